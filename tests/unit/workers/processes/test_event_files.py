"""TensorBoard's event files, as the writers of torch and of TensorBoard write them, beside TensorBoard's own reader."""

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary import Writer
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from ablate.workers.commands import logged_runs
from ablate.workers.commands.event_files import tensorboard_runs
from ablate.workers.commands.logged_runs import LoggedRun, files_below

TAGS = ("loss", "eval/loss", "val loss ä", "x" * 300)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
STEPS = st.integers(min_value=-(2**63), max_value=2**63 - 1)
LOGGED = st.lists(
    st.tuples(st.sampled_from(TAGS), NUMBERS, STEPS, st.sampled_from(["plain", "tensor", "double"])), max_size=40
)


def runs_of(folder: Path, wanted: Sequence[str] = TAGS) -> list[LoggedRun]:
    return list(tensorboard_runs(list(files_below(folder)), folder, wanted))


def by_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard's own reader finds, in its order, without any limit."""
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    reader.Reload()
    found = {}
    for tag in reader.Tags()["tensors"]:
        arrays = [(event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in reader.Tensors(tag)]
        if arrays[0][1].dtype.kind == "f" and arrays[0][1].shape == ():
            found[tag] = [(step, float(array)) for step, array in arrays]
    return found


def same(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    return [(step, repr(value)) for step, value in one] == [(step, repr(value)) for step, value in other]


@settings(max_examples=60, deadline=None)
@given(logged=LOGGED, with_others=st.booleans())
def test_scalars_of_torch_are_those_that_tensorboard_reads(logged, with_others) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = SummaryWriter(folder)
        for tag, value, step, style in logged:
            writer.add_scalar(tag, value, step, new_style=style != "plain", double_precision=style == "double")
        if with_others:
            writer.add_histogram("histogram", np.arange(9.0), 1)
            writer.add_text("text", "eval/loss 0.5", 1)
            writer.add_image("image", np.zeros((3, 200, 200)), 1)
        writer.close()
        (run,) = runs_of(folder)
        oracle = by_tensorboard(folder)
        assert run.broken is None
        assert run.problems == {}
        assert {tag for tag, numbers in run.numbers.items() if numbers} == oracle.keys() & set(TAGS)
        for tag, numbers in oracle.items():
            assert same(run.numbers[tag], numbers)


@settings(max_examples=30, deadline=None)
@given(logged=st.lists(st.tuples(st.sampled_from(TAGS), NUMBERS, STEPS), min_size=1, max_size=40))
def test_scalars_of_tensorboards_writer_are_those_that_it_reads(logged) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = Writer(str(folder / "validation"))
        for tag, value, step in logged:
            writer.add_scalar(tag, value, step)
        writer.close()
        (run,) = runs_of(folder)
        assert run.names == ("validation",)
        oracle = by_tensorboard(folder / "validation")
        assert {tag: len(numbers) for tag, numbers in run.numbers.items() if numbers} == {
            tag: len(numbers) for tag, numbers in oracle.items()
        }
        assert all(same(run.numbers[tag], numbers) for tag, numbers in oracle.items())


def test_one_element_is_a_scalar_and_more_are_none(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    one, two = (TensorShapeProto(dim=[TensorShapeProto.Dim(size=size)]) for size in (1, 2))
    content = np.float32(0.25).tobytes()
    tensors = {
        "content": (TensorProto(dtype="DT_FLOAT", tensor_content=content), 0.25),
        "doubles": (TensorProto(dtype="DT_DOUBLE", tensor_content=np.float64(0.1).tobytes()), 0.1),
        "one of one": (TensorProto(dtype="DT_FLOAT", tensor_shape=one, float_val=[0.5]), 0.5),
        "fill of two": (TensorProto(dtype="DT_FLOAT", tensor_shape=two, float_val=[0.5]), None),
        "two": (TensorProto(dtype="DT_FLOAT", tensor_shape=two, float_val=[0.5, 0.6]), None),
        "text": (TensorProto(dtype="DT_STRING", string_val=[b"0.5"]), None),
        "of another type": (TensorProto(dtype="DT_INT32", tensor_content=content), None),
        "none": (TensorProto(dtype="DT_FLOAT"), None),
    }
    writer = EventFileWriter(str(tmp_path))
    for name, (tensor, _value) in tensors.items():
        writer.add_event(Event(wall_time=1.0, summary=Summary(value=[Summary.Value(tag=name, tensor=tensor)])))
    writer.close()
    (run,) = runs_of(tmp_path, list(tensors))
    assert {name: numbers[0][1] if numbers else None for name, numbers in run.numbers.items()} == {
        name: value for name, (_tensor, value) in tensors.items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return an event file of six scalars."""
    folder = tmp_path_factory.mktemp("whole")
    writer = SummaryWriter(folder)
    for step in range(3):
        writer.add_scalar("loss", 1.0 / (step + 1), step)
        writer.add_scalar("other", step, step)
    writer.close()
    return next(files_below(folder)).read_bytes()


def of_bytes(folder: Path, content: bytes) -> LoggedRun:
    folder.mkdir(exist_ok=True)
    (folder / "events.out.tfevents.1.a.1.0").write_bytes(content)
    (run,) = runs_of(folder, ["loss"])
    return run


def test_a_file_that_ends_anywhere_is_whole_up_to_a_record_or_has_no_last_value(whole: bytes, tmp_path: Path) -> None:
    expected = of_bytes(tmp_path, whole).numbers["loss"]
    readable = [run for end in range(len(whole)) if (run := of_bytes(tmp_path, whole[:end])).broken is None]
    assert len(readable) == 1 + 6, "empty, behind the head of the file, and behind each record but the last"
    assert all(run.numbers["loss"] == expected[: len(run.numbers["loss"])] for run in readable)
    assert "ends within a record" in (of_bytes(tmp_path, whole[:-1]).broken or "")


def test_every_changed_byte_is_noticed(whole: bytes, tmp_path: Path) -> None:
    for place in range(len(whole)):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        assert of_bytes(tmp_path, changed).broken is not None, place


@settings(max_examples=300, deadline=None)
@given(data=st.data(), content=st.binary(max_size=200))
def test_any_bytes_give_numbers_or_a_reason(data, content: bytes) -> None:
    """Records with right checksums, so that every part of the reader sees hostile content."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "events.out.tfevents.1"
        if data.draw(st.booleans()):
            path.write_bytes(content)
        else:
            value = bytes([10, len(content) % 128]) + content
            nested = data.draw(st.sampled_from([content, b"\x2a" + bytes([len(value) % 128]) + value]))
            with path.open("wb") as file:
                RecordWriter(file).write(nested)
        (run,) = runs_of(Path(name), ["loss"])
        assert run.broken is None or "event file events.out.tfevents.1 " in run.broken


def test_files_of_a_folder_are_one_run_in_the_order_of_their_times(tmp_path: Path) -> None:
    for suffix, times in (("z", (1.0, 2.0)), ("a", (3.0, 4.0))):
        writer = SummaryWriter(tmp_path, filename_suffix=suffix)
        for at in times:
            writer.add_scalar("loss", at / 8, 0, walltime=at)
        writer.close()
    (run,) = runs_of(tmp_path, ["loss"])
    assert [value for _step, value in run.numbers["loss"]] == [0.125, 0.25, 0.375, 0.5]
    assert run.problems == {}
    writer = SummaryWriter(tmp_path, filename_suffix="other-rank")
    writer.add_scalar("loss", 1.0, 0, walltime=3.5)
    writer.close()
    (run,) = runs_of(tmp_path, ["loss"])
    assert "were written at the same time" in run.problems["loss"]


def test_links_pipes_and_closed_files_are_not_read(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    writer = SummaryWriter(outside)
    writer.add_scalar("loss", 0.5, 0)
    writer.close()
    inside.mkdir()
    (inside / "linked").symlink_to(outside)
    (inside / "events.out.tfevents.2").symlink_to(next(files_below(outside)))
    os.mkfifo(inside / "events.out.tfevents.3")
    assert list(files_below(inside)) == []
    real = inside / "events.out.tfevents.4"
    shutil.copy(next(files_below(outside)), real)
    (file,) = files_below(inside)
    real.unlink()
    real.symlink_to(next(files_below(outside)))  # between the look and the opening
    (run,) = tensorboard_runs([file], inside, ["loss"])
    assert "no regular file" in (run.broken or "")


def test_more_numbers_than_the_limit_are_refused(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_runs, "MOST_NUMBERS", 2)
    assert "more than 2 numbers of 'loss': log it less often" in (of_bytes(tmp_path, whole).broken or "")
    monkeypatch.setattr(logged_runs, "MOST_NUMBERS", 3)
    run = of_bytes(tmp_path, whole)
    assert math.isclose(run.numbers["loss"][-1][1], 1 / 3, rel_tol=1e-6)
    assert run.others == {"other"}
