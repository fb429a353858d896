"""Read the metrics of runs from local stores of MLflow: folders of text files, or a database of SQLite."""

import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from ablate.workers.commands.logged_runs import LoggedRun, Unreadable, damaged
from ablate.workers.paths import open_plain

DATABASE = "mlflow.db"
_META, _METRICS, _NAME = "meta.yaml", "metrics", "tags/mlflow.runName"
_DELETED = re.compile("^lifecycle_stage: deleted$", re.MULTILINE)
_LINE = re.compile(r"-?[0-9]{1,20} (\S{1,40})(?: (-?[0-9]{1,19}))?(?: \S+ \S+)?")
"""Time, number, step; some versions add a data set."""
_MOST_BYTES = 256 * 2**20
"""Of the numbers of one metric."""
_MOST_TEXT = 2**16
"""Of a description of a run."""
_MOST = 1.7976931348623157e308
"""In a database, infinity."""


def mlflow_runs(files: Sequence[Path], wanted: Sequence[str]) -> Iterator[LoggedRun]:
    """Yield the runs in these files, whichever kind of store they belong to."""
    runs: dict[Path, dict[str, Path]] = defaultdict(dict)
    here = set(files)
    for file in files:
        if file.name == DATABASE:
            yield from _runs_of_a_database(file, wanted)
        for folder in file.parents if _METRICS in file.parts else ():
            if folder.name == _METRICS and folder.parent / _META in here:
                runs[folder.parent][file.relative_to(folder).as_posix()] = file
                break
    for folder, metrics in runs.items():
        if not _DELETED.search(_text(folder / _META)):
            yield _run_of_files(folder, metrics, wanted)


def _run_of_files(folder: Path, metrics: dict[str, Path], wanted: Iterable[str]) -> LoggedRun:
    run = LoggedRun(filter(None, [_text(folder / _NAME), folder.name]), wanted)
    run.others |= metrics.keys() - run.numbers.keys()
    for tag in run.numbers.keys() & metrics.keys():
        try:
            for step, value in _numbers(metrics[tag]):
                run.note(tag, step, value)
        except (Unreadable, OSError) as error:
            run.broken = f"file {tag} of run {run.names[0]} {error}"
    return run


def _text(path: Path) -> str:
    """Return the begin of a small file; nothing if there is none."""
    try:
        with open_plain(path) as file:
            return file.read(_MOST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""


def _numbers(path: Path) -> Iterator[tuple[int, float]]:
    with open_plain(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise Unreadable(f"has more than {_MOST_BYTES // 2**20} MiB: log it less often")
    if content and not content.endswith(b"\n"):
        raise Unreadable("ends within a line")
    for line in content.decode("ascii", "replace").splitlines():
        fields = _LINE.fullmatch(line)
        try:
            yield int(fields[2] or 0) if fields else 0, float(fields[1] if fields else "")
        except ValueError as error:
            raise damaged() from error


def _runs_of_a_database(path: Path, wanted: Sequence[str]) -> Iterator[LoggedRun]:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema=OFF")
            named = "SELECT name, type FROM sqlite_master WHERE name IN ('runs', 'metrics')"
            if dict(database.execute(named).fetchall()) != {"runs": "table", "metrics": "table"}:
                raise Unreadable("is no store of MLflow: it has no tables 'runs' and 'metrics'")
            active = "SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active' LIMIT 1000"
            for identity, name in database.execute(active).fetchall():
                run = LoggedRun([str(name), str(identity)], wanted)
                stored = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY rowid"
                for tag, step, value, is_nan in database.execute(stored, (identity,)):
                    if not isinstance(step, int) or not isinstance(value, float | int):
                        raise damaged()
                    run.note(str(tag), step, math.nan if is_nan else _unbounded(value))
                yield run
    except (sqlite3.Error, Unreadable) as error:
        run = LoggedRun([path.name], wanted)
        run.broken = f"database {path.name}: {error}"
        yield run


def _unbounded(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= _MOST else float(value)
