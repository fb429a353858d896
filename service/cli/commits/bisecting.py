"""Bisections by ablations: the commits between two, the measurements, and the answer in words."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich.markup import escape

from ablate.experiments.analysis.verdicts import VariantVerdict
from ablate.experiments.catalog.files import content_type_of
from ablate.experiments.design.load import load_values
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import BASELINE, ExitCode, VerdictWord
from ablate.experiments.records.git_repository import Repository
from ablate.experiments.reporting import wording
from ablate.service.cli.commits.bisection import Bisection, Shift, pooled
from ablate.service.cli.follow import run_spec
from ablate.service.cli.output import err
from ablate.service.cli.verdicts import exit_code
from ablate.service.schemas.submissions import SpecBody

_MOST_COMMITS = 512
_MOST_ROUNDS = 40
_AS_GOOD = Shift(mean=0.0, se=0.0, df=1)
"""Of a commit with the files of the good one."""
_BAD = "bad"
"""Variant of the first ablation."""


class Found(BaseModel):
    """The answer, for --json. Commits have their whole names."""

    culprits: list[str]
    """The most probable commit, or several that cannot be told apart; none if several share the blame."""
    probability: float | None
    step_pct: float
    """Difference of the bad commit from the good one."""
    shared_at: str | None
    """A commit between with a part of the difference."""
    broken: list[str]
    """Commits that could not be measured."""
    contradicting: list[str]
    """Commits that one step does not explain, because the difference came and went."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The commits between two, oldest first, that change the folder of code. A merge counts as one."""

    repository: Repository
    good: str
    commits: tuple[str, ...]

    def named(self, place: int) -> str:
        """Return the short name and the subject of the commit at a place, from 1."""
        return self.repository.titled(self.commits[place - 1])


def search(folder: Path, values: Mapping[str, Any], history: History, *, at_once: int, as_json: bool) -> Bisection:
    """Measure commits until the culprit is probable enough; folders of code are relative to `folder`.

    Exits unless a difference of the last commit is proved.
    """
    bisection = _first(folder, values, history, as_json=as_json)
    for number in range(1, _MOST_ROUNDS + 1):
        if bisection.culprits() is not None or bisection.other_level() is not None:
            break
        places = bisection.next_places(at_once)
        if not places:
            break
        err().print(f"round {number}: {'; '.join(escape(history.named(place)) for place in places)}", soft_wrap=True)
        arms = {f"c-{history.commits[place - 1][:12]}": place for place in places}
        commits = {arm: history.commits[place - 1] for arm, place in arms.items()}
        body, as_good = _body(folder, values, history, commits, number)
        for arm in as_good:
            bisection.measured.setdefault(arms[arm], []).append(_AS_GOOD)
        for variant in () if body is None else _measured(body, as_json=as_json):
            difference = _difference(variant)
            if difference is None:
                bisection.broken.add(arms[variant.arm])
            else:
                bisection.measured.setdefault(arms[variant.arm], []).append(difference)
    return bisection


def values_of(spec: Path, why: str) -> dict[str, Any]:
    """Return the values of the spec without its variants; print that they do not run, and why. Raises SpecError."""
    if not spec.is_file():
        raise SpecError([SpecProblem(pointer="SPEC", detail=f"there is no file {str(spec)!r}")])
    values = load_values(spec.read_bytes(), content_type_of(spec))
    workload = values.get("workload")
    if not isinstance(workload, Mapping) or "command" not in workload or not isinstance(workload.get("code"), str):
        detail = "this compares commits of a folder of code, and the spec names none"
        raise SpecError([SpecProblem(pointer="/workload/code", detail=detail, hint="code: FOLDER, beside a command")])
    if values.pop("variants", None):
        err().print(f"[dim]the spec's variants do not run: {why}[/]")
    return values


def history_of(folder: Path, good: str, bad: str) -> History:
    """Return the commits after `good` up to `bad`. Raises CodeArchiveError, and SpecError for none or too many."""
    repository = Repository.around(folder)
    first, last = repository.commit(good), repository.commit(bad)
    if not repository.is_before(first, last):
        detail = f"{good!r} is not an ancestor of {bad!r}"
        hint = f"--good $({repository.here} merge-base {good} {bad})"
        raise SpecError([SpecProblem(pointer="--good", detail=detail, hint=hint)])
    listed = repository.read(
        "rev-list", "--reverse", "--first-parent", f"{first}..{last}", "--", repository.prefix or "."
    )
    commits = tuple(listed.decode().split())
    if not commits:
        detail = f"no commit after {good!r} up to {bad!r} changes the folder {str(folder)!r}"
        raise SpecError([SpecProblem(pointer="--bad", detail=detail)])
    if len(commits) > _MOST_COMMITS:
        detail = f"{len(commits):,} commits change the folder; allowed: {_MOST_COMMITS}"
        hint = f"measure one between them first: --good {commits[-_MOST_COMMITS - 1][:12]}"
        raise SpecError([SpecProblem(pointer="--good", detail=detail, hint=hint)])
    return History(repository=repository, good=first, commits=commits)


def _body(
    folder: Path, values: Mapping[str, Any], history: History, variants: Mapping[str, str], number: int
) -> tuple[SpecBody | None, frozenset[str]]:
    """Return the spec of a round, with the code of `good` as baseline, and the variants that have its files.

    Of several variants with the same files, as after a revert, only the first is in the spec; None without any.
    """
    name = f"bisect-{history.good[:8]}-{history.commits[-1][:8]}-{number}"
    own = {**values, "ablation": name, "variants": {arm: {} for arm in variants}}
    packed = SpecBody.packed(spec_yaml(own), folder=folder, commits={BASELINE: history.good, **variants})
    return packed.without_repeats()


def _measured(body: SpecBody, *, as_json: bool) -> tuple[VariantVerdict, ...]:
    """Run the ablation, or follow the one of the same content that an ended bisection left; return its answers."""
    key = f"bisect-{hashlib.sha256(body.content).hexdigest()[:32]}"
    return run_spec(body, idempotency_key=key, as_json=as_json)[1].variants


def _first(folder: Path, values: Mapping[str, Any], history: History, *, as_json: bool) -> Bisection:
    """Measure the bad commit. Exits unless a difference is proved."""
    body, _as_good = _body(folder, values, history, {_BAD: history.commits[-1]}, 0)
    if body is None:
        err().print("nothing to bisect: the bad commit has the files of the good one")
        raise typer.Exit(ExitCode.INCONCLUSIVE)
    variants = _measured(body, as_json=as_json)
    [variant] = variants
    step = _difference(variant)
    if step is None or variant.measured not in (VerdictWord.WORSE, VerdictWord.BETTER):
        err().print(f"nothing to bisect: no difference of the bad commit from the good one is proved. {variant.reason}")
        code = exit_code(variants, None)
        raise typer.Exit(code if code > ExitCode.REJECT else ExitCode.INCONCLUSIVE)
    return Bisection(last=len(history.commits), step=step)


def _difference(variant: VariantVerdict) -> Shift | None:
    """Return a commit's difference from the good one in percent; None if the commit cannot be measured."""
    if variant.primary is not None:
        one = variant.primary
        return Shift(mean=one.delta_pct, se=one.se_pct, df=max(1, one.blocks - 2))
    pairs = () if variant.exact is None else variant.exact.seeds
    changes = [pair.change_pct for pair in pairs if pair.change_pct is not None]
    return Shift(mean=sum(changes) / len(changes), se=0.0, df=1) if len(changes) == len(pairs) > 0 else None


def found(bisection: Bisection, history: History) -> Found:
    """Return the answer for --json."""
    other = bisection.other_level()
    places, probability = bisection.culprits() or max(bisection.groups(), key=lambda group: group[1])
    return Found(
        culprits=[] if other else [history.commits[place - 1] for place in places],
        probability=None if other else probability,
        step_pct=bisection.step.mean,
        shared_at=history.commits[other.place - 1] if other else None,
        broken=[history.commits[place - 1] for place in sorted(bisection.broken)],
        contradicting=[] if other else [history.commits[place - 1] for place in bisection.contradicting()],
    )


def answer_lines(bisection: Bisection, history: History) -> list[str]:
    """Return what the measurements say, the answer first."""
    other = bisection.other_level()
    if other is not None:
        middle = history.commits[other.place - 1][:12]
        share = f"{history.named(other.place)} has {100 * other.share:.0f} % of the step"
        return [
            f"several commits share the blame: {share}",
            f"  before it  ablate bisect SPEC --good {history.good[:12]} --bad {middle}",
            f"  after it   ablate bisect SPEC --good {middle} --bad {history.commits[-1][:12]}",
        ]
    places, probability = bisection.culprits() or max(bisection.groups(), key=lambda group: group[1])
    much = f"made the difference of {bisection.step.mean:+.2f} %, with a probability of {100 * probability:.1f} %"
    notes = dict.fromkeys(bisection.broken, "  (did not measure)")
    names = [f"{history.named(place)}{notes.get(place, '')}" for place in places]
    several = [f"one of {wording.counted(len(names), 'commit')} {much}:", *(f"  {name}" for name in names)]
    before = history.good if places[0] == 1 else history.commits[places[0] - 2]
    culprit = history.commits[places[-1] - 1]
    confirm = f"  confirm  ablate bisect SPEC --good {before[:12]} --bad {culprit[:12]}"
    return [*([f"{names[0]} {much}"] if len(names) == 1 else several), *_contradictions(bisection, history), confirm]


def _contradictions(bisection: Bisection, history: History) -> list[str]:
    """Say which commits one step does not explain."""
    places = bisection.contradicting()
    if not places:
        return []
    sides = [f"  {history.named(place)}: {pooled(bisection.measured[place]).mean:+.2f} %" for place in places]
    return ["but no single commit made it: the difference came and went, as by reverts, because these measured", *sides]
