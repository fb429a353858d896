"""Receipts of commands with several ranks or devices: what is said, and which contradict themselves."""

from typing import Any

import pytest

from experiments.analysis.guards import block_problems
from experiments.analysis.judge import judge
from experiments.analysis.noise.calibrate import key_of, serials_of
from experiments.records.circumstances import Admission, Circumstances
from experiments.records.receipt_check import contradictions
from experiments.records.receipts import Receipt
from experiments.records.surroundings import DeviceEvents, HeldDevice
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


@pytest.mark.parametrize(("tokens", "said"), [((40, 20), True), ((30, 30), False), (None, False)])
def test_ranks_with_unequal_tokens_are_named_in_the_verdict(tokens: tuple[int, ...] | None, said: bool) -> None:
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
        if said
        else []
    )


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
        found = contradictions(receipt(*devices))
        assert found == [f"environment names {max(1, len(devices))} devices; the configuration has 2"], devices


def test_two_trials_of_a_block_have_the_same_devices() -> None:
    one = receipt((NAME, "1"), (NAME, "2"))
    same, other = receipt((NAME, "1"), (NAME, "2"), arm="fused"), receipt((NAME, "1"), (NAME, "3"), arm="fused")
    assert block_problems([one, same]) == []
    assert block_problems([one, other]) == ["device differs inside the block"]


def test_a_calibration_of_two_devices_is_of_these_two() -> None:
    spec, _plan = plan_of(placement={"node_class": "h100", "devices": 2})
    key = key_of(spec, receipt((NAME, "1"), (NAME, None)))
    assert key.device_serial == f"1 + node-a, {NAME}"
    on_node = serials_of([(NAME, "1"), (NAME, None), (NAME, "3")], "node-a")
    assert key.device_serial in on_node
    assert {"1", "3"} <= on_node
    assert "1 + 3" not in on_node, "trials use the first devices of a node"
