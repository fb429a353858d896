"""How many requests of an API process run at once, by kind, and how many database connections they need.

Each kind has threads of its own. Long imports and plans never delay a worker's call or a read.
"""

WORKERS_AT_ONCE = 8
LONG_AT_ONCE = 8
"""Submissions, plans and imports: a large one takes seconds."""
OTHERS_AT_ONCE = 12
"""All other requests, which read."""
_EXTRA = 6
"""Connections for streams, token lookups, probes and wake-ups; each is in use for milliseconds."""

CONNECTIONS = WORKERS_AT_ONCE + LONG_AT_ONCE + OTHERS_AT_ONCE + _EXTRA
"""Most connections of a process: one for each running request, so that none waits for a connection."""
