"""What clients sent and what they were told: calls of workers and of people, and the rules that compare the books.

An answer with status 2xx is visible in the database afterwards. A call that was only ever answered with 4xx changed
nothing. A call without an answer, or with 5xx, may have done either.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.books import Books, Call, Row

VERBS = ("claim", "heartbeat", "report")
"""Calls of workers."""


class History:
    """The calls of workers, recorded by the proxies before them, and those of people."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Record a call."""
        with self._lock:
            self.calls.append(call)

    def note(self, request: bytes, answer: bytes) -> None:
        """Record a worker's call; an empty answer is none."""
        line, _, rest = request.partition(b"\r\n")
        path, _, verb = line.split(b" ")[1].decode().rpartition(":")
        if verb not in VERBS:
            return
        sent = json.loads(rest.partition(b"\r\n\r\n")[2])
        status = int(answer.split(b" ", 2)[1]) if answer else 0
        body = _body(answer) if status == 200 else {}
        attempt = body.get("attempt_id") if verb == "claim" else path.rpartition("/")[2]
        self.add(Call(verb=verb, subject=attempt or "", status=status, sent=_shortened(sent), answer=body))


def _body(answer: bytes) -> Row:
    body: Row = json.loads(answer.partition(b"\r\n\r\n")[2])
    return body


def _shortened(message: Row) -> Row:
    digests = [receipt["digest"] for receipt in message.get("receipts", [])]
    kept = {name: message[name] for name in ("failure_class", "logs", "claim_id", "token") if message.get(name)}
    return kept | {"digests": digests}


def answered_is_visible(books: Books) -> Iterator[str]:
    """Every call of a worker that was answered 200 is in the database."""
    attempts = {row["id"]: row for row in books.tables["attempts"]}
    stored: dict[str, set[str]] = defaultdict(set)
    for row in books.tables["receipts"]:
        stored[row["attempt_id"]].add(row["digest"])
    for call in books.calls or ():
        if call.status != 200 or call.verb not in VERBS:
            continue
        attempt = attempts.get(call.subject)
        where = f"{call.verb} of {call.subject} was answered 200"
        if attempt is None:
            yield f"{where}, and there is no such attempt"
        elif call.verb == "claim" and (attempt["token"], attempt["block_id"]) != (
            call.answer["token"],
            call.answer["block_id"],
        ):
            yield f"{where} with {call.answer['token']} and {call.answer['block_id']}, stored is {attempt['block_id']}"
        elif call.verb == "report" and attempt["state"] != _led_to(call):
            yield f"{where}; it led to {_led_to(call)}, and the attempt is {attempt['state']}"
        elif not stored[call.subject] >= set(call.sent["digests"]):
            yield f"{where}, and receipts of it are not stored"


def _led_to(call: Call) -> str:
    return "broken" if call.sent.get("failure_class") else "done"


def sent_logs_are_stored(books: Books) -> Iterator[str]:
    """The log text of every heartbeat that was answered 200 is stored."""
    stored: dict[tuple[str, str], bytes] = defaultdict(bytes)
    for row in sorted(books.tables["log_chunks"], key=lambda row: row["offset"]):
        stored[row["trial_id"], row["attempt_id"]] += bytes(row["data"])
    for call in books.calls or ():
        if call.verb == "heartbeat" and call.status == 200:
            for chunk in call.sent.get("logs", []):
                log = stored[chunk["trial_id"], call.subject]
                text = chunk["text"].encode()
                if log[chunk["offset"] : chunk["offset"] + len(text)] != text:
                    yield f"bytes {chunk['offset']} ff. of the log of {chunk['trial_id']} were taken and are not stored"


def refused_changed_nothing(books: Books) -> Iterator[str]:
    """No attempt ended by calls that were all refused with 4xx."""
    if books.calls is None:
        return
    statuses: dict[tuple[str, str], list[int]] = defaultdict(list)
    for call in books.calls:
        if call.verb == "report":
            statuses[call.subject, _led_to(call)].append(call.status)
    for row in books.tables["attempts"]:
        if row["state"] in ("done", "broken"):
            answers = statuses[row["id"], row["state"]]
            if not answers:
                yield f"attempt {row['id']} is {row['state']}, and nobody sent that"
            elif all(400 <= status < 500 for status in answers):
                yield f"attempt {row['id']} is {row['state']} by calls that were refused with {sorted(set(answers))}"


def people_see_what_they_did(books: Books) -> Iterator[str]:
    """An accepted cancellation and priority are stored, a refused one is not."""
    calls: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in books.calls or ():
        calls[call.verb, call.subject].append(call)
    for row in books.tables["ablations"]:
        yield from _cancelled_as_answered(row, calls["cancel", row["id"]], books)
        yield from _priority_as_answered(row, calls["priority", row["id"]])


def _cancelled_as_answered(row: Row, calls: list[Call], books: Books) -> Iterator[str]:
    moved = any(
        event["kind"] == "ablation.state" and event["new"] in ("cancelling", "cancelled")
        for event in books.of("events", subject=row["id"])
    )
    if any(200 <= call.status < 300 for call in calls) and not moved:
        yield f"the cancellation of {row['id']} was accepted, and it was never cancelling"
    if moved and calls and all(400 <= call.status < 500 for call in calls):
        yield f"{row['id']} was cancelled by calls that were refused"


def _priority_as_answered(row: Row, calls: list[Call]) -> Iterator[str]:
    """Compare with the last accepted priority; one without an answer may have come at any time."""
    accepted = [call for call in calls if 200 <= call.status < 300]
    unsure = {call.sent["priority"] for call in calls if not 200 <= call.status < 500}
    planned = json.loads(row["spec_text"]).get("limits", {}).get("priority", 50) if calls else row["priority"]
    last: Any = accepted[-1].sent["priority"] if accepted else planned
    if row["priority"] not in {last, *unsure}:
        yield f"{row['id']} has priority {row['priority']}; accepted was {last}, without an answer {sorted(unsure)}"


RULES = (answered_is_visible, sent_logs_are_stored, refused_changed_nothing, people_see_what_they_did)
