"""local_sgd: ranks go their own ways between two averages, meet in the average, and come back as they were after a resume."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.parallel import strategy_class
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.distributed.test_parity import assert_same_curve

# 53 samples in global batches of 12: four whole ones and a tail of 5. In step 5 one of four ranks has two, the others one.
CONFIG = """
task: tests.tasks:Ragged
training:
  total_batch_size: 12
  batch_size: 3
  max_epochs: 2
  optimizer: {name: adamw, lr: 0.01, weight_decay: 0.1}
  scheduler: {name: cosine_warmup, warmup_steps: 2}
"""
NORMED = CONFIG.replace("tests.tasks:Ragged", "tests.distributed.test_resume:Normed")
"""A model with running statistics, and a parameter that never gets a gradient."""
EVERY = 3


def local(folder: Path | None = None, *more: str, every: int = EVERY) -> list[str]:
    place = work.folder_of(folder) if folder else []
    return ["training.strategy=local_sgd", f"training.local_sgd.every={every}", *place, *more]


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


# ---------------------------------------------------------------- what its numbers are equal to


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["{name: sgd, lr: 0.1, momentum: 0.0}", "{name: sgd, lr: 0.1, momentum: 0.9}"])
def test_averaged_after_every_step_of_sgd_it_is_ddp(ranks: RankPool, size: int, optimizer: str) -> None:
    """Losses, weights and the evaluation, with ragged batches and ranks of unequal shares. Norms are those of each rank."""
    train, choice = functools.partial(work.train, evaluate=True), [f"training.optimizer={optimizer}"]
    ours = ranks.run(size, train, CONFIG, [*local(every=1), *choice])
    theirs = ranks.run(size, train, CONFIG, ["training.strategy=ddp", *choice])
    for mine, expected in zip(ours, theirs, strict=True):
        assert_same_curve({**mine, "norms": expected["norms"]}, expected)
        assert mine["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert mine["norms"] == ours[0]["norms"]
        assert all(own > mean for own, mean in zip(mine["norms"], expected["norms"], strict=True))


def test_averaged_less_often_it_is_not_ddp_and_says_so(ranks: RankPool) -> None:
    choice = ["training.optimizer={name: sgd, lr: 0.1, momentum: 0.0}"]
    ours = ranks.run(2, work.train, CONFIG, [*local(), *choice])[0]
    theirs = ranks.run(2, work.train, CONFIG, ["training.strategy=ddp", *choice])[0]
    with pytest.raises(AssertionError):
        assert_same_curve({**ours, "norms": theirs["norms"]}, theirs)
    assert "not those of one process" in strategy_class("local_sgd").unequal


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_one_rank_it_is_a_single_process(ranks: RankPool, precision: str) -> None:
    choice = ["training.gradient_clip=0.5", f"training.precision={precision}"]
    train = functools.partial(work.train, evaluate=True)
    ours = ranks.run(1, train, CONFIG, [*local(), *choice])[0]
    theirs = ranks.run(1, train, CONFIG, ["training.strategy=single", *choice])[0]
    assert ours == {**theirs, "weights": ours["weights"]}
    assert_equal(ours["weights"], theirs["weights"])


def test_it_learns_what_ddp_learns(ranks: RankPool) -> None:
    train = functools.partial(work.train, evaluate=True)
    theirs = ranks.run(2, train, CONFIG, ["training.strategy=ddp"])[0]["metrics"]["loss"]
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        ours = ranks.run(2, train, CONFIG, [*local(), f"training.precision={precision}"])[0]["metrics"]["loss"]
        assert ours == pytest.approx(theirs, rel=0.03), precision


# ---------------------------------------------------------------- apart and together


def test_ranks_have_the_same_weights_after_every_third_step_and_only_then(ranks: RankPool) -> None:
    """And the same running statistics."""
    first, second = ranks.run(2, work.with_session, NORMED, local(), _weights_after_each_step)
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(first, second, strict=True)]
    assert same == [False, False, True] * 3 + [False]


def _weights_after_each_step(session: Any) -> list[dict[str, Tensor]]:
    found = []
    for batch in session.batches():
        session.step(batch)
        found.append(work.full_weights(session))
    return found


def test_evaluations_and_checkpoints_do_not_change_the_run(ranks: RankPool, tmp_path: Path) -> None:
    undisturbed = ranks.run(2, work.train, NORMED, local())
    disturbed = ranks.run(2, work.with_session, NORMED, local(tmp_path), _evaluated_and_saved_at_every_step)
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert_equal(ours["weights"], theirs["weights"])
    means = [each["weights"]["norm.0.inner.running_mean"] for each in undisturbed]
    assert not torch.equal(*means), "the last step was no average"


def _evaluated_and_saved_at_every_step(session: Any) -> dict[str, Any]:
    losses = []
    for batch in session.batches():
        losses.append(session.loss(session.step(batch)))
        session.evaluate()
        session.save({"loss": 0.0})
    session.wait()
    return {"losses": losses, "weights": work.full_weights(session)}


def test_what_is_evaluated_and_saved_is_the_average(ranks: RankPool, tmp_path: Path) -> None:
    job = functools.partial(work.with_session, CONFIG, local(tmp_path), _state_after_four_steps)
    states = ranks.run(2, job)
    assert states[0]["metrics"] == states[1]["metrics"]
    single = ["training.strategy=single", *work.folder_of(tmp_path)]
    saved = ranks.run(1, work.with_session, CONFIG, single, _resumed_state)[0]
    for kind in ("weights", "moments"):
        for name, value in saved[kind].items():
            own = [each[kind][name] for each in states]
            assert name.endswith(".step") or not torch.equal(*own), f"{name}: the ranks have not gone their own ways"
            torch.testing.assert_close(value, torch.stack(own).mean(0), rtol=1e-6, atol=1e-8)
    assert saved["metrics"] == pytest.approx(states[0]["metrics"], rel=1e-6)


def _state_after_four_steps(session: Any) -> dict[str, Any]:
    for batch in session.batches():
        session.step(batch)
        if session.steps_done == 4:
            break
    metrics = session.evaluate()
    session.save(metrics)
    session.wait()
    return {"metrics": metrics, "weights": work.full_weights(session), "moments": _moments(session)}


def _resumed_state(session: Any) -> dict[str, Any]:
    session.resume("latest")
    return {"metrics": session.evaluate(), "weights": work.full_weights(session), "moments": _moments(session)}


def _moments(session: Any) -> dict[str, Tensor]:
    return {
        f"{number}.{key}": value.clone()
        for number, parameter in enumerate(session.parts.parameters)
        for key, value in session.parts.optimizer.state[parameter].items()
    }


# ---------------------------------------------------------------- resume


def test_every_rank_gets_its_own_back(ranks: RankPool, tmp_path: Path) -> None:
    """Weights, running statistics and moments; each rank evaluates with the average before and after."""
    saved = ranks.run(2, work.with_session, NORMED, local(tmp_path), _state_after_four_steps)
    resumed = ranks.run(2, work.with_session, NORMED, local(tmp_path), _resumed_state)
    for ours, theirs in zip(resumed, saved, strict=True):
        assert ours["metrics"] == theirs["metrics"]
        assert_equal(ours["weights"], theirs["weights"])
        assert_equal(ours["moments"], theirs["moments"])
    assert not torch.equal(*(each["weights"]["norm.0.inner.running_mean"] for each in resumed))


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("optimizer", ["{name: adamw, lr: 0.01}", "{name: sgd, lr: 0.1, momentum: 0.9}"])
def test_it_resumes_bit_for_bit_between_two_averages(
    ranks: RankPool, tmp_path: Path, steps: int, optimizer: str
) -> None:
    overrides = [*local(tmp_path), f"training.optimizer={optimizer}"]
    whole = ranks.run(2, work.train, NORMED, overrides)
    head = ranks.run(2, functools.partial(work.train, steps=steps, save=True), NORMED, overrides)
    tail = ranks.run(2, functools.partial(work.train, resume="latest"), NORMED, overrides)
    for before, after, undisturbed in zip(head, tail, whole, strict=True):
        assert before["losses"] + after["losses"] == undisturbed["losses"]
        assert before["norms"] + after["norms"] == undisturbed["norms"]
        assert_equal(after["weights"], undisturbed["weights"])


@pytest.mark.parametrize(
    ("before", "after", "ranks_after", "lost"),
    [
        (local(), local(), 2, False),
        (local(), local(), 4, True),
        (local(), local(), 1, False),
        (local(), ["training.strategy=ddp"], 2, False),
        (local(), ["training.strategy=fsdp"], 2, False),
        (local(), ["training.strategy=ddp", "training.ddp.comm_hook=powersgd"], 2, True),
        (["training.strategy=ddp"], local(), 2, True),
        (["training.strategy=ddp", "training.ddp.comm_hook=powersgd"], local(), 2, True),
    ],
)
def test_a_run_goes_on_from_the_average_on_other_ranks_and_under_other_strategies(
    ranks: RankPool, tmp_path: Path, before: list[str], after: list[str], ranks_after: int, lost: bool
) -> None:
    folder = work.folder_of(tmp_path)
    ranks.run(2, functools.partial(work.train, steps=4, save=True), CONFIG, [*before, *folder])
    batch = [f"training.batch_size={3 if ranks_after > 1 else 6}"]
    found = ranks.run(ranks_after, work.with_session, CONFIG, [*after, *folder, *batch], _goes_on)
    assert all(each["lost"] == lost for each in found)
    assert all(math.isfinite(loss) for each in found for loss in each["losses"]) and len(found[0]["losses"]) == 6
    if ranks_after != 2:
        assert found[0]["begins"] == pytest.approx(found[-1]["begins"], abs=0), "all from the same weights"


def _goes_on(session: Any) -> dict[str, Any]:
    session.resume("latest")
    begins = float(sum(weight.double().sum() for weight in work.full_weights(session).values()))
    losses = [session.loss(session.step(batch)) for batch in session.batches()]
    return {"lost": session.extra_state_lost, "losses": losses, "begins": begins}


# ---------------------------------------------------------------- the same branch on every rank


def test_all_ranks_clip_by_the_same_factor(ranks: RankPool) -> None:
    """With a rate of 1, a rank's way in the first step is its gradient, clipped."""
    sgd = "training.optimizer={name: sgd, lr: 1.0, momentum: 0.0, weight_decay: 0.0}"
    free, clipped = (
        ranks.run(2, work.with_session, CONFIG, local(None, sgd, "training.scheduler={name: constant}", limit), _way)
        for limit in ("training.gradient_clip=null", "training.gradient_clip=0.01")
    )
    norm = free[0]["norm"]
    assert norm == free[1]["norm"] == clipped[0]["norm"] == clipped[1]["norm"]
    assert norm == pytest.approx(math.sqrt(sum(each["way"] ** 2 for each in free) / 2), rel=1e-4)
    assert free[0]["way"] != pytest.approx(free[1]["way"], rel=1e-2)
    for ours, theirs in zip(clipped, free, strict=True):
        assert ours["way"] == pytest.approx(theirs["way"] * 0.01 / norm, rel=1e-3)


def _way(session: Any) -> dict[str, float]:
    before = work.full_weights(session)
    before.pop("head.weight")  # tied
    result = session.step(next(session.batches()))
    after = work.full_weights(session)
    way = torch.stack([(after[name] - weight).double().norm() for name, weight in before.items()]).norm()
    return {"norm": result.grad_norm, "way": float(way)}


def test_a_bad_number_on_one_rank_is_skipped_by_all_and_the_average_comes_after_as_many_updates(
    ranks: RankPool, tmp_path: Path
) -> None:
    text = CONFIG.replace("tests.tasks:Ragged", "tests.distributed.test_loss_guard:Poisoned")
    overrides = [*local(tmp_path), "training.on_nonfinite=skip"]
    first, second = ranks.run(2, work.with_session, text, overrides, _skipped_and_weights)
    assert first["skipped"] == second["skipped"] and sum(first["skipped"]) == 2, "once in each epoch"
    updates = 0
    for skipped, mine, theirs in zip(first["skipped"], first["weights"], second["weights"], strict=True):
        updates += not skipped
        assert all(torch.equal(mine[name], theirs[name]) for name in mine) == (updates % EVERY == 0)


def _skipped_and_weights(session: Any) -> dict[str, Any]:
    skipped, weights = [], []
    for batch in session.batches():
        skipped.append(session.step(batch).skipped)
        weights.append(work.full_weights(session))
    return {"skipped": skipped, "weights": weights}


# ---------------------------------------------------------------- what it says


REFUSED = {
    "training.precision=16-mixed": "use bf16-mixed",
    "training.ddp.comm_hook=fp16": "works under ddp and zero1, not under local_sgd",
    "training.sync_batch_norm=true": "between two averages the ranks exchange nothing.* use ddp",
    "training.local_sgd.every=0": "0 is not allowed. Allowed: 1 or more",
    "training.local_sgd.evry=2": "Nearest: training.local_sgd.every",
}


@pytest.mark.parametrize("choice", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(ranks: RankPool, choice: str) -> None:
    with pytest.raises(AssertionError, match=REFUSED[choice]):
        ranks.run(2, work.train, CONFIG, [*local(), choice])


def test_the_log_says_how_little_is_sent_and_when_the_ranks_lose_their_own(ranks: RankPool, tmp_path: Path) -> None:
    run = functools.partial(work.run_fit, CONFIG, folder=str(tmp_path))
    sizes = ["model.width=64", "training.max_steps=4"]
    said = ranks.run(2, run, [*local(every=8), *sizes])[0]["output"]
    assert (
        "weights are averaged every 8 step(s): 37.5 KiB per step and rank on average, where ddp hands over 300 KiB"
        in said
    )
    again = functools.partial(run, resume="auto")
    said = ranks.run(4, again, [*local(every=8), *sizes, "training.max_steps=5"])[0]["output"]
    assert "warning: the checkpoint has no weights and moments of each of this many ranks" in said
    said = ranks.run(1, functools.partial(run, fresh=True), [*local(), *sizes])[0]["output"]
    assert "local_sgd on one rank: there is nobody to average weights with" in said
