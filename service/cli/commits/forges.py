"""GitHub and GitLab, from a job of theirs: the pull request, the check with the verdict, and the one comment.

A pull request of a fork is measured only after somebody with write access named its commit. Text of other people is
data: no shell sees it.
"""

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import httpx

from ablate.experiments.errors import BadSetting
from ablate.experiments.reporting.wording import shorten
from ablate.experiments.system.http_clients import http_client, reason
from ablate.service.errors import ForgeBusy, ForgeError

MARK = "<!-- ablate pull-request -->"
"""Begins our comment. A comment of somebody else with it is not ours."""
CHECK = "ablate"
"""Name of the check."""
CALL = "/ablate"
"""Begins a comment that asks for a measurement."""
_PAUSE_S = 2.0
_LOOK_S = 60.0
"""How long a question waits for a busy forge."""
_WRITERS = ("admin", "write")
"""Permissions of GitHub that include pushing. `maintain` is shown as write."""
_ASSOCIATIONS = ("OWNER", "MEMBER", "COLLABORATOR")
_MOST_OF_GITLAB = 255
"""Characters of a status's description and address."""

_Result = TypeVar("_Result")


class CheckState(StrEnum):
    """State of the check."""

    QUEUED = auto()
    RUNNING = auto()
    SUCCESS = auto()
    FAILURE = auto()
    NEUTRAL = auto()
    """Inconclusive."""
    CANCELLED = auto()


@dataclass(frozen=True, kw_only=True)
class PullRequest:
    """A pull request, or a merge request of GitLab, as a job shall measure it."""

    name: str
    """For people and for a label: owner/repository#7."""
    head: str
    """The whole name of the commit to measure."""
    base: str
    """The newest commit of the branch that it shall be merged into."""
    is_fork: bool
    words: str | None
    """The arguments behind /ablate, unread; None if nobody asked, and a push started the job."""
    asked_by: str
    """What asked, for example a comment; the same in a repeated job, and empty for a push."""


class Forge(ABC):
    """The REST interface of a forge, with the token of the job."""

    needs: ClassVar[str]
    """What the token must be allowed to do."""
    _update: ClassVar[str]
    """Method that changes a comment."""
    _path: str
    """Of the pull request."""
    _comments: str
    """Path of its comments."""
    _comment: str
    """Path above a single one."""
    _login = ""
    """Who writes our comment."""

    def __init__(self, url: str, token: str) -> None:
        self._http = http_client(url, token=token)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @abstractmethod
    def pull_request(self) -> PullRequest:
        """Return the pull request that this job is about. Raises ForgeError if it may not be measured."""

    @abstractmethod
    def _report(self, head: str, state: CheckState, title: str, text: str, url: str | None) -> None: ...

    def current_head(self) -> str:
        """Return the newest commit of the pull request."""
        answer = self._get(self._path)
        return str(answer.get("head", answer)["sha"])

    def report(
        self, head: str, state: CheckState, title: str, *, text: str = "", url: str | None = None, patience_s: float
    ) -> None:
        """Set the check of a commit; try again for `patience_s` while the forge is busy. Raises ForgeError."""
        self._patiently(lambda: self._report(head, state, title, text or title, url), patience_s)

    def comment(self, text: str, *, patience_s: float) -> None:
        """Write our comment anew, or for the first time. The check comes first: it tells who we are."""
        self._patiently(lambda: self._write_comment(f"{MARK}\n{text}"), patience_s)

    def _write_comment(self, body: str) -> None:
        """Look for our comment again each time: people delete and edit comments, and a lost answer leaves one."""
        own = next((one for one in self._every_comment() if self._is_own(one)), None)
        if own is not None:
            try:
                self._call(self._update, f"{self._comment}/{own['id']}", json={"body": body})
            except ForgeError as error:
                if error.answered not in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
                    raise
            else:
                return
        self._call("POST", self._comments, json={"body": body})

    def _is_own(self, comment: Mapping[str, Any]) -> bool:
        author = comment.get("user") or comment.get("author") or {}  # a deleted account is none
        who = author.get("login") or author.get("username")
        return (comment.get("body") or "").startswith(MARK) and who == self._login

    def _every_comment(self) -> Iterator[dict[str, Any]]:
        """Yield all pages. Their numbers go on, so the token never follows an address in an answer."""
        page, answer = 1, None
        while answer is None or "next" in answer.links:
            answer = self._call("GET", self._comments, params={"per_page": 100, "page": page})
            yield from answer.json()
            page += 1

    def _get(self, path: str) -> dict[str, Any]:
        return self._patiently(lambda: dict(self._call("GET", path).json()), _LOOK_S)

    def _patiently(self, action: Callable[[], _Result], patience_s: float) -> _Result:
        until = time.monotonic() + patience_s
        while True:
            try:
                return action()
            except ForgeBusy as busy:
                if time.monotonic() + busy.pause_s > until:
                    raise
                time.sleep(busy.pause_s)

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request once. Raises ForgeBusy if it may succeed later, and ForgeError."""
        what = f"{method} {self._http.base_url}{path.lstrip('/')}"
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise ForgeBusy(f"{what}: {reason(error, str(self._http.base_url))}", pause_s=_PAUSE_S) from error
        if answer.is_success:
            return answer
        text = f"{what} answered {answer.status_code}: {shorten(_message(answer), 300)}"
        if (pause_s := _pause_s(answer)) is not None:
            raise ForgeBusy(text, pause_s=pause_s)
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
            text += f". The token needs {self.needs}"
        raise ForgeError(text, answered=answer.status_code)


class GitHub(Forge):
    """GitHub, in a job that a pull request or a comment started."""

    needs = "permissions: checks: write, pull-requests: write"
    _update = "PATCH"

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(_given(variables, "GITHUB_API_URL"), _given(variables, "GITHUB_TOKEN"))
        self._http.headers.update({"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"})
        self._name = _given(variables, "GITHUB_REPOSITORY")
        self._event: dict[str, Any] = json.loads(Path(_given(variables, "GITHUB_EVENT_PATH")).read_bytes())
        about = self._event.get("pull_request") or self._event.get("issue")
        if about is None:
            raise ForgeError("this job is about no pull request; allowed: pull_request_target and issue_comment")
        self._number, self._check = int(about["number"]), 0
        self._above = f"/repos/{self._name}"
        self._path = f"{self._above}/pulls/{self._number}"
        self._comment = f"{self._above}/issues/comments"
        self._comments = f"{self._above}/issues/{self._number}/comments"

    def pull_request(self) -> PullRequest:
        """Return the pull request. Raises ForgeError if a fork was not approved, or by somebody who may not."""
        comment, pull = self._event.get("comment"), self._get(self._path)
        if comment is not None:
            self._check_author(comment)
        source, target = pull["head"]["repo"], pull["base"]["repo"]  # a deleted fork has none
        is_fork = source is None or source["id"] != target["id"]
        if comment is None and is_fork:
            raise ForgeError(
                f"#{self._number} comes from a fork, so nothing runs by itself. Somebody with write access "
                f"approves a commit by the comment `{CALL} COMMIT`, with its whole name"
            )
        return PullRequest(
            name=f"{self._name}#{self._number}",
            head=pull["head"]["sha"] if comment is not None else self._event["pull_request"]["head"]["sha"],
            base=pull["base"]["sha"],
            is_fork=is_fork,
            words=None if comment is None else _words(comment["body"]),
            asked_by="" if comment is None else f"comment {comment['id']}",
        )

    def _check_author(self, comment: Mapping[str, Any]) -> None:
        """Raise ForgeError unless the author may push: only a new comment counts, because others edit old ones."""
        login, association = comment["user"]["login"], comment["author_association"]
        refusal = f"{login} may not start a measurement here; it takes write access"
        if self._event["action"] != "created" or association not in _ASSOCIATIONS:
            raise ForgeError(refusal)
        if self._get(f"{self._above}/collaborators/{quote(login, safe='')}/permission")["permission"] not in _WRITERS:
            raise ForgeError(refusal)

    def _report(self, head: str, state: CheckState, title: str, text: str, url: str | None) -> None:
        running = {CheckState.QUEUED: "queued", CheckState.RUNNING: "in_progress"}
        body: dict[str, Any] = {"output": {"title": title, "summary": text}}
        body |= {"status": running[state]} if state in running else {"status": "completed", "conclusion": state.value}
        body |= {} if url is None else {"details_url": url}
        if not self._check:
            made = self._call(
                "POST", f"{self._above}/check-runs", json={"name": CHECK, "head_sha": head, **body}
            ).json()
            self._check, self._login = made["id"], f"{(made['app'] or {}).get('slug', 'github-actions')}[bot]"
        else:
            self._call("PATCH", f"{self._above}/check-runs/{self._check}", json=body)


class GitLab(Forge):
    """GitLab, in a pipeline of a merge request, or in one of the default branch that a maintainer started.

    A status cannot change while it stays in one state, and cannot be skipped once it runs. So it is pending to the end,
    and the comment shows the place in the queue and the blocks.
    """

    needs = "the scope api and the role Developer: a project access token in the variable GITLAB_TOKEN"
    _update = "PUT"
    _STATES: ClassVar[Mapping[CheckState, str]] = {
        CheckState.QUEUED: "pending",
        CheckState.RUNNING: "pending",
        CheckState.SUCCESS: "success",
        CheckState.FAILURE: "failed",
        CheckState.NEUTRAL: "skipped",  # the only final state that neither passes nor fails a pipeline
        CheckState.CANCELLED: "canceled",
    }

    def __init__(self, variables: Mapping[str, str], merge_request: str, words: str) -> None:
        super().__init__(_given(variables, "CI_API_V4_URL"), _given(variables, "GITLAB_TOKEN"))
        self._project = _given(variables, "CI_PROJECT_ID")
        self._name = _given(variables, "CI_PROJECT_PATH")
        self._pipeline = int(_given(variables, "CI_PIPELINE_ID"))
        self._is_asked = bool(merge_request)
        number = merge_request or _given(variables, "CI_MERGE_REQUEST_IID")
        if not number.isdecimal():
            raise ForgeError(f"--merge-request is {number!r}; allowed: the number behind the '!'")
        self._number, self._words = int(number), words
        self._path = f"/projects/{self._project}/merge_requests/{self._number}"
        self._comments = self._comment = f"{self._path}/notes"
        self._own_head = variables.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA") or variables.get("CI_COMMIT_SHA", "")
        self._place: dict[str, Any] = {"pipeline_id": self._pipeline}
        """Where the status stands: in this pipeline, or at the branch whose commit it is about."""

    def pull_request(self) -> PullRequest:
        """Return the merge request. Raises ForgeError for a pipeline that a fork's commit started."""
        request = self._get(self._path)
        if request["diff_refs"] is None:
            raise ForgeError(f"GitLab has not prepared the changes of !{self._number} yet; run the job again")
        is_fork = request["source_project_id"] != request["target_project_id"]
        if is_fork and not self._is_asked:
            raise ForgeError(
                f"!{self._number} comes from a fork, so nothing runs by itself. A maintainer starts a pipeline of the "
                "default branch with the variables MERGE_REQUEST and ARGUMENTS, which names the commit"
            )
        if self._is_asked:
            self._place = {"ref": request["source_branch"]}
        self._login = str(self._get("/user")["username"])
        return PullRequest(
            name=f"{self._name}!{self._number}",
            head=request["sha"] if self._is_asked else self._own_head,
            base=request["diff_refs"]["start_sha"],
            is_fork=is_fork,
            words=self._words if self._is_asked else None,
            asked_by=f"pipeline {self._pipeline}" if self._is_asked else "",
        )

    def _report(self, head: str, state: CheckState, title: str, _text: str, url: str | None) -> None:
        if self._STATES[state] == "pending" and url is not None:
            self._write_comment(f"{MARK}\nAblate measures commit {head}: [{title}]({url})")
            return
        body = {"state": self._STATES[state], "name": CHECK, "description": shorten(title, _MOST_OF_GITLAB)}
        body |= {"target_url": url} if url is not None and len(url) <= _MOST_OF_GITLAB else {}
        try:
            self._call("POST", f"/projects/{self._project}/statuses/{head}", json={**body, **self._place})
        except ForgeError as error:
            if "Cannot transition status via :enqueue" not in str(error):  # a job that was killed left it pending
                raise


def forge_of_this_job(*, merge_request: str, words: str) -> Forge:
    """Return the forge whose job runs this process. Raises BadSetting and ForgeError."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        return GitHub(os.environ)
    if os.environ.get("GITLAB_CI") == "true":
        return GitLab(os.environ, merge_request, words)
    raise BadSetting("this is no job of GitHub Actions or GitLab CI; elsewhere: ablate run SPEC --commit ARM=REVISION")


def _given(variables: Mapping[str, str], name: str) -> str:
    if value := variables.get(name):
        return value
    hint = "; a pipeline in a fork has no secrets, and measures nothing" if name == "GITLAB_TOKEN" else ""
    raise BadSetting(f"the variable {name} is not set{hint}")


def _words(comment: str) -> str:
    """Return the text behind /ablate in the first line of a comment. Raises ForgeError for another comment."""
    first, *rest = (comment.splitlines() or [""])[0].split(maxsplit=1) or [""]
    if first != CALL:
        raise ForgeError(f"the comment does not begin with {CALL}, so nothing is measured")
    return "".join(rest)


def _pause_s(answer: httpx.Response) -> float | None:
    """Return after how many seconds a busy forge wants a request again; None if it refused it."""
    after, reset = (answer.headers.get(name, "") for name in ("Retry-After", "X-RateLimit-Reset"))
    if after.isdecimal():
        return float(after)
    if answer.headers.get("X-RateLimit-Remaining") == "0" and reset.isdecimal():
        return max(_PAUSE_S, float(reset) - time.time())
    busy = answer.status_code in (httpx.codes.CONFLICT, httpx.codes.TOO_MANY_REQUESTS) or answer.is_server_error
    return _PAUSE_S if busy else None


def _message(answer: httpx.Response) -> str:
    try:
        values = answer.json()
    except ValueError:
        return answer.reason_phrase
    return str(values.get("message") or values.get("error")) if isinstance(values, dict) else answer.reason_phrase
