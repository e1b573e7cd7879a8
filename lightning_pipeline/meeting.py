"""Where the processes of one host meet: at the address that they were told, and nowhere else.

torch's store listens at every address of the machine whatever ``MASTER_ADDR`` says (pytorch issue
173909), and gloo at the one that the host's name has. Both let in whoever calls.
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

_VARIABLE = "GLOO_SOCKET_IFNAME"


def serve_store(host: str, port: int, world_size: int) -> dist.TCPStore | None:
    """Makes the server of the store listen at one address, before torch makes its own.

    torch takes what already serves a port in its process, so the result need only live until the
    process group is there.

    Args:
        host: The address, of this machine.
        port: The port.
        world_size: Number of processes.

    Returns:
        ``None`` if torchrun has a server already, or the address cannot be taken; the ranks then
        meet as torch lets them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(place[:2], family=family, backlog=max(world_size, 128))
    except OSError:
        return None
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=server.detach(),
    )


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
