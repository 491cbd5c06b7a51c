"""Several machines, each with a launcher: where they meet, and by which address each is reached."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from shardwise.config import Config
from shardwise.errors import LaunchError
from shardwise.launch.rendezvous import MeetingPoint
from shardwise.parallel.membership import Member
from shardwise.parallel.what_runs import MACHINES_OWN, what_runs
from shardwise.watch.run_key import run_key


def launcher_of(config: Config) -> Member:
    """What the launchers of several machines compare."""
    return Member(run_key(Path(config.run_folder)), what_runs(config, own=MACHINES_OWN))


@dataclass(frozen=True)
class Nodes:
    """Between `least` and `most` machines, which meet at `endpoint`, host:port."""

    least: int
    most: int
    endpoint: str
    job: str
    """The same on all machines of a job."""
    member: Member
    """By what they know each other, and what this one runs."""
    keeps: bool = False
    """This machine was told to host the rendezvous."""

    @property
    def point(self) -> MeetingPoint:
        return MeetingPoint(self._host, int(self.endpoint.rpartition(":")[2]), self.hosts_rendezvous)

    @property
    def is_loopback(self) -> bool:
        return self._host in ("localhost", "127.0.0.1")

    @property
    def _host(self) -> str:
        return self.endpoint.rpartition(":")[0]

    @property
    def hosts_rendezvous(self) -> bool | None:
        """None: whoever of those on this machine comes first."""
        if self.keeps:
            return True
        return None if self.is_loopback else self.address == self._rendezvous_address[0]

    @property
    def address(self) -> str:
        """Of this machine, as the others reach it: the one by which it reaches the rendezvous. Its name need not resolve."""
        if self.is_loopback:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            try:
                probe.connect(self._rendezvous_address)
            except OSError as error:
                raise LaunchError(f"--rendezvous {self.endpoint}: there is no way to it: {error.strerror}") from None
            return str(probe.getsockname()[0])

    @property
    def interface(self) -> str | None:
        """The network that has this address, for gloo, which would go by the machine's name."""
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == self.address), None)

    @property
    def _rendezvous_address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        try:
            return socket.gethostbyname(host), int(port)
        except OSError as error:
            raise LaunchError(f"--rendezvous {self.endpoint}: {host} is not known: {error.strerror}") from None


def _address_of(interface: str) -> str | None:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
