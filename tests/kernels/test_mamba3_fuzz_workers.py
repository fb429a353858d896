"""The fuzz's processes: what hangs or ends costs one problem, and nothing is lost when a run is killed."""

import math

import pytest

pytest.importorskip("tilelang")

from tests.kernels.fuzz import command, draws, results, workers
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.results import FuzzSetting, OutcomeStore
from tests.kernels.fuzz.workers import Compiled, FuzzPool
from tests.kernels.fuzz_answers import ENDS, HANGS, REFUSED, answer

FINE = 1
SETTING = FuzzSetting(command="fuzz", date="2026-11-22", device="1 x GPU", versions={"torch": "2"})


def several(*kinds):
    return tuple(ScanProblem(H=kind, seed=seed) for seed, kind in enumerate(kinds))


def outcomes(*problem_sets, size=1):
    with FuzzPool(answer, size) as pool:
        return [said for said in pool.outcomes(iter(problem_sets)) if said is not None]


def endings(said):
    return {(one.problem.seed, one.ending) for one in said if isinstance(one, FuzzOutcome)}


def test_every_problem_has_its_outcome_and_kernels_are_counted():
    said = outcomes(several(FINE, FINE, FINE), several(FINE), size=2)
    assert len([one for one in said if isinstance(one, FuzzOutcome)]) == 4
    assert [one for one in said if isinstance(one, Compiled)] == [Compiled(1, 2)] * 4


def test_a_set_whose_first_problem_is_refused_is_left_and_another_refusal_is_not():
    assert endings(outcomes(several(REFUSED, FINE))) == {(0, "refused")}
    assert endings(outcomes(several(FINE, REFUSED, FINE))) == {(0, "right"), (1, "refused"), (2, "right")}


def test_a_process_that_ends_costs_one_problem():
    assert endings(outcomes(several(FINE, ENDS, FINE))) == {(0, "right"), (1, "failed"), (2, "right")}


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setitem(workers.PATIENCE_S, "run", 2.0)
    found = outcomes(several(HANGS, FINE))
    assert endings(found) == {(0, "hung"), (1, "right")}


def stored(folder, *kinds):
    store = OutcomeStore(folder)
    for problem, ending in zip(several(*[FINE] * len(kinds)), kinds, strict=True):
        why = "" if ending == "right" else "rank is 3; allowed: 1, 2"
        worst = 2.0 if ending == "right" else math.nan
        store.add(FuzzOutcome(problem=problem, ending=ending, why=why, errors={"out": (1.0, worst)}))
    return store


def test_outcomes_outlive_the_run_that_was_killed_while_it_wrote(tmp_path):
    stored(tmp_path, "right", "wrong", "refused")
    with (tmp_path / results.LINES).open("a") as lines:
        lines.write('{"problem":{"S":7')
    assert [outcome.ending for outcome in OutcomeStore(tmp_path).outcomes] == ["right", "wrong", "refused"]


def test_the_page_shows_what_is_not_right_and_how_to_see_it_again(tmp_path):
    store = stored(tmp_path, "right", "wrong", "refused", "refused")
    found = results.summarised(store.outcomes, SETTING, 3.0, complete=True, kernels=(4, 5))
    text = store.write(found)
    assert found.endings == {"right": 1, "wrong": 1, "refused": 2}
    assert found.refusals == {"rank is #; allowed: #, #": 2}
    assert found.worst == {"out": (1.0, 2.0)}
    assert "2 problems ran, each twice: 1 right, 1 wrong. 2 were refused before anything was compiled." in text
    assert f"--only '{several(FINE, FINE)[1].line}'" in text
    assert (tmp_path / results.PAGE).read_text() == text


def test_a_run_confirms_what_is_not_right_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(draws, "sets", lambda seed, limits: iter([several(FINE, ENDS, FINE), several(FINE, FINE)]))
    arguments = command.parser("fuzz", "About.", count=4, out=tmp_path).parse_args(["--jobs", "1"])
    assert command.run(arguments, answer, draws.DrawLimits(), "none") == 1
    (bad,) = [outcome for outcome in OutcomeStore(tmp_path).outcomes if outcome.ending != "right"]
    assert (bad.problem.H, bad.ending, bad.alone) == (ENDS, "failed", "failed")
    said = capsys.readouterr()
    assert "failed: the process ended" in said.err
    assert "failed (alone: failed): the process ended" in said.out
    lines = (tmp_path / results.LINES).read_text()
    assert command.run(arguments, answer, draws.DrawLimits(), "none") == 1
    assert (tmp_path / results.LINES).read_text() == lines


def test_as_many_run_as_are_asked_for_though_pending_ones_are_refused(tmp_path, monkeypatch):
    drawn = [several(FINE), several(REFUSED, *[FINE] * 30), several(FINE, FINE, FINE), several(FINE)]
    drawn = [tuple(problem.model_copy(update={"B": 1 + at}) for problem in one) for at, one in enumerate(drawn)]
    monkeypatch.setattr(draws, "sets", lambda seed, limits: iter(drawn))
    arguments = command.parser("fuzz", "About.", count=4, out=tmp_path).parse_args(["--jobs", "3"])
    assert command.run(arguments, answer, draws.DrawLimits(), "none") == 0
    assert sum(outcome.ending == "right" for outcome in OutcomeStore(tmp_path).outcomes) == 4
    assert '"complete": true' in (tmp_path / "summary.json").read_text()
