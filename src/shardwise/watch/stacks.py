"""Where a rank is in the code: faulthandler's text, read.

faulthandler writes it from a signal handler of its own, so that it comes even while Python or PyTorch hangs.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from shardwise.compat.frames import BACKWARD, COLLECTIVES, EXCHANGES, STORE

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_STDLIB = sysconfig.get_paths()["stdlib"]
_OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """file:line, with the folder it is in: tasks/chess.py:120."""
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}"

    @property
    def is_torch(self) -> bool:
        return "/torch/" in self.file

    @property
    def is_ours(self) -> bool:
        return self.file.startswith(_OURS)

    @property
    def is_users(self) -> bool:
        """Neither PyTorch's, nor Python's, nor the engine's. A task that comes with shardwise counts as the user's."""
        if self.is_torch or (self.file.startswith(("<", _STDLIB)) and "site-packages" not in self.file):
            return False
        return not self.is_ours or f"{_OURS}/tasks/" in self.file


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, the innermost first."""

    frames: tuple[Frame, ...] = ()

    @property
    def collective(self) -> str | None:
        """The collective it waits in, if it does: the call that was made, not those that it is made of."""
        name = None
        for frame in self.frames:
            if frame.is_torch and any(part in frame.file for part in COLLECTIVES):
                name = frame.function.rpartition(".")[2]
            elif frame.is_torch and any(part in frame.file for part in STORE):
                return "the rendezvous"
            elif not frame.is_torch:
                break
        if name == "init_process_group":
            return "the rendezvous"
        return name

    @property
    def in_backward(self) -> bool:
        """In autograd's engine, where DDP and fully_shard wait for the gradients of the others."""
        for frame in self.frames:
            if frame.function == BACKWARD:
                return True
            if not frame.is_torch:
                return False
        return False

    @property
    def in_exchange(self) -> bool:
        """In what DDP, fully_shard or a pipeline does around the model: the model's own code would lie further in."""
        return bool(self.frames) and any(part in self.frames[0].file for part in EXCHANGES)

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's; where there is none, of ours."""
        users = next((frame for frame in self.frames if frame.is_users), None)
        return users or next((frame for frame in self.frames if frame.is_ours), None)

    @property
    def innermost_own(self) -> Frame | None:
        """The innermost frame that is neither PyTorch's nor Python's."""
        return next((frame for frame in self.frames if frame.is_users or frame.is_ours), None)


NOWHERE = Stack()


def parse_stack(text: str) -> Stack:
    """The main thread of the last dump in a file that may hold several.

    faulthandler writes the threads from the newest to the oldest: the last one is the main thread.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        if "(most recent call first)" in line:
            frames = []
        elif match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return Stack(tuple(frames))
