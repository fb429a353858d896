from dataclasses import replace

import numpy as np
import pytest

from ablate.experiments.analysis.noise.history import BaselineRun, find_changes, history_of, scatter
from ablate.experiments.analysis.noise.history_series import MIN_POINTS
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.kinds.program import Evaluation
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.program_report import EvaluationReport, ProgramReport
from ablate.experiments.records.receipts import Receipt
from tests.factories import make_plan, make_receipt

PLAN = make_plan()
SD = 0.005


def run(
    number: int, speed: float, *, code: str = "sha256:code", data: str = "sha256:data", **changes: object
) -> BaselineRun:
    receipts: list[Receipt] = []
    for block in PLAN.blocks[:2]:
        made = make_receipt(PLAN, block, "baseline", tokens_per_s=speed, **changes)
        at = made.started_at.replace("2026-11-20", f"2026-{1 + number // 28:02d}-{1 + number % 28:02d}")
        digests = made.digests.model_copy(update={"code": code, "data": data})
        receipts.append(made.model_copy(update={"started_at": at, "digests": digests}))
    return BaselineRun(ablation=f"abl_{number:03d}", name=f"a{number}", receipts=tuple(receipts))


@pytest.mark.parametrize("points", [8, 12, 20, 50, 100])
def test_constant_level_is_rarely_split(points: int) -> None:
    rng = np.random.default_rng(points)
    tries = 600
    false = sum(bool(find_changes(rng.normal(0, SD, points))) for _ in range(tries))
    assert false / tries <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tries)


def test_changed_level_is_found_where_it_begins() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        logs = rng.normal(0, SD, 24)
        logs[15:] -= 4 * SD
        hits += any(abs(index - 15) <= 1 for index in find_changes(logs))
    assert hits >= 190


def test_scatter_is_that_of_points_and_not_of_levels() -> None:
    rng = np.random.default_rng(4)
    logs = rng.normal(0, SD, 400)
    logs[200:] += 1.0
    assert scatter(logs) == pytest.approx(SD, rel=0.15)


def test_series_says_that_a_level_changed_with_the_data() -> None:
    rng = np.random.default_rng(5)
    runs = [
        run(n, 5000 * np.exp(rng.normal(0, 0.002)) * (0.97 if n >= 12 else 1), data=f"sha256:{n >= 12}")
        for n in range(20)
    ]
    ((change,),) = (series.changes for series in history_of("tokens_per_s", runs))
    assert (change.code_changed, change.data_changed) == (False, True)
    assert change.difference == "same code, other data"


def test_series_tells_level_code_and_anchor() -> None:
    rng = np.random.default_rng(5)
    runs = [
        run(n, 5000 * np.exp(rng.normal(0, 0.002)) * (0.97 if n >= 12 else 1), code=f"sha256:{'b' if n >= 12 else 'a'}")
        for n in range(20)
    ]
    (series,) = history_of("tokens_per_s", reversed(runs))
    assert [point.ablation for point in series.points] == [one.ablation for one in runs]
    assert [point.trials for point in series.points] == [2] * 20
    (change,) = series.changes
    assert (change.ablation, change.worse, change.code_changed) == ("abl_012", True, True)
    assert change.difference == "other code, same data"
    assert change.change_pct == pytest.approx(-3, abs=0.4)
    assert series.since_anchor is not None
    assert series.since_anchor.worse is True
    assert series.since_anchor.low_pct < -3 < series.since_anchor.high_pct


def test_small_losses_add_up_against_the_anchor() -> None:
    rng = np.random.default_rng(6)
    runs = [run(n, 5000 * np.exp(rng.normal(0, 0.001) - 0.002 * n)) for n in range(16)]
    (series,) = history_of("tokens_per_s", runs)
    assert series.since_anchor is not None
    assert series.since_anchor.worse is True
    assert series.since_anchor.change_pct == pytest.approx(100 * np.expm1(-0.002 * 13), abs=0.4)
    (seconds,) = history_of("step_s", runs)
    assert seconds.since_anchor is not None
    assert (seconds.since_anchor.worse, seconds.since_anchor.change_pct > 2) == (True, True)


def test_few_points_say_nothing_and_equal_ones_no_change() -> None:
    (few,) = history_of("tokens_per_s", [run(n, 5000) for n in range(MIN_POINTS - 1)])
    assert (few.changes, few.since_anchor) == ((), None)
    (equal,) = history_of("tokens_per_s", [run(n, 5000) for n in range(MIN_POINTS)])
    assert equal.changes == ()
    assert equal.since_anchor is not None
    assert equal.since_anchor.worse is False


def test_other_devices_and_what_did_not_measure_stand_apart() -> None:
    here, there = run(0, 5000), run(1, 4000, environment={"device_serial": "other"})
    oom = run(2, 5000, outcome=Outcome.OOM)
    histories = history_of("tokens_per_s", [here, there, oom])
    assert sorted(len(series.points) for series in histories) == [1, 1]
    assert {series.device for series in histories} == {"other", histories[0].device, histories[1].device}


def program_run(number: int, letter: str, code: object) -> BaselineRun:
    """A run of a command whose code has the digest of `letter`, in a folder or an archive."""
    config = CommandArm(command=("a",), code=code, seed=number)  # type: ignore[arg-type]
    report = ProgramReport(argv=("a",), code=f"sha256:{letter * 64}", ranks=1, exit_code=0)
    one = run(number, 5000 * (0.9 if letter == "b" else 1) * (1 + (number * 7 % 5) / 1000))
    receipts = tuple(made.model_copy(update={"config": config, "program": report}) for made in one.receipts)
    return one.model_copy(update={"receipts": receipts})


def test_versions_of_sent_code_are_one_series_that_says_when_the_code_changed() -> None:
    sent = [program_run(n, "ab"[n >= 12], {"archive": f"sha256:{'12'[n >= 12] * 64}"}) for n in range(20)]
    (series,) = history_of("tokens_per_s", sent)
    assert [(change.ablation, change.difference) for change in series.changes] == [("abl_012", "other code, same data")]
    on_node = [program_run(n, "ab"[n >= 12], "/srv/lab") for n in range(20)]
    ((change,),) = (series.changes for series in history_of("tokens_per_s", on_node))
    assert change.difference == "other code, same data"


def evaluated_run(number: int, letters: str, command: str = "judge") -> BaselineRun:
    """A run of a sent command with an evaluation: `letters` are their code, and any but aa is slower."""
    code, judging = ({"archive": f"sha256:{letter * 64}"} for letter in letters)
    own = program_run(number, "a" if letters == "aa" else "b", code)
    evaluate = Evaluation(command=(command,), code=judging)
    report = EvaluationReport(argv=(command,), code=f"sha256:{letters[1] * 64}", metrics=("v",), exit_code=0)
    receipts = [
        one.model_copy(
            update={
                "config": replace(one.config, evaluate=evaluate),
                "program": one.program.model_copy(update={"evaluation": report, "code": letters[0]}),
            }
        )
        for one in own.receipts
        if one.program is not None
    ]
    return BaselineRun(ablation=own.ablation, name=own.name, receipts=tuple(receipts))


@pytest.mark.parametrize("later", ["bb", "ab", "ba"])
def test_versions_of_a_sent_evaluation_are_one_series_that_says_when_its_code_changed(later: str) -> None:
    (series,) = history_of("tokens_per_s", [evaluated_run(n, later if n >= 12 else "aa") for n in range(20)])
    assert [(change.ablation, change.difference) for change in series.changes] == [("abl_012", "other code, same data")]


def test_another_evaluation_is_another_series() -> None:
    runs = [evaluated_run(n, "aa", "other" if n >= 10 else "judge") for n in range(20)]
    assert len(history_of("tokens_per_s", runs)) == 2
