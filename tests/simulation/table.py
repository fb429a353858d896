"""The tables of `make simulate`: all simulated cases with Monte-Carlo intervals."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain

import numpy as np

from ablate.experiments.analysis.noise.calibrate import upper_factor
from ablate.experiments.analysis.sizing import LOOKS as LOOKS_OF_AUTO
from ablate.experiments.analysis.sizing import PASSES, looks_up_to
from ablate.experiments.analysis.statistics import log_ratio, percent
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.checks import MOST_APART
from ablate.experiments.design.power import (
    PLANNED_POWER,
    Look,
    alpha_of,
    blocks_for_events,
    blocks_to_detect,
    detectable_per_sd,
)
from ablate.experiments.outcomes import VerdictWord
from tests.simulation import draws, traps
from tests.simulation.cases import (
    ASKINGS,
    BLOCKS,
    FEW_AA,
    LOOKS,
    LOSS_NOISES,
    MARGIN_PCT,
    NO_MARGIN_PCT,
    NOISES,
    VARIANTS,
    Crashes,
    Drawing,
    Outcomes,
    Stalls,
    adoptions,
    asked_again,
    at_the_end,
    by_shares,
    controlled,
    counted,
    jointly,
    losses_passed,
    noisy,
    noted,
    outcomes,
    verdict_rates,
    windows_in_parts,
    with_looks,
    with_slow_mode,
    wrong_of_unequal_flops,
)
from tests.simulation.dependence import BLOCKS as BLOCKS_OF_DEPENDENCE
from tests.simulation.dependence import FOUND_SD, SOURCES, dependent
from tests.simulation.noise import SD
from tests.simulation.rates import Rate, rate
from tests.simulation.scopes import over_nodes, wrong_of_alike_seeds
from tests.simulation.sessions import PROPOSALS, Kept, levels_without_keep, mixed, nulls, planted, sessions
from tests.simulation.targets import RULES, Arms, word_rates
from tests.simulation.words import NOW, OLD

_HIDDEN = 0.2
"""Mean number of stalled steps per window; so few that a few blocks may have none."""
_HIDDEN_NAME = "1 step in 5 windows stalls, the others are faster to balance it"
_SKEWED = "heavy skew in the variants only"
_AIMS = (1.0, 1.5, 2.0)
_AT_LOOKS = (1.0, 1.5, 2.0)
"""True effects of the table of looks, in percent."""
_MEAN_WIDENING = 1.18
"""Mean factor of twenty independent A/A blocks."""


def tables(repetitions: int) -> Iterator[str]:
    """Yield the tables as Markdown, one by one."""
    yield from (_noise_table(name, repetitions) for name in NOISES)
    yield control_table(repetitions)
    yield _auto_table(repetitions)
    yield _looks_table(repetitions)
    yield _words_table(repetitions)
    yield targets_table(repetitions)
    yield _traps_table(repetitions)
    yield _bootstrap_table(repetitions)
    yield _losses_table(repetitions)
    yield _flops_table(repetitions)
    yield _adoption_table(repetitions)
    yield _events_table(repetitions)
    yield _notes_table(repetitions)
    yield _nodes_table(repetitions)
    yield _seeds_table(repetitions)
    yield dependence_table(repetitions)
    yield from session_tables(repetitions // 4)


def _noise_table(name: str, repetitions: int) -> str:
    rows = []
    for blocks in BLOCKS:
        for variants in VARIANTS:
            parts = windows_in_parts(noisy(name), blocks, variants, repetitions, 0)
            rows.append((blocks, variants, *_beside(counted(parts, NOW), counted(parts, OLD))))
    heads = ("blocks", "variants", "wrong better or worse", "wrong same", "intervals hold", "detects 1 %",
             "better at 2 %", "withheld")  # fmt: skip
    return _table(f"Noise: {name}", heads, rows)


def _beside(rates: Outcomes, old: Outcomes) -> Iterator[str]:
    """Yield each rate with its interval, and that of the old rule."""
    for name in ("wrong_difference", "wrong_same", "holds", "detected", "beyond", "withheld"):
        yield f"{getattr(rates, name)}, was {100 * getattr(old, name).value:.1f}"


_FIRST = ((6, 1), (6, 4), (10, 1), (10, 4), (14, 2))
"""(blocks, variants) of first ablations."""


def control_table(repetitions: int) -> str:
    """Return the table of ablations whose only A/A blocks are those of their own control."""
    rows = []
    for name in FEW_AA:
        for blocks, variants in _FIRST:
            parts = windows_in_parts(controlled(name), blocks, variants, repetitions, 0)
            rows.append((name, blocks, variants, *_beside(counted(parts, NOW), counted(parts, OLD))))
    heads = ("noise", "blocks", "variants", "wrong better or worse", "wrong same", "intervals hold", "detects 1 %",
             "better at 2 %")  # fmt: skip
    return _table("First ablations, with a control and without a calibration", (*heads, "withheld"), rows)


def _auto_table(repetitions: int) -> str:
    rows = []
    for aim in _AIMS:
        for variants in VARIANTS:
            now, old = planned_looks(variants, aim), (planned_looks(variants, aim, parts=1))
            cells = ((now, jointly, NOW), (old, at_the_end, OLD))
            row: list[object] = [f"{aim:g} %", variants]
            for looks, looking, rule in cells:
                gain, null = (
                    with_looks(noisy("normal"), variants=variants, repetitions=repetitions // 4, effect_pct=effect,
                               looks=looks, looking=looking, rule=rule)
                    for effect in (aim, 0.0)
                )  # fmt: skip
                middles = (f"{np.median(each.blocks):.0f} of {looks[-1]}" for each in (gain, null))
                row += [gain.better, next(middles), null.same, next(middles)]
            rows.append(tuple(row))
    heads = ("better at the gain", "blocks", "same without an effect", "blocks")
    heads = ("gain", "variants", *heads, *(f"{head}, was" for head in heads))
    return _table("`blocks: auto` at an sd of 0.5 % and a margin of 0.5 %; blocks: median of most", heads, rows)


def planned_looks(variants: int, aim_pct: float, *, parts: int = LOOKS_OF_AUTO) -> tuple[int, ...]:
    """Return the looks of `blocks: auto` for a gain of `aim_pct`, at the sd of the noises and the mean widening.

    With one part it is the fixed number of the rule until November 2026.
    """
    looks: tuple[int, ...] = (BLOCKS[0],)
    for _ in range(PASSES):
        needed = blocks_to_detect(
            log_ratio(aim_pct) - log_ratio(MARGIN_PCT),
            SD * upper_factor(ADMITTING_BLOCKS),
            minimum=BLOCKS[0],
            level=Look(looks, len(looks) - 1).level(alpha_of(1) / variants),
            power=PLANNED_POWER,
            widening=lambda _blocks: _MEAN_WIDENING,
        )
        if needed is None:
            raise AssertionError("such gains need few blocks")
        looks = (needed,) if parts == 1 else tuple(looks_up_to(needed))
    return looks


def _looks_table(repetitions: int) -> str:
    rows = []
    rules = {"looks": jointly, "looks, until November 2026": by_shares, "a fixed number": at_the_end}
    for name, looking in rules.items():
        for variants in VARIANTS:
            null, half, one, two = (
                with_looks(
                    noisy("normal"),
                    variants=variants,
                    repetitions=repetitions,
                    effect_pct=effect,
                    margin_pct=MARGIN_PCT if effect else NO_MARGIN_PCT,
                    looking=looking,
                )
                for effect in (0.0, *_AT_LOOKS)
            )
            rates = ((each.better, f"{each.blocks.mean():.1f}") for each in (half, one, two))
            rows.append((name, variants, null.changed, *chain(*rates)))
    heads = ("rule", "variants", "wrong better or worse")
    heads += tuple(chain(*((f"detects {effect:g} %", "blocks") for effect in _AT_LOOKS)))
    return _table(f"Looks at {', '.join(map(str, LOOKS))} blocks", heads, rows)


def _hidden_stalls() -> Stalls:
    return Stalls(stalls=_HIDDEN, faster=-draws.true_effect_of_stalls(stalls=_HIDDEN, faster=0))


def _words_table(repetitions: int) -> str:
    cases: dict[str, Stalls | Crashes] = {
        "2 of 25 steps stall": Stalls(stalls=2, faster=0),
        "2 of 25 steps stall, the others 1.5 % faster": Stalls(stalls=2, faster=0.015),
        _HIDDEN_NAME: _hidden_stalls(),
        "slow trials (5 % slower, three in ten) crash and are rerun": Crashes(slow=0.05, chance=0.3),
        "slow trials (5 % slower, one in ten) are preempted": Crashes(slow=0.05, chance=0.1, preempted=True),
        "one trial in fifty is preempted, and none is slow": Crashes(slow=0.0, chance=0.02, preempted=True),
    }
    rows = []
    for name, case in cases.items():
        for blocks in BLOCKS:
            rates, old = (verdict_rates(case, blocks=blocks, repetitions=repetitions, rule=rule) for rule in (NOW, OLD))
            kinds = ("better", "same", "worse", "stalls", "withheld")
            words = (f"{rates[kind]}, was {100 * old[kind].value:.1f}" for kind in kinds)
            rows.append((name, f"{case.effect_pct:+.1f} %", blocks, *words))
    heads = ("variant", "true effect", "blocks", "better", "same", "worse", "stalls differ", "withheld")
    return _table("Stalls and crashes of one variant", heads, rows)


def targets_table(repetitions: int) -> str:
    """Return the table of runs that never reach their target, beside two other rules."""
    cases = {
        "one in ten of the variant's never arrives, the others need 10 % less": Arms(change=-0.1, never=(0.1, 0.0)),
        "one in ten of both arms' never arrives, nothing differs": Arms(never=(0.1, 0.1)),
        "one in ten of the baseline's never arrives, the variant needs 10 % less": Arms(change=-0.1, never=(0.0, 0.1)),
        "none of the baseline's arrives": Arms(never=(0.0, 1.0)),
    }
    rows = []
    for name, arms in cases.items():
        for seeds in (6, 8, 12, 24):
            rates = [word_rates(arms, seeds=seeds, repetitions=repetitions, rule=rule) for rule in RULES]
            rows.append((name, seeds, *(one[VerdictWord.BETTER] for one in rates), rates[0][VerdictWord.WORSE]))
    heads = ("runs", "seeds", "better", "better, was", "better, such seeds left out", "worse")
    return _table("Tokens to a target loss", heads, rows)


def _traps_table(repetitions: int) -> str:
    rng = np.random.default_rng(0)
    again = asked_again(noisy("normal"), blocks=6, repetitions=repetitions)
    wide = outcomes(noisy("normal"), blocks=8, variants=12, repetitions=repetitions)
    looks = with_looks(noisy("normal"), variants=1, repetitions=repetitions, effect_pct=0.0, margin_pct=NO_MARGIN_PCT)
    drift, slot = (outcomes(noisy(name), blocks=10, variants=1, repetitions=repetitions) for name in
                   ("drift of 1 %", "first slot 0.5 % slower"))  # fmt: skip
    normal = outcomes(noisy("normal"), blocks=6, variants=1, repetitions=repetitions)
    stalled = draws.stalling(rng, repetitions, 6, 2, stalls=2, faster=0.0)
    dropped = np.median(traps.outlier_steps_dropped(stalled))
    truth = Stalls(stalls=2, faster=0).effect_pct
    rows = [
        ("steps as samples", traps.steps_as_samples(rng, repetitions), normal.wrong_difference),
        ("one arm after the other, 1 % drift", traps.one_arm_after_the_other(rng, repetitions),
         drift.wrong_difference),
        ("fixed order, first slot 0.5 % slower", traps.fixed_alternation(rng, repetitions), slot.wrong_difference),
        ("stopping at the first p < 0.05, 4 to 20 blocks",
         traps.until_significant(noisy("normal"), blocks=20, repetitions=repetitions), looks.changed),
        ("12 null variants", traps.uncorrected(noisy("normal"), blocks=8, variants=12, repetitions=repetitions),
         wide.wrong_difference),
        (f"{ASKINGS} askings of one question", f"{100 * (1 - 0.975**ASKINGS):.0f} % (computed)", again),
        (f"outlier steps left out, true effect {truth:.1f} %", f"reads {percent(float(dropped)):+.2f} %",
         "see stalls above"),
    ]  # fmt: skip
    return _table("Traps: wrong better or worse", ("trap", "naive", "ours"), rows)


def _bootstrap_table(repetitions: int) -> str:
    rows = []
    for name, blocks, studentised in (
        ("normal", 6, False),
        ("normal", 20, True),
        ("5 % of trials ten sd slower", 20, True),
    ):
        naive = traps.bootstrap_misses(noisy(name), blocks=blocks, repetitions=repetitions, studentised=studentised)
        ours = outcomes(noisy(name), blocks=blocks, variants=1, repetitions=repetitions).holds
        kind = "studentised" if studentised else "percentile"
        rows.append((kind, name, blocks, naive, Rate(hits=ours.tries - ours.hits, tries=ours.tries)))
    return _table("Intervals that miss", ("bootstrap", "noise", "blocks", "bootstrap, 95 %", "ours, 96 %"), rows)


def _losses_table(repetitions: int) -> str:
    rows = []
    for noise in LOSS_NOISES:
        for seeds in (4, 6, 12, 20):
            rates = (
                losses_passed(noise, seeds=seeds, bound=bound, change=change, repetitions=repetitions)
                for bound, change in ((1, 1), (1, 0), (2, 0))
            )
            rows.append((noise, seeds, *rates))
    heads = ("differences of seeds", "seeds", "passes, truly worse by the bound", "passes without a change, bound 1 sd",
             "the same, bound 2 sd")  # fmt: skip
    return _table("Losses that must be no worse", heads, rows)


def _flops_table(repetitions: int) -> str:
    rows = [
        (seeds, *(wrong_of_unequal_flops(apart, seeds=seeds, repetitions=repetitions) for apart in (MOST_APART, 0.01)))
        for seeds in (6, 12, 24)
    ]
    return _table("Losses of equal models after `equal: flops`", ("seeds", "0.1 % more", "1 % more, was"), rows)


def _adoption_table(repetitions: int) -> str:
    rows = []
    for blocks in BLOCKS:
        for effect in (MARGIN_PCT, 1.0, 1.5, 2.0):
            some, none = (
                adoptions(blocks=blocks, effect_pct=effect, adopt_if_pct=adopt_if, repetitions=repetitions)
                for adopt_if in (1.0, MARGIN_PCT)
            )
            rates = (some.adopted, some.by_estimate, none.adopted, none.by_estimate)
            rows.append((blocks, f"{effect:g} %", *rates))
    heads = ("blocks", "true effect", "adopted from 1 %", "by the estimate alone", "adopted from 0.5 %, the margin",
             "by the estimate alone")  # fmt: skip
    return _table("Adoption, with a margin of 0.5 %", heads, rows)


def _events_table(repetitions: int) -> str:
    rows = []
    for share in (0.5, 0.2, 0.1):
        for variants in VARIANTS:
            enough = blocks_for_events(share, alpha_of(1) / variants)
            drawing = with_slow_mode(share)
            few, many = (
                outcomes(drawing, blocks=blocks, variants=variants, repetitions=repetitions // 4)
                for blocks in (max(6, enough // 3), enough)
            )
            rows.append((f"{share:.0%}", variants, enough, many.wrong_difference, many.detected, few.wrong_difference))
    heads = ("slow trials of the variants", "variants", "blocks required", "wrong better or worse", "detects 1 %",
             "wrong with a third of the blocks")  # fmt: skip
    return _table("Rare events of one arm", heads, rows)


def _notes_table(repetitions: int) -> str:
    names = ("normal", "1 % slower after a trial of the first variant",
             "two nodes, +0.5 % on one and -0.5 % on the other")  # fmt: skip
    rows = [(name, blocks, *noted(name, blocks=blocks, repetitions=repetitions)) for name in names for blocks in BLOCKS]
    heads = ("noise", "blocks", "a trial acts on the next one", "nodes differ")
    return _table("Notes beside a verdict", heads, rows)


def _nodes_table(repetitions: int) -> str:
    rows = []
    for nodes, blocks in ((2, 6), (2, 12), (2, 20), (4, 12), (4, 20), (8, 24)):
        for apart in (0.0, 0.25, 0.5, 1.0):
            rates = over_nodes(nodes, apart_pct=apart, blocks=blocks, repetitions=repetitions)
            rows.append((nodes, blocks, f"{apart:g} %", *(getattr(rates, each.name) for each in fields(rates))))
    heads = ("nodes", "blocks", "sd of the effect over nodes", "wrong of all nodes", "wrong of these nodes",
             "better at 2 %", "wrong of all, nodes as the sample", "better at 2 %, nodes as the sample")  # fmt: skip
    return _table("Several nodes", heads, rows)


def _seeds_table(repetitions: int) -> str:
    shares, numbers = (0.0, 0.25, 0.5, 0.75, 1.0), (6, 12, 24)
    rows = [
        (f"{share:.0%}", *(wrong_of_alike_seeds(share, seeds=seeds, repetitions=repetitions) for seeds in numbers))
        for share in shares
    ]
    heads = ("variance that two seeds each share", *(f"wrong with {seeds} seeds" for seeds in numbers))
    return _table("Losses over seeds that are alike in pairs", heads, rows)


def dependence_table(repetitions: int) -> str:
    """Return the table of dependent blocks, with the A/A blocks of a control or twenty."""
    rows = []
    for source, (drawing, shares) in SOURCES.items():
        for share in shares:
            for blocks in BLOCKS_OF_DEPENDENCE:
                for control in (True, False) if blocks >= BLOCKS[0] else (False,):
                    one = dependent(drawing, share, blocks=blocks, repetitions=repetitions, control=control)
                    wide = (*np.quantile(one.factors, [0.5, 0.9]), one.factors.mean())
                    rows.append((source, f"{share:g}", blocks, blocks if control else ADMITTING_BLOCKS, one.plain,
                                 one.widened, one.power, *(f"{factor:.2f}" for factor in wide),
                                 rate(one.factors >= 2)))  # fmt: skip
    heads = ("correlated quantity", "strength", "blocks", "A/A blocks", "wrong, t test", "wrong, widened",
             f"finds {FOUND_SD:g} sd", "widened, median", "90 % below", "mean", "2 or more")  # fmt: skip
    return _table("Dependence between blocks: wrong better or worse", heads, rows)


def _null_cases() -> Iterator[tuple[str, Drawing, int]]:
    """Yield noises of sessions of null proposals; those of one arm only also at more blocks."""
    yield from (("normal", noisy("normal"), blocks) for blocks in BLOCKS)
    yield from ((name, noisy(name), 10) for name in NOISES if name != "normal")
    yield from ((_SKEWED, noisy(_SKEWED), blocks) for blocks in (20, 40))
    yield from ((_HIDDEN_NAME, _hidden_stalls(), blocks) for blocks in (10, 20, 40))


def session_tables(number: int) -> Iterator[str]:
    """Yield the tables of `number` sessions per cell."""
    normal, rows = noisy("normal"), []
    for name, drawing, blocks in _null_cases():
        kept = sessions(drawing, nulls(number), blocks=blocks)
        greedy = f"{kept.by_greed.sum(axis=1).mean():.0f}"
        rows.append((name, blocks, kept.any_false, kept.any_false_by_greed, greedy))
    heads = ("noise", "blocks", "keeps anything", "greed keeps anything", "greed keeps, of 200")
    yield _table(f"Sessions of {PROPOSALS} proposals that change nothing", heads, rows)
    yield _margins_table(number)
    rows = []
    for at, level in levels_without_keep((1, 10, 100)):
        for blocks in BLOCKS:
            runs = [
                sessions(normal, planted(number, at=at, effect_pct=pct), blocks=blocks, margin_pct=margin)
                for pct, margin in ((1.0, NO_MARGIN_PCT), (1.0, MARGIN_PCT), (2.0, MARGIN_PCT))
            ]
            detectable = f"{detectable_per_sd(blocks, level=level):.2f} sd"
            kept = (rate(one.by_budget[:, -1]) for one in runs)
            large = (_too_large(one, pct) for one, pct in zip(runs, (1.0, 1.0, 2.0), strict=True))
            rows.append((at, f"{100 * level:.2g} %", blocks, detectable, *chain(*zip(kept, large, strict=True))))
    shown = "shown, shrunk"
    heads = ("proposal", "two-sided level", "blocks", "detectable", "keeps 1 % (2 sd)", shown, "the same, margin 0.5 %",
             shown, "keeps 2 %, margin 0.5 %", shown)  # fmt: skip
    yield _table("One improvement after proposals that change nothing", heads, rows)
    rows = []
    for pct in (1.0, 2.0):
        for blocks in BLOCKS:
            kept = sessions(normal, mixed(number, share=0.1, effect_pct=pct), blocks=blocks)
            shares = [f"{100 * kept.false_share(greed=greed):.1f} %" for greed in (False, True)]
            rows.append((f"{pct:g} %", blocks, kept.of_improvements, *shares))
    heads = ("improvement", "blocks", "improvements kept", "wrong among the kept", "the same by greed")
    yield _table(f"Sessions of {PROPOSALS} proposals, one in ten an improvement", heads, rows)


_MARGINS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""In standard deviations of the difference of two trials."""
_UNSEEN = ("each arm autocorrelated 0.6, the A/A blocks not", "a slow mode in 10 % of the variants' trials")


def _margins_table(number: int) -> str:
    """Return how a margin protects sessions from noise that A/A blocks do not show, and what it costs."""
    rows = []
    for share in _MARGINS:
        margin = max(NO_MARGIN_PCT, percent(share * SD))
        for blocks in (10, 20):
            wrong = (sessions(noisy(name), nulls(number), blocks=blocks, margin_pct=margin).any_false
                     for name in _UNSEEN)  # fmt: skip
            gains = planted(number, at=10, effect_pct=percent(2 * SD))
            right = rate(sessions(noisy("normal"), gains, blocks=blocks, margin_pct=margin).by_budget[:, -1])
            rows.append((f"{share:g} sd", blocks, *wrong, right))
    heads = ("margin", "blocks", *(f"keeps anything: {name}" for name in _UNSEEN), "keeps 2 sd at proposal 10")
    return _table(f"Margins of sessions of {PROPOSALS} proposals that change nothing", heads, rows)


_FEWEST_KEPT = 20
"""Kept gains whose mean says something."""


def _too_large(kept: Kept, effect_pct: float) -> str:
    """Return how many times the true gain a kept one shows, and shows shrunk; nothing where few are kept."""
    if kept.by_budget.sum() < _FEWEST_KEPT:
        return ""
    return ", ".join(f"x{times:.2f}" for times in kept.too_large(effect_pct))


def _table(title: str, heads: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    body = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
    return f"### {title}\n\n{body}\n"
