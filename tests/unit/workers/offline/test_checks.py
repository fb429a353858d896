"""Whether the trials of a block can take turns, by the answers of `ablate check`: drawn results, counted in full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.records.program_report import ProgramReport
from ablate.workers.offline import checks
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
    assert answer == (fits and all(ranks == 1 for ranks, _peak in arms))
