"""The parent run of an ablation: its answer in name, note and columns, and spec, plan, verdict and report as files."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.load import load_values
from ablate.experiments.design.program_files import without_archives
from ablate.experiments.design.workload import COMMAND
from ablate.experiments.digest import canonical_json
from ablate.experiments.outcomes import AblationState, Decision
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.changes import arm_changes, in_one_line
from ablate.experiments.reporting.mlflow import content
from ablate.experiments.reporting.sentences import broken_attempts
from ablate.experiments.reporting.terminal.markdown import short_table, table_markdown, verdict_markdown
from ablate.experiments.reporting.verdict_layout import VariantLayout, by_importance
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.reporting.wording import gate_values

PARENT = "parent"
MOST_ROWS = 4
"""Variants in the table that begins a note; MLflow folds what is below about 150 pixels."""
LONGEST_COLUMN = 500
"""Longest tag that is shown as a column, in characters."""
STATUS: dict[AblationState, str] = {
    AblationState.QUEUED: "SCHEDULED",
    AblationState.RUNNING: "RUNNING",
    AblationState.CANCELLING: "RUNNING",
    AblationState.CANCELLED: "KILLED",
    AblationState.COMPLETED: "FINISHED",
    AblationState.FAILED: "FAILED",
}
"""MLflow's status by state."""
OPEN = frozenset({"SCHEDULED", "RUNNING"})


def parent(view: AblationView, report_html: str | None) -> content.RunContent:
    """Return the parent run; `report_html` is None while the ablation is running."""
    status = STATUS[view.state]
    return content.finite(
        content.RunContent(
            identity=PARENT,
            name=content.ablation_name(view),
            status=status,
            started_ms=content.milliseconds(view.created_at),
            ended_ms=None if status in OPEN else content.ended_ms(view),
            tags=_tags(view),
            params=_params(view),
            points=tuple(_points(view)),
            texts=_texts(view, report_html),
            datasets=content.datasets(view.receipts),
        )
    )


def _tags(view: AblationView) -> dict[str, str]:
    tags = content.common_tags(view, content.RunKind.ABLATION, PARENT) | content.source_tags(view.receipts)
    tags |= {
        "ablation.state": view.state,
        "ablation.rule_digest": view.plan.rule_digest,
        "ablation.gates": _by_arm(
            {arm.name: in_one_line(arm_changes(arm, view.plan.baseline)) for arm in view.plan.variants},
        ),
        "ablation.nodes": wording.shorten(_nodes(view), LONGEST_COLUMN),
        content.NOTE_TAG: _note(view),
    }
    if view.verdict is None or view.answer is None:
        return tags
    first = by_importance(view.verdict, view.answer)[0]
    decides = {"ablation.metric": view.answer.rule.metric, "ablation.variant": first.arm}
    return tags | decides | _answer_columns(view.answer.variants) | _circumstances(view.verdict)


def _nodes(view: AblationView) -> str:
    baseline = view.plan.baseline.name
    return wording.of_arm(view.arms[baseline], view.whole_blocks.of(baseline))


def _answer_columns(variants: Sequence[VariantLayout]) -> dict[str, str]:
    """Return the columns of the list of ablations: all variants by name, largest improvement first."""
    cells: dict[str, Callable[[VariantLayout], str]] = {
        "verdict": lambda variant: str(variant.word),
        "effect": lambda variant: variant.effect.text,
        "interval": lambda variant: variant.interval.text,
    }
    return {f"ablation.{name}": _by_arm({v.arm: cell(v) for v in variants}) for name, cell in cells.items()}


def _by_arm(cells: dict[str, str]) -> str:
    """Return the cells with their arms after them, because MLflow cuts the end; a single arm is not named."""
    named = cells.values() if len(cells) == 1 else (f"{text} ({arm})" for arm, text in cells.items())
    return wording.shorten("; ".join(named), LONGEST_COLUMN)


def _circumstances(verdict: Verdict) -> dict[str, str]:
    """Return the circumstances of the verdict: A/A evidence, broken attempts, earlier askings."""
    circumstances: Circumstances = verdict.circumstances
    return {
        "ablation.verdict_digest": verdict.digest,
        "ablation.calibrated": f"no: {refused}" if (refused := circumstances.admission.refused_because) else "yes",
        "ablation.broken_attempts": str(len(circumstances.attempts)),
        "ablation.asking": str(circumstances.family.number),
        **_registered(circumstances),
        "ablation.calibrations": ", ".join(one.digest for one in circumstances.admission.calibrations),
    }


def _registered(circumstances: Circumstances) -> dict[str, str]:
    """Return when a service registered a plan that ran without one."""
    carried = circumstances.carried
    return {} if carried is None else {"ablation.plan_registered": carried.registered_at or "by nobody"}


def _points(view: AblationView) -> Iterator[content.Point]:
    """Yield the numbers of the most important variant, and how many have each decision; none without a verdict.

    Names do not depend on the arms: every other name would be a column of the list of all ablations.
    """
    if view.verdict is None or view.answer is None:
        return
    first, noise = by_importance(view.verdict, view.answer)[0], view.verdict.own_noise
    decisions = Counter(variant.decision.text for variant in view.answer.variants)
    numbers: dict[str, float | None] = {
        **first.numbers,
        "tokens_per_s": view.arms[first.arm].tokens_per_s,
        "baseline_tokens_per_s": view.arms[view.plan.baseline.name].tokens_per_s,
        "blocks": view.verdict.blocks_counted,
        **{f"variants_{decision}": decisions[decision] for decision in Decision},
        "sd_pct": first.numbers.get("sd_pct") if noise is None else noise.sd_pct,
    }
    at_ms, step = content.ended_ms(view), len(view.whole_blocks.blocks)
    for name, value in numbers.items():
        if value is not None:
            yield content.Point(name, value, at_ms, step)


def _params(view: AblationView) -> dict[str, str]:
    """Return recipe, design, every gate over all arms, and the configuration that all arms share."""
    plan = view.plan
    workload = load_values(view.spec_text.encode(), view.content_type)["workload"]
    shared = [content.params(arm) for arm in plan.arms]
    same = {name: value for name, value in shared[0].items() if all(own.get(name) == value for own in shared)}
    gates = {
        content.allowed_key(f"gate.{name}"): gate_values(name, plan.arms, LONGEST_COLUMN)
        for name in plan.baseline.gates
    }
    return (
        same
        | gates
        | {
            "recipe": str(workload.get("recipe", COMMAND)),
            "design.blocks": str(len(plan.blocks)),
            "design.arms": str(len(plan.arms)),
            "placement.devices": str(plan.devices),
        }
    )


def _texts(view: AblationView, report_html: str | None) -> dict[str, str]:
    kind = view.content_type.partition(";")[0].rpartition("/")[2].removeprefix("x-")
    texts = {f"spec.{kind}": view.spec_text}
    if STATUS[view.state] not in OPEN:  # nobody may read a seed in it before its block is claimed
        texts["plan.json"] = canonical_json(view.plan.model_dump(mode="json"))
    archives = {archive for arm in view.plan.arms for archive in arm.config.archives}
    texts = {name: without_archives(text, archives) for name, text in texts.items()}  # anybody reads them
    if report_html is not None:
        texts["report.html"] = report_html
    if view.verdict is not None:
        texts["verdict.json"] = canonical_json(view.verdict.model_dump(mode="json"))
        tables = view.answer.kernels if view.answer else ()
        texts |= {"kernels.md": "\n\n".join(map(table_markdown, tables))} if tables else {}
    return texts


def _note(view: AblationView) -> str:
    """Return the answers as a short table, which MLflow shows unfolded, then the whole answer, then the question."""
    short, table, rest = "", "", f"\n\nQuestion: {view.question}"
    if view.verdict is not None and view.answer is not None:
        short = f"{short_table(view.verdict, view.answer, MOST_ROWS)}\n\n"
        table = f"\n\n{verdict_markdown(view.verdict)}"
        table += "".join(f"\n- {line}" for line in broken_attempts(view.verdict))
        rest += "\n\nThe artefact `report.html` has the whole answer with pictures."
    text = f"{short}**{view.lead}**{table}{rest}"
    if len(text) <= content.LONGEST_TAG:
        return text
    cut = f"\n\nCut here: MLflow stores no longer notes.{rest}"
    return text[: content.LONGEST_TAG - len(cut)].rsplit("\n", 1)[0] + cut
