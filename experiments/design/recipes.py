"""Named, versioned configurations of model, data and optimiser, and the keys that a spec may override."""

from dataclasses import dataclass, replace
from typing import get_args

from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.block_configs import HeadNorm
from ablate.model.config import (
    BLOCK_KINDS,
    AttentionConfig,
    DataConfig,
    DocumentBorders,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    NormKind,
    OptimConfig,
    RecurrenceConfig,
    TrainConfig,
)
from ablate.model.data.corpus import BUILT_IN


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named complete configuration; a change of any number needs a new version."""

    name: str
    version: int
    summary: str
    config: TrainConfig
    node_classes: tuple[str, ...] = ()
    """Node classes that the recipe is meant for; empty means any."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One key under `workload.overrides`."""

    path: str
    """Dotted TrainConfig field."""
    kind: type[int] | type[float] | type[str]
    description: str
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None


HYBRID_TINY = Recipe(
    name="hybrid-tiny",
    version=1,
    summary="A four-block hybrid that trains a step in well under a second on two CPU cores.",
    config=TrainConfig(
        model=HybridConfig(
            vocab_size=4096,
            d_model=128,
            pattern="MMAF",
            mlp_ratio=2.0,
            mamba=MambaConfig(d_state=32, expand=2, headdim=32, ngroups=1, mimo_rank=4),
            attention=AttentionConfig(num_heads=4),
        ),
        data=DataConfig(seq_len=256, max_corpus_mib=8.0),
        micro_batch=2,
        dtype="float32",
        threads=1,  # the other core serves API, broker and worker; a second thread would measure them too
    ),
)

HYBRID_REF_H200 = Recipe(
    name="hybrid-ref-h200",
    version=3,
    summary="The reference hybrid of one H200 or H100: H16 G1 N64 P64 R4, six mixers, 4096 to 65536 tokens a row.",
    node_classes=("h200", "h100"),
    config=TrainConfig(
        model=HybridConfig(
            vocab_size=32_768,
            d_model=512,
            pattern="MFMFMFAFMFMFMFAF",
            mlp_ratio=2.0,
            mamba=MambaConfig(d_state=64, expand=2, headdim=64, ngroups=1, mimo_rank=4),
            attention=AttentionConfig(num_heads=8, backend="fa4"),
            scan=ScanSwitches(lane=Lane.CUDA),
        ),
        data=DataConfig(seq_len=4096, max_corpus_mib=64.0),
        optim=OptimConfig(learning_rate=1e-3),
        micro_batch=8,
        dtype="bfloat16",
    ),
)

HYBRID_REF_V6E = Recipe(
    name="hybrid-ref-v6e",
    version=1,
    summary="The reference hybrid of one TPU v6e: H24 G1 N64 P64 R4, nine mixer and three attention layers, 8 x 2048.",
    node_classes=("tpu-v6e", "tpu-v6e-compile"),
    config=TrainConfig(
        model=HybridConfig(
            vocab_size=32_768,
            d_model=768,
            pattern="MMMAMMMAMMMA",
            mamba=MambaConfig(d_state=64, expand=2, headdim=64, ngroups=1, mimo_rank=4),
            attention=AttentionConfig(num_heads=6, backend="flash"),
            scan=ScanSwitches(lane=Lane.XLA, chunk_size=32),
        ),
        data=DataConfig(seq_len=2048, max_corpus_mib=64.0),
        optim=OptimConfig(learning_rate=1e-3),
        micro_batch=8,
        dtype="bfloat16",
    ),
)

_NAM56R = TrainConfig(
    model=HybridConfig(
        vocab_size=65_536,
        d_model=3584,
        pattern=("AEMEAEMEAEMR" * 5)[:52],
        mlp_ratio=18_944 / 3584,  # the published width of its MLP, though none of its blocks is one
        mamba=MambaConfig(d_state=64, expand=2, headdim=64, ngroups=8, mimo_rank=4),
        attention=AttentionConfig(num_heads=56, num_kv_heads=8, rope_theta=500_000.0, backend="fa4"),
        experts=ExpertsConfig(num_experts=16, top_k=4, width=896, shared_width=1024),
        recurrence=RecurrenceConfig(num_heads=44, key_width=64, value_width=16, conv_width=4, walk="fused"),
        scan=ScanSwitches(lane=Lane.CUDA),
    ),
    data=DataConfig(seq_len=4096, max_corpus_mib=64.0),
    optim=OptimConfig(learning_rate=3e-4),
    micro_batch=4,
    dtype="bfloat16",
)
"""Letters, widths and numbers of heads as published. docs/recipes.md says what was not, and how near its counts are."""

NAM56R = Recipe(
    name="nam56r",
    version=1,
    summary="The published geometry NAM56R: 52 blocks of attention, experts, mixers and recurrences, 4.5 B parameters.",
    node_classes=("h200",),
    config=_NAM56R,
)

NAM56R_QUARTER = Recipe(
    name="nam56r-quarter",
    version=1,
    summary="The first 13 of the 52 blocks of nam56r, which train on one H200: 1.4 B parameters.",
    node_classes=("h200",),
    config=replace(_NAM56R, model=replace(_NAM56R.model, pattern=_NAM56R.model.pattern[:13])),
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (HYBRID_TINY, HYBRID_REF_H200, HYBRID_REF_V6E, NAM56R_QUARTER, NAM56R)
}
"""All recipes by name."""

UNPUBLISHED = {"nam52": "NAM52 has no published geometry; its depth of 52 and its 4.1 B parameters make no model"}
"""Names of models that people ask for, and why they are no recipes."""


def _int(path: str, description: str, minimum: int, maximum: int) -> Override:
    return Override(path=path, kind=int, description=description, minimum=minimum, maximum=maximum)


def _float(path: str, description: str, minimum: float, maximum: float) -> Override:
    return Override(path=path, kind=float, description=description, minimum=minimum, maximum=maximum)


def _name(path: str, description: str, names: tuple[str, ...]) -> Override:
    described = f"{description}: {' or '.join(names)}"
    return Override(path=path, kind=str, description=described, pattern=f"^({'|'.join(names)})$")


_CORPORA = f"{' or '.join(BUILT_IN)}, or an absolute folder on the node"
_CORPUS = f"^({'|'.join(BUILT_IN)}|/[A-Za-z0-9._/-]{{1,400}})$"

OVERRIDES: dict[str, Override] = {
    "seq_len": _int("data.seq_len", "S, tokens per packed row", 8, 1_048_576),
    "val_seq_len": _int("data.val_seq_len", "tokens per validation row; 0: seq_len of the workload", 0, 1_048_576),
    "documents": _name("data.documents", "attention and state at a document's end", get_args(DocumentBorders)),
    "micro_batch": _int("micro_batch", "B, rows per step", 1, 4096),
    "pattern": Override(
        path="model.pattern",
        kind=str,
        description=f"one letter per block: {', '.join(f'{letter} {kind}' for letter, kind in BLOCK_KINDS.items())}",
        pattern=f"^[{''.join(BLOCK_KINDS)}]{{1,256}}$",
    ),
    "d_model": _int("model.d_model", "residual width", 16, 16_384),
    "expand": _int("model.mamba.expand", "mixer width as a multiple of d_model", 1, 8),
    "headdim": _int("model.mamba.headdim", "P, value width per head", 8, 256),
    "d_state": _int("model.mamba.d_state", "N, state size per head", 8, 256),
    "ngroups": _int("model.mamba.ngroups", "G, groups sharing B and C", 1, 256),
    "mimo_rank": _int("model.mamba.mimo_rank", "R, MIMO rank", 1, 8),
    "rope_fraction": _float("model.mamba.rope_fraction", "share of N that is rotated: 0.5 or 1.0", 0.5, 1.0),
    "a_activation": _name("model.mamba.a_activation", "how dd_A becomes a decay rate", ("heavy_tail", "softplus")),
    "dt_min": _float("model.mamba.dt_min", "smallest step size of the mixer at the start", 1e-6, 1.0),
    "dt_max": _float("model.mamba.dt_max", "largest step size of the mixer at the start", 1e-6, 10.0),
    "num_heads": _int("model.attention.num_heads", "attention heads", 1, 256),
    "num_kv_heads": _int("model.attention.num_kv_heads", "heads of keys and values; 0: as many as num_heads", 0, 256),
    "qk_norm": _name("model.attention.qk_norm", "norm of the heads of queries and keys", get_args(HeadNorm)),
    "window": _int("model.attention.window", "tokens that a token sees at most; 0: its document", 0, 1_048_576),
    "latent_rank": _int("model.attention.latent_rank", "rank of latent attention; 0: none", 0, 4096),
    "rope_theta": _float("model.attention.rope_theta", "base of the rotary periods of attention", 100.0, 1e8),
    "softcap": _float("model.attention.softcap", "attention scores s become c * tanh(s / c); 0 caps nothing", 0.0, 1e4),
    "mlp_ratio": _float("model.mlp_ratio", "hidden width of the MLP as a multiple of d_model", 0.5, 8.0),
    "num_experts": _int("model.experts.num_experts", "experts of a layer", 1, 1024),
    "top_k": _int("model.experts.top_k", "experts of a token", 1, 1024),
    "expert_width": _int("model.experts.width", "hidden width of an expert", 8, 65_536),
    "shared_width": _int("model.experts.shared_width", "hidden width of the shared expert; 0: none", 0, 262_144),
    "balance_rate": _float("model.experts.balance_rate", "step of the bias, or factor of the auxiliary loss", 0.0, 1.0),
    "state_heads": _int("model.recurrence.num_heads", "heads of block R", 1, 1024),
    "key_width": _int("model.recurrence.key_width", "rows of a state of block R", 1, 1024),
    "value_width": _int("model.recurrence.value_width", "columns of a state of block R", 1, 256),
    "conv_width": _int("model.recurrence.conv_width", "tokens that the convolution of block R sees", 1, 16),
    "norm": _name("model.norm", "norm of the residual stream", get_args(NormKind)),
    "vocab_size": _int("model.vocab_size", "tokens in the vocabulary: 256 bytes, end of text, merges", 257, 262_144),
    "learning_rate": _float("optim.learning_rate", "AdamW step size after its warm-up", 1e-8, 1.0),
    "lr_warmup_steps": _int("optim.warmup_steps", "steps over which the step size rises to it", 0, 1_000_000),
    "beta1": _float("optim.beta1", "AdamW decay of the mean gradient", 0.0, 0.9999),
    "beta2": _float("optim.beta2", "AdamW decay of the mean squared gradient", 0.0, 0.99999),
    "weight_decay": _float("optim.weight_decay", "AdamW weight decay", 0.0, 10.0),
    "grad_clip": _float("optim.grad_clip", "global gradient norm at which gradients are clipped", 1e-4, 1e6),
    "loss_chunk_tokens": _int("loss_chunk_tokens", "tokens per chunk when loss is chunked", 16, 1_048_576),
    "max_corpus_mib": _float("data.max_corpus_mib", "text read at most, in MiB", 0.1, 65_536.0),
    "threads": _int("threads", "intra-op CPU threads; 0 takes every core", 0, 1024),
    "val_fraction": _float("data.val_fraction", "share of the files for validation", 0.001, 0.5),
    "corpus": Override(path="data.corpus", kind=str, description=_CORPORA, pattern=_CORPUS),
    "second_corpus": Override(
        path="data.second_corpus",
        kind=str,
        description=f"of further training rows: {_CORPORA}; empty: none",
        pattern=f"^$|{_CORPUS}",
    ),
    "second_share": _float("data.second_share", "share of the training rows from second_corpus", 0.0, 1.0),
}
"""Values that a spec may change in a recipe. All others are gates or need another recipe."""
SHARED = ("val_seq_len", "threads")
"""Values that all arms share: losses are compared over equal validation rows, speeds with equal processors."""
OF_AN_ARM = tuple(name for name in OVERRIDES if name not in SHARED)
"""Values in which a variant may differ. `micro_batch` is a gate, too."""
OF_VALIDATION = ("corpus", "max_corpus_mib", "val_fraction", "second_corpus", "vocab_size")
"""Values that decide the validation rows and their tokens, besides the length of a row."""
OF_TRAINING = (*OF_VALIDATION, "seq_len", "micro_batch", "documents", "second_share")
"""Values that decide the rows of a training step."""
