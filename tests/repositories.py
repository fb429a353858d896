"""Drawn git repositories with submodules, filters and attributes, and plain walks over what git checks out."""

import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

SETTINGS = """
[user]
    name = a
    email = a@example.org
[init]
    defaultBranch = main
[protocol "file"]
    allow = always
[filter "upper"]
    clean = tr A-Z a-z
    smudge = tr a-z A-Z
[core]
    autocrlf = {autocrlf}
"""
ATTRIBUTES = (
    "* text=auto",
    "*.txt text eol=crlf",
    "*.sh text eol=lf",
    "*.md export-ignore",
    "*.py export-subst",
    "*.id ident",
    "*.u16 text working-tree-encoding=UTF-16LE",
    "*.up filter=upper",
    "*.bin filter=lfs -text",
    "*.no filter=unknown",
    "tests export-ignore",
    "[attr]shell text eol=crlf",
    "*.cmd shell",
    "* -text",
)
NAMES = ("a", "b c", "-x", "back\\slash", "é漢", "\udcff", "q'\"*", "a.b")
ENDINGS = (".txt", ".sh", ".md", ".py", ".id", ".u16", ".up", ".no", ".cmd", ".bin", "")
FOLDERS = ("", "", "sub/", "sub/deep/", "tests/", "node_modules/")


def git(folder: Path, *arguments: str) -> str:
    """Run git as a person does; return its output."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)
    return os.fsdecode(done.stdout).strip()


def is_clean(folder: Path) -> bool:
    return git(folder, "status", "--porcelain", "--ignored=no") == ""


def walked(folder: Path) -> dict[bytes, tuple[str, bytes]]:
    """What a plain walk finds: kind and content of every file by its raw name; the oracle of these tests."""
    entries = {}
    for above, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in {".git", "node_modules"}]
        for path in (Path(above) / name for name in (*names, *folders)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                entry = "link", os.fsencode(os.path.normpath(path.readlink()))
            elif stat.S_ISDIR(mode) or path.name == ".git":
                continue
            else:
                entry = ("program" if mode & 0o100 else "file"), path.read_bytes()
            entries[os.fsencode(path.relative_to(folder))] = entry
    return entries


def submodules_of(folder: Path) -> list[str]:
    """Return the submodules of a work tree, whose names are their places."""
    entries = git(folder, "ls-files", "--stage", "-z").split("\0")
    return [entry.split("\t")[1] for entry in entries if entry.startswith("160000 ")]


class DrawnRepository:
    """A repository with three commits, which may have submodules with submodules."""

    def __init__(self, folder: Path, draw: random.Random, *, depth: int = 2) -> None:
        self.folder = folder
        self._draw = draw
        self._inner: list[DrawnRepository] = []
        folder.mkdir(parents=True)
        git(folder, "init", "-q")
        for number in range(3):
            self._change()
            if depth and draw.random() < 0.4:
                name = draw.choice(["lib", "sub/lib", "vendor é"]) + str(number)
                inner = DrawnRepository(folder.parent / f"{folder.name}-{number}", draw, depth=depth - 1)
                self._inner.append(inner)
                git(folder, "submodule", "--quiet", "add", str(inner.folder), name)
            if self._inner and draw.random() < 0.5:
                self._move_submodule()
            git(folder, "add", "--all")
            git(folder, "commit", "-qm", f"commit {number}", "--allow-empty")
        git(folder, "submodule", "--quiet", "update", "--init", "--recursive")

    def _change(self) -> None:
        draw, folder = self._draw, self.folder
        for _ in range(draw.randrange(1, 6)):
            path = folder / (draw.choice(FOLDERS) + draw.choice(NAMES) + draw.choice(ENDINGS))
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() or draw.random() < 0.15:
                path.unlink(missing_ok=True)
                path.symlink_to(draw.choice(["a", "missing", "./x", "a b"]))
            else:
                path.write_bytes(self._content(path.suffix))
                path.chmod(draw.choice([0o644, 0o755]))
        for above in ("", "sub/"):
            if draw.random() < 0.5:
                (folder / above).mkdir(exist_ok=True)
                lines = draw.sample(ATTRIBUTES, draw.randrange(0, 5))
                (folder / above / ".gitattributes").write_text("".join(f"{line}\n" for line in lines))

    def _content(self, ending: str) -> bytes:
        text = self._draw.choice(["", "x", "a\nb\n", "a\r\nb\r\n", "a\nb\r\n", "$Id$ $Format:%H$\n", "\0\1\n"])
        if ending == ".bin":
            size = self._draw.randrange(1000)
            return f"version https://git-lfs.github.com/spec/v1\noid sha256:{size:064}\nsize {size}\n".encode()
        return text.encode("utf-16-le" if ending == ".u16" else "utf-8")

    def _move_submodule(self) -> None:
        """Commit in a submodule, so that the repository names another commit of it."""
        inner = self._draw.choice(self._inner)
        inner._change()
        git(inner.folder, "add", "--all")
        git(inner.folder, "commit", "-qm", "more", "--allow-empty")
        for name in submodules_of(self.folder):
            if git(self.folder, "config", "-f", ".gitmodules", f"submodule.{name}.url") == str(inner.folder):
                git(self.folder / name, "fetch", "-q")
                git(self.folder / name, "checkout", "-qf", "origin/HEAD")

    def clone(self, target: Path, *options: str) -> Path:
        """Clone it with its submodules, as a stranger does."""
        subprocess.run(
            ["git", "clone", "-q", "--recurse-submodules", *options, str(self.folder), str(target)],
            check=True,
            capture_output=True,
        )
        return target


def checked_out(clone: Path, commit: str) -> dict[bytes, tuple[str, bytes]]:
    """The files of a commit in a clone of its own: every file is written anew."""
    for path in clone.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    git(clone, "checkout", "-qf", commit)
    git(clone, "submodule", "--quiet", "update", "--init", "--recursive", "--force")
    return walked(clone)
