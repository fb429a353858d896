"""Expert parallel: each rank of `Ranks.expert` keeps some experts of every layer, and rows travel to their experts.

The ranks of a group have different tokens. Each routes its own ones over all experts and sends a row to the rank of its
expert, which sends the result back; gradients travel the same ways in reverse. So no rank gathers an expert, and no row
is dropped, however uneven the load is: the ranks first exchange the numbers of rows, for which the host waits.

Rank e of P keeps the experts e X / P to (e + 1) X / P - 1 of a whole model, so a divided start equals an undivided one.
Router, shared expert and everything else lie as without it (`data.py`). A rank's gradient of its experts is that of
all tokens of its group. Ranks with the same experts (`Ranks.expert_copies`) add theirs up after the backward pass.

All ranks of a group have to run the same passes, and wait for each other in each of these layers; so do ranks with
pieces of the same rows (`context.py`). Tensor ranks keep columns of their experts, and each exchanges rows with the
ranks that keep the same columns.

Legend: N rows of this rank's tokens, M rows for this rank's experts, D d_model, X experts, P ranks, Y = X / P.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ablate.model.hybrid import Hybrid
from ablate.model.layers.experts import ExpertMaps, Products, experts_of, inverse, permuted
from ablate.model.parallel.ranks import Group, Ranks


def divide_experts(model: Hybrid, ranks: Ranks) -> dict[str, nn.Parameter]:
    """Keep this rank's experts of every layer of `model`, in place, and return their matrices by name.

    With one rank for all experts nothing changes and nothing is returned.
    """
    if ranks.expert.size == 1:
        return {}
    for layer in experts_of(model):
        _divide(layer.maps, ranks.expert)
    own = {linear.weight for layer in experts_of(model) for linear in (layer.maps.up_proj, layer.maps.out_proj)}
    return {name: parameter for name, parameter in model.named_parameters() if parameter in own}


def _divide(maps: ExpertMaps, group: Group) -> None:
    for linear in (maps.up_proj, maps.out_proj):
        linear.weight = nn.Parameter(group.part(linear.weight.detach(), 0).clone())
    maps.num_experts //= group.size
    maps.exchange = RowExchange(group)


def average_experts(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace the gradients of experts by their sum over all tokens, divided by the number of ranks of `ranks.rows`."""
    for parameter in parameters:
        if parameter.grad is not None:
            ranks.expert_copies.sum(parameter.grad).div_(ranks.rows.size)


class RowExchange:
    """Lets the ranks of a group compute each other's rows."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, products: Products, rows_ND: Tensor, ends_X: Tensor) -> Tensor:
        """Return the outputs [N,D] of all ranks' experts for rows that are sorted by expert."""
        ranks = self._group.size
        given_PY = ends_X.diff(prepend=ends_X.new_zeros(1)).view(ranks, -1)
        taken_PY = self._group.exchange(given_PY, [1] * ranks, [1] * ranks)
        given, taken = torch.stack((given_PY, taken_PY)).sum(2).tolist()
        rows_MD = _exchanged(rows_ND, given, taken, self._group)
        experts_PY = torch.arange(taken_PY.shape[1], device=rows_ND.device).expand_as(taken_PY)
        experts_M = experts_PY.flatten().repeat_interleave(taken_PY.flatten(), output_size=sum(taken))
        order_M = experts_M.argsort(stable=True)
        back_M = inverse(order_M)
        rows_MD = products(permuted(rows_MD, order_M, back_M), taken_PY.sum(0).cumsum(0))
        return _exchanged(permuted(rows_MD, back_M, order_M), taken, given, self._group)


def _exchanged(rows: Tensor, given: list[int], taken: list[int], group: Group) -> Tensor:
    result: Tensor = _Exchanged.apply(rows, given, taken, group)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(torch.autograd.Function):
    """Rows from all ranks (`Group.exchange`). The gradients of the taken rows go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, given: list[int], taken: list[int], group: Group) -> Tensor:
        ctx.given, ctx.taken, ctx.group = given, taken, group
        return group.exchange(rows, given, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.exchange(gradients[0], ctx.taken, ctx.given), None, None, None
