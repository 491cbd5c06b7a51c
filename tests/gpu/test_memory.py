"""On a real GPU: running out of memory says what filled it, and batch_size: auto finds what fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.loss_guard import BAD_SAMPLES
from shardwise.tasks import Loss, Task
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_loss_guard import TEXT as NUMBERS
from tests.distributed.test_loss_guard import _train
from tests.tasks import Ragged

pytestmark = pytest.mark.gpu

GIB = 2**30
STEPS = "training: {batch_size: %s, max_steps: 3, optimizer: {lr: 0.001}}\n"


class Greedy(Ragged):
    """In its second step it takes half of what is free, and then asks for all of it."""

    forwards = 0
    loss_is_a_sum = False  # it is one, but the forward passes of the check would be counted

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        Greedy.forwards += 1
        if Greedy.forwards == 2:
            free, capacity = torch.cuda.mem_get_info()
            half = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
            more = torch.empty(capacity, dtype=torch.uint8, device="cuda")
            del half, more
        return super().loss(model, batch)


class Deep(Task):
    """About 100 MiB of activations per sample."""

    def train_data(self) -> Any:
        return torch.randn(512, 8, generator=torch.Generator().manual_seed(0))

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(1024, 1024), nn.GELU())))

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        rows = batch.repeat_interleave(512, dim=0).repeat(1, 128)
        return Loss(model(rows).square().mean(dim=1).sum(), len(batch))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [layer for layer in model.children() if isinstance(layer, nn.Linear)]


def test_running_out_says_what_filled_the_memory_and_what_to_do(ranks: RankPool, tmp_path: Path) -> None:
    text = "task: tests.gpu.test_memory:Greedy\n" + STEPS % 4
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(AssertionError) as failure:
        ranks.run(1, _greedy, text, ["training.strategy=single", "training.device=cuda", f"run_dir={tmp_path}"])
    said = str(failure.value)
    assert "step 2: out of memory:" in said
    held = re.search(
        r"held: weights (\S+) MiB, gradients \S+ MiB, optimizer state (\S+) MiB, activations and other (\S+) GiB", said
    )
    assert held is not None, said
    weights, optimizer, activations = map(float, held.groups())
    assert weights > 0
    assert optimizer == pytest.approx(2 * weights, rel=0.1)
    assert activations * GIB == pytest.approx(free / 2, rel=0.1)
    assert (
        "training.batch_size: 2 (training.gradient_accumulation: 2" in said and "training.precision: bf16-mixed" in said
    )


def _greedy(text: str, overrides: list[str]) -> None:
    Greedy.forwards = 0
    try:
        work.train(text, overrides)
    finally:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_auto_finds_a_size_that_fits_and_trains_as_if_it_had_been_written(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    text = "task: tests.gpu.test_memory:Deep\n"
    overrides = [f"training.strategy={strategy}", "training.device=cuda", f"run_dir={tmp_path}"]
    auto = ranks.run(1, _train_in, 4 * GIB, text + STEPS % "auto", overrides)[0]
    size = len(auto["ids"][0])
    assert 4 <= size <= 64, auto["reserved"] / GIB
    assert auto["reserved"] <= 4 * GIB
    fixed = ranks.run(1, work.train, text + STEPS % size, overrides)[0]
    assert auto["losses"] == fixed["losses"] and auto["norms"] == fixed["norms"]
    for name, weight in fixed["weights"].items():
        assert torch.equal(auto["weights"][name], weight), name


def _train_in(room: int, text: str, overrides: list[str]) -> dict[str, Any]:
    """Train with so much memory, as far as the search knows."""
    from shardwise.engine import batch_size

    original = batch_size.torch.cuda.mem_get_info
    torch.cuda.empty_cache()
    batch_size.torch.cuda.mem_get_info = lambda device=None: (room - torch.cuda.memory_reserved(), room)
    try:
        record = work.train(text, overrides)
        record["reserved"] = torch.cuda.max_memory_reserved()
        return record
    finally:
        batch_size.torch.cuda.mem_get_info = original


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_auto_survives_running_out_while_it_tries(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    text = "task: tests.gpu.test_memory:Deep\n" + STEPS % "auto"
    overrides = [f"training.strategy={strategy}", "training.device=cuda", f"run_dir={tmp_path}"]
    size = ranks.run(1, _train_confined, 4 * GIB, text, overrides)[0]
    assert 4 <= size <= 64


def _train_confined(room: int, text: str, overrides: list[str]) -> int:
    """PyTorch itself refuses more than this, and the search does not know."""
    _, capacity = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(room / capacity)
    try:
        return len(work.train(text, overrides)["ids"][0])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_forward_pass_is_timed_on_the_device(ranks: RankPool, tmp_path: Path) -> None:
    text = "task: tests.gpu.test_memory:Deep\n" + STEPS % 8
    overrides = ["training.strategy=single", "training.device=cuda", f"run_dir={tmp_path}"]
    for times in ranks.run(1, work.with_session, text, overrides, _times)[0]:
        assert 0 < times["forward"] < times["agree"] + times["compute"] + times["update"]


def _times(session: Any) -> list[dict[str, float]]:
    return [session.step(batch).times for batch in session.batches()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_rolled_back_run_equals_one_that_never_saw_the_batch(
    ranks: RankPool, tmp_path: Path, strategy: str, precision: str
) -> None:
    text = NUMBERS.format(task="Poisoned")
    common = [f"training.strategy={strategy}", f"training.precision={precision}", "training.device=cuda"]
    rolled = ranks.run(
        1, work.with_session, text, [*common, f"run_dir={tmp_path}/a", "training.on_nonfinite=rollback"], _train
    )[0]
    assert rolled["rollbacks"] == 2
    clean = ranks.run(
        1, work.with_session, text, [*common, f"run_dir={tmp_path}/b"], _train, rolled["skipped_batches"]
    )[0]
    for name, weight in clean["weights"].items():
        assert torch.equal(rolled["weights"][name], weight), name
    assert len((tmp_path / "a" / BAD_SAMPLES).read_text().splitlines()) == 2
