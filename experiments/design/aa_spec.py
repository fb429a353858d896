"""Spec of an A/A ablation: the baseline against itself, in the circumstances of an ablation or of a bare recipe."""

from typing import Any

import yaml

from experiments.design.arms import resolve
from experiments.design.gate import GateValue
from experiments.design.gates import GATES
from experiments.design.load import parse_spec
from experiments.design.recipes import RECIPES
from experiments.design.spec import MIN_BLOCKS, AblationSpec
from experiments.errors import SpecError

REPEAT = "repeat"
"""Name of the arm that repeats the baseline."""
SENTINEL = "sentinel"
"""Label of an A/A ablation that asks whether the noise is still the same."""
ADMITTING_BLOCKS = 20
"""A/A blocks from which a key is admitted to words: the upper 95 % bound of the sd is then 1.37 times its estimate."""
_THROUGHPUT = {"metric": "tokens_per_s", "margin": "0.5%"}
"""What is compared where a spec names nothing that has noise."""
CONTENT_TYPE = "application/yaml"


def bare_spec(recipe: str, node_class: str) -> AblationSpec:
    """Return a spec that asks for nothing but `recipe` as it is; raises SpecError for an unknown one."""
    values = {
        "ablation": recipe,
        "question": f"What is the noise of {recipe} on {node_class}?",
        "workload": {"recipe": recipe},
        "variants": {REPEAT: {"gates": {"loss": "dense"}}},
        "design": {"blocks": {"count": ADMITTING_BLOCKS}},
        "placement": {"node_class": node_class},
        "verdict": {"primary": _THROUGHPUT},
    }
    return parse_spec(_yaml(values), CONTENT_TYPE)


def calibration_spec(like: AblationSpec, *, node_class: str, blocks: int, order_seed: int, sentinel: str = "") -> bytes:
    """Return the YAML of a spec that measures the noise of ablations such as `like` on `node_class`.

    Workload, baseline, seeds, limits and primary metric (throughput in place of an exact one) are those of `like`:
    A/A blocks hold for their recipe, shape and window only. Raises SpecError when the baseline does not run on
    `node_class`. `sentinel` names what it watches: then it waits for whatever else is queued.
    """
    values = like.model_dump(mode="json", exclude_none=True)
    planned = MIN_BLOCKS if like.design.blocks.auto else like.design.blocks.number
    trials = planned * (1 + len(like.variants))
    values = {"ablation": "", "purpose": "calibration", **values}
    values |= {
        "ablation": like.ablation if like.purpose == "calibration" else f"aa-{like.ablation}"[:63],
        "question": f"What is the noise of ablations such as '{like.ablation}' on {node_class}?",
        "placement": {**values["placement"], "node_class": node_class},
        "variants": {REPEAT: {"gates": _baseline_gates(like)}},
    }
    values["design"] |= {"blocks": {"count": blocks}, "order_seed": order_seed}
    values["limits"]["device_minutes"] *= max(1.0, 2 * blocks / trials)
    values["verdict"]["require"] = []
    values["labels"] = {name: value for name, value in like.labels.items() if name != SENTINEL}
    if sentinel:
        values["labels"] = {SENTINEL: sentinel}
        values["limits"]["priority"] = 0
    if like.verdict.primary.exact:
        values["verdict"]["primary"] = _THROUGHPUT
    text = _yaml(values)
    found = resolve(parse_spec(text, CONTENT_TYPE)).problems
    if found:
        raise SpecError(list(found))
    return text


def _baseline_gates(like: AblationSpec) -> dict[str, GateValue]:
    """Return the gates that the baseline names, or one that every recipe has: a variant names at least one."""
    return dict(like.baseline.gates) or {"loss": GATES["loss"].read(RECIPES[like.workload.recipe].config)}


def _yaml(values: dict[str, Any]) -> bytes:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120).encode()
