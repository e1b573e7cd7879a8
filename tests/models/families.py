"""Models that address by index, and modules in several roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.registry import WIDTH, Arguments, linears, register, sequences, vectors

# ---- indices: graphs, tables, experts


def graphs(batch: int, nodes: int) -> Arguments:
    edges = torch.randint(0, nodes, (batch, 2 * nodes, 2))
    return (torch.randn(batch, nodes, WIDTH), edges), {"mask": torch.rand(batch, 2 * nodes) > 0.2}


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        messages = self.message(torch.cat([x[source], x.index_select(0, target)], dim=-1))
        messages = messages * mask.unsqueeze(-1)
        total = torch.zeros_like(x).index_add_(0, target, messages)
        count = x.new_zeros(x.shape[0]).scatter_add_(0, target, mask.to(x.dtype))
        return self.update(total / count.clamp_min(1).unsqueeze(-1), x)


@register(graphs, ((4, 6), (3, 5)))
class GraphNetwork(nn.Module):
    """Graphs of a batch as one, nodes addressed by index."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MessagePassing() for _ in range(3))
        self.edge = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, edges: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        b, n, w = x.shape
        offsets = torch.arange(b, device=x.device)[:, None] * n
        source, target = ((edges[..., k] + offsets).flatten() for k in (0, 1))
        x, flat = x.reshape(b * n, w), mask.flatten()
        for layer in self.layers:
            x = layer(x, source, target, flat)
        nodes = x.view(b, n, w)
        ends = torch.gather(nodes, 1, edges[..., :1].expand(-1, -1, w))
        return self.head(nodes.amax(1)), self.edge(ends).squeeze(-1).masked_fill(~mask, 0.0)


def clicks(batch: int, length: int) -> Arguments:
    bags = torch.randint(0, 50, (batch, 3, length))
    return (torch.randn(batch, WIDTH), bags, torch.randint(0, 20, (batch, 2))), {}


@register(clicks)
class Recommender(nn.Module):
    """Large tables, small networks, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.tables = nn.ModuleDict({name: nn.Embedding(20, 8) for name in ("user", "item")})
        pairs = torch.tril_indices(6, 6, offset=-1)
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])
        self.top = nn.Sequential(nn.Linear(8 + 15, 12), nn.ReLU(), nn.Linear(12, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, bags: Tensor, ids: Tensor) -> Tensor:
        batch, _, length = bags.shape
        features = [self.bottom(dense)]
        offsets = torch.arange(0, batch * length, length, device=bags.device)
        for bag, numbers in zip(self.bags, bags.unbind(1), strict=True):
            features.append(bag(numbers.flatten(), offsets))
        features += [table(ids[:, k]) for k, table in enumerate(self.tables.values())]
        stacked = torch.stack(features, dim=1)
        products = torch.bmm(stacked, stacked.mT)[:, self.rows, self.columns]
        return self.top(torch.cat([features[0], products], dim=1)).squeeze(1)


class StackedExperts(nn.Module):
    """Each token goes through its two best experts, whose weights are one tensor."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.w1 = nn.Parameter(torch.randn(count, WIDTH, 24) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(count, 24, WIDTH) / 24**0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        weights = torch.zeros(*x.shape[:-1], len(self.w1), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, share)
        hidden = torch.einsum("btw,ewh->ebth", x, self.w1).relu()
        return x + torch.einsum("ebth,ehw,bte->btw", hidden, self.w2, weights)


@register()
class MixtureOfExperts(nn.Module):
    """Experts whose weights are one tensor, two of them for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StackedExperts() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x


# ---- one module in several roles


@register(
    lambda b, t: ((torch.randn(b, WIDTH), torch.randn(b, WIDTH)), {}),
    ((4, 1), (3, 1)),
)
class SiameseEncoder(nn.Module):
    """One encoder called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in linears(4)))
        self.head = nn.Bilinear(WIDTH, WIDTH, 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.encoder(left), self.encoder(right)
        return self.head(a, b), F.cosine_similarity(a, b)


@register(vectors, ((4, 1), (3, 1)))
class NeuralODE(nn.Module):
    """A solver of fourth order that calls one network all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.encode, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def slope(self, t: float, x: Tensor) -> Tensor:
        return self.field(F.pad(x, (0, 1), value=t))

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.encode(x), 0.5
        for t in (0.0, 0.5):
            k1 = self.slope(t, x)
            k2 = self.slope(t + h / 2, x + h / 2 * k1)
            k3 = self.slope(t + h / 2, x + h / 2 * k2)
            k4 = self.slope(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(x)


@register(vectors, ((4, 1), (3, 1)))
class HyperNetwork(nn.Module):
    """Weights of one network are the output of another."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH * WIDTH))
        self.codes = nn.ParameterDict({name: torch.randn(4) for name in ("first", "second")})
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)])
        self.between, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for code, bias in zip(self.codes.values(), self.biases, strict=True):
            weight = self.make(code).view(WIDTH, WIDTH) / WIDTH
            x = self.between(F.linear(x, weight, bias).tanh())
        return self.head(x)


def task(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {"task": "left" if length > 6 else "right"}


@register(task)
class Dispatch(nn.Module):
    """Modules in dicts of dicts, chosen by a string."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in linears(3)))
        self.heads = nn.ModuleDict(
            {
                name: nn.ModuleDict({"body": nn.Linear(WIDTH, WIDTH), "out": nn.Linear(WIDTH, k)})
                for name, k in (("left", 3), ("right", 5))
            }
        )

    def forward(self, x: Tensor, task: str) -> dict[str, Any]:
        head = self.heads[task]
        return {"task": task, "out": head["out"](head["body"](self.trunk(x)).relu())}


@dataclass
class Answer:
    hidden: Tensor
    scores: list[Tensor]
    count: int = 0
    extra: Tensor | None = None


class AnswerBlock(nn.Module):
    """Takes and gives an object of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, state: Answer) -> Answer:
        hidden = self.layer(state.hidden).tanh()
        return Answer(hidden, [*state.scores, self.score(hidden)], state.count + 1)


@register(sequences)
class Dataclasses(nn.Module):
    """Modules that take and give dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AnswerBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Answer:
        state = Answer(x, [])
        for block in self.blocks:
            state = block(state)
        return state
