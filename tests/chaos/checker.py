"""The independent checker: reads the books of a run and returns a sentence for every problem.

It shares no code with the service: the rules are written a second time, from docs/glossary.md and docs/block-life.md.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from tests.chaos import history
from tests.chaos.books import Books, Row, Run

START: dict[str, set[str]] = {
    "ablation": {"queued"},
    "block": {"queued", "held"},
    "trial": {"queued"},
    "attempt": {"running"},
}
"""Initial states."""

OVER: dict[str, set[str]] = {
    "ablation": {"completed", "failed", "cancelled"},
    "block": {"done", "failed", "cancelled"},
    "trial": {"done", "failed", "cancelled"},
    "attempt": {"done", "broken", "expired"},
}
"""States with no work left."""

MOVES: dict[str, dict[str, set[str]]] = {
    "ablation": {
        "queued": {"running", "cancelling"},
        "running": {"cancelling", "completed", "failed"},
        "cancelling": {"cancelled", "completed"},
    },
    "block": {
        "held": {"queued", "cancelled"},
        "queued": {"running", "cancelled"},
        "running": {"queued", "done", "failed", "cancelled"},
    },
    "trial": {
        "queued": {"running", "done", "cancelled", "failed"},
        "running": {"queued", "done", "cancelled", "failed"},
    },
    "attempt": {"running": {"done", "broken", "expired"}, "expired": {"done"}},
}
"""An expired attempt becomes done if its result comes before another attempt claims the block."""

ATTEMPT_LIMITS: dict[str, int] = {
    "user_error": 1,
    "oom": 1,
    "numerics": 1,
    "gate_refused": 1,
    "cancelled": 1,
    "timeout": 2,
    "invalid_measurement": 3,
    "disturbed": 2,
    "no_receipt": 3,
    "infra_node": 5,
    "infra_control": 5,
    "preempted": 10,
}
"""Attempts at one block that may end by a class before the block fails."""

Rule = Callable[[Books], Iterator[str]]

LEAST_OVERLAP_S = 0.0


def problems(books: Books) -> list[str]:
    """Return every problem, after the name of its rule."""
    return [f"{rule.__name__}: {sentence}" for rule in RULES for sentence in rule(books)]


def canonical(value: Any) -> str:
    """Return the JSON that is digested: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sealed(document: Row) -> str:
    """Return the digest that a document with a field `digest` must carry."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return "sha256:" + hashlib.sha256(canonical(rest).encode()).hexdigest()


def accepted_is_stored_once(books: Books) -> Iterator[str]:
    """Every accepted submission is stored, once for each Idempotency-Key."""
    stored = {row["id"] for row in books.tables["ablations"]}
    for key, ablation in books.accepted.items():
        if ablation not in stored:
            yield f"ablation {ablation} was accepted under key {key} and is not in the database"
    for key, count in Counter(row["key"] for row in books.tables["idempotency"]).items():
        if count > 1:
            yield f"key {key} was answered {count} times"
    answered = {row["ablation_id"] for row in books.tables["idempotency"]}
    for ablation in sorted(stored - answered):
        yield f"ablation {ablation} belongs to no Idempotency-Key"


def everything_ends(books: Books) -> Iterator[str]:
    """After the faults all ablations end, and the outbox is empty."""
    for row in books.tables["ablations"]:
        if row["state"] not in OVER["ablation"]:
            yield f"ablation {row['id']} is still {row['state']}"
    for row in books.tables["outbox"]:
        yield f"outbox row {row['kind']} of {row['key']} is left after {row['tries']} tries: {row['last_error']}"


def plan_is_stored_whole(books: Books) -> Iterator[str]:
    """Every block and trial of the plan has exactly one row, in the planned order."""
    for row in books.tables["ablations"]:
        plan = json.loads(row["plan"])
        planned = [(b["index"], b["seed"], tuple(b["order"])) for b in plan["blocks"]]
        blocks = sorted(books.of("blocks", ablation_id=row["id"]), key=lambda block: block["index"])
        if [(b["index"], b["seed"], tuple(json.loads(b["order"]))) for b in blocks] != planned:
            yield f"the blocks of {row['id']} are not those of its plan"
        arms = sorted((t["block_index"], t["position"], t["arm"]) for t in books.of("trials", ablation_id=row["id"]))
        if arms != sorted((index, place, arm) for index, _, order in planned for place, arm in enumerate(order)):
            yield f"the trials of {row['id']} are not those of its plan"


def ended_ablations_add_up(books: Books) -> Iterator[str]:
    """An ended ablation has no open part, true counters, and the right state."""
    for row in books.tables["ablations"]:
        if row["state"] not in OVER["ablation"]:
            continue
        blocks, trials = (books.of(name, ablation_id=row["id"]) for name in ("blocks", "trials"))
        for kind, parts in (("block", blocks), ("trial", trials)):
            for part in parts:
                if part["state"] not in OVER[kind]:
                    yield f"{kind} {part['id']} of {row['id']}, which is {row['state']}, is {part['state']}"
        states = Counter(block["state"] for block in blocks)
        counters = {name.removeprefix("blocks_"): row[name] for name in row if name.startswith("blocks_")}
        if counters != {**{state: states[state] for state in counters}, "planned": len(blocks)}:
            yield f"{row['id']} counts blocks as {counters}, there are {dict(states)}"
        done = sum(trial["state"] == "done" for trial in trials)
        if row["trials_done"] != done or row["trials_planned"] != len(trials):
            yield f"{row['id']} counts {row['trials_done']} of {row['trials_planned']} trials, there are {done} done"
        yield from _state_fits(row, states, books)


def _state_fits(row: Row, states: Counter[str], books: Books) -> Iterator[str]:
    asked_for = row["id"] in books.cancelled
    if row["state"] == "cancelled" and (not asked_for or states["done"] == sum(states.values())):
        yield f"{row['id']} is cancelled with blocks {dict(states)}; somebody asked for it: {asked_for}"
    if row["state"] == "completed" and not states["done"]:
        yield f"{row['id']} is completed without a finished block"
    if (
        row["state"] == "completed"
        and states["cancelled"]
        and not json.loads(row["spec_text"])["design"]["blocks"].get("looks")
    ):
        yield f"{row['id']} is completed, and blocks of it were cancelled"


def one_receipt_for_every_counted_trial(books: Books) -> Iterator[str]:
    """Every trial of a finished block has one receipt, from the attempt that finished it; no other trial has one."""
    attempts = {row["id"]: row for row in books.tables["attempts"]}
    blocks = {row["id"]: row for row in books.tables["blocks"]}
    receipts: dict[str, list[Row]] = defaultdict(list)
    for row in books.tables["receipts"]:
        receipts[row["trial_id"]].append(row)
    for trial in books.tables["trials"]:
        block = blocks.get(trial["block_id"], {"id": trial["block_id"], "state": "missing", "attempt_id": None})
        own = receipts.pop(trial["id"], [])
        if len(own) != (block["state"] == "done"):
            yield f"trial {trial['id']} of block {block['id']} ({block['state']}) has {len(own)} receipts"
        for row in own:
            yield from _receipt_fits(row, trial, block, attempts.get(row["attempt_id"]))
    for trial_id in receipts:
        yield f"a receipt belongs to trial {trial_id}, which nobody planned"


def _receipt_fits(row: Row, trial: Row, block: Row, attempt: Row | None) -> Iterator[str]:
    where, content = f"the receipt of {trial['id']}", json.loads(row["payload"])
    if attempt is None or attempt["state"] != "done" or attempt["block_id"] != block["id"]:
        yield f"{where} is of attempt {row['attempt_id']}, which did not finish block {block['id']}"
    if row["attempt_id"] != block["attempt_id"]:
        yield f"{where} is of {row['attempt_id']}, the block was finished by {block['attempt_id']}"
    if not content["digest"] == row["digest"] == trial["receipt_digest"] == sealed(content):
        yield f"{where} does not carry the digest of its content everywhere"
    ids = content["ids"]
    expected = {
        "ablation": row["ablation_id"],
        "block": block["id"],
        "trial": trial["id"],
        "attempt": row["attempt_id"],
    }
    if {name: ids[name] for name in expected} != expected or content["arm"] != trial["arm"]:
        yield f"{where} is of another trial by its ids: {ids}, arm {content['arm']}"


def attempts_follow_each_other(books: Books) -> Iterator[str]:
    """A block's attempts have numbers without a gap and different tokens; at most one finished it, none is open."""
    by_block: dict[str, list[Row]] = defaultdict(list)
    for row in books.tables["attempts"]:
        by_block[row["block_id"]].append(row)
    for block in books.tables["blocks"]:
        tried = sorted(by_block[block["id"]], key=lambda row: row["number"])
        numbers = [row["number"] for row in tried]
        if numbers != list(range(1, block["attempt_no"] + 1)):
            yield f"block {block['id']} had attempts {numbers}, it counts {block['attempt_no']}"
        ended = Counter(row["state"] for row in tried)
        if ended["done"] != (block["state"] == "done"):
            yield f"block {block['id']} is {block['state']} with attempts {dict(ended)}"
        if ended["running"] > (block["state"] == "running"):
            yield f"block {block['id']} is {block['state']} and has {ended['running']} open attempts"
        if not books.clock_was_set:
            yield from _in_time(block, tried)
    for token, count in Counter(row["token"] for row in books.tables["attempts"]).items():
        if count > 1 and token is not None and not str(token).isdigit():
            yield f"{count} attempts have the fencing token {token}"


def _in_time(block: Row, tried: list[Row]) -> Iterator[str]:
    for earlier, later in pairwise(tried):
        if earlier["ended_at"] is None or later["started_at"] < earlier["ended_at"] - 0.002:
            yield f"block {block['id']}: attempt {later['number']} began before attempt {earlier['number']} had ended"


def every_move_is_allowed(books: Books) -> Iterator[str]:
    """The events of each row form one chain of allowed moves that ends in its state."""
    now = {row["id"]: row["state"] for name in START for row in books.tables[f"{name}s"]}
    state: dict[str, str] = {}
    for event in sorted(books.tables["events"], key=lambda row: row["seq"]):
        kind, _, what = event["kind"].partition(".")
        if what != "state":
            continue
        subject, old, new = event["subject"], event["old"], event["new"]
        before = state.get(subject)
        if old is not None and old != before and not (before is None and old in START[kind]):
            yield f"{kind} {subject} moved from {old} to {new} while it was {before} (event {event['seq']})"
        if old is not None and new not in MOVES[kind].get(old, ()):
            yield f"{kind} {subject} moved from {old} to {new}, which is forbidden (event {event['seq']})"
        state[subject] = new
    for subject, last in state.items():
        if now.get(subject) != last:
            yield f"{subject} is {now.get(subject)}, its last event says {last}"


def failed_blocks_used_their_attempts_up(books: Books) -> Iterator[str]:
    """A block fails only after one failure class has used up its attempts."""
    for block in books.of("blocks", state="failed"):
        classes = Counter(row["failure_class"] for row in books.of("attempts", block_id=block["id"]))
        if not any(count >= ATTEMPT_LIMITS[name] for name, count in classes.items() if name):
            yield f"block {block['id']} failed after {dict(classes)}"


def verdicts_use_what_counts(books: Books) -> Iterator[str]:
    """A verdict's means and counts equal those of the stored receipts, its broken attempts those of the database."""
    for row in books.tables["ablations"]:
        if row["state"] in ("completed", "failed") and row["verdict"] is None:
            yield f"{row['id']} is {row['state']} and has no verdict"
        if row["verdict"] is not None:
            yield from _verdict_fits(row, json.loads(row["verdict"]), books)


def _verdict_fits(row: Row, verdict: Row, books: Books) -> Iterator[str]:
    if verdict["digest"] != sealed(verdict):
        yield f"the verdict of {row['id']} does not carry its own digest"
    by_arm: dict[str, list[Row]] = {arm: [] for arm in verdict["arms"]}
    for receipt in books.of("receipts", ablation_id=row["id"]):
        content = json.loads(receipt["payload"])
        by_arm[content["arm"]].append(content)
    for arm, judged in verdict["arms"].items():
        outcomes = Counter(content["outcome"] for content in by_arm[arm])
        if judged["outcomes"] != dict(outcomes):
            yield f"the verdict of {row['id']} counts {arm} as {judged['outcomes']}, stored are {dict(outcomes)}"
        speeds = [c["summary"]["tokens_per_s"] for c in by_arm[arm] if c["outcome"] == "measured"]
        mean = math.fsum(speeds) / len(speeds) if speeds else None
        if mean != judged["tokens_per_s"]:
            yield f"the verdict of {row['id']} has {judged['tokens_per_s']} tokens/s for {arm}, its receipts {mean}"
    yield from _attempts_fit(row, verdict, books)


def _attempts_fit(row: Row, verdict: Row, books: Books) -> Iterator[str]:
    index = {block["id"]: block["index"] for block in books.of("blocks", ablation_id=row["id"])}
    broken = Counter(
        (index[attempt["block_id"]], attempt["number"], attempt["failure_class"])
        for attempt in books.tables["attempts"]
        if attempt["block_id"] in index and attempt["state"] in ("broken", "expired")
    )
    named = Counter((a["block_index"], a["number"], a["failure_class"]) for a in verdict["circumstances"]["attempts"])
    if named != broken:
        wrong = f"{named - broken}, {broken - named}"
        yield f"the verdict of {row['id']} names other broken attempts than the database: {wrong}"


def receipts_on_nodes_agree(books: Books) -> Iterator[str]:
    """A node's receipt of a counted attempt is the stored one; its receipt of a lost attempt is not stored."""
    stored = {f"{row['attempt_id']}/{row['trial_id']}": row["digest"] for row in books.tables["receipts"]}
    for place, content in books.on_nodes.items():
        if place in stored and stored[place] != content["digest"]:
            yield f"the node's receipt of {place} is another one than the stored one"
        if place not in stored and content["digest"] in stored.values():
            yield f"the receipt of the lost attempt {place} is stored for another one"


def never_two_trainers_on_one_device(books: Books) -> Iterator[str]:
    """No two trainers of one node were alive at the same time, except those of one block that runs in slices."""
    sliced = _sliced_attempts(books)
    by_node: dict[str, list[Any]] = defaultdict(list)
    for span in sorted(books.spans, key=lambda span: span.began):
        for earlier in by_node[span.node][-8:]:
            together = span.overlaps(earlier)
            by_turns = span.attempt == earlier.attempt and span.attempt in sliced and span.trial != earlier.trial
            if together > LEAST_OVERLAP_S and span.pid != earlier.pid and not by_turns:
                both = f"{earlier.attempt} and {span.attempt}"
                yield f"{span.node}: trainers of {both} lived together for {together:.2f} s"
        by_node[span.node].append(span)


def _sliced_attempts(books: Books) -> set[str]:
    """Return the attempts of ablations with slices."""
    asked = {
        row["id"]
        for row in books.tables["ablations"]
        if json.loads(row["spec_text"])["workload"].get("steps", {}).get("slice")
    }
    blocks = {row["id"] for row in books.tables["blocks"] if row["ablation_id"] in asked}
    return {row["id"] for row in books.tables["attempts"] if row["block_id"] in blocks}


def trainers_of_a_sliced_block_run_by_turns(books: Books) -> Iterator[str]:
    """No two measured trials of one sliced block made a step at the same time."""
    by_attempt: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    sliced = _sliced_attempts(books)
    for row in books.tables["receipts"]:
        content = json.loads(row["payload"])
        if row["attempt_id"] in sliced and content["outcome"] == "measured":
            start = content.get("training_began_s")
            if start is None:
                yield f"the receipt of {row['trial_id']}, which ran in slices, does not say when it began"
                continue
            steps = ((start + step["began_s"], start + step["ended_s"], row["trial_id"]) for step in content["steps"])
            by_attempt[row["attempt_id"]] += steps
    for attempt, steps in by_attempt.items():
        for earlier, later in pairwise(sorted(steps)):
            if later[0] < earlier[1] - 1e-6:
                yield f"{attempt}: trials {earlier[2]} and {later[2]} made a step at the same time"


def never_two_trainers_of_one_block(books: Books) -> Iterator[str]:
    """No two attempts at one block had a living trainer at the same time, unless the service's clock was set."""
    if books.clock_was_set:
        return
    block_of = {row["id"]: row["block_id"] for row in books.tables["attempts"]}
    by_block: dict[str, list[Any]] = defaultdict(list)
    for span in books.spans:
        by_block[block_of.get(span.attempt, span.attempt)].append(span)
    for block, spans in by_block.items():
        for number, one in enumerate(spans):
            for other in spans[number + 1 :]:
                together = one.overlaps(other)
                if one.attempt != other.attempt and together > LEAST_OVERLAP_S:
                    where = f"{one.attempt} on {one.node} and {other.attempt} on {other.node}"
                    yield f"block {block}: trainers of {where} lived together for {together:.2f} s"


def nobody_pays_for_more_time_than_passed(books: Books) -> Iterator[str]:
    """No ablation is charged for more time than its nodes had, also after a step of a clock."""
    most = books.lasted_s * max(1, len(books.tables["nodes"]))
    for row in books.tables["ablations"]:
        if not 0.0 <= row["device_s"] <= most:
            yield f"{row['id']} is charged for {row['device_s']:.1f} s; its nodes had {most:.1f} s"


_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_METRICS = ("tokens_per_s", "loss_step1", "loss_final")


def mlflow_equals_the_database(books: Books) -> Iterator[str]:
    """MLflow has one complete run for every ablation and every ended trial, with the numbers of its receipt."""
    by_ablation: dict[str, list[Run]] = defaultdict(list)
    for run in books.runs:
        by_ablation[run.tags.get("ablation.id", "nobody")].append(run)
    for row in books.tables["ablations"]:
        if row["state"] in _STATUS:
            yield from _ablation(row, by_ablation.pop(row["id"], []), books)
    for ablation, runs in by_ablation.items():
        yield f"MLflow has {len(runs)} runs of {ablation}, which is not over or does not exist"


def _ablation(row: Row, runs: list[Run], books: Books) -> Iterator[str]:
    named: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        named[run.tags.get("ablation.run", "nameless")].append(run)
        if "ablation.projected" not in run.tags:
            yield f"run {run.id} of {row['id']} was never completed"
    expected = {"parent"} | {f"{trial['id']}/{attempt}" for trial, attempt in _projected(row, books)}
    expected |= {f"arm/{arm}" for arm in _judged(row)}
    for name in expected | named.keys():
        if len(named[name]) != (name in expected):
            yield f"MLflow has {len(named[name])} runs {name} of {row['id']}; {int(name in expected)} belongs there"
    for parent in named["parent"]:
        yield from _parent(row, parent)
    receipts = {f"{r['trial_id']}/{r['attempt_id']}": r for r in books.of("receipts", ablation_id=row["id"])}
    for arm, verdict in _judged(row).items():
        for run in named[f"arm/{arm}"]:
            yield from _arm(row, arm, verdict, run)
    for name, receipt in receipts.items():
        for run in named[name]:
            yield from _child(run, receipt)


def _projected(row: Row, books: Books) -> list[tuple[Row, str]]:
    """Return the trials that MLflow shows, with their attempts: the ended ones that have an attempt."""
    attempts = {block["id"]: block["attempt_id"] for block in books.tables["blocks"]}
    return [
        (trial, attempt)
        for trial in books.of("trials", ablation_id=row["id"])
        for attempt in [attempts.get(trial["block_id"])]
        if attempt is not None and trial["state"] in ("done", "failed", "cancelled")
    ]


def _parent(row: Row, run: Run) -> Iterator[str]:
    if run.id != row["mlflow_run_id"] or run.status != _STATUS[row["state"]]:
        state = f"{row['state']}, run {row['mlflow_run_id']}"
        yield f"the parent run of {row['id']} is {run.id}, {run.status}; stored: {state}"
    if row["verdict"] is None:
        return
    verdict: dict[str, Any] = json.loads(row["verdict"])
    tags = {name: run.tags.get(f"ablation.{name}") for name in ("verdict_digest", "state")}
    if tags != {"verdict_digest": verdict["digest"], "state": row["state"]}:
        yield f"the parent run of {row['id']} says {tags}"


def _judged(row: Row) -> dict[str, str | None]:
    """Return the verdict on every arm; None for the baseline."""
    if row["verdict"] is None:
        return {}
    verdict: dict[str, Any] = json.loads(row["verdict"])
    return {verdict["baseline"]: None} | {one["arm"]: one["verdict"] for one in verdict["variants"]}


def _arm(row: Row, arm: str, verdict: str | None, run: Run) -> Iterator[str]:
    tag = run.tags.get("ablation.verdict")
    if tag != verdict:
        yield f"the run of arm {arm} of {row['id']} says {tag}, the verdict {verdict}"


def _child(run: Run, receipt: Row) -> Iterator[str]:
    content = json.loads(receipt["payload"])
    if run.tags.get("ablation.receipt_digest") != receipt["digest"]:
        yield f"run {run.id} is of receipt {run.tags.get('ablation.receipt_digest')}, stored is {receipt['digest']}"
    if run.receipt is None or json.loads(run.receipt) != content:
        yield f"the artefact receipt.json of run {run.id} is not the stored receipt"
    summary = content["summary"] or {}
    for name in _METRICS:
        if summary.get(name) != run.metrics.get(name):
            yield f"run {run.id} has {name} {run.metrics.get(name)}, its receipt {summary.get(name)}"


RULES: tuple[Rule, ...] = (
    accepted_is_stored_once,
    everything_ends,
    plan_is_stored_whole,
    ended_ablations_add_up,
    one_receipt_for_every_counted_trial,
    attempts_follow_each_other,
    every_move_is_allowed,
    failed_blocks_used_their_attempts_up,
    verdicts_use_what_counts,
    receipts_on_nodes_agree,
    never_two_trainers_on_one_device,
    trainers_of_a_sliced_block_run_by_turns,
    never_two_trainers_of_one_block,
    nobody_pays_for_more_time_than_passed,
    *history.RULES,
    mlflow_equals_the_database,
)
