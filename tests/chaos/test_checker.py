"""The checker of the chaos runs: honest books have no problem, and every kind of doctored books has one."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api_stack import Api, receipts_of, running_api
from tests.chaos.books import Books, Call, Run
from tests.chaos.checker import RULES, problems, sealed
from tests.chaos.clocks import Clocks
from tests.chaos.disks import SmallDisk
from tests.chaos.ledger import Ledger, books_of, settle
from tests.chaos.lights import DARK, RED, Light, Probe, table, wrong_greens
from tests.chaos.trainers import Span


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """Books of a real service: one ablation with a broken attempt, one that was cancelled in the middle."""
    with running_api("sqlite", tmp_path_factory.mktemp("books")) as api:
        ledger = Ledger()
        node = api.register()
        first = api.submit(key="first")["id"]
        _break_and_finish(api, node)
        second = api.submit(key="second")["id"]
        block = api.claim(node)
        assert block is not None
        assert api.attempt(block, "report", receipts=receipts_of(block, node)).status_code == 200
        assert api.cancel(second).status_code == 202
        settle(api.store, ledger)
        books = books_of(api.store, ledger)
    books.spans = list(_spans(books.tables["receipts"]))
    books.accepted, books.cancelled = {"first": first, "second": second}, {second}
    books.calls, books.lasted_s = [*_calls(books), Call("cancel", second, 202, {}, {})], 600.0
    books.calls.append(Call("priority", first, 200, {"priority": 50}, {}))
    return books


def _calls(books: Books) -> Iterator[Call]:
    """Yield what the worker sent, and how it was answered."""
    digests = {
        row["id"]: [r["digest"] for r in books.of("receipts", attempt_id=row["id"])] for row in books.tables["attempts"]
    }
    for row in books.tables["attempts"]:
        told = {"token": row["token"], "block_id": row["block_id"]}
        yield Call("claim", row["id"], 200, {"digests": []}, told)
        failure = {"failure_class": row["failure_class"]} if row["state"] == "broken" else {}
        yield Call("report", row["id"], 200, {"digests": digests[row["id"]], **failure}, {})
    for row in books.tables["log_chunks"]:
        logs = [{"trial_id": row["trial_id"], "offset": row["offset"], "text": row["data"].decode()}]
        yield Call("heartbeat", row["attempt_id"], 200, {"digests": [], "logs": logs}, {})


def _break_and_finish(api: Api, node: str) -> None:
    block = api.claim(node)
    assert block is not None
    logs = [{"trial_id": block["trials"][0]["trial_id"], "offset": 0, "text": "step 1\n"}]
    assert api.attempt(block, "heartbeat", logs=logs).status_code == 200
    answer = api.attempt(block, "report", failure_class="infra_node", message="the disk is full")
    assert answer.json()["block_state"] == "queued"
    assert api.finish(node) == 6


def _call(books: Books, verb: str, **changes: Any) -> None:
    """Change the first call of a kind."""
    assert books.calls is not None
    number = next(number for number, call in enumerate(books.calls) if call.verb == verb)
    books.calls[number] = dataclasses.replace(books.calls[number], **changes)


def _only(books: Books, verb: str, **changes: Any) -> None:
    """Change every call of a kind."""
    books.calls = [dataclasses.replace(call, **changes) if call.verb == verb else call for call in books.calls or ()]


def _spans(receipts: list[dict[str, Any]]) -> Iterator[Span]:
    for number, row in enumerate(receipts):
        yield Span("node-a", row["attempt_id"], row["trial_id"], 1000 + number, 2.0 * number, 2.0 * number + 1)


def test_honest_books_have_no_problem(honest: Books) -> None:
    assert problems(honest) == []
    assert {row["state"] for row in honest.tables["ablations"]} == {"completed", "cancelled"}
    assert {row["state"] for row in honest.tables["attempts"]} == {"done", "broken"}


Doctoring = Callable[[Books], Any]


def _first(books: Books, table: str, **values: Any) -> dict[str, Any]:
    return books.of(table, **values)[0]


def _done(books: Books) -> dict[str, Any]:
    return _first(books, "ablations", state="completed")


def _again(books: Books, table: str, **changes: Any) -> None:
    books.tables[table].append({**books.tables[table][-1], **changes})


def _drop(books: Books, table: str) -> None:
    books.tables[table].pop(0)


def _lost_receipt(books: Books) -> None:
    """Let a counted receipt be that of the broken attempt."""
    lost = _first(books, "attempts", state="broken")
    for row in books.tables["receipts"]:
        if row["trial_id"] in {trial["id"] for trial in books.of("trials", block_id=lost["block_id"])}:
            row["attempt_id"] = lost["id"]


def _edited(books: Books, *, again: bool) -> None:
    row = books.tables["receipts"][0]
    content = json.loads(row["payload"])
    content["wall_s"] += 1.0
    if again:
        content["digest"] = row["digest"] = sealed(content)
        _first(books, "trials", id=row["trial_id"])["receipt_digest"] = row["digest"]
    row["payload"] = json.dumps(content)


def _verdict(books: Books, change: Callable[[dict[str, Any]], Any], *, seal: bool = True) -> None:
    row = _done(books)
    verdict = json.loads(row["verdict"])
    change(verdict)
    verdict["digest"] = sealed(verdict) if seal else verdict["digest"]
    row["verdict"] = json.dumps(verdict)


def _other_mean(verdict: dict[str, Any]) -> None:
    verdict["arms"]["baseline"]["tokens_per_s"] *= 1.0001


def _move(books: Books, **changes: Any) -> None:
    event = next(row for row in books.tables["events"] if row["kind"] == "block.state" and row["new"] == "done")
    event.update(changes)


def _run_of(books: Books, *, parent: bool) -> Run:
    return next(run for run in books.runs if (run.tags["ablation.run"] == "parent") == parent and _is_done(run))


def _arm_of(books: Books, arm: str) -> Run:
    return next(run for run in books.runs if run.tags["ablation.run"] == f"arm/{arm}")


def _asks_for_slices(books: Books) -> None:
    """Let every ablation have asked for slices."""
    for row in books.tables["ablations"]:
        spec = json.loads(row["spec_text"])
        spec["workload"].setdefault("steps", {})["slice"] = 2
        row["spec_text"] = json.dumps(spec)


def _ran_in_slices(books: Books, *, at_once: bool) -> None:
    """Let every block have run in slices; trials of one block either all at once, or one behind the other."""
    _asks_for_slices(books)
    for number, row in enumerate(books.tables["receipts"]):
        content = json.loads(row["payload"])
        content |= {"training_began_s": 5.0 if at_once else 1000.0 * number, "waited_s": 0.0}
        row["payload"] = json.dumps(content)


def _lived_together(books: Books) -> None:
    """Let all trainers of an attempt have lived until its last one ended."""
    for span in books.spans:
        span.seen = max(other.seen for other in books.spans if other.attempt == span.attempt)


def _is_done(run: Run) -> bool:
    return run.status == "FINISHED"


DOCTORED: dict[str, tuple[str, Doctoring]] = {
    "an accepted ablation is gone": ("accepted_is_stored_once", lambda b: b.accepted.update(third="abl_gone")),
    "a key was answered twice": ("accepted_is_stored_once", lambda b: _again(b, "idempotency", ablation_id="abl_x")),
    "an ablation without a key": ("accepted_is_stored_once", lambda b: _drop(b, "idempotency")),
    "an ablation goes on": ("everything_ends", lambda b: _done(b).update(state="running")),
    "work is left over": (
        "everything_ends",
        lambda b: b.tables["outbox"].append({"kind": "judge", "key": "abl_x", "tries": 9, "last_error": "no"}),
    ),
    "a block is missing": ("plan_is_stored_whole", lambda b: _drop(b, "blocks")),
    "a trial is there twice": ("plan_is_stored_whole", lambda b: _again(b, "trials")),
    "a block ran another order": ("plan_is_stored_whole", lambda b: b.tables["blocks"][0].update(order='["baseline"]')),
    "a trial is open": ("ended_ablations_add_up", lambda b: b.tables["trials"][0].update(state="running")),
    "a counter is wrong": ("ended_ablations_add_up", lambda b: _done(b).update(blocks_done=5)),
    "trials are counted wrong": ("ended_ablations_add_up", lambda b: _done(b).update(trials_done=17)),
    "cancelled by nobody": ("ended_ablations_add_up", lambda b: b.cancelled.clear()),
    "a receipt is missing": ("one_receipt_for_every_counted_trial", lambda b: _drop(b, "receipts")),
    "a receipt is there twice": ("one_receipt_for_every_counted_trial", lambda b: _again(b, "receipts")),
    "a receipt of nobody's trial": (
        "one_receipt_for_every_counted_trial",
        lambda b: _again(b, "receipts", trial_id="trl_x"),
    ),
    "a lost attempt's receipt counts": ("one_receipt_for_every_counted_trial", _lost_receipt),
    "a receipt was edited": ("one_receipt_for_every_counted_trial", lambda b: _edited(b, again=False)),
    "a receipt was edited and sealed again": ("receipts_on_nodes_agree", lambda b: _edited(b, again=True)),
    "an attempt is missing": ("attempts_follow_each_other", lambda b: _drop(b, "attempts")),
    "an attempt is open": (
        "attempts_follow_each_other",
        lambda b: _first(b, "attempts", state="broken").update(state="running"),
    ),
    "two attempts finished a block": (
        "attempts_follow_each_other",
        lambda b: _first(b, "attempts", state="broken").update(state="done"),
    ),
    "an attempt began too early": (
        "attempts_follow_each_other",
        lambda b: _first(b, "attempts", number=2).update(started_at=0.0),
    ),
    "a token came twice": (
        "attempts_follow_each_other",
        lambda b: [row.update(token="x" * 22) for row in b.tables["attempts"][:2]],
    ),
    "a forbidden move": ("every_move_is_allowed", lambda b: _move(b, old="queued")),
    "a move from another state": ("every_move_is_allowed", lambda b: _move(b, old="held")),
    "a move is not told": ("every_move_is_allowed", lambda b: _move(b, kind="trial.progress")),
    "a block failed too early": (
        "failed_blocks_used_their_attempts_up",
        lambda b: b.tables["blocks"][0].update(state="failed"),
    ),
    "no verdict": ("verdicts_use_what_counts", lambda b: _done(b).update(verdict=None)),
    "another mean": ("verdicts_use_what_counts", lambda b: _verdict(b, _other_mean)),
    "a broken attempt is not named": (
        "verdicts_use_what_counts",
        lambda b: _verdict(b, lambda verdict: verdict["circumstances"]["attempts"].clear()),
    ),
    "trials are counted that are not there": (
        "verdicts_use_what_counts",
        lambda b: _verdict(b, lambda verdict: verdict["arms"]["baseline"]["outcomes"].update(measured=7)),
    ),
    "an edited verdict": ("verdicts_use_what_counts", lambda b: _verdict(b, _other_mean, seal=False)),
    "two trainers on one device": (
        "never_two_trainers_on_one_device",
        lambda b: b.spans.append(Span("node-a", "att_x", "trl_x", 1, 0.5, 0.9)),
    ),
    "trainers of an attempt together without slices": ("never_two_trainers_on_one_device", _lived_together),
    "one trial of a block in slices twice": (
        "never_two_trainers_on_one_device",
        lambda b: [_ran_in_slices(b, at_once=False), b.spans.append(dataclasses.replace(b.spans[0], pid=1))],
    ),
    "trainers of two attempts in slices": (
        "never_two_trainers_on_one_device",
        lambda b: [
            _ran_in_slices(b, at_once=False),
            b.spans.append(dataclasses.replace(b.spans[0], pid=1, attempt="att_x")),
        ],
    ),
    "slices without a clock": ("trainers_of_a_sliced_block_run_by_turns", lambda b: _asks_for_slices(b)),
    "two trials in slices at once": (
        "trainers_of_a_sliced_block_run_by_turns",
        lambda b: _ran_in_slices(b, at_once=True),
    ),
    "two trainers of one block": (
        "never_two_trainers_of_one_block",
        lambda b: b.spans.append(Span("node-b", _first(b, "attempts", state="broken")["id"], "trl_x", 1, 0.5, 0.9)),
    ),
    "a claim shows another token": (
        "answered_is_visible",
        lambda b: _call(b, "claim", told={"token": "x" * 22, "block_id": "blk_x"}),
    ),
    "a claim of no attempt": ("answered_is_visible", lambda b: _call(b, "claim", subject="att_x")),
    "a taken report is of a broken attempt": (
        "answered_is_visible",
        lambda b: _first(b, "attempts", state="done").update(state="broken"),
    ),
    "a taken receipt is not stored": (
        "answered_is_visible",
        lambda b: _call(b, "report", sent={"digests": ["sha256:x"], "failure_class": "infra_node"}),
    ),
    "a log was cut": ("sent_logs_are_stored", lambda b: b.tables["log_chunks"][0].update(data=b"step")),
    "a log is gone": ("sent_logs_are_stored", lambda b: b.tables["log_chunks"].clear()),
    "a refused report counts": ("refused_changed_nothing", lambda b: _only(b, "report", status=409)),
    "a report that nobody sent": ("refused_changed_nothing", lambda b: _only(b, "report", subject="att_x")),
    "an accepted cancellation is lost": (
        "people_see_what_they_did",
        lambda b: _call(b, "cancel", subject=_done(b)["id"]),
    ),
    "a refused cancellation counts": ("people_see_what_they_did", lambda b: _call(b, "cancel", status=409)),
    "an accepted priority is lost": (
        "people_see_what_they_did",
        lambda b: (b.calls or []).append(Call("priority", _done(b)["id"], 200, {"priority": 71}, {})),
    ),
    "a refused priority is stored": (
        "people_see_what_they_did",
        lambda b: [
            (b.calls or []).append(Call("priority", _done(b)["id"], 409, {"priority": 71}, {})),
            _done(b).update(priority=71),
        ],
    ),
    "a clock was charged": ("nobody_pays_for_more_time_than_passed", lambda b: _done(b).update(device_s=21_600.0)),
    "a run is missing": ("mlflow_equals_the_database", lambda b: b.runs.remove(_run_of(b, parent=False))),
    "a run is there twice": ("mlflow_equals_the_database", lambda b: b.runs.append(_run_of(b, parent=False))),
    "a run of a lost attempt": (
        "mlflow_equals_the_database",
        lambda b: _run_of(b, parent=False).tags.update({"ablation.run": "trl_x/att_x"}),
    ),
    "a half-written run": (
        "mlflow_equals_the_database",
        lambda b: _run_of(b, parent=False).tags.pop("ablation.projected"),
    ),
    "another number": ("mlflow_equals_the_database", lambda b: _run_of(b, parent=False).metrics.update(loss_final=1.0)),
    "another artefact": ("mlflow_equals_the_database", lambda b: setattr(_run_of(b, parent=False), "receipt", "{}")),
    "another word": (
        "mlflow_equals_the_database",
        lambda b: _arm_of(b, "psiv-on").tags.update({"ablation.verdict": "best"}),
    ),
    "a parent that nobody knows": ("mlflow_equals_the_database", lambda b: _done(b).update(mlflow_run_id="run-x")),
    "runs of nobody's ablation": (
        "mlflow_equals_the_database",
        lambda b: b.runs.append(Run("run-x", "FINISHED", {"ablation.id": "abl_x"}, {}, None)),
    ),
}


def test_trainers_of_one_attempt_may_live_together_where_they_run_by_turns(honest: Books) -> None:
    books = copy.deepcopy(honest)
    _ran_in_slices(books, at_once=False)
    _lived_together(books)
    found = {problem.partition(":")[0] for problem in problems(books)}
    assert not {rule for rule in found if "trainers" in rule}, "what was doctored shows elsewhere only"


@pytest.mark.parametrize("what", DOCTORED)
def test_doctored_books_are_found(honest: Books, what: str) -> None:
    rule, doctor = DOCTORED[what]
    books = copy.deepcopy(honest)
    doctor(books)
    assert rule in {problem.partition(":")[0] for problem in problems(books)}


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for rule, _ in DOCTORED.values()} == {rule.__name__ for rule in RULES}


def _probes(*, works_at: int | None = None, seconds: int = 10) -> list[Probe]:
    """Return one failed probe a second after one that works; `works_at` is the second of another one that works."""
    failing = [Probe("api", "writes", at, at + 0.5, at == works_at) for at in range(1, seconds)]
    return [Probe("api", "writes", 0.0, 0.5, works=True), *failing]


def _lights(*names: str) -> list[Light]:
    return [Light("api", at, at + 0.1, frozenset(names)) for at in range(10)]


@pytest.mark.parametrize("light", ["writes", RED, DARK])
def test_light_for_a_part_that_fails_is_right(light: str) -> None:
    assert list(wrong_greens(_probes(), _lights(light), lease_s=3.0)) == []
    row = table(_probes(), _lights(light), lease_s=3.0)["writes"]
    assert (row.outages, row.false_green) == (1, 0)


@pytest.mark.parametrize("light", [[], ["mlflow"]])
def test_green_light_for_a_part_that_fails_is_found(light: list[str]) -> None:
    lights = _lights(*light)
    assert len(list(wrong_greens(_probes(), lights, lease_s=3.0))) == 2  # at 8 and 9 s; the light may be late by 6
    assert table(_probes(), lights, lease_s=3.0)["writes"].false_green == 2
    assert not list(wrong_greens(_probes(seconds=7), lights, lease_s=3.0))
    assert not list(wrong_greens(_probes(works_at=5), lights, lease_s=3.0))


def test_light_for_a_part_that_works_is_counted() -> None:
    assert table(_probes(seconds=1), _lights("broker"), lease_s=3.0)["broker"].false_alarms == 10


def test_disk_without_power_keeps_what_was_synced(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk")
    if not disk.mounted:
        pytest.skip("nothing may be mounted here")
    try:
        with (disk.folder / "kept").open("w") as kept:
            kept.write("synced")
            kept.flush()
            os.fsync(kept.fileno())
        (disk.folder / "lost").write_text("not synced")
        disk.lose_power()
        assert sorted(path.name for path in disk.folder.iterdir()) == ["kept", "lost+found"]
        assert (disk.folder / "kept").read_text() == "synced"
        with disk.full() as is_full:
            assert is_full
            with pytest.raises(OSError, match="No space"):
                (disk.folder / "more").write_bytes(bytes(2**20))
            with (disk.folder / "kept").open("a") as kept:
                os.fsync(kept.fileno())  # the journal knows of the full disk now
        disk.lose_power()
        (disk.folder / "more").write_bytes(bytes(2**20))
    finally:
        disk.close()


def test_clock_of_a_process_is_set_while_it_runs(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    if not clocks.can_be_set:
        pytest.skip("there is no C compiler")
    code = "import time\nwhile input(): print(time.time(), time.monotonic(), flush=True)"
    environment = {**os.environ, **clocks.environment("one")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for shift_s in (0.0, 21_600.0, -7200.0):
            clocks.set("one", shift_s)
            process.stdin.write("?\n")
            process.stdin.flush()
            wall_s, monotonic_s = map(float, process.stdout.readline().split())
            assert abs(wall_s - time.time() - shift_s) < 10
            assert abs(monotonic_s - time.monotonic()) < 10
        process.stdin.write("\n")
