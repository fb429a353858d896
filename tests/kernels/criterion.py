"""Criterion of a correct result: its error relative to the noise of rounding the operands to bfloat16.

A lane multiplies bfloat16 numbers, so no lane can come closer to the exact result than the rounding of the operands
allows. That bound depends on the problem: a gradient that is a difference of large sums has few exact digits in every
implementation. So the yardstick is measured on the problem itself. The float64 reference runs once unchanged, and
SAMPLES times with every operand of the matrix products, and the gradient of every operand, moved by a random part of
half a bfloat16 place. The noise of a row is the root mean square of the resulting changes, and an error may be a fixed
multiple of it. A row of `adt` is a sum over later tokens and has the noise of its terms.

docs/kernels-correctness.md explains the multiples, the rows and the sums. Letters: see inputs.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ablate.kernels.documents import document_starts
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import cumulated_angles, handed_on, psiv, rotated
from ablate.kernels.mamba3_mimo.reference import chunk_parallel
from tests.kernels.problem import outputs

SAMPLES, SAMPLES_IN_DOUBT = 8, 32
"""Samples of the noise: at first, and for a result that the first samples call wrong."""
HALF_A_PLACE = 2.0**-9
"""Largest relative error of rounding to bfloat16."""
HALF_A_TABLE_PLACE = 2.0**-12
"""The same for float16, in which a lane may store the cosines and sines that turn a final state."""
WHOLE_LIMIT, ROW_LIMIT, SUM_LIMIT = 8.0, 32.0, 8.0
"""Largest errors of a whole tensor, of a row, and of a row that is a sum, in multiples of the noise."""
LIMITS = f"{WHOLE_LIMIT:g} / {ROW_LIMIT:g}, rows of adt {SUM_LIMIT:g}"
CHUNK = 64
"""Tokens per chunk of the reference. Irrelevant to the result, because it computes in float64."""
SUMMED = 64
"""Tokens that a lane may sum before it must correct the sum by other means."""
PLACE_OF_SUMS = 2.0**-22
"""Relative error of float32 sums of products in matrix units, two bits short of rounding."""

ROWS: dict[str, tuple[int, ...]] = {
    "out": (0, 1, -2), "q": (0, 1, 3), "k": (0, 1, 3), "v": (0, 1, 2), "z": (0, 1, 2), "angles": (0, 1, 2),
    "adt": (0, 2, 1), "dt": (0, 2, 1), "trap": (0, 2, 1), "state": (0, 1), "entering": (0, 1), "q_bias": (0,),
    "k_bias": (0,), "psi": (0,), "zeta": (0,), "phi": (0,), "D": (0,),
}  # fmt: skip
"""Tensor -> axes of its rows: batch, time and head as far as it has them, the head last."""

Results: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Share:
    """An error as a multiple of the noise."""

    whole: float
    """Share of the whole tensor."""
    row: float
    """Share of the worst row."""
    row_limit: float = ROW_LIMIT
    """Largest correct share of a row."""

    @property
    def right(self) -> bool:
        """Whether both shares are within their limits. NaN is not."""
        return self.whole <= WHOLE_LIMIT and self.row <= self.row_limit


class Yardstick(NamedTuple):
    """Exact results of a problem and their noise."""

    exact: Results
    noise: Results
    """Mean square noise of every row, [..., heads]."""
    carried: Results
    """Mean square noise that a row receives from the rows that it is summed with."""


def shares(got: Results, inputs: ScanInputs, grad_out: Tensor, grad_state: Tensor | None = None) -> dict[str, Share]:
    """Return the share of every result in `got`: out, state and gradients by name.

    If a few samples call a result wrong, many samples decide: among thousands of rows a few samples barely move some.
    """
    gradients = bool(got.keys() - {"out", "state"})

    def by(samples: int) -> Yardstick:
        return yardstick(inputs, grad_out, grad_state, gradients=gradients, samples=samples)

    return judged(got, by, (SAMPLES, SAMPLES_IN_DOUBT))[1]


def judged(got: Results, by: Callable[[int], Yardstick], counts: Sequence[int]) -> tuple[Yardstick, dict[str, Share]]:
    """Return the deciding yardstick and the share of every result.

    `by` makes a yardstick from a number of samples. The first of `counts` that calls all results right decides,
    otherwise the last.
    """
    for samples in counts:
        measure = by(samples)
        results = measured(got, measure)
        if all(share.right for share in results.values()):
            break
    return measure, results


def wrong(got: Results, inputs: ScanInputs, grad_out: Tensor, grad_state: Tensor | None = None) -> dict[str, Share]:
    """Return the shares of the wrong results in `got`."""
    return {name: share for name, share in shares(got, inputs, grad_out, grad_state).items() if not share.right}


def measured(got: Results, by: Yardstick) -> dict[str, Share]:
    """Return the share of every result in `got` by the yardstick of its problem."""
    return {
        name: _share(name, tensor, by.exact[name], by.noise[name], by.carried.get(name)) for name, tensor in got.items()
    }


def yardstick(
    inputs: ScanInputs,
    grad_out: Tensor,
    grad_state: Tensor | None = None,
    *,
    gradients: bool = True,
    samples: int = SAMPLES,
) -> Yardstick:
    """Return the yardstick of a problem. `grad_state` is the gradient of the final state, None for none."""
    exact, noise = noise_of_rows(inputs, grad_out, grad_state, gradients=gradients, samples=samples)
    return Yardstick(exact, noise, carried(exact, noise, inputs, grad_out))


def carried(exact: Results, noise: Results, inputs: ScanInputs, grad_out: Tensor) -> Results:
    """Return the noise that rows of `adt` receive from their sums, [B,S,H]; empty without gradients.

    The gradient of a token's decay is the sum of <o, dO> - <v, dv> over the rest of its document. So it has the noise
    of all rows of its document within SUMMED tokens, and the float32 rounding of their products.
    """
    if "adt" not in noise:
        return {}
    rounding = _sizes_of_products(exact["out"], grad_out) + _sizes_of_products(exact["v"], inputs.v.detach())
    terms_BSH = noise["adt"] + (PLACE_OF_SUMS * rounding).square()
    ids_BS1 = terms_BSH.new_zeros(()).expand(terms_BSH.shape[:2]) if inputs.segment_ids is None else inputs.segment_ids
    ids_BS1 = ids_BS1.unsqueeze(-1)
    total_BSH = terms_BSH - noise["adt"]
    for far in range(1, min(SUMMED, terms_BSH.shape[1])):
        together = ids_BS1[:, far:] == ids_BS1[:, :-far]
        total_BSH[:, far:] += terms_BSH[:, :-far] * together
        total_BSH[:, :-far] += terms_BSH[:, far:] * together
    return {"adt": total_BSH}


def _sizes_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the sums [B,S,H] of the absolute products of two tensors [B,S,...,H,P]."""
    products = (left * right.to(left.dtype)).abs()
    return products.sum((*range(2, products.dim() - 2), -1))


def noise_of_rows(
    inputs: ScanInputs, grad_out: Tensor, grad_state: Tensor | None = None, *, gradients: bool, samples: int
) -> tuple[Results, Results]:
    """Return the exact results and the mean square noise of their rows. Both add up over parts of a problem."""
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
    """Return the results of the float64 reference. `gen` moves the operands of its products."""

    def run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        starts_BS = None if inputs.segment_ids is None else document_starts(inputs.segment_ids)
        angle_BHSA = cumulated_angles(inputs, starts_BS)
        turned = {}
        for name, bias in (("q", inputs.q_bias), ("k", inputs.k_bias)):
            operand_BHSRN = rotated(getattr(inputs, name), _rounded(bias, gen), angle_BHSA)
            turned[name] = _rounded(operand_BHSRN, gen).permute(0, 2, 3, 1, 4)
        x_BHSRP = _rounded(psiv(inputs.v, inputs.psi), gen)
        out, state = chunk_parallel(_unturned(inputs, **turned), x_BHSRP, chunk_size=CHUNK)
        if inputs.angles_cumulated:
            return out, handed_on(state, None)
        return out, handed_on(_rounded(state, gen, HALF_A_TABLE_PLACE), angle_BHSA[:, :, -1])

    return outputs(run, wide, grad_out, grad_state)


def _unturned(inputs: ScanInputs, q: Tensor, k: Tensor) -> ScanInputs:
    """Return inputs whose q and k [B,S,R,H,N] need no bias and no rotation."""
    batch, length, _, heads, _ = q.shape
    zero = torch.zeros_like(inputs.q_bias)
    angles = inputs.angles.new_zeros(batch, length, heads, inputs.angles.shape[-1])
    return replace(inputs, q=q, k=k, q_bias=zero, k_bias=zero, angles=angles, angles_cumulated=True)


def _rounded(operand: Tensor, gen: torch.Generator | None, place: float = HALF_A_PLACE) -> Tensor:
    """Return an operand as bfloat16 might store it, with its gradient moved alike; unchanged without `gen`."""
    if gen is None:
        return operand
    moved: Tensor = _Moved.apply(operand, gen, place)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operand: Tensor, gen: torch.Generator, place: float) -> Tensor:
        ctx.gen, ctx.place = gen, place
        return _moved(operand, gen, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _moved(grad, ctx.gen, ctx.place), None, None


def _moved(t: Tensor, gen: torch.Generator, place: float = HALF_A_PLACE) -> Tensor:
    part = 2 * torch.rand(t.shape, generator=gen, device=t.device, dtype=t.dtype) - 1
    return t * (1 + place * part)


def _rows(name: str, t: Tensor) -> Tensor:
    """Return the sums of squares of the rows, [..., heads]."""
    kept = tuple(axis % t.dim() for axis in ROWS[name])
    rest = tuple(axis for axis in range(t.dim()) if axis not in kept)
    squares = t.double().square().permute(*kept, *rest)
    return squares.flatten(len(kept)).sum(-1) if rest else squares


def _share(name: str, got: Tensor, exact: Tensor, noise: Tensor, carried: Tensor | None) -> Share:
    error = _rows(name, got.double() - exact)
    whole = _ratio(error.sum(), noise.sum())
    if carried is not None:
        return Share(whole, float(_ratios(error, noise + carried).max()), SUM_LIMIT)
    typical = noise.flatten(0, -2).mean(0) if noise.dim() > 1 else noise
    return Share(whole, float(_ratios(error, noise + typical).max()))


def _ratios(error: Tensor, allowed: Tensor) -> Tensor:
    """Return sqrt(error / allowed): 0 without an error, infinite for an error if none is allowed."""
    return torch.where(error == 0, 0.0, error / allowed).sqrt()


def _ratio(error: Tensor, allowed: Tensor) -> float:
    return float(_ratios(error, allowed))
