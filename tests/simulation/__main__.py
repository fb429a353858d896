"""`python -m tests.simulation`: simulate the judge's errors and print the tables (docs/statistics.md)."""

import argparse

from tests.simulation.table import dependence_table, tables


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=4000, help="ablations per cell")
    parser.add_argument("--dependence", action="store_true", help="the table of dependent blocks alone")
    options = parser.parse_args()
    print(f"{options.repetitions:,} ablations per cell; 95 % Monte-Carlo intervals in brackets.\n")  # noqa: T201
    chosen = [dependence_table(options.repetitions)] if options.dependence else tables(options.repetitions)
    for table in chosen:
        print(table, flush=True)  # noqa: T201  # a program for the terminal


if __name__ == "__main__":
    main()
