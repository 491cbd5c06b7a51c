"""An evaluation in the middle of a run, watched: what it gives, and what it changes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.config import Batching
from shardwise.data import GlobalOrder, Reader, StepLoader
from shardwise.data.loader import MicroBatch
from shardwise.data.seeding import seed_everything
from shardwise.engine.evaluate import run_evaluation
from shardwise.engine.run import Run
from shardwise.errors import ShardwiseError
from shardwise.tasks import Loss
from shardwise.verify.contents import digest, local, whole
from shardwise.verify.names import canonical
from shardwise.verify.plain_state import PlainState, attributes_of, settings_of


class Evaluation:
    """On this rank."""

    def __init__(self, run: Run, samples: int) -> None:
        """`samples`: at most, that are evaluated."""
        self.run, self.samples = run, samples
        self._parameters: dict[str, Tensor] = dict(run.strategy.module.named_parameters())
        self._names = {id(each): canonical(name) for name, each in self._parameters.items()}
        self._own: dict[str, list[float]] = {}
        self._seeds: tuple[int, ...] = ()
        """To evaluate one micro-batch with."""
        self._reseeds = False

    def look(self, *, thorough: bool, regroup: bool) -> dict[str, Any]:
        """`thorough`: whether it gives the same once more, and leaves the seeds alone. `regroup`: whether it does in other
        micro-batches, and with another seed. No other ranks may be there."""
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
            reseeded = thorough and self._reseeds_anything()
            regrouped = (
                self._once_more_by_hand(batch_size=self._odd_size) if regroup and run.task.loss_is_a_sum else None
            )
            redrawn = self._once_more_by_hand(seed=1) if regroup else None
        except Exception as error:
            if run.world.size > 1 and not isinstance(error, ShardwiseError):  # which is the same on every rank
                raise
            return {"error": str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"}
        return {
            "metrics": metrics,
            "again": again,
            "own": own,
            "changed": changed,
            "attributes": attributes,
            "reseeded": reseeded,
            "regrouped": regrouped,
            "regrouped_by": self._odd_size,
            "redrawn": redrawn,
        }

    def add(self, micro: MicroBatch, results: Mapping[str, Any]) -> None:
        """What one micro-batch gave."""
        if self.run.layout.counts and not micro.request.borrowed:
            for name, each in results.items():
                if isinstance(each, Loss):
                    total = self._own.setdefault(name, [0.0, 0.0])
                    total[0] += float(each.sum)
                    total[1] += float(each.count)
        if self._seeds:
            seeds, self._seeds = self._seeds, ()
            one, other = (self._drawn_after(micro, seed) for seed in seeds)
            self._reseeds = any(mine == theirs for mine, theirs in zip(one, other, strict=True))

    def _once_more(self) -> dict[str, float] | None:
        self._own = {}
        return self.run.evaluate()

    @property
    def _size(self) -> int:
        return int(self.run.config.training.batch_size)

    @property
    def _odd_size(self) -> int:
        """Another size, with no sample left alone at the end: batch norm that trains cannot take one."""
        samples = min(len(self.run.valid_data), self.samples)
        return next((size for size in range(max(2, self._size // 2 - 3), self._size) if samples % size != 1), 1)

    def _once_more_by_hand(self, *, batch_size: int | None = None, seed: int = 0) -> dict[str, float] | None:
        """As one process, in micro-batches of another size; or what is drawn in it comes from another seed."""
        run, data = self.run, self.run.valid_data
        batches = StepLoader(
            Reader(data, run.task.collate, lambda _: 0, run.config.seed, name="validation"),
            GlobalOrder(min(len(data), self.samples), run.config.seed, shuffle=False),
            Batching(world=1, batch_size=batch_size or self._size, accumulation=1),
            0,
            run.world.device,
            run.config.data,
        )
        parts = replace(run.parts, config=run.config.model_copy(update={"seed": run.config.seed + seed}))
        with tempfile.TemporaryDirectory() as pictures:
            return run_evaluation(parts, batches, Path(pictures), run.steps_done)

    def _reseeds_anything(self) -> bool:
        """Whether what was drawn before a micro-batch makes no difference to what is drawn after it: a seed was set in it."""
        self._seeds = (1, 2)
        self._once_more()
        return self._reseeds

    def _drawn_after(self, micro: MicroBatch, seed: int) -> list[str]:
        seed_everything(seed)
        self.run.parts.task.evaluate(self.run.model, micro.inputs)
        return [digest(torch.get_rng_state()), repr(random.random()), repr(np.random.random())]

    def _state(self) -> dict[str, str]:
        """Fingerprints of weights, buffers, moments and settings."""
        module = self.run.strategy.module
        found = {f"weight {name}": digest(each) for name, each in whole(self._weights()).items()}
        found |= {f"buffer {canonical(name)}": digest(local(each)) for name, each in module.named_buffers()}
        for each, values in self.run.parts.optimizer.state.items():
            found |= {
                f"{key} of {self._names.get(id(each), 'a parameter')}": digest(local(value))
                for key, value in values.items()
                if isinstance(value, Tensor)
            }
        return found | settings_of(module)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """By name, as they are now; under fsdp an evaluation leaves some put together, and cast: of these, the shards."""
        for name, now in self.run.strategy.module.named_parameters():
            held = self._parameters.get(name)
            yield name, held if isinstance(held, DTensor) and not isinstance(now, DTensor) else now
