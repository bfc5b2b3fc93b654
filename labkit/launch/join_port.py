"""The one port of a joined cluster: ZeroMQ with CURVE, open to who has the key of the ticket and to nobody else."""

from __future__ import annotations

import secrets

import zmq
from zmq.auth.thread import ThreadAuthenticator

from labkit.launch import join_file

BEAT_MS, BEAT_TIMEOUT_MS = 500, 2000
"""A connection on which ZeroMQ hears no heartbeat for so long is closed. Its own thread answers them, whatever Python
does. The posts have the same."""


class Allowed:
    """ZeroMQ asks it, in a thread of its own, whether a peer's key is the one of the ticket."""

    def __init__(self, public: bytes):
        self.public, self.refused = public, 0

    def callback(self, _: str, key: bytes) -> bool:
        """True for the one key."""
        if secrets.compare_digest(key, self.public):
            return True
        self.refused += 1
        return False


class Gate:
    """The router and its keys. Nothing comes out of the router that was not encrypted with the key of the ticket."""

    def __init__(self, host: str | None):
        keys = join_file.new_keys()
        self.public = (keys.server[0].decode(), keys.client[0].decode(), keys.client[1].decode())
        self.context = zmq.Context()
        self.allowed = Allowed(keys.client[0])
        self.guard = ThreadAuthenticator(self.context)
        self.guard.start()
        self.guard.configure_curve_callback(domain="*", credentials_provider=self.allowed)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.curve_server, self.router.curve_secretkey = True, keys.server[1]
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.HEARTBEAT_IVL, BEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, BEAT_TIMEOUT_MS),
            (zmq.IPV6, int(":" in (host or ""))),
            (zmq.LINGER, 2000),
        ):
            self.router.setsockopt(option, value)
        try:
            self.port = self.router.bind_to_random_port(f"tcp://{join_file.bracketed(host) if host else '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"host={host!r} is no address of this machine ({error}): leave it out") from None

    def close(self) -> None:
        """Let nobody in any more, when what was said has been sent."""
        self.router.close()
        self.guard.stop()
        self.context.term()
