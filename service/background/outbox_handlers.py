"""Handlers of the outbox rows that follow the blocks of an ablation: look, verdict, report, webhook.

Each is idempotent, is done outside any transaction, and is tried again with growing pauses until it succeeds.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from experiments.analysis.judge import judge
from experiments.analysis.looks import at_look
from experiments.analysis.noise.calibrate import aa_blocks_of
from experiments.analysis.verdicts import Verdict
from experiments.design.load import parse_spec
from experiments.design.spec import AblationSpec
from experiments.records.circumstances import Circumstances
from experiments.records.receipts import Receipt
from experiments.reporting.pages.report import render
from service.background.webhooks import Webhook, content_of
from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.ablations import results
from service.store.ablations.ablations import get_whole
from service.store.ablations.circumstances import circumstances_of
from service.store.blocks import looks
from service.store.nodes import calibrations
from service.store.session import Store

log = logging.getLogger(__name__)

HOLD_S = 30.0
"""A row whose taker died is due again after this long; a taker that lives renews it."""
LAST_FIRST_EVERY = 4
"""One row in so many is of the rank that otherwise comes last."""
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


def retry_delay_s(tries: int) -> float:
    """Return how long a row waits that failed after `tries` failures."""
    return min(LAST_RETRY_S, FIRST_RETRY_S * 2.0**tries)


class OutboxHandlers:
    """Takes due rows of one kind from the outbox and handles them."""

    def __init__(self, store: Store, webhook: Webhook | None = None) -> None:
        self._store = store
        self._webhook = webhook
        self._takes: Counter[OutboxKind] = Counter()
        self._in_hand: set[int] = set()
        self._handlers: dict[OutboxKind, Callable[[str], None]] = {
            OutboxKind.LOOK: self._look,
            OutboxKind.JUDGE: self._judge,
            OutboxKind.REPORT: self._report,
            OutboxKind.HOOK: self._hook,
        }

    def run_due(self, kind: OutboxKind) -> bool:
        """Handle one due row of `kind`; return whether there was one."""
        self._takes[kind] += 1
        last_first = self._takes[kind] % LAST_FIRST_EVERY == 0
        with self._store.write() as connection:
            taken = outbox.take(connection, kind, hold_s=HOLD_S, last_first=last_first)
        for row in taken:
            self._run(row)
        return bool(taken)

    def renew_holds(self) -> None:
        """Go on hiding the rows that are being handled; called from another thread while they are."""
        if held := list(self._in_hand):
            with self._store.write() as connection:
                outbox.hold(connection, held, hold_s=HOLD_S)

    def _run(self, row: outbox.OutboxRow) -> None:
        try:
            self._handle(row)
        except Exception as error:  # the boundary of a handler: recorded in the row, tried again later
            delay_s = retry_delay_s(row.tries)
            log.warning("%s of %s failed, trying again in %.0f s: %s", row.kind, row.key, delay_s, error)
            with self._store.write() as connection:
                outbox.retry(connection, [row.id], delay_s=delay_s, error=f"{type(error).__name__}: {error}")
            return
        with self._store.write() as connection:
            outbox.done(connection, [row.id])
        log.info("%s of %s done", row.kind, row.key)

    def _handle(self, row: outbox.OutboxRow) -> None:
        self._in_hand.add(row.id)
        try:
            self._handlers[row.kind](row.key)
        finally:
            self._in_hand.discard(row.id)

    def _look(self, ablation_id: str) -> None:
        """Decide whether the blocks beyond a look run, and let it happen."""
        with self._store.read() as connection:
            after = looks.look_due(connection, ablation_id)
            if after is None:
                return
            view = results.ablation_view(connection, ablation_id)
            spec = _spec_of(connection, ablation_id)
            circumstances = _circumstances(connection, ablation_id, spec, view.receipts)
        schedule = spec.design.blocks.schedule
        number = schedule.index(after)
        decision = at_look(view.plan, spec, view.receipts, circumstances, number)
        with self._store.write() as connection:
            if decision.go_on:
                looks.go_on(connection, ablation_id, schedule[number + 1], after=after, reason=decision.reason)
            else:
                looks.stop(connection, ablation_id, after=after, reason=decision.reason)

    def _judge(self, ablation_id: str) -> None:
        with self._store.read() as connection:
            view = results.ablation_view(connection, ablation_id)
            spec = _spec_of(connection, ablation_id)
        receipts = [trial.receipt for trial in view.trials if trial.receipt is not None]
        with self._store.write() as connection:
            calibrations.store_aa_blocks(connection, ablation_id, aa_blocks_of(view.plan, spec, receipts))
        with self._store.read() as connection:
            circumstances = _circumstances(connection, ablation_id, spec, receipts)
        verdict = judge(view.plan, spec, receipts, circumstances)
        with self._store.write() as connection:
            results.store_verdict(connection, ablation_id, verdict)

    def _report(self, ablation_id: str) -> None:
        with self._store.read() as connection:
            view = results.ablation_view(connection, ablation_id)
        html = render(view)
        with self._store.write() as connection:
            results.store_report(connection, ablation_id, html)
            if self._webhook is not None:
                outbox.add(connection, OutboxKind.HOOK, ablation_id)

    def _hook(self, ablation_id: str) -> None:
        """Send a webhook; a row that was asked for by other settings is forgotten."""
        if self._webhook is None:
            return
        with self._store.read() as connection:
            row = get_whole(connection, ablation_id)
        verdict = None if row.verdict is None else Verdict.model_validate_json(row.verdict)
        self._webhook.send(f"msg_{row.id}", content_of(row.id, row.name, row.state, verdict))


def _spec_of(connection: Connection, ablation_id: str) -> AblationSpec:
    body = results.read_spec(connection, ablation_id)
    return parse_spec(body.content, body.content_type)


def _circumstances(
    connection: Connection, ablation_id: str, spec: AblationSpec, receipts: Sequence[Receipt]
) -> Circumstances:
    """Return under which circumstances these receipts are judged, the noise of their nodes among them."""
    admission = calibrations.read_admission(connection, ablation_id, spec, receipts)
    return circumstances_of(connection, ablation_id).model_copy(update={"admission": admission})
