"""One call of `ablate nightly`: finish the last night, ask about a new commit, tell people of a confirmed loss."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich.markup import escape

from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.design.verdict_rule import METRIC
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import NIGHTLY_LABEL
from ablate.experiments.outcomes import BASELINE, ExitCode
from ablate.experiments.reporting import wording
from ablate.service.cli.commits import bisecting, notes
from ablate.service.cli.commits.branch import Branch, Remote, own_cache
from ablate.service.cli.commits.nights import (
    ACCEPTED,
    PINNED,
    Night,
    NightAnswer,
    NightChange,
    NightWord,
    WatchedBranch,
    change_of,
)
from ablate.service.cli.output import err, out, print_json_line
from ablate.service.client.api import Client
from ablate.service.lifecycle import OVER
from ablate.service.schemas.submissions import SpecBody

_AT_ONCE = 3
"""Commits that an ablation of a bisection compares."""
_MOST_TITLE = 150
_MOST_SHOWN = 60
"""Nights of a picture."""
_HEADLINES = {
    NightWord.ACCEPTED: "is accepted",
    NightWord.WORSE: "is worse",
    NightWord.UNANSWERED: "was not compared, so it is not accepted",
}
_CODES = {
    NightWord.ACCEPTED: ExitCode.DONE,
    NightWord.WORSE: ExitCode.REJECT,
    NightWord.UNANSWERED: ExitCode.INVALID,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command."""

    repo: str | None
    branch: str
    pin: str
    every: int
    receivers: tuple[str, ...]
    """Addresses."""
    bisect: bool


class NightlyAnswer(BaseModel):
    """The answer on a commit, for --json."""

    commit: str
    """Its whole name."""
    word: NightWord
    reason: str
    comparisons: list[str]
    """A line on each commit that it was compared with; of a worse one, on each where that is confirmed."""
    culprit: list[str]
    """Lines on the commits that may have made it worse."""
    ablations: list[str]
    unsent: list[str]
    """Receivers that did not take the message."""


def watch(spec: Path, options: Options, *, as_json: bool) -> ExitCode:
    """Run the command once. Raises SpecError, CodeArchiveError, ClientError."""
    values = _values_of(spec)
    receivers = {address: notes.receiver(address) for address in options.receivers}
    label = f"{values.get('ablation')}/{options.branch}"
    remote = Remote.of(options.repo, spec, values["workload"]["code"])
    with own_cache(label, remote.url) as cache, Client() as client:
        branch = Branch.fetched(cache, remote, options.branch)
        folder = spec.parent.resolve()
        values["workload"] = {**values["workload"], "code": os.path.relpath(branch.folder.resolve(), folder)}
        pinned = branch.commit(options.pin)
        if pinned is None:
            detail = f"{options.pin!r} is no commit in the history of the fetched branch, nor a tag of one"
            hint = "pin a commit that is; push the tag, if it is yours; a branch may have been rewritten"
            raise SpecError([SpecProblem(pointer="--pin", detail=detail, hint=hint)])
        return _NightlyCall(
            folder=folder,
            values=values,
            branch=branch,
            watch=WatchedBranch.read(client, label, as_json=as_json),
            pinned=pinned,
            receivers=receivers,
            bisects=options.bisect,
        ).run(options.every)


def _values_of(spec: Path) -> dict[str, Any]:
    """Return the values of the spec without variants and requirements. Raises SpecError for listed seeds."""
    values = bisecting.values_of(spec, "nightly compares commits of its baseline")
    if isinstance(values.get("verdict"), Mapping) and values["verdict"].get("require"):
        err().print("[dim]the spec's requirements do not count: the earlier commits are the variants[/]")
        values["verdict"] = {name: value for name, value in values["verdict"].items() if name != "require"}
    design = values.get("design")
    if isinstance(design, Mapping) and isinstance(design.get("seeds"), list):
        detail = "with listed seeds the second ablation would repeat the runs of the first"
        raise SpecError([SpecProblem(pointer="/design/seeds", detail=detail, hint=f"seeds: {len(design['seeds'])}")])
    return values


@dataclass(frozen=True, kw_only=True)
class _NightlyCall:
    folder: Path
    """Of the spec."""
    values: Mapping[str, Any]
    branch: Branch
    watch: WatchedBranch
    pinned: str
    receivers: Mapping[str, Any]
    """By address."""
    bisects: bool

    def run(self, every: int) -> ExitCode:
        """Finish the last night, ask about a new commit if there is one, and return the exit code."""
        nights = [night for night in self.watch.nights() if night.commit in self.branch.history]
        code, last, accepted = ExitCode.DONE, None, self.pinned
        if nights:
            code, word = self._settled(nights[0])
            last = None if word is NightWord.UNANSWERED else nights[0].commit
            earlier = (night.commit for night in nights[1:] if self.watch.word_of(night) is NightWord.ACCEPTED)
            latest = nights[0].commit if word is NightWord.ACCEPTED else next(earlier, self.pinned)
            accepted = latest if self.branch.repository.is_before(self.pinned, latest) else self.pinned
        why = self._nothing_new(accepted, last, every)
        if why is not None:
            err().print(escape(f"nothing new: {why}"))
            return code
        return self._finished(self.watch.asked(self._body(accepted), self.branch.head))[0]

    def _settled(self, night: Night) -> tuple[ExitCode, NightWord]:
        """Finish the last night; return the exit code for what this call did, and what the night says."""
        answer = self.watch.known_answer(night)
        if answer is None:
            return self._finished(night)
        unsent = self._sent(night, answer, self._range(night, answer)) if answer.word is NightWord.WORSE else []
        return ExitCode.ERROR if unsent else ExitCode.DONE, answer.word

    def _finished(self, night: Night) -> tuple[ExitCode, NightWord]:
        """Follow a night to its end, print its answer, and tell people if it is a confirmed loss."""
        night, answer = self.watch.finished(night, suspect=lambda: self.branch.owe(night.first.id, [*self.receivers]))
        is_worse = answer.word is NightWord.WORSE
        culprit = (self._searched if self.bisects else self._range)(night, answer) if is_worse else []
        comparisons = self._comparisons(night, answer)
        if not self.watch.as_json:
            title = f"{self._titled(night.commit)} {_HEADLINES[answer.word]}: {answer.reason}"
            out().print(f"[bold]{escape(title)}[/]")
            for line in (*comparisons, *culprit):
                out().print(escape(f"  {line}"))
        unsent = self._sent(night, answer, culprit) if is_worse else []
        if self.watch.as_json:
            print_json_line(
                nightly=NightlyAnswer(
                    commit=night.commit,
                    word=answer.word,
                    reason=answer.reason,
                    comparisons=comparisons,
                    culprit=culprit,
                    ablations=[one.id for one in (night.first, night.second) if one is not None],
                    unsent=unsent,
                )
            )
        return _CODES[answer.word], answer.word

    def _titled(self, commit: str) -> str:
        return self.branch.repository.titled(commit)

    def _nothing_new(self, accepted: str, last: str | None, every: int) -> str | None:
        """Say why the newest commit needs no ablation, or return None; `last` is the newest one with an answer."""
        branch, head = self.branch, self._titled(self.branch.head)
        for commit, name in ((accepted, "accepted"), (last, "compared last")):
            if commit is not None and branch.code_of(commit) == branch.code_of(branch.head):
                return f"the code of {head} is that of the commit {name}, {self._titled(commit)}"
        count = branch.commits_since(last or accepted)
        return f"{wording.counted(count, 'commit')} of {every}, up to {head}" if count < every else None

    def _body(self, accepted: str) -> SpecBody:
        """Return the spec of a night: the newest commit as the baseline, and the earlier ones that have other code."""
        code_of, head, labels = self.branch.code_of, self.branch.head, self.values.get("labels") or {}
        commits = {ACCEPTED: accepted} if code_of(accepted) != code_of(self.pinned) else {}
        commits |= {PINNED: self.pinned} if code_of(self.pinned) != code_of(head) else {}
        own: dict[str, Any] = {
            "ablation": f"{str(self.values.get('ablation'))[:47]}-{head[:8]}",
            "question": f"Is an earlier commit better than {head[:8]}?",
            "variants": {arm: {} for arm in commits},
            "labels": {**labels, NIGHTLY_LABEL: self.watch.label} if isinstance(labels, Mapping) else labels,
        }
        content = spec_yaml({**self.values, **own})
        return SpecBody.packed(content, folder=self.folder, commits={BASELINE: head, **commits})

    def _comparisons(self, night: Night, answer: NightAnswer) -> list[str]:
        lines = []
        for one in answer.variants:
            change, where = change_of(one), f"{one.arm} {self._titled(night.other(one.arm))}"
            if change is None:
                lines.append(f"against {where}: {wording.with_minus(one.reason)}")
                continue
            sure = "" if one.primary is None else f", {wording.confidence(one.primary.alpha)} interval"
            cause = "" if one.cause is None else f": {one.cause}"
            between = wording.interval(change.low_pct, change.high_pct)
            much = f"{self._metric} {wording.percent(change.change_pct)} ({between}{sure})"
            lines.append(f"{much} against {where}{cause}")
        return lines

    @property
    def _metric(self) -> str:
        return wording.metric(self.values["verdict"]["primary"].get("metric", METRIC))

    def _ends(self, night: Night, answer: NightAnswer) -> tuple[str, str, int]:
        """Return the nearest good commit, the bad one, and how many after the good one may have done it."""
        arms = [one.arm for one in answer.variants]
        good = night.other(ACCEPTED if ACCEPTED in arms else arms[0])
        return good, night.commit, self.branch.commits_since(good, night.commit)

    def _range(self, night: Night, answer: NightAnswer) -> list[str]:
        """Return lines on the commits among which the culprit is."""
        good, bad, count = self._ends(night, answer)
        if count == 1:
            return [f"it is the only commit after {good[:12]} that changes the code"]
        return [f"one or more of {count} commits did it: ablate bisect SPEC --good {good[:12]} --bad {bad[:12]}"]

    def _searched(self, night: Night, answer: NightAnswer) -> list[str]:
        """Return lines on the culprit, after a bisection if several commits may be it."""
        good, bad, count = self._ends(night, answer)
        if count > 1:
            history = bisecting.history_of(self.branch.folder, good, bad)
            with suppress(typer.Exit):  # it has printed that it proves no difference
                as_json = self.watch.as_json
                measured = bisecting.search(self.folder, self.values, history, at_once=_AT_ONCE, as_json=as_json)
                return bisecting.answer_lines(measured, history)
        return self._range(night, answer)

    def _sent(self, night: Night, answer: NightAnswer, culprit: list[str]) -> list[str]:
        """Send the message to everybody who lacks it; return the receivers that did not take it."""
        owed = {address: to for address, to in self.receivers.items() if self.branch.owes(night.first.id, address)}
        if not owed:
            return []
        note, unsent = self._note(night, answer, culprit), []
        for address, to in owed.items():
            why = notes.send(note, to)
            if why is None:
                self.branch.paid(night.first.id, address)
            else:
                unsent.append(notes.shown(to))
                err().print(escape(f"{unsent[-1]} did not take the message; the next call repeats it: {why}"))
        return unsent

    def _note(self, night: Night, answer: NightAnswer, culprit: list[str]) -> notes.Note:
        title, comparisons = self._titled(night.commit), self._comparisons(night, answer)
        lines = (f"{title} is worse: {answer.reason}.", *comparisons, *culprit, self.watch.page(night))
        subject = f"{self.watch.label}: {title} is worse, {comparisons[0]}"
        picture = notes.picture_of(self._changes(night), f"{self._metric} against {self._titled(self.pinned)}")
        return notes.Note(title=wording.shorten(subject, _MOST_TITLE), text="\n".join(lines), picture=picture)

    def _changes(self, night: Night) -> list[tuple[str, NightChange]]:
        """Return the changes of the newest nights against the pinned commit, oldest first."""
        over = (one for one in self.watch.nights() if one.first.state in OVER and one.commit != night.commit)
        nights = [one for one in over if one.other(PINNED) == self.pinned]
        changes = []
        for one in reversed([night, *nights[: _MOST_SHOWN - 1]]):
            variants = self.watch.verdict_of(one.first).variants
            chosen = next((variant for variant in variants if variant.arm == PINNED), variants[0])
            if (change := change_of(chosen)) is not None:
                changes.append((one.commit[:8], change))
        return changes
