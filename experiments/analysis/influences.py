"""Influences on the differences besides the arms' change: trials that act on the next one, nodes, and steadier arms.

They are notes beside a verdict. A verdict that does not hold without what trials do to the next one is withheld.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from ablate.experiments.analysis.comparing import Sample
from ablate.experiments.analysis.evidence import Evidence, WholeBlocks
from ablate.experiments.analysis.sample_checks import spread_ratio
from ablate.experiments.analysis.statistics import Array, Fit, fit, log_ratio, percent
from ablate.experiments.analysis.verdicts import Nodes
from ablate.experiments.outcomes import GOOD, VerdictWord

LEVEL = 0.05
"""Level of each test."""
_FEWEST_ON_A_NODE = 2


@dataclass(frozen=True, kw_only=True)
class WordTests:
    """The tests of one variant."""

    level: float
    """Two-sided, of one variant after Bonferroni's correction."""
    margin_pct: float


@dataclass(frozen=True, kw_only=True)
class CarryOver:
    """Effect of a trial of the variant on the trial after it."""

    fit: Fit
    """Effect of the variant, with the trial before in the model."""
    carried: float
    """Change of the metric in a trial that follows one of the variant; in natural log units."""
    p: float
    """Two-sided p value that nothing is carried over."""

    def in_words(self) -> str:
        """Return the numbers as a note."""
        change = f"a trial right after one of this arm differs by {percent(self.carried):+.2f} % (p {self.p:.2g})"
        return f"{change}; without that, the effect is {percent(float(self.fit.mean)):+.2f} %"


def influences(evidence: Evidence, whole: WholeBlocks, sample: Sample) -> Iterator[str]:
    """Yield what besides the variant's change moves or describes the differences of `sample`, one note for each."""
    ratio = spread_ratio(sample)
    if ratio is not None:
        share, low, high = ratio
        factor = f"steadier by a factor of {1 / share:.2g}" if share < 1 else f"less steady by a factor of {share:.2g}"
        deviation = f"{share:.2g} of the baseline's standard deviation [{low:.2g}, {high:.2g}]"
        yield f"the variant's runs are {factor}: {deviation}"
    carried = proved_carry_over(evidence, whole, sample)
    if carried is not None:
        yield carried.in_words()
    if _of_blocks(evidence, sample) and (effects := node_effects(_nodes(evidence), sample)) is not None:
        yield effects.in_words()


def proved_carry_over(evidence: Evidence, whole: WholeBlocks, sample: Sample) -> CarryOver | None:
    """Return what a trial of the variant does to the next one, if that is proved; else None, as for seeds."""
    if not _of_blocks(evidence, sample):
        return None
    after = follows(evidence, whole)
    tested = carry_over(sample, after) if any(after) else None
    return tested if tested is not None and tested.p <= LEVEL else None


def _of_blocks(evidence: Evidence, sample: Sample) -> bool:
    """Return whether the sample has the difference of times of every block."""
    return sample.baseline is None and not sample.independent and len(sample.differences) == len(evidence.pairs)


def explained_by_carry_over(
    evidence: Evidence, whole: WholeBlocks, sample: Sample, word: VerdictWord, rule: WordTests
) -> str | None:
    """Return what trials do to the next one, if that is proved and `word` does not hold without it; else None."""
    tested = proved_carry_over(evidence, whole, sample)
    return None if tested is None or holds(word, tested.fit, rule) else tested.in_words()


def said_by_median(word: VerdictWord, sample: Sample, rule: WordTests, widening: float) -> bool:
    """Return whether the median steps of the windows, which stalls do not move, give the same word as the totals."""
    if sample.window is None:
        return True
    fitted = fit(sample.window.by_median, sample.places).widened(widening)
    if word is VerdictWord.INCONCLUSIVE:
        return not any(holds(one, fitted, rule) for one in GOOD)
    other_way = float(fitted.mean) * float(sample.fit().mean) < 0 and word is not VerdictWord.SAME
    return holds(word, fitted, rule) and not other_way


def holds(word: VerdictWord, fitted: Fit, rule: WordTests) -> bool:
    """Return whether a fit proves a change beyond the margin, or sameness, in accordance with `word`."""
    low, high = log_ratio(-rule.margin_pct), log_ratio(rule.margin_pct)
    if word is VerdictWord.SAME:
        return bool(fitted.p_same(low, high) <= rule.level)
    ends = fitted.interval(rule.level)
    return bool(ends[0] > high or ends[1] < low)


def carry_over(sample: Sample, after: Sequence[int]) -> CarryOver | None:
    """Fit d = mean + slope x place + carried x `after`; None if the blocks cannot tell the three apart.

    `after`: 1 where the variant's trial follows one of the variant, -1 where the baseline's does, 0 otherwise.
    """
    d = np.asarray(sample.differences)
    columns = np.stack([np.ones(d.size), np.asarray(sample.places), np.asarray(after, dtype=np.float64)], axis=1)
    solved = _least_squares(columns, d)
    if solved is None:
        return None
    values, errors, sd, freedom = solved
    t = abs(float(values[2])) / float(errors[2]) if errors[2] > 0 else np.inf
    p = float(2 * scipy.special.stdtr(freedom, -t)) if values[2] else 1.0
    fitted = Fit(
        blocks=d.size,
        mean=values[0],
        se=errors[0],
        sd=np.asarray(sd),
        slope=values[1],
        freedom=np.asarray(float(freedom)),
    )
    return CarryOver(fit=fitted, carried=float(values[2]), p=p)


def _least_squares(columns: Array, d: Array) -> tuple[Array, Array, float, int] | None:
    """Return coefficients, their errors, the residual standard deviation and the degrees of freedom.

    None with fewer than two of these, or without full rank.
    """
    freedom = d.size - columns.shape[1]
    if freedom < 2 or np.linalg.matrix_rank(columns) < columns.shape[1]:
        return None
    values, squares = _fitted(columns, d)
    sd = float(np.sqrt(squares / freedom))
    return values, sd * np.sqrt(np.diag(np.linalg.inv(columns.T @ columns))), sd, freedom


def follows(evidence: Evidence, whole: WholeBlocks) -> list[int]:
    """Return for each pair which of its trials ran right after a trial of the variant: 1, -1, or 0 (`carry_over`)."""
    before, name = whole.before, evidence.arm.name
    return [
        (before.get(pair.variant.digest) == name) - (before.get(pair.baseline.digest) == name)
        for pair in evidence.pairs
    ]


@dataclass(frozen=True, kw_only=True)
class NodeEffects:
    """The effect on each node, and whether nodes differ."""

    by_node: dict[str, float]
    """Mean of d at equal places, in natural log units, by the name of the node."""
    blocks: dict[str, int]
    p: float
    """p value that all nodes have one effect."""

    @property
    def differ(self) -> bool:
        """Whether it is proved that nodes have different effects."""
        return self.p <= LEVEL

    def in_words(self) -> str:
        """Return the numbers as a note."""
        each = ", ".join(f"{name} {percent(d):+.2f} % ({self.blocks[name]} blocks)" for name, d in self.by_node.items())
        word = "they differ" if self.differ else "no difference between them is proved"
        return f"effect by node: {each}; {word} (F test, p {self.p:.2g})"


def scope_of(evidence: Evidence, sample: Sample) -> Nodes | None:
    """Return the nodes whose times a verdict compares; None for one node."""
    nodes = _nodes(evidence)
    if len(set(nodes)) < 2 or not _of_blocks(evidence, sample):
        return None
    effects = node_effects(nodes, sample)
    return Nodes(names=tuple(sorted(set(nodes))), differ=effects is not None and effects.differ)


def _nodes(evidence: Evidence) -> list[str]:
    return [pair.variant.environment.node_name for pair in evidence.pairs]


def node_effects(nodes: Sequence[str], sample: Sample) -> NodeEffects | None:
    """Return the effect by node; None with one node, or with too few blocks to compare them."""
    names = sorted(set(nodes))
    if len(names) < 2 or min(nodes.count(name) for name in names) < _FEWEST_ON_A_NODE:
        return None
    d, places = np.asarray(sample.differences), np.asarray(sample.places, dtype=np.float64)
    each = np.array([[node == name for name in names] for node in nodes], dtype=np.float64)
    with_places = np.column_stack([each, places])
    place = np.linalg.matrix_rank(with_places) > len(names)  # not if it is the same in all blocks of a node
    whole = with_places if place else each
    freedom = d.size - whole.shape[1]
    if freedom < 2:
        return None
    values, squares = _fitted(whole, d)
    _, more = _fitted(np.column_stack([np.ones(d.size), whole[:, len(names) :]]), d)
    between = max(0.0, more - squares) / (len(names) - 1)
    ratio = between / (squares / freedom) if squares > 0 else np.inf
    rounding = 1e-20 * float(d @ d)
    p = float(scipy.special.fdtrc(len(names) - 1, freedom, ratio)) if between > rounding else 1.0
    by_node = {name: float(value) for name, value in zip(names, values, strict=False)}
    return NodeEffects(by_node=by_node, blocks={name: nodes.count(name) for name in names}, p=p)


def _fitted(columns: Array, d: Array) -> tuple[Array, float]:
    """Return (coefficients, sum of squared residuals)."""
    values = np.asarray(np.linalg.lstsq(columns, d, rcond=None)[0], dtype=np.float64)
    return values, float(np.sum((d - columns @ values) ** 2))
