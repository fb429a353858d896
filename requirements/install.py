"""Install packages of project.lock into a virtual environment, then the project itself.

    python requirements/install.py .venv service embedded worker cpu dev
    python requirements/install.py --packages /opt/ablate service      # without the project, for a layer of an image
    python requirements/install.py --only /opt/mlflow mlflow-server    # without what every extra needs

Names after the folder are extras of pyproject.toml; without one the client alone is installed. pip looks at no
dependencies: the lock has all of them, with the digests of their files, and pip refuses every other file. The last step
checks that nothing is missing.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOCK, CPU_LOCK = HERE / "project.lock", HERE / "torch-cpu.lock"
BUILD, CUDA, TORCH = "build", "cuda", "torch"
"""The extra that installs the others, the one that needs CUDA's libraries, and the package with several builds."""
PROJECT = "ablate"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TORCH = """
from importlib.metadata import requires, version
from pip._vendor.packaging.requirements import Requirement
print(version("torch"))
for needed in map(Requirement, requires("torch") or ()):
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        print(needed.name)
"""
_ABSENT = "No matching distribution found"
"""pip's words when no index has a version."""


@dataclass(frozen=True)
class Locked:
    """A package of the lock."""

    name: str
    lines: str
    """As pip reads them: version, marker and digests."""
    needed_by: frozenset[str]


def name_of(requirement: str) -> str:
    """Return the normalised name at the start of a requirement."""
    name = _NAME.match(requirement.strip())
    if name is None:
        raise SystemExit(f"{requirement!r} does not begin with the name of a package")
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def read_lock(path: Path) -> dict[str, Locked]:
    """Return the packages of a lock by name. Raises SystemExit for a package without version or digest."""
    packages = {}
    text = "".join(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[0] != "#")
    for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]:
        lines, _, needed_by = entry.partition("    # via ")
        if not re.match(r"[A-Za-z0-9._-]+===?[A-Za-z0-9.+!]+( ;.*)? \\\n +--hash=sha256:", lines):
            raise SystemExit(f"{path.name}: {lines.splitlines()[0]!r} needs == with a version and --hash=sha256:...")
        name = name_of(lines)
        packages[name] = Locked(name, lines.rstrip(), frozenset(map(name_of, filter(None, needed_by.split(",")))))
    return packages


def roots(extras: Collection[str], *, with_base: bool = True) -> frozenset[str]:
    """Return the names that pyproject.toml lists for these extras. Raises SystemExit for an unknown extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = project["optional-dependencies"]
    for extra in extras:
        if extra not in allowed:
            raise SystemExit(f"unknown extra {extra!r}; allowed: {', '.join(allowed)}")
    requirements = [one for extra in extras for one in allowed[extra]] + with_base * project["dependencies"]
    return frozenset(map(name_of, requirements))


def selected(packages: dict[str, Locked], wanted: Iterable[str]) -> dict[str, Locked]:
    """Return the packages that these names need. Raises SystemExit for a name that the lock lacks."""
    names = set(wanted)
    if missing := sorted(names - packages.keys()):
        raise SystemExit(f"{LOCK.name} has no {', '.join(missing)}; run `make lock`")
    while more := {one.name for one in packages.values() if one.needed_by & names} - names:
        names |= more
    return {name: packages[name] for name in sorted(names)}


class Environment:
    """A virtual environment that pip fills from the lock."""

    def __init__(self, folder: Path) -> None:
        self.python = str(folder / "bin" / "python")
        if not Path(self.python).exists():  # a second call would copy the interpreter onto itself or a running one
            venv.create(folder, with_pip=True)

    def install(self, packages: Iterable[str]) -> None:
        """Install lines of a lock and nothing else. Raises SystemExit if pip fails."""
        if error := self.tried(packages):
            raise SystemExit(error)

    def tried(self, packages: Iterable[str]) -> str:
        """Install lines of a lock and nothing else; return pip's error, empty for none."""
        with tempfile.NamedTemporaryFile("w", suffix=".lock") as file:
            file.write("\n".join(packages) + "\n")
            file.flush()
            options = ("--require-hashes", "--no-deps", "--no-compile", "--requirement")
            return self.pip("install", *options, file.name)

    def add_project(self) -> None:
        """Install the project as this folder. Raises SystemExit if pip fails."""
        if error := self.pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)):
            raise SystemExit(error)

    def compile(self) -> None:
        """Compile the installed modules on all cores; pip would use one. Files for other Pythons fail silently."""
        folder = Path(self.python).parents[1] / "lib"
        subprocess.run([self.python, "-m", "compileall", "-qq", "-j", "0", str(folder)], check=False)

    def check(self) -> None:
        """Raise SystemExit unless every package has what it needs."""
        if error := self.pip("check"):
            raise SystemExit(f"{LOCK.name} does not fit pyproject.toml, run `make lock`: {error}")

    def pip(self, verb: str, *arguments: str) -> str:
        """Run pip; return its output if it failed, empty if not."""
        command = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check", verb, *arguments]
        ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return f"pip {verb} failed:\n{ended.stdout}" if ended.returncode else ""

    def torch(self) -> tuple[str, set[str]] | None:
        """Return the version of the installed torch and the names of the packages that this build needs."""
        answer = subprocess.run([self.python, "-c", _TORCH], check=False, capture_output=True, text=True)
        if answer.returncode:
            return None
        version, *requirements = answer.stdout.splitlines()
        return version, set(map(name_of, requirements))


def install_torch(environment: Environment, locked: Locked, extras: Collection[str]) -> set[str]:
    """Install torch, where it can be had the build without CUDA; return the names of the packages that it needs.

    Raises SystemExit if pip fails, except if no index has the build without CUDA.
    """
    if CUDA not in extras:
        error = environment.tried([read_lock(CPU_LOCK)[TORCH].lines])
        if error and _ABSENT not in error:
            raise SystemExit(error)
    installed = environment.torch()
    if installed is None or (CUDA in extras and "+" in installed[0]):
        # == would also match builds such as 2.13.0+cpu
        environment.install([locked.lines.replace("==", "===", 1)])
        installed = environment.torch()
    if installed is None:
        raise SystemExit(f"torch does not start after its installation: {environment.python} -c {_TORCH!r}")
    version, used = installed
    if CUDA not in extras and "+" not in version:
        print("No index here has torch without CUDA for this Python: PyPI's build brings CUDA's libraries, 3 GB")  # noqa: T201
    return used


def without_unused(packages: dict[str, Locked], wanted: Iterable[str], used: Collection[str]) -> dict[str, Locked]:
    """Return the packages that these names need when torch needs only `used`."""
    kept = {
        name: one if name in used else Locked(name, one.lines, one.needed_by - {TORCH})
        for name, one in packages.items()
    }
    return selected(kept, wanted)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the virtual environment; it is made if it does not exist")
    parser.add_argument("extras", nargs="*", metavar="extra")
    parser.add_argument("--packages", action="store_true", help="leave out the project")
    parser.add_argument("--only", action="store_true", help="install these extras alone")
    options = parser.parse_args()
    packages, wanted = read_lock(LOCK), roots(options.extras, with_base=not options.only)
    chosen = selected(packages, wanted)
    environment = Environment(options.folder)
    environment.install(one.lines for one in selected(packages, roots([BUILD], with_base=False)).values())
    if TORCH in chosen:
        used = install_torch(environment, packages[TORCH], options.extras)
        chosen = without_unused(packages, wanted, used)
        del chosen[TORCH]
    environment.install(one.lines for one in chosen.values())
    environment.compile()
    if not (options.packages or options.only):
        environment.add_project()
    environment.check()


if __name__ == "__main__":
    sys.exit(main())
