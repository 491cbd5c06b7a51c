"""What speaks against packing samples, whichever task packs them. A task adds what is its own."""

from __future__ import annotations

REFUSED = [
    (["training.strategy=pipeline"], "strategy pipeline cuts a micro-batch along its rows"),
    (["training.strategy=dp"], "strategy dp cuts a micro-batch along its rows"),
    (["training.tensor={sequence_parallel: true}"], "sequence_parallel cuts the rows themselves"),
]
"""Overrides, and why `tokenizer.packing: true` is refused with them."""
BY_DEFAULT = [
    ([], True, True),
    ([], False, False),
    (["tokenizer.packing=false"], True, False),
    (["training.tensor={}"], True, True),
    *((overrides, True, False) for overrides, _ in REFUSED),
]
"""Overrides, whether there is CUDA, and whether samples are packed."""
