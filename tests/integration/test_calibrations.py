"""From A/A blocks through the real API and both databases to verdicts, the ledger, and what people and programs see."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import controlled, make_plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.ids import new_id
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.cli import tables
from ablate.service.cli.output import plain_text
from ablate.service.lifecycle import OutboxKind
from ablate.service.schemas.submissions import AblationAccepted
from ablate.service.submitting import _has_control
from tests.api_stack import Api, api_fixture, running_api
from tests.calibrations import aa_spec, aa_text
from tests.factories import make_receipt, make_spec, spec_values
from tests.web_pages import Person

SPEEDS = {"psiv-on": 1.05, "chunk-32": 0.95}


both = api_fixture()
api = api_fixture(kinds=["sqlite"])


def submit_aa(api: Api, **options: Any) -> str:
    headers = {
        **api.admin,
        "Content-Type": CONTENT_TYPE,
        "Idempotency-Key": f"aa-{sorted(options.items())}".replace(" ", ""),
    }
    answer: httpx.Response = api.client.post("/v1/ablations", content=aa_text(**options), headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def run(
    api: Api, spec: AblationSpec, *, seed: int = 0, control: bool = False, on: str = "node-a", **environment: Any
) -> None:
    """Report every waiting block of an ablation of `spec`, with noise of 0.3 % and the speeds above, and judge it.

    Any other node than node-a is that of an allocation, with which it leaves.
    """
    plan = controlled(spec, make_plan(spec)) if control else make_plan(spec)
    allocation = {} if on == "node-a" else {"allocation": on}
    rng, node = np.random.default_rng(seed), api.register(on, **allocation)
    of_losses = np.random.default_rng(1000 + seed)
    handlers = OutboxHandlers(api.store)
    while (block := api.claim(node)) or handlers.run_due(OutboxKind.LOOK):
        if block is None:
            continue
        receipts = []
        for trial in block["trials"]:
            ids = {"ablation": block["ablation_id"], "block": block["block_id"], "trial": trial["trial_id"]}
            ids |= {"attempt": block["attempt_id"], "node": node}
            rate = 5000 * SPEEDS.get(trial["arm"], 1.0) * float(np.exp(rng.normal(0, 0.003)))
            loss = {"loss_val": 7.5 + float(of_losses.normal(0, 0.02))}
            made = make_receipt(
                plan, block["block_index"], trial["arm"], tokens_per_s=rate, ids=ids, environment=environment, **loss
            )
            receipts.append(made.model_dump(mode="json"))
        answer = api.attempt(block, "report", receipts=receipts)
        assert answer.status_code == 200, answer.text
    handlers.run_due(OutboxKind.JUDGE)
    if allocation:
        assert api.client.post(f"/v1/nodes/{on}:leave", headers=api.worker_of(on)).status_code == 204


def answer(api: Api, path: str) -> Any:
    response = api.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def planned(api: Api, spec: dict[str, Any]) -> Any:
    response = api.client.post("/v1/ablations:plan", json=spec, headers=api.admin)
    assert response.status_code == 200, response.text
    return response.json()


def test_verdicts_are_published_after_twenty_blocks_of_noise_and_not_before(both: Api) -> None:
    api = both
    before = api.submit()["id"]
    run(api, make_spec())
    capped = answer(api, f"/v1/ablations/{before}/verdict")
    assert {one["verdict"] for one in capped["variants"]} == {"inconclusive"}
    assert "no A/A blocks" in capped["circumstances"]["admission"]["refused_because"]
    assert capped["circumstances"]["admission"]["mended_by"] == f"ablate aa cpu --like {before}"
    nothing = answer(api, "/v1/calibrations")
    assert (nothing["items"], nothing["ledger"]["ablations"]) == ([], 0)
    assert planned(api, spec_values())["mended_by"] == "ablate aa cpu --like SPEC"

    first = submit_aa(api, blocks=12)
    run(api, aa_spec(blocks=12), seed=1)
    (half,) = answer(api, "/v1/calibrations")["items"]
    assert (half["calibration"]["blocks"], half["problem"], half["mended_by"]) == (12, None, None)

    second = submit_aa(api, blocks=8, order_seed=9)
    run(api, aa_spec(blocks=8, order_seed=9), seed=2)
    noise = answer(api, "/v1/calibrations")
    (whole,) = noise["items"]
    assert (whole["problem"], whole["calibration"]["blocks"]) == (None, 20)
    assert whole["calibration"]["ablations"] == [first, second]
    assert whole["calibration"]["sd_pct"] == pytest.approx(0.3 * 2**0.5, rel=0.4)
    assert noise["ledger"] == {
        "ablations": 2,
        "false_words": 0,
        "differing": 0,
        "upper_bound": pytest.approx(0.7764, abs=1e-4),
    }
    metrics = api.get("/metrics").text
    assert "ablate_aa_ablations 2.0" in metrics
    assert "ablate_false_word_rate_bound 0.776" in metrics

    exact = spec_values(verdict__primary={"metric": "peak_allocated_gib", "margin": "1%", "adopt_if": "5%"})
    assert [planned(api, spec)["mended_by"] for spec in (spec_values(), exact)] == [None, None]
    after = api.submit()["id"]
    run(api, make_spec(), seed=3)
    judged = answer(api, f"/v1/ablations/{after}/verdict")
    assert {one["arm"]: one["verdict"] for one in judged["variants"]} == {"psiv-on": "better", "chunk-32": "worse"}
    (cited,) = judged["circumstances"]["admission"]["calibrations"]
    assert cited == whole["calibration"]
    assert judged["circumstances"]["admission"]["ledger"] == noise["ledger"]


def test_pages_show_a_node_with_two_calibrations(api: Api) -> None:
    for torch in ("2.13.0", "2.14.0"):
        submit_aa(api, order_seed=int(torch[2:4]))
        run(api, aa_spec(order_seed=int(torch[2:4])), device_name="test", versions={"torch": torch})
    for page, lines in (("/", 1), ("/live", 1), ("/nodes", 2)):
        answered = Person.signed_in(api).get(page)
        assert (answered.status_code, answered.text.count(" ago for throughput of ")) == (200, lines), page


@pytest.mark.parametrize(("serial", "problem"), [("card-1", None), ("card-2", "another device")])
def test_a_calibration_outlives_the_allocation_that_measured_it_on_its_card_alone(
    api: Api, serial: str, problem: str | None
) -> None:
    submit_aa(api)
    run(api, aa_spec(), on="slurm-1", device_serial="card-1")
    assert api.get("/v1/nodes").json()["items"] == []
    later = api.submit()["id"]
    run(api, make_spec(), seed=3, on="slurm-2", device_serial=serial)
    judged = answer(api, f"/v1/ablations/{later}/verdict")
    refused = judged["circumstances"]["admission"]["refused_because"]
    assert (refused is None) if problem is None else refused.endswith(problem)
    words = {one["arm"]: one["verdict"] for one in judged["variants"]}
    published = {"psiv-on": "better", "chunk-32": "worse"}
    assert words == (published if problem is None else dict.fromkeys(published, "inconclusive"))


def test_other_software_is_another_key_and_capped_again(api: Api) -> None:
    submit_aa(api)
    run(api, aa_spec())
    other = api.submit()["id"]
    run(api, make_spec(), versions={"python": "3.11", "torch": "2.14.0"})
    admission = answer(api, f"/v1/ablations/{other}/verdict")["circumstances"]["admission"]
    assert admission["refused_because"].endswith("other code or versions")


def test_judging_again_stores_no_block_twice(both: Api) -> None:
    api = both
    ablation = submit_aa(api)
    run(api, aa_spec())
    OutboxHandlers(api.store)._judge(ablation)
    assert answer(api, "/v1/calibrations")["items"][0]["calibration"]["blocks"] == 20


def test_the_spec_of_an_ablation_is_given_as_it_was_written(api: Api) -> None:
    ablation = submit_aa(api)
    given = answer(api, f"/v1/ablations/{ablation}/spec")
    assert given == {"text": aa_text().decode(), "content_type": CONTENT_TYPE}
    missing = api.get("/v1/ablations/abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3/spec")
    assert missing.status_code == 404


def test_a_design_that_the_measured_noise_blinds_is_refused_and_sized_instead(api: Api) -> None:
    before = api.client.post("/v1/ablations:plan", json=spec_values(), headers=api.admin).json()
    assert before["sizing"] is None
    submit_aa(api)
    run(api, aa_spec())
    blind = spec_values(verdict__primary={"metric": "tokens_per_s", "margin": "0.1%", "adopt_if": "0.3%"})
    refused = api.post_spec(blind)
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert problem["pointer"] == "#/design/blocks"
    assert "the rule adopts from 0.3 %" in problem["detail"]
    plan = api.client.post("/v1/ablations:plan", json=blind, headers=api.admin)
    assert (plan.status_code, plan.json()["errors"]) == (422, [problem]), "a plan refuses what a submission does"
    allowed = blind | {"design": blind["design"] | {"underpowered": True}}
    needed = planned(api, allowed)["sizing"]["blocks_needed"]
    assert f"{needed:,} blocks are enough" in problem["hint"]
    blind["design"]["blocks"] = {"count": needed}
    assert api.post_spec(blind).status_code == 202


def test_a_plan_of_a_loss_knows_the_spread_of_seeds_of_an_earlier_ablation(both: Api) -> None:
    api = both
    primary = {"metric": "loss_val", "margin": "0.02 nats"}
    asked = spec_values(design={"seeds": [*range(1, 9)], "blocks": {"count": 8}}, verdict__primary=primary)
    untried = planned(api, asked)
    assert (untried["over_seeds"], untried["sizing"]) == (True, None)
    assert api.post_spec(asked).status_code == 202
    run(api, AblationSpec.model_validate(asked))
    sizing = planned(api, asked | {"ablation": "again"})["sizing"]
    assert (sizing["calibration"], sizing["earlier"]) == (None, asked["ablation"])
    assert sizing["baseline"] == pytest.approx(7.5, abs=0.05)
    assert 0.1 < sizing["sd_upper_pct"] < 1.5
    other = asked | {"workload": asked["workload"] | {"overrides": {"learning_rate": 0.001}}}
    assert planned(api, other)["sizing"] is None, "another baseline"


def test_repeating_an_accepted_submission_gives_its_answer_although_the_design_would_be_refused_now(api: Api) -> None:
    blind = spec_values(verdict__primary={"metric": "tokens_per_s", "margin": "0.1%", "adopt_if": "0.3%"})
    first = api.post_spec(blind, key="same")
    run(api, AblationSpec.model_validate(blind))
    submit_aa(api)
    run(api, aa_spec())
    refused = api.post_spec(blind)
    plan = api.client.post("/v1/ablations:plan", json=blind, headers=api.admin)
    assert (plan.status_code, plan.json()["errors"]) == (refused.status_code, refused.json()["errors"])
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "#/design/blocks")
    assert api.post_spec(blind, key="same").json() == first.json()


def test_a_control_repeats_the_baseline_unasked_and_its_blocks_are_noise(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path, control_every=1) as api:
        api.register()
        made = api.submit()
        assert made["plan"]["arms"] == ["baseline", "psiv-on", "chunk-32", "control"]
        shown = planned(api, spec_values())
        assert (shown["control"], [arm["name"] for arm in shown["arms"]][-1]) == ("control", "control")
        assert shown["trials"] == 24
        assert (made["plan"]["control"], made["warnings"]) == ("control", [])
        printed = plain_text(tables.remarks(AblationAccepted.model_validate(made)))
        assert printed == "arm 'control' repeats the baseline, to measure the noise: 6 trials more"
        run(api, make_spec(), control=True)
        judged = answer(api, f"/v1/ablations/{made['id']}/verdict")
        assert [one["arm"] for one in judged["variants"]] == ["psiv-on", "chunk-32"]
        assert "control" in judged["arms"]
        assert judged["blocks_counted"] == 6
        assert judged["circumstances"]["admission"]["refused_because"] is None
        assert {one["cause"] for one in judged["variants"]} == {None}, "verdicts by six A/A blocks of its own"
        (known,) = answer(api, "/v1/calibrations")["items"]
        assert {block["source"] for block in known["calibration"]["samples"]} == {"hidden"}
        assert known["calibration"]["blocks"] == 6
        submit_aa(api)
        run(api, aa_spec())
        (known,) = answer(api, "/v1/calibrations")["items"]
        assert (known["calibration"]["blocks"], known["problem"]) == (26, None)


def test_one_ablation_in_ten_gets_a_control_but_no_calibration_and_no_exact_one() -> None:
    ids = [new_id("abl") for _ in range(2000)]
    exact = make_spec(verdict__primary={"metric": "peak_allocated_gib", "margin": "0%"})
    assert 140 < sum(_has_control(one, make_spec(), 10, measured=True) for one in ids) < 260
    assert all(_has_control(one, make_spec(), 10, measured=False) for one in ids[:50])
    assert not any(_has_control(one, spec, 1, measured=False) for one in ids[:50] for spec in (exact, aa_spec()))
    assert not any(_has_control(one, make_spec(), 0, measured=False) for one in ids[:50])


def test_a_number_of_blocks_that_is_left_to_the_noise_is_put_in_when_the_noise_is_known(api: Api) -> None:
    auto = spec_values(design__blocks="auto")
    refused = api.post_spec(auto, key="early")
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert (problem["pointer"], "ablate aa cpu --like SPEC" in problem["hint"]) == ("#/design/blocks", True)
    assert api.client.post("/v1/ablations:plan", json=auto, headers=api.admin).status_code == 422
    submit_aa(api)
    run(api, aa_spec())
    plan = api.client.post("/v1/ablations:plan", json=auto, headers=api.admin).json()
    made = api.post_spec(auto, key="late")
    assert made.status_code == 202
    assert made.json()["plan"]["blocks"] == len(plan["blocks"]) == plan["sizing"]["blocks_needed"]
    kept = answer(api, f"/v1/ablations/{made.json()['id']}/spec")
    assert kept["text"].startswith(f"# blocks: auto gave {len(plan['blocks'])}: sd of d at most ")
    run(api, parse_spec(kept["text"].encode(), kept["content_type"]))
    judged = answer(api, f"/v1/ablations/{made.json()['id']}/verdict")
    assert {one["verdict"] for one in judged["variants"]} == {"better", "worse"}
    submit_aa(api, blocks=6, order_seed=9)
    run(api, aa_spec(blocks=6, order_seed=9), seed=5)
    assert api.post_spec(auto, key="late").json() == made.json()


def test_blocks_that_the_noise_asks_for_beyond_the_budget_are_refused_before_submission(api: Api) -> None:
    auto = spec_values(design__blocks="auto", limits={"device_minutes": 0.01})
    submit_aa(api)
    run(api, aa_spec())
    plan = api.client.post("/v1/ablations:plan", json=auto, headers=api.admin).json()
    assert plan["expected_device_minutes"] is None  # its variants never ran, so nothing is known against it
    assert api.post_spec(spec_values()).status_code == 202
    run(api, make_spec())
    refused = [api.post_spec(auto), api.client.post("/v1/ablations:plan", json=auto, headers=api.admin)]
    for answer in refused:
        assert answer.status_code == 422
        (problem,) = answer.json()["errors"]
        assert problem["pointer"] == "#/limits/device_minutes"
        assert "limits.device_minutes allows 0.01: neighbouring trials there" in problem["detail"]
    fixed = spec_values(limits={"device_minutes": 0.01})
    plan = api.client.post("/v1/ablations:plan", json=fixed, headers=api.admin).json()
    assert plan["expected_device_minutes"] > plan["device_minutes_allowed"] == 0.01
    assert plan["window_steps"] == 4


def test_a_number_of_ones_own_beyond_the_budget_is_accepted_with_the_warning_of_its_plan(api: Api) -> None:
    asked = spec_values(limits={"device_minutes": 0.01})
    api.register()
    unmeasured = api.post_spec(asked).json()
    assert (unmeasured["warnings"], unmeasured["plan"]["expected_device_minutes"]) == ([], None)
    run(api, make_spec(limits={"device_minutes": 0.01}))
    plan = api.client.post("/v1/ablations:plan", json=asked, headers=api.admin).json()
    made = api.post_spec(asked, key="over").json()
    cost = plan["expected_device_minutes"]
    assert made["plan"]["expected_device_minutes"] == cost > 0.01
    warning, again = made["warnings"]
    assert again.startswith("asking 2 of this question, after 'factory': it is tested at 0.5")
    assert [warning] == plan["warnings"] == api.post_spec(asked, key="over").json()["warnings"][:1]
    assert warning.startswith(f"about {cost:,.1f} device minutes are expected, and limits.device_minutes allows 0.01: ")
    for allowed, warned in ((cost * 0.999, True), (cost, False), (cost * 1.001, False)):
        warning, *_again = api.post_spec(spec_values(limits={"device_minutes": allowed})).json()["warnings"]
        assert ("device minutes are expected" in warning) == warned


def test_what_ran_on_one_node_class_says_nothing_of_the_cost_on_another(api: Api) -> None:
    assert api.post_spec(spec_values()).status_code == 202
    run(api, make_spec())
    asked = [spec_values(placement={"node_class": name}) for name in ("cpu", "h200")]
    here, there = (api.client.post("/v1/ablations:plan", json=one, headers=api.admin).json() for one in asked)
    assert [arm["digest"] for arm in here["arms"]] == [arm["digest"] for arm in there["arms"]]
    assert (here["expected_device_minutes"] > 0, there["expected_device_minutes"]) == (True, None)
    why = {row["node_class"]: row["reason"] for row in there["node_classes"]}
    assert why["h200"] == ("it waits for a live node of class 'h200'; none has registered yet")
