"""The yardstick: a bare FastAPI + SQLAlchemy endpoint that inserts the same rows in one transaction, nothing more.

No token, no idempotency check, no planning, no digests, no metrics: the body is parsed by pydantic, the rows are filled
with text of the same size, and the tables, pragmas, connections and server settings are the service's own.
"""

import json
import sys
from pathlib import Path
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy import insert

from service.store.columns import db_now
from service.store.session import Store
from service.store.tables import ablations, blocks, events, idempotency, metadata, outbox, questions, trials

ARMS, BLOCKS = ("baseline", "psiv-on", "chunk-32"), 6
DIGEST = "sha256:" + "0" * 64

INSERT_ABLATION = insert(ablations).values(created_at=db_now())
INSERT_BLOCKS, INSERT_TRIALS, INSERT_QUESTIONS = insert(blocks), insert(trials), insert(questions)
INSERT_EVENT = insert(events).values(at=db_now())
INSERT_OUTBOX_ROWS = insert(outbox).values(created_at=db_now(), due_at=db_now(), tries=0)
INSERT_KEY = insert(idempotency).values(created_at=db_now())


class Steps(BaseModel):
    warmup: int
    timed: int


class Workload(BaseModel):
    recipe: str
    steps: Steps


class Gates(BaseModel):
    gates: dict[str, bool | int | str]


class Design(BaseModel):
    seeds: list[int]
    blocks: dict[str, int]
    order_seed: int


class Placement(BaseModel):
    node_class: str
    devices: int


class Limits(BaseModel):
    trial: str
    device_minutes: float
    priority: int


class Spec(BaseModel):
    ablation: str
    question: str
    workload: Workload
    baseline: Gates
    variants: dict[str, Gates]
    design: Design
    placement: Placement
    limits: Limits
    verdict: dict[str, object]
    labels: dict[str, str] = {}


class Created(BaseModel):
    id: str
    state: str


def create_app(store: Store, plan: str) -> FastAPI:
    """Build the bare application; `plan` is stored as it is."""
    metadata.create_all(store.writer)
    app = FastAPI()

    @app.post("/v1/ablations", status_code=202)
    def create(spec: Spec) -> Created:
        ablation_id = uuid4().hex[:30]
        block_ids = [uuid4().hex[:30] for _ in range(BLOCKS)]
        with store.writer.begin() as connection:
            connection.execute(INSERT_ABLATION, _ablation(ablation_id, spec, plan))
            connection.execute(INSERT_BLOCKS, [_block(ablation_id, b, i, spec) for i, b in enumerate(block_ids)])
            rows = [_trial(ablation_id, b, i, p, arm) for i, b in enumerate(block_ids) for p, arm in enumerate(ARMS)]
            connection.execute(INSERT_TRIALS, rows)
            asked = [{"ablation_id": ablation_id, "arm": arm, "digest": DIGEST} for arm in ARMS[1:]]
            connection.execute(INSERT_QUESTIONS, asked)
            connection.execute(INSERT_EVENT, _event(ablation_id))
            wanted = [{"kind": "none", "key": key} for key in (spec.placement.node_class, ablation_id)]
            connection.execute(INSERT_OUTBOX_ROWS, wanted)
            connection.execute(INSERT_KEY, _key(ablation_id))
        return Created(id=ablation_id, state="queued")

    return app


def _ablation(ablation_id: str, spec: Spec, plan: str) -> dict[str, object]:
    return {
        "id": ablation_id,
        "name": spec.ablation,
        "question": spec.question,
        "state": "queued",
        "node_class": spec.placement.node_class,
        "spec_text": spec.model_dump_json(),
        "content_type": "application/json",
        "spec_digest": DIGEST,
        "rule_digest": DIGEST,
        "plan": plan,
        "trial_timeout_s": 1200.0,
        "device_minutes": 180.0,
        "priority": spec.limits.priority,
        "submitted_by": "bench",
        "blocks_planned": BLOCKS,
        "blocks_done": 0,
        "blocks_failed": 0,
        "blocks_cancelled": 0,
        "trials_planned": BLOCKS * len(ARMS),
        "trials_done": 0,
    }


def _block(ablation_id: str, block_id: str, index: int, spec: Spec) -> dict[str, object]:
    return {
        "id": block_id,
        "ablation_id": ablation_id,
        "index": index,
        "seed": spec.design.seeds[index % len(spec.design.seeds)],
        "order": json.dumps(ARMS),
        "node_class": spec.placement.node_class,
        "state": "queued",
        "attempt_no": 0,
        "not_before": 0.0,
    }


def _trial(ablation_id: str, block_id: str, index: int, position: int, arm: str) -> dict[str, object]:
    return {
        "id": uuid4().hex[:30],
        "ablation_id": ablation_id,
        "block_id": block_id,
        "block_index": index,
        "position": position,
        "arm": arm,
        "role": "baseline" if arm == "baseline" else "variant",
        "state": "queued",
    }


def _event(ablation_id: str) -> dict[str, object]:
    return {
        "ablation_id": ablation_id,
        "kind": "ablation.state",
        "subject": ablation_id,
        "old": None,
        "new": "queued",
        "actor": "bench",
        "reason": "submitted",
        "data": "{}",
    }


def _key(ablation_id: str) -> dict[str, object]:
    return {
        "token_id": "bench",
        "key": uuid4().hex,
        "body_digest": DIGEST,
        "ablation_id": ablation_id,
        "answer": "x" * 780,
    }


if __name__ == "__main__":
    url, port, plan_file = sys.argv[1:4]
    bare = create_app(Store(url), Path(plan_file).read_text())
    uvicorn.run(bare, port=int(port), loop="uvloop", http="httptools", access_log=False, log_level="warning")
