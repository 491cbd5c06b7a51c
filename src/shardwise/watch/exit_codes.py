"""What the exit code of a run says to whoever started it."""

from __future__ import annotations

import signal

AGAIN = 75
"""It was asked to leave, and did with a checkpoint: run it again (EX_TEMPFAIL)."""
INTERRUPTED = 128 + signal.SIGINT
"""The same, by Ctrl-C."""
TIME_IS_UP = 76
"""Of a rank alone: it left because of --stop-after. The program's own code is then AGAIN."""


def of_program(code: int) -> int:
    return AGAIN if code == TIME_IS_UP else code
