"""What the ranks of the pool are asked to do."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwise.config import Config
from shardwise.engine import forward_passes as passes_module
from shardwise.engine.fit import fit
from shardwise.engine.session import Session
from tests.tasks import config_of

if TYPE_CHECKING:
    from tests.distributed.pool import FreshRanks, RankPool

Record = dict[str, Any]


def train(text: str, overrides: list[str], *, steps: int | None = None, resume: str | None = None, save: bool = False,
          save_each: bool = False, per_rank_mean: bool = False, evaluate: bool = False) -> Record:  # fmt: skip
    """Train through the five verbs. Returns per-step loss and gradient norm, the sample ids, and the final weights."""
    config = config_of(text, overrides)
    original = passes_module.loss_weight
    if per_rank_mean:  # the mistake that rule 1 is about: every micro-batch divided by its own count
        micro_batches = config.training.gradient_accumulation or 1
        passes_module.loss_weight = lambda copies, global_count, micro_count: 1 / (micro_count * micro_batches)
    try:
        with Session(config) as session:
            session.prepare()
            if resume:
                session.resume(resume)
            record: Record = {"losses": [], "norms": [], "ids": [], "lrs": [], "from": session.steps_done}
            for batch in session.batches():
                if save_each:  # before the first step, and after each; with a metric, so that save_top_k keeps them all
                    session.save({"loss": 0.0})
                if steps is not None and session.steps_done >= steps:
                    break
                result = session.step(batch)
                record["losses"].append(session.loss(result))
                record["norms"].append(result.grad_norm)
                record["lrs"].append(result.lr)
                record["ids"].append(batch.ids)
            if save_each:
                session.save({"loss": 0.0})
                session.wait()
            record["metrics"] = session.evaluate() if evaluate else {}
            record["weights"] = full_weights(session)
            record["skipped"] = session.skipped_steps
            if save:
                record["checkpoint"] = str(session.save(record["metrics"]))
                session.wait()
            return record
    finally:
        passes_module.loss_weight = original


def resumed_bit_for_bit(
    ranks: RankPool | FreshRanks, size: int, text: str, overrides: list[str], *, steps: int, job: Any = train
) -> Record:
    """The claim that a run which was saved after so many steps goes on as the uninterrupted one, whose record is returned."""
    whole = ranks.run(size, job, text, overrides)[0]
    head = ranks.run(size, functools.partial(job, steps=steps, save=True), text, overrides)[0]
    tail = ranks.run(size, functools.partial(job, resume="latest"), text, overrides)[0]
    assert head["losses"] + tail["losses"] == whole["losses"]
    for name, weight in whole["weights"].items():
        assert torch.equal(tail["weights"][name], weight), name
    return dict(whole)


def full_weights(session: Session) -> dict[str, torch.Tensor]:
    """The whole model on every rank, whatever the strategy."""
    options = StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = get_model_state_dict(session.parts.strategy.module, options=options)
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def run_fit(text: str, overrides: list[str], folder: str, **options: Any) -> Record:
    """The whole loop of `shardwise train`, in a folder."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        outcome = fit(config_of(text, overrides), **options)
    return {
        "before": outcome.before,
        "after": outcome.after,
        "steps": outcome.steps,
        "stopped": outcome.stopped,
        "output": output.getvalue(),
    }


def with_session(text: str, overrides: list[str], action: Any, *args: Any) -> Any:
    """Prepare a session and hand it to a function of the test's own."""
    config: Config = config_of(text, overrides)
    with Session(config) as session:
        session.prepare()
        return action(session, *args)


def folder_of(path: Path) -> list[str]:
    return [f"run_dir={path}"]
