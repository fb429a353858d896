"""The output of programs on its way to the log and the results: whole lines, nothing lost, no reader that hangs."""

import os
import resource
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from ablate.experiments.in_trial import ablate
from ablate.experiments.outcomes import FailureClass
from ablate.workers.commands.printed_results import ProgramOutput
from ablate.workers.trials.result import TrialResult
from tests.programs import order_for, program_config, ran, write_program
from tests.waiting import LIMIT_S

RANKS = """
import os, subprocess, sys, time
other = subprocess.Popen([*sys.argv[1:], "other.py"])
while not os.path.exists("began"):
    time.sleep(0.01)
for epoch in range(300):
    print(f"METRIC val={3 - epoch / 100:.2f}")
    print("val", f"loss: {3 - epoch / 100:.2f}")
other.terminate()
other.wait()
print("METRIC val=0.01")
print("val loss:", 0.01)
"""
OTHER = """
print("7 batches done")
open("began", "w").close()
while True:
    print("7 batches done")
"""


def log_of(home: Path) -> str:
    return order_for(program_config(None), home).paths.log.read_bytes().decode("utf-8", "replace")


def printed_by(
    tmp_path: Path, source: str, command: tuple[str, ...] = ("python", "train.py"), **more: str
) -> TrialResult:
    folder = write_program(tmp_path / "code", source)
    for name, text in more.items():
        folder.joinpath(name).write_text(text, encoding="utf-8")
    config = program_config(folder, command=command, needs="process", lines={"printed": "val loss: {}"})
    return ran(config, tmp_path / "home")


@pytest.mark.parametrize("python", [("python",), ("python", "-u"), ("env", "PYTHONUNBUFFERED=1", "python")])
def test_lines_of_two_processes_never_mix(tmp_path: Path, python: tuple[str, ...]) -> None:
    result = printed_by(tmp_path, RANKS, (*python, "train.py", *python), **{"other.py": OTHER})
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert result.program.reported == {"val": 0.01, "printed": 0.01}
    lines = log_of(tmp_path / "home").splitlines()
    assert {line for line in lines if "METRIC" not in line and "val" not in line} == {"7 batches done"}


@pytest.mark.parametrize(
    ("source", "log", "reported"),
    [
        ("import os; print('METRIC a=1'); print('no end', end=''); os._exit(0)", "METRIC a=1\n", {"a": 1.0}),
        (
            "import os; os.system('echo METRIC a=2; echo METRIC b=1 > /dev/stderr')",
            "METRIC a=2\nMETRIC b=1\n",
            {"a": 2.0, "b": 1.0},
        ),
        ("import os; os.system('echo METRIC a=2 | tee /dev/stderr')", "METRIC a=2\nMETRIC a=2\n", {"a": 2.0}),
        (
            "import sys; print('one\\rtwo', end='', flush=True); print('\\nMETRIC a=1')",
            "one\rtwo\nMETRIC a=1\n",
            {"a": 1.0},
        ),
        ("import sys; print(sys.stdout.isatty(), sys.stdin.read() == '')", "False True\n", {}),
        ("import sitecustomize, sys; print(sys.stdout.line_buffering, sys.stderr.write_through)", "True False\n", {}),
    ],
)
def test_output_reaches_log_and_results(tmp_path: Path, source: str, log: str, reported: dict[str, float]) -> None:
    result = printed_by(tmp_path, source)
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert (log_of(tmp_path / "home"), result.program.reported) == (log, reported)


def test_a_program_that_is_killed_has_its_last_lines_in_the_log(tmp_path: Path) -> None:
    result = printed_by(tmp_path, "import os; print('last words'); os.kill(os.getpid(), 9)")
    assert result.failure_class is not None
    assert log_of(tmp_path / "home") == "last words\n"


def test_a_result_before_a_flood_of_bytes_is_found(tmp_path: Path) -> None:
    source = """
import os, sys
print("METRIC val=1.5")
sys.stdout.buffer.write(os.urandom(2_000_000) + b"\\x1b]0;title\\x07\\x1b[2J\\0" + b"x" * 38_000_000 + b"\\xff\\n")
"""
    result = printed_by(tmp_path, source)
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert result.program.reported == {"val": 1.5}
    assert order_for(program_config(None), tmp_path / "home").paths.log.stat().st_size > 40_000_000


def test_the_sitecustomize_of_the_environment_runs_too(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code", "import builtins; print('METRIC a=%d' % builtins.mine)")
    folder.joinpath("sitecustomize.py").write_text("import builtins; builtins.mine = 5", encoding="utf-8")
    command = ("env", "sh", "-c", "PYTHONPATH=$PYTHONPATH:$PWD exec python train.py")
    result = ran(program_config(folder, command=command, needs="process"), tmp_path / "home")
    assert result.program is not None
    assert result.program.reported == {"a": 5.0}, result.message


def test_a_log_that_cannot_grow_ends_the_program_and_names_the_limit(tmp_path: Path) -> None:
    from ablate.workers.trials.failures import describe

    log = os.open(tmp_path / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ended = threading.Event()
    with ProgramOutput(log, {}) as output:
        program = subprocess.Popen(["yes", "METRIC val=1.5"], stdout=output.writer)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            output.follow(ended.set)
            assert ended.wait(LIMIT_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert program.wait(LIMIT_S) == -signal.SIGPIPE, "a program that goes on printing does not wait for a reader"
        with pytest.raises(OSError, match="File too large") as caught:
            output.finish()
    os.close(log)
    assert describe(caught.value, most_bytes=100_000)[0] is FailureClass.OUTPUT_LIMIT
    assert (tmp_path / "log.txt").stat().st_size == 100_000


def test_a_process_that_keeps_the_pipe_open_holds_nobody_up(tmp_path: Path) -> None:
    log = os.open(tmp_path / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with ProgramOutput(log, {}) as output:
        kept = os.dup(output.writer)
        os.write(kept, b"METRIC val=1.5\n")
        output.follow(lambda: None)
        assert output.finish().values == {"val": 1.5}
        os.close(kept)
    os.close(log)


def test_five_thousand_results_keep_the_names_that_the_program_gave_them(tmp_path: Path) -> None:
    names = ["", "..", "val//acc", "top-5 acc, %", "gr\u00f6\u00dfe", "new\nline", "x" * 249 + "1", "x" * 249 + "2"]
    reported = {
        **dict.fromkeys(names, 0.5),
        **{f"average_precision/class_{n:05}/iou_0.50": n / 7 for n in range(5_000)},
    }
    source = f"import ablate\nwith ablate.trial() as trial:\n    trial.report(**{reported!r})\n"
    result = ran(program_config(write_program(tmp_path / "code", source), needs="process"), tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert result.program.reported == reported


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([f"m{number}" for number in range(10_001)], "10,001 results of"),
        ([f"{number:0250}" for number in range(3_000)], "allowed: 10,000 results of 800,000 bytes"),
        (["x" * 251], "has 251 letters; allowed: 250"),
        (["a\0"], "has a letter that no text can store"),
        (["\ud800"], "has a letter that no text can store"),
    ],
)
@pytest.mark.parametrize("active", [True, False])
def test_results_that_no_trial_can_have_are_refused_at_once(names: list[str], words: str, active: bool) -> None:
    settings = {"seed": 1, "out": ".", "warmup": 0, "timed": 1, "profile": False} if active else None
    trial = ablate.Trial(settings)
    with pytest.raises(ValueError, match=words):
        trial.report(**dict.fromkeys(names, 1.0))
