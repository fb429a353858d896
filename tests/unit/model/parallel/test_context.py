"""Pieces of rows on several ranks against the whole rows on one, in float64."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.config import (
    CONTEXT_ATTENTION,
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    MeshConfig,
    check_tensor_geometry,
)
from ablate.model.data.packing import Batch
from ablate.model.errors import ConfigError
from ablate.model.hybrid import Hybrid, initialise
from ablate.model.layers.attention import PLAIN, ScoreRules, document_mask, for_every_head, masked_attention
from ablate.model.parallel import context
from ablate.model.parallel.context import (
    ATTEND_OVER_PIECES,
    PieceExchange,
    packed_keys,
    row_piece,
    spread_rows,
    visible_keys,
)
from ablate.model.parallel.ranks import Group
from ablate.model.parallel.tensor import divide_layers, gradient_norm
from ablate.model.training.loss import cross_entropy
from tests.ranks import run_ranks

VOCAB = 258
ENVELOPE = 1e-12
"""Largest error in float64, relative to the largest number of the tensor; rotary angles are float32 on both sides."""


def drawn_config(draw, tensor):
    """A small model of random geometry, of every kind of layer, that `tensor` ranks can share."""
    while True:
        config = _drawn_config(draw)
        try:
            check_tensor_geometry(config, tensor)
        except ConfigError:
            continue
        return config


def _drawn_config(draw):
    groups, heads_of_attention = draw.choice((1, 2)), draw.choice((1, 2, 4))
    return HybridConfig(
        vocab_size=VOCAB,
        d_model=16,
        pattern="".join(draw.choices("MAFE", k=draw.randint(0, 2))) + draw.choice(("MA", "AM", "MM", "MFA", "AA")),
        norm=draw.choice(("rms", "layer")),
        mamba=MambaConfig(
            d_state=draw.choice((8, 16)),
            headdim=draw.choice((8, 16)),
            ngroups=groups,
            mimo_rank=draw.choice((1, 2, 4)),
            rope_fraction=draw.choice((0.5, 1.0)),
            a_activation=draw.choice(("heavy_tail", "softplus")),
        ),
        attention=drawn_attention(draw, heads_of_attention),
        experts=ExpertsConfig(
            num_experts=4, width=8, shared_width=8, products="loop", balancing=draw.choice(("bias", "none"))
        ),
        scan=ScanSwitches(
            chunk_size=draw.choice((8, 16)),
            schedule=draw.choice(("sequential", "chunk_parallel")),
            psiv_cache=draw.choice((False, True)),
        ),
    )


def drawn_attention(draw, heads):
    """Shared heads of keys with and without norms, a window, capped scores, or latent attention."""
    fields = {"num_heads": heads, "softcap": draw.choice((0.0, 0.0, 2.0)), "window": draw.choice((0, 0, 1, 3, 9))}
    if draw.random() < 0.25:
        return AttentionConfig(**fields, latent_rank=draw.choice((4, 7)))
    shared = draw.choice([number for number in (1, 2, 4) if heads % number == 0])
    return AttentionConfig(**fields, num_kv_heads=shared, qk_norm=draw.choice(("none", "rms")))


def drawn_ids(draw, length, pieces):
    """Documents of one row: any cuts, borders of pieces, single tokens beside them, and ids that return."""
    borders = range(length // pieces, length, length // pieces)
    near = [place for border in borders for place in (border - 1, border, border + 1)]
    share = draw.choice((0.0, 0.1, 0.4))
    cuts = {place for place in near if draw.random() < share} | set(
        draw.choices(range(1, length), k=draw.choice((0, 1, 3)))
    )
    cuts = sorted(cut for cut in cuts if 0 < cut < length)
    ids, last = [], -1
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        last = draw.choice([number for number in range(3) if number != last])
        ids += [last] * (end - start)
    return ids


def drawn_batch(draw, rows, length, pieces):
    ids = np.array([drawn_ids(draw, length, pieces) for _ in range(rows)])
    tokens = np.array([[draw.randrange(VOCAB) for _ in range(length + 1)] for _ in range(rows)])
    valid = np.array([[draw.random() < 0.8 for _ in range(length)] for _ in range(rows)])
    without = draw.randrange(pieces + 1)  # a piece without a valid target, or none
    valid[:, without * (length // pieces) :][:, : length // pieces] = False
    valid[0, 0] |= not valid.any()
    return Batch(tokens[:, :-1], tokens[:, 1:], ids, valid)


def double_model(config, seed):
    """Build a model that computes in float64 throughout, except its tables of rotary angles."""
    torch.Tensor.float = torch.Tensor.double  # what layers keep in float32; this process runs nothing else
    model = Hybrid(config, compute_dtype=torch.float64).double()
    initialise(model, seed=seed)
    return model


def hidden_and_loss(model, batch, total, vocabulary=None):
    """Hidden states of `batch`, and the sum of its losses divided by `total` valid targets."""
    tokens, targets, ids, valid = map(torch.from_numpy, batch)
    hidden = model(tokens, ids)
    loss = cross_entropy(hidden, model.lm_head.weight, targets, valid, vocabulary=vocabulary)
    return hidden, loss * valid.sum() / total


def error(value, expected):
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def plain_attention(q_BSHE, k, v, edges, rules=PLAIN):
    """The contract of a varlen kernel, document by document: the last query sees all keys of its document."""
    outs, tensors = [], [t.flatten(0, -3) for t in (q_BSHE, *(for_every_head(t, q_BSHE) for t in (k, v)))]
    for document in range(len(edges.of_queries) - 1):
        queries, keys = (slice(*e[document : document + 2].tolist()) for e in edges[:2])
        q, k, v = (t[place] for t, place in zip(tensors, (queries, keys, keys), strict=True))
        scores = torch.einsum("qhe,khe->hqk", q, k) * q.shape[-1] ** -0.5
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        unseen = (behind < 0) | (behind >= (rules.window or len(k)))
        scores = rules.softcap * (scores / rules.softcap).tanh() if rules.softcap else scores
        outs.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(unseen, -torch.inf).softmax(2), v))
    return torch.cat(outs).view(q_BSHE.shape)


def compare(ranks, seeds, blocking):
    """Largest errors of hidden states and gradients by seed, on this rank.

    With `blocking` a rank that sends waits for the receiver, as messages in one queue of a GPU may. GPU kernels are
    replaced by `plain_attention`.
    """
    context.flash_attention = context.fa4_attention = plain_attention
    if blocking:
        PieceExchange.send = lambda exchange, tensor, to: dist.send(
            tensor, group=ranks.context.process_group, group_dst=to
        )
    return [_compare(ranks, random.Random(seed)) for seed in seeds]  # noqa: S311 - a seeded draw


def _compare(ranks, draw):
    pieces, rows = ranks.context.size, ranks.data.size * draw.randint(1, 2)
    config = drawn_config(draw, ranks.tensor.size)
    batches = [drawn_batch(draw, rows, pieces * draw.randint(1, 12), pieces) for _ in range(2)]
    model = double_model(config, draw.randrange(100))
    whole = [hidden_and_loss(model, batch, batch.valid.sum()) for batch in batches]
    (whole[0][1] + 2 * whole[1][1]).backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    norm = gradient_norm(model)
    model.zero_grad()
    slices = divide_layers(model, ranks)
    backend = draw.choice(CONTEXT_ATTENTION) if not config.attention.softcap else "sdpa"
    for block in model.blocks:
        block.mixer.backend = backend
    spread_rows(model, ranks)
    vocabulary = ranks.tensor if ranks.tensor.size > 1 else None
    own = [Batch(*(part[_share(ranks.data, rows)] for part in batch)) for batch in batches]
    parts = [
        hidden_and_loss(model, row_piece(piece, ranks.context), batch.valid.sum(), vocabulary)
        for piece, batch in zip(own, batches, strict=True)
    ]
    (parts[0][1] + 2 * parts[1][1]).backward()
    errors = {}
    for place, ((hidden, _), (expected_hidden, _)) in enumerate(zip(parts, whole, strict=True)):
        matching = ranks.context.part(expected_hidden[_share(ranks.data, rows)], 1)
        errors[f"hidden {place}"] = error(hidden.detach(), matching.detach())
        with torch.no_grad():
            again = model(*(torch.from_numpy(row_piece(own[place], ranks.context)[part]) for part in (0, 2)))
        errors[f"validation {place}"] = error(again, hidden.detach())
    for name, parameter in model.named_parameters():
        parameter.grad = ranks.rows.sum(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        if parameter.shape == expected.get(name, torch.empty(0)).shape:  # else a slice, which only the norm sees
            errors[name] = error(parameter.grad, expected[name])
    errors["norm"] = error(gradient_norm(model, (slices, ranks.tensor)), norm)
    return config.pattern, errors


def _share(group, rows):
    return slice(group.index * rows // group.size, (group.index + 1) * rows // group.size)


@pytest.mark.parametrize(
    ("mesh", "seeds", "blocking"),
    [
        (MeshConfig(devices=2, context=2), range(6), False),
        (MeshConfig(devices=4, context=4), range(100, 105), True),
        (MeshConfig(devices=4, context=2), range(200, 202), False),
        (MeshConfig(devices=4, context=2, tensor=2), range(300, 303), False),
    ],
    ids=("2", "4", "2 beside 2", "2 of 2 shares"),
)
def test_pieces_on_ranks_equal_whole_rows(mesh, seeds, blocking):
    for by_seed in run_ranks(mesh, compare, list(seeds), blocking):
        for seed, (pattern, errors) in zip(seeds, by_seed, strict=True):
            wrong = {name: size for name, size in errors.items() if not size < ENVELOPE}
            assert wrong == {}, f"seed {seed}, pattern {pattern}"


@pytest.mark.parametrize("seed", range(12))
def test_keys_packed_for_a_varlen_kernel_give_the_values_of_the_whole_rows(seed, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # scores are capped in float32
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311 - a seeded draw
    pieces, rows, length = draw.choice((2, 4, 8)), draw.randint(1, 3), draw.randint(1, 9)
    ids_BT = torch.tensor([drawn_ids(draw, pieces * length, pieces) for _ in range(rows)])
    ids_CBS = torch.stack(ids_BT.chunk(pieces, 1))
    q, k, v = torch.randn(3, rows, pieces * length, 2, 4, generator=generator, dtype=torch.float64)
    k, v = k[..., : draw.choice((1, 2)), :], v[..., : draw.choice((1, 2)), :]
    rules = ScoreRules(softcap=draw.choice((0.0, 2.0)), window=draw.choice((0, 1, 4)))
    expected = masked_attention(q, k, v, document_mask(ids_BT), rules).chunk(pieces, 1)
    visible = [visible_keys(ids_CBS, index) for index in range(pieces)]
    for index, own in enumerate(visible):
        assert all((index, tokens) in visible[source].sent for source, tokens in own.received)
        assert all((index, tokens) in visible[to].received for to, tokens in own.sent)
        q_BSHE = q.chunk(pieces, 1)[index]
        k_BKHE, v_BKHE = (
            torch.cat(
                [*(t.chunk(pieces, 1)[at][:, length - n :] for at, n in own.received), t.chunk(pieces, 1)[index]], 1
            )
            for t in (k, v)
        )
        masked = masked_attention(q_BSHE, k_BKHE, v_BKHE, own.mask, rules)
        packed = packed_keys(own.query_runs_BS, own.key_runs_BK)
        out = plain_attention(q_BSHE, packed.of(k_BKHE), packed.of(v_BKHE), packed.edges, rules)
        assert error(masked, expected[index]) < ENVELOPE
        assert error(out, expected[index]) < ENVELOPE
        edges, sizes = packed.edges, [e.diff() for e in packed.edges[:2]]
        assert [e.dtype for e in edges[:2]] == [torch.int32] * 2
        assert (edges.most_queries, edges.most_keys) == (int(sizes[0].max()), int(sizes[1].max()))
        assert packed.of(k_BKHE).shape[0] == int(edges.of_keys[-1])


def test_no_key_is_sent_that_no_document_reaches():
    ids_CBS = torch.tensor([[[0, 1, 1]], [[1, 1, 1]], [[1, 2, 2]], [[3, 3, 2]]])
    visible = [visible_keys(ids_CBS, index) for index in range(4)]
    assert [keys.received for keys in visible] == [(), ((0, 2),), ((0, 2), (1, 3)), ()]
    assert [keys.sent for keys in visible] == [((1, 2), (2, 2)), ((2, 3),), (), ()]


def test_targets_of_a_piece_reach_into_the_next_one():
    numbers = np.arange(10, dtype=np.int64).reshape(2, 5)
    batch = Batch(numbers[:, :4], numbers[:, 1:], numbers[:, :4] // 5, numbers[:, :4] % 2 == 0)
    first, last = (row_piece(batch, Group(None, index, 2)) for index in range(2))
    assert first.targets.tolist() == [[1, 2], [6, 7]]
    assert last.tokens.tolist() == [[2, 3], [7, 8]]
    assert all(part.flags.c_contiguous and part.shape == (2, 2) for part in (*first, *last))
    with pytest.raises(ValueError, match=r"rows have 4 tokens; allowed on 3 ranks: a multiple of 3"):
        row_piece(batch, Group(None, 0, 3))


def test_attention_over_pieces_is_implemented_for_the_allowed_back_ends():
    assert tuple(ATTEND_OVER_PIECES) == CONTEXT_ATTENTION
