"""`python -m tests.troubles`: run drawn programs of trouble through a real stack, and check all that is left of them.

Each ablation has one drawn program as each variant, beside a program without trouble. An independent rule says which
value a trial may have stored. After each ablation nothing of the trials may be left on the machine, and no attempt may
have spoken against the node. 1 if anything is wrong.
"""

import argparse
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ablate.experiments.outcomes import FailureClass
from tests.acceptance.test_stack import Home
from tests.stopping import leave_when_told
from tests.troubles.drawing import WELL, Expected, draw, expected

TOGETHER = 10
"""Variants of one ablation."""
BLOCKS = 6
MARK = b"ablate-trouble"
CALM = {
    **{"inside": False, "older": False, "form": "plain", "end": "return"},
    **dict.fromkeys(("before", "between", "after", "children", "files"), "none"),
}
IPC = ("shm", "sem", "msg")


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.troubles", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="trials at least")
    parser.add_argument("--programs", type=int, default=40, help="drawn programs")
    parser.add_argument("--seed", default="1", help="the same seed draws the same programs")
    parser.add_argument("--port", type=int, default=18_850)
    arguments = parser.parse_args()
    leave_when_told()
    folder = Path(tempfile.mkdtemp(prefix="ablate-stack-of-troubles-"))
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.environment |= {"ABLATE_CONTROL_EVERY": "0", "ABLATE_PORT": str(arguments.port), "ABLATE_QUIET_S": "0"}
    home.environment |= {"ABLATE_MLFLOW_URL": f"http://127.0.0.1:{arguments.port + 1}"}
    home.up()
    try:
        wrong = list(_all(home, folder, arguments))
    finally:
        home.run("down")
    wrong += [f"after the stack: {what}" for what in left_behind(folder)]
    for sentence in wrong:
        say(f"WRONG {sentence}")
    say(f"{len(wrong)} wrong" + (f"; the home is {folder}" if wrong else ""))
    if not wrong:
        shutil.rmtree(folder)
    return int(bool(wrong))


def _all(home: Home, folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Run ablations until there were enough trials; yield what is wrong."""
    troubles, done, number = draw(arguments.seed, arguments.programs), 0, 0
    (folder / "code").mkdir()
    shutil.copy(Path(__file__).with_name("train.py"), folder / "code")
    groups = [troubles[first : first + TOGETHER] for first in range(0, len(troubles), TOGETHER)]
    while done < arguments.count:
        group, name = groups[number % len(groups)], f"troubles-{number}"
        began = time.monotonic()
        receipts = _run(home, folder, name, group)
        wrong = [*_answers(name, receipts, group), *_books(home, name), *left_behind(folder)]
        yield from wrong
        done, number = done + len(receipts), number + 1
        say(f"{name}: {len(receipts)} trials in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
        if len(receipts) != BLOCKS * (1 + len(group)):
            yield f"{name}: {len(receipts)} receipts"
            return


def _run(home: Home, folder: Path, name: str, group: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run one ablation to its end; return its receipts."""
    spec = {
        "ablation": name,
        "question": "Does trouble stay where it was made?",
        "workload": {
            "command": ["python", "train.py", "{seed}"],
            "code": ".",
            "steps": {"warmup": 1, "timed": 3},
            "metrics": {"val": {"better": "lower"}},
        },
        "baseline": {"args": [json.dumps(CALM)]},
        "variants": {f"t{place}": {"args": [json.dumps(trouble)]} for place, trouble in enumerate(group)},
        "design": {"seeds": list(range(1, BLOCKS + 1)), "blocks": {"count": BLOCKS}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "limits": {"trial": "2m", "device_minutes": 600},
        "verdict": {"primary": {"metric": "val", "margin": "2%", "adopt_if": "5%"}},
    }

    path = folder / "code" / f"{name}.json"
    path.write_text(json.dumps(spec))
    ran = home.run("run", str(path))
    if ran.returncode not in range(5):
        say(ran.stdout + ran.stderr)
    receipts = home.run("offline", "receipts", name, "--json").stdout
    return list(json.loads(receipts or "[]"))


def _answers(name: str, receipts: Sequence[dict[str, Any]], group: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield every receipt that says something else than the program did."""
    for receipt in receipts:
        trouble = CALM if receipt["arm"] == "baseline" else group[int(receipt["arm"].removeprefix("t"))]
        problem = _problem(receipt, trouble, expected(trouble))
        if problem is not None:
            yield f"{name} {receipt['arm']} seed {receipt['seed']}: {problem}; {json.dumps(trouble)}"


def _problem(receipt: dict[str, Any], trouble: dict[str, Any], allowed: Expected) -> str | None:
    counted = receipt["outcome"] in ("measured", "invalid")
    stored = (receipt.get("program") or {}).get("reported", {}).get("val")
    right = 1.5 + receipt["seed"] / 8
    if counted and not allowed.measured:
        return f"counts with {stored} and must fail"
    if counted and stored != right:
        return f"stored {stored} instead of {right}"
    if not counted and not allowed.failed:
        return f"failed: {receipt['failure_class']}: {receipt['message']}"
    if not counted and receipt["failure_class"] != "user_error":
        return f"failed as {receipt['failure_class']}: {receipt['message']}"
    if stored not in (None, right) and trouble["end"] in WELL:
        return f"a failed trial stored {stored}"
    return None


def _books(home: Home, name: str) -> Iterator[str]:
    """Yield every attempt that broke, and a node that takes no work."""
    with sqlite3.connect(f"file:{home.files.home / 'ablate.db'}?mode=ro", uri=True) as books:
        rows = books.execute("select state, failure_class from attempts where state != 'done'").fetchall()
    others = [
        row for row in rows if row[1] not in (FailureClass.DISTURBED, FailureClass.INVALID_MEASUREMENT)
    ]  # by load
    yield from (f"{name}: an attempt is {state}: {failure}" for state, failure in others)
    for node in json.loads(home.run("nodes", "--json").stdout):
        if (node["health"], node["state"]) != ("live", "works"):
            yield f"{name}: the node is {node}"


def left_behind(folder: Path) -> Iterator[str]:
    """Yield processes, files and segments of troubles that are left on this machine, except in the trials' folders."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if MARK in (process / "cmdline").read_bytes().split(b"\0"):
                yield f"process {process.name}"
        except OSError:
            continue
    kept = folder / "home/work"  # each trial's own folder
    for place in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108  # where trials may write
        for above, folders, files in os.walk(place):
            folders[:] = [name for name in folders if Path(above, name) != kept]
            yield from (f"file {above}/{name}" for name in (*folders, *files) if name.startswith(MARK.decode()))
    yield from (f"folder {path}" for path in kept.glob("*/*/tmp"))
    for kind in IPC:
        rows = Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
        keys = (int(row.split()[0]) for row in rows)
        yield from (f"System V {kind} {key:#x}" for key in keys if 0x0AB1A7E0 <= key < 0x0AB1A7F0)


def say(line: str) -> None:
    """Print one line without buffering."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
