import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from scipy import stats

from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.experiments.design.metrics import CURVE_METRICS, METRICS
from ablate.experiments.digest import digest
from ablate.experiments.errors import ReceiptError
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipts import Receipt, read_metric, summarise
from ablate.experiments.reporting.pages.evidence_tables import KERNEL_NUMBERS
from ablate.kernels.scan_switches import ScanFact
from ablate.model.facts import ModelFact
from ablate.model.measurements import GIB, Step
from tests.factories import make_plan, make_receipt, observed_facts

PLAN = make_plan()


def as_json(receipt: Receipt) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(receipt.model_dump_json())
    return value


def steps(*seconds: float, losses: tuple[float, ...] | None = None) -> list[Step]:
    phases = ["compile", "warmup"] + ["timed"] * (len(seconds) - 2)
    return [
        Step(
            index=i,
            phase=phase,
            seconds=second,
            began_s=0.0,
            ended_s=0.0,
            tokens=100,
            loss=losses[i] if losses else 5.0 - i,
            grad_norm=1.0,
        )
        for i, (phase, second) in enumerate(zip(phases, seconds, strict=True))
    ]


def summary_of(measured: list[Step]) -> Any:
    return summarise(measured, flops_per_step=10**12, loss_val=None, peak_flops=4e12)


def test_summarise_sees_stalls_of_a_few_steps_as_lost_throughput() -> None:
    """The audit's case: two of 25 steps three times slower, the others 1.5 % faster."""
    even, stalled = [0.5] * 25, [0.5 / 1.015] * 23 + [1.5, 1.5]
    lost = summary_of(steps(9.0, 3.0, *stalled)).tokens_per_s / summary_of(steps(9.0, 3.0, *even)).tokens_per_s
    assert lost == pytest.approx(25 / (23 / 1.015 + 6))
    assert summary_of(steps(9.0, 3.0, *stalled)).outlier_steps == 2


@pytest.mark.parametrize("seed", range(20))
def test_summarise_of_random_windows_against_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = np.exp(rng.normal(-2, rng.uniform(0, 1), rng.integers(1, 60))) * (1 + 4 * (rng.random() < 0.1))
    summary = summary_of(steps(9.0, 3.0, *seconds.tolist()))
    middle = np.median(seconds)
    spread = stats.median_abs_deviation(seconds, scale="normal")
    assert summary.tokens_per_s == pytest.approx(100 * seconds.size / seconds.sum())
    assert summary.tokens_per_s_median == pytest.approx(100 / middle)
    assert summary.outlier_steps == (seconds > middle + 5 * max(spread, 0.002 * middle)).sum()
    assert (summary.timed_steps, summary.step_s_mean) == (seconds.size, pytest.approx(seconds.mean()))
    assert (summary.model_tflops_per_s, summary.mfu) == pytest.approx((1 / seconds.mean(), 0.25 / seconds.mean()))


def test_summarise_final_loss_is_the_mean_of_the_last_quarter() -> None:
    losses = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0)
    summary = summary_of(steps(*[0.5] * 10, losses=losses))
    assert (summary.loss_step1, summary.loss_final) == (9.0, 0.5)


@pytest.mark.parametrize(
    "broken",
    [
        [],
        steps(1.0, 1.0),
        steps(1.0, 1.0, 0.5)[1:],
        steps(1.0, 1.0, 0.0),
        steps(1.0, 1.0, float("nan")),
        steps(1.0, 1.0, 0.5, losses=(1.0, 1.0, float("nan"))),
    ],
)
def test_summarise_refuses_missing_and_impossible_samples(broken: list[Step]) -> None:
    with pytest.raises(ReceiptError):
        summary_of(broken)


def test_a_stored_receipt_is_read_verified_and_written_byte_for_byte() -> None:
    """No change of the code may alter it: a new field is `OmitNone`."""
    text = (Path(__file__).parents[3] / "golden" / "receipt.json").read_text(encoding="utf-8").rstrip("\n")
    assert verify(json.loads(text)) == []
    assert Receipt.model_validate_json(text).model_dump_json() == text


@pytest.mark.parametrize("outcome", [Outcome.OOM, Outcome.REFUSED, Outcome.FAILED])
def test_verify_accepts_receipts_without_a_summary(outcome: Outcome) -> None:
    assert verify(as_json(make_receipt(PLAN, 0, "psiv-on", outcome=outcome, message="x", steps=None))) == []


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list) or not value:
        yield path
    for key, child in children:
        yield from leaves(child, (*path, key))


def altered(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else "x"


def tampered(receipt: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    copy: Any = json.loads(json.dumps(receipt))
    target = copy
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = altered(target[path[-1]])
    return dict(copy)


def test_verify_finds_every_tampered_value() -> None:
    receipt = as_json(make_receipt(PLAN, 0, "psiv-on"))
    paths = list(leaves(receipt))
    assert len(paths) > 150
    assert [path for path in paths if not verify(tampered(receipt, path))] == []


def test_verify_finds_removed_and_added_keys() -> None:
    receipt = as_json(make_receipt(PLAN, 0, "psiv-on"))
    for key in receipt:
        if key not in ("kernels", "failure_class", "message"):  # absent and empty say the same
            assert verify({name: value for name, value in receipt.items() if name != key}), key
    assert verify({**receipt, "extra": 1})


@pytest.mark.parametrize("key", ["step_s_mean", "tokens_per_s", "model_tflops_per_s", "loss_final", "loss_step1"])
def test_verify_recomputes_the_summary_of_a_forged_digest(key: str) -> None:
    receipt = as_json(make_receipt(PLAN, 0, "psiv-on"))
    receipt["summary"][key] *= 1.05
    receipt["digest"] = digest({name: value for name, value in receipt.items() if name != "digest"})
    (problem,) = verify(receipt)
    assert problem.startswith(f"summary.{key} is ")


def test_seal_refuses_numbers_that_json_cannot_carry() -> None:
    with pytest.raises(ReceiptError, match="finite"):
        make_receipt(PLAN, 0, "psiv-on", training_s=float("inf"))
    with pytest.raises(ReceiptError, match="environment"):
        make_receipt(PLAN, 0, "psiv-on", environment={"node_name": None})


def test_read_gates_is_live_when_everything_was_observed() -> None:
    for arm in PLAN.arms:
        readings = read_gates(arm.gates, observed_facts(arm.gates))
        assert all(reading.live for reading in readings.values()), readings


@pytest.mark.parametrize(
    ("arm", "fact", "value", "gate"),
    [
        ("psiv-on", ScanFact.PSIV_RECOMPUTES, 3, "psiv_cache"),
        ("chunk-32", ScanFact.CHUNK_SIZE, 16, "chunk_size"),
        ("chunk-32", ScanFact.CHUNK_SIZE, "mixed", "chunk_size"),
        ("baseline", ScanFact.PSIV_SAVED_BYTES, 8, "psiv_cache"),
        ("baseline", ModelFact.LOSS, "chunked", "loss"),
        ("baseline", ModelFact.HIDDEN_DTYPE, "bfloat16", "dtype"),
        ("baseline", ScanFact.DTYPE, "bfloat16", "dtype"),
        ("baseline", ScanFact.DTYPE, "mixed", "dtype"),
        ("baseline", ModelFact.COMPILED_GRAPHS, 1, "compile"),
    ],
)
def test_read_gates_refuses_what_was_observed_otherwise(arm: str, fact: str, value: Any, gate: str) -> None:
    gates = next(known for known in PLAN.arms if known.name == arm).gates
    readings = read_gates(gates, {**observed_facts(gates), fact: value})
    assert [name for name, reading in readings.items() if not reading.live] == [gate]


def test_read_gates_without_facts_trusts_defaults_and_nothing_else() -> None:
    readings = read_gates(PLAN.arms[2].gates, {})
    assert [name for name, reading in readings.items() if not reading.live] == ["chunk_size", "micro_batch"]
    assert readings["loss"].how == "default, not observable"


def test_read_gates_knows_what_another_gate_makes_useless() -> None:
    gates = {**PLAN.arms[2].gates, "schedule": "sequential"}
    reading = read_gates(gates, observed_facts(gates))["chunk_size"]
    assert (reading.live, reading.how) == (True, "not used with schedule = sequential and lane = reference")


@pytest.mark.parametrize(("pattern", "not_live"), [("MA", ["attention", "lane"]), ("AF", ["attention"]), ("F", [])])
def test_read_gates_asks_no_proof_of_a_block_that_the_model_does_not_have(pattern: str, not_live: list[str]) -> None:
    readings = read_gates({"lane": "xla", "attention": "flash", "dtype": "float32"}, {}, pattern=pattern)
    assert sorted(name for name, reading in readings.items() if not reading.live) == not_live
    if not not_live:
        assert readings["lane"].how == "not used without a block of kind M"


def test_events_that_the_driver_did_not_tell_stay_absent_in_json_and_in_the_digest() -> None:
    all_events = {
        "sw_power_cap": 1.5,
        "sw_thermal_slowdown": 0.0,
        "hw_thermal_slowdown": 0.25,
        "hw_power_brake": 0.0,
        "ecc_uncorrected": 0,
        "foreign_processes": [],
    }
    for chosen in range(2 ** len(all_events)):
        events = {name: value for bit, (name, value) in enumerate(all_events.items()) if chosen >> bit & 1}
        receipt = make_receipt(PLAN, 0, "baseline", environment={"throttle": events})
        plain = as_json(receipt)
        assert plain["environment"]["throttle"] == events
        assert verify(plain) == []
        assert plain.pop("digest") == digest(plain)


ONE_NUMBER = [name for name, one in METRICS.items() if not (one.summed or one.counted) and name not in CURVE_METRICS]


def _annotation(model: type[BaseModel], path: str) -> set[object]:
    name, _, rest = path.partition(".")
    annotation = model.model_fields[name].annotation
    choices = set(typing.get_args(annotation)) or {annotation}
    if not rest:
        return choices
    (inner,) = choices - {type(None)}
    return _annotation(typing.cast("type[BaseModel]", inner), rest)


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_every_metric_is_a_number_of_the_receipt(name: str) -> None:
    assert _annotation(Receipt, METRICS[name].field) - {type(None)} <= {int, float}


def test_memory_is_read_in_gib_and_is_missing_without_a_reading() -> None:
    receipt = make_receipt(make_plan(), 0, "psiv-on")
    assert receipt.memory is not None
    metric = METRICS["peak_allocated_gib"]
    assert read_metric(metric, receipt) == receipt.memory.peak_allocated_bytes / GIB
    assert read_metric(metric, receipt.model_copy(update={"memory": None})) is None


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.summed is not None])
def test_what_is_added_up_is_a_number_of_the_kernel_table(name: str) -> None:
    metric = METRICS[name]
    assert metric.summed in KERNEL_NUMBERS
    plan, rows = make_plan(), ({"name": "fwd", metric.summed: 3}, {"name": "bwd", metric.summed: 4})
    assert read_metric(metric, make_receipt(plan, 0, "psiv-on", kernels=rows)) == 7
    assert read_metric(metric, make_receipt(plan, 0, "psiv-on", kernels=(*rows, {"name": "x"}))) is None
    assert read_metric(metric, make_receipt(plan, 0, "psiv-on")) is None


def test_kernels_are_counted_where_there_are_any() -> None:
    plan, metric = make_plan(), METRICS["kernel_count"]
    rows = ({"name": "fwd"}, {"name": "bwd"}, {"name": "bwd"})
    assert read_metric(metric, make_receipt(plan, 0, "psiv-on", kernels=rows)) == 3
    assert read_metric(metric, make_receipt(plan, 0, "psiv-on")) is None
