"""Sizes and settings of each kind of blocks, one class for each letter that has its own. Torch-free.

Every class checks itself on construction and raises `ConfigError` with the dotted path of the field.
"""

from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ablate.model.errors import ConfigError

AttentionBackend: TypeAlias = Literal["sdpa", "flash", "fa4", "cudnn", "flex", "splash", "pallas_softcap"]
Routing: TypeAlias = Literal["learned", "balanced"]
Balancing: TypeAlias = Literal["bias", "aux_loss", "none"]
ExpertProducts: TypeAlias = Literal["grouped", "loop"]
RecurrenceWalk: TypeAlias = Literal["loop", "fused"]
HeadNorm: TypeAlias = Literal["none", "rms"]
OmitZero: TypeAlias = Annotated[int, Field(exclude_if=partial(eq, 0))]
"""A number that receipts leave out where it is 0, so that a receipt from before the field keeps its digest."""
OmitOne: TypeAlias = Annotated[int, Field(exclude_if=partial(eq, 1))]
"""The same where it is 1."""


def between(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError if `value` lies outside of a range."""
    if not low <= value <= high:
        raise ConfigError(name, f"is {value}; allowed: {low} to {high}")


def one_of(name: str, value: float, allowed: tuple[float, ...]) -> None:
    """Raise ConfigError if `value` is none of the `allowed` numbers."""
    if value not in allowed:
        raise ConfigError(name, f"is {value}; allowed: {', '.join(map(str, allowed))}")


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Geometry and initialisation of one Mamba-3 MIMO mixer."""

    d_state: int = 64
    """N, state size per head."""
    expand: int = 2
    """d_inner = expand * d_model."""
    headdim: int = 64
    """P, value width per head."""
    ngroups: int = 1
    """G, groups sharing B and C."""
    mimo_rank: int = 4
    """R."""
    rope_fraction: float = 0.5
    """Share of N that is rotated: 0.5 or 1.0."""
    a_activation: Literal["heavy_tail", "softplus"] = "heavy_tail"
    """How dd_A becomes a decay rate. Upstream changed softplus to heavy_tail in 2026-06."""
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    a_floor: float = 1e-4

    def __post_init__(self) -> None:
        where = "model.mamba."
        between(where + "d_state", self.d_state, 8, 256)
        between(where + "expand", self.expand, 1, 8)
        between(where + "headdim", self.headdim, 8, 256)
        between(where + "ngroups", self.ngroups, 1, 256)
        one_of(where + "mimo_rank", self.mimo_rank, (1, 2, 4, 8))
        one_of(where + "rope_fraction", self.rope_fraction, (0.5, 1.0))
        if self.d_state % 4:
            raise ConfigError(where + "d_state", f"is {self.d_state}; allowed: a multiple of 4 (rotary pairs)")
        if not 0 < self.dt_min < self.dt_max:
            raise ConfigError(where + "dt_min", f"is {self.dt_min}; allowed: 0 < dt_min < dt_max = {self.dt_max}")

    @property
    def num_angles(self) -> int:
        """nA, rotary angles per head: half of the rotated width, floor(N * rope_fraction) made even."""
        return int(self.d_state * self.rope_fraction) // 2


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal self-attention with rotary positions, masked at document boundaries."""

    num_heads: int = 4
    num_kv_heads: OmitZero = 0
    """Heads of keys and values, each shared by equally many heads of queries. 0: as many as `num_heads`."""
    qk_norm: Annotated[HeadNorm, Field(exclude_if=partial(eq, "none"))] = "none"
    """Norm of each head of queries and of keys before its rotation, with one weight for all heads of a layer."""
    window: OmitZero = 0
    """Tokens that a token sees at most: itself and those before it in its document. 0: the whole document."""
    latent_rank: OmitZero = 0
    """r: keys and values of all heads are linear maps of one normed vector of r numbers per token (latent attention);
    only half of a head is rotated, and that half of the keys is one for all heads. 0: from the whole token."""
    backend: AttentionBackend = "sdpa"
    """Implementation, see model/layers/attention.py. `sdpa` builds the document mask and lets torch choose a kernel."""
    softcap: float = 0.0
    """Scores s are capped to softcap * tanh(s / softcap) before the mask. 0 caps nothing."""
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        where = "model.attention."
        between(where + "softcap", self.softcap, 0.0, 1e4)
        between(where + "num_heads", self.num_heads, 1, 256)
        between(where + "num_kv_heads", self.num_kv_heads, 0, self.num_heads)
        between(where + "window", self.window, 0, 1_048_576)
        between(where + "latent_rank", self.latent_rank, 0, 4096)
        between(where + "rope_theta", self.rope_theta, 100.0, 1e8)
        if self.num_heads % self.kv_heads:
            detail = f"is {self.num_kv_heads}; allowed: 0, or a number that divides num_heads = {self.num_heads}"
            raise ConfigError(where + "num_kv_heads", detail)
        if self.latent_rank and self.kv_heads != self.num_heads:
            detail = f"is {self.num_kv_heads}; latent attention makes keys and values for every head; allowed: 0"
            raise ConfigError(where + "num_kv_heads", detail)
        if self.latent_rank and self.qk_norm != "none":
            detail = f"is {self.qk_norm}; latent attention norms its latent vector instead; allowed: none"
            raise ConfigError(where + "qk_norm", detail)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_kv_heads or self.num_heads


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: each token goes to `top_k` of them, and to one that all share."""

    num_experts: int = 8
    top_k: int = 2
    """Experts of a token."""
    width: int = 128
    """Hidden width of an expert, which has two matrices."""
    shared_width: int = 128
    """Hidden width of the expert that every token goes to. 0: none."""
    routing: Routing = "learned"
    """`balanced` gives every expert equally many tokens, whatever the scores: a speed, no model."""
    balancing: Balancing = "bias"
    """How a learned load becomes even, see model/layers/experts.py."""
    balance_rate: float = 1e-3
    """Step of the bias at each update, or factor of the auxiliary loss."""
    products: ExpertProducts = "grouped"
    """Implementation of the experts' products, see model/layers/experts.py."""

    def __post_init__(self) -> None:
        where = "model.experts."
        between(where + "num_experts", self.num_experts, 1, 1024)
        between(where + "top_k", self.top_k, 1, self.num_experts)
        between(where + "width", self.width, 8, 65_536)
        between(where + "shared_width", self.shared_width, 0, 262_144)
        between(where + "balance_rate", self.balance_rate, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """A recurrent block with a matrix state per head."""

    num_heads: int = 4
    key_width: int = 16
    """K, rows of a state. All heads read one key and one query."""
    value_width: int = 16
    """V, columns of a state."""
    conv_width: int = 4
    """Tokens that the convolution of queries, keys and values sees."""
    walk: RecurrenceWalk = "loop"
    """Implementation of the recurrence: a loop in torch's operations, or a `fused` kernel for GPUs."""

    def __post_init__(self) -> None:
        where = "model.recurrence."
        between(where + "num_heads", self.num_heads, 1, 1024)
        between(where + "key_width", self.key_width, 1, 1024)
        between(where + "value_width", self.value_width, 1, 256)
        between(where + "conv_width", self.conv_width, 1, 16)

    @property
    def channels(self) -> int:
        """C, channels of the convolution: query, key and the values of all heads."""
        return 2 * self.key_width + self.num_heads * self.value_width
