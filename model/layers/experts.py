"""Mixture of experts without dropped tokens: a token goes to the K experts with the highest scores, and a shared one.

An expert is a map up, the square of the positive part, and a map down (So et al., 2021, "Primer"). Scores are sigmoids
in float32; the outputs of the chosen experts are weighted by their scores, which are divided by their sum. Rows are
sorted by expert, so an expert multiplies its rows in one product, however many they are (`expert_products`):

    grouped   torch's product of groups of rows (torch.nn.functional.grouped_mm), without a wait for the device
    loop      one product for each expert; the host waits for the numbers of rows

Load is balanced in one of two ways (`balancing`), or not at all:

    bias       a bias of each expert takes part in the choice and not in the weights. After each step of the optimiser
               it rises for experts with fewer rows than the mean, and falls for others (Wang et al., 2024,
               "Auxiliary-loss-free load balancing strategy for mixture-of-experts")
    aux_loss   X * Sum of f p is added to the loss by its gradient alone, so reported losses stay comparable: f is an
               expert's share of the rows, p its mean share of the scores (Fedus et al., 2021, "Switch transformers")

With `routing` balanced the scores choose nothing: token t goes to the experts t K to t K + K - 1, modulo their number.
That is no model, but the speed of one whose load is even.

Legend: B batch, S sequence, T = B S tokens, D d_model, X experts, K experts of a token, N = T K rows, F expert width.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ablate.kernels import facts
from ablate.model.config import HybridConfig
from ablate.model.facts import ModelFact
from ablate.model.layers.linear import projections

Products = Callable[[Tensor, Tensor], Tensor]
"""(rows [N,D] by expert, ends of the experts' rows [X]) -> [N,D]."""


class LoadGroup(Protocol):
    """The processes that compute other tokens of a step (`ablate.model.parallel.ranks.Group`)."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up `tensor` over the processes in place and return it."""


class ExpertMaps(nn.Module):
    """The maps of this process's experts, expert by expert in one matrix, and of the shared expert."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.compute_dtype, self.num_experts = compute_dtype, config.experts.num_experts
        width, shared, projection = (
            config.experts.width,
            config.experts.shared_width,
            projections(config, compute_dtype),
        )
        self.up_proj = projection(config.d_model, self.num_experts * width)
        self.out_proj = projection(width, self.num_experts * config.d_model)
        self.shared_up_proj = projection(config.d_model, shared) if shared else None
        self.shared_out_proj = projection(shared, config.d_model) if shared else None
        self.product = _PRODUCTS[config.experts.products]
        self.exchange: Callable[[Products, Tensor, Tensor], Tensor] | None = None
        """Calls `Products` of the processes that share the experts (model/parallel/experts.py); None: all are here."""

    @property
    def num_elements(self) -> int:
        """Elements of the matrices of this process's experts."""
        return self.up_proj.weight.numel() + self.out_proj.weight.numel()

    def forward(self, x_TD: Tensor, weights_TK: Tensor, order_N: Tensor, ends_X: Tensor) -> Tensor:
        """Return the weighted outputs [T,D] of the chosen experts, and of the shared one.

        `order_N` sorts the rows by expert. `ends_X` says where the rows of an expert end.
        """
        back_N = inverse(order_N)
        rows_ND: Tensor = _Sorted.apply(x_TD, order_N, back_N)  # type: ignore[no-untyped-call]
        if self.exchange is None:
            rows_ND = self.products(rows_ND, ends_X)
        else:
            rows_ND = self.exchange(self.products, rows_ND, ends_X)
        rows_ND = permuted(rows_ND, back_N, order_N)
        rows_TKD = rows_ND.view(*weights_TK.shape, -1)
        # Not a product of T small matrices, whose kernels took 27 of 242 ms of a step of nam56r-quarter on an H200.
        out_TD = (weights_TK.unsqueeze(2) * rows_TKD).sum(1).to(self.compute_dtype)
        if self.shared_up_proj is None or self.shared_out_proj is None:
            return out_TD
        shared_TD: Tensor = self.shared_out_proj(functional.relu(self.shared_up_proj(x_TD)).square())
        return out_TD + shared_TD

    def products(self, rows_ND: Tensor, ends_X: Tensor) -> Tensor:
        """Return the outputs [N,D] of this process's experts for rows that are sorted by expert."""
        up_XFD, down_XDF = (
            linear.weight.to(self.compute_dtype).view(self.num_experts, -1, linear.weight.shape[1])
            for linear in (self.up_proj, self.out_proj)
        )
        hidden_NF = functional.relu(self.product(rows_ND, up_XFD, ends_X)).square()
        out_ND: Tensor = self.product(hidden_NF, down_XDF, ends_X)
        return out_ND


class Experts(nn.Module):
    """Router and experts."""

    bias: Tensor
    """[X] float32, added to the scores for the choice."""
    counts: Tensor
    """[X] int64, rows of each expert in the last pass with gradients."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config.experts, compute_dtype
        num_experts = self.config.num_experts
        self.router = nn.Parameter(torch.empty(num_experts, config.d_model, dtype=torch.float32))
        self.maps = ExpertMaps(config, compute_dtype=compute_dtype)
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64))
        self.rows: LoadGroup | None = None
        """Present if other processes compute the rest of a step's tokens (model/training/ranked_step.py)."""
        self.num_rows = 0
        """N of the last pass with gradients, in this process."""

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return [B,S,D]. Tokens are independent, so `segment_ids_BS` is unused."""
        del segment_ids_BS
        x_TD = x_BSD.flatten(0, 1)
        scores_TX = functional.linear(x_TD.float(), self.router.float()).sigmoid()
        chosen_TK = self._chosen(scores_TX.detach())
        weights_TK = scores_TX.gather(1, chosen_TK)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        experts_N, order_N = chosen_TK.flatten().sort(stable=True)
        ends_X = torch.searchsorted(experts_N, torch.arange(self.config.num_experts, device=x_TD.device), right=True)
        out_TD: Tensor = self.maps(x_TD.to(self.compute_dtype), weights_TK, order_N, ends_X)
        if torch.is_grad_enabled():
            out_TD = self._counted(out_TD, scores_TX, ends_X)
        return out_TD.view(x_BSD.shape)

    def _chosen(self, scores_TX: Tensor) -> Tensor:
        """Return the experts [T,K] of every token, all different."""
        _record(ModelFact.ROUTING, self.config.routing)
        tokens, top_k = len(scores_TX), self.config.top_k
        if self.config.routing == "balanced":
            slots_N = torch.arange(tokens * top_k, device=scores_TX.device)
            return (slots_N % self.config.num_experts).view(tokens, top_k)
        return (scores_TX + self.bias).topk(top_k, dim=1).indices

    def _counted(self, out_TD: Tensor, scores_TX: Tensor, ends_X: Tensor) -> Tensor:
        """Remember the load; return the output, with the gradient of the auxiliary loss if there is one."""
        counts_X = ends_X.diff(prepend=ends_X.new_zeros(1))
        self.counts.copy_(counts_X)
        self.num_rows = len(out_TD) * self.config.top_k
        if self.config.balancing != "aux_loss":
            return out_TD
        _record(ModelFact.BALANCING, "aux_loss")
        counts_X = counts_X if self.rows is None else _summed(self.rows, counts_X)
        share_X = (scores_TX / scores_TX.sum(1, keepdim=True)).mean(0)
        loss = self.config.num_experts * (share_X * counts_X / counts_X.sum()).sum()
        out: Tensor = _WithLoss.apply(out_TD, loss * self.config.balance_rate)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def end_step(self, *_of_optimizer: Any) -> None:
        """Add up the load of all processes, and move the bias by it. A hook of the optimiser's step."""
        if self.rows is not None:
            self.rows.sum(self.counts)
        if self.config.balancing == "bias":
            load_X = self.counts.to(self.bias.dtype)
            self.bias += self.config.balance_rate * (load_X.mean() - load_X).sign()
        if self.config.balancing != "aux_loss":
            facts.record(ModelFact.BALANCING, self.config.balancing)


def experts_of(model: nn.Module) -> list[Experts]:
    """Return the mixtures of experts of a model."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def load_facts(model: nn.Module, processes: int) -> Iterator[tuple[ModelFact, float]]:
    """Yield the load of the last step: its worst layer, and the dropped rows of all layers; nothing without experts."""
    layers = experts_of(model)
    if not layers:
        return
    shares = [layer.counts.double() / layer.counts.sum() for layer in layers]
    entropies = [-float(share.xlogy(share).sum()) / math.log(max(2, len(share))) for share in shares]
    yield ModelFact.EXPERT_LOAD, max(float(share.max()) * len(share) for share in shares)
    yield ModelFact.EXPERT_ENTROPY, min(entropies)
    yield ModelFact.EXPERT_DROPPED, sum(layer.num_rows * processes - int(layer.counts.sum()) for layer in layers)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _record(name: ModelFact, value: str) -> None:
    facts.record(name, value)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(rows: LoadGroup, counts_X: Tensor) -> Tensor:
    return rows.sum(counts_X.clone())


def _grouped(rows_NI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    _record(ModelFact.EXPERT_PRODUCTS, "grouped")
    if len(rows_NI) == 0:  # torch's backward pass of it takes no empty operand
        return functional.linear(rows_NI, weight_XOI[0])
    return functional.grouped_mm(rows_NI, weight_XOI.transpose(1, 2), offs=ends_X.int())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loop(rows_NI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    _record(ModelFact.EXPERT_PRODUCTS, "loop")
    sizes = ends_X.diff(prepend=ends_X.new_zeros(1)).tolist()
    parts = zip(torch.split(rows_NI, sizes), weight_XOI, strict=True)
    return torch.cat([functional.linear(rows, weight) for rows, weight in parts])


_PRODUCTS = {"grouped": _grouped, "loop": _loop}
"""(rows [N,I] by expert, weights [X,O,I], ends of the experts' rows [X]) -> [N,O]."""


class _Sorted(torch.autograd.Function):
    """Rows [N,D] by expert, K for each token. The gradient of a token is summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        ctx.tokens = len(x_TD)
        return x_TD[order_N // (len(order_N) // len(x_TD))]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        return gradients[0][back_N].view(ctx.tokens, -1, gradients[0].shape[1]).sum(1), None, None


def inverse(order_N: Tensor) -> Tensor:
    """Return the permutation that undoes `order_N`."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


def permuted(rows_ND: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Return the rows in another order, which `back_N` undoes."""
    result: Tensor = _Permuted.apply(rows_ND, order_N, back_N)  # type: ignore[no-untyped-call]
    return result


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        return rows_ND[order_N]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        return gradients[0][back_N], None, None


class _WithLoss(torch.autograd.Function):
    """The output, with the gradient of a loss that is added to the model's."""

    @staticmethod
    def forward(ctx: Any, out_TD: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return out_TD.view_as(out_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return gradients[0], one
