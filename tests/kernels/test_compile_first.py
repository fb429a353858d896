"""A kernel whose program depends on sizes alone is compiled once for all switches."""

import pytest

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo.cuda.host.compiled import OF_SIZES, pass_configs, program
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


@pytest.mark.parametrize("name", OF_SIZES)
def test_no_switch_changes_a_kernel_of_sizes_alone(name):
    shape = ScanShape(B=1, S=128, H=2, G=1, N=32, P=32, R=2, A=8, C=16, L=64)
    plain = Variant(fast_math=False)
    others = {"psiv_cache": True, "remat": True, "superchunk": 64, "pipeline_stages": 2, "tma": False, "chunk_size": 8}
    others |= {"warp_specialize": True, "aggressive_smem_merge": True, "layout_2d": False, "heads_in_turn": 2}
    others |= {} if name == "decays" else {"schedule": "sequential"}
    changed = Variant(fast_math=False, **others)
    assert program(name, shape, plain).script() == program(name, shape, changed).script()
    assert pass_configs(name, plain) == pass_configs(name, changed)
    assert set(others) | {"lane", "fast_math"} >= vars(plain).keys() - {"schedule"}
