"""A port for a server that a test starts."""

import socket


def free_port() -> int:
    """Return a loopback port that nobody listens on just now; by the time that it is bound somebody may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
