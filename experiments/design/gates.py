"""The registry of gates: it declares every switchable feature of model, kernels and run once.

Validation, published enums, documentation, attestation and tests derive from the entries. A gate's value is one typed
field of TrainConfig. Model code reads that field and never a gate's name.
"""

from collections.abc import Mapping
from typing import Any, get_args

from ablate.experiments.design.gate import Claim, Facts, Gate, GateValue, replace_fields, show
from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import CHUNK_SIZES, HEADS_IN_TURN, PIPELINE_STAGES, SCHEDULES, ScanFact
from ablate.model.block_configs import Balancing, ExpertProducts, RecurrenceWalk, Routing
from ablate.model.config import (
    MESH_SIZES,
    AdamWUpdate,
    AttentionBackend,
    ComputeDtype,
    LossKind,
    NormKernels,
    OptimizerKind,
    ProjectionKind,
    Sharding,
    StoredDtype,
    TrainConfig,
)
from ablate.model.facts import ModelFact

ON_CUDA = (Lane.CUDA,)


def _lanes_except(*used: Lane) -> tuple[dict[str, Any], ...]:
    """Return the settings of `lane` under which a gate of the `used` lanes has no effect."""
    return tuple({"lane": str(lane)} for lane in Lane if lane not in used)


NOT_XLA_NOR_CUDA = _lanes_except(Lane.XLA, Lane.CUDA)
NOT_XLA = _lanes_except(Lane.XLA)
NOT_CUDA = _lanes_except(Lane.CUDA)
NOT_ON_XLA = ({"lane": str(Lane.XLA)},)
OF_RANKS = (Lane.CUDA, Lane.REFERENCE)


def _attested_by(fact: str) -> dict[str, Any]:
    """Return the attestation of a gate whose live value is one fact."""
    return {"attest": lambda facts: facts.get(fact), "attested_by": f"fact {fact}"}


def _psiv_cached(facts: Facts) -> bool | str | None:
    counts = facts.get(ScanFact.PSIV_SAVED_BYTES, 0), facts.get(ScanFact.PSIV_RECOMPUTES, 0)
    if any(isinstance(count, str) for count in counts):  # ranks counted differently
        return "mixed"
    saved, recomputed = (count > 0 for count in counts)
    if (saved and recomputed) or facts.get(ScanFact.PSIV_CACHE, saved) != saved:
        return "mixed"
    return saved if saved or recomputed else None


def _in_loops(facts: Facts) -> bool | str | None:
    """Return whether blocks ran in loops. A text says how the graph contradicts the code."""
    count = facts.get(ModelFact.LAYERS_IN_LOOPS)
    return count if count is None or isinstance(count, str) else count > 0


def _schedule_shown(requested: Mapping[str, Any], facts: Facts) -> GateValue:
    """Return the schedule to observe: super-chunk 0 may become the whole row, which one block walks."""
    automatic = requested["schedule"] == "chunk_parallel" and requested.get("superchunk") == 0
    return "sequential" if automatic and facts.get(ScanFact.SUPERCHUNK_OF_SIZES) == 0 else str(requested["schedule"])


def _superchunk_shown(requested: Mapping[str, Any], facts: Facts) -> Any:
    return requested["superchunk"] or facts.get(ScanFact.SUPERCHUNK_OF_SIZES)


def _in_turn_shown(requested: Mapping[str, Any], facts: Facts) -> Any:
    return requested["heads_in_turn"] or facts.get(ScanFact.HEADS_IN_TURN_OF_SIZES)


def _dtype(facts: Facts) -> str | None:
    """Return the common dtype of the scan, if the model has one, and of the last hidden states."""
    hidden = facts.get(ModelFact.HIDDEN_DTYPE)
    if ScanFact.LANE not in facts:
        return hidden
    scan = facts.get(ScanFact.DTYPE, "unproved")
    return scan if scan == hidden else "mixed"


def _compiled(facts: Facts) -> bool | str | None:
    """Return whether the model was compiled; 'mixed' if ranks counted different graphs."""
    count = facts.get(ModelFact.COMPILED_GRAPHS, 0)
    return count if isinstance(count, str) else count > 0 if facts else None


def _kernel_gate(name: str, question: str, **changes: Any) -> Gate:
    """Return a switch of the generated kernels of lane cuda; true or false unless `changes` differ."""
    fields: dict[str, Any] = {
        "values": (False, True),
        "claim": Claim.SCHEDULE_ONLY,
        "in_kernels": True,
        "unused_with": NOT_CUDA,
        **changes,
    }
    return Gate(
        name=name,
        question=question,
        path=f"model.scan.{name}",
        block="M",
        **_attested_by(ScanFact.of(name)),
        **{"lanes": dict.fromkeys(fields["values"], ON_CUDA), **fields},
    )


def _shared_by_ranks(name: str, question: str, fact: ModelFact, *, proof: str, block: str | None = None) -> Gate:
    """Return the gate of a number of devices that share the layers, the tokens or the experts of a step."""
    numbers = (1, 2, 4, 8)
    return Gate(
        name=name,
        question=question,
        values=numbers,
        path=str(fact),
        claim=Claim.RE_ASSOCIATES,
        lanes=dict.fromkeys(numbers[1:], OF_RANKS),
        unused_with=NOT_ON_XLA,
        block=block,
        proof=proof,
        blind_to="when the ranks exchange what; one device, where nothing is recorded",
        **_attested_by(fact),
    )


_GENERAL_WALK = "that the backward walk takes its general form"
"""Side effect of switches that the faster form of the backward walk does not support (docs/kernels.md)."""

_OF_THE_LIFTED_WALK: dict[str, GateValue] = {"psiv_cache": False, "aggressive_smem_merge": False}
"""Values that the faster form of the backward walk requires."""

_ENTRIES = (
    Gate(
        name="schedule",
        question="Does walking time in parallel chunks beat walking it step by step?",
        values=SCHEDULES,
        path="model.scan.schedule",
        claim=Claim.RE_ASSOCIATES,
        lanes={"chunk_parallel": tuple(lane for lane in Lane if lane is not Lane.PEER)},
        in_kernels=True,
        block="M",
        proof="lane cuda: the launched kernels; a row holds as many walks of the length in their code as states were "
        "passed between walks; chunk_parallel with superchunk 0 may be sequential by the rule of the sizes; lanes "
        "reference and xla: the function that ran; lane peer: it has one schedule",
        blind_to="nothing relevant to the gate: the kernels that pass states on are launched or not",
        shown_as=_schedule_shown,
        **_attested_by(ScanFact.SCHEDULE),
    ),
    Gate(
        name="chunk_size",
        question="How many tokens per chunk balance work inside a chunk against work between chunks?",
        values=CHUNK_SIZES,
        path="model.scan.chunk_size",
        claim=Claim.RE_ASSOCIATES,
        unused_with=({"schedule": "sequential", "lane": "reference"},),
        in_kernels=True,
        block="M",
        proof="lane cuda: the tokens of one load of q, k, v or z in the program of every launched walk; lane peer: the "
        "arguments of the official launchers; lanes reference and xla: the function that ran",
        blind_to="whether the compiler's code follows its source program",
        **_attested_by(ScanFact.CHUNK_SIZE),
    ),
    Gate(
        name="psiv_cache",
        question="Does saving PsiV for the backward pass beat recomputing it, at what cost in memory?",
        values=(False, True),
        path="model.scan.psiv_cache",
        claim=Claim.SCHEDULE_ONLY,
        lanes={True: (Lane.REFERENCE, Lane.CUDA, Lane.XLA)},
        in_kernels=True,
        block="M",
        attest=_psiv_cached,
        attested_by=f"facts {ScanFact.PSIV_SAVED_BYTES} and {ScanFact.PSIV_RECOMPUTES}",
        proof="bytes kept between the passes (lane cuda: and passed to a launched kernel) against backward passes that "
        "recomputed PsiV; lane cuda: both agree with the walks' binaries; lane xla: with the traced graphs",
        blind_to=f"whether a kernel reads the PsiV that it receives; how much of the gate's cost is {_GENERAL_WALK}",
    ),
    Gate(
        name="remat",
        question="Does recomputing values of the scan in the backward pass save memory, and at what cost in time?",
        values=(False, True),
        path="model.scan.remat",
        claim=Claim.RE_ASSOCIATES,
        lanes={True: (Lane.XLA, Lane.CUDA)},
        unused_with=NOT_XLA_NOR_CUDA,
        block="M",
        proof="lane xla: operations that the traced backward graph shares with the forward graph, except PsiV's; "
        "schedule chunk_parallel: the inputs of that graph have as many bytes as pass the lowered step's barriers. "
        "Lane cuda: the kernel of the outputs was launched in the backward pass, and no chunk's state was kept",
        blind_to="lane xla: values that XLA itself decides to recompute; schedule sequential: whether the lowered loop "
        "is that graph; with scan_layers, whether the values belong to the scan, because the gate then applies to all "
        "blocks of a group with a mixer. Lane cuda: nothing relevant to the gate",
        **_attested_by(ScanFact.REMAT),
    ),
    Gate(
        name="scan_layers",
        question="Does running a repeated group of layers as one loop shorten compilation, and at what cost in time?",
        values=(False, True),
        path="model.scan_layers",
        claim=Claim.RE_ASSOCIATES,
        lanes={True: (Lane.XLA,)},
        requires={"schedule": "chunk_parallel", "psiv_cache": False},
        unused_with=NOT_XLA,
        attest=_in_loops,
        attested_by=f"fact {ModelFact.LAYERS_IN_LOOPS}",
        proof="the trip counts of the loops in the lowered step, in both passes. Submission refuses a pattern in which "
        "no group of adjacent blocks repeats",
        blind_to="whether XLA unrolls the loop",
    ),
    Gate(
        name="loss",
        question="Which implementation of the cross entropy takes the least time, which the least memory?",
        values=get_args(LossKind),
        path="loss",
        claim=Claim.RE_ASSOCIATES,
        device_types={
            **dict.fromkeys(("compiled", "torch_linear_ce"), ("cpu", "cuda")),
            **dict.fromkeys(("liger", "quack"), ("cuda",)),
        },
        tried_on_gpus=("compiled", "torch_linear_ce", "liger", "quack"),
        proof="the function that computes the loss records it; compiled: the function says whether torch's compiler "
        "traced it; liger and quack: also the names of the kernels of one step on the GPU; lane xla: chunked is a loop "
        "of the lowered step with one trip for each chunk",
        blind_to="whether a step's peak memory is in the loss: with few tokens or a small vocabulary it is elsewhere, "
        "and both values take the same memory; torch_linear_ce: that torch rounds the loss of each token to the "
        "compute dtype, by up to 0.2 % in bfloat16 (the mean of 8,192 tokens was off by 0.0007), not its gradients",
        **_attested_by(ModelFact.LOSS),
    ),
    _kernel_gate(
        "tma",
        "Does loading tiles with the tensor memory accelerator hide memory latency?",
        proof="the machine code of every launched walk: bulk copies (UTMALDG, UBLKCP) and no cp.async (LDGSTS); off: "
        "no bulk copy",
        blind_to="single numbers, which ordinary loads fetch either way",
    ),
    _kernel_gate(
        "warp_specialize",
        "Does a copying warp group spare the others from waiting, and what do its registers cost them?",
        requires=_OF_THE_LIFTED_WALK | {"tma": True, "pipeline_stages": 1},
        lanes=dict.fromkeys((False, True), (*ON_CUDA, Lane.PEER)),
        unused_with=_lanes_except(Lane.CUDA, Lane.PEER),
        proof="branches on the thread index that each wait at barriers, in the CUDA source of the backward walk; lane "
        "peer: of the forward kernel for dense rows, compiled with TMA, which the release turns off, too",
        blind_to="whether the copies overlap with arithmetic in time; lane peer: which of the tiles TMA loads",
    ),
    _kernel_gate(
        "aggressive_smem_merge",
        "Does overlapping shared-memory buffers raise occupancy?",
        proof="the compiler options of every launched walk",
        blind_to="whether any buffer overlaps another: equal hashes of two arms show that none does; how much of the "
        f"gate's cost is {_GENERAL_WALK}",
    ),
    _kernel_gate(
        "layout_2d",
        "Do two-dimensional shared-memory tiles cost anything by themselves?",
        proof="the shape of the shared buffers of q and k in the program of every launched walk",
        blind_to="how the compiler swizzles them",
    ),
    _kernel_gate(
        "superchunk",
        "How many tokens per block balance parallel blocks against states passed between them?",
        values=(0, 64, 128, 256, 512, 1024),
        shown_as=_superchunk_shown,
        claim=Claim.RE_ASSOCIATES,
        unused_with=(*NOT_CUDA, {"schedule": "sequential"}),
        proof="the trip count of the loop over chunks in the CUDA source of every launched walk, times the tokens of "
        "one load; 0: the product equals the choice of the rule of the sizes",
        blind_to="how much of a row's last super-chunk is padding",
    ),
    _kernel_gate(
        "heads_in_turn",
        "How many heads should a block of the backward walk add up before they leave it, at what cost in accuracy?",
        values=HEADS_IN_TURN,
        free=(1,),
        shown_as=_in_turn_shown,
        claim=Claim.RE_ASSOCIATES,
        in_kernels=False,
        requires=_OF_THE_LIFTED_WALK,
        proof="the number of sums in the tensors that the backward walk was launched with, and that the kernel after "
        "it adds up by groups; 0: the number that the rule of the sizes chooses",
        blind_to="whether a block takes the heads of a sum one after another: the kernel reads their number from the "
        "tensor",
    ),
    _kernel_gate(
        "pipeline_stages",
        "How many chunks ahead of the arithmetic should tiles be loaded?",
        values=PIPELINE_STAGES,
        proof="loads before the loop over chunks per load inside it, in the CUDA source of every launched walk; with a "
        "copying warp group: the slots of its ring",
        blind_to="whether a load has arrived when the walk waits for it; how much of the cost of value 2 is "
        f"{_GENERAL_WALK}",
    ),
    _kernel_gate(
        "fast_math",
        "What do the hardware's approximate functions gain, and what do they cost in accuracy?",
        proof="the machine code of every launched walk: all float additions and products flush denormal numbers, as "
        "with the compiler's fast math; off: none does",
        blind_to="everything on machines without a disassembler, because the CUDA source is the same",
        claim=Claim.RE_ASSOCIATES,
    ),
    Gate(
        name="attention",
        question="Which attention implementation is fastest under the document mask?",
        values=get_args(AttentionBackend),
        path="model.attention.backend",
        claim=Claim.RE_ASSOCIATES,
        device_types={
            **dict.fromkeys(("fa4", "cudnn", "flex"), ("cuda",)),
            **dict.fromkeys(("splash", "pallas_softcap"), ("xla",)),
            "flash": ("cuda", "xla"),
        },
        tpu_kernels=("flash", "splash", "pallas_softcap"),
        tried_on_gpus=("flash", "fa4", "flex"),
        not_deterministic=("cudnn",),
        block="A",
        proof="the implementation that runs, or is traced, records it; on a GPU: the names of the kernels of one step, "
        "in both passes, and that no other implementation's kernel ran; lane xla: the names of the kernels that the "
        "lowered step calls, for each layer and pass",
        blind_to="on a GPU whose profiler reports no kernels: everything except the function that was called",
        **_attested_by(ModelFact.ATTENTION),
    ),
    Gate(
        name="routing",
        question="How fast would the experts be if each got equally many tokens?",
        values=get_args(Routing),
        path="model.experts.routing",
        claim=Claim.CHANGES_MODEL,
        block="E",
        proof="the layer that gives tokens to experts records it",
        blind_to="how even a learned load is, which the facts experts.load and experts.entropy say",
        **_attested_by(ModelFact.ROUTING),
    ),
    Gate(
        name="balancing",
        question="Which way to balance the load of experts costs the least loss: a bias or an auxiliary loss?",
        values=get_args(Balancing),
        path="model.experts.balancing",
        claim=Claim.CHANGES_MODEL,
        block="E",
        proof="the code that moved the bias after a step of the optimiser, or added the gradient of the loss",
        blind_to="whether the load became even, which the facts experts.load and experts.entropy say; with routing "
        "balanced: everything, because nothing depends on it",
        **_attested_by(ModelFact.BALANCING),
    ),
    Gate(
        name="expert_products",
        question="Does one grouped product beat a loop over experts?",
        values=get_args(ExpertProducts),
        path="model.experts.products",
        claim=Claim.RE_ASSOCIATES,
        block="E",
        proof="the function that multiplies records it",
        blind_to="which kernels torch chooses for a grouped product",
        **_attested_by(ModelFact.EXPERT_PRODUCTS),
    ),
    Gate(
        name="recurrence",
        question="Does a kernel for the matrix-state recurrence beat the loop over tokens?",
        values=get_args(RecurrenceWalk),
        path="model.recurrence.walk",
        claim=Claim.RE_ASSOCIATES,
        device_types={"fused": ("cuda",)},
        tried_on_gpus=("fused",),
        block="R",
        proof="the loop, or the function that launches the kernels, records it",
        blind_to="how the kernels divide a state among threads",
        **_attested_by(ModelFact.RECURRENCE),
    ),
    Gate(
        name="projections",
        question="What do projections in float8 gain, forward or in both passes, and what do they cost in loss?",
        values=get_args(ProjectionKind),
        path="model.projections",
        claim=Claim.CHANGES_MODEL,
        device_types=dict.fromkeys(("fp8_forward", "fp8"), ("cuda",)),
        tried_on_gpus=("fp8_forward", "fp8"),
        requires={"dtype": "bfloat16"},
        proof="the kind of every linear map of the blocks in the model that trained; on a GPU: the number of float8 "
        "products in one step, one or two for each map, by the names of the kernels",
        blind_to="which operand has which of the two formats",
        **_attested_by(ModelFact.PROJECTIONS),
    ),
    Gate(
        name="optimizer",
        question="Does Muon for the matrices of the blocks beat AdamW, at what cost in time?",
        values=get_args(OptimizerKind),
        path="optim.algorithm",
        claim=Claim.CHANGES_MODEL,
        device_types={"muon": ("cpu", "cuda")},
        unused_with=NOT_ON_XLA,
        proof="the optimiser that stepped, not its configuration",
        blind_to="nothing relevant to the gate: each optimiser has its own code",
        **_attested_by(ModelFact.OPTIMIZER),
    ),
    Gate(
        name="adamw_update",
        question="Which implementation of AdamW and of the clipping takes the least time?",
        values=get_args(AdamWUpdate),
        path="optim.update",
        claim=Claim.RE_ASSOCIATES,
        requires={"optimizer": "adamw"},
        free=("foreach",),
        device_types=dict.fromkeys(("foreach", "clip_in_update", "compiled"), ("cpu", "cuda")),
        unused_with=NOT_ON_XLA,
        proof="the options of the optimiser that stepped; compiled: the update says whether torch's compiler traced "
        "it; on a GPU fused also by the names of the kernels of one step",
        blind_to="compiled: how many kernels the compiler makes of an update. Otherwise nothing relevant to the gate: "
        "torch refuses what an option cannot do",
        **_attested_by(ModelFact.ADAMW_UPDATE),
    ),
    Gate(
        name="adamw_moments",
        question="What do moments in bfloat16 save in time and memory, and what do they cost in loss?",
        values=get_args(StoredDtype),
        path="optim.moments",
        claim=Claim.CHANGES_MODEL,
        device_types={"bfloat16": ("cpu", "cuda")},
        requires={"adamw_update": "compiled"},
        unused_with=NOT_ON_XLA,
        proof="the dtype of the moments of the optimiser that stepped",
        blind_to="the moments of embedding, head, norms and small tensors, which stay float32",
        **_attested_by(ModelFact.ADAMW_MOMENTS),
    ),
    Gate(
        name="residual",
        question="What does a residual stream in bfloat16 save in time and memory, and what does it cost in loss?",
        values=get_args(StoredDtype),
        path="model.residual",
        claim=Claim.CHANGES_MODEL,
        requires={"dtype": "bfloat16"},
        proof="the dtype of the stream after the last block",
        blind_to="nothing relevant to the gate: every block adds to the stream of the block before",
        **_attested_by(ModelFact.RESIDUAL_DTYPE),
    ),
    Gate(
        name="norm_kernels",
        question="Does one kernel for a residual sum and its norm beat torch's operations, compiled or not?",
        values=get_args(NormKernels),
        path="model.norm_kernels",
        claim=Claim.RE_ASSOCIATES,
        device_types={"quack": ("cuda",)},
        tried_on_gpus=("quack",),
        requires={"dtype": "bfloat16"},
        proof="the class of every norm of the residual stream in the model that trained; on a GPU: the names of the "
        "kernels of one step",
        blind_to="nothing relevant to the gate: a norm of this class calls nothing else",
        **_attested_by(ModelFact.NORM_KERNELS),
    ),
    Gate(
        name="compile",
        question="Does torch.compile pay for its compile time?",
        values=(False, True),
        path="compile",
        claim=Claim.RE_ASSOCIATES,
        lanes={True: (Lane.REFERENCE, Lane.CUDA)},
        attest=_compiled,
        attested_by=f"fact {ModelFact.COMPILED_GRAPHS}",
        proof="the graphs that torch's compiler counted in the first pass; with ranks all counted the same",
        blind_to="how much of the model the graphs contain",
    ),
    Gate(
        name="cuda_graph",
        question="What does replaying the whole step as one CUDA graph gain over launching its kernels one by one?",
        values=(False, True),
        path="cuda_graph",
        claim=Claim.RE_ASSOCIATES,
        lanes={True: (Lane.REFERENCE, Lane.CUDA)},
        device_types={True: ("cuda",)},
        tried_on_gpus=(True,),
        requires={"optimizer": "adamw"},
        proof="the number of replays in the window, one for each timed step",
        blind_to="nothing relevant to the gate: a step is recorded as a whole or refused",
        **_attested_by(ModelFact.CUDA_GRAPH),
    ),
    Gate(
        name="lane",
        question="Which implementation family of the scan is fastest on this node class?",
        values=tuple(str(lane) for lane in Lane),
        path="model.scan.lane",
        claim=Claim.RE_ASSOCIATES,
        lanes={str(lane): (lane,) for lane in Lane},
        block="M",
        proof="lane cuda: the code of its launched walks; lane peer: its launchers ran; lanes reference and xla: the "
        "function that computes or traces records it",
        blind_to="nothing relevant to the gate: each lane has its own code",
        **_attested_by(ScanFact.LANE),
    ),
    Gate(
        name="devices",
        question="How fast is each device when several share a step?",
        values=MESH_SIZES,
        path="mesh.devices",
        claim=Claim.RE_ASSOCIATES,
        proof="the number of processes of the step, or of the devices of XLA's mesh",
        blind_to="what each device computes, which the gates that divide a step show; one device, where nothing is "
        "recorded",
        **_attested_by(ModelFact.MESH_DEVICES),
    ),
    Gate(
        name="sharding",
        question="Does dividing parameters and optimiser state over the devices lower the memory of each?",
        values=get_args(Sharding),
        path="mesh.sharding",
        claim=Claim.RE_ASSOCIATES,
        lanes={"hsdp": OF_RANKS},
        unused_with=NOT_XLA,
        of_devices=True,
        proof="lane xla: the runtime's layout of the weight matrices on the devices after the first step, or before it "
        "where nothing runs; other lanes: the placements of every matrix on each rank after the first step",
        blind_to="what is gathered and when; one device, where nothing is recorded",
        **_attested_by(ModelFact.SHARDING),
    ),
    _shared_by_ranks(
        "tensor_parallel",
        "Does dividing heads and columns of each layer over devices pay, in memory or in time?",
        ModelFact.TENSOR,
        proof="the elements of the weight matrices that a rank stores after the layers were divided, against those of "
        "the whole model",
    ),
    _shared_by_ranks(
        "context_parallel",
        "Does dividing the tokens of each row over devices pay, for long rows?",
        ModelFact.CONTEXT,
        proof="the tokens of a row that reach the model of a rank, against those of the whole row",
    ),
    _shared_by_ranks(
        "expert_parallel",
        "Does it pay to keep each expert on one device and to send it its tokens, instead of gathering its matrices?",
        ModelFact.EXPERT,
        block="E",
        proof="the elements of the experts' matrices that a rank keeps in each layer, against those of all experts",
    ),
    Gate(
        name="micro_batch",
        question="How many rows per step fit, and what does a larger step gain?",
        values=(1, 2, 4, 8, 16, 32, 64),
        path="micro_batch",
        claim=Claim.CHANGES_MODEL,
        proof="the rows of the targets that the loss reads",
        blind_to="nothing relevant to the gate: a step reads one batch",
        **_attested_by(ModelFact.ROWS),
    ),
    Gate(
        name="dtype",
        question="What do bfloat16 matrix multiplications gain, and what do they cost in loss?",
        values=get_args(ComputeDtype),
        path="dtype",
        claim=Claim.CHANGES_MODEL,
        attest=_dtype,
        attested_by=f"facts {ScanFact.DTYPE} and {ModelFact.HIDDEN_DTYPE}",
        proof="the dtype of q, k, v and z at the scan (lane cuda: the buffers in the program of every launched walk, "
        "whose launcher rejects other tensors; lane peer: the arguments of the official launchers; lanes reference and "
        "xla: the inputs of the function that ran or of the traced graph), and of the last hidden states at the loss",
        blind_to="the dtype in which attention and the MLP multiply, and in which products are summed; without a block "
        "of kind M: everything except the last hidden states",
    ),
)

GATES: dict[str, Gate] = {gate.name: gate for gate in _ENTRIES}
"""All gates by name."""

BACK_ENDS = tuple(f"{gate.name}={show(value)}" for gate in _ENTRIES for value in gate.tried_on_gpus)
"""Names of the values that a worker on a GPU tries, such as "attention=fa4"."""


def with_gates(config: TrainConfig, values: Mapping[str, GateValue]) -> TrainConfig:
    """Return `config` with these values of gates, all set at once. Raises ConfigError if they do not fit together."""
    return replace_fields(config, {GATES[name].path: GATES[name].typed(value) for name, value in values.items()})


def back_ends_of(gates: Mapping[str, Any], pattern: str) -> frozenset[str]:
    """Return the members of BACK_ENDS that an arm with these gates and this pattern of blocks runs."""
    return frozenset(
        f"{gate.name}={show(gates[gate.name])}"
        for gate in _ENTRIES
        if gates.get(gate.name) in gate.tried_on_gpus and (gate.block is None or gate.block in pattern)
    )
