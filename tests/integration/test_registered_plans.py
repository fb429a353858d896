"""Plans that are registered before they are carried away: each is an asking, on SQLite and on PostgreSQL."""

from typing import Any

import httpx
import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.design.plan import seeds_of
from ablate.experiments.errors import BundleError
from ablate.experiments.ids import new_id
from ablate.experiments.outcomes import SeedOrigin
from ablate.experiments.records.bundle_files import PLAN
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.circumstances import (
    NOT_REGISTERED,
    CarriedPlan,
    Circumstances,
    Family,
    Registration,
)
from ablate.experiments.records.plan_file import PlanFile, carried_plan, plan_file_text, registered_file
from ablate.experiments.records.signing import Signer
from ablate.experiments.reporting.sentences import origin_problems
from ablate.experiments.reporting.view import judge_bundle
from ablate.service.schemas.submissions import PlanRegistered
from ablate.service.store.questions.circumstances import circumstances_of, family_of
from tests.api_stack import ADMIN, Api, api_fixture, bearer
from tests.bundles import archive_of, make_bundle, make_file, resealed, sealed

api = api_fixture()

NODE = Signer(b"n" * 32)


def register(api: Api, file: PlanFile, **headers: str) -> httpx.Response:
    content = {**bearer(ADMIN), "Content-Type": "application/json", **headers}
    return api.client.post("/v1/plans:register", content=plan_file_text(file).encode(), headers=content)


def registered(api: Api, file: PlanFile) -> PlanFile:
    answer = register(api, file)
    assert answer.status_code == 200, answer.text
    own = PlanRegistered.model_validate(answer.json())
    whole = registered_file(file, own.seeds, own.registered)
    assert whole.digest == own.digest
    return whole


def send(api: Api, file: PlanFile) -> httpx.Response:
    return api.client.post(
        "/v1/ablations:import",
        content=archive_of(make_bundle(file, signer=NODE)),
        headers={**bearer(ADMIN), "Content-Type": "application/x-tar"},
        params={"trust": [NODE.key]},
    )


def imported(api: Api, file: PlanFile) -> Circumstances:
    answer = send(api, file)
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


def test_the_registration_says_how_often_the_question_was_asked_before(api: Api) -> None:
    first, second = make_file(), make_file()
    api.submit()
    one, two = registered(api, first), registered(api, second)
    assert one.registered is not None
    assert two.registered is not None
    assert (one.registered.family.number, two.registered.family.number) == (2, 3)
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
    own = first.registered
    assert own is not None
    assert circumstances.carried == CarriedPlan(registered_at=own.registered_at, compared=True)
    assert family(api, later).number == 2, "it counts once"


def test_a_plan_that_nobody_registered_says_so(api: Api) -> None:
    file = make_file()
    assert imported(api, file).carried == CarriedPlan(registered_at=None, compared=True)
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
    sent = send(api, other)
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


DRAWN: dict[str, Any] = {"design__seeds": 3}


def test_the_service_draws_the_seeds_when_it_registers_a_plan(api: Api) -> None:
    sent = [make_file(to_register=True, **DRAWN) for _ in range(20)]
    whole = [registered(api, file) for file in sent]
    seeds = [seed for file in whole for seed in seeds_of(file.plan)]
    assert (len(set(seeds)), {file.plan.seeds for file in whole}) == (60, {SeedOrigin.DRAWN})
    assert [registered(api, file) for file in sent] == whole, "registered again"
    verdict = judge_bundle(open_bundle(make_bundle(whole[0], signer=NODE)))
    assert (verdict.seeds.origin, verdict.seeds.used) == ("drawn", seeds_of(whole[0].plan))
    assert imported(api, whole[0]).carried is not None
    listed = registered(api, make_file())
    assert judge_bundle(open_bundle(make_bundle(listed, signer=NODE))).seeds.origin == "chosen"


def test_a_plan_with_other_seeds_than_the_service_drew_is_no_registered_plan(api: Api) -> None:
    sent = make_file(to_register=True, **DRAWN)
    whole = registered(api, sent)
    forged = registered_file(sent, [1, 2, 3], whole.registered or Registration(registered_at="", family=Family()))
    stripped = resealed(whole, registered=None)
    for other in (forged, stripped):
        answer = send(api, other)
        assert (answer.status_code, "was registered with plan" in answer.text) == (409, True)
    never = registered_file(make_file(to_register=True, **DRAWN), [1, 2, 3], forged.registered)  # type: ignore[arg-type]
    answer = send(api, never)
    assert "a service registered it" in answer.json()["remarks"][0]
    with api.store.read() as connection:
        circumstances = circumstances_of(connection, never.ablation_id)
    assert circumstances.carried == CarriedPlan(registered_at=None, compared=True)
    view = judge(never.plan, never.spec, [], circumstances)
    assert view.seeds.origin == "unregistered"


def test_a_service_registers_no_plan_whose_seeds_are_drawn(api: Api) -> None:
    drawn = make_file(**DRAWN)
    own = registered(api, make_file())
    for file in (drawn, resealed(own, ablation_id=new_id("abl"))):
        answer = register(api, file)
        assert (answer.status_code, "a service draws them when it registers a plan" in answer.text) == (422, True)


def test_a_plan_without_its_seeds_is_in_no_bundle() -> None:
    drawn, sent = make_file(**DRAWN), make_file(to_register=True, **DRAWN)
    files = {**make_bundle(drawn, signer=NODE), PLAN: plan_file_text(sent).encode()}
    with pytest.raises(BundleError, match="seeds of the plan file were not drawn"):
        open_bundle(sealed(sent, files, NODE))
