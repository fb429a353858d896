"""Limits of GPU back ends that a configuration alone shows, so that a plan refuses what every trial would. Torch-free.

Back ends that some nodes lack are tried on each node instead (model/back_ends.py).
"""

from collections.abc import Iterator

from ablate.kernels.backends import Lane
from ablate.model.blocks import BLOCKS
from ablate.model.config import DIVISIBLE_ATTENTION, TrainConfig
from ablate.model.errors import ConfigError

FA4_WIDTHS = tuple(range(32, 257, 32))
"""Head widths whose results were compared with float64. Release 4.0.0b36 takes every multiple of 8 up to 256, but on an
H100 the gradient of q was wrong for heads of 8, 16, 48, 80 and 112 numbers."""
HALF_LANES = (Lane.CUDA, Lane.PEER)
"""Lanes of the scan whose kernels take bfloat16 only."""
HALF_ONLY = ("flash", "fa4", "cudnn")
"""Attention that takes 16-bit numbers only on a GPU."""
NEVER_CAPPED = ("flash", "cudnn", "flex")
"""Attention on a GPU that cannot cap scores."""
NO_WINDOW = ("cudnn",)
"""Attention on a GPU that has no window."""
RULED_WIDTHS = (64, 128)
"""Head widths whose results of kernels with a window or capped scores were compared with float64, on an H200
(tests/unit/model/test_attention_gpu.py)."""
FUSED_KEYS, FUSED_VALUES = (32, 64, 128), (8, 16)
"""Sizes of a recurrence's state that its kernels take."""
GROUPED_MULTIPLE = 8
"""Both sizes of an expert's matrices must be multiples of it: torch's grouped product reads 16 bytes at a time."""
FLOAT8_MULTIPLE = 16
"""Both axes of a float8 product's operands must be multiples of it."""


def check_back_ends(config: TrainConfig) -> None:
    """Raise ConfigError if a back end of `config` would refuse its sizes, its dtype or its neighbours."""
    lane = config.model.scan.lane
    if "M" in config.model.pattern and lane in HALF_LANES and config.dtype != "bfloat16":
        detail = f"is {lane}, which takes bfloat16; allowed with dtype {config.dtype}: {Lane.REFERENCE}"
        raise ConfigError("model.scan.lane", detail)
    if "M" in config.model.pattern and lane is Lane.PEER and config.model.scan.warp_specialize:
        _check_specialized_peer(config)
    if "A" in config.model.pattern:
        _check_attention_on_xla(config) if lane is Lane.XLA else _check_attention(config)
    if lane is Lane.XLA:
        _check_blocks_on_xla(config)
    if "E" in config.model.pattern:
        _check_experts(config)
    if "R" in config.model.pattern and config.model.recurrence.walk == "fused":
        _check_recurrence(config)
    if config.model.projections != "as_dtype":
        _check_float8(config)
    if config.cuda_graph and config.loss == "liger":
        detail = "is true; liger reads the number of targets back to the host, which cannot be recorded"
        raise ConfigError("cuda_graph", f"{detail}; allowed with loss liger: false")


def _check_specialized_peer(config: TrainConfig) -> None:
    where, data, chunk = "model.scan.warp_specialize", config.data, config.model.scan.chunk_size
    detail = "is true, which lane peer does for rows of one document of whole chunks"
    if data.documents != "joined":
        raise ConfigError(where, f"{detail}; allowed with documents {data.documents}: false")
    for tokens in (data.seq_len, data.val_row):
        if tokens % chunk:
            raise ConfigError(where, f"{detail}; allowed with rows of {tokens:,} tokens and chunk_size {chunk}: false")


def _check_attention(config: TrainConfig) -> None:
    where, attention = "model.attention.backend", config.model.attention
    name, width = attention.backend, config.model.head_width
    if name in HALF_ONLY and config.dtype != "bfloat16":
        raise ConfigError(where, f"is {name}, which takes bfloat16; allowed with dtype {config.dtype}: sdpa, flex")
    if name in NEVER_CAPPED and attention.softcap:
        allowed = f"allowed with softcap {attention.softcap}: sdpa"
        raise ConfigError(where, f"is {name}, which cannot cap scores; {allowed}")
    if name in NO_WINDOW and attention.window:
        raise ConfigError(where, f"is {name}, which has no window; allowed with window {attention.window}: sdpa")
    if name != "sdpa" and (attention.softcap or attention.window) and width not in RULED_WIDTHS:
        compared = f"compared with float64 for heads of {', '.join(map(str, RULED_WIDTHS))} numbers only"
        detail = f"is {name}, whose results with a window or capped scores were {compared}; these have {width}"
        raise ConfigError(where, f"{detail}; allowed: sdpa")
    if name == "fa4" and width not in FA4_WIDTHS:
        detail = f"is fa4, which takes heads of {', '.join(map(str, FA4_WIDTHS))} numbers; these have {width}"
        raise ConfigError(where, f"{detail}; allowed: sdpa, flash, flex")


def _check_attention_on_xla(config: TrainConfig) -> None:
    attention = config.model.attention
    for name, value in (("num_kv_heads", attention.num_kv_heads), ("window", attention.window)):
        if value and attention.backend not in DIVISIBLE_ATTENTION:
            detail = f"is {attention.backend}, a kernel for TPUs that has no {name}; allowed with {name} {value}"
            raise ConfigError("model.attention.backend", f"{detail}: {', '.join(DIVISIBLE_ATTENTION)}")


def _check_experts(config: TrainConfig) -> None:
    experts = config.model.experts
    if config.optim.algorithm == "muon":
        detail = "is muon, which would make the matrices of all experts of a layer one orthogonal matrix"
        raise ConfigError("optim.algorithm", f"{detail}; allowed with block 'E': adamw")
    if experts.products == "loop":
        if config.cuda_graph:
            detail = "is true; a loop over experts reads their loads back to the host, which cannot be recorded"
            raise ConfigError("cuda_graph", f"{detail}; allowed with model.experts.products loop: false")
        return
    if config.compile and config.dtype != "bfloat16" and config.mesh.expert == 1:
        detail = "is grouped, which torch's compiler takes in bfloat16 only"
        raise ConfigError("model.experts.products", f"{detail}; allowed with compile and {config.dtype}: loop")
    of_device = experts.width // config.mesh.tensor
    for name, size in (("d_model", config.model.d_model), ("the width on a device", of_device)):
        if size % GROUPED_MULTIPLE:
            detail = f"is grouped, which takes multiples of {GROUPED_MULTIPLE}; {name} is {size:,}; allowed: loop"
            raise ConfigError("model.experts.products", detail)


def _check_recurrence(config: TrainConfig) -> None:
    own = config.model.recurrence
    for name, size, sizes in (
        ("key_width", own.key_width, FUSED_KEYS),
        ("value_width", own.value_width, FUSED_VALUES),
    ):
        if size not in sizes:
            detail = f"is fused, which takes {name} {', '.join(map(str, sizes))}; it is {size}; allowed: loop"
            raise ConfigError("model.recurrence.walk", detail)


def _check_blocks_on_xla(config: TrainConfig) -> None:
    for letter in sorted(set(config.model.pattern)):
        if not BLOCKS[letter].on_xla:
            detail = f"has block {letter!r} ({BLOCKS[letter].name}), which does not run in lane xla"
            raise ConfigError("model.pattern", f"{detail}; allowed lanes: {Lane.REFERENCE}, {Lane.CUDA}, {Lane.PEER}")


def _check_float8(config: TrainConfig) -> None:
    for letter in sorted(set(config.model.pattern)):
        if BLOCKS[letter].widths is None:
            detail = f"is {config.model.projections}, which block {letter!r} ({BLOCKS[letter].name}) cannot do"
            raise ConfigError("model.projections", f"{detail}; allowed: as_dtype")
    for name, size in (*_widths(config), *_tokens(config)):
        if size % FLOAT8_MULTIPLE:
            detail = f"is {config.model.projections}, which takes multiples of {FLOAT8_MULTIPLE}; {name} is {size:,}"
            raise ConfigError("model.projections", f"{detail}; allowed: as_dtype")


def _widths(config: TrainConfig) -> Iterator[tuple[str, int]]:
    model = config.model
    yield "d_model", model.d_model
    for letter in dict.fromkeys(model.pattern):
        widths = BLOCKS[letter].widths
        yield from () if widths is None else widths(model).items()


def _tokens(config: TrainConfig) -> Iterator[tuple[str, int]]:
    """Yield the tokens that one device multiplies at a time, in a step and in validation."""
    data, mesh, rows = config.data, config.mesh, config.micro_batch
    yield "the number of a device's tokens in a step", rows // mesh.data * (data.seq_len // mesh.context)
    for batch in {min(rows, config.steps.val_rows), config.steps.val_rows % rows} - {0}:
        what = f"the number of a device's tokens in a validation batch (rows: {batch})"
        yield what, -(-batch // mesh.data) * (data.val_row // mesh.context)
