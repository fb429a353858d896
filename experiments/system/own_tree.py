"""A file tree of its own for a process and its later children: the same paths, but hardly any of them can be changed.

Everything is read-only except for a few folders, so that modes, owners and times of all other files stay. `/dev/shm` is
its own, and sockets of services are hidden. It needs CAP_SYS_ADMIN, or a user namespace. See docs/trust.md.
"""

import ctypes
import fcntl
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.errors import IsolationFailed
from ablate.experiments.system.kernel_limits import LIBC, checked, has_admin, system_call

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
"""System calls; their numbers are the same on every machine. Every kernel with Landlock has them."""
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_CWD, _EMPTY_PATH, _RECURSIVE = -100, 0x1000, 0x8000
_CLONE, _FROM_DESCRIPTOR = 0x1, 0x4
_READ_ONLY = 0x1
_SLAVE, _ALL_BELOW = 1 << 19, 1 << 14
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place that the C library takes
_SERVICES = Path("/run")
"""Folder of other programs' sockets."""
_NAME_SERVICES = (_SERVICES / "nscd", _SERVICES / "nslcd")
"""Those that only answer who a user is."""
_BY_EVERYBODY = 0o002
_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class OwnTree:
    """The tree of one trial. All paths are resolved."""

    writable: tuple[Path, ...]
    """Folders to change."""
    readable: tuple[Path, ...]
    """Files and folders that stay visible in /run."""
    own_network: bool = False
    """Whether its sockets reach only its own processes: its network has nothing but a loopback interface."""

    def enter(self) -> None:
        """Give this process, which has one thread, the tree. Raises IsolationFailed if the kernel refuses."""
        sockets, room = tuple(_sockets_of_services()), _room(SHARED_MEMORY)
        _enter_namespaces(own_network=self.own_network)
        parts = self._parts()
        _set_read_only(_CWD, b"/", _RECURSIVE)
        if covers := _SERVICES.is_dir() and _SERVICES not in parts:
            _place_memory(_SERVICES, "mode=755")
        for path in sorted(parts, key=lambda path: len(path.parts)):
            _place(parts[path], path)
        if covers:
            _set_read_only(_CWD, os.fsencode(_SERVICES))
        if SHARED_MEMORY.is_dir():
            _place_memory(SHARED_MEMORY.resolve(), f"mode=1777,size={room}")
        _hide(sockets)
        _go_to_the_same_folder()

    def _parts(self) -> dict[Path, int]:
        """Return detached copies of the folders that get a place of their own: those to change, and those in /run."""
        writable = _outermost(self.writable)
        visible = _outermost(path for path in (*self.readable, *_NAME_SERVICES) if path.is_relative_to(_SERVICES))
        parts = {path: _part(path) for path in visible if path.exists() and not _is_inside(path, writable)}
        for part in parts.values():
            _set_read_only(part, b"", _EMPTY_PATH | _RECURSIVE)
        return parts | {path: _part(path) for path in writable}


def keep_own_process_writable() -> None:
    """Let a process of root inside of a tree write its own files in /proc, if the file rights allow it."""
    own = Path(f"/proc/{os.getpid()}")
    part = _part(own)
    _set_attributes(part, b"", _EMPTY_PATH, clear=_READ_ONLY)
    _place(part, own)


def _enter_namespaces(*, own_network: bool) -> None:
    """Make the mounts of this process its own: what it mounts stays in here, what the machine mounts arrives."""
    user, group = os.geteuid(), os.getegid()
    as_user = 0 if has_admin() else _NEW_USER
    flags = _NEW_MOUNTS | _NEW_IPC | as_user | (_NEW_NETWORK if own_network else 0)
    checked("unshare", LIBC.unshare(flags))
    if as_user:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    checked("mount of / as a slave", LIBC.mount(None, b"/", None, _SLAVE | _ALL_BELOW, None))
    if own_network:
        _start_loopback()


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        _name, flags = struct.unpack("16sH14x", fcntl.ioctl(control, _GET_FLAGS, request))
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _part(path: Path) -> int:
    """Return a detached copy of the mounts at and below `path`, as a descriptor."""
    return system_call(f"open_tree of {path}", _OPEN_TREE, _CWD, os.fsencode(path), _CLONE | os.O_CLOEXEC | _RECURSIVE)


def _place(part: int, path: Path) -> None:
    """Mount a detached copy at `path`, which is made if it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if stat.S_ISDIR(os.fstat(part).st_mode) else path.touch()
    system_call(f"move_mount to {path}", _MOVE_MOUNT, part, b"", _CWD, os.fsencode(path), _FROM_DESCRIPTOR)
    os.close(part)


def _place_memory(path: Path, options: str) -> None:
    checked(f"mount of memory at {path}", LIBC.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, options.encode()))


def _set_read_only(folder: int, path: bytes, flags: int = 0) -> None:
    _set_attributes(folder, path, flags, set_=_READ_ONLY)


def _set_attributes(folder: int, path: bytes, flags: int, *, set_: int = 0, clear: int = 0) -> None:
    attributes = struct.pack("=QQQQ", set_, clear, 0, 0)
    system_call("mount_setattr", _MOUNT_SETATTR, folder, path, flags, attributes, ctypes.c_size_t(len(attributes)))


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths without those that are inside of another one."""
    kept: list[Path] = []
    for path in sorted(set(paths), key=lambda path: len(path.parts)):
        if not _is_inside(path, kept):
            kept.append(path)
    return kept


def _is_inside(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _room(folder: Path) -> int:
    """Return the size of the machine's own shared memory, which its operator has chosen."""
    if not folder.is_dir():
        return 0
    size = os.statvfs(folder)
    return size.f_frsize * size.f_blocks


def _sockets_of_services() -> Iterator[Path]:
    """Yield the named sockets on which this user's other processes listen, and those that not everybody may use."""
    for path in dict.fromkeys([*_names_of_sockets(), *_mount_points()]):
        with suppress(OSError, ValueError):
            file = path.stat()
            own = file.st_uid == os.geteuid() or not file.st_mode & _BY_EVERYBODY
            if stat.S_ISSOCK(file.st_mode) and own and os.access(path, os.W_OK):
                yield path.resolve()


def _names_of_sockets() -> Iterator[Path]:
    for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
        name = line.split(maxsplit=7)[7:]
        if name and name[0].startswith(b"/"):
            yield Path(os.fsdecode(name[0]))


def _mount_points() -> Iterator[Path]:
    """Yield the mount points of this process: a socket may come from another container."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        name = _ESCAPED.sub(lambda escaped: bytes([int(escaped[1], 8)]), line.split()[4])
        yield Path(os.fsdecode(name))


def _hide(sockets: Iterable[Path]) -> None:
    for path in sockets:
        with suppress(OSError):  # it was in /run, or was removed meanwhile
            if stat.S_ISSOCK(path.stat().st_mode):
                _cover(path)


def _cover(path: Path) -> None:
    """Put a device without content over a socket, which its program may remove at any moment."""
    try:
        _place(_part(Path(os.devnull)), path)
    except IsolationFailed:
        if path.exists():
            raise


def _go_to_the_same_folder() -> None:
    """Take the current folder from the tree: the old one leads to everything that is hidden here."""
    try:
        os.chdir(os.getcwd())  # noqa: PTH109 - the name that it has
    except OSError:
        os.chdir("/")
