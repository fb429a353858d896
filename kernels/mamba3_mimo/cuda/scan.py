"""The chunk-parallel scan on one GPU: the order of the kernels, their buffers, and the autograd node around them.

Between the passes only the inputs, the prefix tables and the states entering the super-chunks are kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.mamba3_mimo.cuda.compiled import kernel
from kernels.mamba3_mimo.cuda.prefix import TAU
from kernels.mamba3_mimo.cuda.reductions import HEAD_BLOCK
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.variant import Variant, refusal
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from kernels.mamba3_mimo.operands import document_starts

TIME_FIRST = ("q", "k", "v", "z", "angles")
TIME_LAST = ("adt", "dt", "trap")


class Prefix(NamedTuple):
    """Outputs of the prefix kernels; see prefix.py."""

    cs: Tensor
    lc: Tensor
    sk: Tensor
    gm: Tensor
    wk: Tensor
    wq: Tensor
    carry: Tensor
    reset: Tensor


class Scan:
    """One scan's shape, variant and prepared tensors."""

    def __init__(self, inputs: ScanInputs, variant: Variant) -> None:
        B, tokens, R, G, N = inputs.q.shape
        H, P = inputs.v.shape[2:]
        C = variant.chunk_size
        padded = -(-tokens // C) * C
        self.tokens, self.variant, self.cumulated = tokens, variant, inputs.angles_cumulated
        self.shape = ScanShape(
            B=B, S=padded, H=H, G=G, N=N, P=P, R=R, A=inputs.angles.shape[-1], C=C, L=variant.superchunk
        )
        reason = refusal(variant, self.shape)
        if reason is not None:
            raise ValueError(reason)
        self.t = {name: self._prepared(name, getattr(inputs, name)) for name in DIFFERENTIABLE}
        reset = torch.zeros(B, padded, dtype=torch.int32, device=inputs.v.device)
        if inputs.segment_ids is not None:
            reset[:, :tokens] = document_starts(inputs.segment_ids)
        self.reset, self.documents = reset, inputs.segment_ids is not None

    def _prepared(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor as the kernels read it: dtype, padding, contiguous."""
        wide = torch.bfloat16 if name in ("q", "k", "v", "z", "q_bias", "k_bias") else torch.float32
        missing = self.shape.S - self.tokens
        tensor = tensor.detach().to(wide)
        if missing and name in TIME_FIRST:
            tensor = functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
        if missing and name in TIME_LAST:
            tensor = functional.pad(tensor, (0, missing))
        return tensor.contiguous()

    def run(self, name: str, *tensors: Tensor) -> None:
        """Launch one kernel."""
        kernel(name, self.shape, self.variant, self.tokens)(*tensors)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor on the scan's device."""
        return torch.empty(size, dtype=dtype, device=self.reset.device)

    def prefix(self) -> Prefix:
        """Run the prefix kernels."""
        s, t = self.shape, self.t
        cs = self.empty(s.B, s.H, s.chunks, s.A // 4, s.C, 8, dtype=torch.float16)
        if self.cumulated:
            theta = torch.remainder(t["angles"].transpose(1, 2), TAU).view(s.B, s.H, s.chunks, s.C, s.A // 8, 8)
            table = torch.stack((theta.cos(), theta.sin()), dim=5)
            cs.copy_(table.permute(0, 1, 2, 4, 5, 3, 6).reshape(cs.shape))
        else:
            sums = self.empty(s.B, s.H, s.K, s.A)
            self.run("angle_sums", t["angles"], t["dt"], sums)
            # a product with a triangle of ones: torch.cumsum is not deterministic on a GPU, and float32 may mean tf32
            earlier = torch.ones(s.K, s.K, dtype=torch.float64, device=sums.device).tril(-1)
            before = torch.remainder(earlier @ sums.double(), TAU).float()
            self.run("tables", t["angles"], t["dt"], before, cs)
        lc, sk, gm, wk, wq = (self.empty(s.B, s.H, s.S) for _ in range(5))
        carry = self.empty(s.B, s.H, s.K)
        self.run("decays", t["adt"], t["dt"], t["trap"], self.reset, lc, sk, gm, wk, wq, carry)
        return Prefix(cs, lc, sk, gm, wk, wq, carry, self.reset)

    def forward(self) -> tuple[Tensor, Tensor, Prefix, Tensor, Tensor]:
        """Return (o, final state, prefix, states entering the super-chunks, states entering the chunks if saved)."""
        s, t, pre = self.shape, self.t, self.prefix()
        start = self.empty(s.B, s.H, s.K, s.N, s.P)
        final = self.empty(s.B, s.H, s.N, s.P)
        self.run("local_states", t["k"], t["v"], t["k_bias"], t["psi"], pre.cs, pre.wk, start)
        flat = (s.B * s.H, s.K, s.N * s.P)
        self.run("pass_states", start.view(flat), pre.carry.view(flat[:2]), final.view(flat[0], flat[2]))
        out = self.empty(s.B, s.S, s.H, s.P, dtype=torch.bfloat16)
        saved = s.chunks if self.variant.save_states else 1
        states = self.empty(s.B, s.H, saved, s.N, s.P, dtype=torch.bfloat16)
        weights = (t[name] for name in ("q_bias", "k_bias", "psi", "zeta", "phi", "D"))
        self.run(
            "outputs",
            t["q"],
            t["k"],
            t["v"],
            t["z"],
            *weights,
            pre.cs,
            pre.lc,
            pre.sk,
            pre.gm,
            start,
            out,
            states,
        )
        return out[:, : self.tokens], self._restarted(final, pre.cs), pre, start, states

    def _restarted(self, final: Tensor, cs: Tensor) -> Tensor:
        """Return the final state with its angles counted from the start of the last document."""
        if not self.documents or self.cumulated:
            return final
        A, half = self.shape.A, self.shape.N // 2
        at = torch.arange(self.shape.S, device=final.device)
        first = (self.reset * at).amax(1)
        before, rows = (first - 1).clamp_min(0), torch.arange(self.shape.B, device=final.device)
        turned = cs[rows, :, before // self.shape.C, :, before % self.shape.C].float()
        turned = turned.view(*turned.shape[:2], A // 8, 2, 8)
        cos, sin = (turned[:, :, :, which].flatten(2).unsqueeze(-1) for which in (0, 1))
        lo, hi = final[:, :, :A], final[:, :, half : half + A]
        back = torch.cat((lo * cos + hi * sin, final[:, :, A:half], hi * cos - lo * sin, final[:, :, half + A :]), 2)
        return torch.where((first > 0).view(-1, 1, 1, 1), back, final)

    def backward(self, grad_out: Tensor, pre: Prefix, start: Tensor, states: Tensor) -> dict[str, Tensor]:
        """Return the gradients of all tensors in `DIFFERENTIABLE`, in the kernels' dtypes."""
        s, t = self.shape, self.t
        do = self._prepared("v", grad_out)
        leaving = self.empty(s.B, s.H, s.K, s.N, s.P)
        flat = (s.B * s.H, s.K, s.N * s.P)
        self.run("local_gradients", t["q"], t["z"], do, t["q_bias"], t["zeta"], t["phi"], pre.cs, pre.wq, leaving)
        discarded = self.empty(flat[0], flat[2])
        self.run("pass_gradients", leaving.view(flat), pre.carry.view(flat[:2]), discarded)
        if not self.variant.save_states:
            states = self.empty(s.B, s.H, s.chunks, s.N, s.P, dtype=torch.bfloat16)
            self.run("chunk_states", t["k"], t["v"], t["k_bias"], t["psi"], pre.cs, pre.lc, pre.sk, start, states)
        per_head = [self.empty(s.B, s.S, s.R, s.H, s.N, dtype=torch.bfloat16) for _ in range(2)]
        dv, dz = (torch.empty_like(t["v"]) for _ in range(2))
        dtheta = self.empty(s.B, s.H, s.S, s.A)
        rows = [self.empty(s.B, s.H, s.S) for _ in range(4)]
        partial = [self.empty(s.B, s.K, s.H, s.R, s.C // 8, s.P) for _ in range(3)]
        p_d, decay_edge, angle_edge = (
            self.empty(s.B, s.K, s.H),
            self.empty(s.B, s.H, s.K),
            self.empty(s.B, s.H, s.K, s.A),
        )
        self.run("edges", leaving, start, decay_edge, angle_edge)
        weights = (t[name] for name in ("q_bias", "k_bias", "psi", "zeta", "phi", "D"))
        self.run(
            "gradients", t["q"], t["k"], t["v"], t["z"], do, *weights, pre.cs, pre.lc, pre.sk, pre.gm, states, leaving,
            *per_head, dv, dz, dtheta, *rows, *(p.flatten(3, 4) for p in partial), p_d,
        )  # fmt: skip
        grads = {"v": dv, "z": dz, "D": p_d.sum((0, 1))}
        grads |= {name: p.sum((0, 1)).sum(2) for name, p in zip(("psi", "zeta", "phi"), partial, strict=True)}
        grads["zeta"] *= t["phi"]
        for name in ("q", "k"):
            grads[name] = torch.empty_like(t[name])
            bias = self.empty(s.B, -(-s.S // HEAD_BLOCK), s.H, s.R, s.N)
            self.run("reduce_heads", per_head.pop(0), grads[name], bias)
            grads[f"{name}_bias"] = bias.sum((0, 1))
        grads |= self._scalar_gradients(pre, (*rows, decay_edge), dtheta, angle_edge)
        return {name: self._trimmed(name, grad) for name, grad in grads.items()}

    def _scalar_gradients(
        self, pre: Prefix, rows: tuple[Tensor, ...], dtheta: Tensor, angle_edge: Tensor
    ) -> dict[str, Tensor]:
        t = self.t
        dadt, ddt, dtrap = (torch.zeros_like(t["dt"]) for _ in range(3))
        self.run("scalar_gradients", t["dt"], t["trap"], self.reset, pre.sk, *rows, dadt, ddt, dtrap)
        if self.cumulated:
            return {"adt": dadt, "dt": ddt, "trap": dtrap, "angles": dtheta.transpose(1, 2)}
        dangles = torch.empty_like(t["angles"])
        self.run("angle_gradients", t["angles"], t["dt"], dtheta, angle_edge, dangles, ddt)
        return {"adt": dadt, "dt": ddt, "trap": dtrap, "angles": dangles}

    def _trimmed(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient without the padding."""
        if name in TIME_FIRST:
            return grad[:, : self.tokens]
        return grad[..., : self.tokens] if name in TIME_LAST else grad


def chunk_parallel_cuda(inputs: ScanInputs, variant: Variant | None = None) -> tuple[Tensor, Tensor]:
    """Return (o [B,S,H,P] bf16, final state [B,H,N,P] fp32, without gradient). Raises ValueError with the reason."""
    out, state = _CudaScan.apply(inputs, variant or Variant(), *inputs.tensors())  # type: ignore[no-untyped-call]
    return out, state


class _CudaScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: ScanInputs, variant: Variant, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        scan = Scan(inputs.with_tensors(tensors), variant)
        out, final, pre, start, states = scan.forward()
        ctx.scan = scan
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.save_for_backward(*pre, start, states)
        ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        *pre, start, states = ctx.saved_tensors
        grads = ctx.scan.backward(grad_out, Prefix(*pre), start, states)
        return None, None, *(grads[name].to(dtype) for name, dtype in zip(DIFFERENTIABLE, ctx.dtypes, strict=True))
