import json

from tests.golden.freeze_plans import GOLDEN, plans


def test_every_catalog_spec_has_its_frozen_plan() -> None:
    assert plans() == json.loads(GOLDEN.read_text(encoding="utf-8"))
