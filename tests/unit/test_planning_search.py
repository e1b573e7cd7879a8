"""Candidates, their order, and what is said where none fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipeline.planning.blueprint import Blueprint
from lightning_pipeline.planning.candidates import Bounds, Candidate, Dropped, candidates
from lightning_pipeline.planning.devices import Device, Way, get_device
from lightning_pipeline.planning.planner import Outlook, Planner, describe, gigabytes
from lightning_pipeline.planning.prediction import Prediction
from lightning_pipeline.planning.searching import searched
from lightning_pipeline.planning.tables import ranking
from lightning_pipeline.schedules import SCHEDULES, get_schedule
from lightning_pipeline.splitting import CUDA_RATES
from lightning_pipeline.wording import plain

ROWS = 32


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(16))
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


@pytest.fixture(scope="module")
def blueprint() -> Blueprint:
    module = Net()
    batch = torch.randn(ROWS, 8, 256), torch.randn(ROWS, 8, 256)
    sizes = {name: 8 * p.numel() for name, p in module.named_parameters()}
    return Blueprint(module, batch, ROWS, (1, ROWS), 16, CUDA_RATES, sizes)


@pytest.fixture
def device() -> Device:
    return replace(get_device("h100"), reserved=0.0, launch=0.0, action=0.0)


def planner(blueprint: Blueprint, device: Device, limit: float = 1e12) -> Planner:
    return Planner(blueprint, device, device.rates(torch.float32), limit)


def predict(
    blueprint: Blueprint, device: Device, schedule: str, recompute: str = "none", **sizes: int
) -> Prediction:
    numbers = {"ranks": 4, "replicas": 1, "stages_per_rank": 1, "microbatches": 8, **sizes}
    entry = get_schedule(schedule)
    candidate = Candidate(entry, recompute=recompute, **numbers)  # type: ignore[arg-type]
    drawing = blueprint.cut(candidate.num_stages)
    return Prediction(candidate, drawing, ROWS, device, device.rates(torch.float32))


def test_candidates_are_legal_and_of_every_schedule() -> None:
    found = list(candidates(Bounds(8, ROWS), 100))
    legal = [c for c in found if isinstance(c, Candidate)]
    assert {c.schedule.name for c in legal} == {entry.name for entry in SCHEDULES}
    assert {c.ranks for c in legal} == {2, 4, 8}
    for schedule, ranks, replicas, depth, microbatches, _ in legal:
        assert ranks * replicas == 8
        schedule.check(ranks, depth, microbatches)


def test_illegal_counts_are_dropped_with_the_nearest_legal_one() -> None:
    [dropped] = candidates(Bounds(4, 3, schedules=[get_schedule("1F1B")], ranks=4), 100)
    assert dropped == Dropped("1F1B with 4 x 1 stage", "needs 4 microbatches", "count")


def test_a_pipeline_of_one_rank_has_candidates() -> None:
    found = list(candidates(Bounds(1, ROWS, ranks=1), 100))
    assert any(isinstance(each, Candidate) for each in found)


def test_more_microbatches_than_rows_are_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "three.csv"
    path.write_text("0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    for given in ({}, {"microbatches": 3}):
        bounds = Bounds(2, 2, schedules=[get_schedule(str(path))], ranks=2, **given)  # type: ignore[arg-type]
        found = list(candidates(bounds, 100))
        assert {d.why for d in found if isinstance(d, Dropped)} == {
            "its 3 microbatches need 3 rows, the batch has 2"
        }
        assert not any(isinstance(each, Candidate) for each in found)


def test_a_model_of_few_pieces_drops_many_stages() -> None:
    [dropped] = candidates(Bounds(4, 8, schedules=[get_schedule("GPipe")], ranks=4), 3)
    assert isinstance(dropped, Dropped) and dropped.kind == "pieces"
    assert "the model has 3 pieces" in dropped.why


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stages": 7}, r"got 7.*Set stages=6 or stages=8"),
        ({"stages": 0}, "stages must be an integer of at least 1, got 0"),
        ({"microbatches": "many"}, "microbatches must be an integer"),
        ({"stages_per_rank": 2, "schedules": [get_schedule("1F1B")]}, "needs exactly 1 stage"),
    ],
)
def test_impossible_numbers_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Bounds(6, ROWS), **changed).check()  # type: ignore[arg-type]


def test_predicted_bubble_of_equal_stages_is_the_closed_form(
    blueprint: Blueprint, device: Device
) -> None:
    fast = replace(device, node=Way(1e15, 0.0))
    found = predict(blueprint, fast, "GPipe")
    assert found.timeline.bubble == pytest.approx(3 / 11, abs=0.02)


def test_more_activations_in_flight_need_more_memory(blueprint: Blueprint, device: Device) -> None:
    gpipe, one = predict(blueprint, device, "GPipe"), predict(blueprint, device, "1F1B")
    held = [m.activations for m in gpipe.memory], [m.activations for m in one.memory]
    assert held[1][0] == pytest.approx(held[0][0] / 2)  # 4 of 8 microbatches
    assert [m.weights for m in gpipe.memory] == [m.weights for m in one.memory]
    again = predict(blueprint, device, "GPipe", recompute="full")
    assert again.peak < gpipe.peak and again.seconds > gpipe.seconds


def test_memory_is_weights_gradients_and_two_states_of_adam(
    blueprint: Blueprint, device: Device
) -> None:
    memory = predict(blueprint, device, "1F1B").memory
    weights = 16 * (256 * 256 + 256) * 4
    assert sum(m.weights for m in memory) == weights
    assert sum(m.gradients for m in memory) == weights
    assert sum(m.optimizer for m in memory) == 2 * weights


def test_slower_links_and_more_replicas_cost_time(blueprint: Blueprint, device: Device) -> None:
    slow = replace(device, node=Way(1e9, 1e-4))
    for sizes in ({}, {"replicas": 2}):
        quick = predict(blueprint, device, "1F1B", **sizes)
        assert predict(blueprint, slow, "1F1B", **sizes).seconds > quick.seconds
    assert quick.timeline.reductions and not predict(blueprint, device, "1F1B").timeline.reductions


@pytest.mark.parametrize("entry", SCHEDULES, ids=lambda entry: entry.snake)
def test_the_bound_of_the_speed_is_one(blueprint: Blueprint, device: Device, entry: object) -> None:
    schedule = get_schedule(entry.name)  # type: ignore[attr-defined]
    depth = schedule.default_stages_per_rank
    found = predict(blueprint, device, schedule.name, stages_per_rank=depth)
    assert found.samples_per_second <= found.most_samples_per_second * (1 + 1e-9)


def test_the_best_is_found_and_is_the_same_each_time(blueprint: Blueprint, device: Device) -> None:
    bounds = Bounds(4, ROWS)
    outlook = planner(blueprint, device).search(bounds)
    again = planner(blueprint, device).search(bounds)
    assert [p.candidate for p in outlook.fitting] == [p.candidate for p in again.fitting]
    best = outlook.fitting[0].samples_per_second
    for found in candidates(bounds, blueprint.num_pieces):
        if isinstance(found, Candidate):
            other = predict(blueprint, device, found.schedule.name, *found[5:], **_sizes(found))
            assert other.samples_per_second <= best * (1 + 2e-6)


def _sizes(found: Candidate) -> dict[str, int]:
    names = ("ranks", "replicas", "stages_per_rank", "microbatches")
    return {name: getattr(found, name) for name in names}


def lines(*found: Prediction) -> list[str]:
    """The ranking's lines below its header, the blanks between their columns in one."""
    text = ranking(Outlook(found, len(found), (), (), 1e12), 10)
    return [re.sub(" {2,}", " | ", line) for line in text.splitlines()[1:]]


def test_schedules_with_one_order_share_a_line(blueprint: Blueprint, device: Device) -> None:
    sizes = {"ranks": 2, "stages_per_rank": 2, "microbatches": 1}
    v = [predict(blueprint, device, name, **sizes) for name in ("VHalf", "VMin")]
    sizes["stages_per_rank"] = 1
    names = ("GPipe", "ZBH1", "ZBH2")
    # Without weight gradients to put off, GPipe takes no longer in another order.
    full = [predict(blueprint, device, name, "full", **sizes) for name in names]
    first, second, legend = lines(*v, *full)
    assert first.startswith("VHalf = VMin | 2 | 1 | 2 | 1 | none | ")
    assert second.startswith("GPipe, ZBH1 = ZBH2 | 2 | 1 | 1 | 1 | full | ")
    assert legend.startswith("- A = B: the same order of work")


def test_schedules_that_differ_have_a_line_each(blueprint: Blueprint, device: Device) -> None:
    sizes = {"ranks": 4, "stages_per_rank": 2, "microbatches": 8}
    found = lines(*(predict(blueprint, device, name, **sizes) for name in ("VHalf", "VMin")))
    assert [line.split(" | ")[0] for line in found] == ["VHalf", "VMin"]
    # Other counts are no twins, whatever they take.
    sizes = {"ranks": 2, "stages_per_rank": 2, "microbatches": 1}
    one = predict(blueprint, device, "VHalf", **sizes)
    assert len(lines(one, predict(blueprint, device, "VMin", **sizes, replicas=2))) == 2


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (51863.2, 4, "51,860"),
        (12340, 4, "12,340"),
        (8872.4, 4, "8,872"),
        (999.96, 4, "1,000"),
        (912.34, 4, "912.3"),
        (0.012344, 4, "0.01234"),
        (1.3, 3, "1.30"),
        (1234567, 3, "1,230,000"),
        (0, 3, "0"),
    ],
)
def test_numbers_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert plain(value, digits) == text


def test_counts_of_one_are_singular() -> None:
    entry = get_schedule("1F1B")
    one, two = Candidate(entry, 4, 1, 1, 1, "none"), Candidate(entry, 4, 2, 2, 8, "full")
    assert describe(one) == "1F1B on 4 ranks x 1 replica, 1 stage a rank, 1 microbatch"
    assert describe(two) == (
        "1F1B on 4 ranks x 2 replicas, 2 stages a rank, 8 microbatches, recomputing full"
    )


def test_a_limit_is_kept(blueprint: Blueprint, device: Device) -> None:
    bounds = Bounds(4, ROWS)
    free = planner(blueprint, device).search(bounds)
    limit = free.fitting[0].peak * 0.7
    tight = planner(blueprint, device, limit).search(bounds)
    assert tight.fitting and tight.too_large
    assert all(p.peak <= limit for p in tight.fitting) and all(
        p.peak > limit for p in tight.too_large
    )
    assert tight.fitting[0].samples_per_second <= free.fitting[0].samples_per_second


def test_where_nothing_fits_the_nearest_is_named(blueprint: Blueprint, device: Device) -> None:
    bounds = Bounds(2, ROWS, schedules=[get_schedule("GPipe")], recompute=["none"])
    limit = 8e6
    plans = planner(blueprint, device, limit)
    outlook = plans.search(bounds)
    assert not outlook.fitting
    text = plans.refusal(bounds, outlook)
    assert f"memory of each device, {gigabytes(limit)}" in text
    assert "(devices=" in text
    count = int(text.split("(devices=")[1].split(")")[0])
    fewer = replace(bounds, devices=count - 1, ranks=count - 1, stages_per_rank=1)
    assert not plans.search(fewer).fitting
    assert plans.search(replace(fewer, devices=count, ranks=count)).fitting


def test_recomputation_and_counts_are_named_where_they_help(
    blueprint: Blueprint, device: Device
) -> None:
    bounds = Bounds(4, ROWS, schedules=[get_schedule("GPipe")], recompute=["none"], microbatches=2)
    free = planner(blueprint, device).search(bounds)
    limit = free.fitting[0].peak * 0.9
    plans = planner(blueprint, device, limit)
    text = plans.refusal(bounds, plans.search(bounds))
    assert "recomputation (activation_checkpointing=" in text
    assert "devices of 0.0" in text


def test_an_order_of_its_own_beats_all_schedules_and_fits(
    blueprint: Blueprint, device: Device
) -> None:
    far = replace(device, node=Way(1e15, 2e-6))
    bounds = Bounds(4, ROWS, ranks=4, microbatches=8, recompute=["none"])
    free = planner(blueprint, far).search(bounds)
    for limit, part in ((1e12, 0.9), (free.fitting[0].peak * 0.9, 0.82)):
        outlook = planner(blueprint, far, limit).search(bounds)
        found = searched(outlook, "mine.csv")
        assert found is not None and found.candidate.schedule.name == "mine.csv"
        assert found.seconds_per_sample < part * outlook.fitting[0].seconds_per_sample
        assert found.peak <= limit
        assert found.candidate.microbatches == 8
        again = searched(outlook, "mine.csv")
        assert again is not None and again.lists == found.lists


def test_no_order_is_made_up_where_a_schedule_is_as_fast(
    blueprint: Blueprint, device: Device
) -> None:
    bounds = Bounds(2, ROWS, ranks=2, microbatches=1, recompute=["none"])
    assert searched(planner(blueprint, device).search(bounds)) is None
    assert searched(planner(blueprint, device, 1.0).search(bounds)) is None


def test_python_is_hidden_behind_the_work_of_a_gpu_and_added_on_a_cpu(
    blueprint: Blueprint, device: Device
) -> None:
    plain = predict(blueprint, device, "GPipe").times[0]
    longer = plain.forward * 2
    gpu = predict(blueprint, replace(device, action=longer), "GPipe").times[0]
    cpu = predict(blueprint, replace(device, action=longer, kind="cpu"), "GPipe").times[0]
    assert gpu.forward == longer and cpu.forward == pytest.approx(plain.forward + longer)
    assert cpu.of("B") == pytest.approx(plain.of("B") + longer)
    assert cpu.of("I") + cpu.of("W") == pytest.approx(plain.of("B") + 2 * longer)
    assert gpu.of("B") == max(longer, plain.of("B"))
