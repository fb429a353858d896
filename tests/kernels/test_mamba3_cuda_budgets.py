"""Kernels of the gate table, compiled for sm_90a without a GPU, stay within their budgets and show their gates.

A kernel that needs more fails with its name and both numbers. If the need is justified, store it (budgets.py).

While the inputs of the compilation are the stored ones, a sample of the day is compiled, and must cost what is stored.
Every kernel is compiled for other inputs, and with --every-kernel (`make nightly`).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ablate.kernels.mamba3_mimo.cuda.host import attest
from tests.kernels.budgets import (
    BUDGETS,
    CASES,
    FILE,
    INPUTS,
    budget,
    chosen,
    compile_kernels,
    compilers,
    every_kernel,
    excess,
    inputs,
    nvcc_release,
    program_of,
    programs,
    tools,
    written,
)
from tests.kernels.offsets import narrow_offsets, parameters

CACHE = Path(__file__).parents[2] / "build" / "kernels"
"""Compiled kernels of changed inputs, kept from run to run."""

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
from ablate.kernels import facts
from ablate.kernels.mamba3_mimo.cuda.host import compiled
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
compiled.needed = lambda *_: ("local_states", "reduce_heads")
counts = []
for rows, tokens in ((8, 8192), (3, 4096)):
    with facts.collect() as recorded:
        compiled.build("forward", ScanShape(B=rows, S=tokens, H=16, G=1, N=64, P=64, R=4, A=16), Variant())
    counts.append(recorded)
print(json.dumps(counts))
"""


@dataclass(frozen=True)
class Compilation:
    """Kernels that were compiled here."""

    rows: dict[str, dict[str, dict[str, Any]]]
    cache: Path
    sampled: bool
    """Whether they are a sample, because the inputs are those of budgets.json."""


def compilation(folder: Path, *, every: bool) -> Compilation:
    """Compile a sample of today or every kernel into an empty folder. New inputs use the cache of earlier runs."""
    with compilers(folder) as pool:
        kernels = every_kernel() if every else chosen(inputs(programs(pool)), date.today().toordinal())
        sampled = len(kernels) < len(every_kernel())
        if sampled or every:
            return Compilation(compile_kernels(pool, kernels), folder, sampled)
    kept = CACHE / sha256("".join(tools()).encode()).hexdigest()[:12]
    with compilers(kept) as pool:
        return Compilation(compile_kernels(pool, kernels), kept, sampled)


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    pytest.importorskip("tilelang")
    every = request.config.getoption("--every-kernel")
    if nvcc_release() is None:
        (pytest.fail if every else pytest.skip)("no nvcc on PATH: kernels cannot be compiled for sm_90a here")
    return compilation(tmp_path_factory.mktemp("kernels"), every=every)


def test_kernels_stay_within_their_budgets(compiled):
    rows = [(case, kernel, row) for case, of_case in compiled.rows.items() for kernel, row in of_case.items()]
    assert not [(case, kernel, row["failed"]) for case, kernel, row in rows if "failed" in row]
    exceeded = [text for case, kernel, row in rows for text in excess(f"{case}: {kernel}", row, BUDGETS[case][kernel])]
    assert not exceeded, "; ".join(exceeded)


def test_a_sample_costs_what_is_stored_for_the_same_inputs(compiled):
    if not compiled.sampled:
        pytest.skip("every kernel was compiled; to store the costs of new inputs: python -m tests.kernels.budgets")
    for case, rows in compiled.rows.items():
        measured = {kernel: budget(row) for kernel, row in rows.items()}
        assert measured == {kernel: BUDGETS[case][kernel] for kernel in rows}, case


def test_a_cost_above_its_budget_is_reported_with_both_numbers():
    row = {"registers": 168, "shared_bytes": 1024, "barriers": 4, "spill_loads": 1, "spill_stores": 2}
    texts = excess("baseline: outputs", row, {"registers": 167, "shared_bytes": 1024, "barriers": 4})
    assert texts == ["baseline: outputs needs 168 registers, budget 167", "baseline: outputs needs 3 spills, budget 0"]


def test_every_kernel_has_a_budget():
    pytest.importorskip("tilelang")
    from ablate.kernels.mamba3_mimo.cuda.host.compiled import KERNELS

    assert set(BUDGETS["baseline"]) == set(KERNELS)
    assert set(BUDGETS) == set(CASES)


def test_two_blocks_of_the_lifted_walk_fit_a_processor_or_one_with_two_groups(compiled):
    from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import (
        BESIDES,
        OF_A_PROCESSOR,
        groups_of,
        lifts,
        shared_bytes,
    )
    from ablate.kernels.mamba3_mimo.cuda.backward.lifted_steps import threads_of

    groups = set()
    for name, case in CASES.items():
        shape, variant = case.shape(), case.variant()
        if "gradients" not in BUDGETS[name] or not lifts(shape, variant):
            continue
        groups.add(groups_of(shape))
        row = compiled.rows.get(name, {}).get("gradients", {})
        used = row.get("shared_bytes", BUDGETS[name]["gradients"]["shared_bytes"])
        assert shared_bytes(shape, variant) <= used <= shared_bytes(shape, variant) + BESIDES
        assert used * (2 // groups_of(shape)) <= OF_A_PROCESSOR
        assert row.get("threads", threads_of(shape, variant)) == threads_of(shape, variant)
    assert groups == {1, 2}


def test_code_shows_the_requested_gates(compiled):
    """Not the schedule: it is the number of launched walks, which code for every size does not show."""
    defaults = {
        "tma": True, "warp_specialize": False, "aggressive_smem_merge": False, "layout_2d": True, "pipeline_stages": 1,
        "fast_math": True, "psiv_cache": False,
    }  # fmt: skip
    for case, rows in compiled.rows.items():
        requested = defaults | {gate: value for gate, value in CASES[case].switches.items() if gate != "schedule"}
        observed = attest.facts(rows.values())
        shown = {gate: observed[f"mamba3_mimo.{gate}"] for gate in requested if f"mamba3_mimo.{gate}" in observed}
        assert shown == {gate: value for gate, value in requested.items() if gate in shown}, case


def test_flipped_gate_changes_the_machine_code(compiled):
    baseline = {kernel: row["binary_sha256"] for kernel, row in compiled.rows["baseline"].items()}
    for case, rows in compiled.rows.items():
        if CASES[case].switches:
            assert any(row["binary_sha256"] != baseline[kernel] for kernel, row in rows.items()), case


def test_a_sample_is_drawn_for_the_stored_inputs_only():
    samples = [chosen(INPUTS, seed) for seed in range(400)]
    assert {kernel for drawn in samples for kernel in drawn} == set(every_kernel())
    assert max(map(len, samples)) <= 4
    assert chosen(INPUTS[::-1], 0) == every_kernel()


def test_a_changed_kernel_option_or_tool_makes_other_inputs(monkeypatch):
    pytest.importorskip("tilelang")
    from ablate.kernels.mamba3_mimo.cuda.backward import reductions
    from ablate.kernels.mamba3_mimo.cuda.host import compiled as host

    def digest():
        return inputs([program_of(CASES["baseline"], "sum_heads")])

    plain = digest()
    assert digest() == plain
    with monkeypatch.context() as planted:
        planted.setattr(reductions, "THREADS", 64)
        assert digest() != plain
    with monkeypatch.context() as planted:
        planted.setattr(host, "_relevant", lambda name, variant: replace(variant, fast_math=False))
        assert digest() != plain
    with monkeypatch.context() as planted:
        planted.setattr(attest, "READER", "another")
        assert digest() != plain
    monkeypatch.setenv("PATH", "/nowhere")  # no nvcc
    assert digest() != plain


def test_stored_budgets_are_written_as_they_are_stored():
    assert written(INPUTS, BUDGETS) == FILE.read_text()


def test_fresh_process_loads_compiled_kernels_and_another_length_needs_no_more(compiled):
    command = [sys.executable, "-c", BUILD]
    environment = os.environ | {"TILELANG_CACHE_DIR": str(compiled.cache)}
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
