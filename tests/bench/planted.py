"""Plant a slow-down, or nothing, into real trials on this machine, and see which verdict is published.

Usage: python -m tests.bench.planted FOLDER [--share 0.03] [--blocks N] [--nulls 20] [--busy]

First 20 A/A blocks calibrate this machine; then one ablation whose variant is slower by `--share` of every step (by
default with as many blocks as the measured noise asks for), then `--nulls` ablations whose variant is the baseline
again. Every trial is a process, as in `ablate offline exec`; every verdict comes from the judge by that calibration.
Each null is judged twice: as a first asking, and as the service counts them, as one more asking of one question.
Running it again goes on where it ended. `--busy` lets trials count beside other programs.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import patch

import typer
import yaml

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.admission import admission_of, keep_ledger, mending_command
from ablate.experiments.analysis.noise.calibrate import calibrations_of
from ablate.experiments.analysis.statistics import log_ratio
from ablate.experiments.analysis.verdicts import VariantVerdict
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE, REPEAT, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import PLANNED_POWER, alpha_of, blocks_to_detect
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.outcomes import AblationState
from ablate.experiments.records.bundle import Bundle, attempt_records
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.circumstances import Circumstances, EarlierAblation, Family
from ablate.experiments.records.plan_file import make_plan_file, plan_file_text, read_plan_file
from ablate.service.cli.offline import read_bundle
from ablate.workers.offline import cli
from tests.bench.planting import planting_server

LIKE = Path(__file__).with_suffix(".yaml")


def ran(folder: Path, *, blocks: int, share: float = 0.0, seed: int, busy: bool) -> Bundle:
    """Run an ablation of the baseline and its repeat, the repeat slower by `share`, unless it has run already."""
    plan_path = folder / "plan.json"
    if not plan_path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        plan_path.write_text(plan_text(blocks, seed, busy=busy))
    file = read_plan_file(plan_path.read_bytes())
    slower = frozenset(
        trial_id
        for block, ids in zip(file.plan.blocks, file.blocks, strict=True)
        for arm, trial_id in zip(block.order, ids.trial_ids, strict=True)
        if arm == REPEAT
    )
    with patch.object(cli, "ForkServer", planting_server(slower if share else frozenset(), share)):
        try:
            cli.run(
                plan_path,
                out=folder / "bundle",
                data_dir=folder.parent / "data",
                blocks="",
                node_name="",
                key=None,
                rehearse=False,
                tar=False,
                as_json=False,
            )
        except typer.Exit as ended:
            sys.stderr.write(f"{folder.name}: exit code {ended.exit_code}\n")
    return read_bundle(folder / "bundle")[1]


def plan_text(blocks: int, seed: int, *, busy: bool) -> str:
    """Return the plan file of `blocks` blocks of the baseline and its repeat."""
    text = calibration_spec(
        parse_spec(LIKE.read_bytes(), CONTENT_TYPE), node_class="cpu", blocks=blocks, order_seed=seed
    )
    if busy:
        values = yaml.safe_load(text)
        values["placement"]["max_foreign_load"] = "99%"
        text = yaml.safe_dump(values, sort_keys=False).encode()
    plan = make_plan(parse_spec(text, CONTENT_TYPE))
    return plan_file_text(make_plan_file(plan, spec_text=text.decode(), content_type=CONTENT_TYPE))


def judged(bundle: Bundle, known: Sequence[Calibration], *, asked_before: int = 0) -> VariantVerdict:
    """Return the verdict of the repeat by `known` alone: what the bundle's own blocks say of the noise is not asked.

    `asked_before` ablations had asked the same question, as the service counts them.
    """
    file = bundle.plan_file
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    admission = admission_of(
        file.spec, receipts, known, ledger=keep_ledger(known), mended_by=mending_command("cpu", LIKE.name)
    )
    circumstances = Circumstances(
        attempts=attempt_records(bundle), family=family(asked_before), admission=admission, signers=bundle.signers
    )
    (verdict,) = judge(file.plan, file.spec, receipts, circumstances).variants
    return verdict


def family(asked_before: int) -> Family:
    """Return a family of the question whether the repeat differs, asked so many times before."""
    one = {"state": AblationState.COMPLETED, "created_at": "2026-01-01T00:00:00Z", "asked": (REPEAT,), "words": {}}
    names = [f"null-{number + 1:02}" for number in range(asked_before)]
    return Family(earlier=tuple(EarlierAblation(ablation=name, name=name, **one) for name in names))


def blocks_for(share: float, noise: Calibration) -> int:
    """Return how many blocks a planned ablation takes to find `share` at this noise."""
    needed = blocks_to_detect(
        log_ratio(100 * share), noise.sd_upper_pct / 100, minimum=MIN_BLOCKS, level=alpha_of(1), power=PLANNED_POWER
    )
    if needed is None:
        raise SystemExit(f"sd {noise.sd_pct:.1f} %: no allowed number of blocks finds {share:.1%}")
    return needed


def print_verdict(name: str, verdict: VariantVerdict) -> None:
    """Print one line of what came out."""
    line = {"ablation": name, "word": verdict.verdict, "cause": verdict.cause, "reason": verdict.reason}
    sys.stdout.write(json.dumps(line | {"effect": verdict.model_dump(mode="json").get("effect")}, default=str) + "\n")
    sys.stdout.flush()


def main(arguments: Iterable[str] | None = None) -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.03)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--nulls", type=int, default=20)
    parser.add_argument("--busy", action="store_true")
    given = parser.parse_args(None if arguments is None else list(arguments))
    aa = ran(given.folder / "aa", blocks=ADMITTING_BLOCKS, seed=1, busy=given.busy)
    known = calibrations_of(
        aa.plan_file.plan, aa.plan_file.spec, [trial.receipt for block in aa.blocks for trial in block.trials]
    )
    for one in known:
        sys.stdout.write(f"calibrated: {one.blocks} blocks, sd {one.sd_pct:.2f} % (at most {one.sd_upper_pct:.2f})\n")
    if given.share:
        blocks = given.blocks or blocks_for(given.share, known[-1])
        planted = ran(given.folder / "planted", blocks=blocks, share=given.share, seed=2, busy=given.busy)
        print_verdict(f"planted {given.share:.1%}, {blocks} blocks", judged(planted, known))
    for number in range(given.nulls):
        null = ran(given.folder / f"null-{number + 1:02}", blocks=MIN_BLOCKS, seed=10 + number, busy=given.busy)
        print_verdict(f"null {number + 1}", judged(null, known))
        print_verdict(f"null {number + 1}, as asking {number + 1}", judged(null, known, asked_before=number))


if __name__ == "__main__":
    main()
