import json
from typing import Any

import pytest

from ablate.experiments.design.plan import controlled, make_plan
from ablate.experiments.digest import digest
from ablate.experiments.errors import PlanFileError
from ablate.experiments.records import plan_file
from ablate.experiments.records.plan_file import PlanFile, differences, make_plan_file, plan_file_text, read_plan_file
from tests.bundles import make_file


def rewritten(file: PlanFile, **changes: Any) -> bytes:
    """The file with values replaced (a key such as plan__arms reaches into it) and a digest that fits again."""
    values = json.loads(plan_file_text(file))
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = values
        for name in parents:
            target = target[int(name) if name.isdigit() else name]
        target[last] = value
    del values["digest"]
    return json.dumps({**values, "digest": digest(values)}).encode()


def test_plan_file_survives_writing_and_reading() -> None:
    file = make_file()
    again = read_plan_file(plan_file_text(file).encode())
    assert again == file
    assert again.spec.digest == file.plan.spec_digest
    assert differences(again) == []


def test_claimed_block_is_what_a_service_hands_out() -> None:
    file = make_file(limits={"trial": "90s"})
    block = file.claimed(3, attempt_id="att_x", attempt_no=2)
    planned = file.plan.blocks[3]
    assert (block.block_index, block.seed, block.attempt_no) == (3, planned.seed, 2)
    assert [trial.arm for trial in block.trials] == list(planned.order)
    assert [trial.trial_id for trial in block.trials] == list(file.blocks[3].trial_ids)
    assert {trial.timeout_s for trial in block.trials} == {90.0}
    assert all(trial.config.seed == planned.seed for trial in block.trials)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a plan file"),
        (b'{"kind": "ablate bundle"}', "not a plan file"),
        (b'{"kind": "ablate plan", "schema_version": 2}', "schema version 2; this program reads 3"),
        (b'{"kind": "ablate plan", "schema_version": 3}', "Field required"),
    ],
)
def test_read_plan_file_refuses_something_else(data: bytes, words: str) -> None:
    with pytest.raises(PlanFileError, match=words):
        read_plan_file(data)


def test_read_plan_file_rejects_an_altered_or_contradictory_file() -> None:
    file = make_file()
    with pytest.raises(PlanFileError, match="was altered"):
        read_plan_file(plan_file_text(file).replace('"seed": 2', '"seed": 3', 1).encode())
    with pytest.raises(PlanFileError, match="arm 'baseline' has digest"):
        read_plan_file(rewritten(file, plan__arms__0__gates={"micro_batch": 1}))
    with pytest.raises(PlanFileError, match=r"plan\.arms\.0\.config.* with one of package, command, model"):
        read_plan_file(rewritten(file, plan__arms__0__config={"micro_batch": 1}))
    ids = [block.model_dump() for block in file.blocks]
    with pytest.raises(PlanFileError, match="6 blocks, but ids for 5"):
        read_plan_file(rewritten(file, blocks=ids[:5]))
    with pytest.raises(PlanFileError, match="an id appears twice"):
        read_plan_file(rewritten(file, blocks=[*ids[:5], ids[0]]))


def test_differences_name_another_order_seed_and_spec() -> None:
    file = make_file()
    blocks = [block.model_dump() for block in file.plan.blocks]
    other = read_plan_file(rewritten(file, plan__blocks=[{**block, "seed": 77} for block in blocks]))
    assert differences(other) == ["blocks have other seeds or another order"]
    text = file.spec_text.replace('"order_seed": 7', '"order_seed": 8')
    (first, *_) = differences(read_plan_file(rewritten(file, spec_text=text)))
    assert "the spec's digest is sha256:" in first
    (only,) = differences(read_plan_file(rewritten(file, spec_text="{}")))
    assert only.startswith("this code rejects the spec")


def test_differences_name_arms_that_resolve_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file()
    real = plan_file.resolve_with_steps

    def other(spec: Any) -> Any:
        resolved = real(spec)
        first = resolved.arms[0].model_copy(update={"digest": "sha256:other"})
        return type(resolved)(arms=(first, *resolved.arms[1:]), problems=())

    monkeypatch.setattr(plan_file, "resolve_with_steps", other)
    assert differences(file) == ["arm 'baseline' resolves to another configuration"]


def test_a_plan_with_a_control_resolves_to_itself() -> None:
    file = make_file()
    plan = controlled(file.spec, make_plan(file.spec))
    again = read_plan_file(
        plan_file_text(make_plan_file(plan, spec_text=file.spec_text, content_type=file.content_type)).encode()
    )
    assert again.plan.control is not None
    assert differences(again) == []
    names = ", ".join(arm.name for arm in plan.arms)
    lie = rewritten(again, **{f"plan__arms__{len(plan.arms) - 1}__role": "variant"})
    without = names.removesuffix(", control")
    assert differences(read_plan_file(lie)) == [f"the arms are {without} here, {names} in the plan"]
