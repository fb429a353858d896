"""How a program's end is judged: signals of its own, exit codes, lost ranks, processes that outlive the first one."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.outcomes import FailureClass
from ablate.workers.commands import program_end
from ablate.workers.commands.program_end import ProgramEnd, RankFailure, exit_words, program_failure
from ablate.workers.commands.ranks import ProgramRank
from ablate.workers.trials.result import TrialResult
from tests.programs import program_config, ran, write_program

MARKED = """
import ablate, os, signal, sys, time
with ablate.trial(seed=7) as trial:
    for step in trial.steps():
        step.report(loss=1.0, tokens=10)
    {last}
{after}
"""


def marked(tmp_path: Path, last: str = "pass", *, after: str = "", **changes: Any) -> TrialResult:
    code = write_program(tmp_path / "code", MARKED.format(last=last, after=after))
    return ran(program_config(code, **{"command": ("python", "train.py"), **changes}), tmp_path / "home")


def end(**changes: Any) -> ProgramEnd:
    fields: dict[str, Any] = {
        "exit_code": 0,
        "oom_kills": 0,
        "reported": {},
        "last_line": "last",
        "failed": None,
        "wrong": None,
        "loops": {},
        "lost": (),
        "stopped": False,
        "left": (),
        "most_bytes": 4 * 2**30,
        "reached": False,
    }
    return ProgramEnd(**{**fields, **changes})


@given(st.integers(-64, 255))
def test_no_signal_of_a_program_is_ever_the_nodes_fault(exit_code: int) -> None:
    config = program_config(None, needs="process")
    failure = program_failure(config, end(exit_code=exit_code))
    assert (failure is None) == (exit_code == 0)
    if failure is not None:
        large = exit_code in {-signal.SIGXFSZ, 128 + signal.SIGXFSZ, 256 - signal.SIGXFSZ}
        assert failure[0] is (FailureClass.OUTPUT_LIMIT if large else FailureClass.USER_ERROR)
    killed = program_failure(config, end(exit_code=exit_code, oom_kills=1))
    assert killed is None or killed[0] is FailureClass.OOM


@pytest.mark.parametrize("number", sorted(signal.valid_signals()))
def test_every_signal_is_named_also_in_the_exit_code_of_a_shell_or_of_python(number: int) -> None:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    assert f"died of {name}" in exit_words(-number)
    assert f"a shell reports {name}" in exit_words(128 + number)
    read = f"Python reports {name}" in exit_words(256 - number)
    assert read == (number not in {1, 64}), "sys.exit(-1) is no SIGHUP, and 192 is a shell's"


def test_plain_exit_codes_are_no_signals() -> None:
    assert [code for code in range(129) if "reports" in exit_words(code)] == []
    assert exit_words(255) == "ended with exit code 255"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGBUS, "shared memory"),
        (signal.SIGXCPU, "ulimit -t"),
        (signal.SIGXFSZ, "ABLATE_TRIAL_DISK_GIB"),
        (signal.SIGKILL, "neither the worker nor"),
    ],
)
def test_a_signal_with_a_usual_cause_names_it(number: int, words: str) -> None:
    failure = program_failure(program_config(None), end(exit_code=-number))
    assert failure is not None
    assert words in failure[1]


@pytest.mark.parametrize(
    ("text", "large"),
    [
        ("head: error writing 'standard output': File too large", True),
        ("OSError: [Errno 27] File too large", True),
        ("thread 'main' panicked at: Os { code: 27, message: \"File too large\" }", True),
        ("write failed (os error 27)", True),
        ("the file is too large for me", False),
    ],
)
def test_a_file_beyond_the_limit_is_read_from_the_words_of_any_language(text: str, large: bool) -> None:
    for changes in (
        {"exit_code": 1, "last_line": text},
        {"failed": RankFailure(rank=0, kind="builtins.OSError", message=text)},
    ):
        failure = program_failure(program_config(None), end(**changes))
        assert failure is not None
        assert (failure[0] is FailureClass.OUTPUT_LIMIT) == large
        assert ("(ABLATE_TRIAL_DISK_GIB)" in failure[1]) == large


def test_a_file_at_the_limit_counts_where_no_words_say_so() -> None:
    failure = program_failure(program_config(None), end(exit_code=1, last_line="iostream error", reached=True))
    assert failure is not None
    assert failure[0] is FailureClass.OUTPUT_LIMIT


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("sys.exit()", None),
        ("sys.exit(0)", None),
        ("sys.exit(False)", None),
        ("sys.exit(3)", "the program ended with exit code 3"),
        ("sys.exit(256)", "the program ended with exit code 256"),
        ("sys.exit(-11)", "as Python reports SIGSEGV"),
        ("sys.exit('no data here')", "the program ended itself: no data here"),
        ("type('Exit', (RuntimeError,), {'exit_code': 0})  and sys.exit(0)", None),
        ("raise type('Exit', (RuntimeError,), {'exit_code': 2})('bye')", "Exit: bye"),
        ("os.fork() or sys.exit(5)", None),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("os._exit(0)", "left the trial without closing it"),
        ("os._exit(4)", "exit code 4"),
        ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
        ("os.kill(0, signal.SIGKILL)", "died of SIGKILL"),
        ("os.killpg(0, signal.SIGTERM)", "died of SIGTERM"),
        ("os.kill(os.getpid(), 40)", "died of signal 40"),
    ],
)
def test_an_end_inside_of_the_trial_is_a_success_or_the_programs_failure(
    tmp_path: Path, last: str, words: str | None
) -> None:
    result = marked(tmp_path, last)
    if words is None:
        assert result.failure_class is None, result.message
    else:
        assert result.failure_class is FailureClass.USER_ERROR
        assert words in str(result.message)


def test_the_exception_of_a_command_line_library_that_ends_well_is_no_failure(tmp_path: Path) -> None:
    """As typer.Exit, which the library turns into an exit code outside of the trial."""
    source = MARKED.format(last="raise Exit", after="").replace("with abl", "try:\n  with abl", 1)
    lines = source.splitlines()
    place = next(index for index, line in enumerate(lines) if line == "  with ablate.trial(seed=7) as trial:")
    lines[place + 1 :] = [f"  {line}" for line in lines[place + 1 :]] + ["except Exit as e: sys.exit(e.exit_code)"]
    lines.insert(place - 1, "class Exit(RuntimeError): exit_code = 0")
    result = ran(
        program_config(write_program(tmp_path / "code", "\n".join(lines)), command=("python", "train.py")),
        tmp_path / "home",
    )
    assert result.failure_class is None, result.message


BACKGROUND = {
    "&": "python train.py > /dev/null 2>&1 &",
    "nohup": "nohup python train.py > /dev/null 2>&1 &",
    "setsid": "setsid python train.py &",
    "twice": "(python train.py &) &",
}


@pytest.mark.parametrize("how", BACKGROUND)
@pytest.mark.parametrize("needs", ["process", "tokens"])
def test_processes_in_the_background_are_waited_for(tmp_path: Path, how: str, needs: str) -> None:
    code = write_program(tmp_path / "code", MARKED.format(last="time.sleep(0.7)", after=""))
    config = program_config(code, command=("bash", "-c", BACKGROUND[how]), needs=needs)
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.process_s is not None
    assert result.process_s > 0.7


@pytest.mark.parametrize("how", BACKGROUND)
def test_processor_time_counts_the_work_of_all_processes_and_no_waiting(tmp_path: Path, how: str) -> None:
    works = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(1)\n"
    config = program_config(
        write_program(tmp_path / "code", works), command=("bash", "-c", BACKGROUND[how]), needs="process"
    )
    result = ran(config, tmp_path / "home")
    assert result.cpu_s is not None, result.message
    assert 0.5 <= result.cpu_s <= (result.process_s or 0.0) - 0.9


@pytest.mark.parametrize("how", BACKGROUND)
def test_processes_that_do_not_end_after_the_first_one_fail_the_trial_by_name(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_end, "_GRACE_S", 1.0)
    code = write_program(tmp_path / "code", "import time; time.sleep(600)")
    config = program_config(code, command=("bash", "-c", BACKGROUND[how]), needs="process")
    result = ran(config, tmp_path / "home")
    assert result.failure_class is FailureClass.USER_ERROR
    assert "still ran: python train.py" in str(result.message)
    assert (result.process_s, result.cpu_s) == (None, None)


def test_a_helper_that_outlives_a_marked_program_costs_only_its_process_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_end, "_HELPERS_GRACE_S", 0.2)
    result = marked(tmp_path, command=("bash", "-c", "sleep 600 & python train.py"))
    assert result.failure_class is None, result.message
    assert result.process_s is None


def test_a_helper_that_ends_with_its_program_is_no_failure(tmp_path: Path) -> None:
    result = marked(tmp_path, command=("bash", "-c", "(sleep 0.3) & exec python train.py"), needs="process")
    assert result.failure_class is None, result.message


def test_what_is_wrong_is_listed_with_the_cause_first() -> None:
    loops = {number: ProgramRank(began=1.0, world=2) for number in range(2)}
    failed = RankFailure(rank=0, kind="builtins.OSError", message="peer is gone")
    failure = program_failure(program_config(None), end(loops=loops, lost=(1,), failed=failed, stopped=True))
    assert failure is not None
    assert failure[1].startswith("rank 1 of 2 died before the end of its trial; rank 0 of 2 raised builtins.OSError")


def test_a_program_is_of_another_session_than_the_process_that_judges_it(tmp_path: Path) -> None:
    marked(tmp_path, "(trial.out / 'ids').write_text(f'{os.getsid(0)} {os.getpgid(0)} {os.getpid()}')")
    ids = (tmp_path / "home/work/att_1/trl_1/out/ids").read_text().split()
    assert len(set(ids)) == 1
    assert sys.platform == "linux"
