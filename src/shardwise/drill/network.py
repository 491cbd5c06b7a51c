"""Two machines on this one: two network namespaces of the kernel, and a cable between them that can be pulled out.

They reach each other and nothing else. Their names carry the process that made them, so that what a killed drill left behind
is found and removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError

MEETING_POINT = "10.87.0.1:29400"
"""In the first of the two; nobody else is there who could have taken the port."""
CABLE = "cable"
NAMES = Path("/run/netns")
"""Where iproute2 keeps them."""


class NoNetworks(ShardwiseError):
    """The kernel refuses."""


@dataclass(frozen=True)
class Machine:
    network: str

    def within(self) -> list[str]:
        """The beginning of a command that is to run on it."""
        return ["ip", "netns", "exec", self.network]

    def put_the_cable_back(self) -> None:
        _ip("-n", self.network, "link", "set", CABLE, "up")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Removed in the end, however it ends."""
    _sweep()
    names = [f"shardwise-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for number, name in enumerate(names, start=1):
            _ip("-n", name, "addr", "add", f"10.87.0.{number}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Machine(names[0]), Machine(names[1])
    finally:
        for name in names:
            _remove(name)


def pull_the_cable() -> None:
    """Of the machine that this process runs on. Nothing is reset or refused from now on: what is sent never arrives."""
    _ip("link", "set", CABLE, "down")


def why_there_are_none() -> str | None:
    """Why two machines cannot be made here; None: they can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip, of iproute2"
    try:
        with two_machines():  # a container may have root and yet not the right
            return None
    except NoNetworks as error:
        return str(error)


def _sweep() -> None:
    """What drills left behind that were killed; one of them may have had the number that this process has now."""
    for file in NAMES.glob("shardwise-*-[ab]"):
        match = re.fullmatch(r"shardwise-(\d+)-[ab]", file.name)
        if match and (int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists()):
            _remove(file.name)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworks(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _remove(name: str) -> None:
    if (NAMES / name).exists():
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
