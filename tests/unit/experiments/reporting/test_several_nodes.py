"""Blocks that ran on several nodes: absolute figures are told by node, wherever they stand."""

import math
import random
from collections import defaultdict

import pytest

from ablate.experiments.design.load import parse_spec
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.receipts import Receipt, summarise
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import arm_runs
from ablate.experiments.reporting.pages import evidence_tables
from ablate.experiments.reporting.pages.first_screen import first_screen
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.verdict_layout import lay_out
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.reporting.wording import MOST_NODES
from tests import views

ARMS = {"baseline": views.Effect(), "psiv-on": views.Effect(gates={"psiv_cache": True}, speed_pct=5)}


def rates(view: AblationView, arm: str) -> dict[str, list[float]]:
    """Return the throughput of every trial of an arm by node, from the receipts themselves."""
    by_node = defaultdict(list)
    for receipt in view.receipts:
        if receipt.arm == arm and receipt.summary is not None:
            by_node[receipt.environment.node_name].append(receipt.summary.tokens_per_s)
    return by_node


@pytest.mark.parametrize("seed", range(6))
def test_throughput_of_several_nodes_is_told_by_node_or_marked(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    nodes = {f"node-{n}": chance.uniform(0.3, 1.7) for n in range(chance.randint(2, MOST_NODES + 2))}
    view = views.view(arms=ARMS, num_blocks=chance.randint(6, 9), node_class="cpu", timed=4, nodes=nodes)
    screen, answer, verdict = first_screen(view), view.answer, view.verdict
    assert screen is not None
    assert answer is not None
    assert verdict is not None
    lines = {"baseline": screen.baseline} | {line.variant.arm: line.absolute for line in screen.lines}
    for arm, line in lines.items():
        by_node = {node: math.fsum(own) / len(own) for node, own in rates(view, arm).items()}
        named = [f"{wording.number(rate, 4)} on {node}" in line for node, rate in by_node.items()]
        assert named == [len(nodes) <= MOST_NODES] * len(nodes)
        assert (f"mean over {len(nodes)} nodes" in line) == (len(nodes) > MOST_NODES)
    counts = [f"{len(own)} on {node}" for node, own in rates(view, "baseline").items()]
    texts = (answer.heading, verdict_markdown(verdict), " ".join(screen.warnings))
    assert all(count in text for count in counts for text in texts)
    for run in (parent(view, None), *arm_runs(view)):
        assert all(f"{node}: " in run.tags["ablation.nodes"] for node in nodes), run.name
    table = evidence_tables.arms_table(view)
    assert {f"throughput on {node}, tokens/s" for node in nodes} <= {str(row[0]) for row in table.rows}
    assert "nodes of unequal speed" in table.note


@pytest.mark.parametrize(("apart", "scope"), [(0.0, "on these 2 nodes"), (3.0, "on these 2 nodes, which differ")])
def test_every_medium_says_that_a_word_is_of_these_nodes(apart: float, scope: str) -> None:
    own = {"fast": 1 + apart / 100, "slow": 1 - apart / 100}
    arms = {"baseline": views.Effect(), "psiv-on": views.Effect(gates={"psiv_cache": True}, speed_pct=9)}
    view = views.view(arms=arms, num_blocks=24, node_class="cpu", timed=4, noise=1e-3, nodes={"fast": 1.7, "slow": 0.5})
    receipts = [one if one.arm == "baseline" else faster(one, own[one.environment.node_name]) for one in view.receipts]
    spec = parse_spec(view.spec_text.encode(), "application/json")
    view = views.judged_view(spec, view.plan, receipts, spec_text=view.spec_text)
    verdict = view.verdict
    assert verdict is not None
    (variant,) = verdict.variants
    assert (variant.verdict, variant.decision) == (VerdictWord.BETTER, Decision.ADOPT)
    assert variant.nodes is not None
    assert (variant.nodes.names, variant.nodes.differ) == (("fast", "slow"), bool(apart))
    assert variant.reason.endswith(f"; {scope}")
    (shown,) = lay_out(verdict).variants
    assert shown.word.note == scope
    assert shown.sentence.endswith(f"all of this is {scope} only.")
    assert lay_out(verdict).lead == f"Adopt psiv-on ({scope})."
    assert f"({scope})" in verdict_markdown(verdict)
    assert render(view).count(scope) >= 2


def faster(receipt: Receipt, factor: float) -> Receipt:
    """Return the receipt of a trial whose steps took a `factor` less."""
    steps = tuple(step.model_copy(update={"seconds": step.seconds / factor}) for step in receipt.steps)
    summary = summarise(steps, flops_per_step=receipt.flops_per_step, loss_val=None, peak_flops=None)
    return receipt.model_copy(update={"steps": steps, "summary": summary})


def test_one_node_is_told_without_any_of_it() -> None:
    view = views.cpu_view()
    assert view.verdict is not None
    page = render(view)
    assert "nodes of unequal speed" not in page
    assert "throughput on " not in page
    assert "by_node" not in view.verdict.model_dump_json()
    assert lay_out(view.verdict).heading.endswith("blocks on cpu, throughput against baseline")
    assert {run.tags["ablation.nodes"] for run in arm_runs(view)} == {"two-core"}


def test_two_machines_of_unequal_speed_are_no_drift() -> None:
    view = views.view(arms=ARMS, num_blocks=9, node_class="cpu", timed=4, noise=1e-4, nodes={"fast": 1.7, "slow": 0.5})
    alone = views.view(
        arms=ARMS, num_blocks=40, node_class="cpu", timed=4, noise=1e-4, nodes={"fast": 1.7, "slow": 0.5}
    )
    drifts = [[line for line in (first_screen(one).warnings) if "drifted by" in line] for one in (view, alone)]  # type: ignore[union-attr]
    assert drifts[0] == []
    assert len(drifts[1]) == 1
    moved = float(drifts[1][0].split(" by \N{MINUS SIGN}")[1].split("\N{NO-BREAK SPACE}")[0])
    assert 2.0 < moved < 2.6, "0.06 % from block to block, 38 blocks apart"
    assert drifts[1][0].endswith("to the last on fast; the arms of a block share the drift.")
