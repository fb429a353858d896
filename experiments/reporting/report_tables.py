"""The report's tables as plain rows of strings: verdict, requirements, arms, gates, blocks, kernels, provenance."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.analysis.verdicts import Verdict
from experiments.block_numbers import block_list, block_number
from experiments.design.arms import Arm
from experiments.digest import canonical_json
from experiments.outcomes import Outcome
from experiments.records.receipts import GateReading, Receipt, Summary
from experiments.reporting import series, wording
from experiments.reporting.view import AblationView, TrialView

MOST_ROWS = 200
MOST_KERNELS = 60
KERNEL_COLUMNS = {
    "name": "kernel", "threads": "threads", "registers": "registers", "shared_bytes": "shared, B",
    "stack_bytes": "stack, B", "instructions": "instructions", "tma_loads": "bulk loads", "cp_async": "cp.async",
    "wgmma": "WGMMA", "mbarrier": "mbarrier", "barriers": "barriers",
}  # fmt: skip
"""Key in a receipt's kernel row -> heading."""
MOST_ARMS = 12
ARM_ROWS = (
    "outcomes",
    "throughput, tokens/s",
    "step time",
    "model TFLOP/s",
    "model FLOP utilisation",
    "loss of step 1, nats",
    "final training loss, nats",
    "validation loss, nats",
    "compile time",
    "timed steps left out as outliers",
    "peak allocated",
    "peak reserved",
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table; the first column heads its row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    """Columns whose cells are aligned to the right."""
    codes: frozenset[int] = frozenset()
    """Columns whose cells are identifiers or digests, set in a fixed-width face."""
    note: str = ""
    """What was left out, or how to read it."""


def verdict_table(verdict: Verdict) -> Table:
    """Return the numbers behind every variant's word."""
    rows = []
    for variant in verdict.variants:
        found = variant.primary
        numbers: tuple[str, ...] = (wording.NOTHING,) * 7
        if found is not None:
            numbers = (
                wording.percent(found.delta_pct),
                wording.interval(found.ci_low_pct, found.ci_high_pct),
                wording.percent(found.median_pct),
                wording.number(found.p_sign_flip, 3),
                wording.number(found.p_holm, 3),
                wording.plain_percent(found.mde_pct),
                str(found.blocks),
            )
        word = f"{wording.BADGES[variant.verdict].sign}{wording.SPACE}{variant.verdict.value}"
        rows.append((variant.arm, word, wording.DECISIONS[variant.decision], *numbers, variant.gates_live))
    columns = ("variant", "verdict", "decision", "change", "95 % interval", "median", "p", "p, Holm")
    return Table(
        title="Verdict",
        columns=(*columns, "detectable", "blocks", "gates live"),
        rows=tuple(rows),
        numeric=frozenset(range(3, 11)),
        note="Change: mean over blocks of the paired difference. p: exact sign-flip test, two-sided; Holm: paired t "
        "test, corrected over the variants. Detectable: the smallest effect found with 80\N{NO-BREAK SPACE}% power.",
    )


def secondary_table(verdict: Verdict) -> Table:
    """Return the other metrics, judged on the same footing, for information."""
    rows = tuple(
        (
            variant.arm,
            wording.metric(found.metric),
            wording.percent(found.delta_pct),
            wording.interval(found.ci_low_pct, found.ci_high_pct),
            str(found.blocks),
        )
        for variant in verdict.variants
        for found in variant.secondary
    )
    return Table(
        title="Other metrics",
        columns=("variant", "metric", "change", "95 % interval", "blocks"),
        rows=rows,
        numeric=frozenset({2, 3, 4}),
        note="For information: the rule does not decide on these.",
    )


def requirements_table(verdict: Verdict) -> Table:
    """Return every `require` entry of the rule, judged."""
    rows = tuple(
        (
            variant.arm,
            wording.metric(item.metric),
            item.rule,
            "\N{CHECK MARK}\N{NO-BREAK SPACE}met"
            if item.passed
            else "\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}not met",
            item.detail,
        )
        for variant in verdict.variants
        for item in variant.requirements
    )
    return Table(title="Requirements", columns=("variant", "metric", "rule", "result", "found"), rows=rows)


def arms_table(view: AblationView) -> Table:
    """Return every arm's own means, computed from its receipts: one row for each quantity, one column for each arm."""
    receipts = series.receipts_in_time(view)
    arms = view.plan.arms[:MOST_ARMS]
    columns = [_arm_column([r for r in receipts if r.arm == arm.name]) for arm in arms]
    return Table(
        title="Arms",
        columns=("mean over measured trials", *(_titled(arm) for arm in arms)),
        rows=tuple(zip(ARM_ROWS, *columns, strict=True)) if receipts else (),
        numeric=frozenset(range(1, 1 + len(arms))),
        note="Memory: the largest peak over all trials." + _arms_left_out(view),
    )


def _titled(arm: Arm) -> str:
    return f"{arm.name} (baseline)" if arm.role == "baseline" else arm.name


def _arms_left_out(view: AblationView) -> str:
    count = len(view.plan.arms) - MOST_ARMS
    return f" {wording.counted(count, 'more arm')} in the API only." if count > 0 else ""


def _arm_column(receipts: Sequence[Receipt]) -> tuple[str, ...]:
    counts = Counter(r.outcome.value for r in receipts)
    outcomes = ", ".join(f"{count}{wording.SPACE}{outcome}" for outcome, count in counts.items()) or "none yet"
    summaries = [r.summary for r in series.measured(receipts) if r.summary is not None]
    peaks = [r.memory for r in receipts if r.memory is not None]
    mfu = _mean(s.mfu for s in summaries)
    return (
        outcomes,
        wording.number(_of(summaries, "tokens_per_s"), 5),
        wording.seconds(_of(summaries, "step_s_mean")),
        wording.number(_of(summaries, "model_tflops_per_s")),
        wording.NOTHING if mfu is None else wording.plain_percent(100 * mfu),
        wording.fixed(_of(summaries, "loss_step1")),
        wording.fixed(_of(summaries, "loss_final")),
        wording.fixed(_of(summaries, "loss_val")),
        wording.seconds(_mean(r.compile_s for r in receipts)),
        f"{sum(s.outlier_steps for s in summaries):,}" if summaries else wording.NOTHING,
        wording.gib(max((m.peak_allocated_bytes for m in peaks), default=None)),
        wording.gib(max((m.peak_reserved_bytes for m in peaks), default=None)),
    )


def _of(summaries: Sequence[Summary], field: str) -> float | None:
    return _mean(getattr(summary, field) for summary in summaries)


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def gates_table(view: AblationView) -> Table:
    """Return requested against observed: one row for each gate, one column for each arm, over all its receipts."""
    by_arm: dict[str, list[Receipt]] = {}
    for receipt in series.receipts_in_time(view):
        by_arm.setdefault(receipt.arm, []).append(receipt)
    arms = view.plan.arms[:MOST_ARMS]
    gates = sorted({gate for arm in view.plan.arms for gate in arm.gates})
    rows = []
    for gate in gates:
        readings = {arm.name: [r.gates[gate] for r in by_arm.get(arm.name, ()) if gate in r.gates] for arm in arms}
        looked_at = sorted({reading.how for found in readings.values() for reading in found})
        cells = (_gate_cell(arm.gates.get(gate), readings[arm.name]) for arm in arms)
        rows.append((gate, *cells, "; ".join(looked_at) or wording.NOTHING))
    return Table(
        title="Gates: requested against observed",
        columns=("gate", *(_titled(arm) for arm in arms), "looked at"),
        rows=tuple(rows),
        note="The requested value; a check mark where every trial was observed to run it, with their number."
        + _arms_left_out(view),
    )


def _gate_cell(requested: Any, readings: Sequence[GateReading]) -> str:
    live = sum(reading.live for reading in readings)
    wrong = sorted({_shown(reading.observed) for reading in readings if not reading.live})
    if not readings:
        return _shown(requested)
    if not wrong:
        return f"{_shown(requested)} \N{CHECK MARK}{wording.SPACE}{live}"
    seen = f", observed {', '.join(wrong)}"
    return f"{_shown(requested)}{seen} \N{MULTIPLICATION SIGN}{wording.SPACE}live in {live} of {len(readings)}"


def _shown(value: Any) -> str:
    return "not observable" if value is None else value if isinstance(value, str) else canonical_json(value)


def blocks_table(view: AblationView) -> Table:
    """Return every block with its seed, its order and how far it is."""
    trials: dict[int, list[TrialView]] = {}
    for trial in view.trials:
        trials.setdefault(trial.block_index, []).append(trial)
    rows = []
    for block in view.plan.blocks[:MOST_ROWS]:
        own = trials.get(block.index, [])
        receipts = sorted((t.receipt for t in own if t.receipt), key=lambda r: r.ids.position)
        states = Counter(t.state for t in own)
        rows.append(
            (
                str(block_number(block.index)),
                str(block.seed),
                " \N{RIGHTWARDS ARROW} ".join(block.order),
                ", ".join(f"{count} {state}" for state, count in states.items()) or wording.NOTHING,
                receipts[0].environment.node_name if receipts else wording.NOTHING,
                wording.moment(receipts[0].started_at) if receipts else wording.NOTHING,
                wording.seconds(sum(r.wall_s for r in receipts)) if receipts else wording.NOTHING,
            )
        )
    return _capped(
        Table(
            title="Blocks and order",
            columns=("block", "seed", "order of arms", "trials", "node", "started", "wall time"),
            rows=tuple(rows),
            numeric=frozenset({1, 6}),
        ),
        total=len(view.plan.blocks),
    )


def unmeasured_table(view: AblationView) -> Table:
    """Return every outcome other than a valid measurement with its message, and the blocks where it happened."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for r in series.receipts_in_time(view):
        if r.outcome is not Outcome.MEASURED:
            why = r.failure_class.value if r.failure_class else wording.NOTHING
            found.setdefault((r.arm, r.outcome.value, why, r.message or wording.NOTHING), []).append(r.ids.block_index)
    rows = tuple((*key, str(len(blocks)), block_list(sorted(blocks))) for key, blocks in found.items())
    columns = ("arm", "outcome", "class", "message", "trials", "in blocks")
    return _capped(Table(title="Trials without a measurement", columns=columns, rows=rows, numeric=frozenset({4})))


def kernels_table(view: AblationView) -> Table:
    """Return the kernels of the baseline, and of every variant those with other machine code."""
    first: dict[str, Receipt] = {}
    for receipt in series.receipts_in_time(view):
        if receipt.kernels:
            first.setdefault(receipt.arm, receipt)
    baseline = first.get(view.plan.baseline.name)
    known = {(k.get("name"), _machine_code(k)) for k in baseline.kernels if _machine_code(k)} if baseline else set()
    rows = tuple(
        (arm.name, *(_cell(kernel.get(key)) for key in KERNEL_COLUMNS), _machine_code(kernel)[:12] or wording.NOTHING)
        for arm in view.plan.arms
        if arm.name in first
        for kernel in first[arm.name].kernels
        if first[arm.name] is baseline or (kernel.get("name"), _machine_code(kernel)) not in known
    )
    return _capped(
        Table(
            title="Kernels",
            columns=("arm", *KERNEL_COLUMNS.values(), "machine code"),
            rows=rows,
            numeric=frozenset(range(2, 1 + len(KERNEL_COLUMNS))),
            codes=frozenset({1 + len(KERNEL_COLUMNS)}),
            note="From the first trial of each arm. A variant's kernels whose machine code is the baseline's are left "
            "out. The receipts hold everything that was read from the binaries.",
        ),
        most=MOST_KERNELS,
    )


def _machine_code(kernel: Mapping[str, Any]) -> str:
    """Return the digest of the kernel's instructions, or of its source where only that was read; "" where neither."""
    return str(kernel.get("binary_sha256") or kernel.get("source_sha256") or "")


def _cell(value: object) -> str:
    if value is None:
        return wording.NOTHING
    if isinstance(value, bool | str):
        return str(value)
    return wording.number(float(value)) if isinstance(value, int | float) else canonical_json(value)


def provenance_table(view: AblationView) -> Table:
    """Return what produced the numbers; where receipts differ, every value is listed."""
    receipts = series.receipts_in_time(view)
    rows = [
        ("ablation", view.ablation_id),
        ("spec", view.spec_digest),
        ("rule", view.plan.rule_digest),
        *((("verdict", view.verdict.digest),) if view.verdict else ()),
        *((f"arm {arm.name}", arm.digest) for arm in view.plan.arms),
        ("code", _distinct(r.digests.code for r in receipts)),
        ("data", _distinct(r.digests.data for r in receipts)),
        ("git commit", _distinct(r.environment.git_commit for r in receipts)),
        ("uncommitted patch", _distinct((r.environment.git_dirty_digest for r in receipts), absent="none")),
        ("node", _distinct(r.environment.node_name for r in receipts)),
        ("device", _distinct(r.environment.device_name for r in receipts)),
        ("serial number", _distinct(r.environment.device_serial for r in receipts)),
        ("parameters", _distinct(f"{r.parameters:,}" for r in receipts)),
        ("model FLOPs of one step", _distinct(f"{r.flops_per_step:.4g}" for r in receipts)),
        *((name, _distinct(values)) for name, values in sorted(_versions(receipts).items())),
    ]
    return Table(title="Provenance", columns=("what", "value"), rows=tuple(rows), codes=frozenset({1}))


def _versions(receipts: Sequence[Receipt]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for receipt in receipts:
        for name, version in receipt.environment.versions.items():
            found.setdefault(name, []).append(version)
    return found


def _distinct(values: Iterable[str | None], absent: str = wording.NOTHING) -> str:
    return ", ".join(dict.fromkeys(value or absent for value in values)) or absent


def rule_table(rule: Mapping[str, Any]) -> Table:
    """Return the rule exactly as it was hashed."""
    rows = tuple((str(key), _shown(value)) for key, value in rule.items())
    return Table(title="The rule", columns=("part", "value"), rows=rows, codes=frozenset({1}))


def receipts_table(view: AblationView) -> Table:
    """Return every receipt's digest."""
    receipts = series.receipts_in_time(view)
    rows = tuple(
        (r.ids.trial, str(block_number(r.ids.block_index)), r.arm, r.outcome.value, r.digest) for r in receipts
    )
    return _capped(
        Table(
            title="Receipts",
            columns=("trial", "block", "arm", "outcome", "digest"),
            rows=rows,
            codes=frozenset({0, 4}),
        )
    )


def _capped(table: Table, *, most: int = MOST_ROWS, total: int | None = None) -> Table:
    """Keep the first rows, and say so when others are left out."""
    count = len(table.rows) if total is None else total
    if count <= most:
        return table
    note = f"{table.note} The first {most} of {count:,} rows; the API lists all.".strip()
    return Table(
        title=table.title,
        columns=table.columns,
        rows=table.rows[:most],
        numeric=table.numeric,
        codes=table.codes,
        note=note,
    )
