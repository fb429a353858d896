"""What an arm changes against the baseline, in words."""

from experiments.design.arms import Arm
from experiments.design.gate import show
from experiments.reporting import wording


def changed_gates(arm: Arm, baseline: Arm) -> str:
    """Return the gates in which `arm` differs, for example "chunk_size=32, psiv_cache=true"; empty for a repeat."""
    changed = sorted(name for name, value in arm.gates.items() if value != baseline.gates[name])
    return ", ".join(f"{name}={show(arm.gates[name])}" for name in changed)


def gate_values(name: str, arms: tuple[Arm, ...], longest: int) -> str:
    """Return one gate over all arms: its value, then who differs, for example "16; chunk-32: 32"."""
    first, *others = arms
    differing = [f"{arm.name}: {show(arm.gates[name])}" for arm in others if arm.gates[name] != first.gates[name]]
    return wording.shorten("; ".join([show(first.gates[name]), *differing]), longest)
