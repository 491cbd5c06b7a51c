"""Interrupted and resumed: the run that was never interrupted, bit for bit; on other ranks, the same curve."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve
from tests.tasks import Ragged

CONFIG = """
task: tests.tasks:Ragged
training:
  total_batch_size: 12
  batch_size: 3
  gradient_clip: 0.5
  max_epochs: 2
  optimizer: {name: adamw, lr: 0.01, weight_decay: 0.1}
  scheduler: {name: cosine_warmup, warmup_steps: 3}
"""
STEPS = 10


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_resumed_at_any_step_it_is_bit_for_bit_the_uninterrupted_run(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    """With dropout, so that random states matter, and in fp16, so that the scaler does."""
    size = 1 if strategy == "single" else 2
    overrides = [f"training.strategy={strategy}", "model.dropout=0.2", "training.precision=16-mixed"]
    whole = ranks.run(size, work.train, CONFIG, overrides)[0]
    assert len(whole["losses"]) == STEPS
    saved = [*overrides, "training.save_top_k=99", f"run_dir={tmp_path / 'saved'}"]
    head = ranks.run(size, functools.partial(work.train, save_each=True), CONFIG, saved)[0]
    for step in range(STEPS + 1):
        # As if the run had been killed then, and this were what is left of it.
        left = Path("checkpoints") / f"step-{step:08}"
        shutil.copytree(tmp_path / "saved" / left, tmp_path / str(step) / left)
        folder = [*overrides, f"run_dir={tmp_path / str(step)}"]
        tail = ranks.run(size, functools.partial(work.train, resume="latest"), CONFIG, folder)[0]
        assert tail["from"] == step
        for key in ("losses", "norms", "ids", "lrs"):
            assert head[key][:step] + tail[key] == whole[key], key
        for name, weight in whole["weights"].items():
            assert torch.equal(tail["weights"][name], weight), f"{name} differs after resuming at step {step}"


def test_resumed_on_four_two_and_one_ranks_and_across_strategies_the_curve_goes_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole = ranks.run(1, work.train, CONFIG, ["training.strategy=single", *work.folder_of(tmp_path / "whole")])[0]
    legs = [(4, "ddp", 2), (2, "fsdp", 4), (1, "single", 6), (4, "fsdp", 8), (2, "ddp", 10)]
    folder = work.folder_of(tmp_path / "legs")
    parts: list[dict[str, Any]] = []
    for size, strategy, until in legs:
        job = functools.partial(work.train, steps=until, resume="auto", save=True)
        parts.append(ranks.run(size, job, CONFIG, [f"training.strategy={strategy}", *folder])[0])
    joined = {key: [value for part in parts for value in part[key]] for key in ("losses", "norms", "lrs")}
    assert_same_curve({**joined, "weights": parts[-1]["weights"]}, whole)


def test_every_sample_of_an_epoch_is_used_once_across_a_change_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folder = work.folder_of(tmp_path)
    seen: list[int] = []
    for size, until in ((4, 2), (1, 3), (2, 5)):
        job = functools.partial(work.train, steps=until, resume="auto", save=True)
        for result in ranks.run(size, job, CONFIG, [f"training.strategy={'single' if size == 1 else 'ddp'}", *folder]):
            seen += [index for ids in result["ids"] for index in ids]
    assert sorted(seen) == list(range(53))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", "training.save_top_k=0", *work.folder_of(tmp_path)]
    ranks.run(2, functools.partial(work.train, steps=3, save=True), CONFIG, folder)
    ranks.run(2, functools.partial(work.train, steps=6, save=True, resume="latest"), CONFIG, folder)
    shard = next((tmp_path / "checkpoints" / "step-00000006").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    result = ranks.run(2, functools.partial(work.train, resume="auto"), CONFIG, folder)[0]
    assert result["from"] == 3
    assert (tmp_path / "checkpoints" / "damaged-step-00000006").is_dir()


def test_going_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(ranks: RankPool, tmp_path: Path) -> None:
    """Otherwise the next resume would take the abandoned branch for the newest."""
    folder = ["training.strategy=ddp", "training.save_top_k=9", *work.folder_of(tmp_path)]
    job = functools.partial(work.train, save=True, evaluate=True)  # with a metric, so that save_top_k keeps them all
    for step in (2, 4, 6):
        ranks.run(2, functools.partial(job, steps=step, resume="auto"), CONFIG, folder)
    earlier = str(tmp_path / "checkpoints" / "step-00000002")
    assert ranks.run(2, functools.partial(job, steps=3, resume=earlier), CONFIG, folder)[0]["from"] == 2
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-00000002", "step-00000003", "superseded-step-00000004", "superseded-step-00000006"}
    assert ranks.run(2, functools.partial(job, resume="auto"), CONFIG, folder)[0]["from"] == 3


def test_a_checkpoint_of_other_data_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=single", *work.folder_of(tmp_path)]
    ranks.run(1, functools.partial(work.train, steps=2, save=True), CONFIG, folder)
    with pytest.raises(AssertionError, match="53 training samples and seed 0, but there are 54"):
        ranks.run(1, functools.partial(work.train, resume="auto"), CONFIG, [*folder, "data.samples=54"])


def test_a_checkpoint_of_another_model_is_refused_with_the_reason(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", *work.folder_of(tmp_path)]
    ranks.run(2, functools.partial(work.train, steps=2, save=True), CONFIG, folder)
    with pytest.raises(AssertionError, match="does not fit this model"):
        ranks.run(2, functools.partial(work.train, resume="auto"), CONFIG, [*folder, "model.width=32"])


def test_a_changed_setting_of_the_optimizer_counts_after_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=single", *work.folder_of(tmp_path)]
    ranks.run(1, functools.partial(work.train, steps=2, save=True), CONFIG, folder)
    assert ranks.run(1, work.with_session, CONFIG, [*folder, "training.optimizer.weight_decay=0.5"], _decay) == [
        [0.5, 0.0]
    ]


class Normed(Ragged):
    """With running statistics, which every rank sees differently, and a parameter that never gets a gradient."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.never_used = nn.Linear(2, 2)
        model.norm = nn.Sequential(_Flat(nn.BatchNorm1d(16)), model.norm)
        return model


class _Flat(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])


NORMED = CONFIG.replace("tests.tasks:Ragged", "tests.distributed.test_resume:Normed")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_running_statistics_and_unused_parameters_resume_bit_for_bit(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    size = 1 if strategy == "single" else 2
    overrides = [f"training.strategy={strategy}", "training.ddp.find_unused_parameters=true", *work.folder_of(tmp_path)]
    job = functools.partial(work.train, evaluate=True)
    whole = ranks.run(size, job, NORMED, overrides)
    ranks.run(size, functools.partial(work.train, steps=4, save=True), NORMED, overrides)
    parts = ranks.run(size, functools.partial(job, resume="latest"), NORMED, overrides)
    for rank in range(size):
        assert parts[rank]["metrics"] == whole[0]["metrics"]
        for name, value in whole[0]["weights"].items():
            if "never_used" not in name:
                assert torch.equal(parts[rank]["weights"][name], value), f"{name} on rank {rank}"


@pytest.mark.parametrize(
    "optimizer",
    [
        "{name: adam, lr: 0.01, weight_decay: 0.1}",
        "{name: sgd, lr: 0.1, momentum: 0.9}",
        "{name: muon, lr: 0.02, weight_decay: 0.1}",
    ],
)
def test_a_checkpoint_before_the_first_step_changes_nothing(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    overrides = ["training.strategy=single", f"training.optimizer={optimizer}", *work.folder_of(tmp_path)]
    whole = ranks.run(1, work.train, CONFIG, overrides)[0]
    ranks.run(1, functools.partial(work.train, steps=0, save=True), CONFIG, overrides)
    resumed = ranks.run(1, functools.partial(work.train, resume="latest"), CONFIG, overrides)[0]
    assert resumed["losses"] == whole["losses"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1"])
def test_a_run_with_muon_resumes_bit_for_bit(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    """In fp16, too: a scaler asks an optimizer what it can do by itself."""
    for precision in ("32-true", "16-mixed"):
        overrides = [
            f"training.strategy={strategy}",
            "training.optimizer={name: muon, lr: 0.02, weight_decay: 0.1}",
            f"training.precision={precision}",
            *work.folder_of(tmp_path / precision),
        ]
        work.resumed_bit_for_bit(ranks, 1 if strategy == "single" else 2, CONFIG, overrides, steps=4)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_resumed_with_another_global_batch_the_epochs_are_still_completed(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    text = "task: tests.tasks:Ragged\nname: r\ntraining: {batch_size: 2, max_epochs: 2, max_steps: 400}\n"
    ranks.run(before, work.run_fit, text, ["training.max_steps=8"], str(tmp_path))
    ended = ranks.run(after, functools.partial(work.run_fit, resume="auto"), text, [], str(tmp_path))[0]
    used, left = 8 * 2 * before, 2 * 53 - 8 * 2 * before
    if used > 53:  # the first epoch ended with a short batch
        used = 53 + (8 - -(-53 // (2 * before))) * 2 * before
        left = 2 * 53 - used
    in_epoch = left if used >= 53 else 53 - used
    steps = -(-in_epoch // (2 * after)) + (0 if used >= 53 else -(-53 // (2 * after)))
    assert ended["steps"] == 8 + steps
    assert (tmp_path / "runs" / "r" / "checkpoints" / f"step-{ended['steps']:08d}").is_dir()


def test_a_new_run_in_a_folder_with_older_checkpoints_keeps_its_own(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", *work.folder_of(tmp_path)]
    ranks.run(2, functools.partial(work.train, steps=6, save=True), CONFIG, folder)
    new = ranks.run(2, functools.partial(work.train, steps=2, save=True), CONFIG, folder)[0]
    assert Path(new["checkpoint"]).is_dir()
    assert ranks.run(2, functools.partial(work.train, resume="auto"), CONFIG, folder)[0]["from"] == 2


def test_the_best_metric_resumes(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", *work.folder_of(tmp_path)]
    before = ranks.run(2, work.with_session, CONFIG, folder, _save_twice)[0]
    assert before == 0.5
    assert ranks.run(2, work.with_session, CONFIG, folder, _best_after_resume) == [0.5, 0.5]


def _save_twice(session: Any) -> float | None:
    batches = session.batches()
    for loss in (0.5, 0.7):  # the later is worse, so the best is not simply the last
        session.step(next(batches))
        session.save({"loss": loss})
    return session.best_metric


def _best_after_resume(session: Any) -> float | None:
    session.resume("latest")
    return session.best_metric


def _decay(session: Any) -> list[float]:
    session.resume("latest")
    return [group["weight_decay"] for group in session.parts.optimizer.param_groups]
