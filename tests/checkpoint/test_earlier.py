"""A run that an earlier version began goes on in this one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Session
from shardwise.config import load_config
from tests.conftest import REPOSITORY

EARLIER = REPOSITORY / "tests" / "fixtures" / "checkpoint-0.1.0"
"""After step 5 of 14, and what version 0.1.0 itself came to afterwards."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as it was made with: sums are added up in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_checkpoint_of_version_0_1_0_resumes_bit_for_bit(tmp_path: Path, one_thread: None) -> None:
    expected = json.loads((EARLIER / "expected.json").read_text())
    same_arithmetic = expected["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    same_arithmetic &= expected["cpu"] == torch.backends.cpu.get_cpu_capability()
    checkpoint = shutil.copytree(EARLIER / "step-00000005", tmp_path / "checkpoints" / "step-00000005")
    with Session(load_config(EARLIER / "config.yaml", [f"run_dir={tmp_path}"])) as session:
        session.prepare()
        assert session.resume(str(checkpoint)) == checkpoint
        optimizer = session.parts.optimizer
        assert session.steps_done == 5
        assert [session.cursor.epoch, session.cursor.consumed] == expected["saved"]["cursor"]
        assert _digest_of_weights(session.model) == expected["saved"]["weights"]
        assert _digest_of_moments(optimizer) == expected["saved"]["moments"]
        for batch in session.batches():
            result = session.step(batch)
            step = str(session.steps_done)
            close = 0.0 if same_arithmetic else 1e-5  # another processor or PyTorch adds up in another order
            assert session.loss(result) == pytest.approx(expected["losses"][step], rel=close, abs=0)
            assert result.grad_norm == pytest.approx(expected["norms"][step], rel=10 * close, abs=0)
        assert session.steps_done == expected["steps"]
        if same_arithmetic:
            assert _digest_of_weights(session.model) == expected["final"]["weights"]
            assert _digest_of_moments(optimizer) == expected["final"]["moments"]


def _digest_of_weights(model: nn.Module) -> str:
    return _digest(sorted(model.state_dict().items()))


def _digest_of_moments(optimizer: torch.optim.Optimizer) -> str:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return _digest(item for parameter in parameters for item in sorted(optimizer.state[parameter].items()))


def _digest(named: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
