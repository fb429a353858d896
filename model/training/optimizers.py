"""The optimisers: AdamW by torch's implementations, and Muon for the matrices of the blocks.

AdamW's update, by `OptimConfig.update`:

    fused           one kernel for many tensors, after a pass that clips the gradients
    foreach         one kernel for each operation over many tensors, after the same pass
    clip_in_update  the fused kernel divides each gradient by the clipping factor, so no pass before it writes them
    compiled        the same in one compiled kernel per matrix of the blocks, which also writes the rounded weights
                    (model/training/compiled_adamw.py)

Muon replaces the momentum of a matrix by the nearest orthogonal one, scaled so that an update has the size of AdamW's
(`adjust_lr_fn="match_rms_adamw"`), so both use one learning rate. Embedding, head, vectors and the small tensors of the
mixers stay with AdamW.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ablate.model.config import OptimConfig
from ablate.model.hybrid import Hybrid
from ablate.model.layers.experts import experts_of
from ablate.model.layers.linear import Linear
from ablate.model.training.compiled_adamw import CompiledAdamW


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to vectors (norm weights, dt_bias, D) or biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


AnyOptimizer: TypeAlias = "torch.optim.Optimizer | MuonAndAdamW | CompiledAdamW"


def optimizer_of(model: Hybrid, config: OptimConfig, *, capturable: bool = False) -> AnyOptimizer:
    """Return the optimiser of `config` for the parameters of `model` that need gradients.

    A `capturable` one can be recorded in a CUDA graph: its learning rate is a tensor. With `compiled` updates the
    weights of the model's blocks are rounded to their compute dtype. A step also ends that of mixtures of experts.
    """
    optimizer = _optimizer_of(model, config, capturable=capturable)
    inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.adamw
    for layer in experts_of(model):
        inner.register_step_post_hook(layer.end_step)
    return optimizer


def _optimizer_of(model: Hybrid, config: OptimConfig, *, capturable: bool) -> AnyOptimizer:
    if config.algorithm == "muon":
        return MuonAndAdamW(model.named_parameters(), config)
    make = partial(adamw, config=config, capturable=capturable)
    if config.update == "compiled":
        maps = [module for module in model.blocks.modules() if isinstance(module, Linear)]
        return CompiledAdamW(model, maps, config, make)
    return make(model.named_parameters())


def adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, *, capturable: bool = False
) -> torch.optim.AdamW:
    """Return AdamW for the parameters that need gradients, with weight decay for those that `decays` selects."""
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if decays(name, p)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    if any(parameter.device.type == "xla" for _, parameter in trained):
        return _compilable(groups, betas, config.learning_rate)
    fused, rate = config.update != "foreach", config.learning_rate
    options: dict[str, Any] = {"betas": betas, "fused": fused, "foreach": not fused, "capturable": capturable}
    if not capturable:
        return torch.optim.AdamW(groups, lr=rate, **options)
    device = trained[0][1].device
    return torch.optim.AdamW(groups, lr=torch.tensor(rate, device=device), **options)


def _compilable(groups: list[dict[str, Any]], betas: tuple[float, float], rate: float) -> torch.optim.AdamW:
    """Return AdamW whose steps are equal graphs from the first one on.

    Values that change from step to step are tensors, because a number would be compiled into the graph. The state that
    AdamW creates in its first step exists before it.
    """
    device = groups[0]["params"][0].device
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, capturable=True, foreach=False)
    for group in optimizer.param_groups:  # the constructor would read a tensor's value and so run a graph
        group["lr"] = torch.tensor(rate).to(device)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class MuonAndAdamW:
    """Muon for the matrices of the blocks, AdamW for everything else, stepped together."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        matrices = [parameter for name, parameter in trained if _by_muon(name, parameter)]
        self._muon = torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = adamw([(name, parameter) for name, parameter in trained if not _by_muon(name, parameter)], config)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of both."""
        return [*self._muon.param_groups, *self.adamw.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """State of both by parameter."""
        return {**self._muon.state, **self.adamw.state}

    def step(self) -> None:
        """Update all parameters."""
        self._muon.step()  # type: ignore[no-untyped-call]
        self.adamw.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop or zero all gradients."""
        self._muon.zero_grad(set_to_none=set_to_none)
        self.adamw.zero_grad(set_to_none=set_to_none)


def _by_muon(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("blocks.") and parameter.ndim == 2
