"""Metrics that a program logs to W&B and MLflow, beside the values that it logged; and what is said without one."""

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter
from wandb.proto import wandb_internal_pb2

from ablate.experiments.design.metrics import LoggedMetric
from ablate.workers.commands.logged_results import MOST_POINTS, LoggedResults, ProgramLogs
from ablate.workers.commands.logged_runs import LoggedRun, files_below
from ablate.workers.commands.mlflow_stores import mlflow_runs
from ablate.workers.commands.wandb_files import wandb_runs

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own

TAGS = ("loss", "eval/loss", "a b.c", "ä")
KEYS = ("loss", "eval/loss", "a b.c")
"""MLflow takes fewer letters."""
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def same(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    return [(step, repr(float(value))) for step, value in one] == [(step, repr(float(value))) for step, value in other]


def by_tag(logged: Sequence[tuple[str, float, int]]) -> dict[str, list[tuple[int, float]]]:
    return {tag: [(step, value) for own, value, step in logged if own == tag] for tag in {one[0] for one in logged}}


WANDB = """
import json, sys, wandb
run = wandb.init(name="the run")
for entry in json.load(open("logged.json")):
    run.log(entry)
run.summary["best"] = 0.1
run.finish()
"""


def wandb_file(folder: Path, logged: Sequence[dict[str, Any]], source: str = WANDB) -> Path:
    (folder / "logged.json").write_text(json.dumps(logged))
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", source], cwd=folder, env=variables, check=True, capture_output=True)
    (file,) = (file for file in files_below(folder) if file.suffix == ".wandb")
    return file


@settings(max_examples=4, deadline=None)
@given(
    logged=st.lists(st.dictionaries(st.sampled_from(TAGS), NUMBERS | st.integers(-(2**40), 2**40)), max_size=400),
    long=st.booleans(),
)
def test_numbers_of_wandb_are_those_that_the_program_logged(logged: list[dict[str, Any]], long: bool) -> None:
    logged = [{"loss": 0.5, "table": {"a": 1, "b": [1]}, "words": "x" * (100_000 if long else 1)}, *logged, {"ä": 1.5}]
    with tempfile.TemporaryDirectory() as name:
        file = wandb_file(Path(name), logged)
        (run,) = wandb_runs([file], TAGS)
        assert (run.broken, run.names[0], len(run.names)) == (None, "the run", 2)
        for tag in TAGS:
            assert same(run.numbers[tag], [(at, entry[tag]) for at, entry in enumerate(logged) if tag in entry])
        assert run.others == {"table.a"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("wandb")
    return wandb_file(folder, [{"loss": 0.5, "words": "x" * 40_000}, {"loss": 0.25}]).read_bytes()


def of_bytes(folder: Path, content: bytes) -> LoggedRun:
    file = folder / "run-1.wandb"
    file.write_bytes(content)
    (run,) = wandb_runs([file], ["loss"])
    return run


def test_a_run_of_wandb_that_ends_anywhere_has_no_last_value(whole: bytes, tmp_path: Path) -> None:
    assert [value for _step, value in of_bytes(tmp_path, whole).numbers["loss"]] == [0.5, 0.25]
    for end in range(0, len(whole), 7):
        assert of_bytes(tmp_path, whole[:end]).broken is not None


def test_every_changed_byte_of_a_run_of_wandb_is_noticed(whole: bytes, tmp_path: Path) -> None:
    for place in range(0, len(whole), 11):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        assert of_bytes(tmp_path, changed).broken is not None, place


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=300), whole=st.booleans(), history=st.booleans())
def test_any_bytes_of_a_run_of_wandb_give_numbers_or_a_reason(content: bytes, whole: bool, history: bool) -> None:
    nested = b"\x12" + bytes([len(content) % 128]) + content if history else content
    record = struct.pack("<IHB", zlib.crc32(b"\x01" + nested), len(nested), 1) + nested
    with tempfile.TemporaryDirectory() as name:
        run = of_bytes(Path(name), b":W&B\xe1\xbe\x00" + record if whole else content)
        assert "file run-1.wandb " in (run.broken or "")


def test_typed_items_of_a_history_are_numbers_too(tmp_path: Path) -> None:
    """Of the protocol buffers of W&B, which its program does not write yet."""
    items = [wandb_internal_pb2.HistoryItem(nested_key=["a", "b"], integer=-7)]
    items += [wandb_internal_pb2.HistoryItem(key="c", number=0.1), wandb_internal_pb2.HistoryItem(key="d", text="0.1")]
    items += [wandb_internal_pb2.HistoryItem(key="e", value_json="true")]
    history = wandb_internal_pb2.HistoryRecord(item=items, step=wandb_internal_pb2.HistoryStep(num=3))
    records = [wandb_internal_pb2.Record(history=history), wandb_internal_pb2.Record(exit={"exit_code": 0})]
    content = b":W&B\xe1\xbe\x00"
    for record in records:
        own = record.SerializeToString()
        content += struct.pack("<IHB", zlib.crc32(b"\x01" + own), len(own), 1) + own
    file = tmp_path / "run-1.wandb"
    file.write_bytes(content)
    (run,) = wandb_runs([file], ["a.b", "c", "d", "e"])
    assert run.broken is None
    assert run.numbers == {"a.b": [(3, -7.0)], "c": [(3, 0.1)], "d": [], "e": []}


STORED = st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf])
"""A database of MLflow has the largest float in the place of infinity."""
LOGGED = st.lists(st.tuples(st.sampled_from(KEYS), STORED, st.integers(-(2**60), 2**60)), min_size=1, max_size=12)


@pytest.fixture(scope="module", params=["file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of a store of MLflow, and its client."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (folder / "mlruns").as_uri() if request.param == "file" else f"sqlite:///{folder / 'mlflow.db'}"
        client = mlflow.MlflowClient(uri)
        yield folder, client


@settings(max_examples=12, deadline=None)
@given(logged=LOGGED)
def test_metrics_of_mlflow_are_those_that_its_client_reads(store: tuple[Path, Any], logged: Any) -> None:
    folder, client = store
    run = client.create_run("0", run_name="a run: ä")
    for at, (key, value, step) in enumerate(logged):
        client.log_metric(run.info.run_id, key, value, step=step, timestamp=1_000 + at)
    (own,) = (one for one in mlflow_runs(list(files_below(folder)), KEYS) if run.info.run_id in one.names)
    client.delete_run(run.info.run_id)
    assert (own.broken, own.names) == (None, ("a run: ä", run.info.run_id))
    assert {key for key, numbers in own.numbers.items() if numbers} == {one[0] for one in logged}
    for key, numbers in by_tag(logged).items():
        history = sorted(client.get_metric_history(run.info.run_id, key), key=lambda metric: metric.timestamp)
        assert same(own.numbers[key], numbers)
        assert same(
            [(step, _bounded(value)) for step, value in numbers], [(m.step, _bounded(m.value)) for m in history]
        )
    assert all(run.info.run_id not in one.names for one in mlflow_runs(list(files_below(folder)), KEYS)), "deleted"


def _bounded(value: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, value)) if math.isinf(value) else value


def mlflow_files(folder: Path, numbers: str) -> LoggedRun:
    for name, text in (("meta.yaml", ""), ("metrics/loss", numbers)):
        (folder / "mlruns/0/1" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mlruns/0/1" / name).write_text(text)
    (run,) = mlflow_runs(list(files_below(folder)), ["loss"])
    return run


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("1 0.5 0\n2 0.25 1", "ends within a line"),
        ("1 0.5 0\n2 0.2", "ends within a line"),
        ("1 half 0\n", "is damaged"),
        ("\n", "is damaged"),
        ("1\n", "is damaged"),
        ("1 0.5 0 0 0 0 0\n", "is damaged"),
        (f"1 0.5 {'9' * 30}\n", "is damaged"),
    ],
)
def test_text_that_is_no_metric_of_mlflow_is_refused(tmp_path: Path, numbers: str, words: str) -> None:
    assert words in (mlflow_files(tmp_path, numbers).broken or "")


def test_metrics_of_old_and_new_versions_of_mlflow_are_read(tmp_path: Path) -> None:
    run = mlflow_files(tmp_path, "1 0.5\n2 0.25 1\n3 nan 2 data digest\n")
    assert same(run.numbers["loss"], [(0, 0.5), (1, 0.25), (2, math.nan)])


@pytest.mark.parametrize(
    "statements",
    [
        "",
        "CREATE TABLE runs (run_uuid, name, lifecycle_stage); CREATE VIEW metrics AS SELECT 1 AS key",
        "CREATE TABLE runs (run_uuid, name); CREATE TABLE metrics (key)",
        "CREATE TABLE runs (run_uuid, name, lifecycle_stage); INSERT INTO runs VALUES (1, 2, 'active');"
        "CREATE TABLE metrics (key, step, value, is_nan, run_uuid); INSERT INTO metrics VALUES ('loss', 1, 'x', 0, 1)",
        "CREATE TABLE runs (run_uuid, name, lifecycle_stage); INSERT INTO runs VALUES (1, 2, 'active');"
        "CREATE TABLE metrics (key, step, value, is_nan, run_uuid); INSERT INTO metrics VALUES ('loss', 1e9, 1, 0, 1)",
    ],
)
def test_a_database_that_is_no_store_of_mlflow_is_refused(tmp_path: Path, statements: str) -> None:
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as database:
        database.executescript(statements)
    database.close()
    runs = list(mlflow_runs([file], ["loss"]))
    assert "database mlflow.db: " in (runs[-1].broken or "")
    file.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 100)
    (run,) = mlflow_runs([file], ["loss"])
    assert "database mlflow.db: " in (run.broken or "")


def scalars(folder: Path, numbers: Sequence[float], tag: str = "eval/loss") -> None:
    writer = SummaryWriter(folder)
    for step, value in enumerate(numbers):
        writer.add_scalar(tag, value, step)
    writer.close()


def logs(folder: Path, **place: Any) -> ProgramLogs:
    own = {"tracker": "tensorboard", "tag": "eval/loss", **place}
    return ProgramLogs({"val_loss": LoggedMetric(**own)}, folder)


def test_the_last_number_is_the_result_and_all_are_its_curve(tmp_path: Path) -> None:
    own = logs(tmp_path)
    scalars(tmp_path / "code/runs", [0.5, math.nan, 0.25])
    assert own.read() == LoggedResults(values={"val_loss": 0.25}, curves={"val_loss": ((0, 0.5), (2, 0.25))})
    scalars(tmp_path / "code/more", [1.0] * 1000, tag="train/loss")
    values = own.read().values
    assert values == {"val_loss": 0.25}
    many = logs(tmp_path, tag="train/loss").read()
    assert many.problem is not None
    assert "wrote no event file" in many.problem, "those were there before"


def test_a_curve_is_thinned_with_its_ends(tmp_path: Path) -> None:
    own = logs(tmp_path)
    scalars(tmp_path, [float(step) for step in range(5000)])
    curve = own.read().curves["val_loss"]
    assert (len(curve), curve[0], curve[-1]) == (MOST_POINTS, (0, 0.0), (4999, 4999.0))
    assert all(step == value for step, value in curve)


def test_no_value_is_missing_without_a_reason(tmp_path: Path) -> None:
    own, named, absent = logs(tmp_path), logs(tmp_path, run="validation"), logs(tmp_path, run="test")
    wrong = logs(tmp_path, tag="eval_loss")
    assert str(own.read().problem).startswith(
        "the program wrote no event file (events.out.tfevents.*) of TensorBoard into the folder of its trial, which "
        "workload.metrics names for val_loss; write below the working folder or {out}"
    )
    scalars(tmp_path / "code/logs/train", [0.5])
    assert own.read().values == {"val_loss": 0.5}
    scalars(tmp_path / "code/logs/validation", [0.25])
    assert own.read().problem == (
        "2 runs of the program logged 'eval/loss' to TensorBoard, which workload.metrics names for val_loss: "
        "'code/logs/train', 'code/logs/validation'; name the one that counts, such as run: code/logs/validation"
    )
    assert named.read().values == {"val_loss": 0.25}
    assert absent.read().problem == (
        "the program logged no run 'test' to TensorBoard, which workload.metrics names for val_loss; its runs: "
        "'code/logs/train', 'code/logs/validation'"
    )
    assert wrong.read().problem == (
        "the program logged no number 'eval_loss' to TensorBoard, which workload.metrics names for val_loss; it "
        "logged: 'eval/loss'; did you mean 'eval/loss'?"
    )
    next(files_below(tmp_path / "code/logs/train")).write_bytes(b"torn")
    assert named.read().values == {"val_loss": 0.25}, "another run does not count"
    assert "cannot be read: event file events.out.tfevents." in str(own.read().problem)
    scalars(tmp_path / "code/logs/validation", [0.125])
    values = named.read().values
    assert values == {"val_loss": 0.125}, "a writer that was opened again"


def test_the_variables_are_those_of_the_trackers_that_a_spec_names(tmp_path: Path) -> None:
    assert logs(tmp_path).variables() == {}
    both = {"a": LoggedMetric(tracker="wandb", tag="a"), "b": LoggedMetric(tracker="mlflow", tag="b")}
    variables = ProgramLogs(both, tmp_path).variables()
    assert variables == {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path / "logged"),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/logged/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    assert (tmp_path / "logged").is_dir()


def test_another_number_of_the_program_contradicts_the_logged_one_beyond_its_digits() -> None:
    own = LoggedResults(values={"a": float("0.12345679104328156"), "b": 2.0, "c": 3.0, "d": math.nan})
    others = {"a": 0.123456789, "b": 2.5, "d": 1.0, "e": 1.0, "c": math.inf}
    assert own.contradicting(others) == {"b": 2.5}
