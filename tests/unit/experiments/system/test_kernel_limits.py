"""The filter of system calls, run by an interpreter of its own, beside a plain statement of what it refuses."""

import errno
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.system.kernel_limits import _MACHINES, _assembled, _filter

ALLOWED, REFUSED, ABSENT = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
NAMESPACES = {
    "mounts": 0x00020000,
    "cgroups": 0x02000000,
    "names": 0x04000000,
    "ipc": 0x08000000,
    "users": 0x10000000,
    "processes": 0x20000000,
    "network": 0x40000000,
}
NEW_TIME, THREAD = 0x80, 0x003D0F00
"""The flags of a thread of the C library."""
MOUNTS = {428: "open_tree", 429: "move_mount", 430: "fsopen", 431: "fsconfig", 432: "fsmount", 433: "fspick"}
NEW = {**MOUNTS, 442: "mount_setattr", 467: "open_tree_attr", 425: "io_uring_setup"}
REFUSED_BY_NAME = {
    "x86_64": {
        **{165: "mount", 166: "umount2", 155: "pivot_root", 161: "chroot", 308: "setns", 304: "open_by_handle_at"},
        **{248: "add_key", 249: "request_key", 250: "keyctl", 321: "bpf", 323: "userfaultfd"},
    },
    "aarch64": {
        **{40: "mount", 39: "umount2", 41: "pivot_root", 51: "chroot", 268: "setns", 265: "open_by_handle_at"},
        **{217: "add_key", 218: "request_key", 219: "keyctl", 280: "bpf", 282: "userfaultfd"},
    },
}
CLONE, UNSHARE = {"x86_64": 56, "aarch64": 220}, {"x86_64": 272, "aarch64": 97}
SOCKET, CONNECT = {"x86_64": 41, "aarch64": 198}, {"x86_64": 42, "aarch64": 203}
LISTENERS = {socket.SOCK_STREAM, socket.SOCK_SEQPACKET}


def answer(program: list[bytes], number: int, architecture: int, arguments: tuple[int, ...]) -> int:
    """Run a program as the kernel does."""
    data, place, value = struct.pack("=IIQ6Q", number, architecture, 0, *arguments), 0, 0
    while True:
        code, yes, no, operand = struct.unpack("=HBBI", program[place])
        place += 1
        if code == 0x20:
            value = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return int(operand)
        else:
            is_true = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += yes if is_true else no


def expected(machine: str, number: int, arguments: tuple[int, ...], *, sockets: bool) -> int:
    if number in REFUSED_BY_NAME[machine] or number in NEW:
        return REFUSED
    if number == 435:
        return ABSENT
    if number in (CLONE[machine], UNSHARE[machine]):
        flags = sum(NAMESPACES.values()) | (NEW_TIME if number == UNSHARE[machine] else 0)
        return REFUSED if arguments[0] & flags else ALLOWED
    if not sockets and number == CONNECT[machine]:
        return REFUSED
    if not sockets and number == SOCKET[machine]:
        listens = arguments[0] == socket.AF_UNIX and arguments[1] & 0xF in LISTENERS
        return ALLOWED if listens else REFUSED
    return ALLOWED


FLAGS = st.sampled_from([0, 17, THREAD, NEW_TIME, *NAMESPACES.values()])
MIXED = st.builds(lambda one, other, number: one | other | number, FLAGS, FLAGS, st.sampled_from([0, 17]))
ARGUMENT = st.one_of(MIXED, st.sampled_from([1, 2, 5, 0x80001, 0x80801, 16]), st.integers(0, 2**32 - 1))


@given(data=st.data(), machine=st.sampled_from(sorted(_MACHINES)), sockets=st.booleans())
def test_the_filter_refuses_what_it_says_and_nothing_else(data: st.DataObject, machine: str, sockets: bool) -> None:
    special = [*REFUSED_BY_NAME[machine], *NEW, 435, CLONE[machine], UNSHARE[machine], SOCKET[machine]]
    number = data.draw(st.one_of(st.sampled_from([*special, CONNECT[machine]]), st.integers(0, 500)))
    arguments = tuple(data.draw(st.lists(ARGUMENT, min_size=6, max_size=6)))
    values = _MACHINES[machine]
    program = _assembled(_filter(values, sockets=sockets))
    action = expected(machine, number, arguments, sockets=sockets)
    assert answer(program, number, values.architecture, arguments) == action
    assert answer(program, number, values.architecture ^ 1, arguments) == REFUSED, "of another kind of processor"
    assert answer(program, number | 0x40000000, values.architecture, arguments) == REFUSED, "by another convention"


@pytest.mark.parametrize("machine", sorted(_MACHINES))
def test_threads_and_processes_go_on_starting(machine: str) -> None:
    values = _MACHINES[machine]
    for sockets in (False, True):
        program = _assembled(_filter(values, sockets=sockets))
        for flags in (17, THREAD, 0x4000 | 0x100 | 17, 0x01200011):  # fork, a thread, vfork, fork by the C library
            assert answer(program, CLONE[machine], values.architecture, (flags, 0, 0, 0, 0, 0)) == ALLOWED
