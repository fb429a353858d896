"""The size of block reports that a submission announces, against the largest curves."""

import json
import sys

import pytest

from ablate.experiments.design.plan import make_plan
from ablate.experiments.errors import SpecError
from ablate.service.submitting import check_reports
from ablate.workers.commands.logged_results import MOST_POINTS
from tests.factories import command_values
from tests.unit.experiments.design.test_command_spec import parse

LARGEST_CURVE = json.dumps([[2**63 - 1, -sys.float_info.max]] * MOST_POINTS)


def least_limit(curves: int, timed: int) -> int:
    """Return the smallest limit of reports with which a spec is taken."""
    metrics = {f"m{number}": {"better": "lower", "from": "wandb"} for number in range(curves)}
    metrics["printed"] = {"better": "lower", "line": "val {}"}
    spec = parse(
        command_values(
            workload__metrics=metrics,
            workload__steps={"warmup": 1, "timed": timed},
            design={"seeds": 6, "blocks": {"count": 6}},
            verdict={"primary": {"metric": "printed", "margin": "1%"}},
        )
    )
    plan, low, high = make_plan(spec), 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        try:
            check_reports(spec, plan, middle)
        except SpecError as error:
            (problem,) = error.problems
            assert (problem.pointer, f"allowed: {middle:,} (ABLATE_MAX_REPORT_BYTES)" in problem.detail) == (
                "#/workload/steps",
                True,
            )
            low = middle
        else:
            high = middle
    return high


@pytest.mark.parametrize("curves", [1, 2, 10])
def test_each_curve_of_each_arm_is_counted(curves: int) -> None:
    sizes = [least_limit(number, timed) for number in (0, curves) for timed in (10, 400)]
    none, none_long, own, own_long = sizes
    assert own - none >= 3 * curves * len(LARGEST_CURVE), "arms with the control that it may get"
    assert none_long - none == own_long - own > 0, "steps cost what they cost without curves"
