"""The nights of a watched branch, as the service knows them, and their answers.

A night is an ablation with the new commit as its baseline, and the last accepted commit and a pinned one as variants: a
variant that is *better* shows that the new commit is worse. Then a second ablation asks the same of these variants
again. Only its *better* confirms.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from ablate.experiments.design.load import load_values
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.ids import COMMIT_LABEL, NIGHTLY_LABEL
from ablate.experiments.outcomes import BASELINE, AblationState, VerdictWord
from ablate.service.cli.follow import follow_to_end, run_spec
from ablate.service.client.api import Client
from ablate.service.lifecycle import OVER
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.schemas.submissions import SpecBody

ACCEPTED, PINNED = "accepted", "pinned"
"""Variants of a night."""
CONFIRMS = "nightly.confirms"
"""Label of a second ablation: the id of the first."""
_COMPARED = (VerdictWord.BETTER, VerdictWord.SAME, VerdictWord.WORSE, VerdictWord.INCONCLUSIVE)


class NightWord(StrEnum):
    """What a night says about its commit."""

    ACCEPTED = "accepted"
    WORSE = "worse"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, kw_only=True)
class NightAnswer:
    """What a night says, and why."""

    word: NightWord
    variants: tuple[VariantVerdict, ...]
    """Where the commit is worse: those that the second ablation confirms. Otherwise all of the first."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Night:
    """The first ablation of a commit, and the second one if there is one that was not cancelled and did not fail."""

    first: AblationPublic
    second: AblationPublic | None

    @property
    def commit(self) -> str:
        """Name of the new commit."""
        return self.first.labels[f"{COMMIT_LABEL}{BASELINE}"]

    def other(self, arm: str) -> str:
        """Return the commit of a variant; an empty text without one."""
        return self.first.labels.get(f"{COMMIT_LABEL}{arm}", "")


def answer_of(first: Verdict, second: Verdict | None) -> NightAnswer | None:
    """Return what a night says; None while a second ablation is needed."""
    last = first if second is None or not better_arms(first) else second
    if better := better_arms(last):
        reason = "two independent ablations prove it"
        return None if last is first else NightAnswer(word=NightWord.WORSE, variants=better, reason=reason)
    if not any(map(_is_compared, last.variants)):
        reason = "; ".join(dict.fromkeys(one.no_baseline or one.reason for one in last.variants))
        return NightAnswer(word=NightWord.UNANSWERED, variants=last.variants, reason=reason)
    unconfirmed = "one ablation says that it is worse, and a second one does not confirm it"
    reason = "not proved to be worse" if last is first else unconfirmed
    return NightAnswer(word=NightWord.ACCEPTED, variants=first.variants, reason=reason)


@dataclass(frozen=True, kw_only=True)
class NightChange:
    """The new commit's change against an earlier one, in percent, with its interval."""

    change_pct: float
    low_pct: float
    high_pct: float


def change_of(variant: VariantVerdict) -> NightChange | None:
    """Return the change of the new commit against a variant; None without numbers."""
    if variant.primary is not None:
        one = variant.primary
        values = [one.delta_pct, one.ci_low_pct, one.ci_high_pct]
    else:
        pairs = () if variant.exact is None else variant.exact.seeds
        own = [pair.change_pct for pair in pairs if pair.change_pct is not None]
        if not own:
            return None
        values = [sum(own) / len(own), min(own), max(own)]
    if min(values) <= -100:
        return None
    change, high, low = (100 / (1 + value / 100) - 100 for value in values)
    return NightChange(change_pct=change, low_pct=low, high_pct=high)


def better_arms(verdict: Verdict) -> tuple[VariantVerdict, ...]:
    """Return the earlier commits that are proved to be better."""
    return tuple(one for one in verdict.variants if one.verdict is VerdictWord.BETTER)


def _is_compared(variant: VariantVerdict) -> bool:
    return variant.verdict in _COMPARED and variant.cause not in (Cause.MISSING, Cause.UNCALIBRATED)


@dataclass(frozen=True, kw_only=True)
class WatchedBranch:
    """A watched branch: its ablations at the beginning of a call, and what the call adds."""

    client: Client
    label: str
    rows: tuple[AblationPublic, ...]
    """Newest first."""
    as_json: bool

    @classmethod
    def read(cls, client: Client, label: str, *, as_json: bool) -> "WatchedBranch":
        """Read the ablations of a watch."""
        rows = tuple(client.ablations.list(label=f"{NIGHTLY_LABEL}={label}"))
        return cls(client=client, label=label, rows=rows, as_json=as_json)

    def nights(self) -> Iterator[Night]:
        """Yield the nights that have or will have a verdict, newest first."""
        useful = [row for row in self.rows if row.state not in (AblationState.FAILED, AblationState.CANCELLED)]
        seconds = {row.labels[CONFIRMS]: row for row in reversed(useful) if CONFIRMS in row.labels}
        yield from (Night(first=row, second=seconds.get(row.id)) for row in useful if CONFIRMS not in row.labels)

    def known_answer(self, night: Night) -> NightAnswer | None:
        """Return the answer of a night whose ablations are over; None if it still needs one."""
        if not all(one.state in OVER for one in (night.first, night.second) if one is not None):
            return None
        return answer_of(self.verdict_of(night.first), None if night.second is None else self.verdict_of(night.second))

    def word_of(self, night: Night) -> NightWord | None:
        """Return what a night says, if it says anything yet."""
        answer = self.known_answer(night)
        return None if answer is None else answer.word

    def page(self, night: Night) -> str:
        """Return the address of the last ablation of a night."""
        return f"{self.client.url.rstrip('/')}/a/{(night.second or night.first).id}"

    def asked(self, body: SpecBody, commit: str) -> Night:
        """Submit the first ablation of a commit, or find the one that another call submitted; follow it to its end."""
        earlier = [
            row for row in self.rows if CONFIRMS not in row.labels and Night(first=row, second=None).commit == commit
        ]
        return Night(first=self._ran(body, len(earlier)), second=None)

    def finished(self, night: Night, *, suspect: Callable[[], None]) -> tuple[Night, NightAnswer]:
        """Follow the ablations of a night to their end, and return the answer.

        Where a second one is needed, `suspect` is called before its submission. Exits with 5 if one fails.
        """
        first = self.verdict_of(night.first)
        if (answer := answer_of(first, None)) is not None:
            return night, answer
        second = night.second
        if second is None:
            suspect()
            earlier = [row for row in self.rows if row.labels.get(CONFIRMS) == night.first.id]
            second = self._ran(_second(self.client, night.first, better_arms(first)), len(earlier))
        answer = answer_of(first, self.verdict_of(second))
        if answer is None:
            raise AssertionError("two verdicts are an answer")
        return Night(first=night.first, second=second), answer

    def _ran(self, body: SpecBody, earlier: int) -> AblationPublic:
        """Run an ablation; after each earlier one without an answer the key is another one."""
        key = f"nightly-{hashlib.sha256(body.content).hexdigest()[:32]}-{earlier}"
        ablation, _verdict = run_spec(body, idempotency_key=key, as_json=self.as_json)
        return self.client.ablations.get(ablation)

    def verdict_of(self, row: AblationPublic) -> Verdict:
        """Return the verdict of an ablation, after its end."""
        if row.state not in OVER:
            return follow_to_end(self.client, row.id, as_json=self.as_json)
        self.client.ablations.wait(row.id)
        return self.client.ablations.verdict(row.id)


def _second(client: Client, first: AblationPublic, variants: tuple[VariantVerdict, ...]) -> SpecBody:
    """Return the same question of these variants, in another running order and with new seeds."""
    body = client.ablations.spec(first.id)
    values: dict[str, Any] = load_values(body.content, body.content_type)
    design: Mapping[str, Any] = values["design"]
    own = {
        "ablation": f"{first.name}-again",
        "variants": {one.arm: values["variants"][one.arm] for one in variants},
        "design": {**design, "order_seed": design.get("order_seed", 0) + 1},
        "labels": {**values["labels"], CONFIRMS: first.id},
    }
    return SpecBody(content=spec_yaml({**values, **own}))
