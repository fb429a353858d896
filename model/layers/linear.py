"""Linear map, norms and gated MLP with explicit dtypes. The model uses no autocast.

Weights are float32, or have the compute dtype if the optimiser keeps float32 masters
(model/training/compiled_adamw.py). A linear map casts both operands to `compute_dtype` and returns that dtype. Norms
compute in float32. Legend: B batch, S sequence, D d_model, F hidden width.

The projections of the blocks can multiply in float8 on NVIDIA GPUs (`HybridConfig.projections`). Each row of the left
operand and each column of the right one is scaled by its largest absolute value at every call; activations and weights
are e4m3, gradients e5m2 (Micikevicius et al., 2022, "FP8 formats for deep learning"), results bfloat16. Gradients of
weights are always products in bfloat16: their float8 operands would have to be transposed in memory, which takes longer
than the products gain.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ablate.kernels.errors import KernelUnsupported
from ablate.model.back_end_limits import FLOAT8_MULTIPLE
from ablate.model.config import HybridConfig, NormKind, ProjectionKind

NORM_EPS = 1e-5


class Linear(nn.Module):
    """Bias-free linear map of the last axis."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        compute_dtype: torch.dtype,
        products: ProjectionKind = "as_dtype",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))
        self.compute_dtype = compute_dtype
        self.products = products

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight^T in `compute_dtype`. Raises KernelUnsupported where float8 products cannot run."""
        if self.products == "as_dtype":
            return functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype))
        _check_float8(x, self.weight, self.compute_dtype)
        x_TK = x.to(self.compute_dtype).flatten(0, -2)
        y_TN: Tensor = _Float8Linear.apply(x_TK, self.weight, self.products == "fp8")  # type: ignore[no-untyped-call]
        return y_TN.view(*x.shape[:-1], -1)


def _check_float8(x: Tensor, weight_NK: Tensor, compute_dtype: torch.dtype) -> None:
    if not x.is_cuda:
        raise KernelUnsupported(f"projections in float8 run on NVIDIA GPUs; the activations are on {x.device.type}")
    if compute_dtype != torch.bfloat16:
        raise KernelUnsupported("projections in float8 need dtype bfloat16 for everything around them")
    sizes = (*weight_NK.shape, x.numel() // x.shape[-1])
    if any(size % FLOAT8_MULTIPLE for size in sizes):
        text = " x ".join(map(str, sizes))
        raise KernelUnsupported(
            f"projections in float8 take multiples of {FLOAT8_MULTIPLE}; outputs x inputs x tokens are {text}"
        )


def _scaled(x: Tensor, dtype: torch.dtype, axis: int) -> tuple[Tensor, Tensor]:
    """Return `x` in a float8 format and the float32 factors that restore it, one for each line along `axis`."""
    largest = torch.finfo(dtype).max
    factor = (x.abs().amax(axis, keepdim=True).float() / largest).clamp_min(_LEAST_FACTOR)
    return (x.float() / factor).clamp(-largest, largest).to(dtype), factor


_LEAST_FACTOR = 1e-30
"""Factor of zeros. It keeps quotients finite."""


def _product(a_MK: tuple[Tensor, Tensor], b_KN: tuple[Tensor, Tensor]) -> Tensor:
    """Return a @ b in bfloat16 from operands with factors [M,1] and [1,N]; `b` is laid out by columns."""
    (a, a_factor), (b, b_factor) = a_MK, b_KN
    return torch._scaled_mm(a, b, scale_a=a_factor, scale_b=b_factor, out_dtype=torch.bfloat16, use_fast_accum=True)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, backward_too: bool) -> Tensor:
        ctx.backward_too = backward_too
        ctx.save_for_backward(x_TK, weight_NK)
        w8_NK, w_factor_N1 = _scaled(weight_NK, torch.float8_e4m3fn, 1)
        return _product(_scaled(x_TK, torch.float8_e4m3fn, 1), (w8_NK.t(), w_factor_N1.t()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_TN,) = gradients
        x_TK, weight_NK = ctx.saved_tensors
        if ctx.backward_too:
            w8_NK, w_factor_1K = _scaled(weight_NK, torch.float8_e4m3fn, 0)
            by_columns = w8_NK.t().contiguous().t()
            grad_x = _product(_scaled(grad_TN, torch.float8_e5m2, 1), (by_columns, w_factor_1K))
        else:
            grad_x = grad_TN @ weight_NK.to(grad_TN.dtype)
        return grad_x, (grad_TN.t() @ x_TK).to(weight_NK.dtype), None


def projections(config: HybridConfig, compute_dtype: torch.dtype) -> Callable[[int, int], Linear]:
    """Return the constructor of a block's linear maps, from input and output features."""
    return partial(Linear, compute_dtype=compute_dtype, products=config.projections)


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last axis, times a learned weight; float32 inside and out."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x as float32."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, NORM_EPS)

    def of_sum(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + update in the dtype of x, and its norm. torch's compiler joins both."""
        x = x if update is None else x + update
        return x, self(x)


class LayerNorm(RMSNorm):
    """Subtract the mean of the last axis and divide by its standard deviation, times a learned weight, without bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x as float32."""
        return functional.layer_norm(x.float(), self.weight.shape, self.weight, eps=NORM_EPS)


class QuackRMSNorm(RMSNorm):
    """The same by QuACK (package quack-kernels), which has one kernel for sum and norm in either pass."""

    def __init__(self, features: int, *, compute_dtype: torch.dtype) -> None:
        super().__init__(features)
        self.compute_dtype = compute_dtype

    def of_sum(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + update in the dtype of x, and its norm in the compute dtype.

        Raises KernelUnsupported where the kernel cannot run.
        """
        kernel, options = _quack_rmsnorm(x), {"out_dtype": self.compute_dtype, "eps": NORM_EPS}
        if update is None:
            return x, kernel(x, self.weight, **options)
        normed, added = kernel(update, self.weight, residual=x, residual_dtype=x.dtype, prenorm=True, **options)
        return added, normed


def _quack_rmsnorm(x: Tensor) -> Callable[..., Any]:
    if not x.is_cuda:
        raise KernelUnsupported(f"norms by quack run on NVIDIA GPUs; the residual stream is on {x.device.type}")
    try:
        from quack.rmsnorm import rmsnorm
    except ImportError as error:
        raise KernelUnsupported(f"norms by quack need the package quack-kernels: {error}") from error
    kernel: Callable[..., Any] = rmsnorm
    return kernel


NORMS: dict[NormKind, type[RMSNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""Norms of the residual stream by name."""


def residual_norm(config: HybridConfig, compute_dtype: torch.dtype) -> RMSNorm:
    """Return a norm of the residual stream with the kernels of `config`."""
    if config.norm_kernels == "quack":
        return QuackRMSNorm(config.d_model, compute_dtype=compute_dtype)
    return NORMS[config.norm](config.d_model)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with gate and up in one matmul."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        projection = projections(config, compute_dtype)
        self.up_proj = projection(config.d_model, 2 * config.mlp_width)
        self.out_proj = projection(config.mlp_width, config.d_model)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return [B,S,D]. Tokens are independent, so `segment_ids_BS` is unused."""
        del segment_ids_BS
        gate_BSF, up_BSF = self.up_proj(x_BSD).chunk(2, dim=-1)
        mixed: Tensor = self.out_proj(functional.silu(gate_BSF) * up_BSF)
        return mixed
