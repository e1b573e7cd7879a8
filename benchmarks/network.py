"""Two hosts made of network namespaces, with a link of limited bandwidth between them.

Needs the rights to make namespaces (root) and the programs ``ip`` and ``tc``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "pipe"
"""Name of the link's end in both namespaces; gloo takes it from GLOO_SOCKET_IFNAME."""


@contextmanager
def two_hosts(rate: str, prefix: str = "lightning-pipeline") -> Iterator[list[str]]:
    """Names of two namespaces that a link joins, which end with the block.

    Args:
        rate: Bandwidth in each direction, as ``tc`` writes it: ``1gbit``.
        prefix: Begin of the namespaces' names.

    Raises:
        RuntimeError: If the kernel or the rights do not suffice, with what was refused.
    """
    names = [f"{prefix}-{index}" for index in range(2)]
    made: list[str] = []
    try:
        for name in names:
            _run(f"ip netns add {name}")
            made.append(name)
        a, b = names
        _run(f"ip link add {INTERFACE} netns {a} type veth peer name {INTERFACE} netns {b}")
        for index, name in enumerate(names):
            _run(f"ip -n {name} addr add 10.77.0.{index + 1}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {INTERFACE} up")
            shape = f"root tbf rate {rate} burst 256kb latency 50ms"
            _run(f"tc -n {name} qdisc add dev {INTERFACE} {shape}")
        yield names
    finally:
        for name in made:
            _run(f"ip netns del {name}")


def _run(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"`{command}`: {error}. Install iproute2.") from None
    if done.returncode:
        raise RuntimeError(
            f"`{command}` ended with {done.returncode}: {done.stderr.strip()}. Two hosts need "
            "the rights of root and a kernel with network namespaces, veth and sch_tbf. Run as "
            "root, or leave the link out."
        )
