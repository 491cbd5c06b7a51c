"""`verify`: the runs of the proof, one after the other, and the verdict."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.config import Config, load_config
from shardwise.config.load import load_task_class
from shardwise.config.registry import BUILT_IN
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.scratch import scratch_folder
from shardwise.verify import processes
from shardwise.verify.job import Job, as_asked, batching_of
from shardwise.verify.processes import Outcome, run_jobs, start_server
from shardwise.verify.report import Check, Report

STEPS = 7
"""A ragged step, then two epochs of two full batches and a short one."""
FEWEST_STEPS = 4


def verify(
    target: str | Path,
    *,
    ranks: int | None = None,
    strategy: str | None = None,
    steps: int = STEPS,
    against: str | Path | None = None,
    overrides: Sequence[str] = (),
    planted: str | None = None,
    patience: float = processes.TO_STEP,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Prove that `ranks` ranks compute what one process would. `planted` names a function that plants a bug in every run."""
    proof = _Proof(Path(target), ranks, strategy, steps, tuple(overrides), planted, patience, say)
    with scratch_folder("shardwise-verify-") as folder:
        return proof.run(folder, None if against is None else Path(against))


class _Proof:
    def __init__(
        self,
        target: Path,
        ranks: int | None,
        strategy: str | None,
        steps: int,
        overrides: tuple[str, ...],
        planted: str | None,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        self.began = time.monotonic()
        self.target, self.strategy, self.steps, self.overrides = target, strategy, steps, overrides
        self.planted, self.patience = planted, patience
        self._say = say
        if steps < FEWEST_STEPS:
            raise ConfigError(
                f"--steps {steps}: at least {FEWEST_STEPS} are needed, to save, to be killed and to go on"
            )
        self.config = self._read(target)
        self.ranks = ranks or (self.config.training.num_gpus if self.config else None) or 2
        if self.config is not None:
            self._check(self.config)
        start_server((target, overrides) if self.config and self.config.task in BUILT_IN["shardwise.tasks"] else None)
        self.device, self.device_said = self._device()
        self.at_once = max(4, self.ranks + 1)

    def say(self, line: str) -> None:
        self._say(f"[{time.monotonic() - self.began:5.1f} s] {line}")

    def _read(self, file: Path) -> Config | None:
        if file.suffix != ".py":
            return load_config(file, self.overrides)
        if not file.is_file():
            raise ConfigError(f"there is no program {file}")
        if self.overrides:
            raise ConfigError("--set is for config files; a program's config is its own")
        return None

    def _check(self, config: Config) -> None:
        if self.ranks > 1 and (self.strategy or config.training.strategy) == "single":
            raise ConfigError(f"strategy single runs on one rank, but {self.ranks} were asked for: give --strategy ddp")
        load_task_class(config.task)
        asked = as_asked(config, self._job("check", Path(), "probe", 1))
        if not batching_of(asked, self.ranks).global_batch:
            raise ConfigError("the global batch is empty")

    def _device(self) -> tuple[str, str]:
        wanted = self.config.training.device if self.config else "auto"
        if wanted == "cpu":
            return "cpu", "CPU"
        import torch

        found = torch.cuda.device_count()
        if found >= self.ranks:
            return "cuda", "CUDA"
        return (
            "cpu",
            "CPU" if not found else f"CPU, because {self.ranks} ranks need {self.ranks} GPUs and there are {found}",
        )

    # ---------------------------------------------------------------- the runs

    def _job(self, name: str, folder: Path, kind: Any, world: int, **more: Any) -> Job:
        return Job(
            name=name,
            folder=folder / name.replace(" ", "-").replace(",", ""),
            target=self.target.resolve(),
            overrides=self.overrides,
            kind=kind,
            world=world,
            ranks=self.ranks,
            device=getattr(self, "device", "cpu"),
            strategy=self.strategy,
            steps=self.steps,
            planted=self.planted,
            shared=folder / "task.pickle",
            **more,
        )

    def run(self, folder: Path, against: Path | None) -> Report:
        from shardwise.verify.agreement import check_agreement
        from shardwise.verify.compared import run_of
        from shardwise.verify.measure import Tolerance, is_narrow, same_at_first
        from shardwise.verify.parity import check_single
        from shardwise.verify.probe import Probe

        probe_job = self._job("the probe", folder, "probe", 1, spread="whole")
        self.say("one process: the first batch in plain PyTorch, and what depends on what")
        outcome = self._run([probe_job])["the probe"]
        self._must_run(outcome)
        probe: Probe = outcome.record()["probe"]
        plan = probe.plan
        rng = random.Random(f"{self.ranks} {self.strategy} {self.steps}")
        save_at = rng.randint(1, self.steps - 3)
        kill_at = rng.randint(save_at + 1, self.steps - 1)

        ranks = self._job(f"{self.ranks} ranks", folder, "train", self.ranks, plan=plan, save_at=save_at, watched=True)
        one = self._job("one process", folder, "train", 1, spread="whole", plan=plan, save_at=save_at)
        split = replace(one, name="split", folder=folder / "split", spread="split", same_shares=True)
        # Batch norm must see the same samples together: they change places within a micro-batch only.
        base = split if probe.by_batch_norm else one
        again = [
            replace(base, name=f"reordered {n}", folder=folder / f"reordered-{n}", reorder=n, threads=n) for n in (1, 2)
        ]
        self.say(f"{self.ranks} ranks, and one process twice: {self.steps} steps each")
        runs = self._run([ranks, one, again[0]])
        for name in ("one process", "reordered 1"):
            self._must_run(runs[name])
        self._must_be_accepted(runs[ranks.name])
        fine = runs[ranks.name].fine

        killed = replace(ranks, name="killed ranks", folder=folder / "killed", kill_at=kill_at, watched=False)
        coverage = self._job("coverage", folder, "coverage", 1, spread="whole", plan=plan)
        second = [split, again[1]]
        if against is not None:
            second.append(self._other_job(ranks, against, probe))
        else:
            second += [coverage, *([killed] if fine else [])]
        said = f", and ranks that are killed by SIGKILL in step {kill_at}" if fine and against is None else ""
        self.say(f"one process again: reordered, and in the ranks' micro-batches{said}")
        runs |= self._run(second)
        for job in (split, again[1]):
            self._must_run(runs[job.name])
        if against is not None:
            self._must_be_accepted(runs[str(against)])

        single, record = run_of(runs["one process"]), runs["one process"].record()
        start = record["initial_weights"]
        others = [run_of(runs[job.name]) for job in again]
        in_parts = run_of(runs["split"])
        base_run = in_parts if probe.by_batch_norm else single
        if is_narrow(probe.precision) and not probe.by_batch_norm:
            # In a narrow type every micro-batch rounds its own gradient: one more order of additions, if it is only that.
            others += [in_parts] if same_at_first(in_parts, single, probe.precision) else []
        tolerance = Tolerance.measured(base_run, others, probe.precision, start)
        report = Report(self._about(probe, runs[ranks.name], against))
        report.checks += check_single(probe, single, record, tolerance)
        report.checks += self._parity(probe, runs, ranks.name, tolerance, against)
        if against is None:
            report.checks += self._coverage(runs["coverage"])
        if fine and against is None:
            report.checks += self._resume(runs, ranks, killed, probe, tolerance, start, save_at, kill_at)
        for name in (ranks.name, *([str(against)] if against else [])):
            if runs[name].fine:
                report.checks += check_agreement(runs[name], probe)
        report.seconds = time.monotonic() - self.began
        return report

    def _run(self, jobs: list[Job]) -> dict[str, Outcome]:
        return run_jobs(jobs, self.at_once, patience=self.patience)

    def _must_run(self, outcome: Outcome) -> None:
        """A config that one process cannot train is not for verify to judge."""
        if not outcome.fine:
            from shardwise.verify.failure_report import trouble_of

            log = processes.text_of(outcome.job.log(0))[-2000:]
            error = outcome.first_error()
            trace = f"\n{error.trace}" if error and not error.for_user else ""
            raise LaunchError(f"one process cannot run it. {trouble_of(outcome).what}{trace}\n{log}".rstrip())

    def _must_be_accepted(self, outcome: Outcome) -> None:
        """Nor is one that the ranks refuse before their first step, with a reason."""
        error = outcome.first_error()
        if error and error.for_user and not any(rank.steps or "step" in rank.phase for rank in outcome.ranks):
            raise ConfigError(f"{outcome.job.name}: {error.message}")

    def _other_job(self, ranks: Job, against: Path, probe: Any) -> Job:
        other = self._read(against)
        plan = ranks.plan
        assert plan is not None
        if other is not None:
            batching = batching_of(other, self.ranks)
            if batching.global_batch != plan.batching.global_batch:
                raise ConfigError(
                    f"{against} has a global batch of {batching.global_batch}, {self.target} one of "
                    f"{plan.batching.global_batch}: only runs on the same batches can be compared"
                )
            plan = replace(plan, batching=batching)
        return replace(
            ranks,
            name=str(against),
            folder=ranks.folder.parent / "against",
            target=against.resolve(),
            strategy=None,
            plan=plan,
        )

    # ---------------------------------------------------------------- the checks

    def _parity(
        self, probe: Any, runs: dict[str, Outcome], name: str, tolerance: Any, against: Path | None
    ) -> list[Check]:
        from shardwise.verify.compared import Compared, run_of
        from shardwise.verify.failure_report import trouble_of
        from shardwise.verify.parity import check_parity

        for group in (name, *([str(against)] if against else [])):
            if not runs[group].fine:
                finding = trouble_of(runs[group], trains_alone=not probe.without_gradient)
                return [Check("parity", group, "FAIL", finding.what, finding)]
        checks = []
        reference, called = ("split", "one process") if probe.by_batch_norm else ("one process", "one process")
        if against is not None:
            reference = called = str(against)
        elif probe.by_batch_norm:
            text = (
                "batch norm sees a rank's own samples: split into micro-batches, the gradient moves by "
                f"{probe.split_matters:.1e}, and not at all with batch norm frozen. The ranks are compared with one process "
                "that computes the same micro-batches"
            )
            checks.append(Check("parity", "batch norm", "note", text))
        compared = Compared(
            probe=probe,
            ranks=runs[name],
            run=run_of(runs[name]),
            reference=run_of(runs[reference]),
            start=runs[reference].record()["initial_weights"],
            reference_record=runs[reference].record(),
            tolerance=tolerance,
            split=probe.by_batch_norm or against is not None,
            reference_name=called,
        )
        return [*checks, *check_parity(compared)]

    def _coverage(self, outcome: Outcome) -> list[Check]:
        from shardwise.verify.coverage import check_coverage
        from shardwise.verify.failure_report import trouble_of

        if not outcome.fine:
            finding = trouble_of(outcome)
            return [Check("coverage", "data", "FAIL", finding.what, finding)]
        return check_coverage(outcome.record()["coverage"], self.ranks)

    def _resume(
        self,
        runs: dict[str, Outcome],
        ranks: Job,
        killed: Job,
        probe: Any,
        tolerance: Any,
        start: Any,
        save_at: int,
        kill_at: int,
    ) -> list[Check]:
        from shardwise.verify.resume import check_other_ranks, check_resume

        left = killed.folder / "run"
        fewer = self._fewer(ranks)
        same = replace(
            ranks,
            name="resumed ranks",
            folder=ranks.folder.parent / "resumed",
            save_at=None,
            resume=True,
            watched=False,
        )
        other = replace(
            same,
            name=f"resumed on {fewer}",
            folder=ranks.folder.parent / "resumed-on-others",
            world=fewer,
            spread="ranks" if fewer > 1 else "split",
        )
        jobs = []
        if runs[killed.name].killed and any((left / "checkpoints").glob("step-*")):
            for job in (same, other):
                copy = job.folder / "run"
                shutil.copytree(left, copy)
                jobs.append(job)
            self.say(f"new processes go on from step {save_at}: {self.ranks} ranks, and {fewer}")
            runs |= self._run(jobs)
        checks = check_resume(runs[ranks.name], runs[killed.name], runs.get(same.name), tolerance, save_at, kill_at)
        if other.name in runs and not any(check.verdict == "FAIL" for check in checks) and self.ranks > 1:
            moved = probe.by_batch_norm
            checks.append(
                check_other_ranks(runs[ranks.name], runs[other.name], tolerance, start, save_at, split_matters=moved)
            )
        return checks

    def _fewer(self, ranks: Job) -> int:
        """Half of the ranks, where the strategy can do with so few; else one process."""
        half = self.ranks // 2
        try:
            return (
                half if self.ranks >= 4 and (not self.config or batching_of(as_asked(self.config, ranks), half)) else 1
            )
        except ConfigError:  # tensor.size, pipeline.stages or shard_size may ask for all of them
            return 1

    # ---------------------------------------------------------------- words

    def _about(self, probe: Any, outcome: Outcome, against: Path | None) -> list[str]:
        from shardwise.verify.measure import is_narrow

        batching, plan = probe.plan.batching, probe.plan
        strategy = outcome.record()["strategy"] if outcome.fine else (self.strategy or "as configured")
        reference = f"{against} on {self.ranks} rank(s)" if against else "one process"
        lines = [
            f"{self.target}: {self.ranks} rank(s), strategy {strategy}, precision {probe.precision}, on {self.device_said}, "
            f"against {reference}",
            f"{probe.parameters} parameters; {self.steps} steps of at most {batching.batch_size} per rank × "
            f"{batching.accumulation} accumulation × {batching.world} ranks = {batching.global_batch} samples; the first step is "
            f"a ragged one of {plan.window - plan.start}, an epoch the last {plan.window} of {probe.samples} samples",
            "dropout is off in every run; the first step is not clipped, so that its gradients are seen as they are",
        ]
        if is_narrow(probe.precision):
            lines.append(
                "in this precision rounding explains much: --set training.precision=32-true sees far smaller errors"
            )
        if probe.comm_hook != "none":
            lines.append(
                f"comm_hook {probe.comm_hook} is switched off: compressed gradients are other gradients, by design"
            )
        return lines + ([probe.clip_said] if probe.clip_said else [])
