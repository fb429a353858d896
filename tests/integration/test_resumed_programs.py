"""Programs that are killed and go on from a checkpoint: real processes, ranks, and what goes wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.design.load import parse_spec
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle_files import read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.circumstances import UNCALIBRATED
from ablate.experiments.records.plan_file import PlanWithCode
from ablate.experiments.records.program_report import report_contradictions
from ablate.model.config import StepsConfig
from ablate.workers.trials.result import TrialResult
from tests.integration.test_exec_code import ablate
from tests.programs import program_config, ran, write_program

STEPS = StepsConfig(warmup=3, warmup_s=0.0, timed=16, slice=0, val_rows=0)
PROGRAM = """
import ablate, json, os, random, sys
EVERY, FILE = 4, f"checkpoint-{os.environ.get('RANK', '0')}.json"
weights, first, chance = 0.0, 0, random.Random(7)
if os.path.exists(FILE):
    weights, first, state = json.load(open(FILE))
    chance.setstate((state[0], tuple(state[1]), state[2]))
assert (os.environ.get("ABLATE_RESUMED") == "1") == (first > 0), "the variable says so"
with ablate.trial(seed=7) as trial:
    assert trial.resumed == (first > 0)
    for step in trial.steps(20, first=first):
        weights = 0.9 * weights + chance.random()
        step.report(loss=weights, tokens=10)
        if (step.index + 1) % EVERY == 0:
            with open(FILE + ".part", "w") as file:
                json.dump([weights, step.index + 1, chance.getstate()], file)
            os.replace(FILE + ".part", FILE)
    trial.report(val_bpb=weights)
"""


def trial(folder: Path, source: str = PROGRAM, *, at: int | None, **changes: Any) -> TrialResult:
    code = write_program(folder / "code", source)
    command = changes.pop("command", ("python", "train.py"))
    config = program_config(code, command=command, resume_at=at, steps=STEPS, metrics={"val_bpb": "lower"}, **changes)
    result = ran(config, folder / f"home-{at}")
    if result.failure_class is None:
        assert result.program is not None
        timed = [step.seconds for step in result.program_steps if step.phase == "timed"]
        assert list(report_contradictions(result.program, config, sum(timed))) == []
    return result


def losses(result: TrialResult) -> list[float | None]:
    assert result.failure_class is None, result.message
    assert [step.index for step in result.program_steps] == list(range(STEPS.total))
    return [step.loss for step in result.program_steps]


@pytest.mark.parametrize("at", [4, 5, 7, 8, 16, 19])
def test_a_program_that_goes_on_from_its_checkpoint_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, at: int
) -> None:
    whole, resumed = trial(tmp_path, at=None), trial(tmp_path, at=at)
    assert losses(resumed) == losses(whole)
    assert whole.program is not None
    assert resumed.program is not None
    assert (whole.program.resumed_from, resumed.program.resumed_from) == (None, at // 4 * 4)
    assert resumed.program.repeated_otherwise is None
    assert resumed.program.reported == whole.program.reported
    assert {step.tokens for step in resumed.program_steps} == {10}


def test_a_checkpoint_without_the_state_of_chance_is_found_out_at_the_first_step(tmp_path: Path) -> None:
    forgets = PROGRAM.replace("    chance.setstate((state[0], tuple(state[1]), state[2]))\n", "")
    whole, resumed = trial(tmp_path, forgets, at=None), trial(tmp_path, forgets, at=10)
    pairs = list(zip(losses(whole), losses(resumed), strict=True))
    assert [one == other for one, other in pairs[:8]] == [True] * 8
    assert not any(one == other for one, other in pairs[8:])
    assert resumed.program is not None
    index, before, after = resumed.program.repeated_otherwise or (0, 0.0, 0.0)
    assert (index, before, after) == (8, *pairs[8])


def test_all_processes_and_ranks_are_killed_and_go_on(tmp_path: Path) -> None:
    launcher = """
        import os, subprocess, sys
        subprocess.Popen(["sleep", "600"], start_new_session=True) if "ABLATE_RESUMED" not in os.environ else None
        both = [subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"})
                for rank in "01"]
        sys.exit(max(one.wait() for one in both))
        """
    folder = write_program(tmp_path / "code", launcher)
    (folder / "rank.py").write_text(PROGRAM)
    whole, resumed = trial(tmp_path, launcher, at=None), trial(tmp_path, launcher, at=6)
    assert losses(resumed) == losses(whole)
    assert resumed.program is not None
    assert (resumed.program.ranks, resumed.program.resumed_from) == (2, 4)
    assert resumed.process_s is not None, "the daemon of the killed run is gone"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("os.path.exists(FILE)", "False", "the variable says so"),
        ("assert (os", "(os", None),
        ("first=first", "first=first + (9 if first else 0)", "began with step 17 after it was killed at the end of"),
        ("first=first", "first=0", "began with step 0 after it was killed at the end of step 9; allowed: 1 to 10"),
        ("first=first", "first=1", "began with step 1; a trial begins with step 0"),
        ("weights = 0.9", "assert step.index != 3; weights = 0.9", "AssertionError"),
        ("weights = 0.9", "assert step.index != 12; weights = 0.9", "AssertionError"),
        ("with ablate.trial", "sys.exit(3) if first else 0\nwith ablate.trial", "exit code 3"),
        ("    for step in trial", "    sys.exit(0)\n    for step in trial", "marked no steps"),
    ],
)
def test_a_program_that_does_not_go_on_fails_and_says_why(
    tmp_path: Path, old: str, new: str, words: str | None
) -> None:
    result = trial(tmp_path, PROGRAM.replace(old, new), at=10, needs="steps")
    assert result.failure_class is (None if words is None else FailureClass.USER_ERROR)
    assert words is None or words in str(result.message)


def test_a_generator_that_marks_a_loop_goes_on_too(tmp_path: Path) -> None:
    source = """
        import ablate, os
        first = int(open("first").read()) if os.path.exists("first") else 0
        for step in ablate.steps(20, first=first, seed=7):
            step.report(loss=float(step.index), tokens=1)
            open("first", "w").write(str(step.index + 1))
        print("METRIC val_bpb=1.5")
        """
    result = trial(tmp_path, source, at=13)
    assert losses(result) == [float(index) for index in range(20)]
    assert result.program is not None
    assert result.program.resumed_from == 13


def test_ranks_of_torchrun_go_on(tmp_path: Path) -> None:
    source = PROGRAM.replace(
        "with ablate.trial", "import torch.distributed as dist\ndist.init_process_group('gloo')\nwith ablate.trial"
    )
    launch = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    whole, resumed = (trial(tmp_path, source, at=at, command=launch, env={"OMP_NUM_THREADS": "1"}) for at in (None, 6))
    assert losses(resumed) == losses(whole)
    assert resumed.program is not None
    assert (resumed.program.ranks, resumed.program.resumed_from) == (2, 4)
    assert resumed.program.repeated_otherwise is None
    assert {step.tokens for step in resumed.program_steps} == {20}, "10 of each rank"


TRAINER = """
import ablate, json, os
from types import SimpleNamespace

ROWS = [30, 10, 20, 40, 50, 70, 60, 80]

class Trainer:
    \"\"\"Calls back in the order of transformers.Trainer, and saves the state every four steps.\"\"\"

    def __init__(self, callback):
        self.callback = callback

    def train(self, resume):
        state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
        if resume:
            state = SimpleNamespace(**json.load(open("checkpoint")))
        control = SimpleNamespace(should_training_stop=False)
        self.callback.on_train_begin(None, state, control)
        while not control.should_training_stop:
            state.num_input_tokens_seen += ROWS[state.global_step % len(ROWS)]
            state.global_step += 1
            self.callback.on_step_end(None, state, control)
            self.callback.on_log(None, state, control, logs={"loss": 1 / state.global_step})
            if state.global_step % 4 == 0:
                json.dump(vars(state), open("part", "w"))
                os.replace("part", "checkpoint")

with ablate.trial(seed=7) as trial:
    Trainer(ablate.trainer_callback(trial)).train(resume=trial.resumed)
    trial.report(val_bpb=1.0)
"""


@pytest.mark.parametrize("at", [5, 8, 11, 19])
def test_the_callback_of_a_trainer_goes_on_with_the_tokens_of_its_checkpoint(tmp_path: Path, at: int) -> None:
    write_program(tmp_path / "code")
    (tmp_path / "code/transformers.py").write_text("class TrainerCallback: pass\n")
    whole, resumed = trial(tmp_path, TRAINER, at=None), trial(tmp_path, TRAINER, at=at)
    assert losses(resumed) == losses(whole)
    assert [step.tokens for step in resumed.program_steps] == [step.tokens for step in whole.program_steps]
    assert [step.tokens for step in whole.program_steps][:4] == [30, 10, 20, 40]
    assert resumed.program is not None
    assert resumed.program.resumed_from == (at - 1) // 4 * 4, "the state is saved after the callback"


def test_a_check_kills_the_program_and_lets_it_go_on(tmp_path: Path) -> None:
    spec = {
        "ablation": "resumed",
        "question": "Is a run that was killed and resumed the same?",
        "workload": {"command": ["python", "train.py", "{seed}"], "code": ".", "steps": {"warmup": 3, "timed": 16}},
        "variants": {"resumed": {"resume_at": 19}, "first": {"resume_at": 1}},
        "design": {"seeds": [1, 2, 3], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu"},
        "verdict": {"primary": {"metric": "loss_final", "margin": "0%"}},
    }
    own = PROGRAM.replace("EVERY, FILE = 4", "EVERY, FILE = 1").replace("trial.steps(20,", "trial.steps(")
    own = own.replace("seed=7", "seed=int(sys.argv[1])")
    forgets = own.replace("first=first", "first=0")
    answers = []
    for source in (own, forgets):
        write_program(tmp_path / "code", source)
        (tmp_path / "code/spec.json").write_text(json.dumps(spec))
        done = ablate("check", "--json", "spec.json", folder=tmp_path / "code")
        rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
        answers.append((done.returncode, {arm: rows[arm] for arm in ("baseline", "resumed", "first")}))
    (code, good), (bad_code, bad) = answers
    assert (code, bad_code) == (0, 6), answers
    assert all(row["passed"] for row in good.values()), good
    assert {arm: row["passed"] for arm, row in bad.items()} == {"baseline": True, "resumed": False, "first": False}
    assert "began with step 0 after it was killed at the end of step" in bad["resumed"]["detail"]


def test_an_ablation_says_whether_a_resumed_run_is_identical_and_where_it_first_differs(tmp_path: Path) -> None:
    own = PROGRAM.replace("Random(7)", "Random(int(sys.argv[1]))").replace("seed=7", "seed=int(sys.argv[1])")
    own = own.replace("    chance.setstate", "    if 'FORGET' not in os.environ: chance.setstate")
    write_program(tmp_path / "src", own)
    spec = {
        "ablation": "resumed",
        "question": "Is a run that was killed and resumed the same?",
        "workload": {
            "command": ["python", "train.py", "{seed}"],
            "code": "src",
            "steps": {"warmup": 3, "timed": 16},
        },
        "variants": {"resumed": {"resume_at": 10}, "forgetful": {"resume_at": 10, "env": {"FORGET": "1"}}},
        "design": {"seeds": [1, 2, 3], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "loss_final", "margin": "0%"}},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    for words in (["plan", "spec.json", "--out", "plan.tar"], ["offline", "exec", "plan.tar", "--out", "bundle"]):
        done = ablate(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    plan_file = PlanWithCode(tmp_path / "plan.tar").plan_file
    bundle = open_bundle(read_bundle_files(tmp_path / "bundle"))
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    spec_of_plan = parse_spec(plan_file.spec_text.encode(), plan_file.content_type)
    verdict = judge(plan_file.plan, spec_of_plan, receipts, UNCALIBRATED)
    variants = {variant.arm: variant for variant in verdict.variants}
    assert {name: (one.verdict, one.decision) for name, one in variants.items()} == {
        "resumed": ("same", "same"),
        "forgetful": ("worse", "reject"),
    }
    for variant in variants.values():
        assert variant.secondary == (), "no speed"
        assert variant.costs is None or variant.costs.seconds is None
    same = (
        "killed after 10 steps and resumed from step 8: every loss is that of the uninterrupted run, bit for bit, in 6"
    )
    assert any(note.startswith(same) for note in variants["resumed"].notes)
    words = "killed after 10 steps and resumed from step 8: the first loss that differs is that of step 8, "
    assert any(
        note.startswith(words) and "(block 1; so in 6 of 6 blocks)" in note for note in variants["forgetful"].notes
    )
    assert any(note.startswith("step 8 ran twice, with loss ") for note in variants["forgetful"].notes)
