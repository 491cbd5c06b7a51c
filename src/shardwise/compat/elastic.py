"""torchrun's elastic agent: its private hooks under public names, and what its processes are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _BackendRendezvousStateHolder as RendezvousStateHolder,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDesc
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState as RendezvousState
from torch.multiprocessing.spawn import ProcessContext

__all__ = ["ElasticAgent", "NodeDesc", "RendezvousState", "RendezvousStateHolder", "starting_ranks_with"]

# NodeDesc: a machine in torchrun's rendezvous; by their order the ranks are numbered. Seen on 2.11, 2.13, 2.15.
# RendezvousState: what the machines know of each other. Seen on 2.13.
# RendezvousStateHolder: keeps it in step with the others'. Seen on 2.11, 2.13, 2.15.


class ElasticAgent(LocalElasticAgent):
    """What a subclass overrides and asks for, under public names. Seen on 2.11, 2.13, 2.15."""

    def start_ranks(self, group: WorkerGroup) -> dict[int, Any]:
        """The ids of this machine's ranks, by local rank. Called once per attempt, after the rendezvous."""
        return super()._start_workers(group)

    def monitor_ranks(self, group: WorkerGroup) -> RunResult:
        """What has become of them. Called several times a second."""
        return super()._monitor_workers(group)

    def stop_ranks(self, group: WorkerGroup) -> None:
        """Called before they are started again, and where the agent gives up."""
        super()._stop_workers(group)

    def restart_ranks(self, group: WorkerGroup) -> None:
        """They are stopped, and start again with the machines that are there then."""
        self._restart_workers(group)

    def wait_for_other_machines(self) -> None:
        """Called when the ranks of this one are done."""
        super()._exit_barrier()

    def processes(self) -> list[Any]:
        """Of the ranks, by local rank; none before they are started."""
        context: Any = self._pcontext
        return list(context._pc.processes) if context is not None and context._pc is not None else []

    def take_results(self) -> bool:
        """Ranks that are done end only when their results are taken. True: there is nothing to wait for any more."""
        return self._pcontext is None or self._pcontext.wait(0) is not None

    @property
    def remaining_restarts(self) -> int:
        """How often a failure is still answered with a restart; may be set."""
        return self._remaining_restarts

    @remaining_restarts.setter
    def remaining_restarts(self, number: int) -> None:
        self._remaining_restarts = number

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_ranks(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_ranks(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_ranks(worker_group)

    def _exit_barrier(self) -> None:
        self.wait_for_other_machines()


@contextmanager
def starting_ranks_with(
    finished: Callable[[int, str], Any], processes: Callable[[list[Any], list[str]], ProcessContext]
) -> Iterator[None]:
    """Ranks that the agent starts within it wait for each other by `finished(ranks, start_method)`, in the place of an Event;
    the agent joins them by `processes(processes, error_files)`. Seen on 2.11, 2.13, 2.15."""
    before: Any = elastic.MultiprocessContext

    class Context(before):
        def _start(self) -> None:
            self._worker_finished_event = finished(self.nprocs, self.start_method)
            super()._start()
            started: Any = self._pc
            self._pc: Any = processes(started.processes, started.error_files)

    elastic.MultiprocessContext = Context  # type: ignore[misc]
    try:
        yield
    finally:
        elastic.MultiprocessContext = before  # type: ignore[misc]
