"""`blocks: auto`: put the number of blocks that the measured noise asks for into a spec that leaves it open."""

from collections.abc import Sequence
from typing import Any

import yaml

from experiments.analysis.sizing import noise_of, size_of
from experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE
from experiments.design.load import load_values, parse_spec
from experiments.design.plan import make_plan, unsized
from experiments.design.power import FEWER_BLOCKS
from experiments.design.problems import pointer
from experiments.design.spec import COMPARED_WITH_REPEATS, MIN_BLOCKS, MIN_EXACT_BLOCKS, AblationSpec
from experiments.errors import SpecError, SpecProblem
from experiments.records.calibration import Calibration


def with_number(body: bytes, content_type: str, known: Sequence[Calibration]) -> tuple[bytes, str]:
    """Return (text, content type) of the spec in `body` with the number of blocks that it needs, if it says `auto`.

    Statistics need as many as find `adopt_if` with the power of a planned design at the upper bound of the noise of
    the noisiest device among `known`; an exact metric two for every seed; a calibration those that admit a device.
    Raises SpecError where the noise is not known, or no allowed number is enough.
    """
    if not parse_spec(body, content_type).design.blocks.auto:
        return body, content_type
    count, because = _number(_with(load_values(body, content_type), MIN_BLOCKS), known)
    values = load_values(body, content_type)
    values["design"]["blocks"] = {"count": count}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return f"# blocks: auto gave {count}: {because}\n{text}".encode(), CONTENT_TYPE


def _with(values: dict[str, Any], count: int) -> AblationSpec:
    """Return the spec with a number that only serves to plan its arms."""
    values["design"]["blocks"] = {"count": max(count, 2 * len(values["design"].get("seeds", ())))}
    return parse_spec(yaml.safe_dump(values, allow_unicode=True).encode(), CONTENT_TYPE)


def _number(spec: AblationSpec, known: Sequence[Calibration]) -> tuple[int, str]:
    if spec.purpose == "calibration":
        return ADMITTING_BLOCKS, "so many admit a device"
    if spec.verdict.primary.exact:
        return max(MIN_EXACT_BLOCKS, 2 * len(spec.design.seeds)), "every seed runs twice, to prove the metric exact"
    sizing = size_of(spec, make_plan(spec), known)
    if sizing is None:
        raise SpecError([unsized(spec)])
    repeats = (
        2 * len(spec.design.seeds) if any(one.rule in COMPARED_WITH_REPEATS for one in spec.verdict.require) else 0
    )
    noise = f"sd of d at most {sizing.sd_upper_pct:.2f} %"
    if sizing.blocks_needed is None:
        detail = f"no allowed number of blocks finds {sizing.adopt_if_pct:g} %: {noise_of(spec, sizing)}"
        raise SpecError([SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=FEWER_BLOCKS)])
    return max(sizing.blocks_needed, repeats), f"{noise} ({sizing.calibration}), looking for {sizing.adopt_if_pct:g} %"
