"""Private names of torch, Lightning and torchmetrics: listed in one module each, and there.

Whatever begins with one underscore in the package must be of the package itself, or listed by the
module that keeps the private names of its library.
"""

from __future__ import annotations

import ast
import io
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torchmetrics import MeanMetric

import lightning_pipeline
from lightning_pipeline import lightning_private
from lightning_pipeline.splitting import torch_private

PACKAGE = Path(lightning_pipeline.__file__).parent
KEEPERS = {"lightning_private.py": lightning_private, "splitting/torch_private.py": torch_private}
IN_PLACE = {
    name for keeper in KEEPERS.values() for names in keeper.IN_PLACE.values() for name in names
}

OF_PYTHON = frozenset(
    ["_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_io", "_replace", "_thread"]
)
OF_MODELS = frozenset(["_init_weights"])  # what authors of models call it
PARTS = frozenset(
    [
        *("_", "_adaptive_avg_pool", "_cudnn_rnn", "_foreach_", "_hooks", "_raw_saved_", "_saved_"),
        *("_sdp", "_sdp_enabled"),
    ]
)
"""Parts of names: of operations, of what graphs keep, of public functions."""
GLOBALS = frozenset(["_clip_value_of_part", "_unflatten", "_whole_grad_norm", "_whole_norm"])
"""What the package puts among the globals of code that it makes or redirects."""


def _files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def _is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_(?!_)\w*", name))


def _own(tree: ast.Module) -> set[str]:
    """Names that a file itself gives to something."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


OWN = {name for _, tree in _files() for name in _own(tree) if _is_private(name)}


def _used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names that a file takes from elsewhere, with their lines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value not in PARTS else []
        yield from ((node.lineno, name) for name in names if _is_private(name))


def _overridden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef)
            and _is_private(node.name)
            and any(ast.unparse(mark) == "override" for mark in node.decorator_list)
        ):
            yield node.lineno, node.name


def _foreign(files: Iterator[tuple[str, ast.Module]]) -> list[str]:
    """Where a private name of a library is used that is not listed for use where it stands."""
    allowed = IN_PLACE | OF_PYTHON | OF_MODELS | GLOBALS | (OWN - _listed())
    wrong = []
    for file, tree in files:
        if file in KEEPERS:
            continue
        found = [*_used(tree), *((n, m) for n, m in _overridden(tree) if m not in OWN_METHODS)]
        wrong += [f"{file}:{line} {name}" for line, name in found if name not in allowed]
    return wrong


def _listed() -> set[str]:
    tables = [keeper.NAMES for keeper in KEEPERS.values()]
    return {name for table in tables for names in table.values() for name in names}


def _first_defined() -> set[str]:
    """Methods of this package's strategies that override each other alone."""
    found: set[str] = set()
    for _, tree in _files():
        overridden = {line for line, _ in _overridden(tree)}
        found |= {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.lineno not in overridden
        }
    return found


OWN_METHODS = _first_defined()


def test_private_names_are_used_where_they_are_listed() -> None:
    assert _foreign(_files()) == []


@pytest.mark.parametrize(
    "code",
    [
        "from torch._dynamo import config",
        "from lightning.pytorch.loops.fit_loop import _FitLoop",
        "import torch._inductor",
        "trainer._checkpoint_connector.restore()",
        "torch._C._set_grad_enabled(True)",
        "x = getattr(module, '_compiler_ctx')",
        "class Mine(DDPStrategy):\n    @override\n    def _setup_distributed(self): ...",
    ],
)
def test_a_new_use_is_found(code: str) -> None:
    assert _foreign(iter([("new.py", ast.parse(code))])) != []


@pytest.mark.parametrize("file", KEEPERS)
def test_what_is_listed_is_what_is_used(file: str) -> None:
    keeper, trees = KEEPERS[file], dict(_files())
    lists = [
        node
        for node in trees[file].body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ("NAMES", "IN_PLACE")
    ]
    assert len(lists) == 2
    own = ast.Module([node for node in trees[file].body if node not in lists], [])
    used = {name for _, name in _used(own)}
    listed = {name for names in keeper.NAMES.values() for name in names if _is_private(name)}
    in_place = {name for names in keeper.IN_PLACE.values() for name in names}
    elsewhere = {
        name
        for other, tree in trees.items()
        if other != file
        for _, name in [*_used(tree), *_overridden(tree)]
    }
    assert used - listed == set()
    assert in_place - elsewhere == set(), "listed for other files, which do not use it"
    assert listed - in_place - used == set(), "listed, but not used"


class _Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def _trainer() -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def _parameter_of_a_subclass() -> Any:
    with torch_private.FakeTensorMode():
        return nn.Parameter(torch.empty(1))


def _node(make: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> Any:
    return make(torch.ones(shape, requires_grad=True)).grad_fn


def _stored_in_file() -> Any:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    with torch_private.FakeTensorMode():
        return torch.load(file, weights_only=True).untyped_storage()


INSTANCES: dict[str, Callable[[], Any]] = {
    "torch.nn.Module": lambda: nn.Linear(1, 1),
    "torch.nn.LSTM": lambda: nn.LSTM(1, 1),
    "torch.nn.Parameter": _parameter_of_a_subclass,
    "torch._dynamo.OptimizedModule": lambda: torch.compile(nn.Linear(1, 1)),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch.autograd.graph.Node": lambda: _node(torch.exp, 1),
    "torch.optim.Optimizer": lambda: torch.optim.SGD([torch.ones(1)], 0.1),
    "torch.UntypedStorage": _stored_in_file,
    "torch.compile": lambda: torch.compile(lambda: None),
    "AddmmBackward0": lambda: _node(lambda x: torch.addmm(x, x, x), 2, 2),
    "ConvolutionBackward0": lambda: _node(lambda x: torch.conv1d(x, x), 1, 1, 1),
    "EmbeddingBackward0": lambda: _node(
        lambda x: nn.functional.embedding(torch.zeros(1, dtype=torch.long), x), 1, 1
    ),
    "lightning.pytorch.LightningModule": _Net,
    "lightning.pytorch.Trainer": _trainer,
    "lightning.pytorch.loops._FitLoop": lambda: _trainer().fit_loop,
    "lightning.pytorch.loops._TrainingEpochLoop": lambda: _trainer().fit_loop.epoch_loop,
    "lightning.pytorch.loops._EvaluationLoop": lambda: _trainer().validate_loop,
    "lightning.pytorch.loops._PredictionLoop": lambda: _trainer().predict_loop,
    "lightning.pytorch.callbacks.ModelCheckpoint": ModelCheckpoint,
    "lightning.pytorch.callbacks.StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1),
    "lightning.pytorch.callbacks.ThroughputMonitor": lambda: ThroughputMonitor(len),
    "lightning.pytorch.callbacks.WeightAveraging": WeightAveraging,
    "lightning.pytorch.plugins.io.AsyncCheckpointIO": AsyncCheckpointIO,
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver": (
        lambda: lightning_private._ChildProcessObserver([], object())
    ),
    "lightning.pytorch.utilities.CombinedLoader": lambda: CombinedLoader([]),
    "torchmetrics.Metric": MeanMetric,
}
"""Where a name is set by what makes the object, so that its class does not have it."""


def _owner(name: str) -> Any:
    if name in INSTANCES:
        return INSTANCES[name]()
    if name == "ProcessGroupNCCL":  # where torch was built with it
        return getattr(torch.distributed, name, None)
    return pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    ("owner", "names"),
    [(o, n) for keeper in KEEPERS.values() for o, n in keeper.NAMES.items()],
    ids=[o for keeper in KEEPERS.values() for o in keeper.NAMES],
)
def test_listed_names_are_there(owner: str, names: tuple[str, ...]) -> None:
    there = _owner(owner)
    if owner == "ProcessGroupNCCL" and there is None:
        assert not torch.distributed.is_nccl_available()
        return
    gone = [name for name in names if not hasattr(there, name)]
    assert gone == [], f"{owner} of this version has no {', '.join(gone)}"


def test_a_name_that_is_gone_is_told() -> None:
    with pytest.raises(AssertionError, match="torch of this version has no _never_there"):
        test_listed_names_are_there("torch", ("_foreach_div_", "_never_there"))
