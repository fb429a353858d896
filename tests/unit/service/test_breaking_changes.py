"""The REST interface is the frozen one, and every operation is explained."""

import json

from tests.golden.freeze_openapi import GOLDEN, document, without_words


def test_the_interface_breaks_no_client_of_the_frozen_one() -> None:
    hint = "if the change is wanted: make golden, and read whether a client of the old one would notice"
    assert json.loads(GOLDEN.read_text()) == without_words(document()), hint


def test_every_operation_has_its_own_id_and_words() -> None:
    operations = [item for path in document()["paths"].values() for item in path.values()]
    ids = [item["operationId"] for item in operations]
    assert len(ids) == len(set(ids))
    assert all(item["tags"] and item["summary"] and item["description"] for item in operations)
