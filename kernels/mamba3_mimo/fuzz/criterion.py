"""When a result is right: its error beside what rounding the operands to bfloat16 does to the exact result.

The lane multiplies bfloat16 numbers, so nobody's result can be nearer to the exact one than the rounding of the
operands allows, and how near that is depends on the problem: a gradient that is a difference of large sums keeps few
digits whoever computes it. So the yardstick is measured on the problem itself. The float64 reference runs once as it
is, and SAMPLES times with every operand of the matrix products, and the gradient of every operand, moved by a random
part of half a bfloat16 place. The noise of a row is the root mean square of what that changes, and an error may be a
stated multiple of it. docs/kernels-correctness.md says why these multiples, and why rows. Letters: see ../inputs.py.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.documents import document_starts
from kernels.mamba3_mimo.accuracy import outputs
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.operands import cumulated_angles, handed_on, psiv, rotated
from kernels.mamba3_mimo.reference import chunk_parallel

SAMPLES = 8
HALF_A_PLACE = 2.0**-9
"""Largest relative error of rounding to bfloat16."""
WHOLE_LIMIT, ROW_LIMIT = 8.0, 32.0
"""Largest error allowed of a whole tensor and of a row, in multiples of its noise."""
CHUNK = 64
"""Tokens per chunk of the reference: its own matter, it computes in float64."""

ROWS: dict[str, tuple[int, ...]] = {
    "out": (0, 1, -2), "q": (0, 1, 3), "k": (0, 1, 3), "v": (0, 1, 2), "z": (0, 1, 2), "angles": (0, 1, 2),
    "adt": (0, 2, 1), "dt": (0, 2, 1), "trap": (0, 2, 1), "state": (0, 1), "entering": (0, 1), "q_bias": (0,),
    "k_bias": (0,), "psi": (0,), "zeta": (0,), "phi": (0,), "D": (0,),
}  # fmt: skip
"""Axes that tell the rows of a tensor apart: batch, time and head, where it has them; the head comes last."""

Results: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Share:
    """An error as a multiple of the noise."""

    whole: float
    """Of the tensor."""
    row: float
    """Of the row that is worst."""

    @property
    def right(self) -> bool:
        """Whether both are within their limits; NaN is not."""
        return self.whole <= WHOLE_LIMIT and self.row <= ROW_LIMIT


def shares(got: Results, inputs: ScanInputs, grad_out: Tensor, grad_state: Tensor | None = None) -> dict[str, Share]:
    """Return the share of every result in `got`: out, state and gradients by name."""
    gradients = bool(got.keys() - {"out", "state"})
    exact, noise = yardstick(inputs, grad_out, grad_state, gradients=gradients)
    return measured(got, exact, noise)


def measured(got: Results, exact: Results, noise: Results) -> dict[str, Share]:
    """Return the share of every result in `got`, given the yardstick of the problem."""
    return {name: _share(name, tensor, exact[name], noise[name]) for name, tensor in got.items()}


def yardstick(
    inputs: ScanInputs,
    grad_out: Tensor,
    grad_state: Tensor | None = None,
    *,
    gradients: bool = True,
    samples: int = SAMPLES,
) -> tuple[Results, Results]:
    """Return the exact results, and the mean square noise of every row of each.

    `grad_state` is the gradient of the final state, None where nobody uses it.
    """
    wide = inputs.with_tensors(tuple(t.detach().double() for t in inputs.tensors()))
    grad_wide = None if grad_state is None else grad_state.double()
    exact = _reference(wide, grad_out.double() if gradients else None, grad_wide, None)
    gen = torch.Generator(device=grad_out.device).manual_seed(0)
    noise = {name: torch.zeros_like(_rows(name, tensor)) for name, tensor in exact.items()}
    for _ in range(samples):
        sample = _reference(wide, _moved(grad_out.double(), gen) if gradients else None, grad_wide, gen)
        for name, tensor in sample.items():
            noise[name] += _rows(name, tensor - exact[name]) / samples
    return exact, noise


def _reference(
    wide: ScanInputs, grad_out: Tensor | None, grad_state: Tensor | None, gen: torch.Generator | None
) -> Results:
    """Return the results of the float64 reference; with `gen` the operands of its products are moved."""

    def run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        starts_BS = None if inputs.segment_ids is None else document_starts(inputs.segment_ids)
        angle_BHSA = cumulated_angles(inputs, starts_BS)
        turned = {}
        for name, bias in (("q", inputs.q_bias), ("k", inputs.k_bias)):
            operand_BHSRN = rotated(getattr(inputs, name), _rounded(bias, gen), angle_BHSA)
            turned[name] = _rounded(operand_BHSRN, gen).permute(0, 2, 3, 1, 4)
        x_BHSRP = _rounded(psiv(inputs.v, inputs.psi), gen)
        out, state = chunk_parallel(_unturned(inputs, **turned), x_BHSRP, chunk_size=CHUNK)
        return out, handed_on(state, None if inputs.angles_cumulated else angle_BHSA[:, :, -1])

    return outputs(run, wide, grad_out, grad_state)


def _unturned(inputs: ScanInputs, q: Tensor, k: Tensor) -> ScanInputs:
    """Return inputs whose q and k [B,S,R,H,N] are to be read as they are."""
    batch, length, _, heads, _ = q.shape
    nothing = torch.zeros_like(inputs.q_bias)
    angles = inputs.angles.new_zeros(batch, length, heads, inputs.angles.shape[-1])
    return replace(inputs, q=q, k=k, q_bias=nothing, k_bias=nothing, angles=angles, angles_cumulated=True)


def _rounded(operand: Tensor, gen: torch.Generator | None) -> Tensor:
    """Return an operand as bfloat16 might hold it, whose gradient is treated so, too; without `gen`, as it is."""
    if gen is None:
        return operand
    moved: Tensor = _Moved.apply(operand, gen)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operand: Tensor, gen: torch.Generator) -> Tensor:
        ctx.gen = gen
        return _moved(operand, gen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _moved(grad, ctx.gen), None


def _moved(t: Tensor, gen: torch.Generator) -> Tensor:
    part = 2 * torch.rand(t.shape, generator=gen, device=t.device, dtype=t.dtype) - 1
    return t * (1 + HALF_A_PLACE * part)


def _rows(name: str, t: Tensor) -> Tensor:
    """Return the sums of squares of the rows, [..., heads]."""
    kept = tuple(axis % t.dim() for axis in ROWS[name])
    rest = tuple(axis for axis in range(t.dim()) if axis not in kept)
    return (
        t.double().square().permute(*kept, *rest).flatten(len(kept)).sum(-1)
        if rest
        else t.double().square().permute(*kept)
    )


def _share(name: str, got: Tensor, exact: Tensor, noise: Tensor) -> Share:
    error = _rows(name, got.double() - exact)
    typical = noise.flatten(0, -2).mean(0) if noise.dim() > 1 else noise
    allowed = noise + typical
    return Share(_ratio(error.sum(), noise.sum()), float(_ratios(error, allowed).max()))


def _ratios(error: Tensor, allowed: Tensor) -> Tensor:
    """Return the roots of error / allowed: 0 where there is no error, infinite where none is allowed."""
    return torch.where(error == 0, 0.0, error / allowed).sqrt()


def _ratio(error: Tensor, allowed: Tensor) -> float:
    return float(_ratios(error, allowed))
