"""The last whole runs of what continuous integration does not run itself, stored beside this file.

    make nightly           # runs all and writes nightly.json, to be committed
    make nightly-result    # shows nightly.json; fails if a test failed, if a run is too old or had other kernels

These are the long tests (long_tests.py), those of them that run kernels, and those of lane xla, which need an
environment of their own. The age of a run counts up to the last commit, so an old checkout does not fail by itself.
A run of kernels counts only for the folder `kernels` that it ran with.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
STORED = Path(__file__).with_suffix(".json")
MAX_AGE = timedelta(days=14)
TARGETS = {"long tests": "test-long", "kernels": "test-kernels", "lane xla": "test-tpu"}
"""What is run -> target of the Makefile."""
OF_KERNELS = ("kernels", "lane xla")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one run of a target."""

    date: str
    """End of the run, RFC 3339 UTC."""
    commit: str
    """Commit of the tree at the start, with `+changes` if a tracked file differed from it."""
    kernels: str
    """Git's digest of the folder `kernels` of that commit."""
    passed: int
    skipped: int
    failed: int
    """Failures and errors."""
    seconds: float
    processor_seconds: float
    """Seconds of all processes on all cores."""

    def line(self, name: str) -> str:
        """Return the result in a line."""
        counts = f"{self.passed} passed, {self.skipped} skipped, {self.failed} failed"
        times = f"{self.seconds:.0f} s, {self.processor_seconds:.0f} s of processors"
        return f"{name}: {counts} in {times}, on {self.date} at {self.commit}"

    def problem(self, name: str, now: datetime, kernels: str) -> str | None:
        """Return why this run does not vouch for the code of `now`, or None."""
        if self.failed or not self.passed:
            return f"{name}: {self.failed} tests failed and {self.passed} passed; run make nightly again"
        if name in OF_KERNELS and self.kernels != kernels:
            return f"{name}: kernels/ has changed since the last run; run make nightly"
        age = now - datetime.fromisoformat(self.date)
        if age > MAX_AGE:
            return f"{name}: the last run is {age.days} days old; allowed: {MAX_AGE.days}; run make nightly"
        return None


def run(target: str) -> tuple[int, Run]:
    """Run a target of the Makefile; return its exit code and the result."""
    used_before = _processor_seconds()
    began = time.monotonic()
    changes = "+changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    commit = _git("rev-parse", "--short=12", "HEAD") + changes
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
        code = subprocess.run(["make", target], cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": options}, check=False)
        counts = _counts(report) if report.is_file() else {"passed": 0, "skipped": 0, "failed": 0}
    result = Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        kernels=_kernels(),
        seconds=round(time.monotonic() - began, 1),
        processor_seconds=round(_processor_seconds() - used_before, 1),
        **counts,
    )
    return code.returncode, result


def _kernels() -> str:
    return _git("rev-parse", "HEAD:kernels")


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stored() -> dict[str, Run]:
    """Return the stored runs by name."""
    return {name: Run(**values) for name, values in json.loads(STORED.read_text(encoding="utf-8")).items()}


def _counts(report: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))  # noqa: S314  # pytest wrote it
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": tests - failed - skipped, "skipped": skipped, "failed": failed}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def show(now: datetime) -> int:
    """Print the stored runs with what is wrong with them; return the exit code for a commit of `now`."""
    runs, kernels = stored(), _kernels()
    problems = [f"{name}: never run; run make nightly" for name in TARGETS if name not in runs]
    problems += [problem for name, one in runs.items() if (problem := one.problem(name, now, kernels)) is not None]
    lines = [one.line(name) for name, one in runs.items()] + [f"error: {problem}" for problem in problems]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(bool(problems))


def main() -> int:
    """Run the tests and store their results, or judge the stored ones; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="judge the stored runs")
    parser.add_argument("--only", choices=[*TARGETS], help="run this one; the other stays as it is stored")
    arguments = parser.parse_args()
    if arguments.show:
        return show(datetime.fromisoformat(_git("log", "-1", "--format=%cI")))
    codes = []
    for name in [arguments.only] if arguments.only else TARGETS:
        code, result = run(TARGETS[name])
        codes.append(code)
        values = {title: asdict(one) for title, one in {**stored(), name: result}.items()}
        STORED.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"{result.line(name)}\n")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
