"""Tensor parallel: each rank of a group computes some heads and columns of every layer.

    M  z, x, B, C, dd_dt, dd_A and trap of some heads and their groups; the per-head parameters; out_proj by columns
    A  queries, keys and values of some heads; out_proj by columns. Latent attention is refused
    F  some hidden columns: gate, up and out_proj
    E  some hidden columns of each expert and of the shared one; every rank routes all tokens
    head  the logits of some tokens of the vocabulary (`vocabulary.py`)

`divide_layers` keeps this rank's slices of a whole model, so a divided start equals an undivided one. Hidden states
between the layers are equal on all ranks: each output projection adds up its partial products over the group, and each
input projection adds up the partial gradients of its input.

Gradients need no work after the backward pass. Each parameter is of one of three kinds:

    slices      the weights above: the gradient is the same slice of the whole gradient
    whole       embedding, norms of the residual stream, routers: every rank computes the whole gradient
    shared      the projection of the angles, k_norm and q_norm (of M and of A), and B and C if there are fewer groups
                than ranks: each rank uses the whole parameter for its own heads, and the backward pass adds up the
                partial gradients

The embedding is not divided: its lookup needs no product, and the sum over ranks of a divided lookup would be [B,S,D]
in float32. Ranks with different tokens can still divide it with its state (FSDP).
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ablate.model.config import HybridConfig, check_tensor_geometry
from ablate.model.hybrid import Hybrid
from ablate.model.layers.attention import CausalAttention
from ablate.model.layers.experts import ExpertMaps, Experts
from ablate.model.layers.linear import NORM_EPS, GatedMLP, Linear, RMSNorm
from ablate.model.layers.mamba3 import InputProjection, Mamba3
from ablate.model.parallel.ranks import Group, Ranks, summed, summed_gradient


def divide_layers(model: Hybrid, ranks: Ranks) -> frozenset[str]:
    """Keep this rank's share of every layer of the whole `model`, in place. All ranks start from equal parameters.

    Returns the names of the parameters that are slices now, for `gradient_norm`; none with one tensor rank. With
    several, `lm_head.weight` is [V / ranks, D], and the loss needs `ranks.tensor` as its `vocabulary`.

    Raises ConfigError if a size does not divide.
    """
    group = ranks.tensor
    check_tensor_geometry(model.config, group.size)
    if group.size == 1:
        return frozenset()
    divider = _Divider(group)
    for block in model.blocks:
        divider.divide(block.get_submodule("mixer"))
    model.lm_head.weight = divider.slice(model.lm_head.weight)
    slices = {id(parameter) for parameter in divider.slices}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in slices)


def gradient_norm(model: nn.Module, *divided: tuple[Collection[str], Group]) -> Tensor:
    """Return the norm of all gradients of the whole model, a scalar that is equal on all ranks.

    `divided`: names, in `model`, of parameters of which each rank of a group has another part. A parameter that is
    whole on every rank counts once. Gradients may be DTensors over ranks with different tokens.
    """
    gradients: dict[tuple[Group, ...], list[Tensor | None]] = {}
    for name, parameter in model.named_parameters():
        groups = tuple(group for names, group in divided if name in names)
        gradients.setdefault(groups, []).append(parameter.grad)
    squares = [_squares(some) for some in gradients.values()]
    for groups, square in zip(gradients, squares, strict=True):
        for group in groups:
            group.sum(square)
    return torch.stack(squares).sum().sqrt()


def _squares(gradients: list[Tensor | None]) -> Tensor:
    """Return the summed squares of all `gradients`, whose DTensors lie on the ranks in one way.

    Shares are added up as plain tensors: for DTensors the host needs longer than a GPU.
    """
    divided = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if gradient is not None and not isinstance(gradient, DTensor)]
    if not divided:
        return nn.utils.get_total_norm(whole).square()
    squares = nn.utils.get_total_norm([gradient.to_local() for gradient in divided]).square()
    for axis, placement in enumerate(divided[0].placements):
        if placement.is_shard():
            dist.all_reduce(squares, group=divided[0].device_mesh.get_group(axis))
    return squares + nn.utils.get_total_norm(whole).square() if whole else squares


class _Divider:
    """Cuts modules to one rank's share and collects the slices."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.slices: list[nn.Parameter] = []

    def divide(self, mixer: nn.Module) -> None:
        if isinstance(mixer, Mamba3):
            self._mamba(mixer)
        elif isinstance(mixer, CausalAttention):
            self._attention(mixer)
        elif isinstance(mixer, GatedMLP):
            self._columns(mixer.up_proj, [len(mixer.up_proj.weight) // 2] * 2)
            self._rows(mixer.out_proj)
        elif isinstance(mixer, Experts):
            self._experts(mixer.maps)
        else:
            allowed = "Mamba3, CausalAttention, GatedMLP, Experts"
            raise TypeError(f"{type(mixer).__name__} cannot be divided; allowed: {allowed}")

    def slice(self, whole: Tensor, axis: int = 0) -> nn.Parameter:
        """Return this rank's share of `whole` along `axis` as a parameter."""
        return self._keep(self._group.part(whole.detach(), axis))

    def _keep(self, part: Tensor) -> nn.Parameter:
        self.slices.append(nn.Parameter(part.clone(memory_format=torch.contiguous_format)))
        return self.slices[-1]

    def _attention(self, mixer: CausalAttention) -> None:
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
        self._columns(mixer.qkv_proj, [number * mixer.head_width for number in heads])
        self._rows(mixer.out_proj)
        mixer.num_heads, mixer.num_kv_heads = (number // self._group.size for number in heads[:2])
        if mixer.q_norm is not None and mixer.k_norm is not None:
            norms = (mixer.q_norm, mixer.k_norm)
            mixer.q_norm, mixer.k_norm = (SharedRMSNorm(norm.weight, self._group) for norm in norms)

    def _experts(self, maps: ExpertMaps) -> None:
        """Keep some hidden columns of each expert. The whole layer has one sum, and so have its gradients."""
        up_XFD = maps.up_proj.weight.detach().view(maps.num_experts, -1, maps.up_proj.weight.shape[1])
        maps.up_proj.weight = self._keep(self._group.part(up_XFD, 1).flatten(0, 1))
        maps.out_proj.weight = self.slice(maps.out_proj.weight, axis=1)
        if maps.shared_up_proj is not None and maps.shared_out_proj is not None:
            maps.shared_up_proj.weight = self.slice(maps.shared_up_proj.weight)
            maps.shared_out_proj.weight = self.slice(maps.shared_out_proj.weight, axis=1)
        maps.register_forward_pre_hook(_sums_gradients_of_inputs(self._group))
        maps.register_forward_hook(_sums_output(self._group))

    def _columns(self, linear: Linear, parts: list[int]) -> None:
        """Keep this rank's share of each of the parts of the outputs, whose sizes are `parts`."""
        weights = torch.split(linear.weight.detach(), parts)
        linear.weight = self._keep(torch.cat([self._group.part(weight, 0) for weight in weights]))
        linear.register_forward_pre_hook(_sums_gradient_of_input(self._group))

    def _rows(self, linear: Linear) -> None:
        """Keep this rank's share of the inputs."""
        linear.weight = self.slice(linear.weight, axis=1)
        linear.register_forward_hook(_sums_output(self._group))

    def _mamba(self, mixer: Mamba3) -> None:
        ranks, config = self._group.size, mixer.config
        mixer.in_proj = DividedInputProjection(mixer.in_proj, config, self._group)
        self.slices.append(mixer.in_proj.weight)
        self._rows(mixer.out_proj)
        for leaf in ("q_bias", "k_bias", "psi", "zeta", "phi", "dt_bias", "D"):
            setattr(mixer, leaf, self.slice(getattr(mixer, leaf)))
        mixer.k_norm, mixer.q_norm = (SharedRMSNorm(norm.weight, self._group) for norm in (mixer.k_norm, mixer.q_norm))
        mixer.num_heads, mixer.num_groups = mixer.num_heads // ranks, max(1, mixer.num_groups // ranks)


def _sums_gradient_of_input(group: Group) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
    def hook(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        return (summed_gradient(inputs[0].to(linear.compute_dtype), group),)  # the sum in the compute dtype

    return hook


def _sums_gradients_of_inputs(group: Group) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(summed_gradient(x, group) if x.is_floating_point() else x for x in inputs)

    return hook


def _sums_output(group: Group) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    def hook(_linear: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return summed(output, group)

    return hook


class SharedLinear(Linear):
    """Linear map with a whole weight, whose outputs each rank uses for its own heads."""

    def __init__(self, weight: Tensor, group: Group, *, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight.clone())
        self.compute_dtype, self.products, self._group = compute_dtype, "as_dtype", group

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight^T in `compute_dtype`."""
        weight = summed_gradient(self.weight, self._group)
        return functional.linear(x.to(self.compute_dtype), weight.to(self.compute_dtype))


class SharedRMSNorm(RMSNorm):
    """Norm with a whole weight, whose outputs each rank uses for its own heads."""

    def __init__(self, weight: Tensor, group: Group) -> None:
        nn.Module.__init__(self)
        self.weight, self._group = nn.Parameter(weight.detach().clone()), group

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x as float32."""
        return functional.rms_norm(x.float(), self.weight.shape, summed_gradient(self.weight, self._group), NORM_EPS)


class DividedInputProjection(InputProjection):
    """One rank's share of a mixer's input projection: `weight` has its slices, `shared` the whole parts.

    A rank has one group or G / ranks of them. With fewer groups than ranks B and C are among the whole parts: every
    rank computes all groups and uses its own.
    """

    def __init__(self, whole: InputProjection, config: HybridConfig, group: Group) -> None:
        nn.Module.__init__(self)
        self.compute_dtype, self.products, self._group = whole.compute_dtype, whole.products, group
        mamba = config.mamba
        self._direction = (mamba.mimo_rank, mamba.ngroups, mamba.d_state)
        self._own_group = None if mamba.ngroups >= group.size else group.index * mamba.ngroups // group.size
        z, x, b, c, *by_heads, angles = torch.split(whole.weight.detach(), list(config.mixer_widths))
        slices = [group.part(part, 0) for part in (z, x, *by_heads)]
        shared = [angles]
        if self._own_group is None:
            slices[2:2] = [group.part(part.view(*self._direction, -1), 1).flatten(0, 2) for part in (b, c)]
        else:
            shared[:0] = [b, c]
        self.widths, self._shared_widths = (tuple(len(part) for part in parts) for parts in (slices, shared))
        self.weight = nn.Parameter(torch.cat(slices))
        self.shared = SharedLinear(torch.cat(shared), group, compute_dtype=whole.compute_dtype)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return z, x, B, C, dd_dt, dd_A, trap of this rank's heads and groups, and all angles."""
        x_BSD = summed_gradient(x_BSD.to(self.compute_dtype), self._group)
        slices = torch.split(Linear.forward(self, x_BSD), list(self.widths), dim=-1)
        shared = torch.split(self.shared(x_BSD), list(self._shared_widths), dim=-1)
        if self._own_group is None:
            return (*slices, *shared)
        z, x, *by_heads = slices
        b, c, angles = shared
        b, c = (part.reshape(*part.shape[:2], *self._direction)[:, :, :, self._own_group] for part in (b, c))
        return (z, x, b, c, *by_heads, angles)
