"""The pre-registered rule: how samples become a verdict, hashed before the first sample.

Texts and numbers of the rule are part of its digest, so a changed rule judges no plan that was made before it.
"""

from typing import Any

from ablate.experiments.design.gate import Claim
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.metrics import CPU_STEP, CURVE_METRICS, METRICS, OTHER_PROGRAM, TARGET_METRICS
from ablate.experiments.design.power import ALPHA, blocks_for_events, level_shares
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.verdict_rule import Primary, Requirement
from ablate.experiments.design.workload import Steps
from ablate.experiments.digest import digest
from ablate.experiments.outcomes import FailureClass

LOAD_LEVEL = 0.05
"""Level of the sign test whether others' load spoiled more attempts of one arm."""

MAX_SLOWED_SHARE = 0.01
"""Seconds that heat or hardware slowed the device down during a trial, over the seconds of its window."""
MAX_CLOCK_GAP = 0.01
"""Relative difference of the median device clock between arms, unless the cycles differ as well."""
MAX_PAUSE_S = 60.0
"""Between the end of a trial and the start of the next one in its block."""
MAX_BACKWARD_S = 1.0
"""Overlap that two trials may seem to have because the machine's clock was set."""

ESTIMATOR: dict[str, Any] = {
    "window": "timed steps; step 0 and warm-up are kept and marked",
    "estimate": "total: tokens of the window over its seconds, nothing left out",
    "beside": "median step",
    "stalls": "no word where total and median are further apart than the margin beyond noise (t test over blocks at "
    "5 %), or where outlier steps are more in one arm (sign-flip test over blocks at 5 %), and the medians do not give "
    "the same word",
}
"""How the timed steps of a trial become one number."""

SLICES: dict[str, Any] = {
    "slices": "the trials of a block are in memory together and run their timed steps by turns, through the block's "
    "order and back, one at any moment; nothing untimed between a trial's slices",
}
"""Addition to the estimator where a window runs in slices."""

TURNS: dict[str, Any] = {
    "turns": "the trials of a block are in memory together and run by turns of half a second, through the block's "
    "order and back, one at any moment; the turns of the others are in no time of a trial",
}
"""The same where whole processes take turns."""

VALIDATED: dict[str, Any] = {
    "validations": "between timed steps by a schedule; their time is in no step and no part of the window",
}
"""Addition to the estimator where trials validate by a schedule."""

COMPILE_TIME: dict[str, Any] = {
    "estimate": "wall seconds of the pass before step 0 that compiles, its one execution included",
    "caches": "empty on disk when a trial starts",
}
"""How the compilation of a trial becomes one number."""

COMPARISON: dict[str, Any] = {
    "unit": "one trial per arm and block, d = ln(variant / baseline) within the block",
    "alpha": ALPHA,
    "askings": "4 % for the first asking of a question, 1 % / (m (m - 1)) for the m-th: 5 % over all",
    "covariate": "place of the variant in the block minus place of the baseline, least squares",
    "test": "Student's t at every number of blocks",
    "dependence": "tests and intervals are widened by what an autoregressive process asks for, of the strongest "
    "autocorrelation from 0 to 0.9 that is at least 0.95 times as likely as the likeliest one, in the A/A blocks (mean "
    "zero) and in the blocks themselves (the mean over the variants of their log likelihoods), less the effect of "
    "places (restricted likelihood); in the blocks alone, where none is less than 0.15 times as likely",
    "admission": "no word without 6 A/A blocks of the device; those of a control in the same blocks count",
    "interval": "t, simultaneous over the variants (Bonferroni), ending at zero or margin where Holm proves the side",
    "beside": "sign flip p, exact up to 16 blocks, 9999 seeded flips beyond; reported, not decisive",
    "several_variants": "Holm over all planned variants, for difference and for sameness",
    "better_or_worse": "the whole interval lies beyond the margin; a difference that is proved and may be within it is "
    "inconclusive",
    "same": "two one-sided t tests against the margin, corrected p at most the level",
    "looks": "group-sequential: the looks spend the growth of (blocks / all blocks) ** 2 of the level, by their joint "
    "normal distribution; p values and intervals hold over all looks; futile below a chance of 10 %",
    "spreads": "no word where one arm's trials scatter more (5 %; Pitman-Morgan below 16 blocks, sign flips of squares "
    "from there), the estimate lies within 6 standard deviations of that arm, and, from 16 blocks on, the mean of that "
    "arm's trials is further from their median than in 70 % of normal samples",
    "noise": "no word where d scatters by three times the standard deviation of the A/A blocks or more (F test, 1 %)",
    "carry_over": "no word where trials right after one of the arm differ (5 %, least squares beside mean and place) "
    "and the word is not proved beside that",
    "reruns": "no word where an arm's own run ended an attempt, guards and machine ended two more of one arm's, or "
    "others' load ended more of one arm's than chance explains (sign test, 5 %)",
    "lost_trials": "no same of a time, and no proof of not_worse_by, that does not hold if the trials of attempts that "
    "ended early, except by others' load, were twice as slow as the slowest",
    "exact_requirement": "a failed one rejects whatever the speed does",
    "adoption": "better, and an estimate from the threshold on",
    "missing": "fails, except of six blocks one in which the baseline alone did not measure; 6 must count",
}
"""How trials become a verdict word."""

EXACT_COMPARISON: dict[str, Any] = {
    "unit": "one value per arm and seed",
    "exact": "every repeat of an arm with a seed gives the same value, bit for bit, in two blocks at least; or else "
    "inconclusive",
    "better_or_worse": "the change lies beyond the margin, the same way for every seed",
    "same": "the change lies within the margin for every seed",
    "without_direction": "same: bit-identical; worse: not",
    "exact_requirement": COMPARISON["exact_requirement"],
    "missing": "fails",
}
"""How trials become a verdict word where an exact metric decides."""

OTHER_MODEL: dict[str, Any] = {
    "other_work": "no word where tokens or model FLOPs of a step differ and the metric counts whole steps, or model "
    "FLOPs of a token differ and the metric counts tokens",
}
"""Addition to the comparison where a gate changes the numerical model."""
EQUAL_PARAMETERS = {
    "other_work": "no word where tokens of a step differ and the metric counts whole steps; parameters are equal up to "
    "2 %, and FLOPs may differ",
}
"""The same where the spec demands equal parameters."""


OTHER_TRAINING: dict[str, Any] = {
    "other_training": "no word of a loss where the arms train on other numbers of tokens, unless their model FLOPs are "
    "equal up to 0.1 %; of a validation loss where its rows or their tokens differ; of a training loss where the "
    "rows of a step differ",
}
"""Addition to both of them."""

PROCESS_TIMES: dict[str, dict[str, Any]] = {
    "process_s": {"estimate": "wall seconds of the whole process, its start and its end included"},
    "cpu_s": {"estimate": "processor seconds of all processes, of the user and the system, from start to end"},
}
"""How a whole process becomes one number, by metric."""


CPU_TIME_OF_STEPS: dict[str, Any] = {
    "window": ESTIMATOR["window"],
    "estimate": "processor seconds of all processes, of the user and the system, from the begin to the end of the "
    "window, over its steps; work between slices counts",
}
"""How the processor time of a window becomes one number."""


def reported_estimator(metric: str) -> dict[str, Any]:
    """Return the estimator of a number that the program reports."""
    return {"estimate": "the number that the program reports at its end, once for each run", "metric": metric}


NOT_INFERIOR: dict[str, Any] = {
    "not_inferior": "not_worse_by under require: one-sided t test at the level of this asking and look, over the "
    "number of variants (Bonferroni), that the variant is worse by less; without proof the decision is inconclusive",
    "of_losses": "one difference per seed, the mean over its blocks",
    "of_speeds": "proved on a device with A/A blocks only",
}
"""Addition to the comparison where a requirement bounds a metric by a test."""
SEEDS: dict[str, Any] = {
    "seeds": "every block has a seed of its own; no word where one arm reports the same number with every seed, or "
    "both arms the same two numbers with two seeds",
    "steps": "no same where the values come in steps above the margin",
    "spreads_over_seeds": "they matter where the estimate lies within 6 standard deviations of d",
}
"""Addition to the comparison where a declared metric decides."""
OVER_SEEDS: dict[str, Any] = {
    "unit": "one difference per seed, variant minus baseline, the mean over its blocks; in percent of the mean of the "
    "baseline over the seeds",
    "covariate": "none",
    "dependence": "none: seeds are independent",
    "calibration": "none: the seeds show the noise",
    "seeds": "no word where one arm has the same number with every seed, or both arms the same two with two seeds",
    "steps": SEEDS["steps"],
    "spreads_over_seeds": "they matter where the estimate lies within 6 standard deviations of the differences",
}
"""Changes of the comparison where a loss decides by statistics."""


OVER_CURVES: dict[str, Any] = {
    "unit": "one difference per block, each with a seed of its own, from the validation curves of both trials",
    "curve": "linear between validations; the mean of its estimated errors is added to both ends of an interval, and "
    "tests allow for it",
    "tokens": "of all steps, step 0 and warm-up included",
    "seconds": "of the timed steps, and for each step before them the mean of the timed ones",
    "rows": "no word where the arms validate on other rows",
    "seeds": OVER_SEEDS["seeds"],
    "spreads_over_seeds": OVER_SEEDS["spreads_over_seeds"],
}
"""Changes of the comparison where a number of validation curves decides."""
AT_EQUAL_TIME: dict[str, Any] = {
    "value": "validation loss at the largest training time that both trials of the block reached, in percent of the "
    "mean of the baseline's last validation losses",
}
TO_TARGET: dict[str, Any] = {
    "value": "until the validation loss first is at most the target; d = ln(variant / baseline)",
    "censored": "a trial that does not reach the target, or has reached it at its first validation, counts at its last "
    "or first validation; no word but a change that is larger without that",
}


SESSION: dict[str, Any] = {
    "askings": "the session gives each proposal its level, whatever was asked before (LORD++: 5 % wrong ones among the "
    "kept ones); a proposal spends it when it is submitted, and only a kept one gives some back",
}
"""In place of the level of an asking where the ablation is a proposal of a session."""


def window_estimator(slice_steps: int) -> dict[str, Any]:
    """Return the estimator of windows whose slices have `slice_steps` steps; 0: no slices."""
    return {**ESTIMATOR, **SLICES, "slice": slice_steps} if slice_steps else ESTIMATOR


def process_estimator(metric: str, *, turns: bool) -> dict[str, Any]:
    """Return the estimator of a number of whole processes, which took turns or ran one after another."""
    return {**PROCESS_TIMES[metric], **(TURNS if turns else {})}


def estimator_of(metric: str, slice_steps: int, *, turns: bool) -> dict[str, Any]:
    """Return how one trial becomes one number of `metric`."""
    if metric == CPU_STEP:
        return {**CPU_TIME_OF_STEPS, **({**SLICES, "slice": slice_steps} if slice_steps else {})}
    if metric not in METRICS:
        return reported_estimator(metric)
    if METRICS[metric].cold:
        return COMPILE_TIME
    if metric in PROCESS_TIMES:
        return process_estimator(metric, turns=turns)
    return window_estimator(slice_steps)


def rule_of(spec: AblationSpec) -> dict[str, Any]:
    """Return the rule of `spec` as plain JSON."""
    primary, looks = spec.verdict.primary, spec.design.blocks.schedule
    return {
        "primary": {
            "metric": primary.metric,
            **amounts_of(primary),
            **({} if primary.target is None else {"target": str(primary.target)}),
            **({} if primary.metric in METRICS else {"better": spec.metric.better}),
        },
        "require": [_required(spec, requirement) for requirement in spec.verdict.require],
        "blocks": spec.design.blocks.number,
        "looks": {str(look): share for look, share in zip(looks, level_shares(looks), strict=True)},
        "seeds": list(spec.design.chosen_seeds or ()) or f"{spec.design.num_seeds}, drawn after the spec was fixed",
        "estimator": estimator_of(primary.metric, spec.workload.steps.slice, turns=spec.workload.turns)
        | _validated(spec.workload.steps),
        "comparison": _comparison(primary) | _additions(spec),
        "guards": _guard_limits(spec),
    }


def _validated(steps: Steps) -> dict[str, Any]:
    return {**VALIDATED, "val_every": steps.val_every} if steps.val_every else {}


def _comparison(primary: Primary) -> dict[str, Any]:
    without = {"noise", "carry_over"} if primary.over_seeds else set()
    if not primary.timed:
        without |= {"admission", "lost_trials"}
    texts = EXACT_COMPARISON if primary.exact else COMPARISON
    return {part: text for part, text in texts.items() if part not in without}


def amounts_of(primary: Primary) -> dict[str, Any]:
    """Return margin and threshold of the rule as plain JSON: percent, or amounts with their unit."""
    if primary.margin.relative:
        return {"margin_pct": primary.margin_pct, "adopt_if_pct": primary.threshold_pct}
    return {"margin": str(primary.margin), "adopt_if": str(primary.threshold)}


def _required(spec: AblationSpec, requirement: Requirement) -> dict[str, Any]:
    values = requirement.model_dump(mode="json", exclude_none=True)
    if requirement.not_worse_by is None:
        return values
    return {**values, "better": spec.metric_named(requirement.metric).better}


def _additions(spec: AblationSpec) -> dict[str, Any]:
    return _other_model(spec) | _of_declared(spec) | _of_session(spec) | _of_events(spec)


def _of_events(spec: AblationSpec) -> dict[str, Any]:
    share, blocks = spec.verdict.rarest_event, blocks_for_rarest_event(spec)
    return {} if blocks is None else {"rarest_event_pct": share, "blocks_for_rarest_event": blocks}


def blocks_for_rarest_event(spec: AblationSpec) -> int | None:
    """Return the blocks, or the seeds of a loss, that the rarest event of the rule needs; None without one."""
    share = spec.verdict.rarest_event
    if share is None:
        return None
    return blocks_for_events(share / 100, spec.verdict.level_of(1) / len(spec.variants))


def _of_session(spec: AblationSpec) -> dict[str, Any]:
    """Return the proposal's number and level, which only the judge of a metric with noise uses."""
    session = spec.verdict.session
    return {} if session is None else {**SESSION, "session": session.model_dump(mode="json")}


def _of_declared(spec: AblationSpec) -> dict[str, Any]:
    tested = any(requirement.not_worse_by is not None for requirement in spec.verdict.require)
    primary = spec.verdict.primary
    over_seeds = _over_curves(primary.metric) if primary.metric in CURVE_METRICS else {}
    over_seeds = over_seeds or (OVER_SEEDS if primary.over_seeds else {})
    return (SEEDS if primary.metric not in METRICS else over_seeds) | (NOT_INFERIOR if tested else {})


def _over_curves(metric: str) -> dict[str, Any]:
    without_clock = {part: OVER_SEEDS[part] for part in ("covariate", "dependence", "calibration")}
    value = TO_TARGET if metric in TARGET_METRICS else AT_EQUAL_TIME
    return {**OVER_CURVES, **value, **({} if METRICS[metric].clocked else without_clock)}


def _other_model(spec: AblationSpec) -> dict[str, Any]:
    of_curves = spec.verdict.primary.metric in CURVE_METRICS  # where tokens or seconds are equal
    training = {} if of_curves else OTHER_TRAINING
    if not spec.workload.built_in:
        return OTHER_PROGRAM | training
    gates = (gate for arm in spec.variants.values() for gate in arm.gates or ())
    values = any(arm.overrides for arm in spec.variants.values())
    if spec.workload.steps.equal == "parameters":
        return EQUAL_PARAMETERS | training
    return OTHER_MODEL | training if values or any(GATES[gate].claim is Claim.CHANGES_MODEL for gate in gates) else {}


def rule_digest(spec: AblationSpec) -> str:
    """Return the digest of `rule_of(spec)`."""
    return digest(rule_of(spec))


def _guard_limits(spec: AblationSpec) -> dict[str, float | int]:
    """Return the limits of the guards; loads are shares of the cores' time."""
    for_load = {"reruns_for_load": FailureClass.DISTURBED.rule.attempts - 1} if spec.verdict.timed else {}
    return {
        "max_slowed_share": MAX_SLOWED_SHARE,
        "max_clock_gap": MAX_CLOCK_GAP,
        "max_pause_s": MAX_PAUSE_S,
        "max_foreign_load": spec.placement.max_foreign_load / 100,
        "compilations_in_window": 0,
        "reruns_of_a_block": 2,
        **for_load,
    }
