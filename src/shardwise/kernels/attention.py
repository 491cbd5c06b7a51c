"""Attention: causal for language models, through Transformers' attention interface, or both ways for encoders.

Texts come as the rows of a batch, or packed: laid end to end in one row, told apart by `cu_seq_lens_q`, where each begins.
Packed attention never looks from one text into another. On CUDA in half precision PyTorch's kernel for sequences of
different lengths does it; elsewhere the texts are laid out as rows for the attention alone, which computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from shardwise.compat.tensors import varlen_operations
from shardwise.kernels.backend import in_order
from shardwise.kernels.meta_probe import without_values
from shardwise.kernels.types import computing_type

NAME = "shardwise"
"""Under which Transformers knows it (`attn_implementation`)."""
_LOOKING = "shardwise_looking"
_WIDEST_HEAD = 256
"""Of flash attention."""


@dataclass(frozen=True)
class Look:
    """What a look at a model's attention shows."""

    ours: bool
    """Plain causal attention, called through the interface: this file can take its place."""
    packs: bool
    """And it hands on where packed texts begin."""
    why_not: str = ""


def register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def prefer_backend(model: nn.Module, name: str | None) -> None:
    """Which of PyTorch's kernels attends to the rows of a batch: a name of BACKENDS; None: as PyTorch chooses."""
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.attention_backend = name  # type: ignore[assignment]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[batch, heads, length, width] each; the answer is [batch, length, heads, width], as Transformers wants it."""
    starts = kwargs.get("cu_seq_lens_q")
    if starts is not None:
        longest = kwargs["max_length_q"]
        return attend_packed(query, key, value, starts, longest, causal=True, dropout=dropout, scaling=scaling), None
    backend = getattr(module, "attention_backend", None)
    found = attend_rows(
        query, key, value, attention_mask, causal=True, dropout=dropout, scaling=scaling, backend=backend
    )
    return found.contiguous(), None


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    dropout: float = 0.0,
    scaling: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """[batch, heads, length, width] each; the answer is [batch, length, heads, width]. A mask takes the place of `causal`."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and not _takes_groups(query, value, mask, backend):
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        grouped = False
    # In this order: compiled with sizes that change, the other way round it would not be a plain bool (torch 2.13).
    looks_back = causal and query.shape[2] > 1 and mask is None
    with _preferring(backend):
        found = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=looks_back,
            scale=scaling,
            enable_gqa=grouped,
        )
    return found.transpose(1, 2)


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None, backend: str | None) -> bool:
    """Several query heads per key head: on CUDA only flash and cuDNN attention take them as they are (torch 2.13). Left to
    the others, PyTorch would write out the whole matrix of scores."""
    fits = mask is None and query.shape[-1] == value.shape[-1] <= _WIDEST_HEAD
    return fits and (not query.is_cuda or (computing_type(query) in _HALF and backend != "efficient"))


def _preferring(backend: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if backend is None else sdpa_kernel(in_order(backend), set_priority=True)


# ---------------------------------------------------------------- packed


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    *,
    causal: bool,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    """One row of texts, the n-th from starts[n] to starts[n + 1], none longer than `longest`."""
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))  # [tokens, heads, width]
    if _VARLEN is not None and _fits_varlen(query, value, dropout):
        # Rotary embeddings leave queries in fp32 under autocast, and values not; PyTorch's own attention narrows them all.
        dtype = computing_type(query)
        narrow = (each.to(dtype) for each in (queries, keys, values))
        return _VARLEN(*narrow, starts, longest, scaling, causal)[None]
    tokens, texts = query.shape[2], starts.shape[0] - 1
    token = torch.arange(tokens, device=query.device)
    text = torch.searchsorted(starts, token, right=True, out_int32=False) - 1
    place = text * longest + token - starts[text]

    def as_rows(each: Tensor) -> Tensor:
        rows = each.new_zeros(texts * longest, *each.shape[1:]).index_copy(0, place, each)
        return rows.view(texts, longest, *each.shape[1:]).transpose(1, 2)

    # What is left empty lies to the right of every text, where causal attention does not look.
    mask = None if causal else (torch.arange(longest, device=query.device) < starts.diff()[:, None])[:, None, None]
    found = attend_rows(
        as_rows(queries), as_rows(keys), as_rows(values), mask, causal=causal, dropout=dropout, scaling=scaling
    )
    return found.reshape(texts * longest, *found.shape[2:]).index_select(0, place)[None]


def _fits_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    width = query.shape[-1]
    flash = width == value.shape[-1] and width <= _WIDEST_HEAD and width % 8 == 0
    return query.is_cuda and flash and dropout == 0.0 and computing_type(query) in _HALF


_HALF = (torch.bfloat16, torch.float16)


def _varlen() -> Callable[..., Tensor] | None:
    """PyTorch's kernel, however this version of it is called: 2.10 knows `is_causal` and no scale, 2.11 says causal by
    window_size, 2.12 takes fewer key heads than query heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    says_window = "window_size" in known
    takes_scale, takes_groups = "scale" in known, "enable_gqa" in known

    def varlen(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, causal: bool
    ) -> Tensor:
        options: dict[str, Any] = {}
        if causal:
            options |= {"window_size": (-1, 0)} if says_window else {"is_causal": True}
        if takes_scale:
            options["scale"] = scaling
        elif scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)
        if query.shape[1] != key.shape[1]:
            if takes_groups:
                options["enable_gqa"] = True
            else:
                key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        found = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
        assert isinstance(found, Tensor)  # nothing more was asked for
        return found

    return varlen


_VARLEN = _varlen()
OPERATIONS = varlen_operations() if _VARLEN is not None else []
"""What it is called where operations are recorded: attention is worth keeping when others are computed again."""


# ---------------------------------------------------------------- what a model's attention is like


def look_at_attention(model: Any, length: int) -> Look:
    """Of a Transformers model on the meta device, whose texts have `length` tokens at most: one forward pass of nothing,
    to see what its attention is called with. In bf16, which experts insist on even there (torch 2.13)."""
    config = model.config
    if not (getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False)):
        return _not_ours("its attention does not go through Transformers' attention interface")
    if getattr(model, "_is_stateful", False) or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return _not_ours("it has layers other than attention that look back along the text")
    if problem := _other_layers(config, length):
        return _not_ours(problem)
    problems, calls, told = _one_pass(model, length)
    if problems or not calls:
        return _not_ours(problems[0] if problems else "its attention does not go through Transformers' interface")
    if told < calls:
        return Look(ours=True, packs=False, why_not="it does not tell its attention where packed texts begin")
    if any(
        isinstance(module, nn.Embedding) and name.endswith("position_embeddings") and module.padding_idx is not None
        for name, module in model.named_modules()
    ):  # RoBERTa and its kin
        return Look(ours=True, packs=False, why_not="it counts positions from the number of its padding token")
    return Look(ours=True, packs=True)


def _not_ours(why: str) -> Look:
    return Look(ours=False, packs=False, why_not=why)


def _other_layers(config: Any, length: int) -> str:
    reach = {
        "full_attention": length,
        "sliding_attention": getattr(config, "sliding_window", None) or length,
        "chunked_attention": getattr(config, "attention_chunk_size", None) or length,
    }
    for kind in getattr(config, "layer_types", None) or []:
        if reach.get(kind, 0) < length:
            return f"its layers of type {kind} do not see the whole text"
    return ""


def _one_pass(model: Any, length: int) -> tuple[list[str], int, int]:
    """What speaks against it, how often attention was called, and how often it was told where packed texts begin."""
    from transformers import AttentionInterface

    problems: list[str] = []
    told: list[bool] = []

    def looking(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        told.append(kwargs.get("cu_seq_lens_q") is not None and kwargs.get("max_length_q") is not None)
        causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            problems.append("its attention is not causal")
        if attention_mask is not None or query.shape[2] != key.shape[2]:
            problems.append("it masks attention in its own way")
        if (window := kwargs.get("sliding_window")) is not None and window < length:
            problems.append(f"its attention only sees the last {window} tokens")
        problems.extend(
            f"its attention has a {name}"
            for name in ("softcap", "s_aux", "position_bias")
            if kwargs.get(name) is not None
        )
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_LOOKING, looking)
    row = torch.zeros(1, 2, dtype=torch.long, device="meta")
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    try:
        with without_values(model.config, _attn_implementation=_LOOKING):
            model(input_ids=row, **packed_arguments(row, starts, 2))
    except Exception as error:  # anybody's code, run on tensors without values: not every model can do without
        problems.append(f"its forward pass cannot be looked at: {type(error).__name__}: {str(error).splitlines()[0]}")
    return problems, len(told), sum(told)


def packed_arguments(positions: Tensor, starts: Tensor, longest: int) -> dict[str, Any]:
    """How a Transformers model is told of packed texts, besides their tokens."""
    return {
        "position_ids": positions,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }
