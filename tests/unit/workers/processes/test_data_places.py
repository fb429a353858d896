"""Data of a program: what a spec may open on a node, and where the program finds it; with real isolation."""

import random
from pathlib import Path
from typing import Any

import pytest

from ablate.workers.commands.code_copy import data_problem, link_data, private_places
from ablate.workers.isolation.reach import isolation_problem
from tests.programs import LOOP, program_config, write_program
from tests.unit.workers.processes.test_advice import isolated_message

isolates = pytest.mark.skipif(isolation_problem() is not None, reason="this kernel isolates no trials")


def problem_of(*data: Any, roots: tuple[Path, ...] | None = None, hidden: tuple[Path, ...] = ()) -> str | None:
    return data_problem(program_config(None, data=data), roots, hidden)


def test_data_is_refused_outside_of_the_folders_of_the_operator(tmp_path: Path) -> None:
    inside, outside = tmp_path / "srv/corpus", tmp_path / "other"
    inside.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "srv/link").symlink_to(outside)
    roots = (tmp_path / "srv",)
    assert problem_of(str(inside), {"path": str(inside), "at": "data"}, roots=roots) is None
    assert problem_of(str(outside)) is None, "any folder"
    for name in (outside, tmp_path / "srv/link", tmp_path / "srv/../other"):
        problem = str(problem_of(str(name), roots=roots))
        assert f"allowed: paths below {tmp_path / 'srv'} (ABLATE_TRIAL_READABLE)" in problem
    assert "none on this node (ABLATE_TRIAL_READABLE)" in str(problem_of(str(inside), roots=()))
    assert "is not on this node" in str(problem_of(str(inside / "missing"), roots=roots))


@pytest.mark.parametrize("roots", [None, (Path("/"),)])
def test_keys_and_the_system_stay_closed_whoever_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots: tuple[Path, ...] | None
) -> None:
    home = tmp_path / "home/.ablate"
    (home / "keys").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in (home, home / "keys", tmp_path / "link/keys", *private_places(), Path("~/.ssh/id").expanduser()):
        assert "folder with keys" in str(problem_of(str(path), roots=roots, hidden=(home,))), path
    for name in ("/", "/etc", "/etc/ssl", "/proc/self", "/usr/..", "/run"):
        assert "folder of the system" in str(problem_of(name, roots=roots)), name


def test_links_stand_only_where_no_sent_file_is(tmp_path: Path) -> None:
    rng = random.Random(7)  # noqa: S311 - draws that repeat
    names = [f"{folder}{name}" for folder in ("", "a/", "a/b/", "c/") for name in ("x.bin", "y.bin")]
    for number in range(30):
        source, code = tmp_path / f"{number}/source", tmp_path / f"{number}/code"
        there, sent = (rng.sample(names, rng.randrange(1, len(names))) for _ in range(2))
        for root, own, text in ((source, there, "data"), (code, sent, "sent")):
            root.mkdir(parents=True)
            for name in own:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
        link_data(program_config(None, data=({"path": str(source), "at": "."},)), code)
        assert {name: (code / name).read_text() for name in names if (code / name).exists()} == {
            **dict.fromkeys(there, "data"),
            **dict.fromkeys(sent, "sent"),
        }


READS = (
    LOOP
    + """
    from pathlib import Path
    for name in {names!r}:
        assert Path(name).read_text() == "data", name
        try:
            Path(name).write_text("changed")
        except OSError:
            continue
        raise ValueError("it can be changed")
"""
)


@isolates
def test_an_isolated_trial_reads_its_data_and_cannot_change_it(tmp_path: Path) -> None:
    lab, corpus = tmp_path / "lab/data", tmp_path / "corpus/part"
    for folder in (lab, corpus):
        folder.mkdir(parents=True)
        (folder / "x.bin").write_text("data")
    source = READS.format(names=["data/x.bin", str(corpus / "x.bin"), str(lab / "x.bin")])
    data = ({"path": str(lab), "at": "data"}, str(corpus.parent))
    assert isolated_message(tmp_path, source, data=data) == "None"
    assert "FileNotFoundError" in isolated_message(tmp_path / "without", source)
    assert (lab / "x.bin").read_text() == "data"


@isolates
def test_keys_inside_of_data_stay_closed(tmp_path: Path) -> None:
    """The state folder lies beside the data, as in a folder in which somebody typed `ablate up`."""
    keys = tmp_path / "home/keys/node"
    keys.parent.mkdir(parents=True)
    keys.write_text("secret")
    (tmp_path / "x.bin").write_text("data")
    source = f"open({str(tmp_path / 'x.bin')!r}).read()\nopen({str(keys)!r})"
    assert "PermissionError" in isolated_message(tmp_path, source, data=(str(tmp_path),))
    write_program(tmp_path / "code", "pass")
