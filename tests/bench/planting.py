"""A fork server whose trials of chosen ids do every step and then wait a share of it more, awake."""

import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from ablate.workers.processes import trial
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.trials.result import TrialOrder


def planting_server(trials: frozenset[str], share: float) -> Callable[[], ForkServer]:
    """Return what makes the fork server; `trials` are slower by `share` of a step, warm-up and step 0 included."""
    return partial(ForkServer, target=partial(run_slower, trials=trials, share=share))


def run_slower(order: TrialOrder, *, trials: frozenset[str], share: float) -> None:
    """Run one trial in its own process, as every trial, slower if it was chosen."""
    if order.trial_id in trials:
        from ablate.model.training import optim_step, train

        start = [time.perf_counter()]
        patch.object(optim_step, "learning_rate", _begins(optim_step.learning_rate, start)).start()
        patch.object(train, "update", _lasts(optim_step.update, start, share)).start()
    trial.main(order)


def _begins(step: Callable[..., float], start: list[float]) -> Callable[..., float]:
    @wraps(step)
    def begins(*given: Any) -> float:
        start[0] = time.perf_counter()
        return step(*given)

    return begins


def _lasts(update: Callable[..., Any], start: list[float], share: float) -> Callable[..., Any]:
    @wraps(update)
    def lasts(*given: Any) -> Any:
        result = update(*given)
        now = time.perf_counter()
        while time.perf_counter() < now + share * (now - start[0]):
            pass
        return result

    return lasts
