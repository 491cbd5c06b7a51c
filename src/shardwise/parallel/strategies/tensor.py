"""Tensor parallelism: the ranks of a group hold a part of every large matrix each, and compute on the same samples. The groups
shard the model among them as fsdp does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from shardwise.config.schema import Tensor as Options
from shardwise.errors import ConfigError
from shardwise.parallel.advice import Question, Suggestion
from shardwise.parallel.layout import Axes, group_size
from shardwise.parallel.memory import ModelSizes, Remedy, Shortage, StateBytes
from shardwise.parallel.recipe import ModelSpec
from shardwise.parallel.strategies.fsdp import FullyShardedDataParallel, sharding_axes


class TensorParallel(FullyShardedDataParallel):
    name = "tensor"
    compiles = False
    scales_loss = False

    @property
    def own(self) -> Options:
        """Its own block; `options` is how the groups shard."""
        return self.training.tensor or Options()

    def axes(self, ranks: int) -> Axes:
        """[replicate ×] shard × tensor"""
        machine = max(1, ranks // self.training.num_nodes)
        size = group_size("tensor.size", self.own.size or machine, ranks)
        return (*sharding_axes(self.options, ranks // size, self.training), ("tensor", size))

    def held_bytes(self, sizes: ModelSizes, ranks: int) -> StateBytes:
        size = dict(self.axes(ranks))["tensor"]
        sharded = super().held_bytes(sizes, ranks)
        return StateBytes(
            *(part / size for part in (sharded.weights, sharded.gradients, sharded.optimizer, sharded.gathered))
        )

    def suggestions(self, question: Question) -> Iterator[Suggestion]:
        lines = ["strategy: tensor", f"tensor: {{size: {max(question.tensor_sizes, default=0)}}}"]
        if question.tensor_sizes:
            yield Suggestion(self.name, lines, splits_blocks=True)

    def lighter(self, shortage: Shortage) -> Iterator[Remedy]:
        return iter(())

    def packing_problem(self, samples: str) -> str:
        if self.own.sequence_parallel:
            return f"training.tensor.sequence_parallel cuts the rows themselves, in the middle of a {samples}"
        return super().packing_problem(samples)

    def split(self, shape: nn.Module, spec: ModelSpec) -> None:
        styles = spec.tensor_plan(shape, self.layout.size("tensor"), self.own.sequence_parallel)
        if styles is None:
            raise ConfigError(
                "strategy tensor: this task or model does not say how its matrices are split (Task.tensor_plan). The nearest "
                "that works is strategy: fsdp, which splits any model"
            )
        try:
            parallelize_module(shape, self.layout.mesh["tensor"], dict(styles))
        except (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError) as error:
            raise ConfigError(
                f"strategy tensor: the task's tensor_plan cannot be applied to its model: {error}"
            ) from error
        self._refuse_uneven(shape)

    def _refuse_uneven(self, shape: nn.Module) -> None:
        """Of a matrix that does not divide, ranks have parts of different sizes, which no product of PyTorch's takes (torch
        2.13)."""
        for path, module in shape.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if not isinstance(module, nn.Linear) or not isinstance(parameter, DTensor):
                    continue
                for placement in parameter.placements:
                    size = self.layout.size("tensor")
                    if isinstance(placement, Shard) and parameter.shape[placement.dim] % size:
                        raise ConfigError(
                            f"strategy tensor: {path}.{name} of shape {list(parameter.shape)} does not divide over {size} ranks "
                            f"along its axis {placement.dim}, as the task's tensor_plan asks. Choose a model.* size that does, "
                            "another training.tensor.size, or strategy: fsdp, which splits any model"
                        )

    @property
    def shards(self) -> bool:
        return self.layout.data_size > 1

    @property
    def forward_clock(self) -> Literal["thread"]:
        return "thread"  # every layer waits for the others of its group

    def notes(self, micro_batches: int) -> Iterator[str]:
        return iter(())
