"""Programs that take turns in real blocks: their order, what waits with them, and what they cannot do about it."""

import itertools
import json
import math
import random
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records import receipt_check
from ablate.experiments.records.code_archive import PackedCode
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.receipt_clocks import slice_problems
from ablate.experiments.records.receipts import Receipt, read_named
from ablate.experiments.records.spec_code import pack_spec
from ablate.experiments.retries import Break
from ablate.workers.blocks.block_runner import BlockRunner
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.trials.turns import TURN_S
from tests.integration.block_runners import block_runner, endless_lease

YAML = "application/yaml"
PROGRAM = """
import argparse, ablate, multiprocessing, os, threading, time

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--work", type=float, default=0.002)
parser.add_argument("--dies-at", type=int, default=-1)
parser.add_argument("--how", default="raises")
parser.add_argument("--out")
parser.add_argument("--name")
options = parser.parse_args()

def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass

def tick(file, parent=None):
    while parent in (None, os.getppid()):
        now = time.monotonic()
        with open(file, "a") as ticks:
            ticks.write(f"{now!r} {time.monotonic()!r}\\n")
        time.sleep(0.0005)

def ticked(file):
    return os.path.exists(file) and len(open(file).readlines()) > 3

fork = multiprocessing.get_context("fork")
fork.Process(target=tick, args=(options.out + "/process", os.getpid()), daemon=True).start()
threading.Thread(target=tick, args=(options.out + "/thread",), daemon=True).start()
while not all(ticked(options.out + who) for who in ("/process", "/thread")):
    time.sleep(0.001)
with ablate.trial(seed=options.seed) as trial, open(options.out + "/steps", "a", buffering=1) as steps:
    for step in trial.steps(10):
        began = time.monotonic()
        burn(options.work)
        step.report(loss=1.0 / (1 + step.index), tokens=10)
        if step.index == options.dies_at:
            if options.how == "raises":
                raise ValueError("asked to")
            if options.how == "is killed":
                os.kill(os.getpid(), 11)
            os._exit(3)
        steps.write(f"{began!r} {time.monotonic()!r}\\n")
"""
"""Each step takes the processor seconds after --work. The loop, and a process and a thread beside it, write when they
run. The trial begins when both have written."""
HOWS = {"raises": "asked to", "is killed": "SIGSEGV", "exits": "code 3"}
"""Ways to die, with words of the message about it."""


class Span(NamedTuple):
    """A slice, or a loop of a program beside its steps, by the machine's clock."""

    began: float
    ended: float
    arm: str


class Block(NamedTuple):
    """A block that ran."""

    receipts: Sequence[Receipt]
    folder: Path

    def of(self, arm: str) -> Receipt:
        """Return the receipt of an arm."""
        return next(receipt for receipt in self.receipts if receipt.arm == arm)

    def slices(self, size: int, timed: int) -> list[Span]:
        """Return the whole slices of all trials, in the order of their begins, as the programs saw their steps."""
        spans = []
        for receipt in self.receipts:
            own = self.ran(receipt.arm, "steps")[2 : 2 + timed]
            for first, last in zip(own[::size], own[size - 1 :: size], strict=False):
                spans.append(Span(first.began, last.ended, receipt.arm))
        return sorted(spans)

    def ran(self, arm: str, who: str) -> list[Span]:
        """Return when a part of an arm's program ran."""
        lines = (self.folder / self.of(arm).ids.trial / "out" / who).read_text().splitlines()
        return [Span(*map(float, line.split()), arm) for line in lines if line.count(" ") == 1]


class Rig:
    """A node that runs blocks in slices."""

    def __init__(self, runner: BlockRunner, home: Path, archives: dict[str, PackedCode]) -> None:
        self._runner, self._home, self._archives = runner, home, archives
        self._blocks = 0

    def ran(
        self, arms: Mapping[str, Sequence[str]], *, source: str = PROGRAM, by_time: bool = False, **steps: int
    ) -> Block:
        """Run one block: arms by the arguments that they add."""
        self._blocks += 1
        folder = self._home.with_name(f"code-{self._blocks}")
        folder.joinpath("code").mkdir(parents=True)
        folder.joinpath("code/train.py").write_text(textwrap.dedent(source), encoding="utf-8")
        packed = pack_spec(spec_yaml(values_of(arms, by_time=by_time, **steps)), YAML, folder)
        self._archives.update({one.digest: one for one in packed.archives})
        plan = make_plan(parse_spec(packed.content, YAML))
        file = make_plan_file(plan, spec_text=packed.content.decode(), content_type=YAML, code={})
        attempt = f"att_turns{self._blocks}"
        last = [Break(0, FailureClass.INVALID_MEASUREMENT, None)] * 2  # a third one is a result
        claimed = file.claimed(0, attempt_id=attempt, attempt_no=3, broken=last)
        return Block(self._runner.run(claimed, endless_lease(), BlockOutput()), self._home / "work" / attempt)


def values_of(arms: Mapping[str, Sequence[str]], *, by_time: bool, **steps: int) -> dict[str, Any]:
    """Return the values of a spec whose trials take turns, by the clock or after equally many steps."""
    first, *others = arms
    return {
        "ablation": "turns",
        "question": "Does it wait?",
        "workload": {
            "command": ["python", "train.py", "--seed", "{seed}", "--out", "{out}"],
            "code": "code",
            **({"turns": True} if by_time else {"steps": {"warmup": 1, **steps}}),
        },
        "baseline": {"args": list(arms[first])},
        "variants": {name: {"args": list(arms[name])} for name in others},
        "design": {"seeds": [3], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "cpu_s" if by_time else "cpu_step_s", "margin": "1%"}},
    }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    home, archives = tmp_path_factory.mktemp("turns") / "home", dict[str, PackedCode]()

    def pieces(_attempt: str, digest: str) -> Iterator[bytes]:
        return archives[digest].pieces()

    with block_runner(home, pieces) as runner:
        yield Rig(runner, home, archives)


def expected(order: Sequence[str], deaths: Mapping[str, int], *, size: int, slices: int) -> list[str]:
    """Return whose slices run to their ends, in order: forward and back, without those of programs that died."""
    line = []
    for number in range(slices):
        line += [arm for arm in (order if number % 2 == 0 else order[::-1]) if (number + 1) * size <= deaths[arm]]
    return line


def test_drawn_blocks_run_in_the_order_of_the_oracle_and_nothing_of_a_trial_runs_in_the_turn_of_another(
    rig: Rig,
) -> None:
    chance = random.Random(49)  # noqa: S311 - reproducible by design
    seen = set()
    for _ in range(10):
        size, slices, arms = chance.randint(1, 4), 2 * chance.randint(1, 4), chance.randint(2, 4)
        timed, names = size * slices, ["baseline", "one", "two", "three"][:arms]
        deaths, words, args = {}, {}, {}
        for name in names:
            deaths[name] = timed
            args[name] = ["--work", str(chance.choice([0.0, 0.001, 0.005])), "--name", name]
            if name != "baseline" and chance.random() < 0.5:
                how = chance.choice([*HOWS])
                words[name] = HOWS[how]
                deaths[name] = chance.randint(0, timed - 1)
                args[name] += ["--dies-at", str(2 + deaths[name]), "--how", how]
                seen.add(how)
        block = rig.ran(args, timed=timed, slice=size)
        order = [receipt.arm for receipt in sorted(block.receipts, key=lambda one: one.ids.position)]
        line = block.slices(size, timed)
        assert [span.arm for span in line] == expected(order, deaths, size=size, slices=slices), (order, deaths)
        assert all(later.began >= earlier.ended for earlier, later in pairwise(line))
        for receipt in block.receipts:
            assert receipt_check.verify(json.loads(receipt.model_dump_json())) == []
            if receipt.arm in words:
                assert receipt.outcome is Outcome.FAILED
                assert words[receipt.arm] in str(receipt.message)
            else:
                check_measured(receipt, [span for span in line if span.arm != receipt.arm], timed=timed)
        assert list(slice_problems(block.receipts)) == []
        check_helpers(block, line, names)
    assert seen == HOWS.keys()


def check_measured(receipt: Receipt, others: Sequence[Span], *, timed: int) -> None:
    """Compare a whole trial with what its program was told to do."""
    assert receipt.outcome is Outcome.MEASURED, receipt.message
    assert sum(step.phase == "timed" for step in receipt.steps) == timed
    work = float(receipt.config.values_with_seed["args"][1])
    spent = read_named("cpu_step_s", receipt) or math.nan
    assert work <= spent
    assert timed * spent <= (receipt.cpu_s or 0.0) + 0.02
    assert (receipt.waited_s or 0.0) >= math.fsum(span.ended - span.began for span in others)


def check_helpers(block: Block, line: Sequence[Span], names: Sequence[str]) -> None:
    """Look for a moment at which a process or a thread of one trial ran within a slice of another."""
    for name, who in itertools.product(names, ("process", "thread")):
        ticks = block.ran(name, who)
        assert len(ticks) > 3
        moments = [moment for tick in ticks for moment in (tick.began, tick.ended)]
        foreign = [span for span in line if span.arm != name]
        assert [(name, who, m, span) for span in foreign for m in moments if span.began < m < span.ended] == []


def changed(after: str, *, before: str = "") -> str:
    """Return the program with code of its own before its trial opens."""
    return PROGRAM.replace("with ablate.trial", f"{before}\n{after}\nwith ablate.trial", 1)


NO_WAIT = """
if options.name == "cheat":
    ablate.Trial._wait_for_turn = lambda self: {what}
"""


def test_a_program_that_does_not_ask_for_its_turn_fails_and_the_others_are_measured(rig: Rig) -> None:
    arms = {"baseline": (), "cheat": ("--name", "cheat")}
    block = rig.ran(arms, source=changed(NO_WAIT.format(what="None")), timed=8, slice=2)
    assert block.of("baseline").outcome is Outcome.MEASURED
    assert block.of("cheat").outcome is Outcome.FAILED
    assert "slice 1 began before the turn of its trial" in str(block.of("cheat").message)


def test_a_program_that_does_not_wait_for_the_answer_is_stopped_all_the_same(rig: Rig) -> None:
    """It runs on for the time that a stop takes. A slice that it begins in this time ends its trial."""
    arms = {"baseline": ("--work", "0.02"), "cheat": ("--work", "0.02", "--name", "cheat")}
    block = rig.ran(arms, source=changed(NO_WAIT.format(what="self._send('turn')")), timed=8, slice=2)
    base, cheat = block.of("baseline"), block.of("cheat")
    assert base.outcome is Outcome.MEASURED
    if cheat.outcome is Outcome.FAILED:
        assert "began before the turn of its trial" in str(cheat.message)
    if cheat.outcome is Outcome.MEASURED:
        check_helpers(block, block.slices(2, 8), ["baseline", "cheat"])


def test_nobody_but_the_worker_lets_a_program_go_on(rig: Rig) -> None:
    """A process of its own tries to answer, and to wake it; both before it is stopped and while it is."""
    helper = """
if options.name == "cheat":
    opened = ablate.Trial.__enter__
    def enter(self):
        opened(self)
        file = options.out + "/answers"
        if not os.fork():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own, open(file, "w", buffering=1) as answers:
                while os.getppid() != 1 and os.path.exists(f"/proc/{main}/fd"):
                    try:
                        own.sendto(b".", self._socket.getsockname())
                        answers.write("sent\\n")
                    except PermissionError:
                        answers.write("refused\\n")
                    os.kill(main, 18)
                    time.sleep(0.0005)
            os._exit(0)
        while not os.path.exists(file) or not os.path.getsize(file):
            time.sleep(0.001)
        return self
    ablate.Trial.__enter__ = enter
"""
    arms = {"baseline": ("--work", "0.01"), "cheat": ("--work", "0.01", "--name", "cheat")}
    source = changed(helper, before="import socket; main = os.getpid()")
    block = rig.ran(arms, source=source, timed=8, slice=2)
    line = block.slices(2, 8)
    assert all(later.began >= earlier.ended for earlier, later in pairwise(line))
    answers = (block.folder / block.of("cheat").ids.trial / "out" / "answers").read_text().splitlines()
    assert set(answers) == {"refused"}
    assert block.of("baseline").outcome is Outcome.MEASURED
    check_helpers(block, line, ["baseline", "cheat"])


def test_work_between_the_slices_is_in_the_processor_time_of_the_window(rig: Rig) -> None:
    stash = """
if options.name == "stash":
    waits = ablate.Trial._wait_for_turn
    def wait(self):
        burn(0.05)
        waits(self)
        burn(0.05)
    ablate.Trial._wait_for_turn = wait
"""
    arms = {"baseline": ("--work", "0.01"), "stash": ("--work", "0.001", "--name", "stash")}
    block = rig.ran(arms, source=changed(stash), timed=8, slice=2)
    base, own = (read_named("cpu_step_s", block.of(arm)) or math.nan for arm in ("baseline", "stash"))
    assert 0.01 <= base < own
    # four times before a slice and four times after one: those before the first turn and after the last are outside
    assert own >= 7 * 0.05 / 8


def test_ranks_do_not_take_turns(rig: Rig) -> None:
    ranks = "os.environ.update(RANK='0', WORLD_SIZE='2')"
    block = rig.ran({"baseline": (), "two": ("--name", "two")}, source=changed(ranks), timed=4, slice=1)
    assert {receipt.outcome for receipt in block.receipts} == {Outcome.FAILED}
    assert "trains with 2 ranks, which cannot take turns" in str(block.of("two").message)


def test_times_of_a_trial_leave_out_the_turns_of_the_others(rig: Rig) -> None:
    block = rig.ran({"baseline": ("--work", "0.1"), "slow": ("--work", "0.11")}, timed=12, slice=3)
    line = block.slices(3, 12)
    for receipt in block.receipts:
        check_measured(receipt, [span for span in line if span.arm != receipt.arm], timed=12)
        window_s = sum(step.seconds for step in receipt.steps if step.phase == "timed")
        assert window_s <= receipt.training_s <= (receipt.process_s or 0.0) <= receipt.wall_s
        passed_s = block.ran(receipt.arm, "steps")[-1].ended - block.ran(receipt.arm, "steps")[0].began
        in_turn_s = passed_s - (receipt.waited_s or 0.0)
        assert receipt.training_s >= in_turn_s, "a profiled step after the window is in it, too"


PROCESS = """
import argparse, multiprocessing, os, threading, time

parser = argparse.ArgumentParser()
parser.add_argument("--seed")
parser.add_argument("--work", type=float)
parser.add_argument("--dies", action="store_true")
parser.add_argument("--out")
options = parser.parse_args()

def tick(file, seconds):
    began = time.thread_time()
    with open(options.out + file, "a", buffering=1) as ticks:
        while time.thread_time() < began + seconds:
            now = time.monotonic()
            end = time.thread_time() + 0.002
            while time.thread_time() < end:
                pass
            ticks.write(f"{now!r} {time.monotonic()!r}\\n")

helper = multiprocessing.get_context("fork").Process(target=tick, args=("/process", options.work / 2))
helper.start()
thread = threading.Thread(target=tick, args=("/thread", options.work / 4))
thread.start()
tick("/main", options.work / 4)
helper.join()
thread.join()
if options.dies:
    raise ValueError("asked to")
"""
"""Takes the processor seconds after --work in a process and two threads, which write when they run."""


def test_drawn_processes_take_turns_of_half_a_second_and_their_numbers_leave_out_those_of_the_others(rig: Rig) -> None:
    chance = random.Random(50)  # noqa: S311 - reproducible by design
    for arms, dies in ((2, False), (3, True), (4, False)):
        names = ["baseline", "one", "two", "three"][:arms]
        args = {name: ["--work", str(round(chance.uniform(1.0, 4.0), 2))] for name in names}
        if dies:
            args["one"].append("--dies")
        block = rig.ran(args, source=PROCESS, by_time=True)
        order = [receipt.arm for receipt in sorted(block.receipts, key=lambda one: one.ids.position)]
        moments = sorted(
            (moment, name)
            for name in names
            for who in ("main", "process", "thread")
            for tick in block.ran(name, who)
            for moment in (tick.began, tick.ended)
        )
        turns = []
        for name, group in itertools.groupby(moments, key=lambda one: one[1]):
            own = [moment for moment, _name in group]
            turns.append(Span(own[0], own[-1], name))
        first_end = min(max(turn.ended for turn in turns if turn.arm == name) for name in names)
        line = [turn.arm for turn in turns if turn.began < first_end]
        there_and_back = itertools.cycle(order + order[::-1])
        planned = [arm for arm, _ in itertools.groupby(itertools.islice(there_and_back, 2 * len(line) + 8))]
        assert line == planned[: len(line)], "nothing of a trial runs in the turn of another one"
        for receipt in block.receipts:
            check_process(receipt, turns)


def check_process(receipt: Receipt, turns: Sequence[Span]) -> None:
    """Compare a trial that took turns by the clock with what its program did."""
    assert receipt_check.verify(json.loads(receipt.model_dump_json())) == []
    arguments = receipt.config.values_with_seed["args"]
    if "--dies" in arguments:
        assert receipt.outcome is Outcome.FAILED
        assert "asked to" in str(receipt.message)
        return
    assert receipt.outcome is Outcome.MEASURED, receipt.message
    own = [turn for turn in turns if turn.arm == receipt.arm]
    others = [turn for turn in turns if turn.arm != receipt.arm and own[0].began < turn.began < own[-1].began]
    process_s, waited_s, cpu_s = (value or 0.0 for value in (receipt.process_s, receipt.waited_s, receipt.cpu_s))
    assert math.fsum(turn.ended - turn.began for turn in others) <= waited_s
    assert bool(others) == (len(own) > 1), "one turn may be enough for a trial that takes two in a row"
    assert own[-1].ended - own[0].began - waited_s <= process_s <= receipt.wall_s
    assert len(own) <= process_s / TURN_S + 1
    work = float(arguments[1])
    assert work <= cpu_s <= work + 1.5, "and the start of the program"
    assert receipt.environment.foreign_load is not None


def test_a_program_that_marks_its_steps_takes_no_turns_by_the_clock(rig: Rig) -> None:
    block = rig.ran({"baseline": (), "one": ("--name", "one")}, by_time=True)
    assert {receipt.outcome for receipt in block.receipts} == {Outcome.FAILED}
    assert "write steps: {slice: ...} instead of workload.turns" in str(block.of("one").message)
