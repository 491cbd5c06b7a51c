"""What is trained, told once: every tool gets the same weights, the same samples in the same order and the same loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from benchmarks.gpu.contenders.meter import Figures, Meter, Plan
from shardwise.data import GlobalOrder, Samples

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEED = 0
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    """The model, on the device, with the weights that all contenders begin with."""
    samples: Sequence[Any]
    """In the order in which they are used."""
    loss: Callable[[nn.Module, Any], Tensor]
    """The mean loss of a batch."""
    batch: int
    units: Callable[[int], float]
    """What step n, from 0, counts: tokens or volumes."""
    learning_rate: float = LEARNING_RATE

    def loader(self) -> DataLoader[Any]:
        on_host = not any(tensor.is_cuda for tensor in _tensors(self.samples[0]))
        return DataLoader(self.samples, self.batch, pin_memory=on_host and DEVICE.type == "cuda")  # type: ignore[arg-type]

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        fused = DEVICE.type == "cuda"
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=WEIGHT_DECAY, fused=fused)


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[Meter], None]
    batch: int
    plan: Plan
    flops_per_unit: float | None = None
    """6 × the weights that a token meets + 12 × layers × hidden × sequence; None where no formula is known."""


@dataclass(frozen=True)
class Row:
    """What came of a contender."""

    contender: Contender
    figures: Figures | None = None
    failed: str = ""
    """The first line of the error."""


@dataclass(frozen=True)
class Work:
    title: str
    unit: str
    contenders: list[Contender]
    study: Callable[[list[Row], Path | None], list[str]] = lambda rows, out: []
    """What there is to say of all rows together, in markdown; pictures go beside the file."""


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    tiny: bool = False
    batch_7b: int = 5
    batch_8b: int = 4
    overrides: tuple[str, ...] = ()
    """Of every config of shardwise."""
    plan: dict[str, Any] = field(default_factory=dict)

    def planned(self, *, warmup: int = 4) -> Plan:
        usual = {"warmup": 1, "windows": 2, "steps": 1} if self.tiny else {"warmup": warmup, "windows": 4, "steps": 4}
        return Plan(**(usual | self.plan))

    @property
    def compiler(self) -> str:
        """Inductor takes tens of seconds on a CPU: a trial of the script does without."""
        return "aot_eager" if self.tiny else "inductor"


def made(build: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    """Made on the device, where it is fast; on the meta device, where only the shape is asked for, as it is."""
    if torch.get_default_device().type == "meta":
        return build()
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return build()


def in_order(samples: Samples) -> list[Any]:
    """As shardwise shuffles them, for those who take them one after the other: a step has the same samples for all."""
    return [samples[int(index)] for index in GlobalOrder(len(samples), SEED).part(0, 0, len(samples))]


def on_device(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE, non_blocking=True), batch)


def _tensors(sample: Any) -> list[Tensor]:
    return [value for value in (sample.values() if isinstance(sample, dict) else [sample]) if isinstance(value, Tensor)]
