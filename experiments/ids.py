"""Ids that sort by time: a prefix that names the kind, and a ULID that grows within one process."""

import os
import threading
import time

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ULID_PATTERN = "[0-9A-HJKMNP-TV-Z]{26}"

CALLED_PATTERN = "^[A-Za-z0-9_-]{1,63}$"
"""Pattern of an ablation's name or id, or the beginning of either, as users write it."""

_PAIRS = tuple(a + b for a in ALPHABET for b in ALPHABET)
_RANDOM_BITS = 80
_lock = threading.Lock()
_last = 0


def _encode(value: int) -> str:
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])


def new_ids(prefix: str, count: int) -> list[str]:
    """Return `count` growing ids such as "blk_01KAH...", later than all earlier ids of the process."""
    global _last  # one counter per process
    fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | int.from_bytes(os.urandom(10)) >> 1
    with _lock:
        first = max(fresh, _last + 1)
        _last = first + count - 1
    return [f"{prefix}_{_encode(value)}" for value in range(first, first + count)]


def new_id(prefix: str) -> str:
    """Return one id; see `new_ids`."""
    return new_ids(prefix, 1)[0]


def id_pattern(prefix: str) -> str:
    """Return the regular expression of ids with `prefix`."""
    return f"^{prefix}_{ULID_PATTERN}$"
