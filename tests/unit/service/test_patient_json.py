"""Large bodies: the same documents as json.loads, the same refusals, and others go on meanwhile."""

import gc
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_core import from_json

from service.http.patient_json import parse

MIB = 2**20
SAMPLES = [
    "",
    "a",
    '"',
    "\\",
    "\n\t\x00\x7f",
    "é",
    "𝄞",
    "\u2028",
    "/",
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
]
NUMBERS = [0, -0.0, 1, -1, 10**30, 1.5e-300, 3.14159, 2**53 + 1, -(2**63), 1e22]


def drawn(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(7 if depth else 5)
    if kind == 5:
        return [drawn(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(SAMPLES) + str(n): drawn(draw, depth - 1) for n in range(draw.randrange(4))}
    return [
        None,
        draw.random() < 0.5,
        draw.choice(NUMBERS),
        draw.random() * 10.0 ** draw.randrange(-20, 20),
        draw.choice(SAMPLES) * 3,
    ][kind]


@pytest.mark.parametrize("seed", range(100))
def test_a_document_is_what_json_loads_makes_of_it(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    options = {"ensure_ascii": draw.random() < 0.5, "indent": draw.choice([None, 1])}
    body = json.dumps([drawn(draw, 5) for _ in range(20)], **options).encode()
    assert repr(parse(body)) == repr(json.loads(body))  # -0.0 equals 0, and True equals 1


def _judged(read: Any, body: bytes) -> str | None:
    """The document as text, None for a refusal."""
    try:
        return repr(read(body))
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_document_is_refused_where_the_strict_parser_refuses_it(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    body = bytearray(json.dumps([drawn(draw, 4) for _ in range(5)], ensure_ascii=draw.random() < 0.5).encode())
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(body))
        piece = draw.choice([b"", b"]", b",", b"}", b'"', b"NaN", b"-Infinity", b"\\ud800", b"\xff", b"01", b"\x00"])
        body[place : place + draw.randrange(3)] = piece
    own = _judged(parse, bytes(body))
    assert own == _judged(lambda data: _strict(data), bytes(body))


def _strict(body: bytes) -> Any:
    from_json(body, allow_inf_nan=False)
    return json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": NaN}',
        b"[Infinity]",
        b"[-Infinity]",
        b'["\\ud800"]',
        b'{"\\udc00": 1}',
        b'["\\ud83d"]',
        b"[1",
        b"",
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_what_a_receipt_cannot_hold_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse(body)


def _longest_stretch(read: Any, body: bytes) -> float:
    """The longest stretch of reading in which no other thread had a turn, as a share of all, in processor time."""
    begin, done, leave = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        read(body)
        done.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    moments = [time.clock_gettime(clock)]
    begin.set()
    while not done.is_set():
        time.sleep(0)
        moments.append(time.clock_gettime(clock))
    leave.set()
    thread.join()
    return max(after - before for before, after in itertools.pairwise(moments)) / (moments[-1] - moments[0])


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected: the callbacks of other libraries' collections give others a turn inside the C parser."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("read", "shares"), [(parse, True), (json.loads, False)])
def test_others_go_on_while_a_large_document_is_read(read: Any, shares: bool) -> None:
    """The second case shows that the test can see the difference: the parser in C lets nobody else run.

    One good try of eight is enough: busy processors that keep the waiting thread away lengthen a stretch, never
    shorten one.
    """
    body = b"[" + b"[1,2],{}," * (MIB // 4) + b"0]"
    assert any(_longest_stretch(read, body) < 0.5 for _ in range(8)) == shares
