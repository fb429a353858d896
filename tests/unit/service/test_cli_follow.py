from typing import Any

import pytest

from ablate.service.cli.follow import FollowedAblation
from ablate.service.schemas.ablations import Event
from ablate.service.schemas.nodes import NodePublic
from tests.public_rows import ablation_row, trial_row

NODE: dict[str, Any] = {
    **dict.fromkeys(("id", "name", "node_class", "code_digest", "registered_at", "seen_at"), "x"),
    **dict.fromkeys(("quarantined_reason", "stopped_by", "stopped_at", "lanes", "public_key")),
    **{"health": "live", "state": "works", "devices": [], "devices_free": 0, "versions": {}, "lacks": [], "runs": []},
}


def _followed(**changes: Any) -> FollowedAblation:
    return FollowedAblation.of(ablation_row(**changes), [trial_row()])


def _event(kind: str, subject: str, **values: Any) -> Event:
    return Event.of(kind, "7", {"subject": subject, "at": "2026-11-20T10:11:12Z", **values})


def test_followed_ablation_names_the_running_arm_and_its_progress() -> None:
    followed = _followed()
    followed.apply(_event("block.state", "blk_1", to="running", actor="nod_9"))
    assert followed.lines == ["10:11:12  block 1/6: running"], "its node registered meanwhile"
    followed.apply(_event("trial.progress", "trl_9", data={"steps_done": 1}))
    assert followed.trial_text == "", "an unknown trial"
    followed.apply(_event("trial.state", "trl_1", to="running"))
    assert followed.trial_text == "block 1/6, psiv-on: runs"
    followed.apply(_event("trial.progress", "trl_1", data={"steps_done": 3, "steps_total": 14, "loss": 8.2}))
    assert followed.trial_text == "block 1/6, psiv-on: step 3/14, loss 8.200"


def test_followed_ablation_names_the_node_and_the_time_left() -> None:
    nodes = [NodePublic.model_validate({**NODE, "id": "nod_7", "name": "gpu-7"})]
    followed = FollowedAblation.of(ablation_row(time_left_s=754.0), [trial_row()], nodes)
    followed.apply(_event("block.state", "blk_1", to="running", actor="nod_7", reason="claimed, attempt 1"))
    followed.apply(_event("trial.progress", "trl_1", data={"steps_done": 3, "steps_total": 14}))
    assert followed.lines == ["10:11:12  block 1/6 on gpu-7: running (claimed, attempt 1)"]
    assert followed.trial_text == "block 1/6 on gpu-7, psiv-on: step 3/14; about 13\N{NO-BREAK SPACE}min left"
    followed.apply(_event("block.state", "blk_1", to="done", actor="service"))
    assert followed.lines[-1] == "10:11:12  block 1/6 on gpu-7: done", "who reported it is not where it ran"


@pytest.mark.parametrize(
    ("came_from", "went_to", "shown"),
    [("running", "queued", True), ("running", "failed", True), ("running", "done", True), ("held", "queued", False)],
)
def test_the_end_of_an_attempt_stays_on_a_terminal_with_its_reason(
    came_from: str, went_to: str, *, shown: bool
) -> None:
    followed = _followed()
    followed.apply(
        _event("block.state", "blk_1", **{"from": came_from}, to=went_to, reason="disturbed: others took 70%")
    )
    line = f"10:11:12  block 1/6: {went_to} (disturbed: others took 70%)"
    assert followed.kept == ([line] if shown else [])


def test_a_failure_of_a_trial_is_shown_once_as_it_happens_and_again_in_the_next_attempt() -> None:
    followed = _followed()
    why = "user_error: PermissionError: [Errno 13]"
    line = f"10:11:12  block 1/6: psiv-on failed: {why}"
    followed.apply(_event("trial.progress", "trl_1", data={"steps_done": 0, "failure": why}))
    assert followed.kept == [line]
    followed.apply(_event("trial.progress", "trl_1", data={"steps_done": 0, "failure": why}))
    followed.apply(_event("trial.state", "trl_1", to="done", reason=why))
    assert followed.lines == followed.kept == [line]
    followed.apply(_event("trial.state", "trl_1", to="queued", reason="disturbed: others took 70%"))
    followed.apply(_event("trial.state", "trl_1", to="done", reason=why))
    assert followed.kept == [line, line]


def test_blocks_that_are_cancelled_for_one_reason_are_one_line() -> None:
    rows = [trial_row(id=f"trl_{number}", block_id=f"blk_{number}", block_index=number) for number in range(6)]
    followed = FollowedAblation.of(ablation_row(), rows)
    for number in range(1, 6):
        followed.apply(_event("block.state", f"blk_{number}", to="cancelled", reason="every arm failed"))
    assert followed.lines == ["10:11:12  block 2/6: cancelled (every arm failed)"]


def test_a_measured_trial_is_no_problem() -> None:
    followed = _followed()
    followed.apply(_event("trial.state", "trl_1", to="done", reason="reported"))
    assert (followed.lines, followed.kept) == ([], [])


@pytest.mark.parametrize("state", ["done", "failed", "cancelled", "queued"])
def test_a_block_that_runs_no_more_has_no_steps(state: str) -> None:
    followed = FollowedAblation.of(
        ablation_row(), [trial_row(), trial_row(id="trl_2", block_id="blk_2", block_index=1)]
    )
    followed.apply(_event("trial.progress", "trl_1", data={"steps_done": 8, "steps_total": 8}))
    followed.apply(_event("block.state", "blk_2", to="done"))
    assert followed.trial_text == "block 1/6, psiv-on: step 8/8", "another block ended"
    followed.apply(_event("block.state", "blk_1", to=state))
    assert followed.trial_text == ""
    followed.apply(_event("trial.state", "trl_2", to="running"))
    assert followed.trial_text == "block 2/6, psiv-on: runs"


def test_followed_ablation_says_what_a_queued_ablation_waits_for() -> None:
    assert _followed(state="queued", waiting_for="a free node").trial_text == "waits for a free node"


def test_a_wait_whose_numbers_change_is_one_wait() -> None:
    quiet = (
        "quiet: others take {}% of the cores' time (busiest: {}); it waits at most {} s more (block {} on node 'vm')"
    )
    waits = {
        _followed(waiting_for=quiet.format(*values)).waits_for for values in ((70, "xz", 52, 1), (100, "a:b", 1, 2))
    }
    assert waits == {"quiet"}
    node = "a free node of class 'cpu' ({} live, {} blocks ahead in the queue)"
    assert len({_followed(waiting_for=node.format(*values)).waits_for for values in ((1, 0), (2, 14))}) == 1
    assert _followed(waiting_for=None).waits_for == ""


def test_followed_ablation_is_silent_when_it_is_over() -> None:
    followed = _followed(state="completed")
    followed.apply(_event("trial.state", "trl_1", to="running"))
    assert followed.over
    assert followed.trial_text == ""


def test_followed_ablation_tells_the_story_of_blocks_and_of_the_ablation_by_name() -> None:
    followed = _followed()
    followed.apply(_event("ablation.state", "abl_1", to="running", reason="first block claimed"))
    followed.apply(_event("block.state", "blk_1", to="done"))
    assert followed.lines == ["10:11:12  demo: running (first block claimed)", "10:11:12  block 1/6: done"]
