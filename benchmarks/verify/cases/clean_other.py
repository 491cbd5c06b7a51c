"""Correct tasks on points, tables and graphs, and correct models with a part that is easy to get wrong."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, DDP, FSDP, UNUSED, clean
from plain import CLASSES, WIDTH, Mlp, Plain, points
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from shardwise import Loss, Task


@clean("weight-norm", "reparametrised", "weight norm on every matrix", ("ddp-accumulate", 2, DDP | ACCUMULATE))
class WeightNorm(Plain):
    def build_model(self) -> nn.Module:
        model = Mlp()
        for block in model.blocks:
            weight_norm(block)
        return model


@clean("spectral-norm", "reparametrised", "spectral norm: its vectors are buffers that change in every forward pass")
class SpectralNorm(Plain):
    def build_model(self) -> nn.Module:
        model = Mlp()
        for block in model.blocks:
            spectral_norm(block, n_power_iterations=3)
        return model


class Averaged(nn.Linear):
    """Keeps a moving average of its weight, which it uses in eval mode."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        self.register_buffer("average", self.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, self.average, self.bias)
        with torch.no_grad():
            self.average.lerp_(self.weight.detach(), 0.1)
        return super().forward(x)


@clean("ema", "EMA buffers", "a moving average of a weight, used in evaluation alone")
class Ema(Plain):
    def build_model(self) -> nn.Module:
        model = Mlp()
        model.head = Averaged(WIDTH, CLASSES)
        return model


class Centre(nn.Module):
    """Follows the mean of what passes; nothing that is trained looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.detach().float().mean(dim=0), 0.1)
        return x


@clean("watched-mean", "EMA buffers", "a buffer follows the features; no gradient depends on it")
class WatchedMean(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), Centre(), nn.Linear(WIDTH, CLASSES))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(out=WIDTH)
        self.kind, self.size = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.kind(h), self.size(h)


@clean(
    "two-losses",
    "two losses",
    "classes and a number at once, both sums over the samples",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
)
class TwoLosses(Plain):
    def build_model(self) -> nn.Module:
        return TwoHeads()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        kind, size = model(x)
        target = x.norm(dim=1, keepdim=True)
        total = F.cross_entropy(kind, y, reduction="sum") + 0.3 * F.smooth_l1_loss(size, target, reduction="sum")
        return Loss(sum=total, count=len(x))


class Gated(nn.Module):
    """x + gate · f(x), the gate a number that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.inner(x))


@clean(
    "scalar-gates", "scalar gates", "residual gates that are one number each, at a small learning rate",
    ("ddp-bf16", 2, DDP | BF16), ("ddp-4", 4, DDP), optimizer={"lr": 1e-5},
)  # fmt: skip
class ScalarGates(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), *(Gated() for _ in range(4)), nn.Linear(WIDTH, CLASSES))


@clean(
    "class-weights",
    "class weights",
    "weighted classes; the count is the sum of the weights",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class ClassWeights(Plain):
    weights = torch.tensor([1, 2, 5, 10])

    def count(self, batch: list[Tensor]) -> int:
        return int(self.weights[batch[1]].sum())

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        total = F.cross_entropy(model(x), y, weight=self.weights.to(x), reduction="sum")
        return Loss(sum=total, count=self.count(batch))


class Forked(nn.Module):
    """Rare samples, whose first number is above 1.8, also go through a branch of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.common = Mlp()
        self.rare = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out = self.common(x)
        rows = (x[:, 0] > 1.8).nonzero().squeeze(1)
        if len(rows):
            out = out.index_add(0, rows, self.rare(x[rows]).to(out.dtype))
        return out


@clean(
    "rare-branch", "unused branches", "a branch that most batches do not take",
    ("ddp", 2, UNUSED), ("ddp-4", 4, UNUSED), ("ddp-accumulate", 2, UNUSED | ACCUMULATE), ddp=False,
)  # fmt: skip
class RareBranch(Plain):
    def build_model(self) -> nn.Module:
        return Forked()


class Messages(nn.Module):
    """Nodes hear the mean of their neighbours; a graph is the sum of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.rounds = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        x = torch.tanh(self.first(nodes))
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        for layer in self.rounds:
            heard = torch.zeros_like(x).index_add(0, target, x[source]) / degree.unsqueeze(1).to(x.dtype)
            x = x + torch.tanh(layer(torch.cat([x, heard], dim=1))).to(x.dtype)
        out = self.head(x)
        return torch.zeros(graphs, 1, dtype=out.dtype).index_add(0, graph, out)


@clean("graphs", "graph network", "graphs of different sizes, joined in a batch", ("ddp-4", 4, DDP))
class Graphs(Task):
    def train_data(self):
        generator = torch.Generator().manual_seed(self.config.seed)
        graphs = []
        for _ in range(180):
            size = int(torch.randint(3, 9, (1,), generator=generator))
            nodes = torch.randn(size, 3, generator=generator)
            edges = torch.randint(0, size, (2, 2 * size), generator=generator)
            graphs.append((nodes, edges, nodes[edges[0], 0].mul(nodes[edges[1], 1]).mean().view(1)))
        return graphs

    def collate(self, samples: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = torch.tensor([len(nodes) for nodes, _, _ in samples])
        first = sizes.cumsum(0) - sizes
        edges = torch.cat([edges + begin for (_, edges, _), begin in zip(samples, first, strict=True)], dim=1)
        graph = torch.arange(len(samples)).repeat_interleave(sizes)
        return torch.cat([nodes for nodes, _, _ in samples]), edges, graph, torch.stack([y for _, _, y in samples])

    def count(self, batch: tuple[Tensor, ...]) -> int:
        return len(batch[3])

    def build_model(self) -> nn.Module:
        return Messages()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Loss:
        nodes, edges, graph, y = batch
        return Loss(sum=(model(nodes, edges, graph, len(y)) - y).square().sum(), count=len(y))


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 3)

    def forward(self, cloud: Tensor) -> Tensor:
        return self.head(self.each(cloud).amax(dim=1))


@clean(
    "point-clouds",
    "point network",
    "the same MLP for each point, then the largest",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Clouds(Task):
    def train_data(self):
        generator = torch.Generator().manual_seed(self.config.seed)
        scales = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.5, 1.0], [0.3, 0.3, 2.0]])
        return [(torch.randn(24, 3, generator=generator) * scales[i % 3], i % 3) for i in range(180)]

    def build_model(self) -> nn.Module:
        return PointNet()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count=len(batch[1]))


class Tastes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(60, 8), nn.Embedding(90, 8)
        self.person_bias, self.thing_bias = nn.Embedding(60, 1), nn.Embedding(90, 1)
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, person: Tensor, thing: Tensor) -> Tensor:
        product = (self.people(person) * self.things(thing)).sum(dim=1)
        return product + self.person_bias(person)[:, 0] + self.thing_bias(thing)[:, 0] + self.mean


@clean(
    "tastes",
    "recommender",
    "two tables and a product; SGD with momentum",
    ("ddp-4", 4, DDP),
    optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9},
)
class Recommender(Task):
    def train_data(self):
        g = torch.Generator().manual_seed(self.config.seed)
        people, things = torch.randint(0, 60, (300,), generator=g), torch.randint(0, 90, (300,), generator=g)
        return list(zip(people, things, ((people * 7 + things * 3) % 5).float(), strict=True))

    def build_model(self) -> nn.Module:
        return Tastes()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        person, thing, stars = batch
        return Loss(sum=(model(person, thing) - stars).square().sum(), count=len(stars))


@clean(
    "triplets",
    "siamese",
    "anchor, near and far come in one sample, through the same network",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
)
class Triplets(Task):
    def train_data(self):
        x, y = points(self.config.seed, 200)
        near = [int((y == y[i]).nonzero()[(i * 7) % int((y == y[i]).sum())]) for i in range(200)]
        far = [int((y != y[i]).nonzero()[(i * 5) % int((y != y[i]).sum())]) for i in range(200)]
        return [torch.stack([x[i], x[near[i]], x[far[i]]]) for i in range(200)]

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def build_model(self) -> nn.Module:
        return Mlp(out=6)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        anchor, near, far = model(batch.flatten(0, 1)).view(len(batch), 3, -1).unbind(1)
        return Loss(sum=F.triplet_margin_loss(anchor, near, far, reduction="sum"), count=len(batch))


class Again(nn.Module):
    """One block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.head(x)


@clean(
    "shared-block",
    "shared weights",
    "one block that is used three times",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("fsdp-4", 4, FSDP),
)
class SharedBlock(Plain):
    def build_model(self) -> nn.Module:
        return Again()


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(1 if not i else 12, 12, 2, dilation=2**i) for i in range(4))
        self.head = nn.Conv1d(12, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(F.pad(x, (layer.dilation[0], 0))))
        return self.head(x)


@clean(
    "series",
    "temporal convolutions",
    "dilated causal convolutions, a mixture of two normals per step",
    ("ddp-4", 4, DDP),
)
class Series(Task):
    unit = "steps"

    def train_data(self):
        g = torch.Generator().manual_seed(self.config.seed)
        steps = torch.randn(160, 40, generator=g)
        return [(0.3 * one.cumsum(0) + torch.sin(torch.arange(40) * 0.4)).unsqueeze(0) for one in steps]

    def count(self, batch: Tensor) -> int:
        return batch[..., 1:].numel()

    def build_model(self) -> nn.Module:
        return Causal()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        weight, mean, width = model(batch[..., :-1]).float().chunk(3, dim=1)
        normal = torch.distributions.Normal(mean, F.softplus(width) + 0.05)
        likelihood = (weight.log_softmax(dim=1) + normal.log_prob(batch[..., 1:])).logsumexp(dim=1)
        return Loss(sum=-likelihood.sum(), count=self.count(batch))


class Augmented(torch.utils.data.Dataset):
    """Draws from all three generators that are seeded for it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scale = random.uniform(0.7, 1.3)
        shift = float(np.random.normal(scale=0.2))
        return self.x[index] * scale + shift + 0.3 * torch.randn(8), self.y[index]


@clean(
    "augmented",
    "augmentation",
    "random, numpy.random and torch draw in __getitem__",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
)
class AugmentedPoints(Plain):
    def train_data(self):
        return Augmented(*points(self.config.seed, 200))


@clean("dropout", "dropout", "nn.Dropout and a residual MLP", ("ddp-bf16", 2, DDP | BF16), gradient_clip=0.5)
class Dropped(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 48),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(48, 48),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(48, CLASSES),
        )


@clean(
    "wide-range",
    "regression",
    "targets from 0.001 to 10000, Huber loss, clipped",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    gradient_clip=1.0,
)
class WideRange(Task):
    def train_data(self):
        x, _ = points(self.config.seed, 200)
        return [(one, torch.exp(one[:1] * 3)) for one in x]

    def build_model(self) -> nn.Module:
        return Mlp(out=1)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=F.huber_loss(model(batch[0]), batch[1], reduction="sum"), count=len(batch[0]))


class Pooled(nn.Module):
    """A learned question asks a bag of things; what is padded is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.ask = nn.Parameter(torch.randn(1, 1, 16) * 0.1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, bag: Tensor, empty: Tensor) -> Tensor:
        things = torch.tanh(self.embed(bag))
        ask = self.ask.expand(len(bag), -1, -1)
        return self.head(self.attention(ask, things, things, key_padding_mask=empty, need_weights=False)[0][:, 0])


@clean("bags", "sets", "attention over bags of different sizes, padded and masked", ("ddp-4", 4, DDP))
class Bags(Task):
    def train_data(self):
        g = torch.Generator().manual_seed(self.config.seed)
        bags = [torch.randn(int(torch.randint(1, 9, (1,), generator=g)), 4, generator=g) for _ in range(180)]
        return [(bag, bag.amax(dim=0).sum().view(1)) for bag in bags]

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        bags = nn.utils.rnn.pad_sequence([bag for bag, _ in samples], batch_first=True)
        sizes = torch.tensor([len(bag) for bag, _ in samples])
        return bags, torch.arange(bags.shape[1]) >= sizes[:, None], torch.stack([y for _, y in samples])

    def count(self, batch: tuple[Tensor, Tensor, Tensor]) -> int:
        return len(batch[2])

    def build_model(self) -> nn.Module:
        return Pooled()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        bags, empty, y = batch
        return Loss(sum=(model(bags, empty) - y).abs().sum(), count=len(y))


class PlainTensor(Mlp):
    """A fixed random matrix that is neither a parameter nor a buffer, drawn with the seed set."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.randn(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.turn)


@clean("plain-tensor", "plain tensors", "a random matrix as a plain attribute: the seed makes it the same everywhere")
class FixedTurn(Plain):
    def build_model(self) -> nn.Module:
        return PlainTensor()
