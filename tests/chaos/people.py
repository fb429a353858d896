"""The users of the system under test: a thread that submits and cancels ablations, moves them up and resumes nodes.

A submission is repeated under its Idempotency-Key until it is answered, as every client of the product does it. Calls
go to all API processes in turn, and a second one must show at once what the first one accepted.
"""

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

import httpx

from tests.chaos.books import Call
from tests.chaos.history import History

_EVERY_S = 0.4
_OPEN, _UNFINISHED = 3, 8
"""Most unfinished ablations, and most that MLflow does not show yet."""
_PATIENCE_S = 4.0
_MOVES = 0.15
"""Chance of a changed priority in each round."""
_OVER = ("completed", "failed", "cancelled")


def small_spec(chance: random.Random, number: int, *, long_steps: int) -> dict[str, Any]:
    """Return a spec of short trials, or of four that outlive a lease. Its metric is memory, not time."""
    gates: dict[str, dict[str, Any]] = {
        "chunk-8": {"gates": {"chunk_size": 8}},
        "psiv-on": {"gates": {"psiv_cache": True}},
    }
    kind = chance.choices(("short", "long", "looks", "sliced"), (60, 18, 10, 12))[0]
    names = chance.sample(sorted(gates), 1 if kind == "long" else chance.choice((1, 1, 2)))
    blocks = {"long": {"count": 2}, "looks": {"looks": [6, 8]}}.get(kind, {"count": chance.randint(2, 4)})
    return {
        "ablation": f"chaos-{number}",
        "question": "Is every trial counted once, whatever breaks?",
        "workload": {
            "recipe": "hybrid-tiny",
            "overrides": {
                **{"d_model": 16, "headdim": 8, "d_state": 8, "mimo_rank": 1, "pattern": "M", "seq_len": 16},
                **{"vocab_size": 300, "micro_batch": 1, "max_corpus_mib": 0.1, "threads": 1},
            },
            "steps": {
                "warmup": 0,
                "warmup_s": 0,
                "timed": long_steps if kind == "long" else 8 if kind == "sliced" else chance.randint(1, 4),
                "val_rows": 0,
                **({"slice": chance.choice((1, 2))} if kind == "sliced" else {}),
            },
        },
        "baseline": {"gates": {"schedule": "chunk_parallel", "chunk_size": 16}},
        "variants": {name: gates[name] for name in names},
        "design": {
            "seeds": [1],
            "blocks": blocks,
            "order_seed": number,
        },
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "limits": {"trial": "60s", "device_minutes": 60, "priority": chance.choice((40, 50, 50, 60))},
        "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}},
    }


class People:
    """The thread of all users. The checker compares `accepted` and `cancelled` with the database."""

    def __init__(self, clients: Sequence[httpx.Client], history: History, seed: str, *, long_steps: int) -> None:
        self.accepted: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.refusals: list[str] = []
        self.resumed = 0
        self.open: list[str] = []
        """Unfinished ablations at the last look."""
        self._clients, self._history = cycle(clients), history
        self._chance = random.Random(seed)  # noqa: S311 - a seeded run, no secret
        self._seed, self._number, self._long_steps = seed, 0, long_steps
        self._waiting: tuple[str, dict[str, Any]] | None = None
        self._wishes: list[str] = []
        self._unsure: set[str] = set()
        """Ablations with a call that may still have its effect."""
        self._submitting, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="people", daemon=True)

    def __enter__(self) -> "People":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self) -> None:
        """Submit from now on."""
        self._submitting.set()

    def pause(self) -> None:
        """Stop submitting; repeat pending submissions until they are answered."""
        self._submitting.clear()

    @property
    def is_idle(self) -> bool:
        """Whether every submission is answered."""
        return self._waiting is None and not self._wishes

    def cancel(self, ablation: str) -> None:
        """Cancel an ablation soon."""
        self.cancelled.add(ablation)
        self._wishes.append(ablation)

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            with suppress(httpx.HTTPError):
                self._round()

    def _round(self) -> None:
        while self._wishes:
            if self._call("cancel", "POST", f"/v1/ablations/{self._wishes[0]}:cancel").status_code < 500:
                self._wishes.pop(0)
        if self._waiting is not None:
            self._submit(*self._waiting)
        self._resume_nodes()
        newest = self._send("GET", "/v1/ablations?limit=100").json()["items"]
        if newest and self._chance.random() < _MOVES:
            self._move(self._chance.choice(newest)["id"])
        self.open = [item["id"] for item in newest if item["state"] not in _OVER]
        unfinished = sum(item["state"] not in _OVER or not item["mlflow_url"] for item in newest)
        if self._submitting.is_set() and self._waiting is None and len(self.open) < _OPEN and unfinished < _UNFINISHED:
            self._number += 1
            self._waiting = (
                f"{self._seed}-{self._number}",
                small_spec(self._chance, self._number, long_steps=self._long_steps),
            )

    def _submit(self, key: str, spec: dict[str, Any]) -> None:
        answer = self._send("POST", "/v1/ablations", json=spec, headers={"Idempotency-Key": key})
        if answer.is_success:
            made = answer.json()
            self.accepted[key] = made["id"]
            self._waiting = None
            self._expect("the accepted ablation", made["id"], "name", spec["ablation"])
        elif answer.status_code < 500 and answer.status_code not in (409, 429):
            self.refusals.append(f"a legal submission was answered {answer.status_code}: {answer.text[:300]}")
            self._waiting = None

    def _move(self, ablation: str) -> None:
        """Change the priority of an ablation, which works while it waits or runs."""
        priority = self._chance.randint(40, 60)
        answer = self._call("priority", "PATCH", f"/v1/ablations/{ablation}", json={"priority": priority})
        if answer.is_success and ablation not in self._unsure:
            self._expect("the accepted priority", ablation, "priority", priority)

    def _expect(self, what: str, ablation: str, name: str, value: Any) -> None:
        """Note a refusal unless the next API process shows a value."""
        answer = self._send("GET", f"/v1/ablations/{ablation}")
        if answer.json()[name] != value:
            self.refusals.append(f"{what} {value!r} of {ablation} shows as {answer.json()[name]!r}")

    def _resume_nodes(self) -> None:
        for node in self._send("GET", "/v1/nodes").json()["items"]:
            if node.get("state") in ("quarantined", "draining", "drained"):
                self.resumed += self._send("POST", f"/v1/nodes/{node['name']}:resume").is_success

    def _call(self, verb: str, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a call that the checker compares with the books. Raises httpx.HTTPError without an answer."""
        ablation = path.rpartition("/")[2].partition(":")[0]
        status = 0
        try:
            answer = self._send(method, path, **options)
            status = answer.status_code
        finally:
            if not 0 < status < 500:
                self._unsure.add(ablation)
            self._history.add(Call(verb=verb, subject=ablation, status=status, sent=options.get("json", {}), answer={}))
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request to the next API process. Raises httpx.HTTPError if a client would retry it."""
        answer = next(self._clients).request(method, path, timeout=_PATIENCE_S, **options)
        if method == "GET":
            answer.raise_for_status()
        return answer
