from datetime import datetime, timedelta
from typing import Any

import pytest

from ablate.experiments.analysis.guards import (
    _SAME_EVERYWHERE,
    _SAME_IN_BLOCK,
    between_blocks_problem,
    block_problems,
    order_problems,
    receipt_problems,
)
from ablate.experiments.analysis.judge import judge
from ablate.experiments.design.rule import MAX_PAUSE_S, MAX_SLOWED_SHARE
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.program_report import EvaluationReport, ProgramReport
from ablate.experiments.records.receipts import DeviceEvents, Receipt
from ablate.experiments.records.trial_guards import FATAL_EVENTS, SLOWED_BY, load_problem, trial_problems, window_s
from ablate.kernels.backends import NODE_CLASSES
from tests.factories import NOTHING_HAPPENED, make_plan, make_receipt, make_spec

CPU = make_plan()
H200 = make_plan(
    make_spec(
        workload__recipe="hybrid-ref-h200",
        placement__node_class="h200",
        variants={"on": {"gates": {"psiv_cache": True}}},
    )
)
HARMLESS = {"sw_power_cap"}


def on_h200(**changes: Any) -> Receipt:
    return make_receipt(H200, 0, "baseline", **changes)


def problems(**events: object) -> list[str]:
    return receipt_problems(on_h200(environment={"throttle": {**NOTHING_HAPPENED, **events}}), H200)


def test_nothing_happened_and_nothing_is_wrong() -> None:
    assert problems() == []
    assert problems(sw_power_cap=3.5) == []
    assert receipt_problems(make_receipt(CPU, 0, "baseline"), CPU) == []


def test_every_event_but_a_power_cap_can_make_a_trial_invalid() -> None:
    happened: dict[str, object] = dict.fromkeys(DeviceEvents.model_fields, 1)
    happened["foreign_processes"] = (4711,)
    by_event = {name: problems(**{name: value}) for name, value in happened.items()}
    assert {name for name, reasons in by_event.items() if not reasons} == HARMLESS
    assert all(len(reasons) == 1 for name, reasons in by_event.items() if name not in HARMLESS)
    assert len(problems(**happened)) == len(FATAL_EVENTS) + len(SLOWED_BY)


@pytest.mark.parametrize("name", ["sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"])
def test_a_slow_down_counts_from_a_share_of_the_window_on(name: str) -> None:
    """One microsecond is not worth a rerun; a hundredth of the window is."""
    window = window_s(on_h200())
    assert problems(**{name: 1e-6}) == []
    assert problems(**{name: 0.99 * MAX_SLOWED_SHARE * window}) == []
    (problem,) = problems(**{name: 1.01 * MAX_SLOWED_SHARE * window})
    assert "allowed: 1% of its" in problem


@pytest.mark.parametrize("name", sorted(NODE_CLASSES["h200"].reports - {"clock_mhz", "foreign_load"}))
def test_what_an_h200_can_tell_and_did_not_is_not_fine(name: str) -> None:
    (problem,) = problems(**{name: None})
    assert f"did not report {name}" in problem


def test_absent_counters_clocks_and_loads_are_not_fine() -> None:
    (problem,) = receipt_problems(on_h200(environment={"throttle": None}), H200)
    assert "did not report ecc_uncorrected, foreign_processes, hw_power_brake" in problem
    receipt = on_h200()
    steps = (*receipt.steps[:-1], receipt.steps[-1].model_copy(update={"clock_mhz": None}))
    (problem,) = receipt_problems(receipt.model_copy(update={"steps": steps}), H200)
    assert "did not report clock_mhz" in problem
    (problem,) = receipt_problems(make_receipt(CPU, 0, "baseline", environment={"foreign_load": None}), CPU)
    assert "did not report foreign_load" in problem


def test_other_processes_on_the_cores_count_on_the_host_only() -> None:
    busy = {"foreign_load": 0.5, "foreign_busiest": ({"pid": 7, "name": "compiler", "cpu_s": 12.34},)}
    assert load_problem(make_receipt(CPU, 0, "baseline", environment=busy), 0.25) == (
        "others took 50% of the cores' time during the trial (busiest: compiler 12.3 s); "
        "placement.max_foreign_load allows 25%: stop other work, or allow more"
    )
    stolen = {**busy, "stolen_load": 0.4}
    problem = load_problem(make_receipt(CPU, 0, "baseline", environment=stolen), 0.25)
    assert "(40% by other virtual machines; busiest: compiler 12.3 s)" in str(problem)
    assert load_problem(make_receipt(CPU, 0, "baseline", environment={"foreign_load": 0.25}), 0.25) is None
    assert load_problem(on_h200(environment=busy), 0.25) is None
    assert receipt_problems(make_receipt(CPU, 0, "baseline", environment=busy), CPU) == [], "the last attempt counts"


def compiled_in(receipt: Receipt, index: int) -> Receipt:
    steps = tuple(step.model_copy(update={"compilations": 2 * (step.index == index)}) for step in receipt.steps)
    return receipt.model_copy(update={"steps": steps})


def test_a_compilation_counts_inside_the_window_only() -> None:
    receipt = make_receipt(CPU, 0, "baseline")
    for step in receipt.steps:
        reasons = receipt_problems(compiled_in(receipt, step.index), CPU)
        expected = [f"something was compiled inside the window, first in step {step.index}"]
        assert reasons == (expected if step.phase == "timed" else [])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"graphs": 1, "host_operations": ()}, None),
        ({"graphs": 2, "host_operations": ()}, "step {} ran as 2 graphs; allowed: 1"),
        ({"graphs": 0, "host_operations": ()}, "step {} ran as 0 graphs; allowed: 1"),
        ({"graphs": 1, "host_operations": ("aten::nonzero",)}, "operation aten::nonzero ran on the host in step {}"),
    ],
)
def test_a_timed_step_on_xla_is_one_graph_without_operations_of_the_host(
    change: dict[str, Any], problem: str | None
) -> None:
    receipt = make_receipt(CPU, 0, "baseline")
    on_xla = receipt.model_copy(
        update={"environment": receipt.environment.model_copy(update={"node_class": "xla-cpu"})}
    )
    for step in receipt.steps:
        changed = tuple(one.model_copy(update=change) if one is step else one for one in receipt.steps)
        expected = [problem.format(step.index)] if problem and step.phase == "timed" else []
        assert trial_problems(on_xla.model_copy(update={"steps": changed})) == expected
        assert trial_problems(receipt.model_copy(update={"steps": changed})) == []


def test_what_disturbs_nothing_but_times_is_no_problem_where_an_exact_metric_decides() -> None:
    exact = CPU.model_copy(update={"mde_pct_per_sd_pct": None, "max_foreign_load": 0.1})
    receipt = make_receipt(exact, 0, "baseline", environment={"foreign_load": 0.9})
    assert receipt_problems(compiled_in(receipt, 3), exact) == []
    hot = {"throttle": {**NOTHING_HAPPENED, "hw_thermal_slowdown": 5.0, "ecc_uncorrected": 1}}
    (problem,) = receipt_problems(on_h200(environment=hot), H200.model_copy(update={"mde_pct_per_sd_pct": None}))
    assert problem == "uncorrected ECC error during the trial"


def test_fewer_timed_steps_than_the_configuration_says_are_no_window() -> None:
    receipt = make_receipt(CPU, 0, "baseline")
    short = receipt.model_copy(update={"steps": receipt.steps[:-1]})
    assert receipt_problems(short, CPU) == ["3 timed steps; the configuration has 4"]
    bad = receipt.steps[-1].model_copy(update={"seconds": float("nan")})
    assert receipt_problems(receipt.model_copy(update={"steps": (*receipt.steps[:-1], bad)}), CPU) == [
        "a sample is not finite"
    ]


def test_a_gate_that_is_not_live_and_a_missing_summary_are_named() -> None:
    receipt = make_receipt(CPU, 0, "psiv-on")
    reading = receipt.gates["psiv_cache"].model_copy(update={"live": False})
    dead = receipt.model_copy(update={"gates": {**receipt.gates, "psiv_cache": reading}})
    assert receipt_problems(dead, CPU) == ["gate 'psiv_cache' was requested and not live"]
    assert receipt_problems(receipt.model_copy(update={"summary": None}), CPU) == ["samples are missing"]


EVALUATION = EvaluationReport(argv=("judge",), code="sha256:other", metrics=("val",), exit_code=0)
EVALUATED = {"program": {"evaluation": EVALUATION}}


def with_other(receipt: Receipt, part: str, changes: dict[str, Any]) -> Receipt:
    """Return a receipt with other values in a part of it, such as the report of a program that it had not."""
    own = getattr(receipt, part) or ProgramReport(argv=("a",), ranks=1, exit_code=0)
    return receipt.model_copy(update={part: own.model_copy(update=changes)})


OTHERWISE: dict[str, dict[str, Any]] = {
    "code": {"digests": {"code": "sha256:other"}},
    "data": {"digests": {"data": "sha256:other"}},
    "validation data": {"digests": {"validation": "sha256:other"}},
    "device": {"ids": {"device": "node-a/1"}},
    "attempt": {"ids": {"attempt": "att_other"}},
    "uncommitted patch": {"environment": {"git_dirty_digest": "sha256:other"}},
    "software versions": {"environment": {"versions": {"torch": "2.12"}}},
    "number of CPU threads": {"environment": {"cpu_threads": 7}},
    "code of the evaluation": EVALUATED,
}
"""What else a receipt of the same block could say, for every guard of a block."""


def test_every_guard_of_a_block_has_a_case() -> None:
    assert set(OTHERWISE) == set(_SAME_IN_BLOCK)


@pytest.mark.parametrize("what", OTHERWISE)
def test_block_is_invalid_when_one_trial_differs(what: str) -> None:
    receipts = [make_receipt(CPU, 0, arm) for arm in CPU.blocks[0].order]
    assert block_problems(receipts) == []
    ((part, changes),) = OTHERWISE[what].items()
    receipts[-1] = with_other(receipts[-1], part, changes)
    assert block_problems(receipts) == [f"{what} differs inside the block"]


@pytest.mark.parametrize(
    ("values", "digests", "problems"),
    [
        ({"seq_len": 128}, {"data": "sha256:other"}, []),
        ({"seq_len": 128}, {"validation": "sha256:other"}, ["validation data"]),
        ({"corpus": "torch-python"}, {"data": "sha256:other", "validation": "sha256:other"}, []),
        ({"second_share": 0.5}, {"data": "sha256:other"}, ["data"]),
        ({"documents": "joined"}, {"data": "sha256:other"}, ["data"]),
        ({"micro_batch": 4}, {"data": "sha256:other"}, ["data"]),
        ({"vocab_size": 512}, {"data": "sha256:other", "validation": "sha256:other"}, []),
    ],
)
def test_data_may_differ_where_the_configurations_do(
    values: dict[str, Any], digests: dict[str, str], problems: list[str]
) -> None:
    spec = make_spec(
        variants={"other": {"overrides": values}},
        workload__overrides={"second_corpus": "/data/more"},
        verdict__primary={"metric": "model_tflops_per_s", "margin": "1%"},
    )
    plan = make_plan(spec)
    receipts = [make_receipt(plan, block, arm) for block in plan.blocks for arm in block.order]
    changed = [
        one.model_copy(update={"digests": one.digests.model_copy(update=digests)}) if one.arm == "other" else one
        for one in receipts
    ]
    assert block_problems(changed[:2]) == [f"{what} differs inside the block" for what in problems]
    assert (between_blocks_problem(changed) is None) == (not problems)
    assert between_blocks_problem([*receipts[:4], *changed[4:]]) is not None, "one arm has equal data in all blocks"


def block(index: int = 0, **changes: Any) -> list[Receipt]:
    return [make_receipt(CPU, index, arm, **changes) for arm in CPU.blocks[index].order]


def started(receipt: Receipt, seconds: float) -> Receipt:
    moved = datetime.fromisoformat(receipt.started_at) + timedelta(seconds=seconds)
    return receipt.model_copy(update={"started_at": moved.isoformat()})


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (172_800.0, "s after arm"),
        (MAX_PAUSE_S + 1, "allowed: 60 s"),
        (-4.0, "before arm"),
        (MAX_PAUSE_S - 3, None),
        (-1.5, None),
    ],
)
def test_trials_of_a_block_follow_each_other_in_their_order(seconds: float, message: str | None) -> None:
    first, second, third = block()
    assert list(order_problems([third, first, second])) == []
    reasons = list(order_problems([first, second, started(third, seconds)]))
    assert reasons == [] if message is None else message in reasons[0]
    assert list(order_problems([first, started(third, 10**6)])) == []  # what lies between them is not known


ELSEWHERE: dict[str, dict[str, Any]] = {
    "code": {"digests": {"code": "sha256:other"}},
    "data": {"digests": {"data": "sha256:other"}},
    "validation data": {"digests": {"validation": "sha256:other"}},
    "kind of device": {"environment": {"device_name": "another"}},
    "software versions": {"environment": {"versions": {"python": "3.11", "torch": "2.14.0"}}},
    "number of CPU threads": {"environment": {"cpu_threads": 7}},
    "code of the evaluation": EVALUATED,
}
"""What else the receipts of another block could say, for every guard between blocks."""


def test_every_guard_between_blocks_has_a_case() -> None:
    assert set(ELSEWHERE) == set(_SAME_EVERYWHERE)


@pytest.mark.parametrize("what", ELSEWHERE)
def test_blocks_with_other_circumstances_are_not_one_comparison(what: str) -> None:
    ((part, changes),) = ELSEWHERE[what].items()
    others = [with_other(receipt, part, changes) for index in (3, 4, 5) for receipt in block(index)]
    same = [receipt for index in (0, 1, 2) for receipt in block(index)]
    assert between_blocks_problem(same) is None
    problem = between_blocks_problem([*same, *others])
    assert problem is not None
    assert problem.startswith(f"{what} of block 1 and block 4 differ")
    verdict = judge(CPU, make_spec(), [*same, *others], CALIBRATED)
    assert {variant.verdict for variant in verdict.variants} == {VerdictWord.INVALID}
    assert all(problem in variant.reason for variant in verdict.variants)


def test_another_serial_number_or_operating_system_between_blocks_is_no_problem() -> None:
    versions = {"python": "3.11", "torch": "2.13.0", "kernel": "6.19"}
    other = {"device_serial": "7", "versions": versions, "node_name": "node-b"}
    first = block(environment={"versions": {**versions, "kernel": "6.18"}})
    assert between_blocks_problem([*first, *block(1, environment=other)]) is None


def test_an_arm_that_ran_two_days_later_makes_its_block_invalid() -> None:
    receipts = [receipt for index in range(6) for receipt in block(index)]
    late = [
        started(receipt, 172_800.0) if (receipt.ids.block_index, receipt.ids.position) == (2, 2) else receipt
        for receipt in receipts
    ]
    assert {v.verdict for v in judge(CPU, make_spec(), receipts, CALIBRATED).variants} != {VerdictWord.INVALID}
    verdict = judge(CPU, make_spec(), late, CALIBRATED)
    assert {variant.verdict for variant in verdict.variants} == {VerdictWord.INVALID}
    assert "block 3" in verdict.variants[0].reason
