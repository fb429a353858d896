"""Environments from locks: what a lock may name, and what is built from it by pip from a local index."""

import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from ablate.model.errors import DataError
from ablate.workers.commands import locked_environment as module
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.commands.locked_environment import locked_environment, packages_of
from tests.package_index import package_index
from tests.programs import order_for, program_config, write_program

__all__ = ["package_index"]

_WORDS = (
    *(
        "torch",
        "torch",
        "flash-attn",
        "a.b_c",
        "x[extra]",
        "x[a,b]",
        "-e",
        "-r",
        "--index-url",
        "==",
        "==",
        "==",
        "===",
    ),
    *(">=", "~=", "!=", "@", "2.11.0", "2.11.0+cu130", "1!2", "2.*", "git+https://x/y", "../y", "https://x/y.whl", ","),
    *("; python_version < '3.13'", "; sys_platform == 'linux'", ";", "--hash=sha256:" + 64 * "a", "# via x", "\\\n"),
    *("--config-settings=a=b", "--global-option=x", "--find-links", "{", "$(id)", "\u00e9"),
)


def version_in(environment: Path) -> str:
    code = "import colours; print(colours.VERSION)"
    return subprocess.check_output([environment / "bin" / "python", "-c", code], text=True).strip()


def names_one_version(line: str) -> bool:
    """Return what the standard's own parser says of a line without its hashes; what it refuses, pip refuses, too."""
    words = line.split(" --hash", 1)[0]
    try:
        package = Requirement(words)
    except InvalidRequirement:
        return not any(part in words for part in ("@", "/", " -"))
    versions = list(package.specifier)
    return package.url is None and len(versions) == 1 and versions[0].operator == "==" and "*" not in words


def test_drawn_lines_pass_only_if_they_name_one_version_of_a_package() -> None:
    draw, passed = random.Random(5), set[str]()  # noqa: S311 - a reproducible draw
    for _ in range(60_000):
        words = draw.choices(_WORDS, k=draw.randint(0, 5))
        text = draw.choice(("", "x==1.5", "torch == 2.11.0 ")) + draw.choice(("", " ")).join(words)
        try:
            lines = packages_of("lock", text)
        except DataError:
            continue
        for line in lines:
            assert names_one_version(line), line
            options = [word for word in line.split() if word.startswith("-")]
            assert all(word.startswith("--hash") for word in options), line
        passed |= set(lines)
    assert len(passed) > 100, "some are allowed"


def test_what_uv_and_pip_write_is_a_lock() -> None:
    root = Path(__file__).resolve().parents[4]
    text = (root / "requirements" / "project.lock").read_text()
    lines = packages_of("project.lock", text)
    assert all(names_one_version(line) and "--hash=sha256:" in line for line in lines)
    assert len(lines) == sum("==" in line.split(";")[0].split("#")[0] for line in text.splitlines())


def test_an_environment_is_built_once_and_runs_nothing_of_its_packages(
    tmp_path: Path, package_index: list[str]
) -> None:
    with ThreadPoolExecutor(2) as two:  # workers of one node
        built = set(two.map(lambda _: locked_environment("a.lock", "colours==1.0\n", tmp_path / "built"), range(2)))
    (first,) = built
    assert len([path for path in package_index if path.endswith(".whl")]) == 1
    assert not (tmp_path / "ran").exists(), "a build runs no code of a package"
    assert version_in(first) == "1.0"
    second = locked_environment("b.lock", "# newer\ncolours == 2.0  # by hand\n", tmp_path / "built")
    assert version_in(second) == "2.0"
    assert {first, second} == {one.parent for one in (tmp_path / "built").glob("*/bin")}


@pytest.mark.usefixtures("package_index")
def test_what_cannot_be_installed_says_why_and_a_torn_build_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"of a\.lock cannot be built: .*colours==3.0 \(from versions: 1.0, 2.0\)"):
        locked_environment("a.lock", "colours==3.0", tmp_path / "built")
    with pytest.raises(DataError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        locked_environment("a.lock", f"colours==1.0 --hash=sha256:{64 * '0'}", tmp_path / "built")
    assert not list((tmp_path / "built").glob("*/bin"))
    whole = locked_environment("a.lock", "colours==1.0", tmp_path / "built")
    (whole / module._COMPLETE).unlink()
    whole.joinpath("bin/python").unlink()
    assert locked_environment("a.lock", "colours==1.0", tmp_path / "built") == whole
    assert version_in(whole) == "1.0"
    monkeypatch.setattr(module, "KEPT", 1)
    other = locked_environment("b.lock", "colours==2.0", tmp_path / "built")
    assert [one.parent for one in (tmp_path / "built").glob("*/bin")] == [other]


def test_the_lock_is_a_file_of_the_code(tmp_path: Path, package_index: list[str]) -> None:
    folder = write_program(tmp_path / "code")
    config = program_config(folder, lock="mine.lock")
    with pytest.raises(DataError, match=r"the code has no file 'mine\.lock'"):
        copy_code(order_for(config, tmp_path / "home"))
    folder.joinpath("mine.lock").write_text("colours==2.0\n")
    prepared = copy_code(order_for(config, tmp_path / "home"))
    assert prepared.program_prefix is not None
    assert version_in(prepared.program_prefix) == "2.0"
    assert len(package_index) == 2
