"""The roofline picture: where its points lie, what its caption says, and when there is none."""

import dataclasses
import math
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.figure import Figure

from ablate.experiments.node_classes import NAMED_GPUS, NODE_CLASSES
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.pictures.roofline import products_of, roofline
from ablate.experiments.reporting.view import AblationView
from ablate.model.measurements import KernelFacts
from tests import views


def with_products(products: list[tuple[float, float, float]], node_class: str = "h200") -> AblationView:
    """Return an ablation whose trials all have these products: FLOPs, FLOP per byte and microseconds of each kernel."""
    facts = {
        f"gemm-{place}": KernelFacts(
            product_flops=round(flops), product_bytes=round(flops / intensity), product_us=round(us, 3)
        )
        for place, (flops, intensity, us) in enumerate(products)
    }
    rows = tuple((name, 1, one.product_us or 0.0) for name, one in facts.items())
    made = views.view(
        arms={name: views.EFFECTS[name] for name in ("baseline", "psiv-on")}, node_class=node_class, num_blocks=6
    )
    receipts = (one.receipt for one in made.trials if one.receipt is not None)
    changed = (
        one.model_copy(update={"step_kernels": (*rows, ("add", 9, 1.0)), "kernel_facts": facts}) for one in receipts
    )
    return dataclasses.replace(made, trials=tuple(map(views.trial_of, changed)))


def drawn_products(chance: random.Random, count: int) -> list[tuple[float, float, float]]:
    """Return products that an H200 can do, by a straight calculation of its roof."""
    products = []
    for _ in range(count):
        intensity, share = 2 ** chance.uniform(0, 13), chance.uniform(0.01, 1)
        flops = 2 ** chance.uniform(36, 42)
        products.append((flops, intensity, max(flops / 989.5e12, flops / intensity / 4.8e12) / share * 1e6))
    return products


@pytest.mark.parametrize("seed", range(5))
def test_the_points_are_the_longest_products_of_each_arm_below_the_roof(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []

    def draw(name: str, title: str, caption: str, paint: Callable[[Figure], None]) -> drawing.Picture:
        figures.append(Figure())
        paint(figures[0])
        return whole(name, title, caption, paint)

    whole = drawing.draw
    monkeypatch.setattr(drawing, "draw", draw)
    chance = random.Random(seed)  # noqa: S311
    products = drawn_products(chance, chance.randint(1, 40))
    view = with_products(products)
    own = products_of(view, "psiv-on")
    longest = sorted(products, key=lambda one: -one[2])
    assert len(own) == len(products)
    for product, (flops, intensity, us) in zip(own, longest, strict=True):
        assert tuple(product) == pytest.approx((us, intensity, flops / us * 1e6), rel=1e-3)
        assert product.flops_per_s <= min(989.5e12, product.flops_per_byte * 4.8e12) * 1.001
    picture = roofline(view)
    assert picture is not None
    assert "989.5 TFLOP/s and 4.8 TB/s" in picture.caption
    left = 2 * max(0, len(products) - 12)
    assert (f"{left} shorter kernels not drawn" in picture.caption) == (left > 0)
    (axes,) = figures[0].axes
    for points in axes.collections:
        shown = [(one.flops_per_byte, one.flops_per_s / 1e12) for one in own[:12]]
        assert np.asarray(points.get_offsets()) == pytest.approx(np.array(shown))
        sizes = np.asarray(points.get_sizes()).tolist()
        assert sizes == sorted(sizes, reverse=True), "the longer, the larger"
    assert len(axes.collections) == 2
    (roof,) = axes.lines
    for place, speed in zip(*(np.asarray(values).tolist() for values in roof.get_data()), strict=True):
        assert speed == pytest.approx(min(989.5, place * 4.8))
    assert not re.search(r"\bnan\b|\binf\b|mathdefault", picture.svg)


def test_without_peaks_of_the_device_the_points_have_no_roof() -> None:
    picture = roofline(with_products([(1e12, 100.0, 1e3)], node_class="cpu"))
    assert picture is not None
    assert "The device's peaks are unknown." in picture.caption
    assert "var(--limit)" not in picture.svg


def test_without_products_there_is_no_picture() -> None:
    assert roofline(with_products([])) is None
    assert roofline(views.view()) is None


def test_every_gpu_with_a_peak_has_a_bandwidth_and_a_usual_ridge() -> None:
    for name in (*NAMED_GPUS, "h200", "h100"):
        peak, bandwidth = NODE_CLASSES[name].peak("bfloat16", 1), NODE_CLASSES[name].memory_bytes_per_s
        assert peak is not None
        assert bandwidth is not None
        assert 50 < peak / bandwidth < 500, f"{name}: FLOP per byte where both roofs meet"
        assert math.isfinite(bandwidth)
    assert NODE_CLASSES["rtx-3080"].memory_bytes_per_s is None
