"""Limits that a Linux process sets on itself for ever, and on its later children: Landlock, seccomp, capabilities.

They need no privilege and no package. The constants are those of the kernel's headers. The files of a Landlock rule are
opened before the limits apply, so a rule survives a later change of its path.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from ablate.experiments.errors import IsolationFailed

LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library; it keeps the error of the last call."""
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
"""System calls; their numbers are the same on every machine."""
_GET_ABI = 1
_RULE_PATH_BENEATH = 1
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 0b01, 0b10
_SCOPES_FROM = 6
"""Landlock's first version that keeps signals and abstract sockets inside."""
_PR_SET_NO_NEW_PRIVS = 38


class FileRight(IntFlag):
    """What a process may do with a file, or below a folder."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14


_DEVICE_FILES = FileRight.MAKE_CHAR | FileRight.MAKE_BLOCK
_OF_FILES = FileRight.EXECUTE | FileRight.WRITE_FILE | FileRight.READ_FILE | FileRight.TRUNCATE
"""Rights that a rule on a single file may contain."""
_SINCE = {FileRight.REFER: 2, FileRight.TRUNCATE: 3}
"""Landlock's version of a right; the others are of the first."""
LIST = FileRight.READ_DIR
READ = FileRight.EXECUTE | FileRight.READ_FILE | FileRight.READ_DIR
CHANGE = FileRight.WRITE_FILE | FileRight.TRUNCATE
WRITE = ~_DEVICE_FILES


@lru_cache
def landlock_version() -> int:
    """Return the version of this kernel's Landlock, 0 without it."""
    version: int = LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _GET_ABI)
    return max(0, version)


def drop_rights(rules: Mapping[Path, FileRight], *, alone: bool = True) -> None:
    """Allow this process and its later children only `rules` on files; a path that does not exist is left out.

    A rule on a folder is a rule on all below it. The processes may neither trace nor inspect one outside, nor mount.
    If they are `alone`, from version 6 they may also neither signal one outside nor connect to its abstract sockets.

    Raises:
        IsolationFailed: this kernel has no Landlock, or refuses a step.

    """
    version = landlock_version()
    if not version:
        raise IsolationFailed("this kernel has no Landlock")
    supported = ~FileRight(0)
    for right, since in _SINCE.items():
        supported &= ~right if version < since else ~FileRight(0)
    _restrict(rules, supported, _SCOPE_SOCKETS | _SCOPE_SIGNALS if alone and version >= _SCOPES_FROM else 0)


def enclose() -> None:
    """Let this process and its later children signal, and reach by abstract sockets, only each other.

    They keep all rights on files, and may drop them each for itself. Before version 6 this does nothing.
    """
    if keeps_signals_in():
        _restrict_scopes(_SCOPE_SOCKETS | _SCOPE_SIGNALS)


def keep_apart() -> None:
    """Let this process and its later children neither trace, inspect nor signal the process that started it.

    It keeps all rights on files. Before version 6 it may still signal. Raises IsolationFailed as `drop_rights`.
    """
    _restrict_scopes(_SCOPE_SIGNALS if keeps_signals_in() else 0)


def keeps_signals_in() -> bool:
    """Return whether a process after `keep_apart` cannot signal the process that started it."""
    return landlock_version() >= _SCOPES_FROM


def _restrict_scopes(scopes: int) -> None:
    """Enter a domain that refuses no right on files. Landlock refuses REFER wherever no rule grants it."""
    moves = {Path("/"): FileRight.REFER} if landlock_version() >= _SINCE[FileRight.REFER] else {}
    _restrict(moves, _DEVICE_FILES | (FileRight.REFER if moves else 0), scopes)


def _restrict(rules: Mapping[Path, FileRight], handled: FileRight, scopes: int) -> None:
    """Enter a domain of Landlock that refuses the rights `handled` outside of `rules`."""
    attributes = struct.pack("=QQQ", handled, 0, scopes)
    ruleset = system_call("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path, rights in rules.items():
            _add_rule(ruleset, path, rights & handled)
        keep_privileges_out()
        system_call("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: Path, rights: FileRight) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not path.is_dir():
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, handle)
        system_call(f"landlock_add_rule for {path}", _LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(handle)


def keep_privileges_out() -> None:
    """Let no later program of this process gain privileges, such as one with the setuid bit."""
    checked("prctl(PR_SET_NO_NEW_PRIVS)", LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


_CLONE_NEWIPC = 0x08000000
_CAP_SYS_ADMIN = 21


def own_ipc() -> None:
    """Give this process and its later children System V segments and message queues of their own, if it may.

    They end with the last of these processes, so that a trial leaves none.
    """
    LIBC.unshare(_CLONE_NEWIPC)


def has_admin() -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which `own_ipc` needs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    effective = next(line.partition(":")[2] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


_CAPABILITIES_VERSION = 0x20080522
_ROOT_KEEPS = (1 << 1) | (1 << 14)
"""CAP_DAC_OVERRIDE, because root also runs from folders of other users, and CAP_IPC_LOCK, for pinned memory."""


def drop_capabilities() -> None:
    """Leave root hardly more than the right to use its own files, others nothing. Call `keep_privileges_out` as well.

    A process of another user has capabilities where it made a user namespace.
    """
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_VERSION, 0))
    data = ctypes.create_string_buffer(struct.pack("=6I", *[0] * 6), 24)
    checked("capget", LIBC.capget(header, data))
    _effective, permitted, *_rest = struct.unpack("=6I", data.raw)
    kept = permitted & _ROOT_KEEPS if os.geteuid() == 0 else 0
    checked("capset", LIBC.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)))


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """What a filter of system calls must know about a processor."""

    architecture: int
    seccomp: int
    socket: int
    connect: int
    clone: int
    unshare: int
    keys: tuple[int, ...]
    """Calls that reach the kernel's keyrings, which all processes of a user share."""
    trees: tuple[int, ...]
    """mount, umount2, pivot_root, chroot, setns, and open_by_handle_at, which leaves every tree."""
    kernel: tuple[int, ...]
    """bpf and userfaultfd, which run code in the kernel, or stop it."""


_MACHINES = {
    "x86_64": _Machine(
        architecture=0xC000003E,
        seccomp=317,
        socket=41,
        connect=42,
        clone=56,
        unshare=272,
        keys=(248, 249, 250),
        trees=(165, 166, 155, 161, 308, 304),
        kernel=(321, 323),
    ),
    "aarch64": _Machine(
        architecture=0xC00000B7,
        seccomp=277,
        socket=198,
        connect=203,
        clone=220,
        unshare=97,
        keys=(217, 218, 219),
        trees=(40, 39, 41, 51, 268, 265),
        kernel=(280, 282),
    ),
}
_NEW_MOUNT_CALLS = (*range(428, 434), 442, 467)
"""open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, open_tree_attr: equal on every machine."""
_CLONE3 = 435
_ANY_NAMESPACE = 0x7E020000
"""Flags of clone for a namespace of any kind but time, whose bit is there part of a signal's number."""
_NEW_TIME = 0x80
_FOREIGN_FROM = 0x40000000
"""Numbers of system calls from here on belong to another calling convention of the same processor."""
_IO_URING_SETUP = 425  # it could open a socket, too
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_AT, _SECOND_AT = 0, 4, 16, 24
_TYPE_MASK = 0xF
_SET_FILTER = 1
_NO_MITIGATIONS = 1 << 2
"""Without it, kernels before 5.16 turn processor features off for the process, which slows every step down."""


def can_filter_calls() -> bool:
    """Return whether `filter_calls` works on this kind of processor."""
    return platform.machine() in _MACHINES


def filter_calls(*, sockets: bool) -> None:
    """Refuse this process and its later children keyrings, namespaces, mounts and, unless `sockets`, connections.

    Pipes, socket pairs and inherited sockets go on working, and so do Unix sockets that only listen: CUDA opens one.
    The C library replaces clone3, whose flags a filter cannot see, by clone.
    Raises IsolationFailed if this machine cannot do it.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise IsolationFailed(f"processor {platform.machine()!r} is unknown; known: {', '.join(_MACHINES)}")
    program = _assembled(_filter(machine, sockets=sockets))
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    keep_privileges_out()
    system_call("seccomp", machine.seccomp, _SET_FILTER, _NO_MITIGATIONS, header)


_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _ABSENT = (
    (_RETURN, 0x7FFF0000),
    (_RETURN, 0x00050000 | errno.EPERM),
    (_RETURN, 0x00050000 | errno.ENOSYS),
)
_Instruction: TypeAlias = tuple[int, int] | tuple[int, int, str, str]
"""Code, value, and for a comparison the labels to go on with if it is true and if it is false; "" is the next one."""


def _filter(machine: _Machine, *, sockets: bool) -> dict[str, tuple[_Instruction, ...]]:
    """Return a filter: its parts by their labels."""
    denied = [*machine.keys, *machine.trees, *machine.kernel, *_NEW_MOUNT_CALLS, _IO_URING_SETUP]
    denied += [] if sockets else [machine.connect]
    return {
        "begin": (
            (_LOAD, _ARCHITECTURE_AT),
            (_EQUAL, machine.architecture, "", "deny"),
            (_LOAD, _NUMBER_AT),
            (_AT_LEAST, _FOREIGN_FROM, "deny", ""),
            *((_EQUAL, number, "deny", "") for number in denied),
            (_EQUAL, machine.clone, "clone", ""),
            (_EQUAL, machine.unshare, "unshare", ""),
            (_EQUAL, _CLONE3, "absent", ""),
            *([] if sockets else [(_EQUAL, machine.socket, "socket", "")]),
        ),
        "allow": (_ALLOW,),
        "clone": ((_LOAD, _FIRST_AT), (_ANY_OF, _ANY_NAMESPACE, "deny", "go on")),
        "unshare": ((_LOAD, _FIRST_AT), (_ANY_OF, _ANY_NAMESPACE | _NEW_TIME, "deny", "go on")),
        "go on": (_ALLOW,),
        "absent": (_ABSENT,),
        "socket": (
            (_LOAD, _FIRST_AT),
            (_EQUAL, socket.AF_UNIX, "", "deny"),
            (_LOAD, _SECOND_AT),
            (_AND, _TYPE_MASK),
            (_EQUAL, socket.SOCK_STREAM, "listener", ""),
            (_EQUAL, socket.SOCK_SEQPACKET, "listener", "deny"),
        ),
        "listener": (_ALLOW,),
        "deny": (_DENY,),
    }


def _assembled(parts: dict[str, tuple[_Instruction, ...]]) -> list[bytes]:
    """Return the kernel's instructions; a jump counts the instructions that it leaves out."""
    places: dict[str, int] = {}
    lines: list[_Instruction] = []
    for label, instructions in parts.items():
        places[label] = len(lines)
        lines += instructions
    program = []
    for place, (code, value, *labels) in enumerate(lines):
        jumps = [places[label] - place - 1 if label else 0 for label in map(str, labels)] or [0, 0]
        program.append(struct.pack("=HBBI", code, *jumps, value))
    return program


def system_call(name: str, number: int, *arguments: object) -> int:
    """Make a system call and return its result. Raises IsolationFailed, with `name`, if the kernel refuses it."""
    return checked(name, LIBC.syscall(number, *arguments))


def checked(name: str, result: int) -> int:
    """Return the result of a call of the C library. Raises IsolationFailed, with `name`, if it is an error."""
    if result < 0:
        raise IsolationFailed(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result
