"""Ablate trainers of other people on this machine: nothing, a slow-down, other numerics, and lies.

Usage: python -m tests.trainers FOLDER [--only NAME] [--nulls 20] [--share 0.03] [--blocks N] [--busy]

Each trainer gets its own environment from PyPI and runs as a command, through `ablate plan` and `ablate offline exec`.
First 20 A/A blocks calibrate it. Then come `--nulls` variants that change nothing, five in an ablation; one ablation
with a planted slow-down of `--share`, planted numerics and half of the tokens; one of the program without marks, whose
variant trains twice as long; and one block for each other lie. The words are the judge's, by that calibration. Running
it again goes on where it ended. `--busy` lets trials count beside other programs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.admission import admission_of, keep_ledger, mending_command
from ablate.experiments.analysis.noise.calibrate import calibrations_of
from ablate.experiments.analysis.verdicts import VariantVerdict
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.records.bundle import Bundle, attempt_records
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.records.plan_file import make_plan_file, plan_file_text
from ablate.service.cli.offline import read_bundle
from tests.bench.planted import family
from tests.trainers.programs import TRAINERS, OtherTrainer

_TOGETHER = 5
"""Variants without a change in one ablation."""
_LIES = ("own-clock", "one-seed", "daemon", "gigabyte", "forever")


class _Campaign:
    """All ablations of one trainer, in a folder of its own."""

    def __init__(self, trainer: OtherTrainer, folder: Path, prefix: Path, *, busy: bool) -> None:
        self._trainer, self._folder, self._busy = trainer, folder, busy
        self._prefix = prefix
        self.changed_lines = trainer.write(folder / "code", trainer.install(prefix))

    def spec(self, name: str, variants: Mapping[str, Any], *, blocks: int, **changes: Any) -> dict[str, Any]:
        """Return a spec of the trainer."""
        warmup, timed = self._trainer.steps
        values: dict[str, Any] = {
            "ablation": name,
            "question": f"What does {name} change in {self._trainer.name}?",
            "workload": {
                "command": ["python", "plant.py", "train.py", "--seed", "{seed}", "--steps", "{steps}"],
                "code": str(self._folder / "code"),
                "environment": self._trainer.name,
                "env": dict(self._trainer.env),
                "steps": {"warmup": warmup, "timed": timed},
            },
            "variants": dict(variants),
            "design": {"seeds": [1, 2], "blocks": {"count": blocks}},
            "placement": {"node_class": "cpu"},
            "limits": {"trial": "2m", "device_minutes": 600},
            "verdict": {"primary": {"metric": "tokens_per_s", "margin": "1%", "adopt_if": "2%"}},
            **changes,
        }
        if self._busy:
            values["placement"]["max_foreign_load"] = "99%"
        return values

    def unchanged(self) -> dict[str, Any]:
        """Return a spec of the program without marks: the time of the whole process, and a metric that it prints."""
        warmup, timed = self._trainer.steps
        steps = 1 + warmup + timed
        variants = {"same": {"env": {"UNUSED": "1"}}, "longer": {"args": ["--steps", str(2 * steps)]}}
        verdict = {"primary": {"metric": "process_s", "margin": "5%", "adopt_if": "10%"}}
        spec = self.spec("unchanged", variants, blocks=MIN_BLOCKS, verdict=verdict)
        spec["workload"]["command"] = ["python", "plain.py", "--seed", "{seed}", "--steps", str(steps)]
        spec["workload"]["metrics"] = {"printed_loss": {"better": "lower", "line": self._trainer.line}}
        return spec

    def ran(self, name: str, text: bytes, *, only: str = "") -> Bundle | str:
        """Run a spec through plan and exec, or go on with it; return its bundle, or why there is none."""
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / "plan.json"
        if not plan.exists():
            made = make_plan(parse_spec(text, CONTENT_TYPE))
            plan.write_text(plan_file_text(make_plan_file(made, spec_text=text.decode(), content_type=CONTENT_TYPE)))
        command = [sys.executable, "-m", "ablate.workers.offline", str(plan), "--out", str(folder / "bundle")]
        command += ["--no-rehearse", *(["--blocks", only] if only else [])]
        environment = {**os.environ, "ABLATE_ENVIRONMENTS": f"{self._trainer.name}={self._prefix}"}
        environment["ABLATE_HOME"] = str(self._folder / "home")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        (folder / "exec.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        try:
            return read_bundle(folder / "bundle")[1]
        except Exception as error:  # a bundle without blocks is the answer to some lies
            return f"{error}; {(done.stdout + done.stderr).strip().splitlines()[-1:]}"

    def calibrations(self) -> list[Calibration]:
        """Run the A/A blocks; return the noise that they show."""
        like = parse_spec(json.dumps(self.spec("aa", {"x": {"env": {"UNUSED": "1"}}}, blocks=6)).encode(), CONTENT_TYPE)
        text = calibration_spec(like, node_class="cpu", blocks=ADMITTING_BLOCKS, order_seed=1)
        bundle = self.ran("aa", text)
        assert isinstance(bundle, Bundle), bundle
        receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
        return list(calibrations_of(bundle.plan_file.plan, bundle.plan_file.spec, receipts))

    def verdicts(self, name: str, spec: Mapping[str, Any], known: list[Calibration]) -> list[VariantVerdict] | str:
        """Run a spec; return the verdicts of its variants by `known`."""
        bundle = self.ran(name, json.dumps(spec).encode())
        if isinstance(bundle, str):
            return bundle
        file = bundle.plan_file
        receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
        admission = admission_of(
            file.spec, receipts, known, ledger=keep_ledger(known), mended_by=mending_command("cpu", name)
        )
        circumstances = Circumstances(
            attempts=attempt_records(bundle), family=family(0), admission=admission, signers=bundle.signers
        )
        return list(judge(file.plan, file.spec, receipts, circumstances).variants)


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()


def _told(trainer: str, what: str, verdicts: list[VariantVerdict] | str) -> None:
    if isinstance(verdicts, str):
        _say(trainer=trainer, ablation=what, problem=verdicts)
        return
    for one in verdicts:
        _say(
            trainer=trainer,
            ablation=what,
            variant=one.arm,
            word=one.verdict,
            measured=one.measured,
            cause=one.cause,
            reason=one.reason,
            decision=one.decision,
            delta_pct=one.primary and one.primary.delta_pct,
            interval_pct=one.primary and [one.primary.ci_low_pct, one.primary.ci_high_pct],
            blocks_needed=one.blocks_needed,
            notes=list(one.notes),
        )


def _lie(campaign: _Campaign, trainer: str, lie: str) -> None:
    limits = {"trial": "1m" if lie == "forever" else "2m", "device_minutes": 600}
    bundle = campaign.ran(
        f"lie-{lie}",
        json.dumps(campaign.spec(lie, {"lie": {"env": {"PLANT": lie}}}, blocks=MIN_BLOCKS, limits=limits)).encode(),
        only="1-2" if lie == "one-seed" else "1",
    )
    if isinstance(bundle, str):
        _say(trainer=trainer, lie=lie, problem=bundle)
        return
    for block in bundle.blocks:
        for trial in block.trials:
            receipt = trial.receipt
            if receipt.arm == "lie":
                losses = [step.loss for step in receipt.steps][:2]
                _say(
                    trainer=trainer,
                    lie=lie,
                    outcome=receipt.outcome,
                    failure=receipt.failure_class,
                    message=receipt.message,
                    tokens=sum(step.tokens for step in receipt.steps),
                    losses=losses,
                    seed=receipt.seed,
                )
    if lie == "one-seed":
        receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
        file = bundle.plan_file
        circumstances = Circumstances(attempts=attempt_records(bundle), family=family(0), signers=bundle.signers)
        _told(trainer, f"lie {lie}", list(judge(file.plan, file.spec, receipts, circumstances).variants))


def main() -> None:
    """Run all that is requested."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trainers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(TRAINERS))
    parser.add_argument("--nulls", type=int, default=20)
    parser.add_argument("--share", default="0.03")
    parser.add_argument("--blocks", type=int, default=MIN_BLOCKS, help="blocks of the ablation with plants")
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    for name in [options.only] if options.only else list(TRAINERS):
        trainer = TRAINERS[name]
        campaign = _Campaign(trainer, folder / name, folder / f"env-{name}", busy=options.busy)
        _say(trainer=name, requires=trainer.requires, changed_lines=campaign.changed_lines)
        for lie in _LIES:
            _lie(campaign, name, lie)
        known = campaign.calibrations()
        for one in known:
            _say(trainer=name, calibrated=one.blocks, sd_pct=one.sd_pct, sd_upper_pct=one.sd_upper_pct)
        plants = {
            "slow": {"env": {"PLANT": "slow", "SHARE": options.share}},
            "numerics": {"env": {"PLANT": "numerics"}},
        }
        verdict = {
            "primary": {"metric": "tokens_per_s", "margin": "1%", "adopt_if": "2%"},
            "require": [{"metric": "loss_step1", "rule": "identical"}],
        }
        spec = campaign.spec("planted", plants, blocks=options.blocks, verdict=verdict)
        _told(name, "planted", campaign.verdicts("planted", spec, known))
        _told(name, "unchanged", campaign.verdicts("unchanged", campaign.unchanged(), known))
        for number in range(0, options.nulls, _TOGETHER):
            same = {f"same-{i + 1}": {"env": {"UNUSED": str(i + 1)}} for i in range(number, number + _TOGETHER)}
            spec = campaign.spec(f"nulls-{number + 1}", same, blocks=MIN_BLOCKS)
            _told(name, f"nulls {number + 1}", campaign.verdicts(f"nulls-{number + 1}", spec, known))


if __name__ == "__main__":
    main()
