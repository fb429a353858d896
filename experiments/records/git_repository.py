"""Reading a git repository without changing it, whatever variables the caller has.

No hook, monitor, prompt or download runs, and no lock is taken. Filters for single files run as at a checkout. Only
`fetch` downloads, into a repository of its own.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.errors import CodeArchiveError, GitError

_GIT_S = 120.0
_FETCH_S = 3600.0
_OF_A_HOOK = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE"),
    *("GIT_REPLACE_REF_BASE", "GIT_NO_REPLACE_OBJECTS", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS"),
    *("GIT_IMPLICIT_WORK_TREE", "GIT_INTERNAL_SUPER_PREFIX", "GIT_CEILING_DIRECTORIES"),
    *("GIT_ATTR_SOURCE", "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS"),
)
"""Variables that would name another repository, or change what is read."""
_ALWAYS = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1",  # the nearest .git above counts, in a container, too
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",  # it then writes what is here, and fetches nothing
    "LANGUAGE": "C",
}
_REACHING = {"GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh"}
_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.splitIndex=false",
    "index.sparse=false",
    "submodule.recurse=false",
)
_TRUSTED_DIRECTORY = re.compile(r"--add safe\.directory (.+)")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A git repository with its objects, and the folder of its work tree that somebody asked about."""

    git_dir: Path
    folder: Path | None
    """None for a repository without a work tree."""
    prefix: str = ""
    """Of the folder below the root of the work tree, with a slash at its end."""
    any_owner: bool = False
    """Whether it may belong to another user. Then only settings of the repository count."""

    @classmethod
    def around(cls, folder: Path, *, any_owner: bool = False) -> "Repository":
        """Return the repository around a folder. Raises CodeArchiveError."""

        def asked(option: str) -> str:
            answer = run_git(folder, "rev-parse", option, any_owner=any_owner)
            return os.fsdecode(answer).removesuffix("\n")

        git_dir = Path(asked("--absolute-git-dir"))
        if asked("--is-inside-work-tree") != "true":
            return cls(git_dir=git_dir, folder=None, any_owner=any_owner)
        return cls(git_dir=git_dir, folder=folder, prefix=asked("--show-prefix"), any_owner=any_owner)

    def read(self, *arguments: str, stdin: bytes = b"", replacing: bool = True) -> bytes:
        """Run a command that needs objects only; without `replacing`, as if nobody had used `git replace`."""
        variables = {"GIT_DIR": str(self.git_dir), "GIT_WORK_TREE": str(self.git_dir)}  # a stored one may be gone
        if not replacing:
            variables["GIT_NO_REPLACE_OBJECTS"] = "1"
        return run_git(self.git_dir, *arguments, stdin=stdin, variables=variables, any_owner=self.any_owner)

    def read_work_tree(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Run a command below the folder of the work tree."""
        if self.folder is None:
            raise AssertionError("a repository without a work tree")
        return run_git(self.folder, *arguments, stdin=stdin, any_owner=self.any_owner)

    def write(self, files: Path, index: Path, *arguments: str, stdin: bytes = b"") -> bytes:
        """Run a command with another work tree and index. Raises CodeArchiveError for a filter that fails, too."""
        where = {"GIT_DIR": str(self.git_dir), "GIT_WORK_TREE": str(files), "GIT_INDEX_FILE": os.fspath(index)}
        return run_git(files, *arguments, stdin=stdin, variables=where, any_owner=self.any_owner, strict=True)

    def commit(self, revision: str) -> str:
        """Return the whole name of a commit. Raises CodeArchiveError."""
        try:
            return self.read("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
        except GitError as error:
            raise self._without_commit(revision, error) from error

    def has_commit(self, name: str) -> bool:
        """Return whether the repository has a commit of this whole name."""
        try:
            self.read("cat-file", "-e", f"{name}^{{commit}}")
        except GitError:
            return False
        return True

    def fetch(self, commit: str) -> None:
        """Get the objects of a commit from the server; nothing is checked out. Raises CodeArchiveError."""
        options = ("--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head")
        try:
            run_git(self.git_dir, "fetch", *options, "origin", commit, variables=_REACHING)
        except GitError as error:
            raise CodeArchiveError(f"commit {commit} cannot be fetched from origin: {reason(error.stderr)}") from error

    def is_before(self, commit: str, later: str) -> bool:
        """Return whether a commit is another one or an ancestor of it."""
        return not int(self.read("rev-list", "--count", commit, f"^{later}"))

    def titled(self, commit: str) -> str:
        """Return the short name and the subject of a commit."""
        return self.read("log", "-1", "--format=%h %s", commit).decode(errors="replace").strip()

    def setting(self, name: str) -> str:
        """Return a value of git's configuration; an empty text without one."""
        return self.read("config", "--default", "", "--get", name).decode(errors="replace").strip()

    @property
    def is_shallow(self) -> bool:
        """Whether it is a shallow clone, which lacks older commits."""
        return self.read("rev-parse", "--is-shallow-repository") == b"true\n"

    @property
    def common_dir(self) -> Path:
        """The folder that all work trees of the repository share."""
        return self.git_dir / os.fsdecode(self.read("rev-parse", "--git-common-dir")).removesuffix("\n")

    @property
    def here(self) -> str:
        """Beginning of a command for people that runs in this repository."""
        return f"git -C {shlex.quote(str(self.folder or self.git_dir))}"

    def _without_commit(self, revision: str, error: GitError) -> CodeArchiveError:
        where = f"the repository around {str(self.folder or self.git_dir)!r} has no commit {revision!r}"
        if not self.read("rev-list", "--all", "--max-count=1"):
            return CodeArchiveError(f"{where}, nor any other", f"type `{self.here} add . && {self.here} commit`")
        fetch, branches = f"{self.here} fetch", "origin '+refs/heads/*:refs/remotes/origin/*'"
        if self.is_shallow:
            hint = f"type `{fetch} --unshallow {branches}`; in a workflow of GitHub, check out with `fetch-depth: 0`"
            return CodeArchiveError(f"{where}: it is a shallow clone, which lacks older commits and branches", hint)
        reasons = [line.removeprefix("error: ") for line in error.stderr.splitlines() if line.startswith("error: ")]
        hint = f"`{self.here} log --oneline --all` lists its commits; `{fetch} {branches}` gets those of a server"
        return CodeArchiveError(": ".join((where, *reasons[:1])), hint)


def is_work_tree(folder: Path) -> bool:
    """Return whether a folder is in the work tree of a git repository. Raises CodeArchiveError."""
    above = [folder.resolve(), *folder.resolve().parents]
    if not any(os.path.lexists(one / ".git") for one in above):
        return False
    return run_git(folder, "rev-parse", "--is-inside-work-tree") == b"true\n"


def names_in(output: bytes) -> list[str]:
    """Return the names in the output of a git command with `-z`."""
    return [name for name in os.fsdecode(output).split("\0") if name]


def run_git(
    folder: Path,
    *arguments: str,
    stdin: bytes = b"",
    variables: dict[str, str] | None = None,
    any_owner: bool = False,
    strict: bool = False,
) -> bytes:
    """Return the output of a git command in a folder. Raises GitError, and CodeArchiveError when none can run.

    Without `variables`, git looks for the repository around the folder. `strict`: errors that git survives count.
    """
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} if any_owner else {}  # closed to a trial
    settings = ("safe.directory=*",) if any_owner else ()
    command = _command(folder, arguments, {**own, **(variables or {})}, settings)
    status, output, errors = _run(command, folder, stdin)
    stderr = errors.decode(errors="replace")
    if status or (strict and any(line.startswith("error:") for line in stderr.splitlines())):
        raise _error(folder, stderr)
    return output


def fetch(folder: Path, url: str, *refspecs: str) -> None:
    """Fetch from another repository into the one in `folder`, which begins as an empty folder.

    Settings of the user, such as helpers for passwords, count. From a shallow clone it becomes one, too. Raises
    GitError, and CodeArchiveError without git.
    """
    depth = "--unshallow" if (folder / ".git" / "shallow").exists() else "--update-shallow"
    options = ("--quiet", "--force", "--prune", "--no-tags", "--no-write-fetch-head", depth, "--end-of-options")
    reach = {**_REACHING, "GIT_DIR": str(folder / ".git")}
    for arguments in (("init", "--quiet"), ("fetch", *options, url, *refspecs)):
        status, _output, errors = _run(_command(folder, arguments, reach), folder, b"", limit_s=_FETCH_S)
        if status:
            raise _error(folder, errors.decode(errors="replace"))


def _command(
    folder: Path, arguments: Iterable[str], variables: dict[str, str], settings: Iterable[str] = ()
) -> list[str]:
    return [
        *("env", *(part for name in _OF_A_HOOK for part in ("-u", name))),
        *(f"{name}={value}" for name, value in {**_ALWAYS, **variables}.items()),
        *("git", *(part for setting in (*_SETTINGS, *settings) for part in ("-c", setting))),
        *("-C", str(folder), *arguments),
    ]


def _run(command: list[str], folder: Path, stdin: bytes, *, limit_s: float = _GIT_S) -> tuple[int, bytes, bytes]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            output, errors = process.communicate(stdin, timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # filters, too, which hold the pipes
            if isinstance(error, subprocess.TimeoutExpired):
                raise CodeArchiveError(f"git did not read {str(folder)!r} within {limit_s:.0f} s") from error
            raise
    return process.returncode, output, errors


def _error(folder: Path, stderr: str) -> CodeArchiveError:
    where, here = repr(str(folder)), f"git -C {shlex.quote(str(folder))}"
    if shutil.which("git") is None:
        return CodeArchiveError(f"{where} is in a git repository, but git is not installed here", "install git")
    if (directory := _TRUSTED_DIRECTORY.search(stderr)) is not None:
        hint = f"if you trust it, type `git config --global --add safe.directory {directory[1]}`"
        return GitError(f"the repository around {where} belongs to another user, so git does not read it", hint, stderr)
    if "promisor remote" in stderr:
        hint = f"type `{here} fetch --refetch --no-filter`"
        return GitError(f"the repository around {where} is a partial clone, which lacks some files", hint, stderr)
    if "not a git repository" in stderr:
        hint = "name a folder in a git repository; a `.git` that names none is to be repaired or removed"
        return GitError(f"{where} is in no git repository", hint, stderr)
    return GitError(f"git cannot read {where}: {reason(stderr)}", None, stderr)


def reason(stderr: str) -> str:
    """Return the last lines that git wrote, without advice and warnings."""
    lines = [line for line in stderr.strip().splitlines() if not line.startswith(("hint:", "warning:"))]
    return " ".join(lines)[-500:]
