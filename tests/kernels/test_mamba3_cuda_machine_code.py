"""The check for a fault of the assembler: on loops written here, and on a kernel that has the fault."""

import re
from pathlib import Path

import pytest

from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.host import attest, compiled, machine_code
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels.budgets import nvcc_release

LOOP = (
    "ULEA UR4, UR5, UR4, 0x18",  # the start of shared memory
    "LDS R39, [UR4+0x4abc]",  # target of the branch: numbers of a chunk's tokens
    "@P1 LEA R5, R5, UR4, 0x1",
    "LDSM.16.M88.4 R4, [R5+0x4200]",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "UIADD3 UR4, UR4, 0x80, URZ",
    "@P0 BRA 0x10",
)
"""The fault, from the forward kernel of rank 1 with N = 32 and P = 64."""


def disassembly(lines: tuple[str, ...]) -> str:
    return "".join(
        f"        /*{16 * i:04x}*/    {line} ;    /* 0x0a */\n            /* 0x0b */\n" for i, line in enumerate(lines)
    )


def changed(was: str, becomes: str) -> tuple[str, ...]:
    lines = tuple(line.replace(was, becomes) for line in LOOP)
    assert lines != LOOP
    return lines


def test_a_tile_at_a_growing_address_is_the_fault() -> None:
    assert machine_code.fault(disassembly(LOOP)) == "LEA R5, R5, UR4, 0x1; LDSM.16.M88.4 R4, [R5+0x4200]"
    direct = changed("[R5+0x4200]", "[R7+UR4+0x4200]")
    assert machine_code.fault(disassembly(direct)) == "LDSM.16.M88.4 R4, [R7+UR4+0x4200]"


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("UIADD3 UR4, UR4, 0x80", "UIADD3 UR6, UR6, 0x80"),  # another register grows
        ("UIADD3 UR4, UR4, 0x80, URZ", "ULOP3.LUT UR4, UR4, 0x80, URZ, 0x3c, !UPT"),  # it turns over
        ("LDS R39, [UR4+0x4abc]", "ULEA UR4, UR5, UR4, 0x18"),  # each turn begins at the start
        ("LDSM.16.M88.4 R4, [R5", "LDS.128 R4, [R5"),  # no tile
        ("LDS R39, [UR4+0x4abc]", "LDSM.16.M88.4 R36, [R6]"),  # a tile elsewhere
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "NOP"),  # not over the chunks
        ("BRA 0x10", "BRA 0x70"),  # no loop
    ],
)
def test_other_loops_are_right(was: str, becomes: str) -> None:
    lines = changed(was, becomes)
    if becomes.endswith("[R6]"):
        lines = tuple(line.replace("R5, UR4", "R5, UR7") for line in lines)
    assert machine_code.fault(disassembly(lines)) is None


def test_a_compiled_kernel_with_the_fault_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = nvcc_release()
    if release is None or attest.disassembler() is None:
        pytest.skip("no nvcc or no cuobjdump: nothing is compiled here")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    shape = ScanShape(B=1, S=256, H=2, G=1, N=32, P=64, R=1, A=16, C=32, L=256)
    variant = Variant(chunk_size=32)
    if tuple(map(int, release.split("."))) >= (13, 3):
        compiled.kernel("outputs", shape, variant)
        return
    with pytest.raises(KernelUnsupported, match=re.escape("kernel 'outputs' has wrong machine code (LEA")):
        compiled.kernel("outputs", shape, variant)
    assert not list(tmp_path.rglob("executable.so"))
