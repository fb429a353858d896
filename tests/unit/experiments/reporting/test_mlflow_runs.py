"""The names under which reviewers filter in MLflow: a tag that comes or goes is seen here."""

from experiments.reporting import mlflow_runs
from tests import views

OF_EVERY_RUN = {
    "ablation.id",
    "ablation.run",
    "ablation.role",
    "ablation.spec_digest",
    "ablation.node_class",
    "mlflow.source.name",
    "mlflow.source.type",
    "mlflow.user",
}
OF_THE_PARENT = {
    "ablation.name",
    "ablation.question",
    "ablation.state",
    "ablation.rule_digest",
    "ablation.calibrated",
    "ablation.verdict_digest",
    "ablation.admission",
    "ablation.broken_attempts",
    "ablation.asking",
    "mlflow.note.content",
}
OF_A_VARIANT = {"ablation.verdict.", "ablation.decision."}
OF_A_TRIAL = {
    "ablation.trial",
    "ablation.attempt",
    "ablation.arm",
    "ablation.block",
    "ablation.order",
    "ablation.arm_digest",
    "ablation.seed",
    "ablation.outcome",
    "ablation.receipt_digest",
    "ablation.code_digest",
    "ablation.data_digest",
    "ablation.node",
    "ablation.device",
    "mlflow.source.git.commit",
    "mlflow.source.git.dirty",
}
OF_A_FAILED_TRIAL = {"ablation.failure_class", "ablation.message"}


def test_parent_has_these_tags() -> None:
    view = views.view()
    assert view.verdict is not None
    of_variants = {tag + variant.arm for tag in OF_A_VARIANT for variant in view.verdict.variants}
    assert set(mlflow_runs.parent(view, "").tags) == OF_EVERY_RUN | OF_THE_PARENT | of_variants


def test_children_have_these_tags() -> None:
    measured = OF_EVERY_RUN | OF_A_TRIAL
    found = {frozenset(child.tags) for child in mlflow_runs.children(views.view())}
    assert found == {frozenset(measured), frozenset(measured | OF_A_FAILED_TRIAL)}
