"""`verify`: proof that N ranks compute what one process would. What is run and compared for it is in conduct.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.config.registry import BUILT_IN
from shardwise.errors import ConfigError
from shardwise.launch.scratch import scratch_folder
from shardwise.launch.server import start_server
from shardwise.verify.report import Report
from shardwise.verify.request import Request, Target

STEPS = 7
"""A ragged step, then two epochs of two full batches and a short one."""
FEWEST_STEPS = 4
TO_STEP = 120.0


def verify(
    target: str | Path,
    *,
    ranks: int | None = None,
    strategy: str | None = None,
    steps: int = STEPS,
    against: str | Path | None = None,
    overrides: Sequence[str] = (),
    planted: str | None = None,
    hang_timeout: float = TO_STEP,
    say: Callable[[str], None] = lambda line: None,
    quick: bool = False,
) -> Report:
    """What each argument means is said in request.py."""
    began = time.monotonic()
    if steps < FEWEST_STEPS:
        raise ConfigError(f"--steps {steps}: at least {FEWEST_STEPS} are needed, to save, to be killed and to go on")
    mine = Target.read(target, overrides)
    other = None if against is None else Target.read(against, overrides)
    ranks = ranks or (mine.config.training.num_gpus if mine.config else None) or 2
    built_in = mine.config is not None and mine.config.task in BUILT_IN["shardwise.tasks"]
    rehearsed = mine.values if built_in else None
    # There are more ranks than cores: a thread that waits must not keep one busy.
    start_server(["shardwise.verify.rank"], rehearsed, {"OMP_WAIT_POLICY": "PASSIVE"})

    from shardwise.verify.conduct import conduct  # torch: imported while the server does the same

    request = Request(mine, other, ranks, strategy, steps, planted, hang_timeout, say, began, quick)
    with scratch_folder("shardwise-verify-") as folder:
        return conduct(request, folder)
