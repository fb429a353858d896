"""Stored bundles are judged by the version of the rule that they were planned with."""

from pathlib import Path

import pytest

from experiments.analysis.judge import judge
from experiments.analysis.verdicts import Verdict
from experiments.design.plan import make_plan
from experiments.design.rule import RULE_VERSION, rule_digest, rule_of, version_of
from experiments.digest import digest
from experiments.outcomes import Decision, VerdictWord
from experiments.records.bundle_files import read_bundle_files
from experiments.records.bundle_reader import open_bundle
from experiments.records.circumstances import CALIBRATED
from tests.factories import make_receipts, make_spec

STORE = Path(__file__).resolve().parents[4] / "docs" / "receipts"


def judged(path: str) -> Verdict:
    bundle = open_bundle(read_bundle_files(STORE / path))
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    return judge(bundle.plan_file.plan, bundle.plan_file.spec, receipts, CALIBRATED)


@pytest.mark.parametrize(
    "path",
    [
        "2026-11-23-h200-aa/gates.tar.gz",
        "2026-11-26-own-code-h200/blocks-1-3.tar.gz",
        "2026-11-26-trainers/litgpt/planted.tar.gz",
        "2026-11-26-quality-cpu/bundle.tar.gz",
        "2026-11-26-quality-h100/bundle.tar.gz",
    ],
)
def test_a_stored_bundle_is_judged_by_its_rule(path: str) -> None:
    verdict = judged(path)
    assert all("not the planned one" not in one.reason for one in verdict.variants)
    assert all(one.verdict is not VerdictWord.INVALID for one in verdict.variants)


def test_every_version_has_a_digest_of_its_own_and_a_changed_rule_has_none() -> None:
    spec = make_spec(variants={"rows": {"gates": {"micro_batch": 4}}})
    digests = [digest(rule_of(spec, version)) for version in range(1, RULE_VERSION + 1)]
    assert len(set(digests)) == RULE_VERSION
    assert [version_of(spec, one) for one in digests] == [*range(1, RULE_VERSION + 1)]
    assert rule_digest(spec) == digests[-1]
    other = make_spec(verdict__primary={"metric": "tokens_per_s", "margin": "0.6%", "adopt_if": "1.5%"})
    assert version_of(other, digests[-1]) is None
    changed = make_plan(spec).model_copy(update={"rule_digest": rule_digest(other)})
    assert judge(changed, spec, make_receipts(changed), CALIBRATED).variants[0].verdict is VerdictWord.INVALID


@pytest.mark.parametrize(
    ("version", "decision"),
    [(1, Decision.ADOPT), (2, Decision.ADOPT), (3, Decision.INCONCLUSIVE), (4, Decision.INCONCLUSIVE)],
)
def test_adoption_follows_the_version(version: int, decision: Decision) -> None:
    spec = make_spec(verdict__primary={"metric": "tokens_per_s", "margin": "1%", "adopt_if": "1%"})
    plan = make_plan(spec).model_copy(update={"rule_digest": digest(rule_of(spec, version))})
    found = judge(plan, spec, make_receipts(plan, {"psiv-on": 1.012}, sd=0.003), CALIBRATED).variants[0]
    assert found.verdict is VerdictWord.BETTER
    assert not found.beyond_margin
    assert found.decision is decision
