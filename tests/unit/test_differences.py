"""What of a gradient's distance from its reference is no rounding."""

from __future__ import annotations

import pytest
import torch

from lightning_pipeline.differences import Rounding, measure

ROUNDINGS = [Rounding(str(d), torch.finfo(d).eps) for d in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("gradient", [None, torch.zeros(3)])
def test_a_gradient_that_is_missing_is_seen_however_small(rounding, gradient):
    missing = measure("bias", 0, gradient, torch.full((3,), 0.01), 1.0)
    assert missing.beyond(rounding.noise(1.0)) == 1.0 > rounding.expected


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_one_that_is_zero_but_for_rounding_is_none(rounding):
    reference = torch.tensor([rounding.eps, 0.0, -rounding.eps])
    found = measure("bias", 0, -reference, reference, 1.0)
    assert found.relative == 2.0 and found.beyond(rounding.noise(1.0)) < rounding.expected
    assert measure("bias", 0, None, torch.zeros(3), 1.0).beyond(0.0) == 0.0
