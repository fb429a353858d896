"""The roofline of the profiled step: the speed of matrix products over the FLOPs that each byte of them allows."""

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ablate.experiments.analysis.programs import kernels_of
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.view import AblationView

WIDTH_IN, HEIGHT_IN = 8.2, 4.0
MOST_ARMS, MOST_KERNELS = 9, 12
"""The baseline and eight variants; kernels of each, the longest ones."""
LIMIT, TERA = drawing.SENTINELS["limit"], 1e12


class Product(NamedTuple):
    """The matrix products of one kernel in an arm."""

    us: float
    flops_per_byte: float
    flops_per_s: float


class Roof(NamedTuple):
    """What one device can do at most, as its maker says."""

    flops_per_s: float
    bytes_per_s: float


def roofline(view: AblationView) -> drawing.Picture | None:
    """Draw the matrix products of the profiled steps of all arms below the device's roof; None without products."""
    products = {arm.name: own for arm in view.plan.arms if (own := products_of(view, arm.name))}
    if not products:
        return None
    roof = _roof(view.plan.node_class)
    shown = {arm: own[:MOST_KERNELS] for arm, own in [*products.items()][:MOST_ARMS]}

    def paint(figure: Figure) -> None:
        _paint(figure, view, shown, roof)

    return drawing.draw("roofline", "Matrix products below the roof", _caption(products, shown, roof), paint)


def products_of(view: AblationView, arm: str) -> list[Product]:
    """Return the products of each kernel of an arm, the longest first."""
    facts = [use.facts for use in kernels_of(view.whole_blocks.of(arm)).values()]
    return sorted(
        (
            Product(one.product_us, one.product_flops / one.product_bytes, one.flops_per_s)
            for one in facts
            if one and one.product_us and one.product_flops and one.product_bytes and one.flops_per_s
        ),
        reverse=True,
    )


def _roof(node_class: str) -> Roof | None:
    device = NODE_CLASSES[node_class]
    peak, bandwidth = device.peak("bfloat16", 1), device.memory_bytes_per_s
    return None if peak is None or bandwidth is None else Roof(peak, bandwidth)


def _caption(products: Mapping[str, list[Product]], shown: Mapping[str, list[Product]], roof: Roof | None) -> str:
    left = sum(map(len, products.values())) - sum(map(len, shown.values()))
    limits = (
        "The device's peaks are unknown."
        if roof is None
        else f"The line is what the device can do at most, by its maker: {wording.number(roof.flops_per_s / TERA)} "
        f"TFLOP/s and {wording.number(roof.bytes_per_s / TERA)} TB/s. Caches can lift a point above its slope."
    )
    return (
        "Products of 16-bit matrices in the profiled step; a point is a kernel, the larger the longer it ran. Each "
        "matrix and result counts once: what the memory moved is unknown, and a kernel that reads one again belongs "
        f"further left. Other kernels have no known FLOPs, and no point. {limits}"
        + (f" {wording.counted(left, 'shorter kernel')} not drawn." if left else "")
    )


def _paint(figure: Figure, view: AblationView, shown: Mapping[str, list[Product]], roof: Roof | None) -> None:
    figure.set_size_inches(WIDTH_IN, HEIGHT_IN)
    axes = figure.add_subplot()
    styles = drawing.styles(view)
    longest = max(own[0].us for own in shown.values())
    for arm, own in shown.items():
        style = styles[arm]
        axes.scatter(
            [product.flops_per_byte for product in own],
            [product.flops_per_s / TERA for product in own],
            s=[max(10.0, 90 * product.us / longest) * style.grown**2 for product in own],
            marker=style.marker,
            color=style.colour,
            alpha=0.75,
            linewidths=0,
            label=style.shown,
        )
    places = [product.flops_per_byte for own in shown.values() for product in own]
    axes.set_xlim(min(places) / 2, max(places) * 2)
    if roof is not None:
        ridge = roof.flops_per_s / roof.bytes_per_s
        line = [min([*places, ridge]) / 2, ridge, max([*places, ridge]) * 2]
        axes.set_xlim(line[0], line[-1])
        axes.plot(
            line, [min(roof.flops_per_s, place * roof.bytes_per_s) / TERA for place in line], color=LIMIT, linewidth=1.4
        )
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _place: wording.number(value)))
        axis.set_minor_locator(NullLocator())
    speeds = [product.flops_per_s / TERA for own in shown.values() for product in own]
    axes.set_ylim(min(speeds) / 2, max([*speeds, *([] if roof is None else [roof.flops_per_s / TERA])]) * 1.5)
    axes.set_xlabel("FLOP per byte of matrices and results")
    axes.set_ylabel("TFLOP/s")
    axes.grid()
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, markerscale=1)
