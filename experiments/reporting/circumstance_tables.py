"""Tables of what a verdict took into account besides its receipts: A/A blocks, broken attempts, earlier askings."""

from experiments.block_numbers import block_number
from experiments.outcomes import VerdictWord
from experiments.records.calibration import Calibration
from experiments.records.circumstances import Circumstances
from experiments.reporting import wording
from experiments.reporting.table import Table, codes, numbers, row, texts

LONGEST_MESSAGE = 200


def calibrations_table(known: Circumstances) -> Table:
    """Return the A/A evidence for the devices that ran: one row for each calibration."""
    return Table(
        title="A/A evidence: the noise of the devices that ran",
        columns=(
            *texts("device", "recipe"),
            *numbers(
                "A/A blocks", "sd", "sd at most", "autocorrelation", "second place", "drift per hour", "largest z"
            ),
            *texts("measured"),
            *codes("digest"),
        ),
        rows=tuple(
            row(
                f"{found.key.device_serial} ({found.key.node_class})",
                found.key.recipe,
                str(found.blocks),
                *_noise(found),
                wording.moment(found.measured_at),
                found.digest,
            )
            for found in known.admission.calibrations
        ),
        note="Blocks in which both arms were the same, measured on the same path. sd: of the difference from block to "
        f"block; at most: its upper 95{wording.SPACE}% bound. Second place: its mean against the first in a block.",
    )


def _noise(found: Calibration) -> tuple[str, ...]:
    return (
        wording.size_percent(found.sd_pct),
        wording.size_percent(found.sd_upper_pct),
        wording.signed(found.autocorrelation),
        wording.percent(found.position_effect_pct),
        wording.percent(found.drift_pct_per_hour),
        wording.number(found.largest_z, 3),
    )


def attempts_table(known: Circumstances) -> Table:
    """Return every attempt at a block that did not count; the verdict takes each into account."""
    return Table(
        title="Attempts that did not count",
        columns=(*texts("block"), *numbers("attempt"), *texts("class", "arm", "message", "node")),
        rows=tuple(
            row(
                str(block_number(one.block_index)),
                str(one.number),
                one.failure_class.value,
                one.arm or "cannot be told",
                wording.shorten(one.message, LONGEST_MESSAGE),
                one.node,
            )
            for one in known.attempts
        ),
        note="A block that broke runs again whole. Where an arm may have caused it, no word is published for that arm.",
    )


def family_table(known: Circumstances) -> Table:
    """Return the earlier ablations that asked the same question, cancelled ones included."""
    return Table(
        title="The same question, asked before",
        columns=(*codes("ablation"), *texts("name", "state", "created", "words")),
        rows=tuple(
            row(
                one.ablation,
                one.name,
                one.state.value,
                wording.moment(one.created_at),
                ", ".join(f"{arm}: {VerdictWord(word).value}" for arm, word in one.words.items()) or wording.NOTHING,
            )
            for one in known.family.earlier
        ),
        note="Whoever asks often enough finds something by chance. So each asking is tested at its own, stricter "
        f"level, which keeps 5{wording.SPACE}% over all of them.",
    )
