"""The file that lets ranks of other machines join a cluster: addresses, keys, and nothing that is ever unpickled.

It is written with mode 0600 and deleted when the cluster closes. Whoever can read it can run code as its owner, so a
copy that others can read is refused. Its keys stand in no command line, no output and no environment.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import psutil
import zmq


class Ticket(NamedTuple):
    """What a rank needs to find the notebook, to know that it is the one, and to be let in."""

    token: str  # names the job where its engine wants a name
    n_ranks: int
    addresses: tuple[str, ...]
    server: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Ticket({self.token}: {self.n_ranks} ranks, {', '.join(self.addresses)}; keys not shown)"


class Keys(NamedTuple):
    """The notebook's own pair, and the pair of those who may join."""

    server: tuple[bytes, bytes]
    client: tuple[bytes, bytes]


def new_keys() -> Keys:
    """Two fresh pairs of CURVE keys, public and secret. ValueError if this ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ValueError("this pyzmq was built without CURVE, and no rank joins without it: pip install pyzmq")
    return Keys(zmq.curve_keypair(), zmq.curve_keypair())


def write(path: Path, ticket: Ticket) -> None:
    """Write the file, readable by its owner alone. ValueError if there is one by this name: it may be in use."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(
            f"{path} is there already, and may belong to a cluster that is open: take another file=, or delete it"
        ) from None
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(ticket._asdict(), file)


def read(path: Path) -> Ticket:
    """The ticket in a file. ValueError with the mend if it is not there, others can read it, or it is no ticket."""
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): it is written by Cluster.join and deleted by close(); nodes "
            "that share no file system with the notebook need a copy, made with scp -p"
        ) from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ValueError(f"{path} has mode {mode:04o}: others can read the keys in it. Say chmod 600 {path}")
    if status.st_uid not in (os.getuid(), 0):
        raise ValueError(f"{path} belongs to user {status.st_uid} and you are {os.getuid()}: copy it, mode 0600")
    try:
        fields = json.loads(text)
        return Ticket(**{**fields, "addresses": tuple(fields["addresses"])})
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no file of Cluster.join: copy that one again") from None


def addresses(host: str | None, port: int) -> tuple[str, ...]:
    """Where this machine may be found: at `host`, or at each address that it has, its own loopback last."""
    if host is not None:
        return (f"tcp://{bracketed(host)}:{port}",)
    hosts = [
        address.address
        for name, there in psutil.net_if_addrs().items()
        for address in there
        if address.family == socket.AF_INET and psutil.net_if_stats()[name].isup
    ]
    hosts.sort(key=lambda address: address.startswith("127."))
    return tuple(f"tcp://{address}:{port}" for address in hosts)


def bracketed(host: str) -> str:
    """An address as it stands in front of a port."""
    return f"[{host}]" if ":" in host else host


def interface_to(host: str, port: int) -> tuple[str, str]:
    """(address, network interface) of this machine on the way to `host`; no packet is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own = probe.getsockname()[0]
    names = [
        name
        for name, there in psutil.net_if_addrs().items()
        for address in there
        if address.address.partition("%")[0] == own
    ]
    return own, names[0] if names else ""
