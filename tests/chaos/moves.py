"""Which moves are allowed, where things begin and end, and how often a block may break: written down a second time."""

START: dict[str, set[str]] = {
    "ablation": {"queued"},
    "block": {"queued", "held"},
    "trial": {"queued"},
    "attempt": {"running"},
}
"""States in which something is made."""

OVER: dict[str, set[str]] = {
    "ablation": {"completed", "failed", "cancelled"},
    "block": {"done", "failed", "cancelled"},
    "trial": {"done", "failed", "cancelled"},
    "attempt": {"done", "broken", "released", "expired"},
}
"""States in which nothing is left to do."""

MOVES: dict[str, dict[str, set[str]]] = {
    "ablation": {
        "queued": {"running", "cancelling"},
        "running": {"cancelling", "completed", "failed"},
        "cancelling": {"cancelled", "completed"},
    },
    "block": {
        "held": {"queued", "cancelled"},
        "queued": {"running", "cancelled"},
        "running": {"queued", "done", "failed", "cancelled"},
    },
    "trial": {
        "queued": {"running", "done", "cancelled", "failed"},
        "running": {"queued", "done", "cancelled", "failed"},
    },
    "attempt": {"running": {"done", "broken", "released", "expired"}, "expired": {"done"}},
}
"""An expired attempt whose whole result comes before anybody else holds its block counts after all."""

ATTEMPT_LIMITS: dict[str, int] = {
    "user_error": 1,
    "oom": 1,
    "numerics": 1,
    "gate_refused": 1,
    "cancelled": 1,
    "timeout": 2,
    "invalid_measurement": 3,
    "no_receipt": 3,
    "infra_node": 5,
    "infra_control": 5,
    "preempted": 10,
}
"""Attempts at one block that may end by a class before the block fails."""
