"""Read, list and cancel ablations, their blocks and trials. Pages continue after a key, never after a row number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    case,
    false,
    func,
    or_,
    select,
    tuple_,
)

from ablate.experiments.outcomes import AblationState, BlockState, Outcome, TrialState
from ablate.service.errors import AblationOver, NotFound
from ablate.service.lifecycle import OVER
from ablate.service.store.blocks.attempts import WITHOUT_RESULT
from ablate.service.store.blocks.completion import cancel_blocks, complete_if_done, lock_waiting
from ablate.service.store.blocks.transitions import Transitions, lock_ablation
from ablate.service.store.nodes.nodes import runs_now
from ablate.service.store.tables import ablations, attempts, blocks, events, labels, nodes, receipts, trials


def last_event(connection: Connection, ablation_id: str | None = None) -> int:
    """Return the sequence number of the last event of an ablation, or of all; 0 before the first."""
    query = select(func.max(events.c.seq))
    if ablation_id is not None:
        query = query.where(events.c.ablation_id == ablation_id)
    return int(connection.scalar(query) or 0)


def events_after(connection: Connection, ablation_id: str, seq: int, *, limit: int) -> list[Row[Any]]:
    """Return up to `limit` events of an ablation with a sequence number above `seq`, oldest first.

    Each has the `block_index` and the `arm` of its subject, or None. Ids of different tables are never equal.
    """
    query = (
        select(events, _EVENT_BLOCK, _EVENT_ARM)
        .outerjoin(trials, trials.c.id == events.c.subject)
        .outerjoin(attempts, attempts.c.id == events.c.subject)
        .outerjoin(blocks, blocks.c.id == func.coalesce(attempts.c.block_id, events.c.subject))
        .where(events.c.ablation_id == ablation_id, events.c.seq > seq)
    )
    return list(connection.execute(query.order_by(events.c.seq).limit(limit)))


_EVENT_BLOCK = func.coalesce(trials.c.block_index, blocks.c["index"]).label("block_index")
_EVENT_ARM = func.coalesce(trials.c.arm, attempts.c.arm).label("arm")


def ending(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation's state, whether it has a verdict (`judged`), and when it ended (`finished_at`)."""
    query = select(ablations.c.state, ablations.c.verdict.is_not(None).label("judged"), ablations.c.finished_at)
    return connection.execute(query.where(ablations.c.id == ablation_id)).one()


_BULKY = {"spec_text", "plan", "verdict", "report_html"}
_PUBLIC = [column for column in ablations.c if column.name not in _BULKY]


def get_ablation(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation without its bulky columns. Raises NotFound."""
    return _get(connection, ablation_id, *_PUBLIC)


def get_document(connection: Connection, ablation_id: str, column: str) -> Row[Any]:
    """Return one bulky column of an ablation as `document`, with its `state`. Raises NotFound."""
    return _get(connection, ablation_id, ablations.c.state, ablations.c[column].label("document"))


def get_whole(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation with every column. Raises NotFound."""
    return _get(connection, ablation_id, *ablations.c)


def check_exists(connection: Connection, ablation_id: str) -> None:
    """Raise NotFound unless the ablation exists."""
    _get(connection, ablation_id, ablations.c.id)


def _get(connection: Connection, ablation_id: str, *columns: ColumnElement[Any]) -> Row[Any]:
    row = connection.execute(select(*columns).where(ablations.c.id == ablation_id)).first()
    if row is None:
        raise NotFound(f"there is no ablation {ablation_id!r}")
    return row


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The filters of a list of ablations; None and nothing filter nothing."""

    states: Sequence[str] = ()
    label: tuple[str, str | None] | None = None
    """Key and value; None for any value."""
    digest: str | None = None
    """Of the spec or of its rule."""
    name: str | None = None
    owner: str | None = None
    """Name of the token that submitted or imported it."""
    words: str = ""
    """Each is in its name, its question, its answer or its note, in any order and case."""
    answer: str = ""
    """A word of its answer, such as better."""


def list_ablations(connection: Connection, wanted: Wanted, *, before: str | None, limit: int) -> list[Row[Any]]:
    """Return up to `limit` ablations older than the id `before`, newest first."""
    query: Select[Any] = select(*_PUBLIC).order_by(ablations.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(ablations.c.id < before)
    if wanted.states:
        query = query.where(ablations.c.state.in_(wanted.states))
    if wanted.digest is not None:
        query = query.where((ablations.c.spec_digest == wanted.digest) | (ablations.c.rule_digest == wanted.digest))
    if wanted.name is not None:
        query = query.where(ablations.c.name == wanted.name)
    if wanted.owner is not None:
        query = query.where(ablations.c.submitted_by == wanted.owner)
    texts = (ablations.c.name, ablations.c.question, func.coalesce(ablations.c.answer, ""))
    for word in wanted.words.split():
        noted = select(labels.c.ablation_id).where(labels.c.value.icontains(word, autoescape=True))
        within = [text.icontains(word, autoescape=True) for text in texts]
        query = query.where(or_(*within, ablations.c.id.in_(noted)))
    if wanted.answer:
        query = query.where(ablations.c.answer.contains(f" {wanted.answer}", autoescape=True))
    if wanted.label is not None:
        key, value = wanted.label
        having = select(labels.c.ablation_id).where(labels.c.key == key)
        query = query.where(ablations.c.id.in_(having if value is None else having.where(labels.c.value == value)))
    return list(connection.execute(query))


def spec_texts(connection: Connection, ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return text and content type of the specs of several ablations."""
    query = select(ablations.c.id, ablations.c.spec_text, ablations.c.content_type).where(ablations.c.id.in_(ids))
    return {row.id: (row.spec_text, row.content_type) for row in connection.execute(query)}


def labels_of(connection: Connection, ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the labels of several ablations."""
    by_id: dict[str, dict[str, str]] = {ablation_id: {} for ablation_id in ids}
    for row in connection.execute(select(labels).where(labels.c.ablation_id.in_(ids)).order_by(labels.c.key)):
        by_id[row.ablation_id][row.key] = row.value
    return by_id


def list_blocks(connection: Connection, after: tuple[int], limit: int, *, ablation_id: str) -> list[Row[Any]]:
    """Return up to `limit` blocks after (index,), in order. Raises NotFound."""
    check_exists(connection, ablation_id)
    index = blocks.c["index"]
    query = select(blocks).where(blocks.c.ablation_id == ablation_id, index > after[0], index <= after[0] + limit)
    return list(connection.execute(query.order_by(index)))


# In a column SQLite evaluates both sides of AND, so without CASE it would search the block of every trial.
_RUNS_NOW = case((trials.c.state == TrialState.RUNNING, runs_now()), else_=false()).label("runs_now")
_NEWEST_BREAK = (
    select(attempts.c.message)
    .where(attempts.c.block_id == blocks.c.id, attempts.c.message.is_not(None))
    .order_by(attempts.c.number.desc())
    .limit(1)
    .scalar_subquery()
)
_RUNS_AGAIN = blocks.c.state.in_([BlockState.QUEUED, BlockState.RUNNING]) & (blocks.c.attempt_no > 0)
_BROKE = case((_RUNS_AGAIN, _NEWEST_BREAK)).label("broke")


def list_trials(connection: Connection, after: tuple[int, int], limit: int, *, ablation_id: str) -> list[Row[Any]]:
    """Return up to `limit` trials after (block index, position), in running order, with reasons for missing results.

    The range of block indices keeps the query small, even if the database has no statistics of its tables. Raises
    NotFound.
    """
    planned = _get(connection, ablation_id, ablations.c.trials_planned, ablations.c.blocks_planned)
    arms = max(1, planned.trials_planned // planned.blocks_planned)
    place = (trials.c.block_index, trials.c.position)
    of_page = (tuple_(*place) > after, trials.c.block_index <= after[0] + 1 + limit // arms)
    query = (
        select(trials, receipts.c.payload.label("unmeasured"), blocks.c.message.label("block_message"), _RUNS_NOW)
        .add_columns(nodes.c.name.label("node"), _BROKE)
        .join(blocks, blocks.c.id == trials.c.block_id)
        .outerjoin(nodes, nodes.c.id == blocks.c.node_id)
        .outerjoin(receipts, and_(receipts.c.trial_id == trials.c.id, trials.c.outcome != Outcome.MEASURED))
        .where(trials.c.ablation_id == ablation_id, *of_page)
    )
    return list(connection.execute(query.order_by(*place).limit(limit)))


def grid_trials(connection: Connection, ablation_id: str, first: int, num_blocks: int) -> Sequence[Row[Any]]:
    """Return the trials of `num_blocks` blocks from index `first`, in any order, with the columns that a grid shows."""
    query = (
        select(trials.c.arm, trials.c.block_index, trials.c.state, trials.c.outcome, _RUNS_NOW)
        .add_columns(blocks.c.state.label("block_state"))
        .join(blocks, blocks.c.id == trials.c.block_id)
        .where(trials.c.ablation_id == ablation_id)
        .where(trials.c.block_index >= first, trials.c.block_index < first + num_blocks)
    )
    return connection.execute(query).all()


_TRIALS_OF_BLOCKS = blocks.join(trials, trials.c.block_id == blocks.c.id)


def _is_break(ablation_id: str) -> tuple[ColumnElement[bool], ...]:
    return attempts.c.ablation_id == ablation_id, attempts.c.state.in_(WITHOUT_RESULT)


def _is_unmeasured(ablation_id: str) -> tuple[ColumnElement[bool], ...]:
    """Return conditions on trials without a measurement; only done blocks have them, which spares the other trials."""
    is_done = (blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.DONE)
    return *is_done, trials.c.outcome != Outcome.MEASURED


def newest_breaks(connection: Connection, ablation_id: str, *, limit: int) -> Sequence[Row[Any]]:
    """Return the newest attempts without a result, with their `block_index` and the name of their `node`."""
    query = select(attempts, blocks.c["index"].label("block_index"), nodes.c.name.label("node")).select_from(attempts)
    query = query.join(blocks, blocks.c.id == attempts.c.block_id).join(nodes, nodes.c.id == attempts.c.node_id)
    newest = query.where(*_is_break(ablation_id)).order_by(attempts.c.started_at.desc())
    return connection.execute(newest.limit(limit)).all()


def newest_unmeasured(connection: Connection, ablation_id: str, *, limit: int) -> Sequence[Row[Any]]:
    """Return the newest trials whose receipts have no measurement, with the receipt's payload and attempt."""
    query = (
        select(trials.c.id, trials.c.arm, trials.c.outcome, trials.c.block_index)
        .add_columns(receipts.c.payload, receipts.c.attempt_id, attempts.c.number.label("attempt_number"))
        .select_from(_TRIALS_OF_BLOCKS)
        .join(receipts, receipts.c.trial_id == trials.c.id)
        .join(attempts, attempts.c.id == receipts.c.attempt_id)
        .where(*_is_unmeasured(ablation_id))
    )
    newest = query.order_by(blocks.c["index"].desc(), trials.c.position.desc())
    return connection.execute(newest.limit(limit)).all()


def count_breaks(connection: Connection, ablation_id: str) -> int:
    """Return the number of attempts without a result."""
    return int(connection.scalar(select(func.count()).select_from(attempts).where(*_is_break(ablation_id))) or 0)


def count_unmeasured(connection: Connection, ablation_id: str) -> int:
    """Return the number of trials without a measurement. Reads every trial that is done."""
    query = select(func.count()).select_from(_TRIALS_OF_BLOCKS).where(*_is_unmeasured(ablation_id))
    return int(connection.scalar(query) or 0)


def get_receipt(connection: Connection, trial_id: str) -> Row[Any]:
    """Return the trial's state, and payload and digest of its receipt, None before it is done. Raises NotFound."""
    query: Select[Any] = select(trials.c.state, receipts.c.payload, receipts.c.digest).outerjoin(
        receipts, receipts.c.trial_id == trials.c.id
    )
    row = connection.execute(query.where(trials.c.id == trial_id)).first()
    if row is None:
        raise NotFound(f"there is no trial {trial_id!r}")
    return row


def count_by_state(connection: Connection, table: Table) -> dict[str, int]:
    """Return the number of rows of `table` in each state."""
    query = select(table.c.state, func.count()).group_by(table.c.state)
    return {row[0]: row[1] for row in connection.execute(query)}


def cancel(connection: Connection, ablation_id: str, *, actor: str) -> None:
    """Cancel an ablation: waiting blocks at once, running ones through their workers. A second call changes nothing.

    Blocks are locked before their ablation. A block that came back to the queue in between is cancelled too, unless
    another transaction holds it, which then sees the cancellation. Raises NotFound, and AblationOver if the ablation
    is over.
    """
    waiting = lock_waiting(connection, ablation_id, wait=True)
    row = get_ablation(connection, ablation_id)
    state = lock_ablation(connection, ablation_id)
    if state == AblationState.CANCELLING:
        return
    if state in OVER:
        raise AblationOver(f"ablation {row.id} is {state}; nothing is left to cancel")
    by_id = {row.id: row for row in [*waiting, *lock_waiting(connection, ablation_id, wait=False)]}
    transitions = Transitions(connection, ablation_id, actor=actor, locked=state)
    transitions.move([ablation_id], state, AblationState.CANCELLING, reason="cancel was asked for")
    cancel_blocks(connection, transitions, ablation_id, [*by_id.values()], reason="the ablation is being cancelled")
    transitions.flush()
    complete_if_done(connection, ablation_id)
