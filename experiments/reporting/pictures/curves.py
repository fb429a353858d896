"""The validation curves of all arms over tokens and over time, and their distance from the baseline."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ablate.experiments.analysis.arm_summary import measured_trials
from ablate.experiments.analysis.curves import BandPoint, band_of
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.pictures.drawing import ArmStyle
from ablate.experiments.reporting.view import AblationView

WIDTH_IN, HEIGHT_IN = 8.2, 5.6
MOST_ARMS = 9
"""The baseline and eight variants."""
MOST_POINTS = 400
OPACITY = 0.14
"""Of a band, so that several can be told apart where they overlap."""
SOFT = drawing.SENTINELS["soft"]
_TOKENS = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1.0, "tokens"))
_TIMES = ((3600.0, "training time, hours"), (60.0, "training time, minutes"), (1.0, "training time, seconds"))


def validation_curves(view: AblationView) -> drawing.Picture | None:
    """Draw the validation curves; None without a curve of the baseline."""
    trials = {arm.name: measured_trials(view.whole_blocks.of(arm.name)) for arm in view.plan.arms}
    bands = {arm: drawing.thin(band, MOST_POINTS) for arm, own in trials.items() if (band := band_of(own))}
    baseline = view.plan.baseline.name
    if baseline not in bands:
        return None
    shown = [*bands][:MOST_ARMS]
    caption = (
        "Top: validation loss of each arm over tokens and over training time, as a mean over its seeds; the band holds "
        "the middle half of the seeds. Bottom: distance from the baseline at equal tokens, seed by seed, which leaves "
        "the luck of a seed out; mean and middle half. Straight lines between validations."
        + (f" Not drawn: {wording.counted(len(bands) - len(shown), 'more arm')}." if len(bands) > len(shown) else "")
    )

    def paint(figure: Figure) -> None:
        figure.set_size_inches(WIDTH_IN, HEIGHT_IN)
        grid = figure.add_gridspec(2, 2)
        over_tokens, over_time = (figure.add_subplot(grid[0, column]) for column in (0, 1))
        distance = figure.add_subplot(grid[1, :])
        styles = drawing.styles(view)
        for axes, read, units in (
            (over_tokens, lambda point: float(point.tokens), _TOKENS),
            (over_time, lambda point: point.seconds, _TIMES),
        ):
            unit = _unit(axes, max(read(bands[arm][-1]) for arm in shown), units)
            for arm in shown:
                _draw(axes, bands[arm], read, styles[arm], unit)
            axes.set_ylabel(view.with_loss_unit("validation loss"))
        unit = _unit(distance, max(float(bands[arm][-1].tokens) for arm in shown), _TOKENS)
        for arm in shown:
            if arm != baseline:
                own = drawing.thin(distances(trials[arm], trials[baseline]), MOST_POINTS)
                _draw(distance, own, lambda point: float(point.tokens), styles[arm], unit)
        distance.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
        distance.set_ylabel(view.with_loss_unit("distance from the baseline"))
        handles, labels = over_tokens.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, handlelength=2.6)

    return drawing.draw("curves", "Validation curves", caption, paint)


def distances(own: Sequence[Receipt], base: Sequence[Receipt]) -> tuple[BandPoint, ...]:
    """Return the paired distances from the baseline's curves at the tokens of the variant's validations, over seeds.

    Validations outside of the baseline's curve are left out.
    """
    mine, theirs = _by_seed(own), _by_seed(base)
    pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    if not pairs:
        return ()
    places = [point.tokens for point in pairs[0][0]]
    low, high = max(base[0].tokens for _, base in pairs), min(base[-1].tokens for _, base in pairs)
    points = []
    for index, tokens in enumerate(places):
        if low <= tokens <= high:
            values = [one[index].mean - _mean_at(other, tokens) for one, other in pairs]
            bottom, top = np.quantile(values, [0.25, 0.75])
            mean = float(np.mean(values))
            points.append(BandPoint(tokens=tokens, seconds=0.0, mean=mean, low=float(bottom), high=float(top)))
    return tuple(points)


def _by_seed(receipts: Sequence[Receipt]) -> Mapping[int, tuple[BandPoint, ...]]:
    seeds = dict.fromkeys(receipt.seed for receipt in receipts)
    bands = {seed: band_of([receipt for receipt in receipts if receipt.seed == seed]) for seed in seeds}
    return {seed: band for seed, band in bands.items() if band}


def _mean_at(band: Sequence[BandPoint], tokens: int) -> float:
    return float(np.interp(tokens, [point.tokens for point in band], [point.mean for point in band]))


def _unit(axes: Axes, most: float, units: Sequence[tuple[float, str]]) -> float:
    """Label the axis in the largest unit of which it has at least two; return the unit."""
    size, label = next((unit for unit in units if most >= 2 * unit[0]), units[-1])
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    return size


def _draw(
    axes: Axes, band: Sequence[BandPoint], read: Callable[[BandPoint], float], style: ArmStyle, unit: float
) -> None:
    places = [read(point) / unit for point in band]
    low, high = [point.low for point in band], [point.high for point in band]
    axes.fill_between(places, low, high, color=style.colour, alpha=OPACITY, linewidth=0, zorder=1)
    axes.plot(
        places,
        [point.mean for point in band],
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markevery=max(1, len(band) // 8),
        markersize=4 * style.grown,
        linewidth=1.3,
        label=style.shown,
    )
