"""Seeds of an ablation: drawn at its submission, and shown when a node claims their block."""

from typing import Any

import pytest

from ablate.experiments.outcomes import SeedOrigin
from ablate.service.store.blocks.block_wire import plan_of
from tests.api_stack import Api, api_fixture
from tests.factories import spec_values

api = api_fixture()

DESIGN = {"seeds": 3, "blocks": {"count": 6}, "order_seed": 7}


def answers(api: Api, ablation_id: str) -> str:
    """Everything that a reader gets about an ablation."""
    own, page = f"/v1/ablations/{ablation_id}", f"/a/{ablation_id}"
    paths = [own, *(f"{own}/{part}" for part in ("blocks", "trials", "spec", "report")), page]
    return "".join(api.client.get(path, headers=api.admin).text for path in paths)


def shown_seeds(api: Api, ablation_id: str) -> list[int | None]:
    rows = api.client.get(f"/v1/ablations/{ablation_id}/blocks", headers=api.admin).json()["items"]
    return [row["seed"] for row in rows]


def drawn_seeds(api: Api, ablation_id: str) -> list[int]:
    return [block.seed for block in plan_of(api.store, ablation_id).blocks]


def test_nobody_sees_a_seed_before_a_node_claims_its_block(api: Api) -> None:
    made = api.submit(design=DESIGN)
    seeds = drawn_seeds(api, made["id"])
    assert (len(set(seeds)), seeds[:3]) == (3, seeds[3:])
    assert plan_of(api.store, made["id"]).seeds is SeedOrigin.DRAWN
    assert shown_seeds(api, made["id"]) == [None] * 6
    assert not any(str(seed) in answers(api, made["id"]) for seed in seeds)
    block: Any = api.claim(api.register())
    assert (block["seed"], {trial["config"]["seed"] for trial in block["trials"]}) == (seeds[0], {seeds[0]})
    assert shown_seeds(api, made["id"]) == [seeds[0], *[None] * 5]


def test_every_submission_of_a_spec_has_other_seeds_also_of_the_same_question(api: Api) -> None:
    made = [api.submit(design=DESIGN) for _ in range(20)]
    assert len({seed for one in made for seed in drawn_seeds(api, one["id"])}) == 60


@pytest.mark.parametrize("seeds", [[5], [1, 2], [2**53 - 1, 0, 7]])
def test_listed_seeds_stay_as_they_are(api: Api, seeds: list[int]) -> None:
    made = api.submit(design={**DESIGN, "seeds": seeds})
    assert drawn_seeds(api, made["id"]) == [seeds[index % len(seeds)] for index in range(6)]
    assert plan_of(api.store, made["id"]).seeds is SeedOrigin.CHOSEN


def test_a_plan_says_that_its_seeds_will_be_drawn(api: Api) -> None:
    for design, seeds, shown in (
        (DESIGN, "to be drawn", [None] * 6),
        ({"blocks": {"count": 6}}, "to be drawn", [None] * 6),
        ({**DESIGN, "seeds": [4, 9]}, "chosen", [4, 9] * 3),
    ):
        answer = api.client.post("/v1/ablations:plan", json=spec_values(design=design), headers=api.admin).json()
        assert (answer["seeds"], [block["seed"] for block in answer["blocks"]]) == (seeds, shown)
