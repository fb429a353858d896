"""Slices of a window: between them the other trials of the block run, and this one waits."""

import time
from collections.abc import Callable
from typing import TypeAlias

from model.config import StepsConfig
from model.training.host_load import HostLoad

Yield: TypeAlias = Callable[[], None]
"""Lets the others run; returns when this trial is to go on."""


class Others:
    """The other trials of a block, as one of them sees them: they run before each of its slices and after the last."""

    def __init__(self, steps: StepsConfig, yield_to: Yield | None) -> None:
        if (steps.slice > 0) != (yield_to is not None):
            there = "somebody" if yield_to else "nobody"
            raise ValueError(f"steps.slice is {steps.slice}, and there is {there} to yield to between slices")
        self._yield_to = yield_to
        self.waited_s = None if yield_to is None else 0.0
        """Seconds for which this trial waited so far; None where it runs in one go."""

    def run(self, load: HostLoad) -> None:
        """Let the others run, which are no foreign `load`."""
        if self._yield_to is None or self.waited_s is None:
            return
        load.pause()
        start = time.perf_counter()
        self._yield_to()
        self.waited_s += time.perf_counter() - start
        load.resume()
