"""Comparison of arms beside their metric: costs of training, work and seeds of commands, kernels of a profiled step."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import scipy

from ablate.experiments.analysis.arm_summary import measured_trials
from ablate.experiments.analysis.evidence import Evidence, Pair
from ablate.experiments.analysis.verdicts import Costs, KernelChange, KernelUse, StepKernels
from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.kinds.program import CLOCK_SHARE, ProgramArm
from ablate.experiments.design.metrics import CPU_STEP, WINDOW_METRICS
from ablate.experiments.design.problems import listed
from ablate.experiments.in_trial.ablate_profile import LAUNCH, longest_launch
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.program_report import printable, shorten
from ablate.experiments.records.receipts import Receipt, kernel_rows
from ablate.model.measurements import KernelFacts

MOST_CHANGES = 25
"""Kernels of a variant in its verdict; receipts and MLflow have all of them."""
_WHOLE = (Outcome.MEASURED, Outcome.REFUSED)
"""Outcomes of trials that may have a profiled step: a refused one shows what ran in place of the required kernel."""
_OF_THE_NUMBER = {
    "process_s": "the time is that of the whole process, with its start",
    **dict.fromkeys(
        ("cpu_s", CPU_STEP),
        "processor time counts work, and not waiting for a disk, a network, a GPU or another process",
    ),
}
_RANKS_SHOWN = 8
_SLOWER, _MOST_TRIALS, _LEAST_TRIALS = 0.05, 0.9, 6
"""A node is named that took this much longer than the others, in this share of the trials, of which there are as many.
Two equal nodes whose times vary by 10 % from trial to trial meet this in 0.5 % of ablations with six trials."""
_SHARED, _QUIET = "processor packages", 0.02
"""What has a counter that everybody shares, and the largest share of the cores' time of others beside its number."""
_MOVED_LEVEL = 0.05
"""Level of both tests of a gain that is paid outside of the window."""
_AMOUNTS = ("product_flops", "product_bytes")
_MEANS = ("occupancy", "product_us", *_AMOUNTS)
"""Facts of a kernel: the whole numbers of its products, and all of which the mean over trials counts."""
_NAMED = 2
"""Kernels that a note names."""


def other_tokens(evidence: Evidence, *, in_all: bool = False) -> str | None:
    """Say how the tokens of a command's steps differ between a variant and the baseline; None if they do not.

    With `in_all` only their sum counts.
    """
    for pair in evidence.pairs:
        own, other = ([step.tokens for step in receipt.steps] for receipt in (pair.variant, pair.baseline))
        differ = sum(own) != sum(other) if in_all else own != other
        if pair.baseline.config.work is None and differ:
            return f"{block_name(pair.block_index)}: the steps have {sum(own):,} tokens, the baseline's {sum(other):,}"
    return None


def costs_of(evidence: Evidence) -> Costs | None:
    """Return the costs of training a variant against the baseline's; None without whole trials of both."""
    own = measured_trials(pair.variant for pair in evidence.pairs)
    base = measured_trials(pair.baseline for pair in evidence.pairs)
    if not own or not base:
        return None
    return Costs(
        tokens=_multiple(own, base, _tokens),
        flops=_multiple(own, base, _flops),
        parameters=_multiple(own, base, lambda receipt: receipt.parameters),
        seconds=_multiple(own, base, _seconds),
    )


def _multiple(own: Sequence[Receipt], base: Sequence[Receipt], read: Callable[[Receipt], float]) -> float | None:
    """Return the ratio of the means; None where a trial has no such number."""
    mine, theirs = [read(receipt) for receipt in own], [read(receipt) for receipt in base]
    if not all(value > 0 for value in (*mine, *theirs)):
        return None
    return math.fsum(mine) * len(theirs) / (math.fsum(theirs) * len(mine))


def _tokens(receipt: Receipt) -> float:
    return sum(step.tokens for step in receipt.steps)


def _flops(receipt: Receipt) -> float:
    return receipt.flops_per_step * len(receipt.steps)


def _seconds(receipt: Receipt) -> float:
    """Return the seconds of all steps at the mean of the timed ones, so that no compilation counts; 0 if unknown."""
    return (
        0.0
        if receipt.summary is None or not receipt.config.has_speed
        else receipt.summary.step_s_mean * receipt.config.steps.total
    )


def kernels_of(receipts: Sequence[Receipt]) -> dict[str, KernelUse]:
    """Return the kernels of an arm by name; empty if a trial with a whole run has no table."""
    whole = [receipt for receipt in receipts if receipt.outcome in _WHOLE]
    tables = [_table(receipt) for receipt in whole]
    if not tables or not all(tables):
        return {}
    facts_of_trials = [receipt.kernel_facts for receipt in whole]
    return {
        name: KernelUse(
            calls=statistics.fmean(table.get(name, (0, 0.0))[0] for table in tables),
            us=statistics.fmean(table.get(name, (0, 0.0))[1] for table in tables),
            facts=_merged(
                [
                    (table[name][1], facts.get(name))
                    for table, facts in zip(tables, facts_of_trials, strict=True)
                    if name in table
                ]
            ),
        )
        for name in sorted(set().union(*tables))
    }


def _merged(of_trials: Sequence[tuple[float, KernelFacts | None]]) -> KernelFacts | None:
    """Return the facts of a kernel in several trials, each with its microseconds; None if a trial has none."""
    trials = [(us, facts) for us, facts in of_trials if facts is not None]
    if len(trials) < len(of_trials):
        return None
    longest, different = longest_launch((us, tuple(getattr(facts, name) for name in LAUNCH)) for us, facts in trials)
    launches = [facts.launches for _us, facts in trials if facts.launches is not None]
    means = {name: _mean(getattr(facts, name) for _us, facts in trials) for name in _MEANS}
    amounts = {name: mean and round(mean) for name, mean in means.items() if name in _AMOUNTS}
    return KernelFacts.model_validate(
        {
            **dict(zip(LAUNCH, longest, strict=True)),
            "launches": max(*launches, different) if launches else None,
            **means,
            **amounts,
        }
    )


def _table(receipt: Receipt) -> dict[str, tuple[int, float]]:
    table: dict[str, tuple[int, float]] = {}
    for name, calls, spent in kernel_rows(receipt):
        before = table.get(name, (0, 0.0))
        table[name] = before[0] + calls, before[1] + spent
    return table


def kernel_changes(variant: Mapping[str, KernelUse], baseline: Mapping[str, KernelUse]) -> tuple[KernelChange, ...]:
    """Return all kernels of two arms, the largest change of time first."""
    names = sorted({*variant, *baseline})
    changes = [KernelChange(name=name, baseline=baseline.get(name), variant=variant.get(name)) for name in names]
    return tuple(sorted(changes, key=lambda change: (-abs(change.change_us), change.name)))


def program_notes(evidence: Evidence, metric: str) -> Iterator[str]:
    """Yield sentences about a variant that is a command."""
    if not evidence.pairs or not (workload := evidence.pairs[0].baseline.config).own_process:
        return
    if not workload.attested:
        yield f"nothing proves that the program used its arguments, variables and code{_by_an_evaluation(workload)}"
    yield from _resumed(evidence)
    if metric in _OF_THE_NUMBER:
        yield _OF_THE_NUMBER[metric]
    if metric in WINDOW_METRICS or metric == CPU_STEP:
        yield from _outside_of_windows(evidence, metric)
    yield from _window_notes(evidence)
    yield from slow_nodes([*evidence.receipts, *(pair.baseline for pair in evidence.pairs)])
    for arm, receipts in (("variant", evidence.receipts), ("baseline", [pair.baseline for pair in evidence.pairs])):
        if _ignores_seed(receipts):
            yield f"two seeds of the {arm} have bit-identical losses: the program may ignore its seed"
        unequal = next((tokens for receipt in receipts if len(set(tokens := _tokens_of_ranks(receipt))) > 1), None)
        if unequal is not None:
            shown = ", ".join(f"{count:,}" for count in unequal[:_RANKS_SHOWN])
            yield f"ranks of the {arm} reported unequal tokens: {shown}; one may count its own share wrongly"


def _resumed(evidence: Evidence) -> Iterator[str]:
    """Compare the losses of a program that was killed and went on with those of the baseline, step by step."""
    config = evidence.arm.config
    if not isinstance(config, ProgramArm) or config.resume_at is None:
        return
    reports = [pair.variant.program for pair in evidence.pairs if pair.variant.program]
    starts = sorted({report.resumed_from for report in reports if report.resumed_from is not None})
    head = f"killed after {config.resume_at:,} steps and resumed from step {listed(starts)}"
    compared = [(pair, list(zip(pair.baseline.steps, pair.variant.steps, strict=False))) for pair in evidence.pairs]
    differing = [
        (pair.block_index, first)
        for pair, steps in compared
        if (first := next((both for both in steps if repr(both[0].loss) != repr(both[1].loss)), None))
    ]
    if not any(both[0].loss is not None for _pair, steps in compared for both in steps):
        yield f"{head}: no step reports a loss that could be compared"
    elif not differing:
        yield f"{head}: every loss is that of the uninterrupted run, bit for bit, in {len(compared)} blocks"
    else:
        block, (base, own) = differing[0]
        yield (
            f"{head}: the first loss that differs is that of step {base.index}, {base.loss!r} uninterrupted and "
            f"{own.loss!r} resumed ({block_name(block)}; so in {len(differing)} of {len(compared)} blocks)"
        )
    if again := next((report.repeated_otherwise for report in reports if report.repeated_otherwise), None):
        yield f"step {again[0]} ran twice, with loss {again[1]!r} before the program was killed and {again[2]!r} after"


def clocks_apart(evidence: Evidence, metric: str, margin_pct: float) -> str | None:
    """Say that the worker's clock gives another effect on the windows than the programs' own; None if it does not.

    One trial may differ by milliseconds. By chance they do so in both directions.
    """
    pairs = evidence.pairs if metric in WINDOW_METRICS else ()
    lags = [(_lag(pair.variant), _lag(pair.baseline)) for pair in pairs]
    differences = [own - other for own, other in lags if own is not None and other is not None]
    if not differences:
        return None
    gap, limit = 100 * math.expm1(math.fsum(differences) / len(differences)), max(margin_pct, 100 * CLOCK_SHARE)
    if abs(gap) <= limit:
        return None
    return (
        f"by the worker's clock the variant's windows are {gap:+.2f} % longer against the baseline's than by the "
        f"programs' own clocks; allowed: {limit:.3g} %"
    )


def _lag(receipt: Receipt) -> float | None:
    """Return the logarithm of the window by the worker's clock over that by the program's own."""
    program = receipt.program
    own, seen = (None, None) if program is None else (program.window_s, program.window_seen_s)
    return math.log(seen / own) if own and seen and min(own, seen) > 0 else None


def _outside_of_windows(evidence: Evidence, metric: str) -> Iterator[str]:
    """Say that a gain inside the window was paid outside of it, by half at least, and what had to be ended."""
    both = [(_parts(pair.variant, metric), _parts(pair.baseline, metric)) for pair in evidence.pairs]
    gains = [(base[0] - own[0], own[1] - base[1]) for own, base in both if own and base]
    if _are_above_zero([gain for gain, _ in gains]) and _are_above_zero([cost - gain / 2 for gain, cost in gains]):
        inside, outside = (statistics.fmean(column) for column in zip(*gains, strict=True))
        yield (
            f"it needs {inside:.3g} s less than the baseline inside of the window, and {outside:.3g} s more outside "
            f"of it (means): compilation and start-up do that, and so does work that was moved there"
        )
    marked = [receipt for receipt in measured_trials(evidence.receipts) if receipt.program and receipt.program.ranks]
    ended = sum(receipt.process_s is None for receipt in marked)
    if ended and any(pair.baseline.process_s is not None for pair in evidence.pairs):
        yield (
            f"processes of the variant still ran at the end of {ended} of its {len(marked)} trials, and had to be "
            "ended: their work is in no number"
        )


def _window_notes(evidence: Evidence) -> Iterator[str]:
    """Say how long both arms waited for data, and how much energy a token took."""
    arms = (measured_trials(evidence.receipts), measured_trials(pair.baseline for pair in evidence.pairs))
    own, base = (_mean(map(_loading_share, receipts)) for receipts in arms)
    if own is not None or base is not None:
        variant, baseline = ("an unknown part" if one is None else f"{one:.1%}" for one in (own, base))
        yield f"it waited for data in {variant} of its windows, the baseline in {baseline} (means)"
    sources = {receipt.program.energy_of for receipts in arms for receipt in receipts if receipt.program}
    if len(sources) != 1 or (of := sources.pop()) is None:
        return
    loads = [receipt.environment.foreign_load for receipts in arms for receipt in receipts]
    if of == _SHARED and any(load is None or load > _QUIET for load in loads):
        why = f"others took more than {_QUIET:.0%} of the cores' time, or nobody knows"
        yield f"the energy of the {of} is not shown: {why}"
        return
    spent, base_spent = (_joules([*map(_joules_per_token, receipts)]) for receipts in arms)
    if spent and base_spent:
        more = ", with everything that ran on them" if of == _SHARED else ""
        yield f"the {of} used {spent} J a token in its windows, {base_spent} in the baseline's (mean, range{more})"


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if a value is missing, or all are."""
    entries = list(values)
    numbers = [value for value in entries if value is not None]
    return statistics.fmean(numbers) if numbers and len(numbers) == len(entries) else None


def _loading_share(receipt: Receipt) -> float | None:
    program = receipt.program
    return None if program is None or program.loading_s is None else program.loading_s / (program.window_s or math.inf)


def _joules_per_token(receipt: Receipt) -> float | None:
    tokens = sum(step.tokens for step in receipt.steps if step.phase == "timed")
    energy = receipt.program and receipt.program.energy_j
    return energy / tokens if isinstance(energy, float) and tokens else None


def _joules(values: Sequence[float | None]) -> str | None:
    mean = _mean(values)
    numbers = [value for value in values if value is not None]
    return None if mean is None else f"{mean:.3g} ({min(numbers):.3g} to {max(numbers):.3g})"


def _are_above_zero(values: Sequence[float]) -> bool:
    """Return whether the mean is proved to be above zero (t test, one side)."""
    if len(values) < 2:
        return False
    limit = float(scipy.special.stdtrit(len(values) - 1, 1 - _MOVED_LEVEL)) * statistics.stdev(values)
    return statistics.fmean(values) * math.sqrt(len(values)) > limit


def _parts(receipt: Receipt, metric: str) -> tuple[float, float] | None:
    """Return the seconds, or processor seconds, of a program inside and outside of its window; None if unknown."""
    window, whole = None if receipt.program is None else receipt.program.window_s, receipt.process_s
    if metric == CPU_STEP:
        spent, whole = receipt.cpu_step_s, receipt.cpu_s
        window = None if spent is None else spent * receipt.config.steps.timed
    return None if window is None or whole is None else (window, whole - window)


def slow_nodes(receipts: Sequence[Receipt]) -> Iterator[str]:
    """Name each node that was slower than the others in nearly all trials over several nodes."""
    excess: dict[str, list[float]] = {}
    for receipt in measured_trials(receipts):
        steps = _step_of_nodes(receipt)
        for node, own in steps.items():
            others = [seconds for other, seconds in steps.items() if other != node]
            if others:
                excess.setdefault(node, []).append(own / statistics.median(others) - 1)
    for node, ratios in sorted(excess.items()):
        slower = sum(ratio > _SLOWER for ratio in ratios)
        if len(ratios) >= _LEAST_TRIALS and slower >= _MOST_TRIALS * len(ratios):
            yield (
                f"node {printable(node)} was {statistics.median(ratios):.0%} slower than the others' median, by more "
                f"than {_SLOWER:.0%} in {slower} of {len(ratios)} trials"
            )


def _step_of_nodes(receipt: Receipt) -> dict[str, float]:
    """Return the step time of the slowest rank of each node; empty unless all are known."""
    program = receipt.program
    if program is None or program.rank_step_s is None or program.rank_nodes is None or min(program.rank_step_s) <= 0:
        return {}
    steps: dict[str, float] = {}
    for node, seconds in zip(program.rank_nodes, program.rank_step_s, strict=True):
        steps[node] = max(seconds, steps.get(node, 0.0))
    return steps


def _by_an_evaluation(workload: ArmConfig) -> str:
    if not isinstance(workload, ProgramArm) or workload.evaluate is None:
        return ""
    return f"; {listed(sorted(workload.metrics))} by {workload.evaluate.title}"


def contradictions_of(evidence: Evidence) -> Iterator[str]:
    """Say which results the programs of both arms gave otherwise than they count, with the first such trial."""
    yield from _contradictions(f"arm '{evidence.arm.name}'", evidence.receipts)
    yield from _contradictions("the baseline", [pair.baseline for pair in evidence.pairs])


def _contradictions(arm: str, receipts: Sequence[Receipt]) -> Iterator[str]:
    programs = [(receipt.ids.block_index, receipt.program) for receipt in receipts if receipt.program]
    for name in sorted({name for _, program in programs for name in program.contradicted}):
        contradicting = [(block, program) for block, program in programs if name in program.contradicted]
        block, first = contradicting[0]
        printed, counted = first.contradicted[name], first.reported[name]
        numbers = f"{printed:.6g} as {printable(name)}, but {counted:.6g} counts"
        trials = f"{block_name(block)}; so in {len(contradicting)} of its {len(programs)} trials"
        if first.evaluation is not None and name in first.evaluation.metrics:
            yield f"{arm} reported {numbers}, by the protected evaluation ({trials})"
        else:
            yield f"{arm} contradicts itself: it printed or reported {numbers} ({trials})"


def _tokens_of_ranks(receipt: Receipt) -> tuple[int, ...]:
    measured = receipt.outcome is Outcome.MEASURED and receipt.program is not None
    return (receipt.program.rank_tokens or ()) if measured and receipt.program else ()


def _ignores_seed(receipts: Sequence[Receipt]) -> bool:
    losses: dict[tuple[float | None, ...], int] = {}
    for receipt in receipts:
        own = tuple(step.loss for step in receipt.steps)
        lossy = receipt.outcome is Outcome.MEASURED and any(loss is not None for loss in own)
        if lossy and losses.setdefault(own, receipt.seed) != receipt.seed:
            return True
    return False


def changes_of(pairs: Sequence[Pair]) -> tuple[KernelChange, ...]:
    """Return all kernels of a variant and the baseline; none unless every measured trial has a profiled step."""
    own, base = kernels_of([pair.variant for pair in pairs]), kernels_of([pair.baseline for pair in pairs])
    return kernel_changes(own, base) if own and base else ()


def step_kernels(evidence: Evidence) -> StepKernels | None:
    """Compare the kernels of a variant's profiled step with the baseline's; None without profiled steps."""
    changes = changes_of(evidence.pairs)
    if not changes:
        return None
    same = all(change.same_calls for change in changes)
    return StepKernels(same=same, kernels=len(changes), changes=changes[:MOST_CHANGES])


def kernel_note(kernels: StepKernels) -> str:
    """Say in one sentence whether two arms ran the same kernels, and which times changed most."""
    largest = kernels.changes[:_NAMED]
    named = ", ".join(f"{shorten(change.name)} {change.change_us:+,.0f} us" for change in largest)
    what = "the same kernels, equally often" if kernels.same else "different kernels"
    other = next((change for change in kernels.changes if change.launch_differences), None)
    launched = f"; the variant's {shorten(other.name)} has {', '.join(other.launch_differences)}" if other else ""
    return f"these arms ran {what} in the profiled step; largest changes of their time: {named}{launched}"
