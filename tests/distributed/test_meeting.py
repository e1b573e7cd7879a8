"""Ranks that torchrun has started again meet each other, and none that is gone."""

from __future__ import annotations

import errno
import json
import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_pipeline import meeting
from lightning_pipeline.errors import PipelineError
from lightning_pipeline.meeting import meet_anew, open_server
from tests.distributed.ranks import run_ranks

RANKS = 3
GONE = json.dumps(["127.0.0.1", 1, "gone"])


@pytest.fixture(params=["127.0.0.1", "::1"])
def agent(request):
    """The store of torchrun, in which an earlier start has left what it could."""
    try:
        open_server(request.param, 0, 1).close()
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    store = dist.TCPStore(request.param, 0, is_master=True, wait_for_workers=False)
    left = dist.PrefixStore("lightning_pipeline/starts", store)
    for rank in range(1, RANKS):
        left.set(f"call/{rank}", f"early{rank}")
        left.set(f"answer/early{rank}", GONE)
        left.add(f"heard/{GONE}", 1)
    return store


def variables(store):
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start(one_host):
    """Meets, and counts those that have met."""
    rank = dist.get_rank()
    served = meet_anew(rank, RANKS, one_host, timedelta(seconds=20))
    assert (served is not None) == (rank == 0)
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    store = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
    met = store.add("met", 1)
    dist.barrier()
    return place, met


@pytest.mark.parametrize("one_host", [True, False])
def test_every_start_has_a_store_of_its_own(agent, one_host):
    places = set()
    for _ in range(2):
        ends = run_ranks(RANKS, start, one_host, environment=variables(agent))
        assert len({place for place, _ in ends}) == 1
        assert sorted(met for _, met in ends) == [1, 2, 3]
        places.add(ends[0][0])
    assert len(places) == 2
    assert agent.port not in {port for _, port in places}


def comes_alone(rank):
    told = ""
    if dist.get_rank() == rank:
        with pytest.raises(PipelineError) as raised:
            meet_anew(rank, RANKS, True, timedelta(seconds=1))
        told = str(raised.value)
    dist.barrier()
    return told


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "0 of the 2 other ranks"), (1, "Rank 1 has waited")]
)
def test_a_rank_does_not_wait_for_ever(agent, rank, told):
    assert told in run_ranks(RANKS, comes_alone, rank, environment=variables(agent))[rank]


@pytest.mark.parametrize("one_host", [True, False])
def test_no_port_is_free(agent, one_host, monkeypatch):
    def none_is_free(*place, **arguments):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    for name, value in variables(agent).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting.socket, "create_server", none_is_free)
    with pytest.raises(PipelineError, match="Rank 0 must listen at a port of its own") as raised:
        meet_anew(0, RANKS, one_host, timedelta(seconds=1))
    assert "Address already in use" in str(raised.value)
    assert "set --max-restarts=0" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
