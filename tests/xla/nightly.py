"""The last whole run of lane xla's tests, stored beside them.

    make nightly           # runs `make test-tpu` and writes last_run.json, to be committed
    make nightly-result    # shows last_run.json; fails if a test failed, or if the run is too old

Continuous integration does not install the lane's environment, so it judges the stored run. The age counts up to the
last commit, so that an old checkout does not fail by itself.
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

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_name("last_run.json")
MAX_AGE = timedelta(days=14)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one run of `make test-tpu`."""

    date: str
    """End of the run, RFC 3339 UTC."""
    commit: str
    """Commit of the tree at the start, with `+changes` if a tracked file differed from it."""
    passed: int
    skipped: int
    failed: int
    """Failures and errors."""
    seconds: float
    processor_seconds: float
    """Seconds of all processes on all cores."""

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.skipped} skipped, {self.failed} failed"
        times = f"{self.seconds:.0f} s, {self.processor_seconds:.0f} s of processors"
        return f"lane xla: {counts} in {times}, on {self.date} at {self.commit}"

    def problem(self, now: datetime) -> str | None:
        """Return why this run does not vouch for the code of `now`, or None."""
        if self.failed or not self.passed:
            return f"{self.failed} tests of lane xla failed and {self.passed} passed; run make nightly again"
        age = now - datetime.fromisoformat(self.date)
        if age > MAX_AGE:
            return f"the last run of lane xla is {age.days} days old; allowed: {MAX_AGE.days}; run make nightly"
        return None


def run_tests() -> tuple[int, Run]:
    """Run `make test-tpu`; return its exit code and the result."""
    began = time.monotonic()
    changes = "+changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    commit = _git("rev-parse", "--short=12", "HEAD") + changes
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
        code = subprocess.run(
            ["make", "test-tpu"], cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": options}, check=False
        )
        counts = _counts(report) if report.is_file() else {"passed": 0, "skipped": 0, "failed": 0}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        seconds=round(time.monotonic() - began, 1),
        processor_seconds=round(used.ru_utime + used.ru_stime, 1),
        **counts,
    )
    return code.returncode, result


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


def main() -> int:
    """Run the tests and store the result, or judge the stored one; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="judge the stored run")
    if parser.parse_args().show:
        stored = Run(**json.loads(STORED.read_text(encoding="utf-8")))
        problem = stored.problem(datetime.fromisoformat(_git("log", "-1", "--format=%cI")))
        sys.stdout.write(f"{stored}\n")
        if problem is None:
            return 0
        sys.stdout.write(f"error: {problem}\n")
        return 1
    code, result = run_tests()
    STORED.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{result}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
