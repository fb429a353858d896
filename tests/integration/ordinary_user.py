"""A process of root becomes one of an ordinary user, who sees the same Python and this program."""

import ctypes
import os
import sys
from pathlib import Path

from ablate.experiments.digest import SOURCE_ROOT
from ablate.experiments.system.own_tree import _outermost, _part, _place, _place_memory

NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _SLAVE, _ALL_BELOW = 0x00020000, 1 << 19, 1 << 14


def become_ordinary() -> None:
    """Give up root for good. The folders of Python stay readable, also where they are below root's own folder."""
    assert _LIBC.unshare(_NEW_MOUNTS) == 0
    assert _LIBC.mount(None, b"/", None, _SLAVE | _ALL_BELOW, None) == 0
    programs = _outermost(Path(one).resolve() for one in (SOURCE_ROOT, sys.prefix, sys.base_prefix))
    closed = {parent: programs for one in programs for parent in one.parents if not parent.stat().st_mode & 0o001}
    parts = {one: _part(one) for one in programs if any(parent in closed for parent in one.parents)}
    for parent in _outermost(closed):
        _place_memory(parent, "mode=755")
    for one, part in parts.items():
        _place(part, one)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    assert _LIBC.prctl(4, 1, 0, 0, 0) == 0  # as after a log-in: PR_SET_DUMPABLE
