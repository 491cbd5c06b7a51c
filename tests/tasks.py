"""Tasks that tests train: small enough for a thousand steps, awkward enough to show mistakes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwise.config import Block, Config, DataBlock, parse_config
from shardwise.errors import DataError
from shardwise.launch.environment import attempt
from shardwise.tasks import Loss, Rows, Task


def config_of(text: str, overrides: list[str] | None = None) -> Config:
    return parse_config(text, overrides or [], name="test")


class RaggedData(DataBlock):
    samples: int = Field(53, ge=1, description="A number that divides by nothing.")


class RaggedModel(Block):
    width: int = Field(16, ge=1, description="Width.")
    layers: int = Field(3, ge=1, description="Blocks.")
    tied: bool = Field(True, description="Input and output share weights.")
    dropout: float = Field(0.0, ge=0, description="Dropout.")


class Ragged(Task):
    """A toy language model on sequences of very different lengths: the count differs between any two micro-batches."""

    Data, Model = RaggedData, RaggedModel
    unit = "tokens"
    vocabulary = 29

    def train_data(self) -> list[Tensor]:
        return sequences(self.config.data.samples, seed=1)

    def valid_data(self) -> list[Tensor]:
        return sequences(11, seed=2)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return {"ids": nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)}

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["ids"][:, 1:] >= 0).sum())

    def build_model(self) -> nn.Module:
        options: Any = self.config.model
        return Toy(self.vocabulary, options.width, options.layers, options.tied, options.dropout)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        ids = batch["ids"]
        logits = model(ids[:, :-1].clamp(min=0))
        loss = nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-1, reduction="sum"
        )
        return Loss(loss, (ids[:, 1:] >= 0).sum())

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.layers)  # type: ignore[arg-type]

    def tensor_plan(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, Any]:
        return {"layers.*.inner.1": ColwiseParallel(), "layers.*.inner.3": RowwiseParallel()}


class Toy(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, tied: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList(ToyBlock(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Not in the state dict, as rotary frequencies are: it has to reach the other ranks all the same.
        self.register_buffer("slope", torch.linspace(0.5, 1.5, width), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden * self.slope.to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class ToyBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.inner(hidden.cumsum(1) / 8))


class Unevaluated(Ragged):
    """Its evaluation fails on the last rank as long as there is a file `broken` in the folder, and kills it if that says so."""

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss]:
        if Path("broken").exists() and os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
            print("about to fail", flush=True)
            if Path("broken").read_text() == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the evaluation is wrong")
        return {"loss": self.loss(model, batch)}


class Deadly(Ragged):
    """Kills its own process with SIGKILL in the forward pass of a step, where the environment says so."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Deadly.forwards += model.training
        where = os.environ.get("KILL_AT")
        if where and where == f"{os.environ.get('RANK', '0')}:{Deadly.forwards}":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class Faulty(Ragged):
    """One fault per attempt, as the environment lists them: kind:rank:forward pass, separated by commas."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Faulty.forwards += model.training
        faults = os.environ.get("FAULTS", "").split(",")
        fault = faults[attempt()] if attempt() < len(faults) else ""
        kind, _, when = fault.partition(":")
        if model.training and when == f"{os.environ.get('RANK', '0')}:{Faulty.forwards}":
            print(f"fault: {kind}", flush=True)
            if kind == "hang":
                time.sleep(3600)
            if kind == "raise":
                raise OSError("a passing trouble")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}[kind])
        return super().loss(model, batch)


class Broken(Ragged):
    """Raises on rank 1 at its second step."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Broken.forwards += model.training
        if os.environ.get("RANK") == "1" and Broken.forwards == 2:
            raise ValueError("the cause")
        return super().loss(model, batch)


class Slow(Ragged):
    """Takes its time, so that a test can interrupt it."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        time.sleep(0.1)
        return super().loss(model, batch)


class Endless(Ragged):
    """A step that does not end."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        if model.training:
            print("in an endless step", flush=True)
            time.sleep(3600)
        return super().loss(model, batch)


class Exits(Ragged):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        sys.exit(0)


class Unprepared(Ragged):
    def prepare_data(self) -> None:
        raise DataError("the disk is on fire")


class Prepared(Ragged):
    def prepare_data(self) -> None:
        with Path("prepared.txt").open("a") as file:
            file.write("once\n")


class Studied(Ragged):
    """Hands every validation sample to `study`, numbered by its length and first token."""

    def valid_data(self) -> Any:
        return list(enumerate(super().valid_data()))

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        if not isinstance(samples[0], tuple):
            return super().collate(samples)
        return super().collate([each for _, each in samples]) | {"number": torch.tensor([n for n, _ in samples])}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Loss | Rows]:
        rows = Rows(batch["number"], {"twice": 2 * batch["number"]})
        return {"loss": self.loss(model, batch), "samples": rows}

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        samples = rows["samples"]
        assert samples.columns["twice"].tolist() == [2 * key for key in samples.keys.tolist()]
        Path("studied.txt").write_text(f"{samples.keys.tolist()}\n")
        return {"rows": float(len(samples.keys))}


class SlowToRead(Ragged):
    def train_data(self) -> Any:
        return _Sleepy(super().train_data())


class _Sleepy(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


def sequences(number: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (number,), generator=generator)
    return [torch.randint(0, Ragged.vocabulary, (int(length),), generator=generator) for length in lengths]


class Hungry(Ragged):
    """Rank 1 asks for more memory than there is, in its third step."""

    forwards = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Hungry.forwards += model.training
        if os.environ.get("RANK", "1") == "1" and Hungry.forwards == 3:
            torch.empty(2**60, dtype=torch.uint8)
        return super().loss(model, batch)


class Forgetful(Ragged):
    """Counts its batches, and lets the loss depend on it: what is in no checkpoint is lost with the process."""

    batches = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Forgetful.batches += 1
        loss = super().loss(model, batch)
        return Loss(loss.sum * (1 + 0.01 * Forgetful.batches), loss.count)
