"""When there is something to compile before step 0, and what is told of it."""

from dataclasses import replace
from typing import Any

import pytest

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.model.config import AttentionConfig, TrainConfig, generates_code
from ablate.model.training.compilation import record_compilation

EAGER = TrainConfig()


def config(*, graphs: bool = False, **model: Any) -> TrainConfig:
    return replace(EAGER, compile=graphs, model=replace(EAGER.model, **model))


CUDA, PEER = ScanSwitches(lane=Lane.CUDA), ScanSwitches(lane=Lane.PEER)
FLEX = AttentionConfig(backend="flex")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(), False),
        (config(graphs=True), True),
        (config(scan=CUDA), True),
        (config(scan=PEER), True),
        (config(scan=CUDA, pattern="AF"), False),
        (config(attention=FLEX), True),
        (config(attention=FLEX, pattern="MF"), False),
    ],
)
def test_first_pass_generates_code_where_something_in_the_model_does(given: TrainConfig, expected: bool) -> None:
    assert generates_code(given) is expected


def hit_and_facts(given: TrainConfig, compiled: int, loaded: int) -> tuple[bool | None, facts.Facts]:
    seen = facts.Facts()
    seen.update({ScanFact.KERNELS_COMPILED: compiled, ScanFact.KERNELS_LOADED: loaded})
    with facts.collect() as recorded:
        compilation = record_compilation(given, 1.5, seen)
    assert compilation.seconds == 1.5
    return compilation.cache_hit, recorded


def test_kernels_say_whether_they_came_from_the_cache_and_how_many() -> None:
    hit, recorded = hit_and_facts(config(scan=CUDA), 0, 14)
    assert (hit, dict(recorded)) == (True, {ScanFact.KERNELS_COMPILED: 0, ScanFact.KERNELS_LOADED: 14})
    assert hit_and_facts(config(scan=CUDA), 1, 13)[0] is False


def test_lane_that_does_not_tell_is_not_said_to_hit_its_cache() -> None:
    with facts.collect() as recorded:
        compilation = record_compilation(config(scan=PEER), 2.0, facts.Facts())
    assert (compilation.cache_hit, dict(recorded)) == (None, {})
