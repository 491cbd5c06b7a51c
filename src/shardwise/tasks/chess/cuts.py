"""How much of the games is lost because they are longer than what the model is given of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.tasks.chess.tokens import GameTokenizer, MoveTokenizer

LOOKED_AT = 2000
"""Games that are made into tokens by a tokenizer that takes its time, spread evenly over all."""


def told_of_lengths(tokenizer: GameTokenizer, parts: Sequence[Sequence[str]], most: int) -> str:
    """What a person should know: how many games are cut after `most` tokens, and the share of all tokens that this loses."""
    number = sum(map(len, parts))
    every = 1 if isinstance(tokenizer, MoveTokenizer) else max(1, number // LOOKED_AT)
    lengths = np.array([n for part in parts for n in tokenizer.lengths(part[i] for i in range(0, len(part), every))])
    cut = int((lengths > most).sum())
    if not cut:
        return ""
    lost = float(np.maximum(lengths - most, 0).sum() / lengths.sum())
    exact = len(lengths) == number
    games = f"{cut:,} of {number:,}" if exact else f"about {cut / len(lengths):.1%} of the {number:,}"
    how = "" if exact else f" (by {len(lengths):,} games, spread evenly)"
    return (
        f"{games} games are longer than tokenizer.max_seq_len: {most} and are cut there: {_percent(lost)} of all tokens are "
        f"lost, the ends of games{how}"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
