"""A user's command as a trial: what its messages become, and that each way to fail ends in its class."""

import io
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ablate.experiments.design.kinds.program import Evaluation
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import clocks_differ, report_contradictions, unmet_requirement
from ablate.experiments.records.receipts import is_finite
from ablate.model.config import StepsConfig
from ablate.workers.commands.evaluation import Evaluated
from ablate.workers.commands.program_end import ProgramEnd, last_line_of
from ablate.workers.commands.program_socket import ProgramSocket
from ablate.workers.trials.result import TrialResult
from tests.programs import LOOP, program_config, ran, write_program

NAN_LOSS = LOOP.replace("1.0 / (seed + step.index)", "float('nan')")


def test_a_loop_gives_its_steps_tokens_losses_and_two_clocks(tmp_path: Path) -> None:
    config = program_config(write_program(tmp_path / "code"), args=("--step", "0.01"))
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    assert [step.phase for step in result.program_steps] == ["compile", "warmup", "timed", "timed", "timed"]
    assert [step.loss for step in result.program_steps] == [1.0 / (7 + index) for index in range(5)]
    assert {step.tokens for step in result.program_steps} == {100}
    assert all(0.009 < step.seconds < 2 for step in result.program_steps)
    report = result.program
    assert report is not None
    assert report.argv == ("python", "train.py", "--seed", "7", "--step", "0.01")
    assert report.reported == {"val_bpb": 1.5}
    assert (report.seed, report.ranks, report.exit_code) == (7, 1, 0)
    timed_s = math.fsum(step.seconds for step in result.program_steps[2:])
    assert list(report_contradictions(report, config, timed_s)) == []
    assert result.process_s is not None
    assert result.training_s < result.process_s
    assert result.foreign_load is not None


def test_the_program_runs_in_a_copy_of_its_code_and_writes_nothing_into_the_original(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code", LOOP + "open('written', 'w').write('x')\n")
    assert ran(program_config(folder), tmp_path / "home").failure_class is None
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert not (tmp_path / "home/work/att_1/trl_1/code").exists()


def test_placeholders_and_variables_reach_the_program_and_our_own_paths_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "TORCHINDUCTOR_CACHE_DIR", "PYTHONHOME_"):
        monkeypatch.setenv(name, "secret-of-the-operator")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    source = """
        import json, os, sys
        from pathlib import Path
        kept = {name: os.environ.get(name) for name in ("MINE", "PYTHONHOME", "OMP_NUM_THREADS")}
        assert "secret-of-the-operator" not in os.environ.values()
        Path(sys.argv[1]).joinpath("seen.json").write_text(json.dumps([sys.argv[2:], kept, sys.path]))
        """
    config = program_config(
        write_program(tmp_path / "code", source),
        command=("python", "train.py", "{out}", "{seed}", "{steps}", "{not-one}"),
        env={"MINE": "yes"},
        needs="process",
    )
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    argv, kept, path = json.loads((tmp_path / "home/work/att_1/trl_1/out/seen.json").read_text())
    assert argv == ["7", "5", "{not-one}"]
    assert kept == {"MINE": "yes", "PYTHONHOME": None, "OMP_NUM_THREADS": "2"}
    assert not any(Path(entry) == Path(__file__).parents[4] for entry in path), "the program would import our packages"


@pytest.mark.parametrize(
    ("source", "failure", "words"),
    [
        ("raise SystemExit(3)", FailureClass.USER_ERROR, "exit code 3"),
        ("raise ValueError('bad')", FailureClass.USER_ERROR, "exit code 1"),
        (
            LOOP.replace("time.sleep(0.8 * step_s)", "raise KeyError('x')"),
            FailureClass.USER_ERROR,
            "builtins.KeyError: 'x'",
        ),
        (LOOP.replace("time.sleep(0.8 * step_s)", "raise MemoryError"), FailureClass.OOM, "MemoryError"),
        (
            LOOP.replace("time.sleep(0.8 * step_s)", "raise RuntimeError('CUDA out of memory. Tried')"),
            FailureClass.OOM,
            "out of memory",
        ),
        ("import os; os.abort()", FailureClass.USER_ERROR, "SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", FailureClass.USER_ERROR, "SIGKILL"),
        ("pass", FailureClass.USER_ERROR, "marked no steps"),
        (LOOP.replace("tokens=100", ""), FailureClass.USER_ERROR, "no tokens"),
        (LOOP.replace("tokens=100", "tokens=-1"), FailureClass.USER_ERROR, "tokens is -1"),
        (
            LOOP.replace("tokens=100", "tokens=2**70"),
            FailureClass.USER_ERROR,
            "less than 4611686018427387904, got 11805",
        ),
        (LOOP.replace("step.report", "break\n        step.report"), FailureClass.USER_ERROR, "0 of 5 steps"),
        (LOOP + "\n    list(trial.steps())", FailureClass.USER_ERROR, "called twice"),
        (
            LOOP.replace("val_bpb=1.5", "**{f'm{i}': 1.0 for i in range(10_001)}"),
            FailureClass.USER_ERROR,
            "10,001 results",
        ),
        (LOOP.replace("val_bpb=1.5", "**{'m' * 251: 1.0}"), FailureClass.USER_ERROR, "251 letters; allowed: 250"),
        (LOOP + "print('METRIC val_bpb=nan')", FailureClass.USER_ERROR, "reported nan as 'val_bpb'"),
        (LOOP + "print('METRIC val=1,5')", FailureClass.USER_ERROR, "plain number (such as 1234.5) alone"),
        (LOOP + "print('METRIC val=1'); print('METRIC val=nan')", FailureClass.USER_ERROR, "reported nan as 'val'"),
        (LOOP.replace("seed=seed", "seed=8"), FailureClass.USER_ERROR, "trained with seed 8; the block has seed 7"),
        (LOOP.replace("1.5", "float('inf')"), FailureClass.USER_ERROR, "inf as 'val_bpb'"),
        ("import os; os.execvp('nothing-of-this-name', ['x'])", FailureClass.USER_ERROR, "exit code 1"),
    ],
)
def test_each_way_to_fail_ends_in_its_class(tmp_path: Path, source: str, failure: FailureClass, words: str) -> None:
    result = ran(program_config(write_program(tmp_path / "code", source)), tmp_path / "home")
    assert result.failure_class is failure
    assert words in str(result.message)


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = ran(program_config(None, command=("nothing-of-this-name",)), tmp_path / "home")
    assert "nothing-of-this-name" in str(result.message)


LOOSE = """
import ablate, sys
for step, row in zip(ablate.steps(9, seed=7), iter(range(ROWS))):
    if row == RAISES:
        raise KeyError("batch")
    step.report(loss=1.0 + row, tokens=10)
print("METRIC val=2.5")
"""


@pytest.mark.parametrize(
    ("rows", "raises", "message"),
    [
        (100, -1, None),
        (100, 2, "KeyError: 'batch'"),
        (3, -1, "the program marked 3 of 5 steps"),
        (0, -1, "marked 0 of 5"),
    ],
)
def test_a_loop_without_a_with_statement_begins_and_ends_its_trial(
    tmp_path: Path, rows: int, raises: int, message: str | None
) -> None:
    code = write_program(tmp_path / "code", LOOSE.replace("ROWS", str(rows)).replace("RAISES", str(raises)))
    result = ran(program_config(code, command=("python", "train.py")), tmp_path / "home")
    if message is None:
        assert result.failure_class is None, result.message
        assert [step.loss for step in result.program_steps] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert result.program is not None
        assert result.program.reported == {"val": 2.5}
    else:
        assert result.failure_class is FailureClass.USER_ERROR
        assert message in str(result.message)


def test_a_printed_result_that_contradicts_the_reported_one_is_kept_beside_it(tmp_path: Path) -> None:
    lines = "METRIC val_bpb=0.001", "METRIC other=7", "METRIC line=2.50", "line: 2.5", "METRIC both=2", "both: 3"
    source = LOOP + "".join(f"\nprint({line!r})" for line in lines)
    metrics = {"line": "lower", "both": "lower"}
    patterns = {name: f"{name}: {{}}" for name in metrics}
    config = program_config(write_program(tmp_path / "code", source), metrics=metrics, lines=patterns)
    report = ran(config, tmp_path / "home").program
    assert report is not None
    assert report.reported == {"val_bpb": 1.5, "other": 7, "line": 2.5, "both": 3}
    assert report.contradicted == {"val_bpb": 0.001, "both": 2}


def test_a_declared_metric_that_is_not_reported_is_named(tmp_path: Path) -> None:
    config = program_config(write_program(tmp_path / "code"), metrics={"val_loss": "lower"})
    assert "did not report 'val_loss'" in str(ran(config, tmp_path / "home").message)


def test_losses_that_are_not_finite_stay_in_the_steps(tmp_path: Path) -> None:
    result = ran(program_config(write_program(tmp_path / "code", NAN_LOSS)), tmp_path / "home")
    assert result.failure_class is None
    assert not any(is_finite(step) for step in result.program_steps)


def test_lines_with_metrics_count_for_a_program_without_marks(tmp_path: Path) -> None:
    source = "import sys; sys.stdout.buffer.write(b'\\xff\\x00\\nMETRIC val_bpb=1.25\\nMETRIC val_bpb=1.5\\n')"
    config = program_config(write_program(tmp_path / "code", source), needs="process", metrics={"val_bpb": "lower"})
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert (result.program.ranks, result.program.reported) == (0, {"val_bpb": 1.5})
    assert result.foreign_load is not None, "the load of a whole process counts where there is no window"


@pytest.mark.parametrize(
    ("required", "words"),
    [
        ({"fused rope": True, "slow": False}, None),
        ({"fused": True}, "require_live asks for 'fused': true; the program called ablate.live with 'fused rope'"),
        ({"fused rope": False}, "require_live asks for 'fused rope': false; the program called"),
    ],
)
def test_an_arm_needs_its_code_paths_and_must_not_run_others(
    required: dict[str, bool], words: str | None, tmp_path: Path
) -> None:
    source = LOOP.replace("        began =", "        ablate.live('fused rope')\n        began =")
    config = program_config(write_program(tmp_path / "code", source), required_live=required)
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert result.program.live == ("fused rope",)
    problem = unmet_requirement(result.program, config)
    assert problem is None if words is None else words in str(problem)


def test_a_code_path_of_one_rank_counts_and_without_any_the_message_says_so(tmp_path: Path) -> None:
    launcher = """
        import os, subprocess, sys
        both = [subprocess.Popen([sys.executable, "rank.py", *sys.argv[1:]],
                                 env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"}) for rank in "01"]
        sys.exit(max(one.wait() for one in both))
        """
    folder = write_program(tmp_path / "code", launcher)
    own = "import os\nif os.environ['RANK'] == '1': ablate.live('last stage')\n"
    folder.joinpath("rank.py").write_text(LOOP.replace("with ablate", f"{own}with ablate"), encoding="utf-8")
    config = program_config(folder, required_live={"last stage": True})
    report = ran(config, tmp_path / "home").program
    assert report is not None
    assert (report.live, unmet_requirement(report, config)) == (("last stage",), None)
    without = report.model_copy(update={"live": ()})
    assert str(unmet_requirement(without, config)).endswith("the program called ablate.live with nothing")


def test_two_ranks_add_up_their_tokens_and_the_slowest_sets_the_time(tmp_path: Path) -> None:
    source = (
        LOOP
        + """
if "--worker" not in sys.argv:
    sys.exit(0)
"""
    )
    launcher = """
        import os, subprocess, sys
        both = [subprocess.Popen([sys.executable, "rank.py", *sys.argv[1:], "--step", wait],
                                 env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"})
                for rank, wait in (("0", "0.001"), ("1", "0.03"))]
        sys.exit(max(one.wait() for one in both))
        """
    folder = write_program(tmp_path / "code", launcher)
    folder.joinpath("rank.py").write_text(source, encoding="utf-8")
    result = ran(program_config(folder), tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert result.program.ranks == 2
    assert {step.tokens for step in result.program_steps} == {200}
    assert min(step.seconds for step in result.program_steps) > 0.029


def test_a_clock_that_runs_wrong_contradicts_the_workers(tmp_path: Path) -> None:
    slow = LOOP.replace(
        "import ablate,",
        "import ablate; ablate._now = lambda: time.monotonic() / 2\nimport",
    )
    config = program_config(write_program(tmp_path / "code", slow), args=("--step", "0.05"))
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    report = result.program
    assert report is not None
    assert report.window_s is not None
    assert report.window_seen_s is not None
    assert clocks_differ(report.window_s, report.window_seen_s)
    timed_s = math.fsum(step.seconds for step in result.program_steps[2:])
    assert "the worker's" in "".join(report_contradictions(report, config, timed_s))


FAULTS: tuple[tuple[str, FailureClass | None], ...] = (
    ("pass", None),
    ("raise RuntimeError('no')", FailureClass.USER_ERROR),
    ("os._exit(1)", FailureClass.USER_ERROR),
    ("os._exit(255)", FailureClass.USER_ERROR),
    ("signal.signal(11, signal.SIG_DFL); os.kill(os.getpid(), 11)", FailureClass.USER_ERROR),
    ("os.kill(os.getpid(), 8)", FailureClass.USER_ERROR),
    ("os.kill(os.getpid(), 9)", FailureClass.USER_ERROR),
    ("os.kill(os.getpid(), 15)", FailureClass.USER_ERROR),
    (
        'trial._socket.send(b\'{"event": "window ended", "rank": 0, "at": 1.0}\')',
        FailureClass.USER_ERROR,
    ),
    ("trial._socket.send(os.urandom(100))", FailureClass.USER_ERROR),
    ("step.report(loss=float('nan'))", None),
    ("step.report(loss=float('-inf'), tokens=0)", FailureClass.USER_ERROR),
    ("step.report(tokens=2**63)", FailureClass.USER_ERROR),
    ("step.report(tokens=7)", None),
    ("os.write(1, os.urandom(5000))", None),
    ("os.close(1); os.close(2)", None),
    ("subprocess.Popen(['sleep', '5'], start_new_session=True)", None),
    ("os.environ.clear()", None),
    ("os.chdir('/')", None),
    ("threading.Thread(target=time.sleep, args=(0.2,)).start()", None),
)
"""Statements in one step of a program, and the failure class of the trial. None: it is measured."""


def program_with(statement: str, *, in_step: int) -> str:
    """Return a program of five steps with the statement in one of them."""
    return f"""
import ablate, os, signal, subprocess, threading, time
with ablate.trial() as trial:
    for step in trial.steps():
        step.report(loss=0.5, tokens=10)
        if step.index == {in_step}:
            {statement}
"""


@pytest.mark.parametrize(("number", "statement", "expected"), [(at, *fault) for at, fault in enumerate(FAULTS)])
def test_a_program_ends_in_the_class_of_its_fault(
    tmp_path: Path, number: int, statement: str, expected: FailureClass | None
) -> None:
    source = program_with(statement, in_step=number % 5)
    result = ran(program_config(write_program(tmp_path / "code", source)), tmp_path / "home")
    assert result.failure_class is expected, (source, result.message)


def test_every_message_carries_a_stamp_and_a_sender_of_the_kernel() -> None:
    with ProgramSocket() as receiver, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(receiver.address)
        before = time.time()
        sender.send(b"x")
        after = time.time()
        (message,) = receiver.messages()
    assert (message.content, message.sender) == (b"x", os.getpid())
    assert before <= message.seen <= after


def test_steps_of_a_rank_that_left_its_loop_early_are_no_measurement(tmp_path: Path) -> None:
    steps = StepsConfig(warmup=0, warmup_s=0.0, timed=2, slice=0, val_rows=0)
    source = LOOP.replace("step.report", "if step.index == 2: os._exit(0)\n        step.report").replace(
        "sys,", "sys, os,"
    )
    result = ran(program_config(write_program(tmp_path / "code", source), steps=steps), tmp_path / "home")
    assert result.failure_class is FailureClass.USER_ERROR
    assert "of 3 steps" in str(result.message)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"", "its log is empty"),
        (b"one\n====\n\n", "one"),
        (b"----\n====\n", "its log is empty"),
        (b"Traceback\nValueError: bad\nTrying to end\n", "ValueError: bad"),
        (b"[rank1]: torch.OutOfMemoryError: no\nx.ChildFailedError: \n==\nrank : 0\n==", "torch.OutOfMemoryError: no"),
        (b"exitcode : -9\ntraceback : Signal 9 received by PID 12\n====", "traceback : Signal 9 received by PID 12"),
        (b"\x1b[31mred\xff\n", "\ufffd[31mred\ufffd"),
        (b"KeyError", "KeyError"),
        (b"no Error here\nlast", "last"),
    ],
)  # fmt: skip
def test_the_end_of_a_log_is_its_last_exception_or_word(log: bytes, line: str) -> None:
    assert last_line_of(io.BytesIO(log)) == line
    before = b"ValueError: of the program\n"
    assert last_line_of(io.BytesIO(before + log), since=len(before)) == line


JUDGE = "import os, json; print('METRIC val_loss=' + open(os.environ['ABLATE_RUN_FOLDER'] + '/weights').read())"


def evaluated(folder: Path, source: str, **changes: Any) -> TrialResult:
    """Return the result of a program with an evaluation that reads the file `weights` beside it."""
    code = write_program(folder / "code", source)
    (code / "judge.py").write_text(JUDGE)
    evaluation = Evaluation(command=("python", "judge.py"), code=str(code))
    config = program_config(code, evaluate=evaluation, metrics={"val_loss": "lower"}, needs="process", **changes)
    return ran(config, folder / "home")


def test_a_program_with_an_evaluation_need_not_report_what_is_measured(tmp_path: Path) -> None:
    result = evaluated(tmp_path, "open('weights', 'w').write('2.5')")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert (result.program.reported, result.program.contradicted) == ({"val_loss": 2.5}, {})


@given(own=st.floats(1, 1e3), share=st.floats(-0.5, 0.5))
@settings(max_examples=200, deadline=None)
def test_a_number_contradicts_the_evaluations_where_they_differ_by_more_than_a_thousandth(
    own: float, share: float
) -> None:
    measured = own * (1 + share)
    fields = dict.fromkeys(("failed", "wrong")) | dict.fromkeys(("lost", "left"), ())
    end = ProgramEnd(
        exit_code=0, oom_kills=0, reported={"v": own, "more": 1.0}, contradicted={"v": 7.0, "more": 2.0}, last_line="",
        loops={}, stopped=False, most_bytes=1, reached=False, **fields,
    )  # fmt: skip
    named = Evaluated(measured={"v": measured}, failure=None).contradicted(end)
    assert named["more"] == 2.0, "what the program itself said twice"
    half = 0.5 * 10.0 ** -len(repr(own).partition(".")[2])
    assume(abs(abs(own - measured) - half) > 1e-9)
    if abs(own - measured) < 0.00099 * max(own, measured) or abs(own - measured) < half:
        assert named == {"more": 2.0}, "another precision, or fewer decimal places"
    elif abs(own - measured) > 0.00101 * max(own, measured):
        assert named == {"more": 2.0, "v": own}


def test_results_of_program_and_evaluation_have_one_limit(tmp_path: Path) -> None:
    source = "open('weights', 'w').write('2.5')\nfor i in range(10_000): print(f'METRIC m{i}=1')"
    result = evaluated(tmp_path, source)
    assert result.failure_class is FailureClass.USER_ERROR
    assert "10,001 results" in str(result.message)


def test_peaks_that_a_program_reports_do_not_count_on_a_processor(tmp_path: Path) -> None:
    forged = LOOP.replace("import ablate,", "import ablate; ablate._memory = lambda: (1, 2)\nimport")
    result = ran(program_config(write_program(tmp_path / "code", forged)), tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.peak_allocated_bytes == result.peak_reserved_bytes
    assert result.peak_reserved_bytes is not None
    assert result.peak_reserved_bytes > 2**20
