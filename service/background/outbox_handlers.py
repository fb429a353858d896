"""Handlers of outbox rows about an ablation: look, verdict, report, webhook.

Each is idempotent, works outside any transaction, and is retried with growing pauses until it succeeds.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.looks import at_look
from ablate.experiments.analysis.noise.calibrate import aa_blocks_of
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import ProjectionUnfinished
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.view import AblationView
from ablate.service.background.notifications import Notifier
from ablate.service.background.webhooks import Webhook, content_of
from ablate.service.errors import LeaseLost
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.ablations import results
from ablate.service.store.ablations.ablations import get_whole
from ablate.service.store.access import notifications
from ablate.service.store.blocks import looks
from ablate.service.store.nodes import calibrations
from ablate.service.store.questions.circumstances import circumstances_of
from ablate.service.store.session import Store

log = logging.getLogger(__name__)

HOLD_S = 10.0
"""A row that killed its process lets others go first for so long."""
LAST_FIRST_EVERY = 4
"""One take in so many reverses the ranks."""
FIRST_RETRY_S = 1.0
LAST_RETRY_S = outbox.LONGEST_PAUSE_S

Ending = Callable[[Connection], None]
"""Stores the result of a handler, in the transaction that deletes the rows that asked for it."""


def nothing_to_store(_connection: Connection) -> None:
    """End a handler that has stored its result itself."""


class OutboxTaker:
    """Takes due rows from the outbox, all of one ablation at a time, and records how they ended."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._takes: Counter[OutboxKind] = Counter()

    def take_due(self, kinds: Sequence[OutboxKind], handle: Callable[[str, int], Ending]) -> bool:
        """Call `handle` with the key that is due first and its tries; return whether there was one.

        A handler that fails is tried again later. Passes LeaseLost on, and leaves the rows to the next leader.
        """
        self._takes[kinds[0]] += 1
        with self.store.read() as connection:
            last_first = self._takes[kinds[0]] % LAST_FIRST_EVERY == 0
            key = outbox.first_due(connection, kinds, last_first=last_first)
        if key is None:
            return False
        with self.store.write() as connection:
            rows = outbox.take(connection, kinds, key, hold_s=HOLD_S)
        ids, tries = [row.id for row in rows], max((row.tries for row in rows), default=0)
        try:
            ending = handle(key, tries)
        except LeaseLost:
            raise
        except ProjectionUnfinished as unfinished:
            log.info("%s of %s goes on later: %s", kinds[0], key, unfinished)
            with self.store.write() as connection:
                outbox.put_back(connection, ids)
        except Exception as error:  # the boundary of a handler: stored in the row, tried again later
            delay_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0**tries)
            log.warning("%s of %s failed, trying again in %.0f s: %s", kinds[0], key, delay_s, error)
            with self.store.write() as connection:
                outbox.retry(connection, ids, delay_s=delay_s, error=f"{type(error).__name__}: {error}")
        else:
            with self.store.write() as connection:
                ending(connection)
                outbox.done(connection, ids)
            log.info("%s of %s done", kinds[0], key)
        return True


class OutboxHandlers(OutboxTaker):
    """Handles looks, verdicts, reports and webhooks."""

    def __init__(self, store: Store, webhook: Webhook | None = None, notifier: Notifier | None = None) -> None:
        super().__init__(store)
        self._notifier = notifier
        self._webhook = webhook
        self._handlers: dict[OutboxKind, Callable[[str], None]] = {
            OutboxKind.LOOK: self._look,
            OutboxKind.JUDGE: self._judge,
            OutboxKind.REPORT: self._report,
            OutboxKind.HOOK: self._hook,
            OutboxKind.NOTIFY: self._notify,
        }

    def run_due(self, kind: OutboxKind) -> bool:
        """Handle the ablation that is due first for `kind`; return whether there was one."""

        def handle(ablation_id: str, _tries: int) -> Ending:
            self._handlers[kind](ablation_id)
            return nothing_to_store

        return self.take_due([kind], handle)

    def _look(self, ablation_id: str) -> None:
        """Decide whether the blocks beyond a look run, and store the decision."""
        with self.store.read() as connection:
            after = looks.look_due(connection, ablation_id)
            if after is None:
                return
            view = results.ablation_view(connection, ablation_id)
            spec = _spec_of(connection, ablation_id)
        self._store_aa_blocks(view, spec)
        with self.store.read() as connection:
            circumstances = _circumstances(connection, ablation_id, spec, view.receipts)
        schedule = spec.design.blocks.schedule
        number = schedule.index(after)
        decision = at_look(view.plan, spec, view.receipts, circumstances, number)
        with self.store.write() as connection:
            if decision.go_on:
                looks.go_on(connection, ablation_id, schedule[number + 1], after=after, reason=decision.reason)
            else:
                looks.stop(connection, ablation_id, after=after, reason=decision.reason)

    def _judge(self, ablation_id: str) -> None:
        with self.store.read() as connection:
            view = results.ablation_view(connection, ablation_id)
            spec = _spec_of(connection, ablation_id)
        receipts = view.receipts
        self._store_aa_blocks(view, spec)
        with self.store.read() as connection:
            circumstances = _circumstances(connection, ablation_id, spec, receipts)
        verdict = judge(view.plan, spec, receipts, circumstances)
        with self.store.write() as connection:
            results.store_verdict(connection, ablation_id, verdict)

    def _store_aa_blocks(self, view: AblationView, spec: AblationSpec) -> None:
        """Store the A/A blocks of an ablation, which count for its own verdict too."""
        with self.store.write() as connection:
            calibrations.store_aa_blocks(connection, view.ablation_id, aa_blocks_of(view.plan, spec, view.receipts))

    def _report(self, ablation_id: str) -> None:
        with self.store.read() as connection:
            view = results.ablation_view(connection, ablation_id)
        html = render(view)
        with self.store.write() as connection:
            results.store_report(connection, ablation_id, html)
            notifications.ask(connection, ablation_id)
            if self._webhook is not None:
                outbox.add(connection, OutboxKind.HOOK, ablation_id)

    def _hook(self, ablation_id: str) -> None:
        """Send a webhook; without one in the settings do nothing."""
        if self._webhook is None:
            return
        with self.store.read() as connection:
            row = get_whole(connection, ablation_id)
        verdict = None if row.verdict is None else Verdict.model_validate_json(row.verdict)
        self._webhook.send(
            f"msg_{row.id}", content_of(row.id, row.name, row.state, verdict, base=self._webhook.links_base)
        )

    def _notify(self, notice_id: str) -> None:
        """Send a notice; without a notifier do nothing."""
        if self._notifier is not None:
            self._notifier.send(notice_id)


def _spec_of(connection: Connection, ablation_id: str) -> AblationSpec:
    body = results.read_spec(connection, ablation_id)
    return parse_spec(body.content, body.content_type)


def _circumstances(
    connection: Connection, ablation_id: str, spec: AblationSpec, receipts: Sequence[Receipt]
) -> Circumstances:
    """Return the circumstances that a verdict depends on, the noise of the receipts' nodes among them."""
    admission = calibrations.read_admission(connection, ablation_id, spec, receipts)
    return circumstances_of(connection, ablation_id).model_copy(update={"admission": admission})
