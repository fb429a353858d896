"""Expert parallel against one process: every gradient of drawn models on packed documents, in float64.

The expected shares are written out here expert by expert, apart from the code that cuts them.
"""

import random
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.config import (
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    check_mesh,
)
from ablate.model.data.packing import Batch
from ablate.model.errors import ConfigError
from ablate.model.hybrid import Hybrid
from ablate.model.layers.experts import experts_of
from ablate.model.parallel.ranks import Ranks
from ablate.model.training.loss import cross_entropy
from ablate.model.training.optimizers import optimizer_of
from ablate.model.training.ranked_step import RankedStep
from tests.ranks import run_ranks
from tests.unit.model.parallel.test_tensor import whole_model

ROWS, TOKENS = 4, 24
LIMITS = {"loop": 1e-13, "grouped": 1e-4}
"""Largest relative error of a gradient by the products: in float64, and in float32, which the grouped one needs. The
chunked loss adds up in float32, too."""
MESHES = {
    2: {MeshConfig(devices=2, sharding=kind, expert=2) for kind in ("fsdp", "replicated")}  # type: ignore[arg-type]
    | {MeshConfig(devices=2, context=2, expert=2)},
    4: {MeshConfig(devices=4, sharding=kind, tensor=2, expert=2) for kind in ("fsdp", "replicated")}  # type: ignore[arg-type]
    | {MeshConfig(devices=4, sharding="hsdp", expert=2), MeshConfig(devices=4, sharding="hsdp", context=2, expert=4)}
    | {MeshConfig(devices=4, expert=4)},
}
"""Ways to divide that are among the drawn ones, by devices."""
LOADS = ("as it comes", "one rank", "one expert", "none of the first")
"""Where the bias of the experts sends the rows."""


class Case(NamedTuple):
    config: TrainConfig
    load: str


def drawn(seed: int, devices: int) -> Case:
    """Return a configuration that is not refused."""
    draw = random.Random(f"{seed}/{devices}")  # noqa: S311  # a reproducible draw
    while True:
        tensor, context = draw.choice(((1, 1), (2, 1), (1, 2)))
        try:
            mesh = MeshConfig(
                devices=devices,
                sharding=draw.choice(("fsdp", "replicated", "hsdp")),
                tensor=tensor,
                context=context,
                expert=draw.choice((2, 4)),
            )
            number = mesh.expert * draw.choice((1, 2, 3))
            experts = ExpertsConfig(
                num_experts=number,
                top_k=draw.randint(1, min(4, number)),
                width=8 * tensor * draw.choice((1, 2)),
                shared_width=draw.choice((0, 8 * tensor)),
                routing=draw.choice(("learned", "learned", "learned", "balanced")),
                balancing=draw.choice(("bias", "aux_loss", "none")),
                balance_rate=0.3,
                products=draw.choice(("loop", "loop", "grouped")),
            )
            model = HybridConfig(
                vocab_size=260,
                d_model=16,
                pattern="".join(draw.choices("EMFAR", k=draw.randint(0, 3))) + "E",
                mamba=MambaConfig(d_state=8, headdim=8, mimo_rank=2),
                attention=AttentionConfig(num_heads=2),
                experts=experts,
            )
            config = TrainConfig(
                model=model,
                mesh=mesh,
                micro_batch=ROWS,
                loss=draw.choice(("dense", "chunked")) if experts.products == "grouped" else "dense",
                loss_chunk_tokens=16,
                optim=OptimConfig(update="foreach"),
                seed=seed,
            )
            check_mesh(config)
        except ConfigError:
            continue
        if experts.routing == "balanced" and TOKENS // context * experts.top_k % number:
            continue  # each rank numbers its own tokens, which are then other ones
        return Case(config, LOADS[seed % len(LOADS)])


@cache
def cases(devices: int) -> list[Case]:
    return [drawn(seed, devices) for seed in range(16)]  # all of range(100) passed by hand


def batch_of(config: TrainConfig) -> Batch:
    """Packed documents, an id that returns, and rows with unequal numbers of valid tokens: none in the last one."""
    generator = torch.Generator().manual_seed(config.seed)
    tokens, targets = (torch.randint(config.model.vocab_size, (ROWS, TOKENS), generator=generator) for _ in range(2))
    segment_ids = (torch.rand(ROWS, TOKENS, generator=generator) < 0.2).cumsum(1) % 3
    valid = torch.rand(ROWS, TOKENS, generator=generator) < torch.tensor([[0.9], [0.3], [0.6], [0.0]])
    return Batch(*(part.numpy() for part in (tokens, targets, segment_ids, valid)))


def model_of(case: Case, dtype: torch.dtype) -> Hybrid:
    """Return the whole model without equal numbers, whose bias sends the rows where the case says."""
    model = whole_model(case.config, dtype)
    model._residual_dtype = dtype
    for layer in experts_of(model):
        experts = torch.arange(layer.config.num_experts)
        of_a_rank = layer.config.num_experts // case.config.mesh.expert
        wanted = {
            "as it comes": experts < 0,
            "one rank": experts // of_a_rank == case.config.mesh.expert - 1,
            "one expert": experts == 1,
            "none of the first": experts >= of_a_rank,
        }[case.load]
        layer.bias.copy_(9.0 * wanted + 0.1 * torch.randn(len(experts), generator=torch.Generator().manual_seed(3)))
    return model


class Alone(NamedTuple):
    """What one process computes."""

    gradients: dict[str, Tensor]
    loss: float
    norm: float
    counts: list[list[int]]
    biases: list[Tensor]


def alone(case: Case, dtype: torch.dtype) -> Alone:
    config, model = case.config, model_of(case, dtype)
    tokens, targets, segment_ids, valid = (torch.from_numpy(part) for part in batch_of(config))
    rest = (targets, valid, config.loss, config.loss_chunk_tokens)
    loss = cross_entropy(model(tokens, segment_ids), model.lm_head.weight, *rest)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    norm = float(nn.utils.get_total_norm(list(gradients.values())))
    counts = [layer.counts.tolist() for layer in experts_of(model)]
    optimizer_of(model, config.optim).step()
    return Alone(gradients, float(loss), norm, counts, [layer.bias for layer in experts_of(model)])


def share(case: Case, name: str, whole: Tensor, rank: int) -> Tensor:
    """Return what `rank` keeps of a value for a matrix of all experts: its experts, and its columns of each."""
    experts, mesh = case.config.model.experts, case.config.mesh
    number = experts.num_experts // mesh.expert
    first = rank // mesh.tensor % mesh.expert * number
    columns = experts.width // mesh.tensor
    own = slice(rank % mesh.tensor * columns, (rank % mesh.tensor + 1) * columns)
    if name.endswith("maps.up_proj.weight"):
        rows = [whole[expert * experts.width :][: experts.width][own] for expert in range(first, first + number)]
    else:
        height = case.config.model.d_model
        rows = [whole[expert * height :][:height, own] for expert in range(first, first + number)]
    return torch.cat(rows)


def of_experts(name: str) -> bool:
    return name.endswith(("maps.up_proj.weight", "maps.out_proj.weight"))


class Compared(NamedTuple):
    """One case on one rank."""

    errors: dict[str, float]
    loads_equal: bool
    repeats_equal: bool
    """To the bit. The first pass of whole copies adds up in another order."""
    rows: list[int]
    """For the experts of this rank, by layer."""
    elements: dict[str, int]
    """Stored by this rank in the matrices of experts, and those of all experts."""


def compare(ranks: Ranks, devices: int) -> list[Compared]:
    results = []
    for case in cases(devices):
        if case.config.model.experts.products == "grouped":
            results.append(compare_one(ranks, case, torch.float32))
        else:
            with patch.object(torch.Tensor, "float", torch.Tensor.double):
                results.append(compare_one(ranks, case, torch.float64))
    return results


def compare_one(ranks: Ranks, case: Case, dtype: torch.dtype) -> Compared:
    config, whole, model = case.config, alone(case, dtype), model_of(case, dtype)
    elements = {"all": sum(p.numel() for name, p in model.named_parameters() if of_experts(name))}
    step = RankedStep(config, model, Ranks(config.mesh, torch.device("cpu")))
    elements["own"] = sum(step.stored(p).numel() for name, p in model.named_parameters() if of_experts(name))
    optimizer = optimizer_of(model, config.optim)
    step.lay_out(optimizer)
    passes = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        step.backward(step.loss(model, batch_of(config)))
        passes.append({name: p.grad.clone() for name, p in model.named_parameters()})  # type: ignore[union-attr]
        step.finish()
    model.zero_grad(set_to_none=True)
    loss, norm = step.update(step.loss(model, batch_of(config)), optimizer).tolist()
    step.finish()
    errors = {"loss": abs(loss - whole.loss) / whole.loss, "norm": abs(norm - whole.norm) / whole.norm}
    for name, gradient in passes[0].items():
        expected = whole.gradients.get(name)
        if expected is None or (name.endswith("router") and config.model.experts.top_k == 1):
            continue  # a parameter of tensor ranks alone; one weight is always 1
        got = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if of_experts(name):
            expected = share(case, name, expected, ranks.rank)
        if got.shape == expected.shape:  # else a slice of tensor ranks, which the norm sees
            scale = float(whole.gradients[name].norm())
            errors[name] = float((got - expected).norm()) / scale if scale else float(got.norm())
    layers = experts_of(model)
    number = config.model.experts.num_experts // config.mesh.expert
    first = ranks.rank // config.mesh.tensor % config.mesh.expert * number
    return Compared(
        errors,
        [layer.counts.tolist() for layer in layers] == whole.counts
        and all(map(torch.equal, (layer.bias for layer in layers), whole.biases)),
        all(torch.equal(local(passes[1][name]), local(passes[2][name])) for name in passes[0]),
        [sum(counts[first : first + number]) for counts in whole.counts],
        elements,
    )


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [2, 4])
def test_gradients_norm_and_load_equal_one_process_and_repeats_are_equal_to_the_bit(devices: int) -> None:
    of_ranks = run_ranks(MeshConfig(devices=devices), compare, devices)
    for number, case in enumerate(cases(devices)):
        products = case.config.model.experts.products
        for compared in (results[number] for results in of_ranks):
            assert max(compared.errors.values()) < LIMITS[products], (case, compared.errors)
            assert compared.loads_equal, case
            assert compared.repeats_equal, case
            mesh = case.config.mesh
            assert compared.elements["own"] * mesh.expert * mesh.tensor == compared.elements["all"] > 0
    rows = {count for results in of_ranks for compared in results for count in compared.rows}
    assert 0 in rows
    assert {case.config.mesh for case in cases(devices)} >= MESHES[devices]


def test_what_devices_cannot_share_is_refused_with_the_numbers_that_are_allowed() -> None:
    model = HybridConfig(pattern="ME", experts=ExpertsConfig(num_experts=12))
    config = TrainConfig(model=model, mesh=MeshConfig(devices=8, expert=4), micro_batch=8)
    check_mesh(config)
    check_mesh(replace(config, compile=True))
    refused = replace(config, mesh=MeshConfig(devices=8, expert=8))
    with pytest.raises(ConfigError, match=r"mesh.expert: is 8; allowed with 12 experts \(.*num_experts\): 1, 2, 4$"):
        check_mesh(refused)
    check_mesh(replace(refused, model=replace(model, pattern="MF")))
    with pytest.raises(ConfigError, match=r"mesh.expert: is 4; lane xla divides rows only; allowed: 1"):
        check_mesh(replace(config, model=replace(model, scan=ScanSwitches(lane=Lane.XLA))))
    problem = r"mesh.expert: is 8; it does not divide the number of devices with different tokens, 4; allowed: 1, 2, 4$"
    with pytest.raises(ConfigError, match=problem):
        MeshConfig(devices=8, tensor=2, expert=8)
    MeshConfig(devices=8, tensor=2, context=2, expert=4)
    with pytest.raises(ConfigError, match=r"mesh.expert: is 3; allowed: 1, 2, 4, 8, 16"):
        MeshConfig(devices=8, expert=3)
