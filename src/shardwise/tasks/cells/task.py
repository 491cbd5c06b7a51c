"""The cells task: hidden genes are predicted from the others; the embedding is judged by its neighbourhoods."""

from __future__ import annotations

import logging
import math
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, MissingExtra

# Looked for and not imported: matplotlib takes tenths of a second, and is for a picture at the end.
if _missing := [name for name in ("anndata", "h5py", "pyarrow", "matplotlib") if find_spec(name) is None]:
    raise MissingExtra.of(_missing[0], "cells", "task: cells")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.data import BatchedSamples, SampleContents
from shardwise.kernels.attention import prefer_backend
from shardwise.kernels.backend import Shape, fastest_backend, remembered_backend
from shardwise.tasks.base import Loss, Rows, Task
from shardwise.tasks.cells.check import check_cells, check_held_out
from shardwise.tasks.cells.config import CellsData, CellsModel, CellsTokenizer
from shardwise.tasks.cells.corpus import Corpus, open_corpus
from shardwise.tasks.cells.export import save_encoder
from shardwise.tasks.cells.model import IGNORED, CellEncoder, split_encoder, targets_of
from shardwise.tasks.cells.neighbours import draw_cells, knn_agreement
from shardwise.tasks.cells.overlap import STREAMED, cell_contents
from shardwise.tasks.cells.samples import CellSamples, CellsInMemory, StreamedCells
from shardwise.tasks.cells.tokens import NO_PLACE, CellBatch, CellTokenizer, revealed
from shardwise.tasks.packing import (
    computes_in,
    decide_packing,
    measured_attention,
    on_cuda,
    strategy_against_packing,
)

DEFAULT_MAX_GENES = 2048
STUDIED_CELLS = 5000
"""Validation cells whose neighbours are looked up, at most."""
FEWEST_CELLS = 50
"""With fewer, a cell's ten neighbours are mostly whoever is there."""

log = logging.getLogger(__name__)


class CellsTask(Task):
    Data, Tokenizer, Model = CellsData, CellsTokenizer, CellsModel
    unit = "masked genes"
    narrow_weights = True
    may_count_nothing = True  # a batch of cells that express no gene of the vocabulary

    def prepare_data(self) -> None:
        corpus = open_corpus(self._data, self.config.seed, quiet=False)
        some = self._data.streaming and corpus.split.kept > STREAMED
        values = check_cells(corpus.training, self._data, twins=some)
        rows, _, _, labels = corpus.validation_cells()
        check_held_out(rows, labels, len(corpus.training), self._data)
        tokenizer = self._tokenizer(corpus)
        log.info(
            f"cells: {corpus.split.kept} to train on, {len(corpus.held_out)} held out; {len(corpus.genes)} genes, "
            f"{values or corpus.values or 'of unknown scale'}; {tokenizer.max_genes} genes per cell at most"
        )
        self.measure_attention(tokenizer.max_tokens)

    @cached_property
    def packs(self) -> bool:
        """Whether the cells of a training micro-batch lie end to end, where they are not equally long anyway. Follows from the
        config and the kind of device alone, so that ranks and loader workers agree."""
        return decide_packing(
            self._tokens.packing,
            cuda=on_cuda(self.config.training),
            problem=lambda: strategy_against_packing(self.config, "cell"),
        )

    def measure_attention(self, length: int) -> None:
        """Which attention is fastest is measured by one rank of a machine, before any other asks."""
        if self._chooses_attention:
            fastest_backend(self._attention_shape(length), measured_attention())

    def with_fast_attention(self, model: CellEncoder, length: int) -> CellEncoder:
        if self._chooses_attention:
            prefer_backend(model, remembered_backend(self._attention_shape(length), measured_attention()))
        return model

    @property
    def _chooses_attention(self) -> bool:
        """In a rank, that is, which has its GPU: a process that ranks are forked from must not touch one."""
        return torch.cuda.is_initialized() and on_cuda(self.config.training)

    def _attention_shape(self, length: int) -> Shape:
        training, heads = self.config.training, self._network.num_heads
        width = self._network.hidden_dim // heads
        return Shape(training.batch_size, heads, heads, length, width, computes_in(training), causal=False)

    def train_data(self) -> BatchedSamples:
        data = self._training_cells()
        data.packs = self.packs
        return data

    def _training_cells(self) -> CellSamples:
        corpus, data = self._corpus, self._data
        tokenizer = self._tokenizer(corpus)
        if data.streaming:
            return StreamedCells(
                corpus.training,
                corpus.split,
                tokenizer,
                chunk=data.streaming_chunk_size,
                buffer=data.streaming_shuffle_buffer,
                seed=self.config.seed,
            )
        rows = corpus.split.training_rows(np.arange(corpus.split.kept))
        everything = corpus.training.read(0, len(corpus.training))
        numbers = corpus.training.numbers(rows)
        return CellsInMemory(everything.take(rows), numbers, tokenizer, origin=corpus.training.origin)

    def valid_data(self) -> BatchedSamples:
        rows, numbers, labels, self._label_names = self._corpus.validation_cells()
        return CellsInMemory(rows, numbers, self._tokenizer(self._corpus), labels)

    def sample_contents(self, train: Any, valid: Any) -> SampleContents:
        return cell_contents(self._corpus, train, valid)

    def build_model(self) -> nn.Module:
        tokenizer = self._tokenizer(self._corpus)
        model = CellEncoder(self._network, self._tokens, tokenizer.genes, tokenizer.max_tokens)
        return self.with_fast_attention(model, tokenizer.max_tokens)

    def tensor_plan(self, model: Any, ranks: int, sequence_parallel: bool) -> dict[str, Any]:
        heads = self._network.num_heads
        if heads % ranks:
            raise ConfigError(
                f"strategy tensor on {ranks} ranks: model.num_heads: {heads} must be a multiple of {ranks}"
            )
        model.length_multiple = ranks if sequence_parallel else 1
        return split_encoder(model, sequence_parallel=sequence_parallel)

    def count(self, batch: CellBatch) -> int:
        # In NumPy: PyTorch would wake all its threads for a few thousand numbers.
        return int(np.count_nonzero(batch["places"].numpy() != NO_PLACE))

    def loss(self, model: nn.Module, batch: CellBatch) -> Loss:
        if self._tokens.strategy == "continuous_projection":
            return Loss((_errors(model(batch), batch) ** 2).sum(), _count(batch))
        # A sum, as strategy dp gives the loss of each device.
        return Loss(model(batch, want="loss").sum(), _count(batch))

    def evaluate(self, model: nn.Module, batch: CellBatch) -> dict[str, Loss | Rows]:
        predictions, count = model(batch), _count(batch)
        results: dict[str, Loss | Rows] = {}
        if self._tokens.strategy == "continuous_projection":
            errors = _errors(predictions, batch)
            results |= {"loss": Loss((errors**2).sum(), count), "masked_error": Loss(errors.abs().sum(), count)}
        else:
            targets, counted = targets_of(batch)
            flat = torch.where(counted, targets, IGNORED).flatten()
            results["loss"] = Loss(F.cross_entropy(predictions.flatten(0, 1), flat, reduction="sum"), count)
            results["masked_accuracy"] = Loss(((predictions.argmax(dim=-1) == targets) & counted).sum(), count)
        if "labels" in batch:
            embedding = model(revealed(batch), want="embedding")
            results["cells"] = Rows(batch["cells"], {"embedding": embedding, "label": batch["labels"]})
        return results

    def derived_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        if self._tokens.strategy == "continuous_projection":
            return {}
        return {"perplexity": math.exp(min(metrics["loss"], 700.0))}

    def metric_names(self) -> tuple[str, ...]:
        continuous = self._tokens.strategy == "continuous_projection"
        return "loss", "knn_agreement", *(("masked_error",) if continuous else ("masked_accuracy", "perplexity"))

    def study(self, rows: dict[str, Rows], pictures: Path, step: int) -> dict[str, float]:
        cells = rows["cells"].columns
        known = torch.nonzero(cells["label"] >= 0).flatten()
        known = known[:: -(-len(known) // STUDIED_CELLS) or 1]
        embedding, labels = cells["embedding"][known], cells["label"][known]
        if len(known) < FEWEST_CELLS:
            log.info(f"{len(known)} labelled cells are held out: too few for knn_agreement, which takes {FEWEST_CELLS}")
            return {}
        agreement = knn_agreement(embedding, labels)
        title = f"step {step}, {len(known)} cells: {agreement:.1%} of 10 nearest neighbours share the label"
        draw_cells(embedding, labels, self._label_names, title, pictures / f"step-{step:08d}-cells.png")
        return {"knn_agreement": agreement}

    def flops_per_count(self, model: nn.Module) -> float:
        """(6 × parameters without embeddings + 12 × layers × hidden × mean length) per token, ÷ mask_ratio"""
        outside = sum(p.numel() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
        weights = sum(parameter.numel() for parameter in model.parameters()) - outside
        attention = 12 * self._network.num_layers * self._network.hidden_dim * self._mean_length
        return (6 * weights + attention) / self._tokens.masking.mask_ratio

    def export(self, model: nn.Module, folder: Path) -> None:
        """Weights, the vocabulary, and what `shardwise.tasks.cells.export.load_encoder` needs to use them."""
        assert isinstance(model, CellEncoder)
        corpus = self._corpus
        save_encoder(model, self._tokenizer(corpus), list(corpus.genes), self._network, folder, counts=corpus.counts)

    @property
    def _data(self) -> CellsData:
        return self.config.data

    @property
    def _tokens(self) -> CellsTokenizer:
        return self.config.tokenizer

    @property
    def _network(self) -> CellsModel:
        return self.config.model

    @cached_property
    def _corpus(self) -> Corpus:
        return open_corpus(self._data, self.config.seed)

    def _tokenizer(self, corpus: Corpus) -> CellTokenizer:
        cls = int(self._tokens.prepend_cls)
        wanted = [limit for limit in (self._data.max_genes, self._tokens.max_genes) if limit is not None]
        genes = min(*(wanted or [DEFAULT_MAX_GENES]), len(corpus.genes))
        if self._network.max_seq_len is not None:
            genes = min(genes, self._network.max_seq_len - cls)
        scaled = self._data.normalize == "log1p" or (self._data.normalize == "auto" and corpus.counts)
        return CellTokenizer(
            self._tokens, len(corpus.genes), genes, self._data.target_sum if scaled else None, self.config.seed
        )

    @cached_property
    def _mean_length(self) -> float:
        rows = self._corpus.training.read(0, min(256, len(self._corpus.training)))
        limit = self._tokenizer(self._corpus).max_genes
        return float(np.minimum(rows.lengths, limit).mean()) + self._tokens.prepend_cls


def _count(batch: CellBatch) -> Tensor:
    """Of the hidden places, where they are: nobody waits for it."""
    return (batch["places"] != NO_PLACE).sum()


def _errors(predictions: Tensor, batch: CellBatch) -> Tensor:
    """Of expressions, at the hidden places. Not in the model: sharded, it would narrow them with its other inputs."""
    targets, counted = targets_of(batch)
    return torch.where(counted, predictions.squeeze(-1) - targets, 0.0)
