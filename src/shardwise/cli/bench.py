"""`shardwise bench data CONFIG`."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from shardwise.cli.arguments import add_config_arguments
from shardwise.cli.output import show

if TYPE_CHECKING:
    from shardwise.bench.data import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="WHAT", required=True)
    data = actions.add_parser("data", help="does the data keep up: time to read, collate, move and wait, by workers")
    add_config_arguments(data)
    data.add_argument("--workers", metavar="N,N,…", help="numbers of loader workers to try (default: 0 to the cores)")
    data.add_argument("--steps", type=int, default=20, help="steps per measurement (20)")
    data.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from shardwise.bench.data import profile_data
    from shardwise.config import load_config
    from shardwise.errors import ConfigError

    config = load_config(args.config, args.set)
    cores = os.cpu_count() or 1
    try:
        workers = [int(number) for number in args.workers.split(",")] if args.workers else _usual(cores)
    except ValueError:
        raise ConfigError(f"--workers {args.workers}: write numbers with commas, for example 0,2,4") from None
    workers = sorted({*workers, config.data.num_workers})
    if args.steps < 1 or min(workers) < 0:
        raise ConfigError("--steps must be at least 1, and --workers must not be below 0")
    profile = profile_data(config, workers, args.steps, cores)
    show(json.dumps(profile.as_dict(), indent=1) if args.json else _table(profile))
    return 0


def _usual(cores: int) -> list[int]:
    return sorted({0, 1, 2, *(number for number in (4, 8, 16) if number <= cores)})


def _table(profile: Profile) -> str:
    costs = profile.costs
    lines = [
        f"one rank on {profile.device}, micro-batches of {profile.batch_size}, {profile.cores} cores",
        "",
        f"in one process, ms per micro-batch:  read {costs.read:.2f}   collate {costs.collate:.2f}   move {costs.move:.2f}   "
        f"compute {costs.compute:.2f}",
        "",
        "workers   loader alone, samples/s   wait per step, ms   share of the step",
    ]
    lines += [
        f"{pace.workers:>7}   {pace.samples_per_second:>25,.0f}   {pace.wait:>17.2f}   {pace.wait_share:>17.1%}"
        for pace in profile.paces
    ]
    return "\n".join([*lines, "", profile.verdict])
