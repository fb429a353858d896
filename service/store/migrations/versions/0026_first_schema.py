"""The first schema: all tables."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ablations",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("spec_text", sa.Text(), nullable=False),
        sa.Column("content_type", sa.String(length=64), nullable=False),
        sa.Column("spec_digest", sa.String(length=71), nullable=False),
        sa.Column("rule_digest", sa.String(length=71), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("trial_timeout_s", sa.Double(), nullable=False),
        sa.Column("device_minutes", sa.Double(), nullable=False),
        sa.Column("device_s", sa.Double(), nullable=False),
        sa.Column("settled_s", sa.Double(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.Column("submitted_by", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("blocks_planned", sa.Integer(), nullable=False),
        sa.Column("blocks_held", sa.Integer(), nullable=False),
        sa.Column("blocks_queued", sa.Integer(), nullable=False),
        sa.Column("blocks_running", sa.Integer(), nullable=False),
        sa.Column("blocks_done", sa.Integer(), nullable=False),
        sa.Column("blocks_failed", sa.Integer(), nullable=False),
        sa.Column("blocks_cancelled", sa.Integer(), nullable=False),
        sa.Column("trials_planned", sa.Integer(), nullable=False),
        sa.Column("trials_done", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("report_html", sa.Text(), nullable=True),
        sa.Column("mlflow_experiment_id", sa.String(length=64), nullable=True),
        sa.Column("mlflow_run_id", sa.String(length=64), nullable=True),
        sa.Column("bundles", sa.Text(), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("logs_dropped_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ablations")),
    )
    op.create_index(
        "ix_ablations_logged",
        "ablations",
        ["finished_at"],
        unique=False,
        sqlite_where=sa.text("logs_dropped_at IS NULL"),
        postgresql_where=sa.text("logs_dropped_at IS NULL"),
    )
    op.create_index(
        "ix_ablations_name_id", "ablations", ["name", "id"], unique=False, postgresql_ops={"name": "text_pattern_ops"}
    )
    op.create_index(
        "ix_ablations_queue",
        "ablations",
        ["node_class", sa.literal_column("priority DESC"), "turn", "id", "blocks_queued"],
        unique=False,
        sqlite_where=sa.text("blocks_queued > 0"),
        postgresql_where=sa.text("blocks_queued > 0"),
    )
    op.create_index(op.f("ix_ablations_spec_digest"), "ablations", ["spec_digest"], unique=False)
    op.create_index("ix_ablations_state_id", "ablations", ["state", "id"], unique=False)
    op.create_index("ix_ablations_submitted_by_id", "ablations", ["submitted_by", "id"], unique=False)
    op.create_index(op.f("ix_ablations_token_id"), "ablations", ["token_id"], unique=False)
    op.create_table(
        "code_archives",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sent_by", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_code_archives")),
    )
    op.create_index(op.f("ix_code_archives_used_at"), "code_archives", ["used_at"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_digest", sa.String(length=71), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "leaders",
        sa.Column("duty", sa.String(length=32), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("duty", name=op.f("pk_leaders")),
    )
    op.create_table(
        "node_keys",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("node", sa.String(length=120), nullable=False),
        sa.Column("trusted_by", sa.String(length=64), nullable=False),
        sa.Column("trusted_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key", "node", name=op.f("pk_node_keys")),
    )
    op.create_index(op.f("ix_node_keys_node"), "node_keys", ["node"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("registration", sa.Text(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("quarantined_reason", sa.Text(), nullable=True),
        sa.Column("stopped_by", sa.String(length=64), nullable=True),
        sa.Column("stopped_at", sa.Double(), nullable=True),
        sa.Column("resumed_at", sa.Double(), nullable=False),
        sa.Column("lanes", sa.Text(), nullable=True),
        sa.Column("failed_back_ends", sa.Text(), nullable=True),
        sa.Column("num_devices", sa.Integer(), nullable=False),
        sa.Column("probe_at", sa.Double(), nullable=True),
        sa.Column("probe_began_at", sa.Double(), nullable=True),
        sa.Column("probes", sa.Integer(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=True),
        sa.Column("allocation", sa.String(length=120), nullable=True),
        sa.Column("left_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("name", name=op.f("uq_nodes_name")),
    )
    op.create_index(op.f("ix_nodes_node_class"), "nodes", ["node_class"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("key", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("rank", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_outbox_kind_rank_due_at", "outbox", ["kind", "rank", "due_at"], unique=False)
    op.create_table(
        "registered_plans",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("sent_digest", sa.String(length=71), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("seeds", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("registered_by", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("ablation_id", name=op.f("pk_registered_plans")),
    )
    op.create_table(
        "sessions",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("spec_text", sa.Text(), nullable=False),
        sa.Column("metric", sa.String(length=64), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("opened_by", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_sessions")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("name", sa.String(length=130), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("node", sa.String(length=120), nullable=True),
        sa.Column("node_class", sa.String(length=32), nullable=True),
        sa.Column("device_minutes", sa.Double(), nullable=True),
        sa.Column("uses_left", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_index(
        "uq_tokens_live_name",
        "tokens",
        ["name"],
        unique=True,
        sqlite_where=sa.text("revoked_at IS NULL"),
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "turns",
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("node_class", "priority", name=op.f("pk_turns")),
    )
    op.create_table(
        "aa_blocks",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("block_index", sa.Integer(), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("workload", sa.String(length=71), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_aa_blocks_ablation_id")),
        sa.PrimaryKeyConstraint("ablation_id", "block_index", name=op.f("pk_aa_blocks")),
    )
    op.create_index(op.f("ix_aa_blocks_node_class"), "aa_blocks", ["node_class"], unique=False)
    op.create_index(op.f("ix_aa_blocks_workload"), "aa_blocks", ["workload"], unique=False)
    op.create_table(
        "blocks",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("order", sa.Text(), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("lanes", sa.String(length=64), nullable=False),
        sa.Column("back_ends", sa.Text(), nullable=False),
        sa.Column("num_devices", sa.Integer(), nullable=False),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.String(length=30), nullable=True),
        sa.Column("node_id", sa.String(length=30), nullable=True),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("limit_at", sa.Double(), nullable=True),
        sa.Column("avoid_node_id", sa.String(length=30), nullable=True),
        sa.Column("avoid_until", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_blocks_ablation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blocks")),
        sa.UniqueConstraint("ablation_id", "index", name=op.f("uq_blocks_ablation_id_index")),
    )
    op.create_index(
        "ix_blocks_holders",
        "blocks",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_blocks_leases",
        "blocks",
        ["lease_until"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_blocks_queued",
        "blocks",
        ["ablation_id", "index"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_table(
        "code_owners",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("shared_by", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["digest"], ["code_archives.digest"], name=op.f("fk_code_owners_digest")),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_code_owners_token_id")),
        sa.PrimaryKeyConstraint("digest", "token_id", name=op.f("pk_code_owners")),
    )
    op.create_table(
        "code_pieces",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["code_archives.digest"], name=op.f("fk_code_pieces_digest")),
        sa.PrimaryKeyConstraint("digest", "number", name=op.f("pk_code_pieces")),
    )
    op.create_table(
        "code_uses",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_code_uses_ablation_id")),
        sa.PrimaryKeyConstraint("ablation_id", "digest", name=op.f("pk_code_uses")),
    )
    op.create_index(op.f("ix_code_uses_digest"), "code_uses", ["digest"], unique=False)
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=30), nullable=False),
        sa.Column("old", sa.String(length=16), nullable=True),
        sa.Column("new", sa.String(length=16), nullable=True),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_events_ablation_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_ablation_id_seq", "events", ["ablation_id", "seq"], unique=False)
    op.create_index(
        "ix_events_progress",
        "events",
        ["subject"],
        unique=False,
        sqlite_where=sa.text("kind = 'trial.progress'"),
        postgresql_where=sa.text("kind = 'trial.progress'"),
    )
    op.create_table(
        "labels",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_labels_ablation_id")),
        sa.PrimaryKeyConstraint("ablation_id", "key", name=op.f("pk_labels")),
    )
    op.create_index("ix_labels_key_value", "labels", ["key", "value", "ablation_id"], unique=False)
    op.create_table(
        "notices",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("notification_id", sa.String(length=30), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_notices_ablation_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
        sa.UniqueConstraint("notification_id", "ablation_id", name=op.f("uq_notices_notification_id_ablation_id")),
    )
    op.create_table(
        "notifications",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_notifications_token_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notifications")),
    )
    op.create_index(op.f("ix_notifications_token_id"), "notifications", ["token_id"], unique=False)
    op.create_table(
        "proposals",
        sa.Column("session", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_proposals_ablation_id")),
        sa.ForeignKeyConstraint(["session"], ["sessions.name"], name=op.f("fk_proposals_session")),
        sa.PrimaryKeyConstraint("session", "number", name=op.f("pk_proposals")),
        sa.UniqueConstraint("ablation_id", name=op.f("uq_proposals_ablation_id")),
    )
    op.create_table(
        "questions",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("arm", sa.String(length=120), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_questions_ablation_id")),
        sa.PrimaryKeyConstraint("ablation_id", "arm", name=op.f("pk_questions")),
    )
    op.create_index(op.f("ix_questions_digest"), "questions", ["digest"], unique=False)
    op.create_table(
        "registered_questions",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("arm", sa.String(length=120), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(
            ["ablation_id"], ["registered_plans.ablation_id"], name=op.f("fk_registered_questions_ablation_id")
        ),
        sa.PrimaryKeyConstraint("ablation_id", "arm", name=op.f("pk_registered_questions")),
    )
    op.create_index(op.f("ix_registered_questions_digest"), "registered_questions", ["digest"], unique=False)
    op.create_table(
        "share_links",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("uses", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_share_links_ablation_id")),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_share_links_token_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_share_links")),
        sa.UniqueConstraint("digest", name=op.f("uq_share_links_digest")),
    )
    op.create_index(op.f("ix_share_links_ablation_id"), "share_links", ["ablation_id"], unique=False)
    op.create_table(
        "token_secrets",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_token_secrets_token_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_token_secrets")),
    )
    op.create_index(op.f("ix_token_secrets_token_id"), "token_secrets", ["token_id"], unique=False)
    op.create_table(
        "web_sessions",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("secret_digest", sa.String(length=71), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_web_sessions_token_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_web_sessions")),
    )
    op.create_index(op.f("ix_web_sessions_token_id"), "web_sessions", ["token_id"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("block_id", sa.String(length=30), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=True),
        sa.Column("token", sa.String(length=22), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(length=30), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("failure_class", sa.String(length=32), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("report_digest", sa.String(length=71), nullable=True),
        sa.Column("arm", sa.String(length=120), nullable=True),
        sa.Column("signed_by", sa.String(length=51), nullable=True),
        sa.Column("signature", sa.String(length=86), nullable=True),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name=op.f("fk_attempts_block_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_attempts_node_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
    )
    op.create_index("ix_attempts_ablation_id_state", "attempts", ["ablation_id", "state"], unique=False)
    op.create_index(op.f("ix_attempts_block_id"), "attempts", ["block_id"], unique=False)
    op.create_index("ix_attempts_node_id_started_at", "attempts", ["node_id", "started_at"], unique=False)
    op.create_table(
        "trials",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("block_id", sa.String(length=30), nullable=False),
        sa.Column("block_index", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("arm", sa.String(length=120), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("steps_done", sa.Integer(), nullable=True),
        sa.Column("steps_total", sa.Integer(), nullable=True),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("over_at", sa.Double(), nullable=True),
        sa.Column("runs_since", sa.Double(), nullable=True),
        sa.Column("receipt_digest", sa.String(length=71), nullable=True),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_trials_ablation_id")),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name=op.f("fk_trials_block_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trials")),
        sa.UniqueConstraint(
            "ablation_id", "block_index", "position", name=op.f("uq_trials_ablation_id_block_index_position")
        ),
    )
    op.create_index(op.f("ix_trials_block_id"), "trials", ["block_id"], unique=False)
    op.create_table(
        "log_chunks",
        sa.Column("trial_id", sa.String(length=30), nullable=False),
        sa.Column("attempt_id", sa.String(length=30), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("end_offset", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_log_chunks_attempt_id")),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_log_chunks_trial_id")),
        sa.PrimaryKeyConstraint("trial_id", "attempt_id", "offset", name=op.f("pk_log_chunks")),
    )
    op.create_table(
        "receipts",
        sa.Column("trial_id", sa.String(length=30), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("attempt_id", sa.String(length=30), nullable=False),
        sa.Column("arm_digest", sa.String(length=71), nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_receipts_ablation_id")),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_receipts_attempt_id")),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_receipts_trial_id")),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_receipts")),
    )
    op.create_index(op.f("ix_receipts_ablation_id"), "receipts", ["ablation_id"], unique=False)
    op.create_index(op.f("ix_receipts_arm_digest"), "receipts", ["arm_digest"], unique=False)
