"""The loop behind `shardwise train`: the run folder, the log, evaluation, checkpoints, trackers."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint import state
from shardwise.tasks import Loss
from tests.distributed import work
from tests.distributed.pool import RankPool
from tests.tasks import Ragged, config_of

CONFIG = """
task: tests.tasks:Ragged
name: ragged
training:
  batch_size: 3
  max_epochs: 3
  gradient_clip: 1.0
  optimizer: {lr: 0.01}
  log_every_n_steps: 2
"""
DDP = ["training.strategy=ddp"]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def fit(ranks: RankPool, folder: Path, overrides: list[str], size: int = 2, **options: Any) -> dict[str, Any]:
    return ranks.run(size, functools.partial(work.run_fit, **options), CONFIG, overrides, str(folder))[0]


def test_a_run_leaves_its_folder_as_documented(ranks: RankPool, tmp_path: Path) -> None:
    outcome = fit(ranks, tmp_path, DDP)
    run = tmp_path / "runs" / "ragged"
    assert outcome["steps"] == 27
    facts = json.loads((run / "run.json").read_text())
    assert (facts["world"], facts["strategy"], facts["batch"]["global"], facts["total_steps"]) == (2, "ddp", 6, 27)
    steps = [line["step"] for line in lines(run / "metrics.jsonl") if "eval" not in line]
    assert steps == [1, *range(2, 27, 2), 27]
    evaluations = [line["step"] for line in lines(run / "metrics.jsonl") if "eval" in line]
    assert evaluations == [0, 9, 18, 27]
    for rank in (0, 1):
        own = lines(run / "ranks" / f"rank-{rank:04d}.jsonl")
        assert [line["step"] for line in own if "seconds" in line] == steps
        saved = [line for line in own if "checkpoint" in line]
        assert [(line["step"], line["problem"]) for line in saved] == [(9, None), (18, None), (27, None)]
        assert all(0 < line["checkpoint"]["stall"] <= line["checkpoint"]["in_place"] for line in saved)
        assert {"wait", "agree", "compute", "update"} <= own[0]["seconds"].keys()
    assert outcome["after"]["loss"] < outcome["before"]["loss"]
    record = lines(run / "metrics.jsonl")[1]
    assert record["mfu"] is None, "no peak is known for this CPU, so no MFU is claimed"
    assert record["memory_kind"] == "resident"


def test_the_resolved_config_in_the_run_folder_is_a_config_of_the_same_run(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, DDP)
    written = (tmp_path / "runs" / "ragged" / "config.yaml").read_text()
    assert config_of(written).model_dump() == config_of(CONFIG, DDP).model_dump()


def test_checkpoints_are_the_best_and_the_last(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.save_top_k=2", "training.optimizer.lr=0.3"])
    run = tmp_path / "runs" / "ragged"
    losses = {line["step"]: line["eval"]["loss"] for line in lines(run / "metrics.jsonl") if "eval" in line}
    del losses[0]  # there is no checkpoint before the first step
    expected = {*sorted(losses, key=lambda step: losses[step])[:2], 27}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{step:08d}" for step in expected}


def test_a_folder_that_holds_a_run_is_not_overwritten(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.max_steps=2"])
    with pytest.raises(AssertionError, match="runs/ragged already holds a run") as failure:
        fit(ranks, tmp_path, DDP)
    assert str(failure.value).count("already holds a run") == 2, "every rank leaves, nobody waits"
    before = (tmp_path / "runs" / "ragged" / "metrics.jsonl").read_text()
    fit(ranks, tmp_path, [*DDP, "training.max_steps=3"], fresh=True)
    assert (tmp_path / "runs" / "ragged-1" / "metrics.jsonl").read_text() == before


def test_metrics_of_an_interrupted_and_resumed_run_are_those_of_the_uninterrupted(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Steps that were logged after the last checkpoint are computed again: they must not stand there twice."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    every = [*DDP, "training.checkpoint_every_n_steps=4"]
    fit(ranks, whole, every)
    # Interrupted between two checkpoints: steps 5 to 7 are lost.
    with pytest.raises(AssertionError, match="power cut"):
        ranks.run(2, functools.partial(_fit_until, 7), CONFIG, every, str(parts))
    # The folder was moved meanwhile, and the run goes on where it is now.
    moved = tmp_path / "moved"
    (parts / "runs" / "ragged").rename(moved)
    fit(ranks, parts, [*every, f"run_dir={moved}"], resume="auto")
    a, b = (_comparable(folder / "metrics.jsonl") for folder in (whole / "runs" / "ragged", moved))
    assert a == b
    assert not (parts / "runs" / "ragged").exists()


def _fit_until(step: int, text: str, overrides: list[str], folder: str, **options: Any) -> None:
    from shardwise.engine import fit as fit_module

    original = fit_module.Session.step

    def step_or_die(self: Any, batch: Any) -> Any:
        if self.steps_done == step:
            raise RuntimeError("power cut")
        return original(self, batch)

    fit_module.Session.step = step_or_die  # type: ignore[method-assign]
    try:
        work.run_fit(text, overrides, folder, **options)
    finally:
        fit_module.Session.step = original  # type: ignore[method-assign]


def _comparable(file: Path) -> list[dict[str, Any]]:
    measured = {"samples_per_second", "counts_per_second", "memory_gib", "eta_seconds", "data_wait_share"}
    return [{key: value for key, value in line.items() if key not in measured} for line in lines(file)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(ranks: RankPool, tmp_path: Path, number: int) -> None:
    outcomes = ranks.run(2, functools.partial(_fit_with_signal, number), CONFIG, DDP, str(tmp_path))
    assert [(outcome["stopped"], outcome["steps"]) for outcome in outcomes] == [(True, 5)] * 2
    assert (tmp_path / "runs" / "ragged" / "checkpoints" / "step-00000005").is_dir()


def _fit_with_signal(number: int, text: str, overrides: list[str], folder: str) -> dict[str, Any]:
    from shardwise.engine import fit as fit_module

    original = fit_module.Session.step
    before = signal.signal(number, signal.SIG_DFL)  # as in a terminal, though the tests may run under nohup

    def step_and_signal(self: Any, batch: Any) -> Any:
        result = original(self, batch)
        if self.steps_done == 5 and self.world.rank == 1:
            os.kill(os.getpid(), number)
        return result

    fit_module.Session.step = step_and_signal  # type: ignore[method-assign]
    try:
        return work.run_fit(text, overrides, folder)
    finally:
        fit_module.Session.step = original  # type: ignore[method-assign]
        signal.signal(number, before)


def _signalled(where: str, at: int) -> Any:
    """Sends rank 1 a SIGUSR1 at the n-th call of something."""
    import importlib

    module, _, name = where.rpartition(".")
    owner = getattr(importlib.import_module(module.rpartition(".")[0]), module.rpartition(".")[2])
    original, calls = getattr(owner, name), 0

    def signalled(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(*args, **options)

    setattr(owner, name, signalled)
    return lambda: setattr(owner, name, original)


def _fit_signalled(where: str, at: int, text: str, overrides: list[str], folder: str) -> dict[str, Any]:
    undo = _signalled(where, at)
    try:
        return work.run_fit(text, overrides, folder)
    finally:
        undo()


EVALUATES = [*DDP, "training.max_epochs=1", "training.eval_every_n_steps=3", "training.checkpoint_every_n_steps=3",
             "training.batch_size=2", "training.gradient_accumulation=2"]  # fmt: skip


def test_a_signal_in_an_evaluation_gives_it_up_and_the_run_makes_up_for_it(ranks: RankPool, tmp_path: Path) -> None:
    """Of the run's second evaluation, of which each has three batches on two ranks; and of the last one."""
    whole = tmp_path / "whole"
    whole.mkdir()
    steps = fit(ranks, whole, EVALUATES)["steps"]
    for at, stopped_at in ((5, 3), (11, steps)):
        parts = tmp_path / str(at)
        parts.mkdir()
        job = functools.partial(_fit_signalled, "tests.tasks.Ragged.evaluate", at)
        outcomes = ranks.run(2, job, CONFIG, EVALUATES, str(parts))
        assert [(each["stopped"], each["steps"]) for each in outcomes] == [(True, stopped_at)] * 2
        run = parts / "runs" / "ragged"
        assert (run / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
        assert [line["step"] for line in lines(run / "metrics.jsonl") if "eval" in line][-1] < stopped_at
        assert not fit(ranks, parts, EVALUATES, resume="auto")["stopped"]
        a, b = (_comparable(each / "runs" / "ragged" / "metrics.jsonl") for each in (whole, parts))
        assert a == b
        kept = [
            sorted(path.name for path in (each / "runs" / "ragged" / "checkpoints").iterdir())
            for each in (whole, parts)
        ]
        assert kept[0] == kept[1]


def test_a_signal_while_a_checkpoint_is_written_lets_it_be_finished(ranks: RankPool, tmp_path: Path) -> None:
    job = functools.partial(_fit_signalled, "shardwise.engine.session.Session.save", 1)
    outcomes = ranks.run(2, job, CONFIG, [*DDP, "training.checkpoint_every_n_steps=2"], str(tmp_path))
    assert [(each["stopped"], each["steps"]) for each in outcomes] == [(True, 2)] * 2
    names = {path.name for path in (tmp_path / "runs" / "ragged" / "checkpoints").iterdir()}
    assert names == {"step-00000002"}


def test_a_signal_before_the_first_step_leaves_at_once_and_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Stopped"):
        ranks.run(1, _fit_signalled_alone, CONFIG, ["training.strategy=single"], str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def _fit_signalled_alone(text: str, overrides: list[str], folder: str) -> None:
    original = Ragged.valid_data

    def signalled(self: Ragged) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(self)

    Ragged.valid_data = signalled  # type: ignore[method-assign]
    try:
        work.run_fit(text, overrides, folder)
    finally:
        Ragged.valid_data = original  # type: ignore[method-assign]


def test_with_another_number_of_ranks_the_run_keeps_its_global_batch(ranks: RankPool, tmp_path: Path) -> None:
    """Four ranks, three (which do not divide it), one, and four again: the curve is that of four all along."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    every = [*DDP, "training.batch_size=2", "training.max_epochs=2", "training.log_every_n_steps=1"]
    said = []
    for size, until in ((4, 3), (3, 6), (1, 9), (4, 14)):
        leg = [*every, f"training.max_steps={until}", "training.scheduler={name: constant}"]
        said.append(fit(ranks, parts, leg, size=size, resume="auto", elastic=True)["output"])
    fit(ranks, whole, [*every, "training.scheduler={name: constant}"], size=4)
    assert "3 devices now, 4 when the run began: accumulation 2, the global batch stays 8" in said[1]
    assert "1 devices now, 4 when the run began: accumulation 4, the global batch stays 8" in said[2]
    assert "when the run began" not in said[3] and "warning: the global batch" not in "".join(said)
    a, b = (
        {line["step"]: line["loss"] for line in lines(each / "runs" / "ragged" / "metrics.jsonl") if "eval" not in line}
        for each in (whole, parts)
    )
    assert len(a) == 14 and a == pytest.approx(b, rel=1e-4)


def test_tensorboard_and_offline_wandb_get_what_metrics_jsonl_gets(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.logger=[tensorboard, wandb]", "training.max_steps=4"])
    run = tmp_path / "runs" / "ragged"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    expected = {line["step"]: line["loss"] for line in lines(run / "metrics.jsonl") if "eval" not in line}
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(expected)
    assert events.Scalars("eval/loss")[0].step == 0
    offline = list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(offline) == 1 and offline[0].stat().st_size > 0


def test_mlflow_gets_what_metrics_jsonl_gets(ranks: RankPool, tmp_path: Path) -> None:
    overrides = [*DDP, "training.logger=mlflow", "training.max_steps=4", f"training.wandb_project={'x' * 600}"]
    began = time.time()
    ranks.run(2, _fit_with_mlflow, overrides, str(tmp_path))
    run = tmp_path / "runs" / "ragged"
    written = lines(run / "mlflow.db")
    assert written[:2] == [{"experiment": "shardwise"}, {"run": "ragged", "of": "shardwise"}]
    assert written[-1] == {"terminated": "run 1"}
    batches = written[2:-1]
    assert {line["batch"] for line in batches} == {"run 1"}
    assert max(len(line["params"]) for line in batches) == 10
    params = dict(param for line in batches for param in line["params"])
    assert params["training.batch_size"] == "3" and params["training.optimizer.lr"] == "0.01"
    assert params["training.wandb_project"] == "x" * 500 and "training.checkpoint_dir" not in params
    metrics = [metric for line in batches for metric in line["metrics"]]
    expected = {line["step"]: line["loss"] for line in lines(run / "metrics.jsonl") if "eval" not in line}
    assert {step: value for name, value, _, step in metrics if name == "loss"} == pytest.approx(expected)
    assert next(step for name, _, _, step in metrics if name == "eval/loss") == 0
    assert all(began - 1 < when / 1000 < time.time() + 1 for _, _, when, _ in metrics)

    ranks.run(2, _fit_with_mlflow, [*overrides, "training.max_steps=6"], str(tmp_path), "auto")
    more = lines(run / "mlflow.db")[len(written) :]
    assert more[0] == {"run": "ragged", "of": "shardwise"} and more[-1] == {"terminated": "run 2"}
    assert {step for line in more[1:-1] for _, _, _, step in line["metrics"]} == {6}

    elsewhere = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/server", "MLFLOW_EXPERIMENT_NAME": "mine"}
    other = ["training.logger=mlflow", "training.max_steps=1", "run_dir=other"]
    ranks.run(1, _fit_with_mlflow, other, str(tmp_path), None, elsewhere)
    assert lines(tmp_path / "server")[:2] == [{"experiment": "mine"}, {"run": "ragged", "of": "mine"}]


def _fit_with_mlflow(
    overrides: list[str], folder: str, resume: str | None = None, environ: dict[str, str] | None = None
) -> None:
    """With a package of that name that writes down what it is asked for."""
    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    vars(package)["MlflowClient"] = _Client
    vars(entities)["Metric"] = namedtuple("Metric", "key value timestamp step")
    vars(entities)["Param"] = namedtuple("Param", "key value")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", package)
        patch.setitem(sys.modules, "mlflow.entities", entities)
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.setenv(name, (environ or {}).get(name, ""))
        patch.setattr("shardwise.watch.trackers.mlflow.AT_ONCE", 10)
        try:
            work.run_fit(CONFIG, overrides, folder, resume=resume)
        finally:
            sys.modules.pop("shardwise.watch.trackers.mlflow", None)


class _Client:
    """As MLflow's, of which it has what is called."""

    def __init__(self, tracking_uri: str) -> None:
        self.file = Path(tracking_uri.removeprefix("sqlite:///"))
        assert self.file.is_absolute()

    def get_experiment_by_name(self, name: str) -> Any:
        known = [line for line in lines(self.file) if line.get("experiment") == name] if self.file.exists() else []
        return SimpleNamespace(experiment_id=name) if known else None

    def create_experiment(self, name: str) -> str:
        self._write({"experiment": name})
        return name

    def create_run(self, experiment_id: str, *, run_name: str) -> Any:
        self._write({"run": run_name, "of": experiment_id})
        number = sum("run" in line for line in lines(self.file))
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run {number}"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self._write({"batch": run_id, "metrics": metrics, "params": params})

    def set_terminated(self, run_id: str) -> None:
        self._write({"terminated": run_id})

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_a_finished_run_says_so_and_goes_on_when_asked_for_more(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.max_epochs=1"])
    again = fit(ranks, tmp_path, [*DDP, "training.max_epochs=1"], resume="auto")
    assert again["steps"] == 9 and "nothing was left to do" in again["output"]
    assert fit(ranks, tmp_path, DDP, resume="auto")["steps"] == 27


def test_resumed_before_the_first_checkpoint_the_run_begins_again_and_logs_each_step_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="power cut"):
        ranks.run(2, functools.partial(_fit_until, 5), CONFIG, DDP, str(tmp_path))
    fit(ranks, tmp_path, DDP, resume="auto")
    run = tmp_path / "runs" / "ragged"
    for file in (run / "metrics.jsonl", run / "ranks" / "rank-0000.jsonl", run / "ranks" / "rank-0001.jsonl"):
        steps = [line["step"] for line in lines(file) if "eval" not in line and "checkpoint" not in line]
        assert steps == sorted(set(steps)) and steps[0] == 1, file.name


class Sometimes(Ragged):
    """A metric that has nothing to count at first, as precision has before anything is predicted."""

    calls = 0

    def evaluate(self, model: Any, batch: Any) -> Any:
        loss: Any = super().evaluate(model, batch)["loss"]
        Sometimes.calls += 1
        return {"loss": loss, "precision": Loss(loss.sum, 0 if Sometimes.calls < 3 else 1)}


def test_a_metric_without_a_first_value_is_shown_without_one(ranks: RankPool, tmp_path: Path) -> None:
    outcome = fit(ranks, tmp_path, [*DDP, "task=tests.distributed.test_fit:Sometimes"])
    assert "precision              none →" in outcome["output"]


def test_a_different_global_batch_on_resume_is_said(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.max_steps=3"])
    resumed = fit(ranks, tmp_path, [*DDP, "training.batch_size=5"], resume="auto")
    assert "the global batch was 6 and is 10 now" in resumed["output"]


def test_only_rank_zero_speaks_and_every_line_has_its_rank(ranks: RankPool, tmp_path: Path) -> None:
    job = functools.partial(work.run_fit, fresh=True)
    first, second = ranks.run(2, job, CONFIG, [*DDP, "training.max_steps=4"], str(tmp_path))
    spoken = first["output"].splitlines()
    assert spoken and all(line.startswith("[rank 0]") for line in spoken)
    assert any("loss" in line and "grad" in line and "MFU unknown (CPU)" in line and "ETA" in line for line in spoken)
    assert second["output"] == ""
    job = functools.partial(work.run_fit, fresh=True, all_ranks=True)
    _, second = ranks.run(2, job, CONFIG, [*DDP, "training.max_steps=4"], str(tmp_path))
    assert second["output"] and all(line.startswith("[rank 1]") for line in second["output"].splitlines())


def test_what_a_task_prints_carries_its_rank_or_goes_to_the_ranks_own_file(ranks: RankPool, tmp_path: Path) -> None:
    overrides = [*DDP, "task=tests.distributed.test_fit:Chatty", "training.max_steps=1"]
    outcome = fit(ranks, tmp_path, overrides)
    assert "[rank 0] forward\n[rank 0] second line\n" in outcome["output"]
    log = (tmp_path / "runs" / "ragged" / "ranks" / "rank-0001.log").read_text()
    assert "[rank 1] forward\n[rank 1] second line\n" in log


class Chatty(Ragged):
    def loss(self, model: Any, batch: Any) -> Any:
        print("forward\nsecond line")
        return super().loss(model, batch)


def test_a_start_that_fails_leaves_no_run_and_puts_the_earlier_one_back(ranks: RankPool, tmp_path: Path) -> None:
    broken = [*DDP, "task=tests.tasks:Unprepared"]
    with pytest.raises(AssertionError, match="the disk is on fire") as failure:
        fit(ranks, tmp_path, broken)
    assert str(failure.value).count("DataError: the disk is on fire") == 2, "every rank is told, and none waits"
    assert list(tmp_path.iterdir()) == []
    fit(ranks, tmp_path, [*DDP, "training.max_steps=2"])
    before = (tmp_path / "runs" / "ragged" / "metrics.jsonl").read_text()
    with pytest.raises(AssertionError, match="the disk is on fire"):
        fit(ranks, tmp_path, broken, fresh=True)
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["ragged"]
    assert (tmp_path / "runs" / "ragged" / "metrics.jsonl").read_text() == before


def test_data_is_prepared_by_one_process_per_machine(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "task=tests.tasks:Prepared", "training.max_steps=2"])
    assert (tmp_path / "prepared.txt").read_text() == "once\n"


def test_rows_of_all_ranks_are_studied_together_and_in_order(ranks: RankPool, tmp_path: Path) -> None:
    for world, strategy in ((1, "single"), (2, "ddp"), (4, "ddp")):
        overrides = ["task=tests.tasks:Studied", f"training.strategy={strategy}", "training.max_steps=1"]
        folder = tmp_path / str(world)
        folder.mkdir()
        result = ranks.run(world, work.run_fit, CONFIG, overrides, str(folder))[0]
        assert result["after"]["rows"] == 11
        assert (folder / "studied.txt").read_text().splitlines()[0] == str(list(range(11)))


def test_waiting_for_data_is_logged_and_said_once_with_the_remedy(ranks: RankPool, tmp_path: Path) -> None:
    slow = [*DDP, "task=tests.tasks:SlowToRead", "training.log_every_n_steps=1"]
    output = fit(ranks, tmp_path, slow)["output"]
    assert output.count("of the time is spent waiting for data") == 1
    assert "data.num_workers is 0: set it to" in output
    shares = [
        json.loads(line)["data_wait_share"]
        for line in (tmp_path / "runs" / "ragged" / "metrics.jsonl").read_text().splitlines()
        if "loss" in json.loads(line)
    ]
    assert all(0 <= share <= 1 for share in shares) and max(shares[1:]) > 0.1
    quick = fit(ranks, tmp_path, [*DDP, "training.max_steps=3"], fresh=True)["output"]
    assert "data wait" in quick


def test_a_resume_says_what_was_changed_and_keeps_the_earlier_config(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.max_epochs=1"])
    output = fit(ranks, tmp_path, [*DDP, "training.max_epochs=2", "training.gradient_clip=0.5"], resume="auto")[
        "output"
    ]
    assert "changed since then, the earlier config is kept beside:" in output
    assert "training.gradient_clip: 1.0 → 0.5" in output and "training.max_epochs: 1 → 2" in output
    assert "max_epochs: 1\n" in (tmp_path / "runs" / "ragged" / "config-1.yaml").read_text()
    again = fit(ranks, tmp_path, [*DDP, "training.max_epochs=2", "training.gradient_clip=0.5"], resume="auto")["output"]
    assert "changed since then" not in again


def test_a_resume_without_a_checkpoint_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="there is no whole checkpoint"):
        fit(ranks, tmp_path, DDP, resume="latest")
    assert list(tmp_path.iterdir()) == []


def test_a_last_checkpoint_that_could_not_be_written_is_tried_once_more(ranks: RankPool, tmp_path: Path) -> None:
    for often, ends_well in ((1, True), (2, False)):
        folder = tmp_path / str(often)
        folder.mkdir()
        job = functools.partial(_disk_full_at_the_end, often)
        if ends_well:
            outcome = ranks.run(2, job, CONFIG, [*DDP, "training.max_epochs=1"], str(folder))[0]
            assert outcome["output"].count("No space left on device; training goes on") == 1
            (last,) = (folder / "runs" / "ragged" / "checkpoints").iterdir()
            assert last.name == "step-00000009"
        else:
            with pytest.raises(AssertionError, match="the checkpoint of step 9 could not be written"):
                ranks.run(2, job, CONFIG, [*DDP, "training.max_epochs=1"], str(folder))


def _disk_full_at_the_end(often: int, text: str, overrides: list[str], folder: str) -> dict[str, Any]:
    left, write_files = [often], state.write_files

    def full(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_files(*args)

    state.write_files = full  # type: ignore[assignment]
    try:
        return work.run_fit(text, overrides, folder)
    finally:
        state.write_files = write_files


def test_a_run_begun_from_another_folder_has_that_state_in_its_own_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """So that a restart before its first own checkpoint does not begin with something else."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    short = [*DDP, "training.max_epochs=1"]
    fit(ranks, one, short)
    fit(ranks, two, [*short, "training.max_steps=4"])  # another run, whose checkpoint lies in the folder
    with pytest.raises(AssertionError, match="power cut"):
        job = functools.partial(_fit_until, 10, resume=str(one / "runs" / "ragged"))
        ranks.run(2, job, CONFIG, DDP, str(two))
    names = sorted(path.name for path in (two / "runs" / "ragged" / "checkpoints").iterdir())
    assert names == ["step-00000009", "superseded-step-00000004"]
    assert (
        "resumed from runs/ragged/checkpoints/step-00000009 at step 9" in fit(ranks, two, DDP, resume="auto")["output"]
    )


def test_a_fresh_run_does_not_leave_an_earlier_ones_checkpoints_for_a_restart_to_find(
    ranks: RankPool, tmp_path: Path
) -> None:
    elsewhere = [*DDP, "training.max_epochs=1", f"training.checkpoint_dir={tmp_path / 'checkpoints'}"]
    fit(ranks, tmp_path, elsewhere)
    with pytest.raises(AssertionError, match="power cut"):
        ranks.run(2, functools.partial(_fit_until, 2, fresh=True), CONFIG, elsewhere, str(tmp_path))
    assert fit(ranks, tmp_path, elsewhere, resume="auto")["steps"] == 9
    losses = [line["step"] for line in lines(tmp_path / "runs" / "ragged" / "metrics.jsonl") if "eval" not in line]
    assert losses[0] == 1, "it began at the beginning"


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_without_a_word(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path, [*DDP, "training.max_epochs=1"])
    (tmp_path / "runs" / "ragged" / "checkpoints").rename(tmp_path / "unmounted")
    with pytest.raises(AssertionError, match="this run had a checkpoint of step 9, and there is none in"):
        fit(ranks, tmp_path, DDP, resume="auto")
    assert len(lines(tmp_path / "runs" / "ragged" / "metrics.jsonl")) > 5, "and nothing was erased"
