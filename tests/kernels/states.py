"""Rows in pieces: how a scan is cut, its pieces chained, and their results put together again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ablate.kernels.mamba3_mimo import ScanInputs, ScanResult, ScanState
from tests.scan_inputs import TIME_AXIS, ScanSizes, random_inputs

Scan = Callable[[ScanInputs, ScanState | None], ScanResult]
"""(inputs, initial state) -> result with its final state."""


def piece(inputs: ScanInputs, start: int, stop: int) -> ScanInputs:
    """Return the tokens from `start` to `stop`."""
    parts = {name: getattr(inputs, name) for name in TIME_AXIS if name in inputs.names}
    parts = {name: tensor.narrow(TIME_AXIS[name], start, stop - start) for name, tensor in parts.items()}
    ids = None if inputs.segment_ids is None else inputs.segment_ids[:, start:stop]
    return replace(inputs, **parts, segment_ids=ids)


def chained(inputs: ScanInputs, cuts: Sequence[int], scan: Scan, before: ScanState | None = None) -> ScanResult:
    """Return the result of all pieces, each scanned from what the one before left."""
    outs, state = [], before
    for start, stop in pairwise((0, *cuts, inputs.v.shape[1])):
        out, state = scan(piece(inputs, start, stop), state)
        outs.append(out)
    return ScanResult(torch.cat(outs, dim=1), state)


def random_state(inputs: ScanInputs, *, seed: int, same_document: Sequence[bool] | None = None) -> ScanState:
    """Return a state for the inputs to go on from; of rows with ids, those of `same_document` really go on."""
    gen = torch.Generator().manual_seed(seed)
    size = (inputs.v.shape[0], inputs.num_heads, inputs.state_size, inputs.v.shape[3])
    state, write = (torch.randn(size, generator=gen).to(inputs.accumulate_dtype) for _ in range(2))
    ids = None
    if inputs.segment_ids is not None and same_document is not None:
        ids = inputs.segment_ids[:, 0] + ~torch.tensor(same_document)
    return ScanState(state, write, ids)


def double_inputs(shape: ScanSizes, *, seed: int = 0, **changes: object) -> ScanInputs:
    """Return random inputs in float64."""
    inputs = random_inputs(shape, seed=seed)
    return replace(inputs.with_tensors(tuple(t.double() for t in inputs.tensors())), **changes)


def results(inputs: ScanInputs, before: ScanState | None, scan: Scan, seed: int = 5) -> dict[str, Tensor]:
    """Return output, final state and write, and the gradients of a random sum of them with respect to everything."""
    leaves = {
        name: tensor.detach().requires_grad_() for name, tensor in zip(inputs.names, inputs.tensors(), strict=True)
    }
    if before is not None:
        before = ScanState(*(t.detach().requires_grad_() for t in before[:2]), before.segment_ids)
        leaves |= {"state": before.state, "write": before.write}
    out, final = scan(inputs.with_tensors(tuple(leaves[name] for name in inputs.names)), before)
    outputs = {"out": out, "final_state": final.state, "final_write": final.write}
    gen = torch.Generator().manual_seed(seed)
    weights = [torch.randn(t.shape, generator=gen).to(t) for t in outputs.values()]
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), weights)
    return {name: t.detach() for name, t in outputs.items()} | dict(zip(leaves, grads, strict=True))
