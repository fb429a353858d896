"""Numbers as people read them: whatever the magnitude, thousands are grouped and nothing but digits is lost."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.reporting import wording

PLAIN = re.compile(r"\d{1,3}(,\d{3})*(\.\d+)?(e[+-]\d+)?")
"""A number whose thousands are grouped."""
CHANCE = random.Random(20261123)  # noqa: S311  # not for secrets
VALUES = [sign * CHANCE.uniform(1, 10) * 10**power for power in range(-4, 9) for sign in (1, -1) for _ in range(8)]
EDGES = [0.0, 999.4, 999.96, 999.995, 9999.5, 99_999.96, 1000.0, 5000.0, 5011.7, 0.004, -0.004]


def read(text: str) -> float:
    """Return the number that a text begins with, as a person reads it."""
    sign = -1 if text.startswith(wording.MINUS) else 1
    digits = re.split(f"[{wording.SPACE} ]", text.lstrip(f"+{wording.MINUS}"))[0]
    assert PLAIN.fullmatch(digits.lstrip("-")), text
    return sign * float(digits.replace(",", ""))


@pytest.mark.parametrize("value", [*VALUES, *EDGES])
def test_every_number_is_grouped_and_rounds_its_value(value: float) -> None:
    assert read(wording.percent(value)) == pytest.approx(value, abs=0.0051)
    assert read(wording.size_percent(abs(value))) == pytest.approx(abs(value), abs=0.0051)
    assert read(wording.signed(value, 1)) == pytest.approx(value, abs=0.051)
    assert read(wording.fixed(value, 3)) == pytest.approx(value, abs=0.00051)
    assert read(wording.number(value, 5)) == pytest.approx(value, rel=1e-4, abs=0)
    assert read(wording.plain_percent(value)) == pytest.approx(value, rel=1e-2, abs=0)
    assert read(wording.gib(abs(value) * 2**30)) * (2**30 if abs(value) >= 1 else 2**20) == pytest.approx(
        abs(value) * 2**30, rel=0.01, abs=2**20 / 10
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(5000, "5,000"), (5011.7, "5,011.7"), (123_456.7, "123,457"), (0.5, "0.5"), (999.996, "1,000")],
        *[(-9e14, "-900,000,000,000,000"), (1e15, "1e+15"), (-1.66667e307, "-1.6667e+307")],
    ],
)
def test_a_table_s_numbers_look_alike(value: float, text: str) -> None:
    assert wording.number(value, 5) == text


def test_there_is_one_minus_sign() -> None:
    text = "psiv-on: -3.29 % [-4.14, -2.43] of tokens-8 on 2026-11-23, (-1) abl_1-2 p=-0.5"
    assert wording.with_minus(text).replace(wording.MINUS, "-") == text
    assert re.findall(r"\S*-\S*", wording.with_minus(text)) == ["psiv-on:", "tokens-8", "2026-11-23,", "abl_1-2"]


def test_counts_are_grouped() -> None:
    assert wording.share(1234, 10_000) == "1,234 of 10,000"
    assert wording.counted(12_345, "block") == "12,345 blocks"
    assert wording.left_to_the_table(1) == "1 more variant is in the table only."
    assert wording.left_to_the_table(2) == "2 more variants are in the table only."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0 ms"),
        (2.7e-6, "2.7 µs"),
        (0.000_999, "999.0 µs"),
        (0.001, "1.0 ms"),
        (0.5, "500.0 ms"),
        (1.0, "1.00 s"),
        (120.0, "2.0 min"),
        (None, wording.NOTHING),
    ],
)
def test_a_time_has_the_unit_that_shows_it(value: float | None, text: str) -> None:
    assert wording.seconds(value).replace(wording.SPACE, " ") == text


def test_failures_are_words_without_underscores() -> None:
    names = [*FailureClass, *Outcome]
    assert [name for name in names if "_" in wording.failure(name)] == []
    assert wording.failure(FailureClass.USER_ERROR) == "error of the program"
    assert len({wording.failure(name) for name in FailureClass}) == len(FailureClass)


def test_a_program_that_reports_no_tokens_has_no_throughput() -> None:
    arm: Any = SimpleNamespace(tokens_per_s=0.0, by_node=None)
    assert wording.rate(arm) is None
    arm.tokens_per_s = 12.0
    assert wording.rate(arm) == "12 tokens/s"
