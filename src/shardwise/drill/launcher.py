"""The launcher of a drill, in a process of its own, because it is killed too: python -m shardwise.drill.launcher JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwise.config import load_config
from shardwise.drill import inject
from shardwise.errors import ShardwiseError
from shardwise.launch.agent import Job
from shardwise.launch.local import run_ranks

OFTEN = 1_000_000


def main(text: str) -> int:
    given = json.loads(text)
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
        )
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
