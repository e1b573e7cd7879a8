"""What a device can do: read from a file of ``conf/device``, or measured on this machine."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_pipeline.splitting import CPU_RATES, CUDA_RATES, Rates

THIS_MACHINE = "this_machine"
"""The device that is measured."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = 1.024  # for each prefix of KiB, MiB, GiB, TiB
_SECONDS = 0.15  # of each measurement
# Between 0.35 ms, half of what a forward and a backward take when they are warm, and 1.35 ms when
# each follows a sleep: docs/speed.md.
_CPU_ACTION = 5e-4
_CPU_LATENCY = 2.5e-4  # of gloo to a process that sleeps; docs/speed.md


@dataclass(frozen=True)
class Way:
    """A link between two devices, one direction.

    Attributes:
        bandwidth: Bytes a second.
        latency: Seconds until a message of no size has arrived.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """One kind of device and how several of them are linked.

    Attributes:
        name: Name of its file.
        kind: ``"cuda"`` or ``"cpu"``: which rates the training itself cuts the model by.
        flops: Dense operations a second of matrix products, by the data sheet, for each dtype:
            ``float64``, ``float32``, ``bfloat16``, ``float16``.
        share: The part of ``flops`` that real products reach, 0 to 1.
        memory: Bytes.
        reserved: Bytes of it that the driver, the libraries and fragmentation take.
        bandwidth: Bytes a second that its memory moves.
        bandwidth_share: The part of that which elementwise operations reach, 0 to 1.
        elements: Random numbers or elements of pooling windows a second.
        launch: Seconds that any operation takes, however small.
        action: Seconds of Python that running an action of a schedule takes.
        node: Link to a device of the same node.
        network: Link to a device of another node.
        devices_per_node: Number of devices in a node.
        source: Where the figures come from.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    flops: Mapping[str, float]
    share: float
    memory: float
    reserved: float
    bandwidth: float
    bandwidth_share: float
    elements: float
    launch: float
    action: float
    node: Way
    network: Way
    devices_per_node: int
    source: str

    def rates(self, dtype: torch.dtype) -> Rates:
        """Speed in products of one dtype.

        Args:
            dtype: Dtype of the products; one that the device has no figure for is like float32.
        """
        name = str(dtype).removeprefix("torch.")
        flops = self.flops.get(name, self.flops["float32"]) * self.share
        return Rates(flops, self.bandwidth * self.bandwidth_share, self.elements, self.launch)

    def with_python(self, seconds: float) -> float:
        """How long an action lasts whose operations take so long.

        A GPU works off what it was told while Python prepares the next; a CPU does one by one.
        """
        return seconds + self.action if self.kind == "cpu" else max(seconds, self.action)

    @property
    def cutting_rates(self) -> Rates:
        """The rates that a training on this kind of device cuts its model by."""
        return CPU_RATES if self.kind == "cpu" else CUDA_RATES

    def way(self, first: int, second: int) -> Way:
        """The link between two global ranks."""
        same = first // self.devices_per_node == second // self.devices_per_node
        return self.node if same else self.network


def device_names() -> list[str]:
    """Names of the devices that are described, in alphabetical order."""
    folder = files("lightning_pipeline.conf") / "device"
    return sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".yaml"))


def get_device(name: str) -> Device:
    """Returns a device by the name of its file; ``this_machine`` is measured in about a second.

    Raises:
        ValueError: If there is no such device; names the nearest one.
    """
    known = device_names()
    if name not in known:
        close = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.0)
        raise ValueError(
            f"The device must be one of {', '.join(known)}, got {name!r}. The name comes from "
            f"device={name}. Set device={close[0]}, or put a file {name}.yaml beside conf/device's "
            "and add its folder with --config-dir."
        )
    text = (files("lightning_pipeline.conf") / "device" / f"{name}.yaml").read_text()
    return device_of(OmegaConf.create(text))


def device_of(node: Any) -> Device:
    """A device from the content of its file.

    Args:
        node: The content; numbers with a unit, such as ``80 GB``, may be strings.
    """
    content = OmegaConf.to_container(node) if isinstance(node, DictConfig) else dict(node)
    assert isinstance(content, dict)
    _check_keys(content)
    if content["name"] == THIS_MACHINE:
        content |= _measured()
    ways = {key: Way(**content[key]) for key in ("node", "network")}
    sizes = {key: parse_bytes(key, content[key]) for key in ("memory", "reserved")}
    return Device(**{**content, **ways, **sizes})


def _check_keys(content: Mapping[Any, Any]) -> None:
    """Refuses a device's file that lacks figures, or has others."""
    known = [field.name for field in fields(Device)]
    lacks = [name for name in known if name not in content]
    more = [str(name) for name in content if name not in known]
    if lacks or more:
        faults = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has {', '.join(more)}"] * bool(
            more
        )
        raise ValueError(
            f"A device's file must have the keys {', '.join(known)}, and that of "
            f"{content.get('name', 'this one')} {' and '.join(faults)}. It comes from device= and "
            "--config-dir. Copy a file of conf/device and change its figures."
        )


def local_device(device: torch.device) -> Device:
    """What is known of a rank's device without measuring, so that every run decides alike.

    A CUDA device is looked up by its name; its memory is what it says it has. On a CPU there is no
    limit of memory.
    """
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        words = set(re.split(r"[\s-]+", found.name.lower().replace("rtx ", "rtx")))
        name = next((name for name in device_names() if name in words), "a100")
        return replace(get_device(name), memory=float(found.total_memory))
    flops = {"float32": CPU_RATES.flops, "float64": CPU_RATES.flops / 2}
    way = Way(CPU_RATES.bytes / 3, _CPU_LATENCY)  # as measured by `this_machine`
    return Device(
        name="cpu",
        kind="cpu",
        flops=flops,
        share=1.0,
        memory=float("inf"),
        reserved=0.0,
        bandwidth=CPU_RATES.bytes,
        bandwidth_share=1.0,
        elements=CPU_RATES.elements,
        launch=CPU_RATES.launch,
        action=_CPU_ACTION,
        node=way,
        network=way,
        devices_per_node=1024,
        source="the rates that models are cut by",
    )


def product_dtype(
    module: nn.Module, device: torch.device, context: Callable[[], AbstractContextManager[Any]]
) -> torch.dtype:
    """Dtype of the matrix products of a module: that of autocast, or of most of its weights.

    Args:
        module: The module.
        device: Where it runs.
        context: The precision plugin's context of the step.
    """
    with context():
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


def parse_bytes(name: str, value: float | str) -> float:
    """Bytes from a number, or from text such as ``80GB`` or ``1.5 GiB``.

    Args:
        name: The argument that the value comes from.
        value: What the user gave.

    Raises:
        ValueError: If it is no positive size.
    """
    found = re.fullmatch(r"([\d.]+(?:[eE]\+?\d+)?)\s*([KMGT]?)(i?)B?", str(value).strip())
    try:
        assert found is not None
        prefix = list(_UNITS).index(found[2])
        size = float(found[1]) * _UNITS[found[2]] * (_BINARY**prefix if found[3] else 1)
        assert size > 0
    except (AssertionError, ValueError):
        raise ValueError(
            f"{name} must be a size in bytes, got {value!r}. The value comes from {name}={value}. "
            f"Set e.g. {name}=80GB or {name}=40GiB."
        ) from None
    return size


def _measured() -> dict[str, Any]:
    """Figures of this machine's CPU, by the rates of one process with its threads."""
    flops = {}
    for name in ("float64", "float32", "bfloat16"):
        a = torch.ones(384, 384, dtype=getattr(torch, name))
        flops[name] = 2 * 384**3 / _seconds(lambda a=a: a @ a)  # type: ignore[misc]
    flops["float16"] = flops["bfloat16"]
    block, copy = torch.ones(2**24), torch.empty(2**24)
    moved = 2 * 4 * block.numel() / _seconds(lambda: copy.copy_(block))
    drawn = torch.empty(2**18)
    tiny = torch.ones(1)
    return {
        "flops": flops,
        "bandwidth": moved,
        "elements": drawn.numel() / _seconds(lambda: drawn.normal_()),
        "launch": _seconds(lambda: tiny + tiny),
        "action": _CPU_ACTION,
        "memory": _memory(),
        # Between processes of one machine a message is copied in, through and out again.
        "node": {"bandwidth": moved / 3, "latency": _CPU_LATENCY},
        "network": {"bandwidth": moved / 3, "latency": _CPU_LATENCY},
    }


def _seconds(run: Callable[[], Any]) -> float:
    """The fastest of the repetitions that fit a short time."""
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
