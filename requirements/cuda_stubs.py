"""Stand-ins for the CUDA libraries that the CUDA build of torch is linked against.

PyPI's torch for Linux loads cuBLAS, cuDNN, NCCL and others when it is imported: 3.3 GB of packages that a TPU or CPU
machine never calls. This writes empty libraries of the same names beside torch's own, with the symbols and symbol
versions that torch's libraries look for. A function that is called after all prints its name and aborts.

    python cuda_stubs.py SITE_PACKAGES

libcudart and libcupti must be the real ones (12 MB): torch calls them while it is loaded.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOOLS = {"gcc": "gcc", "nm": "binutils", "readelf": "binutils"}
"""Program -> the Debian package that has it."""
REAL = ("libcudart", "libcupti", "libcuda.so")
OWNERS = {
    "cublasLt": "libcublasLt",
    "cublas": "libcublas",
    "cudnn": "libcudnn",
    "cuFile": "libcufile",
    "cufft": "libcufft",
    "curand": "libcurand",
    "cusolver": "libcusolver",
    "cusparseLt": "libcusparseLt",
    "cusparse": "libcusparse",
    "nccl": "libnccl",
    "nvshmem": "libnvshmem",
}
"""Begin of a symbol without a version -> the library that it belongs to, the longest begin first."""


@dataclass(frozen=True)
class Wanted:
    """What torch's libraries expect of CUDA's."""

    libraries: frozenset[str]
    """File names, as written in the NEEDED entries."""
    symbols: dict[str, dict[str, set[str]]]
    """Library -> symbol version ("" for none) -> names."""


def main(site: Path) -> None:
    """Write the stubs into torch/lib below `site`."""
    missing = {package for program, package in TOOLS.items() if shutil.which(program) is None}
    if missing:
        raise SystemExit(
            f"the CUDA build of torch needs stand-ins for CUDA's libraries here, and making them needs "
            f"{', '.join(sorted(TOOLS))}; install: apt-get install {' '.join(sorted(missing))}"
        )
    folder = site / "torch" / "lib"
    own = [path for path in folder.glob("lib*.so*") if not path.is_symlink()]
    wanted = read_wanted(sorted(path for path in own if not _is_cuda(path.name)))  # not stand-ins of an earlier run
    for library in sorted(wanted.libraries):
        write_stub(folder / library, wanted.symbols.get(library, {}))
    print(f"{len(wanted.libraries)} stand-ins for CUDA libraries in {folder}")  # noqa: T201


def read_wanted(paths: Iterable[Path]) -> Wanted:
    """Read from torch's libraries which CUDA libraries and symbols they expect."""
    needed: set[str] = set()
    undefined: set[str] = set()
    defined: set[str] = set()
    owner_of_version: dict[str, str] = {}
    for path in paths:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-dW", str(path))))
        owner_of_version |= _owners_of_versions(_run("readelf", "-VW", str(path)))
        for line in _run("nm", "-D", str(path)).splitlines():
            kind, symbol = line.split()[-2:]
            (undefined if kind in "Uwv" else defined).add(symbol)
    libraries = frozenset(name for name in needed if _is_cuda(name))
    return Wanted(libraries, _assign(undefined, defined, libraries, owner_of_version))


def _is_cuda(name: str) -> bool:
    return re.match(r"lib(cu|nccl|nv)", name) is not None and not name.startswith(REAL)


def _owners_of_versions(text: str) -> dict[str, str]:
    """Read `readelf -V`: which library each symbol version comes from."""
    owners, library = {}, ""
    for line in text.splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif library and (found := re.search(r"Name: (\S+)", line)):
            owners[found[1]] = library
    return owners


def _assign(
    undefined: set[str], defined: set[str], libraries: frozenset[str], owner_of_version: dict[str, str]
) -> dict[str, dict[str, set[str]]]:
    here = {symbol.partition("@")[0] for symbol in defined}
    symbols: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        version = version.lstrip("@")
        if version:
            if owner_of_version.get(version) in libraries:
                symbols[owner_of_version[version]][version].add(name)
        elif name not in here:
            for library in _owners_by_name(name, libraries):
                symbols[library][""].add(name)
    return symbols


def _owners_by_name(name: str, libraries: frozenset[str]) -> list[str]:
    begin = next((begin for begin in sorted(OWNERS, key=len, reverse=True) if name.startswith(begin)), None)
    return [] if begin is None else [lib for lib in libraries if re.match(rf"{OWNERS[begin]}[._]", lib)]


def write_stub(path: Path, symbols: dict[str, set[str]]) -> None:
    """Compile an empty library at `path` with `symbols` by version."""
    names = sorted(set().union(*symbols.values())) if symbols else []
    body = "".join(
        f'void {name}(void) {{ fputs("CUDA stand-in called: {name}\\n", stderr); abort(); }}\n' for name in names
    )
    versions = "".join(
        f"{version} {{ global: {'; '.join(sorted(members))}; }};\n" for version, members in symbols.items() if version
    )
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        source.write_text("#include <stdio.h>\n#include <stdlib.h>\n" + body)
        script.write_text(versions)
        options = [f"-Wl,--version-script={script}"] if versions else []
        flags = ["-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        _run("gcc", *flags, "-o", str(path), str(source), *options)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
