"""Advice to the user of a program that failed because of the place where a trial runs.

The isolation closes folders, the copy of the code is not the work tree, and a file may hide a module of the same name.
"""

import ast
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Self

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.system.shell_python import editable_projects
from ablate.workers.environment_variables import with_readable
from ablate.workers.paths import is_allowed
from ablate.workers.trials.failures import MESSAGE_LIMIT
from ablate.workers.trials.result import TrialOrder

_NAMED = re.compile(r"(?:module|from|No module named) '([A-Za-z_]\w*)[\w.]*'")
_DENIED = re.compile(
    r"(?:Permission denied|Read-only file system): ['\"](/[^'\"]+)['\"]"
    r"|(?<![^\s'\"])(/[^\s:'\"]+)['\"]?: (?:\[Errno \d+\] )?(?:Permission|Read-only)"
)
_MISSING = re.compile(
    r"No such file or directory: b?(?:'([^']+)'|\"([^\"]+)\"|([^\s'\";,)]+))"
    r"|(?<![^\s'\"])([^\s:'\"]+)['\"]?: (?:\[Errno 2\] )?No such file or directory(?!:)"
    r"|name = '([^']+)', errno = 2\b"
)
"""The last one is of HDF5."""
_FEW = 2
"""Parts of the path of a folder that is too large to be opened for one file, such as /home."""
_MAPPING = re.compile(r"^MAPPING\b[^=\n]*=\s*(\{.*?\})", re.MULTILINE | re.DOTALL)
_NO_MARKS = "marked no steps"
_OUR_MODULE = "ablate"
_MOST_SENTENCES = 2


@dataclass(frozen=True, kw_only=True)
class ProgramPlace:
    """The surroundings of a program in its trial. Its methods run in the trial's process, which is isolated, too."""

    argv: Sequence[str]
    code: Path | None
    """A copy of the sent code."""
    prefix: Path
    """The Python environment."""
    search_path: str
    """PYTHONPATH of the spec."""
    writable: Path
    """Folder of the trial."""
    origin: Path | None = None
    """The folder from which the code was packed; None if it is not known here."""
    data: Sequence[Path] = ()
    """Places of the spec's data beside the code."""
    data_roots: Sequence[Path] | None = None
    """What this node lets a spec name as data; None for any path."""
    hidden: tuple[Path, ...] = ()
    """Folders that no setting opens."""
    run_folder: Path | None = None
    """Of an evaluation: the folder in which the program ran."""

    @classmethod
    def of(cls, order: TrialOrder, config: ProgramArm, argv: Sequence[str]) -> Self:
        """Return the place of the program of an order."""
        return cls(
            argv=argv,
            code=order.dataset,
            prefix=Path(sys.prefix) if order.program_prefix is None else order.program_prefix,
            search_path=config.env.get("PYTHONPATH", ""),
            writable=order.paths.folder,
            origin=order.origin,
            data=[Path(one["at"]) for one in config.data if not isinstance(one, str)],
            data_roots=order.data_roots,
            hidden=() if order.isolation is None else order.isolation.hidden,
        )

    def advised(self, message: str) -> str:
        """Return the message of a failure with advice, if there is any."""
        advice = chain(self._of_names(message), self._of_files(message), self._of_missing_files(message))
        sentences = islice(dict.fromkeys(advice), _MOST_SENTENCES)
        return "; ".join([message, *sentences])[:MESSAGE_LIMIT]

    @cached_property
    def _folders(self) -> list[Path]:
        """The folders of the code from which the program may import."""
        if self.code is None:
            return []
        scripts = [self.code / argument for argument in self.argv if argument.endswith(".py")]
        own = [self.code / part for part in self.search_path.split(os.pathsep) if part and not Path(part).is_absolute()]
        folders = [*(script.parent for script in scripts if script.is_file()), self.code, *own]
        return list(dict.fromkeys(folder.resolve() for folder in folders))

    def _of_names(self, message: str) -> Iterator[str]:
        """Yield advice about the modules that an exception names."""
        names = [*_NAMED.findall(message), *([_OUR_MODULE] if _NO_MARKS in message else [])]
        for name in dict.fromkeys(names):
            if name == _OUR_MODULE or name in sys.stdlib_module_names:
                yield from self._of_a_shadow(name)
            elif f"No module named '{name}" in message:
                yield from self._of_a_missing(name)

    def _of_a_shadow(self, name: str) -> Iterator[str]:
        own = "Ablate's module 'ablate'" if name == _OUR_MODULE else f"Python's own module '{name}'"
        also = [] if self.code is None or name != _OUR_MODULE else [self.code / "src"]
        for file in _modules([*self._folders, *also], name):
            shown = file.relative_to(self.code.resolve()) if self.code else file
            yield f"the file {shown} of the sent code hides {own}: rename it, such as to my_{name}"

    def _of_a_missing(self, name: str) -> Iterator[str]:
        """Yield advice about a module that is not found: its folder is closed, or not on the search path."""
        if self.code is not None:
            yield from (
                f"the sent code has it in {folder.name}: write workload.env: {{PYTHONPATH: {folder.name}}}"
                for folder in (self.code / "src", self.code / "lib", self.code / "python")
                if (folder / name).is_dir() or (folder / f"{name}.py").is_file()
            )
            if any(_modules([self.code], name)):
                yield "the sent code has it in its root: write workload.env: {PYTHONPATH: .}"
        for folder in self._sources(name):
            if _is_closed(folder):
                yield f"'{name}' lies in {folder}, {self._how_to_open(folder)}"
        if self.prefix == Path(sys.prefix) and not Path(self.argv[0]).is_absolute():
            yield (
                f"the program ran in Ablate's own Python ({self.prefix}): activate the program's before `ablate ask` "
                "or write its path, such as .venv/bin/python; on a node workload.environment names one"
            )

    def _of_files(self, message: str) -> Iterator[str]:
        """Yield advice about files that the program could not open, and that its user may open outside of a trial."""
        for path in (Path(first or second) for first, second in _DENIED.findall(message)):
            folder = path if path.is_dir() else path.parent
            root = self._import_root(path)
            if root is not None:
                yield (
                    f"the Python environment imports {path} and not its sent copy: write workload.env: "
                    f"{{PYTHONPATH: {root}}}"
                )
            elif _is_closed(path) or _is_closed(folder):
                yield f"the file is in {folder}, {self._how_to_open(folder if len(folder.parts) > _FEW else path)}"
            elif not path.is_relative_to(self.writable) and _user_may_write(folder):
                yield f"a trial may write only below its own folder: use trial.out, or {{out}} in an argument ({path})"

    def _import_root(self, path: Path) -> Path | None:
        """Return the folder of the sent code below which a Python file was sent that was opened elsewhere, or None."""
        if self.code is None or path.suffix != ".py" or path.is_relative_to(self.writable):
            return None
        ends = (Path(*path.parts[start:]) for start in range(1, len(path.parts)))
        sent = next((self.code / end for end in ends if (self.code / end).is_file()), None)
        if sent is None or len(sent.relative_to(self.code).parts) < _FEW:
            return None
        packages = [one for one in sent.parents if one != self.code and (one / "__init__.py").is_file()]
        return (packages[-1] if packages else sent).parent.relative_to(self.code)

    def _of_missing_files(self, message: str) -> Iterator[str]:
        """Yield advice about files that the program looks for beside its code, and that were not sent."""
        for match in _MISSING.findall(message):
            name = self._beside_the_code(next(filter(None, match)))
            if name is not None and self.run_folder is not None:
                if (self.run_folder / name).exists():
                    yield f"{name} is in the program's working folder: open it below the folder in ABLATE_RUN_FOLDER"
            elif name is not None:
                entry = name if name.parent == Path() else f"{name.parent}/"
                if self.origin is not None and (self.origin / name).exists():
                    why = f"{name} is in {self.origin.absolute()}, but was not sent, because git ignores it"
                else:
                    why = f"the sent code has no {name}, and files that git ignores are not sent"
                yield f"{why}: to read it where it is, {_as_data(entry)}"

    def _beside_the_code(self, text: str) -> Path | None:
        """Return the path below the folder of the code that a program named; None for another, or one that is there."""
        place = Path(os.path.normpath(text))
        if place.is_absolute() and place.is_relative_to(self.writable / "code"):
            place = place.relative_to(self.writable / "code")
        if self.code is None or place.is_absolute() or ".." in place.parts or (self.code / place).exists():
            return None
        return None if any(place.is_relative_to(one) for one in self.data) else place

    def _how_to_open(self, folder: Path) -> str:
        if any(folder.resolve().is_relative_to(one.resolve()) for one in self.hidden):
            return "a folder with the worker's keys, which stays closed to trials: move the files elsewhere"
        how = f"which is closed to trials: {_as_data(folder)}"
        if is_allowed(folder, self.data_roots):
            return how
        return f"{how}, once this node's operator has started the worker with {with_readable(folder)}"

    def _sources(self, name: str) -> Iterator[Path]:
        """Yield the folders outside of the environment from which it imports `name`."""
        folders = [Path(part) for part in self.search_path.split(os.pathsep) if part.startswith("/")]
        for site in sorted(self.prefix.glob("lib*/python3*/*-packages")):
            folders += _of_pth_files(site)
            folders += _of_finders(site, name)
        folders += (folder for project in editable_projects(self.prefix) for folder in (project, project / "src"))
        for folder in dict.fromkeys(folders):
            if (folder / name).exists() or (folder / f"{name}.py").exists():
                yield folder


def _as_data(place: Path | str) -> str:
    return f"type --data {shlex.quote(str(place))} before the `--`, or write workload.data: [{place}]"


def _modules(folders: Sequence[Path], name: str) -> Iterator[Path]:
    for folder in folders:
        places = (folder / f"{name}.py", folder / name / "__init__.py")
        yield from (place.resolve() for place in places if place.is_file())


def _is_closed(path: Path) -> bool:
    """Return whether the isolation, and not the file's mode, keeps this process from reading `path`."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return os.access(path, os.R_OK)
    except OSError:
        return False
    return False


def _user_may_write(folder: Path) -> bool:
    """Return whether this user can write there, or could if the trial's file tree did not keep it from changes."""
    return os.access(folder, os.W_OK) or (folder.is_dir() and bool(os.statvfs(folder).f_flag & os.ST_RDONLY))


def _of_pth_files(site: Path) -> Iterator[Path]:
    for file in site.glob("*.pth"):
        lines = [line.strip() for line in _text(file).splitlines()]
        yield from (site / line for line in lines if line and not line.startswith(("#", "import ", "import\t")))


def _of_finders(site: Path, name: str) -> Iterator[Path]:
    """Yield the folders in the maps of editable installations by setuptools."""
    for file in site.glob("__editable__*_finder.py"):
        mapping = _MAPPING.search(_text(file))
        with suppress(ValueError, SyntaxError, TypeError):
            places = ast.literal_eval(mapping[1]) if mapping else {}
            yield from (Path(place).parent for own, place in places.items() if own == name)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
