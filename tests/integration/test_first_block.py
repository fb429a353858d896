"""A first block that leaves nothing to compare ends the ablation, and every failure is an event; on both databases."""

import random
from typing import Any

import pytest
from sqlalchemy import select

from ablate.experiments.outcomes import FailureClass
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.tables import events
from tests.api_stack import Api, api_fixture, receipts_of

api = api_fixture()

DENIED = "the program ended with exit code 1: PermissionError: [Errno 13] Permission denied: '/srv/x.bin'"
ARMS = ("baseline", "psiv-on", "chunk-32")
VARIANTS = {*ARMS} - {"baseline"}


def failing(*arms: str, outcome: str = "failed", message: str = DENIED) -> dict[str, Any]:
    """Changes of the receipts of arms that failed; `outcome` is one of receipts."""
    ends = {"outcome": outcome, "message": message, "steps": (), "validations": ()}
    classes = {"failed": FailureClass.USER_ERROR}
    return {arm: {**ends, **({"failure_class": classes[outcome]} if outcome in classes else {})} for arm in arms}


def report(api: Api, node: str, changed: dict[str, Any], **spec: Any) -> None:
    block = api.claimed(node)
    answer = api.attempt(block, "report", receipts=receipts_of(block, node, changed=changed, **spec))
    assert answer.status_code == 200, answer.text


def states(api: Api, made: dict[str, Any]) -> str:
    items = api.get(f"{made['links']['self']}/blocks?limit=100").json()["items"]
    return "".join(item["state"][0] for item in items)


def reasons(api: Api, made: dict[str, Any], kind: str, new: str = "done") -> list[str]:
    own = events.c.ablation_id == made["id"], events.c.kind == kind, events.c.new == new
    with api.store.read() as connection:
        return list(connection.execute(select(events.c.reason).where(*own)).scalars())


def test_an_ablation_whose_arms_all_fail_alike_ends_after_its_first_block_and_says_why(api: Api) -> None:
    made, node = api.submit(), api.register()
    report(api, node, failing(*ARMS))
    assert states(api, made) == "d" + "c" * 5
    assert set(reasons(api, made, "trial.state")) == {f"user_error: {DENIED}"}
    [block_reason] = reasons(api, made, "block.state")
    assert block_reason.startswith("none of 3 trials measured; ")
    assert all(arm in block_reason for arm in ARMS)
    [ended] = reasons(api, made, "ablation.state", "completed")
    assert "1 block done, none of them comparable, 0 failed, 5 not run" in ended
    assert "PermissionError" in ended
    block = api.get(f"{made['links']['self']}/blocks?limit=100").json()["items"][1]
    assert block["message"] == f"every arm failed in the first block: {DENIED}"
    assert OutboxHandlers(api.store).run_due(OutboxKind.JUDGE)
    verdict = api.get(made["links"]["verdict"]).json()
    assert {variant["decision"] for variant in verdict["variants"]} == {"invalid"}


def test_a_failed_baseline_ends_the_ablation_at_its_first_block_only(api: Api) -> None:
    made, node = api.submit(), api.register()
    report(api, node, failing("baseline"))
    assert states(api, made) == "d" + "c" * 5
    later = api.submit()
    report(api, node, {})
    report(api, node, failing("baseline"))
    assert states(api, later) == "dd" + "q" * 4


def test_held_blocks_end_with_the_first_block_too(api: Api) -> None:
    looks = {"design__blocks": {"looks": [6, 8, 12]}}
    made, node = api.submit(**looks), api.register()
    report(api, node, failing(*ARMS), **looks)
    assert states(api, made) == "d" + "c" * 11


@pytest.mark.parametrize("seed", range(8))
def test_the_first_block_ends_an_ablation_exactly_if_no_variant_can_be_compared(api: Api, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - draws that repeat
    outcomes = {arm: rng.choice(["measured", "failed", "oom", "refused", "invalid"]) for arm in ARMS}
    changed = {arm: failing(arm, outcome=one)[arm] for arm, one in outcomes.items() if one != "measured"}
    made, node = api.submit(), api.register()
    report(api, node, changed)
    failed = {arm for arm, outcome in outcomes.items() if outcome in {"failed", "oom", "refused"}}
    ends = "baseline" in failed or failed >= VARIANTS
    assert states(api, made) == "d" + ("c" if ends else "q") * 5
    api.cancel(made["id"])
    stored = sorted(reason != "reported" for reason in reasons(api, made, "trial.state"))
    assert stored == sorted(outcome != "measured" for outcome in outcomes.values())
    (of_block,) = reasons(api, made, "block.state")
    assert ("measured; " in of_block) == (set(outcomes.values()) != {"measured"})
    compared = {arm for arm in VARIANTS if outcomes[arm] == outcomes["baseline"] == "measured"}
    assert {arm for arm in VARIANTS if f"{arm} 0.00 %" in of_block} == compared


@pytest.mark.parametrize("seed", range(6))
def test_a_block_says_how_its_arms_differ_in_the_metric_that_decides(api: Api, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - draws that repeat
    own = {arm: {"tokens_per_s": rng.uniform(10, 1e6), "peak_bytes": rng.randint(2**20, 2**40)} for arm in ARMS}
    primary, wanted = rng.choice(
        [("tokens_per_s", "throughput"), ("step_s", "step time"), ("peak_allocated_gib", "peak allocated memory")]
    )
    spec = {"verdict__primary": {"metric": primary, "margin": "1%"}}
    made, node = api.submit(**spec), api.register()
    report(api, node, own, **spec)
    (reason,) = reasons(api, made, "block.state")
    label, _, parts = reason.partition(": ")
    assert label == wanted
    for part in parts.split(", "):
        arm, shown, _ = part.rsplit(" ", 2)
        one, base = own[arm], own["baseline"]
        ratio = {
            "tokens_per_s": one["tokens_per_s"] / base["tokens_per_s"],
            "step_s": base["tokens_per_s"] / one["tokens_per_s"],
            "peak_allocated_gib": one["peak_bytes"] / base["peak_bytes"],
        }[primary]
        assert float(shown.replace(",", "").replace("\N{MINUS SIGN}", "-")) == pytest.approx(
            100 * (ratio - 1), abs=0.0051, rel=1e-6
        )
    assert {part.partition(" ")[0] for part in parts.split(", ")} == VARIANTS


@pytest.mark.parametrize(("failure", "ends"), [("user_error", True), ("output_limit", True), ("timeout", False)])
def test_code_that_cannot_be_prepared_ends_the_ablation_at_the_first_block(
    api: Api, failure: str, *, ends: bool
) -> None:
    made, node = api.submit(), api.register()
    for _ in range(1 if ends else 2):
        block = api.claimed(node)
        message = "the code cannot be copied: 'x' is no folder"
        api.attempt(block, "report", receipts=[], failure_class=failure, message=message)
    assert states(api, made) == ("f" + "c" * 5 if ends else "f" + "q" * 5)


def test_a_heartbeat_shows_the_failure_of_a_trial_before_its_block_ends(api: Api) -> None:
    made, node = api.submit(), api.register()
    block = api.claimed(node)
    first = block["trials"][0]["trial_id"]
    beat = {"trial_id": first, "steps_done": 0, "steps_total": 5, "over": True, "failure": f"user_error: {DENIED}\0"}
    for _ in range(2):
        assert api.attempt(block, "heartbeat", progress=[beat]).status_code == 200
    api.cancel(made["id"])
    api.attempt(block, "report", failure_class="cancelled", message="cancelled")
    assert states(api, made) == "c" * 6
