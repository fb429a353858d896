"""A placement that leaves its class open, against an oracle over drawn kinds of machines, and its refusals."""

import json
import random
from fnmatch import fnmatch
from typing import Any

import pytest

from ablate.experiments.analysis.placing import Kind, placed
from ablate.experiments.design.aa_spec import CONTENT_TYPE, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from tests.factories import make_spec

GIB = 2**30
JSON = "application/json"
NAMES = ("cpu", "h100", "h200", "tpu-v6e", "a100-80gb", "a100-pcie-40gb", "rtx-4090", "mi300x")
GPUS = frozenset(NAMES) - {"cpu", "tpu-v6e"}


def body_of(placement: dict[str, Any] | None) -> bytes:
    values = make_spec().model_dump(mode="json", exclude_unset=True)
    del values["placement"]
    return json.dumps(values | ({} if placement is None else {"placement": placement})).encode()


def place(placement: dict[str, Any] | None, *kinds: Kind) -> AblationSpec:
    body = body_of(placement)
    text, content_type, spec = placed(body, JSON, parse_spec(body, JSON), kinds)
    assert parse_spec(text, content_type) == spec
    return spec


def refused(placement: dict[str, Any] | None, *kinds: Kind) -> str:
    with pytest.raises(SpecError) as caught:
        place(placement, *kinds)
    (problem,) = caught.value.problems
    return f"{problem.pointer} {problem.detail} ({problem.hint})"


def test_drawn_placements_take_the_kind_that_fits_with_most_nodes() -> None:
    draw = random.Random(50)  # noqa: S311 - a seeded draw
    answers = {"placed": 0, "refused": 0}
    for _ in range(1500):
        kinds = [
            Kind(
                node_class=name,
                nodes=draw.randrange(4),
                devices=draw.choice([1, 2, 8]),
                memory_bytes=draw.choice([None, 24 * GIB, 40 * GIB, 80 * GIB]),
            )
            for name in draw.sample(NAMES, draw.randint(1, 5))
        ]
        pattern = draw.choice(["any", "A100*", "a100-80gb", "*", "RTX 4090", "h?00", "MI300X", None])
        least = draw.choice([None, 24, 39.5, 80]) if pattern else None
        devices = draw.choice([1, 1, 2]) if pattern else 1
        placement = {"gpu": pattern, "memory": f"{least}GiB" if least else None, "devices": devices}
        own = {name: value for name, value in placement.items() if value is not None}
        fitting = [
            kind
            for kind in kinds
            if pattern is None
            or (
                kind.node_class in GPUS
                and (pattern == "any" or fnmatch(kind.node_class, pattern.lower().replace(" ", "-")))
                and (least is None or (kind.memory_bytes is not None and kind.memory_bytes >= least * GIB))
                and kind.devices >= devices
            )
        ]
        if not fitting or (pattern is None and len(fitting) > 1):
            text = refused(own if pattern else None, *kinds)
            assert all(str(kind) in text for kind in kinds), text
            answers["refused"] += 1
            continue
        spec = place(own if pattern else None, *kinds)
        best = max(kind.nodes for kind in fitting)
        first = min(
            (kind for kind in fitting if kind.nodes == best), key=lambda kind: (kind.memory_bytes or 0, kind.node_class)
        )
        assert spec.placement.node_class == first.node_class
        assert (spec.placement.gpu, spec.placement.memory, spec.placement.devices) == (None, None, devices)
        answers["placed"] += 1
    assert min(answers.values()) > 300


def test_a_spec_with_a_class_stays_as_it_was_written() -> None:
    body = body_of({"node_class": "cpu"})
    spec = parse_spec(body, JSON)
    assert placed(body, JSON, spec, [Kind(node_class="h200")]) == (body, JSON, spec)
    assert place({"node_class": "rtx-4090"}).placement.node_class == "rtx-4090"  # nobody here knows the nodes


def test_the_text_keeps_its_other_values_and_says_what_was_chosen() -> None:
    body = body_of({"gpu": "any", "devices": 1, "max_foreign_load": "40%"})
    kinds = [Kind(node_class="a100-80gb", nodes=2, memory_bytes=80 * GIB), Kind(node_class="rtx-4090", nodes=1)]
    text, _type, spec = placed(body, JSON, parse_spec(body, JSON), kinds)
    chosen = "a100-80gb (80.0 GiB, 2 of its nodes take work)"
    assert text.decode().splitlines()[0] == f"# placement: {chosen} of {chosen}, rtx-4090 (1 of its nodes take work)"
    alone, _type, _spec = placed(body, JSON, parse_spec(body, JSON), kinds[:1])
    assert alone.decode().splitlines()[0] == f"# placement: {chosen}", "one kind is not chosen of several"
    assert spec.placement.max_foreign_load == 40
    assert parse_spec(body, JSON).digest != spec.digest


@pytest.mark.parametrize(
    ("placement", "kinds", "text"),
    [
        (None, [], "#/placement the placement names no node class, and no node is known that could choose one (write "),
        ({"gpu": "any"}, [], "`ablate worker doctor` says the name of a machine's"),
        (None, ["cpu", "h200"], "several kinds of machines: cpu (0 of its nodes take work), h200 (0"),
        ({"gpu": "any"}, ["cpu"], "#/placement/gpu no kind of machine has gpu: any; there are: cpu (0 of its"),
        ({"gpu": "B*", "memory": "40.5GiB", "devices": 2}, ["h200"], "gpu: B* and memory of 40.5 GiB and 2 devices"),
        ({"node_class": "a100-80g"}, ["a100-80gb"], "no node of class 'a100-80g' is known here; known: a100-80gb"),
        ({"node_class": "a100-80g"}, ["a100-80gb"], "did you mean 'a100-80gb'?; to have one: ablate nodes add NAME"),
        ({"node_class": "h20"}, ["cpu"], "did you mean 'h200'?"),
    ],
)
def test_refusals(placement: dict[str, Any] | None, kinds: list[str], text: str) -> None:
    assert text in refused(placement, *(Kind(node_class=name) for name in kinds))


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ({"node_class": "h200", "gpu": "any"}, "either a node_class, or a gpu with or without memory"),
        ({"node_class": "h200", "memory": "40GiB"}, "either a node_class, or a gpu with or without memory"),
        ({"memory": "40GiB"}, "memory says which GPUs fit, and there is no gpu"),
        ({"gpu": "any", "memory": "40"}, "is not a size; allowed: a number with its unit, such as 40GiB"),
        ({"gpu": "any", "memory": 40}, "is not a size; allowed: a number with its unit, such as 40GiB"),
        ({"gpu": "any", "memory": "40GB"}, "is not a size; allowed: a number with its unit, such as 40GiB"),
        ({"gpu": "a/b"}, "#/placement/gpu"),
        ({"node_class": "a100-80gb", "devices": 9}, "9 devices for one trial are not available on node class 'a100-80"),
        ({"node_class": "a100-80gb-mig-3g-40gb", "devices": 2}, "2 devices for one trial are not available"),
    ],
)
def test_placements_that_no_service_needs_to_see(placement: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(body_of(placement), JSON)
    assert any(text in f"{one.pointer} {one.detail}" for one in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("gates", "text"),
    [
        (
            {"lane": "cuda"},
            "lane 'cuda' has no implementation on node class 'rtx-4090'; implemented there: reference. Its kernels are "
            "compiled for Hopper (sm_90a): node classes h100 and h200 run them",
        ),
        ({"lane": "xla"}, "lane 'xla' has no implementation on node class 'rtx-4090'; implemented there: reference"),
        ({"tma": True}, "needs lane cuda, which has no implementation on node class 'rtx-4090'. Its kernels "),
    ],
    ids=["kernels", "xla", "a gate of the kernels"],
)
def test_kernels_for_hopper_are_refused_on_other_gpus_with_the_reason(gates: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(make_spec(placement={"node_class": "rtx-4090"}, variants={"x": {"gates": gates}}))
    assert any(one.detail.startswith(text) or text in one.detail for one in caught.value.problems), (
        caught.value.problems
    )
    ends = [one.detail for one in caught.value.problems if gates == {"lane": "xla"}]
    assert not any("Hopper" in one for one in ends)


def test_the_built_in_model_and_its_back_ends_run_on_any_gpu() -> None:
    variants = {"x": {"gates": {"attention": "flex", "compile": True}}}
    plan = make_plan(make_spec(placement={"node_class": "rtx-4090", "devices": 2}, variants=variants))
    assert (plan.node_class, plan.busy_devices) == ("rtx-4090", 2)


def test_noise_like_that_of_an_open_spec_is_measured_on_the_named_class() -> None:
    like = parse_spec(body_of({"gpu": "any", "memory": "40GiB", "max_foreign_load": "40%"}), JSON)
    text = calibration_spec(like, node_class="rtx-4090", blocks=6, order_seed=1)
    own = parse_spec(text, CONTENT_TYPE).placement
    assert (own.node_class, own.gpu, own.memory, own.max_foreign_load) == ("rtx-4090", None, None, 40)
