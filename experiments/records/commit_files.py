"""Files of a commit as a checkout writes them: filters, line ends, links, executable bits, submodules.

Git writes them with the repository's own settings, from an index of its own, so the work tree and its index stay as
they are. A file that git calls unmodified in the work tree must be the same there; otherwise the two would be
different arms without a difference, and the commit is refused.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from ablate.experiments.errors import CodeArchiveError, GitError
from ablate.experiments.records.code_tree import CodeFile, check_size, is_left_out, left_out_names, read_file
from ablate.experiments.records.git_repository import Repository, names_in, reason

_SUBMODULE = "160000"
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/.*\nsize (\d{1,18})\n", re.DOTALL)
"""A file that git-lfs has not replaced by its content, with the size of that."""
_MOST_OF_A_POINTER = 1024
_Git = Callable[..., bytes]
"""Runs git with the index and the files of a commit."""
_CONVERTING = frozenset({"filter", "working-tree-encoding", "ident", "eol", "crlf", "text"})
"""Attributes that change the bytes of a file at a checkout."""


@dataclass(frozen=True, kw_only=True)
class CommitFiles:
    """What `write_commit` wrote."""

    commit: str
    """The commit's whole name."""
    names: tuple[str, ...]
    """Of the files below the folder."""


def write_commit(folder: Path, revision: str, target: Path, *, any_owner: bool = False) -> CommitFiles:
    """Write the files that a commit of the repository around `folder` has below it into the new folder `target`.

    `revision` is any that git reads, such as a branch. `any_owner`: the repository may belong to another user. Raises
    CodeArchiveError.
    """
    if not folder.is_dir():
        raise CodeArchiveError(f"{str(folder)!r} is no folder")
    repository = Repository.around(folder, any_owner=any_owner)
    commit = repository.commit(revision)
    part = _Checkout(repository=repository, commit=commit, name=f"commit {revision} of {str(folder)!r}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".commit-") as place:
        files = Path(place, "files")
        names = set(part.write(files))
        left_out = left_out_names(names)
        for name in left_out:
            (files / repository.prefix / name).unlink()
        (files / repository.prefix).rename(target)
    return CommitFiles(commit=commit, names=tuple(sorted(names - left_out)))


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A file, a link or a submodule of a commit."""

    mode: str
    object: str
    name: str
    """Path below the folder that was asked for."""


@dataclass(frozen=True, kw_only=True)
class _Checkout:
    """The files of one repository: of the one around the folder, or of a submodule."""

    repository: Repository
    commit: str
    name: str
    """In messages."""

    def write(self, files: Path) -> list[str]:
        """Write the files, with those of submodules, below `files`; return their names below the folder."""
        entries = self._entries()
        blobs = [entry for entry in entries if entry.mode != _SUBMODULE]
        root = files / self.repository.prefix
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ablate-index-") as place:
            git = partial(self.repository.write, files, Path(place, "index"))
            filtered = self._check_out(git, blobs)
            modified = self._check_work_tree(git, blobs, root)
        for entry in filtered:
            self._check_content(read_file(root, entry.name))
        names = [entry.name for entry in blobs]
        for entry in entries:
            if entry.mode == _SUBMODULE:
                inner = self._submodule(entry, modified).write(root / entry.name)
                names += [f"{entry.name}/{name}" for name in inner]
        return names

    def _entries(self) -> list[_Entry]:
        entries = list(self._listed())
        self._check_replaced(entries)
        if not entries and self.repository.prefix:
            hint = f"type `{self.repository.here} log --oneline -- .` to see the commits that have it"
            raise CodeArchiveError(f"{self.name}: the commit has no folder {self.repository.prefix!r}", hint)
        inside = {f"{entry.name}/x" if entry.mode == _SUBMODULE else entry.name: entry for entry in entries}
        left_out = left_out_names(inside)
        return [entry for name, entry in inside.items() if name not in left_out]

    def _listed(self, *, replacing: bool = True) -> Iterator[_Entry]:
        """Yield the commit's entries below the folder."""
        prefix = self.repository.prefix
        where = ("--", prefix) if prefix else ()
        command = ("ls-tree", "-rz", "--full-tree", self.commit, *where)
        for line in names_in(self.repository.read(*command, replacing=replacing)):
            head, name = line.split("\t", 1)
            mode, _kind, hashed = head.split(" ")
            if name.startswith(prefix):
                yield _Entry(mode=mode, object=hashed, name=name.removeprefix(prefix))

    def _check_replaced(self, entries: Sequence[_Entry]) -> None:
        """Raise CodeArchiveError if `git replace` changes the commit's files: other clones have other ones."""
        listed = self.repository.read("for-each-ref", "--format=%(refname:lstrip=2)", "refs/replace/")
        replaced = set(listed.decode().split())
        if not replaced:
            return
        own = list(self._listed(replacing=False))
        if own != entries or any(entry.object in replaced for entry in entries):
            here = self.repository.here
            hint = f"type `{here} replace --list`, and `{here} replace -d OBJECT`"
            raise CodeArchiveError(f"{self.name}: `git replace` puts other files in the place of the commit's", hint)

    def _check_out(self, git: _Git, blobs: Sequence[_Entry]) -> list[_Entry]:
        """Write files and links; return those with a filter. Raises CodeArchiveError, first of all for too much."""
        git("read-tree", self.commit)
        paths = b"".join(os.fsencode(f"{self.repository.prefix}{entry.name}\0") for entry in blobs)
        filters = _attributes(git("check-attr", "--cached", "-z", "--stdin", "filter", stdin=paths))
        paths_of_filters = {path for (path, _key), value in filters.items() if value != "unset"}
        filtered = [entry for entry in blobs if self.repository.prefix + entry.name in paths_of_filters]
        self._check_size(blobs, filtered)
        try:
            git("checkout-index", "-z", "--stdin", stdin=paths)
        except GitError as error:
            hint = f"`{self.repository.here} config --get-regexp '^filter'` lists the programs that a checkout runs"
            raise CodeArchiveError(f"{self.name} cannot be checked out: {reason(error.stderr)}", hint) from error
        return filtered

    def _check_size(self, blobs: Sequence[_Entry], filtered: Sequence[_Entry]) -> None:
        objects = sorted({entry.object for entry in blobs})
        listed = self.repository.read("cat-file", "--batch-check=%(objectsize)", stdin="\n".join(objects).encode())
        sizes = dict(zip(objects, listed.decode().splitlines(), strict=True))
        missing = next((entry.name for entry in blobs if not sizes[entry.object].isdigit()), None)
        if missing is not None:
            hint = f"type `{self.repository.here} fsck`"
            raise CodeArchiveError(f"{self.name}: the repository lacks the content of {missing!r}", hint)
        by_name = {entry.name: int(sizes[entry.object]) for entry in blobs}
        for entry in filtered:
            if by_name[entry.name] < _MOST_OF_A_POINTER:
                pointer = _POINTER.match(self.repository.read("cat-file", "blob", entry.object))
                by_name[entry.name] = int(pointer[1]) if pointer else by_name[entry.name]
        check_size(self.name, by_name)

    def _check_content(self, file: CodeFile) -> None:
        """Raise CodeArchiveError for a pointer whose content is missing, unless the work tree has it so, too."""
        if _POINTER.match(file.content) and self._present(file.name) != file:
            here = self.repository.here
            hint = f"install git-lfs, and type `{here} lfs install --local && {here} lfs fetch origin {self.commit}`"
            raise CodeArchiveError(f"{self.name}: {file.name!r} is a pointer of git-lfs without its content", hint)

    def _present(self, name: str) -> CodeFile | None:
        """Return a file that the folder of the work tree would send."""
        folder = self.repository.folder
        if folder is None or is_left_out(folder, name) or not os.path.lexists(folder / name):
            return None
        return read_file(folder, name)

    def _check_work_tree(self, git: _Git, blobs: Sequence[_Entry], root: Path) -> set[str] | None:
        """Return what is modified in the work tree; None without one.

        Raises CodeArchiveError for a file that is different there although git calls it unmodified, and although it has
        the same attributes.
        """
        if self.repository.folder is None:
            return None
        modified = self._modified()
        for entry in blobs:
            if entry.name in modified:
                continue
            expected, present = read_file(root, entry.name), self._present(entry.name)
            if present != expected and self._converting(git, entry.name) == self._converting(None, entry.name):
                raise self._unlike(present, expected)
        return modified

    def _converting(self, git: _Git | None, name: str) -> dict[str, str]:
        """Return the attributes that change a file's bytes, of the commit or in the work tree (without `git`)."""
        if git is None:
            output = self.repository.read_work_tree("check-attr", "-z", "--all", "--", name)
        else:
            output = git("check-attr", "--cached", "-z", "--all", "--", self.repository.prefix + name)
        return {key: value for (_path, key), value in _attributes(output).items() if key in _CONVERTING}

    def _modified(self) -> set[str]:
        """Return the names, also of submodules, that git calls different in the work tree and the commit."""
        options = ("--name-only", "--no-renames", "--no-ext-diff", "--relative", "-z")
        return set(names_in(self.repository.read_work_tree("diff", *options, self.commit)))

    def _unlike(self, present: CodeFile | None, expected: CodeFile) -> CodeArchiveError:
        """Return why a checkout writes another file than the unmodified one of the work tree."""
        name, here, quoted = expected.name, self.repository.here, shlex.quote(expected.name)
        detail = f"{self.name} is not the work tree: git calls {name!r} unmodified there, but"
        flag = self.repository.read_work_tree("ls-files", "-v", "--", name).decode(errors="replace")[:1]
        if flag.islower():
            hint = f"type `{here} update-index --no-assume-unchanged {quoted}`"
            return CodeArchiveError(f"{detail} it is marked as assume-unchanged, and differs", hint)
        if flag == "S":
            sparse = self.repository.setting("core.sparseCheckout") == "true"
            command = "sparse-checkout disable" if sparse else f"update-index --no-skip-worktree {quoted}"
            hint = f"type `{here} {command}`"
            return CodeArchiveError(f"{detail} it is left out of the checkout (skip-worktree)", hint)
        if present is None:
            hint = "move the environment out of the repository's folders"
            return CodeArchiveError(f"{detail} it lies in a Python environment, which is no code", hint)
        if present.content == expected.content:
            hint = f"type `chmod {'+x' if expected.kind == 'program' else '-x'} {quoted}`"
            return CodeArchiveError(f"{detail} its executable bit differs, which core.fileMode=false hides", hint)
        one = f"rm {quoted} && git checkout -- {quoted}"
        hint = f"in {str(self.repository.folder)!r}, type `{one}`; all: `git rm -rq --cached . && git reset -q --hard`"
        if _POINTER.match(present.content) or _POINTER.match(expected.content):
            hint = f"install git-lfs, and type `{here} lfs install --local && {here} lfs pull`"
        return CodeArchiveError(f"{detail} a checkout writes other bytes ({self._reasons(name)})", hint)

    def _reasons(self, name: str) -> str:
        """Return the attributes and settings that change a file's bytes."""
        reasons = [f"attribute {key}={value}" for key, value in self._converting(None, name).items()]
        settings = {setting: self.repository.setting(setting) for setting in ("core.autocrlf", "core.eol")}
        reasons += [f"{setting}={value}" for setting, value in settings.items() if value not in {"", "false"}]
        return ", ".join(reasons) or "attributes or settings changed after the last checkout"

    def _submodule(self, entry: _Entry, modified: set[str] | None) -> "_Checkout":
        """Return the part of a submodule. Raises CodeArchiveError for one that is not here, or not as git says."""
        name = f"submodule {entry.name!r} of {self.name}"
        unmodified = modified is not None and entry.name not in modified
        checked_out = self._checked_out(entry.name)
        candidates = checked_out if unmodified else (*checked_out, *self._stored(entry.name))
        repository = next((one for one in candidates if one.has_commit(entry.object)), None)
        if repository is None:
            command = f"{self.repository.here} submodule update --init --recursive"
            hint = f"with {self.commit[:12]} checked out, type `{command}`"
            raise CodeArchiveError(f"{name} is not here: no repository has its commit {entry.object[:12]}", hint)
        part = _Checkout(repository=repository, commit=entry.object, name=name)
        if unmodified and (self._is_left_out(f"{entry.name}/x") or part._modified()):
            hint = f"type `{self.repository.here} status --ignore-submodules=none`"
            raise CodeArchiveError(f"{name} is not that of the work tree, although git calls it unmodified", hint)
        return part

    def _is_left_out(self, name: str) -> bool:
        return self.repository.folder is not None and is_left_out(self.repository.folder, name)

    def _checked_out(self, name: str) -> tuple[Repository, ...]:
        """Return the repository of a submodule in the work tree, if there is one."""
        folder = self.repository.folder
        if folder is None or not os.path.lexists(folder / name / ".git"):
            return ()
        inner = Repository.around(folder / name, any_owner=self.repository.any_owner)
        return () if inner.prefix else (inner,)

    def _stored(self, name: str) -> Iterator[Repository]:
        """Yield the repositories that git keeps of a submodule which is not checked out, or was at another place."""
        listed = self.repository.read("ls-tree", "--name-only", "--full-tree", self.commit, "--", ".gitmodules")
        if not listed:
            return
        places = ("config", "-z", "--blob", f"{self.commit}:.gitmodules", "--get-regexp", r"^submodule\..*\.path$")
        for line in names_in(self.repository.read(*places)):
            key, place = line.split("\n", 1)
            module = PurePosixPath(key.removeprefix("submodule.").removesuffix(".path"))
            if place != self.repository.prefix + name or ".." in module.parts:
                continue
            for above in (self.repository.git_dir, self.repository.common_dir):
                if (above / "modules" / module / "HEAD").is_file():
                    git_dir, any_owner = above / "modules" / module, self.repository.any_owner
                    yield Repository(git_dir=git_dir, folder=None, any_owner=any_owner)


def _attributes(output: bytes) -> dict[tuple[str, str], str]:
    """Return the values in an output of `git check-attr -z` by name of file and attribute, without those of no use."""
    parts = [os.fsdecode(part) for part in output.split(b"\0")]
    values = zip(parts[0::3], parts[1::3], parts[2::3], strict=False)  # behind the last one is an empty part
    return {(name, attribute): value for name, attribute, value in values if value != "unspecified"}
