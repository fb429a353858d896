"""Kernels of the gate table, compiled for sm_90a without a GPU, stay within their budgets and show their gates.

A kernel that needs more fails with its name and both numbers. If the need is justified, raise it in budgets.json.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.mamba3_mimo.cuda.host import attest
from tests.kernels.budgets import BUDGETS, CASES, compile_kernels, excess, nvcc_release
from tests.kernels.offsets import narrow_offsets, parameters

CACHE = Path(__file__).parents[2] / "build" / "kernels"
"""Compiled kernels, kept from run to run."""

LARGE = {
    "local_states": {"v"},
    "outputs": {"v", "z", "o", "states"},
    "local_gradients": {"z", "do"},
    "gradients": {"v_", "z", "d_out", "states", "dqh", "dkh", "dv", "dz"},
    "reduce_heads": {"per_head"},
}
"""Kernel -> its tensors with more than 2^31 numbers in a batch of 9 rows of 65,536 tokens with 64 heads."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # ends a compiler that hangs

BUILD = """
import json
from kernels import facts
from kernels.mamba3_mimo.cuda.host import compiled
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
compiled.needed = lambda *_: ("local_states", "reduce_heads")
counts = []
for rows, tokens in ((8, 8192), (3, 4096)):
    with facts.collect() as recorded:
        compiled.build("forward", ScanShape(B=rows, S=tokens, H=16, G=1, N=64, P=64, R=4, A=16), Variant())
    counts.append(recorded)
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("tilelang")
    if nvcc_release() is None:
        pytest.skip("no nvcc on PATH: kernels cannot be compiled for sm_90a here")
    return compile_kernels(CACHE)


@pytest.mark.parametrize("case", CASES)
def test_kernels_stay_within_their_budgets(compiled, case):
    failed = {kernel: row["failed"] for kernel, row in compiled[case].items() if "failed" in row}
    assert not failed
    exceeded = [
        text
        for kernel, row in compiled[case].items()
        for text in excess(f"{case}: {kernel}", row, BUDGETS[case][kernel])
    ]
    assert not exceeded, "; ".join(exceeded)


def test_a_cost_above_its_budget_is_reported_with_both_numbers():
    row = {"registers": 168, "shared_bytes": 1024, "barriers": 4, "spill_loads": 1, "spill_stores": 2}
    texts = excess("baseline: outputs", row, {"registers": 167, "shared_bytes": 1024, "barriers": 4})
    assert texts == ["baseline: outputs needs 168 registers, budget 167", "baseline: outputs needs 3 spills, budget 0"]


def test_every_kernel_has_a_budget():
    pytest.importorskip("tilelang")
    from kernels.mamba3_mimo.cuda.host.compiled import KERNELS

    assert set(BUDGETS["baseline"]) == set(KERNELS)
    assert set(BUDGETS) == set(CASES)


def test_two_blocks_of_the_lifted_walk_fit_a_processor_or_one_with_two_groups(compiled):
    from kernels.mamba3_mimo.cuda.backward.lifted_layout import BESIDES, OF_A_PROCESSOR, groups_of, lifts, shared_bytes
    from kernels.mamba3_mimo.cuda.backward.lifted_steps import threads_of

    groups = set()
    for name, case in CASES.items():
        shape, variant = case.shape(), case.variant()
        row = compiled[name].get("gradients")
        if row is None or not lifts(shape, variant):
            continue
        groups.add(groups_of(shape))
        assert shared_bytes(shape, variant) <= row["shared_bytes"] <= shared_bytes(shape, variant) + BESIDES
        assert row["shared_bytes"] * (2 // groups_of(shape)) <= OF_A_PROCESSOR
        assert row["threads"] == threads_of(shape, variant)
    assert groups == {1, 2}


@pytest.mark.parametrize("case", CASES)
def test_code_shows_the_requested_gates(compiled, case):
    """Not the schedule: it is the number of launched walks, which code for every size does not show."""
    requested = {
        "tma": True, "warp_specialize": False, "aggressive_smem_merge": False, "layout_2d": True, "pipeline_stages": 1,
        "fast_math": True, "psiv_cache": False,
    } | {gate: value for gate, value in CASES[case].switches.items() if gate != "schedule"}  # fmt: skip
    observed = attest.facts(compiled[case].values())
    shown = {gate: observed[f"mamba3_mimo.{gate}"] for gate in requested if f"mamba3_mimo.{gate}" in observed}
    assert shown == {gate: value for gate, value in requested.items() if gate in shown}


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.switches])
def test_flipped_gate_changes_the_machine_code(compiled, case):
    code = {which: {k: row["binary_sha256"] for k, row in compiled[which].items()} for which in (case, "baseline")}
    assert any(digest != code["baseline"][kernel] for kernel, digest in code[case].items())


def test_fresh_process_loads_compiled_kernels_and_another_length_needs_no_more(compiled):
    command = [sys.executable, "-c", BUILD]
    environment = os.environ | {"TILELANG_CACHE_DIR": str(CACHE)}
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=1800).stdout
    same, shorter = json.loads(text.splitlines()[-1])
    assert same == {"mamba3_mimo.kernels_compiled": 0, "mamba3_mimo.kernels_loaded": 2}
    assert shorter == {"mamba3_mimo.kernels_compiled": 0, "mamba3_mimo.kernels_loaded": 0}


@pytest.mark.parametrize("name", LARGE)
def test_offsets_beyond_two_to_the_31_have_64_bits(name):
    """Without tma all loads and stores are offsets: bulk copies take coordinates."""
    pytest.importorskip("tilelang")
    from tests.kernels.offsets import long_rows

    source, sizes = long_rows(name, tma=False)
    assert {tensor for tensor, size in sizes.items() if size > 2**31} == LARGE[name]
    tensors = {tensor.removesuffix("_1"): tensor for tensor in parameters(source)}  # `do` is a keyword of C
    assert {tensor: narrow for tensor in LARGE[name] if (narrow := narrow_offsets(source, tensors[tensor]))} == {}


def test_an_offset_with_32_bits_is_reported():
    wide = "*(uint4*)(dv + ((((int64_t)((int)blockIdx.z)) * (int64_t)1048576) + (((int64_t)n) & (int64_t)3)))"
    assert narrow_offsets(wide, "dv") == []
    assert narrow_offsets(wide.replace("(int64_t)n", "n"), "dv") == [wide.replace("(int64_t)n", "n")[15:-1]]
    with pytest.raises(ValueError, match="no offset into 'dz'"):
        narrow_offsets(wide, "dz")
