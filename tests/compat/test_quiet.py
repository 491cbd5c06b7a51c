"""What PyTorch says to itself does not reach the screen; everything else does."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.compat.quiet import WARNINGS, quiet_pytorch
from tests.cli.program import environment, shardwise


@pytest.fixture
def seen() -> Iterator[list[warnings.WarningMessage]]:
    """As in a program that has set no filter of its own."""
    with warnings.catch_warnings(record=True) as found:
        warnings.resetwarnings()
        quiet_pytorch()
        yield found


def warn(message: str, category: type[Warning], module: str) -> None:
    warnings.warn_explicit(message, category, f"{module}.py", 1, module)


INTERNAL = [
    ("`_x` is deprecated", FutureWarning, "torch.distributed.tensor._api"),
    ("`_x` is deprecated", FutureWarning, "torch.distributed.pipelining.schedules"),
    ("`_x` is deprecated", FutureWarning, "torch._inductor.compile_fx"),
    ("Flash attention kernel not used because: (Triggered at …)", UserWarning, "my.model"),
    (
        "Memory efficient kernel not used because: (Triggered …)",
        UserWarning,
        "transformers.integrations.sdpa_attention",
    ),
    (
        "barrier(): using the device under current context. You can specify",
        UserWarning,
        "torch.distributed.distributed_c10d",
    ),
    ("Grad strides do not match bucket view strides. This may indicate", UserWarning, "torch.autograd.graph"),
    ("\nOnline softmax is disabled on the fly since Inductor decides", UserWarning, "torch._inductor.lowering"),
    ("FSDP2-wrapped module (FSDPCellEncoder) returned a view tensor. An in-place op on this", UserWarning, "torch.x"),
    (
        "torch.distributed is disabled, unavailable or uninitialized, assuming",
        UserWarning,
        "torch.distributed.checkpoint.x",
    ),
]
OF_THE_USER = [
    ("`_x` is deprecated", FutureWarning, "my.model"),
    ("`_x` is deprecated", FutureWarning, "torch_geometric.nn"),
    ("`torch.cuda.amp.autocast(args...)` is deprecated", FutureWarning, "transformers.models.mine"),
    ("the learning rate is odd", UserWarning, "my.model"),
    ("the learning rate is odd", UserWarning, "torch.optim.adamw"),
    ("FSDP2-wrapped module (FSDPMine) returned a view tensor. An in-place op on this view", UserWarning, "torch.x"),
    (
        "This DataLoader will create 9 worker processes in total. Our suggested max",
        UserWarning,
        "torch.utils.data.dataloader",
    ),
    ("Detected call of `lr_scheduler.step()` before `optimizer.step()`", UserWarning, "torch.optim.lr_scheduler"),
    (
        "find_unused_parameters=True was specified in DDP constructor, but did not find",
        UserWarning,
        "torch.nn.modules.module",
    ),
    ("I say: Flash attention kernel not used because I dislike it", UserWarning, "my.model"),
]


@pytest.mark.parametrize(("message", "category", "module"), INTERNAL)
def test_what_pytorch_says_to_itself_is_not_seen(
    seen: list[warnings.WarningMessage], message: str, category: type[Warning], module: str
) -> None:
    warn(message, category, module)
    assert not seen


@pytest.mark.parametrize(("message", "category", "module"), OF_THE_USER)
def test_what_a_user_can_act_on_is_seen(
    seen: list[warnings.WarningMessage], message: str, category: type[Warning], module: str
) -> None:
    warn(message, category, module)
    assert [str(each.message) for each in seen] == [message]


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_filter_of_the_users_own_counts_before_ours(action: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.simplefilter(action)  # type: ignore[arg-type]
        quiet_pytorch()
        if action == "error":
            with pytest.raises(FutureWarning):
                warn(*INTERNAL[0])
        else:
            warn(*INTERNAL[0])
            assert len(seen) == 1


def test_to_be_quiet_twice_adds_nothing(seen: list[warnings.WarningMessage]) -> None:
    before = list(warnings.filters)
    assert len(before) == len(WARNINGS)
    quiet_pytorch()
    assert list(warnings.filters) == before


def test_every_filter_names_a_message_or_a_module_of_pytorch() -> None:
    """One that names neither would hide a user's own."""
    assert all(each.message or each.module.startswith("torch") for each in WARNINGS)


def test_redistribution_is_quiet() -> None:
    """DTensor tells of every collective that goes over two axes of a mesh, once per tensor: nobody can act on it."""
    quiet_pytorch()
    assert not logging.getLogger("torch.distributed.tensor._redistribute").isEnabledFor(logging.WARNING)


TASK = """
import warnings

from tests.tasks import Ragged


class Loud(Ragged):
    def evaluate(self, model, batch):
        warnings.warn("my own words")
        warnings.warn_explicit("to itself", FutureWarning, "a.py", 1, "torch.distributed.tensor._api")
        return super().evaluate(model, batch)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_shows_the_users_warnings_and_not_pytorchs(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "a.yaml").write_text(f"task: mine:Loud\ntraining: {{num_gpus: {ranks}, max_steps: 1}}\n")
    done = shardwise(tmp_path, "train", "a.yaml")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "UserWarning: my own words" in said and "to itself" not in said and said.count("Warning") == 1


def test_a_loop_of_ones_own_is_quiet_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "loop.py").write_text(
        "from shardwise import Session\nfrom shardwise.config import parse_config\n\n"
        "with Session(parse_config('task: mine:Loud')) as session:\n    session.prepare()\n    session.evaluate()\n"
    )
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert "UserWarning: my own words" in done.stderr and done.stderr.count("Warning") == 1
