"""Names of results become keys that MLflow takes: no two one key, and each name can be read back."""

import random
import re

import pytest
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

from ablate.experiments.in_trial.ablate import LONGEST_NAME
from ablate.experiments.reporting.mlflow.content import LONGEST_KEY, reported_key

NAMES = (
    *(
        "",
        " ",
        ".",
        "..",
        "/",
        "//",
        "/x",
        "x/",
        "a//b",
        "a/../b",
        "../../x",
        "./a",
        "a/.",
        "...",
        "a b",
        " a ",
        "a\n",
        "\n",
    ),
    *(
        "val/AR@100",
        "timing(s)/gen",
        "top-5 acc, %",
        "gr\u00f6\u00dfe_\u00b5",
        "e\u0301",
        "\u00e9",
        "a:b=c[d]",
        "VAL",
        "val",
    ),
    *("new\nline", "<img src=x onerror=alert(1)>", "_x", "_x40_", "_x_", "@", "_x40_@", "x40_", "_", "__x__", "loss_x"),
    *("x" * 70 + "_rouge1", "x" * 70 + "_rouge2", "x" * LONGEST_NAME, "x" * (LONGEST_NAME - 1), "@" * LONGEST_NAME),
)


def name_of(key: str) -> str:
    """Return the name that a key says, as a reader would."""
    return re.sub(
        r"_x([0-9a-f]*)_", lambda code: chr(int(code[1], 16)) if code[1] else "", key.removeprefix("reported/")
    )


def drawn(chance: random.Random) -> str:
    pieces = [
        "a",
        "b",
        "/",
        ".",
        "..",
        "_",
        "_x",
        "x",
        "4",
        "40",
        "_x40_",
        " ",
        "@",
        "\u00b5",
        "\t",
        "\n",
        "\U0001f600",
        "%",
    ]
    if chance.random() < 0.1:
        return "".join(chr(chance.choice([chance.randint(1, 127), chance.randint(160, 0xD7FF)])) for _ in range(9))
    return "".join(chance.choices(pieces, k=chance.randint(0, 8)))


def check(name: str) -> str:
    key = reported_key(name)
    _validate_metric_name(key)
    _validate_metric_name(f"ablation.nonfinite.{key}")
    assert len(f"ablation.nonfinite.{key}") <= MAX_ENTITY_KEY_LENGTH
    if len(key) < LONGEST_KEY:
        assert name_of(key) == name
    return key


def test_names_that_people_write_stay_readable() -> None:
    assert reported_key("val_loss") == "reported/val_loss"
    assert reported_key("eval/top-5 acc") == "reported/eval/top-5 acc"
    assert reported_key("val/AR@100") == "reported/val/AR_x40_100"


def test_every_name_has_a_key_of_its_own_that_mlflow_takes() -> None:
    chance = random.Random(20261128)  # noqa: S311 - a reproducible draw
    names = {*NAMES, *(drawn(chance) for _ in range(10_000))}
    assert len({check(name) for name in names}) == len(names)


@pytest.mark.parametrize("letter", ["@", "\u00fc", "x", "/"])
def test_long_names_differ_in_their_keys(letter: str) -> None:
    names = {letter * length for length in range(1, LONGEST_NAME + 1)}
    names |= {letter * (LONGEST_NAME - 1) + str(end) for end in range(10)}
    assert len({check(name) for name in names}) == len(names)
