"""Rows of tokens: random ones, on which nothing can be learned, and ones that follow a rule."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.contenders.problem import SEED

FIRST_TOKEN = 3
"""0 to 2 are padding, begin and end in the config of the model; none of them is among the tokens."""
SUCCESSORS = 8


def random_tokens(rows: int, sequence: int, vocabulary: int) -> Tensor:
    return torch.randint(FIRST_TOKEN, vocabulary, (rows, sequence), generator=torch.Generator().manual_seed(SEED))


def learnable_tokens(rows: int, sequence: int, vocabulary: int) -> Tensor:
    """A chain: every token is followed by one of eight, with chances of its own, drawn once from the seed."""
    generator = torch.Generator().manual_seed(SEED)
    words = vocabulary - FIRST_TOKEN
    successors = torch.randint(0, words, (words, SUCCESSORS), generator=generator)
    chances = torch.rand(words, SUCCESSORS, generator=generator).square().cumsum(dim=1)
    chances /= chances[:, -1:]
    token = torch.randint(0, words, (rows,), generator=generator)
    columns = []
    for _ in range(sequence):
        columns.append(token)
        draw = torch.rand(rows, 1, generator=generator)
        choice = (chances[token] < draw).sum(dim=1).clamp(max=SUCCESSORS - 1)
        token = successors[token, choice]
    return FIRST_TOKEN + torch.stack(columns, dim=1)
