"""Sentinels: A/A ablations that the service submits to keep the calibrations of noise current."""

import json
import logging
import time
from typing import Any

from sqlalchemy import Connection, Row, or_, select

from ablate.experiments.analysis.noise.admission import is_enough
from ablate.experiments.analysis.noise.calibrate import seconds, serials_of, software_digest
from ablate.experiments.design.aa_spec import CONTENT_TYPE, SENTINEL, calibration_spec
from ablate.experiments.design.kinds.command import sent_code
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.digest import digest, digest_bytes
from ablate.experiments.ids import new_id
from ablate.experiments.records.calibration import Calibration, CalibrationKey
from ablate.experiments.records.messages import NodeRegistration
from ablate.service.lifecycle import OVER
from ablate.service.principals import SERVICE
from ablate.service.store.ablations import results
from ablate.service.store.ablations.submissions import IdempotencyKey, StoredAnswer, Submission, store_submission
from ablate.service.store.files import code_archives
from ablate.service.store.nodes import nodes
from ablate.service.store.nodes.calibrations import read_calibrations
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, db_now, labels

log = logging.getLogger(__name__)

AGAIN_S = 86_400.0
"""A sentinel without a result is followed by another after this long, or after the sentinels' interval if shorter."""


def submit_due(store: Store, *, every_s: float, silent_s: float) -> int:
    """Submit a small A/A ablation for each valid calibration whose last block is older than `every_s`; return how many.

    Only if a node that was seen within `silent_s` has the same device and software.
    """
    with store.write() as connection:
        live = [row for row in nodes.list_nodes(connection) if row.silent_s <= silent_s]
        due = [one for one in read_calibrations(connection) if _is_due(connection, one, live, every_s)]
        submitted = [_submit(connection, calibration) for calibration in due]
        for calibration, ablation_id in zip(due, submitted, strict=True):
            if ablation_id is None:
                log.info("no sentinel for %s: the code was dropped", calibration.key.device_serial)
            else:
                log.info("sentinel %s watches the noise of %s", ablation_id, calibration.key.device_serial)
    return len([one for one in submitted if one is not None])


def _is_due(connection: Connection, calibration: Calibration, live: list[Row[Any]], every_s: float) -> bool:
    now = time.time()
    recent = now - seconds(calibration.measured_at) < every_s
    if recent or calibration.bit_repeatable or not is_enough(calibration, now):
        return False
    return any(_fits(row, calibration.key) for row in live) and not _was_asked(connection, calibration.key, every_s)


def _fits(row: Row[Any], key: CalibrationKey) -> bool:
    """Tell whether trials on this node have the device and software of `key`."""
    node = NodeRegistration.model_validate_json(row.registration)
    serials = serials_of([(device.name, device.serial) for device in node.devices], row.name)
    software = software_digest(node.code_digest, node.versions)
    return row.node_class == key.node_class and key.device_serial in serials and software == key.software_digest


def _was_asked(connection: Connection, key: CalibrationKey, every_s: float) -> bool:
    """Tell whether a sentinel of this key is unfinished or recent."""
    query = select(ablations.c.id).join(labels, labels.c.ablation_id == ablations.c.id)
    query = query.where(labels.c.key == SENTINEL, labels.c.value == _name(key))
    recent = or_(ablations.c.created_at > db_now() - min(AGAIN_S, every_s), ablations.c.state.not_in(OVER))
    return connection.execute(query.where(recent).limit(1)).first() is not None


def _name(key: CalibrationKey) -> str:
    return digest(key.model_dump(mode="json"))[:23]


def _submit(connection: Connection, calibration: Calibration) -> str | None:
    """Submit a sentinel and return its id; None if the service no longer has the code of its command."""
    body = results.read_spec(connection, calibration.ablations[-1])
    like = parse_spec(body.content, body.content_type)
    if code_archives.lacking(connection, sent_code(like).values(), user=None):
        return None
    node_class, order_seed = calibration.key.node_class, int(time.time())
    watched = _name(calibration.key)
    text = calibration_spec(like, node_class=node_class, blocks=MIN_BLOCKS, order_seed=order_seed, sentinel=watched)
    spec = parse_spec(text, CONTENT_TYPE)
    ablation_id = new_id("abl")
    submission = Submission(
        ablation_id=ablation_id,
        spec=spec,
        plan=make_plan(spec),
        spec_text=text.decode(),
        content_type=CONTENT_TYPE,
        submitted_by=SERVICE,
    )
    key = IdempotencyKey(token_id=SERVICE, key=ablation_id, body_digest=digest_bytes(text))
    store_submission(connection, submission, key, StoredAnswer(ablation_id=ablation_id, text=json.dumps(None)))
    return ablation_id
