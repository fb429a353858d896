"""Known cheats as arms beside an honest baseline, and as proposals: the product says what their headers say."""

from pathlib import Path

import pytest

from ablate.experiments.outcomes import BASELINE, Outcome, ProposalOutcome
from ablate.workers.isolation.reach import isolation_problem, own_tree_problem
from tests.cheating import GROUPS, SESSIONS, Ran, answer_problem, cheats, of_group, ran, trial_problem, tried

pytestmark = [
    pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}"),
    pytest.mark.timeout(1800),
]
BY_TRIAL = [name for name in of_group("Speed") if cheats()[name].answers["Speed"].word in ("fails", "invalid")]
BY_BLOCKS = [(group, name) for group in GROUPS if group not in SESSIONS for name in of_group(group)]
AS_PROPOSALS = [(group, name) for group in SESSIONS for name in of_group(group)]


def test_a_trial_that_is_caught_ends_as_its_header_says(tmp_path: Path) -> None:
    receipts = ran("Speed", BY_TRIAL, tmp_path, blocks=1).receipts
    assert [one.message for one in receipts if one.arm == BASELINE] == [None]
    problems = {name: trial_problem(name, cheats()[name].answers["Speed"], receipts) for name in BY_TRIAL}
    assert {name: problem for name, problem in problems.items() if problem is not None} == {}


@pytest.fixture(scope="module")
def ablations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Return the ablation of each group that a test of this process asks for, by group."""
    return Lazily(tmp_path_factory)


class Lazily(dict[str, Ran]):
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, group: str) -> Ran:
        self[group] = ran(group, of_group(group), self._folders.mktemp(group.lower()))
        return self[group]


@pytest.mark.parametrize(("group", "name"), BY_BLOCKS)
def test_a_cheat_gets_the_answer_of_its_header(ablations: dict[str, Ran], group: str, name: str) -> None:
    if name == "stashed_files" and own_tree_problem() is not None:
        pytest.skip("trials share /dev/shm here, which ablate worker doctor says")
    one, expected = ablations[group], cheats()[name].answers[group]
    honest = [receipt.outcome for receipt in one.receipts if receipt.arm == BASELINE]
    assert honest == [Outcome.MEASURED] * 6
    assert answer_problem(expected, one.answer(name)) is None


@pytest.mark.parametrize(("group", "name"), AS_PROPOSALS)
def test_a_cheat_as_a_proposal_is_kept_only_if_its_header_says_so(tmp_path: Path, group: str, name: str) -> None:
    outcome, answer = tried(group, name, tmp_path)
    expected = cheats()[name].answers[group]
    assert (outcome is ProposalOutcome.KEEP) == (expected.word in ("kept", "named")), answer.reason
    assert answer_problem(expected, answer) is None
