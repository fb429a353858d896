import json
import logging
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context

import pytest

from ablate.experiments.system.logs import LogFormat, configure_logging, current_request_id, requested_by, visible

STEERING = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F)]
STEERING += range(0x2066, 0x206A)


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("seed", range(20))
def test_visible_leaves_nothing_that_steers_and_nothing_else_changed(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    text = "".join(
        chr(draw.choice([*STEERING, *range(0x20, 0x7F), 0x0A, 0x09, 0xE9, 0x4E2D, 0x1F600])) for _ in "x" * 50
    )
    shown = visible(text)
    assert len(shown) == len(text)
    assert all(b == a for a, b in zip(text, shown, strict=True) if ord(a) not in STEERING)
    assert not {ord(sign) for sign in shown} & set(STEERING)


def test_json_lines_are_one_object_each_with_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.JSON)
    log = logging.getLogger("somewhere")
    log.info("outside\nof any \x1b[31mrequest")
    with requested_by("req_1"):
        log.warning("inside, %s", "given")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert "request_id" not in first
    assert (second["level"], second["logger"], second["message"]) == ("warning", "somewhere", "inside, given")
    assert second["request_id"] == third["request_id"] == "req_1"
    assert "ValueError: why" in third["traceback"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["at"])


def test_text_lines_end_with_the_request_and_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.TEXT)
    with requested_by("req_2"):
        logging.getLogger("x").error("red \x1b[31m or not")
    assert capsys.readouterr().err.endswith("x: red ␛[31m or not [req_2]\n")


def _call(work: Callable[[], None]) -> None:
    work()


def test_a_thread_knows_its_request_only_with_the_context() -> None:
    seen: list[str | None] = []
    with requested_by("req_3"):
        context = copy_context()
        for target in (
            lambda: seen.append(current_request_id()),
            lambda: context.run(lambda: seen.append(current_request_id())),
        ):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [None, "req_3"]
    assert current_request_id() is None
