"""A transformer encoder that predicts hidden genes: PyTorch's own, and the one of shardwise's task `cells`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from benchmarks.gpu.contenders import by_hand, with_lightning, with_shardwise
from benchmarks.gpu.contenders.meter import Meter
from benchmarks.gpu.contenders.problem import SEED, Contender, Options, Problem, Work, in_order, made
from shardwise import DataBlock
from shardwise.tasks.cells.layout import laid_out
from shardwise.tasks.cells.model import CellEncoder
from shardwise.tasks.cells.task import CellsTask
from shardwise.tasks.cells.tokens import CLS, FIRST_GENE, MASK, NOT_HIDDEN, PAD, CellBatch, hidden_places

MASKED = 0.15


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    ffn: int
    sequence: int
    vocabulary: int

    @property
    def hidden_genes(self) -> int:
        return round(MASKED * (self.sequence - 1))

    @property
    def flops_per_token(self) -> float:
        """The head meets the hidden places only."""
        blocks = self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.ffn)
        head = self.hidden * (self.hidden + self.vocabulary) * self.hidden_genes / self.sequence
        return 6 * (blocks + head) + 12 * self.layers * self.hidden * self.sequence


def cells(options: Options) -> Work:
    shape = Shape(32, 2, 2, 64, 32, 100) if options.tiny else Shape(1024, 12, 16, 4096, 2048, 20000)
    batch = 2 if options.tiny else 16
    plan = options.planned()

    def other(train: Callable[[Problem, Meter], None]) -> Callable[[Meter], None]:
        def run(meter: Meter) -> None:
            problem = Problem(
                build=lambda: made(lambda: TorchEncoder(shape)),
                samples=in_order(random_cells(plan.total * batch, shape)),
                loss=_loss,
                batch=batch,
                units=lambda step: batch * shape.sequence,
            )
            train(problem, meter)

        return run

    def shardwise(meter: Meter) -> None:
        sizes = ("hidden", "layers", "heads", "ffn", "sequence", "vocabulary")
        blocks = {
            "task": f"{__name__}:RandomCells",
            "data": {"rows": plan.total * batch, "shape": {name: getattr(shape, name) for name in sizes}},
            "model": {
                "hidden_dim": shape.hidden,
                "num_layers": shape.layers,
                "num_heads": shape.heads,
                "ffn_dim": shape.ffn,
            },
        }
        units = lambda result: result.samples * shape.sequence  # noqa: E731
        with_shardwise.train(blocks, {"batch_size": batch}, units, meter, options.overrides)

    contenders = [
        Contender(name, run, batch, plan, shape.flops_per_token)
        for name, run in {
            "plain loop, nn.TransformerEncoder": other(by_hand.train),
            "plain loop, nn.TransformerEncoder, torch.compile": other(
                partial(by_hand.train, compiler=options.compiler)
            ),
            "Lightning, nn.TransformerEncoder": other(with_lightning.train),
            "shardwise, task cells": shardwise,
        }.items()
    ]
    title = (
        f"Encoder, pre-norm: hidden {shape.hidden}, {shape.layers} layers, {shape.heads} heads, MLP {shape.ffn}, sequence "
        f"{shape.sequence}, {shape.vocabulary} genes, {shape.hidden_genes} of a cell's hidden and predicted; fp32 weights, "
        "computed in bf16"
    )
    return Work(title, "tokens", contenders)


def random_cells(rows: int, shape: Shape) -> list[CellBatch]:
    """Ready for the model: as what CellTokenizer makes of cells with as many genes as there is room for."""
    generator = torch.Generator().manual_seed(SEED)
    made_cells = []
    for cell in range(rows):
        genes = torch.randint(0, shape.vocabulary, (shape.sequence,), generator=generator, dtype=torch.int32)
        hidden = 1 + torch.randperm(shape.sequence - 1, generator=generator)[: shape.hidden_genes]
        targets = torch.full_like(genes, NOT_HIDDEN)
        targets[hidden] = genes[hidden]
        shown = genes + FIRST_GENE
        shown[hidden], shown[0] = MASK, CLS
        made_cells.append({"genes": shown, "targets": targets, "cells": torch.tensor(cell)})
    return made_cells


class TorchEncoder(nn.Module):
    """CellEncoder, written with PyTorch's own parts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.genes = nn.Embedding(FIRST_GENE + shape.vocabulary, shape.hidden, padding_idx=PAD)
        self.ranks = nn.Embedding(shape.sequence, shape.hidden)
        layer = nn.TransformerEncoderLayer(
            shape.hidden, shape.heads, shape.ffn, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, shape.layers, norm=nn.LayerNorm(shape.hidden), enable_nested_tensor=False
        )
        self.head = nn.Sequential(
            nn.Linear(shape.hidden, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.vocabulary)
        )

    def forward(self, batch: CellBatch) -> Tensor:
        genes = batch["genes"]
        states = self.genes(genes) + self.ranks.weight[: genes.shape[1]]
        states = self.encoder(states, src_key_padding_mask=genes == PAD)
        return self.head(states[batch["targets"] >= 0]).float()


def _loss(model: nn.Module, batch: CellBatch) -> Tensor:
    return F.cross_entropy(model(batch), batch["targets"][batch["targets"] >= 0].long())


class RandomCells(CellsTask):
    """shardwise's own task for cells, with batches that are ready."""

    class Data(DataBlock):
        rows: int
        shape: dict[str, int]

    def prepare_data(self) -> None:
        self.measure_attention(self._shape.sequence)

    def train_data(self) -> Any:
        return random_cells(self.config.data.rows, self._shape)

    def valid_data(self) -> Any:
        return None

    def collate(self, samples: list[CellBatch]) -> dict[str, Any]:
        batch: CellBatch = default_collate(samples)
        batch["places"] = torch.from_numpy(hidden_places(batch["targets"].numpy()))
        return laid_out(batch, packs=self.packs, max_tokens=self._shape.sequence)

    def build_model(self) -> nn.Module:
        shape, config = self._shape, self.config
        model = made(lambda: CellEncoder(config.model, config.tokenizer, shape.vocabulary, shape.sequence))
        assert isinstance(model, CellEncoder)
        return self.with_fast_attention(model, shape.sequence)

    @property
    def _shape(self) -> Shape:
        return Shape(**self.config.data.shape)
