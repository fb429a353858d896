"""Every kernel of the gate table, compiled for sm_90a without a GPU, against the committed table of what it costs.

Two kernels of the baseline are compiled each time, so that the compilers here are those of the table; the others when
their programs are no longer those that the table was made from.
After a change that was wanted: `python -m tests.kernels.freeze_resources`. And the offsets of long rows, in generated
source.
"""

import json
import os
import subprocess
import sys

import pytest

from kernels.mamba3_mimo.cuda.host import attest
from tests.kernels.offsets import narrow_offsets, parameters
from tests.kernels.resources import CASES, Case, committed, compile_cases, nvcc_release

REGISTERS_MORE, INSTRUCTIONS_MORE = 8, 1.03
"""How far a kernel may grow before the table must be made again: what another patch release of ptxas changes."""
EXACT = (
    "threads", "shared_bytes", "tma_loads", "tma_stores", "cp_async", "wgmma", "mma", "mbarrier",
    "register_reallocations", "barriers",
)  # fmt: skip
ALWAYS = ("local_states", "reduce_heads")
"""Kernels of the baseline that are compiled each time: one with tensor cores and one without, both soon done."""
BOUNDED = ("stack_bytes", "spill_loads", "spill_stores")
FREEZE = "if the change is wanted: python -m tests.kernels.freeze_resources"

LARGE = {
    "local_states": {"v"},
    "outputs": {"v", "z", "o", "states"},
    "local_gradients": {"z", "do"},
    "gradients": {"v_", "z", "d_out", "states", "dqh", "dkh", "dv", "dz"},
    "reduce_heads": {"per_head"},
}
"""Kernel -> its tensors with more than 2^31 numbers in a batch of 9 rows of 65,536 tokens with 64 heads."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # ends a compiler that hangs


BUILD = f"""
import json
from kernels import facts
from kernels.mamba3_mimo.cuda.host import compiled
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.shape import Variant
compiled.needed = lambda *asked: {ALWAYS}
found = []
for rows, tokens in ((8, 8192), (3, 4096)):
    with facts.collect() as seen:
        compiled.build("forward", ScanShape(B=rows, S=tokens, H=16, G=1, N=64, P=64, R=4, A=16), Variant())
    found.append(seen)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tilelang")


@pytest.fixture(scope="module")
def compiled(cache):
    pytest.importorskip("tilelang")
    here, table = nvcc_release(), committed()["nvcc"]
    if here is None:
        pytest.skip("no nvcc on PATH: kernels cannot be compiled for sm_90a here")
    if here != table:
        pytest.skip(f"nvcc is release {here}; the table was made with {table}, and counts differ between releases")
    return compile_cases(CASES, cache, _known(committed()["cases"]))


def _known(cases):
    """Return the rows of the table that stand while their programs do: all but those of ALWAYS."""
    kept = {kernel: row for kernel, row in cases["baseline"]["kernels"].items() if kernel not in ALWAYS}
    return {**cases, "baseline": {"kernels": kept}}


def test_table_has_the_cases_of_the_gate_table():
    assert set(committed()["cases"]) == set(CASES), FREEZE


@pytest.mark.parametrize("name", CASES)
def test_kernels_cost_what_the_table_says(compiled, name):
    case, table = compiled[name], committed()["cases"][name]
    assert "failed" not in case, case["failed"]
    assert case.get("refused") == table.get("refused"), FREEZE
    assert set(case.get("kernels", {})) == set(table.get("kernels", {})), FREEZE
    wrong = {kernel: bad for kernel, row in case.get("kernels", {}).items() if (bad := _worse(row, table, kernel))}
    assert not wrong, f"{wrong}; {FREEZE}"


def _worse(row, table, kernel):
    """Return {column: (now, in the table)} of what differs or is over its bound."""
    old = table["kernels"][kernel]
    most = {name: old[name] for name in BOUNDED}
    most |= {
        "registers": old["registers"] + REGISTERS_MORE,
        "instructions": old["instructions"] * INSTRUCTIONS_MORE,
    }
    differs = {name: (row[name], old[name]) for name in EXACT if row[name] != old[name]}
    return differs | {name: (row[name], old[name]) for name, limit in most.items() if row[name] > limit}


@pytest.mark.parametrize("name", CASES)
def test_code_shows_the_gates_that_were_asked_for(compiled, name):
    """Not the schedule: that is how many walks are launched, which code for every size does not say."""
    if "refused" in compiled[name]:
        pytest.skip(f"refused: {compiled[name]['refused']}")
    asked = {
        "tma": True, "warp_specialize": False, "aggressive_smem_merge": False, "layout_2d": True, "pipeline_stages": 1,
        "fast_math": True, "psiv_cache": False,
    } | {gate: value for gate, value in CASES[name].switches.items() if gate != "schedule"}  # fmt: skip
    observed = attest.facts(compiled[name]["kernels"].values())
    shown = {gate: observed.get(f"mamba3_mimo.{gate}") for gate in asked if f"mamba3_mimo.{gate}" in observed}
    assert shown == {gate: value for gate, value in asked.items() if gate in shown}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.switches])
def test_flipped_gate_changes_the_machine_code(compiled, name):
    if "refused" in compiled[name]:
        pytest.skip(f"refused: {compiled[name]['refused']}")
    unflipped = "N128" if CASES[name].N == 128 else "baseline"
    code = {
        which: {k: r["binary_sha256"] for k, r in compiled[which]["kernels"].items()} for which in (name, unflipped)
    }
    same = [kernel for kernel, digest in code[name].items() if digest == code[unflipped][kernel]]
    assert len(same) < len(code[name]), f"nothing changed in {same}"


def test_fresh_process_loads_what_was_compiled_and_another_length_takes_nothing_more(compiled, cache):
    assert "failed" not in compiled["baseline"]
    command = [sys.executable, "-c", BUILD]
    where = os.environ | {"TILELANG_CACHE_DIR": str(cache)}
    said = subprocess.run(command, env=where, capture_output=True, text=True, check=True, timeout=1800).stdout
    same, shorter = json.loads(said.splitlines()[-1])
    assert same == {"mamba3_mimo.kernels_compiled": 0, "mamba3_mimo.kernels_loaded": len(ALWAYS)}
    assert shorter == {"mamba3_mimo.kernels_compiled": 0, "mamba3_mimo.kernels_loaded": 0}


@pytest.mark.parametrize(("program", "is_compiled"), [("that of the row", False), ("another", True)])
def test_kernel_is_compiled_when_its_program_is_not_that_of_its_row(compiled, tmp_path, program, is_compiled):
    small, row = {"small": Case(kernels=("pass_states",))}, compiled["baseline"]["kernels"]["pass_states"]
    told = row if program == "that of the row" else {**row, "program_sha256": program}
    assert compile_cases(small, tmp_path, {"small": {"kernels": {"pass_states": told}}})["small"]["kernels"] == {
        "pass_states": row
    }
    assert bool(list(tmp_path.rglob("*.cu"))) == is_compiled


@pytest.mark.parametrize("name", ["local_states", "outputs", "local_gradients", "gradients", "reduce_heads"])
def test_offsets_beyond_two_to_the_31_have_64_bits(name):
    """Without tma all loads and stores are offsets: bulk copies take coordinates."""
    pytest.importorskip("tilelang")
    from tests.kernels.offsets import long_rows

    source, sizes = long_rows(name, tma=False)
    assert {tensor for tensor, size in sizes.items() if size > 2**31} == LARGE[name]
    taken = {tensor.removesuffix("_1"): tensor for tensor in parameters(source)}  # `do` is a word of C
    assert {tensor: narrow for tensor in LARGE[name] if (narrow := narrow_offsets(source, taken[tensor]))} == {}


def test_an_offset_with_32_bits_is_found():
    wide = "*(uint4*)(dv + ((((int64_t)((int)blockIdx.z)) * (int64_t)1048576) + (((int64_t)n) & (int64_t)3)))"
    assert narrow_offsets(wide, "dv") == []
    assert narrow_offsets(wide.replace("(int64_t)n", "n"), "dv") == [wide.replace("(int64_t)n", "n")[15:-1]]
    with pytest.raises(ValueError, match="no offset into 'dz'"):
        narrow_offsets(wide, "dz")
