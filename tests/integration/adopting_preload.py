"""A preload without torch for fork servers of tests: like the real one, it makes the server adopt orphans."""

from experiments.runtime.processes import adopt_orphans

adopt_orphans()
