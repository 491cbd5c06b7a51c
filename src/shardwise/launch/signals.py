"""Signals to the launcher, which may be asleep in the agent when they come: a thread takes them."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

TAKEN = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def ignored(number: int) -> bool:
    """Under nohup a closed terminal is no reason to leave."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def signals_to(tell: Callable[[int], None]) -> Iterator[None]:
    """Every signal that asks for an end goes to `tell`, in a thread of its own.

    Ctrl-C goes to every process of the terminal. The ranks must not see it, or they would break off in the middle of a
    collective: it is blocked here, which they inherit, and taken by that thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while received := reader.recv(1):
            if received[0] in TAKEN:
                tell(received[0])

    # To start multiprocessing's tracker unblocks SIGINT again (Python 3.11), so it is started first.
    resource_tracker.ensure_running()
    # Without a handler nothing is written to the socket.
    taken = [number for number in TAKEN if not ignored(number)]
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in taken}
    wakeup = signal.set_wakeup_fd(writer.fileno())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        writer.close()
        listener.join()
        reader.close()
