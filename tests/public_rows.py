"""Rows of the REST interface with believable values, for the tests of what the CLI shows."""

from typing import Any

from ablate.service.schemas.ablations import AblationPublic, TrialPublic


def ablation_row(**changes: Any) -> AblationPublic:
    """Return a running ablation of six blocks; `changes` replace fields."""
    values = {
        "id": "abl_1",
        "name": "demo",
        "question": "?",
        "state": "running",
        "spec_digest": "s",
        "rule_digest": "r",
        "node_class": "cpu",
        "created_at": "2026-11-20T00:00:00Z",
        "started_at": None,
        "finished_at": None,
        "blocks": {"planned": 6, "done": 0, "failed": 0},
        "trials": {"planned": 12, "done": 0},
        "priority": 50,
        "waiting_for": None,
        "blocks_ahead": None,
        "starts_in_s": None,
        "labels": {},
        "mlflow_url": None,
        "links": dict.fromkeys(("self", "events", "verdict", "report", "cancel"), "/"),
    }
    return AblationPublic.model_validate({**values, **changes})


def trial_row(**changes: Any) -> TrialPublic:
    """Return a queued trial of the first block; `changes` replace fields."""
    values = {
        "id": "trl_1",
        "block_id": "blk_1",
        "block_index": 0,
        "arm": "psiv-on",
        "role": "variant",
        "position": 0,
        "state": "queued",
        "runs_now": changes.get("state") == "running",
        "outcome": None,
        "progress": None,
        "receipt_digest": None,
    }
    return TrialPublic.model_validate({**values, **changes})
