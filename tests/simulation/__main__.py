"""`python -m tests.simulation`: simulate the judge's errors and write the tables of docs/statistics.md."""

import argparse
from pathlib import Path

from experiments.digest import SOURCE_ROOT
from tests.simulation.table import tables

PAGE = SOURCE_ROOT / "docs" / "statistics.md"
START, END = "<!-- simulated: written by make simulate -->", "<!-- end of simulated -->"


def main() -> None:
    """Write the tables between their marks, or print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=4000, help="ablations of every cell")
    parser.add_argument("--show", action="store_true", help="print, and leave the page as it is")
    given = parser.parse_args()
    found = []
    for table in tables(given.repetitions):
        print(table, flush=True)  # noqa: T201  # a program for the terminal
        found.append(table)
    if not given.show:
        write(PAGE, given.repetitions, found)


def write(page: Path, repetitions: int, found: list[str]) -> None:
    """Replace what stands between the marks of `page`."""
    before, rest = page.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    head = f"{repetitions:,} ablations for every cell; in brackets 95 % Monte-Carlo intervals (Clopper and Pearson)."
    page.write_text("\n".join([f"{before}{START}", head, "", *found]) + f"{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
