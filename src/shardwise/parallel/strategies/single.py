"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.kernels.low_precision_weights import LowPrecisionWeights
from shardwise.parallel.advice import Question, Suggestion
from shardwise.parallel.layout import Layout
from shardwise.parallel.memory import Remedy, Shortage
from shardwise.parallel.recipe import ModelSpec, copies_dtype, whole_model
from shardwise.parallel.strategies.fsdp import sharded_instead
from shardwise.parallel.strategy import Strategy


class Single(Strategy):
    name = "single"
    one_process = True
    records_graphs = True

    def suggestions(self, question: Question) -> Iterator[Suggestion]:
        if question.machines.devices == 1:
            yield Suggestion(self.name, [f"strategy: {self.name}"], self.held_bytes(question.sizes, 1))

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        return sharded_instead(self, shortage)

    def wrap(self, spec: ModelSpec, layout: Layout) -> None:
        self.layout = layout
        self.module, self.regions = whole_model(spec, self.training, layout.world)
        self.model = self.module
        if dtype := copies_dtype(spec, self.training, self.module):
            self.low_precision = LowPrecisionWeights(self.module, dtype)
            self.low_precision.collect_as_they_come()
