"""Decoding token by token from what a scan leaves behind equals scanning the whole sequence."""

from dataclasses import replace

import pytest
import torch

from kernels.errors import ShapeError
from kernels.mamba3_mimo import ScanInputs, decode_state, decode_step, mamba3_mimo
from kernels.scan import ScanSwitches
from tests.scan_inputs import ScanSizes, random_inputs

FORMS = {"sequential": ScanSwitches(schedule="sequential"), "chunk_parallel": ScanSwitches()}
SHAPE = ScanSizes(batch=2, length=40, heads=4, groups=2, state=16, width=8, ranks=2)
TIME_AXIS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}


def part(inputs: ScanInputs, start: int, stop: int) -> ScanInputs:
    """Return the tokens from `start` to `stop`, in one document from a second token on."""
    parts = {name: getattr(inputs, name).narrow(axis, start, stop - start) for name, axis in TIME_AXIS.items()}
    ids = None if inputs.segment_ids is None or start else inputs.segment_ids[:, :stop]
    return replace(inputs, **parts, segment_ids=ids)


def double_inputs(*, documents: bool, cumulated: bool) -> ScanInputs:
    inputs = random_inputs(SHAPE, seed=3)
    inputs = inputs.with_tensors(tuple(t.double() for t in inputs.tensors()))
    ids = torch.zeros(2, 40, dtype=torch.long)
    ids[0, 11:], ids[1, 5:], ids[1, 20:] = 1, 1, 2
    return replace(inputs, segment_ids=ids if documents else None, angles_cumulated=cumulated)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("documents", [False, True], ids=["one_document", "documents"])
@pytest.mark.parametrize("cumulated", [False, True], ids=["raw_angles", "cumulated_angles"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_decoding_equals_the_whole_sequence(form, documents, cumulated, tokens):
    inputs = double_inputs(documents=documents, cumulated=cumulated)
    whole = mamba3_mimo(inputs, form)
    start = part(inputs, 0, 25)
    state = decode_state(start, mamba3_mimo(start, form).final_state)
    for at in range(25, 40, tokens):
        out, state = decode_step(part(inputs, at, at + tokens), state)
        torch.testing.assert_close(out, whole.out[:, at : at + tokens], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.state, whole.final_state, rtol=1e-10, atol=1e-10)


def test_decode_state_is_that_of_the_step_before():
    inputs = double_inputs(documents=True, cumulated=False)
    start = part(inputs, 0, 39)
    _, stepped = decode_step(part(inputs, 39, 40), decode_state(start, mamba3_mimo(start).final_state))
    whole = decode_state(inputs, mamba3_mimo(inputs).final_state)
    for ours, theirs in zip(stepped, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_decode_state_has_the_documented_shapes_and_no_gradient():
    inputs = random_inputs(SHAPE, dtype=torch.bfloat16)
    inputs.k.requires_grad_()
    state = decode_state(inputs, mamba3_mimo(inputs).final_state)
    assert [(tuple(t.shape), t.dtype, t.requires_grad) for t in state] == [
        ((2, 4, 16, 8), torch.float32, False),
        ((2, 2, 4, 16), torch.bfloat16, False),
        ((2, 4, 8), torch.bfloat16, False),
        ((2, 4, 4), torch.float32, False),
    ]


def test_decode_step_refuses_documents():
    inputs = double_inputs(documents=True, cumulated=False)
    state = decode_state(inputs, mamba3_mimo(inputs).final_state)
    with pytest.raises(ShapeError, match="a decode step continues one document"):
        decode_step(inputs, state)
