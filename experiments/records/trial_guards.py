"""Guards of one trial: what makes its numbers not believed, as far as its receipt shows it.

The worker asks them before a block counts, so that the block runs again; verifying and judging a receipt ask them once
more. What differs between trials is asked by `experiments.analysis.guards`.
"""

import math
from collections.abc import Callable, Iterator

from experiments.design.rule import MAX_SLOWED_SHARE
from experiments.outcomes import Outcome
from experiments.records.receipts import DeviceEvents, Environment, Receipt
from kernels.backends import NODE_CLASSES
from model.facts import ModelFact

FOREIGN_LOAD = "foreign_load"
"""Of what nodes tell, the one thing that matters for times alone; some sandboxes hide it."""
MIN_STOLEN = 0.005
"""Share of the cores' time that is worth a word."""

SLOWED_BY: dict[str, Callable[[DeviceEvents], float | None]] = {
    "software thermal slow-down": lambda events: events.sw_thermal_slowdown,
    "hardware thermal slow-down": lambda events: events.hw_thermal_slowdown,
    "hardware power brake": lambda events: events.hw_power_brake,
}
"""What makes a trial invalid from a share of its window on; a software power cap is recorded, not fatal."""

FATAL_EVENTS: dict[str, Callable[[DeviceEvents], object]] = {
    "uncorrected ECC error": lambda events: events.ecc_uncorrected,
    "foreign process on the device": lambda events: events.foreign_processes,
}
"""What makes a trial invalid when it happened at all."""


def trial_problems(receipt: Receipt) -> list[str]:
    """Return the guards that one trial breaks whatever is compared; only a measured trial can break any."""
    if receipt.outcome is not Outcome.MEASURED:
        return []
    grown = _compilations(receipt) if _on_xla(receipt) else ()
    return [*_sample_problems(receipt), *_untold(receipt), *_event_problems(receipt), *grown]


def timing_problems(receipt: Receipt, *, max_foreign_load: float) -> list[str]:
    """Return the guards that one trial breaks if times decide: what disturbs nothing but times.

    `max_foreign_load` is the share of the cores' time that others may take where trials run on the host.
    """
    if receipt.outcome is not Outcome.MEASURED:
        return []
    compiled = () if _on_xla(receipt) else _compilations(receipt)
    return [*compiled, *_slow_downs(receipt), *_load_problems(receipt, max_foreign_load)]


def cache_problems(receipt: Receipt) -> list[str]:
    """Return the guard that one trial breaks if compile time decides: nothing may come from a cache on disk."""
    if receipt.outcome is not Outcome.MEASURED or not receipt.compile_cache_hit:
        return []
    return ["everything that was compiled came from caches on disk, and compile time decides"]


def window_s(receipt: Receipt) -> float:
    """Return the seconds of the timed steps."""
    return math.fsum(step.seconds for step in receipt.steps if step.phase == "timed")


def _sample_problems(receipt: Receipt) -> Iterator[str]:
    dead = sorted(name for name, reading in receipt.gates.items() if not reading.live)
    if dead:
        yield f"gate '{dead[0]}' was requested and not live"
    if receipt.compilation is not None:  # nothing was executed
        return
    if receipt.summary is None:
        yield "samples are missing"
    timed = [step for step in receipt.steps if step.phase == "timed"]
    wanted = receipt.config.get("steps", {}).get("timed")
    if len(timed) != wanted:
        yield f"{len(timed)} timed steps; the configuration asks for {wanted}"
    if any(not (math.isfinite(step.seconds) and math.isfinite(step.loss)) for step in timed):
        yield "a sample is not finite"


def _compilations(receipt: Receipt) -> Iterator[str]:
    compiled = [step.index for step in receipt.steps if step.phase == "timed" and step.compilations]
    if compiled:
        change = receipt.facts.get(ModelFact.GRAPH_CHANGE)
        how = "" if change is None else f": {change}"
        yield f"something was compiled inside the window, first in step {compiled[0]}{how}"


def _on_xla(receipt: Receipt) -> bool:
    """Tell whether a step is one graph, so that another compilation is another graph and not only lost time."""
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    return node_class is not None and node_class.device_type == "xla"


def _untold(receipt: Receipt) -> Iterator[str]:
    """Find what this kind of node can tell and did not: absent is not fine."""
    told = {} if receipt.environment.throttle is None else receipt.environment.throttle.model_dump()
    clocks = [step.clock_mhz for step in receipt.steps if step.phase == "timed"]
    told["clock_mhz"] = None if None in clocks else clocks
    missing = sorted(name for name in _tells(receipt) - {FOREIGN_LOAD} if told.get(name) is None)
    if missing:
        yield _not_told(receipt, *missing)


def _tells(receipt: Receipt) -> frozenset[str]:
    node_class = NODE_CLASSES.get(receipt.environment.node_class)
    return frozenset() if node_class is None else node_class.reports


def _not_told(receipt: Receipt, *names: str) -> str:
    return f"the node did not tell {', '.join(names)}, which node class '{receipt.environment.node_class}' can tell"


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


def _load_problems(receipt: Receipt, limit: float) -> Iterator[str]:
    environment = receipt.environment
    node_class, load = NODE_CLASSES.get(environment.node_class), environment.foreign_load
    if load is None and FOREIGN_LOAD in _tells(receipt):
        yield _not_told(receipt, FOREIGN_LOAD)
    if load is None or node_class is None or not node_class.on_host or load <= limit:
        return
    taken = f"others took {load:.0%} of the cores' time during the trial{_by_whom(environment)}"
    yield f"{taken}; placement.max_foreign_load allows {limit:.0%}: quiet the machine, or allow more"


def _by_whom(environment: Environment) -> str:
    stolen = environment.stolen_load or 0.0
    told = [f"{stolen:.0%} by other machines in this one's place"] if stolen >= MIN_STOLEN else []
    busiest = ", ".join(f"{one.name} {one.cpu_s:.1f} s" for one in environment.foreign_busiest)
    told += [f"busiest: {busiest}"] if busiest else []
    return f" ({'; '.join(told)})" if told else ""
