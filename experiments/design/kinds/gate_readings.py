"""Requested values of an arm's settings beside those that facts prove to have been live."""

from collections.abc import Mapping
from typing import Any

from ablate.experiments.design.gate import Gate, show
from ablate.experiments.design.gates import GATES
from ablate.experiments.documents import Frozen
from ablate.experiments.outcomes import DECLARED
from ablate.model.config import BLOCK_KINDS


class GateReading(Frozen):
    """Requested and observed value of one gate."""

    requested: Any
    observed: Any
    """None when the lane cannot observe the gate."""
    live: bool
    how: str
    """Source of the observation, such as "fact loss.implementation"."""


def read_gates(
    requested: Mapping[str, Any], facts: Mapping[str, Any], *, pattern: str = "".join(BLOCK_KINDS), devices: int = 1
) -> dict[str, GateReading]:
    """Compare the requested gates with the recorded facts of a model with this `pattern` on so many `devices`.

    A gate without facts counts as live when it is at its default, or when the model lacks its kind of block. Any other
    requested gate without facts is not live.
    """
    return {name: read_gate(GATES[name], requested, facts, pattern=pattern, devices=devices) for name in requested}


def declared_readings(requested: Mapping[str, Any]) -> dict[str, GateReading]:
    """Return the readings of a command's settings, which nothing observes."""
    return {
        name: GateReading(requested=value, observed=None, live=True, how=DECLARED) for name, value in requested.items()
    }


def read_gate(
    gate: Gate,
    requested: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    pattern: str,
    devices: int = 1,
) -> GateReading:
    """Compare one requested gate with the facts."""
    value = requested[gate.name]
    if setting := gate.unused_because(requested, devices=devices):
        return GateReading(requested=value, observed=None, live=True, how=f"not used with {setting}")
    observed = gate.attest(facts)
    if observed is not None:
        expected = value if gate.shown_as is None else gate.shown_as(requested, facts)
        live = type(observed) is type(expected) and observed == expected
        return GateReading(requested=value, observed=observed, live=live, how=gate.attested_by)
    if value == gate.default:
        return GateReading(requested=value, observed=None, live=True, how="default, not observable")
    if gate.block is not None and gate.block not in pattern:
        how = f"not used without a block of kind {gate.block}"
        return GateReading(requested=value, observed=None, live=True, how=how)
    how = f"{gate.attested_by}: nothing recorded, so {show(value)} is not proved"
    return GateReading(requested=value, observed=None, live=False, how=how)
