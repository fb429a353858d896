"""Asking the same question again is counted, on SQLite and on PostgreSQL."""

from typing import Any

import pytest
from sqlalchemy import update

from ablate.experiments.outcomes import FailureClass, FailureRule
from ablate.experiments.records.circumstances import Family
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.questions.circumstances import family_of
from ablate.service.store.tables import ablations
from tests.api_stack import Api, api_fixture
from tests.factories import spec_values

PSIV, CHUNK = {"gates": {"psiv_cache": True}}, {"gates": {"chunk_size": 32}}


api = api_fixture()


def family(api: Api, made: dict[str, Any]) -> Family:
    with api.store.read() as connection:
        return family_of(connection, made["id"])


def judged(api: Api, made: dict[str, Any]) -> dict[str, Any]:
    handlers = OutboxHandlers(api.store)
    while handlers.run_due(OutboxKind.JUDGE):
        pass
    return dict(api.get(made["links"]["verdict"]).json())


def test_earlier_askings_are_in_the_verdict_with_their_words(api: Api) -> None:
    node = api.register()
    first = api.submit()
    api.finish(node)
    judged(api, first)
    second = api.submit(ablation="again", design__order_seed=9)
    api.claim(node)
    api.cancel(second["id"])
    third = api.submit(ablation="and-again", variants={"cache": PSIV})
    while block := api.claim(node):
        api.attempt(block, "report", failure_class="user_error", message="x")
    record = judged(api, third)["circumstances"]["family"]
    assert [(one["ablation"], one["name"], one["asked"]) for one in record["earlier"]] == [
        (first["id"], "factory", ["cache"]),
        (second["id"], "again", ["cache"]),
    ]
    assert set(record["earlier"][0]["words"]) == {"psiv-on", "chunk-32"}
    assert [one["state"] for one in record["earlier"]] == ["completed", "cancelling"]
    assert record["earlier"][1]["words"] == {}


def test_an_ablation_that_others_load_spoiled_is_no_asking(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailureClass.DISTURBED, "rule", FailureRule(1))
    node = api.register()
    spoiled = api.submit(ablation="spoiled")
    while block := api.claim(node):
        api.attempt(block, "report", failure_class="disturbed", arm="baseline", message="others took 70%")
    judged(api, spoiled)
    again = api.submit(ablation="again")
    assert (family(api, again).number, again["warnings"]) == (1, [])
    plan = api.client.post("/v1/ablations:plan", json=spec_values(), headers=api.admin).json()
    assert (plan["asking"]["number"], plan["asking"]["earlier"]) == (2, ["again"])
    assert (plan["asking"]["level_pct"], plan["asking"]["next_level_pct"]) == pytest.approx((0.5, 1 / 6))
    third = api.submit(ablation="third")
    assert third["warnings"][0] == "asking 2 of this question, after 'again': it is tested at 0.5\N{NO-BREAK SPACE}%"


def test_an_asking_whose_blocks_all_broke_counts_like_any_other(api: Api) -> None:
    node = api.register()
    api.submit(ablation="slow")
    while block := api.claim(node):
        api.attempt(block, "report", failure_class="user_error", message="x")
    again = api.submit(ablation="slower")
    while block := api.claim(node):
        api.attempt(block, "report", failure_class="user_error", message="x")
    verdict = judged(api, again)
    assert [(one["name"], one["state"]) for one in verdict["circumstances"]["family"]["earlier"]] == [
        ("slow", "failed")
    ]
    for variant in verdict["variants"]:
        assert any(note.startswith("asking 2 of this question") for note in variant["notes"]), variant
        assert any(note.endswith("before it: 'slow' (failed)") for note in variant["notes"])


def test_every_variant_has_its_own_number(api: Api) -> None:
    node = api.register()
    for variants in ({"a": PSIV}, {"b": PSIV, "c": CHUNK}, {"d": PSIV}):
        last = api.submit(variants=variants)
        api.claim(node)
    both = api.submit(variants={"cache": PSIV, "chunk": CHUNK})
    record = family(api, both)
    assert (record.number, record.number_of("cache"), record.number_of("chunk")) == (4, 4, 2)
    assert family(api, last).number == 3
    assert family(api, last).question_digest != record.question_digest


def test_what_ended_before_it_ran_is_not_counted_and_what_waits_is(api: Api) -> None:
    waiting = api.submit()
    gone = api.submit()
    api.cancel(gone["id"])
    assert [one.ablation for one in family(api, api.submit()).earlier] == [waiting["id"]]


def test_order_is_that_of_submission_even_at_the_same_moment(api: Api) -> None:
    made = [api.submit() for _ in range(4)]
    with api.store.write() as connection:
        connection.execute(update(ablations).values(created_at=1.0))
    ids = sorted(one["id"] for one in made)
    numbers = {one["id"]: family(api, one).number for one in made}
    assert [numbers[ablation_id] for ablation_id in ids] == [1, 2, 3, 4]


def test_an_alias_of_the_metric_and_swapped_arms_are_the_same_question(api: Api) -> None:
    api.submit(variants={"cache": PSIV}, verdict__primary={"metric": "step_s", "margin": "0.5%"})
    swapped = {"none": {"gates": {"psiv_cache": False}}}
    api.submit(baseline__gates={"chunk_size": 16, "psiv_cache": True}, variants=swapped)
    assert family(api, api.submit()).number_of("psiv-on") == 3


def test_other_question_and_calibration_are_no_family(api: Api) -> None:
    api.submit(verdict__primary={"metric": "peak_allocated_gib", "margin": "0.5%"})
    api.submit(purpose="calibration", variants={"again": {"gates": {"chunk_size": 16}}})
    asked = family(api, api.submit())
    assert (asked.number, asked.number_of("psiv-on")) == (1, 1)
    assert asked.question_digest is not None
    again = api.submit(purpose="calibration", variants={"again": {"gates": {"chunk_size": 16}}})
    assert family(api, again) == Family()
