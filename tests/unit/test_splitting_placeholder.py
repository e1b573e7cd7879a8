"""Placeholders keep names, identity and metadata, and raise on everything else."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.errors import ElsewhereError
from lightning_pipeline.splitting import (
    ElsewhereBuffer,
    ElsewhereParameter,
    is_elsewhere,
    release,
    restore,
)

HOLDERS = {"0.bias": (1,), "1.weight": (2, 3)}


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3))
    model.register_buffer("ids", torch.arange(3))
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    model.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
    model[1].weight.requires_grad_(False)
    return model


def released() -> nn.Sequential:
    model = make_model()
    release(model, {"0.weight"}, HOLDERS)
    return model


def test_release_keeps_identity_names_and_metadata() -> None:
    model = make_model()
    tied = model[0].bias
    model.tied, model.reference = tied, [tied]
    before = {
        name: (id(t), t.shape, t.dtype) for name, t in model.state_dict(keep_vars=True).items()
    }
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    names = release(model, lambda name: name == "0.weight", HOLDERS)
    after = model.state_dict(keep_vars=True)
    assert {name: (id(t), t.shape, t.dtype) for name, t in after.items()} == before
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert [name for name, t in after.items() if not is_elsewhere(t)] == ["0.weight"]
    # canonical names: the tied bias comes first under the name of the outer module
    assert set(names) == set(before) - {"0.weight", "0.bias"}
    assert isinstance(tied, ElsewhereParameter) and model.reference[0] is model[0].bias
    assert model[2]._flat_weights[0] is model[2].weight_ih_l0
    assert isinstance(model.ids, ElsewhereBuffer) and isinstance(model.codes, nn.Parameter)
    assert release(model, {"0.weight"}, HOLDERS) == []


USES: dict[str, Callable[[nn.Sequential], Any]] = {
    "linear": lambda m: F.linear(torch.ones(2, 3), m[0].weight, m[0].bias),
    "add": lambda m: torch.ones(3) + m[0].bias,
    "in place": lambda m: torch.ones(3).add_(m[0].bias),
    "index": lambda m: m[0].bias[0],
    "view": lambda m: m[0].bias.view(3, 1),
    "transposed": lambda m: m[1].weight.T,
    "item": lambda m: m[1].weight.sum().item(),
    "data": lambda m: (m[1].weight.data + 1).sum(),
    "detached": lambda m: m[1].weight.detach().mul_(2).exp(),
    "cloned": lambda m: float((m[1].weight.clone() + 1)[0]),
    "by what is here": lambda m: m[1].weight.mul_(torch.ones(3)),
    "into what is here": lambda m: torch._foreach_add_([torch.ones(3)], [m[0].bias]),
    "random": lambda m: nn.init.normal_(m[1].weight),
    "elsewhere than": lambda m: m[1].weight.copy_(m[0].bias),
    "data of another": lambda m: setattr(m[1].weight, "data", m[0].bias.data * 2),
    "not placed": lambda m: m.phase.mul_(2),
    "written": lambda m: m[1].weight.detach().copy_(torch.ones(3)),
    "list": lambda m: torch.stack([torch.ones(3), m[1].weight]),
    "keyword": lambda m: F.linear(torch.ones(2, 3), weight=m[0].weight, bias=m[1].bias),
    "buffer": lambda m: m.ids + 1,
    "norm": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
    "assigned": lambda m: setattr(m[1].weight, "data", torch.ones(3)),
    "like": lambda m: (torch.zeros_like(m[1].weight) + 1).tolist(),
    "forward": lambda m: m(torch.ones(2, 3)),
    "rnn": lambda m: m[2](torch.ones(2, 1, 3)),
}


@pytest.mark.parametrize("use", USES)
def test_use_raises(use: str) -> None:
    with torch.no_grad(), pytest.raises(ElsewhereError, match="which is on"):
        USES[use](released())


def blend(p: Tensor, q: Tensor) -> None:
    q.data = 0.9 * q.data + (1 - 0.9) * p.data


UPDATES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "lerp": lambda p, q: q.lerp_(p, 0.1),
    "lerp by a tensor": lambda p, q: q.lerp_(p, torch.tensor(0.1)),
    "multiply and add": lambda p, q: q.data.mul_(0.9).add_(p.data, alpha=0.1),
    "operators": lambda p, q: q.copy_(q * 0.9 + (1 - 0.9) * p),
    "in place operators": lambda p, q: q.__imul__(0.9).__iadd__(0.1 * p),
    "difference": lambda p, q: q.sub_(0.1 * (q - p)),
    "data": blend,
    "copy": lambda p, q: q.copy_(p),
    "foreach": lambda p, q: torch._foreach_lerp_([q], [p], 0.1),
    "foreach in two": lambda p, q: (torch._foreach_mul_([q], 0.9), torch._foreach_add_([q], [p])),
    "clamp": lambda p, q: q.clamp_(-0.1, 0.1),
    "weight decay": lambda p, q: q.mul_(1 - 0.1).addcdiv_(p, p.abs().sqrt_().add_(1), value=0.1),
}


@pytest.mark.parametrize("update", UPDATES)
def test_updates_of_weights_by_each_other_do_nothing(update: str) -> None:
    """Their holders do them; the same object stays a placeholder that raises on use."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    release(model, set(), {"0.weight": (1,), "1.weight": (1,)})
    p, q = model[0].weight, model[1].weight
    with torch.no_grad():
        UPDATES[update](p, q)
    assert model[1].weight is q and is_elsewhere(q) and repr(q).startswith("ElsewhereParameter(")
    assert q.shape == (2, 3) and q.requires_grad and "'1.weight'" in repr(q)
    if "data" not in update and "multiply" not in update:
        with pytest.raises(ElsewhereError, match="which is on stage 1"):
            UPDATES[update](p, q)  # a gradient is asked for


def test_an_update_over_stages_names_both() -> None:
    model = released()
    text = r"brings together '1.weight', which is on stages 2, 3.*'0.bias', on stage 1.*deepcopy"
    with torch.no_grad(), pytest.raises(ElsewhereError, match=text):
        model[1].weight.lerp_(model[0].bias, 0.1)


def test_what_is_here_in_a_list_is_updated() -> None:
    model, here = released(), torch.ones(3)
    with torch.no_grad():
        torch._foreach_lerp_([here, model[0].bias], [torch.zeros(3), model[0].bias], 0.5)
    assert here.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0.bias", "needs the parameter '0.bias', which is on stage 1 of the pipeline"),
        ("1.weight", "needs the parameter '1.weight', which is on stages 2, 3 of the pipeline"),
        ("ids", "needs the tensor 'ids', which is on another stage of the pipeline"),
    ],
)
def test_message_names_the_holders(name: str, message: str) -> None:
    tensor = released().state_dict(keep_vars=True)[name]
    with pytest.raises(ElsewhereError, match=message):
        torch.exp(tensor)


METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: t.shape == (3,) and t.size(0) == 3 and t.numel() == 3 and len(t) == 3,
    "dtype": lambda t: t.dtype is torch.float32 and t.is_floating_point() and not t.is_complex(),
    "device": lambda t: t.is_meta and t.device.type == "meta" and not t.is_cuda,
    "grad": lambda t: t.grad is None and t.requires_grad and t.is_leaf,
    "stride": lambda t: t.dim() == 1 and t.stride() == (1,) and t.element_size() == 4,
    "hash": lambda t: {t: 1}[t] == 1,
    "repr": lambda t: "'0.bias', (3,), torch.float32, on stage 1" in repr(t) and f"{t}",
    "flag": lambda t: not t.requires_grad_(False).requires_grad,
    "detach": lambda t: is_elsewhere(t.detach()) and is_elsewhere(t.data),
    "move": lambda t: t.to("cpu") is t and t.cpu() is t and t.float() is t,
    "cast": lambda t: t.half().dtype is torch.float16,
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_is_free(kind: str) -> None:
    assert METADATA[kind](released()[0].bias)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_skip_placeholders(name: str, before: bool) -> None:
    model = make_model()
    trained = [p for p in model.parameters() if p.is_floating_point()]
    optimizer = OPTIMIZERS[name](trained) if before else None
    release(model, {"0.weight"}, HOLDERS)
    optimizer = optimizer or OPTIMIZERS[name](trained)
    start = model[0].weight.detach().clone()
    for _ in range(2):
        model[0].weight.grad = torch.ones(3, 3)
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model[0].weight, start)
    copied = copy.deepcopy(optimizer)
    copied.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["params"][1] is model[0].bias


def test_modules_with_placeholders_go_on_working() -> None:
    model = released().train().eval()
    model[1].requires_grad_(True)
    assert model[1].weight.requires_grad
    copied = copy.deepcopy(model)
    assert repr(copied[0].bias) == repr(model[0].bias) and copied[0].bias is not model[0].bias
    model.zero_grad()
    assert model.to("cpu")[0].bias is model[0].bias
    bias = model[0].bias
    model.half()
    assert model[0].bias is bias and is_elsewhere(bias) and bias.dtype is torch.float16


def test_state_dict_can_be_saved_and_loaded() -> None:
    model, file = released(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == list(model.state_dict())
    assert torch.equal(loaded["0.weight"], model[0].weight)
    assert loaded["0.bias"].is_meta and loaded["0.bias"].shape == (3,)


def test_restore_undoes_release() -> None:
    model = make_model().eval()
    x = torch.randn(2, 3)
    expected = model(x)[0]
    values = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.is_floating_point()], 0.1)
    identities = [id(p) for p in model.parameters()]
    release(model, set(), {})
    for name, tensor in model.state_dict(keep_vars=True).items():
        restore(tensor, values[name].clone())
        assert not is_elsewhere(tensor)
    assert [id(p) for p in model.parameters()] == identities
    assert type(model[0].bias) is nn.Parameter and type(model.ids) is Tensor
    assert not model[1].weight.requires_grad and not model.codes.requires_grad
    out = model(x)[0]
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, values["0.weight"])


def test_restore_checks_the_shape() -> None:
    with pytest.raises(ValueError, match=r"must have shape \(3,\), but has \(4,\)"):
        restore(released()[0].bias, torch.ones(4))
