import json
import random
from pathlib import Path

import pytest

from ablate.workers.lease import StopReason
from ablate.workers.paths import TrialPaths
from ablate.workers.processes import trial_output
from ablate.workers.processes.trial_output import BlockOutput, LogTail, TrialOutput, log_stop


def _read_all(tail: LogTail) -> tuple[str, list[int]]:
    text, offsets = "", []
    while (chunk := tail.next_chunk()) is not None:
        text += chunk.text
        offsets.append(chunk.offset)
        tail.accepted(chunk)
    return text, offsets


def test_next_chunk_never_splits_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_output, "CHUNK_BYTES", 5)
    log = tmp_path / "log.txt"
    original = "aé漢字🙂 loss ≈ 5.3\n" * 3
    log.write_text(original)
    text, offsets = _read_all(LogTail("trl", log))
    assert text == original
    assert offsets == sorted(set(offsets))
    raw = original.encode()
    assert all(raw[offset:].decode() for offset in offsets[1:])


def test_next_chunk_repeats_until_accepted(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("one\n")
    tail = LogTail("trl", log)
    first = tail.next_chunk()
    log.write_text("one\ntwo\n")
    assert tail.next_chunk() == first
    assert first is not None
    tail.accepted(first)
    second = tail.next_chunk()
    assert second is not None
    assert (second.offset, second.text) == (4, "two\n")


def test_next_chunk_replaces_damage_and_nul_and_keeps_offsets(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"a\0b\xff\n")
    tail = LogTail("trl", log)
    first = tail.next_chunk()
    assert first is not None
    assert first.text == "a\ufffdb\ufffd\n"
    tail.accepted(first)
    with log.open("ab") as file:
        file.write(b"next")
    second = tail.next_chunk()
    assert second is not None
    assert second.offset == len(first.text.encode())


def test_next_chunk_cuts_endless_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_output, "LOG_LIMIT_BYTES", 100)
    monkeypatch.setattr(trial_output, "CHUNK_BYTES", 60)
    log = tmp_path / "log.txt"
    log.write_text("x" * 1000)
    text, _offsets = _read_all(LogTail("trl", log))
    assert text.count("x") == 120
    assert text.endswith("the whole file is on the node]\n")


def test_progress_reads_last_whole_line(tmp_path: Path) -> None:
    paths = TrialPaths(folder=tmp_path)
    one = TrialOutput("trl", paths, steps_total=14)
    assert one.progress().steps_done == 0
    line = '{"index": %d, "phase": "timed", "seconds": 0.5, "tokens": 1024, "loss": %s, "grad_norm": 1.0}'
    paths.steps.write_text(line % (0, "NaN") + "\n")
    assert one.progress().loss is None
    paths.steps.write_text(line % (0, "NaN") + "\n" + line % (1, "8.0") + "\n" + '{"index": 2, "pha')
    progress = one.progress()
    assert (progress.steps_done, progress.steps_total, progress.loss) == (2, 14, 8.0)
    assert progress.tokens_per_s == pytest.approx(2048)
    paths.steps.write_text('{"index": 2, "seconds": 0.5, "tokens": 0}\n')
    assert TrialOutput("trl", paths, steps_total=14).progress().tokens_per_s is None


def test_a_steps_time_is_the_median_of_late_and_never_of_what_compiles(tmp_path: Path) -> None:
    paths = TrialPaths(folder=tmp_path)
    one = TrialOutput("trl", paths, steps_total=90)
    assert one.progress().step_s is None
    chance, seconds = random.Random(5), list[float]()  # noqa: S311
    for index in range(60):
        took = 40.0 if index == 0 else chance.uniform(0.1, 2.0)
        seconds += [took] if index else []
        line = {"index": index, "phase": "timed", "seconds": took, "tokens": 8, "loss": 8.0}
        with paths.steps.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if chance.random() < 0.3 or index == 0:
            late = sorted(seconds[-16:])
            middle = (late[(len(late) - 1) // 2] + late[len(late) // 2]) / 2 if late else None
            assert one.progress().step_s == (middle if middle is None else pytest.approx(middle))


def test_unsent_progress_is_that_which_the_service_lacks_and_the_running_trial(tmp_path: Path) -> None:
    block, files = BlockOutput(), {}

    def step(name: str, index: int) -> None:
        line = {"index": index, "phase": "timed", "seconds": 1, "tokens": 8, "loss": 8.0}
        with files[name].open("a") as file:
            file.write(json.dumps(line) + "\n")

    def send(*, arrives: bool = True) -> list[tuple[str, int, bool]]:
        progress = block.unsent_progress()
        if arrives:
            block.progress_accepted(progress)
        return [(one.trial_id, one.steps_done, one.over) for one in progress]

    assert send() == []
    for name in ("one", "two", "three"):  # as in slices: all are added before the first one starts
        (tmp_path / name).mkdir()
        files[name] = TrialPaths(folder=tmp_path / name).steps
        block.add(name, TrialPaths(folder=tmp_path / name), steps_total=2)
    block.runs("one")
    assert send() == [("one", 0, False)]
    step("one", 0)
    block.runs("two")
    assert send(arrives=False) == [("one", 1, False), ("two", 0, False)]
    assert send() == [("one", 1, False), ("two", 0, False)], "lost progress is sent again"
    assert send() == [("two", 0, False)]
    step("one", 1)
    block.end("one")
    step("two", 0)
    assert send() == [("one", 2, True), ("two", 1, False)]
    block.end("two")
    assert send() == [("two", 1, True)]
    assert [name for name, *_ in send()] == ["two"], "a heartbeat contains the last running trial"


def test_block_output_has_the_running_trial_and_all_logs(tmp_path: Path) -> None:
    block = BlockOutput()
    for name in ("trl_1", "trl_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(f"{name}\n")
        block.add(name, TrialPaths(folder=tmp_path / name), steps_total=2)
    assert _running(block) == "trl_2"
    block.runs("trl_1")  # as where trials run in slices
    assert _running(block) == "trl_1"
    chunks = block.chunks()
    assert [chunk.text for chunk in chunks] == ["trl_1\n", "trl_2\n"]
    block.chunks_accepted(chunks)
    assert block.chunks() == ()


def _running(block: BlockOutput) -> str | None:
    progress = block.progress()
    return None if progress is None else progress.trial_id


def test_a_trial_that_waits_for_quiet_is_not_said_to_run(tmp_path: Path) -> None:
    output = BlockOutput()
    for name in ("one", "two"):
        output.add(name, TrialPaths(folder=tmp_path / name), steps_total=4)
        output.waits("quiet: others take 70%")
        assert (output.running, output.waiting) == (None, "quiet: others take 70%")
        assert name not in [one.trial_id for one in output.unsent_progress()], "its arm did nothing yet"
        output.waits(None)
        assert (output.running, output.waiting) == (name, None)
        assert output.unsent_progress()[-1].trial_id == name
        output.end(name)


def test_log_stop_appends_time_steps_and_reason(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("step 1")
    log_stop(log, StopReason.TIMEOUT, 12.34, "5 of 14 steps")
    assert log.read_text() == "step 1\n[the worker stopped this trial after 12.3 s and 5 of 14 steps: timeout]\n"
    log_stop(tmp_path / "gone" / "log.txt", StopReason.TIMEOUT, 1.0, "no steps")  # writes nothing


def test_logs_of_one_message_are_bounded_as_json(tmp_path: Path) -> None:
    """Control characters take six bytes in JSON."""
    output = BlockOutput()
    for number in range(4):
        paths = TrialPaths(folder=tmp_path / str(number))
        paths.log.parent.mkdir(parents=True)
        paths.log.write_text("\x01" * 150_000)
        output.add(f"trl_{number}", paths, steps_total=1)
    received: dict[str, str] = {}
    while chunks := output.chunks():
        assert sum(len(json.dumps(chunk.text)) for chunk in chunks) <= trial_output.MAX_LOG_JSON_BYTES
        for chunk in chunks:
            received[chunk.trial_id] = received.get(chunk.trial_id, "") + chunk.text
        output.chunks_accepted(chunks)
    assert received == {f"trl_{number}": "\x01" * 150_000 for number in range(4)}
