"""Mamba-3 MIMO mixer: one input projection, the scan, one output projection, and no short convolution.

Legend: B batch, S sequence, D d_model, I d_inner = H * P, H value heads, P head width, N state size, G groups,
R MIMO rank, A rotary angles. The mixer expects a normalised input; the residual block provides it.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import ScanInputs, ScanState, mamba3_mimo, peer
from ablate.kernels.mamba3_mimo.small_run import small_run_problem
from ablate.model.config import HybridConfig
from ablate.model.layers.linear import Linear, RMSNorm, projections


class InputProjection(Linear):
    """The mixer's input projection: one weight for all parts."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        sizes = (config.d_model, sum(config.mixer_widths))
        super().__init__(*sizes, compute_dtype=compute_dtype, products=config.projections)
        self.widths = config.mixer_widths

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return z, x, B, C, dd_dt, dd_A, trap and angles, [B,S,width] each.

        The scan reads z and x as tensors of their own, so each has its own product instead of a copy out of a shared
        one. XLA lays tensors out itself, and float8 scales whole rows: these have one product.
        """
        if x_BSD.device.type == "xla" or self.products != "as_dtype":
            return torch.split(super().forward(x_BSD), list(self.widths), dim=-1)
        x_TK, weight_NK = x_BSD.to(self.compute_dtype).flatten(0, -2), self.weight.to(self.compute_dtype)
        large = self.widths[:2]
        products = _Products.apply(x_TK, weight_NK, (*large, sum(self.widths[2:])))  # type: ignore[no-untyped-call]
        z, x, rest = (product.view(*x_BSD.shape[:-1], -1) for product in products)
        return z, x, *torch.split(rest, list(self.widths[2:]), dim=-1)


class _Products(torch.autograd.Function):
    """x @ weight^T in parts. The gradients are those of one product, without a sum over parts."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TK, weight_NK)
        return tuple(functional.linear(x_TK, part_NK) for part_NK in torch.split(weight_NK, list(widths)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_TN = torch.cat(gradients, dim=-1)
        return grad_TN @ weight_NK, grad_TN.t() @ x_TK, None


class StateExchange(Protocol):
    """Passes states on between devices that hold pieces of the same rows."""

    @property
    def has_next(self) -> bool:
        """Whether another device holds a later piece."""

    def state_before(self, values_BSHP: Tensor, state_size: int, segment_ids_BS: Tensor) -> tuple[Tensor, ...] | None:
        """Return state, write [B,H,N,P] and document ids [B] that the piece before leaves; None in the first piece."""

    def hand_on(self, out_BSHP: Tensor, state_BHNP: Tensor, write_BHNP: Tensor) -> Tensor:
        """Send state and write to the next piece; return the output, whose backward pass receives their gradients."""


class Mamba3(nn.Module):
    """Token mixer with a rank-R state space recurrence.

    All parameters except the projections are float32 for every compute dtype.
    """

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self._switches = config.scan
        mamba, heads = config.mamba, config.num_value_heads
        self.num_heads, self.num_groups = heads, mamba.ngroups
        per_state = (heads, mamba.mimo_rank, mamba.d_state)
        per_value = (heads, mamba.mimo_rank, mamba.headdim)
        self.in_proj = InputProjection(config, compute_dtype=compute_dtype)
        self.out_proj = projections(config, compute_dtype)(config.d_inner, config.d_model)
        self.k_norm, self.q_norm = RMSNorm(mamba.d_state), RMSNorm(mamba.d_state)
        self.k_bias, self.q_bias = _parameter(*per_state), _parameter(*per_state)
        self.psi, self.zeta, self.phi = (_parameter(*per_value) for _ in range(3))
        self.dt_bias, self.D = _parameter(heads), _parameter(heads)
        self.exchange: StateExchange | None = None
        """Present if other devices hold the rest of the rows (model/parallel/context.py)."""

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the mixed tokens [B,S,D]. Documents of a row do not affect each other."""
        out_BSHP = self._scan(self._scan_inputs(self.in_proj(x_BSD), segment_ids_BS), segment_ids_BS)
        mixed: Tensor = self.out_proj(out_BSHP.flatten(2))
        return mixed

    def _scan(self, inputs: ScanInputs, segment_ids_BS: Tensor) -> Tensor:
        if self.exchange is None:
            return mamba3_mimo(inputs, self._switches).out
        before = self.exchange.state_before(inputs.v, inputs.state_size, segment_ids_BS)
        initial, has_next = None if before is None else ScanState(*before), self.exchange.has_next
        out, final = mamba3_mimo(inputs, self._switches, initial_state=initial, return_final_state=has_next)
        if final is None:
            return out
        assert final.write is not None  # noqa: S101  # a scan always returns it
        return self.exchange.hand_on(out, final.state, final.write)

    def _scan_inputs(self, parts: tuple[Tensor, ...], segment_ids_BS: Tensor) -> ScanInputs:
        mamba = self.config.mamba
        z, v, b, c, dd_dt, dd_a, trap, angles = parts
        directions = (*z.shape[:2], mamba.mimo_rank, self.num_groups, mamba.d_state)
        values = (*z.shape[:2], self.num_heads, mamba.headdim)
        dt_BSH = functional.softplus(dd_dt.float() + self.dt_bias)
        adt_BSH = decay_rate(dd_a.float(), mamba.a_activation, floor=mamba.a_floor) * dt_BSH
        return ScanInputs(
            q=self.q_norm(c.reshape(directions)).to(v.dtype),
            k=self.k_norm(b.reshape(directions)).to(v.dtype),
            v=v.reshape(values),
            z=z.reshape(values),
            q_bias=self.q_bias,
            k_bias=self.k_bias,
            psi=self.psi,
            zeta=self.zeta,
            phi=self.phi,
            D=self.D,
            adt=adt_BSH.transpose(1, 2),
            dt=dt_BSH.transpose(1, 2),
            trap=trap.transpose(1, 2),
            angles=angles.float().unsqueeze(2),
            segment_ids=segment_ids_BS,
        )


def use_lane(lane: Lane, peer_site: Path | None) -> None:
    """Make the lane's kernels importable. Lane peer needs another TileLang, from the folder `peer_site`.

    Without a folder they must be on the import path. Raises KernelUnsupported if the folder lacks them.
    """
    if lane is Lane.PEER and peer_site is not None:
        peer.use_site(peer_site)


def lane_problem(lane: Lane, device: torch.device) -> str | None:
    """Run a small scan with its gradients; return why `lane` does not work on `device`, or None if it does."""
    return small_run_problem(lane, device)


def decay_rate(dd_a: Tensor, activation: str, *, floor: float) -> Tensor:
    """Return A = -f(dd_a), at most -floor.

    f is softplus, or the heavy tail: 1 + x for x >= 0 and 1 / (1 - x) below, which falls slower than an exponential.
    """
    if activation == "softplus":
        rate = functional.softplus(dd_a)
    else:
        rate = torch.where(dd_a >= 0, 1 + dd_a, 1 / (1 - dd_a.clamp(max=0)))
    return -rate.clamp_min(floor)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))
