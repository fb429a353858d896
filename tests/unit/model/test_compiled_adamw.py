"""AdamW in one compiled kernel per matrix, against a recount in float64 and against torch's fused AdamW."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.model import hybrid
from ablate.model.config import HybridConfig, MambaConfig, OptimConfig, TrainConfig
from ablate.model.errors import ConfigError
from ablate.model.facts import ModelFact
from ablate.model.layers.linear import Linear
from ablate.model.training import compiled_adamw
from ablate.model.training.compiled_adamw import CompiledAdamW
from ablate.model.training.optim_step import DeviceBatch, batch_loss, set_learning_rate, update
from ablate.model.training.optimizers import adamw, optimizer_of

DTYPES = (torch.float32, torch.bfloat16)


class Maps(nn.Module):
    """Linear maps and a vector that is none."""

    def __init__(self, draw: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(draw.choice((1, 3, 16, 37)), draw.choice((1, 8, 33, 64))) for _ in range(draw.randint(1, 4))]
        self.maps = nn.ModuleList(Linear(columns, rows, compute_dtype=dtype) for rows, columns in shapes)
        self.vector = nn.Parameter(torch.empty(draw.randint(1, 9)))


def recount(
    start: Tensor, gradients: list[Tensor | None], rates: list[float], divisors: list[float], config: OptimConfig
) -> Tensor:
    """Return the weights after AdamW's steps in float64. Moments are rounded to the dtype in which they are stored."""
    stored = getattr(torch, config.moments)
    weights, first, second = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for step, (gradient, rate, divisor) in enumerate(zip(gradients, rates, divisors, strict=True), start=1):
        if gradient is None:
            continue
        clipped = gradient.double() / divisor
        exact = (config.beta1 * first + (1 - config.beta1) * clipped, config.beta2 * second)
        first, second = exact[0], exact[1] + (1 - config.beta2) * clipped**2
        root = (second / (1 - config.beta2**step)).sqrt() + 1e-8
        weights = weights * (1 - rate * config.weight_decay) - rate * first / (1 - config.beta1**step) / root
        first, second = first.to(stored).double(), second.to(stored).double()
    return weights


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_updates_equal_a_recount_in_float64(
    dtype: torch.dtype, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mathematics. The compiler would compile each of these sizes; its results are compared below."""
    monkeypatch.setattr(compiled_adamw, "_compiler", lambda: compiled_adamw._update)
    for seed in range(24):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311 - a reproducible draw
        model = Maps(draw, dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=draw.choice((1e-3, 1.0)), generator=generator)
        config = OptimConfig(
            update="compiled",
            moments=moments,  # type: ignore[arg-type]
            beta1=draw.choice((0.0, 0.9) if moments == "bfloat16" else (0.0, 0.9, 0.9999)),
            beta2=draw.choice((0.0, 0.95, 0.99) if moments == "bfloat16" else (0.0, 0.95, 0.999, 0.99999)),
            weight_decay=draw.choice((0.0, 0.1)),
        )
        before = {id(one): one.weight.detach().clone() for one in model.maps}
        maps = [one for one in model.maps if isinstance(one, Linear)]
        optimizer = CompiledAdamW(model, maps, config, partial(adamw, config=config))
        steps = draw.randint(1, 5)
        rates = [draw.choice((0.0, 1e-4, 1e-2)) for _ in range(steps)]
        divisors = [draw.choice((1.0, 1.7, 300.0)) for _ in range(steps)]
        without = draw.choice(maps) if draw.random() < 0.2 else None
        gradients: dict[int, list[Tensor | None]] = {id(one): [] for one in maps}
        for rate, divisor in zip(rates, divisors, strict=True):
            set_learning_rate(optimizer, rate)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(divisor), torch.tensor(0.0)
            for one in maps:
                size = draw.choice((0.0, 1e-6, 1.0, 100.0))
                gradient = (size * torch.randn(one.weight.shape, generator=generator)).to(dtype)
                one.weight.grad = None if one is without else gradient
                gradients[id(one)].append(one.weight.grad)
            model.vector.grad = torch.ones_like(model.vector)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert all(one.weight.grad is None for one in maps)
        for one in maps:
            want = recount(before[id(one)], gradients[id(one)], rates, divisors, config)
            state = optimizer.state[one.weight]
            master = state.get("master", one.weight).detach()
            assert master.dtype == torch.float32
            assert one.weight.dtype == dtype
            assert torch.equal(one.weight.detach(), master.to(dtype))
            assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {getattr(torch, moments)}
            limit = 1e-5 if moments == "float32" else 2e-3  # a moment at half of a rounding step may fall either way
            torch.testing.assert_close(master.double(), want, rtol=limit, atol=limit * sum(rates) + 1e-9)


@pytest.fixture
def nothing_compiled() -> None:
    """The compiler refuses a ninth variant of a function, and the dtypes here are more than those of one trial."""
    torch.compiler.reset()


def run_once(shape: tuple[int, int], dtype: torch.dtype, moments: torch.dtype) -> tuple[list[Tensor], bool]:
    """Return the slots of a drawn matrix after one update, and whether the compiler traced it."""
    generator = torch.Generator().manual_seed(0)
    start, first, second, gradient = (torch.randn(shape, generator=generator) for _ in range(4))
    numbers = (torch.tensor(1.7), torch.tensor(0.999), torch.tensor([3e-3, 2.1]))
    rounded = None if dtype == torch.float32 else start.to(dtype)
    slots = (start.clone(), first.to(moments, copy=True), second.square().to(moments))
    matrix = compiled_adamw._Matrix(*slots, rounded)
    compiled = compiled_adamw._run(matrix, gradient.to(dtype), *numbers, (0.9, 0.95))
    assert not torch.equal(matrix.master, start)
    return [slot for slot in matrix if slot is not None], compiled


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("moments", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_update_equals_the_plain_one(
    dtype: torch.dtype, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in ((30, 100), (64, 48), (17, 129), (4, 4), (1, 1), (128, 3)):
        own, compiled = run_once(shape, dtype, moments)
        with monkeypatch.context() as patch:
            patch.setattr(compiled_adamw, "_compiler", lambda: compiled_adamw._update)
            plain, traced = run_once(shape, dtype, moments)
        assert (compiled, traced) == (True, False)
        for one, other in zip(own, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if one.dtype == torch.float32 else 8e-3, atol=1e-6)


@pytest.mark.usefixtures("nothing_compiled")
def test_one_graph_serves_all_sizes_with_the_divisor_and_its_compiler_knows_the_divisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a thread on a GPU reads single numbers."""
    graphs: list[list[Tensor]] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append([node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")])
        return graph

    compiled = torch.compile(compiled_adamw._update, fullgraph=True, backend=keep)
    monkeypatch.setattr(compiled_adamw, "_compiler", lambda: compiled)
    sizes = [(64, 48), (17, 129), (30, 100), (16, 3), (2048, 33)]
    for shape in (*sizes, *reversed(sizes)):
        run_once(shape, torch.bfloat16, torch.bfloat16)
    matrices = [[one for one in graph if isinstance(one, Tensor) and one.dim() == 2] for graph in graphs]
    assert [{one.shape[1] for one in graph} for graph in matrices] == [{compiled_adamw.LINE}, {1}]
    assert all(isinstance(one.shape[0], torch.SymInt) for graph in matrices for one in graph)
    assert [len(graph) for graph in matrices] == [5, 5]


MODEL = HybridConfig(vocab_size=512, d_model=32, pattern="MFA", mamba=MambaConfig(d_state=8, headdim=16, mimo_rank=2))


def trained(config: TrainConfig, steps: int = 4) -> tuple[list[list[float]], facts.Facts, dict[str, torch.dtype]]:
    model = hybrid.build(config)
    optimizer = optimizer_of(model, config.optim)
    generator, outcomes = torch.Generator().manual_seed(0), []
    for step in range(steps):
        tokens = torch.randint(0, 512, (2, 64), generator=generator)
        ids = (torch.arange(64) > 20).long().expand(2, 64)
        batch = DeviceBatch(tokens, tokens.roll(-1, 1), ids, torch.ones(2, 64, dtype=torch.bool))
        set_learning_rate(optimizer, 1e-3 * (step + 1))
        with facts.collect() as seen:
            loss = batch_loss(model, model.lm_head.weight, batch, config)
            outcomes.append(update(loss, list(model.parameters()), optimizer, config).tolist())
    return outcomes, seen, {name: parameter.dtype for name, parameter in model.named_parameters()}


def test_a_model_in_bfloat16_has_the_losses_of_the_fused_update() -> None:
    config = TrainConfig(model=MODEL, dtype="bfloat16")
    plain, seen, dtypes = trained(replace(config, optim=OptimConfig(update="clip_in_update")))
    assert set(dtypes.values()) == {torch.float32}
    other, own, rounded = trained(replace(config, optim=OptimConfig(update="compiled")))
    assert [loss for loss, _ in other] == [loss for loss, _ in plain]
    assert [norm for _, norm in other] == pytest.approx([norm for _, norm in plain], rel=1e-6)
    assert (seen[ModelFact.ADAMW_UPDATE], own[ModelFact.ADAMW_UPDATE]) == ("clip_in_update", "compiled")
    assert own[ModelFact.ADAMW_MOMENTS] == "float32"
    of_maps = {name for name in dtypes if name.startswith("blocks.") and name.endswith("_proj.weight")}
    assert {name for name, dtype in rounded.items() if dtype == torch.bfloat16} == of_maps
    assert len(of_maps) == 6


def test_moments_in_bfloat16_are_refused_where_they_would_not_move() -> None:
    with pytest.raises(ConfigError, match=r"optim.moments: is bfloat16; allowed with optim.update fused: float32"):
        OptimConfig(moments="bfloat16")
    with pytest.raises(ConfigError, match=r"rounds away small changes .* beta above 0.99; allowed with 0.9 and 0.999"):
        OptimConfig(moments="bfloat16", update="compiled", beta2=0.999)
    assert OptimConfig(moments="bfloat16", update="compiled", beta2=0.99).moments == "bfloat16"
