"""Small correct tasks that the bugs of this folder each change in one place."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Loss, Task

CLASSES = 4
WIDTH = 24


def rank() -> int:
    """As users ask for it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def points(seed: int, number: int, features: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, features, generator=generator)
    truth = torch.randn(features, CLASSES, generator=torch.Generator().manual_seed(12345))
    return x, (x @ truth + torch.randn(number, CLASSES, generator=generator)).argmax(dim=1)


class Mlp(nn.Module):
    def __init__(self, features: int = 8, out: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(features, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, out)

    def features(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Plain(Task):
    """Four classes of points."""

    samples = 240

    def train_data(self):
        x, y = points(self.config.seed, self.samples)
        return list(zip(x, y, strict=True))

    def valid_data(self):
        x, y = points(self.config.seed + 1000, 52)
        return list(zip(x, y, strict=True))

    def build_model(self) -> nn.Module:
        return Mlp()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(sum=F.cross_entropy(model(x), y, reduction="sum"), count=len(x))


VOCABULARY = 32
PAD = 0


def sentences(seed: int, number: int, shortest: int, longest: int) -> list[Tensor]:
    """Of different lengths, without PAD in them; each token follows from the one before it, nearly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (number,), generator=generator).tolist()
    texts = []
    for length in lengths:
        start = int(torch.randint(1, VOCABULARY, (1,), generator=generator))
        steps = torch.randint(1, 4, (length,), generator=generator).cumsum(0)
        texts.append((start + steps) % (VOCABULARY - 1) + 1)
    return texts


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)


class Words(nn.Module):
    """The next token from this one and a recurrent state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class Sentences(Task):
    """Next tokens; every token that is no padding counts."""

    unit = "tokens"
    shortest, longest = 4, 24

    def train_data(self):
        return sentences(self.config.seed, 240, self.shortest, self.longest)

    def build_model(self) -> nn.Module:
        return Words()

    def collate(self, samples: list[Tensor]) -> Tensor:
        return pad(samples)

    def count(self, batch: Tensor) -> int:
        return int((batch[:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        logits = model(batch[:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        return Loss(sum=total, count=self.count(batch))
