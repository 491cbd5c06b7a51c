"""The port at which the members of a run meet: at the address that was asked for, and at no other of the machine."""

from __future__ import annotations

import errno
import logging
import socket
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from shardwise.compat.distributed import TCPStore
from shardwise.errors import LaunchError, one_line

log = logging.getLogger(__name__)


def tcp_store(address: str, port: int, *, hosts: bool, timeout: timedelta) -> TCPStore:
    """`hosts`: it listens, otherwise it connects to the one who does. LaunchError: that is not possible."""
    listening = listen(address, port) if hosts else None
    try:
        # A number of members would make it wait for so many, whoever they are.
        return TCPStore(address, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listening)
    except (dist.DistError, ValueError) as error:
        raise LaunchError(f"nobody who belongs to this run answers at {address}:{port}: {one_line(error)}") from None


def listen(address: str, port: int) -> int | None:
    """A socket that listens there, as its number. None: the address is none of this machine's own, as behind a translation of
    addresses, or a name that only others look up right; then the port is open at all of them."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if _is_loopback(str(place[0])) and not (_is_loopback(address) or address == "localhost"):
            return None  # of its own name, Debian says 127.0.1.1
        with socket.socket(family, kind, protocol) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(place)
            own.listen(1024)
            return own.detach()
    except socket.gaierror as error:
        raise LaunchError(f"{address} is not known on this machine: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {address} is in use already, by another run or program: choose another"
            ) from None
        if error.errno != errno.EADDRNOTAVAIL:
            raise LaunchError(f"cannot listen at {address}:{port}: {error.strerror}") from None
        log.warning(f"{address} is not an address of this machine: port {port} is open at all of its addresses")
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return False


class PortInUse(LaunchError):
    """Somebody listens there already."""
