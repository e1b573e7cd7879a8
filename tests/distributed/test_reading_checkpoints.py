"""A folder that was being replaced, and a server nobody vouches for, as checkpoints to read."""

from __future__ import annotations

import os
import pickle
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.files import WholeFiles
from lightning_pipeline.replacing import old_of
from lightning_pipeline.sharded import consolidate, is_folder
from lightning_pipeline.weights import copied, open_checkpoint, open_weights
from tests.distributed.ranks import run_ranks
from tests.distributed.test_flipped_bits import Saves, Tiny, is_same, numbers


@pytest.fixture
def interrupted(tmp_path):
    """A folder whose process was killed before the next one took its place, and what is in it."""
    Saves(Tiny, numbers, checkpoint=tmp_path).pipelined(1)
    path = tmp_path / "last.ckpt"
    os.rename(tmp_path / "folder", old_of(path))
    return path, WholeFiles().load_checkpoint(tmp_path / "file")


def test_a_folder_that_was_being_replaced_is_found_by_all_that_read(interrupted):
    path, expected = interrupted
    assert is_folder(path)
    assert is_same(copied(open_checkpoint(path)), expected)
    assert is_same(copied(open_weights(path)), dict(expected["state_dict"]))
    file = consolidate(path)
    assert file.name == "last.ckpt.consolidated"
    assert is_same(WholeFiles().load_checkpoint(file), expected)


def without_weights(path):
    """Which tensors of a checkpoint are not read yet, for a module that has no memory."""
    with torch.device("meta"):
        module = Tiny()
    strategy = PipelineStrategy(1)
    strategy.connect(module)
    state = strategy.load_checkpoint(path)["state_dict"]
    return {name: tensor.is_meta for name, tensor in state.items()}


def test_a_module_without_memory_reads_it_tensor_by_tensor(interrupted):
    path, _ = interrupted
    [unread] = run_ranks(1, without_weights, path)
    assert unread == {"net.weight": True, "net.bias": True}


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("evil",))


class Own(CheckpointIO):
    """A user's own way of reading, by Lightning's."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        raise NotImplementedError

    def remove_checkpoint(self, path):
        raise NotImplementedError

    def load_checkpoint(self, path, *args, **kwargs):
        return TorchCheckpointIO().load_checkpoint(path, *args, **kwargs)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a folder."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "downloads"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("plugin", [WholeFiles, TorchCheckpointIO, AsyncCheckpointIO, Own])
def test_nothing_from_a_server_runs(tmp_path, server, plugin):
    plain = {"pytorch-lightning_version": L.__version__, "weights": torch.arange(3)}
    torch.save(plain, tmp_path / "plain.ckpt")
    torch.save({**plain, "epoch": Evil()}, tmp_path / "evil.ckpt")
    strategy = PipelineStrategy(1)
    strategy.checkpoint_io = plugin()
    assert is_same(strategy.load_checkpoint(f"{server}/plain.ckpt"), plain)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        strategy.load_checkpoint(f"{server}/evil.ckpt")
    assert not (tmp_path / "evil").exists()
    strategy.load_checkpoint(f"{server}/evil.ckpt", weights_only=False)
    assert (tmp_path / "evil").exists()
