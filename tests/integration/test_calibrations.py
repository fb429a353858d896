"""From A/A blocks through the real API and both databases to words, the ledger, and what people and programs see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from experiments.design.calibration import CONTENT_TYPE
from experiments.design.plan import make_plan
from experiments.design.spec import AblationSpec
from service.lifecycle import OutboxKind
from service.outbox_handlers import OutboxHandlers
from tests.api_stack import Api, running_api
from tests.calibrations import aa_spec, aa_text
from tests.factories import make_receipt, make_spec

SPEEDS = {"psiv-on": 1.05, "chunk-32": 0.95}


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


def submit_aa(api: Api, **options: Any) -> str:
    headers = {
        **api.admin,
        "Content-Type": CONTENT_TYPE,
        "Idempotency-Key": f"aa-{sorted(options.items())}".replace(" ", ""),
    }
    answer: httpx.Response = api.client.post("/v1/ablations", content=aa_text(**options), headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def run(api: Api, spec: AblationSpec, *, seed: int = 0, **environment: Any) -> None:
    """Report every waiting block of an ablation of `spec`, with noise of 0.3 % and the speeds above, and judge it."""
    plan, rng, node = make_plan(spec), np.random.default_rng(seed), api.register()
    while block := api.claim(node):
        receipts = []
        for trial in block["trials"]:
            ids = {"ablation": block["ablation_id"], "block": block["block_id"], "trial": trial["trial_id"]}
            ids |= {"attempt": block["attempt_id"], "node": node}
            rate = 5000 * SPEEDS.get(trial["arm"], 1.0) * float(np.exp(rng.normal(0, 0.003)))
            made = make_receipt(
                plan, block["block_index"], trial["arm"], tokens_per_s=rate, ids=ids, environment=environment
            )
            receipts.append(made.model_dump(mode="json"))
        answer = api.attempt(block, "report", receipts=receipts)
        assert answer.status_code == 200, answer.text
    OutboxHandlers(api.store, None).run_due(OutboxKind.JUDGE)  # type: ignore[arg-type]  # nothing is projected


def answer(api: Api, path: str) -> Any:
    found = api.get(path)
    assert found.status_code == 200, found.text
    return found.json()


def test_words_are_published_after_twenty_blocks_of_noise_and_not_before(api: Api) -> None:
    before = api.submit()["id"]
    run(api, make_spec())
    capped = answer(api, f"/v1/ablations/{before}/verdict")
    assert {one["verdict"] for one in capped["variants"]} == {"inconclusive"}
    assert "no A/A blocks are known" in capped["circumstances"]["admission"]["refused_because"]
    assert capped["circumstances"]["admission"]["mended_by"] == f"ablate aa cpu --like {before}"
    nothing = answer(api, "/v1/calibrations")
    assert (nothing["items"], nothing["ledger"]["ablations"]) == ([], 0)

    first = submit_aa(api, blocks=12)
    run(api, aa_spec(blocks=12), seed=1)
    (half,) = answer(api, "/v1/calibrations")["items"]
    assert "12 A/A blocks are known" in half["problem"]
    assert half["mended_by"] == f"ablate aa cpu --like {first}"

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

    after = api.submit()["id"]
    run(api, make_spec(), seed=3)
    judged = answer(api, f"/v1/ablations/{after}/verdict")
    assert {one["arm"]: one["verdict"] for one in judged["variants"]} == {"psiv-on": "better", "chunk-32": "worse"}
    (cited,) = judged["circumstances"]["admission"]["calibrations"]
    assert cited == whole["calibration"]
    assert judged["circumstances"]["admission"]["ledger"] == noise["ledger"]


def test_other_software_is_another_key_and_capped_again(api: Api) -> None:
    submit_aa(api)
    run(api, aa_spec())
    other = api.submit()["id"]
    run(api, make_spec(), versions={"python": "3.11", "torch": "2.14.0"})
    admission = answer(api, f"/v1/ablations/{other}/verdict")["circumstances"]["admission"]
    assert admission["refused_because"].endswith("those that are have other code or versions")


def test_judging_again_stores_no_block_twice(api: Api) -> None:
    ablation = submit_aa(api)
    run(api, aa_spec())
    OutboxHandlers(api.store, None)._judge(ablation)  # type: ignore[arg-type]
    assert answer(api, "/v1/calibrations")["items"][0]["calibration"]["blocks"] == 20


def test_the_spec_of_an_ablation_is_given_as_it_was_written(api: Api) -> None:
    ablation = submit_aa(api)
    given = answer(api, f"/v1/ablations/{ablation}/spec")
    assert given == {"text": aa_text().decode(), "content_type": CONTENT_TYPE}
    missing = api.get("/v1/ablations/abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3/spec")
    assert missing.status_code == 404
