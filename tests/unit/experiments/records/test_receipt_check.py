"""One receipt, edited by somebody who redoes digest and summary: what contradicts itself is found and named.

What is consistent can be found by a signature alone: test_tampering.py.
"""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from ablate.experiments.design.plan import Plan
from ablate.experiments.digest import digest
from ablate.experiments.errors import ReceiptError
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipts import summarise
from ablate.model.measurements import Step, Validation
from tests.factories import make_plan, make_receipt, make_spec

Values: TypeAlias = dict[str, Any]
Edit: TypeAlias = Callable[[Values], None]


def plan_of(**steps: int) -> Plan:
    given = {"warmup": 3, "warmup_s": 1.5, "timed": 25, "val_rows": 2, **steps}
    return make_plan(
        make_spec(
            workload={"recipe": "hybrid-ref-h200", "steps": given},
            placement__node_class="h200",
            variants={"psiv-cache": {"gates": {"psiv_cache": True}}},
        )
    )


PLAN = plan_of()
CURVE = [9.0, 8.5, 8.25, 8.125, 7.5]


def original(**steps: int) -> Values:
    plan, curve = (plan_of(**steps), {"val_losses": CURVE}) if steps else (PLAN, {})
    values: Values = json.loads(make_receipt(plan, 0, "psiv-cache", tokens_per_s=486_000.0, **curve).model_dump_json())
    return values


def redone(values: Values) -> Values:
    """Return the receipt with the summary that its steps give, where they give one, and with its digest."""
    try:
        fresh = summarise(
            [Step.model_validate(step) for step in values["steps"]],
            flops_per_step=values["flops_per_step"],
            loss_val=values["summary"]["loss_val"],
            peak_flops=values["environment"]["peak_flops"],
            validations=[Validation.model_validate(one) for one in values["validations"]]
            if "validations" in values
            else None,
        )
        values["summary"] = fresh.model_dump(mode="json")
    except (ReceiptError, TypeError):
        pass
    return sealed(values)


def sealed(values: Values) -> Values:
    return {**values, "digest": digest({name: value for name, value in values.items() if name != "digest"})}


def put(path: str, value: Any) -> Edit:
    def edit(values: Values) -> None:
        *parents, last = path.split(".")
        for name in parents:
            values = values[name]
        values[last] = value

    return edit


def steps(change: Callable[[Values], Values | None]) -> Edit:
    """Return the edit that replaces every step by what `change` makes of it; None deletes it."""

    def edit(values: Values) -> None:
        changed = [change(step) for step in values["steps"]]
        values["steps"] = [step for step in changed if step is not None]

    return edit


def timed(**factors: float) -> Edit:
    """Return the edit that multiplies fields of the timed steps."""
    return steps(
        lambda step: {
            **step,
            **{name: step[name] * factor for name, factor in factors.items() if step["phase"] == "timed"},
        }
    )


def marked(phase: str, *indices: int) -> Edit:
    return steps(lambda step: {**step, "phase": phase} if step["index"] in indices else step)


def without(*indices: int) -> Edit:
    return steps(lambda step: None if step["index"] in indices else step)


def both(*edits: Edit) -> Edit:
    def edit(values: Values) -> None:
        for one in edits:
            one(values)

    return edit


def earlier(seconds: float) -> Edit:
    """Return the edit by which everything after step 0 happened earlier."""

    def edit(step: Values) -> Values:
        moved = seconds if step["index"] else 0.0
        return {**step, "began_s": step["began_s"] - moved, "ended_s": step["ended_s"] - moved}

    return steps(edit)


def begun_later(factor: float) -> Edit:
    """Return the edit that makes timed steps shorter at their begin, so that their seconds fit their clock."""

    def edit(step: Values) -> Values:
        seconds = step["seconds"] * (factor if step["phase"] == "timed" else 1)
        return {**step, "seconds": seconds, "began_s": step["ended_s"] - seconds}

    return steps(edit)


def without_field(name: str) -> Edit:
    return steps(lambda step: {key: value for key, value in step.items() if key != name})


def renumbered(values: Values) -> None:
    values["steps"] = [{**step, "index": place} for place, step in enumerate(values["steps"])]


EDITS: dict[str, tuple[Edit, str]] = {
    "timed steps 3 % faster": (timed(seconds=0.97), "the clock gives it"),
    "warm-up steps as timed ones": (marked("timed", 1, 2, 3), "step 1 is marked timed; the configuration"),
    "slow timed steps as warm-up": (marked("warmup", 4, 5), "step 4 is marked warmup"),
    "eleven steps deleted and the rest numbered again": (
        both(without(*range(10, 21)), renumbered),
        "18 steps; the configuration gives 29",
    ),
    "fewer steps, and fewer asked for": (
        both(without(*range(18, 29)), put("config.steps.timed", 14)),
        "digests.arm is",
    ),
    "the last step deleted": (without(28), "24 timed steps; the configuration has 25"),
    "a step that stands twice": (steps(lambda s: {**s, "index": 7} if s["index"] == 8 else s), "step 8 has index 7"),
    "more tokens": (timed(tokens=2), "tokens; the configuration gives 32768"),
    "device clocks erased": (steps(lambda s: {**s, "clock_mhz": None}), "did not report clock_mhz"),
    "one counter erased": (
        lambda values: values["environment"]["throttle"].pop("hw_thermal_slowdown"),
        "did not report hw_thermal_slowdown",
    ),
    "an ECC error and a neighbour left in": (
        both(put("environment.throttle.ecc_uncorrected", 1), put("environment.throttle.foreign_processes", [7])),
        "uncorrected ECC error during the trial",
    ),
    "fewer FLOPs": (put("flops_per_step", 10**12), "flops_per_step is 1000000000000; the configuration gives"),
    "another peak of the device": (put("environment.peak_flops", 5e14), "environment.peak_flops is 500000000000000.0"),
    "another seed": (put("seed", 99), "seed is 99; the configuration says"),
    "a gate that was not asked for": (put("gates.psiv_cache.requested", False), "gate 'psiv_cache' is False"),
    "a gate that is in no configuration": (put("gates.turbo", original()["gates"]["lane"]), "gate 'turbo' is"),
    "the facts of a live gate removed": (put("facts", {}), "gates.lane says"),
    "a reading of nobody": (
        put("gates.psiv_cache.how", "somebody said so"),
        "gates.psiv_cache says 'somebody",
    ),
    "a configuration with a larger batch": (put("config.micro_batch", 16), "digests.arm is"),
    "a configuration with an unknown field": (put("config.turbo", True), "config: Value error, turbo: Unexpected"),
    "a validation loss that nobody asked for": (
        put("config.steps.val_rows", 0),
        "0 validation rows",
    ),
    "the validation loss removed": (put("summary.loss_val", None), "2 validation rows"),
    "the load before the window removed": (put("warmup_passes", []), "no warm-up pass"),
    "a warm-up that took no time": (
        earlier(1.4),
        "between step 0 and step 1; the configuration requests 1.5 s of load",
    ),
    "a training shorter than its steps": (put("training_s", 0.5), "training_s is only 0.5"),
    "a trial shorter than its training": (put("wall_s", 1.0), "wall_s is only 1"),
    "a compilation longer than the clock allows": (put("compile_s", 30.0), "step 0 took"),
    "a start that is no moment": (put("started_at", "yesterday"), "started_at is 'yesterday'"),
    "a start without its offset": (
        put("started_at", "2026-11-20T12:00:00"),
        "expected a date and time with its offset",
    ),
    "a failure that measured": (put("failure_class", "numerics"), "outcome is measured, and failure_class is numerics"),
    "a loss that is not the first step's": (
        lambda values: values["summary"].update(loss_step1=1.0),
        "summary.loss_step1 is 1.0",
    ),
    "no memory": (put("memory", None), "there is no memory"),
    "a later schema": (put("schema_version", 5), "schema_version is 5; this program reads 4"),
    "no schema": (put("schema_version", True), "schema_version is true"),
}
"""By what was done: the edit, and what is said of it."""


def test_the_original_is_whole() -> None:
    assert verify(original()) == []
    assert verify(redone(original())) == []


@pytest.mark.parametrize("what", EDITS)
def test_edit_with_every_digest_redone_is_found_and_named(what: str) -> None:
    edit, message = EDITS[what]
    values = original()
    edit(values)
    values = sealed(values) if "summary" in what or "loss" in what else redone(values)
    problems = verify(values)
    assert any(message in problem for problem in problems), problems
    assert not any("was altered" in problem for problem in problems)


@pytest.mark.parametrize(
    "field",
    [
        "timed_steps",
        "step_s_mean",
        "step_s_median",
        "tokens_per_s",
        "tokens_per_s_median",
        "model_tflops_per_s",
        "mfu",
        "outlier_steps",
        "loss_step1",
        "loss_final",
    ],
)
def test_every_number_of_the_summary_is_computed_again(field: str) -> None:
    values = original()
    values["summary"][field] *= 1.03
    values["summary"][field] += 1
    if field in ("timed_steps", "outlier_steps"):
        values["summary"][field] = int(values["summary"][field])
    assert any(problem.startswith(f"summary.{field} is") for problem in verify(sealed(values)))


def test_a_receipt_that_did_not_measure_is_not_asked_for_what_it_lacks() -> None:
    for outcome, failure in (("oom", "oom"), ("timeout", "timeout"), ("failed", "no_receipt")):
        receipt = make_receipt(
            PLAN, 0, "psiv-cache", outcome=outcome, failure_class=failure, steps=(), memory=None, flops_per_step=0
        )
        assert verify(json.loads(receipt.model_dump_json())) == []


def validations(**changes: float) -> Edit:
    """Return the edit that adds to fields of the second validation."""

    def edit(values: Values) -> None:
        one = values["validations"][1]
        one |= {name: one[name] + change for name, change in changes.items()}

    return edit


def only(keep: slice) -> Edit:
    return lambda values: values.update(validations=values["validations"][keep])


CURVE_EDITS: dict[str, tuple[Edit, str]] = {
    "a validation left out": (only(slice(1, None)), "val_every = 6 gives 5 of them"),
    "all validations left out": (lambda values: values.pop("validations"), "follow steps none"),
    "a validation after another step": (validations(step=1), "validations follow steps 9, 16, 21"),
    "a better last validation": (
        lambda values: values["validations"][-1].update(loss=7.0),
        "summary.loss_val is 7.5; the last validation gives 7.0",
    ),
    "a validation inside a step": (validations(began_s=-0.01), "the validation after step 15 does not lie"),
    "a validation that ends in the next step": (validations(ended_s=0.01), "the validation after step 15 does not"),
    "validations that take no time": (validations(ended_s=-0.25), "the validation after step 15 does not lie"),
    "training that is over before its last validation": (
        lambda values: values.update(training_s=values["steps"][-1]["ended_s"]),
        "training_s is only",
    ),
}


def test_a_curve_follows_from_its_validations_and_steps() -> None:
    values = original(val_every=6)
    assert verify(values) == []
    assert verify(redone(original(val_every=6))) == []
    curve, steps_ = values["summary"]["curve"], values["steps"]
    assert [point["step"] for point in curve] == [9, 15, 21, 27, 28]
    assert [point["loss"] for point in curve] == CURVE
    assert [point["tokens"] for point in curve] == [32_768 * (point["step"] + 1) for point in curve]
    seconds = [step["seconds"] for step in steps_]
    mean = sum(seconds[4:]) / 25
    assert [point["seconds"] for point in curve] == pytest.approx(
        [4 * mean + sum(seconds[4 : point["step"] + 1]) for point in curve]
    )
    assert "curve" not in original()["summary"]


@pytest.mark.parametrize("every", [1, 2, 24, 25])
def test_a_receipt_with_any_schedule_verifies(every: int) -> None:
    values = original(val_every=every)
    assert verify(values) == []
    assert len(values["summary"]["curve"]) == -(-25 // every)


@pytest.mark.parametrize("what", CURVE_EDITS)
def test_edit_of_a_curve_is_found_and_named(what: str) -> None:
    edit, message = CURVE_EDITS[what]
    values = original(val_every=6)
    edit(values)
    problems = verify(redone(values))
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("field", ["tokens", "seconds", "loss", "step"])
def test_every_number_of_a_curve_is_computed_again(field: str, place: int) -> None:
    values = original(val_every=6)
    values["summary"]["curve"][place][field] += 1
    assert any("summary.curve is" in problem for problem in verify(sealed(values)))


def test_no_receipt_has_validations_without_a_schedule() -> None:
    values = original()
    values["validations"] = original(val_every=25)["validations"]
    assert any("val_every = 0 gives 0 of them" in problem for problem in verify(redone(values)))
