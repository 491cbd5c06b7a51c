"""`shardwise train CONFIG`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, e.g. training.batch_size=8"
    )
    parser.add_argument(
        "--resume",
        metavar="WHICH",
        help="auto: from the newest whole checkpoint, if there is one; latest: there must be one; or a path",
    )
    parser.add_argument("--fresh", action="store_true", help="start anew; a run already in the folder is moved aside")
    parser.add_argument("--all-ranks", action="store_true", help="show the output of every rank, not of rank 0 alone")


def run(args: argparse.Namespace) -> int:
    from shardwise.config import load_config
    from shardwise.errors import ConfigError
    from shardwise.launch.environment import adopt_environment

    if args.resume and args.fresh:
        raise ConfigError("--resume goes on with a run and --fresh starts anew: give one of them")
    if adopt_environment():
        return _as_rank(args)
    config = load_config(args.config, args.set)
    _check_before_start(config)

    import torch

    from shardwise.launch.local import Interrupted, local_rank_count, run_ranks

    count = local_rank_count(config, cuda_devices=torch.cuda.device_count())
    if count == 1:
        return _train(args)
    try:
        outcomes = run_ranks(_train, (args,), count)
    except Interrupted as stopped:
        return stopped.exit_code
    return max(outcomes.values())


def _as_rank(args: argparse.Namespace) -> int:
    """One of the ranks that torchrun or srun started: each prints its own error, unless it only lost a peer."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from shardwise.errors import ConfigError, ShardwiseError
    from shardwise.launch.local import peer_lost

    rank = os.environ["RANK"]

    @record
    def entry() -> int:
        try:
            return _train(args)
        except Exception as error:
            if peer_lost(error):
                raise SystemExit(f"[rank {rank}] stopped, because another rank went away") from None
            if isinstance(error, ShardwiseError):
                # A mistake in the file is the same on every rank: said once.
                if rank == "0" or not isinstance(error, ConfigError):
                    print(f"[rank {rank}] error: {error}", file=sys.stderr, flush=True)
                raise SystemExit(2) from None
            raise

    return int(entry() or 0)


def _train(args: argparse.Namespace) -> int:
    from shardwise.config import load_config
    from shardwise.engine.fit import fit
    from shardwise.launch.local import STOPPED

    outcome = fit(load_config(args.config, args.set), resume=args.resume, fresh=args.fresh, all_ranks=args.all_ranks)
    return STOPPED if outcome.stopped else 0


def _check_before_start(config: Config) -> None:
    """What can be known to fail is said before any rank has started."""
    from shardwise.config.load import load_task_class
    from shardwise.watch.trackers import require_trackers

    require_trackers(config)
    load_task_class(config.task)
