"""The branch of a remote repository, in a repository below ~/.cache/ablate that nothing else uses."""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from ablate.experiments.errors import CodeArchiveError, GitError, SpecError, SpecProblem
from ablate.experiments.records import git_repository
from ablate.experiments.records.git_repository import Repository
from ablate.experiments.system.setting_values import shown

_OWED = "refs/ablate/owed"
"""Refs of messages that somebody is still to get: `NIGHT/RECEIVER`."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A repository to fetch from, and the folder of code in it."""

    url: str
    code: str
    """Below the root of the repository, without a slash at its end; empty for the root."""

    @classmethod
    def of(cls, repo: str | None, spec: Path, code: str) -> "Remote":
        """Return `repo` with the folder `code` below its root; without it the origin of the repository around the spec.

        Then `code` is relative to the spec, as in every command. Raises SpecError, CodeArchiveError.
        """
        if repo is not None:
            folder = PurePosixPath(os.path.normpath(code))
            if folder.is_absolute() or ".." in folder.parts:
                detail = f"with --repo the code is a folder of that repository, and {code!r} is outside of it"
                raise SpecError(
                    [SpecProblem(pointer="/workload/code", detail=detail, hint="write for example training")]
                )
            return cls(
                url=str(Path(repo).absolute()) if Path(repo).exists() else repo,
                code="" if folder == PurePosixPath() else str(folder),
            )
        around = Repository.around(spec.parent / code)
        url = around.setting("remote.origin.url")
        if not url:
            detail = f"the repository around {str(spec.parent / code)!r} has no remote named origin"
            raise SpecError([SpecProblem(pointer="--repo", detail=detail, hint="--repo URL, with the folder below it")])
        root = Path(os.fsdecode(around.read_work_tree("rev-parse", "--show-toplevel")).removesuffix("\n"))
        return cls(url=str(root / url) if (root / url).exists() else url, code=around.prefix.removesuffix("/"))


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A fetched branch."""

    repository: Repository
    folder: Path
    """Stands for the folder of code, without its files."""
    head: str
    """Name of the newest commit."""

    @classmethod
    def fetched(cls, cache: Path, remote: Remote, name: str) -> "Branch":
        """Fetch a branch with its history, and the tags. Raises CodeArchiveError."""
        folder, ref = cache / remote.code, f"refs/remotes/origin/{name}"
        branch = f"branch {name!r} of {shown(remote.url)}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            git_repository.fetch(cache, remote.url, f"+refs/heads/{name}:{ref}", "+refs/tags/*:refs/tags/*")
        except GitError as error:
            reason = git_repository.reason(error.stderr).replace(remote.url, shown(remote.url))
            raise CodeArchiveError(f"{branch} cannot be fetched: {reason}") from error
        repository = Repository.around(folder)
        if repository.is_shallow:
            hint = "name the repository that it was cloned from, or type `git fetch --unshallow` in it"
            raise CodeArchiveError(f"{branch} lacks older commits: the repository is a shallow clone", hint)
        return cls(repository=repository, folder=folder, head=repository.commit(ref))

    @cached_property
    def history(self) -> frozenset[str]:
        """Names of the newest commit and all before it."""
        return frozenset(self.repository.read("rev-list", self.head).decode().split())

    def commit(self, revision: str) -> str | None:
        """Return the whole name of a commit in the history; None for any other text."""
        try:
            commit = self.repository.commit(revision)
        except CodeArchiveError:
            return None
        return commit if commit in self.history else None

    def commits_since(self, commit: str, last: str = "") -> int:
        """Return how many commits after one, up to `last` or the newest, change the code; a merge counts as one."""
        span = f"{commit}..{last or self.head}"
        changed = ("--count", "--first-parent", span, "--", self.repository.prefix or ".")
        return int(self.repository.read("rev-list", *changed))

    def code_of(self, commit: str) -> str:
        """Return the object of the folder of code in a commit. Raises CodeArchiveError."""
        try:
            name = f"{commit}:{self.repository.prefix}"
            return self.repository.read("rev-parse", "--verify", "--end-of-options", name).decode().strip()
        except GitError as error:
            detail = f"commit {commit[:12]} has no folder {self.repository.prefix!r}"
            raise CodeArchiveError(detail, "the code must be a folder of the repository") from error

    def owe(self, night: str, receivers: Sequence[str]) -> None:
        """Note that these receivers are to get the message of a night if it is confirmed."""
        for receiver in receivers:
            self.repository.read("update-ref", f"{_OWED}/{night}/{_digest(receiver)}", self.head)

    def owes(self, night: str, receiver: str) -> bool:
        """Return whether a receiver is still to get the message of a night."""
        try:
            self.repository.read("rev-parse", "--verify", "--quiet", f"{_OWED}/{night}/{_digest(receiver)}")
        except GitError:
            return False
        return True

    def paid(self, night: str, receiver: str) -> None:
        """Note that a receiver has the message of a night."""
        self.repository.read("update-ref", "-d", f"{_OWED}/{night}/{_digest(receiver)}")


@contextmanager
def own_cache(name: str, url: str) -> Iterator[Path]:
    """Yield the folder of a cache, while no other process uses it. Raises CodeArchiveError if one does."""
    folder = Path.home() / ".cache" / "ablate" / "branches" / _digest(f"{name} {url}")
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CodeArchiveError(f"another `ablate nightly` of {name} is running here; it goes on") from None
        yield folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
