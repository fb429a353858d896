"""A rule of the checker: MLflow has one parent run for every ablation and one child for every ended trial."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.books import Books, Row, Run

_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_METRICS = ("tokens_per_s", "loss_step1", "loss_final")


def mlflow_equals_the_database(books: Books) -> Iterator[str]:
    """Every run exists once, complete, with the numbers of its receipt; a lost attempt has none."""
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
    for arm, word in _judged(row).items():
        for run in named[f"arm/{arm}"]:
            yield from _arm(row, arm, word, run)
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
    """Return the verdict word of every arm of a verdict; None for the baseline."""
    if row["verdict"] is None:
        return {}
    verdict: dict[str, Any] = json.loads(row["verdict"])
    return {verdict["baseline"]: None} | {one["arm"]: one["verdict"] for one in verdict["variants"]}


def _arm(row: Row, arm: str, word: str | None, run: Run) -> Iterator[str]:
    tag = run.tags.get("ablation.verdict")
    if tag != word:
        yield f"the run of arm {arm} of {row['id']} says {tag}, the verdict {word}"


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
