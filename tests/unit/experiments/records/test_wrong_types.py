"""A value of a wrong type at any place of a document leads to the documented error of its reader."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ablate.experiments.analysis.published import read_table
from ablate.experiments.design.load import parse_spec
from ablate.experiments.digest import digest
from ablate.experiments.errors import BundleError, PlanFileError, SpecError
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle_files import PLAN
from ablate.experiments.records.bundle_reader import open_bundle, verify_bundle
from ablate.experiments.records.identity import BlockReport
from ablate.experiments.records.messages import Heartbeat, LogChunk, TrialProgress
from ablate.experiments.records.plan_file import (
    differences,
    make_plan_file,
    plan_file_text,
    read_plan_file,
)
from ablate.experiments.records.receipt_check import verify_signed
from ablate.experiments.records.signing import Signer
from ablate.workers.commands.program_socket import read_message
from tests.architecture.pages import ROOT
from tests.bundles import broken_attempt, make_bundle, make_file, make_node, registered, sealed
from tests.factories import command_values, make_plan, make_receipt, spec_values
from tests.program_receipts import plan_of, program_receipt, program_values

SIGNER = Signer(b"n" * 32)
FILE = make_file()
_, COMMAND_PLAN = plan_of()
COMMAND = json.dumps(program_values())
COMMAND_FILE = make_plan_file(COMMAND_PLAN, spec_text=COMMAND, content_type="application/json")
BUNDLE = make_bundle(FILE, range(1), broken=[broken_attempt(1, 1, FailureClass.OOM, arm="baseline")], signer=SIGNER)
UNREADABLE = "\ud800"
"""Half of a character, which JSON can hold and UTF-8 cannot."""
WRONG = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=3)),
    st.sampled_from([UNREADABLE, 2**64, "sha256:" + "0" * 64, [], {}, [None], {"": None}, [[]], {"x": {"y": []}}]),
)


class Case(NamedTuple):
    """A valid document, its reader, and the reader's documented errors."""

    document: Any
    read: Callable[[Any], object]
    errors: tuple[type[Exception], ...]


def written(values: Any) -> bytes:
    return json.dumps(values).encode()


def of_model(document: BaseModel) -> Case:
    """The case of a message or record, which pydantic reads alone."""
    read = type(document).model_validate_json
    return Case(json.loads(document.model_dump_json()), lambda values: read(written(values)), (ValidationError,))


def read_plan(values: Any) -> None:
    """Read a plan file as a node without a service does."""
    file = read_plan_file(written(values))
    if not differences(file):
        file.claimed(0, attempt_id="att_x", attempt_no=1)


def check_receipt(values: Any) -> None:
    if isinstance(values, dict):  # the type of its parameter
        verify_signed(values)
        verify_signed(values, any_release=True)


def in_bundle(path: str) -> Case:
    """The case of one file of a bundle whose manifest fits the changed file."""

    def read(values: Any) -> None:
        changed = {**BUNDLE, path: written(values)}
        file = FILE
        if path == PLAN:
            with suppress(PlanFileError):
                file = read_plan_file(changed[PLAN])
        open_bundle(sealed(file, changed, SIGNER))

    return Case(json.loads(BUNDLE[path]), read, (BundleError,))


def manifest() -> Case:
    return Case(
        json.loads(BUNDLE["manifest.json"]),
        lambda values: verify_bundle({**BUNDLE, "manifest.json": written(values)}),
        (BundleError,),
    )


HEARTBEAT = Heartbeat(
    token="-" * 22,
    progress=(TrialProgress(trial_id="t", steps_done=1, steps_total=2, tokens_per_s=1.0, loss=1.0),),
    logs=(LogChunk(trial_id="t", offset=0, text="x"),),
)
CASES = {
    "plan file": Case(json.loads(plan_file_text(registered(FILE))), read_plan, (PlanFileError,)),
    "plan file of commands": Case(json.loads(plan_file_text(COMMAND_FILE)), read_plan, (PlanFileError,)),
    "claim": of_model(FILE.claimed(0, attempt_id="att_x", attempt_no=1)),
    "claim of commands": of_model(COMMAND_FILE.claimed(0, attempt_id="att_x", attempt_no=1)),
    "receipt": Case(json.loads(make_receipt(make_plan(), 0, "baseline").model_dump_json()), check_receipt, ()),
    "receipt of a command": Case(
        json.loads(
            program_receipt(COMMAND_PLAN, COMMAND_PLAN.blocks[0], COMMAND_PLAN.baseline, reported={}).model_dump_json()
        ),
        check_receipt,
        (),
    ),
    "registration": of_model(make_node(SIGNER).registration),
    "heartbeat": of_model(HEARTBEAT),
    "report": of_model(BlockReport(token="-" * 22, receipts=({"a": 1},), message="m")),
    "manifest": manifest(),
    # each process of a run of tests draws other ids, but all must name their tests alike
    **{
        f"bundle's {re.sub('_[0-9A-Z]{26}', '', path)}": in_bundle(path)
        for path in BUNDLE
        if path.endswith(".json") and path != "manifest.json"
    },
    "spec": Case(spec_values(), lambda values: parse_spec(written(values), "application/json"), (SpecError,)),
    "spec of a command": Case(
        command_values(), lambda values: parse_spec(written(values), "application/json"), (SpecError,)
    ),
}
MESSAGES: dict[str, Any] = {
    "steps": {"steps": [[0, 1.5, 10, 2.5]]},
    "reported": {"values": {"accuracy": 0.5}},
    "attested": {"values": {"gate": True}},
    "kernels": {"rows": [["gemm", 3, 12.5]]},
    "ended": {"at": 2.0, "seed": 1, "whole": True, "packages": {"torch": "2"}, "memory": [1, 2]},
}
CASES |= {
    f"message {event}": Case(
        {"event": event, "rank": 0, **fields}, lambda values: read_message(written(values)), (ValueError,)
    )
    for event, fields in MESSAGES.items()
}
TABLE = yaml.safe_load(next((ROOT / "docs/published").glob("*.yaml")).read_text(encoding="utf-8"))
CASES["published table"] = Case(TABLE, lambda values: read_table(written(values)), (SpecError,))
Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield every place of a document; of a list only the first."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*at, name))


def with_wrong(document: Any, at: Place, wrong: Any) -> Any:
    if not at:
        return wrong
    changed = copy.deepcopy(document)
    part = changed
    for name in at[:-1]:
        part = part[name]
    part[at[-1]] = wrong
    return changed


def resealed(values: Any) -> Any:
    """Return the document with a digest that fits, as a forger would write it."""
    if not isinstance(values, dict) or "digest" not in values:
        return values
    covered = {name: value for name, value in values.items() if name not in {"digest", "signature"}}
    try:
        return {**values, "digest": digest(covered)}
    except ValueError:
        return values


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=60)
def test_a_wrong_value_at_any_place_gives_the_documented_error(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    at = data.draw(st.sampled_from(list(places(case.document))))
    values = with_wrong(case.document, at, data.draw(WRONG))
    for one in (values, resealed(values)):
        with suppress(*case.errors):
            case.read(one)


@pytest.mark.parametrize(
    ("name", "at", "wrong", "words"),
    [
        ("plan file", ("plan", "arms", 0, "config"), [], "one of package, command, model; given: a list"),
        ("plan file", ("plan", "arms", 0, "config"), "x", "one of package, command, model; given: 'x'"),
        ("plan file", ("plan", "blocks", 0, "seed"), -1, "block 1 has seed -1; allowed: 0 to 9223372036854775807"),
        ("plan file", ("plan", "blocks", 0, "seed"), 2**64, f"block 1 has seed {2**64}; allowed"),
        ("plan file", ("registered", "registered_at"), UNREADABLE, "not a plan file: Invalid JSON"),
        ("claim", ("trials", 0, "config"), 3, "one of package, command, model; given: 3"),
        ("claim of commands", ("trials", 0, "config"), None, "one of package, command, model; given: null"),
        (f"bundle's {PLAN}", ("plan", "blocks", 0, "seed"), -1, "block 1 has seed -1; allowed"),
    ],
)
def test_the_error_says_what_was_given_and_what_is_allowed(name: str, at: Place, wrong: Any, words: str) -> None:
    case = CASES[name]
    with pytest.raises(case.errors, match=words):
        case.read(resealed(with_wrong(case.document, at, wrong)))
