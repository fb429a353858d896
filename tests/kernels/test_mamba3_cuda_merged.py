"""Buffers that share memory: none may lie on what a matrix product still reads, which the compiler does not know."""

import re

import pytest

pytest.importorskip("tilelang")

import tilelang

from kernels.mamba3_mimo.cuda import backward
from kernels.mamba3_mimo.cuda.compiled import TARGET, pass_configs
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.variant import Variant

pytestmark = pytest.mark.slow

WIDE = ScanShape(B=1, S=512, H=2, G=1, N=128, P=64, R=4, A=32)
BUFFER = re.compile(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\)")


def buffers(shape, variant):
    """Return where each buffer of the backward walk starts in shared memory, in bytes."""
    options = {getattr(name, "value", name): value for name, value in pass_configs(variant).items()}
    with tilelang.tvm.target.Target(TARGET), tilelang.tvm.transform.PassContext(opt_level=3, config=options):
        source = tilelang.lower(backward.gradients(shape, variant), target=TARGET).kernel_source
    return {match[1]: int(match[2]) for match in BUFFER.finditer(source)}


def test_operand_of_a_running_product_keeps_its_memory():
    variant = Variant(aggressive_smem_merge=True)
    assert backward.owns(WIDE, variant)
    starts = buffers(WIDE, variant)
    assert len(set(starts.values())) < len(starts), "nothing is merged"
    gw = range(starts["gw_s"], starts["gw_s"] + 2 * WIDE.M * WIDE.P)
    assert [name for name, start in starts.items() if start in gw] == ["gw_s"]
