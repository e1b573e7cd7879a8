"""What a user would pick instead of a pipeline: DDP, FSDP2, one device.

    python -m benchmarks.alternatives [--cases compute,parameters] [--link 1gbit] [--out FOLDER]

Two processes on two cores train one model with one global batch in every way, and take turns in one
process group. One device is one process with both cores, in a plain loop; FSDP2 is a plain loop
with every block sharded; DDP and the pipelines are Trainers. *compute* has models that compute
much; *parameters* has one with many weights and few rows, over a link of limited bandwidth between
two network namespaces. The memory of a way is measured in runs of its own: the peak of what is
resident above what was before the model, and what weights, gradients and optimizer states take.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from benchmarks.network import INTERFACE, two_hosts
from lightning_pipeline.actions import action_lists
from lightning_pipeline.bench.harness import Steps, Subject, alternate, now, settle_process
from lightning_pipeline.bench.memory import reset_resident_peak, resident, resident_peak
from lightning_pipeline.bench.models import MODELS, Chain, adam, cuts
from lightning_pipeline.bench.ranks import run_ranks
from lightning_pipeline.bench.report import Report
from lightning_pipeline.bench.training import TrainerSteps, trainer_steps
from lightning_pipeline.schedules import get_schedule
from lightning_pipeline.simulate import StageTime, simulate
from lightning_pipeline.splitting import is_elsewhere

RANKS, MEGA = 2, 1e6
WAYS = ("ddp", "ddp again", "fsdp2", "single", "1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

COLUMNS = {
    "case": "case",
    "model": "model",
    "way": "way",
    "seconds": "step, s",
    "to_ddp": "DDP / step",
    "bound": "1 - bubble",
    "cpu": "CPU s of all ranks",
    "peak": "peak resident MB by rank",
    "state": "MB of weights, gradients, states",
}


class Case(NamedTuple):
    """One model at one size.

    Attributes:
        name: Name of the case.
        model: Name of the model.
        sizes: Its arguments.
        blocks: Its blocks.
        rows: Rows of the global batch.
        microbatches: Microbatches of the pipelines.
    """

    name: str
    model: str
    sizes: dict[str, int]
    blocks: int
    rows: int
    microbatches: int = 8


CASES = {
    "compute": [
        Case("compute", "conv", {"width": 64, "pixels": 16}, 8, 64),
        Case("compute", "gpt", {"width": 192, "length": 128}, 8, 16),
    ],
    "parameters": [Case("parameters", "mlp", {"width": 2048}, 16, 32)],
    "tiny": [Case("tiny", "mlp", {"width": 16}, 4, 16)],
}

Batches = Sequence[tuple[Tensor, Tensor]]


def loop(case: Case, chain: Chain, batches: Batches, threads: int = 1) -> Steps:
    """A plain loop on this rank."""
    model = MODELS[case.model](**case.sizes)
    optimizer = adam(chain.parameters())
    count = 0

    def step() -> None:
        nonlocal count
        inputs, targets = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        model.loss(chain.net(inputs), targets).backward()
        optimizer.step()

    steps = Steps(step, threads)
    steps.optimizer = optimizer  # type: ignore[attr-defined]
    return steps


def subject(case: Case, way: str) -> tuple[Subject, Callable[[], float]]:
    """A way to train on this rank, and what gives the bytes of its states once it has trained."""
    model, rank = MODELS[case.model](**case.sizes), dist.get_rank()
    if way == "single" and rank:
        return Steps(lambda: None), lambda: 0.0
    chain, batches = model.chain(case.blocks, adam), model.batches(case.rows)
    own = [tuple(t.chunk(RANKS)[rank].clone() for t in batch) for batch in batches]
    if way == "single":
        steps = loop(case, chain, batches, threads=RANKS)
        return steps, lambda: _bytes(chain, steps.optimizer)  # type: ignore[attr-defined]
    if way == "fsdp2":
        for block in chain.net:
            fully_shard(block)
        fully_shard(chain.net)
        steps = loop(case, chain, own)  # type: ignore[arg-type]
        return steps, lambda: _bytes(chain, steps.optimizer)  # type: ignore[attr-defined]
    if way.startswith("ddp"):
        trainer = trainer_steps(chain, own, ranks=RANKS, strategy="ddp")
    else:
        depth = get_schedule(way).default_stages_per_rank
        first = cuts(case.blocks, RANKS * depth)[1:-1]
        strategy = {
            "schedule": way,
            "num_microbatches": case.microbatches,
            "partition": [f"net.{index}" for index in first],
        }
        trainer = trainer_steps(chain, batches, ranks=RANKS, strategy=strategy)
    return trainer, lambda: _bytes_of_trainer(trainer)


def _bytes_of_trainer(trainer: TrainerSteps) -> float:
    return _bytes(trainer.module, trainer.strategy.optimizers[0])


def _bytes(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients and optimizer states on this rank."""
    held = [p for p in module.parameters() if not is_elsewhere(p)]
    # Between two steps of a Trainer gradients may be gone: each weight has one within a step.
    tensors = [*held, *(p for p in held if p.requires_grad)]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return float(sum(t.numel() * t.element_size() for t in local))


def times_on_rank(case: Case, ways: Sequence[str], rounds: int, warmup: int) -> dict[str, Any]:
    """Runs on every rank."""
    settle_process()
    subjects = {way: subject(case, way)[0] for way in ways}
    found = alternate(subjects, rounds=rounds, warmup=warmup)
    return {
        way: {
            "seconds": found.seconds(way),
            "to_ddp": found.ratio("ddp", way),
            "cpu": found.cpu_seconds(way),
        }
        for way in ways
    }


def memory_on_rank(case: Case, way: str, steps: int = 3) -> tuple[float, float]:
    """Peak of resident memory above that before the model, and bytes of the states."""
    settle_process()
    torch.nn.Linear(64, 64)(torch.zeros(8, 64)).sum().backward()  # what torch itself keeps
    reset_resident_peak()
    before = resident()
    made, states = subject(case, way)
    made.run(now(), steps)
    return float(resident_peak() - before), states()


def link_on_rank(megabytes: int = 32) -> float:
    """Gbit/s from rank 0 to rank 1."""
    message = torch.zeros(megabytes * 250_000)
    for _ in range(2):  # the first one fills the link's bucket and connects
        dist.barrier()
        start = now()
        if dist.get_rank() == 0:
            dist.send(message, 1)
        else:
            dist.recv(message, 0)
        seconds = now() - start
    return 8 * message.nbytes / seconds / 1e9


def bound(way: str, microbatches: int) -> float | None:
    """Share of its time that a rank computes under a schedule, stages of equal F, I and W."""
    if way in ("ddp", "ddp again", "fsdp2", "single"):
        return None
    schedule = get_schedule(way)
    depth = schedule.default_stages_per_rank
    lists = action_lists(schedule, RANKS, depth, microbatches)
    return 1 - simulate(lists, [StageTime(1, 1, 1)] * RANKS * depth).bubble


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="compute,parameters")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--link", default="1gbit", help="of the case parameters; none: loopback")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/alternatives"))
    asked = parser.parse_args()
    ways = asked.ways.split(",")
    settings = {key: str(value) for key, value in vars(asked).items()}
    title = "Step time and memory of what a user may pick."
    report = Report("alternatives", title, settings, COLUMNS)
    for case in (case for name in asked.cases.split(",") for case in CASES[name]):
        linked = case.name == "parameters" and asked.link != "none"
        with two_hosts(asked.link) if linked else contextlib.nullcontext([]) as hosts:
            environment = {"GLOO_SOCKET_IFNAME": INTERFACE} if linked else {}
            place: dict[str, Any] = {"namespaces": hosts, "environment": environment}
            if linked:
                speed = max(run_ranks(RANKS, link_on_rank, deadline=60, **place))
                report.settings["link_gbits_measured"] = speed
            sizes = case, ways, asked.rounds, asked.warmup
            times = run_ranks(RANKS, times_on_rank, *sizes, deadline=560, **place)[0]
            for way in ways:
                memory = run_ranks(RANKS, memory_on_rank, case, way, deadline=300, **place)
                report.add(
                    case=case.name,
                    model=case.model,
                    way=way,
                    **times[way],
                    bound=bound(way, case.microbatches),
                    peak=[peak / MEGA for peak, _ in memory],
                    state=[state / MEGA for _, state in memory],
                )
    report.write(asked.out)


if __name__ == "__main__":
    main()
