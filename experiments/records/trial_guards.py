"""Guards of one trial: conditions under which the numbers of a receipt do not count.

The worker checks them before a block counts, so that the block can run again. Verification and the judge check them
again. `ablate.experiments.analysis.guards` compares trials with each other.
"""

import math
from collections.abc import Callable, Iterator

from ablate.experiments.design.rule import MAX_SLOWED_SHARE
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import DeviceEvents, Environment, Receipt
from ablate.model.facts import ModelFact

FOREIGN_LOAD = "foreign_load"
"""The only reported value that affects times alone; some sandboxes hide it."""
MIN_STOLEN = 0.005
"""Smallest share of the cores' time that a message mentions."""

SLOWED_BY: dict[str, Callable[[DeviceEvents], float | None]] = {
    "software thermal slow-down": lambda events: events.sw_thermal_slowdown,
    "hardware thermal slow-down": lambda events: events.hw_thermal_slowdown,
    "hardware power brake": lambda events: events.hw_power_brake,
}
"""Slow-downs that invalidate a trial above a share of its window; a software power cap is only recorded."""

FATAL_EVENTS: dict[str, Callable[[DeviceEvents], object]] = {
    "uncorrected ECC error": lambda events: events.ecc_uncorrected,
    "foreign process on the device": lambda events: events.foreign_processes,
}
"""Events that invalidate a trial."""


def trial_problems(receipt: Receipt) -> list[str]:
    """Return the guards that a trial breaks in every comparison; only measured trials can break guards."""
    if receipt.outcome is not Outcome.MEASURED:
        return []
    split = [*_compilations(receipt), *_split_steps(receipt)] if _on_xla(receipt) else ()
    return [*_sample_problems(receipt), *_unreported(receipt), *_event_problems(receipt), *split]


def timing_problems(receipt: Receipt) -> list[str]:
    """Return the guards that a trial breaks if times decide."""
    if receipt.outcome is not Outcome.MEASURED:
        return []
    compiled = () if _on_xla(receipt) else _compilations(receipt)
    return [*compiled, *_slow_downs(receipt), *_unreported_load(receipt)]


def load_problem(receipt: Receipt, limit: float) -> str | None:
    """Say that others took more than `limit` of the cores' time during a measured trial on the host, or return None.

    It makes the block run again, and is no guard: at the last attempt the block counts with any load.
    """
    if receipt.outcome is not Outcome.MEASURED:
        return None
    environment = receipt.environment
    node_class, load = NODE_CLASSES.get(environment.node_class), environment.foreign_load
    if load is None or node_class is None or not node_class.on_host or load <= limit:
        return None
    taken = f"others took {load:.0%} of the cores' time during the trial{_by_whom(environment)}"
    return f"{taken}; placement.max_foreign_load allows {limit:.0%}: stop other work, or allow more"


def cache_problems(receipt: Receipt) -> list[str]:
    """Return the guard that a trial breaks if compile time decides and all code came from caches on disk."""
    if receipt.outcome is not Outcome.MEASURED or not receipt.compile_cache_hit:
        return []
    return ["all compiled code came from caches on disk, but compile time decides"]


def window_s(receipt: Receipt) -> float:
    """Return the seconds of the timed steps."""
    return math.fsum(step.seconds for step in receipt.steps if step.phase == "timed")


def _sample_problems(receipt: Receipt) -> Iterator[str]:
    dead = sorted(name for name, reading in receipt.gates.items() if not reading.live)
    if dead:
        yield f"gate '{dead[0]}' was requested and not live"
    if receipt.compilation is not None:  # nothing was executed
        return
    if receipt.program is not None and not receipt.program.ranks:  # no step was marked
        return
    if receipt.summary is None:
        yield "samples are missing"
    timed = [step for step in receipt.steps if step.phase == "timed"]
    expected = receipt.config.steps.timed
    if len(timed) != expected:
        yield f"{len(timed)} timed steps; the configuration has {expected}"
    if any(not (math.isfinite(step.seconds) and math.isfinite(step.loss or 0.0)) for step in timed):
        yield "a sample is not finite"


def _compilations(receipt: Receipt) -> Iterator[str]:
    compiled = [step.index for step in receipt.steps if step.phase == "timed" and step.compilations]
    if compiled:
        change = receipt.facts.get(ModelFact.GRAPH_CHANGE)
        how = "" if change is None else f": {change}"
        yield f"something was compiled inside the window, first in step {compiled[0]}{how}"


def _split_steps(receipt: Receipt) -> Iterator[str]:
    """Find timed steps that were not one graph on the device."""
    timed = [step for step in receipt.steps if step.phase == "timed"]
    split = next((step for step in timed if step.graphs not in (None, 1)), None)
    if split is not None:
        yield f"step {split.index} ran as {split.graphs} graphs; allowed: 1"
    on_host = next((step for step in timed if step.host_operations), None)
    if on_host is not None:
        yield f"operation {', '.join(on_host.host_operations or ())} ran on the host in step {on_host.index}"


def _on_xla(receipt: Receipt) -> bool:
    """Return whether a step must be one graph, so that another compilation means another graph."""
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    return node_class is not None and node_class.device_type == "xla"


def _unreported(receipt: Receipt) -> Iterator[str]:
    """Find values that this kind of node can report and did not."""
    reported = {} if receipt.environment.throttle is None else receipt.environment.throttle.model_dump()
    clocks = [step.clock_mhz for step in receipt.steps if step.phase == "timed"]
    reported["clock_mhz"] = None if None in clocks else clocks
    missing = sorted(name for name in _reportable(receipt) - {FOREIGN_LOAD} if reported.get(name) is None)
    if missing:
        yield _not_reported(receipt, *missing)


def _reportable(receipt: Receipt) -> frozenset[str]:
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    return frozenset() if node_class is None else node_class.reports


def _not_reported(receipt: Receipt, *names: str) -> str:
    return f"the node did not report {', '.join(names)}, which node class '{receipt.environment.node_class}' can"


def _event_problems(receipt: Receipt) -> Iterator[str]:
    events = receipt.environment.throttle
    for what, happened in FATAL_EVENTS.items():
        if events is not None and happened(events):
            yield f"{what} during the trial"


def _slow_downs(receipt: Receipt) -> Iterator[str]:
    events, window = receipt.environment.throttle, window_s(receipt)
    for what, read in SLOWED_BY.items():
        seconds = 0.0 if events is None else read(events) or 0.0
        if seconds > MAX_SLOWED_SHARE * window:
            yield f"{what} for {seconds:g} s of the trial; allowed: {MAX_SLOWED_SHARE:.0%} of its {window:.3g} s window"


def _unreported_load(receipt: Receipt) -> Iterator[str]:
    if receipt.environment.foreign_load is None and FOREIGN_LOAD in _reportable(receipt):
        yield _not_reported(receipt, FOREIGN_LOAD)


def _by_whom(environment: Environment) -> str:
    stolen = environment.stolen_load or 0.0
    parts = [f"{stolen:.0%} by other virtual machines"] if stolen >= MIN_STOLEN else []
    busiest = ", ".join(f"{one.name} {one.cpu_s:.1f} s" for one in environment.foreign_busiest)
    parts += [f"busiest: {busiest}"] if busiest else []
    return f" ({'; '.join(parts)})" if parts else ""
