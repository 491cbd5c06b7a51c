"""A head that answers with the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwise.kernels.head import LossHead, summed_loss, use_loss_head

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
WIDE = {**SIZES, "intermediate_size": 64}


def model_of(kind: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    numbers = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **numbers, **sizes)).eval()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", WIDE),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}),
        ("qwen2", {**WIDE, "num_key_value_heads": 2}),
        ("gpt_neox", WIDE),
    ],
)
def test_loss_and_gradients_are_those_of_the_logits(kind: str, sizes: dict[str, Any]) -> None:
    model = model_of(kind, sizes)
    ids, targets = torch.randint(3, 100, (2, 9)), torch.randint(0, 100, (2, 9))
    targets[0, :2] = -100
    names = list(model.state_dict())
    whole = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(whole, list(model.parameters()))
    assert use_loss_head(model)
    loss = summed_loss(model, targets, input_ids=ids)
    torch.testing.assert_close(loss, whole)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names and model(input_ids=ids).logits.shape == (2, 9, 100)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gemma2", {**WIDE, "num_key_value_heads": 2, "head_dim": 8}),
        ("granite", {**WIDE, "logits_scaling": 3.0}),
        ("cohere", {**WIDE, "num_key_value_heads": 2}),
    ],
)
def test_a_model_that_changes_its_logits_afterwards_keeps_its_head(kind: str, sizes: dict[str, Any]) -> None:
    model = model_of(kind, sizes)
    ids, targets = torch.randint(3, 100, (2, 9)), torch.randint(0, 100, (2, 9))
    assert not use_loss_head(model) and not isinstance(model.get_output_embeddings(), LossHead)
    logits = model(input_ids=ids).logits
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(summed_loss(model, targets, input_ids=ids), whole)


def test_in_fp16_gradients_are_made_on_the_way_back_when_the_loss_has_been_scaled() -> None:
    model = model_of("llama", WIDE)
    use_loss_head(model)
    ids, targets = torch.randint(3, 100, (2, 9)), torch.randint(0, 100, (2, 9))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = summed_loss(model, targets, input_ids=ids)
    assert "NllLoss" in type(loss.grad_fn).__name__
