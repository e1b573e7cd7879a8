"""Nothing that is read runs as code: no eval, no pickle, no loader that would."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import lightning_pipeline

PACKAGE = Path(lightning_pipeline.__file__).parent

NAMES = [
    "eval",
    "exec",
    "compile",
    "__import__",
    "__builtins__",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "importlib.import_module",
    "importlib.reload",
    "importlib.util.module_from_spec",
    "pkgutil.resolve_name",
    "pydoc.locate",
    "pandas.read_pickle",
    "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.load_state_dict",
    "torch.distributed.checkpoint.FileSystemReader",
]
"""What runs what it is given, called or handed on."""

MODULES = [
    "builtins",
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "runpy",
    "code",
    "torch.hub",
    "torch.package",
    "hydra.utils",
]
"""Modules of which every name is taken for one that does, but for the harmless."""
HARMLESS = {"pickle.UnpicklingError", "yaml.safe_load"}

LOADERS = ["torch.load", "torch.serialization.load", "lightning.fabric.utilities.cloud_io._load"]
METHODS = {"load_checkpoint", "load_from_checkpoint"}  # of whatever object
"""What must be told ``weights_only``."""

SAFE = {"weights_only": "True", "allow_pickle": "False", "shell": "False"}
"""The one value that an argument of this name may have."""

ALLOWED = {
    "splitting/stage.py:StageFunction.__init__ exec": "a program that the package itself has made",
    "splitting/stage.py:StageFunction.__init__ compile": "the same",
    "shards.py:_Unpickler pickle.Unpickler": "finds the classes of a list of tensors, no others",
    "cli.py:_build hydra.utils.instantiate": "what a user's configuration names is their program",
    "bench/ranks.py:run_ranks weights_only=False": "what a child has written for its parent",
    "messages.py:_unpacked weights_only=False": "what another rank of the job has sent",
    "sharded.py:load weights_only=weights_only": "the user's, as in Trainer.fit; None is True",
    "weights.py:open_checkpoint weights_only=weights_only": "the same",
    "files.py:WholeFiles.load_checkpoint weights_only=weights_only": "the same",
}
"""By place and name, why it may stand there."""


class Finder(ast.NodeVisitor):
    """Finds what may run code in one file.

    Args:
        file: Its path.
        code: Its text.

    Attributes:
        found: Place and name of each.
    """

    def __init__(self, file: str, code: str) -> None:
        self.found: set[str] = set()
        self._file, self._scopes = file, list[str]()
        self._arguments = frozenset[str]()  # of the functions around
        self._told = set[ast.AST]()  # functions whose call has a weights_only
        self._meanings = defaultdict[str, set[str]](set)
        tree = ast.parse(code)
        for node in ast.walk(tree):
            self._note_import(node)
        self.visit(tree)

    def _note_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                whole = name.name if name.asname else name.name.partition(".")[0]
                self._meanings[name.asname or whole].add(whole)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                self._meanings[name.asname or name.name].add(f"{node.module}.{name.name}")

    def _in_scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._arguments
        if not isinstance(node, ast.ClassDef):
            own = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            self._arguments = before | own
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()
        self._arguments = before

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _in_scope

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if any(name.name == "*" for name in node.names):
            self._find(f"{node.module}.*")

    def visit_Call(self, node: ast.Call) -> None:
        given = [keyword.arg for keyword in node.keywords]
        given += [ast.unparse(argument) for argument in node.args]
        if "weights_only" in given:
            self._told.add(node.func)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._look_at_value(node.arg, node.value)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self._look_at_value(key.value if isinstance(key, ast.Constant) else None, value)
        self.generic_visit(node)

    def _look_at_value(self, name: object, value: ast.expr) -> None:
        given = ast.unparse(value)
        if isinstance(name, str) and given != SAFE.get(name, given):
            self._find(f"{name}={given}")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._look_at_name(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in METHODS and node not in self._told:
            self._find(f"{node.attr} without weights_only")
        if not self._look_at_name(node):
            self.generic_visit(node)

    def _look_at_name(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether it is the name of something imported, or of something in that."""
        first, dot, rest = ast.unparse(node).partition(".")
        is_chain = not dot or all(map(str.isidentifier, rest.split(".")))
        if first in self._arguments or not is_chain:
            return False
        is_imported = first in self._meanings
        for meaning in self._meanings.get(first, {first}):
            name = meaning + dot + rest
            inside = is_imported and f"{name}.".startswith(tuple(f"{m}." for m in MODULES))
            if name in NAMES or (inside and name not in HARMLESS):
                self._find(name)
            if name in LOADERS and node not in self._told:
                self._find(f"{name} without weights_only")
        return is_imported

    def _find(self, name: str) -> None:
        self.found.add(f"{self._file}:{'.'.join(self._scopes)} {name}")


def test_nothing_that_is_read_runs_as_code() -> None:
    files = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}
    found = set().union(*(Finder(file, code).found for file, code in files.items()))
    assert found == ALLOWED.keys()


DANGERS = [
    ("eval(cfg.loss)", "eval"),
    ("exec(text)", "exec"),
    ("compile(text, 'a', 'exec')", "compile"),
    ("list(map(eval, texts))", "eval"),
    ("import builtins\nbuiltins.eval(text)", "builtins.eval"),
    ("__import__(cfg.module)", "__import__"),
    ("import importlib\nimportlib.import_module(cfg.module)", "importlib.import_module"),
    ("from importlib import import_module as get\nget(cfg.module)", "importlib.import_module"),
    ("from hydra.utils import instantiate\ninstantiate(cfg)", "hydra.utils.instantiate"),
    ("import hydra\nhydra.utils.get_method(cfg.function)", "hydra.utils.get_method"),
    ("import runpy\nrunpy.run_path(path)", "runpy.run_path"),
    ("import pickle\npickle.load(file)", "pickle.load"),
    ("import pickle\npickle.Unpickler(file).load()", "pickle.Unpickler"),
    ("import pickle\nclass Mine(pickle.Unpickler): ...", "pickle.Unpickler"),
    ("import pickle\ngetattr(pickle, name)(data)", "pickle"),
    ("from pickle import loads\nloads(data)", "pickle.loads"),
    ("from pickle import loads as read\nread(data)", "pickle.loads"),
    ("from pickle import *", "pickle.*"),
    ("def f():\n    from pickle import loads\n    return loads", "pickle.loads"),
    ("from json import loads\nfrom pickle import loads\nloads(data)", "pickle.loads"),
    ("import cloudpickle\ncloudpickle.loads(data)", "cloudpickle.loads"),
    ("import dill as pickle\npickle.load(file)", "dill.load"),
    ("from joblib import load\nload(path)", "joblib.load"),
    ("import marshal\nmarshal.loads(data)", "marshal.loads"),
    ("import shelve\nshelve.open(path)", "shelve.open"),
    ("import pandas as pd\npd.read_pickle(path)", "pandas.read_pickle"),
    ("import yaml\nyaml.load(text, Loader)", "yaml.load"),
    ("import yaml\nyaml.unsafe_load(text)", "yaml.unsafe_load"),
    ("import torch\ntorch.load(path)", "torch.load without weights_only"),
    ("import torch\ntorch.load(path, weights_only=False)", "weights_only=False"),
    ("import torch\ntorch.load(path, weights_only=None)", "weights_only=None"),
    ("import torch as t\nt.load(path)", "torch.load without weights_only"),
    ("from torch import load\nload(path)", "torch.load without weights_only"),
    ("import torch\nread = torch.load", "torch.load without weights_only"),
    (
        "import torch\ntorch.serialization.load(path)",
        "torch.serialization.load without weights_only",
    ),
    (
        "import torch\ntorch.hub.load_state_dict_from_url(url)",
        "torch.hub.load_state_dict_from_url",
    ),
    ("from torch import hub\nhub.load(place, name)", "torch.hub.load"),
    (
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader(folder)",
        "torch.distributed.checkpoint.FileSystemReader",
    ),
    ("super().load_checkpoint(path)", "load_checkpoint without weights_only"),
    ("super().load_checkpoint(path, None, False)", "load_checkpoint without weights_only"),
    ("io.load_checkpoint(path, weights_only=False)", "weights_only=False"),
    ("Model.load_from_checkpoint(path)", "load_from_checkpoint without weights_only"),
    ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle=True"),
    ("import os\nos.system(command)", "os.system"),
    ("import os\nos.popen(command)", "os.popen"),
    ("import subprocess\nsubprocess.run(command, shell=True)", "shell=True"),
    ("import subprocess\nsubprocess.run(command, shell=is_text)", "shell=is_text"),
    ("import subprocess\nsubprocess.run(command, **{'shell': True})", "shell=True"),
    ("import subprocess\nsubprocess.getoutput(command)", "subprocess.getoutput"),
]


@pytest.mark.parametrize(("code", "name"), DANGERS)
def test_a_new_danger_is_found(code: str, name: str) -> None:
    assert {place.split(" ", 1)[1] for place in Finder("new.py", code).found} == {name}


@pytest.mark.parametrize(
    "code",
    [
        "import json\njson.loads(text)",
        "import re\nre.compile(text)",
        "import torch\ntorch.compile(module.eval())",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "from pickle import UnpicklingError\nraise UnpicklingError",
        "import subprocess\nsubprocess.run(['ls'])",
        "super().load_checkpoint(path, weights_only)",
        "from . import loads\nloads(data)",
        "model.exec(text)",
        "def set(compile: bool):\n    return compile",
    ],
)
def test_what_is_harmless_may_stand(code: str) -> None:
    assert Finder("new.py", code).found == set()
