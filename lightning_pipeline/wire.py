"""Tensors from one rank of a pipeline to another, as few messages as may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.boundary import as_it_is
from lightning_pipeline.steps.pending import TensorMeta

PACKED = 1 << 16
"""Tensors of fewer bytes travel together: a message costs as much as copying some 100 kB."""

_ALIGNED = 16
_LAYOUTS = 8
"""Most messages of one parcel have tags of their own."""


class Parcel:
    """Tensors that travel together: small ones in one message, each large one in its own.

    Args:
        metas: What the tensors are like; both ends know it.
    """

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas = tuple(metas)
        small = [i for i, meta in enumerate(self._metas) if meta.nbytes < PACKED]
        # one alone needs no copy
        self._small = small if len(small) > 1 else []
        self._large = [i for i in range(len(self._metas)) if i not in self._small]
        self._places: dict[int, slice] = {}
        self._size = 0
        for i in self._small:
            self._places[i] = slice(self._size, self._size + self._metas[i].nbytes)
            self._size += math.ceil(self._metas[i].nbytes / _ALIGNED) * _ALIGNED

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The messages that carry ``tensors``."""
        messages = [as_it_is(tensors[i].detach()).contiguous() for i in self._large]
        if self._small:
            box = torch.empty(self._size, dtype=torch.uint8, device=tensors[0].device)
            for place, tensor in zip(self._open(box), self._packed(tensors), strict=True):
                place.copy_(tensor.detach())
            messages.append(box)
        return messages

    def _packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[i] for i in self._small]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Room for the messages."""
        metas = [self._metas[i] for i in self._large]
        messages = [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas]
        if self._small:
            messages.append(torch.empty(self._size, dtype=torch.uint8, device=device))
        return messages

    def unpack(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in messages that have arrived."""
        found = dict(zip(self._large, messages, strict=False))
        if self._small:
            # each counts its own writes, although they share memory
            opened = [place.data for place in self._open(messages[-1])]
            found.update(zip(self._small, opened, strict=True))
        return [found[i] for i in range(len(self._metas))]

    def _open(self, box: Tensor) -> list[Tensor]:
        return [
            box[self._places[i]].view(self._metas[i].dtype).view(self._metas[i].shape)
            for i in self._small
        ]


class Wire:
    """Messages between the ranks of one group, under way while the ranks go on.

    Args:
        group: The group, whose ranks are those of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # gloo pairs messages by their tags and posts them at once; NCCL knows no tags
        self.by_tag = dist.get_backend(group) == "gloo"

    def send(self, messages: Sequence[Tensor], peer: int, tag: int) -> list[Any]:
        """Sends; what is given can be waited for."""
        if not self.by_tag:
            return self._batch(dist.isend, messages, peer)
        return [
            self._group.send([message], peer, tag * _LAYOUTS + i)
            for i, message in enumerate(messages)
        ]

    def receive(self, messages: Sequence[Tensor], peer: int, tag: int) -> list[Any]:
        """Fills ``messages``, which are complete when what is given has been waited for."""
        if not self.by_tag:
            return self._batch(dist.irecv, messages, peer)
        return [
            self._group.recv([message], peer, tag * _LAYOUTS + i)
            for i, message in enumerate(messages)
        ]

    def _batch(self, operation: Any, messages: Sequence[Tensor], peer: int) -> list[Any]:
        group = self._group
        parts = [dist.P2POp(operation, m, group=group, group_peer=peer) for m in messages]
        return list(dist.batch_isend_irecv(parts)) if parts else []
