"""`ablate nightly`: measure the newest commit of a branch beside earlier ones, and tell what two ablations prove."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from rich.markup import escape

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import NIGHTLY_LABEL
from ablate.experiments.outcomes import BASELINE, ExitCode
from ablate.experiments.reporting import wording
from ablate.service.cli.output import StreamOption, err, guarded, out, print_json_line

if TYPE_CHECKING:
    from apprise import NotifyBase

    from ablate.service.cli.branch import Branch
    from ablate.service.cli.nights import Change, Night, NightAnswer, NightWord, Watch
    from ablate.service.cli.notes import Note
    from ablate.service.schemas.submissions import SpecBody

app = typer.Typer()

_AT_ONCE = 3
_MOST_TITLE = 150
_MOST_SHOWN = 60
"""Nights of a picture."""


class NightlyChange(BaseModel):
    """The new commit's change against an earlier one, in percent."""

    against: str
    commit: str
    change_pct: float | None = None
    low_pct: float | None = None
    high_pct: float | None = None


class NightlyAnswer(BaseModel):
    """The answer on a commit, for --json. Commits have their whole names."""

    commit: str
    word: str
    """accepted, worse or unanswered."""
    reason: str
    changes: list[NightlyChange]
    """Where it is worse: those that the second ablation confirms."""
    ablations: list[str]
    culprit: list[str]
    """Lines for people about the commits that made it worse."""
    unsent: list[str]
    """Receivers that did not take the message."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of the command."""

    folder: Path
    """Of the spec."""
    values: Mapping[str, Any]
    branch: "Branch"
    watch: "Watch"
    pinned: str
    receivers: "Mapping[str, NotifyBase]"
    """By address."""
    bisect: bool


@app.command()
@guarded
def nightly(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC", help="The file of a spec: a command with a folder of code in a repository."),
    ],
    pin: Annotated[
        str,
        typer.Option(metavar="REVISION", help="A commit or tag of the branch. Small losses add up against it."),
    ],
    repo: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The repository; then the spec's code is a folder below its root. Default: the origin of the "
            "repository around the spec's code.",
        ),
    ] = None,
    branch: Annotated[str, typer.Option(help="The branch to watch.")] = "main",
    every: Annotated[int, typer.Option(min=1, help="Wait for so many new commits that change the code.")] = 1,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Tell this receiver, an address of apprise, a confirmed loss. Repeatable."
        ),
    ] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Find the commit of a confirmed loss at once.")] = False,
    as_json: StreamOption = False,
) -> None:
    """Compare the newest commit of a branch with the last accepted one and a pinned one; once, for cron or a CI schedule.

    If an ablation proves that it is worse, a second one must confirm that before anybody is told. Otherwise it is
    accepted. The service has everything that earlier calls did, so a call goes on where one was ended.

    The exit code is 0 if the commit is accepted or nothing is new, 1 if it is confirmed to be worse, 4 if it was not
    compared, 5 if an ablation failed or only a message is left and was not accepted.
    """
    from ablate.service.cli.branch import Branch, Remote, own_cache
    from ablate.service.cli.nights import Watch
    from ablate.service.cli.notes import receiver
    from ablate.service.client.api import Client

    values = _values_of(spec)
    receivers = {address: receiver(address) for address in notify or ()}
    label = f"{values['ablation']}/{branch}"
    remote = Remote.of(repo, spec, values["workload"]["code"])
    with own_cache(label, remote.url) as cache, Client() as client:
        fetched = Branch.fetched(cache, remote, branch)
        values["workload"] = {**values["workload"], "code": os.path.relpath(fetched.folder, spec.parent)}
        call = _Call(
            folder=spec.parent,
            values=values,
            branch=fetched,
            watch=Watch.read(client, label, as_json=as_json),
            pinned=_pinned(fetched, pin),
            receivers=receivers,
            bisect=bisect,
        )
        raise typer.Exit(_code_of(call, every))


def _values_of(spec: Path) -> dict[str, Any]:
    """Return the values of the spec without variants and requirements. Raises SpecError for listed seeds."""
    from ablate.service.cli.commands.bisect import values_of

    values = values_of(spec, "nightly compares commits of its baseline")
    if isinstance(values.get("verdict"), Mapping) and values["verdict"].get("require"):
        err().print("[dim]the spec's requirements do not count: the earlier commits are the variants[/]")
        values["verdict"] = {name: value for name, value in values["verdict"].items() if name != "require"}
    design = values.get("design")
    if isinstance(design, Mapping) and isinstance(design.get("seeds"), list):
        detail = "with listed seeds the second ablation would repeat the runs of the first"
        raise SpecError([SpecProblem(pointer="/design/seeds", detail=detail, hint=f"seeds: {len(design['seeds'])}")])
    return values


def _pinned(branch: "Branch", pin: str) -> str:
    """Return the whole name of the pinned commit. Raises SpecError unless it is in the branch's history."""
    commit = branch.repository.commit(pin)
    if commit not in branch.history:
        detail = f"{pin!r} is not in the history of the branch, which may have been rewritten"
        raise SpecError([SpecProblem(pointer="--pin", detail=detail, hint="pin a commit that is")])
    return commit


def _code_of(call: _Call, every: int) -> ExitCode:
    """Finish the last night, ask about a new commit if there is one, and return the exit code."""
    from ablate.service.cli.nights import NightWord

    nights = [night for night in call.watch.nights() if night.commit in call.branch.history]
    code, last, accepted = ExitCode.DONE, None, call.pinned
    if nights:
        code, word = _settled(call, nights[0])
        last = None if word is NightWord.UNANSWERED else nights[0].commit
        earlier = (night.commit for night in nights[1:] if call.watch.word_of(night) is NightWord.ACCEPTED)
        latest = nights[0].commit if word is NightWord.ACCEPTED else next(earlier, call.pinned)
        accepted = latest if call.branch.is_before(call.pinned, latest) else call.pinned
    why = _nothing_new(call.branch, accepted, last, every)
    if why is not None:
        err().print(escape(f"nothing new: {why}"))
        return code
    night = call.watch.asked(_body(call, accepted), call.branch.head)
    return _told(call, *call.watch.finished(night, suspect=partial(_owe, call, night)))


def _settled(call: _Call, night: "Night") -> "tuple[ExitCode, NightWord]":
    """Finish the last night; return the exit code for what this call did, and what the night says."""
    from ablate.service.cli.nights import NightWord

    answer = call.watch.known_answer(night)
    if answer is None:
        night, answer = call.watch.finished(night, suspect=partial(_owe, call, night))
        return _told(call, night, answer), answer.word
    is_worse = answer.word is NightWord.WORSE
    unsent = _sent(call, night, answer, _range(call, night, answer)) if is_worse else []
    return ExitCode.ERROR if unsent else ExitCode.DONE, answer.word


def _owe(call: _Call, night: "Night") -> None:
    call.branch.owe(night.first.id, tuple(call.receivers))


def _nothing_new(branch: "Branch", accepted: str, last: str | None, every: int) -> str | None:
    """Say why the newest commit needs no ablation, or return None; `last` is the newest commit with an answer."""
    head = branch.titled(branch.head)
    for commit, name in ((accepted, "the accepted commit"), (last, "the last commit that was compared")):
        if commit is not None and branch.code_of(commit) == branch.code_of(branch.head):
            return f"the code of {head} is that of {name}, {branch.titled(commit)}"
    count = branch.commits_since(last or accepted)
    return f"{wording.counted(count, 'commit')} of {every}, up to {head}" if count < every else None


def _body(call: _Call, accepted: str) -> "SpecBody":
    """Return the spec of a night: the newest commit as the baseline, and the earlier ones that have other code."""
    from ablate.experiments.design.spec_yaml import spec_yaml
    from ablate.service.cli.nights import ACCEPTED, PINNED
    from ablate.service.schemas.submissions import SpecBody

    code_of, head = call.branch.code_of, call.branch.head
    commits = {ACCEPTED: accepted} if code_of(accepted) != code_of(call.pinned) else {}
    commits |= {PINNED: call.pinned} if code_of(call.pinned) != code_of(head) else {}
    labels = {**call.values.get("labels", {}), NIGHTLY_LABEL: call.watch.label}
    own = {
        "ablation": f"{call.values['ablation'][:47]}-{head[:8]}",
        "question": f"Is an earlier commit better than {head[:8]}?",
        "variants": {arm: {} for arm in commits},
        "labels": labels,
    }
    content = spec_yaml({**call.values, **own})
    return SpecBody.packed(content, folder=call.folder, commits={BASELINE: head, **commits})


def _told(call: _Call, night: "Night", answer: "NightAnswer") -> ExitCode:
    """Print the answer, send the messages of a confirmed loss, and return the exit code."""
    from ablate.service.cli.nights import NightWord

    is_worse = answer.word is NightWord.WORSE
    culprit = (_searched(call, night, answer) if call.bisect else _range(call, night, answer)) if is_worse else []
    unsent = _sent(call, night, answer, culprit) if is_worse else []
    if call.watch.as_json:
        ablations = [one.id for one in (night.first, night.second) if one is not None]
        print_json_line(
            nightly=NightlyAnswer(
                commit=night.commit,
                word=answer.word,
                reason=answer.reason,
                changes=_changes(night, answer),
                ablations=ablations,
                culprit=culprit,
                unsent=unsent,
            )
        )
    else:
        words = {NightWord.WORSE: "is worse", NightWord.UNANSWERED: "was not compared, so it is not accepted"}
        headline = f"{call.branch.titled(night.commit)} {words.get(answer.word, 'is accepted')}: {answer.reason}"
        out().print(f"[bold]{escape(headline)}[/]")
        for line in (*_lines(call, night, answer), *culprit):
            out().print(escape(f"  {line}"))
    return {NightWord.WORSE: ExitCode.REJECT, NightWord.UNANSWERED: ExitCode.INVALID}.get(answer.word, ExitCode.DONE)


def _changes(night: "Night", answer: "NightAnswer") -> list[NightlyChange]:
    from ablate.service.cli.nights import change_of

    rows = ((one.arm, night.other(one.arm), change_of(one)) for one in answer.variants)
    return [
        NightlyChange(against=arm, commit=commit, **({} if change is None else vars(change)))
        for arm, commit, change in rows
    ]


def _lines(call: _Call, night: "Night", answer: "NightAnswer") -> list[str]:
    """Return a line on each compared commit: how much the new one differs from it."""
    from ablate.service.cli.nights import change_of

    lines = []
    for one in answer.variants:
        change, where = change_of(one), f"{one.arm} {call.branch.titled(night.other(one.arm))}"
        if change is None:
            lines.append(f"against {where}: {wording.with_minus(one.reason)}")
            continue
        sure = "" if one.primary is None else f", {wording.confidence(one.primary.alpha)} interval"
        between = wording.interval(change.low_pct, change.high_pct)
        lines.append(f"{_metric(call)} {wording.percent(change.change_pct)} ({between}{sure}) against {where}")
    return lines


def _metric(call: _Call) -> str:
    return wording.metric(call.values["verdict"]["primary"]["metric"])


def _ends(night: "Night", answer: "NightAnswer") -> tuple[str, str]:
    """Return the good and the bad commit of a confirmed loss: the accepted commit is the nearest good one."""
    from ablate.service.cli.nights import ACCEPTED

    arms = [one.arm for one in answer.variants]
    return night.other(ACCEPTED if ACCEPTED in arms else arms[0]), night.commit


def _range(call: _Call, night: "Night", answer: "NightAnswer") -> list[str]:
    """Return lines on the commits among which the culprit is."""
    good, bad = _ends(night, answer)
    count = call.branch.commits_since(good, bad)
    if count == 1:
        return [f"it is the only commit after {good[:12]} that changes the code"]
    return [f"one or more of {count} commits did it: ablate bisect SPEC --good {good[:12]} --bad {bad[:12]}"]


def _searched(call: _Call, night: "Night", answer: "NightAnswer") -> list[str]:
    """Return lines on the culprit, after a bisection if several commits may be it."""
    from ablate.service.cli.commands import bisect

    good, bad = _ends(night, answer)
    if call.branch.commits_since(good, bad) > 1:
        history = bisect.history_of(call.branch.folder, good, bad)
        with suppress(typer.Exit):  # it has printed that it proves no difference
            own = bisect.search(call.folder, call.values, history, at_once=_AT_ONCE, as_json=call.watch.as_json)
            return bisect.answer_lines(own, history)
    return _range(call, night, answer)


def _sent(call: _Call, night: "Night", answer: "NightAnswer", culprit: list[str]) -> list[str]:
    """Send the message to everybody who lacks it; return the receivers that did not accept it."""
    from ablate.service.cli import notes

    owed = [address for address in call.receivers if call.branch.owes(night.first.id, address)]
    note, unsent = (_note(call, night, answer, culprit) if owed else None), []
    for address in owed:
        name, why = notes.shown(call.receivers[address]), notes.send(note, call.receivers[address])
        if why is None:
            call.branch.paid(night.first.id, address)
        else:
            unsent.append(name)
            err().print(escape(f"{name} did not accept the message; the next call repeats it: {why}"))
    return unsent


def _note(call: _Call, night: "Night", answer: "NightAnswer", culprit: list[str]) -> "Note":
    from ablate.service.cli.nights import change_of
    from ablate.service.cli.notes import Note, picture_of

    title = call.branch.titled(night.commit)
    largest = max(
        (change for one in answer.variants if (change := change_of(one))), key=lambda one: abs(one.change_pct)
    )
    how_much = f"{_metric(call)} {wording.percent(largest.change_pct)}"
    lines = (f"{title} is worse: {answer.reason}.", *_lines(call, night, answer), *culprit, call.watch.page(night))
    points = [
        (call.branch.titled(one.commit)[:9], change, one.commit == night.commit) for one, change in _points(call, night)
    ]
    return Note(
        title=wording.shorten(f"{call.watch.label}: {how_much} in {title}", _MOST_TITLE),
        text="\n".join(lines),
        picture=picture_of(points, f"{_metric(call)} against {call.branch.titled(call.pinned)}"),
    )


def _points(call: _Call, night: "Night") -> "list[tuple[Night, Change]]":
    """Return the changes of the newest nights against the pinned commit, oldest first."""
    from ablate.service.cli.nights import PINNED, change_of

    nights = [one for one in call.watch.nights() if one.commit != night.commit and one.other(PINNED) == call.pinned]
    points = []
    for one in reversed([night, *nights[: _MOST_SHOWN - 1]]):
        variants = call.watch.verdict_of(one.first).variants
        chosen = next((variant for variant in variants if variant.arm == PINNED), variants[0])
        if (change := change_of(chosen)) is not None:
            points.append((one, change))
    return points
