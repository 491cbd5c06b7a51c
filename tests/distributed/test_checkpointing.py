"""Checkpoints while several ranks train: written aside from the steps, and no failure of one stops them."""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import CheckpointError
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_resume import CONFIG


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_a_run_that_saves_at_every_step_computes_what_one_that_never_does(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    overrides = [f"training.strategy={strategy}", "model.dropout=0.2", "training.save_top_k=99"]
    never = ranks.run(2, work.train, CONFIG, overrides)[0]
    always = ranks.run(2, work.with_session, CONFIG, [*overrides, *work.folder_of(tmp_path)], _save_at_every_step)[0]
    assert always["losses"] == never["losses"]
    middle = str(tmp_path / "checkpoints" / "step-00000004")
    resumed = ranks.run(
        2, functools.partial(work.train, resume=middle), CONFIG, [*overrides, *work.folder_of(tmp_path)]
    )
    assert resumed[0]["from"] == 4
    assert resumed[0]["losses"] == never["losses"][4:]
    assert all(torch.equal(resumed[0]["weights"][name], value) for name, value in never["weights"].items())


def _save_at_every_step(session: Any) -> dict[str, Any]:
    losses = []
    for batch in session.batches():
        losses.append(session.loss(session.step(batch)))
        session.save({"loss": losses[-1]})  # with a metric, so that save_top_k keeps all
    return {"losses": losses}


def test_one_ranks_full_disk_is_told_at_the_next_step_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", *work.folder_of(tmp_path)]
    results = ranks.run(2, work.with_session, CONFIG, folder, _disk_full_on_rank_one)
    for problems, steps, in_place in results:
        ((step, problem),) = problems
        assert step == 2
        assert problem is not None and "rank 1: [Errno 28] No space left on device" in problem
        assert steps == 4
        assert in_place == ["step-00000004"], "and the next one is whole; nothing is left of the other"


def _disk_full_on_rank_one(session: Any) -> tuple[list[tuple[int, str | None]], int, list[str]]:
    heard: list[tuple[int, str | None]] = []
    session.checkpoints.on_written = lambda written: (
        heard.append((written.step, written.problem)) if written.problem else None
    )
    batches = session.batches()
    for _ in range(2):
        session.step(next(batches))
    with _disk_full(session, on=[1]):
        session.save()
        session.checkpoints.saver._join(None)
    assert not heard, "a thread cannot speak up in the middle of a step"
    session.step(next(batches))
    assert session.checkpoints.saved_at is None
    session.step(next(batches))
    session.save()
    session.wait()
    return heard, session.steps_done, sorted(path.name for path in session.checkpoints.store.folder.iterdir())


@contextmanager
def _disk_full(session: Any, on: Sequence[int]) -> Iterator[None]:
    """Within it, these ranks cannot write a checkpoint."""

    def no_space(phase: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = session.checkpoints.saver
    before = saver.on_phase
    if session.world.rank in on:
        saver.on_phase = no_space
    try:
        yield
    finally:
        saver.on_phase = before


def test_a_last_checkpoint_that_could_not_be_written_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", *work.folder_of(tmp_path)]
    for said in ranks.run(2, work.with_session, CONFIG, folder, _last_one_fails):
        assert said.startswith("the checkpoint of step 1 could not be written to ")


def _last_one_fails(session: Any) -> str:
    session.step(next(session.batches()))
    with _disk_full(session, on=[0]):
        session.save()
        with pytest.raises(CheckpointError) as caught:
            session.wait()
    return str(caught.value)


def test_written_at_once_where_the_config_says_so(ranks: RankPool, tmp_path: Path) -> None:
    folder = ["training.strategy=ddp", "training.async_checkpoint=false", *work.folder_of(tmp_path)]
    assert ranks.run(2, work.with_session, CONFIG, folder, _is_in_place) == [True, True]


def _is_in_place(session: Any) -> bool:
    session.step(next(session.batches()))
    return bool(session.save().is_dir())


def test_of_replicated_tensors_every_rank_writes_a_part(ranks: RankPool, tmp_path: Path) -> None:
    """And copies no more than that: with ddp on many devices, the stall shrinks with their number."""
    folder = ["training.strategy=ddp", *work.folder_of(tmp_path)]
    copied, whole = zip(*ranks.run(2, work.with_session, CONFIG, folder, _bytes_copied), strict=True)
    assert sum(copied) == whole[0]
    assert max(copied) < 0.7 * whole[0]


def _bytes_copied(session: Any) -> tuple[int, int]:
    session.step(next(session.batches()))
    session.save()
    session.wait()
    own = sum(body.numel() for file in session.checkpoints.saver._stage.files for body in file.body)
    tensors = [*session.model.state_dict().values()]
    tensors += [value for moments in session.parts.optimizer.state.values() for value in moments.values()]
    unique = {(tensor.data_ptr(), tensor.shape): tensor.nbytes for tensor in tensors}
    tied = sum(tensor.nbytes for tensor in tensors) - sum(unique.values())
    return own, sum(unique.values()) + tied


def test_where_every_checkpoint_is_waited_for_a_full_disk_does_not_end_the_run_either(
    ranks: RankPool, tmp_path: Path
) -> None:
    folder = ["training.strategy=ddp", "training.async_checkpoint=false", *work.folder_of(tmp_path)]
    for problems, steps, in_place in ranks.run(2, work.with_session, CONFIG, folder, _full_and_waited_for):
        assert len(problems) == 1 and "No space left on device" in problems[0]
        assert (steps, in_place) == (2, ["step-00000002"])


def _full_and_waited_for(session: Any) -> tuple[list[str], int, list[str]]:
    heard: list[str] = []
    session.checkpoints.on_written = lambda written: heard.append(written.problem) if written.problem else None
    batches = session.batches()
    session.step(next(batches))
    with _disk_full(session, on=[0, 1]):
        session.save()
    session.step(next(batches))
    session.save()
    return heard, session.steps_done, sorted(path.name for path in session.checkpoints.store.folder.iterdir())
