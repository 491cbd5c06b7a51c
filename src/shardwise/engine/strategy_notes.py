"""What a run says at its start about the way its model is spread: the effects that a user should know of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardwise.engine.session import Session
from shardwise.parallel.replicate import gradient_bytes


def strategy_notes(session: Session) -> Iterator[str]:
    training, spread = session.config.training, session.parts.spread
    whole = sum(each.numel() * each.element_size() for each in spread.whole.parameters() if each.requires_grad)
    if session.strategy == "dp":
        yield (
            "dp: one process drives all devices, copies the model at every step and waits for the slowest: it is the slow "
            "one. ddp computes the same"
        )
    if session.strategy in ("ddp", "zero1") and training.ddp.comm_hook != "none":
        before, after = gradient_bytes(spread.module, training.ddp)
        yield (
            f"gradients travel compressed ({training.ddp.comm_hook}): {_size(after)} per step and rank instead of "
            f"{_size(before)}, {1 - after / before:.0%} less; the numbers are not those of whole gradients"
        )
    if spread.pipeline is not None:
        blocks = " + ".join(str(b - a) for a, b in itertools.pairwise(spread.pipeline.edges))
        yield (
            f"pipeline: {spread.pipeline.options.schedule}, {blocks} blocks on {session.layout.size('stage')} stages, "
            f"{session.batching.accumulation} micro-batches per step: a rank is predicted to wait "
            f"{spread.pipeline.bubble:.0%} of the time; a larger training.gradient_accumulation lowers that"
        )
    sharded = session.strategy == "fsdp" and session.layout.size("shard") > 1
    if sharded and session.batching.accumulation > 1:
        yield (
            f"gradients are reduced after every micro-batch: no rank keeps more than its part of their {_size(whole)}"
            if spread.reduce_always
            else f"gradients are reduced on the last micro-batch: until then every rank keeps all {_size(whole)} of them; "
            "training.fsdp.reduce_every_micro_batch: true keeps a part only, and sends more"
        )


def _size(number: float) -> str:
    return f"{number / 2**20:.3g} MiB" if number >= 2**19 else f"{number / 2**10:.3g} KiB"
