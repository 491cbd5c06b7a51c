"""The runs of the proof, one after the other, and the checks on what they left behind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.config.load import load_task_class
from shardwise.engine.batch_plan import check_plan
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.group import log_file
from shardwise.parallel.gather import accumulation_problem
from shardwise.verify.agreement import check_agreement
from shardwise.verify.by_hand import RANDOM
from shardwise.verify.causes import Cause
from shardwise.verify.compared import ONE_PROCESS, Compared, figures_of
from shardwise.verify.coverage import check_coverage, check_own_batches
from shardwise.verify.evaluation_checks import check_evaluation
from shardwise.verify.failure_report import trouble_of
from shardwise.verify.formatting import figure, listed
from shardwise.verify.groups import Background, GroupResult, run_groups
from shardwise.verify.measure import Tolerance, is_narrow
from shardwise.verify.own_data import LATER, check_data, check_models, difference
from shardwise.verify.parity import FIRST_GRADIENTS, check_parity, check_single
from shardwise.verify.probe import Probe
from shardwise.verify.recorder import WHOLE_ON_EVERY_RANK
from shardwise.verify.report import Check, Finding, Report, failed, noted, unproved
from shardwise.verify.request import Request, Target
from shardwise.verify.resume import check_other_ranks, check_program, check_resume, left_a_checkpoint
from shardwise.verify.run_spec import Interpreter, Plan, RunSpec, as_asked, batching_of
from shardwise.verify.step_by_step import GRADIENTS, Noise, Step, check_steps, first_difference, steps_of
from shardwise.watch.heartbeats import Phase


def conduct(request: Request, folder: Path) -> Report:
    """`folder`: for all that the runs leave behind."""
    proof = _Proof(request, folder)
    report = proof.report()
    if is_narrow(proof.precision) and request.against is None:
        report.checks = _with_fp32(report.checks, _Proof(request, folder / "fp32", WIDE).report(), proof.precision)
    report.seconds = time.monotonic() - request.began
    return report


def _with_fp32(checks: list[Check], wide: Report, precision: str) -> list[Check]:
    """In a narrow type small mistakes hide in rounding, so numbers are compared in fp32 as well. What the narrow type leaves open
    on a way of several steps is noted where fp32 has proved it; gradients must be proved in both."""
    numbers = [check for check in wide.checks if check.group == "parity" and check.name not in _SAME_IN_ANY_PRECISION]
    proved = {check.name for check in numbers if check.status == "pass"} - {"one process", FIRST_GRADIENTS}
    narrow = [
        replace(check, status="note", why=f"In {precision} that proves nothing; it is proved in fp32, below")
        if check.status == "not proved" and check.name in proved
        else check
        for check in checks
    ]
    after = 1 + max((index for index, check in enumerate(checks) if check.group == "parity"), default=-1)
    return [*narrow[:after], *(replace(check, name=f"{check.name} in fp32") for check in numbers), *narrow[after:]]


_SAME_IN_ANY_PRECISION = {"tied weights", "initial weights", "samples", "learning rate", "parameters", "data"}
WIDE = "32-true"


FOLLOWED = 12
"""Steps that are taken from the same weights, of a model whose gradients can be kept for so many."""

FEW_FOLLOWED = 4
"""The same with --quick."""
_LEFT_OUT = [
    "evaluation (--quick): whether metrics are the same, and whether it changes anything",
    "resume (--quick): nothing was killed",
    "data in interpreters of their own (--quick): order of sets and hashes, order of files in a folder, the clock",
]


def _other_batch_norm(probe: Probe) -> bool:
    """On the ranks, batch norm sees other samples than the loss does: no process alone computes the same."""
    return probe.plan.gathers and probe.batch_norm


@dataclass(frozen=True)
class _Following:
    """Runs that take every step from the same weights and moments."""

    leader: RunSpec
    ranks: RunSpec
    again: list[RunSpec]
    """One process, with the last digits changed."""
    alone: RunSpec
    """One process on its own, which evaluates."""


class _Proof:
    def __init__(self, request: Request, folder: Path, precision: str | None = None) -> None:
        """`precision`: instead of the config's; then numbers are compared, and nothing else."""
        self.request, self.folder, self.ranks = request, folder, request.ranks
        self.numbers_only, self.instead = precision is not None, precision
        self.precision = precision or WIDE
        """Of the runs, when the probe has found it out."""
        self.device, self.device_said = self._device()
        self._refuse()
        self.from_the_same: float | None = None
        """How far rounding brings the loss of a step, from the same weights, from itself."""
        self.results: dict[str, GroupResult] = {}
        """Of the runs so far, by name."""

    def _device(self) -> tuple[str, str]:
        config = self.request.target.config
        if config is not None and config.training.device == "cpu":
            return "cpu", "CPU"
        found = torch.cuda.device_count()
        if found >= self.ranks:
            return "cuda", "CUDA"
        needed = f"CPU, because {self.ranks} ranks need {self.ranks} GPUs and there are {found}"
        return "cpu", needed if found else "CPU"

    def _refuse(self) -> None:
        """What the ranks would refuse, before any is started."""
        config = self.request.target.config
        if config is not None:
            load_task_class(config.task)
            asked = as_asked(config, self.request.strategy)
            check_plan(asked, self.ranks, self.device)
            batching_of(asked, self.ranks)

    # ---------------------------------------------------------------- the runs

    def report(self) -> Report:
        data = (
            None
            if self.numbers_only or self.request.quick
            else Background(self._data_spec(), self.request.hang_timeout)
        )
        try:
            return self._report(data)
        finally:
            if data is not None:
                data.end()

    def _report(self, data: Background | None) -> Report:
        steps, against = self.request.steps, self.request.against
        probe = self._probe()
        # Late: what a program switches on in an early step must be on after the resume as well. And in the middle of an epoch.
        # A program saves by itself, so that this is only for one that does not, and not where it is likely to do so.
        save_at, kill_at = steps - 2 if self.request.target.config else max(1, steps - 4), steps - 1

        plan, self.precision = probe.plan, probe.precision
        if plan.gathers and plan.batching.accumulation > 1:
            raise ConfigError(accumulation_problem(plan.batching.accumulation))
        valid = 0 if self.numbers_only or self.request.quick else 4 * plan.batching.global_batch + self.ranks + 1
        common: dict[str, Any] = {"plan": plan, "save_at": save_at, "valid_samples": valid, "evaluate_last": valid > 0}
        ranks = self._spec(f"{self.ranks} ranks", world=self.ranks, watched=True, **common)
        one = self._spec("one process", batches="whole", **common)
        # A loss over the whole batch has no parts that add up.
        split = one if plan.gathers else self._like(one, "split", batches="shares")
        # Batch norm must see the same samples together: they change places within a micro-batch only.
        base = split if probe.by_batch_norm else one
        again = [self._like(base, f"reordered {n}", reorder=n, threads=n, evaluate_last=False) for n in (1, 2)]
        self._say(f"{self.ranks} ranks, and one process twice: {steps} steps each")
        self._run(ranks, one, again[0])
        self._must_run(one, again[0])
        data_checks = list(self._data(data, probe)) if data is not None else []
        if not any(check.status == "FAIL" for check in data_checks):
            self._must_be_accepted(ranks)
        fine = self.results[ranks.name].fine

        killed = self._like(ranks, "killed ranks", kill_at=kill_at, watched=False)
        coverage = self._spec("coverage", kind="coverage", batches="whole", plan=plan)
        other = self._other(ranks, against) if against is not None else None
        more = [other] if other else [coverage, *([killed] if fine and not self.request.quick else [])]
        more = [] if self.numbers_only else more
        said = f", and ranks that are killed by SIGKILL in step {kill_at}" if killed in more else ""
        parts = "" if split is one else ", and in the ranks' micro-batches"
        self._say(f"one process again: reordered{parts}{said}")
        self._run(*([] if split is one else [split]), again[1], *more)
        self._must_run(split, again[1])
        if other:
            self._must_be_accepted(other)

        following = self._step_by_step(probe, base, ranks) if other is None and fine else None

        single, in_parts, *repeated = (figures_of(self.results[spec.name]) for spec in (one, split, *again))
        record = self.results[one.name].record()
        reference = in_parts if probe.by_batch_norm else single
        tolerance = Tolerance.measured(reference, repeated, probe.precision, record["initial_weights"], probe.exact)

        report = Report(self._about(probe, ranks))
        others = [self.results[spec.name].record() for spec in (split, *again)]
        report.checks += check_single(probe, single, record, others, tolerance)
        report.checks += self._parity(probe, ranks, other or base, tolerance)
        if following is not None and not _other_batch_norm(probe):
            known = next((check.finding for check in report.checks if check.name == FIRST_GRADIENTS), None)
            report.checks += self._steps(probe, following, known)
        report.checks += data_checks
        if coverage in more:
            report.checks += self._coverage(coverage)
            if fine and self.request.target.config is None:
                report.checks += check_own_batches(self.results[ranks.name].steps, plan)
        if following is not None and not self.numbers_only and not self.request.quick:
            report.checks += self._evaluation(probe, base, following)
        if killed in more:
            report.checks += self._resume(ranks, killed, probe, tolerance, record["initial_weights"])
        for result in [self.results[spec.name] for spec in (ranks, other) if spec]:
            if result.fine:
                report.checks += check_agreement(result, probe)
                report.allow_unequal(result.record()["strategy"], result.record()["unequal"])
        report.not_looked_at = self._not_looked_at(probe)
        return report

    def _probe(self) -> Probe:
        spec = self._spec("the probe", kind="probe", batches="whole")
        self._say("one process: the first batch in plain PyTorch, and what depends on what")
        self._run(spec)
        self._must_run(spec)
        found: Probe = self.results[spec.name].record()["probe"]
        if found.history.matters > RANDOM:
            again = self._like(spec, "the probe again")
            self._say("the same batch has another gradient after others: another process computes the same")
            self._run(again)
            self._must_run(again)
            other = self.results[again.name].record()["probe"].history
            found.history = replace(found.history, by_chance=other.losses != found.history.losses)
        return found

    def _data_spec(self) -> RunSpec:
        interpreters = tuple(
            Interpreter(
                hash_seed=rank,
                listing="natural" if not rank else "reversed" if rank == 1 else str(rank),
                wait=rank * LATER,
                order=rank,
                threads=1 + rank % 2,
            )
            for rank in range(self.ranks)
        )
        return replace(self._spec("data", kind="data", world=self.ranks, interpreters=interpreters), shared=None)

    def _data(self, data: Background, probe: Probe) -> Iterator[Check]:
        """What each rank makes by itself; and, where they differ, what makes the difference in one process."""
        result = data.result()
        if not result.fine:
            yield failed("coverage", "data of each rank", trouble_of(result))
            return
        records = [record["data"] for record in result.records]
        yield check_models(records)
        if difference(records) is None:
            changes = max(probe.random_data, probe.history.matters) > RANDOM
            yield check_data(records, probe.data, changes=changes)
            return
        self._say(
            "the ranks have different data: one process with another hash seed, other orders of files and samples, a little later"
        )
        first = Interpreter(0)
        others = [
            (Cause.DATA_CHANGE, "when it is started a second later", replace(first, wait=LATER)),
            (Cause.DATA_CHANGE, "when they are read in another order", replace(first, order=1)),
            (Cause.DATA_BY_HASH, "with another hash seed (PYTHONHASHSEED)", replace(first, hash_seed=1)),
            (
                Cause.DATA_BY_LISTING,
                "when folders give their files in another order",
                replace(first, listing="reversed"),
            ),
            (
                Cause.DATA_BY_RANK,
                "with another number of threads, of which a rank has its own",
                replace(first, threads=2),
            ),
        ]
        alone = replace(data.spec, world=1, batches="whole")
        specs = [
            replace(self._like(alone, f"data {number}"), interpreters=(each,))
            for number, each in enumerate([first, *(each for _, _, each in others)])
        ]
        self._run(*specs)
        base, *found = (self.results[spec.name] for spec in specs)
        causes = [
            (cause, f". One process gives other samples, too, {how}")
            for (cause, how, _), each in zip(others, found, strict=True)
            if base.fine and each.fine and difference([base.record()["data"], each.record()["data"]])
        ]
        yield check_data(records, probe.data, causes)

    def _step_by_step(self, probe: Probe, base: RunSpec, ranks: RunSpec) -> _Following:
        """One process goes ahead; others, and the ranks, take each of its steps from the same weights and moments."""
        plan, steps = self._longer(probe)
        valid = base.valid_samples
        leader = replace(
            self._like(base, "goes ahead", plan=plan, steps=steps, save_at=None, keep_every_step=True),
            evaluate_last=False,
            evaluate_at=steps - 1 if valid else None,
        )
        following = replace(leader, keep_every_step=False, follow=leader.run_folder)
        again = [self._like(following, f"follows {n}", reorder=n, threads=n) for n in (1, 2)]
        mine = replace(
            self._like(
                ranks, "ranks follow", plan=plan, steps=steps, save_at=None, watched=False, follow=leader.run_folder
            ),
            evaluate_last=False,
            evaluate_at=leader.evaluate_at,
        )
        alone = replace(self._like(base, "evaluates"), evaluate_at=3)
        self._say(
            f"each of {steps} steps from the same weights and moments: one process ahead, then the ranks after it"
        )
        self._run(leader, *([alone] if valid else []))
        self._must_run(leader)
        self._run(mine, *again)
        self._must_run(*again)
        return _Following(leader, mine, again, alone)

    def _longer(self, probe: Probe) -> tuple[Plan, int]:
        """The ragged step, and one epoch of more samples than the other runs see."""
        plan, whole = probe.plan, probe.plan.batching.global_batch
        few = FEW_FOLLOWED if self.request.quick else FOLLOWED
        most = min(few, max(3, WHOLE_ON_EVERY_RANK // max(1, probe.parameters)))
        ragged, last = plan.window - plan.start, plan.window - 2 * whole
        window = max(plan.window, min(probe.samples, (most - 2) * whole + max(1, last)))
        return replace(plan, window=window, start=max(0, window - ragged)), min(most, 1 + -(-window // whole))

    def _spec(self, name: str, *, kind: Any = "train", world: int = 1, **more: Any) -> RunSpec:
        request = self.request
        return RunSpec(
            name=f"{name} in fp32" if self.numbers_only else name,
            folder=self.folder / name.replace(" ", "-"),
            precision=self.instead,
            target=request.target.path.resolve(),
            values=request.target.values,
            kind=kind,
            world=world,
            ranks=self.ranks,
            device=self.device,
            strategy=request.strategy,
            steps=request.steps,
            planted=request.planted,
            shared=self.folder / "task.pickle",
            **more,
        )

    def _like(self, spec: RunSpec, name: str, **changes: Any) -> RunSpec:
        return replace(spec, name=name, folder=self.folder / name.replace(" ", "-"), **changes)

    def _other(self, ranks: RunSpec, against: Target) -> RunSpec:
        """The run that is compared with, instead of one process."""
        plan = ranks.plan
        assert plan is not None
        if against.config is not None:
            batching = batching_of(against.config, self.ranks)
            if batching.global_batch != plan.batching.global_batch:
                raise ConfigError(
                    f"{against.path} has a global batch of {batching.global_batch}, {self.request.target.path} one of "
                    f"{plan.batching.global_batch}: only runs on the same batches can be compared"
                )
            plan = replace(plan, batching=batching)
        other = self._like(
            ranks, "against", target=against.path.resolve(), values=against.values, strategy=None, plan=plan
        )
        return replace(other, name=str(against.path))

    def _say(self, line: str) -> None:
        self.request.say(f"[{time.monotonic() - self.request.began:5.1f} s] {line}")

    def _run(self, *specs: RunSpec) -> None:
        at_once = max(4, self.ranks + 1)
        self.results |= run_groups(specs, at_once, hang_timeout=self.request.hang_timeout)

    def _must_run(self, *specs: RunSpec) -> None:
        """A config that one process cannot train is not for verify to judge."""
        for result in [self.results[spec.name] for spec in specs]:
            if not result.fine:
                log = log_file(result.spec.folder, 0).read_text(errors="replace")[-2000:]
                error = result.first_error()
                trace = f"\n{error.trace}" if error and not error.for_user else ""
                raise LaunchError(f"one process cannot run it. {trouble_of(result).what}{trace}\n{log}".rstrip())

    def _must_be_accepted(self, spec: RunSpec) -> None:
        """Nor is one that the ranks refuse before their first step, with a reason."""
        result = self.results[spec.name]
        error, beats = result.first_error(), [rank.beat for rank in result.ranks if rank.beat]
        begun = any(result.steps) or any(beat.phase > Phase.DATA for beat in beats)
        if error and error.for_user and not begun:
            raise ConfigError(f"{spec.name}: {error.message}")

    # ---------------------------------------------------------------- the checks

    def _parity(self, probe: Probe, ranks: RunSpec, reference: RunSpec, tolerance: Tolerance) -> list[Check]:
        ours, theirs, against = self.results[ranks.name], self.results[reference.name], self.request.against
        for result in (ours, theirs):
            if not result.fine:
                finding = trouble_of(result, trains_alone=not probe.without_gradient)
                return [failed("parity", result.spec.name, finding)]
        if _other_batch_norm(probe) and against is None:
            text = "batch norm sees a rank's own samples, and the loss those of all ranks: one process cannot compute the same"
            why = (
                "Put another norm in its place to verify the rest; on GPUs the ranks share the statistics of batch norm"
            )
            return [unproved("parity", "batch norm", text, why)]
        compared = Compared(
            probe=probe,
            ranks=ours,
            run=figures_of(ours),
            reference=figures_of(theirs),
            start=theirs.record()["initial_weights"],
            reference_record=theirs.record(),
            tolerance=tolerance,
            split=probe.by_batch_norm or against is not None,
            reference_name=ONE_PROCESS if against is None else reference.name,
        )
        checks = check_parity(compared)
        if probe.by_batch_norm and against is None:
            text = (
                "batch norm sees a rank's own samples: split into micro-batches, the gradient moves by "
                f"{probe.split_matters:.1e}, and not at all with batch norm frozen. The ranks are compared with one process "
                "that computes the same micro-batches"
            )
            return [noted("parity", "batch norm", text), *checks]
        return checks

    def _steps(self, probe: Probe, following: _Following, known: Finding | None) -> list[Check]:
        """`known`: what is wrong with the gradients of step 1."""
        ranks = self.results[following.ranks.name]
        if not ranks.fine:
            return [failed("parity", GRADIENTS, trouble_of(ranks))]
        leader = self.results[following.leader.name]
        start, figures = leader.record()["initial_weights"], figures_of(leader)

        def steps(spec: RunSpec) -> list[Step]:
            return steps_of(self.results[spec.name], figures, start)

        expected, ours = steps(following.leader), steps(following.ranks)
        noise = Noise.measured(expected, [steps(spec) for spec in following.again], probe.precision)
        self.from_the_same = noise.whole_limit(noise.losses)
        differs, cause = first_difference(ours, expected, noise), None
        buffers = [] if probe.by_batch_norm else probe.buffers_in_gradient
        if differs is not None and differs.step == 1 and known is not None:
            cause = known.cause, ""
        elif differs is not None and buffers:
            text = f". The gradient depends on {listed(buffers)}, which every forward pass moves: on the ranks by other samples"
            cause = Cause.OWN_BUFFERS, text
        elif differs is not None and not probe.by_batch_norm and not probe.plan.gathers:
            split = self._like(
                following.ranks, "in parts", world=1, batches="shares", valid_samples=0, evaluate_at=None
            )
            self._say(f"step {differs.step} differs: one process computes it in the ranks' micro-batches")
            self._run(split)
            in_parts = steps(split) if self.results[split.name].fine else []
            gap = first_difference(in_parts, expected, noise)
            if gap is not None and gap.step == differs.step:
                text = f". One process, too, gets another gradient from the micro-batches of the ranks ({figure(gap.amount)})"
                cause = Cause.LOSS_IS_NO_SUM, text
        return list(check_steps(ours, expected, noise, differs, cause))

    def _evaluation(self, probe: Probe, base: RunSpec, following: _Following) -> list[Check]:
        if not probe.held_out:
            return []
        without, alone, leader, ranks, *again = (
            self.results[spec.name]
            for spec in (base, following.alone, following.leader, following.ranks, *following.again)
        )
        return list(check_evaluation(without, alone, leader, ranks, again, probe.precision, probe.held_out))

    def _coverage(self, spec: RunSpec) -> list[Check]:
        result = self.results[spec.name]
        if not result.fine:
            return [failed("coverage", "data", trouble_of(result))]
        return check_coverage(result.record()["coverage"], self.ranks)

    def _resume(
        self, ranks: RunSpec, killed: RunSpec, probe: Probe, tolerance: Tolerance, start: dict[str, torch.Tensor]
    ) -> list[Check]:
        fewer, save_at = self._fewer(), ranks.save_at or 0
        same = self._like(ranks, "resumed ranks", save_at=None, resume=True, watched=False)
        batches = "ranks" if fewer > 1 else "split"
        other = self._like(same, f"resumed on {fewer}", world=fewer, batches=batches, evaluate_last=False)
        if self.results[killed.name].killed and left_a_checkpoint(self.results[killed.name]):
            for spec in (same, other):
                shutil.copytree(killed.run_folder, spec.run_folder)
            self._say(f"new processes go on from step {save_at}: {self.ranks} ranks, and {fewer}")
            self._run(same, other)
        undisturbed, resumed = self.results[ranks.name], self.results.get(same.name)
        checks = check_resume(undisturbed, self.results[killed.name], resumed, tolerance, save_at, killed.kill_at or 0)
        if self.request.target.config is None:
            checks += check_program(self.request.target.path, undisturbed, resumed)
        if other.name in self.results and self.ranks > 1 and all(check.status != "FAIL" for check in checks):
            elsewhere = self.results[other.name]
            apart = probe.by_batch_norm or _other_batch_norm(probe)  # it sees others there
            steady = self.from_the_same
            checks.append(
                check_other_ranks(
                    undisturbed,
                    elsewhere,
                    tolerance,
                    start,
                    split_matters=apart,
                    from_the_same=steady,
                    moving=probe.buffers_in_gradient,
                )
            )
        return checks

    def _fewer(self) -> int:
        """Half of the ranks, where the strategy can do with so few; else one process."""
        half, config = self.ranks // 2, self.request.target.config
        if half < 2:
            return 1
        try:
            if config is not None:
                check_plan(as_asked(config, self.request.strategy), half, self.device)
            return half
        except ConfigError:  # tensor.size, pipeline.stages or shard_size may ask for all of them
            return 1

    # ---------------------------------------------------------------- words

    def _about(self, probe: Probe, ranks: RunSpec) -> list[str]:
        batching, plan, against = probe.plan.batching, probe.plan, self.request.against
        result = self.results[ranks.name]
        strategy = result.record()["strategy"] if result.fine else (self.request.strategy or "as configured")
        reference = f"{against.path} on {self.ranks} rank(s)" if against else "one process"
        lines = [
            f"{self.request.target.path}: {self.ranks} rank(s), strategy {strategy}, precision {probe.precision}, on "
            f"{self.device_said}, against {reference}",
            f"{probe.parameters} parameters; {self.request.steps} steps of at most {batching.batch_size} per rank × "
            f"{batching.accumulation} accumulation × {batching.world} ranks = {batching.global_batch} samples; the first step is "
            f"a ragged one of {plan.window - plan.start}, an epoch the last {plan.window} of {probe.samples} samples",
            "dropout is off in every run; gradients are compared as they are before clipping",
        ]
        if is_narrow(probe.precision):
            lines.append("in this precision rounding explains much, so all numbers are compared in fp32 as well")
        if probe.comm_hook != "none":
            lines.append(
                f"comm_hook {probe.comm_hook} is switched off: compressed gradients are other gradients, by design"
            )
        return lines + ([probe.clip_said] if probe.clip_said else [])

    def _not_looked_at(self, probe: Probe) -> list[str]:
        (plan, followed), steps, quick = self._longer(probe), self.request.steps, self.request.quick
        window = plan.window
        beyond = probe.samples - window
        return [
            "dropout: it is off in every run",
            *(
                [f"{beyond} of {probe.samples} training samples: gradients are compared on the other {window}"]
                if beyond
                else []
            ),
            f"steps after the first {steps}; gradients, after {followed} steps",
            *([] if probe.held_out else ["evaluation: the task has no validation data"]),
            *(_LEFT_OUT if quick else []),
            *([] if self.device == "cuda" else ["kernels of a GPU: everything ran on the CPU"]),
            f"strategies other than the one above{'' if self.ranks > 1 else ', and more than one rank'}",
            *([f"comm_hook {probe.comm_hook}"] if probe.comm_hook != "none" else []),
        ]
