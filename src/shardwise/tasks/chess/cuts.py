"""What is lost of the games when they become tokens: ends that are cut off, and what a tokenizer does not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.tasks.chess.tokens import GameTokenizer, MoveTokenizer, PretrainedTokenizer

LOOKED_AT = 2000
"""So many games are made into tokens by a tokenizer that takes its time, spread evenly over all."""
COUNTED = 100_000
"""So many where tokens are moves, which are only counted."""


def told_of_tokens(tokenizer: GameTokenizer, parts: Sequence[Sequence[str]], most: int) -> Iterator[str]:
    """What a person should know of the games of all parts, of which the model is given `most` tokens each."""
    number = sum(map(len, parts))
    every = -(-number // (COUNTED if isinstance(tokenizer, MoveTokenizer) else LOOKED_AT))
    looked_at = [part[index] for part in parts for index in range(0, len(part), every)]
    spread = f" (by {len(looked_at):,} games, spread evenly)" if every > 1 else ""
    lengths = np.array(tokenizer.lengths(looked_at))
    if cut := int((lengths > most).sum()):
        games = f"about {cut / len(lengths):.1%} of {number:,}" if spread else f"{cut:,} of {number:,}"
        lost = _percent(float(np.maximum(lengths - most, 0).sum() / lengths.sum()))
        yield (
            f"{games} games are longer than tokenizer.max_seq_len: {most} and are cut there: {lost} of all tokens are lost, the "
            f"ends of games{spread}"
        )
    if isinstance(tokenizer, PretrainedTokenizer) and (unknown := tokenizer.unknown_share(looked_at)):
        yield (
            f"{_percent(unknown)} of the tokens stand for what the tokenizer does not know{spread}: was it made for games in "
            f"another notation? The first game: {looked_at[0][:60]!r}"
        )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
