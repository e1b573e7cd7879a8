"""Where the processes of a run meet.

On one host that is the address that they were told, and nowhere else: torch's store listens at
every address of the machine whatever ``MASTER_ADDR`` says (pytorch issue 173909), and gloo at the
one that the host's name has. Both let in whoever calls. Where torchrun may start a job again, each
start meets at a store of its own.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from lightning_pipeline.errors import PipelineError

_VARIABLE = "GLOO_SOCKET_IFNAME"
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_POLL = 0.02  # seconds


def meet(
    environment: ClusterEnvironment, rank: int, world_size: int, one_host: bool, timeout: timedelta
) -> dist.TCPStore | None:
    """Makes ready where the ranks meet, before torch makes its process group.

    torch takes what already serves a port in its process, so the result need only live until the
    process group is there.

    Args:
        environment: Says where it is.
        rank: Global rank of this process.
        world_size: Number of ranks.
        one_host: Whether all are on one host: nothing then listens at another address than the
            one that they are told.
        timeout: How long to wait for the others.

    Returns:
        The store that this process serves, if it does.

    Raises:
        PipelineError: If some rank does not come in time, or no port is free.
    """
    if one_host:
        keep_gloo_on_host(environment.main_address)
    if os.environ.get(_AGENT) == "True":
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            return None
        return meet_anew(rank, world_size, one_host, timeout)
    if rank != 0 or not one_host:
        return None
    return serve_store(environment.main_address, environment.main_port, world_size)


def serve_store(host: str, port: int, world_size: int) -> dist.TCPStore | None:
    """Serves a store at one address.

    Args:
        host: The address, of this machine; empty: all of them.
        port: The port; 0: any that is free.
        world_size: Number of processes.

    Returns:
        ``None`` if the address cannot be taken; the ranks then meet as torch lets them.
    """
    try:
        return _serve(host, port, world_size)
    except OSError:
        return None


def _serve(host: str, port: int, world_size: int) -> dist.TCPStore:
    server = open_server(host, port, max(world_size, 128))
    return dist.TCPStore(
        host or "127.0.0.1",
        server.getsockname()[1],
        world_size,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=server.detach(),
    )


def open_server(host: str, port: int, backlog: int) -> socket.socket:
    """Listens at one address of this machine.

    Args:
        host: The address; empty: all of them, of IPv4 and IPv6.
        port: The port; 0: any that is free.
        backlog: How many may call at once.

    Raises:
        OSError: If the address is none of this machine, or the port is taken.
    """
    if host:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=backlog)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def meet_anew(
    rank: int, world_size: int, one_host: bool, timeout: timedelta
) -> dist.TCPStore | None:
    """Lets ranks that torchrun may start again meet at a store of this start, at rank 0.

    torchrun's own serves all starts of a job (torch 2.13, pytorch issue 135712): ranks would find
    in it where processes were that are gone. Rank 0 tells in it where the new one is, in answer to
    a number that each rank has made up, so that what is left of earlier starts is no answer.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        one_host: Whether all are on one host.
        timeout: How long to wait for the others.

    Returns:
        The store, on rank 0.

    Raises:
        PipelineError: If some rank does not come in time, or no port is free.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    calls, served = dist.PrefixStore("lightning_pipeline/starts", agent), None
    if rank == 0:
        here = serve_store(host, 0, world_size) if one_host else None
        served = here or _serve_anywhere(world_size)
        place = json.dumps([_address_here(host, port), served.port, uuid.uuid4().hex])
        _answer(calls, place, world_size, timeout)
    else:
        place = _call(calls, rank, timeout)
    host, port, _ = json.loads(place)
    os.environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port), _AGENT: "False"})
    return served


def _serve_anywhere(world_size: int) -> dist.TCPStore:
    try:
        return _serve("", 0, world_size)
    except OSError as error:
        raise PipelineError(
            "Rank 0 must listen at a port of its own, where the ranks of this start of the job "
            f"meet, but the machine gave it none: {error}. A restart by torchrun needs one at each "
            "start. Free some: widen net.ipv4.ip_local_port_range or raise `ulimit -n`, as the "
            "error says; or set --max-restarts=0, with which the ranks meet at torchrun's own."
        ) from error


def _answer(calls: dist.Store, place: str, world_size: int, timeout: timedelta) -> None:
    """Answers the calls of all ranks until each has heard it; those of earlier starts as well."""
    end, answered = time.monotonic() + timeout.total_seconds(), dict[int, bytes]()
    while (heard := calls.add(f"heard/{place}", 0)) < world_size - 1:
        if time.monotonic() > end:
            raise PipelineError(
                f"{heard} of the {world_size - 1} other ranks have come within timeout={timeout} "
                "of the strategy. What the others did stands in the output of their hosts."
            )
        for rank in range(1, world_size):
            call = calls.get(f"call/{rank}") if calls.check([f"call/{rank}"]) else None
            if call is not None and answered.get(rank) != call:
                calls.set(f"answer/{call.decode()}", place)
                answered[rank] = call
        time.sleep(_POLL)


def _call(calls: dist.Store, rank: int, timeout: timedelta) -> str:
    """Where rank 0 serves the store of this start."""
    number = uuid.uuid4().hex
    calls.set(f"call/{rank}", number)
    try:
        place: str = calls.get(f"answer/{number}").decode()
    except RuntimeError as error:
        raise PipelineError(
            f"Rank {rank} has waited for rank 0 to come for longer than timeout={timeout} of the "
            "strategy. What rank 0 did stands in the output of its host."
        ) from error
    calls.add(f"heard/{place}", 1)
    return place


def _address_here(host: str, port: int) -> str:
    """The address of this machine that others reach, who all reach ``host``."""
    with socket.create_connection((host, port)) as connection:
        here: str = connection.getsockname()[0]
    return host if _is_loopback(here) else here


def keep_gloo_on_host(host: str) -> None:
    """Lets gloo use the loopback interface if the ranks meet there, unless the user names one.

    Args:
        host: The address at which the ranks meet.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback is not None and _is_loopback(host):
        os.environ.setdefault(_VARIABLE, loopback)


def _is_loopback(host: str) -> bool:
    try:
        place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False
    return str(place).startswith("127.") or place == "::1"
