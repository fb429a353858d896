"""What a submission is told of the time to come: what it may cost, what it waits for. It may be a moment old.

Nothing is refused for it, and nothing of it is stored but the answer that was given.
"""

from experiments.design.plan import Plan
from service.http.kept_answers import KeptAnswers
from service.http.serializers import silent_limit_s
from service.queue.eligible_nodes import needs_of, takers_of
from service.queue.plan_cost import device_minutes
from service.settings import ServiceSettings
from service.store.ablations.ablations import mean_trial_s
from service.store.nodes.placement import Needs
from service.store.session import Store

_MOST = 1024
"""Answers of each kind that are kept."""


class Outlook:
    """Looks for all submissions of a process, outside of their transactions."""

    def __init__(self, store: Store, settings: ServiceSettings) -> None:
        self._store = store
        self._silent_s = silent_limit_s(settings)
        fresh_s = settings.outlook_fresh_s
        self._trial_s = KeptAnswers[tuple[str, tuple[str, ...]], dict[str, float]](fresh_s=fresh_s, most=_MOST)
        self._waits_for = KeptAnswers[tuple[str, Needs], str | None](fresh_s=fresh_s, most=_MOST)

    def device_minutes(self, plan: Plan) -> float | None:
        """Return the device minutes that `plan` is expected to take; None where an arm never ran on its node class."""
        digests = tuple(arm.digest for arm in plan.arms)

        def look() -> dict[str, float]:
            with self._store.read() as connection:
                return mean_trial_s(connection, digests, plan.node_class)

        return device_minutes(plan, self._trial_s.get((plan.node_class, digests), look))

    def waits_for(self, plan: Plan) -> str | None:
        """Return what the blocks of `plan` wait for while no node may take them, else None."""
        needs = needs_of(plan)

        def look() -> str | None:
            with self._store.read() as connection:
                return takers_of(connection, plan.node_class, needs, silent_s=self._silent_s).waits_for

        return self._waits_for.get((plan.node_class, needs), look)
