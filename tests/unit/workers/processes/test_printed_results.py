"""Results in the output of a program: what a person reads there, or nothing; never another number."""

import math
import random
import re
import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.in_trial.ablate import LONGEST_NAME, MOST_RESULTS
from ablate.workers.commands.printed_results import LONGEST_LINE, MOST_CURVES, PrintedResults

LINE = {"v": "val loss: {}"}


def read(log: bytes, lines: Mapping[str, str] | None = None, cuts: tuple[int, ...] = ()) -> PrintedResults:
    results = PrintedResults(lines or {})
    for begin, end in zip((0, *cuts), (*cuts, len(log)), strict=True):
        results.feed(log[begin:end])
    results.end()
    return results


def outcome(results: PrintedResults, name: str) -> float | None:
    """Return the value of a result, None if it was refused."""
    return None if results.problem() else results.values.get(name)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("METRIC val=7.5", 7.5),
        ("METRIC val= 7.5", 7.5),
        ("METRIC  val = -7.5e-3 ", -0.0075),
        ("\tMETRIC val=+7.", 7.0),
        ("INFO:root:METRIC val=7.5", 7.5),
        ("[rank0]: METRIC val=7.5", 7.5),
        ("2026-11-28 20:00:00,123 - INFO - METRIC val=.5", 0.5),
        ("\r 99%|####| 99/100 [00:10<00:00]METRIC val=7.5", 7.5),
        ("\r      \rMETRIC val=7.5\r", 7.5),
        ("METRIC val=3\rMETRIC val=7.5", 7.5),
        ("\x1b[32mMETRIC val=\x1b[1;36m7.5\x1b[0m\x1b[K", 7.5),
        ("\x1b]0;METRIC val=9\x07\x1b[?25l\x1b[2J\x1b[HMETRIC val=7.5\x1b[?25h\x1b(B", 7.5),
        ("METRIC val=7.5\x1b[A", 7.5),
        ("7 batches doneMETRIC val=7.5", 7.5),
        ("METRIC val=7.5METRIC val=7.5", 7.5),
        ("METRIC val=" + " " * 3000 + "7.5", 7.5),
        ("METRIC val=1e1000", math.inf),
        ("METRIC val=-Infinity", -math.inf),
        ("METRIC val=NaN", math.nan),
        ("METRIC val=-nan", math.nan),
        *((f"METRIC val={text}", None) for text in (
            "", "1,234.5", "1_000", "7,5", "1 234.5", "1\u202f234.5", "1'234.5", "7.5 # best", "7.5 step=3", "7.5%",
            "1.2k", "3M", "0x1f", "tensor(7.5)", "1.5e", "1e5.5", "7.5\b6", "7.5\x1b[D6", "7.5\x1b[2K", "7.5\0",
            "7\u0665", "1e-400", "nan(ind)", "None", "seven", "--7", "7.5.2", "\ufffd7.5", "7.5 METRIC other=8",
            "\uff17",
        )),
    ],
)  # fmt: skip
def test_the_last_metric_line_is_the_result_or_is_refused(line: str, value: float | None) -> None:
    results = read(f"METRIC val=2.0\n{line}\n".encode())
    assert outcome(results, "val") == pytest.approx(value, nan_ok=True)
    if value is None:
        assert "'val'" in str(results.problem())
        assert "METRIC val=" in str(results.problem())
        assert str(results.problem()).isprintable()


@pytest.mark.parametrize("line", ["METRIC = 7", "METRIC: val=7", "METRIC so far val=7", "metric val=7", "METRIC val 7"])
def test_a_line_that_does_not_begin_as_a_result_is_none(line: str) -> None:
    assert outcome(read(f"METRIC val=2.0\n{line}\n".encode()), "val") == 2.0


@pytest.mark.parametrize(
    ("line", "text", "value"),
    [
        ("val loss: {}", "epoch 2 | val loss: 5.5 | ppl 2", 5.5),
        ("val loss: {}", "val loss:\t5.5", 5.5),
        ("val loss: {}", "val loss: 5.5.", 5.5),
        ("val loss: {}", "val loss: \x1b[1;36m5.5\x1b[0m", 5.5),
        ("val loss: {}", "val loss: 5.5, lr=3", 5.5),
        ('"ppl": {}', '{"ppl": 5.5}', 5.5),
        ('"ppl": {}', '{"ppl": 5.5,"loss": 3}', 5.5),
        ('"ppl": {}', '{"ppl": NaN, "loss": 3}', math.nan),
        ("'ppl': {}", "{'ppl': -inf}", -math.inf),
        ("loss={},lr", "loss=1e-3,lr=2", 1e-3),
        ("wer {} %", "wer 19 %", 19.0),
        ("{}% done", "it is (5.5% done", 5.5),
        ("{}% done", "acc=5.5 % done", 5.5),
        ("tok/s: {}k", "tok/s: 1.2k", 1.2),
        ("loss {}", "lossless\rloss 5.5", 5.5),
        ("loss: {}", "loss: 5.5 loss: 5.5", 5.5),
        ("loss: {}", "loss: 5.5\x1b[A", 5.5),
        *(("val loss: {}", f"val loss: {text}", None) for text in (
            "", "1,234.5", "1_234", "1.2k", "3.5M", "0x1f", "tensor(7.5)", "7.5/8", "2m30s", "1.5e", "inference done",
            "7.5%", "nanoseconds", "**7.5**", "=7.5", "None", "1 234.5", "1\u00a0234", "12:30", "2026-11-28",
            "7.5 \x1b[4D9", "1'234", "5-7", "7\u0665",
        )),
        ("loss={},", "loss=1,234.5,", None),
        ("loss: {}", "loss: 5.5 val loss: 6", None),
        ("{}% done", "1,234.5% done", None),
        ("{}% done", "1 234% done", None),
        ("{}m", "2m30s", None),
        ("{}m", "5-7m", None),
        ("wer {} %", "wer 19 points", None),
        ("wer {} %", "wer 19", None),
    ],
)  # fmt: skip
def test_the_last_line_of_a_pattern_is_the_result_or_is_refused(line: str, text: str, value: float | None) -> None:
    older = line.replace("{}", "2")
    assert outcome(read(f"{older}\n{text}\n".encode(), {"v": line}), "v") == pytest.approx(value, nan_ok=True)


def test_the_end_of_the_output_may_be_a_part_of_a_number() -> None:
    assert "has no end" in str(read(b"METRIC val=1\nMETRIC val=2.5").problem())
    assert "has no end" in str(read(b"val loss: 3\nval loss: 2.5", LINE).problem())
    assert outcome(read(b"val loss: 3\nval loss: 2.5 | ppl", LINE), "v") == 2.5


@pytest.mark.parametrize("cut", [1, 11, 4096, 4097, 100_000])
def test_a_line_beyond_the_limit_gives_no_number_wherever_it_is_cut(cut: int) -> None:
    longer = b"x" * 5_000_000
    for before in (b"METRIC val=1.5", b"val loss: 1.5"):
        for line in (longer + before, before + longer, longer + before + longer):
            log = b"METRIC val=2\nval loss: 2\n" + line + b"\nthe end\n"
            results = read(log, LINE, tuple(range(cut, len(log), max(cut, 50_000))))
            assert "is longer than 4,096 bytes" in str(results.problem())
            assert len(str(results.problem())) < 400
    results = read(longer + b"\nMETRIC val=2.5\n" + longer + b"\n", LINE)
    assert (results.values, results.problem()) == ({"val": 2.5}, None)


def test_names_are_kept_as_they_are_up_to_a_limit() -> None:
    names = ["val/AR@100", "gr\u00f6\u00dfe_\u00b5", "..", "VAL", "a:b[c]", "x" * LONGEST_NAME]
    results = read("".join(f"METRIC {name}={number}\n" for number, name in enumerate(names)).encode())
    assert (results.values, results.problem()) == ({name: number for number, name in enumerate(names)}, None)
    assert read(b"METRIC gr\xf6=1\nMETRIC gr\xfc=2\n").values == {"gr\\xf6": 1.0, "gr\\xfc": 2.0}
    assert "control characters" in str(read(b"METRIC val=1\nMETRIC val\x1b[D=2\n").problem())
    assert "has 251 letters; allowed: 250" in str(read(b"METRIC " + b"x" * 251 + b"=1\n").problem())
    many = b"".join(b"METRIC m%d=1\n" % number for number in range(MOST_RESULTS))
    assert len(read(many).values) == MOST_RESULTS
    assert "more than 10,000 names" in str(read(many + b"METRIC more=1\n").problem())


def human(text: str) -> float | None:
    """Return the number that a person reads in the text after a name, None without one."""
    text = text.strip()
    text = re.sub(r"^tensor\((.*)\)$", r"\1", text)
    spelled = text.lower().lstrip("+-")
    if spelled in {"nan", "inf", "infinity"}:
        return float(text)
    words = text.split(" ")
    if len(words) > 1 and re.fullmatch(r"[0-9]{1,3}", words[0]) and re.fullmatch(r"[0-9]{3}(\.[0-9]+)?", words[1]):
        words = ["".join(words[:2]), *words[2:]]
    first = words[0].rstrip(",;|")
    if first.startswith("0x"):
        return float(int(first, 16))
    scale = {"k": 1e3, "M": 1e6, "%": 1.0}.get(first[-1:])
    first = (first[:-1] if scale else first).replace(",", "").replace("_", "").replace("'", "")
    try:
        return float(first) * (scale or 1)
    except ValueError:
        return None


def rows_of(log: str) -> list[str]:
    """Return the lines of a log, read letter by letter, without colours."""
    rows, row, in_code = [], "", False
    for letter in log:
        if in_code:
            in_code = letter in "[;0123456789"
        elif letter == "\x1b":
            in_code = True
        elif letter in "\r\n":
            rows.append(row)
            row = ""
        else:
            row += letter
    return rows


def newest(log: str, begin: str) -> str | None:
    """Return the text behind the last `begin` of a log; None without one."""
    rows = [row for row in rows_of(log) if begin in row]
    return rows[-1].rpartition(begin)[2] if rows else None


def draw_number(chance: random.Random) -> str:
    number = chance.choice([chance.uniform(0, 10), chance.uniform(-1e6, 1e6), chance.randint(0, 10**7), 0.0])
    whole = int(abs(number))
    return chance.choice(
        [
            f"{number}", f"{number:.4f}", f"{number:e}", f"{number:+}", f"{number:,.1f}", f"{whole:_}",
            f"{whole / 1000}k", f"{number:.1f}%", f"{whole:,}".replace(",", " "), f"{whole:,}".replace(",", "'"),
            f"tensor({number})", hex(whole), chance.choice(["nan", "NaN", "-nan", "inf", "-Infinity", "INF"]),
            f"{number} # best", f"{number}, lr=3", f"{number} | step 3", "none", "", "inference done", f"{number}M",
            f"{whole}.",
        ]
    )  # fmt: skip


def draw_line(chance: random.Random, begin: str) -> str:
    """Draw a line with a result, with what loggers put around it."""
    prefix = chance.choice(
        ["", "", "  ", "\t", "INFO:root:", "[rank0]: ", "20:33 - ", "\r 99%|##|", "\r   \r", "done "]
    )
    colour, plain = chance.choice([("", ""), ("\x1b[32m", "\x1b[0m"), ("\x1b[1;36m", "\x1b[m")])
    blank = chance.choice(["", "", " "])
    inside = f"{colour}{draw_number(chance)}{plain}" if chance.random() < 0.5 else draw_number(chance)
    return f"{colour}{prefix}{plain}{begin}{blank}{inside}"


NOISE = (
    "7 batches done",
    "100%|####| 3/3",
    "\r 12%|#",
    "warning: METRIC lines",
    "loss",
    "",
    "0.5",
    "\x1b[31mred\x1b[0m",
)


def draw_log(chance: random.Random, begin: str) -> str:
    """Draw the writes of two processes: whole lines in any order, and ends of lines that a write lacks."""
    lines = [f"{draw_line(chance, begin)}{chance.choice(['', ' '])}\n" for _ in range(chance.randint(1, 4))]
    others = [f"{chance.choice(NOISE)}{chance.choice(['', ' ', chr(13)])}\n" for _ in range(chance.randint(0, 4))]
    writes: list[str] = []
    while lines or others:
        writes.append((lines if lines and (not others or chance.random() < 0.5) else others).pop(0))
    return "".join(writes)


def draw_cuts(chance: random.Random, size: int) -> tuple[int, ...]:
    return tuple(sorted(chance.randint(0, size) for _ in range(chance.randint(0, 6))))


@pytest.mark.parametrize(("begin", "lines"), [("METRIC v=", {}), ("val loss:", LINE)])
def test_ten_thousand_logs_give_what_a_person_reads_or_nothing(begin: str, lines: dict[str, str]) -> None:
    chance, num_read = random.Random(20261128), 0  # noqa: S311 - a reproducible draw
    for _ in range(5_000):
        log = draw_log(chance, begin)
        data = log.encode()
        value = outcome(read(data, lines, draw_cuts(chance, len(data))), "v")
        if value is not None:
            num_read += 1
            assert value == pytest.approx(human(newest(log, begin) or ""), rel=1e-12, nan_ok=True), log
    assert num_read > 1_500


def test_a_line_that_another_process_broke_is_refused_or_right() -> None:
    chance = random.Random(20261128)  # noqa: S311 - a reproducible draw
    num_read = 0
    for _ in range(3_000):
        value = f"{chance.uniform(0, 10):.2f}"
        own = [f"METRIC v={value}", "\n"]
        other = [chance.choice([noise for noise in NOISE if re.search("[a-z#]", noise)]), "\n"]
        log = "METRIC v=2\n"
        while own or other:
            log += (own if own and (not other or chance.random() < 0.5) else other).pop(0)
        assert outcome(read(log.encode()), "v") in (float(value), None), log
        num_read += outcome(read(log.encode()), "v") is not None
    assert num_read > 500


def test_any_bytes_are_read_in_a_time_that_grows_with_their_number() -> None:
    chance = random.Random(20261126)  # noqa: S311 - a reproducible draw
    began = time.process_time()
    for _ in range(60):
        alphabet = chance.choice([b"0", b"1.", b" 1", b"x 1\n", b"loss: 1e5\n", b"METRIC v=1\x1b[", bytes(range(256))])
        log = bytes(chance.choices(alphabet, k=100_000))
        read(log, {"a": "loss: {}", "b": "1{}1", "c": " {} x", "d": "x{}"}, draw_cuts(chance, len(log)))
    assert time.process_time() - began < 30


def test_only_so_much_of_the_output_is_kept() -> None:
    results = PrintedResults(LINE)
    for _ in range(2_000):
        results.feed(b"x" * 65_536)
        assert len(results._rest) <= LONGEST_LINE


@given(st.floats(-1e6, 1e6), st.sampled_from([".1f", ".2f", ".3f", ".4f", ".6g", ".12g", "r"]))
def test_a_rounded_number_contradicts_nothing_and_another_one_does(value: float, form: str) -> None:
    shown = repr(value) if form == "r" else f"{value:{form}}"
    results = read(f"METRIC val={shown}\n".encode())
    if "val" not in results.values:  # it may be rounded to zero
        return
    printed, step = results.values["val"], max(1.0, abs(value))
    rounded_away = form == ".6g" and abs(value) >= 1e5
    assert (results.contradicting({"val": value}) == {}) or rounded_away
    for other in (value + 0.3 * step, value * 0.8 - step, value + step):
        assert results.contradicting({"val": other}) == {"val": printed}
    assert results.contradicting({"val": math.nan}) == {}


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=1, max_size=3000),
    st.lists(st.floats(0, 1), max_size=5),
    st.booleans(),
)
def test_a_number_that_is_printed_again_and_again_is_a_curve(
    values: list[float], cuts: list[float], by_pattern: bool
) -> None:
    before = "val " if by_pattern else "METRIC val="
    log = "".join(f"step {number}\n{before}{value!r}\n" for number, value in enumerate(values)).encode()
    lines = {"val": "val {}"} if by_pattern else {}
    curve = read(log, lines, cuts=tuple(sorted(int(cut * len(log)) for cut in cuts))).curves.get("val", ())
    assert len(curve) <= 400
    assert [value for _line, value in curve] == [values[line - 1] for line, _value in curve]
    if len(values) == 1:
        assert curve == (), "one number is no curve"
    else:
        assert (curve[0][0], curve[-1][0]) == (1, len(values)), "the last one counts, so it is drawn"
        assert len(curve) >= min(len(values), 150)


def test_only_the_first_names_have_curves() -> None:
    log = "".join(f"METRIC m{name}={step}\n" for step in range(3) for name in range(20)).encode()
    assert len(read(log).curves) == MOST_CURVES
