"""Drawn messages of a program: each counts exactly if a plain reading of the rules accepts it, and then unchanged."""

import json
import math
import random
from typing import Any

import pytest

from ablate.model.measurements import KernelFacts
from ablate.workers.commands.ranks import ProgramMarks
from tests.programs import program_config

NUMBER_OF_MESSAGES = 10_000
STEPS = 5
NOISE: tuple[Any, ...] = (
    0, 1, 4, 5, -1, 2**62 - 1, 2**62, 2**70, 10**400, True, False, None, "", "1", "NaN", "\ud800", "a\0b", "x" * 300,
    1.5, 2.5, -0.0, -1.0, 1e-300, 1e9, 1.1e9, 1e13, 1e308, math.nan, math.inf, -math.inf, [], {}, [[]], {"a": {}},
)  # fmt: skip
"""Values that take the place of others."""

GOOD: dict[str, dict[str, Any]] = {
    "began": {"at": 2.0, "world": 1, "process": 7, "python": "3.12.1", "implementation": "CPython"},
    "window began": {"at": 3.5},
    "window ended": {"at": 9.25},
    "steps": {"steps": [[0, 3.0, 10, 0.5], [1, 3.25, 0, None]]},
    "losses": {"losses": [[0, 0.5], [4, 1e308]]},
    "tokens": {"tokens": [[0, 5], [3, 2**61]]},
    "loads": {"loads": [[0, 0.5], [4, 0.0]]},
    "reported": {"values": {"a": 1.0, "val/AR@100": -1e308}},
    "attested": {"values": {"on": True, "kind": "fused", "size": 128}},
    "package": {"digest": "sha256:abc"},
    "kernels": {
        "rows": [["aten::mm", 3, 70.5, {"registers": 168, "block": [128, 1, 1], "occupancy": 0.5}], ["k", 0, 0.0, {}]]
    },
    "failed": {"type": "builtins.KeyError", "message": "'x'\nmore"},
    "ended": {"at": 9.5, "seed": 7, "whole": True, "packages": {"torch": "2"}, "memory": [1, 2]},
}
"""A message of each kind that the module sends."""


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places_in(value[key], (*path, key)))]


def changed(values: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Replace or remove one part of a message, or rename one of its names."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    *parents, key = rng.choice([place for place in places_in(copy) if place])
    part: Any = copy
    for parent in parents:
        part = part[parent]
    kind = rng.randrange(6)
    if kind == 0:
        del part[key]
    elif kind == 1 and isinstance(part, dict):
        part[rng.choice(["", "\ud800", "a\0b", "x" * 251, "y" * 70, "\u202e"])] = part.pop(key)
    elif kind == 2 and isinstance(part, list):
        part.append(part[key])
    else:
        part[key] = rng.choice(NOISE)
    return copy


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def is_moment(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and 0 <= value <= 1e9


def is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 10**308)


def rows_of(value: Any, *kinds: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list)
        and len(row) == len(kinds)
        and all(kind(one) for kind, one in zip(kinds, row, strict=True))
        for row in value
    )


def is_index(value: Any) -> bool:
    return is_count(value) and value < STEPS


def is_named(values: Any, is_value: Any) -> bool:
    return isinstance(values, dict) and all(
        len(name) <= 250 and "\0" not in name and "\ud800" not in name and is_value(value)
        for name, value in values.items()
    )


def is_attested(values: Any) -> bool:
    return isinstance(values, dict) and all(
        type(value) in (bool, int, str) and len(str(value)) <= 200 and name.isprintable() and str(value).isprintable()
        for name, value in values.items()
    )


def is_seed(value: Any) -> bool:
    """Return whether a seed is a whole number: a program may send 7.0, "7" or true as well."""
    if value is None:
        return True
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        return False
    whole = isinstance(number, int) or (isinstance(number, float) and math.isfinite(number) and number == int(number))
    return whole and -(2**63) <= number < 2**64


def is_fact(name: str, value: Any) -> bool:
    """Return whether a kernel's fact has a value that its name allows."""
    if value is None or name in ("registers", "shared_bytes", "launches"):
        return name in FACTS and (value is None or is_size(value))
    if name in ("block", "grid"):
        return isinstance(value, list) and len(value) == 3 and all(map(is_size, value))
    if name in ("product_flops", "product_bytes"):
        return is_count(value) and value > 0
    return name in FACTS and is_number(value) and (0 <= value <= 1 if name == "occupancy" else 0 < value <= 1e12)


def is_size(value: Any) -> bool:
    return is_count(value) and value < 2**31


FACTS = set(KernelFacts.model_fields)
RULES: dict[str, Any] = {
    "began": lambda m: (
        is_moment(m["at"])
        and is_count(m["world"])
        and is_count(m.get("process", 0))
        and isinstance(m["python"], str)
        and isinstance(m["implementation"], str)
    ),
    "window began": lambda m: is_moment(m["at"]),
    "window ended": lambda m: is_moment(m["at"]),
    "steps": lambda m: (
        rows_of(m["steps"], is_index, is_moment, is_count, lambda loss: loss is None or is_number(loss))
        and len({row[0] for row in m["steps"]}) == len(m["steps"])
    ),
    "losses": lambda m: rows_of(m["losses"], is_index, is_number),
    "tokens": lambda m: rows_of(m["tokens"], is_index, is_count),
    "loads": lambda m: rows_of(m["loads"], is_index, is_moment),
    "reported": lambda m: is_named(m["values"], is_number),
    "attested": lambda m: is_attested(m["values"]),
    "package": lambda m: isinstance(m["digest"], str) and len(m["digest"]) <= 200,
    "kernels": lambda m: rows_of(
        m["rows"],
        lambda name: isinstance(name, str),
        is_count,
        lambda spent: is_number(spent) and 0 <= spent <= 1e12,
        lambda facts: isinstance(facts, dict) and all(is_fact(name, value) for name, value in facts.items()),
    ),
    "failed": lambda m: isinstance(m["type"], str) and isinstance(m["message"], str),
    "ended": lambda m: (
        is_moment(m["at"])
        and type(m["whole"]) is bool
        and is_seed(m["seed"])
        and isinstance(m["packages"], dict)
        and all(isinstance(version, str) for version in m["packages"].values())
        and (m["memory"] is None or rows_of([m["memory"]], is_count, is_count))
    ),
}
"""What the rules accept, in plain words."""


def is_acceptable(message: dict[str, Any]) -> bool:
    rank, event = message.get("rank"), message.get("event")
    if type(rank) is not int or not 0 <= rank < 1024 or not isinstance(event, str) or event not in RULES:
        return False
    try:
        return bool(RULES[event](message))
    except KeyError:
        return False


def rows_in(marks: ProgramMarks) -> list[list[Any]]:
    facts = {name: one.model_dump(mode="json") for name, one in marks.kernel_facts.items()}
    return [[*row, facts.get(row[0], {})] for row in marks.kernels]


def stored(marks: ProgramMarks, message: dict[str, Any]) -> Any:
    """Return what the marks now have of a message, in the message's own form."""
    rank, event = marks.ranks[message["rank"]], message["event"]
    readings: dict[str, Any] = {
        "began": lambda: {"at": rank.began, "world": rank.world, "process": rank.process},
        "window began": lambda: {"at": rank.edges["window began"][0]},
        "window ended": lambda: {"at": rank.edges["window ended"][0]},
        "steps": lambda: {"steps": [[i, rank.ended[i], rank.tokens[i], rank.losses.get(i)] for i in rank.ended]},
        "losses": lambda: {"losses": [[i, loss] for i, loss in rank.losses.items()]},
        "tokens": lambda: {"tokens": [[i, tokens] for i, tokens in rank.tokens.items()]},
        "loads": lambda: {"loads": [[i, seconds] for i, seconds in rank.loads.items()]},
        "reported": lambda: {"values": marks.reported},
        "attested": lambda: {"values": marks.attested},
        "kernels": lambda: {"rows": rows_in(marks)} if rank is marks.ranks.get(0) else {},
        "ended": lambda: {"at": rank.closed, "whole": rank.whole, "memory": rank.memory and list(rank.memory)},
    }
    return readings.get(event, dict)()


def is_same(stored_value: Any, sent: Any) -> bool:
    if isinstance(stored_value, float):
        return repr(stored_value) == repr(float(sent))
    if isinstance(stored_value, list):
        return len(stored_value) == len(sent) and all(map(is_same, stored_value, sent))
    if isinstance(stored_value, dict):
        return stored_value.keys() == sent.keys() and all(is_same(stored_value[key], sent[key]) for key in sent)
    return type(stored_value) is type(sent) and bool(stored_value == sent)


def shown(name: str) -> str:
    """Return the name of a kernel, which may have any letters, as it is stored."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def known_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts of a kernel as they are stored: without those that are None."""
    return {name: value for name, value in facts.items() if value is not None}


def test_drawn_messages_count_exactly_if_the_rules_accept_them() -> None:
    rng = random.Random(45)  # noqa: S311 - draws that repeat
    accepted = 0
    for number in range(NUMBER_OF_MESSAGES):
        event = rng.choice(list(GOOD))
        message = {"event": event, "rank": 0, **GOOD[event]}
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            message = changed(message, rng)
        marks = ProgramMarks(program_config(None))
        if message.get("event") != "began":
            rank = message.get("rank")
            own = rank if type(rank) is int and 0 <= rank < 1024 else 0
            began = {"event": "began", "rank": own, **GOOD["began"]}
            assert marks.take(json.dumps(began).encode(), 0.0) is not None
        taken = marks.take(json.dumps(message).encode(), 0.0)
        expected = is_acceptable(message)
        assert (taken is not None) == expected, (number, message, marks.wrong)
        assert (marks.wrong is None) == expected
        if not expected:
            assert str(marks.wrong).isprintable()
            continue
        accepted += 1
        if event == "kernels":
            rows = [[shown(name)[:300], *row, known_of(facts)] for name, *row, facts in message["rows"]]
            last = {row[0]: row[-1] for row in rows if row[-1]}
            message["rows"] = [[*row[:-1], last.get(row[0], {})] for row in rows]
        for name, value in stored(marks, message).items():
            if event in ("losses", "tokens", "loads"):  # of one index, the last one counts
                value, message[name] = dict(value), dict(message[name])
            if event == "attested":
                message[name] = {gate[:63]: one for gate, one in message[name].items()}
            sent = message.get(name, value if name == "process" else None)
            assert is_same(value, sent), (message, value)
    assert NUMBER_OF_MESSAGES / 5 < accepted < NUMBER_OF_MESSAGES / 2


@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
def test_noise_is_a_message_of_no_module(depth: int) -> None:
    rng = random.Random(depth)  # noqa: S311 - draws that repeat
    whole = json.dumps({"event": "reported", "rank": 0, "values": {"a": 1.0}}).encode()
    noise = [
        b"[" * depth,
        b'{"a":' * depth,
        b"",
        b"null",
        b"\xff\xfe",
        b"1" * depth,
        b'"\\ud800"',
        rng.randbytes(depth),
    ]
    for content in [*noise, *(whole[:cut] for cut in range(len(whole)))]:
        marks = ProgramMarks(program_config(None))
        assert marks.take(content, 0.0) is None
        assert "not of the module ablate" in str(marks.wrong)


@pytest.mark.parametrize("event", ["window began", "window ended", "steps", "losses", "tokens"])
def test_mark_before_the_begin_of_its_loop_is_wrong(event: str) -> None:
    marks = ProgramMarks(program_config(None))
    assert marks.take(json.dumps({"event": event, "rank": 0, **GOOD[event]}).encode(), 0.0) is None
    assert f"'{event}' of rank 0 came before its training loop began" in str(marks.wrong)


@pytest.mark.parametrize("began_by", [0, 41])
@pytest.mark.parametrize("sender", [0, 41, 42])
@pytest.mark.parametrize("event", [event for event in GOOD if event != "began"])
def test_only_the_process_that_began_a_loop_marks_its_moments(event: str, sender: int, began_by: int) -> None:
    """A rank may be closed by its parent. The kernel may not say who sent a message."""
    marks = ProgramMarks(program_config(None))
    assert marks.take(json.dumps({"event": "began", "rank": 0, **GOOD["began"]}).encode(), 0.0, began_by) is not None
    taken = marks.take(json.dumps({"event": event, "rank": 0, **GOOD[event]}).encode(), 0.0, sender)
    is_refused = event in ("window began", "window ended", "steps") and (began_by, sender) == (41, 42)
    assert (taken is None) == is_refused
    assert ("came from another process than the one that began" in str(marks.wrong)) == is_refused


def test_each_round_and_each_rank_has_its_own_process() -> None:
    marks = ProgramMarks(program_config(None))
    for number, sender in enumerate((41, 42)):
        for rank in (0, 1):
            for event in ("began", "window began"):
                message = {"event": event, "rank": rank, "round": number, **GOOD[event]}
                assert marks.take(json.dumps(message).encode(), 0.0, sender + 10 * rank) is not None, marks.wrong


def test_text_of_a_failure_is_kept_without_halves_of_characters() -> None:
    marks = ProgramMarks(program_config(None))
    message = {"event": "failed", "rank": 0, "type": "builtins.OSError", "message": "no file 'a\udc80b'"}
    assert marks.take(json.dumps(message).encode(), 0.0) is not None
    assert marks.failed is not None
    assert marks.failed.message == "no file 'a\N{REPLACEMENT CHARACTER}b'"
