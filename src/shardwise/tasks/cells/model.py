"""A transformer encoder over the genes of a cell, in plain PyTorch: pre-norm, scaled-dot-product attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from shardwise.kernels.attention import attend_packed, attend_rows
from shardwise.kernels.head import LossHead
from shardwise.tasks.cells.config import CellsModel, CellsTokenizer
from shardwise.tasks.cells.tokens import CLS, FIRST_BIN, FIRST_GENE, PAD

IGNORED = -100
"""The target that LossHead leaves out."""


class CellEncoder(nn.Module):
    """Tokens → states → predictions at the hidden places, or one vector per cell."""

    def __init__(self, options: CellsModel, tokenizer: CellsTokenizer, genes: int, max_len: int) -> None:
        super().__init__()
        width = options.hidden_dim
        self.strategy = tokenizer.strategy
        self.length_multiple = 1
        """Cells are padded to a multiple of this: ranks that share a sequence take equal parts of it."""
        self.pooling = options.pooling or ("cls" if tokenizer.prepend_cls else "mean")
        self.genes = nn.Embedding(FIRST_GENE + genes, width, padding_idx=PAD)
        if self.strategy == "rank_value":
            self.ranks = nn.Embedding(max_len, width)
        elif self.strategy == "binned_expression":
            self.bins = nn.Embedding(FIRST_BIN + tokenizer.num_bins, width, padding_idx=PAD)
        else:
            self.values = nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, width))
            self.hidden = nn.Parameter(torch.empty(width))
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(width, options.num_heads, options.ffn_dim or 4 * width, options.dropout)
            for _ in range(options.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        outputs = {"rank_value": genes, "binned_expression": tokenizer.num_bins, "continuous_projection": 1}
        last = nn.Linear if self.strategy == "continuous_projection" else LossHead
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), last(width, outputs[self.strategy]))
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.strategy == "continuous_projection":
            nn.init.normal_(self.hidden, std=len(self.hidden) ** -0.5)

    def forward(self, batch: Mapping[str, Any], *, want: str = "predictions") -> Tensor:
        """`predictions` at the hidden places: a row per cell, in the order of the tokens, with something that is no prediction
        where `places` says so; the summed `loss` of those that choose between genes or bins, a row of one; or one `embedding` per
        cell."""
        states, real = self._states(batch)
        if want == "embedding":
            return self._pooled(states, real)
        found = self._at_places(states, batch["places"])
        return self._summed_loss(found, batch)[None] if want == "loss" else self.head(found).float()

    def _states(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        genes = batch["genes"]
        real = genes != PAD
        states = self.genes(genes)
        if self.strategy == "rank_value":
            packed = "positions" in batch
            states = states + (self.ranks(batch["positions"]) if packed else self.ranks.weight[: genes.shape[1]])
        elif self.strategy == "binned_expression":
            states = states + self.bins(batch["bins"])
        else:
            shown = self.values(batch["values"].to(states.dtype).unsqueeze(-1))
            # No number stands at CLS and padding, and none may be seen at a hidden place.
            has_value = (real & (genes != CLS)).unsqueeze(-1)
            states = (
                states + torch.where(batch["hidden"].unsqueeze(-1), self.hidden.to(states.dtype), shown) * has_value
            )
        states = self.dropout(states)
        if "starts" in batch:
            for block in self.blocks:
                states = block(states, None, batch["starts"], batch["longest"])
            return self.norm(states), real
        padding = -genes.shape[1] % self.length_multiple
        mask = None if batch.get("full") and not padding else _seen(real, padding)
        if padding:  # by nothing, it would be copied all the same
            states = F.pad(states, (0, 0, 0, padding))
        for block in self.blocks:
            states = block(states, mask)
        return self.norm(states)[:, : genes.shape[1]], real

    def _at_places(self, states: Tensor, places: Tensor) -> Tensor:
        rows = torch.arange(len(places), device=places.device)[:, None] * states.shape[1]
        # Where there is no place, the first token is as good as any.
        chosen = states.flatten(0, 1).index_select(0, (rows + places.clamp(min=0)).flatten())
        return chosen.unflatten(0, places.shape)

    def _summed_loss(self, found: Tensor, batch: Mapping[str, Any]) -> Tensor:
        targets, counted = targets_of(batch)
        last = self.head[-1]
        assert isinstance(last, LossHead)
        with last.summing_up(torch.where(counted, targets, IGNORED)):
            return self.head(found)

    def _pooled(self, states: Tensor, real: Tensor) -> Tensor:
        if self.pooling == "cls":
            return states[:, 0].float()
        weight = real.unsqueeze(-1).float()
        return (states.float() * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


def targets_of(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """What stands at the hidden places, gene or bin numbers, or expressions; and which of `places` there are."""
    places = batch["places"]
    targets = batch["targets"].gather(1, places.clamp(min=0))
    return targets if targets.is_floating_point() else targets.long(), places >= 0


def _seen(real: Tensor, padding: int) -> Tensor:
    """The mask of attention. A cell without any token sees its first padding: where nothing is seen, there are no numbers."""
    seen = F.pad(real, (0, padding))
    seen[:, 0] = True
    return seen[:, None, None, :]


class EncoderBlock(nn.Module):
    is_causal = False
    attention_backend: str | None = None
    """Which of PyTorch's kernels attends where no mask is needed; None: as PyTorch chooses."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_attention = nn.LayerNorm(width)
        # No bias: that of the keys has no effect on the attention, so its gradient would be rounding and nothing else.
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)
        self.norm_ffn = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor | None, starts: Tensor | None = None, longest: int = 0) -> Tensor:
        """`mask`: which tokens of a row are seen, None: all. `starts`: one row of cells, none with more than `longest` tokens."""
        states = states + self.drop(self._attend(self.norm_attention(states), mask, starts, longest))
        return states + self.drop(self.ffn(self.norm_ffn(states)))

    def _attend(self, states: Tensor, mask: Tensor | None, starts: Tensor | None, longest: int) -> Tensor:
        # Head by head, so that ranks which share the matrix (strategy tensor) have whole heads each.
        projected: Any = self.queries_keys_values(states).unflatten(-1, (-1, 3, self.head_width))
        queries, keys, values = projected.permute(3, 0, 2, 1, 4)
        if starts is not None:
            mixed = attend_packed(queries, keys, values, starts, longest, causal=False)
        else:
            backend = self.attention_backend if mask is None else None
            mixed = attend_rows(queries, keys, values, mask, causal=False, backend=backend)
        return self.output(mixed.flatten(2))


def split_encoder(model: CellEncoder, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How ranks share the matrices of every block: heads and the inner width are divided."""
    along = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.queries_keys_values": ColwiseParallel(input_layouts=along),
        "blocks.*.output": RowwiseParallel(output_layouts=along),
        "blocks.*.ffn.0": ColwiseParallel(input_layouts=along),
        "blocks.*.ffn.2": RowwiseParallel(output_layouts=along),
    }
    if sequence_parallel:
        plan |= {
            "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True
            ),
            "blocks.*.norm_attention": SequenceParallel(use_local_output=True),
            "blocks.*.norm_ffn": SequenceParallel(use_local_output=True),
            "norm": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            ),
        }
    return plan
