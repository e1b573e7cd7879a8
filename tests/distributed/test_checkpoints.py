"""Checkpoints are plain Lightning checkpoints, as a file or a folder; the module is whole again."""

from __future__ import annotations

import pickle

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy, sharded
from lightning_pipeline.errors import ElsewhereError
from tests.distributed.fits import Script, distance
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import TOLERANCE, tokens, vectors
from tests.distributed.test_resume import differences
from tests.models.modules import LanguageModel, Perceptron


class ByHand(LanguageModel):
    """With weights that are tied between the first and the last stage, and within the first."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth=depth)
        self.blocks[0].norm2.weight = self.blocks[0].norm1.weight
        self.save_hyperparameters()


class Saves(L.Callback):
    """Saves at the end of the second of three epochs, in a pipeline also as a folder."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)
            trainer.save_checkpoint(f"{self.path}.weights", weights_only=True)
            if isinstance(trainer.strategy, PipelineStrategy):
                trainer.strategy._shards_checkpoints = True
                trainer.save_checkpoint(f"{self.path}.folder")
                trainer.save_checkpoint(f"{self.path}.weights.folder", weights_only=True)
                trainer.strategy._shards_checkpoints = False


class Averages(L.Callback):
    """Keeps the first weights, and what it is given of them, in its state."""

    def __init__(self):
        self.first = {}

    def on_train_batch_end(self, trainer, module, *_):
        for name, weight in module.named_parameters():
            self.first.setdefault(name, weight.detach().clone())
        self.last = dict(module.named_parameters())

    def state_dict(self):
        weights = [weight.detach() for weight in self.last.values()]
        old_and_new = {"old": self.first["norm.weight"], "new": self.last["norm.weight"].detach()}
        return {"first": self.first, "pairs": (weights, 3), "norm": old_and_new}


def save(path):
    def after(trainer, module):
        assert not any(p.is_meta for p in module.parameters())
        return module(torch.zeros(1, 4, dtype=torch.long)).detach()

    return Script(
        ByHand,
        lambda: tokens(32),
        trainer={"callbacks": [Averages(), Saves(path)], "limit_val_batches": 1},
        after=after,
    )


def load(path):
    torch.set_default_dtype(torch.float64)
    module = ByHand.load_from_checkpoint(path, weights_only=True)
    return module.state_dict(), torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas"), [("1F1B", 2, 1), ("ZBVZeroBubble", 2, 2), ("GPipe", 4, 1)]
)
def test_checkpoint_equals_that_of_one_device(tmp_path, schedule, ranks, replicas):
    plain, pipelined = tmp_path / "plain.ckpt", tmp_path / "pipelined.ckpt"
    expected = save(plain).plain(replicas)
    runs = save(pipelined).pipelined(ranks, replicas, schedule=schedule)
    for run in runs if replicas == 1 else ():
        torch.testing.assert_close(run.extra, expected.extra, rtol=1e-12, atol=1e-12)
        assert torch.equal(run.extra, runs[0].extra)
    [(state, checkpoint)] = run_ranks(1, load, pipelined)
    [(expected_state, expected_checkpoint)] = run_ranks(1, load, plain)
    assert not list(differences(state, expected_state, TOLERANCE))
    assert not list(differences(checkpoint, expected_checkpoint, TOLERANCE))
    assert checkpoint["state_dict"]._metadata == expected_checkpoint["state_dict"]._metadata
    assert are_tied(checkpoint["state_dict"])
    check_folder(tmp_path / "pipelined.ckpt.folder", checkpoint, ranks)
    weights, expected_weights = (
        torch.load(f"{path}.weights", weights_only=True) for path in (pipelined, plain)
    )
    assert "optimizer_states" not in expected_weights
    assert not list(differences(weights, expected_weights, TOLERANCE))
    assert not list(differences(sharded.load(f"{pipelined}.weights.folder"), weights, 0.0))


def are_tied(weights):
    ties = {"head.weight": "token.weight", "blocks.0.norm2.weight": "blocks.0.norm1.weight"}
    return all(weights[a].data_ptr() == weights[b].data_ptr() for a, b in ties.items())


def check_folder(folder, expected, ranks):
    """It holds what the file does, one file a rank, and Lightning's own tool reads it."""
    assert {p.name for p in folder.iterdir()} == {
        ".metadata",
        "meta.pt",
        *(f"__{rank}_0.distcp" for rank in range(ranks)),
    }
    checkpoint = torch.load(sharded.consolidate(folder), weights_only=True)
    assert list(checkpoint) == list(expected)
    assert not list(differences(checkpoint, expected, 0.0))
    weights = checkpoint["state_dict"]
    assert weights._metadata == expected["state_dict"]._metadata
    assert are_tied(weights)
    by_lightning = _load_distributed_checkpoint(folder)
    theirs = {name: by_lightning["state_dict"][name] for name in weights}
    assert not list(differences(theirs, dict(weights), 0.0))
    assert by_lightning["hyper_parameters"] == {"depth": 2}
    momenta = by_lightning["optimizer_0"]["state"]["blocks.0.norm1.weight"]
    assert set(momenta) == {"step", "exp_avg", "exp_avg_sq"}


class Watches(L.Callback):
    """Notes the sizes of what goes between the ranks while a checkpoint is saved."""

    def on_train_end(self, trainer, module):
        self.tensors, self.objects, functions = [], [], {}

        def noting(name, note):
            functions[name] = original = getattr(dist, name)

            def noted(*args, **kwargs):
                note(args)
                return original(*args, **kwargs)

            setattr(dist, name, noted)

        noting("send", lambda args: self.tensors.append(args[0].nbytes))
        for name in ("broadcast_object_list", "all_gather_object", "send_object_list"):
            noting(name, lambda args: self.objects.append(len(pickle.dumps(args[:-1]))))
        trainer.save_checkpoint(f"{trainer.default_root_dir}/watched.ckpt")
        for name, function in functions.items():
            setattr(dist, name, function)


def test_no_message_is_larger_than_a_tensor(tmp_path):
    width = 128
    script = Script(
        lambda: Perceptron(width, 4),
        lambda: vectors(32),
        trainer={"callbacks": [Watches()], "default_root_dir": tmp_path, "limit_val_batches": 0},
        after=lambda trainer, _: (trainer.callbacks[0].tensors, trainer.callbacks[0].objects),
    )
    receiver, sender = (run.extra for run in script.pipelined(2))
    assert receiver[0] == []
    # Two layers, each a weight, a bias, and their momenta.
    assert sorted(sender[0]) == [*[8 * width] * 4, *[8 * width * 6] * 2, *[8 * width * width] * 2]
    assert len(sender[1]) == 3  # what is wanted, what is offered, and whether all is written
    assert max(receiver[1] + sender[1]) < 4096


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class Evaluated(Perceptron):
    """Its optimizer has a state before the first step."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.02)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def forward(self, x):
        return self.scale * self.net(x)


def loader(rows=32):
    return DataLoader(vectors(rows)[rows < 32], 16)


def save_and_look(folder, strategy, link):
    """Saves with ModelCheckpoint; then evaluates and goes on from "best" and "last"."""
    saves = ModelCheckpoint(
        folder,
        "{epoch}-{val_loss:.6f}",
        monitor="val_loss",
        save_top_k=2,
        save_last="link" if link else True,
    )

    def after(trainer, module):
        seen = [
            trainer.validate(module, loader(20), ckpt_path="best", verbose=False),
            trainer.test(module, loader(20), ckpt_path="last", verbose=False, weights_only=True),
            trainer.test(module, loader(20), ckpt_path=saves.best_model_path, verbose=False),
        ]
        predicted = trainer.predict(module, loader(20), ckpt_path="best")
        if trainer.is_global_zero:
            (folder / "link").symlink_to(saves.best_model_path)
        trainer.strategy.remove_checkpoint(folder / "link")
        trainer.fit_loop.epoch_loop.max_steps = 10
        trainer.fit(module, loader(), ckpt_path="last", weights_only=True)
        return seen, predicted, saves.best_model_path, float(saves.best_model_score)

    trainer = {"callbacks": [saves], "enable_checkpointing": True}
    if strategy is not None and not strategy["save_distributed_checkpoint"]:
        trainer["plugins"] = [AsyncCheckpointIO()]
    script = Script(Evaluated, lambda: vectors(32), trainer=trainer, after=after)
    return script.plain() if strategy is None else script.pipelined(2, **strategy)[0]


@pytest.mark.parametrize(
    ("folders", "link"),
    [(False, False), (True, False), (True, True)],
    ids=["files", "folders", "folders and a link"],
)
def test_best_and_last(tmp_path, folders, link):
    """The same files with the same scores; folders and links to them are pruned too.

    Files are written in a thread.
    """
    plain, own = tmp_path / "plain", tmp_path / "own"
    expected = save_and_look(plain, None, link)
    run = save_and_look(own, {"save_distributed_checkpoint": folders}, link)
    assert names(own) == names(plain)
    assert all(sharded.is_folder(path) == folders for path in own.iterdir())
    assert distance(run, expected) <= TOLERANCE
    seen, predicted, best, score = run.extra
    assert seen == [[pytest.approx(v, rel=1e-12) for v in e] for e in expected.extra[0]]
    torch.testing.assert_close(predicted, expected.extra[1], rtol=1e-11, atol=1e-12)
    assert best.replace("/own/", "/plain/") == expected.extra[2]
    assert score == pytest.approx(expected.extra[3], rel=1e-12)


def another(trainer):
    """A new trainer with a new strategy of the same layout."""
    strategy = trainer.strategy
    if isinstance(strategy, PipelineStrategy):
        strategy = PipelineStrategy(strategy.mesh.sizes.pipeline)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(
        accelerator="cpu",
        devices=trainer.num_devices,
        strategy=strategy if isinstance(strategy, PipelineStrategy) else "auto",
        max_steps=3,
        **dict.fromkeys(quiet, False),
    )


def test_module_is_whole_after_every_run():
    def after(trainer, module):
        seen, x = [], vectors(32)[0].tensors[0]

        def look():
            whole = not any(t.is_meta for t in module.state_dict().values())
            seen.append((whole, float(module(x).detach().square().sum())))

        look()
        for run in (trainer.validate, trainer.test):
            seen.append([*run(module, loader(20), verbose=False)[0].values()])
            look()
        trainer.predict(module, loader(20))
        look()
        trainer.fit_loop.epoch_loop.max_steps = 9
        trainer.fit(module, loader())
        look()
        another(trainer).fit(module, loader())
        look()
        return seen

    script = Script(Evaluated, lambda: vectors(32), after=after)
    expected = script.plain()
    for run in script.pipelined(2, schedule="Interleaved1F1B"):
        assert distance(run, expected) <= TOLERANCE
        assert run.extra == [pytest.approx(value, rel=1e-12) for value in expected.extra]


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas"), [("Interleaved1F1B", 2, 1), ("1F1B", 2, 2)]
)
def test_module_that_stays_spread(tmp_path, schedule, ranks, replicas):
    """The same Trainer goes on with it; another one and uses outside of runs are refused."""

    def make(name):
        saves = ModelCheckpoint(tmp_path / name, "{epoch}", monitor="val_loss")

        def after(trainer, module):
            if name == "own":
                assert any(t.is_meta for t in module.state_dict().values())
                with pytest.raises(ElsewhereError, match=r"Model\.load_from_checkpoint\(PATH\)"):
                    module(vectors(32)[0].tensors[0])
            seen = [
                trainer.validate(module, loader(20), verbose=False),
                trainer.test(module, loader(20), ckpt_path="best", verbose=False),
            ]
            trainer.predict(module, loader(20))
            trainer.fit_loop.epoch_loop.max_steps = 9
            trainer.fit(module, loader(), loader(20))
            seen.append(trainer.validate(module, loader(20), verbose=False))
            trainer.fit_loop.epoch_loop.max_steps = 12
            trainer.fit(module, loader(), loader(20), ckpt_path=saves.best_model_path)
            trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            if name == "own":
                with pytest.raises(MisconfigurationException) as refused:
                    another(trainer).validate(module, loader(20))
                assert "must begin with a whole module" in str(refused.value)
                assert "Evaluated.load_from_checkpoint(PATH)" in str(refused.value)
            return seen

        trainer = {"callbacks": [saves], "enable_checkpointing": True}
        return Script(Evaluated, lambda: vectors(32 * replicas), trainer=trainer, after=after)

    expected = make("plain").plain(replicas)
    arguments = {"schedule": schedule, "gather_after_run": False}
    for run in make("own").pipelined(ranks, replicas, **arguments)[:1]:
        assert run.extra == [[pytest.approx(v, rel=1e-12) for v in e] for e in expected.extra]
    own, plain = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("own", "plain"))
    for key in ("state_dict", "optimizer_states"):
        assert not list(differences(own[key], plain[key], TOLERANCE))
