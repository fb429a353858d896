"""TCP ports on loopback: which are free, and whose the others are."""

import socket

import psutil

from service.stack.errors import StackError

LOOPBACK = "127.0.0.1"
_TRIES = 200


def free_port(preferred: int, *, taken: frozenset[int] = frozenset()) -> int:
    """Return `preferred`, or the next port above it that nobody listens on."""
    last = min(preferred + _TRIES, 65_536)
    for port in range(preferred, last):
        if port not in taken and _is_free(port):
            return port
    raise StackError(f"no free port from {preferred} to {last - 1} on {LOOPBACK}; set ABLATE_PORT to another start")


def listeners(port: int) -> set[int]:
    """Return the processes of this user that listen on `port` of the loopback address."""
    found = psutil.net_connections(kind="tcp4")
    return {
        one.pid
        for one in found
        if one.status == psutil.CONN_LISTEN and one.laddr == (LOOPBACK, port) and one.pid is not None
    }


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
