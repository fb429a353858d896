"""The scan on one GPU: order and buffers of the kernels, forward and backward.

The forward pass saves the inputs, the prefix tables and the states of the chunks. With `remat` it saves the states of
the super-chunks instead, and the backward pass recomputes the others, one range of walks at a time. No code here
depends on a tensor's content or waits for the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from ablate.kernels.documents import document_starts
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.host import wide_heads
from ablate.kernels.mamba3_mimo.cuda.host.compiled import Launches, launches
from ablate.kernels.mamba3_mimo.cuda.host.final_state import RowEnd, add_row_end, edge
from ablate.kernels.mamba3_mimo.cuda.host.refusals import refusal
from ablate.kernels.mamba3_mimo.cuda.host.sizes import (
    ScanPlan,
    Sizes,
    WalkRange,
    all_walks,
    plan_of,
    sizes_of,
    walk_ranges,
)
from ablate.kernels.mamba3_mimo.cuda.pieces.scalar import TAU
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from ablate.kernels.mamba3_mimo.cuda.shape import ALIGNMENT, Variant
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import state_turned_back

TIME_FIRST = ("q", "k", "v", "z", "angles")
TIME_LAST = ("adt", "dt", "trap")
WALKED = ("q", "k", "v", "z")
"""Tensors that only the kernels of walks read, to which every super-chunk is a row."""
NARROW = ("q", "k", "v", "z", "q_bias", "k_bias")
"""Tensors that the kernels read as bfloat16. The others are float32."""

Tensors = dict[str, Tensor]


class Scan:
    """One scan's shape, variant and prepared tensors. `saved` names the tensors from `forward` to `backward`."""

    def __init__(self, inputs: ScanInputs, variant: Variant) -> None:
        plan = self.plan_of(sizes_of(inputs), variant)
        variant, self.halved, self.saved = plan.variant, plan.halved, plan.saved
        if plan.halved:
            inputs = wide_heads.split(inputs)
            plan = self.plan_of(sizes_of(inputs), variant)
        self.shape, self.sizes = plan.shape, plan.tensors
        self.check(variant)
        self.tokens, self.variant, self.angles = inputs.q.shape[1], variant, inputs.angles.shape[-1]
        self.names, self.parallel = inputs.names, variant.schedule == "chunk_parallel"
        raw = [getattr(inputs, name) for name in self.names]
        if torch.is_grad_enabled():  # not inside a pass of autograd
            raw = [tensor.detach() for tensor in raw]
        self.t = {name: self._prepared(name, tensor) for name, tensor in zip(self.names, raw, strict=True)}
        self.segment_ids, self.device = inputs.segment_ids, inputs.v.device
        if inputs.D is None:
            self.t["D"] = torch.zeros(self.shape.H, device=self.device)

    def plan_of(self, sizes: Sizes, variant: Variant) -> ScanPlan:
        """Return how to run a scan of these sizes."""
        return plan_of(sizes, variant)

    def check(self, variant: Variant) -> None:
        """Raise KernelUnsupported with the reason if no kernel runs `variant` on this shape."""
        reason = refusal(variant, self.shape)
        if reason is not None:
            note = f"; heads of width {2 * self.shape.P} run as two of {self.shape.P}" if self.halved else ""
            raise KernelUnsupported(reason + note)

    def _prepared(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor in the kernels' dtype, padded and contiguous."""
        s = self.shape
        missing = s.S - self.tokens
        if name == "angles" and self.angles < s.A:
            tensor = functional.pad(tensor, (0, s.A - self.angles))
        if missing and name in TIME_FIRST:
            tensor = functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
        if missing and name in TIME_LAST:
            tensor = functional.pad(tensor, (0, missing))
        ready = self.aligned(laid_out(tensor, torch.bfloat16 if name in NARROW else torch.float32))
        return ready.view(s.walks, s.L, *tensor.shape[2:]) if name in WALKED and s.L < s.S else ready

    def aligned(self, tensor: Tensor) -> Tensor:
        """Return the tensor at an address for bulk copies and wide loads, a multiple of 16 bytes."""
        return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()

    @cached_property
    def launches(self) -> Launches:
        """Functions that launch the kernels."""
        return launches(self.shape, self.variant)

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch one kernel: the tensors of its program, then its numbers."""
        self.launches[name](*arguments)

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor on the scan's device."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def new(self, name: str, walks: WalkRange | None = None) -> Tensor:
        """Return an uninitialised tensor of the table in tensors.py, for all walks or for a range of them."""
        sizes = self.sizes
        if walks is not None and walks.walks < walks.all:
            sizes = tensors(replace(self.shape, B=walks.walks, S=self.shape.L))
        size, dtype = sizes[name]
        return self.empty(*size, dtype=getattr(torch, dtype))

    def _present(self, *names: str) -> tuple[Tensor, ...]:
        """Return the present input tensors among `names`."""
        return tuple(self.t[name] for name in names if name in self.t)

    def prefix(self) -> Tensors:
        """Run the prefix kernels and return their outputs, see prefix.py."""
        s, t = self.shape, self.t
        pre = {"reset": torch.zeros(s.B, s.S, dtype=torch.int32, device=self.device)}
        if self.segment_ids is not None:
            pre["reset"][:, : self.tokens] = document_starts(self.segment_ids)
        pre["cs"] = self.new("cs")
        if s.cumulated:
            angles = t["angles"].view(s.walks, s.L, s.H, s.A).transpose(1, 2)
            theta = torch.remainder(angles, TAU).view(s.walks, s.H, s.chunks, s.C, s.A // 8, 8)
            table = torch.stack((theta.cos(), theta.sin()), dim=5)
            pre["cs"].copy_(table.permute(0, 1, 2, 4, 5, 3, 6).reshape(pre["cs"].shape))
        else:
            sums = self.new("sums")
            self.run("angle_sums", t["angles"], t["dt"], sums)
            self.run("tables", t["angles"], t["dt"], sums, pre["cs"])
        names = ("lc", "sk", "gm", "wk", "wq", "carry") if self.parallel else ("lc", "sk", "gm")
        scalars = {name: self.new(name) for name in names}
        self.run("decays", t["adt"], t["dt"], t["trap"], pre["reset"], *scalars.values(), self.tokens)
        return pre | scalars

    def forward(self, *, return_final_state: bool = False) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return (o, final state fp32 [B,H,N,P] or None, the tensors of `saved`)."""
        s, t, pre = self.shape, self.t, self.prefix()
        if self.parallel:
            pre["start"] = self.new("local")
            operands = t["k"], t["v"], t["k_bias"], t["psi"], pre["cs"], pre["wk"]
            self._sum("local_states", *operands, pre["start"], every=return_final_state)
            final = self._pass("pass_states", pre["start"], pre["carry"], t.get("entering"))
        else:
            pre["start"], final = self._state_or_unread(t.get("entering")), self.new("final")
        if self.variant.psiv_cache:
            pre["psiv"] = self.new("psiv")
        (walks,) = all_walks(s)
        out, pre["states"] = self._outputs(pre, final, walks)
        out = self._rows(out)[:, : self.tokens]
        if self.halved:
            out = wide_heads.joined_width(out)
        saved = tuple(pre[name] for name in self.saved)
        return out, self._handed_on(final, pre) if return_final_state else None, saved

    def _outputs(self, pre: Tensors, final: Tensor, walks: WalkRange) -> tuple[Tensor, Tensor]:
        """Return (o, states that enter the chunks) of a range of walks. Fills PsiV and `final` if the scan has them."""
        out, states = self.new("o", walks), self.new("states", walks)
        self.run(
            "outputs",
            *walks.of(self._present("q", "k", "v", "z")),
            *self._present("q_bias", "k_bias", "psi", "zeta", "phi", "D"),
            *walks.of(pre[name] for name in ("cs", "lc", "sk", "gm", "start")),
            out,
            states,
            *walks.of(pre[name] for name in ("psiv",) if name in pre),
            *(() if self.parallel else walks.of((final,))),
            int(self.parallel or "entering" in self.t),
        )
        return out, states

    def _state_or_unread(self, state: Tensor | None) -> Tensor:
        """Return a state at the edge of the sequential schedule's rows, fp32 [B,H,N,P]; None gives unread memory."""
        return self.new("final") if state is None else state

    def _rows(self, walked: Tensor) -> Tensor:
        """Return a tensor [B*K,L,...] of tokens as [B,S,...]."""
        return walked.view(self.shape.B, self.shape.S, *walked.shape[2:])

    def _sum(self, name: str, *operands: Tensor, every: bool) -> None:
        """Launch F1 or B1. Without `every` it omits the outermost super-chunk, which only the row's end needs."""
        self.run(name, *operands, self.shape.K, self.shape.K if every else self.shape.handed_on)

    def _pass(self, name: str, local: Tensor, carry: Tensor, outside: Tensor | None) -> Tensor:
        """Turn the super-chunks' own states into the states at their edges; return the state behind the last.

        The kernel starts from zero. So a state from `outside` [B,H,N,P] is decayed over the first super-chunk, added
        to that super-chunk's own state, and afterwards written to its edge.
        """
        s = self.shape
        first, behind = s.K - 1 if name == "pass_gradients" else 0, self.empty(s.B, s.H, s.N, s.P)
        local, carry = local.view(s.B, s.K, s.H, -1), carry.view(s.B, s.K, s.H)
        if outside is not None:
            local[:, first] += carry[:, first, :, None] * outside.flatten(2)
        self.run(name, local, carry, behind.view(s.B, s.H, -1))
        if outside is not None:
            local[:, first] = outside.flatten(2)
        return behind

    def _last_turn(self, pre: Tensors) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the last token's angles, fp32 [B,H,A]."""
        s = self.shape
        k, t = s.place(0, self.tokens - 1)
        table = torch.unflatten(pre["cs"], 0, (s.B, s.K))[:, k, :, t // s.C, :, t % s.C]
        table = table.float().view(s.B, s.H, s.A // 8, 2, 8)
        return table[:, :, :, 0].flatten(2), table[:, :, :, 1].flatten(2)

    def _handed_on(self, final: Tensor, pre: Tensors) -> Tensor:
        """Return the final state as ScanState has it, the heads whole."""
        if not self.shape.cumulated:
            final = state_turned_back(final, *self._last_turn(pre))
        return wide_heads.joined_width(final, heads_at=1).contiguous() if self.halved else final

    def backward(self, grad_out: Tensor, saved: Sequence[Tensor], row_end: RowEnd | None = None) -> Tensors:
        """Return the gradients of the present tensors, in the kernels' dtypes.

        `row_end` is the final state and its gradient, None without a gradient.
        """
        pre = dict(zip(self.saved, saved, strict=True))
        do = self._prepared("v", wide_heads.split_width(grad_out) if self.halved else grad_out)
        if row_end is not None and self.halved:
            row_end = RowEnd(*(wide_heads.split_width(t, heads_at=1) for t in row_end))
        walked = self._walk(pre, do, row_end)
        if row_end is not None:
            scalars = {"reset": pre["reset"], "sk": pre["sk"], "adt": self.t["adt"]}
            add_row_end(walked, self.shape, self.tokens, scalars | row_end._asdict())
        grads: Tensors = {name: walked[name] for name in ("q", "k", "v", "z", "entering") if name in walked}
        grads |= self._weight_gradients(walked) | self._head_gradients(walked["heads"])
        grads |= self._time_gradients(pre, walked)
        grads = {name: self._trimmed(name, grads[name]) for name in self.names}
        if self.halved:
            return {name: wide_heads.joined_gradient(name, grad, self.shape.H) for name, grad in grads.items()}
        return grads

    def _behind(self, pre: Tensors, row_end: RowEnd | None) -> Tensor | None:
        """Return the gradient of the state behind the last token, with the kernels' angles; None without one."""
        if row_end is None:
            return None
        gradient = self._prepared("entering", row_end.gradient)
        if self.shape.cumulated:
            return gradient
        cos, sin = self._last_turn(pre)
        return state_turned_back(gradient, cos, -sin)

    def _leaving(self, pre: Tensors, do: Tensor, behind: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the states that leave the super-chunks [B*K,H,N,P], and of the entering state.

        Both are fp32. In the sequential schedule the walk writes the second, and this returns None for it.
        """
        if not self.parallel:
            return self._state_or_unread(behind), None
        leaving = self.new("leaving")
        self._sum(
            "local_gradients", *self._present("q", "z"), do, *self._present("q_bias", "zeta", "phi"),
            pre["cs"], pre["wq"], leaving, every=self.shape.started,
        )  # fmt: skip
        return leaving, self._pass("pass_gradients", leaving, pre["carry"], behind)

    def _walk(self, pre: Tensors, do: Tensor, row_end: RowEnd | None) -> Tensors:
        """Run the walk. Return the gradients of q, k, v, z, and the terms of the other gradients."""
        s = self.shape
        behind = self._behind(pre, row_end)
        leaving, first = self._leaving(pre, do, behind)
        upstream = do, leaving, int(self.parallel or behind is not None)
        walked: Tensors = {name: torch.empty_like(self.t[name]) for name in ("v", "z") if name in self.t}
        walked |= {name: self.new(name) for name in ("dtheta", "row_q", "row_k", "same", "diag")}
        walked["weights"] = self.empty(len(self._weights()), *self.sizes["p_psi"][0])
        walked["edges"] = self.new("edges")
        if s.started and first is None:
            walked["entering"] = self.new("first")
        walked["heads"] = self.new("p_heads")
        sums: Tensors = {name: torch.empty_like(self.t[name]) for name in ("q", "k")}
        for walks in walk_ranges(s) if self.variant.remat else all_walks(s):
            self._walk_range(walks, pre, upstream, walked, sums)
        if s.started:
            walked["entering"] = walked["entering"] if first is None else first
            torch.unflatten(walked["edges"], 0, (s.B, s.K))[:, 0, :, 0] = edge(walked["entering"], self.t["entering"])
        return walked | sums

    def _states_of(self, walks: WalkRange, pre: Tensors) -> Tensor:
        """Return the states that enter the chunks of a range of walks: saved, or recomputed like the forward pass."""
        if not self.variant.remat:
            return pre["states"]
        if not self.parallel:
            pre = pre | {"start": self._state_or_unread(self.t.get("entering"))}
        return self._outputs(pre, torch.empty_like(pre["start"]), walks)[1]

    def _walk_range(
        self, walks: WalkRange, pre: Tensors, upstream: tuple[Tensor, Tensor, int], walked: Tensors, sums: Tensors
    ) -> None:
        """Walk a range: fill its parts of `walked`, in the kernel's order, and of the sums over heads `sums`.

        `upstream` holds the gradient of o, that of the leaving states, and 0 if no state leaves, else 1.
        """
        do, leaving, leaves = upstream
        heads = {"q": self.new("dqh", walks), "k": self.new("dkh", walks)}
        self.run(
            "gradients",
            *walks.of((*self._present("q", "k", "v", "z"), do)),
            *self._present("q_bias", "k_bias", "psi", "zeta", "phi", "D"),
            *walks.of(pre[name] for name in ("cs", "lc", "sk", "gm")),
            self._states_of(walks, pre),
            *walks.of((leaving, *(pre[name] for name in ("psiv",) if name in pre))),
            *heads.values(),
            *(part for name, one in walked.items() for part in walks.of(one if name == "weights" else (one,))),
            self.shape.in_turn,
            leaves,
        )
        for name, grad in sums.items():
            self.run("reduce_heads", heads[name], *walks.of((grad,)))

    def _weight_gradients(self, walked: Tensors) -> Tensors:
        """Return the gradients of psi, zeta and phi."""
        s, partial = self.shape, walked["weights"]
        sums = self.empty(partial.shape[0], s.H * s.R, s.P)
        self.run("sum_weights", partial.view(partial.shape[0], s.walks, -1, s.P), sums)
        return dict(zip(self._weights(), sums.view(-1, s.H, s.R, s.P), strict=True))

    def _head_gradients(self, partial: Tensor) -> Tensors:
        """Return the gradients of the biases of q and k and of D from the walks' sums."""
        s = self.shape
        sums = self.empty(*partial.shape[1:])
        self.run("sum_heads", partial.unsqueeze(0), sums.unsqueeze(0))
        biases = sums[: 2 * s.H * s.R].view(2, s.H, s.R, s.N)
        return {"q_bias": biases[0], "k_bias": biases[1], "D": sums[2 * s.H * s.R :].flatten()[: s.H]}

    def _weights(self) -> tuple[str, ...]:
        """Return the present ones of psi, zeta and phi."""
        return tuple(name for name in ("psi", "zeta", "phi") if name in self.t)

    def _time_gradients(self, pre: Tensors, walked: Tensors) -> Tensors:
        t, cumulated = self.t, self.shape.cumulated
        grads = {name: torch.empty_like(t[name]) for name in ("adt", "dt", "trap")}
        grads["angles"] = torch.empty_like(t["angles"])
        if cumulated:
            grads["angles"] = self._rows(walked["dtheta"].transpose(1, 2).contiguous())
        self.run(
            "time_gradients", t["dt"], t["trap"], pre["reset"], pre["sk"],
            *(walked[name] for name in ("row_q", "row_k", "same", "diag", "edges")),
            *(() if cumulated else (t["angles"], walked["dtheta"])),
            *(grads[name] for name in ("adt", "dt", "trap")),
            *(() if cumulated else (grads["angles"],)),
            self.tokens,
        )  # fmt: skip
        return grads

    def _trimmed(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient without the padding."""
        if name in WALKED:
            grad = self._rows(grad)
        if name == "angles" and self.angles < self.shape.A:
            grad = grad[..., : self.angles]
        if self.tokens == self.shape.S:
            return grad
        if name in TIME_FIRST:
            return grad[:, : self.tokens]
        return grad[..., : self.tokens] if name in TIME_LAST else grad


def laid_out(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor contiguous and in `dtype`. If it already is, no call reaches torch's dispatcher."""
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
