"""Each step in CONTRIBUTING.md names files that exist and names that these files contain."""

import re
from pathlib import Path

import pytest

from tests.architecture.pages import PACKAGES, ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (Add .+)\n((?:(?!^#).*\n)*)", TEXT, re.MULTILINE))
FILE = re.compile(rf"(?:{'|'.join(PACKAGES)}|tests)/[\w./<>*-]+\.py")
PLACEHOLDERS = {"<lane>": "*", "<operation>": "mamba3_mimo"}


def files(pattern: str) -> list[Path]:
    """Return the files that a path of the page stands for."""
    for placeholder, example in PLACEHOLDERS.items():
        pattern = pattern.replace(placeholder, example)
    return sorted(ROOT.glob(pattern))


def steps(section: str) -> list[str]:
    return [" ".join(step.split()) for step in re.findall(r"^\d\. ((?:.+\n)(?:   .+\n)*)", section, re.MULTILINE)]


def problems(step: str) -> list[str]:
    """Return the files of a step that do not exist, and its names that none of them contains."""
    quoted = re.findall(r"`([^`]+)`", step)
    named = [word for word in quoted if FILE.fullmatch(word)]
    missing = [word for word in named if not files(word)]
    text = "".join(path.read_text(encoding="utf-8") for word in named for path in files(word))
    names = [re.split(r"[\[(]", word)[0] for word in quoted if word not in named and not word.endswith("/")]
    return missing + [name for name in names if re.search(rf"\b{re.escape(name)}\b", text) is None]


@pytest.mark.parametrize("title", SECTIONS)
def test_every_step_names_files_that_exist_and_names_that_they_contain(title: str) -> None:
    written = steps(SECTIONS[title])
    assert written
    assert {step: wrong for step in written if (wrong := problems(step))} == {}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_section_ends_with_tests_that_exist(title: str) -> None:
    checks = SECTIONS[title].rpartition("Checked by")[2]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", checks)
    assert named
    assert [path for path, _ in named if not (ROOT / path).is_file()] == []
    assert [name for path, name in named if name and f"def {name}(" not in (ROOT / path).read_text("utf-8")] == []
