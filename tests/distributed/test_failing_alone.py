"""Steps that fail on one rank alone where others go on, and runs behind a failure."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy, watch
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.test_exactness import TOLERANCE, vectors
from tests.distributed.test_faults import SECONDS, Happens, Impatient, ended, send
from tests.models.modules import Perceptron

DIFFERENT = (ValueError, KeyError, RuntimeError, MemoryError)
MISTAKE = "my own mistake"


class Steps(Perceptron):
    """A step that fails on some ranks, before or between its calls of modules.

    Args:
        step: The step.
        ranks: Where it fails.
        errors: What it raises, by rank.
        rows: Rows of a microbatch at which it fails; 0: any.
        between: Whether it fails behind a first call.
        passing: Whether it does not fail any more once the sanity check is over.
    """

    def __init__(
        self,
        step: str,
        ranks: tuple[int, ...],
        errors: tuple[type[Exception], ...] = (ValueError,) * 4,
        rows: int = 0,
        between: bool = False,
        passing: bool = False,
    ) -> None:
        super().__init__()
        self.fails = step, ranks, errors
        self.rows, self.between, self.passing = rows, between, passing

    def fail(self, step: str, rows: int) -> None:
        name, ranks, errors = self.fails
        rank = self.trainer.global_rank if self.trainer.world_size > 1 else -1
        if step != name or rank not in ranks or self.rows not in (0, rows):
            return
        if not self.passing or self.trainer.sanity_checking:
            raise errors[rank](MISTAKE)

    def run(self, step: str, batch: Any) -> Any:
        if self.between:
            self.net(batch[0])
        self.fail(step, len(batch[0]))
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.run("training_step", batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.run("validation_step", batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.run("test_step", batch))


def fits(model: Callable[[], L.LightningModule], script: type[Script] = Impatient, **trainer: Any):
    """A script with a sanity check, whose last training batch has fewer rows."""
    return script(model, lambda: vectors(40), trainer=trainer)


class Evaluates(Impatient):
    """Another run comes before the fit, of the same Trainer."""

    def __init__(self, run: str, model: Callable[[], L.LightningModule]) -> None:
        super().__init__(model, lambda: vectors(40))
        self.run = run

    def __call__(self, strategy, devices):
        fit = L.Trainer.fit

        def behind(trainer, module, training, validation):
            getattr(trainer, self.run)(module, validation, verbose=False)
            fit(trainer, module, training, validation)

        L.Trainer.fit = behind
        return super().__call__(strategy, devices)


training = partial(partial, Steps, "training_step")
validation = partial(partial, Steps, "validation_step")
CASES = {
    "training 0": fits(training((0,))),
    "training 1": fits(training((1,))),
    "training all": fits(training((0, 1, 2, 3))),
    "training differs": fits(training((0, 1, 2, 3), DIFFERENT)),
    "memory": fits(training((1,), (MemoryError,) * 4)),
    "between calls 0": fits(training((0,), between=True)),
    "between calls 1": fits(training((1,), between=True)),
    "no sanity check": fits(training((1,)), num_sanity_val_steps=0),
    "next, between calls 0": fits(training((0,), between=True), num_sanity_val_steps=0),
    "next, between calls 1": fits(training((1,), between=True), num_sanity_val_steps=0),
    "validation 0": fits(validation((0,))),
    "validation 1": fits(validation((1,))),
    "validation later": fits(validation((1,)), num_sanity_val_steps=0),
    "new rows 0": fits(training((0,), rows=1)),
    "new rows 1": fits(training((1,), rows=1)),
    "new rows between calls 0": fits(training((0,), rows=1, between=True)),
    "new rows between calls 1": fits(training((1,), rows=1, between=True)),
    "first in the fit": fits(validation((1,), between=True), num_sanity_val_steps=0),
    "behind validate 0": Evaluates("validate", training((0,))),
    "behind validate 1": Evaluates("validate", training((1,))),
    "behind test": Evaluates("test", training((1,))),
    "in test": Evaluates("test", partial(Steps, "test_step", (1,))),
}


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_fails_on_some_ranks_ends_all(case, layout):
    text = ended(CASES[case], *layout)
    own = re.split(r"\nrank \d+: ", text)[1]
    assert MISTAKE in own or "MemoryError" in own, text


class FailsInCheck(Steps):
    """Its training step can be surveyed with a batch of the sanity check on some ranks only."""

    def __init__(self, *ranks: int) -> None:
        super().__init__("training_step", ranks, passing=True)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_ranks_place_the_module_anew_if_one_cannot_survey_the_training(ranks):
    script = fits(partial(FailsInCheck, *ranks), max_steps=3)
    expected = script.plain()
    for run in script.pipelined(2, deadline=20):
        assert distance(run, expected) <= TOLERANCE
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-12)


def trainer_of(*callbacks: L.Callback) -> L.Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(2),
        max_steps=3,
        limit_val_batches=0,
        callbacks=list(callbacks),
        **dict.fromkeys(quiet, False),
    )


class Configures(Perceptron):
    """Fails in a hook that comes before the ranks meet."""

    fails = False

    def configure_callbacks(self):
        if self.fails and os.environ["RANK"] == "1":
            raise ValueError(MISTAKE)
        return []


def mistake_of_a_rank(trainer: L.Trainer) -> None:
    raise ValueError(MISTAKE)


def in_turn(first: list[L.Callback], new: bool, between: Callable[[], Any]) -> list[str]:
    """What two runs in the same processes end with, an error of the first one caught."""
    watch.GRACE, watch.LIMIT, watch.ASKED = 0.5, 2.0, 1.0
    torch.set_default_dtype(torch.float64)
    module, said = Configures(), []
    loader = DataLoader(vectors(64)[0], 16)
    trainer = trainer_of(*first)
    for number in range(2):
        if number:
            between()
            trainer = trainer_of() if new else trainer
            trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, 6
            Configures.fails = not first
        begun = time.monotonic()
        try:
            trainer.fit(module, loader)
            said.append("")
        except Exception as error:
            said.append(f"{time.monotonic() - begun < SECONDS}: {error}")
    return said


UNUSABLE = (
    r"True: A run needs all ranks .*\n{}.*\nNo Trainer can go on in these .* anew, .*ckpt_path"
)


def nothing() -> None:
    """Comes between two runs."""


@pytest.mark.parametrize("new", [False, True])
def test_a_run_behind_a_caught_failure_says_that_the_groups_are_broken(new):
    own = run_ranks(2, in_turn, [Happens(1, mistake_of_a_rank)], new, nothing, deadline=25)
    told = UNUSABLE.format(f"Rank 1 failed between .*ValueError: {MISTAKE}")
    for _, second in own:
        assert re.search(told, second, re.DOTALL), own
    assert "lost its connection" in own[0][0] and MISTAKE in own[0][0]


@pytest.mark.parametrize("new", [False, True])
def test_a_run_behind_the_loss_of_a_rank_says_so_at_once(new, tmp_path):
    def first_rank() -> None:
        said = in_turn([Happens(1, partial(send, signal.SIGKILL))], new, nothing)
        (tmp_path / "said").write_text(said[1])

    with pytest.raises(RankFailed, match=r"exit codes by rank: \[0, -9\]"):
        run_ranks(2, first_rank, deadline=25)
    told = UNUSABLE.format("Rank 1 .* is gone .*ended by itself")
    assert re.search(told, (tmp_path / "said").read_text(), re.DOTALL)


@pytest.mark.parametrize("new", [False, True])
def test_what_fails_before_a_later_run_has_met_is_told(new):
    own, other = run_ranks(2, in_turn, [], new, nothing, deadline=25)
    assert other == ["", f"True: {MISTAKE}"]
    assert own[0] == "" and re.search(f"Rank 1 failed .*: ValueError: {MISTAKE}", own[1]), own


def test_a_rank_that_ends_between_two_runs_is_told():
    def ends() -> None:
        if dist.get_rank() == 1:
            raise ValueError(MISTAKE)

    def first_rank() -> None:
        raise RuntimeError(in_turn([], True, ends)[1])

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, first_rank, deadline=25)
    assert re.search(r"rank 0: .*Rank 1 .*ended by itself", str(caught.value), re.DOTALL)


class Refuses(ValueError):
    """Takes no notes."""

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


def noted() -> Exception:
    error = ValueError(MISTAKE)
    error.add_note("a hint of the user's")
    return error


WORDS = {
    "note": (noted, f"ValueError: {MISTAKE}\n"),
    "no notes": (partial(Refuses, MISTAKE), rf"\S*Refuses: {MISTAKE}\n"),
    "of groups": (
        partial(dist.DistNetworkError, "connection reset by peer"),
        r"\S*DistNetworkError: connection reset by peer",
    ),
    "long": (partial(ValueError, "much " * 100_000), "ValueError: much .*characters are left out"),
}


@pytest.mark.parametrize("case", WORDS)
def test_errors_are_told_by_their_own_line(case, capfd):
    make, told = WORDS[case]

    def fail(trainer: L.Trainer) -> None:
        raise make()

    script = Impatient(
        Perceptron,
        lambda: vectors(64),
        trainer={"callbacks": [Happens(1, fail)], "limit_val_batches": 0},
    )
    text = ended(script)
    own = re.split(r"\nrank \d+: ", text)[1]
    assert "TypeError: no notes" not in text
    assert re.search(rf"Rank 1 failed between .*\): {told}", own, re.DOTALL), own
    said = capfd.readouterr().err
    assert "[rank 1] failed:" in said and len(said) < 50_000 and "in fail\n" in own
