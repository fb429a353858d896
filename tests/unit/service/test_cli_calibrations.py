"""What `ablate aa` says at its end: the noise that it found and what can be asked at it."""

import io

import pytest
from rich.console import Console

from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.analysis.sizing import size_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.records.calibration import Calibration, Ledger
from ablate.service.cli import tables
from ablate.service.cli.calibrations import calibration_lines, noise_lines
from ablate.service.schemas.nodes import CalibrationList, CalibrationPublic
from tests.calibrations import make_block, noisy_blocks
from tests.factories import make_receipt, make_spec

ONE = {"psiv-on": {"gates": {"psiv_cache": True}}}
SPEC = make_spec(variants=ONE, design__blocks={"count": 20})
KEY = key_of(SPEC, make_receipt(make_plan(SPEC), 0, "baseline"))


def known(calibration: Calibration, problem: str | None = None) -> CalibrationList:
    mended_by = None if problem is None else "ablate aa cpu --like abl_1"
    item = CalibrationPublic(calibration=calibration, problem=problem, mended_by=mended_by)
    return CalibrationList(items=[item], ledger=Ledger(), statement="")


def noise_text(calibrations: CalibrationList, ablation_id: str) -> str:
    return "\n".join(noise_lines(calibrations, ablation_id)).replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(("sd", "advised"), [(0.003, False), (0.37, True)])
def test_the_noise_is_said_with_what_blocks_find_at_it(sd: float, advised: bool) -> None:
    calibration = calibrate(KEY, noisy_blocks(sd=sd))
    text = noise_text(known(calibration), calibration.ablations[0])
    sizing = size_of(SPEC, make_plan(SPEC), [calibration])
    assert sizing is not None
    assert f"20 A/A blocks; neighbouring trials of one arm differ with an sd of {calibration.sd_pct:.2f} %" in text
    assert f"20 blocks detect {sizing.mde_pct:.2f} %" in text, "what `plan` says of such a design"
    assert ("a quieter machine" in text) == advised


def test_what_does_not_admit_says_why_and_what_mends_it() -> None:
    few = calibrate(KEY, [make_block(index, difference=0.01 * (-1) ** index) for index in range(5)])
    text = noise_text(known(few, "5 A/A blocks are known; 6 admit it"), few.ablations[0])
    assert "no verdict by throughput yet: 5 A/A blocks are known; 6 admit it; ablate aa cpu --like abl_1" in text
    assert "blocks detect" not in text
    enough = calibrate(KEY, [make_block(index, difference=0.01 * (-1) ** index) for index in range(6)])
    assert "with 20 A/A blocks they would detect smaller effects" in noise_text(known(enough), enough.ablations[0])
    assert "It measured no noise" in noise_text(known(few), "abl_other")


def test_each_row_names_its_metric() -> None:
    keys = [KEY, KEY.model_copy(update={"metric": "val_loss"})]
    items = [known(calibrate(key, noisy_blocks())).items[0] for key in keys]
    console = Console(width=200, file=io.StringIO())
    console.print(tables.calibrations(CalibrationList(items=items, ledger=Ledger(), statement="")))
    heading, _line, *rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    place = heading.index("metric")
    assert [row[place:].split()[0] for row in rows[:2]] == ["throughput", "val_loss"]
    assert "throughput of " in calibration_lines(items[0].calibration)[0]


@pytest.mark.parametrize("blocks", [6, 20])
def test_a_metric_that_repeats_bit_for_bit_asks_for_no_more_blocks(blocks: int) -> None:
    key = KEY.model_copy(update={"metric": "val_loss"})
    calibration = calibrate(key, [make_block(index, log_rate=float(index % 3)) for index in range(blocks)])
    text = noise_text(known(calibration), calibration.ablations[0])
    assert f"{blocks} A/A blocks; val_loss repeats bit for bit, so it has no noise and needs no more A/A blocks" in text
    assert "only another seed changes it" in text
    assert not any(words in text for words in ("speed", "0.00 %", "detect 0", "with 20"))
    assert "drift" not in " ".join(calibration_lines(calibration))
