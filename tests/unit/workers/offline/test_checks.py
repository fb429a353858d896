"""`ablate check`: whether the trials of a block can take turns, in drawn results, and what it says meanwhile."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ablate.experiments.records.program_report import ProgramReport
from ablate.workers.offline import check_runs, checks
from ablate.workers.trials.result import TrialResult

FREE = 1000


class Memory:
    """A machine with as much free memory."""

    available = FREE


def result(ranks: int | None, peak: int | None) -> TrialResult:
    report = None if ranks is None else ProgramReport(argv=("a",), ranks=ranks, exit_code=0)
    return TrialResult.partial(program=report, peak_reserved_bytes=peak, peak_allocated_bytes=peak)


@given(
    arms=st.lists(
        st.tuples(st.sampled_from([None, 0, 1, 1, 1, 1, 2]), st.none() | st.integers(1, 400)), min_size=1, max_size=5
    ),
    more=st.integers(0, 1),
)
def test_trials_take_turns_only_with_one_rank_each_and_memory_for_all(
    arms: list[tuple[int | None, int | None]], more: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.psutil, "virtual_memory", Memory)
        answer = checks._can_take_turns([result(*arm) for arm in arms], more=more)
    sizes = [peak for _ranks, peak in arms if peak is not None]
    together = [*sizes, *([max(sizes)] * more if sizes else [])]
    fits = len(sizes) == len(arms) and sum(together) <= FREE * 3 // 4
    assert answer == (fits and all(ranks in {0, 1} for ranks, _peak in arms))


class Runs:
    """A pipe whose run ends after the given number of looks, each as long as it may take."""

    def __init__(self, clock: list[float], looks: int) -> None:
        self.clock, self.looks = clock, looks

    def poll(self, timeout: float) -> bool:
        self.clock[0] += timeout
        self.looks -= 1
        return self.looks < 0

    def recv(self) -> check_runs.CheckRun:
        return check_runs.CheckRun(wall_s=7.0)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("looks", [0, 1, 9])
def test_a_long_run_says_which_arm_it_is_and_how_long_it_may_take(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, looks: int
) -> None:
    clock, output = [1000.0], io.StringIO()
    monkeypatch.setattr(check_runs.time, "monotonic", lambda: clock[0])
    console = Console(file=output, force_terminal=terminal, width=80, highlight=False)
    run = check_runs._awaited(Runs(clock, looks), console, "run 1 of 2, arm slow", 300)  # type: ignore[arg-type]
    assert run.wall_s == 7.0
    lines = output.getvalue().splitlines()
    assert "run 1 of 2, arm slow" in lines[0]
    every_s = 1 if terminal else 30
    shown = [f"run 1 of 2, arm slow: {every_s * look} s of at most 300 s" for look in range(1, looks + 1)]
    assert terminal or lines[1:] == shown
    assert not terminal or (shown or [""])[-1] in output.getvalue()
    assert not terminal or lines[-1].endswith("\x1b[1A\x1b[2K"), "the line that changes is erased"
