"""What a program of a trial can import, what it imported from another place than its sent code, and digests of it.

The module `ablate` imports this one in trials only. It needs the standard library only and Python 3.9 or newer.
"""

import hashlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any, Optional

_LEAST_ALIKE = 0.3
"""Share of equal file names, or lines, by which two modules of one name are copies of each other."""
_MOST_FILES, _FEW_LINES = 5_000, 10
_NOT_IMPORTED = frozenset(
    {"__mp_main__", "ablate", "ablate_imports", "ablate_profile", "sitecustomize", "usercustomize"}
)
"""Names of modules that are outside of the sent code by design."""


def installed_copy(code: Path) -> Optional[str]:
    """Return a sentence about a module that this program did not import from the folder `code`, which has it, too.

    The arms of an ablation would all run that other copy. Of `code` counts a module in a folder of the search path, and
    a similar one in its root, in `src`, or in the same place as in a work tree of an editable installation.
    """
    code = code.resolve()
    on_path = [place for place in map(Path.resolve, map(Path, sys.path)) if code in (place, *place.parents)]
    usual = [place for place in (code, code / "src") if place not in on_path]
    names = {entry.name.partition(".")[0] for root in on_path + usual if root.is_dir() for entry in root.iterdir()}
    for name, module in sorted(sys.modules.items()):
        place = _source(name, module, names)
        if place is None or code in place.parents:
            continue
        parts = [place.stem] if name == "__main__" else name.split(".")
        likely = usual + [code.joinpath(*end) for end in _ends(place.parents[len(parts) - 1])]
        roots = [(root, True) for root in on_path] + [(root, False) for root in likely]
        for root, is_searched in roots:
            own = root.joinpath(*parts[:-1], place.name if is_searched or place.suffix else parts[-1])
            if is_searched and not own.exists():
                own = own.with_suffix("" if place.suffix else ".py")
            if _is_module(own) and (is_searched or _are_alike(own, place)):
                return _copy_words(name, place, own.relative_to(code), root.relative_to(code), is_searched)
    return None


def _copy_words(name: str, place: Path, own: Path, root: Path, is_searched: bool) -> str:
    """Return the sentence about a module, with the change that the user may make."""
    did = "ran" if name == "__main__" else f"imported '{name}'"
    add = "" if is_searched else f"write workload.env: {{PYTHONPATH: {root}}}, or "
    return (
        f"the program {did} from {place}, and not from the sent code, which has it in {own}: every arm "
        f"would measure that copy; {add}remove it from the Python environment"
    )


def _source(name: str, module: Any, names: set[str]) -> Optional[Path]:
    """Return the file or the package's folder of a module whose parents, if any, have no code; None for others.

    None, too, for Python's own modules, compiled ones, and installed ones of other names than `names`.
    """
    file, parent = getattr(module, "__dict__", {}).get("__file__"), name.rpartition(".")[0]
    above = getattr(sys.modules.get(parent), "__dict__", {})
    if name in _NOT_IMPORTED or (parent and (above.get("__file__") or not above.get("__path__"))):
        return None
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    packaged = "/site-packages/" in file or "/dist-packages/" in file
    standard = file.startswith(f"{Path(os.__file__).parent}/") and not packaged
    if standard or (packaged and name.partition(".")[0] not in names):
        return None
    place = Path(file).resolve()
    return place.parent if place.name == "__init__.py" else place


def _ends(folder: Path) -> list[tuple[str, ...]]:
    """Return the last one, two and more names of a folder's path."""
    return [folder.parts[-size:] for size in range(1, len(folder.parts))]


def _is_module(place: Path) -> bool:
    return place.is_file() if place.suffix == ".py" else (place / "__init__.py").is_file()


def _are_alike(own: Path, other: Path) -> bool:
    """Return whether one of two modules of the same name is a copy of the other, whatever changed since."""
    if own.is_dir() and other.is_dir():
        mine, theirs = _files(own), _files(other)
        if mine and theirs:
            return len(mine & theirs) >= _LEAST_ALIKE * len(mine.union(theirs))
        own, other = own / "__init__.py", other / "__init__.py"
    lines = [set(filter(None, map(str.strip, _text(file).splitlines()))) for file in (own, other)]
    few = max(map(len, lines)) < _FEW_LINES
    return few or len(lines[0] & lines[1]) >= _LEAST_ALIKE * len(lines[0].union(lines[1]))


def _files(folder: Path) -> set[str]:
    """Return the relative names of a package's modules without its own `__init__.py`."""
    names = [place.relative_to(folder).as_posix() for place in itertools.islice(folder.rglob("*.py"), _MOST_FILES)]
    return set(names) - {"__init__.py"}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def packages() -> dict[str, str]:
    """Return the versions of the packages that can be imported, by name."""
    from importlib import metadata

    versions: dict[str, str] = {}
    for package in metadata.distributions():
        name = package.metadata["Name"]
        if name:
            versions.setdefault(str(name).lower(), str(package.version))
    return versions


def package_digest(name: str) -> str:
    """Return the digest over names and contents of all Python files of an installed package, without importing it.

    Raises ImportError if there is none.
    """
    from importlib import util

    spec = util.find_spec(name)
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        raise ImportError(f"no package {name!r} is installed")
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    files = {path.relative_to(root).as_posix(): path for root in roots for path in root.rglob("*.py")}
    if not roots:
        files = {Path(str(spec.origin)).name: Path(str(spec.origin))}
    whole = hashlib.sha256()
    for place in sorted(files):
        content = hashlib.sha256(files[place].read_bytes()).hexdigest()
        whole.update(f"{place} {content}\n".encode())
    return f"sha256:{whole.hexdigest()}"
