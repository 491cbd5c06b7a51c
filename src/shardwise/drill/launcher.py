"""The launcher of a drill, in a process of its own, because it is killed too: python -m shardwise.drill.launcher FILE."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from shardwise.config import Config
from shardwise.config.load import config_from_values, config_values
from shardwise.drill import inject
from shardwise.errors import ShardwiseError
from shardwise.launch.agent import Job
from shardwise.launch.local import run_ranks
from shardwise.launch.nodes import Nodes, launcher_of
from shardwise.launch.server import die_with
from shardwise.watch.console import follow_log_level, program_logging

log = logging.getLogger("shardwise.drill.launcher")  # where this module is __main__

OFTEN = 1_000_000


def main(file: str) -> int:
    given = yaml.safe_load(Path(file).read_text())
    sys.path += [folder for folder in given["sys_path"] if folder not in sys.path]  # where the user's own task may be
    die_with(given["drill"])
    # As many as each rank would have with all of them on one machine: a sum may depend on how many threads make it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // given["of_ranks"])))
    config = config_from_values(given["config"], given["overrides"])
    values = config_values(config)
    job = Job(
        inject.rank,
        (values, given["scratch"]),
        Path(config.run_folder),
        Path(config.checkpoint_folder),
        config.training.hang_timeout,
        restart_on_hang=True,
    )
    built_in = ":" not in config.task
    try:
        return run_ranks(
            job,
            given["ranks"],
            max_restarts=OFTEN,
            preload=["shardwise.drill.inject"],
            rehearsed=values if built_in else None,
            nodes=_nodes(given["meeting"], config) if "meeting" in given else None,
        )
    except ShardwiseError as error:
        log.error(error)
        return 2


def _nodes(meeting: dict[str, Any], config: Config) -> Nodes:
    """All machines or none: the run is to be compared with one on as many ranks."""
    return Nodes(meeting["machines"], meeting["machines"], meeting["endpoint"], "drill", launcher_of(config))


if __name__ == "__main__":
    with program_logging():
        follow_log_level()
        sys.exit(main(sys.argv[1]))
