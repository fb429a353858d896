"""Receipts of commands with several ranks or devices: what is said, and which contradict themselves."""

from typing import Any

import pytest

from ablate.experiments.analysis.guards import block_problems
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.calibrate import key_of, serials_of
from ablate.experiments.analysis.programs import slow_nodes
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.records.circumstances import Admission, Circumstances
from ablate.experiments.records.receipt_check import contradictions
from ablate.experiments.records.receipts import DeviceEvents, HeldDevice, Receipt
from tests.factories import make_plan, make_receipts, make_spec
from tests.program_receipts import plan_of, program_receipt

NAME = "NVIDIA H100 80GB HBM3"
GPU_EVENTS = DeviceEvents(
    sw_power_cap=0.0,
    sw_thermal_slowdown=0.0,
    hw_thermal_slowdown=0.0,
    hw_power_brake=0.0,
    ecc_uncorrected=0,
    foreign_processes=(),
)


@pytest.mark.parametrize(("tokens", "is_named"), [((40, 20), True), ((30, 30), False), (None, False)])
def test_ranks_with_unequal_tokens_are_named_in_the_verdict(tokens: tuple[int, ...] | None, is_named: bool) -> None:
    spec, plan = plan_of()
    receipts = []
    for block in plan.blocks:
        for arm in block.order:
            made = program_receipt(plan, block, arm, reported={"val_bpb": 1.0 + block.seed / 10})
            report = made.program and made.program.model_copy(update={"ranks": 2, "rank_tokens": tokens})
            receipts.append(program_receipt(plan, block, arm, reported={}, program=report))
    (variant,) = judge(plan, spec, receipts, Circumstances(admission=Admission(refused_because=None))).variants
    notes = [note for note in variant.notes if "unequal tokens" in note]
    assert notes == (
        [
            f"ranks of the {arm} reported unequal tokens: 40, 20; one may count its own share wrongly"
            for arm in ("variant", "baseline")
        ]
        if is_named
        else []
    )


SLOW, EVEN = (1.0, 1.18, 1.0), (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ([SLOW] * 12, {"n1": "18% slower than the others' median, by more than 5% in 12 of 12 trials"}),
        ([SLOW] * 11 + [EVEN], {"n1": "18% slower than the others' median, by more than 5% in 11 of 12 trials"}),
        ([SLOW] * 10 + [EVEN] * 2, {}),
        ([(1.0, 1.049, 1.0)] * 12, {}),
        (
            [(2.0, 1.0, 2.0)] * 12,
            dict.fromkeys(("n0", "n2"), "33% slower than the others' median, by more than 5% in 12 of 12 trials"),
        ),
        ([(0.0, 1.0, 1.0)] * 12, {}),
    ],
)
def test_a_node_that_is_slower_in_nearly_all_trials_is_named(
    times: list[tuple[float, ...]], named: dict[str, str]
) -> None:
    """The last case has a rank that says that it waited for its whole step, which is no time to compare with."""
    spec, plan = plan_of()
    trials, drawn = [(block, arm) for block in plan.blocks for arm in block.order], iter(times)
    receipts = []
    for block, arm in trials:
        made = program_receipt(plan, block, arm, reported={"val_bpb": 1.0 + block.seed / 10})
        changes = {"ranks": 3, "rank_step_s": next(drawn), "rank_nodes": ("n0", "n1", "n2")}
        report = made.program and made.program.model_copy(update=changes)
        receipts.append(program_receipt(plan, block, arm, reported={}, program=report))
    (variant,) = judge(plan, spec, receipts, Circumstances(admission=Admission(refused_because=None))).variants
    notes = [note for note in variant.notes if note.startswith("node ")]
    assert notes == [f"node {node} was {words}" for node, words in named.items()]


def test_a_slow_rank_of_a_node_counts_for_the_node_and_few_trials_name_nobody() -> None:
    _spec, plan = plan_of()
    made = program_receipt(plan, plan.blocks[0], "baseline", reported={"val_bpb": 1.0})
    changes = {"ranks": 4, "rank_step_s": (1.0, 1.0, 1.0, 1.5), "rank_nodes": ("n0", "n0", "n1", "n1")}
    report = made.program and made.program.model_copy(update=changes)
    slow = made.model_copy(update={"program": report})
    assert list(slow_nodes([slow] * 5)) == []
    assert list(slow_nodes([slow] * 6)) == [
        "node n1 was 50% slower than the others' median, by more than 5% in 6 of 6 trials"
    ]


def receipt(*devices: tuple[str, str | None], arm: str = "baseline", **changes: Any) -> Receipt:
    """Return the receipt of a command that was planned for two GPUs and ran on `devices`."""
    _spec, plan = plan_of(placement={"node_class": "h100", "devices": 2})
    made = program_receipt(plan, plan.blocks[0], arm, reported={"val_bpb": 1.0})
    held = tuple(HeldDevice(name=name, serial=serial, events=GPU_EVENTS) for name, serial in devices)
    where = {"device_name": NAME, "device_serial": "1", "throttle": GPU_EVENTS, "devices": held or None, **changes}
    environment = made.environment.model_copy(update=where)
    steps = tuple(step.model_copy(update={"clock_mhz": 1980.0}) for step in made.steps)
    return program_receipt(plan, plan.blocks[0], arm, reported={"val_bpb": 1.0}, environment=environment, steps=steps)


def test_a_receipt_names_exactly_the_devices_of_its_plan() -> None:
    assert contradictions(receipt((NAME, "1"), (NAME, "2"))) == []
    for devices in ([], [(NAME, "1")], [(NAME, "1"), (NAME, "2"), (NAME, "3")]):
        problems = contradictions(receipt(*devices))
        assert problems == [f"environment names {max(1, len(devices))} devices; the configuration has 2"], devices


def test_two_trials_of_a_block_have_the_same_devices() -> None:
    one = receipt((NAME, "1"), (NAME, "2"))
    same, other = receipt((NAME, "1"), (NAME, "2"), arm="fused"), receipt((NAME, "1"), (NAME, "3"), arm="fused")
    assert block_problems([one, same]) == []
    assert block_problems([one, other]) == ["device differs inside the block"]


def test_an_arm_with_fewer_devices_must_have_used_the_first_ones_of_its_block() -> None:
    def used(where: str, *devices: tuple[str, str | None], arm: str) -> Receipt:
        made = receipt(*devices, arm=arm, device_name=devices[0][0], device_serial=devices[0][1])
        return made.model_copy(update={"ids": made.ids.model_copy(update={"device": where})})

    two = used("gpu/0,1", (NAME, "1"), (NAME, "2"), arm="baseline")
    assert block_problems([two, used("gpu/0", (NAME, "1"), arm="fused")]) == []
    assert block_problems([used("gpu/0", (NAME, "1"), arm="fused"), two]) == []
    for other in (
        used("gpu/1", (NAME, "2"), arm="fused"),
        used("gpu/0", (NAME, "2"), arm="fused"),
        used("gpu/0,2", (NAME, "1"), (NAME, "2"), arm="fused"),
        used("gpu/0,1", (NAME, "1"), (NAME, "3"), arm="fused"),
    ):
        assert block_problems([two, other]) == ["device differs inside the block"]


def scaling(**changes: Any) -> AblationSpec:
    values: dict[str, Any] = {
        "baseline": {"gates": {"devices": 1}},
        "variants": {"two": {"gates": {"devices": 2, "micro_batch": 4}}},
        "placement": {"node_class": "cpu", "devices": 2},
        "verdict": {"primary": {"metric": "tokens_per_s_per_device", "margin": "7%"}},
    }
    return make_spec(**{**values, **changes})


@pytest.mark.parametrize(("speed", "verdict"), [(1.95, "same"), (1.7, "worse"), (2.3, "better")])
def test_scaling_is_judged_by_the_throughput_of_a_device(speed: float, verdict: str) -> None:
    plan = make_plan(scaling())
    receipts = make_receipts(plan, {"two": speed})
    judged = judge(plan, scaling(), receipts, Circumstances(admission=Admission(refused_because=None)))
    (variant,) = judged.variants
    assert variant.verdict == verdict
    of_one, (of_all,) = variant.primary, (one for one in variant.secondary if one.metric == "tokens_per_s")
    assert of_one is not None
    assert of_one.delta_pct == pytest.approx(50 * speed - 100, abs=0.6)
    assert 1 + of_all.delta_pct / 100 == pytest.approx(2 * (1 + of_one.delta_pct / 100))


def test_arms_with_as_many_devices_are_not_compared_twice() -> None:
    plan = make_plan()
    verdict = judge(plan, make_spec(), make_receipts(plan), Circumstances(admission=Admission(refused_because=None)))
    assert "tokens_per_s_per_device" not in {one.metric for one in verdict.variants[0].secondary}


def test_a_calibration_of_two_devices_is_of_these_two() -> None:
    spec, _plan = plan_of(placement={"node_class": "h100", "devices": 2})
    key = key_of(spec, receipt((NAME, "1"), (NAME, None)))
    assert key.device_serial == f"1 + node-a, {NAME}"
    on_node = serials_of([(NAME, "1"), (NAME, None), (NAME, "3")], "node-a")
    assert key.device_serial in on_node
    assert {"1", "3"} <= on_node
    assert "1 + 3" not in on_node, "trials use the first devices of a node"
