"""Weights in files, of which a rank reads only what it holds, tensor by tensor."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_pipeline import sharded
from lightning_pipeline.checkpoint import STATE_DICT, mapped
from lightning_pipeline.files import check_file, explained
from lightning_pipeline.replacing import standing

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"  # as transformers names them
_SHOWN = 5


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
    """A meta tensor that knows where its value is.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        read: Reads the value into the memory of the host.
    """
    made = torch.empty(shape, dtype=dtype, device="meta")
    made.read_stored = read  # type: ignore[attr-defined]
    return made


def fetch(value: Any) -> Any:
    """The same nest with values for stand-ins."""

    return mapped(value, lambda _, tensor: _read(tensor, tensor))


def copied(value: Any) -> Any:
    """The same nest with values of its own, no part of a file that may be replaced."""
    return mapped(value, lambda _, tensor: _read(tensor, None))


def _read(tensor: Tensor, otherwise: Tensor | None) -> Tensor:
    read = getattr(tensor, "read_stored", None)
    if read is not None:
        value: Tensor = read()
        return value
    return tensor.detach().clone() if otherwise is None else otherwise


def open_checkpoint(
    path: Any, weights_only: bool | None = None, *, together: bool = False
) -> dict[str, Any]:
    """A Lightning checkpoint, file or folder, whose tensors stay where they are until used.

    Args:
        path: Its path on a local or mounted file system.
        weights_only: As in ``torch.load``.
        together: Whether all ranks call it, and shall read the same save.

    Raises:
        CheckpointError: If torch.save did not write it since torch 1.6, or it is cut short.
    """
    if os.path.isdir(standing(path)):
        return sharded.load(path, weights_only, stand_in, together=together)
    check_file(path, checksums=False)  # that would read all of it on every rank
    with explained(path):
        loaded: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=weights_only
        )
    return loaded


def open_weights(path: str | Path) -> dict[str, Tensor]:
    """Names and tensors of a file with weights, without their values.

    Args:
        path: A safetensors file, a folder that ``save_pretrained`` wrote, or a checkpoint.

    Raises:
        FileNotFoundError: If there is no such thing.
        MisconfigurationException: If safetensors is not installed, or there are no tensors.
    """
    path = Path(path)
    if (path / _INDEX).is_file():
        files = set(json.loads((path / _INDEX).read_text())["weight_map"].values())
        return {k: t for name in sorted(files) for k, t in _safetensors(path / name).items()}
    if (path / _FILE).is_file():
        return _safetensors(path / _FILE)
    if path.suffix == ".safetensors" and path.is_file():
        return _safetensors(path)
    if not path.is_file() and not sharded.is_folder(path):
        raise FileNotFoundError(
            "PipelineStrategy(weights=...) must be a safetensors file, a folder with "
            f"{_FILE} or {_INDEX}, or a checkpoint, and {str(path)!r} in {os.getcwd()} is none. "
            "Give the path that model.save_pretrained(PATH) or trainer.save_checkpoint(PATH) wrote."
        )
    loaded = open_checkpoint(path, weights_only=True)
    state = loaded.get(STATE_DICT, loaded)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise MisconfigurationException(
            f"{str(path)!r} must hold tensors by name, or a Lightning checkpoint, but has the keys "
            f"{_some(list(loaded))}. Save torch.save(model.state_dict(), PATH)."
        )
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    if importlib.util.find_spec("safetensors") is None:
        raise MisconfigurationException(
            f"{str(path)!r} can only be read with safetensors, which is not installed: "
            "pip install safetensors."
        )
    from safetensors import safe_open

    def read(name: str) -> Tensor:
        with safe_open(path, framework="pt") as opened:
            value: Tensor = opened.get_tensor(name)
            return value.clone()  # it lies in the file, which may be replaced

    tensors = {}
    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118, it has no other iteration
            part = opened.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise MisconfigurationException(
                    f"{name!r} in {str(path)!r} must be of one of the types "
                    f"{', '.join(_DTYPES)}, but is {part.get_dtype()}. Save it as another type."
                )
            dtype = _DTYPES[part.get_dtype()]
            tensors[name] = stand_in(tuple(part.get_shape()), dtype, partial(read, name))
    return tensors


# fmt: off
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}
# fmt: on


def named_for(module: nn.Module, found: Mapping[str, Tensor], source: Any) -> dict[str, Tensor]:
    """The tensors of a file by their names in a module.

    A file of one submodule, such as a pretrained model inside a LightningModule, is recognised by
    its names; the rest of the module then keeps its own initial values.

    Args:
        module: The module.
        found: Tensors by their names in the file.
        source: Where they come from, for messages.

    Raises:
        MisconfigurationException: If names or shapes do not fit, or fit several submodules.
    """
    state = module.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    prefix = _prefix(module, own, found, source)
    named = {prefix + name: tensor for name, tensor in found.items()}
    unexpected = [name for name in found if prefix + name not in own]
    missing = _missing(own, found, prefix)
    if unexpected or missing:
        raise MisconfigurationException(
            f"The weights in {str(source)!r} must be those of {type(module).__name__} or of one of "
            f"its submodules. Under the prefix {prefix!r} they lack {_some(missing)} and have "
            f"{_some(unexpected)} besides. Save the state dict of the same model, or remove "
            "PipelineStrategy(weights=...) and load what fits in configure_model."
        )
    for name, tensor in named.items():
        if tensor.shape != own[name].shape:
            raise MisconfigurationException(
                f"{name} has shape {tuple(own[name].shape)} in {type(module).__name__} and "
                f"{tuple(tensor.shape)} in {str(source)!r}. Build the model with the configuration "
                "that the file was written with."
            )
    if prefix:
        rank_zero_info(f"The weights in {str(source)!r} are those of {prefix[:-1]!r}.")
    return named


def _missing(own: Mapping[str, Tensor], found: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Names below a prefix that the file lacks; of a tied weight one name is enough."""
    given = {id(own[prefix + name]) for name in found if prefix + name in own}
    return [name for name, t in own.items() if name.startswith(prefix) and id(t) not in given]


def _prefix(
    module: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor], source: Any
) -> str:
    prefixes = ["", *(f"{name}." for name, _ in module.named_modules() if name)]
    fits = [p for p in prefixes if all(p + name in own for name in found)]
    if not fits:
        return max(prefixes, key=lambda p: sum(p + name in own for name in found))
    fits = [p for p in fits if not _missing(own, found, p)] or fits
    places = {tuple(id(own[p + name]) for name in found): p for p in reversed(fits)}
    if "" not in fits and len(places) > 1:
        raise MisconfigurationException(
            f"The weights in {str(source)!r} must fit one submodule of {type(module).__name__}, "
            f"but their names fit {_some([p[:-1] for p in fits])}. Save them under their full "
            f"names, e.g. {fits[0] + next(iter(found))!r}."
        )
    return fits[0]


def _some(names: list[Any]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
