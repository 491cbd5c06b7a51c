"""Our attention is Transformers' own, on the models that it takes, and stays away from the others."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.kernels import attention as kernels
from shardwise.kernels import backend
from shardwise.kernels.attention import (
    NAME,
    attend_packed,
    attention,
    look_at_attention,
    prefer_backend,
    register_attention,
)
from shardwise.kernels.backend import BACKENDS, Shape, fastest_backend, remembered_backend

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 64,
         "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip


def model_of(architecture: str, implementation: str | None = None, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    config = AutoConfig.for_model(architecture, **{**SIZES, **more})
    config.use_cache, config.is_decoder = False, True
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def look(architecture: str, **more: Any) -> Any:
    with torch.device("meta"):
        return look_at_attention(model_of(architecture, dtype="bfloat16", **more), 64)


GROUPED = {"num_key_value_heads": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", GROUPED),
    ("qwen2", GROUPED),
    ("gpt2", {}),
    ("bert", {}),
    ("gpt_neox", {}),
    ("opt", {}),
    ("mixtral", GROUPED),
]


@pytest.mark.parametrize(("architecture", "more"), MODELS, ids=[f"{name} {more or ''}" for name, more in MODELS])
def test_rows_get_the_answer_of_transformers_own_attention(architecture: str, more: dict[str, Any]) -> None:
    assert look(architecture, **more).packs
    theirs, ours = model_of(architecture, **more), model_of(architecture, NAME, **more)
    ids = torch.randint(1, 50, (3, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("architecture", "more", "why"),
    [
        ("bloom", {}, "does not go through Transformers' attention interface"),
        ("gemma2", {"head_dim": 8}, "does not go through Transformers' attention interface"),
        ("mistral", {"sliding_window": 16}, "only sees the last 16 tokens"),
        ("minimax", {}, "linear_attention do not see the whole text"),
        ("recurrent_gemma", {}, "layers other than attention that look back"),
    ],
)
def test_a_model_whose_attention_is_not_plainly_causal_keeps_its_own(
    architecture: str, more: dict[str, Any], why: str
) -> None:
    found = look(architecture, **more)
    assert not found.ours and not found.packs
    assert why in found.why_not


def test_a_look_leaves_the_model_and_the_generator_as_they_were() -> None:
    with torch.device("meta"):
        model = model_of("gpt2")
    state = torch.get_rng_state()
    before = model.config.to_dict(), model.config._attn_implementation
    look_at_attention(model, 64)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_texts_that_look_both_ways_attend_as_each_would_alone(dtype: torch.dtype) -> None:
    starts = torch.tensor([0, 5, 5, 17, 20], dtype=torch.int32)  # the second is empty
    query, key, value = (torch.randn(1, 4, 20, 8, dtype=dtype) for _ in range(3))
    found = attend_packed(query, key, value, starts, 16, causal=False)
    for first, last in ((0, 5), (5, 17), (17, 20)):
        rows = (query[:, :, first:last], key[:, :, first:last], value[:, :, first:last])
        alone = torch.nn.functional.scaled_dot_product_attention(*rows).transpose(1, 2)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[:, first:last], alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_texts_attend_as_each_would_alone(kv_heads: int, dtype: torch.dtype) -> None:
    lengths = [5, 1, 12, 3]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, dtype=dtype) for heads in (4, kv_heads, kv_heads))
    module = torch.nn.Module()
    found, _ = attention(
        module, query, key, value, None, scaling=0.3, cu_seq_lens_q=starts, cu_seq_lens_k=starts,
        max_length_q=16, max_length_k=16,
    )  # fmt: skip
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        part = slice(first, last)
        alone, _ = attention(module, query[:, :, part], key[:, :, part], value[:, :, part], None, scaling=0.3)
        torch.testing.assert_close(found[:, part], alone, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


def _2_10(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Any:
    assert q.shape[1] == k.shape[1]
    return _each(q, k, v, cu_q, max_q, q.shape[-1] ** -0.5, is_causal)


def _2_11(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: Any = None,
    window_size: Any = (-1, -1),
) -> Any:
    assert q.shape[1] == k.shape[1]
    return _each(q, k, v, cu_q, max_q, scale, _CAUSAL[window_size])


def _2_12(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: Any = None,
    window_size: Any = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return _each(q, k, v, cu_q, max_q, scale, _CAUSAL[window_size])


_CAUSAL = {(-1, 0): True, (-1, -1): False}


def _each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: Any,
    longest: int,
    scale: float,
    causal: bool,
) -> Any:
    """One text after the other."""
    found = []
    for first, last in itertools.pairwise(starts.tolist()):
        assert last - first <= longest
        q, k, v = (each[None, first:last].transpose(1, 2) for each in (query, key, value))
        alone = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )
        found.append(alone[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("version", [_2_10, _2_11, _2_12])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_pytorchs_ragged_kernel_is_called_as_each_version_wants_it(
    monkeypatch: pytest.MonkeyPatch, version: Any, kv_heads: int, causal: bool
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", version)
    kernel: Any = kernels._varlen()
    starts = torch.tensor([0, 5, 6, 18], dtype=torch.int32)
    query, key, value = (torch.randn(18, heads, 8) for heads in (4, kv_heads, kv_heads))
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    expected = attend_packed(q, k, v, starts, 16, causal=causal, scaling=0.3)
    torch.testing.assert_close(kernel(query, key, value, starts, 16, 0.3, causal), expected[0], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_a_compiled_block_holds_it_in_one_graph_for_any_length(packs: bool) -> None:
    model = model_of("llama", NAME, **GROUPED)
    prefer_backend(model, "flash")
    layer = model.model.layers[0]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    for length in (8, 16, 24, 40):
        hidden = torch.randn(1, length, 32)
        positions = torch.arange(length)[None]
        starts = torch.tensor([0, length // 2, length], dtype=torch.int32)
        texts = {"cu_seq_lens_q": starts, "max_length_q": 32} if packs else {}
        given = {"position_embeddings": model.model.rotary_emb(hidden, positions), **texts}
        torch.testing.assert_close(compiled(hidden, **given), layer(hidden, **given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_the_fastest_kernel_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shape = tmp_path / "new" / "attention.json", Shape(4, 8, 2, 256, 64, torch.bfloat16)
    asked: list[str] = []
    times = {"cudnn": 2.0, "flash": 1.0, "efficient": None}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(backend, "_measure", lambda _, name: asked.append(name) or times[name])
    assert remembered_backend(shape, file) is None
    assert fastest_backend(shape, file) == fastest_backend(shape, file) == remembered_backend(shape, file) == "flash"
    assert asked == list(BACKENDS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    times["cudnn"] = 0.5
    assert fastest_backend(shape, file) == "cudnn"
    times["efficient"] = 0.1
    assert fastest_backend(replace(shape, causal=False), file) == "efficient", "both ways is another shape"
    assert len(json.loads(file.read_text())) == 3


def test_a_file_that_is_damaged_or_cannot_be_written_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(4, 8, 2, 256, 64, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(backend, "_measure", lambda _, name: None)
    damaged = tmp_path / "attention.json"
    damaged.write_text("{")
    assert fastest_backend(shape, damaged) is None
    assert fastest_backend(shape, damaged / "below a file" / "attention.json") is None
