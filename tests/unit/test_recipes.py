"""Tensors made later are those that the module's own code makes, and files find their module."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations

from lightning_pipeline.materialising import Deferred
from lightning_pipeline.recipes import Recipes
from lightning_pipeline.splitting import is_elsewhere, state_items
from lightning_pipeline.weights import fetch, named_for, open_weights

HERE = torch.device("cpu")


class Assorted(nn.Module):
    """Initialised in all the ways that recipes know; its values do not depend on random numbers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(5, 4)
        self.norm, self.embedding = nn.BatchNorm1d(4), nn.Embedding(7, 3, padding_idx=0)
        self.apply(self.fill)
        self.a.weight.data.mul_(2)
        with torch.no_grad():
            self.a.weight[0] = 7
            self.a.weight[:, 1:3].add_(self.a.bias.view(4, 1))
            self.embedding.weight.fill_(3)[0].zero_()
        self.b.load_state_dict(self.a.state_dict())
        self.c = nn.Linear(3, 3)
        self.c.weight.data = torch.eye(3)
        self.d = nn.Parameter(torch.empty(4, 4))
        nn.init.eye_(self.d)
        self.e = nn.Parameter(self.d.detach() * 3 + torch.arange(4.0))
        self.scaled = parametrizations.weight_norm(self.fill(nn.Linear(3, 2)))
        self.half = self.fill(nn.Linear(2, 2)).to(torch.bfloat16)
        self.ones = nn.Parameter(1e-5 * torch.ones(4))
        nn.init.constant_(self.c.bias, self.a(torch.zeros(2, 5)).shape[1])
        self.encoder = nn.TransformerEncoder(self.fill(nn.TransformerEncoderLayer(4, 2, 8)), 2)
        self.register_buffer("steps", torch.arange(3) if self.a.weight.is_cpu else None)

    def fill(self, module):
        for number, parameter in enumerate(module.parameters(recurse=False)):
            nn.init.constant_(parameter, 0.5 + number)
        for child in module.children():
            self.fill(child)
        return module


def made(module, recipes, seed=1, keep=lambda name: True):
    """The module with its values, or with those that ``keep`` says."""
    deferred = Deferred(module, recipes)
    deferred.check()
    holders = {item.name: (0,) for item in state_items(module)}
    deferred.fill(keep, holders, HERE, seed)
    return module


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_values_are_those_of_the_modules_own_code():
    recipes = Recipes()
    with recipes.watch():
        module = Assorted()
    assert module.a.weight.is_meta and not module.norm.running_mean.is_meta
    assert not module.ones.is_meta and not module.c.weight.is_meta
    expected = Assorted().state_dict()
    found = made(module, recipes).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor) and found[name].dtype == tensor.dtype, name


class Drawn(nn.Module):
    """With functions of torch.nn.init that ask whether a tensor is on meta, and a generator."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        self.c = nn.Conv1d(3, 3, 3)
        nn.init.dirac_(self.c.weight)
        self.d = nn.Linear(10, 10)
        nn.init.sparse_(self.d.weight, 0.5)
        self.e, self.f = nn.Linear(9, 9), nn.Linear(9, 9)
        generator = torch.Generator().manual_seed(3)
        nn.init.normal_(self.e.weight, generator=generator)
        nn.init.normal_(self.f.weight, generator=generator)
        self.g = nn.Linear(9, 9)
        nn.init.normal_(self.g.weight, generator=torch.Generator().manual_seed(3))


def test_random_values_depend_on_names_and_seed_alone():
    states = []
    for seed, names in ((1, ""), (1, "a.weight b.bias d.weight"), (2, "")):
        recipes = Recipes()
        torch.manual_seed(len(states))
        with recipes.watch():
            module = Drawn()
        made(module, recipes, seed, lambda name, names=names: not names or name in names.split())
        states.append({n: t for *_, n, t in state_items(module) if not is_elsewhere(t)})
    whole, part, other = states
    assert part.keys() == {"a.weight", "b.bias", "d.weight"}
    assert all(whole[name].equal(tensor) for name, tensor in part.items())
    seeded = {
        "c.weight",
        "e.weight",
        "f.weight",
        "g.weight",
    }  # not by the run
    assert {n for n in whole if whole[n].equal(other[n])} == seeded
    assert torch.allclose(whole["a.weight"] @ whole["a.weight"].T, torch.eye(40), atol=1e-5)
    assert 0.015 < whole["b.weight"].std() < 0.025
    assert whole["c.weight"].sum() == 3 and (whole["d.weight"] == 0).sum() == 50
    assert not whole["e.weight"].equal(whole["f.weight"])
    assert whole["e.weight"].equal(whole["g.weight"])  # the same seed, the same draw


class Outside(nn.Module):
    """What is on meta has values from reset_parameters; what is not keeps its own."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.norm, self.attention = nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2)
            self.weight = nn.Parameter(torch.empty(4))
        self.bias = nn.Parameter(torch.full((4,), 9.0))
        self.last = nn.Linear(4, 4)

    def reset_parameters(self):
        nn.init.constant_(self.weight, 2.0)
        nn.init.zeros_(self.bias)


def test_what_was_built_unseen_is_reset():
    module, last = Outside(), None
    last = module.last.weight.clone()
    made(module, Recipes())
    assert module.weight.eq(2).all() and module.bias.eq(9).all() and module.last.weight.equal(last)
    assert module.norm.running_var.eq(1).all() and module.norm.num_batches_tracked == 0
    assert 0.1 < module.attention.in_proj_weight.std() < 1


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))
        nn.init.constant_(self.weight, 3.0)

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.more)


def test_only_what_nobody_wrote_to_is_reset():
    recipes = Recipes()
    with recipes.watch():
        module = Half()
    made(module, recipes)
    assert module.weight.eq(3).all() and module.more.eq(1).all()


def pair():
    return nn.ModuleDict({"teacher": nn.Linear(2, 3), "student": nn.Linear(2, 3)})


def inner():
    return nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))})


def test_a_file_of_a_submodule_is_recognised(tmp_path):
    module = inner()
    save_file(dict(module["net"].state_dict()), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        named = named_for(module, open_weights(path), path)
        assert named.keys() == module.state_dict().keys()
        assert all(fetch(named[n]).equal(t) for n, t in module.state_dict().items())


# The module, the names and shapes in the file, and what the refusal says.
UNFIT = {
    "several": (pair, {"weight": (3, 2), "bias": (3,)},
                "fit one submodule of ModuleDict, but their names fit 'teacher', 'student'. Save "
                "them under their full names, e.g. 'teacher.weight'"),
    "missing": (inner, {"net.0.weight": (3, 2), "net.1.weight": (4, 3), "net.1.bias": (4,)},
                "Under the prefix '' they lack 'net.0.bias' and have nothing besides"),
    "unexpected": (inner, {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (4, 3), "1.bias": (4,),
                           "2.bias": (1,)},
                   "Under the prefix 'net.' they lack nothing and have '2.bias' besides"),
    "shape": (inner, {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (4, 5), "1.bias": (4,)},
              r"net.1.weight has shape \(4, 3\) in ModuleDict and \(4, 5\) in 'file'"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_files_that_do_not_fit_are_refused(name):
    make, shapes, message = UNFIT[name]
    with pytest.raises(MisconfigurationException, match=message):
        named_for(make(), {n: torch.zeros(shape) for n, shape in shapes.items()}, "file")


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"safetensors file, a folder with model.safeten"):
        open_weights(tmp_path)
    torch.save({"epoch": 3}, tmp_path / "empty.ckpt")
    with pytest.raises(MisconfigurationException, match=r"must hold tensors by name, .* 'epoch'"):
        open_weights(tmp_path / "empty.ckpt")
