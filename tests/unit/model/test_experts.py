"""The mixture of experts against its definition, one token at a time, in float64."""

import math
import random
from dataclasses import replace

import pytest
import torch

from ablate.kernels import facts
from ablate.model.back_end_limits import check_back_ends
from ablate.model.config import ExpertsConfig, HybridConfig, MambaConfig, OptimConfig, TrainConfig
from ablate.model.counts import active_parameters, num_parameters
from ablate.model.errors import ConfigError
from ablate.model.facts import ModelFact
from ablate.model.hybrid import build
from ablate.model.layers.experts import Experts, load_facts
from ablate.model.training.optimizers import optimizer_of


def model_of(experts, d_model=16, pattern="E"):
    mamba = MambaConfig(headdim=8)
    return HybridConfig(vocab_size=300, d_model=d_model, pattern=pattern, mamba=mamba, experts=experts)


def drawn_experts(draw, **fixed):
    number = draw.randint(1, 7)
    fields = {
        "num_experts": number,
        "top_k": draw.randint(1, number),
        "width": draw.choice((8, 16, 24)),
        "shared_width": draw.choice((0, 8, 13)),
        "routing": draw.choice(("learned", "learned", "balanced")),
        "balancing": draw.choice(("bias", "aux_loss", "none")),
        "balance_rate": draw.choice((0.01, 0.5)),
    }
    return ExpertsConfig(**fields | fixed)


def layer_of(config, generator, dtype):
    """A layer without equal numbers, whose bias changes the choice."""
    layer = Experts(config, compute_dtype=dtype)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    layer.bias.copy_(0.2 * torch.randn(layer.bias.shape, generator=generator))
    return layer


def expected(layer, x_TD):
    """Output [T,D], auxiliary loss and rows of every expert by the definition."""
    own, width = layer.config, layer.config.width
    weight = dict(layer.named_parameters())
    outs, counts, shares = [], [0] * own.num_experts, []

    def mlp(x, up, down):
        hidden = up @ x
        return down @ (hidden * (hidden > 0) * hidden)

    for t, x in enumerate(x_TD):
        scores = 1 / (1 + (-(weight["router"] @ x)).exp())
        shares.append(scores / scores.sum())
        if own.routing == "balanced":
            chosen = [(t * own.top_k + j) % own.num_experts for j in range(own.top_k)]
        else:
            chosen = sorted(range(own.num_experts), key=lambda e: -float(scores[e].detach() + layer.bias[e]))[
                : own.top_k
            ]
        total = sum(scores[e] for e in chosen)
        out = 0
        for e in chosen:
            counts[e] += 1
            up = weight["maps.up_proj.weight"][e * width :][:width]
            down = weight["maps.out_proj.weight"][e * len(x) :][: len(x)]
            out = out + scores[e] / total * mlp(x, up, down)
        if own.shared_width:
            out = out + mlp(x, weight["maps.shared_up_proj.weight"], weight["maps.shared_out_proj.weight"])
        outs.append(out)
    mean = torch.stack(shares).mean(0)
    rows = sum(counts)
    aux = own.num_experts * sum(count / rows * share for count, share in zip(counts, mean, strict=True))
    return torch.stack(outs), aux, counts


def error(got, want):
    return float((got.double() - want).detach().norm() / want.detach().norm().clamp_min(1e-300))


@pytest.mark.parametrize(
    ("products", "dtype", "limit"),
    [("loop", torch.float64, 1e-12), ("loop", torch.float32, 1e-4), ("grouped", torch.float32, 1e-4)],
    ids=["loop-float64", "loop-float32", "grouped-float32"],
)
@pytest.mark.parametrize("seed", range(12))
def test_values_gradients_and_load_match_the_definition(seed, products, dtype, limit, monkeypatch):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311  # a reproducible draw
    if dtype is torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    config = model_of(drawn_experts(draw, products=products), d_model=draw.choice((16, 32)))
    layer = layer_of(config, generator, dtype)
    shape = (draw.randint(1, 3), draw.randint(1, 9), config.d_model)
    x_BSD = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    with facts.collect() as seen:
        out = layer(x_BSD, torch.zeros(shape[:2], dtype=torch.int64))
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad(out, (x_BSD, *layer.parameters()), upstream.to(dtype), allow_unused=True)
    wide = layer_of(config, torch.Generator().manual_seed(0), torch.float64)
    for own, other in zip(wide.parameters(), layer.parameters(), strict=True):
        own.data = other.detach().double()
    wide.bias = layer.bias
    x = x_BSD.detach().double().requires_grad_()
    values, aux, counts = expected(wide, x.flatten(0, 1))
    added = aux * config.experts.balance_rate if config.experts.balancing == "aux_loss" else 0
    total = (values.view(shape) * upstream).sum() + added
    want = torch.autograd.grad(total, (x, *wide.parameters()), allow_unused=True)
    assert error(out, values.view(shape)) < limit
    for name, a, b in zip(("x", *dict(layer.named_parameters())), got, want, strict=True):
        if config.experts.top_k == 1 and name == "router":  # one weight is always 1
            continue
        assert error(a, b) < limit, (name, config.experts)
    assert layer.counts.tolist() == counts
    assert seen[ModelFact.EXPERT_PRODUCTS] == products
    assert seen[ModelFact.ROUTING] == config.experts.routing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_and_the_loop_agree_where_experts_get_nothing(dtype):
    config = model_of(ExpertsConfig(num_experts=6, top_k=2, width=16))
    results = []
    for products in ("grouped", "loop"):
        own = replace(config, experts=replace(config.experts, products=products))
        layer = Experts(own, compute_dtype=dtype)
        for parameter in layer.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        layer.bias.copy_(torch.tensor([9.0, 0, 9, 0, 0, 0]))  # every token goes to experts 0 and 2
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = layer(x, torch.zeros(2, 8, dtype=torch.int64))
        gradients = torch.autograd.grad(out, (x, *layer.parameters()), torch.ones_like(out).contiguous())
        results.append([out, *gradients])
        assert layer.counts.tolist() == [16, 0, 16, 0, 0, 0]
        assert (gradients[2].view(6, 16, 16)[1] == 0).all()
        load = dict(load_facts(layer, 1))
        assert load[ModelFact.EXPERT_LOAD] == 3.0
        assert load[ModelFact.EXPERT_ENTROPY] == pytest.approx(math.log(2) / math.log(6))
        assert load[ModelFact.EXPERT_DROPPED] == 0
    for a, b in zip(*results, strict=True):
        assert error(a, b.double()) < (1e-5 if dtype is torch.float32 else 2e-2)


def test_a_balanced_load_is_even_and_dropped_rows_are_counted():
    layer = layer_of(
        model_of(ExpertsConfig(num_experts=8, top_k=3, routing="balanced")), torch.Generator(), torch.float32
    )
    layer(torch.randn(2, 24, 16), torch.zeros(2, 24, dtype=torch.int64))
    assert layer.counts.tolist() == [18] * 8
    assert dict(load_facts(layer, 1)) == {
        ModelFact.EXPERT_LOAD: 1.0,
        ModelFact.EXPERT_ENTROPY: pytest.approx(1.0),
        ModelFact.EXPERT_DROPPED: 0,
    }
    layer.counts[3] -= 5
    assert dict(load_facts(layer, 1))[ModelFact.EXPERT_DROPPED] == 5


@pytest.mark.parametrize("update", ["fused", "foreach", "clip_in_update"])
def test_the_bias_moves_once_a_step_towards_an_even_load(update):
    """It starts at a load as uneven as can be, and only steps of the optimiser move it."""
    experts = ExpertsConfig(num_experts=4, top_k=1, width=8, shared_width=0, balance_rate=0.004)
    config = TrainConfig(model=model_of(experts), optim=OptimConfig(update=update, learning_rate=1e-8))
    model = build(config)
    layer, optimizer = model.blocks[0].mixer, optimizer_of(model, config.optim)
    with torch.no_grad():
        layer.router.mul_(0.1)
        layer.bias.copy_(torch.tensor([0.3, 0, 0, 0]))
    tokens = torch.arange(256).view(2, 128)
    loads = []
    for _ in range(120):
        before = layer.bias.clone()
        model(tokens, torch.zeros_like(tokens)).square().sum().backward()
        counts = layer.counts.double()
        assert torch.equal(layer.bias, before)
        if update == "clip_in_update":
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert torch.allclose(layer.bias - before, 0.004 * (counts.mean() - counts).sign().float(), atol=1e-7)
        with torch.no_grad():
            model(tokens[:1], torch.zeros_like(tokens[:1]))  # a validation leaves the load of the step
        assert torch.equal(layer.counts.double(), counts)
        loads.append(float(counts.max() / counts.mean()))
    assert loads[0] == 4.0
    assert max(loads[-3:]) < 1.5


def test_a_token_uses_the_parameters_of_its_experts_and_all_others():
    experts = ExpertsConfig(num_experts=6, top_k=2, width=24, shared_width=8)
    model = model_of(experts, pattern="EFE")
    assert num_parameters(model) - active_parameters(model) == 2 * 4 * 2 * 16 * 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": OptimConfig(algorithm="muon")}, "optim.algorithm: is muon, which would make the matrices of all"),
        (
            {"model": {"projections": "fp8"}},
            "model.projections: is fp8, which block 'E' (mixture of experts) cannot do",
        ),
        (
            {"experts": {"width": 20}},
            "model.experts.products: is grouped, which takes multiples of 8; the width on a device is",
        ),
        (
            {"compile": True, "dtype": "float32"},
            "model.experts.products: is grouped, which torch's compiler takes in bfloat16 only; allowed with",
        ),
        ({"experts": {"products": "loop"}, "cuda_graph": True}, "cuda_graph: is true; a loop over experts reads"),
    ],
)
def test_what_experts_cannot_do_is_refused(changes, message):
    model, experts = changes.pop("model", {}), changes.pop("experts", {})
    plain = TrainConfig(model=model_of(ExpertsConfig()), dtype="bfloat16")
    check_back_ends(plain)
    own = replace(plain.model, **model, experts=replace(plain.model.experts, **experts))
    with pytest.raises(ConfigError) as caught:
        check_back_ends(replace(plain, model=own, **changes))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, "model.experts.top_k: is 9; allowed: 1 to 8"),
        ({"width": 4}, "model.experts.width: is 4; allowed: 8 to 65536"),
        ({"num_experts": 0}, "model.experts.num_experts: is 0; allowed: 1 to 1024"),
    ],
)
def test_illegal_sizes_name_the_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        ExpertsConfig(**fields)
