"""Let every Python of a trial print whole lines, then run the environment's own file of this name.

Python imports the first `sitecustomize` of its path when it starts. PYTHONUNBUFFERED would write a line and its end by
two calls, between which other processes write.
"""

import importlib.machinery
import importlib.util
import sys

_HERE = __file__.rpartition("/")[0]


def _print_whole_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a stream may be closed, and is None then
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=False)


def _run_the_next() -> None:
    others = [entry for entry in sys.path if entry != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_print_whole_lines()
_run_the_next()
