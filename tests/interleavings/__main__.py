"""`python -m tests.interleavings`: on PostgreSQL, do one operation before every statement of another."""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
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
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for counts and faults")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # there is no broker
    chosen = pairs(options.world or WORLDS, options.first or OPERATIONS, options.second or OPERATIONS)
    random.Random(options.seed).shuffle(chosen)  # noqa: S311 - a reproducible order
    began, pauses = time.monotonic(), Counter[str]()
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
                pauses[f"{name}: {second} in {first}"] += 1
                if fault is not None:
                    faulty.setdefault(fault.kind, []).append(str(fault))
            for kind in [kind for kind in faulty if kind[:3] == (name, first, second)]:
                sys.stdout.write(f"{faulty[kind][0]} ({len(faulty[kind])} times)\n")
                sys.stdout.flush()
    count = f"{len(pauses)} of {len(chosen)} pairs, {pauses.total()} pauses, {len(faulty)} faults"
    sys.stdout.write(f"{count}, {time.monotonic() - began:.0f} s\n")
    if options.out is not None:
        examples = [example for example, *_ in faulty.values()]
        result = {"seed": options.seed, "count": count, "faults": examples, "pauses": pauses}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
