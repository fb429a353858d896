"""Protected evaluations: what a program does to the one of its trial, as real isolated trials of a real fork server."""

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.proposals import outcome_of, proposal_problems, proposed, with_kept
from ablate.experiments.analysis.verdicts import VariantVerdict
from ablate.experiments.design.kinds.program import Evaluation
from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.outcomes import FailureClass, ProposalOutcome
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.code_archive import PackedCode
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.program_report import report_contradictions
from ablate.experiments.records.spec_code import pack_spec
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.isolation.reach import isolation_problem
from ablate.workers.lease import Lease, StopReason, boot_time_s
from ablate.workers.paths import Usage
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import Ending, TrialRunner
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.processes.wake_event import WakeEvent
from ablate.workers.trials.result import TrialResult, read_result
from tests.integration.block_runners import block_runner, endless_lease
from tests.programs import order_for, program_config, ran, write_program

isolated = pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}")

YAML = "application/yaml"
TRUE, FALSE = 3.0, 0.5
"""What the checkpoint is worth, and what a program would like to have measured."""
PROGRAM = """
import ablate, json, os, signal, subprocess, sys, time
from pathlib import Path
OUT, FOLDER = Path(sys.argv[1]), Path.cwd()
LIE = "print('METRIC val_loss=0.5')"
with ablate.trial(seed=7) as trial:
    for step in trial.steps(5):
        step.report(loss=1.0, tokens=10)
    trial.report(val_loss=0.5, other=4.0)
(FOLDER / "weights.json").write_text("3.0")
"""
JUDGE = """
import json, os, sys, tempfile
import scoring
assert os.listdir(os.environ.get("TMPDIR", "/var/empty")) == os.listdir(os.path.expanduser("~")) == []
with open(os.path.join(os.environ["ABLATE_RUN_FOLDER"], "weights.json")) as file:
    print(f"METRIC val_loss={scoring.score(json.load(file))}")
"""
SCORING = "def score(value):\n    return value\n"


@pytest.fixture(scope="module")
def runner() -> Iterator[TrialRunner]:
    with Guardian() as guardian:
        limit = Usage(bytes=64 * 2**20, files=2_000)
        yield TrialRunner(ForkServer(), guardian, WakeEvent(), grace_s=0.2, preempted=lambda: False, most_output=limit)


@dataclass(frozen=True)
class Trial:
    """A trial that has ended."""

    folder: Path
    ending: Ending
    result: TrialResult

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()


Evaluated = Callable[..., Trial]


@pytest.fixture
def evaluated(tmp_path: Path, runner: TrialRunner) -> Evaluated:
    """Return what runs PROGRAM with more lines, and then an evaluation, in one trial."""

    def run(more: str = "", *, judged_by: str = JUDGE, timeout_s: float = 120.0, **changes: Any) -> Trial:
        home, code, own = tmp_path / "home", tmp_path / "code", tmp_path / "own"
        for folder, source in ((code, "raise SystemExit('not this one')"), (own, PROGRAM + more)):
            write_program(folder, source)
        for name, source in (("judge.py", judged_by), ("scoring.py", SCORING)):
            (code / name).write_text(source)
        (own / "judge.py").write_text("print('METRIC val_loss=0.5')")
        (own / "scoring.py").write_text("def score(value):\n    return 0.5\n")
        evaluation = changes.pop("evaluate", Evaluation(command=("python", "judge.py"), code=str(code)))
        fields = {"command": ("python", "train.py", "{out}"), "metrics": {"val_loss": "lower"}, **changes}
        config = program_config(own, evaluate=evaluation, **fields)
        order = order_for(config, home, f"trl_{uuid.uuid4().hex}")  # its mark ends the processes of that name
        order = replace(order, dataset=copy_code(order).data_folder, start_by=boot_time_s() + 3600)
        assert config.judge is not None
        order = replace(order, evaluation=copy_code(replace(order, config=config.judge)).data_folder)
        order = order.isolated((home,)) if isolation_problem() is None else order
        ending = runner.run(order, Lease(3600.0, sent_at=boot_time_s()), timeout_s=timeout_s)
        result = read_result(order.paths.result) or TrialResult.partial()
        if result.failure_class is None and ending.stopped is None:
            assert result.program is not None
            assert list(report_contradictions(result.program, config, result.program.window_s)) == []
        return Trial(order.paths.folder, ending, result)

    return run


def measured(trial: Trial) -> float:
    assert (trial.ending.stopped, trial.result.failure_class) == (None, None), (trial.result.message, trial.log)
    assert trial.result.program is not None
    return trial.result.program.reported["val_loss"]


def test_the_evaluation_counts_and_the_programs_own_number_is_kept_beside_it(evaluated: Evaluated) -> None:
    trial = evaluated()
    report = trial.result.program
    assert measured(trial) == TRUE
    assert report is not None
    assert report.evaluation is not None
    assert report.reported == {"val_loss": TRUE, "other": 4.0}
    assert report.contradicted == {"val_loss": FALSE}
    assert (report.evaluation.argv, report.evaluation.metrics) == (("python", "judge.py"), ("val_loss",))
    assert report.evaluation.code != report.code
    assert "[the protected evaluation `python judge.py`]" in trial.log
    assert not (trial.folder / "evaluation").exists()
    assert not (trial.folder / "code").exists()
    assert not (trial.folder / "tmp").exists()


@pytest.mark.parametrize("own", ["nan", "-inf", "1.2k", ""])
def test_a_number_that_does_not_count_does_not_fail_its_trial(evaluated: Evaluated, own: str) -> None:
    assert measured(evaluated(f"print('METRIC val_loss={own}')")) == TRUE


def test_another_number_that_is_not_finite_fails_its_trial(evaluated: Evaluated) -> None:
    trial = evaluated("print('METRIC other=nan')")
    assert trial.result.failure_class is FailureClass.USER_ERROR
    assert "reported nan as 'other'" in trial.result.message


EVERYWHERE = """
PLACES = [FOLDER, OUT, OUT.parent, FOLDER / "evaluation", OUT.parent / "evaluation", OUT.parent / "evaluation/code",
          OUT.parent / "evaluation/home", Path(os.environ["TMPDIR"]), Path(os.environ["HOME"]), Path("/dev/shm"),
          Path.home() / f".local/lib/python3.{sys.version_info.minor}/site-packages"]
NAMES = ["judge.py", "scoring.py", "json.py", "json/__init__.py", "ablate.py", "sitecustomize.py", "usercustomize.py",
         "a.pth", "__init__.py", "python", ".pythonrc", "pyvenv.cfg", "__pycache__/scoring.cpython-311.pyc"]
def write_everywhere():
    for place in PLACES:
        for name in NAMES:
            try:
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_text("import sys; sys.stdout.write('METRIC val_loss=0.5\\\\n'); sys.exit(0)")
            except OSError:
                pass
"""
ATTACKS = {
    "files on every path": EVERYWHERE + "write_everywhere()",
    "its own judge": "(FOLDER / 'judge.py').write_text(LIE)",
    "the kept copies": """
for path in [*OUT.parents[3].glob("data/code/*/*"), *OUT.parents[3].glob("data/code/*")]:
    for action in (lambda: path.write_text(LIE), lambda: path.chmod(0o777), path.unlink, lambda: path.rename(OUT / "x"),
                   lambda: (path / "__pycache__").mkdir(), lambda: (path / "sitecustomize.py").write_text(LIE)):
        try:
            action()
        except OSError:
            pass
""",
    "a link in place of the folder": """
(OUT / "mine/code").mkdir(parents=True)
(OUT / "mine/code/judge.py").write_text(LIE)
(OUT.parent / "evaluation").symlink_to(OUT / "mine")
""",
    "a file in place of the folder": "(OUT.parent / 'evaluation').write_text(LIE)",
    "a link in place of the temporary files": """
import shutil
temporary = Path(os.environ["TMPDIR"]).resolve()
shutil.rmtree(temporary)
(OUT / "mine").mkdir()
(OUT / "mine/json.py").write_text(LIE)
temporary.symlink_to(OUT / "mine")
""",
    "a closed folder": "os.chmod(OUT.parent, 0)",
    "a daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (OUT / "pid").write_text(str(os.getpid()))
        while True:
            for path in OUT.parent.glob("evaluation/code/*"):
                path.write_text(LIE)
            with open(OUT.parent / "log.txt", "a") as log:
                log.write("METRIC val_loss=0.5\\n")
    os._exit(0)
while not (OUT / "pid").exists():
    time.sleep(0.01)
""",
    "its own environment": """
os.environ.update(PYTHONPATH=str(OUT), PYTHONSTARTUP=str(OUT / "judge.py"), BASH_ENV=str(OUT / "judge.py"))
""",
    "an unended line": "sys.stdout.write('METRIC val_')",
    "limits of the process that starts the evaluation": """
import resource
for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try:
        resource.prlimit(os.getppid(), limit, (1 << 20, 1 << 20))
    except (OSError, ValueError):
        pass
""",
}


@isolated
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_a_program_leaves_changes_its_evaluation(evaluated: Evaluated, attack: str) -> None:
    assert measured(evaluated(ATTACKS[attack])) == TRUE


@isolated
def test_a_program_cannot_read_the_code_of_its_evaluation(evaluated: Evaluated) -> None:
    """Not even at its place, which an earlier receipt gives away. Its own code is open, which shows that the way is."""
    earlier = evaluated().result.program
    assert earlier is not None
    assert earlier.evaluation is not None
    tries = "".join(
        f"""
try:
    os.listdir({place})
    print("METRIC {name}=1")
except PermissionError:
    print("METRIC {name}=0")
"""
        for name, place in (
            ("judging", f"OUT.parents[3] / 'data/code/{earlier.evaluation.code[7:]}'"),
            ("own", "OUT.parent / 'code'"),
        )
    )
    trial = evaluated(tries)
    assert measured(trial) == TRUE
    assert trial.result.program is not None
    assert trial.result.program.evaluation is not None
    assert trial.result.program.evaluation.code == earlier.evaluation.code
    assert trial.result.program.reported == {"val_loss": TRUE, "other": 4.0, "judging": 0.0, "own": 1.0}


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONPATH": ".:own"},
        {"PYTHONPATH": "{run}"},
        {"HOME": "{run}", "TMPDIR": "{run}", "PYTHONUSERBASE": "{run}"},
        {"PYTHONSTARTUP": "judge.py", "PYTHONINSPECT": "1", "BASH_ENV": "judge.py", "VAL": "0.5"},
        {"PATH": "{run}:/usr/bin:/bin", "PYTHONHASHSEED": "1"},
    ],
)
def test_variables_of_an_arm_do_not_reach_its_evaluation(
    evaluated: Evaluated, tmp_path: Path, env: dict[str, str]
) -> None:
    run = str(tmp_path / "home/work/att_1/trl_1/code")
    own = sorted(set(env) - {"PYTHONPATH", "HOME", "TMPDIR", "PATH"})
    judging = JUDGE + f"\nassert not set({own}) & set(os.environ)\n"
    judging += f"assert {run!r} not in (os.environ['PATH'] + os.environ['PYTHONPATH'] + os.environ['HOME'])"
    program = "(FOLDER / 'python').write_text('#!/bin/sh\\necho METRIC val_loss=0.5\\n')\n"
    more = program + "os.chmod('python', 0o755)\n" + EVERYWHERE + "NAMES.remove('python')\nwrite_everywhere()"
    command = (sys.executable, "train.py", "{out}")
    values = {name: value.replace("{run}", run) for name, value in env.items()}
    assert measured(evaluated(more, judged_by=judging, command=command, env=values)) == TRUE


def test_variables_of_the_workload_reach_the_evaluation_and_placeholders_are_filled(
    evaluated: Evaluated, tmp_path: Path
) -> None:
    judging = """
import ablate, os, sys
from pathlib import Path
out, seed = Path(sys.argv[1]), int(sys.argv[2])
with ablate.trial(seed=seed) as trial:
    assert (trial.seed, trial.out) == (seed, out) == (7, out)
    assert Path("scoring.py").exists() and os.environ["LAB"] == "a"
    assert not Path("weights.json").exists()
    trial.report(val_loss=float((out / "score").read_text()), more=1.0)
"""
    evaluation = Evaluation(
        command=("python", "judge.py", "{out}", "{seed}"), code=str(tmp_path / "code"), env={"LAB": "a"}
    )
    trial = evaluated("(OUT / 'score').write_text('3.0')", judged_by=judging, evaluate=evaluation, env={"LAB": "b"})
    assert measured(trial) == TRUE
    assert trial.result.program is not None
    assert trial.result.program.reported == {"val_loss": TRUE, "other": 4.0, "more": 1.0}
    assert trial.result.program.evaluation is not None
    assert trial.result.program.evaluation.argv == ("python", "judge.py", "{out}", "7")


def test_a_line_of_the_spec_is_one_of_the_evaluation(evaluated: Evaluated) -> None:
    lines = {"val_loss": "validation: {}"}
    trial = evaluated("print('validation: 1,2,3')", judged_by="print('validation: 3.0')", lines=lines)
    assert measured(trial) == TRUE


@isolated
def test_an_evaluation_reads_the_files_of_the_program_and_writes_its_own(evaluated: Evaluated) -> None:
    judging = """
import os, tempfile
from pathlib import Path
run = Path(os.environ["ABLATE_RUN_FOLDER"])
refused = 0
for place in (run / "new", run / "weights.json", run.parent / "out" / "new", run.parent / "log.txt"):
    try:
        place.write_text("changed")
    except OSError:
        refused += 1
Path("mine").write_text("x")
Path.home().joinpath("mine").write_text("x")
tempfile.NamedTemporaryFile().write(b"x")
Path("/dev/shm/mine-of-an-evaluation").write_text("x")
Path("/dev/shm/mine-of-an-evaluation").unlink()
print(f"METRIC val_loss={(run / 'weights.json').read_text()}")
print(f"METRIC refused={refused}")
"""
    trial = evaluated(judged_by=judging)
    assert measured(trial) == TRUE
    assert trial.result.program is not None
    assert trial.result.program.reported["refused"] == 4


NAMED = "the protected evaluation `python judge.py`"


@pytest.mark.parametrize(
    ("judging", "words"),
    [
        ("raise SystemExit(3)", f"{NAMED} ended with exit code 3: its log is empty"),
        ("raise ValueError('bad weights')", f"{NAMED} ended with exit code 1: ValueError: bad weights"),
        ("import os; os.kill(os.getpid(), 9)", f"{NAMED} died of SIGKILL"),
        ("pass", f"{NAMED} did not report 'val_loss', which workload.metrics declares"),
        ("print('METRIC other=1')", f"{NAMED} did not report 'val_loss'"),
        ("print('METRIC val_loss=nan')", f"{NAMED} reported nan as 'val_loss'"),
        ("print('METRIC val_loss=1,5')", f"{NAMED}: the last line that the program printed for result 'val_loss'"),
        ("import ablate\nwith ablate.trial() as t: raise KeyError('x')", f"{NAMED} raised builtins.KeyError: 'x'"),
        ("import ablate\nwith ablate.trial() as t: t.report(val_loss=float('inf'))", f"{NAMED} reported inf"),
        (
            "import subprocess; print('METRIC val_loss=3.0', flush=True); subprocess.Popen(['sleep', '600'])",
            f"{NAMED}: the command ended while its own processes still ran: sleep 600",
        ),
        ("open('weights.json')", "weights.json is in the program's working folder: open it below the folder in ABLATE"),
    ],
)
def test_an_evaluation_that_fails_is_named_and_fails_its_trial(evaluated: Evaluated, judging: str, words: str) -> None:
    trial = evaluated("print('ValueError: of the program')", judged_by=judging)
    assert trial.result.failure_class is FailureClass.USER_ERROR
    assert words in str(trial.result.message)
    assert "git ignores" not in str(trial.result.message)
    assert trial.ending.survivors == ()


@pytest.mark.parametrize("command", [("python", "absent.py"), ("./judge.py",), ("nothing-of-this-name",)])
def test_an_evaluation_that_cannot_be_started_is_named(
    evaluated: Evaluated, tmp_path: Path, command: tuple[str, ...]
) -> None:
    trial = evaluated(evaluate=Evaluation(command=command, code=str(tmp_path / "code")))
    assert trial.result.failure_class is FailureClass.USER_ERROR
    assert f"the protected evaluation `{' '.join(command)}`" in str(trial.result.message)


def test_an_evaluation_that_never_ends_is_stopped_with_all_of_its_processes(evaluated: Evaluated) -> None:
    judging = "import subprocess, time\nsubprocess.Popen(['sleep', '700'], start_new_session=True)\ntime.sleep(700)"
    trial = evaluated(judged_by=judging, timeout_s=20.0)
    assert (trial.ending.stopped, trial.ending.survivors) == (StopReason.TIMEOUT, ())
    assert (trial.folder / "evaluation").is_dir(), "the worker names the evaluation by it"


def test_a_program_that_fails_is_not_evaluated(evaluated: Evaluated) -> None:
    trial = evaluated("raise SystemExit(4)")
    assert "the program ended with exit code 4" in str(trial.result.message)
    assert "protected evaluation" not in trial.log


def test_time_and_memory_of_the_evaluation_are_not_those_of_the_arm(evaluated: Evaluated) -> None:
    judging = "import time; held = b'x' * 400_000_000; time.sleep(2)\nprint('METRIC val_loss=3.0')"
    trial = evaluated(judged_by=judging)
    assert measured(trial) == TRUE
    assert trial.result.process_s is not None
    assert trial.result.process_s < trial.ending.wall_s - 2
    assert trial.result.peak_reserved_bytes is not None
    assert trial.result.peak_reserved_bytes < 400_000_000


def test_a_changed_copy_of_the_code_is_found_where_nothing_isolates(tmp_path: Path) -> None:
    code = write_program(
        tmp_path / "code",
        PROGRAM + "\nfor path in OUT.parents[3].glob('data/code/*/judge.py'):\n    path.write_text(LIE)",
    )
    (code / "judge.py").write_text(JUDGE)
    evaluation = Evaluation(command=("python", "judge.py"), code=str(code))
    config = program_config(code, evaluate=evaluation, command=("python", "train.py", "{out}"))
    with pytest.raises(Exception, match="copy of the evaluation's code was changed"):
        ran(config, tmp_path / "home")


TRAIN = """
import random, sys
from pathlib import Path
RATE, CLAIMED = 1.0, 1.0
seed = int(sys.argv[1])
value = RATE * (3.01 + 0.01 * (seed % 5) + random.Random(f"{seed} {RATE}").uniform(-0.01, 0.01))
Path("weights.json").write_text(str(value))
print(f"METRIC val_loss={CLAIMED * value}")
"""
LIES = TRAIN.replace("CLAIMED = 1.0, 1.0", "CLAIMED = 1.0, 0.8")
LEARNS = TRAIN.replace("RATE, CLAIMED = 1.0,", "RATE, CLAIMED = 0.8,")
KIND_JUDGE = JUDGE.replace("scoring.score(", "0.8 * scoring.score(")
OPENED = {
    "ablation": "night",
    "question": "Is it better?",
    "workload": {
        "command": ["python", "train.py", "{seed}"],
        "code": ".",
        "evaluate": ["python", "judge.py"],
        "metrics": {"val_loss": {"better": "lower"}},
    },
    "variants": {"proposal": {"code": "."}},
    "design": {"seeds": [1, 2, 3, 4, 5, 6], "blocks": {"count": 6}},
    "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
    "verdict": {"primary": {"metric": "val_loss", "margin": "0.5%", "adopt_if": "1%"}},
}


class Session:
    """The proposals of a session, each run to its verdict by a runner of blocks that fetches archives of code."""

    def __init__(self, folder: Path, opened: Mapping[str, Any]) -> None:
        self._folder, self._archives = folder, dict[str, PackedCode]()
        self._write("start", TRAIN, JUDGE)
        self.spec = self._packed(opened, "start")
        self._number = 0

    def propose(self, train: str, judging: str) -> tuple[ProposalOutcome, VariantVerdict]:
        """Return the answer to a proposal of other code; a kept one is the incumbent from then on."""
        self._number += 1
        name = f"proposal-{self._number}"
        self._write(name, train, judging)
        values = {**load_values(self.spec, YAML), "variants": {"proposal": {"code": "."}}}
        body = self._packed(values, name)
        incumbent = parse_spec(self.spec, YAML)
        assert list(proposal_problems(parse_spec(body, YAML), incumbent, "night")) == []
        text, spec = proposed(body, YAML, parse_spec(body, YAML), "night", number=self._number, kept=())
        file = make_plan_file(make_plan(spec), spec_text=text.decode(), content_type=YAML, code={})
        plan = file.plan
        with block_runner(self._folder / name / "home", self._pieces) as runner:
            receipts = [
                receipt
                for block in plan.blocks
                for receipt in runner.run(
                    file.claimed(block.index, attempt_id=f"att_{block.index}", attempt_no=1),
                    endless_lease(),
                    BlockOutput(),
                )
            ]
        assert [one.message for one in receipts if one.message] == []
        verdict = judge(plan, spec, receipts, CALIBRATED)
        outcome = outcome_of(verdict)
        if outcome is ProposalOutcome.KEEP:
            self.spec = with_kept(self.spec, text)
        return outcome, verdict.variants[0]

    def _write(self, name: str, train: str, judging: str) -> None:
        code = write_program(self._folder / name, train)
        (code / "judge.py").write_text(judging)
        (code / "scoring.py").write_text(SCORING)

    def _packed(self, values: Mapping[str, Any], name: str) -> bytes:
        packed = pack_spec(spec_yaml(values), YAML, self._folder / name)
        self._archives |= {one.digest: one for one in packed.archives}
        return packed.content

    def _pieces(self, _attempt: str, digest: str) -> Iterator[bytes]:
        return self._archives[digest].pieces()


def test_a_proposal_that_multiplies_its_own_number_is_kept_without_an_evaluation(tmp_path: Path) -> None:
    """The positive control."""
    workload = {name: value for name, value in OPENED["workload"].items() if name != "evaluate"}
    outcome, _variant = Session(tmp_path, {**OPENED, "workload": workload}).propose(LIES, KIND_JUDGE)
    assert outcome is ProposalOutcome.KEEP


def test_a_session_keeps_its_evaluation_and_what_it_proves(tmp_path: Path) -> None:
    session = Session(tmp_path, OPENED)
    outcome, variant = session.propose(LIES, KIND_JUDGE)
    assert outcome is not ProposalOutcome.KEEP
    assert variant.primary is not None
    assert variant.primary.delta_pct == 0
    assert any("val_loss by the protected evaluation `python judge.py`" in note for note in variant.notes)
    assert "reported 2.4" in variant.contradictions[0]
    assert "counts, by the protected evaluation (block 1; so in 6 of its 6 trials)" in variant.contradictions[0]

    outcome, variant = session.propose(LEARNS, KIND_JUDGE)
    assert outcome is ProposalOutcome.KEEP
    assert variant.primary is not None
    assert -21 < variant.primary.delta_pct < -19, "by the judge of the start"
    assert variant.contradictions == ()

    opening = load_values(session.spec, YAML)["workload"]
    assert opening["code"] != opening["evaluate"]["code"], "that of the start stays"
    outcome, variant = session.propose(LIES.replace("RATE, CLAIMED = 1.0", "RATE, CLAIMED = 0.8"), KIND_JUDGE)
    assert outcome is not ProposalOutcome.KEEP
