"""Tables in terminals of 40 to 200 columns: no line too long, no name cut, nothing lost, ids that still tell apart."""

import io
import random
import string

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from ablate.experiments.ids import new_ids
from ablate.experiments.reporting.terminal.terminal_table import (
    SHORTEST_ID,
    TerminalTable,
    ids,
    names,
    numbers,
    texts,
    unique_prefixes,
)
from ablate.service.cli import tables, verdict_tables
from tests import views
from tests.public_rows import ablation_row, trial_row

NAMES = string.ascii_lowercase + string.digits + "-"
WIDTHS = range(40, 201)


def shown(what: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if cell_len(line) > width] == []
    return lines


def draw_name(draw: random.Random) -> str:
    """A legal name; many begin alike."""
    start = draw.choice(["", "", "chunk-", "psiv-cache-without-recomputing-"])
    return (start + "".join(draw.choices(NAMES, k=draw.randint(1, 40)))).strip("-") or "x"


def draw_text(draw: random.Random) -> str:
    words = ("".join(draw.choices(string.ascii_letters, k=draw.randint(1, 12))) for _ in range(draw.randint(0, 20)))
    return " ".join(words)


@pytest.mark.parametrize("seed", range(24))
def test_random_tables_keep_every_name_and_every_word(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    columns = [*names("name"), *ids("id"), *numbers("number"), *texts("text", "more"), *names("state")]
    rows = [
        (draw_name(draw), one, f"{draw.uniform(-1e5, 1e5):,.2f}", draw_text(draw), draw_text(draw), draw_name(draw))
        for one in new_ids("abl", draw.randint(1, 12))
    ]
    table = TerminalTable(*columns, title="a title of several words", leaving=("more", "id"))
    for row in rows:
        table.add_row(*row)
    for width in draw.sample(WIDTHS, 5):
        lines = shown(table, width)
        words = " ".join(lines).split()
        whole = [name for row in rows for name in (row[0], row[5]) if len(name) <= width - len("  state ")]
        assert [name for name in whole if name not in words] == [], width
        assert [row[2] for row in rows if row[2] not in words] == []
        assert [word for row in rows for text in row[3:5] for word in text.split() if word not in words] == []
        shown_ids = [word for word in words if word.startswith("abl_")]
        assert [[row[1] for row in rows if row[1].startswith(one)] for one in shown_ids] == [[row[1]] for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_a_name_longer_than_the_terminal_is_broken_and_not_cut(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    name = "".join(draw.choices(string.ascii_lowercase, k=63))
    table = TerminalTable(*names("arm"), *numbers("block"))
    table.add_row(name, "3")
    lines = shown(table, draw.randint(20, 40))
    assert name in "".join(line.strip() for line in lines)


@pytest.mark.parametrize("seed", range(20))
def test_unique_prefixes_are_the_shortest_that_tell_ids_apart(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    known = [
        "abl_" + "".join(draw.choices("01", k=draw.choice([12, 13]))) + "".join(draw.choices("0123456789", k=8))
        for _ in range(draw.randint(1, 60))
    ]
    for one, short in unique_prefixes(known).items():
        assert {other for other in known if other.startswith(short)} == {one}
        less = short[:-1]
        assert len(short) == SHORTEST_ID or {other for other in known if other.startswith(less)} != {one}


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_verdict_says_its_answer_in_one_line_at_80_columns(calibrated: bool) -> None:
    verdict = (views.view() if calibrated else views.cpu_view()).verdict
    assert verdict is not None
    for width in (80, 100, 140):
        lines = shown(verdict_tables.verdict(verdict), width)
        for variant in verdict.variants:
            line = next(line for line in lines if line.startswith(f"{variant.arm} "))
            assert variant.decision in line
            if variant.primary is not None:
                assert f"{abs(variant.primary.delta_pct):.2f}" in line
                assert f"{abs(variant.primary.ci_low_pct):.2f}" in line


@pytest.mark.parametrize("width", [40, 57, 80, 140, 200])
def test_everything_that_is_listed_fits(width: int) -> None:
    draw = random.Random(width)  # noqa: S311 - draws that repeat
    fresh = new_ids("abl", 20)
    rows = [
        ablation_row(id=one, name=draw_name(draw), waiting_for=draw.choice([None, draw_text(draw)])) for one in fresh
    ]
    words = " ".join(shown(tables.ablations(rows), width)).split()
    assert [row.name for row in rows if len(row.name) <= width and row.name not in words] == []
    trials = [trial_row(id=one, arm=draw_name(draw), block_index=index) for index, one in enumerate(new_ids("trl", 20))]
    words = " ".join(shown(tables.ablation(rows[0], trials), width)).split()
    assert [row.arm for row in trials if len(row.arm) <= width and row.arm not in words] == []
