"""Shared buffers in memory: none lies on what a copy or a product still uses, which the compiler does not know."""

import re
from dataclasses import replace
from math import prod

import pytest

pytest.importorskip("tilelang")

import tilelang

from ablate.kernels.mamba3_mimo.cuda.host.compiled import TARGET, pass_configs, program
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WIDE = ScanShape(B=1, S=512, H=2, G=1, N=128, P=64, R=4, A=32)
BUFFER = re.compile(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\)")
ALLOCATED = re.compile(r'(\w+) = T\.\w*alloc_buffer\(\(([\d, ]+)\)(?:, "(\w+)")?(?:, data=(\w+))?, scope="shared')
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "": 4, "uint64": 8}
LOCAL = {
    "k_s", "x_s", "g_s", "gw_s", "e_s", "mix_s", "dmix_s", "dgate_s", "w_s", "turn_s", "row_s", "line_s", "same_s",
    "dsame_s",
}  # fmt: skip
"""Buffers of the walk that one turn of its loop fills and uses up: these may share memory, one after the other."""


def overlaps(name, shape, variant):
    """Return the pairs of buffers of a kernel that share memory."""
    text = program(name, shape, variant)
    sizes = {m[4] or m[1]: prod(int(n) for n in m[2].split(",") if n.strip()) * BYTES[m[3] or ""]
             for m in ALLOCATED.finditer(text.script())}  # fmt: skip
    options = {getattr(key, "value", key): value for key, value in pass_configs(name, variant).items()}
    with tilelang.tvm.target.Target(TARGET), tilelang.tvm.transform.PassContext(opt_level=3, config=options):
        source = tilelang.lower(text, target=TARGET).kernel_source
    placed = sorted((int(m[2]), m[1]) for m in BUFFER.finditer(source) if m[1] != "workspace")
    assert len(placed) > 2, "the generated source is not of the form that this test reads"
    return {(a, b) for at, a in placed for start, b in placed if a != b and at <= start < at + sizes[a]}


@pytest.mark.parametrize("length", [16, 512])
@pytest.mark.parametrize("name", ["local_states", "outputs", "local_gradients", "gradients"])
def test_without_the_merge_every_buffer_has_its_own_memory_however_few_chunks_there_are(name, length):
    assert overlaps(name, replace(WIDE, L=length), Variant()) == set()


@pytest.mark.parametrize("length", [16, 512])
def test_the_merge_lays_only_buffers_of_one_turn_on_each_other(length):
    pairs = overlaps("gradients", replace(WIDE, L=length), Variant(aggressive_smem_merge=True))
    assert pairs, "nothing is merged"
    assert {buffer for pair in pairs for buffer in pair} <= LOCAL
