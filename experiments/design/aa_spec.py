"""Specs of A/A ablations: the baseline against itself, like a given ablation or for a bare recipe."""

from collections.abc import Mapping
from typing import Any

from ablate.experiments.design.arms import resolve
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.package import unknown_recipe
from ablate.experiments.design.kinds.program import set_requirements
from ablate.experiments.design.load import load_values, parse_spec, spec_of
from ablate.experiments.design.packages import installed
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import BASELINE

REPEAT = "repeat"
"""Name of the arm that repeats the baseline."""
SENTINEL = "sentinel"
"""Label of an A/A ablation that checks whether the noise is unchanged."""
ADMITTING_BLOCKS = 20
"""A/A blocks of a calibration: the upper 95 % bound of the standard deviation is 1.37 times the estimate."""
_THROUGHPUT = {"metric": "tokens_per_s", "margin": "0.5%"}
"""Primary metric where a spec names none that has noise."""
CONTENT_TYPE = "application/yaml"


def bare_spec(recipe: str, node_class: str) -> AblationSpec:
    """Return a spec of `recipe` without changes. Raises SpecError for an unknown recipe."""
    values = {
        "ablation": recipe,
        "question": f"What is the noise of {recipe} on {node_class}?",
        "workload": {"recipe": recipe},
        "variants": {REPEAT: {"gates": _one_gate(recipe)}},
        "design": {"blocks": {"count": ADMITTING_BLOCKS}},
        "placement": {"node_class": node_class},
        "verdict": {"primary": _THROUGHPUT},
    }
    return spec_of(values)


def spec_like(content: bytes, content_type: str) -> AblationSpec:
    """Return the spec of ablations to calibrate for. Without variants it gets the repeat of an A/A ablation.

    Raises SpecError.
    """
    values = load_values(content, content_type)
    if values.get("variants"):
        return parse_spec(content, content_type)
    workload = values.get("workload")
    recipe = workload.get("recipe") if isinstance(workload, Mapping) else None
    repeat: dict[str, Any] = {"gates": _one_gate(recipe)} if isinstance(recipe, str) else {"args": []}
    return spec_of({**values, "variants": {REPEAT: repeat}})


def calibration_spec(like: AblationSpec, *, node_class: str, blocks: int, order_seed: int, sentinel: str = "") -> bytes:
    """Return the YAML of a spec that measures the noise of ablations such as `like` on `node_class`.

    It copies workload, baseline, seeds, limits and primary metric (throughput instead of an exact one), because A/A
    blocks are valid for one recipe, shape and window. `sentinel` is the value of the label; such an ablation has the
    lowest priority. Raises SpecError when the baseline does not run on `node_class`.
    """
    values = like.model_dump(mode="json", exclude_none=True)
    planned = MIN_BLOCKS if like.design.blocks.auto else like.design.blocks.number
    trials = planned * (1 + len(like.variants))
    values = {"ablation": "", "purpose": "calibration", **values}
    own = values["placement"]
    placement = {name: own[name] for name in ("devices", "nodes", "max_foreign_load") if name in own}
    values |= {
        "ablation": like.ablation if like.purpose == "calibration" else f"aa-{like.ablation}"[:63],
        "question": f"What is the noise of ablations such as '{like.ablation}' on {node_class}?",
        "placement": {"node_class": node_class, **placement},
        "variants": {REPEAT: _like_baseline(like)},
    }
    if like.workload.built_in:
        values["placement"]["devices"] = like.baseline.gates.get("devices", like.placement.devices)
    values["design"] |= {"blocks": {"count": blocks}, "order_seed": order_seed}
    values["limits"]["device_minutes"] *= max(1.0, 2 * blocks / trials)
    values["verdict"]["require"] = []
    values["verdict"].pop("session", None)
    values["labels"] = {name: value for name, value in like.labels.items() if name != SENTINEL}
    if sentinel:
        values["labels"] = {SENTINEL: sentinel}
        values["limits"]["priority"] = 0
    if like.verdict.primary.exact or like.verdict.primary.over_seeds:
        values["verdict"]["primary"] = _THROUGHPUT
    if values["workload"].get("require_kernels"):  # the profiled step is a part of the process's time
        values["workload"]["profile"] = True
    set_requirements(values["workload"], dict.fromkeys((BASELINE, REPEAT), (values["workload"], BASELINE)))
    problems = resolve(spec_of(values)).problems
    if problems:
        raise SpecError(list(problems))
    return spec_yaml(values)


def _like_baseline(like: AblationSpec) -> dict[str, Any]:
    """Return a variant that repeats the baseline: its gates, or one at its recipe's value; or its arguments."""
    if like.workload.recipe is None:
        return {"args": list(like.baseline.args), "env": dict(like.baseline.env)}
    return {"gates": dict(like.baseline.gates) or _one_gate(like.workload.recipe)}


def _one_gate(recipe: str) -> dict[str, Any]:
    """Return a gate of a recipe at its value there. Raises SpecError for an unknown recipe."""
    if recipe in RECIPES:
        return {"loss": GATES["loss"].read(RECIPES[recipe].config)}
    own = installed().recipes.get(recipe)
    if own is None:
        raise SpecError([unknown_recipe(recipe)])
    gate = next(iter(own.gates))
    return {gate: own.config[gate]}
