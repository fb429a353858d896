"""Tables about commands: how each arm ran, and its own reports."""

from collections.abc import Sequence

from ablate.experiments.analysis.statistics import mean_of
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.program_report import ProgramReport, printable
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Column, Table, codes, numbers, row, texts
from ablate.experiments.reporting.view import AblationView


def program_tables(view: AblationView) -> tuple[Table, ...]:
    """Return the tables of an ablation of commands; none for the built-in model."""
    if not view.plan.baseline.config.own_process:
        return ()
    by_arm = {arm.name: _measured(view, arm.name) for arm in view.plan.arms}
    return _commands_table(view, by_arm), _reports_table(by_arm)


def _measured(view: AblationView, arm: str) -> list[Receipt]:
    return [receipt for receipt in view.receipts if receipt.arm == arm and receipt.outcome is Outcome.MEASURED]


def _reports(receipts: Sequence[Receipt]) -> list[ProgramReport]:
    return [receipt.program for receipt in receipts if receipt.program]


def _commands_table(view: AblationView, by_arm: dict[str, list[Receipt]]) -> Table:
    attested, rows = view.plan.baseline.config.attested, []
    for arm in view.plan.arms:
        reports = _reports(by_arm[arm.name])
        first = reports[0] if reports else None
        rows.append(
            row(
                arm.name,
                " ".join(first.argv if first else _unfilled(arm.config)),
                _digest(first.code if first else None),
                (first.interpreter if first else None) or wording.NOTHING,
                _digest(first.packages if first else None),
                f"{first.ranks:,}" if first else wording.NOTHING,
                _spread([abs(r.window_s - r.window_seen_s) for r in reports if r.window_s and r.window_seen_s]),
            )
        )
    return Table(
        title="Programs" if attested else "Commands, as requested",
        columns=(
            *codes("arm", "arguments of its first trial", "code"),
            *texts("interpreter"),
            *codes("packages"),
            *numbers("ranks", "clocks differ by at most, ms"),
        ),
        rows=tuple(rows),
        note=("" if attested else "Nothing proves that a program obeys its arguments. ")
        + _of_evaluation(view.plan.baseline.config, by_arm)
        + "Code and packages are digests of the files that ran. "
        "The clocks are the program's and the worker's, over the window.",
    )


def _of_evaluation(config: ArmConfig, by_arm: dict[str, list[Receipt]]) -> str:
    """Say which evaluation measured the declared metrics, and in which files; empty without one."""
    if not isinstance(config, ProgramArm) or config.evaluate is None:
        return ""
    ran = [report.evaluation for own in by_arm.values() for report in _reports(own) if report.evaluation]
    code = f", code {_digest(ran[0].code)}" if ran else ""
    return f"{', '.join(sorted(config.metrics))}: by {config.evaluate.title}{code}. "


def _unfilled(config: ArmConfig) -> tuple[str, ...]:
    """Return the arguments of an arm that never ran, with placeholders."""
    return (*config.command, *config.args) if isinstance(config, ProgramArm) else ()


def _digest(digest: str | None) -> str:
    return wording.NOTHING if digest is None else digest.removeprefix("sha256:")[:12]


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * max(seconds):.2f}" if seconds else wording.NOTHING


def _reports_table(by_arm: dict[str, list[Receipt]]) -> Table:
    names = sorted({name for receipts in by_arm.values() for report in _reports(receipts) for name in report.reported})
    rows = []
    for name in names:
        values = {arm: [r.reported[name] for r in _reports(own) if name in r.reported] for arm, own in by_arm.items()}
        rows.append(row(printable(name), *(_mean(of_arm) for of_arm in values.values())))
    return Table(
        title="Reported by the program, or by its protected evaluation"
        if any(report.evaluation for own in by_arm.values() for report in _reports(own))
        else "Reported by the program",
        columns=(Column("metric", "code"), *numbers(*by_arm)),
        rows=tuple(rows),
        note="Means over the measured trials, with the smallest and the largest value.",
    )


def _mean(values: Sequence[float]) -> Cell:
    if not values:
        return Cell(text=wording.NOTHING)
    mean = mean_of(values)
    return Cell(text=f"{mean:.6g}", note=f"{min(values):.6g} to {max(values):.6g}", numbers={"mean": mean})
