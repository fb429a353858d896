"""`python -m tests.faults --count 30 --seed 1`: plant faults in copies of the product; do the tests find each?"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.planting import Fault, drawn

ROOT = Path(__file__).resolve().parents[2]
_STAGE_S = 1500
_KERNELS = ["tests/kernels", "tests/unit/kernels"]
_STAGES = (
    ["tests/architecture", "tests/unit", "tests/simulation"],
    ["tests/integration", "tests/chaos"],
    ["tests/acceptance"],
)
"""The whole suite except the kernels' tests, cheapest part first."""


def main() -> None:
    """Plant one fault after another, print and store what each run of the tests said."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="number of the first fault, to continue a run")
    parser.add_argument("--out", type=Path, default=None, help="a JSON-lines file to append results to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ablate-faults-") as folder:
        copy = Path(folder)
        python = _installed(copy)
        faults = drawn(copy, count=options.count, seed=options.seed)
        survivors = 0
        for number, fault in enumerate(faults, start=1):
            if number >= options.first:
                survivors += not _answered(number, fault, copy, python, options.out)
    sys.stdout.write(f"{survivors} faults were not found\n")
    sys.exit(survivors > 0)


def _installed(copy: Path) -> Path:
    """Copy the committed tree and make an environment whose `ablate` is the copy's; return its Python."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", copy], input=archive.stdout, check=True)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    environment = copy / ".venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment}))
    packages.joinpath("tools.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    python = environment / "bin/python"
    options = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *options, "--editable", copy], check=True)
    return python


def _answered(number: int, fault: Fault, copy: Path, python: Path, out: Path | None) -> bool:
    """Plant a fault, run the tests until one fails, take the fault back. Return whether one failed."""
    began = time.monotonic()
    try:
        finder = next(filter(None, (_finder(fault, tests, copy, python) for tests in _runs(fault, copy))), None)
    except RuntimeError as error:
        sys.stdout.write(f"{number:3} {fault}\n    NO RESULT: {error}\n")
        return False
    seconds = time.monotonic() - began
    sys.stdout.write(f"{number:3} {fault}\n    {finder or 'NOT FOUND'} ({seconds:.0f} s)\n")
    sys.stdout.flush()
    if out is not None:
        row = {"number": number, "fault": str(fault), "found_by": finder, "seconds": round(seconds)}
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
    return finder is not None


def _finder(fault: Fault, tests: list[str], copy: Path, python: Path) -> str | None:
    """Return the test that fails with the fault and passes without it; None if there is none among `tests`."""
    path = copy / fault.file
    text, red = path.read_bytes(), []
    while True:
        fault.plant(copy)
        try:
            left_out = [f"--deselect={name}" if "::" in name else f"--ignore={name}" for name in red]
            failed = _failed([*tests, *left_out], copy, python)
        finally:
            path.write_bytes(text)
        if failed is None or _failed([failed], copy, python) is None:
            return failed
        red.append(failed)


def _runs(fault: Fault, copy: Path) -> Iterator[list[str]]:
    """Yield arguments for pytest: the tests that name the changed module, then the whole suite by stages."""
    near = _near(fault.file, copy)
    if near:
        yield near
    of_kernels = fault.file.startswith("kernels/")
    yield from ([_KERNELS, *_STAGES] if of_kernels else [*_STAGES, _KERNELS])


def _near(file: str, copy: Path) -> list[str]:
    module = re.escape(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    parent, _, leaf = module.rpartition("\\.")
    named = re.compile(rf"{module}\b|from {parent} import [^\n]*\b{leaf}\b")
    tests = [path for path in sorted((copy / "tests").rglob("test_*.py")) if "acceptance" not in path.parts]
    return [path.relative_to(copy).as_posix() for path in tests if named.search(path.read_text(encoding="utf-8"))]


def _failed(arguments: list[str], copy: Path, python: Path) -> str | None:
    """Run tests until the first fails; return its name, None if all passed.

    Raises RuntimeError when the run ends without the name of a failed test, which proves nothing.
    """
    command = [python, "-m", "pytest", "-x", "-q", "-n2", "--dist", "loadscope", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "ABLATE_HOME": str(copy / ".ablate")}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=_STAGE_S
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the tests had not ended after {_STAGE_S} s") from error
    if done.returncode in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return failed.group(1)


if __name__ == "__main__":
    main()
