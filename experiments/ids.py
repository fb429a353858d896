"""Ids that sort by time (a prefix that names the kind, and a ULID that grows within one process), names, secrets."""

import hashlib
import os
import re
import secrets
import socket
import threading
import time
import unicodedata

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
ULID_PATTERN = "[0-9A-HJKMNP-TV-Z]{26}"

CALLED_PATTERN = "^[A-Za-z0-9_-]{1,63}$"
"""Pattern of an ablation's name or id, or the beginning of either, as users write it."""

NODE_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"
TOKEN_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # noqa: S105 - the pattern of a name
LISTED_NAME = "^([A-Za-z0-9][A-Za-z0-9._-]{0,63}|node/[A-Za-z0-9][A-Za-z0-9._-]{0,119})$"
"""Names in `ablate admin tokens list`: tokens of people and keys of nodes."""
ENROLMENT_NAME = "^(enrol/)?[a-z0-9-]{1,50}$"
COMMIT_LABEL = "commit."
"""Beginning of the labels that name the commit of each arm: `commit.baseline`."""
NIGHTLY_LABEL = "nightly.branch"
"""Label of the ablations of `ablate nightly`: the spec's name and the branch."""
REASON = "^[ -~]{1,500}$"
LABEL_FILTER = "^[a-z0-9_.-]{1,63}(=[ -~]{0,256})?$"
IDEMPOTENCY_KEY = "^[!-~]+$"

_SIGNS = "letters a-z and A-Z, digits, '.', '_' and '-', beginning with a letter or digit"
NODE_NAME_RULE = f"1 to 120 {_SIGNS}"
RULES = {
    CALLED_PATTERN: "1 to 63 letters a-z and A-Z, digits, '_' and '-'",
    NODE_NAME: NODE_NAME_RULE,
    TOKEN_NAME: f"1 to 64 {_SIGNS}",
    LISTED_NAME: f"1 to 64 {_SIGNS}; or 'node/' and a node's name",
    ENROLMENT_NAME: "the name that `ablate nodes enrolments` lists: 1 to 50 of a-z, 0-9 and '-', such as h200-5f0c2a",
    REASON: "1 to 500 printable ASCII characters on one line",
    LABEL_FILTER: "`key` or `key=value`, the key of 1 to 63 of a-z, 0-9, '.', '_' and '-', the value printable ASCII",
    IDEMPOTENCY_KEY: "printable ASCII characters without spaces",
}
"""Patterns of names and short texts -> the same rule in words."""

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


def fresh_secret() -> str:
    """Return a new bearer token, which nobody can guess."""
    return f"ablate_{secrets.token_urlsafe(32)}"


def id_pattern(prefix: str) -> str:
    """Return the regular expression of ids with `prefix`."""
    return f"^{prefix}_{ULID_PATTERN}$"


def node_name_problem(name: str) -> str | None:
    """Return why a node cannot have this name, or None."""
    if re.fullmatch(NODE_NAME, name) and not name.endswith("\n"):
        return None
    return f"{ascii(name)[:80]} is not a node's name; allowed: {NODE_NAME_RULE}"


def own_node_name() -> str:
    """Return the host name, or the nearest allowed name of a node.

    A host name that no node can have loses its accents, every other forbidden character becomes '-', and six digits of
    its digest follow, so that two such hosts get different names: "_dmz7" becomes "dmz7-6a3850".
    """
    host = socket.gethostname()
    if node_name_problem(host) is None:
        return host
    letters = "".join(sign for sign in unicodedata.normalize("NFKD", host) if not unicodedata.combining(sign))
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("._-")[:100] or "node"
    return f"{plain}-{hashlib.sha256(os.fsencode(host)).hexdigest()[:6]}"
