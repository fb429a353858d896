"""Tensor parallel against the whole model: every gradient in float64, on packed documents of drawn geometries.

The expected slices are written out here by heads, groups and columns, apart from the code that cuts them. In float64
`Tensor.float` returns float64 too, so that no rounding hides an error.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.config import (
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    LossKind,
    MambaConfig,
    MeshConfig,
    OptimConfig,
    TrainConfig,
    check_tensor_geometry,
    check_tensor_parallel,
)
from ablate.model.errors import ConfigError
from ablate.model.hybrid import Hybrid, build
from ablate.model.parallel.context import spread_rows
from ablate.model.parallel.ranks import Group, Ranks
from ablate.model.parallel.tensor import divide_layers, gradient_norm
from ablate.model.training.loss import cross_entropy
from ablate.model.training.optimizers import optimizer_of
from tests.ranks import run_ranks

ROWS, TOKENS, STEPS = 2, 22, 2
TRAINED = 4
"""Cases that are trained for some steps: those that are not drawn."""


class Outcome(NamedTuple):
    """One model after its passes."""

    hidden: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    norm: Tensor
    slices: frozenset[str]
    trained: dict[str, Tensor]
    """Parameters after several steps of AdamW."""
    losses: list[float]
    """Of each step, and without gradients after the last one."""


def drawn(seed: int, tensor: int) -> TrainConfig:
    """Return a configuration that `tensor` devices can share."""
    draw = random.Random(f"{seed}/{tensor}")  # noqa: S311
    while True:
        groups = draw.choice((1, 1, 2, 4, 8, 8))
        heads = draw.choice((1, 2)) * max(tensor, groups)
        headdim, expand = draw.choice((8, 16)), draw.choice((1, 2, 4))
        width = heads * headdim // expand
        try:
            model = HybridConfig(
                vocab_size=tensor * draw.randint(257 // tensor + 1, 300 // tensor),
                d_model=width,
                pattern="".join(draw.choice("MMAFE") for _ in range(draw.randint(1, 4))),
                mlp_ratio=tensor * draw.randint(width // tensor, 2 * width // tensor) / width,
                norm=draw.choice(("rms", "layer")),
                mamba=MambaConfig(
                    d_state=draw.choice((8, 12, 16)),
                    expand=expand,
                    headdim=headdim,
                    ngroups=groups,
                    mimo_rank=draw.choice((1, 2, 4, 8)),
                    rope_fraction=draw.choice((0.5, 1.0)),
                    a_activation=draw.choice(("heavy_tail", "softplus")),
                ),
                attention=AttentionConfig(
                    num_heads=tensor * draw.choice((1, 2)),
                    num_kv_heads=draw.choice((0, tensor)),
                    qk_norm=draw.choice(("none", "rms")),
                    window=draw.choice((0, 3)),
                    softcap=draw.choice((0.0, 5.0)),
                ),
                experts=ExpertsConfig(
                    num_experts=draw.randint(2, 6),
                    top_k=draw.randint(1, 2),
                    width=8 * tensor,
                    shared_width=draw.choice((0, tensor, 3 * tensor)),
                    balancing=draw.choice(("bias", "aux_loss")),
                    balance_rate=0.3,
                    products="loop",  # the grouped one knows no float64
                ),
                scan=ScanSwitches(chunk_size=16, psiv_cache=draw.choice((True, False))),
            )
            check_tensor_geometry(model, tensor)
        except ConfigError:
            continue
        return config_of(model, tensor, loss=draw.choice(("dense", "chunked")), seed=seed)


def config_of(model: HybridConfig, tensor: int, **fields: Any) -> TrainConfig:
    mesh = MeshConfig(devices=tensor, tensor=tensor)
    return TrainConfig(model=model, mesh=mesh, loss_chunk_tokens=16, optim=OptimConfig(update="foreach"), **fields)


def fixed(tensor: int, *, groups: int, loss: LossKind, pattern: str = "MFA", heads: int = 8) -> TrainConfig:
    mamba = MambaConfig(d_state=8, headdim=8, ngroups=groups, mimo_rank=2)
    model = HybridConfig(
        vocab_size=260, d_model=heads * 4, pattern=pattern, mamba=mamba, scan=ScanSwitches(chunk_size=16)
    )
    return config_of(model, tensor, loss=loss)


@cache
def cases(tensor: int) -> list[TrainConfig]:
    """One group, eight groups, and two groups for more ranks than that; then drawn ones."""
    chosen = [fixed(tensor, groups=1, loss="dense"), fixed(tensor, groups=8, loss="chunked")]
    chosen += [fixed(tensor, groups=2, loss="dense", pattern="MM"), fixed(tensor, groups=4, loss="chunked", heads=16)]
    return chosen + [drawn(seed, tensor) for seed in range(6)]


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    segment_ids: Tensor
    valid: Tensor


def batch_of(config: TrainConfig, number: int = 0) -> Batch:
    """Packed documents, an id that returns, and rows with unequal numbers of valid tokens."""
    generator = torch.Generator().manual_seed(1000 * config.seed + number)
    tokens, targets = (torch.randint(config.model.vocab_size, (ROWS, TOKENS), generator=generator) for _ in range(2))
    segment_ids = (torch.rand(ROWS, TOKENS, generator=generator) < 0.2).cumsum(1) % 3
    valid = torch.rand(ROWS, TOKENS, generator=generator) < torch.tensor([[0.9], [0.3]])
    return Batch(tokens, targets, segment_ids, valid)


def whole_model(config: TrainConfig, dtype: torch.dtype = torch.float64) -> Hybrid:
    """Return the model of `config` with no equal numbers, which would hide a swap."""
    model = build(config)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    if dtype == torch.float64:
        model.double()
    for module in (model, *model.modules()):
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = dtype  # type: ignore[assignment]
    return model


def outcome(config: TrainConfig, ranks: Ranks | None, dtype: torch.dtype, steps: int) -> Outcome:
    """Return the results of one device, or of this rank."""
    model = whole_model(config, dtype)
    slices = frozenset[str]() if ranks is None else divide_layers(model, ranks)
    group = None if ranks is None else ranks.tensor

    def loss_of(batch: Batch) -> Tensor:
        hidden = model(batch.tokens, batch.segment_ids)
        rest = (batch.targets, batch.valid, config.loss, config.loss_chunk_tokens)
        return cross_entropy(hidden, model.lm_head.weight, *rest, vocabulary=group)

    def norm_of() -> Tensor:
        if ranks is None:
            return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        return gradient_norm(model, (slices, ranks.tensor))

    first = batch_of(config)
    hidden = model(first.tokens, first.segment_ids).detach()
    loss = loss_of(first)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = norm_of()
    optimizer = optimizer_of(model, config.optim)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_of(batch_of(config, step)))
        losses[-1].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grads_with_norm_(model.parameters(), config.optim.grad_clip, norm_of())
        optimizer.step()
    with torch.no_grad():
        losses.append(loss_of(first))
    trained = {name: p.detach() for name, p in model.named_parameters()}
    return Outcome(hidden, loss.detach(), gradients, norm, slices, trained, [one.item() for one in losses])


Pair: TypeAlias = tuple[Outcome | None, Outcome]
"""The outcome of one device, from one of the ranks, and that of this rank."""


def pair(ranks: Ranks, number: int, config: TrainConfig, dtype: torch.dtype = torch.float64) -> Pair:
    steps = STEPS if number < TRAINED else 0
    whole = outcome(config, None, dtype, steps) if number % ranks.world == ranks.rank else None
    return whole, outcome(config, ranks, dtype, steps)


class Computed(NamedTuple):
    """The results of one rank."""

    exact: list[Pair]
    """Of each case in float64."""
    rounded: dict[torch.dtype, Pair]
    """Of the first case."""
    errors: dict[str, dict[str, float]]
    """By MESHES; of four ranks only."""
    sums: Counter[tuple[int, ...]]
    """Shapes of the sums over ranks in one pass of the first case."""


def compute(ranks: Ranks, configs: list[TrainConfig]) -> Computed:
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        exact = [pair(ranks, number, config) for number, config in enumerate(configs)]
        meshes = zip(MESHES, (1, 8), strict=True) if ranks.world == 4 else ()
        errors = {name: errors_of(MESHES[name], groups) for name, groups in meshes}
    rounded = {dtype: pair(ranks, 0, configs[0], dtype) for dtype in (torch.float32, torch.bfloat16)}
    return Computed(exact, rounded, errors, sums_of_a_pass(ranks, configs[0]))


def sums_of_a_pass(ranks: Ranks, config: TrainConfig) -> Counter[tuple[int, ...]]:
    model, batch, sums = whole_model(config, torch.float32), batch_of(config), Counter[tuple[int, ...]]()
    divide_layers(model, ranks)
    add_up = Group.sum
    with patch.object(Group, "sum", lambda group, x: sums.update([tuple(x.shape)]) or add_up(group, x)):
        ModelAndLoss(config, model, ranks)(batch).backward()
    return sums


class ModelAndLoss(nn.Module):
    """One root for `fully_shard`, which gathers the head before the loss reads it."""

    def __init__(self, config: TrainConfig, model: Hybrid, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.model, self.ranks = config, model, ranks

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.model(batch.tokens, batch.segment_ids)
        rest = (batch.targets, batch.valid, self.config.loss, self.config.loss_chunk_tokens)
        return cross_entropy(hidden, self.model.lm_head.weight, *rest, vocabulary=self.ranks.tensor)


MESHES = {
    "rows": MeshConfig(devices=4, tensor=2),
    "pieces of rows": MeshConfig(devices=4, tensor=2, context=2),
}


def errors_of(mesh: MeshConfig, groups: int) -> dict[str, float]:
    """Return the errors of the norm and of each gradient, with parameters that FSDP divides over the other ranks."""
    ranks, config = Ranks(mesh, torch.device("cpu")), replace(fixed(2, groups=groups, loss="dense"), mesh=mesh)
    batch, whole, model = batch_of(config), whole_model(config), whole_model(config)
    ModelAndLoss(config, whole, Ranks(MeshConfig(devices=4), torch.device("cpu")))(batch).backward()
    slices = divide_layers(model, ranks)
    spread_rows(model, ranks)
    for block in model.blocks:
        fully_shard(block, mesh=ranks.rows_mesh)
    root = ModelAndLoss(config, model, ranks)
    fully_shard(root, mesh=ranks.rows_mesh)
    piece = Batch(*(ranks.context.part(ranks.data.part(part, 0), 1) for part in batch))
    (
        root(piece) * (piece.valid.sum().double() / batch.valid.sum() * ranks.rows.size)
    ).backward()  # FSDP divides by the size
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    expected = share(config, gradients, ranks.tensor.index)
    errors = {
        name: error(parameter.grad.full_tensor(), expected[name])  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
    }
    whole_norm = nn.utils.get_total_norm(list(gradients.values()))
    return errors | {"norm": error(gradient_norm(model, (slices, ranks.tensor)), whole_norm)}


class Compared(NamedTuple):
    """One case: one device and all ranks."""

    config: TrainConfig
    whole: Outcome
    ranks: tuple[Outcome, ...]

    @classmethod
    def of(cls, config: TrainConfig, pairs: Iterable[Pair]) -> "Compared":
        wholes, ranks = zip(*pairs, strict=True)
        return cls(config, next(whole for whole in wholes if whole is not None), ranks)


@cache
def computed(tensor: int) -> list[Computed]:
    """Return the results of each rank."""
    return run_ranks(MeshConfig(devices=tensor, tensor=tensor), compute, cases(tensor))


def exact(tensor: int) -> Iterator[Compared]:
    for number, config in enumerate(cases(tensor)):
        yield Compared.of(config, (of_rank.exact[number] for of_rank in computed(tensor)))


def share(config: TrainConfig, whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return what `rank` has of a value for each parameter, head by head."""
    model, tensor, result = config.model, config.mesh.tensor, {}
    for name, value in whole.items():
        block, leaf = name.removeprefix("blocks.").partition(".")[0], name.split(".", 3)[-1]
        letter = model.pattern[int(block)] if name.startswith("blocks.") else ""
        if name == "lm_head.weight":
            size = model.vocab_size // tensor
            result[name] = value[rank * size : (rank + 1) * size]
        elif letter == "M" and leaf == "in_proj.weight":
            rows, shared = mixer_rows(model, rank, tensor)
            result[name] = value[rows]
            result[name.replace("in_proj", "in_proj.shared")] = value[shared]
        elif letter and ".mixer." in name:
            axis, index = OWN[letter](model, leaf, rank, tensor)
            result[name] = value if index is None else value.index_select(axis, torch.tensor(index))
        else:
            result[name] = value
    return result


def heads_of(count: int, rank: int, tensor: int) -> range:
    return range(rank * count // tensor, (rank + 1) * count // tensor)


def mixer_rows(model: HybridConfig, rank: int, tensor: int) -> tuple[list[int], list[int]]:
    """Return the rows of the input projection of which a rank has a slice, and those that all ranks share."""
    mamba, offset = model.mamba, 0
    own: list[int] = []
    shared: list[int] = []
    heads = heads_of(model.num_value_heads, rank, tensor)
    groups = {head // (model.num_value_heads // mamba.ngroups) for head in heads}
    for part in ("z", "x", "B", "C", "dt", "A", "trap", "angles"):
        if part in ("z", "x"):
            own += [offset + head * mamba.headdim + p for head in heads for p in range(mamba.headdim)]
            offset += model.num_value_heads * mamba.headdim
        elif part in ("B", "C"):
            rows = [
                (offset + (r * mamba.ngroups + g) * mamba.d_state + n, g)
                for r in range(mamba.mimo_rank)
                for g in range(mamba.ngroups)
                for n in range(mamba.d_state)
            ]
            if mamba.ngroups < tensor:
                shared += [row for row, _ in rows]
            else:
                own += [row for row, g in rows if g in groups]
            offset += len(rows)
        elif part == "angles":
            shared += range(offset, offset + mamba.num_angles)
        else:
            own += [offset + head for head in heads]
            offset += model.num_value_heads
    return own, shared


def mixer_axis(model: HybridConfig, leaf: str, rank: int, tensor: int) -> tuple[int, list[int] | None]:
    heads, width = heads_of(model.num_value_heads, rank, tensor), model.mamba.headdim
    if leaf == "out_proj.weight":
        return 1, [head * width + p for head in heads for p in range(width)]
    return 0, None if "norm" in leaf else list(heads)


def attention_axis(model: HybridConfig, leaf: str, rank: int, tensor: int) -> tuple[int, list[int] | None]:
    width, attention = model.d_model // model.attention.num_heads, model.attention
    shared = attention.num_kv_heads or attention.num_heads
    if "norm" in leaf:
        return 0, None
    columns: list[int] = []
    first = 0
    for number in (attention.num_heads, shared, shared):
        columns += [first + head * width + e for head in heads_of(number, rank, tensor) for e in range(width)]
        first += number * width
    if leaf == "out_proj.weight":
        return 1, columns[: model.d_model // tensor]
    return 0, columns


def mlp_axis(model: HybridConfig, leaf: str, rank: int, tensor: int) -> tuple[int, list[int] | None]:
    columns = list(heads_of(model.mlp_width, rank, tensor))
    return (1, columns) if leaf == "out_proj.weight" else (0, columns + [model.mlp_width + c for c in columns])


def experts_axis(model: HybridConfig, leaf: str, rank: int, tensor: int) -> tuple[int, list[int] | None]:
    number, width = model.experts.num_experts, model.experts.width
    if leaf == "router":
        return 0, None
    if "shared" in leaf:
        return int("out" in leaf), list(heads_of(model.experts.shared_width, rank, tensor))
    if "out" in leaf:
        return 1, list(heads_of(width, rank, tensor))
    return 0, [expert * width + column for expert in range(number) for column in heads_of(width, rank, tensor)]


OWN = {"M": mixer_axis, "A": attention_axis, "F": mlp_axis, "E": experts_axis}


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


EXACT = 1e-12
"""Largest relative difference of sums in float64 that are added up in another order."""

FLOAT32_SUM = 1e-6
"""The chunked loss adds up its chunks in float32; its gradients do not contain that sum."""


@pytest.mark.parametrize("tensor", [2, 4])
def test_forward_loss_norm_and_every_gradient_equal_one_device(tensor: int) -> None:
    for config, whole, ranks in exact(tensor):
        for rank, result in enumerate(ranks):
            assert {result.hidden.dtype, *(gradient.dtype for gradient in result.gradients.values())} == {torch.float64}
            assert error(result.hidden, whole.hidden) < EXACT, config
            assert error(result.loss, whole.loss) < (EXACT if config.loss == "dense" else FLOAT32_SUM), config
            assert error(result.norm, whole.norm) < EXACT, config
            expected = share(config, whole.gradients, rank)
            assert result.gradients.keys() == expected.keys()
            wrong = {name: error(result.gradients[name], expected[name]) for name in expected}
            assert {name: size for name, size in wrong.items() if not size < EXACT} == {}, config


@pytest.mark.parametrize("tensor", [2, 4])
def test_several_steps_of_the_optimiser_equal_one_device(tensor: int) -> None:
    for config, whole, ranks in itertools.islice(exact(tensor), TRAINED):
        for rank, result in enumerate(ranks):
            assert len(result.losses) == STEPS + 1
            assert result.losses == pytest.approx(whole.losses, rel=FLOAT32_SUM)
            expected = share(config, whole.trained, rank)
            wrong = {name: error(result.trained[name], expected[name]) for name in expected}
            assert {name: size for name, size in wrong.items() if not size < 1e-8} == {}, config


ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 0.05}
"""Largest difference from one device. Partial products are rounded before they are added up."""


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("tensor", [2, 4])
def test_rounded_dtypes_are_close_and_whole_parameters_stay_equal_on_all_ranks(tensor: int, dtype: torch.dtype) -> None:
    case = Compared.of(cases(tensor)[0], (of_rank.rounded[dtype] for of_rank in computed(tensor)))
    shares = [share(case.config, case.whole.gradients, rank) for rank in range(tensor)]
    for name in shares[0]:
        gradients = torch.stack([one.gradients[name] for one in case.ranks])
        assert error(gradients, torch.stack([whole[name] for whole in shares])) < ROUNDED[dtype], name
    for one in case.ranks:
        assert one.hidden.dtype == dtype
        assert error(one.hidden, case.whole.hidden) < ROUNDED[dtype]
        for name in one.trained.keys() - one.slices:
            assert torch.equal(one.gradients[name], case.ranks[0].gradients[name]), name
            assert torch.equal(one.trained[name], case.ranks[0].trained[name]), name


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_that_also_have_different_tokens_and_divide_parameters_equal_one_device(mesh: str) -> None:
    for of_rank in computed(4):
        errors = of_rank.errors[mesh]
        assert len(errors) > 20
        assert {name: size for name, size in errors.items() if not size < EXACT} == {}


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_pass_adds_up_hidden_states_twice_per_layer_and_once_for_the_head(tensor: int) -> None:
    model = cases(tensor)[0].model
    directions = 2 * model.mamba.mimo_rank * model.mamba.d_state  # B and C of the one group
    expected = Counter({(ROWS, TOKENS, model.d_model): 2 * len(model.pattern), (ROWS * TOKENS, model.d_model): 1})
    expected += Counter({(model.mamba.num_angles + directions, model.d_model): 1, (model.mamba.d_state,): 2})
    assert [of_rank.sums for of_rank in computed(tensor)] == [expected] * tensor


WORKS = fixed(2, groups=1, loss="dense")


def geometry(**fields: Any) -> TrainConfig:
    return replace(WORKS, model=replace(WORKS.model, **fields))


REFUSED = {
    "mesh.tensor: is 2; allowed with 257 tokens of the vocabulary (model.vocab_size): 1": geometry(vocab_size=257),
    "mesh.tensor: is 2; allowed with 1 mixer heads (model.d_model * expand / headdim): 1": geometry(
        mamba=MambaConfig(headdim=64)
    ),
    "mesh.tensor: is 2; allowed with 1 attention heads (model.attention.num_heads): 1": geometry(
        attention=AttentionConfig(num_heads=1)
    ),
    "mesh.tensor: is 2; allowed with 1 heads of keys and values (model.attention.num_kv_heads): 1": geometry(
        attention=AttentionConfig(num_heads=4, num_kv_heads=1)
    ),
    "model.attention.latent_rank: is 4; allowed with mesh.tensor 2: 0; one latent vector": geometry(
        attention=AttentionConfig(num_heads=4, latent_rank=4)
    ),
    "mesh.tensor: is 2; allowed with 9 hidden columns of an expert (model.experts.width): 1": geometry(
        pattern="E", experts=ExpertsConfig(width=9)
    ),
    "mesh.tensor: is 2; allowed with 33 hidden columns of the MLP (model.d_model * mlp_ratio): 1": geometry(
        mlp_ratio=33 / 32
    ),
    "mesh.tensor: is 2; allowed with 3 groups of B and C (model.mamba.ngroups): 1": geometry(
        d_model=48, mamba=MambaConfig(headdim=16, ngroups=3)
    ),
    "loss: is compiled; allowed with mesh.tensor 2: dense, chunked; others": replace(WORKS, loss="compiled"),
    "model.projections: is fp8; allowed with mesh.tensor 2: as_dtype; float8": geometry(projections="fp8"),
    "model.scan.lane: is xla; allowed with mesh.tensor 2: reference": geometry(scan=ScanSwitches(lane=Lane.XLA)),
    "optim.algorithm: is muon; allowed with mesh.tensor 2: adamw; Muon": replace(
        WORKS, optim=OptimConfig(algorithm="muon")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_tensor_ranks_cannot_share_is_refused(message: str) -> None:
    check_tensor_parallel(WORKS)
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        check_tensor_parallel(REFUSED[message])
    check_tensor_parallel(replace(REFUSED[message], mesh=MeshConfig()))


def test_allowed_sizes_are_those_with_whole_heads_and_regular_groups_on_every_rank() -> None:
    seen = Counter[bool]()
    for heads, groups, tensor in itertools.product((2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16)):
        if heads % groups:
            continue
        mamba = MambaConfig(headdim=8, ngroups=groups, expand=1)
        model = replace(
            WORKS.model,
            pattern="M",
            vocab_size=272,
            d_model=8 * heads,
            mamba=mamba,
            attention=AttentionConfig(num_heads=1),
        )
        of_ranks = [{head // (heads // groups) for head in heads_of(heads, rank, tensor)} for rank in range(tensor)]
        regular = heads % tensor == 0 and (all(len(own) == 1 for own in of_ranks) or sum(map(len, of_ranks)) == groups)
        seen[regular] += 1
        if regular:
            check_tensor_geometry(model, tensor)
        else:
            with pytest.raises(ConfigError, match=rf"mesh.tensor: is {tensor}; allowed with"):
                check_tensor_geometry(model, tensor)
    assert min(seen.values()) > 30


def test_a_loss_that_cannot_share_the_vocabulary_is_refused_by_itself() -> None:
    hidden, weight, targets = torch.zeros(1, 4, 8), torch.zeros(130, 8), torch.zeros(1, 4, dtype=torch.long)
    two = Group(process_group=None, index=0, size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss: is 'liger'; allowed with a vocabulary on 2 devices: dense, chunked"):
        cross_entropy(hidden, weight, targets, targets == 0, "liger", vocabulary=two)
