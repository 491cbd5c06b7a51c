"""Few different sizes for what is packed: compiled code is made for each, and memory is used again where sizes come again."""

from __future__ import annotations

from collections.abc import Sequence

PARTS = 64
"""A packed row is at most about one such part longer than what is in it."""


def packed_size(lengths: Sequence[int]) -> int:
    """Of a row that takes texts of these lengths end to end: more than all of them together."""
    tokens = sum(lengths)
    step = min(256, max(8, 1 << max(0, (tokens // PARTS).bit_length() - 1)))
    return (tokens // step + 1) * step


def packed_longest(lengths: Sequence[int], limit: int) -> int:
    """What the longest of them is said to be; a text may have `limit` tokens."""
    longest = max(lengths)
    return max(longest, min(_power_of_two_above(longest), limit))


def _power_of_two_above(number: int) -> int:
    return 1 << (number - 1).bit_length()
