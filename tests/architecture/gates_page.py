"""docs/gates.md: every gate, its proof and the node classes that run its values."""

from ablate.experiments.design.gate import GateValue, show
from ablate.experiments.design.listings import GatePublic, public_gates
from ablate.service.cli.commands.catalog.gates import value_in_recipes

_HEAD = """\
# Gates

`make docs` generates this page from `experiments/design/gates.py`.

A gate is one switchable feature. Its *claim* says what it promises about the numbers:

- `schedule-only`: the loss of step 1 is bit-identical.
- `re-associates`: losses are equal but for rounding.
- `changes-model`: losses are not expected to agree.

Its *proof* says how a receipt shows which value was live. *Without it* is the value of an arm that does not name the
gate. That value comes from the arm's recipe ([recipes.md](recipes.md)). Ablate rejects a trial whose observed gates
differ from the requested ones. "mixed" means that kernels or passes differ. "unproved" means that one of them shows no
value.
"""


def gates_page() -> str:
    """Return the page."""
    return _HEAD + "".join(map(_section, public_gates()))


def _section(gate: GatePublic) -> str:
    lines = [
        f"\n## {gate.name}\n",
        gate.question,
        "",
        f"- field: `{gate.field}`; claim: `{gate.claim.value}`; without it: {value_in_recipes(gate, '`{}`'.format)}",
        f"- attested by: {gate.attested_by}",
        f"- proof: {gate.proof}",
        f"- the proof cannot see: {gate.blind_to}",
    ]
    exceptions = "".join(f", but not at `{show(value)}`" for value in gate.free)
    lines += [f"- needs: {_pairs(gate.requires)}{exceptions}"] if gate.requires else []
    settings = ", or ".join(_pairs(setting) for setting in gate.unused_with)
    where = "on one device it has no effect with" if gate.of_devices else "has no effect with"
    lines += [f"- {where}: {settings}"] if settings else []
    lines += ["", "| value | runs today on |", "|---|---|"]
    lines += [f"| `{value}` | {', '.join(classes) or 'nothing yet'} |" for value, classes in gate.node_classes.items()]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, GateValue]) -> str:
    return " and ".join(f"`{name}: {show(value)}`" for name, value in values.items())
