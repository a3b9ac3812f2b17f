"""The audit log, which the database itself keeps append-only, and the ids of tenants that were deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_GENESIS = "0" * 64

_SQLITE = (
    """CREATE TRIGGER audit_log_update BEFORE UPDATE ON audit_log
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER audit_log_delete BEFORE DELETE ON audit_log
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    # Also for INSERT OR REPLACE, which deletes without asking the trigger above.
    """CREATE TRIGGER audit_log_insert BEFORE INSERT ON audit_log
    WHEN NEW.seq IS NOT (SELECT seq + 1 FROM audit_head WHERE id = 1)
    BEGIN SELECT RAISE(ABORT, 'an audit row is not the next one'); END""",
    """CREATE TRIGGER audit_head_update BEFORE UPDATE ON audit_head
    WHEN NEW.id IS NOT OLD.id OR NEW.seq IS NOT OLD.seq + 1
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER audit_head_delete BEFORE DELETE ON audit_head
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER audit_head_insert BEFORE INSERT ON audit_head
    BEGIN SELECT RAISE(ABORT, 'the audit log has its head'); END""",
    """CREATE TRIGGER audit_texts_update BEFORE UPDATE ON audit_texts
    BEGIN SELECT RAISE(ABORT, 'texts of the audit log are not changed'); END""",
)
_POSTGRESQL = (
    """CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$""",
    """CREATE FUNCTION audit_log_next() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.seq IS DISTINCT FROM (SELECT seq + 1 FROM audit_head WHERE id = 1) THEN
            RAISE EXCEPTION 'an audit row is not the next one';
        END IF;
        RETURN NEW;
    END $$""",
    """CREATE FUNCTION audit_head_next() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.id IS DISTINCT FROM OLD.id OR NEW.seq IS DISTINCT FROM OLD.seq + 1 THEN
            RAISE EXCEPTION 'the audit log is append-only';
        END IF;
        RETURN NEW;
    END $$""",
    """CREATE TRIGGER audit_log_keep BEFORE UPDATE OR DELETE ON audit_log
    FOR EACH ROW EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_log_keep_all BEFORE TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_log_insert BEFORE INSERT ON audit_log
    FOR EACH ROW EXECUTE FUNCTION audit_log_next()""",
    """CREATE TRIGGER audit_head_update BEFORE UPDATE ON audit_head
    FOR EACH ROW EXECUTE FUNCTION audit_head_next()""",
    """CREATE TRIGGER audit_head_keep BEFORE INSERT OR DELETE ON audit_head
    FOR EACH ROW EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_head_keep_all BEFORE TRUNCATE ON audit_head
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()""",
    """CREATE TRIGGER audit_texts_update BEFORE UPDATE ON audit_texts
    FOR EACH ROW EXECUTE FUNCTION audit_refuse()""",
)


def upgrade() -> None:
    op.create_table(
        "deleted_tenants",
        sa.Column("id", sa.String(63), primary_key=True),
        sa.Column("deleted_at", _TIME, nullable=False),
    )
    op.create_table(
        "audit_log",
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("time", _TIME, nullable=False),
        sa.Column("actor", sa.String(8), nullable=False),
        sa.Column("actor_tenant_id", sa.String(63)),
        sa.Column("actor_key_id", sa.String(32)),
        sa.Column("source", sa.String(64)),
        sa.Column("request_id", sa.String(128)),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(63)),
        sa.Column("target", sa.String(400), nullable=False),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("code", sa.String(40)),
        sa.Column("before", sa.Text()),
        sa.Column("after", sa.Text()),
        sa.Column("previous_hash", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    op.create_index("ix_audit_log_time", "audit_log", ["time"])
    op.create_index("ix_audit_log_tenant_id", "audit_log", ["tenant_id"])
    op.create_table(
        "audit_texts",
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("place", sa.String(80), primary_key=True),
        sa.Column("tenant_id", sa.String(63)),
        sa.Column("salt", sa.String(32), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
    )
    op.create_index("ix_audit_texts_tenant_id", "audit_texts", ["tenant_id"])
    head = op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    op.bulk_insert(head, [{"id": 1, "seq": 0, "hash": _GENESIS}])
    for statement in _POSTGRESQL if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)


def downgrade() -> None:
    for table in ("audit_head", "audit_texts", "audit_log", "deleted_tenants"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        for function in ("audit_refuse", "audit_log_next", "audit_head_next"):
            op.execute(f"DROP FUNCTION {function}()")
