"""`python -m tests.interleavings`: on PostgreSQL, do one operation before every statement of another."""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.interleavings.rig import faults
from tests.interleavings.world import OPERATIONS, WORLDS, pairs, world


def main() -> None:
    """Try drawn pairs until the time is over, or all pairs; exit with 1 on a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; default: all pairs")
    parser.add_argument("--world", choices=sorted(WORLDS), action="append", help="only this one; default: all")
    parser.add_argument("--first", choices=sorted(OPERATIONS), action="append")
    parser.add_argument("--second", choices=sorted(OPERATIONS), action="append")
    parser.add_argument("--receipt", type=Path, default=None, help="a Markdown file for the counts and the faults")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # there is no broker
    chosen = pairs(options.world or WORLDS, options.first or OPERATIONS, options.second or OPERATIONS)
    random.Random(options.seed).shuffle(chosen)  # noqa: S311 - a reproducible order
    began, pauses = time.monotonic(), Counter[tuple[str, str, str]]()
    faulty: dict[tuple[str, ...], list[str]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ablate-interleavings-")))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        worlds = {
            name: stack.enter_context(world(name, folder / str(i)))
            for i, name in enumerate({pair[0] for pair in chosen})
        }
        for name, first, second in chosen:
            if time.monotonic() - began > options.seconds:
                break
            for fault in faults(worlds[name], first, second, pool):
                pauses[name, first, second] += 1
                if fault is not None:
                    faulty.setdefault(fault.kind, []).append(str(fault))
            for kind in [kind for kind in faulty if kind[:3] == (name, first, second)]:
                sys.stdout.write(f"{faulty[kind][0]} ({len(faulty[kind])} times)\n")
                sys.stdout.flush()
    count = f"{len(pauses)} of {len(chosen)} pairs, {pauses.total()} pauses, {len(faulty)} faults"
    sys.stdout.write(f"{count}, {time.monotonic() - began:.0f} s\n")
    if options.receipt is not None:
        examples = [f"{examples[0]} ({len(examples)} times)" for examples in faulty.values()]
        text = [f"# {count}", "", f"`python -m tests.interleavings --seed {options.seed}`", "", *_table(pauses)]
        options.receipt.write_text("\n".join([*text, *(f"- {example}" for example in examples)]) + "\n")
    sys.exit(bool(faulty))


def _table(pauses: Counter[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a table of pauses in all worlds: the row is stopped, the column runs meanwhile."""
    names = list(OPERATIONS)
    of_pairs = Counter[tuple[str, str]]()
    for (_, first, second), count in pauses.items():
        of_pairs[first, second] += count
    yield "Pauses of an operation (row), in each of which another one (column, by its number) ran, in all worlds:"
    yield ""
    yield f"| | {' | '.join(str(number) for number in range(1, len(names) + 1))} |"
    yield "|---|" + "---|" * len(names)
    for number, first in enumerate(names, 1):
        yield f"| {number} {first} | {' | '.join(str(of_pairs[first, second] or '-') for second in names)} |"
    yield ""
    worlds = Counter(world for world, _, _ in pauses)
    yield f"Pairs by world: {', '.join(f'{name} {count}' for name, count in sorted(worlds.items()))}."
    yield ""


if __name__ == "__main__":
    main()
