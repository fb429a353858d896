"""`ablate check`: its answers about programs of every kind, from the real command."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import idna
import pytest

from ablate.experiments.system.kernel_limits import has_admin
from ablate.workers.isolation.reach import isolation_problem
from tests.integration.worker_service import links_into
from tests.programs import LOOP, write_program
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.slow
isolates = pytest.mark.skipif(isolation_problem() is not None, reason="this kernel isolates no trials")
ABLATE = [sys.executable, "-c", "from ablate.experiments.system.console import main; main()"]


def checked(folder: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    command = [*ABLATE, "check", "--json", *options, "--", "python", "train.py", "--seed", "{seed}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    rows = json.loads(done.stdout) if done.stdout else []
    return done.returncode, {row["name"]: row for row in rows}, done.stderr


def test_a_marked_program_passes_and_its_properties_are_named(tmp_path: Path) -> None:
    code, rows, errors = checked(write_program(tmp_path / "code"))
    assert code == 0, errors
    assert all(row["passed"] for name, row in rows.items() if name != "kernels"), rows
    assert "100 a step" in rows["tokens"]["detail"]
    assert "bit for bit" in rows["loss"]["detail"]
    assert "val_bpb=1.5" in rows["metrics"]["detail"]
    assert not list((tmp_path / "code").glob("out*")), "it writes into copies only"


def test_a_program_that_ignores_its_seed_and_reports_no_tokens_is_found(tmp_path: Path) -> None:
    source = LOOP.replace("(seed + step.index)", "(1 + step.index)").replace(", tokens=100", "")
    code, rows, _errors = checked(write_program(tmp_path / "code", source))
    assert code == 6
    assert not rows["tokens"]["passed"]
    assert "the seed is ignored" in rows["seed matters"]["detail"]


def test_a_program_without_marks_can_only_be_timed_whole(tmp_path: Path) -> None:
    code, rows, _errors = checked(write_program(tmp_path / "code", "print('METRIC val_bpb=1.25')"))
    assert code == 6
    assert "process_s" in rows["steps"]["detail"]
    assert rows["metrics"]["passed"]


def test_a_program_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code, rows, errors = checked(write_program(tmp_path / "code", "raise SystemExit('no data here')"))
    assert code == 6
    assert "exit code 1" in rows["runs"]["detail"]
    assert "no data here" in errors


def test_a_program_that_never_ends_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = f"sleep 30{os.getpid()}"
    source = f"import subprocess, time; subprocess.Popen({mark.split()!r}, start_new_session=True); time.sleep(600)"
    code, _rows, errors = checked(write_program(tmp_path / "code", source), "--timeout", "5")
    assert code == 5
    assert "3 runs of the program, each of at most 5 s; longer: --timeout SECONDS" in errors.splitlines()[0]
    assert "had not ended after 5 s; give it longer, such as --timeout 1800, or an argument for fewer steps" in errors
    left = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False)
    assert left.stdout == ""


SAYS_ITS_SECRET = (
    LOOP
    + """
    import os
    print("token", os.environ["HF_TOKEN"], flush=True)
    raise ValueError(os.environ["HF_TOKEN"])
"""
)


def test_a_program_gets_its_secret_and_no_output_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    store.write_text("HF_TOKEN=hf_pl4nted-f0r-the-check\n")
    store.chmod(0o600)
    monkeypatch.setenv("ABLATE_SECRETS", str(store))
    code, rows, errors = checked(write_program(tmp_path / "code", SAYS_ITS_SECRET), "--secret", "HF_TOKEN")
    assert code == 6
    assert "hf_pl4nted" not in str(rows) + errors
    assert "token [HF_TOKEN]" in errors
    assert "builtins.ValueError: [HF_TOKEN]" in rows["runs"]["detail"]
    code, rows, errors = checked(tmp_path / "code", "--secret", "OTHER")
    assert (code, rows) == (5, {})
    assert f"there is no secret OTHER in {store}; it has: HF_TOKEN" in errors


def test_the_installed_copy_of_a_program_is_found_before_its_steps(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code/scripts", "import idna\n" + LOOP).parent
    installed = Path(idna.__file__).parent
    shutil.copytree(installed, folder / "src/idna")
    command = [*ABLATE, "check", "--json", "--", "python", "scripts/train.py", "--seed", "{seed}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 6
    detail = json.loads(done.stdout)[0]["detail"]
    assert f"'idna' from {installed}, and not from the sent code, which has it in src/idna" in detail


LEAVES = """
import ctypes, os, subprocess, sys, tempfile, time
from pathlib import Path
libc = ctypes.CDLL(None)
ids = [libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)]
assert min(ids) >= 0
tempfile.mkdtemp()
subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", "{mark}"], {{}})
    os._exit(0)
os.wait()
Path("{began}").write_text(" ".join(map(str, ids)))
time.sleep(600)
"""
"""It makes all that could stay: a child in another session, one without a mark, a folder, segments of every kind."""
BEGAN = "ablate-check-*/work/run-1/trial/code/began"
ENDS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]


def left_by(mark: str, folder: Path) -> list[str]:
    """Return the processes with this mark, the temporary files, and the short names of folders among them."""
    running = subprocess.run(["pgrep", "-fx", f"sleep {mark}"], capture_output=True, text=True, check=False)
    return [*running.stdout.split(), *map(str, folder.iterdir()), *map(str, links_into(folder))]


@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize("moment", ["drawn", "after it has made all"])
def test_a_check_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    mark = f"31{os.getpid()}{ENDS.index(number)}{len(moment)}"
    temporary, made = tmp_path / "temporary", set()
    temporary.mkdir()
    code = write_program(tmp_path / "code", LEAVES.format(mark=mark, began="began"))  # it writes in its own copy only
    process = subprocess.Popen(
        [*ABLATE, "check", "--", "python", "train.py"],
        cwd=code,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup would hand down its own
    )
    if moment == "drawn":
        part = random.Random(number).choice([code, temporary])  # noqa: S311
        until(lambda: process.poll() is not None or any(part.glob("*.py" if part == code else "ablate-*")))
    else:
        until(lambda: process.poll() is not None or any(temporary.glob(BEGAN)))
        assert left_by(mark, temporary), "it is running"
        made = set(enumerate(next(temporary.glob(BEGAN)).read_text().split()))
    os.killpg(process.pid, number)  # as a terminal does
    process.wait()
    until(lambda: not left_by(mark, temporary), what=f"nothing left of {temporary} and sleep {mark}")
    if has_admin():
        assert not segments() & made, "of an own namespace, or removed"


def segments() -> set[tuple[int, str]]:
    """Return the private System V objects of this machine by kind and number."""
    rows = [
        (kind, line.split())
        for kind, name in enumerate(("shm", "sem", "msg"))
        for line in Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]
    ]
    return {(kind, row[1]) for kind, row in rows if row[0] == "0"}


def test_a_check_of_a_program_that_ends_itself_blames_the_program(tmp_path: Path) -> None:
    for end, words in (("kill(0, 9)", "died of SIGKILL"), ("kill(0, 15)", "died of SIGTERM"), ("abort()", "SIGABRT")):
        code, rows, errors = checked(write_program(tmp_path / "code", f"import os; os.{end}"))
        assert (code, words in rows["runs"]["detail"]) == (6, True), (rows, errors)
        assert rows["runs"]["detail"].startswith("user_error")


@isolates
def test_a_check_is_as_closed_as_a_trial_and_names_the_line_that_opens_a_file(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "x.bin").write_text("hi")
    folder = write_program(tmp_path / "code", LOOP + f"\n    open({str(corpus / 'x.bin')!r})")
    code, rows, _errors = checked(folder)
    assert code == 6
    assert rows["runs"]["detail"].endswith(f" before the `--`, or write workload.data: [{corpus}]")
    assert checked(folder, "--data", str(corpus))[0] == 0


def test_a_check_names_a_file_that_git_ignores(tmp_path: Path) -> None:
    folder = write_program(tmp_path / "code", LOOP + "\n    open('data/x.bin')")
    (folder / "data").mkdir()
    (folder / "data/x.bin").write_text("hi")
    (folder / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
    code, rows, _errors = checked(folder)
    assert (code, "but was not sent, because git ignores it" in rows["runs"]["detail"]) == (6, True)
    assert rows["runs"]["detail"].endswith("write workload.data: [data/]")
    assert checked(folder, "--data", "data")[0] == 0


SPEC = {
    "ablation": "mine",
    "question": "Is it better?",
    "workload": {
        "command": ["python", "train.py", "--seed", "{seed}"],
        "code": ".",
        "steps": {"warmup": 2, "timed": 40},
    },
    "variants": {"slow": {"args": ["--step", "0.02"]}},
    "design": {"seeds": 6, "blocks": {"count": 6}},
    "placement": {"node_class": "cpu"},
    "verdict": {"primary": {"metric": "tokens_per_s", "margin": "1%"}},
}


def checked_spec(folder: Path, *, nodes: int = 1, **workload: Any) -> tuple[int, dict[str, Any], str]:
    primary = workload.pop("primary", SPEC["verdict"])
    values = {**SPEC, "workload": {**dict(SPEC["workload"]), **workload}, "verdict": primary}  # type: ignore[call-overload]
    values["placement"] = {"node_class": "cpu", "nodes": nodes}
    (folder / "mine.json").write_text(json.dumps(values))
    done = subprocess.run(
        [*ABLATE, "check", "--json", "mine.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_every_arm_of_a_spec_is_checked_and_a_block_is_estimated(tmp_path: Path) -> None:
    code, answer, errors = checked_spec(write_program(tmp_path / "code"))
    assert code == 0, errors
    assert [check["name"] for check in answer["checks"]] == ["baseline", "slow", "load"]
    assert (answer["marks"], answer["blocks"], answer["can_take_turns"]) == ("tokens", 6, True)
    assert answer["longest_s"] > 36 * 0.02 * 0.8, "the rest of the slow arm's steps"
    assert answer["block_s"] > answer["longest_s"]


@pytest.mark.parametrize(
    ("own", "code", "detail"),
    [
        (43, 0, None),
        (42, 0, "a trial has 43, so the loop goes on beyond its end: write fewer in workload.steps"),
        (3, 6, "a trial needs 4: the first, one to warm up and two to measure"),
    ],
)
def test_a_loop_that_is_shorter_than_a_trial_is_found_before_any_block(
    tmp_path: Path, own: int, code: int, detail: str | None
) -> None:
    source = LOOP.replace("trial.steps(1000)", f"trial.steps({own})")
    assert source != LOOP
    done, answer, errors = checked_spec(write_program(tmp_path / "code", source))
    assert (done, answer["own_steps"]) == (code, own), errors
    shown = [check["detail"] for check in answer["checks"] if check["name"] == "steps"]
    assert shown == (
        [] if detail is None else [f"the program's loop has {own} of its own, as in steps({own}); {detail}"]
    )


def test_no_other_arm_is_checked_once_the_first_one_failed(tmp_path: Path) -> None:
    code, answer, errors = checked_spec(write_program(tmp_path / "code"), command=["python", "train.py", "--sede", "1"])
    assert (code, "run 2" in errors) == (6, False)
    assert [(check["name"], check["passed"]) for check in answer["checks"][:2]] == [
        ("baseline", False),
        ("slow", False),
    ]
    assert answer["checks"][1]["detail"] == "not run, because the first arm failed"


def test_a_program_for_several_nodes_is_checked_on_this_one_which_is_said(tmp_path: Path) -> None:
    code, answer, errors = checked_spec(write_program(tmp_path / "code"), nodes=2)
    assert code == 0, errors
    (detail,) = (check["detail"] for check in answer["checks"] if check["name"] == "nodes")
    assert detail == "the check ran on this node alone, the trials run over 2: other times"


def test_a_spec_is_checked_by_printed_lines_and_by_the_whole_process(tmp_path: Path) -> None:
    prints = write_program(tmp_path / "code", "import sys; print(f'step 1\\nval loss: {len(sys.argv)}.5')")
    metrics = {"val": {"better": "lower", "line": "val loss: {}"}}
    by_val = {"primary": {"metric": "val", "margin": "1%"}}
    code, answer, _errors = checked_spec(prints, metrics=metrics, primary=by_val)
    rows = {check["name"]: check for check in answer["checks"]}
    assert (code, answer["marks"]) == (6, "process")
    assert "val=3.5" in rows["baseline"]["detail"]
    assert "every block would report the same; if it takes a seed" in rows["seed"]["detail"]
    wrong = {"val": {"better": "lower", "line": "loss of validation {}"}}
    code, answer, _errors = checked_spec(prints, metrics=wrong, primary=by_val)
    assert (code, "printed no line 'loss of validation {}'" in answer["checks"][0]["detail"]) == (6, True)
    code, answer, _errors = checked_spec(prints, primary={"primary": {"metric": "process_s", "margin": "1%"}})
    assert (code, "process_s" in answer["checks"][0]["detail"]) == (0, True)
    code, answer, _errors = checked_spec(prints)
    assert (code, "marked no steps" in answer["checks"][0]["detail"]) == (6, True)


def test_an_arm_whose_code_path_does_not_run_fails_the_check_of_its_spec(tmp_path: Path) -> None:
    source = LOOP.replace("        began =", "        ablate.live('fused')\n        began =")
    required = {"baseline": {"fused": True}, "slow": {"fused": False}}
    code, answer, _errors = checked_spec(write_program(tmp_path / "code", source), require_live=required)
    rows = {row["name"]: row for row in answer["checks"]}
    assert (code, rows["baseline"]["passed"], rows["slow"]["passed"]) == (6, True, False)
    assert rows["slow"]["detail"] == (
        "require_live asks for 'fused': false; the program called ablate.live with 'fused'"
    )


def test_the_evaluation_of_a_spec_is_run_for_every_arm(tmp_path: Path) -> None:
    program = write_program(tmp_path / "code", "open('weights', 'w').write('1.5'); print('METRIC val=0.1')")
    judging = (
        "import os, sys; print('METRIC val=' + open(os.environ['ABLATE_RUN_FOLDER'] + '/weights').read() + sys.argv[1])"
    )
    (program / "judge.py").write_text(judging)
    workload = {"metrics": {"val": {"better": "lower"}}, "evaluate": ["python", "judge.py", "{seed}"]}
    by_val = {"primary": {"metric": "val", "margin": "1%"}}
    code, answer, errors = checked_spec(program, primary=by_val, **workload)
    rows = {check["name"]: check for check in answer["checks"]}
    assert (code, rows["seed"]["detail"]) == (0, "val is 1.51 and 1.52 with two seeds"), errors
    for arm in ("baseline", "slow"):
        assert rows[arm]["detail"].endswith("; val=1.51 by the protected evaluation")
    (program / "judge.py").write_text("raise ValueError('bad weights')")
    code, answer, errors = checked_spec(program, primary=by_val, **workload)
    named = "the protected evaluation `python judge.py {seed}` ended with exit code 1: ValueError: bad weights"
    assert (code, named in answer["checks"][0]["detail"]) == (6, True), errors
    (program / "judge.py").unlink()
    code, _answer, errors = checked_spec(program, primary=by_val, **workload)
    assert (code, "runs 'judge.py', and the packed code has no such file" in errors) == (5, True), errors


@pytest.mark.parametrize(
    ("workload", "words"),
    [({"code": "none"}, "#/workload/code"), ({"data": ["none.bin"]}, "there is no 'none.bin' beside the spec")],
)
def test_a_spec_that_cannot_be_packed_is_not_run(tmp_path: Path, workload: dict[str, Any], words: str) -> None:
    code, _answer, errors = checked_spec(write_program(tmp_path / "code"), **workload)
    assert (code, words in errors) == (5, True), errors


def test_the_limit_of_a_file_is_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import pathlib, ablate\nwith open(ablate.trial().out / 'x', 'wb') as file: file.truncate(3 * 2**20)"
    monkeypatch.setenv("ABLATE_TRIAL_DISK_GIB", str(2 / 1024))
    _code, rows, _errors = checked(write_program(tmp_path / "code", source))
    assert rows["runs"]["detail"].startswith("output_limit"), rows
    assert "ABLATE_TRIAL_DISK_GIB" in rows["runs"]["detail"]
    monkeypatch.setenv("ABLATE_TRIAL_DISK_GIB", "1")
    _code, rows, errors = checked(tmp_path / "code")
    assert rows["runs"]["passed"], errors
    monkeypatch.setenv("ABLATE_TRIAL_DISK_GIB", "much")
    code, _rows, errors = checked(tmp_path / "code")
    assert (code, "ABLATE_TRIAL_DISK_GIB is 'much'" in errors) == (5, True)
