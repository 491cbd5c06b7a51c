"""The launcher of a drill, in a process of its own, because it is killed too: python -m shardwise.drill.launcher JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shardwise.config import load_config
from shardwise.drill import inject
from shardwise.errors import ShardwiseError
from shardwise.launch.agent import Job
from shardwise.launch.local import run_ranks
from shardwise.launch.nodes import Nodes
from shardwise.launch.server import die_with

OFTEN = 1_000_000


def main(text: str) -> int:
    given = json.loads(text)
    die_with(given["drill"])
    # As many as each rank would have with all of them on one machine: a sum may depend on how many threads make it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // given["of_ranks"])))
    config = load_config(given["config"], given["overrides"])
    job = Job(
        inject.rank,
        (given["config"], given["overrides"], given["scratch"]),
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
            rehearsed=(Path(given["config"]), given["overrides"]) if built_in else None,
            nodes=_nodes(given["meeting"]) if "meeting" in given else None,
        )
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _nodes(meeting: dict[str, Any]) -> Nodes:
    """All machines or none: the run is to be compared with one on as many ranks."""
    return Nodes(meeting["machines"], meeting["machines"], meeting["endpoint"], "drill")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
