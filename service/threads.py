"""How many threads of an API process work at once, by what they do, and the connections that they have together.

A call that holds locks of the database is not kept from its next statement by dozens of others that compute, and a
fleet that begins at once, or a dozen large imports, keep nobody who reads waiting. More threads than these answer
nothing sooner: all of them share one interpreter.
"""

WORKERS_AT_ONCE = 8
IMPORTS_AT_ONCE = 2
"""Each may have tens of thousands of receipts to verify."""
SUBMISSIONS_AT_ONCE = 8
"""Plans that are only looked at are among them: a large one takes seconds."""
OTHERS_AT_ONCE = 12
"""All other requests, which read."""
_BESIDE = 6
"""Connections for streams, look-ups of tokens, probes and wake-ups: each has one for milliseconds; they may wait."""

CONNECTIONS = WORKERS_AT_ONCE + IMPORTS_AT_ONCE + SUBMISSIONS_AT_ONCE + OTHERS_AT_ONCE + _BESIDE
"""Most connections of a process: one for each request that runs, so that none waits for one that waits for a lock."""
