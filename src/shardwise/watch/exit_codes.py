"""What the exit code of a run says to whoever started it."""

from __future__ import annotations

import signal

AGAIN = 75
"""It was asked to leave, and did with a checkpoint: run it again (EX_TEMPFAIL)."""
INTERRUPTED = 128 + signal.SIGINT
"""The same, by Ctrl-C."""
