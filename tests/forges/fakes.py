"""GitHub's and GitLab's REST interfaces on loopback. They judge every request, and their own answers, by a document."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.forges.openapi import Document, Operation, problems_of_answer, problems_of_request

HERE = Path(__file__).parent
TOKEN = "token-of-the-job"
NUMBER = 7
Answer: TypeAlias = tuple[int, Any]


@dataclass
class Trouble:
    """Answers to the next requests of one kind, in place of the right ones."""

    method: str
    path: str
    """A regular expression."""
    status: int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    after_work: bool = False
    """Whether the request is carried out, and only its answer is lost."""


@dataclass
class FakeForge:
    """What both have in common: a server, comments, and troubles."""

    document: ClassVar[Document]
    prefix: ClassVar[str] = ""
    me: ClassVar[str]
    """Who writes with the token."""
    head: str
    base: str
    is_fork: bool = False
    comments: list[dict[str, Any]] = field(default_factory=list)
    """Author and text, oldest first."""
    troubles: list[Trouble] = field(default_factory=list)
    slow_s: float = 0.0
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, template of the path, body."""
    wrong: list[str] = field(default_factory=list)
    """What the document forbids."""
    states: list[tuple[str, str, str]] = field(default_factory=list)
    """Commit, state and title of the check, in the order in which they changed."""
    url: str = ""
    last_id: int = 100
    lock: Any = field(default_factory=threading.Lock)

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def say(self, author: str, body: str) -> int:
        """Write a comment as somebody."""
        self.comments.append({"id": self.new_id(), "author": author, "body": body})
        return self.last_id

    @property
    def own(self) -> list[str]:
        """The texts of our comments."""
        return [one["body"] for one in self.comments if one["author"] == self.me]

    def answer(self, method: str, target: str, headers: Any, body: Any | None) -> tuple[Answer, dict[str, str]]:
        """Answer one request, with headers."""
        parts = urlsplit(target)
        path, query = parts.path.removeprefix(self.prefix), dict(parse_qsl(parts.query))
        operation = self.document.operation(method, path)
        if operation is None or not parts.path.startswith(self.prefix):
            self.wrong.append(f"{method} {target} is no operation")
            return (404, {"message": "Not Found"}), {}
        self.requests.append((method, operation.template, body))
        problems = problems_of_request(operation, query, headers.get("Content-Type", ""), body)
        problems += self.problems_of_headers(headers)
        self.wrong += [f"{method} {target}: {problem}" for problem in problems]
        trouble = next((one for one in self.troubles if one.method == method and re.search(one.path, path)), None)
        if trouble is not None:
            trouble.times -= 1
            self.troubles = [one for one in self.troubles if one.times]
            if trouble.after_work:
                self.work(method, operation, query, body)
            return (trouble.status, {"message": f"trouble {trouble.status}"}), trouble.headers
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return (401, {"message": "Bad credentials"}), {}
        (status, answer), more = self.work(method, operation, query, body)
        if status < 300:
            self.wrong += [
                f"answer to {method} {target}: {one}" for one in problems_of_answer(operation, status, answer)
            ]
        return (status, answer), more

    def problems_of_headers(self, headers: Any) -> list[str]:
        return [] if headers.get("User-Agent") else ["no User-Agent"]

    def work(
        self, method: str, operation: Operation, query: dict[str, str], body: Any
    ) -> tuple[Answer, dict[str, str]]:
        raise NotImplementedError

    def change_comment(self, number: int, body: str) -> Answer:
        own = next((one for one in self.comments if one["id"] == number), None)
        if own is None:
            return 404, {"message": "Not Found"}
        if own["author"] != self.me:
            return 403, {"message": "Resource not accessible by integration"}
        own["body"] = body
        return 200, self.shown(own)

    def shown(self, comment: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def page(self, comments: list[dict[str, Any]], query: dict[str, str], size: int) -> tuple[Answer, dict[str, str]]:
        number, size = int(query.get("page", 1)), min(100, int(query.get("per_page", size)))
        rest = len(comments) > number * size
        link = {"Link": f'<{self.url}/elsewhere?page={number + 1}>; rel="next"'} if rest else {}
        return (200, [self.shown(one) for one in comments[(number - 1) * size : number * size]]), link


@dataclass
class FakeGitHub(FakeForge):
    """GitHub: check runs, comments of an issue, a pull request, permissions."""

    document = Document(json.loads((HERE / "github.openapi.json").read_bytes()))
    me = "github-actions[bot]"
    permissions: dict[str, str] = field(default_factory=dict)
    checks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def problems_of_headers(self, headers: Any) -> list[str]:
        wanted = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
        return super().problems_of_headers(headers) + [
            f"{name} is {headers.get(name)!r}" for name, value in wanted.items() if headers.get(name) != value
        ]

    def work(
        self, method: str, operation: Operation, query: dict[str, str], body: Any
    ) -> tuple[Answer, dict[str, str]]:
        values, name = operation.values, operation.template.removeprefix("/repos/{owner}/{repo}")
        if (values["owner"], values["repo"]) != ("lab", "trainer"):
            return (404, {"message": "Not Found"}), {}
        if "check-runs" in name:
            return self.check(int(values.get("check_run_id", 0)), body), {}
        if "comments" in name:
            return self.comment(method, values, query, body)
        someone = {"id": 1, "login": values.get("username", "ada")}
        if name.endswith("/permission"):
            return (200, {"permission": self.permissions.get(someone["login"], "none"), "user": someone}), {}
        head = {"repo": {"id": 2 if self.is_fork else 1}, "sha": self.head, "user": someone}
        base = {"repo": {"id": 1}, "sha": self.base, "user": someone}
        return (200, {"id": 70, "user": someone, "body": None, "head": head, "base": base}), {}

    def comment(
        self, method: str, values: dict[str, str], query: dict[str, str], body: Any
    ) -> tuple[Answer, dict[str, str]]:
        if method == "GET":
            return self.page(self.comments, query, 30)
        if len(body["body"]) > 65_536:
            return (422, {"message": "body is too long"}), {}
        if method == "PATCH":
            return self.change_comment(int(values["comment_id"]), body["body"]), {}
        self.say(self.me, body["body"])
        return (201, self.shown(self.comments[-1])), {}

    def check(self, number: int, body: dict[str, Any]) -> Answer:
        if (body["status"] == "completed") != ("conclusion" in body):
            return 422, {"message": "conclusion"}
        number = number or self.new_id()
        check = self.checks.setdefault(number, {})
        check |= body
        self.states.append((check["head_sha"], body.get("conclusion", body["status"]), body["output"]["title"]))
        return 201 if "head_sha" in body else 200, {"id": number, "app": {"id": 1, "slug": "github-actions"}}

    def shown(self, comment: dict[str, Any]) -> dict[str, Any]:
        author = comment["author"]
        user = None if author == "ghost" else {"id": 1, "login": author}
        return {"id": comment["id"], "body": comment["body"], "user": user}

    def event(self, folder: Path, **values: Any) -> dict[str, str]:
        """Return the variables of a job that a push, or the event `values`, started."""
        own = values or {"action": "synchronize", "pull_request": {"number": NUMBER, "head": {"sha": self.head}}}
        path = folder / "event.json"
        path.write_text(json.dumps(own), encoding="utf-8")
        return {
            **{"GITHUB_ACTIONS": "true", "GITHUB_API_URL": self.url, "GITHUB_TOKEN": TOKEN, "GITLAB_CI": ""},
            **{"GITHUB_REPOSITORY": "lab/trainer", "GITHUB_EVENT_PATH": str(path)},
        }

    def asked(self, folder: Path, text: str, *, author: str = "grace", **changes: Any) -> dict[str, str]:
        """Return the variables of a job that a comment started."""
        comment = {"id": self.say(author, text), "body": text, "user": {"login": author}}
        comment["author_association"] = changes.pop("association", "MEMBER")
        issue = {"number": NUMBER, "pull_request": {}}
        return self.event(folder, **{"action": "created", "issue": issue, "comment": comment, **changes})


@dataclass
class FakeGitLab(FakeForge):
    """GitLab: statuses of commits, notes, a merge request."""

    document = Document(yaml.safe_load((HERE / "gitlab.openapi.yaml").read_text(encoding="utf-8")))
    prefix = "/api/v4"
    me = "project_3_bot"
    pipelines: int = 500
    current: dict[tuple[str, str], str] = field(default_factory=dict)
    """State of the unfinished status by commit and place."""
    _MOVES: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "pending": ("enqueue", ("created",)),
        "running": ("run", ("created", "pending")),
        "success": ("success", ("created", "pending", "running")),
        "failed": ("drop", ("created", "pending", "running")),
        "canceled": ("cancel", ("created", "pending", "running")),
        "skipped": ("skip", ("created", "pending")),
    }
    """For each state the event, and the states from which it may happen."""

    def work(
        self, method: str, operation: Operation, query: dict[str, str], body: Any
    ) -> tuple[Answer, dict[str, str]]:
        values, name = operation.values, operation.template
        if name == "/user":
            return (200, {"id": 9, "username": self.me}), {}
        if values["id"] != "3":
            return (404, {"message": "404 Project Not Found"}), {}
        if "statuses" in name:
            return self.status(values["sha"], body), {}
        if "notes" in name:
            return self.note(method, values, query, body)
        refs = {"base_sha": self.base, "head_sha": self.head, "start_sha": self.base}
        branches = {"source_branch": "faster", "target_branch": "main"}
        projects = {"source_project_id": 4 if self.is_fork else 3, "target_project_id": 3}
        return (200, {"iid": NUMBER, "sha": self.head, **branches, **projects, "diff_refs": refs}), {}

    def note(
        self, method: str, values: dict[str, str], query: dict[str, str], body: Any
    ) -> tuple[Answer, dict[str, str]]:
        if method == "GET":
            return self.page(self.comments[::-1], query, 20)
        if method == "PUT":
            return self.change_comment(int(values["note_id"]), body["body"]), {}
        self.say(self.me, body["body"])
        return (201, self.shown(self.comments[-1])), {}

    def status(self, sha: str, body: dict[str, Any]) -> Answer:
        if sha != self.head and "ref" not in body and "pipeline_id" not in body:
            return 404, {"message": "404 References for commit Not Found"}
        place = sha, str(body.get("pipeline_id") or body["ref"])
        before, after = self.current.get(place, "created"), body["state"]
        event, sources = self._MOVES[after]
        if before not in sources:
            return 400, {"message": f"Cannot transition status via :{event} from :{before}"}
        self.current[place] = after
        if after not in ("pending", "running"):
            del self.current[place]
        self.states.append((sha, after, body["description"]))
        return 201, {"id": self.new_id(), "status": after}

    def shown(self, comment: dict[str, Any]) -> dict[str, Any]:
        return {"id": comment["id"], "body": comment["body"], "author": {"id": 1, "username": comment["author"]}}

    def pipeline(self, **variables: str) -> dict[str, str]:
        """Return the variables of a new pipeline."""
        self.pipelines += 1
        return {
            **{"GITLAB_CI": "true", "CI_API_V4_URL": f"{self.url}{self.prefix}", "GITLAB_TOKEN": TOKEN},
            **{"CI_PROJECT_ID": "3", "CI_PROJECT_PATH": "lab/trainer", "CI_PIPELINE_ID": str(self.pipelines)},
            **{"CI_MERGE_REQUEST_IID": str(NUMBER), "CI_COMMIT_SHA": self.head, "GITHUB_ACTIONS": "", **variables},
        }


@contextmanager
def serving(forge: FakeForge) -> Iterator[None]:
    """Serve a fake. In the end, no request and no answer was wrong."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(forge.slow_s)
            with forge.lock:
                body = json.loads(content) if content else None
                (status, answer), headers = forge.answer(self.command, self.path, self.headers, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Type": "application/json", "Content-Length": len(text)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_PUT = _answer

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    forge.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert forge.wrong == []
