"""Whatever a process is killed before, a place has the old or the new, in full."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys

import pytest

from lightning_pipeline import replacing
from lightning_pipeline.replacing import beside, erase, link, put, standing, whole_file


def make(path, kind, text):
    if kind == "file":
        path.write_text(text)
    elif kind == "folder":
        path.mkdir()
        for name in (".metadata", "meta.pt"):
            (path / name).write_text(text)
    elif kind == "link":
        target = path.with_name(f"target of {text}")
        target.write_text(text)
        path.symlink_to(target.name)


def text_of(path):
    """What is there, if it is complete."""
    if path.is_dir():
        names = (".metadata", "meta.pt")
        [text] = {(path / name).read_text() for name in names}
        return text
    return path.read_text() if path.exists() else None


def replace(path, kind):
    if kind == "file":
        with whole_file(path) as file:
            file.write(b"ne")
            file.write(b"w")
    elif kind == "folder":
        replacing.clear(path)
        make(beside(path), "folder", "new")
        put(beside(path), path)
    elif kind == "link":
        link(path.with_name("target of new"), path)
    else:
        erase(path)


def killed(number, function, *args):
    """Whether a child that does this is killed before the ``number``-th step."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL)
        return code != 0
    seen = []

    def hook(event, _):
        if event in ("open", "shutil.rmtree", "ctypes.dlsym") or event.startswith("os."):
            seen.append(event)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = 1
    try:
        function(*args)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("exchange", [True, False], ids=["", "no exchange"])
@pytest.mark.parametrize("new", ["file", "folder", "link", "nothing"])
@pytest.mark.parametrize("old", ["file", "folder", "link", "nothing"])
def test_killed_before_any_step_of_a_replacement(tmp_path, monkeypatch, old, new, exchange):
    if not exchange:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    number, ended = 0, False
    while not ended:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "last_one.ckpt"
        make(path, old, "old")
        (folder / "target of new").write_text("new")
        ended = not killed(number, replace, path, new)
        allowed = {"old" if old != "nothing" else None, "new" if new != "nothing" else None}
        assert text_of(path if exchange else standing(path)) in allowed
        others = {each.name for each in folder.iterdir() if not each.name.startswith("target")}
        others -= {path.name}
        others = {name for name in others if not re.fullmatch(r"\.\w{32}\.removed\.part", name)}
        others = {name for name in others if not re.fullmatch(r"\.last-one\.ckpt\..*\.part", name)}
        assert others <= {"last_one.being-replaced.ckpt"}
        replace(path, new)
        assert text_of(path) == ("new" if new != "nothing" else None)
        left = {each.name for each in folder.iterdir() if not each.name.startswith("target")}
        assert left == ({path.name} if new != "nothing" else set())
    assert number > 1


@pytest.mark.parametrize("exchange", [True, False], ids=["", "no exchange"])
def test_an_old_folder_that_somebody_reads_is_in_nobodys_way(tmp_path, monkeypatch, exchange):
    """On NFS what a process reads is there until it has read it, and its folder with it."""
    if not exchange:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    in_use, path = [True], tmp_path / "last.ckpt"

    def rmtree(folder, ignore_errors=False):
        if not in_use[0]:
            return whole_rmtree(folder, ignore_errors=ignore_errors)
        if not ignore_errors:
            raise OSError(39, "Directory not empty", folder)

    whole_rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    make(path, "folder", "old")
    for _ in range(2):
        replace(path, "folder")
        assert text_of(path) == "new"
    for _ in range(2):
        make(tmp_path / "other.ckpt", "folder", "old")
        erase(tmp_path / "other.ckpt")
        assert not (tmp_path / "other.ckpt").exists()
    in_use[0] = False
    erase(tmp_path / "nothing")
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    path = tmp_path / "results"
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(IsADirectoryError, match="it is a folder that holds something else"):
        replace(path, "file")
    assert (path / "kept").exists() and os.listdir(tmp_path) == ["results"]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"ne")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_two_runs_that_save_to_one_path(tmp_path, kind):
    """One begins while the other writes, and is killed in its own write: the other's is there."""
    path = tmp_path / "last.ckpt"

    def begin_and_be_killed():
        replacing.clear(path)
        make(beside(path), kind, "half")
        os.kill(os.getpid(), signal.SIGKILL)

    replacing.clear(path)
    make(beside(path), kind, "new")
    assert killed(0, begin_and_be_killed)
    assert len(list(tmp_path.iterdir())) == 2
    put(beside(path), path)
    assert text_of(path) == "new"
    replace(path, kind)
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_another_host_writes_stays_for_a_day(tmp_path):
    path = tmp_path / "last[1].ckpt"
    far = tmp_path / ".last[1].ckpt.far-away.com-7.part"
    far.touch()
    replace(path, "file")
    assert far.exists()
    os.utime(far, (0, 0))
    replace(path, "file")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
