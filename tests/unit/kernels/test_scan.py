from dataclasses import fields, replace

import pytest

from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import CHUNK_SIZES, MAX_SUPERCHUNK, PIPELINE_STAGES, SCHEDULES, ScanFact, ScanSwitches


@pytest.mark.parametrize("field", fields(ScanSwitches), ids=lambda field: field.name)
def test_every_switch_has_a_fact_of_its_name(field):
    assert ScanFact.of(field.name).partition(".")[2] == field.name


def test_a_fact_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="TURBO"):
        ScanFact.of("turbo")


def test_defaults_are_among_the_allowed_values():
    switches = ScanSwitches()
    assert switches.schedule in SCHEDULES
    assert switches.chunk_size in CHUNK_SIZES
    assert switches.pipeline_stages in PIPELINE_STAGES
    assert switches.superchunk <= MAX_SUPERCHUNK
    assert switches.superchunk % switches.chunk_size == 0


def test_generated_kernels_have_the_switches_and_defaults_of_everybody():
    variant = pytest.importorskip("ablate.kernels.mamba3_mimo.cuda.host.refusals")
    asked = {field.name: getattr(variant.Variant(), field.name) for field in fields(ScanSwitches)}
    assert ScanSwitches(**asked) == replace(ScanSwitches(), lane=Lane.CUDA)
    assert set(variant.CHUNK_SIZES) < set(CHUNK_SIZES)
