"""The tables. Times are epoch seconds of the database's clock. JSON is text that is written once and never queried.

Lock order, for databases with row locks: the node, blocks (by id), the ablation, then everything else. Events get their
sequence numbers under the ablation's lock, so readers see the events of one ablation in order.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    or_,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from ablate.experiments.outcomes import BlockState
from ablate.service.lifecycle import EventKind


class db_now(FunctionElement[float]):  # noqa: N801  # reads as the SQL function it is
    """The database's time of evaluation, in seconds since 1970."""

    type = Double()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def has_passed(moment: ColumnElement[float], *, longest_s: float) -> ColumnElement[bool]:
    """Return the condition that a moment, stored at most `longest_s` ahead, has passed.

    One that is further ahead was stored before the database's clock was set back. It also counts as passed, so that
    nothing waits as long as the clock went back.
    """
    return or_(moment <= db_now(), moment > db_now() + (longest_s + 1.0))


def rfc3339(epoch_s: float) -> str:
    """Format epoch seconds as RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


MOST_CHARACTERS = 2000


def storable(text: str) -> str:
    """Return external text as a column accepts it: cut, and without NUL, which PostgreSQL rejects."""
    return text[:MOST_CHARACTERS].replace("\0", "\\0")


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Sequence = BigInteger().with_variant(Integer, "sqlite")

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("name", String(130), nullable=False),
    Column("scope", String(16), nullable=False),
    Column("node", String(120)),
    Column("node_class", String(32)),
    Column("device_minutes", Double),
    Column("uses_left", Integer),  # of an enrolment token
    Column("created_at", Double, nullable=False),
    Column("created_by", String(64), nullable=False),
    Column("revoked_at", Double),
    Column("reason", Text),
)
_LIVE = tokens.c.revoked_at.is_(None)
Index("uq_tokens_live_name", tokens.c.name, unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE)

token_secrets = Table(
    "token_secrets",
    metadata,
    Column("digest", String(71), primary_key=True),
    Column("token_id", String(30), ForeignKey("tokens.id"), nullable=False, index=True),
    Column("created_at", Double, nullable=False),
    Column("ends_at", Double),
)

web_sessions = Table(
    "web_sessions",
    metadata,
    Column("digest", String(71), primary_key=True),
    Column("kind", String(8), nullable=False),
    Column("token_id", String(30), ForeignKey("tokens.id"), nullable=False, index=True),
    Column("secret_digest", String(71), nullable=False),
    Column("scope", String(16), nullable=False),
    Column("ends_at", Double, nullable=False),
)

share_links = Table(
    "share_links",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("digest", String(71), nullable=False, unique=True),
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False, index=True),
    Column("token_id", String(30), ForeignKey("tokens.id"), nullable=False),
    Column("created_by", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ends_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("used_at", Double),
    Column("uses", Integer, nullable=False, default=0),
)

notifications = Table(
    "notifications",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("token_id", String(30), ForeignKey("tokens.id"), nullable=False, index=True),
    Column("kind", String(16), nullable=False),
    Column("target", Text, nullable=False),
    Column("secret", String(64)),  # signs the messages of a webhook
    Column("created_at", Double, nullable=False),
)

notices = Table(
    "notices",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("notification_id", String(30), nullable=False),  # also of notifications that were removed
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("sent_at", Double),
    UniqueConstraint("notification_id", "ablation_id"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("name", String(120), nullable=False, unique=True),
    Column("node_class", String(32), nullable=False, index=True),
    Column("registration", Text, nullable=False),
    Column("registered_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("draining", Boolean, nullable=False, default=False),
    Column("quarantined_reason", Text),
    Column("stopped_by", String(64)),
    Column("stopped_at", Double),
    Column("resumed_at", Double, nullable=False, default=0.0),
    Column("probe_at", Double),  # when a node that no person stopped is to probe itself next
    Column("probe_began_at", Double),  # of the probe without an answer yet
    Column("probes", Integer, nullable=False, default=0),  # since its last finished block
    Column("lanes", Text),
    Column("failed_back_ends", Text),
    Column("num_devices", Integer, nullable=False, default=1),
    Column("ends_at", Double),  # when its worker ends by itself, by its last claim
    Column("allocation", String(120)),  # of an enrolled node: the job of the cluster that started its worker
    Column("left_at", Double),  # when that job had ended; the node is no longer listed
)

SILENT_S: ColumnElement[float] = func.abs(db_now() - nodes.c.seen_at)
"""Seconds since a node's last call. A call that is ahead was stored before the database's clock was set back: it counts
as so long ago, since a dead node would else be live until the clock gets there."""

node_keys = Table(
    "node_keys",
    metadata,
    Column("key", String(64), nullable=False),
    Column("node", String(120), nullable=False, index=True),
    Column("trusted_by", String(64), nullable=False),
    Column("trusted_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("reason", Text),
    PrimaryKeyConstraint("key", "node"),
)

ablations = Table(
    "ablations",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("question", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("node_class", String(32), nullable=False),
    Column("spec_text", Text, nullable=False),
    Column("content_type", String(64), nullable=False),
    Column("spec_digest", String(71), nullable=False, index=True),
    Column("rule_digest", String(71), nullable=False),
    Column("plan", Text, nullable=False),
    Column("trial_timeout_s", Double, nullable=False),
    Column("device_minutes", Double, nullable=False),
    Column("device_s", Double, nullable=False, default=0.0),  # wall time of its attempts, regardless of devices
    Column("settled_s", Double, nullable=False, default=0.0),  # wall time of the attempts that finished their block
    Column("priority", Integer, nullable=False, default=50),
    Column("turn", BigInteger, nullable=False, default=0),
    Column("submitted_by", String(64), nullable=False),
    Column("token_id", String(30), index=True),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("blocks_planned", Integer, nullable=False),
    Column("blocks_held", Integer, nullable=False, default=0),
    Column("blocks_queued", Integer, nullable=False, default=0),
    Column("blocks_running", Integer, nullable=False, default=0),
    Column("blocks_done", Integer, nullable=False, default=0),
    Column("blocks_failed", Integer, nullable=False, default=0),
    Column("blocks_cancelled", Integer, nullable=False, default=0),
    Column("trials_planned", Integer, nullable=False),
    Column("trials_done", Integer, nullable=False, default=0),
    Column("verdict", Text),
    Column("answer", Text),  # the verdict in a few words
    Column("report_html", Text),
    Column("mlflow_experiment_id", String(64)),
    Column("mlflow_run_id", String(64)),
    Column("bundles", Text),
    Column("request_id", String(64)),
    Column("logs_dropped_at", Double),
    Index("ix_ablations_state_id", "state", "id"),
    Index("ix_ablations_submitted_by_id", "submitted_by", "id"),
    Index("ix_ablations_name_id", "name", "id", postgresql_ops={"name": "text_pattern_ops"}),
)
_WAITS = ablations.c.blocks_queued > 0
Index(
    "ix_ablations_queue",
    ablations.c.node_class,
    ablations.c.priority.desc(),
    ablations.c.turn,
    ablations.c.id,
    ablations.c.blocks_queued,
    sqlite_where=_WAITS,
    postgresql_where=_WAITS,
)
_LOGGED = ablations.c.logs_dropped_at.is_(None)
Index("ix_ablations_logged", ablations.c.finished_at, sqlite_where=_LOGGED, postgresql_where=_LOGGED)

labels = Table(
    "labels",
    metadata,
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("key", String(64), nullable=False),
    Column("value", String(256), nullable=False),
    PrimaryKeyConstraint("ablation_id", "key"),
    Index("ix_labels_key_value", "key", "value", "ablation_id"),
)

questions = Table(
    "questions",
    metadata,
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("arm", String(120), nullable=False),
    Column("digest", String(71), nullable=False, index=True),
    PrimaryKeyConstraint("ablation_id", "arm"),
)

registered_plans = Table(
    "registered_plans",
    metadata,
    Column("ablation_id", String(30), primary_key=True),
    Column("name", String(120), nullable=False),
    Column("sent_digest", String(71), nullable=False),  # of the plan before its registration
    Column("digest", String(71), nullable=False),
    Column("seeds", Text, nullable=False),  # drawn for it, as JSON; empty if its spec lists them
    Column("family", Text, nullable=False),
    Column("registered_at", Double, nullable=False),
    Column("registered_by", String(64), nullable=False),
)

registered_questions = Table(
    "registered_questions",
    metadata,
    Column("ablation_id", String(30), ForeignKey("registered_plans.ablation_id"), nullable=False),
    Column("arm", String(120), nullable=False),
    Column("digest", String(71), nullable=False, index=True),
    PrimaryKeyConstraint("ablation_id", "arm"),
)

blocks = Table(
    "blocks",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("index", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("order", Text, nullable=False),
    Column("node_class", String(32), nullable=False),
    Column("lanes", String(64), nullable=False, default=""),
    Column("back_ends", Text, nullable=False, default=""),  # each name between two commas
    Column("num_devices", Integer, nullable=False, default=1),  # on each node
    Column("num_nodes", Integer, nullable=False, default=1),
    Column("state", String(16), nullable=False),
    Column("attempt_no", Integer, nullable=False, default=0),
    Column("attempt_id", String(30)),
    Column("node_id", String(30)),
    Column("not_before", Double, nullable=False, default=0.0),
    Column("lease_until", Double),
    Column("limit_at", Double),
    Column("avoid_node_id", String(30)),
    Column("avoid_until", Double, nullable=False, default=0.0),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("message", Text),
    UniqueConstraint("ablation_id", "index"),
)
_QUEUED = blocks.c.state == BlockState.QUEUED.value
_RUNNING = blocks.c.state == BlockState.RUNNING.value
Index("ix_blocks_queued", blocks.c.ablation_id, blocks.c["index"], sqlite_where=_QUEUED, postgresql_where=_QUEUED)
Index("ix_blocks_leases", blocks.c.lease_until, sqlite_where=_RUNNING, postgresql_where=_RUNNING)
Index("ix_blocks_holders", blocks.c.node_id, sqlite_where=_RUNNING, postgresql_where=_RUNNING)

turns = Table(
    "turns",
    metadata,
    Column("node_class", String(32), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("turn", BigInteger, nullable=False),
    PrimaryKeyConstraint("node_class", "priority"),
)

trials = Table(
    "trials",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("block_id", String(30), ForeignKey("blocks.id"), nullable=False, index=True),
    Column("block_index", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("arm", String(120), nullable=False),
    Column("role", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("outcome", String(16)),
    Column("steps_done", Integer),
    Column("steps_total", Integer),
    Column("tokens_per_s", Double),
    Column("loss", Double),
    Column("step_s", Double),
    Column("started_at", Double),  # time of the first heartbeat about it in this attempt
    Column("over_at", Double),
    Column("runs_since", Double),  # when the heartbeats switched to it from another trial of the block
    Column("receipt_digest", String(71)),
    UniqueConstraint("ablation_id", "block_index", "position"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("block_id", String(30), ForeignKey("blocks.id"), nullable=False, index=True),
    Column("ablation_id", String(30)),
    Column("token", String(22)),
    Column("number", Integer, nullable=False),
    Column("node_id", String(30), ForeignKey("nodes.id"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("failure_class", String(32)),
    Column("message", Text),
    Column("report_digest", String(71)),
    Column("arm", String(120)),
    Column("signed_by", String(51)),  # key of the node's report, or of the bundle
    Column("signature", String(86)),  # of the report; a bundle has its own
    Index("ix_attempts_ablation_id_state", "ablation_id", "state"),
    Index("ix_attempts_node_id_started_at", "node_id", "started_at"),
)

receipts = Table(
    "receipts",
    metadata,
    Column("trial_id", String(30), ForeignKey("trials.id"), primary_key=True),
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False, index=True),
    Column("attempt_id", String(30), ForeignKey("attempts.id"), nullable=False),
    Column("arm_digest", String(71), nullable=False, index=True),
    Column("wall_s", Double, nullable=False),
    Column("digest", String(71), nullable=False),
    Column("payload", Text, nullable=False),
)

aa_blocks = Table(
    "aa_blocks",
    metadata,
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("block_index", Integer, nullable=False),
    Column("node_class", String(32), nullable=False, index=True),
    Column("workload", String(71), nullable=False, index=True),
    Column("key", Text, nullable=False),
    Column("payload", Text, nullable=False),
    PrimaryKeyConstraint("ablation_id", "block_index"),
)

log_chunks = Table(
    "log_chunks",
    metadata,
    Column("trial_id", String(30), ForeignKey("trials.id"), nullable=False),
    Column("attempt_id", String(30), ForeignKey("attempts.id"), nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("end_offset", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("trial_id", "attempt_id", "offset"),
)

events = Table(
    "events",
    metadata,
    Column("seq", Sequence, primary_key=True, autoincrement=True),
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("subject", String(30), nullable=False),
    Column("old", String(16)),
    Column("new", String(16)),
    Column("actor", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("ix_events_ablation_id_seq", "ablation_id", "seq"),
    sqlite_autoincrement=True,
)
_PROGRESS = events.c.kind == EventKind.TRIAL_PROGRESS.value
Index("ix_events_progress", events.c.subject, sqlite_where=_PROGRESS, postgresql_where=_PROGRESS)

code_archives = Table(
    "code_archives",
    metadata,
    Column("digest", String(71), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("sent_by", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False, index=True),  # last time that somebody sent it or submitted with it
)

code_owners = Table(
    "code_owners",
    metadata,
    Column("digest", String(71), ForeignKey("code_archives.digest"), nullable=False),
    Column("token_id", String(30), ForeignKey("tokens.id"), nullable=False),
    Column("shared_by", String(64)),  # name of the sender who shared it; null for a sender itself
    PrimaryKeyConstraint("digest", "token_id"),
)

code_pieces = Table(
    "code_pieces",
    metadata,
    Column("digest", String(71), ForeignKey("code_archives.digest"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("digest", "number"),
)

code_uses = Table(
    "code_uses",
    metadata,
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("digest", String(71), nullable=False, index=True),  # also of archives that were dropped
    PrimaryKeyConstraint("ablation_id", "digest"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("kind", String(16), nullable=False),
    Column("key", String(32), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),
    Column("tries", Integer, nullable=False, default=0),
    Column("last_error", Text),
    Column("rank", Integer, nullable=False, server_default="0"),
    Index("ix_outbox_kind_rank_due_at", "kind", "rank", "due_at"),
    sqlite_autoincrement=True,
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("token_id", String(30), nullable=False),
    Column("key", String(255), nullable=False),
    Column("body_digest", String(71), nullable=False),
    Column("ablation_id", String(30), nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    PrimaryKeyConstraint("token_id", "key"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("spec_text", Text, nullable=False),  # YAML; its baseline is the incumbent
    Column("metric", String(64), nullable=False),
    Column("node_class", String(32), nullable=False),
    Column("opened_by", String(64), nullable=False),
    Column("token_id", String(30), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("closed_at", Double),
)

proposals = Table(
    "proposals",
    metadata,
    Column("session", String(63), ForeignKey("sessions.name"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("ablation_id", String(30), ForeignKey("ablations.id"), nullable=False),
    Column("level", Double, nullable=False),
    Column("outcome", String(16)),  # none before the verdict, and without one
    PrimaryKeyConstraint("session", "number"),
    UniqueConstraint("ablation_id"),
)

leaders = Table(
    "leaders",
    metadata,
    Column("duty", String(32), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("until", Double, nullable=False),
)
