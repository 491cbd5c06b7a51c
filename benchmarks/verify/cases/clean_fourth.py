"""Correct tasks, a fourth set: structured losses, trees, frozen parts, masks, rarely used weights, nested batches."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from case import ACCUMULATE, BF16, DDP, FSDP, UNUSED, clean
from plain import CLASSES, PAD, VOCABULARY, WIDTH, Mlp, Plain, Sentences, pad, points, sentences
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from shardwise import Loss, Rows, Task


def made(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*columns, strict=True))


def there(lengths: Tensor, longest: int) -> Tensor:
    """Where a padded row is no padding."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


# Functions of numbers


class Splines(nn.Module):
    """Every edge is a piecewise linear function of its own; a sample touches two of its knots."""

    def __init__(self, inputs: int, outputs: int, knots: int = 9) -> None:
        super().__init__()
        self.height = nn.Parameter(0.2 * torch.randn(knots, inputs, outputs))
        self.slope = nn.Parameter(torch.randn(inputs, outputs) / inputs)
        self.register_buffer("knots", torch.linspace(-3, 3, knots), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        step = self.knots[1] - self.knots[0]
        near = (1 - (x[..., None] - self.knots).abs() / step).clamp(min=0)
        return torch.einsum("nik,kio->no", near, self.height) + x @ self.slope


@clean(
    "fourth-splines",
    "functions on edges",
    "a Kolmogorov-Arnold network: sums of learned splines; most knots have no gradient from a sample",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"name": "adam", "lr": 0.01},
)
class SplineNetwork(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Splines(8, 6), nn.LayerNorm(6), Splines(6, CLASSES))


class Oscillator(nn.Module):
    """A learned field that is followed for as long as each sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.pace = nn.Parameter(torch.tensor(0.5))
        self.bend = nn.Parameter(torch.zeros(()))

    def slope(self, state: Tensor) -> Tensor:
        return self.pace * self.field(state) - self.bend * state

    def forward(self, state: Tensor, gaps: Tensor) -> Tensor:
        states = []
        for gap in gaps.unbind(1):
            h = gap[:, None]
            one = self.slope(state)
            two = self.slope(state + h / 2 * one)
            three = self.slope(state + h / 2 * two)
            four = self.slope(state + h * three)
            state = state + h / 6 * (one + 2 * two + 2 * three + four)
            states.append(state)
        return torch.stack(states, dim=1)


@clean(
    "fourth-field",
    "differential equation",
    "Runge-Kutta through a learned field, at times of each sample's own; two parameters of shape (); seen points count",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
    fsdp=False,  # it cannot shard a parameter of shape ()
    gradient_clip=50.0,
    optimizer={"lr": 0.01, "weight_decay": 0.0},
)
class Field(Task):
    unit = "points"

    def _orbits(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, orbits = made(seed), []
        for _ in range(number):
            length = int(torch.randint(1, 9, (), generator=generator))
            gaps = 0.1 + 0.4 * torch.rand(length, generator=generator)
            start = torch.randn(2, generator=generator)
            angle, far = gaps.cumsum(0), 1e3 * (-0.1 * gaps.cumsum(0)).exp()
            turned = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2) @ start
            orbits.append({"start": start, "gaps": gaps, "seen": far[:, None] * turned})
        return orbits

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._orbits(self.config.seed, 250)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._orbits(self.config.seed + 61, 33)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        return {
            "start": torch.stack([sample["start"] for sample in samples]),
            "path": {
                "gaps": pad_sequence([sample["gaps"] for sample in samples], batch_first=True),
                "seen": pad_sequence([sample["seen"] for sample in samples], batch_first=True),
                "lengths": torch.tensor([len(sample["gaps"]) for sample in samples]),
            },
        }

    def count(self, batch: dict[str, Any]) -> int:
        return int(batch["path"]["lengths"].sum())

    def build_model(self) -> nn.Module:
        return Oscillator()

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        path = batch["path"]
        error = 1e3 * model(batch["start"], path["gaps"]) - path["seen"]
        seen = there(path["lengths"], error.shape[1])
        return Loss(sum=(error.square().sum(-1) * seen).sum(), count=self.count(batch))


class Quantiles(nn.Module):
    """Five quantiles that cannot cross: the lowest, and how far each is above the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(out=5)
        self.unit = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        lowest, above = self.body(x).split([1, 4], dim=1)
        return torch.cat([lowest, lowest + (F.softplus(above) * self.unit.exp()).cumsum(1)], dim=1)


@clean(
    "fourth-quantiles",
    "regression",
    "five quantiles by the pinball loss, which has no second derivative; half of the gradients are the same number",
    ("ddp-bf16", 2, DDP | BF16),
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    optimizer={"lr": 0.003},
)
class QuantileTask(Plain):
    shares = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])

    def _numbers(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, _ = points(seed, number)
        return rows(x, x[:, 0] + (0.3 + x[:, 1].abs()) * torch.randn(number, generator=made(seed + 2)))

    def train_data(self) -> list[tuple[Tensor, ...]]:
        return self._numbers(self.config.seed, 252)

    def valid_data(self) -> list[tuple[Tensor, ...]]:
        return self._numbers(self.config.seed + 71, 45)

    def build_model(self) -> nn.Module:
        return Quantiles()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        error = y[:, None] - model(x).float()
        shares = self.shares.to(error)
        return Loss(sum=torch.maximum(shares * error, (shares - 1) * error).sum(), count=len(x))

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Loss]:
        x, y = batch
        answers = model(x).float()
        inside = ((y > answers[:, 0]) & (y < answers[:, 4])).sum().float()
        return {**super().evaluate(model, batch), "inside": Loss(sum=inside, count=len(x))}


class Thresholds(nn.Module):
    def __init__(self, grades: int) -> None:
        super().__init__()
        self.body = Mlp(out=1)
        self.first = nn.Parameter(torch.full((1,), -1.5))
        self.gaps = nn.Parameter(torch.full((grades - 2,), -0.3))

    def forward(self, x: Tensor) -> Tensor:
        borders = torch.cat([self.first, self.first + self.gaps.exp().cumsum(0)])
        return self.body(x) - borders


@clean(
    "fourth-grades",
    "ordinal regression",
    "grades in an order, with learned borders; votes count: integers, of which some samples have none",
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
    optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9},
)
class Grades(Plain):
    grades = 6
    unit = "votes"

    def _voted(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        x, _ = points(seed, number)
        generator = made(seed + 3)
        samples = []
        for place, middle in enumerate((x[:, 0] + 2.5).clamp(0, 5)):
            voters = int(torch.randint(1, 7, (), generator=generator)) * (place % 20 != 3)
            votes = (middle + torch.randn(voters, generator=generator)).round().clamp(0, 5).long()
            samples.append({"x": x[place], "votes": torch.bincount(votes, minlength=self.grades)})
        return samples

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._voted(self.config.seed, 244)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._voted(self.config.seed + 81, 39)

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["votes"].sum())

    def build_model(self) -> nn.Module:
        return Thresholds(self.grades)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        votes = batch["votes"]
        above = votes.flip(1).cumsum(1).flip(1)[:, 1:]  # how many voted for more than each border
        logits = model(batch["x"])
        total = -(above * F.logsigmoid(logits) + (votes.sum(1, keepdim=True) - above) * F.logsigmoid(-logits)).sum()
        return Loss(sum=total, count=self.count(batch))


class Sines(nn.Module):
    """Sines of thirty times what comes in, as in SIREN."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 3)
        for place, layer in enumerate(self.layers):
            limit = 0.5 if place == 0 else math.sqrt(6 / width) / 30
            nn.init.uniform_(layer.weight, -limit, limit)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.head(x)


@clean(
    "fourth-sines",
    "coordinates",
    "the colour at a place, by sines of thirty times their inputs: lively gradients at a small rate",
    ("ddp-4", 4, DDP),
    optimizer={"name": "adam", "lr": 0.0005},
    scheduler={"name": "linear_warmup", "warmup_steps": 2},
)
class Coordinates(Task):
    def _pixels(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        places = torch.rand(number, 2, generator=made(seed)) * 2 - 1
        x, y = places.unbind(1)
        return rows(places, torch.stack([(7 * x).sin(), (5 * x * y).cos(), (x.square() + y.square() < 0.5).float()], 1))

    def train_data(self) -> list[tuple[Tensor, ...]]:
        return self._pixels(self.config.seed, 320)

    def build_model(self) -> nn.Module:
        return Sines()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        places, colours = batch
        return Loss(sum=(model(places) - colours).square().sum(), count=len(places))


# Structured answers


class Tagger(nn.Module):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.look = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.score = nn.Linear(WIDTH, tags)
        self.step = nn.Parameter(torch.zeros(tags, tags))
        self.begin = nn.Parameter(torch.zeros(tags))
        self.end = nn.Parameter(torch.zeros(tags))

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """How unlikely the tags of each text are, among all ways to tag it."""
        mask = tokens != PAD
        x = self.embed(tokens)
        scores = self.score(x + torch.tanh(self.look(x.transpose(1, 2)).transpose(1, 2) * mask[..., None]))
        here = scores.gather(2, tags[..., None]).squeeze(2)
        last = mask.sum(1) - 1
        path = self.begin[tags[:, 0]] + (here * mask).sum(1)
        path = path + (self.step[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]).sum(1)
        path = path + self.end[tags.gather(1, last[:, None]).squeeze(1)]
        every = self.begin + scores[:, 0]
        for place in range(1, tokens.shape[1]):
            further = torch.logsumexp(every[:, :, None] + self.step, dim=1) + scores[:, place]
            every = torch.where(mask[:, place, None], further, every)
        return torch.logsumexp(every + self.end, dim=1) - path


@clean(
    "fourth-random-field",
    "structured",
    "a conditional random field over padded texts: each text's tags among all ways to tag it; tokens count",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("fsdp-4", 4, FSDP),
)
class RandomField(Sentences):
    tags = 5

    def _tagged(self, texts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(text, (text + text.cumsum(0) % 2) % self.tags) for text in texts]

    def train_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._tagged(sentences(self.config.seed, 230, 1, 14))

    def valid_data(self) -> list[tuple[Tensor, Tensor]]:
        return self._tagged(sentences(self.config.seed + 91, 31, 6, 14))

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [pad([text for text, _ in samples]), pad([tags for _, tags in samples])]

    def count(self, batch: list[Tensor]) -> int:
        return int((batch[0] != PAD).sum())

    def build_model(self) -> nn.Module:
        return Tagger(self.tags)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=model(*batch).sum(), count=self.count(batch))


class Aligner(nn.Module):
    """Frames, labels, and what comes next where both are known."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.hear = nn.GRU(6, WIDTH, batch_first=True)
        self.said = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.embed = nn.Embedding(labels, WIDTH)
        self.joint = nn.Linear(WIDTH, labels)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(labels[:, :1]), labels], dim=1)
        heard, said = self.hear(frames)[0], self.said(self.embed(before))[0]
        return self.joint(torch.tanh(heard[:, :, None] + said[:, None])).log_softmax(-1)


@clean(
    "fourth-transducer",
    "speech",
    "a transducer: the sum over all alignments of frames and labels, by a table; labels count, a few samples have none",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    gradient_clip=20.0,
)
class Transducer(Task):
    kinds = 7
    unit = "labels"

    def _sounds(self, seed: int, number: int) -> list[dict[str, Tensor]]:
        generator, sounds = made(seed), []
        for place in range(number):
            length = int(torch.randint(2, 9, (), generator=generator))
            kinds = torch.randint(0, self.kinds, (length,), generator=generator)
            frames = F.one_hot(kinds, 7)[:, 1:] + 0.3 * torch.randn(length, 6, generator=generator)
            said = kinds[kinds > 0][:5]
            if place % 50 == 7:
                said = said[:0]
            sounds.append({"frames": frames, "said": said})
        return sounds

    def train_data(self) -> list[dict[str, Tensor]]:
        return self._sounds(self.config.seed, 180)

    def valid_data(self) -> list[dict[str, Tensor]]:
        return self._sounds(self.config.seed + 17, 21)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {
            "frames": pad_sequence([sample["frames"] for sample in samples], batch_first=True),
            "said": pad_sequence([sample["said"] for sample in samples], batch_first=True),
            "heard": torch.tensor([len(sample["frames"]) for sample in samples]),
            "words": torch.tensor([len(sample["said"]) for sample in samples]),
        }

    def count(self, batch: dict[str, Tensor]) -> int:
        return int(batch["words"].sum())

    def build_model(self) -> nn.Module:
        return Aligner(self.kinds)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        said, heard, words = batch["said"], batch["heard"], batch["words"]
        scores = model(batch["frames"], said)
        wait = scores[..., 0]
        speak = scores[:, :, :-1].gather(3, said[:, None, :, None].expand(-1, scores.shape[1], -1, 1)).squeeze(3)
        table: list[list[Tensor]] = []
        for time in range(scores.shape[1]):
            row: list[Tensor] = []
            for word in range(scores.shape[2]):
                ways = []
                if time:
                    ways.append(table[time - 1][word] + wait[:, time - 1, word])
                if word:
                    ways.append(row[word - 1] + speak[:, time, word - 1])
                row.append(torch.logsumexp(torch.stack(ways), 0) if ways else torch.zeros(len(said)))
            table.append(row)
        every = torch.stack([torch.stack(row, 1) for row in table], 1)
        sample = torch.arange(len(said))
        likely = every[sample, heard - 1, words] + wait[sample, heard - 1, words]
        return Loss(sum=-likely.sum(), count=self.count(batch))


class TreeCell(nn.Module):
    """Two children become one node; leaves have words instead."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.join = nn.Linear(2 * WIDTH, 5 * WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor, children: Tensor, levels: list[int]) -> Tensor:
        cell = self.embed(words[: levels[0]])
        state = torch.tanh(cell)
        begin = levels[0]
        for number in levels[1:]:
            left, right = children[begin : begin + number].unbind(1)
            into, keep_left, keep_right, out, new = self.join(torch.cat([state[left], state[right]], 1)).chunk(5, 1)
            joined = keep_left.sigmoid() * cell[left] + keep_right.sigmoid() * cell[right] + into.sigmoid() * new.tanh()
            cell = torch.cat([cell, joined])
            state = torch.cat([state, out.sigmoid() * joined.tanh()])
            begin += number
        return self.head(state)


@clean(
    "fourth-trees",
    "trees",
    "binary trees of any shape, from the leaves up, all of a micro-batch level by level; every node has a class and counts",
    ("ddp-4", 4, DDP),
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    optimizer={"lr": 0.005},
)
class Trees(Task):
    unit = "nodes"

    def _tree(self, leaves: int, generator: torch.Generator) -> Any:
        if leaves == 1:
            return int(torch.randint(1, VOCABULARY, (), generator=generator))
        left = int(torch.randint(1, leaves, (), generator=generator))
        return self._tree(left, generator), self._tree(leaves - left, generator)

    def _forest(self, seed: int, number: int) -> list[Any]:
        generator = made(seed)
        sizes = torch.randint(2, 12, (number,), generator=generator).tolist()
        return [self._tree(size, generator) for size in sizes]

    def train_data(self) -> list[Any]:
        return self._forest(self.config.seed, 220)

    def valid_data(self) -> list[Any]:
        return self._forest(self.config.seed + 7, 27)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        nodes: list[tuple[int, int, int, int, int]] = []  # height, word, left, right, sum of the leaves

        def add(tree: Any) -> int:
            if isinstance(tree, int):
                nodes.append((0, tree, -1, -1, tree))
            else:
                left, right = add(tree[0]), add(tree[1])
                height = 1 + max(nodes[left][0], nodes[right][0])
                nodes.append((height, 0, left, right, nodes[left][4] + nodes[right][4]))
            return len(nodes) - 1

        for tree in samples:
            add(tree)
        order = sorted(range(len(nodes)), key=lambda number: (nodes[number][0], number))
        place = {number: new for new, number in enumerate(order)} | {-1: -1}
        chosen = [nodes[number] for number in order]
        heights = [node[0] for node in chosen]
        return {
            "words": torch.tensor([node[1] for node in chosen]),
            "children": torch.tensor([[place[node[2]], place[node[3]]] for node in chosen]),
            "kinds": torch.tensor([node[4] % 3 for node in chosen]),
            "levels": [heights.count(height) for height in range(max(heights) + 1)],
        }

    def count(self, batch: dict[str, Any]) -> int:
        return len(batch["kinds"])

    def build_model(self) -> nn.Module:
        return TreeCell()

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        logits = model(batch["words"], batch["children"], batch["levels"])
        return Loss(sum=F.cross_entropy(logits, batch["kinds"], reduction="sum"), count=self.count(batch))


class Turns(nn.Module):
    """A word is six turns in a tree of 63 nodes; each text uses a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(64, WIDTH, mode="mean")
        self.nodes = nn.Embedding(64, WIDTH)
        self.register_buffer("bits", torch.arange(5, -1, -1))

    def forward(self, context: Tensor, word: Tensor) -> Tensor:
        path = (word[:, None] + 64) >> (self.bits + 1)
        turn = ((word[:, None] >> self.bits) & 1) * 2 - 1
        return -F.logsigmoid(turn * (self.words(context)[:, None] * self.nodes(path)).sum(-1)).sum(1)


@clean(
    "fourth-tree-of-words",
    "sparse embedding",
    "hierarchical softmax: a word is six turns; node 0 is never met, and no batch meets all others",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("zero1", 2, {"strategy": "zero1"}),
    optimizer={"lr": 0.02, "weight_decay": 0.0},
)
class TreeOfWords(Task):
    def train_data(self) -> list[tuple[Tensor, ...]]:
        generator = made(self.config.seed)
        word = (torch.rand(300, generator=generator).square() * 64).long()
        return rows((word[:, None] + torch.randint(1, 4, (300, 6), generator=generator)) % 64, word)

    def build_model(self) -> nn.Module:
        return Turns()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(sum=model(*batch).sum(), count=len(batch[1]))


# Pictures


class Masked(nn.Conv2d):
    """Sees what is above and to the left."""

    def __init__(self, inputs: int, outputs: int, width: int, itself: bool) -> None:
        super().__init__(inputs, outputs, width, padding=width // 2)
        mask = torch.ones(width, width)
        mask[width // 2, width // 2 + itself :] = 0
        mask[width // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


@clean(
    "fourth-pixels",
    "autoregressive pictures",
    "PixelCNN over bytes: convolutions whose masks are buffers, so half of their weights have no gradient; pixels count",
    ("ddp-bf16", 2, DDP | BF16),
    ("fsdp-4", 4, FSDP),
)
class Pixels(Task):
    unit = "pixels"

    def _pictures(self, seed: int, number: int) -> list[Tensor]:
        generator = made(seed)
        base = torch.randint(0, 4, (number, 1, 1), generator=generator)
        ramp = torch.arange(6) * torch.randint(0, 4, (number, 6, 1), generator=generator)
        return list(((base + ramp) % 4).to(torch.uint8))

    def train_data(self) -> list[Tensor]:
        return self._pictures(self.config.seed, 200)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            Masked(4, 16, 5, itself=False), nn.GELU(), Masked(16, 16, 3, itself=True), nn.GELU(), nn.Conv2d(16, 4, 1)
        )

    def count(self, batch: Tensor) -> int:
        return batch.numel()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        values = batch.long()
        logits = model(F.one_hot(values, 4).permute(0, 3, 1, 2).float()).float()
        return Loss(sum=F.cross_entropy(logits, values, reduction="sum"), count=self.count(batch))


def squashed(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return square / (1 + square) * x / (square + 1e-6).sqrt()


class Capsules(nn.Module):
    """Parts agree on a whole, in three rounds within each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 6 * 4)
        self.votes = nn.Parameter(0.3 * torch.randn(6, CLASSES, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        parts = squashed(self.parts(x).view(-1, 6, 4))
        votes = torch.einsum("npi,pcij->npcj", parts, self.votes)
        agreed = torch.zeros(votes.shape[:3], dtype=votes.dtype)
        for _ in range(3):
            wholes = squashed((agreed.softmax(2)[..., None] * votes).sum(1))
            agreed = agreed + (votes * wholes[:, None]).sum(-1)
        return (wholes.square().sum(-1) + 1e-8).sqrt()


@clean(
    "fourth-capsules",
    "routing",
    "capsules: three rounds of agreement within a sample, and a margin loss that is zero where it is right enough",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
)
class CapsuleTask(Plain):
    def build_model(self) -> nn.Module:
        return Capsules()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        lengths, truth = model(x), F.one_hot(y, CLASSES)
        missing, wrong = (0.9 - lengths).relu().square(), (lengths - 0.1).relu().square()
        return Loss(sum=(truth * missing + 0.5 * (1 - truth) * wrong).sum(), count=len(x))


class Pruned(nn.Linear):
    """The smaller weights are left out for good, by a mask that is made with the weights."""

    def __init__(self, inputs: int, outputs: int, kept: float) -> None:
        super().__init__(inputs, outputs)
        with torch.no_grad():
            order = self.weight.abs().flatten().argsort().argsort()
            mask = (order >= (1 - kept) * order.numel()).view(outputs, inputs)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.where(self.mask, self.weight, 0.0), self.bias)


@clean(
    "fourth-pruned",
    "masks",
    "four in five weights are pruned by a mask of bools, which follows from the first weights; theirs is no gradient",
    ("fsdp-4", 4, FSDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    optimizer={"lr": 0.01, "weight_decay": 0.1},
)
class PrunedTask(Plain):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Pruned(8, 48, 0.5), nn.GELU(), Pruned(48, 48, 0.2), nn.GELU(), Pruned(48, CLASSES, 0.4))


# Texts


class Retention(nn.Module):
    """Words fade by a factor of the layer's own."""

    def __init__(self, width: int, heads: int, fade: float) -> None:
        super().__init__()
        self.each, self.fade = width // heads, fade
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.after = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        normed = self.norm(x)
        q, k, v = (layer(normed).view(n, length, -1, self.each).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = torch.arange(length, device=x.device)
        gap = place[:, None] - place
        weights = torch.where(gap >= 0, self.fade ** gap.clamp(min=0), 0.0)
        kept = (q @ k.transpose(2, 3) / self.each**0.5 * weights.to(q.dtype)) @ v
        x = x + self.out(kept.transpose(1, 2).reshape(n, length, -1))
        return x + self.down(F.silu(self.up(self.after(x))))


class Retentive(nn.Module):
    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Retention(width, 4, 1 - 2.0 ** -(place + 1)) for place in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@clean(
    "fourth-retention",
    "decoder",
    "words that fade instead of attention, with a tensor plan of its own",
    ("tensor", 2, {"tensor": {"size": 2}}),
    ("pipeline", 2, {"pipeline": {"stages": 2}, "gradient_accumulation": 4}),
    ("ddp-bf16", 2, DDP | BF16),
    ("fsdp-4-accumulate", 4, FSDP | ACCUMULATE),
    optimizer={"lr": 0.003},
)
class RetentionTask(Sentences):
    def valid_data(self) -> list[Tensor]:
        return sentences(self.config.seed + 41, 29, 4, 24)

    def build_model(self) -> nn.Module:
        return Retentive()

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, Any] | None:
        if sequence_parallel:
            return None
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        down = {name: RowwiseParallel() for name in ("out", "down")}
        return {f"layers.{i}.{name}": how for i in range(len(model.layers)) for name, how in (columns | down).items()}


@clean(
    "fourth-biases-alone",
    "frozen parts",
    "everything is frozen but biases, norms and head; layers without a trained weight of two dimensions",
    ("fsdp-bf16", 2, FSDP | BF16),
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    optimizer={"lr": 0.01},
)
class BiasesAlone(Sentences):
    def build_model(self) -> nn.Module:
        model = Retentive(layers=3)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.ndim == 1 or name.startswith("head"))
        return model


class FusedEntropy(torch.autograd.Function):
    """The head and cross entropy in pieces of sixteen words; gradients are made on the way forward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = states.new_zeros(())
        of_states, of_weight = torch.zeros_like(states), torch.zeros_like(weight)
        for begin in range(0, len(states), 16):
            part, target = states[begin : begin + 16], targets[begin : begin + 16]
            logits = part @ weight.T
            total += F.cross_entropy(logits, target, reduction="sum")
            slope = logits.softmax(1) - F.one_hot(target, len(weight))
            of_states[begin : begin + 16] = slope @ weight
            of_weight += slope.T @ part
        ctx.save_for_backward(of_states, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_states, of_weight = ctx.saved_tensors
        return by * of_states, by * of_weight, None


class Fused(nn.Module):
    """Tied: words come in and go out by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states = self.rnn(self.embed(tokens))[0]
        real = targets != PAD
        return FusedEntropy.apply(states[real], self.embed.weight, targets[real])


@clean(
    "fourth-fused-entropy",
    "own function",
    "the model gives the sum itself: a function with gradients made ahead, in pieces, by the table that also reads words",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("fsdp-4", 4, FSDP),
)
class FusedTask(Sentences):
    def build_model(self) -> nn.Module:
        return Fused()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(sum=model(batch[:, :-1], batch[:, 1:]), count=self.count(batch))


class Predictive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 12))
        self.rnn = nn.GRU(12, WIDTH, batch_first=True)
        self.guess = nn.Linear(WIDTH, 12)
        self.sharpness = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.see(x)
        guess = self.guess(self.rnn(seen)[0])
        return self.sharpness.exp() * F.normalize(guess[:, :-1], dim=-1) @ F.normalize(seen, dim=-1).transpose(1, 2)


@clean(
    "fourth-within-a-series",
    "contrastive",
    "what comes next is told from all other moments of the same series: no other sample is needed; moments count",
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
)
class WithinSeries(Task):
    unit = "moments"

    def _series(self, seed: int, number: int) -> list[Tensor]:
        generator, series = made(seed), []
        for _ in range(number):
            length = int(torch.randint(3, 16, (), generator=generator))
            angle = torch.rand(5, generator=generator) * 6 + torch.arange(length)[:, None] * 0.7
            series.append(angle.sin() + 0.2 * torch.randn(length, 5, generator=generator))
        return series

    def train_data(self) -> list[Tensor]:
        return self._series(self.config.seed, 210)

    def valid_data(self) -> list[Tensor]:
        return self._series(self.config.seed + 19, 26)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return int((batch[1] - 1).sum())

    def build_model(self) -> nn.Module:
        return Predictive()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        x, lengths = batch
        scores = model(x).masked_fill(~there(lengths, x.shape[1])[:, None], -1e4)
        target = torch.arange(1, x.shape[1]).expand(len(x), -1)
        each = F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(len(x), -1)
        return Loss(sum=(each * there(lengths - 1, x.shape[1] - 1)).sum(), count=self.count(batch))


# Decisions


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(out=CLASSES + 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.body(x)
        return out[:, :CLASSES].log_softmax(1), out[:, CLASSES]


@clean(
    "fourth-policy",
    "reinforcement",
    "PPO on what an older policy did: ratios are clipped, so many samples have no gradient; values and entropy beside it",
    ("ddp-4", 4, DDP),
    ("ddp-accumulate", 2, DDP | ACCUMULATE),
    gradient_clip=0.5,
    optimizer={"name": "adam", "lr": 0.003, "eps": 1e-5},
)
class Proximal(Plain):
    def _played(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, y = points(seed, number)
        before = (0.7 * torch.randn(number, CLASSES, generator=made(seed + 4))).log_softmax(1)
        action = torch.multinomial(before.exp(), 1, generator=made(seed + 5)).squeeze(1)
        reward = (action == y).float()
        return rows(x, action, before.gather(1, action[:, None]).squeeze(1), reward - 0.3, reward)

    def train_data(self) -> list[tuple[Tensor, ...]]:
        return self._played(self.config.seed, 256)

    def valid_data(self) -> list[tuple[Tensor, ...]]:
        return self._played(self.config.seed + 23, 37)

    def build_model(self) -> nn.Module:
        return Policy()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, action, before, advantage, reward = batch
        scores, value = model(x)
        ratio = (scores.gather(1, action[:, None]).squeeze(1) - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = -(scores.exp() * scores).sum(1)
        return Loss(sum=(0.5 * (value - reward).square() - gain - 0.01 * entropy).sum(), count=len(x))


class Dueling(nn.Module):
    """What a state is worth, and what each action adds; a frozen copy of both says what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.worth, self.adds = Mlp(out=WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)
        online = nn.ModuleList([self.body, self.worth, self.adds])
        self.target = copy.deepcopy(online).requires_grad_(False)

    @staticmethod
    def values(x: Tensor, body: nn.Module, worth: nn.Module, adds: nn.Module) -> Tensor:
        x = F.relu(body(x))
        more = adds(x)
        return worth(x) + more - more.mean(1, keepdim=True)

    def forward(self, x: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        now = self.values(x, self.body, self.worth, self.adds)
        with torch.no_grad():
            best = self.values(after, self.body, self.worth, self.adds).argmax(1, keepdim=True)
            later = self.values(after, *self.target).gather(1, best).squeeze(1)
        return now, later


@clean(
    "fourth-dueling",
    "reinforcement",
    "double Q-learning from a log: the next action is the best of the trained network, its value that of a frozen copy",
    ("fsdp-accumulate", 2, FSDP | ACCUMULATE),
    ("ddp-4", 4, DDP),
    optimizer={"lr": 0.002},
)
class DuelingTask(Plain):
    def _log(self, seed: int, number: int) -> list[tuple[Tensor, ...]]:
        x, y = points(seed, number)
        generator = made(seed + 8)
        action = torch.randint(0, CLASSES, (number,), generator=generator)
        ended = torch.rand(number, generator=generator) < 0.2
        after = x + 0.3 * torch.randn(x.shape, generator=generator)
        return rows(x, action, (action == y).float(), after, ended)

    def train_data(self) -> list[tuple[Tensor, ...]]:
        return self._log(self.config.seed, 248)

    def valid_data(self) -> list[tuple[Tensor, ...]]:
        return self._log(self.config.seed + 29, 43)

    def build_model(self) -> nn.Module:
        return Dueling()

    def blocks(self, model: nn.Module) -> Any:
        return model.body.blocks

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, action, reward, after, ended = batch
        now, later = model(x, after)
        target = reward + 0.9 * torch.where(ended, 0.0, later)
        return Loss(
            sum=F.smooth_l1_loss(now.gather(1, action[:, None]).squeeze(1), target, reduction="sum"), count=len(x)
        )


# Chance that comes with the samples, and parts that are not always there


class WithNoise(Dataset):
    """Each reading has noise of its own, drawn from torch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i], "noise": {"hidden": torch.randn(16), "out": torch.randn(CLASSES)}}


class Bayesian(nn.Module):
    """A weight is a mean and a deviation; noise is that of the sums, so each sample brings its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.log_deviation = nn.Parameter(torch.full((outputs, inputs), -3.0))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        variance = F.linear(x.square(), (2 * self.log_deviation).exp())
        return F.linear(x, self.mean) + (variance + 1e-8).sqrt() * noise

    def from_prior(self) -> Tensor:
        variance = (2 * self.log_deviation).exp()
        return 0.5 * (variance + self.mean.square() - 1 - 2 * self.log_deviation).sum()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = Bayesian(8, 16), Bayesian(16, CLASSES)

    def forward(self, x: Tensor, noise: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.out(torch.tanh(self.hidden(x, noise["hidden"])), noise["out"])
        return logits, self.hidden.from_prior() + self.out.from_prior()


@clean(
    "fourth-variational",
    "Bayesian",
    "noise is drawn with the sample; how far the weights are from their prior is shared out over all samples of an epoch",
    ("ddp-4-accumulate", 4, DDP | ACCUMULATE),
    ("ddp-bf16", 2, DDP | BF16),
)
class VariationalTask(Plain):
    def train_data(self) -> Dataset:
        return WithNoise(*points(self.config.seed, self.samples))

    def valid_data(self) -> list[dict[str, Any]]:
        x, y = points(self.config.seed + 1000, 52)
        still = {"hidden": torch.zeros(16), "out": torch.zeros(CLASSES)}
        return [{"x": one, "y": label, "noise": still} for one, label in rows(x, y)]

    def build_model(self) -> nn.Module:
        return Variational()

    def count(self, batch: dict[str, Any]) -> int:
        return len(batch["y"])

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        logits, from_prior = model(batch["x"], batch["noise"])
        total = F.cross_entropy(logits.float(), batch["y"], reduction="sum")
        return Loss(sum=total + from_prior * len(batch["y"]) / self.samples, count=len(batch["y"]))


class Senses(nn.Module):
    """An encoder for each sense, called for the samples that have it, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.senses = nn.ModuleDict(
            {
                "words": nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum"),
                "picture": nn.Sequential(nn.Flatten(), nn.Linear(16, WIDTH), nn.Tanh()),
                "table": nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
                "odour": nn.Linear(3, WIDTH),
            }
        )
        self.nothing = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, senses: dict[str, dict[str, Tensor]], number: int) -> Tensor:
        x = self.nothing.expand(number, -1)
        for name, sense in senses.items():
            if len(sense["of"]):
                values = (sense["values"],) if name != "words" else (sense["values"], sense["begins"])
                x = x.index_add(0, sense["of"], self.senses[name](*values).to(x.dtype))
        return self.head(torch.tanh(x))


@clean(
    "fourth-senses",
    "many inputs",
    "words, pictures, tables and odours, of which a sample has some: nested dicts, names, encoders without gradient",
    ("ddp", 2, UNUSED),
    ("ddp-4", 4, UNUSED),
    ("ddp-accumulate", 2, UNUSED | ACCUMULATE),
    ddp=False,
)
class SensesTask(Task):
    def _things(self, seed: int, number: int) -> list[dict[str, Any]]:
        generator, things = made(seed), []
        for place in range(number):
            kind = int(torch.randint(0, 3, (), generator=generator))
            has = torch.rand(3, generator=generator) < 0.4
            thing: dict[str, Any] = {"name": f"{seed}-{place}", "number": place, "kind": kind, "senses": {}}
            if has[0]:
                length = int(torch.randint(1, 7, (), generator=generator))
                thing["senses"]["words"] = torch.randint(kind * 8, kind * 8 + 12, (length,), generator=generator)
            if has[1]:
                thing["senses"]["picture"] = torch.randn(4, 4, generator=generator) + kind
            if has[2]:
                thing["senses"]["table"] = torch.randn(5, generator=generator) * (1 + kind)
            if place % 40 == 3:
                thing["senses"]["odour"] = torch.randn(3, generator=generator) - kind
            things.append(thing)
        return things

    def train_data(self) -> list[dict[str, Any]]:
        return self._things(self.config.seed, 234)

    def valid_data(self) -> list[dict[str, Any]]:
        return self._things(self.config.seed + 37, 41)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        shapes = {"words": (0,), "picture": (0, 4, 4), "table": (0, 5), "odour": (0, 3)}
        senses: dict[str, dict[str, Tensor]] = {}
        for name, shape in shapes.items():
            here = [place for place, sample in enumerate(samples) if name in sample["senses"]]
            values = [samples[place]["senses"][name] for place in here]
            join = torch.cat if name == "words" else torch.stack
            senses[name] = {
                "of": torch.tensor(here, dtype=torch.long),
                "values": join(values) if values else torch.zeros(shape),
                "begins": torch.tensor([0, *(len(value) for value in values)][:-1], dtype=torch.long).cumsum(0),
            }
        return {
            "names": [sample["name"] for sample in samples],
            "numbers": torch.tensor([sample["number"] for sample in samples]),
            "kinds": torch.tensor([sample["kind"] for sample in samples]),
            "senses": senses,
        }

    def count(self, batch: dict[str, Any]) -> int:
        return len(batch["kinds"])

    def build_model(self) -> nn.Module:
        return Senses()

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        logits = model(batch["senses"], self.count(batch))
        return Loss(sum=F.cross_entropy(logits, batch["kinds"], reduction="sum"), count=self.count(batch))

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        right = model(batch["senses"], self.count(batch)).argmax(1) == batch["kinds"]
        kinds = {"right": right.float(), "kind": batch["kinds"]}
        return {**super().evaluate(model, batch), "kinds": Rows(batch["numbers"], kinds)}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        columns = rows["kinds"].columns
        right, kind = columns["right"].flatten(), columns["kind"].flatten()
        recall = [float(right[kind == one].mean()) for one in range(3) if (kind == one).any()]
        return {"recall": sum(recall) / len(recall)}
