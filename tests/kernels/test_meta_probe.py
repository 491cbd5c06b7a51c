"""A look at a Transformers model leaves it as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwise.kernels.meta_probe import without_values


def test_a_config_is_as_it_was_after_a_look_that_failed() -> None:
    config = SimpleNamespace(pad_token_id=3, kind="eager")
    with pytest.raises(ZeroDivisionError), without_values(config, kind="looking"):
        assert (config.pad_token_id, config.kind) == (None, "looking") and not torch.is_grad_enabled()
        _ = 1 / 0
    assert (config.pad_token_id, config.kind) == (3, "eager") and torch.is_grad_enabled()
