"""Tables of the measurements: arms, failures, gates, kernels, blocks, compilation, provenance, rule and receipts."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from ablate.experiments.analysis.verdicts import ArmSummary
from ablate.experiments.block_numbers import block_list, block_number
from ablate.experiments.design.kinds.gate_readings import GateReading
from ablate.experiments.digest import canonical_json
from ablate.experiments.outcomes import Outcome, TrialState
from ablate.experiments.records.compilation_report import CompilationReport, HbmPlan
from ablate.experiments.records.receipts import Receipt, held_by
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.sentences import registration, seeds
from ablate.experiments.reporting.table import Table, codes, numbers, row, texts
from ablate.experiments.reporting.verdict_layout import speed_unjudged
from ablate.experiments.reporting.view import AblationView, TrialView


def _of_plan(read: Callable[[HbmPlan], int]) -> Callable[[CompilationReport], str]:
    return lambda report: wording.NOTHING if report.hbm is None else wording.gib(read(report.hbm))


ROWS: dict[str, Callable[[CompilationReport], str]] = {
    "peak HBM of one chip": _of_plan(lambda plan: plan.peak_bytes),
    "arguments": _of_plan(lambda plan: plan.argument_bytes),
    "temporaries": _of_plan(lambda plan: plan.temp_bytes),
    "program": _of_plan(lambda plan: plan.code_bytes),
    "does not fit": lambda report: _overflow(report),
    "matrix products outside of kernels, TFLOP": lambda report: _tera(report.matmul_flops),
    "the compiler's own count, TFLOP": lambda report: _tera(report.compiler_flops),
    "custom calls": lambda report: str(report.custom_calls),
    "kernels": lambda report: _compiled_counts(report.kernels),
    "custom calls, compiled": lambda report: (
        wording.NOTHING if report.compiled_calls is None else str(report.compiled_calls)
    ),
    "collectives": lambda report: _compiled_counts(report.collectives or {}),
    "instructions, lowered": lambda report: f"{report.instructions:,}",
    "topology": lambda report: f"{report.topology}, {wording.counted(report.chips, 'chip')}",
    "libtpu": lambda report: report.versions.get("libtpu", wording.NOTHING),
    "module": lambda report: report.hlo_digest.removeprefix("sha256:")[:12],
}
"""Heading -> text of an arm's number."""


def compilation_table(view: AblationView) -> Table:
    """Return the compilation of each arm's first trial; no rows unless trials were compiled only."""
    first: dict[str, CompilationReport] = {}
    for receipt in view.receipts:
        if receipt.compilation is not None:
            first.setdefault(receipt.arm, receipt.compilation)
    names = [arm.name for arm in view.plan.arms if arm.name in first]
    rows = tuple(row(heading, *(write(first[name]) for name in names)) for heading, write in ROWS.items())
    return Table(
        title="Compilation",
        columns=(*texts("compiler's report"), *numbers(*names)),
        rows=rows if names else (),
        note="From the first trial of each arm, which was compiled and not run. Peak: arguments + outputs - aliased + "
        "temporaries, without the program. The compiler's own count includes the body of a loop once, and a kernel as "
        "declared. The matrix products are counted in every iteration, with recomputation.",
    )


def exchanges_table(view: AblationView) -> Table:
    """Return what the devices of each arm exchange in a step; no rows unless several processes share the steps."""
    rows = []
    for arm in view.plan.arms:
        of_arm = [one for one in view.whole_blocks.of(arm.name) if one.communication_s is not None]
        if of_arm:
            means = (
                mean(getattr(one, name) for one in of_arm)
                for name in ("communication_s", "exposed_communication_s", "communication_bytes")
            )
            shown = (wording.number(value * scale, 4) for value, scale in zip(means, (1e3, 1e3, 2**-20), strict=True))
            rows.append(row(arm.name, *shown))
    return Table(
        title="Exchanges between devices",
        columns=(*texts("arm"), *numbers("time of a step, ms", "while nothing else runs, ms", "given, MiB")),
        rows=tuple(rows),
        note="One step after all measurements, under torch's profiler, which slows it down. Means over blocks; each "
        "value is that of the rank with the most. The time includes waiting for ranks that come later.",
    )


def _overflow(report: CompilationReport) -> str:
    if report.overflow is None:
        return wording.NOTHING
    needed, available = (wording.gib(size) for size in (report.overflow.needed_bytes, report.overflow.available_bytes))
    return f"{report.overflow.memory.upper()}: {needed} of {available}"


def _tera(flops: float | None) -> str:
    return wording.NOTHING if flops is None else wording.number(flops / 1e12, 4)


def _compiled_counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count) or "none"


MOST_ROWS = 200
MOST_KERNELS = 60
KERNEL_NUMBERS = {
    "threads": "threads", "registers": "registers", "shared_bytes": "shared, B",
    "stack_bytes": "stack, B", "instructions": "instructions", "tma_loads": "bulk loads", "cp_async": "cp.async",
    "wgmma": "WGMMA", "mbarrier": "mbarrier", "barriers": "barriers",
}  # fmt: skip
"""Key in a receipt's kernel table -> heading."""
MOST_ARMS = 13


def _utilisation(share: float | None) -> str:
    if share is not None and share > 1:
        return "more than the device can do: the FLOPs that the program states, or the device's peak, are wrong"
    return wording.NOTHING if share is None else wording.plain_percent(100 * share)


MOST_NODES = 8
ARM_ROWS: dict[str, Callable[[ArmSummary], str]] = {
    "outcomes": lambda arm: _counts(arm.outcomes) or "none yet",
    "throughput, tokens/s": lambda arm: wording.number(arm.tokens_per_s or None, 5),
    "step time": lambda arm: wording.seconds(arm.step_s),
    "model TFLOP/s, attention over whole rows (PaLM)": lambda arm: wording.number(arm.model_tflops_per_s),
    "utilisation by useful FLOPs": lambda arm: _utilisation(arm.utilisation),
    "loss of step 1": lambda arm: wording.fixed(arm.loss_step1),
    "final training loss": lambda arm: wording.fixed(arm.loss_final),
    "validation loss": lambda arm: wording.fixed(arm.loss_val),
    "compile time": lambda arm: wording.seconds(arm.compile_s or None),
    "slow timed steps, all counted": lambda arm: (
        f"{arm.outlier_steps:,}" if Outcome.MEASURED in arm.outcomes else wording.NOTHING
    ),
    "peak allocated": lambda arm: wording.gib(arm.peak_allocated_bytes),
    "peak reserved": lambda arm: wording.gib(arm.peak_reserved_bytes),
}
"""Heading -> text of an arm's number."""


def arms_table(view: AblationView) -> Table:
    """Return the arms: one row per quantity, one column per arm."""
    names = [arm.name for arm in view.plan.arms[:MOST_ARMS]]
    write = ARM_ROWS | _rows_by_node(view)
    rows = [(heading, [cell(view.arms[name]) for name in names]) for heading, cell in write.items()]
    return Table(
        title="Arms",
        columns=(*texts("mean over measured trials"), *numbers(*names)),
        rows=tuple(
            row(view.with_loss_unit(heading) if "loss" in heading else heading, *cells)
            for heading, cells in rows
            if {*cells} != {wording.NOTHING}
        )
        if view.whole_blocks.blocks
        else (),
        note="Over the blocks that count for the arm: those with its own receipt and the baseline's. No mean if a "
        "measured trial lacks the value. Memory: the largest peak over all trials."
        + (" Speeds are not judged." if view.verdict and speed_unjudged(view.verdict) else "")
        + _over_nodes(view)
        + _arms_left_out(view),
    )


def _nodes(view: AblationView) -> list[str]:
    return sorted({node for arm in view.arms.values() for node in arm.by_node or ()})


def _rows_by_node(view: AblationView) -> dict[str, Callable[[ArmSummary], str]]:
    """Return the rows of rates by node, if several nodes ran blocks."""
    nodes = _nodes(view)[:MOST_NODES]
    return {f"throughput on {node}, tokens/s": partial(_rate_on, node) for node in nodes}


def _rate_on(node: str, arm: ArmSummary) -> str:
    means = (arm.by_node or {}).get(node)
    return wording.NOTHING if means is None else wording.number(means.tokens_per_s, 5)


def _over_nodes(view: AblationView) -> str:
    count = len(_nodes(view))
    return f" Rates and times are means over {count} nodes of unequal speed; the last rows list them." if count else ""


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count}{wording.SPACE}{what}" for what, count in counted.items())


def _arms_left_out(view: AblationView) -> str:
    count = len(view.plan.arms) - MOST_ARMS
    return f" {wording.counted(count, 'more arm')} in the API only." if count > 0 else ""


def gates_table(view: AblationView) -> Table:
    """Return requested and observed values: one row per gate, one column per arm, over all its receipts."""
    by_arm: dict[str, list[Receipt]] = {}
    for receipt in view.receipts:
        by_arm.setdefault(receipt.arm, []).append(receipt)
    arms = view.plan.arms[:MOST_ARMS]
    gates = sorted({gate for arm in view.plan.arms for gate in arm.gates})
    rows = []
    for gate in gates:
        readings = {arm.name: [r.gates[gate] for r in by_arm.get(arm.name, ()) if gate in r.gates] for arm in arms}
        observed_in = sorted({reading.how for own in readings.values() for reading in own})
        cells = (_gate_cell(arm.gates.get(gate), readings[arm.name]) for arm in arms)
        rows.append(row(gate, *cells, "; ".join(observed_in) or wording.NOTHING))
    if not view.plan.baseline.config.attested:
        shown = [row(gate, *(_shown(arm.gates.get(gate)) for arm in arms)) for gate in gates]
        title, columns = "Settings, as requested", texts("setting", *(arm.name for arm in arms))
        return Table(title=title, columns=columns, rows=tuple(shown), note=_arms_left_out(view).strip())
    return Table(
        title="Gates: requested against observed",
        columns=texts("gate", *(arm.name for arm in arms), "observed in"),
        rows=tuple(rows),
        note="The requested value. A check mark with the number of trials means that all of them ran it."
        + _arms_left_out(view),
    )


def _gate_cell(requested: Any, readings: Sequence[GateReading]) -> str:
    live = sum(reading.live for reading in readings)
    wrong = sorted({_shown(reading.observed) for reading in readings if not reading.live})
    if not readings:
        return _shown(requested)
    if not wrong:
        return f"{_shown(requested)} \N{CHECK MARK}{wording.SPACE}{live}"
    live_in = f"\N{MULTIPLICATION SIGN}{wording.SPACE}live in {live} of {len(readings)}"
    return f"{_shown(requested)}, observed {', '.join(wrong)} {live_in}"


def _shown(value: Any) -> str:
    return "not observable" if value is None else value if isinstance(value, str) else canonical_json(value)


def blocks_table(view: AblationView) -> Table:
    """Return the blocks with seed, order of arms, trial states, node and times."""
    trials: dict[int, list[TrialView]] = {}
    for trial in view.trials:
        trials.setdefault(trial.block_index, []).append(trial)
    rows = []
    for block in view.plan.blocks[:MOST_ROWS]:
        own = trials.get(block.index, [])
        receipts = sorted((t.receipt for t in own if t.receipt), key=lambda r: r.ids.position)
        states = Counter(str(t.state) for t in own)
        rows.append(
            row(
                str(block_number(block.index)),
                str(block.seed) if receipts else wording.NOTHING,  # nobody may know a seed before it is claimed
                " \N{RIGHTWARDS ARROW} ".join(block.order),
                _counts(states) or wording.NOTHING,
                receipts[0].environment.node_name if receipts else wording.NOTHING,
                wording.moment(receipts[0].started_at) if receipts else wording.NOTHING,
                wording.seconds(sum(r.wall_s for r in receipts)) if receipts else wording.NOTHING,
            )
        )
    return _capped(
        Table(
            title="Blocks and order",
            columns=(
                *texts("block"),
                *numbers("seed"),
                *texts("order of arms", "trials", "node", "started"),
                *numbers("wall time"),
            ),
            rows=tuple(rows),
        ),
        total=len(view.plan.blocks),
    )


def unmeasured_table(view: AblationView) -> Table:
    """Return the trials without a valid measurement, grouped by arm and reason, with their blocks."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for r in view.receipts:
        if r.outcome is not Outcome.MEASURED:
            why = r.failure_class.value if r.failure_class else wording.NOTHING
            groups.setdefault((r.arm, r.outcome.value, why, r.message or wording.NOTHING), []).append(r.ids.block_index)
    for trial in view.trials:
        if trial.receipt is None and trial.state == TrialState.FAILED:
            key = trial.arm, str(trial.state), wording.NOTHING, trial.reason or wording.NOTHING
            groups.setdefault(key, []).append(trial.block_index)
    rows = tuple(
        row(*key, f"{len(blocks):,}", wording.shorten(block_list(sorted(blocks)), wording.LONGEST_BLOCK_LIST))
        for key, blocks in groups.items()
    )
    columns = (*texts("arm", "outcome", "class", "message"), *numbers("trials"), *texts("in blocks"))
    return _capped(Table(title="Trials without a measurement", columns=columns, rows=rows))


def kernels_table(view: AblationView) -> Table:
    """Return the kernels of the baseline, and the variants' kernels with other machine code."""
    first: dict[str, Receipt] = {}
    for receipt in view.receipts:
        if receipt.kernels:
            first.setdefault(receipt.arm, receipt)
    baseline = first.get(view.plan.baseline.name)
    same = {(k.get("name"), _machine_code(k)) for k in baseline.kernels if _machine_code(k)} if baseline else set()
    rows = tuple(
        row(
            arm.name,
            *(_cell(kernel.get(key)) for key in ("name", *KERNEL_NUMBERS)),
            _machine_code(kernel)[:12] or wording.NOTHING,
        )
        for arm in view.plan.arms
        if arm.name in first
        for kernel in first[arm.name].kernels
        if first[arm.name] is baseline or (kernel.get("name"), _machine_code(kernel)) not in same
    )
    return _capped(
        Table(
            title="Kernels",
            columns=(*texts("arm", "kernel"), *numbers(*KERNEL_NUMBERS.values()), *codes("machine code")),
            rows=rows,
            note="From the first trial of each arm. Kernels of a variant with the baseline's machine code are left "
            "out. The receipts hold all data from the binaries.",
        ),
        most=MOST_KERNELS,
    )


def _machine_code(kernel: Mapping[str, Any]) -> str:
    """Return the digest of the kernel's instructions, else of its source, else ""."""
    return str(kernel.get("binary_sha256") or kernel.get("source_sha256") or "")


def _cell(value: object) -> str:
    if value is None:
        return wording.NOTHING
    if isinstance(value, bool | str):
        return str(value)
    return wording.number(float(value)) if isinstance(value, int | float) else canonical_json(value)


def provenance_table(view: AblationView) -> Table:
    """Return the origin of the numbers; if receipts differ, every value is listed."""
    receipts, ours = view.receipts, not view.plan.baseline.config.own_process
    rows = [
        ("ablation", view.ablation_id),
        ("spec", view.spec_digest),
        ("rule", view.plan.rule_digest),
        *((("verdict", view.verdict.digest),) if view.verdict else ()),
        *_signers(view),
        *((("seeds", seeds(view.verdict)),) if view.verdict else ()),
        *((f"arm {arm.name}", arm.digest) for arm in view.plan.arms),
        ("code of Ablate", _distinct(r.digests.code for r in receipts)),
        *([("data", _distinct(r.digests.data for r in receipts))] if ours else []),
        ("commit of Ablate", _distinct(r.environment.git_commit for r in receipts)),
        ("uncommitted patch of Ablate", _distinct((r.environment.git_dirty_digest for r in receipts), absent="none")),
        ("node", _distinct(r.environment.node_name for r in receipts)),
        ("device", _distinct(r.environment.device_name for r in receipts)),
        ("serial number", _distinct(_serials(r) for r in receipts)),
        *(_sizes(receipts) if ours else ()),
        *((name, _distinct(values)) for name, values in sorted(_versions(receipts).items())),
    ]
    columns = (*texts("item"), *codes("value"))
    return Table(title="Provenance", columns=columns, rows=tuple(row(*pair) for pair in rows))


def _sizes(receipts: Sequence[Receipt]) -> Iterator[tuple[str, str]]:
    yield "parameters", _distinct(f"{r.parameters:,}" for r in receipts)
    yield "model FLOPs of one step", _distinct(wording.number(r.flops_per_step) for r in receipts)


def _signers(view: AblationView) -> Iterator[tuple[str, str]]:
    """Yield which key signed which blocks, and which one the plan."""
    for signer in view.verdict.circumstances.signers if view.verdict else ():
        blocks = wording.shorten(block_list(sorted(signer.blocks)), wording.LONGEST_BLOCK_LIST)
        key = signer.key or "nobody: anyone with access to the files could have written them"
        yield f"blocks {blocks} of {signer.name}, signed by", str(key)
    if view.verdict is not None and view.verdict.circumstances.carried is not None:
        yield "plan, registered by a service", registration(view.verdict) or "by none"


def _serials(receipt: Receipt) -> str | None:
    """Return the serial numbers of a trial's devices; None if its driver reports none."""
    return " + ".join(serial for _name, serial in held_by(receipt.environment) if serial) or None


def _versions(receipts: Sequence[Receipt]) -> dict[str, list[str]]:
    versions: dict[str, list[str]] = {}
    for receipt in receipts:
        for name, version in receipt.environment.versions.items():
            versions.setdefault(name, []).append(version)
    return versions


def _distinct(values: Iterable[str | None], absent: str = wording.NOTHING) -> str:
    return ", ".join(dict.fromkeys(value or absent for value in values)) or absent


def rule_table(rule: Mapping[str, Any]) -> Table:
    """Return the rule exactly as it was hashed."""
    rows = tuple(row(str(key), _shown(value)) for key, value in rule.items())
    return Table(title="The rule", columns=(*texts("part"), *codes("value")), rows=rows)


def receipts_table(view: AblationView) -> Table:
    """Return the digests of all receipts."""
    rows = tuple(
        row(r.ids.trial, str(block_number(r.ids.block_index)), r.arm, r.outcome.value, r.digest) for r in view.receipts
    )
    columns = (*codes("trial"), *texts("block", "arm", "outcome"), *codes("digest"))
    return _capped(Table(title="Receipts", columns=columns, rows=rows))


def _capped(table: Table, *, most: int = MOST_ROWS, total: int | None = None) -> Table:
    """Keep the first rows; the note says if others are left out."""
    count = len(table.rows) if total is None else total
    if count <= most:
        return table
    note = f"{table.note} The first {most} of {count:,} rows; the API lists all.".strip()
    return dataclasses.replace(table, rows=table.rows[:most], note=note)
