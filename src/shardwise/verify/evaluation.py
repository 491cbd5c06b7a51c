"""An evaluation in the middle of a run, watched: what it gives, and what it changes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.loader import MicroBatch
from shardwise.engine.run import Run
from shardwise.errors import ShardwiseError
from shardwise.tasks import Loss
from shardwise.verify.contents import digest, local
from shardwise.verify.names import canonical
from shardwise.verify.plain_state import PlainState, attributes_of, settings_of


class Evaluation:
    """On this rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._own: dict[str, list[float]] = {}
        self._states: list[tuple[str, ...]] = []
        self._shift = False

    def look(self, *, thorough: bool) -> dict[str, Any]:
        """`thorough`: whether it gives the same once more, and leaves the seeds alone. No other ranks may be there."""
        run = self.run
        if run.valid_data is None or not len(run.valid_data):
            return {}
        module = run.strategy.module
        plain, before = PlainState(run.task, {type(each) for each in module.modules()}), self._state()
        held = attributes_of(module)
        try:
            metrics = run.evaluate()
            own = self._own
            now = self._state()
            changed = [name for name in now if before.get(name) != now[name]]
            attributes = [
                name for name, each in attributes_of(module).items() if held.get(name) != each
            ] + plain.changed()
            again = self._once_more() if thorough else metrics
            reseeded = thorough and len(self._states) > 1 and self._reseeded()
        except ShardwiseError as error:  # the same on every rank
            return {"error": str(error)}
        return {
            "metrics": metrics,
            "again": again,
            "own": own,
            "changed": changed,
            "attributes": attributes,
            "reseeded": reseeded,
        }

    def add(self, micro: MicroBatch, results: Mapping[str, Any]) -> None:
        """What one micro-batch gave."""
        if self.run.layout.counts and not micro.request.borrowed:
            for name, each in results.items():
                if isinstance(each, Loss):
                    total = self._own.setdefault(name, [0.0, 0.0])
                    total[0] += float(each.sum)
                    total[1] += float(each.count)
        self._states.append(_generators())
        if self._shift and len(self._states) == 1:
            random.random(), np.random.random(), torch.rand(1)

    def _once_more(self) -> dict[str, float] | None:
        self._own, self._states = {}, []
        return self.run.evaluate()

    def _reseeded(self) -> bool:
        """Whether what is drawn before makes no difference to what is drawn after a micro-batch: then a seed was set in it."""
        before = self._states
        self._shift = True
        self._once_more()
        self._shift = False
        return any(
            one == other
            for pair in zip(before[1:], self._states[1:], strict=True)
            for one, other in zip(*pair, strict=True)
        )

    def _state(self) -> dict[str, str]:
        """Fingerprints of this rank's weights, buffers, moments and settings."""
        module = self.run.strategy.module
        names = {id(each): canonical(name) for name, each in module.named_parameters()}
        found = {f"weight {canonical(name)}": digest(local(each.detach())) for name, each in module.named_parameters()}
        found |= {f"buffer {canonical(name)}": digest(local(each)) for name, each in module.named_buffers()}
        for each, values in self.run.parts.optimizer.state.items():
            found |= {
                f"{key} of {names.get(id(each), 'a parameter')}": digest(local(value))
                for key, value in values.items()
                if isinstance(value, Tensor)
            }
        return found | settings_of(module)


def _generators() -> tuple[str, ...]:
    state = np.random.get_state()
    return (
        digest(torch.get_rng_state()),
        repr((state[0], hash(state[1].tobytes()), *state[2:])),  # type: ignore[index]
        str(hash(random.getstate())),
    )
