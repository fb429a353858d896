"""A real git server on loopback, with a pull request whose merge base is not the tip of the target branch."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tests.repositories import git

_PERSON = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")


@dataclass
class Hosted:
    """A repository on the server, a fork of it, and the folder in which a person works."""

    url: str
    bare: Path
    person: Path

    def commit(self, subject: str, files: dict[str, str]) -> str:
        """Commit files, and return the commit."""
        for name, text in files.items():
            path = self.person / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        git(self.person, "add", "--all")
        git(self.person, *_PERSON, "commit", "--allow-empty", "-qm", subject)
        return git(self.person, "rev-parse", "HEAD")

    def merge(self, branch: str) -> str:
        """Merge a branch with a merge commit, and return it."""
        git(self.person, *_PERSON, "merge", "-q", "--no-ff", "-m", f"Merge {branch}", branch)
        return git(self.person, "rev-parse", "HEAD")

    def push(self, commit: str, *references: str) -> None:
        """Put a commit at references of the server, whatever was there."""
        git(self.person, "push", "-q", "-f", str(self.bare), *(f"{commit}:{one}" for one in references))

    def checkout(self, folder: Path, branch: str, *options: str) -> Path:
        """Clone as a job does: a branch, over HTTP."""
        git(
            self.person.parent,
            *_PERSON,
            "clone",
            "-q",
            "-c",
            "http.proxy=",
            *options,
            "--branch",
            branch,
            self.url,
            str(folder),
        )
        return folder


@contextmanager
def git_server(root: Path) -> Iterator[Hosted]:
    """Serve one repository below `root` by `git http-backend`."""
    bare, person = root / "served" / "trainer.git", root / "person"
    for folder, options in ((bare, ("--bare",)), (person, ())):
        folder.mkdir(parents=True)
        git(folder, *_PERSON, "init", "-q", *options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(bare.parent))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Hosted(url=f"http://127.0.0.1:{server.server_address[1]}/trainer.git", bare=bare, person=person)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(root: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Hands requests to git's own program, by CGI."""

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            variables = {
                **{"GIT_PROJECT_ROOT": str(root), "GIT_HTTP_EXPORT_ALL": "1", "PATH": os.environ["PATH"]},
                **{"REQUEST_METHOD": self.command, "PATH_INFO": parts.path, "QUERY_STRING": parts.query},
                **{"CONTENT_TYPE": self.headers.get("Content-Type", ""), "REMOTE_ADDR": "127.0.0.1"},
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            }
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            done = subprocess.run(["git", "http-backend"], input=sent, env=variables, capture_output=True, check=True)
            head, _, body = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            return

    return Handler
