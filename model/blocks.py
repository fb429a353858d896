"""The model's configuration, and the kinds of residual blocks with all that the rest asks of a kind. Torch-free.

A letter of a pattern is one entry of `BLOCKS`. Symbols: H value heads, G B/C groups, N state size per head, P head
width, R MIMO rank, S sequence length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ablate.kernels.scan_switches import CHUNK_SIZES, MAX_SUPERCHUNK, PIPELINE_STAGES, ScanSwitches
from ablate.model.block_configs import (
    AttentionConfig,
    ExpertsConfig,
    MambaConfig,
    RecurrenceConfig,
    between,
    one_of,
)
from ablate.model.errors import ConfigError

NormKernels: TypeAlias = Literal["torch", "quack"]
StoredDtype: TypeAlias = Literal["float32", "bfloat16"]
ProjectionKind: TypeAlias = Literal["as_dtype", "fp8_forward", "fp8"]
NormKind: TypeAlias = Literal["rms", "layer"]


def _check_scan(scan: ScanSwitches) -> None:
    where = "model.scan."
    one_of(where + "chunk_size", scan.chunk_size, CHUNK_SIZES)
    if scan.superchunk % scan.chunk_size or not 0 <= scan.superchunk <= MAX_SUPERCHUNK:
        allowed = f"a multiple of chunk_size = {scan.chunk_size}, at most {MAX_SUPERCHUNK}; 0 chooses by the sizes"
        raise ConfigError(where + "superchunk", f"is {scan.superchunk}; allowed: {allowed}")
    one_of(where + "pipeline_stages", scan.pipeline_stages, PIPELINE_STAGES)


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """A stack of residual blocks, described by a pattern string such as "MFAF"."""

    vocab_size: int = 4096
    d_model: int = 128
    pattern: str = "MFMFAF"
    """One letter per block, see BLOCKS."""
    mlp_ratio: float = 2.0
    """Hidden width of the gated MLP as a multiple of d_model."""
    norm: NormKind = "rms"
    """Of the residual stream: root mean square, or mean and standard deviation. The mixer's norms are always rms."""
    norm_kernels: NormKernels = "torch"
    """Kernels of the residual sums and their norms: torch's operations, or QuACK's kernel for both (rms only)."""
    projections: ProjectionKind = "as_dtype"
    """Products of the blocks' projections: in the compute dtype, or in float8 forward (`fp8_forward`), or also for the
    gradients of their inputs (`fp8`). The head stays in the compute dtype."""
    residual: StoredDtype = "float32"
    """Dtype of the residual stream between blocks."""
    mamba: MambaConfig = field(default_factory=MambaConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    experts: Annotated[ExpertsConfig, Field(exclude_if=partial(eq, ExpertsConfig()))] = field(
        default_factory=ExpertsConfig
    )
    recurrence: Annotated[RecurrenceConfig, Field(exclude_if=partial(eq, RecurrenceConfig()))] = field(
        default_factory=RecurrenceConfig
    )
    scan: ScanSwitches = field(default_factory=ScanSwitches)
    scan_layers: bool = False
    """Run groups of blocks that repeat, such as MF in MFMF, as one loop of the graph, traced once (lane xla)."""

    def __post_init__(self) -> None:
        _check_scan(self.scan)
        between("model.vocab_size", self.vocab_size, 257, 262_144)
        between("model.d_model", self.d_model, 16, 16_384)
        between("model.mlp_ratio", self.mlp_ratio, 0.5, 8.0)
        between("model.pattern", len(self.pattern), 1, 256)
        unknown = sorted(set(self.pattern) - set(BLOCKS))
        if unknown:
            allowed = ", ".join(f"{letter} ({kind.name})" for letter, kind in BLOCKS.items())
            raise ConfigError("model.pattern", f"has unknown block {unknown[0]!r}; allowed: {allowed}")
        if self.norm_kernels == "quack" and self.norm != "rms":
            raise ConfigError("model.norm_kernels", f"is quack; allowed with model.norm {self.norm}: torch")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.d_inner % self.mamba.headdim:
            raise ConfigError(
                "model.mamba.headdim",
                f"is {self.mamba.headdim}; d_model * expand = {self.d_inner} must be a multiple of it",
            )
        if self.num_value_heads % self.mamba.ngroups:
            raise ConfigError(
                "model.mamba.ngroups",
                f"is {self.mamba.ngroups}; the {self.num_value_heads} heads "
                f"(d_model * expand / headdim) must be divisible by it",
            )
        if self.d_model % (2 * self.attention.num_heads):
            raise ConfigError(
                "model.attention.num_heads",
                f"is {self.attention.num_heads}; d_model = {self.d_model} must be a multiple of twice that",
            )
        if self.attention.latent_rank and self.head_width % 4:
            detail = f"is {self.attention.latent_rank}; half of a head is rotated in pairs, so its width must be a"
            raise ConfigError("model.attention.latent_rank", f"{detail} multiple of 4: {self.head_width}; allowed: 0")

    @property
    def d_inner(self) -> int:
        """Width of the mixer's value path, expand * d_model."""
        return self.d_model * self.mamba.expand

    @property
    def num_value_heads(self) -> int:
        """H = d_model * expand / headdim."""
        return self.d_inner // self.mamba.headdim

    @property
    def mixer_widths(self) -> tuple[int, ...]:
        """Widths of the mixer's input projection, in order: z, x, B, C, dd_dt, dd_A, trap, angles."""
        directions = self.mamba.d_state * self.mamba.ngroups * self.mamba.mimo_rank
        heads = self.num_value_heads
        return (self.d_inner, self.d_inner, directions, directions, heads, heads, heads, self.mamba.num_angles)

    @property
    def head_width(self) -> int:
        """E, width of a head of attention."""
        return self.d_model // self.attention.num_heads

    @property
    def attention_widths(self) -> tuple[int, ...]:
        """Widths of attention's input projection: queries, keys, values; latent: queries, latent, rotated key."""
        attention, width = self.attention, self.head_width
        if attention.latent_rank:
            return (self.d_model, attention.latent_rank, width // 2)
        return (self.d_model, attention.kv_heads * width, attention.kv_heads * width)

    @property
    def latent_width(self) -> int:
        """Outputs of the map of the latent vector: half a key and a value for every head."""
        return self.attention.num_heads * (self.head_width // 2 + self.head_width)

    @property
    def mlp_width(self) -> int:
        """Hidden width of the gated MLP, floor(d_model * mlp_ratio)."""
        return int(self.d_model * self.mlp_ratio)


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """What the rest asks of a kind of blocks."""

    name: str
    """For people."""
    module: str
    """`module:Class` of its mixer, which takes the configuration and `compute_dtype`."""
    parameters: Callable[[HybridConfig], int]
    """Parameters of its block without the norm."""
    flops: Callable[[HybridConfig, int], int]
    """Forward FLOPs per token, from (model, tokens of a row)."""
    idle: Callable[[HybridConfig], int] = lambda _model: 0
    """Parameters of its block that a token does not use."""
    fields: tuple[str, ...] = ()
    """Fields of TrainConfig that have an effect only in a model with such blocks."""
    shares: Callable[[HybridConfig], dict[str, int]] | None = None
    """Numbers of heads or columns that tensor parallel devices share, by name; None: devices cannot share a block."""
    widths: Callable[[HybridConfig], dict[str, int]] | None = None
    """Widths of its projections by name; None: they do not multiply in float8."""
    on_xla: bool = False
    """Whether it runs in lane xla."""


def mixer_parameters(model: HybridConfig) -> int:
    """Return the parameters of one Mamba-3 mixer: projections, two norms, two biases, psi, zeta, phi, dt and D."""
    mamba, heads = model.mamba, model.num_value_heads
    per_rank = 2 * mamba.d_state + 3 * mamba.headdim
    return _mixer_matrices(model) + 2 * mamba.d_state + heads * (mamba.mimo_rank * per_rank + 2)


def attention_parameters(model: HybridConfig) -> int:
    """Return the parameters of one attention block: its matrices and norms."""
    attention = model.attention
    norms = 2 * model.head_width if attention.qk_norm != "none" else attention.latent_rank
    return _attention_matrices(model) + norms


def _attention_matrices(model: HybridConfig) -> int:
    latent = model.attention.latent_rank * model.latent_width
    return model.d_model * (sum(model.attention_widths) + model.d_model) + latent


def mlp_parameters(model: HybridConfig) -> int:
    """Return the parameters of one gated MLP: two matrices in, one out."""
    return 3 * model.d_model * model.mlp_width


def experts_parameters(model: HybridConfig) -> int:
    """Return the parameters of one mixture of experts: router, two matrices of each expert and of the shared one."""
    experts = model.experts
    hidden = experts.num_experts * experts.width + experts.shared_width
    return model.d_model * (experts.num_experts + 2 * hidden)


def idle_parameters(model: HybridConfig) -> int:
    """Return the parameters of the experts that a token does not go to."""
    experts = model.experts
    return 2 * model.d_model * experts.width * (experts.num_experts - experts.top_k)


def experts_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one mixture of experts, independent of the row length."""
    del seq_len
    return 2 * (experts_parameters(model) - idle_parameters(model))


def recurrence_parameters(model: HybridConfig) -> int:
    """Return the parameters of one recurrent block: projections, convolution, state matrices, norm and numbers."""
    own = model.recurrence
    values = own.num_heads * own.value_width
    per_head = own.value_width**2 + 2
    return _recurrence_matrices(model) + own.channels * own.conv_width + own.num_heads * per_head + 2 * values


def recurrence_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one recurrent block: the state times its matrix, and the query's read."""
    del seq_len
    own = model.recurrence
    state = own.key_width * own.value_width
    return 2 * _recurrence_matrices(model) + own.num_heads * 2 * state * (own.value_width + 1)


def _recurrence_matrices(model: HybridConfig) -> int:
    own = model.recurrence
    values = own.num_heads * own.value_width
    return model.d_model * (own.channels + values + own.num_heads + values)


def mixer_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one Mamba-3 mixer, independent of the row length."""
    del seq_len
    return 2 * _mixer_matrices(model) + scan_flops(model)


def scan_flops(model: HybridConfig) -> int:
    """Return the least forward FLOPs per token of one scan: H * R * 4NP."""
    mamba = model.mamba
    return model.num_value_heads * mamba.mimo_rank * 4 * mamba.d_state * mamba.headdim


def attention_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one attention block."""
    return 2 * _attention_matrices(model) + score_flops(model, seq_len)


def score_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of the scores and of their product with the values."""
    seen = min(seq_len, model.attention.window or seq_len)
    return 4 * seen * model.d_model


def mlp_flops(model: HybridConfig, seq_len: int) -> int:
    """Return the forward FLOPs per token of one gated MLP, independent of the row length."""
    del seq_len
    return 2 * mlp_parameters(model)


def _mixer_matrices(model: HybridConfig) -> int:
    return model.d_model * (sum(model.mixer_widths) + model.d_inner)


BLOCKS: dict[str, BlockKind] = {
    "M": BlockKind(
        name="Mamba-3 MIMO mixer",
        module="ablate.model.layers.mamba3:Mamba3",
        parameters=mixer_parameters,
        flops=mixer_flops,
        fields=("model.mamba", "model.scan"),
        shares=lambda model: {"mixer heads (model.d_model * expand / headdim)": model.num_value_heads},
        widths=lambda model: {
            "the width of the mixer's input projection": sum(model.mixer_widths),
            "d_model * expand": model.d_inner,
        },
        on_xla=True,
    ),
    "A": BlockKind(
        name="causal attention",
        module="ablate.model.layers.attention:CausalAttention",
        parameters=attention_parameters,
        flops=attention_flops,
        fields=("model.attention",),
        shares=lambda model: {
            "attention heads (model.attention.num_heads)": model.attention.num_heads,
            "heads of keys and values (model.attention.num_kv_heads)": model.attention.kv_heads,
        },
        widths=lambda model: {
            "the width of attention's input projection": sum(model.attention_widths),
            "attention's latent_rank": model.attention.latent_rank,
            "the width of attention's latent map": model.latent_width if model.attention.latent_rank else 0,
        },
        on_xla=True,
    ),
    "F": BlockKind(
        name="gated MLP",
        module="ablate.model.layers.linear:GatedMLP",
        parameters=mlp_parameters,
        flops=mlp_flops,
        fields=("model.mlp_ratio",),
        shares=lambda model: {"hidden columns of the MLP (model.d_model * mlp_ratio)": model.mlp_width},
        widths=lambda model: {"d_model * mlp_ratio": model.mlp_width},
        on_xla=True,
    ),
    "E": BlockKind(
        name="mixture of experts",
        module="ablate.model.layers.experts:Experts",
        parameters=experts_parameters,
        idle=idle_parameters,
        flops=experts_flops,
        fields=("model.experts",),
        shares=lambda model: {
            "hidden columns of an expert (model.experts.width)": model.experts.width,
            "hidden columns of the shared expert (model.experts.shared_width)": model.experts.shared_width,
        },
    ),
    "R": BlockKind(
        name="matrix-state recurrence",
        module="ablate.model.layers.recurrence:Recurrence",
        parameters=recurrence_parameters,
        flops=recurrence_flops,
        fields=("model.recurrence",),
    ),
}
"""By letter."""

BLOCK_KINDS = {letter: kind.name for letter, kind in BLOCKS.items()}
"""Letters of a pattern string, one residual block each, with their names."""
