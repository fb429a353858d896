"""Compare the cuda lane with the official kernels on this GPU: accuracy, speed, and attention beside the scan.

Part chain needs no scan: it times three chained matrix products in CuTe DSL and by torch.bmm.

Usage: python -m tests.kernels.bench [--only PART] [--quick] [--out DIR] [--peer-site DIR] [--jobs N]
[--compile-only]
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelError, KernelUnsupported
from tests.kernels.bench import cases, parts
from tests.kernels.bench.cases import BenchCase
from tests.kernels.bench.chain import CHAINS
from tests.kernels.bench.compiling import compile_first, needed
from tests.kernels.bench.lane_process import LaneProcess, lane_process
from tests.kernels.bench.render import page
from tests.kernels.bench.report import Machine, Row, TablePart, sorted_rows, store, stored
from tests.kernels.bench.runs import ATTENTION_BACKENDS

PARTS = ("accuracy", "speed", "attention", "chain")
PAGE = "README.md"


def main() -> int:
    """Run and store the parts; print the page."""
    arguments = _arguments()
    selected = PARTS if arguments.only is None else (arguments.only,)
    try:
        for part in selected:
            _run(part, arguments)
    except KernelUnsupported as error:
        sys.stderr.write(f"bench-kernels: {error}\n")
        return 1
    if arguments.compile_only:
        return 0
    text = page(stored(arguments.out, PARTS))
    (arguments.out / PAGE).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-kernels", description=__doc__.splitlines()[0] if __doc__ else None)
    day = datetime.now(UTC).date().isoformat()
    parser.add_argument("--only", choices=PARTS, help="run this part; the page shows all stored parts")
    parser.add_argument("--quick", action="store_true", help="three problems for accuracy, one for speed, ten samples")
    parser.add_argument("--out", type=Path, default=Path("docs/receipts") / f"{day}-bench-kernels")
    parser.add_argument("--peer-site", type=Path, help="folder with mamba-ssm and its TileLang, see `make peer`")
    parser.add_argument("--jobs", type=int, default=6, help="compiling processes; 0: compile on demand")
    parser.add_argument("--compile-only", action="store_true", help="only compile")
    return parser.parse_args()


def _problems(part: str, quick: bool) -> tuple[BenchCase, ...]:
    if part == "accuracy":
        return tuple(case for case in cases.ACCURACY if not quick or case.name in ("N64 P64 R4", "S8191", "G4"))
    if part == "attention":
        return cases.ATTENTION
    if part == "chain":
        return ()
    return cases.SPEED[: 1 if quick else None]


def _run(part: str, arguments: argparse.Namespace) -> None:
    problems = _problems(part, arguments.quick)
    requested = (Lane.CUDA, Lane.PEER) if part in ("accuracy", "speed") else (Lane.CUDA,)
    with _lanes(requested, arguments.peer_site) as (lanes, absent):
        if arguments.jobs > 0:
            missing = needed(part, problems, [lane.lane for lane in lanes])
            compile_first(missing, arguments.peer_site, arguments.jobs)
        if arguments.compile_only:
            return
        rounds, repeats = (2, 5) if arguments.quick else (5, 5)
        ceilings = lanes[0].ask("ceilings") if part == "speed" else {}
        bench = parts.BenchRun(lanes=lanes, rounds=rounds, repeats=repeats, ceilings=ceilings)
        machine = Machine(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=parts.gpu("name"),
            driver=parts.gpu("driver_version"),
            clocks_before=parts.gpu("clocks.sm,clocks.mem"),
            clocks_after="not reached",
            versions={lane.lane: lane.ask("versions") for lane in lanes},
            absent=absent,
            ceilings=ceilings,
        )
        rows: list[Row] = []
        for row in _rows(part, bench, problems):
            rows.append(row)
            store(TablePart(part=part, machine=machine, complete=False, **sorted_rows(rows)), arguments.out)
        machine = machine.model_copy(update={"clocks_after": parts.gpu("clocks.sm,clocks.mem")})
    store(TablePart(part=part, machine=machine, **sorted_rows(rows)), arguments.out)


def _rows(part: str, bench: parts.BenchRun, problems: tuple[BenchCase, ...]) -> Iterable[Row]:
    if part == "accuracy":
        return parts.accuracy(bench, problems)
    if part == "speed":
        return parts.speed(bench, problems)
    if part == "chain":
        return parts.chain(bench, CHAINS)
    return parts.attention(bench, problems, ATTENTION_BACKENDS)


@contextmanager
def _lanes(requested: tuple[Lane, ...], site: Path | None) -> Iterator[tuple[tuple[LaneProcess, ...], dict[str, str]]]:
    """Start the lanes; yield (running lanes, absent lane -> reason). Raises an error if our lane cannot run."""
    with lane_process(requested[0]) as ours:
        ours.ask("ready")
        if Lane.PEER not in requested:
            yield (ours,), {}
            return
        with lane_process(Lane.PEER) as peer:
            try:
                peer.ask("ready", site)
            except KernelError as error:
                yield (ours,), {Lane.PEER: str(error)}
            else:
                yield (ours, peer), {}


if __name__ == "__main__":
    sys.exit(main())
