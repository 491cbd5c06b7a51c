"""`shardwise train CONFIG`."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import add_config_arguments, path_text

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.config.commands import ConfigSource
    from shardwise.launch.nodes import Nodes

log = logging.getLogger(__name__)

RESTARTS = 3
"""Unless --max-restarts says otherwise: of several ranks. One alone runs in this process, and is not started again."""


@dataclass(frozen=True)
class TrainRequest:
    """What was asked of the program besides the config. Every rank gets it."""

    resume: str | None
    fresh: bool
    all_ranks: bool
    stop_after: float | None
    """Seconds since `began`."""
    began: float
    """Of the monotonic clock, when the program was started."""
    elastic: bool
    """Machines may come and go."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--resume",
        type=path_text,
        metavar="WHICH",
        help="auto: from the newest whole checkpoint, if there is one; latest: there must be one; or a path",
    )
    parser.add_argument("--fresh", action="store_true", help="start anew; a run already in the folder is moved aside")
    parser.add_argument("--all-ranks", action="store_true", help="show the output of every rank, not of rank 0 alone")
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"start ranks that died or hang again, from the last checkpoint, this many times; default: {RESTARTS}, with one "
        "rank 0",
    )
    parser.add_argument(
        "--stop-after",
        type=duration,
        metavar="TIME",
        help="save and leave in time, with exit code 75: 1h50m, 90s, 1:50:00",
    )
    parser.add_argument(
        "--nodes",
        type=node_range,
        metavar="MIN:MAX",
        help="machines that come and go; start this on each of them, with the same --rendezvous",
    )
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where the machines of --nodes meet")
    parser.add_argument(
        "--node-host", action="store_true", help="this machine hosts the rendezvous; default: the one named so"
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.config import load_config
    from shardwise.config.load import config_values
    from shardwise.launch.environment import adopt_environment

    _check_arguments(args)
    request = TrainRequest(
        args.resume, args.fresh, args.all_ranks, args.stop_after, time.monotonic(), elastic=args.nodes is not None
    )
    if adopt_environment():
        return _as_rank(args.config, args.set, request)
    config = load_config(args.config, args.set)
    _check_before_start(config)

    import torch

    from shardwise.engine.batch_plan import check_plan
    from shardwise.launch.agent import Job
    from shardwise.launch.local import local_rank_count, run_ranks

    nodes = _nodes(args, config)
    count = local_rank_count(config, cuda_devices=torch.cuda.device_count())
    if nodes is None:  # otherwise the number of ranks is not known yet
        check_plan(config, count, _device(config))
        _tell_of_accumulation(config, count)
    restarts = args.max_restarts if args.max_restarts is not None else RESTARTS if count > 1 or nodes else 0
    if count == 1 and not restarts and nodes is None:
        from shardwise.launch.external_ranks import external_ranks
        from shardwise.watch.exit_codes import of_program

        with external_ranks(config):
            return of_program(_train(config, request))
    training, values = config.training, config_values(config)
    job = Job(
        _rank,
        (values, config.source, request),
        Path(config.run_folder),
        Path(config.checkpoint_folder),
        training.hang_timeout,
        training.on_hang == "restart",
    )
    built_in = ":" not in config.task
    return run_ranks(
        job,
        count,
        max_restarts=restarts,
        preload=["shardwise.engine.fit", "shardwise.cli.train"],
        rehearsed=values if built_in else None,
        nodes=nodes,
    )


def _as_rank(file: str, overrides: Sequence[str], request: TrainRequest) -> int:
    """One of the ranks that torchrun or srun started: each prints its own error, unless it only lost a peer."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from shardwise.config import load_config
    from shardwise.errors import ConfigError, ShardwiseError
    from shardwise.launch.external_ranks import external_ranks
    from shardwise.watch.console import PLAIN, program_logging
    from shardwise.watch.exit_codes import of_program
    from shardwise.watch.failures import peer_lost

    rank = os.environ["RANK"]

    @record
    def entry() -> int:
        try:
            config = load_config(file, overrides)
            if rank == "0" and not request.elastic:
                _tell_of_accumulation(config, int(os.environ["WORLD_SIZE"]))
            with external_ranks(config):
                return of_program(_train(config, request))
        except Exception as error:
            if peer_lost(error):
                log.error("stopped, because another rank went away", extra=PLAIN)
                raise SystemExit(1) from None
            if isinstance(error, ShardwiseError):
                # A mistake in the file is the same on every rank: said once.
                if rank == "0" or not isinstance(error, ConfigError):
                    log.error(error)
                raise SystemExit(2) from None
            raise

    with program_logging(f"[rank {rank}] "):
        code = int(entry() or 0)
    _end_at_once(code)
    return code


def _end_at_once(code: int) -> None:
    """Without the end of the interpreter, as ranks of our own launcher end: threads of gloo abort a process that has done all its
    work if they still let go of a tensor then (torch 2.13, Python 3.11: one of ten short runs)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank(values: dict[str, Any], source: ConfigSource | None, request: TrainRequest) -> int:
    """One of the ranks that the launcher started. The file may have been changed or removed since the run began."""
    from shardwise.config.load import config_from_values

    return _train(config_from_values(values).read_from(source), request)


def _train(config: Config, request: TrainRequest) -> int:
    """A rank, in its process."""
    from shardwise.engine.fit import fit
    from shardwise.engine.shutdown import Stop, Stopped
    from shardwise.launch.environment import attempt

    again = attempt() > 0
    named = request.resume if request.resume not in (None, "auto", "latest") else None
    stop = Stop(request.stop_after, request.began)
    try:
        outcome = fit(
            config,
            resume="auto" if again or request.elastic else request.resume,
            fresh=request.fresh and not again,
            all_ranks=request.all_ranks,
            stop=stop,
            elastic=again or request.elastic,
            fallback_checkpoint=named if again else None,
        )
    except Stopped:
        return stop.exit_code
    return stop.exit_code if outcome.stopped else 0


def _nodes(args: argparse.Namespace, config: Config) -> Nodes | None:
    from shardwise.launch.nodes import Nodes, launcher_of

    if args.nodes is None:
        return None
    least, most = args.nodes
    return Nodes(least, most, args.rendezvous, f"shardwise-{config.name}", launcher_of(config), args.node_host)


def _check_arguments(args: argparse.Namespace) -> None:
    from shardwise.errors import ConfigError

    if args.resume and args.fresh:
        raise ConfigError("--resume goes on with a run and --fresh starts anew: give one of them")
    if args.max_restarts is not None and args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: 0 or more")
    if args.nodes is not None and args.fresh:
        raise ConfigError(
            "--fresh with --nodes: a machine that joins later would start anew too. Move the earlier run folder aside instead"
        )
    if args.nodes is not None and args.resume not in (None, "auto"):
        raise ConfigError(
            f"--resume {args.resume} with --nodes: machines that come and go always go on from the newest"
        )
    if (args.nodes is None) != (args.rendezvous is None):
        raise ConfigError("--nodes MIN:MAX and --rendezvous HOST:PORT belong together: give both, on every machine")
    if args.rendezvous and not re.fullmatch(r".+:\d+", args.rendezvous):
        raise ConfigError(f"--rendezvous {args.rendezvous}: must be HOST:PORT")


def _check_before_start(config: Config) -> None:
    """What can be known to fail is said before any rank has started."""
    from shardwise.config.load import load_task_class
    from shardwise.watch.trackers import require_trackers

    require_trackers(config)
    load_task_class(config.task)


def _tell_of_accumulation(config: Config, ranks: int) -> None:
    from shardwise.engine.batch_plan import loss_taken_apart

    if said := loss_taken_apart(config, ranks, _device(config)):
        log.warning(said)


def _device(config: Config) -> str:
    import torch

    return "cuda" if torch.cuda.is_available() and config.training.device != "cpu" else "cpu"


def duration(text: str) -> float:
    """1h50m, 90s, 2h, 1:50:00; a number alone is seconds."""
    if text.isdecimal():
        return float(text)
    clock = re.fullmatch(r"(?:(\d+):)?(\d+):(\d{2})", text)
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", text)
    match = clock or units
    if match is None or not any(match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 1h50m, 90s, 2h or 1:50:00")
    sizes = (3600, 60, 1) if clock else (86400, 3600, 60, 1)
    return sum(float(number or 0) * size for number, size in zip(match.groups(), sizes, strict=True))


def node_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: must be MIN:MAX, for example 1:4")
    return least, most
