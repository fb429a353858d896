"""Tensors with more than 2^31 elements: nine rows of 65,536 tokens with 64 heads, on a GPU with 125 GiB free."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from tests.kernels import criterion
from tests.kernels.accuracy import TIME_AXIS, poisoned_buffers
from tests.kernels.checked import ours
from tests.kernels.problem import Case, make_grad, make_inputs
from tests.kernels.scan_cases import scan_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ROWS = Case(B=9, S=65536, H=64)
ONE = replace(ROWS, B=1)
VARIANT = Variant(superchunk=1024)
"""Named: how long super-chunks are would else depend on the batch, and sums on that."""
TAIL = 2048
"""Tokens of the last row's last document: what the float64 reference is made for."""
NEEDS = 125 * 2**30
OF_ROWS = (*TIME_AXIS, "state")


def cut(inputs: ScanInputs, rows: slice, tokens: slice) -> ScanInputs:
    """Return some rows and tokens of all tensors that have them, as one document each where `tokens` are a part."""
    parts: dict[str, Any] = {
        name: of_tokens(name, getattr(inputs, name)[rows], tokens) for name in inputs.names if name in TIME_AXIS
    }
    ids = None if inputs.segment_ids is None or tokens != slice(None) else inputs.segment_ids[rows]
    return replace(inputs, **parts, segment_ids=ids)


def of_tokens(name: str, tensor: torch.Tensor, tokens: slice) -> torch.Tensor:
    """Return some tokens of a tensor whose first axis are the rows."""
    return tensor[(slice(None),) * TIME_AXIS[name] + (tokens,)].contiguous()


@pytest.mark.scans(scan_problem(ROWS, VARIANT), scan_problem(ONE, VARIANT))
def test_rows_beyond_two_to_the_31_numbers_are_those_of_each_row_alone_and_right():
    """Equal bits to each row alone; the last document, all of it beyond 2^31, also against the float64 reference."""
    free, total = torch.cuda.mem_get_info()
    if free < NEEDS:
        pytest.skip(f"needs {NEEDS >> 30} GiB of GPU memory; free: {free >> 30} of {total >> 30}")
    inputs = make_inputs(ROWS)
    assert inputs.v.numel() > 2**31
    inputs = replace(inputs, segment_ids=torch.zeros(ROWS.B, ROWS.S, dtype=torch.int64, device="cuda"))
    inputs.segment_ids[-1, -TAIL:] = 1
    grad_out = make_grad(inputs, 1)
    torch.cuda.empty_cache()
    with poisoned_buffers():
        every = ours(inputs, grad_out, VARIANT)
        every = {name: every[name] for name in OF_ROWS if name in every}
        torch.cuda.empty_cache()
        for row in (0, ROWS.B // 2, ROWS.B - 1):
            rows = slice(row, row + 1)
            alone = ours(cut(inputs, rows, slice(None)), grad_out[rows], VARIANT)
            assert [name for name in every if not torch.equal(every[name][rows], alone[name])] == []
    last, tail = slice(ROWS.B - 1, ROWS.B), slice(ROWS.S - TAIL, None)
    got = {name: of_tokens(name, every[name][last], tail) for name in TIME_AXIS}
    share = criterion.shares(got, cut(inputs, last, tail), of_tokens("out", grad_out[last], tail))
    assert {name: one for name, one in share.items() if not one.right} == {}
