"""The receipt: the immutable, digested JSON record of one trial. Raw samples are kept and marked, never dropped."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from experiments.outcomes import FailureClass, Outcome

SCHEMA_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Step(_Part):
    """One optimiser step as it was measured."""

    index: int
    phase: Literal["compile", "warmup", "timed"]
    """Step 0 is `compile`; only `timed` steps enter the window."""
    seconds: float
    tokens: int
    """Tokens processed in this step, B * S."""
    loss: float
    """Mean cross entropy in nats over valid tokens, before the update."""
    grad_norm: float
    """Global L2 norm before clipping."""
    clock_mhz: float | None = None
    """Device clock where it can be read."""


class Digests(_Part):
    """What this receipt is chained to."""

    spec: str
    rule: str
    arm: str
    code: str
    """Of the source files of model, kernels and workers that ran."""
    data: str
    """Of tokenizer, packed rows and split."""


class Ids(_Part):
    """Where the trial belongs."""

    ablation: str
    block: str
    block_index: int
    position: int
    """Place of this arm in the block's order, from 0."""
    trial: str
    attempt: str
    node: str
    device: str


class Environment(_Part):
    """What the trial ran on."""

    node_name: str
    node_class: str
    device_name: str
    device_serial: str | None
    git_commit: str | None
    git_dirty_digest: str | None
    """Digest of the uncommitted patch; None when the tree is clean or there is no repository."""
    versions: Mapping[str, str]
    """python, torch, driver, cuda, tilelang, torch_xla ... as far as present."""
    cpu_threads: int
    load_average_before: float | None
    """One-minute load average just before the trial, CPU nodes."""
    throttle: Mapping[str, Any] | None = None
    """Throttle reasons and ECC counters where the device reports them."""


class GateReading(_Part):
    """Requested against observed, for one gate."""

    requested: Any
    observed: Any
    """None when this lane cannot observe it."""
    live: bool
    how: str
    """What was looked at, for example "fact mamba3_mimo.schedule"."""


class Memory(_Part):
    """Peaks in bytes. On CPU nodes allocated is the growth of the resident set over the trial's start."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Device pool on an accelerator, peak resident set on a CPU node."""
    limit_bytes: int | None


class Summary(_Part):
    """Numbers derived from the raw steps by the declared estimator; recomputed by `verify`."""

    timed_steps: int
    step_s_mean: float
    step_s_median: float
    tokens_per_s: float
    """Tokens of the timed window over its seconds, after the outlier rule (mean estimator)."""
    model_tflops_per_s: float
    mfu: float | None
    loss_step1: float
    """Loss of the first step (index 0), the one before any update."""
    loss_final: float
    """Mean loss of the last quarter of the timed steps, at least one."""
    loss_val: float | None


class Receipt(_Part):
    """The record of one trial."""

    schema_version: int = SCHEMA_VERSION
    ids: Ids
    arm: str
    role: Literal["baseline", "variant"]
    seed: int
    outcome: Outcome
    failure_class: FailureClass | None = None
    message: str | None = None
    digests: Digests
    config: Mapping[str, Any]
    """The whole TrainConfig that ran."""
    environment: Environment
    gates: Mapping[str, GateReading]
    facts: Mapping[str, Any]
    """Everything the code recorded about itself (kernels.facts)."""
    steps: tuple[Step, ...]
    summary: Summary | None
    """None when the trial did not reach its window."""
    memory: Memory | None
    compile_s: float
    """Compilation seconds apart from step times; 0 when nothing was compiled."""
    compile_cache_hit: bool | None
    kernels: tuple[Mapping[str, Any], ...] = ()
    """Kernel table: name, ms, registers, shared memory, instructions."""
    parameters: int
    """Trainable parameters."""
    flops_per_step: int
    """Model FLOPs of one step, forward and backward, counted from the configuration."""
    started_at: str
    """RFC 3339 UTC."""
    training_s: float
    """Wall seconds of the trial's own work: model build, steps and validation."""
    wall_s: float
    """Wall seconds from the worker's order to the process's end."""
    digest: str
    """Of everything above."""
