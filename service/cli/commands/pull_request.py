"""`ablate pull-request`: measure the head of a pull request against its merge base, and report to the forge."""

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.markup import escape

from ablate.experiments.errors import CodeArchiveError, ExperimentError, GitError, SpecError, SpecProblem
from ablate.experiments.outcomes import BASELINE, AblationState, Decision, ExitCode, Required
from ablate.service.cli import tables
from ablate.service.cli.arguments import print_packed
from ablate.service.cli.commits.forges import CALL, CheckState, Forge, PullRequest, forge_of_this_job
from ablate.service.cli.output import err, guarded, out, problem_of
from ablate.service.client.api import Client, ClientError, Refused
from ablate.service.errors import ForgeError, ServiceError

if TYPE_CHECKING:
    from ablate.experiments.analysis.verdicts import Verdict
    from ablate.experiments.records.git_repository import Repository
    from ablate.service.schemas.ablations import AblationPublic
    from ablate.service.schemas.submissions import SpecBody

app = typer.Typer()

_LABEL = "pull-request"
"""Label with the name of the pull request."""
_UPDATE_S = 60.0
"""Least time between two reports of one state: GitHub takes 1,000 requests of a repository in an hour."""
_PATIENCE_S = 600.0
"""How long the first and the last report wait for a busy forge. Those between are left out."""
_LEAVING_S = 3.0
"""The same for the report of a job that is being ended."""
_COMMIT = "[0-9a-f]{40}|[0-9a-f]{64}"
"""A short name is no approval: another commit with the same beginning is quickly made."""
_NUMBERS = "[0-9]{1,16}(,[0-9]{1,16})*"
_OPTIONS = {"--spec": r"[\w-]+\.(yaml|yml|json)", "--seeds": _NUMBERS, "--blocks": "[0-9]{1,5}"}
_OPTIONS |= {"--variants": r"[\w-]+(,[\w-]+)*"}
"""What may stand behind `/ablate`. No shell sees it, and `--spec` is a file beside the workflow's."""


@app.command("pull-request")
@guarded
def pull_request(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="The spec's path from here, in the target branch.")],
    require: Annotated[
        Required, typer.Option(help="The check succeeds if every variant has this decision; not-worse: better or same.")
    ] = Required.NOT_WORSE,
    merge_request: Annotated[
        str, typer.Option(metavar="NUMBER", help="GitLab: the merge request, in a pipeline of the default branch.")
    ] = "",
    arguments: Annotated[
        str, typer.Option(metavar="TEXT", help="GitLab: what stands behind /ablate in a comment on GitHub.")
    ] = "",
) -> None:
    """Measure the head of a pull request against its merge base, in a job of GitHub Actions or GitLab CI.

    It keeps a check and one comment up to date. The spec is that of the target branch. The exit code is 0 once a
    verdict of any word is reported.
    """
    with closing(forge_of_this_job(merge_request=merge_request, words=arguments)) as forge, _told(forge) as pull:
        forge.report(pull.head, CheckState.QUEUED, "reads the request", patience_s=_PATIENCE_S)
        body = _body(Path(os.path.normpath(spec)), pull, _wishes(pull))
        print_packed(body)
        if body.without_repeats()[0] is None:
            text = f"Commit {pull.head} has the files of its merge base, so there is nothing to measure"
            _report_end(forge, pull, CheckState.NEUTRAL, "nothing to measure: the code is that of the merge base", text)
            return
        with Client() as client:
            _measure(client, body, forge, pull, require)


@contextmanager
def _told(forge: Forge) -> Iterator[PullRequest]:
    """Give the pull request, if it may be measured. Report errors to the forge, too, and that this job was ended."""
    pull = forge.pull_request()
    try:
        yield pull
    except ForgeError:
        raise  # the forge itself
    except (ClientError, ExperimentError, ServiceError, OSError) as error:
        problem = problem_of(error)
        lines = [problem.title if problem.errors else problem.detail or problem.title]
        lines += [f"{one.pointer}  {one.detail}{f' ({one.hint})' if one.hint else ''}" for one in problem.errors]
        text = "\n".join(f"    {line}" for line in "\n".join(lines).splitlines())
        _report_end(forge, pull, CheckState.FAILURE, "no verdict", f"**No verdict on {pull.head}**\n\n{text}")
        raise
    except KeyboardInterrupt:
        text = "this job was ended, and the ablation goes on; the same job, run again, follows it"
        forge.report(pull.head, CheckState.CANCELLED, text, patience_s=_LEAVING_S)
        raise typer.Exit(ExitCode.DETACHED) from None


def _measure(client: Client, body: "SpecBody", forge: Forge, pull: PullRequest, require: Required) -> None:
    """Submit the spec, follow its ablation, and report how it ends. Exits with 5 without a verdict."""
    from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
    from ablate.service.cli.verdicts import asked_of

    key = hashlib.sha256(body.content + pull.asked_by.encode()).hexdigest()[:32]
    accepted = client.ablations.submit(body, idempotency_key=f"{_LABEL}-{key}")
    _cancel_older(client, pull)
    page = f"{client.url.rstrip('/')}/a/{accepted.id}"
    forge.comment(f"Ablate measures commit {pull.head}: [{accepted.name}]({page})", patience_s=_PATIENCE_S)
    row = client.ablations.wait(accepted.id, each=_Progress(forge, pull.head, page))
    if row.state == AblationState.CANCELLED:
        forge.report(pull.head, CheckState.CANCELLED, "cancelled", url=page, patience_s=_PATIENCE_S)
        raise typer.Exit(ExitCode.ERROR)
    verdict = client.ablations.verdict(accepted.id)
    text = pull_request_markdown(verdict, require, asked_of(accepted.id))
    if row.state != AblationState.COMPLETED:
        _report_end(forge, pull, CheckState.FAILURE, f"no verdict: {row.answer or 'blocks could not run'}", text, page)
        raise typer.Exit(ExitCode.ERROR)
    _report_end(forge, pull, *_conclusion(verdict, require), text, page)


def _cancel_older(client: Client, pull: PullRequest) -> None:
    """Cancel what still measures earlier heads of the pull request."""
    for state in (AblationState.QUEUED, AblationState.RUNNING):
        for row in list(client.ablations.list(state=state, label=f"{_LABEL}={pull.name}")):
            if pull.head not in row.labels.values():
                with suppress(Refused):  # it is over by now, or another token's
                    client.ablations.cancel(row.id)


def _conclusion(verdict: "Verdict", require: Required) -> tuple[CheckState, str]:
    """Return the final state of the check and its title."""
    others = [one for one in verdict.variants if not one.meets(require)]
    if not others:
        return CheckState.SUCCESS, f"{require}: met"
    title = f"{require}: not met: {', '.join(f'{one.arm} is {one.shortfall(require)}' for one in others)}"
    unknown = all(one.decision is Decision.INCONCLUSIVE for one in others)
    return CheckState.NEUTRAL if unknown else CheckState.FAILURE, title


def _report_end(
    forge: Forge, pull: PullRequest, state: CheckState, title: str, text: str, url: str | None = None
) -> None:
    """Report the end in the log, in the check and, unless the pull request has a newer head, in the comment."""
    out().print(escape(f"{state}: {title}"), soft_wrap=True)
    forge.report(pull.head, state, title, text=text, url=url, patience_s=_PATIENCE_S)
    if forge.current_head() == pull.head:
        forge.comment(text, patience_s=_PATIENCE_S)


class _Progress:
    """Shows the place in the queue and the blocks in the check. A report that fails is left out."""

    def __init__(self, forge: Forge, head: str, page: str) -> None:
        self._forge, self._head, self._page = forge, head, page
        self._shown, self._at = (CheckState.QUEUED, ""), float("-inf")

    def __call__(self, row: "AblationPublic") -> None:
        """Report the state, if it is another one or the last report is old."""
        if row.state == AblationState.QUEUED:
            now = CheckState.QUEUED, f"waits for {row.waiting_for}" if row.waiting_for else "waits"
        else:
            rest = tables.time_left(row)
            now = CheckState.RUNNING, f"{row.blocks.done}/{row.blocks.planned} blocks{rest and f'; {rest}'}"
        is_due = now[0] != self._shown[0] or time.monotonic() - self._at > _UPDATE_S
        if now == self._shown or not is_due:
            return
        self._shown, self._at = now, time.monotonic()
        out().print(escape(now[1]), soft_wrap=True)
        try:
            self._forge.report(self._head, *now, url=self._page, patience_s=0)
        except ForgeError as error:
            err().print(f"[dim]not reported: {escape(str(error))}[/]", soft_wrap=True)


def _body(path: Path, pull: PullRequest, wishes: Mapping[str, str]) -> "SpecBody":
    """Return the target branch's spec with the head as code of its variants, and the merge base as baseline's."""
    from ablate.experiments.catalog.files import content_type_of
    from ablate.experiments.design.load import load_values
    from ablate.experiments.design.spec_yaml import spec_yaml
    from ablate.experiments.records.git_repository import Repository
    from ablate.service.schemas.submissions import SpecBody

    repository = Repository.around(Path())
    start = _merge_base(repository, pull)
    path = path.with_name(wishes.get("--spec", path.name))
    try:
        content = repository.read("cat-file", "blob", f"{pull.base}:{repository.prefix}{path}")
    except GitError as error:
        detail = f"commit {pull.base[:12]} of the target branch has no file '{repository.prefix}{path}'"
        raise SpecError([SpecProblem(pointer="SPEC", detail=detail, hint="merge the spec first")]) from error
    values = _changed(load_values(content, content_type_of(path)), pull, wishes)
    commits = {BASELINE: start, **dict.fromkeys(values["variants"], pull.head)}
    return SpecBody.packed(spec_yaml(values), folder=path.parent, commits=commits)


def _changed(values: dict[str, Any], pull: PullRequest, wishes: Mapping[str, str]) -> dict[str, Any]:
    """Return a spec's values as `/ablate` wishes. Its evaluation is the target branch's, too. Raises SpecError."""
    for name in ("workload", "variants", "design", "labels"):
        values[name] = values.get(name) or {}
        if not isinstance(values[name], dict):
            raise SpecError([SpecProblem(pointer=f"#/{name}", detail="it is no mapping")])
    names = wishes["--variants"].split(",") if "--variants" in wishes else list(values["variants"])
    if unknown := [name for name in names if name not in values["variants"]]:
        _refuse(f"the spec has no variant {unknown[0]!r}; it has {', '.join(map(str, values['variants']))}")
    values["variants"] = {name: values["variants"][name] for name in names}
    values["labels"] |= {_LABEL: pull.name}
    if "--seeds" in wishes:
        values["design"]["seeds"] = [int(seed) for seed in wishes["--seeds"].split(",")]
    if "--blocks" in wishes:
        values["design"]["blocks"] = {"count": int(wishes["--blocks"])}
    evaluation = values["workload"].get("evaluate")
    if isinstance(evaluation, dict) and isinstance(evaluation.get("code"), str):
        evaluation["code"] = {"git": evaluation["code"], "commit": pull.base}
    return values


def _merge_base(repository: "Repository", pull: PullRequest) -> str:
    """Return the commit from which the pull request started. Raises CodeArchiveError."""
    if repository.is_shallow:
        hint = "on GitHub, check out with `fetch-depth: 0`; on GitLab, set the variable GIT_DEPTH to 0"
        raise CodeArchiveError("this checkout is a shallow clone, which may lack the merge base", hint)
    for commit in (pull.base, pull.head):
        if not repository.has_commit(commit):
            repository.fetch(commit)
    try:
        start = repository.read("merge-base", pull.base, pull.head).decode().strip()
    except GitError as error:
        detail = f"head {pull.head[:12]} and the target branch at {pull.base[:12]} have no commit in common"
        raise CodeArchiveError(detail) from error
    if start == pull.head:
        raise CodeArchiveError(f"head {pull.head[:12]} is in the target branch already, so there is nothing to measure")
    return start


def _wishes(pull: PullRequest) -> dict[str, str]:
    """Return the options that were asked for. Raises SpecError, also unless a fork's head is named."""
    words = (pull.words or "").split()
    commit = words.pop(0) if words and re.fullmatch(_COMMIT, words[0]) else None
    wishes = dict(zip(words[::2], words[1::2], strict=False))
    for name, value in wishes.items():
        if re.fullmatch(_OPTIONS.get(name, "(?!)"), value, re.ASCII) is None:
            _refuse(f"{name} {value} is not allowed")
    if len(words) != 2 * len(wishes):
        _refuse("every option stands once, with one value behind it")
    if pull.is_fork and commit is None:
        _refuse("this comes from a fork: name the commit that you looked at, with all its digits")
    if commit not in (None, pull.head):
        _refuse(f"commit {commit} is not the head, which is {pull.head}: look at that first")
    return wishes


def _refuse(detail: str) -> NoReturn:
    usage = f"{CALL} [COMMIT] [--spec FILE] [--seeds 1,2] [--blocks 12] [--variants NAME,NAME]"
    raise SpecError([SpecProblem(pointer=CALL, detail=detail, hint=usage)])
