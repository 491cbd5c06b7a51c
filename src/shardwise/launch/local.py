"""Ranks on this machine, through torchrun's elastic agent; on several, one launcher each.

The ranks die with the launcher, however it dies. When a rank fails, they are started again from the last checkpoint; when
that is of no use, the first real error is what the user sees.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from shardwise.config import Config
from shardwise.config.commands import RESUME, user_command
from shardwise.errors import SHARED_MEMORY, LaunchError, NoRoom
from shardwise.launch.agent import Agent, Job
from shardwise.launch.nodes import Nodes
from shardwise.launch.rank import rank_main
from shardwise.launch.rendezvous import join_rendezvous
from shardwise.launch.scratch import no_room_for_temporary_files, scratch_folder
from shardwise.launch.server import start_server
from shardwise.launch.signals import signals_to
from shardwise.parallel import strategy_for
from shardwise.parallel.membership import Member
from shardwise.watch.diagnosis import Kind
from shardwise.watch.exit_codes import AGAIN, INTERRUPTED, of_program
from shardwise.watch.failures import read_failures
from shardwise.watch.run_key import GIVEN, new_key, run_key

log = logging.getLogger(__name__)


def local_rank_count(config: Config, *, cuda_devices: int) -> int:
    """How many ranks to start on this machine."""
    training = config.training
    on_cpu = training.device == "cpu" or (training.device == "auto" and not cuda_devices)
    if training.num_nodes > 1:
        raise LaunchError(
            f"training.num_nodes: {training.num_nodes}: shardwise starts the ranks of one machine by itself. On several, "
            f"start it on each with torchrun --nnodes {training.num_nodes} … -m shardwise train …, or with srun"
        )
    if training.num_gpus is not None:
        if not on_cpu and training.num_gpus > cuda_devices:
            raise LaunchError(
                f"training.num_gpus: {training.num_gpus}, but this machine has {cuda_devices}. "
                "Lower it, or set training.device: cpu to run that many ranks on the CPU"
            )
        return training.num_gpus
    if training.strategy is not None and strategy_for(config, 1).one_process:
        return 1
    return 2 if on_cpu else max(1, cuda_devices)


def run_ranks(
    job: Job,
    count: int,
    *,
    max_restarts: int = 0,
    preload: Sequence[str] = (),
    rehearsed: Mapping[str, Any] | None = None,
    nodes: Nodes | None = None,
) -> int:
    """Run `job.entry(*job.args)` in `count` new processes on this machine. Returns the exit code of the run.

    `preload`: modules that the process imports which they are forked from; `rehearsed`: the values of a config whose model
    it builds.
    """
    _silence_the_agent()
    if nodes is None:
        # Of these ranks alone; those of several machines find theirs in the run folder.
        os.environ.setdefault(GIVEN, new_key())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    # The ranks have a rendezvous store of their own: with a shared one, a restarted rank can dial a dead peer (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # its 30 seconds are too few for a large checkpoint
    if sys.platform == "linux" and (interface := "lo" if nodes is None else nodes.interface):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # nobody else is to reach the ranks of one machine
    with scratch_folder() as scratch, telling_of_room():
        agent = _agent(job, count, max_restarts, nodes, scratch)
        with signals_to(agent.ask):
            start_server(preload, rehearsed)  # with Ctrl-C blocked, as its ranks shall have it
            try:
                result = agent.run()
            except RendezvousConnectionError as error:
                where = nodes.endpoint if nodes else "of this machine"
                raise LaunchError(f"the rendezvous {where} does not answer") from error
            except RendezvousError as error:
                raise LaunchError(f"the machines did not come together: {error}") from error
            finally:
                if nodes is None or agent.asked is None:  # the others may go on without this machine
                    agent.get_worker_group().spec.rdzv_handler.shutdown()
        if agent.asked is not None and not (agent.verdict and agent.verdict.kind is Kind.ERROR):
            return INTERRUPTED if agent.asked == signal.SIGINT else AGAIN
        if result is None or result.is_failed():
            raise _error(agent)
        return of_program(max(result.return_values.values()))


@contextmanager
def telling_of_room() -> Iterator[None]:
    """Ranks are spoken to by files in two folders of this machine."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            about = os.statvfs(SHARED_MEMORY)
            if about.f_bavail * about.f_frsize < 2**16:
                raise NoRoom.in_shared_memory("for what the ranks are started with") from None
        raise no_room_for_temporary_files(error) from None


def _agent(job: Job, count: int, max_restarts: int, nodes: Nodes | None, scratch: Path) -> Agent:
    if nodes is None:
        address, handler = "127.0.0.1", join_rendezvous(None, Member(run_key(job.run_folder), {}), "127.0.0.1")
    else:
        address = nodes.address
        handler = join_rendezvous(nodes.point, nodes.member, address, nodes.least, nodes.most, nodes.job)
    spec = WorkerSpec(
        role="default",
        local_world_size=count,
        entrypoint=rank_main,
        rdzv_handler=handler,
        max_restarts=max_restarts,
        local_addr=address,
        numa_options=LaunchConfig(1, 1, count).numa_options,  # what torchrun chooses for this machine
    )
    logs = DefaultLogsSpecs(log_dir=str(scratch / "logs"), redirects=Std.NONE, tee=Std.NONE)
    return Agent(spec, logs, job, scratch)


def _error(agent: Agent) -> LaunchError:
    verdict = agent.verdict
    if verdict is None:
        return LaunchError("the ranks failed, and nothing is known of why")
    error = read_failures(agent.scratch).get(verdict.guilty[0]) if verdict.guilty else None
    if error is not None and not error.peer_lost:
        if error.for_user:
            # Most are agreed on by all ranks, and it is chance which wrote it down first; where the rank matters, it is named.
            return LaunchError(error.message)
        return LaunchError(f"rank {error.rank} failed:\n{error.trace}{_because(agent)}")
    if agent.lost:
        return LaunchError(
            f"{verdict.sentence}, and {agent.lost}. Bring it back to where it was, and go on with --resume auto"
        )
    return LaunchError(
        f"{verdict.sentence}{_because(agent)}.\n  Go on from the last checkpoint:  {user_command(RESUME, 'auto')}"
    )


def _because(agent: Agent) -> str:
    return f" ({agent.final}: not started again)" if agent.final else ""


def _silence_the_agent() -> None:
    """What it has to say about failures, we say better. Each of its loggers has a level of its own. For --log-level debug it
    may speak."""
    if log.isEnabledFor(logging.DEBUG):
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
