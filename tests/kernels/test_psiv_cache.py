"""psiv_cache decides what is saved between the passes and nothing else: same bits, other memory."""

import os
import subprocess
import sys

import pytest
import torch

from ablate.kernels import facts
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.scan_switches import ScanSwitches
from tests.scan_inputs import ScanSizes, random_inputs

SHAPE = ScanSizes(batch=2, length=40, heads=4, groups=1, state=16, width=16, ranks=4)
PSIV_ELEMENTS = 2 * 4 * 40 * 4 * 16
FORMS = {"sequential": {"schedule": "sequential"}, "chunk_parallel": {"chunk_size": 16}}

PEAK_SCRIPT = """
import sys
from pathlib import Path
import torch
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.scan_switches import ScanSwitches
from tests.scan_inputs import ScanSizes, random_inputs

torch.set_num_threads(1)
inputs = random_inputs(ScanSizes(batch=1, length=512, heads=4, groups=1, state=8, width=64, ranks=8))
tuple(t.requires_grad_() for t in inputs.tensors())
total = sum(mamba3_mimo(inputs, ScanSwitches(psiv_cache=sys.argv[1] == "on")).out.sum() for _ in range(12))
total.backward()
status = Path("/proc/self/status").read_text()
print(status.split("VmHWM:")[1].split()[0])
"""


def run(cache, form, dtype=torch.float32):
    inputs = random_inputs(SHAPE, dtype=dtype)
    leaves = tuple(t.requires_grad_() for t in inputs.tensors())
    saved = []
    with (
        facts.collect() as seen,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        out = mamba3_mimo(inputs, ScanSwitches(psiv_cache=cache, **form)).out
        grads = torch.autograd.grad(out.square().sum(), leaves)
    return out.detach(), grads, seen, saved, leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_output_and_gradients_are_bit_identical(form, dtype):
    out_on, grads_on, *_ = run(True, form, dtype)
    out_off, grads_off, *_ = run(False, form, dtype)
    assert torch.equal(out_on, out_off)
    assert all(torch.equal(a, b) for a, b in zip(grads_on, grads_off, strict=True))


@pytest.mark.parametrize(("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_saved_bytes_are_inputs_plus_psiv_when_cached(form, dtype, item):
    def saved_by_forward(cache):
        inputs = random_inputs(SHAPE, dtype=dtype)
        leaves = tuple(t.requires_grad_() for t in inputs.tensors())
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            mamba3_mimo(inputs, ScanSwitches(psiv_cache=cache, **form))
        return sum(saved), sum(t.nbytes for t in leaves)

    on, inputs_on = saved_by_forward(True)
    off, inputs_off = saved_by_forward(False)
    assert off == inputs_off
    assert on == inputs_on + PSIV_ELEMENTS * item


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_facts_tell_cache_from_recompute(form):
    _, _, on, _, _ = run(True, form)
    _, _, off, _, _ = run(False, form)
    assert on["mamba3_mimo.psiv_saved_bytes"] == PSIV_ELEMENTS * 4
    assert "mamba3_mimo.psiv_recomputes" not in on
    assert off["mamba3_mimo.psiv_recomputes"] == 1
    assert "mamba3_mimo.psiv_saved_bytes" not in off


def test_nothing_is_saved_or_counted_without_gradients():
    inputs = random_inputs(SHAPE)
    inputs.v.requires_grad_()
    with facts.collect() as seen, torch.no_grad():
        out = mamba3_mimo(inputs, ScanSwitches(psiv_cache=True)).out
    assert not out.requires_grad
    assert "mamba3_mimo.psiv_saved_bytes" not in seen


@pytest.mark.slow
def test_peak_memory_differs_by_the_cached_bytes():
    """Twelve scans, each with 4 MiB of PsiV: resident peak of a fresh process, cached minus recomputed."""
    # Freed buffers go back to the system at once, so the peak is not blurred by what malloc keeps.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    peak_kib = {
        cache: int(
            subprocess.run(
                [sys.executable, "-c", PEAK_SCRIPT, cache], check=True, capture_output=True, text=True, env=environment
            ).stdout
        )
        for cache in ("on", "off")
    }
    cached_kib = 12 * 4 * 1024
    assert peak_kib["on"] - peak_kib["off"] > 0.5 * cached_kib
