"""Picture of a crossover: throughput of each arm over the tokens of a row, from the bundles of ablations.

Usage: python -m tests.bench.crossover BUNDLE... --out FILE.png

A point is the geometric mean of an arm's trials, a bar their lowest and highest. Controls count as the baseline.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ablate.experiments.outcomes import VARIANT
from ablate.experiments.records.bundle_files import read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle

Speeds = dict[str, dict[int, list[float]]]
"""Arm -> tokens of a row -> tokens per second of each trial."""


def main() -> None:
    """Read the bundles and draw their arms."""
    parser = argparse.ArgumentParser(prog="crossover", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw(speeds(options.bundles), options.out)


def speeds(bundles: list[Path]) -> Speeds:
    """Return the throughput of every measured trial."""
    by_arm: Speeds = defaultdict(lambda: defaultdict(list))
    for path in bundles:
        bundle = open_bundle(read_bundle_files(path))
        row = int(bundle.plan_file.spec.workload.overrides["seq_len"])
        for block in bundle.blocks:
            for trial in block.trials:
                receipt = trial.receipt
                if receipt.summary is not None and receipt.summary.tokens_per_s is not None:
                    arm = receipt.arm if receipt.role == VARIANT else "dense"
                    by_arm[arm][row].append(receipt.summary.tokens_per_s)
    return by_arm


def draw(by_arm: Speeds, out: Path) -> None:
    """Draw a line for each arm into the PNG file `out`."""
    figure = Figure(figsize=(7.2, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lengths = sorted({length for trials in by_arm.values() for length in trials})
    for (arm, trials), colour, marker in zip(sorted(by_arm.items()), ("#5b6570", "#b4530a"), "os", strict=True):
        rows = sorted(trials)
        means = [statistics.geometric_mean(trials[row]) / 1000 for row in rows]
        spread = [
            [mean - min(trials[row]) / 1000 for row, mean in zip(rows, means, strict=True)],
            [max(trials[row]) / 1000 - mean for row, mean in zip(rows, means, strict=True)],
        ]
        axes.errorbar(rows, means, yerr=spread, marker=marker, color=colour, capsize=3, label=arm, linewidth=1.8)
        axes.annotate(arm, (rows[-1], means[-1]), xytext=(8, 0), textcoords="offset points", va="center", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length / 1024:g}K"))
    axes.set_xlim(lengths[0] * 0.93, lengths[-1] * 1.25)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a row, one document each")
    axes.set_ylabel("thousand tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7ea", linewidth=0.7)
    figure.savefig(out)


if __name__ == "__main__":
    main()
