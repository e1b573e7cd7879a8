"""Files of devices, sizes with units, and this machine."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_pipeline.planning.devices import (
    THIS_MACHINE,
    device_names,
    device_of,
    get_device,
    local_device,
    parse_bytes,
    product_dtype,
)
from lightning_pipeline.splitting import CPU_RATES, CUDA_RATES

NAMED = [name for name in device_names() if name != THIS_MACHINE]


def test_the_devices_that_are_described() -> None:
    assert {"a100", "h100", "h200", "b200", "l4", "rtx4090", THIS_MACHINE} <= set(device_names())


@pytest.mark.parametrize("name", NAMED)
def test_every_device_says_what_it_can_and_where_that_comes_from(name: str) -> None:
    device = get_device(name)
    assert device.name == name
    assert "data sheet" in device.source or "white paper" in device.source
    assert "checked in November 2026 against" in device.source
    # Tensor Cores multiply float64 as fast as other units float32.
    assert device.flops["float64"] <= device.flops["float32"] < device.flops["bfloat16"]
    assert 0 < device.share < 1 and 0 < device.bandwidth_share < 1
    assert 0 < device.reserved < device.memory
    assert device.network.bandwidth < device.node.bandwidth < device.bandwidth
    assert device.cutting_rates is CUDA_RATES


def test_rates_are_those_of_the_dtype() -> None:
    device = get_device("h100")
    assert device.rates(torch.bfloat16).flops == 989e12 * device.share
    assert device.rates(torch.float32).flops == 67e12 * device.share
    assert device.rates(torch.int8).flops == device.rates(torch.float32).flops


def test_links_depend_on_the_nodes_of_the_ranks() -> None:
    device = get_device("h100")
    assert device.way(0, 7) is device.node
    assert device.way(7, 8) is device.network


def test_this_machine_is_measured() -> None:
    device = get_device(THIS_MACHINE)
    assert device.flops["float32"] > 1e9
    assert device.bandwidth > 1e8 and device.memory > 2**29
    assert 0 < device.launch < 1e-3
    assert device.cutting_rates is CPU_RATES


def test_a_rank_knows_its_cpu_without_measuring() -> None:
    device = local_device(torch.device("cpu"))
    assert device.rates(torch.float32) == CPU_RATES
    assert device.memory == float("inf")


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_gpu_is_known_by_a_whole_word_of_its_name(
    spelled: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(name=spelled, total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert local_device(torch.device("cuda")) == replace(get_device(name), memory=2.0**30)


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'h10'.*device=h10\. Set device=h100"):
        get_device("h10")


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("80GB", 80e9), ("80 GB", 80e9), ("1.5 GiB", 1.5 * 2**30), ("2e9", 2e9), ("3T", 3e12)],
)
def test_sizes_with_units(text: float | str, size: float) -> None:
    assert parse_bytes("memory", text) == pytest.approx(size, rel=1e-12)


@pytest.mark.parametrize("text", ["", "GB", "-3", "0", "80 GBs", "eighty"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"memory must be a size in bytes.*Set e\.g\. memory=80GB"):
        parse_bytes("memory", text)


def test_dtype_of_products_is_that_of_autocast_or_of_most_weights() -> None:
    host, module = torch.device("cpu"), nn.Linear(3, 3).to(torch.float64)
    plain = torch.no_grad
    assert product_dtype(module, host, plain) == torch.float64

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    assert product_dtype(module, host, autocast) == torch.bfloat16


def test_a_file_that_lacks_a_figure_or_has_another_is_refused() -> None:
    content = asdict(get_device("h100"))
    del content["action"]
    content["speed"] = 1
    with pytest.raises(ValueError, match=r"that of h100 lacks action and has speed.*Copy a file"):
        device_of(content)
