"""Typed configuration of model, data, optimiser and run. Torch-free, because the service validates with it.

Every class checks itself on construction and raises `ConfigError` with the dotted path of the field. Symbols: H value
heads, G B/C groups, N state size per head, P head width, R MIMO rank, C chunk length, S sequence length.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ablate.kernels.backends import GENERATED_LANES, Lane
from ablate.model.block_configs import AttentionBackend as AttentionBackend
from ablate.model.block_configs import AttentionConfig as AttentionConfig
from ablate.model.block_configs import ExpertsConfig as ExpertsConfig
from ablate.model.block_configs import MambaConfig as MambaConfig
from ablate.model.block_configs import OmitOne, between, one_of
from ablate.model.block_configs import RecurrenceConfig as RecurrenceConfig
from ablate.model.blocks import BLOCK_KINDS as BLOCK_KINDS
from ablate.model.blocks import BLOCKS
from ablate.model.blocks import HybridConfig as HybridConfig
from ablate.model.blocks import NormKernels as NormKernels
from ablate.model.blocks import NormKind as NormKind
from ablate.model.blocks import ProjectionKind as ProjectionKind
from ablate.model.blocks import StoredDtype as StoredDtype
from ablate.model.errors import ConfigError
from ablate.model.measurements import Phase

LossKind: TypeAlias = Literal["dense", "compiled", "chunked", "torch_linear_ce", "liger", "quack"]
OptimizerKind: TypeAlias = Literal["adamw", "muon"]
AdamWUpdate: TypeAlias = Literal["fused", "foreach", "clip_in_update", "compiled"]
ComputeDtype: TypeAlias = Literal["float32", "bfloat16"]
Sharding: TypeAlias = Literal["fsdp", "replicated", "hsdp"]
DocumentBorders: TypeAlias = Literal["separate", "joined"]

MAX_ROUNDED_BETA = 0.99
"""Largest beta of moments in bfloat16, whose rounding error is up to 0.4 % of a value."""

MESH_SIZES = (1, 2, 4, 8, 16)
"""Numbers of devices that one step can be spread over, if a node class has them."""

DIVISIBLE_ATTENTION = ("sdpa",)
"""Attention that lane xla's partitioner can divide over devices, and that loops over layers can trace. Kernels are
opaque to both."""

CONTEXT_LANES, CONTEXT_ATTENTION = (Lane.REFERENCE, Lane.CUDA), ("sdpa", "flash", "fa4")
"""Lanes of the scan and implementations of attention that work on pieces of rows (context parallel)."""

DIVISIBLE_LOSSES = ("dense", "chunked")
"""Losses that can share the vocabulary between devices."""

MAX_SEED = 2**63 - 1
"""Largest seed of a trial."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source text, tokenised by a BPE trained on it and packed into rows with document ids."""

    corpus: str = "torch-headers"
    """`torch-headers` (the C++ headers in the torch package), `torch-python` (its modules) or an absolute folder."""
    seq_len: int = 256
    """S, tokens per packed row."""
    val_seq_len: int = 0
    """Tokens per validation row; 0: as `seq_len`. Arms with rows of unequal length validate on equal ones."""
    documents: DocumentBorders = "separate"
    """Whether attention and state end with a document inside a training row. Validation rows are always separate."""
    second_corpus: str = ""
    """Another corpus to train on, named like the first. The tokenizer is trained on both, validation rows are of the
    first. Empty: none."""
    second_share: float = 0.0
    """Share of the training rows that come from the second corpus."""
    val_fraction: float = 0.05
    """Share of the files for validation."""
    max_corpus_mib: float = 16.0
    """Most text to read of each corpus, in whole files and a fixed order."""

    def __post_init__(self) -> None:
        between("data.seq_len", self.seq_len, 8, 1_048_576)
        if self.val_seq_len:
            between("data.val_seq_len", self.val_seq_len, 8, 1_048_576)
        between("data.second_share", self.second_share, 0.0, 1.0)
        if self.second_share and not self.second_corpus:
            raise ConfigError("data.second_share", f"is {self.second_share}; allowed without a second_corpus: 0")
        if self.second_corpus == self.corpus:
            raise ConfigError("data.second_corpus", f"is {self.corpus}, as the corpus; allowed: another one")
        between("data.val_fraction", self.val_fraction, 0.001, 0.5)
        between("data.max_corpus_mib", self.max_corpus_mib, 0.1, 65_536)

    @property
    def val_row(self) -> int:
        """Tokens per validation row."""
        return self.val_seq_len or self.seq_len

    @property
    def corpora(self) -> tuple[str, ...]:
        """The corpora that are read."""
        return (self.corpus, self.second_corpus) if self.second_corpus else (self.corpus,)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or Muon with linear warm-up to a constant rate, and gradient clipping."""

    algorithm: OptimizerKind = "adamw"
    """`muon` updates the matrices of the blocks by Muon, with AdamW's rate and decay, and everything else by AdamW."""
    update: AdamWUpdate = "fused"
    """Implementation of AdamW's update and of the clipping, see model/training/optimizers.py."""
    moments: StoredDtype = "float32"
    """Dtype in which compiled updates store both moments of the matrices of the blocks."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    warmup_steps: int = 5

    def __post_init__(self) -> None:
        between("optim.learning_rate", self.learning_rate, 1e-8, 1.0)
        between("optim.weight_decay", self.weight_decay, 0.0, 10.0)
        between("optim.beta1", self.beta1, 0.0, 0.9999)
        between("optim.beta2", self.beta2, 0.0, 0.99999)
        between("optim.grad_clip", self.grad_clip, 1e-4, 1e6)
        between("optim.warmup_steps", self.warmup_steps, 0, 1_000_000)
        if self.algorithm == "muon" and self.update not in ("fused", "foreach"):
            allowed = "allowed with optim.algorithm muon: fused, foreach"
            raise ConfigError("optim.update", f"is {self.update}, which Muon's update cannot do; {allowed}")
        if self.moments == "bfloat16" and self.update != "compiled":
            raise ConfigError("optim.moments", f"is bfloat16; allowed with optim.update {self.update}: float32")
        if self.moments == "bfloat16" and max(self.beta1, self.beta2) > MAX_ROUNDED_BETA:
            detail = f"is bfloat16, which rounds away small changes of a moment with a beta above {MAX_ROUNDED_BETA}"
            raise ConfigError("optim.moments", f"{detail}; allowed with {self.beta1} and {self.beta2}: float32")


@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """Optimiser steps of a trial: step 0 (compilation), then warm-up, then timed steps.

    The number of steps is fixed, so losses at a step can be compared. Passes without an update fill `warmup_s`.
    """

    warmup: int = 3
    """Steps after step 0 that are recorded as warm-up and not timed."""
    warmup_s: float = 0.0
    """Seconds of load before the warm-up steps: forward and backward passes without an update."""
    timed: int = 10
    """Steps of the measured window."""
    slice: int = 0
    """Timed steps per slice. After each slice the other trials of the block run as many. 0: no slices."""
    val_rows: int = 8
    """Validation rows to evaluate after the last step, and every `val_every` timed steps."""
    val_every: int = 0
    """Timed steps from one validation to the next. 0: only one, after the last step."""

    def __post_init__(self) -> None:
        between("steps.warmup", self.warmup, 0, 100_000)
        between("steps.warmup_s", self.warmup_s, 0.0, 3600.0)
        between("steps.timed", self.timed, 1, 1_000_000)
        between("steps.val_rows", self.val_rows, 0, 65_536)
        if self.slice < 0 or (self.slice and self.timed % (2 * self.slice)):
            detail = f"is {self.slice}; allowed: 0, or a size that cuts {self.timed} timed steps into an even number"
            detail += " of slices"
            raise ConfigError("steps.slice", detail)
        between("steps.val_every", self.val_every, 0, self.timed)
        if self.val_every and (self.slice or not self.val_rows):
            allowed = "with steps.val_rows above 0 and without steps.slice"
            raise ConfigError("steps.val_every", f"is {self.val_every}; allowed: 0, or a number {allowed}")

    @property
    def total(self) -> int:
        """Number of optimiser steps: step 0, warm-up, timed."""
        return 1 + self.warmup + self.timed

    def phase_of(self, index: int) -> Phase:
        """Return the phase of a step."""
        return "compile" if index == 0 else "warmup" if index <= self.warmup else "timed"

    @property
    def validated(self) -> tuple[int, ...]:
        """Indices of the steps after which a schedule validates, the last step among them; none without `val_every`."""
        if not self.val_every:
            return ()
        return (*range(self.warmup + self.val_every, self.total - 1, self.val_every), self.total - 1)

    @property
    def slices(self) -> tuple[range, ...]:
        """Indices of the timed steps, one range per slice."""
        first, length = 1 + self.warmup, self.slice or self.timed
        return tuple(range(start, start + length) for start in range(first, self.total, length))


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices that share one step: devices = data * context * tensor. Lane xla divides only the rows (`data`)."""

    devices: int = 1
    sharding: Sharding = "fsdp"
    """Of parameters and optimiser state over the devices with different tokens (`data` and `context`): `fsdp` divides
    them, `replicated` keeps whole copies on each, `hsdp` divides them inside of two halves."""
    tensor: int = 1
    """Devices that share heads and columns of each layer (tensor parallel)."""
    context: int = 1
    """Devices that share the tokens of each row (context parallel)."""
    expert: OmitOne = 1
    """Devices with different tokens (of `data` and `context`) that share the experts of a layer (expert parallel)."""

    def __post_init__(self) -> None:
        one_of("mesh.devices", self.devices, MESH_SIZES)
        for name, value in (("tensor", self.tensor), ("context", self.context), ("expert", self.expert)):
            one_of(f"mesh.{name}", value, MESH_SIZES)
        shares = self.tensor * self.context
        if self.devices % shares:
            name = "tensor" if self.tensor > 1 else "context"
            detail = f"is {getattr(self, name)}; tensor * context = {shares} does not divide {self.devices} devices"
            raise ConfigError(f"mesh.{name}", detail)
        if self.copies % self.expert:
            allowed = ", ".join(str(size) for size in MESH_SIZES if self.copies % size == 0)
            detail = f"is {self.expert}; it does not divide the number of devices with different tokens, {self.copies}"
            raise ConfigError("mesh.expert", f"{detail}; allowed: {allowed}")
        if self.copies == 1 and self.sharding != "fsdp":
            raise ConfigError(
                "mesh.sharding", f"is {self.sharding}; no two devices have different tokens: nothing to divide"
            )
        if self.sharding == "hsdp" and self.copies < 4:
            raise ConfigError("mesh.sharding", f"is hsdp; allowed from 4 devices with different tokens: {self.copies}")

    @property
    def data(self) -> int:
        """Devices that compute different rows."""
        return self.devices // (self.tensor * self.context)

    @property
    def copies(self) -> int:
        """Devices that need the same parameters for different tokens: data * context."""
        return self.devices // self.tensor


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Complete configuration of one trial: the resolved configuration of an arm, and the block's seed."""

    model: HybridConfig = field(default_factory=HybridConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    steps: StepsConfig = field(default_factory=StepsConfig)
    micro_batch: int = 4
    """B, rows per step on all devices together."""
    dtype: ComputeDtype = "float32"
    """Dtype of the matrix multiplications. Master weights and norms stay float32."""
    loss: LossKind = "dense"
    """Implementation of the cross entropy, see model/training/loss.py."""
    loss_chunk_tokens: int = 256
    """Tokens per chunk of the chunked loss."""
    compile: bool = False
    """torch.compile the model."""
    cuda_graph: bool = False
    """Record the whole step after step 0 as a CUDA graph and replay it, see model/training/step_graph.py."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    threads: int = 0
    """Intra-op CPU threads. 0 uses every core of the process's affinity."""
    seed: int = 0

    def __post_init__(self) -> None:
        between("micro_batch", self.micro_batch, 1, 4096)
        if self.micro_batch % self.mesh.data:
            allowed = f"a multiple of the {self.mesh.data} devices that compute different rows"
            raise ConfigError("micro_batch", f"is {self.micro_batch}; allowed: {allowed}")
        if self.data.seq_len % self.mesh.context:
            allowed = f"a number that divides data.seq_len = {self.data.seq_len}"
            raise ConfigError("mesh.context", f"is {self.mesh.context}; allowed: {allowed}")
        between("loss_chunk_tokens", self.loss_chunk_tokens, 16, 1_048_576)
        between("threads", self.threads, 0, 1024)
        if self.model.residual == "bfloat16" and self.dtype != "bfloat16":
            raise ConfigError("model.residual", f"is bfloat16; allowed with dtype {self.dtype}: float32")
        if self.model.norm_kernels == "quack" and self.dtype != "bfloat16":
            raise ConfigError("model.norm_kernels", f"is quack; allowed with dtype {self.dtype}: torch")
        if self.cuda_graph and self.optim.algorithm != "adamw":
            raise ConfigError("cuda_graph", f"is true; allowed with optim.algorithm {self.optim.algorithm}: false")
        between("seed", self.seed, 0, MAX_SEED)

    @property
    def tokens_per_step(self) -> int:
        """B * S."""
        return self.micro_batch * self.data.seq_len


@dataclass(frozen=True)
class LayerRun:
    """Adjacent blocks of a pattern: `trips` times the same group of letters, as one loop if there are several trips."""

    start: int
    """Index of the first block."""
    group: str
    trips: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all trips."""
        return len(self.group) * self.trips


def layer_runs(model: HybridConfig) -> tuple[LayerRun, ...]:
    """Divide the pattern of `model` into runs, so that as few blocks as possible are traced.

    Attention by a TPU kernel runs outside loops, because a kernel cannot be in a traced loop.
    """
    pattern, kernels = model.pattern, model.attention.backend not in DIVISIBLE_ATTENTION
    best: list[tuple[int, tuple[LayerRun, ...]]] = [(0, ())]  # for each suffix of the pattern, the empty one first
    for start in reversed(range(len(pattern))):
        tails = {at: best[len(pattern) - at] for at in range(start + 1, len(pattern) + 1)}
        choices = [LayerRun(start, pattern[start], 1)]
        for length in range(1, (len(pattern) - start) // 2 + 1):
            group, trips = pattern[start : start + length], 2
            while pattern.startswith(group * trips, start) and not (kernels and "A" in group):
                choices.append(LayerRun(start, group, trips))
                trips += 1
        rests = [tails[start + run.num_blocks] for run in choices]
        options = [(len(run.group) + rest[0], (run, *rest[1])) for run, rest in zip(choices, rests, strict=True)]
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


def check_mesh(config: TrainConfig) -> None:
    """Raise ConfigError if a gate prevents spreading a step over the devices of `config`."""
    if config.mesh.devices == 1:
        return
    if config.model.scan.lane is Lane.XLA:
        _check_xla_mesh(config)
    else:
        _check_ranks(config)


def _check_xla_mesh(config: TrainConfig) -> None:
    mesh, devices, model = config.mesh, config.mesh.devices, config.model
    for name, value in (("tensor", mesh.tensor), ("context", mesh.context), ("expert", mesh.expert)):
        if value > 1:
            raise ConfigError(f"mesh.{name}", f"is {value}; lane xla divides rows only; allowed: 1")
    if model.scan_layers:
        detail = f"is true; a loop cannot be divided over {devices} devices; allowed: false"
        raise ConfigError("model.scan_layers", detail)
    if "M" in model.pattern and model.scan.schedule != "chunk_parallel":
        detail = f"is {model.scan.schedule}, which runs on one device, not on {devices}; allowed: chunk_parallel"
        raise ConfigError("model.scan.schedule", detail)
    if "A" in model.pattern and model.attention.backend not in DIVISIBLE_ATTENTION:
        name, able = model.attention.backend, ", ".join(DIVISIBLE_ATTENTION)
        detail = f"is {name}, a kernel that cannot be divided over {devices} devices; allowed: {able}"
        raise ConfigError("model.attention.backend", detail)


def _check_ranks(config: TrainConfig) -> None:
    """Raise ConfigError for a gate that several processes of one step cannot have."""
    mesh = config.mesh
    several = f"with {mesh.devices} devices"
    if config.cuda_graph:
        raise ConfigError("cuda_graph", f"is true; exchanges between devices are not recorded {several}")
    if config.optim.update in ("clip_in_update", "compiled"):
        detail = f"is {config.optim.update}, which computes the norm of one device's gradients; allowed {several}"
        raise ConfigError("optim.update", f"{detail}: fused, foreach")
    divided = mesh.tensor > 1 or (mesh.copies > 1 and mesh.sharding != "replicated")
    if config.optim.algorithm == "muon" and divided:
        detail = "is muon, which needs whole matrices; allowed with divided ones: adamw (or sharding replicated)"
        raise ConfigError("optim.algorithm", detail)
    _check_blocks(config)
    check_tensor_parallel(config)
    check_context_parallel(config)
    _check_expert_parallel(config)


def _check_blocks(config: TrainConfig) -> None:
    whole = sorted(letter for letter in set(config.model.pattern) if BLOCKS[letter].shares is None)
    if whole and config.mesh.tensor * config.mesh.context > 1:
        detail = f"has block {whole[0]!r}, which devices cannot share; allowed with mesh.tensor and mesh.context 1"
        raise ConfigError("model.pattern", detail)


def _check_expert_parallel(config: TrainConfig) -> None:
    expert, number = config.mesh.expert, config.model.experts.num_experts
    if "E" in config.model.pattern and number % expert:
        allowed = ", ".join(str(size) for size in MESH_SIZES if number % size == 0)
        detail = f"is {expert}; allowed with {number} experts (model.experts.num_experts): {allowed}"
        raise ConfigError("mesh.expert", detail)


def check_context_parallel(config: TrainConfig) -> None:
    """Raise ConfigError if a value of `config` prevents dividing its rows over devices."""
    devices, model, rows = config.mesh.context, config.model, config.data.val_row
    if devices == 1:
        return
    if config.steps.val_rows and rows % devices:
        allowed = f"a number that divides the {rows} tokens of a validation row"
        raise ConfigError("mesh.context", f"is {devices}; allowed: {allowed}")
    if "M" in model.pattern and model.scan.lane not in CONTEXT_LANES:
        lane, able = model.scan.lane, ", ".join(CONTEXT_LANES)
        reason = "whose kernels take no initial state" if lane is Lane.PEER else "which divides whole rows only"
        raise ConfigError("model.scan.lane", f"is {lane}, {reason}; allowed with mesh.context {devices}: {able}")
    if "A" in model.pattern and model.attention.backend not in CONTEXT_ATTENTION:
        name, able = model.attention.backend, ", ".join(CONTEXT_ATTENTION)
        detail = f"is {name}, which takes as many keys as queries; allowed with mesh.context {devices}: {able}"
        raise ConfigError("model.attention.backend", detail)
    if model.scan_layers:
        detail = "is true; the layers of a loop cannot exchange messages"
        raise ConfigError("model.scan_layers", f"{detail}; allowed with mesh.context {devices}: false")


def check_tensor_geometry(model: HybridConfig, tensor: int) -> None:
    """Raise ConfigError if `tensor` devices cannot share the heads and columns of every layer of `model`."""
    groups = model.mamba.ngroups
    divided = {"tokens of the vocabulary (model.vocab_size)": model.vocab_size}
    for letter in dict.fromkeys(model.pattern):
        shares = BLOCKS[letter].shares
        divided |= {} if shares is None else shares(model)
    for name, size in divided.items():
        if size % tensor:
            allowed = ", ".join(str(devices) for devices in MESH_SIZES if size % devices == 0)
            raise ConfigError("mesh.tensor", f"is {tensor}; allowed with {size} {name}: {allowed}")
    if "M" in model.pattern and groups % tensor and tensor % groups:
        sizes = (devices for devices in MESH_SIZES if groups % devices == 0 or devices % groups == 0)
        detail = f"is {tensor}; allowed with {groups} groups of B and C (model.mamba.ngroups)"
        raise ConfigError("mesh.tensor", f"{detail}: {', '.join(map(str, sizes))}")


def check_tensor_parallel(config: TrainConfig) -> None:
    """Raise ConfigError if the layers of `config` cannot be shared by `mesh.tensor` devices."""
    tensor, model = config.mesh.tensor, config.model
    if tensor == 1:
        return
    check_tensor_geometry(model, tensor)
    lanes = tuple(lane for lane in Lane if lane is not Lane.XLA)
    latent = model.attention.latent_rank if "A" in model.pattern else 0
    rules: tuple[tuple[str, Any, tuple[Any, ...], str], ...] = (
        ("loss", config.loss, DIVISIBLE_LOSSES, "others need the whole vocabulary on one device"),
        ("model.projections", model.projections, ("as_dtype",), "float8 scales whole rows and columns"),
        ("model.scan.lane", model.scan.lane, lanes, "lane xla divides only the rows of a batch"),
        ("optim.algorithm", config.optim.algorithm, ("adamw",), "Muon makes whole matrices orthogonal"),
        ("model.attention.latent_rank", latent, (0,), "one latent vector serves the heads of all devices"),
    )
    for name, value, allowed, reason in rules:
        if value not in allowed:
            choices = ", ".join(str(choice).lower() for choice in allowed)
            raise ConfigError(name, f"is {str(value).lower()}; allowed with mesh.tensor {tensor}: {choices}; {reason}")


def generates_code(config: TrainConfig) -> bool:
    """Return whether a pass before step 0 compiles something for `config`.

    True for torch.compile, flex attention, compiled updates and the scan in lanes cuda and peer. False on XLA, which
    compiles the graph of a step when the step ends: its first steps compile, and none after them.
    """
    return uses_inductor(config) or ("M" in config.model.pattern and config.model.scan.lane in GENERATED_LANES)


def uses_inductor(config: TrainConfig) -> bool:
    """Return whether torch's compiler generates code for `config`."""
    flex = "A" in config.model.pattern and config.model.attention.backend == "flex"
    return config.compile or flex or config.loss == "compiled" or config.optim.update == "compiled"
