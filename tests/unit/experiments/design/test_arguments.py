"""Changed arguments against an independent reader of command lines: argparse."""

import argparse
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.design.arguments import flags_of, merged_arguments

numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(["-1e-3", "-.5", "1E5", "-0"]),
)
words = st.text("abc=/.{}", min_size=1, max_size=5)


def parser() -> argparse.ArgumentParser:
    reader = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    reader._negative_number_matcher = re.compile(
        r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\Z", re.IGNORECASE
    )  # 3.11 reads no exponents
    reader.add_argument("--lr")
    reader.add_argument("-f")
    reader.add_argument("--betas", nargs=2)
    reader.add_argument("--tag", action="append")
    reader.add_argument("--compile", action="store_true")
    reader.add_argument("-v", action="count")
    reader.add_argument("files", nargs="*")
    return reader


@st.composite
def flags(draw: st.DrawFn) -> list[str]:
    """Flags in any order and spelling, repeated ones too."""
    drawn: list[str] = []
    for name in draw(st.lists(st.sampled_from(["--lr", "-f", "--betas", "--tag", "--compile", "-v"]), max_size=6)):
        value = draw(st.one_of(numbers, words))
        if name == "--betas":
            drawn += [name, value, draw(numbers)]
        elif name in {"--compile", "-v"}:
            drawn.append(name)
        elif name != "-f" and draw(st.booleans()):
            drawn.append(f"{name}={value}")
        else:
            drawn += [name, value]
    return drawn


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Values that belong to no flag, flags, and perhaps words after `--`, dashes included."""
    end = draw(st.lists(st.sampled_from(["a", "--lr", "-1", "-", "--lr=3"]), max_size=2))
    return [*draw(st.lists(words, max_size=2)), *draw(flags()), *(["--", *end] if end else [])]


def read(line: list[str]) -> dict[str, Any]:
    """Return the values of a command line; those after `--` apart, which argparse reads in other ways by version."""
    end = line.index("--") if "--" in line else len(line)
    values = vars(parser().parse_intermixed_args(line[:end]))
    return {**values, "files": values.get("files", []), "end": line[end + 1 :]}


@given(command_lines(), flags(), st.lists(st.sampled_from(["a", "--lr"]), max_size=2))
def test_a_flag_of_the_same_name_replaces_and_the_rest_stays(
    base: list[str], changes: list[str], end: list[str]
) -> None:
    changed = [*changes, *(["--", *end] if end else [])]
    was, new = read(base), read(changed)
    expected = {**was, **new, "files": was["files"], "end": was["end"] + new["end"]}
    assert read(list(merged_arguments(base, changed))) == expected


@given(command_lines(), flags())
def test_the_same_change_twice_is_one_change(base: list[str], changes: list[str]) -> None:
    once = merged_arguments(base, changes)
    assert read(list(merged_arguments(once, changes))) == read(list(once))
    assert merged_arguments(base, []) == tuple(base)
    assert merged_arguments([], base) == tuple(base)


@pytest.mark.parametrize(
    ("base", "changes", "merged"),
    [
        ("python train.py --lr 1e-3", "--lr 2e-3", "python train.py --lr 2e-3"),
        ("train.py --lr 1e-3 --seed 1", "--wd 0.1 --lr=2e-3", "train.py --lr=2e-3 --seed 1 --wd 0.1"),
        ("--lr=1e-3 --lr 3", "--lr 2", "--lr 2"),
        ("--tag a --tag b --x", "--tag c", "--tag c --x"),
        ("--tag a", "--tag b --tag c", "--tag b --tag c"),
        ("--lr 1 data.txt", "--lr=2", "--lr=2 data.txt"),
        ("--lr=1 data.txt", "--lr 2", "--lr 2 data.txt"),
        ("--scale -1 --bias -0.5", "--scale -2e-3", "--scale -2e-3 --bias -0.5"),
        ("config/a.py --lr 1", "config/b.py", "config/a.py --lr 1 config/b.py"),
        ("-f a -- --lr 1", "--lr 2 -f b", "-f b --lr 2 -- --lr 1"),
        ("a", "-- b", "a -- b"),
        ("-", "--x", "- --x"),
        ("model.lr=1 a", "model.lr=2", "model.lr=2 a"),
        ("--x 1 lr=1 lr=3", "lr=2 b=1", "--x 1 lr=2 b=1"),
        ("lr=1 a", "lr=2 lr=3", "lr=2 lr=3 a"),
        ("--set a=1 b=2", "b=3", "--set a=1 b=3"),
        ("--lr 1 data", "--lr 2", "--lr 2 data"),
        ("-c data", "-c", "-c data"),
        ("", "", ""),
    ],
)
def test_merged(base: str, changes: str, merged: str) -> None:
    assert merged_arguments(base.split(), changes.split()) == tuple(merged.split())


def test_flags_have_their_values_however_they_are_written() -> None:
    words = "train.py --lr=1e-3 -v --tag a --tag 'b c' --scale -2 data -- --rest".replace("'b c'", "b").split()
    assert flags_of(words) == {
        "": "train.py --rest",
        "--lr": "1e-3",
        "-v": "",
        "--tag": "a b",
        "--scale": "-2 data",
    }
    assert flags_of(["--name", "a b"]) == {"--name": "'a b'"}
