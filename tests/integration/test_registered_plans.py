"""Plans that are registered before they are carried away: each is an asking, on SQLite and on PostgreSQL."""

import json
from typing import Any

import httpx
import pytest

from ablate.experiments.errors import BundleError
from ablate.experiments.records.bundle_files import PLAN
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.circumstances import (
    NOT_REGISTERED,
    CarriedPlan,
    Circumstances,
    Countersignature,
    Family,
)
from ablate.experiments.records.plan_file import PlanFile, carried_plan, countersign, plan_file_text
from ablate.experiments.records.signing import Signer
from ablate.experiments.reporting.sentences import origin_problems
from ablate.experiments.reporting.view import judge_bundle
from ablate.service.store.questions.circumstances import circumstances_of, family_of
from tests.api_stack import ADMIN, Api, api_fixture, bearer
from tests.bundles import archive_of, make_bundle, make_file, resealed

api = api_fixture()

NODE, SERVICE = Signer(b"n" * 32), Signer(b"s" * 32)


def register(api: Api, file: PlanFile, **headers: str) -> httpx.Response:
    content = {**bearer(ADMIN), "Content-Type": "application/json", **headers}
    return api.client.post("/v1/plans:register", content=plan_file_text(file).encode(), headers=content)


def registered(api: Api, file: PlanFile) -> PlanFile:
    answer = register(api, file)
    assert answer.status_code == 200, answer.text
    own = Countersignature.model_validate(answer.json()["countersigned"])
    return file.model_copy(update={"countersigned": own})


def imported(api: Api, file: PlanFile) -> Circumstances:
    answer = api.client.post(
        "/v1/ablations:import",
        content=archive_of(make_bundle(file, signer=NODE)),
        headers={**bearer(ADMIN), "Content-Type": "application/x-tar"},
        params={"trust": [NODE.key]},
    )
    assert answer.status_code == 200, answer.text
    with api.store.read() as connection:
        return circumstances_of(connection, file.ablation_id)


def family(api: Api, made: dict[str, Any]) -> Family:
    with api.store.read() as connection:
        return family_of(connection, made["id"])


def test_a_registered_plan_counts_although_nothing_is_imported(api: Api) -> None:
    for _ in range(3):
        registered(api, make_file())
    asked = family(api, api.submit())
    assert (asked.number, {one.state for one in asked.earlier}) == (4, {"registered"})
    assert family(api, api.submit()).number == 5
    other = api.submit(verdict__primary={"metric": "peak_allocated_gib", "margin": "0.5%"})
    assert family(api, other).number == 1


def test_the_countersignature_says_how_often_the_question_was_asked_before(api: Api) -> None:
    first, second = make_file(), make_file()
    api.submit()
    one, two = registered(api, first), registered(api, second)
    assert one.countersigned is not None
    assert two.countersigned is not None
    assert (one.countersigned.family.number, two.countersigned.family.number) == (2, 3)
    assert one.countersigned.signature.key == two.countersigned.signature.key
    assert registered(api, first) == one, "registered again"
    verdict = judge_bundle(open_bundle(make_bundle(two, signer=NODE)))
    assert verdict.circumstances.family.number_of("psiv-on") == 3
    assert list(origin_problems(verdict)) == []


def test_an_import_keeps_the_number_of_its_registration(api: Api) -> None:
    first = registered(api, make_file())
    later = api.submit()
    assert family(api, later).number == 2
    circumstances = imported(api, first)
    assert circumstances.family.number == 1
    own = first.countersigned
    assert own is not None
    assert circumstances.carried == CarriedPlan(registered_by=own.signature.key, registered_at=own.registered_at)
    assert family(api, later).number == 2, "it counts once"
    stripped = registered(api, make_file()).model_copy(update={"countersigned": None})
    assert imported(api, stripped).carried is not None


def test_a_plan_that_nobody_registered_says_so(api: Api) -> None:
    file = make_file()
    assert imported(api, file).carried == CarriedPlan(registered_by=None, registered_at=None)
    verdict = judge_bundle(open_bundle(make_bundle(file, signer=NODE)))
    assert [text.lower() for text in origin_problems(verdict)] == [NOT_REGISTERED.lower()]
    repeat = {"again": {"gates": {"chunk_size": 16}}}
    assert carried_plan(make_file(purpose="calibration", variants=repeat)) is None, "A/A blocks ask nothing"


def test_another_plan_under_a_registered_id_is_rejected(api: Api) -> None:
    file = make_file()
    registered(api, file)
    other = resealed(make_file(), ablation_id=file.ablation_id)
    answer = register(api, other)
    assert (answer.status_code, "another plan is registered" in answer.text) == (409, True)
    sent = api.client.post(
        "/v1/ablations:import",
        content=archive_of(make_bundle(other, signer=NODE)),
        headers={**bearer(ADMIN), "Content-Type": "application/x-tar"},
        params={"trust": [NODE.key]},
    )
    assert (sent.status_code, "was registered with plan" in sent.text) == (409, True)


def test_a_plan_that_its_spec_does_not_give_is_rejected(api: Api) -> None:
    file = make_file()
    arms = (file.plan.arms[0], *make_file(variants={"x": {"gates": {"loss": "chunked"}}}).plan.arms[1:])
    wrong = resealed(file, plan=make_file(design__order_seed=3).plan)
    for bad, words in (
        (file.model_copy(update={"digest": "sha256:x"}), "was altered"),
        (resealed(file, plan=file.plan.model_copy(update={"arms": arms})), "contradicts itself"),
        (wrong, "this service would plan the spec differently"),
    ):
        answer = register(api, bad)
        assert (answer.status_code, words in answer.text) == (422, True), answer.text


def test_an_altered_countersignature_is_named() -> None:
    file = make_file()
    own = countersign(file, SERVICE, registered_at="2026-11-26T12:00:00.000Z", family=Family())
    assert open_bundle(make_bundle(file.model_copy(update={"countersigned": own}), signer=NODE)).keys == {NODE.key}
    for changes in ({"registered_at": "2026-11-20T12:00:00.000Z"}, {"family": Family(question_digest="sha256:q")}):
        altered = file.model_copy(update={"countersigned": own.model_copy(update=changes)})
        with pytest.raises(BundleError, match="its countersignature does not fit key") as caught:
            open_bundle(make_bundle(altered, signer=NODE))
        assert caught.value.problems[0].pointer == PLAN
    assert json.loads(plan_file_text(file)).get("countersigned") is None
