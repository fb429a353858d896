"""`python -m tests.simulation`: simulate the judge's errors and write the tables of docs/statistics.md."""

import argparse
from pathlib import Path

from experiments.digest import SOURCE_ROOT
from tests.simulation.table import tables

PAGE = SOURCE_ROOT / "docs" / "statistics.md"
START, END = "<!-- simulated: written by make simulate -->", "<!-- end of simulated -->"


def main() -> None:
    """Write the tables into the page, or print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=4000, help="ablations per cell")
    parser.add_argument("--show", action="store_true", help="print, do not change the page")
    options = parser.parse_args()
    written = []
    for table in tables(options.repetitions):
        print(table, flush=True)  # noqa: T201  # a program for the terminal
        written.append(table)
    if not options.show:
        write(PAGE, options.repetitions, written)


def write(page: Path, repetitions: int, written: list[str]) -> None:
    """Replace the text between the marks of `page`."""
    before, rest = page.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    head = f"{repetitions:,} ablations per cell; 95 % Monte-Carlo intervals (Clopper and Pearson) in brackets."
    page.write_text("\n".join([f"{before}{START}", head, "", *written]) + f"{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
