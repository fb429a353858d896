"""Folders of code in specs: wherever and however they are written, the same values come out with archives."""

import copy
import hashlib
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.errors import SpecError
from ablate.experiments.records.code_archive import pack_code
from ablate.experiments.records.spec_code import pack_spec
from tests.factories import command_values
from tests.programs import write_program

FOLDERS = ("one", "./two", "sub/../one", "é 漢")
YAML, JSON = "application/yaml", "application/json"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    for number, name in enumerate(("one", "two", "é 漢")):
        write_program(tmp_path / name, f"print({number})")
    (tmp_path / "sub").mkdir()
    return tmp_path


def drawn(draw: random.Random) -> dict[str, Any]:
    codes: list[Any] = [*FOLDERS, "/srv/lab", {"git": "/srv/git", "commit": "4f2a9c1"}, None]
    variants: dict[str, Any] = {}
    for number in range(draw.randrange(1, 5)):
        code = draw.choice(codes)
        own = {"code": copy.copy(code)} if code else {}
        variants[f"v{number}"] = {"args": [draw.choice(["code: .", "x # y", "é"])], **own}
    return command_values(workload__code=draw.choice(codes[:-1]), variants=variants)


def expected(values: dict[str, Any], lab: Path) -> dict[str, Any]:
    """The oracle: replace in the plain values."""
    replaced = copy.deepcopy(values)
    for own in (replaced["workload"], *replaced["variants"].values()):
        if own.get("code") in FOLDERS:
            own["code"] = {"archive": pack_code(lab / own["code"]).digest}
    return replaced


DATA = ("one", "./two/train.py", "sub/../é 漢", ".", "sub/", "/srv/corpus")


@pytest.mark.parametrize("seed", range(20))
def test_drawn_data_becomes_absolute_with_its_place_beside_the_code(lab: Path, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw
    named = draw.sample(DATA, draw.randrange(1, len(DATA)))
    values = command_values(workload__code=draw.choice([".", "/srv/lab", "sub/.."]), workload__data=named)
    style, kind = draw.choice([None, True, False]), draw.choice([YAML, JSON])
    text = yaml.safe_dump(values, default_flow_style=style, allow_unicode=True) if kind == YAML else json.dumps(values)
    packed = pack_spec(text.encode(), kind, lab)
    places = [(lab / name).resolve() for name in named]
    oracle = [
        name if name.startswith("/") else {"path": str(place), "at": str(place.relative_to(lab.resolve()))}
        for name, place in zip(named, places, strict=True)
    ]
    assert load_values(packed.content, packed.content_type)["workload"]["data"] == oracle


@pytest.mark.parametrize(
    "text",
    ["  data:\n  - one  # mine\n  - two", "  data: [one, two]  # mine", "  data: # mine\n      - one\n      - two"],
)
def test_a_spec_with_data_and_commits_keeps_its_comments(lab: Path, text: str) -> None:
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", *command], cwd=lab, check=True)
    plain = command_values(workload={"command": ["python", "train.py"]}, variants={"fused": {"args": ["--x"]}})
    whole = yaml.safe_dump(plain, sort_keys=False).replace("baseline:", f"  code: .\n{text}\n# kept\nbaseline:")
    packed = pack_spec(whole.encode(), YAML, lab, {"fused": "HEAD"})
    values = load_values(packed.content, YAML)
    assert [one["at"] for one in values["workload"]["data"]] == ["one", "two"]
    assert set(values["labels"]) == {"commit.fused"}
    assert set(values["variants"]["fused"]["code"]) == {"archive"}


@pytest.mark.parametrize(
    ("code", "name", "detail"),
    [
        ("one", "two", "is outside of the code's folder"),
        (".", "missing.bin", "there is no 'missing.bin' beside the spec"),
        (".", "..", "is outside of the code's folder"),
    ],
)
def test_data_that_has_no_place_beside_the_code_is_refused(lab: Path, code: str, name: str, detail: str) -> None:
    values = command_values(workload__code=code, workload__data=["one" if code != "one" else "one/train.py", name])
    with pytest.raises(SpecError) as refused:
        pack_spec(json.dumps(values).encode(), JSON, lab)
    [problem] = refused.value.problems
    assert problem.pointer == "#/workload/data/1"
    assert detail in problem.detail


def test_data_below_the_home_is_absolute(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(lab))
    values = command_values(workload__code=".", workload__data=["~/two"])
    packed = pack_spec(json.dumps(values).encode(), JSON, lab)
    assert load_values(packed.content, JSON)["workload"]["data"] == [str(lab / "two")]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_specs_keep_all_other_values(lab: Path, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw
    values = drawn(draw)
    replaced = expected(values, lab)
    style = draw.choice([None, True, False])
    texts = {
        YAML: yaml.safe_dump(values, default_flow_style=style, sort_keys=draw.random() < 0.5, allow_unicode=True),
        JSON: json.dumps(values, indent=draw.choice([None, 1, "\t"])),
    }
    for kind, text in texts.items():
        packed = pack_spec(text.encode(), kind, lab)
        assert load_values(packed.content, packed.content_type) == replaced
        named = {code["archive"] for own in (replaced["workload"], *replaced["variants"].values())
                 if isinstance(code := own.get("code"), dict) and "archive" in code}  # fmt: skip
        assert {archive.digest for archive in packed.archives} == named


def test_comments_and_order_of_a_yaml_spec_stay(lab: Path) -> None:
    text = (
        "# a question\nworkload:\n  command: [a]\n  code: 'one' # mine\nvariants:\n  x: {code: two, args: []} # other\n"
    )
    packed = pack_spec(text.encode(), YAML, lab)
    one, two = (f'{{archive: "{pack_code(lab / name).digest}"}}' for name in ("one", "two"))
    assert packed.content.decode() == text.replace("'one'", one).replace("two", two)


def test_a_commit_of_a_variant_is_packed_from_the_repository_around_the_folder(lab: Path) -> None:
    git = ("git", "-C", str(lab), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "one"), ("commit", "-qm", "first")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    before = pack_code(lab / "one")
    (lab / "one/train.py").write_text("changed")
    for written in (f" {{commit: '{commit[:9]}'}} # before", f"\n      commit: '{commit[:9]}' # before\n  # then"):
        text = f"workload: {{command: [a], code: one}}\nvariants:\n  old:\n    code:{written}\n  new: {{args: [x]}}\n"
        packed = pack_spec(text.encode(), YAML, lab)
        values = load_values(packed.content, YAML)
        assert values["variants"] == {"old": {"code": {"archive": before.digest}}, "new": {"args": ["x"]}}
        assert values["workload"]["code"] == {"archive": pack_code(lab / "one").digest}
        assert b"# before" in packed.content
    for wrong, words in (("0123456", "0123456"), (commit[:9], "is in no git repository")):
        folder = lab if wrong == "0123456" else lab.parent / "elsewhere"
        write_program(folder / "one")
        text = f"workload: {{command: [a], code: one}}\nvariants: {{v: {{code: {{commit: '{wrong}'}}}}}}"
        with pytest.raises(SpecError, match=words):
            pack_spec(text.encode(), YAML, folder)


@pytest.fixture
def history(lab: Path) -> tuple[str, str]:
    """Two commits of folder `one`, and a change that is in neither."""
    git = ("git", "-C", str(lab), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-qb", "main"], check=True)
    commits = []
    for text in ("print(1)", "print(2)"):
        (lab / "one/train.py").write_text(text)
        for command in (("add", "one"), ("commit", "-qm", text)):
            subprocess.run([*git, *command], check=True)
        commits.append(subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout)
    (lab / "one/train.py").write_text("print(3)")
    return commits[0].strip(), commits[1].strip()


def tree(lab: Path, source: str) -> dict[str, str]:
    """Return the code of a folder `one` with this program."""
    (lab / "one/train.py").write_text(source)
    return {"archive": pack_code(lab / "one").digest}


@pytest.mark.parametrize(
    ("variants", "labels"),
    [
        ("variants: {pr: {code: one}}  # the change", ""),
        ("variants:\n  pr:", ""),
        ("variants:\n  pr: {args: [x]}", "labels: {team: a}\n"),
        ("variants:\n  pr:\n    code: one # the change", "labels:\n  team: a\n"),
    ],
)
@pytest.mark.parametrize("code", ["one", "{git: one, commit: 1234567}", "{git: ./one, commit: deadbeef}"])
def test_arms_are_the_commits_that_somebody_asks_for(
    lab: Path, history: tuple[str, str], code: str, variants: str, labels: str
) -> None:
    text = f"# asked by a pull request\nworkload: {{command: [a], code: {code}}}\n{labels}{variants}\n"
    packed = pack_spec(text.encode(), YAML, lab, {"baseline": "main~1", "pr": "main"})
    values = load_values(packed.content, packed.content_type)
    assert values["workload"]["code"] == tree(lab, "print(1)")
    assert values["variants"]["pr"]["code"] == tree(lab, "print(2)")
    named = {"commit.baseline": history[0], "commit.pr": history[1]}
    assert values["labels"] == {**named, **({"team": "a"} if labels else {})}
    for archive in packed.archives:
        assert f"sha256:{hashlib.sha256(b''.join(archive.pieces())).hexdigest()}" == archive.digest
    assert {line.split(" ")[2] for line in packed.packed} == {"main~1", "main"}
    assert (b"# asked" in packed.content) == ("code: one" in variants), "comments stay unless a key is added"


def test_a_spec_names_the_commits_of_its_arms_itself(lab: Path, history: tuple[str, str]) -> None:
    first, second = history
    workload = f"workload: {{command: [a], code: {{git: one, commit: '{first[:9]}'}}}}"
    text = f"{workload}\nvariants:\n  b: {{code: {{commit: '{second}'}}}}\n"
    values = load_values(pack_spec(text.encode(), YAML, lab).content, YAML)
    assert values["workload"]["code"] == tree(lab, "print(1)")
    assert values["variants"]["b"]["code"] == tree(lab, "print(2)")
    assert values["labels"] == {"commit.baseline": first, "commit.b": second}


@pytest.mark.parametrize(
    ("text", "commits", "place", "words"),
    [
        ("workload: {recipe: hybrid-tiny}", {"baseline": "main"}, "#/workload/code", "names no folder"),
        ("workload: {command: [a], code: /srv/lab}", {"baseline": "main"}, "#/workload/code", "names no folder"),
        (
            "workload: {command: [a], code: one}\nvariants: {pr: {}}",
            {"rp": "main"},
            "#/variants",
            "there is no arm 'rp'",
        ),
        ("workload: {command: [a], code: one}\nvariants: {pr: {}}", {"pr": "mian"}, "#/variants/pr/code", "mian"),
        ("workload: {command: [a], code: one}\nvariants: {pr: {}}", {"pr": "--all"}, "#/variants/pr/code", "--all"),
    ],
)
def test_a_commit_that_no_arm_can_be_is_refused_at_its_place(
    lab: Path, history: tuple[str, str], text: str, commits: dict[str, str], place: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        pack_spec(text.encode(), YAML, lab, commits)
    ((pointer, detail),) = ((one.pointer, one.detail) for one in caught.value.problems)
    assert pointer == place
    assert words in detail


@pytest.mark.parametrize(
    "text",
    [
        "workload: {recipe: hybrid-tiny, code: one}",
        "workload: {command: [a], code: /srv/lab}",
        "workload: {command: [a]}\nvariants: [code]",
        "workload: [command, code]",
        "workload: {command: [a], code: {archive: one}}",
        "workload: {command: [a], code: ''}",
        "workload: {command: [a], code: &anchor one}",
        "\x00 command code",
    ],
)
def test_other_specs_come_back_unchanged_for_their_reader(lab: Path, text: str) -> None:
    packed = pack_spec(text.encode(), YAML, lab)
    assert (packed.content, packed.content_type, packed.archives) == (text.encode(), YAML, ())


def test_every_folder_that_cannot_be_packed_is_told_by_its_pointer(lab: Path) -> None:
    text = "workload: {command: [a], code: absent}\nvariants: {a: {code: one}, b/c: {code: sub}, d: {code: ../x}}"
    with pytest.raises(SpecError) as caught:
        pack_spec(text.encode(), YAML, lab)
    details = {problem.pointer: problem.detail for problem in caught.value.problems}
    assert set(details) == {"#/workload/code", "#/variants/b~1c/code", "#/variants/d/code"}
    assert "absent' is no folder" in details["#/workload/code"]
    assert "has no files" in details["#/variants/b~1c/code"]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "git://host/repo.git",
            "https://host/a/b",
            "ssh://git@host/r.git",
            "git@host.example:a/b.git",
            "file:///srv/r",
        ),
        *("FTP://h/x", "svn+ssh://h/x"),
    ],
)
@pytest.mark.parametrize("code", ["{{git: '{0}', commit: 4f2a9c1}}", "'{0}'"])
@pytest.mark.parametrize("place", ["workload", "variant"])
def test_an_address_is_refused_as_it_was_written_with_what_to_type(
    lab: Path, address: str, code: str, place: str
) -> None:
    values = command_values(workload__code="one")
    own = values["workload"] if place == "workload" else values["variants"]["fused"]
    own["code"] = yaml.safe_load(code.format(address))
    packed = pack_spec(yaml.safe_dump(values).encode(), YAML, lab)
    with pytest.raises(SpecError) as caught:
        parse_spec(packed.content, packed.content_type)
    (problem,) = caught.value.problems
    assert f"code is '{address}', an address; allowed: a folder" in problem.detail
    assert problem.hint == f"clone it, and write its folder: git clone {address}"


@pytest.mark.parametrize("folder", ["a@b", "one:two", "./a@b:c", "x/y@z:w"])
def test_a_folder_whose_name_looks_like_an_address_is_packed(lab: Path, folder: str) -> None:
    write_program(lab / folder, "print(0)")
    values = command_values(workload__code=folder)
    assert pack_spec(yaml.safe_dump(values).encode(), YAML, lab).archives


USES_SEED = {
    "nothing": (False, {}, "print(0)  # ablate: a study"),
    "a seed of its own": (False, {}, "torch.manual_seed(0)"),
    "an argument": (True, {"command": ["python", "train.py", "--seed={seed}"]}, "print(0)"),
    "the module": (True, {}, "import torch\nimport ablate\n"),
    "one of several imports": (True, {}, "import os, ablate\n"),
    "an import in a function": (True, {}, "def f():\n    from ablate import trial\n"),
    "the variable": (True, {}, "import os\nprint(os.environ['ABLATE_TRIAL'])"),
    "code that is not here": (True, {"code": "/srv/lab"}, "print(0)"),
    "another module": (False, {}, "import ablated\n"),
}


@pytest.mark.parametrize("case", USES_SEED)
@pytest.mark.parametrize("decides", [True, False])
def test_a_number_that_no_seed_can_change_is_named_before_the_runs(lab: Path, case: str, decides: bool) -> None:
    uses, changes, source = USES_SEED[case]
    write_program(lab / "three", source)
    (lab / "three" / "notes.md").write_text("import ablate\n")
    metrics = {"val_bpb": {"better": "lower"}}
    own = {"command": ["python", "train.py"], "code": "three", "metrics": metrics, **changes}
    primary = {"metric": "val_bpb" if decides else "process_s", "margin": "1%"}
    values = command_values(workload=own, verdict={"primary": primary})
    lines = pack_spec(yaml.safe_dump(values).encode(), YAML, lab).packed
    warned = [line for line in lines if "every block may report the same val_bpb" in line]
    assert len(warned) == (decides and not uses), lines
    assert all(("--seed '{seed}'" in line) == ("seed" in source) for line in warned), "no seed, no offer"


JUDGED = "workload:\n  command: [a]\n  code: one\n  evaluate: {} # mine\nvariants: {{x: {{code: two}}}}\n"


@pytest.mark.parametrize(
    "command",
    [
        "[python, train.py]",
        "[python, -u, ./train.py, --ref, x.py]",
        "[./train.py]",
        "[python, -m, judge, x.py]",
        "[bash, -c, 'python absent.py']",
        "[python, /srv/judge.py]",
        "[judge]",
        "[torchrun, --nproc-per-node=2, train.py]",
    ],
)
def test_an_evaluation_runs_a_file_of_the_workloads_code(lab: Path, command: str) -> None:
    text = JUDGED.format(command)
    shown = pack_spec(text.encode(), YAML, lab).content.decode()
    for name in ("one", "two"):
        shown = shown.replace(f'{{archive: "{pack_code(lab / name).digest}"}}', name)
    assert shown == text


def test_an_evaluation_may_have_a_folder_of_its_own(lab: Path) -> None:
    lab.joinpath("two/judge.py").write_text("print(1)")
    write_program(lab / "three", "print(3)")
    text = JUDGED.replace("two", "three").format("{command: [python, judge.py], code: two}")
    values = load_values(pack_spec(text.encode(), YAML, lab).content, YAML)
    code = {"archive": pack_code(lab / "two").digest}
    assert values["workload"]["evaluate"] == {"command": ["python", "judge.py"], "code": code}
    assert values["variants"]["x"]["code"] == {"archive": pack_code(lab / "three").digest}


def judged(lab: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Return a spec whose evaluation is in a folder of this name, with an answer that only this folder has."""
    for file, content in (("judge.py", "judge"), ("holdout.txt", "answers")):
        lab.joinpath(name).mkdir(parents=True, exist_ok=True)
        lab.joinpath(name, file).write_text(content)
    write_program(lab / "src", "train")
    evaluate = {"command": ["python", "judge.py"], "code": name}
    return command_values(**{"workload__evaluate": evaluate, "variants": {"x": {"args": ["1"]}}, **changes})


def refused(values: dict[str, Any], lab: Path) -> list[str]:
    """Return the pointers of what `pack_spec` refuses."""
    try:
        pack_spec(yaml.safe_dump(values).encode(), YAML, lab)
    except SpecError as error:
        return [problem.pointer for problem in error.problems]
    return []


PLACES = ("judging", "src/judging", "src/a/judging", "a/judging", "src", ".")
CODES = (".", "src", "src/../src", "a", "./src/a", "link")


@pytest.mark.parametrize("seed", range(60))
def test_no_program_gets_the_folder_of_its_evaluation(lab: Path, seed: int) -> None:
    """Whatever is packed for an arm, or opened as data, has no answer. The oracle reads the archives and the disk."""
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw
    for folder in ("src/a", "a"):
        write_program(lab / folder, f"print({folder!r})")
    lab.joinpath("link").symlink_to("src")
    place, absolute = draw.choice(PLACES), draw.random() < 0.3
    code, other = draw.choice(CODES), draw.choice([None, *CODES])
    data = draw.choice([[], [], [code], [str(lab / draw.choice([place, "a", "src/a", "src"]))]])
    values = judged(lab, place, workload__code=code, workload__data=data)
    if other is not None:
        values["variants"]["x"]["code"] = other
    if absolute:
        values["workload"]["evaluate"]["code"] = str(lab / place)
    if draw.random() < 0.3:
        subprocess.run(["git", "-C", str(lab), "init", "-q"], check=True)
    own, arms = (lab / place).resolve(), {(lab / name).resolve() for name in (code, other) if name}
    if (lab / code).resolve() == own:  # the program's own folder, which hides nothing
        assert refused(values, lab) == []
        return
    given = {path.read_bytes() for folder in arms for path in folder.rglob("*") if path.is_file()}
    given |= {path.read_bytes() for one in data for path in (lab / one).resolve().rglob("*") if path.is_file()}
    inside = {arm for arm in arms if arm.is_relative_to(own) and arm != own}
    answers = {path for path in own.rglob("*") if path.is_file() and not inside.intersection(path.parents)}
    leaks = bool({path.read_bytes() for path in answers} & given)
    assert bool(refused(values, lab)) == leaks, (place, code, other, data)


def test_the_refusal_says_where_the_answers_may_lie(lab: Path) -> None:
    (lab / "spec").mkdir()
    values = judged(lab / "spec", "judging", workload__code=".")
    with pytest.raises(SpecError) as caught:
        pack_spec(yaml.safe_dump(values).encode(), YAML, lab / "spec")
    (problem,) = caught.value.problems
    assert "has the evaluation's folder 'judging' in it, so the program could read the right answers" in problem.detail
    assert str(problem.hint).endswith("and write evaluate: {command: [...], code: ../judging}")
    (lab / "spec/judging").rename(lab / "judging")
    values["workload"]["evaluate"]["code"] = "../judging"
    assert refused(values, lab / "spec") == []


def test_answers_at_a_commit_are_refused_too(lab: Path, history: tuple[str, str]) -> None:
    """Also where the commit has older ones, and where they are no longer in the folder of today."""
    values = judged(lab, "one/judging", workload__code="one")
    git = ("git", "-C", str(lab), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "add", "one"], check=True)
    subprocess.run([*git, "commit", "-qm", "answers"], check=True)
    tip = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    lab.joinpath("one/judging/holdout.txt").write_text("newer answers")
    assert refused(values, lab) == ["#/workload/code"]
    commit = {"git": "one", "commit": tip}
    values["workload"]["code"] = commit
    assert refused(values, lab) == ["#/workload/code"]
    values["workload"]["code"] = {"git": "one", "commit": history[0]}
    assert refused(values, lab) == [], "that commit has no answers"
    values["variants"]["x"]["code"] = {"commit": tip}
    assert refused(values, lab) == ["#/variants/x/code"]


def test_answers_that_git_ignores_are_not_sent_unless_data_opens_them(lab: Path) -> None:
    values = judged(lab, "judging", workload__code=".")
    for folder in (lab, lab / "judging"):  # a repository of its own, or its evaluation could not be sent
        subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    assert refused(values, lab) == ["#/workload/code"]
    lab.joinpath(".gitignore").write_text("judging/\n")
    assert refused(values, lab) == []
    for data in (".", "judging", "judging/holdout.txt", str(lab), str(lab / "judging/holdout.txt")):
        assert refused({**values, "workload": {**values["workload"], "data": [data]}}, lab) == ["#/workload/data/0"]


def test_a_copy_of_the_answers_is_refused_and_shared_files_are_named(lab: Path) -> None:
    values = judged(lab, "judging", workload__code="src", variants={"x": {"code": "one"}})
    lab.joinpath("src/common.py").write_text("judge")
    assert refused(values, lab) == []
    lines = pack_spec(yaml.safe_dump(values).encode(), YAML, lab).packed
    assert "evaluation judging: the program has 1 of its 2 files, too (judge.py)" in lines
    lab.joinpath("one/copy.bin").write_text("answers")
    assert refused(values, lab) == ["#/variants/x/code"]
    lab.joinpath("src/copy.bin").write_text("answers")
    assert refused(values, lab) == ["#/workload/evaluate/code"], "nothing is left that is hidden"


def test_folders_on_the_node_are_compared_by_their_paths(lab: Path) -> None:
    evaluate = {"command": ["python", "judge.py"], "code": "/srv/lab/judging"}
    for code, pointers in (
        ("/srv/lab", ["#/workload/code"]),
        ({"git": "/srv", "commit": "4f2a9c1"}, ["#/workload/code"]),
        ("/srv/lab/judging/..", ["#/workload/code"]),
        ("/srv/lab2", []),
        ("/srv/lab/judging/program", []),
        ("/srv/lab/judging", []),
    ):
        assert refused(command_values(workload__code=code, workload__evaluate=evaluate), lab) == pointers


@pytest.mark.parametrize(
    "evaluate",
    [
        "[python, judge.py]",
        "{command: [python, judge.py]}",
        "[./judge.sh]",
        "[python, ../two/judge.py]",
        "{command: [python, -u, judge.py], code: one}",
    ],
)
def test_an_evaluation_whose_file_was_not_packed_is_refused(lab: Path, evaluate: str) -> None:
    lab.joinpath("two/judge.py").write_text("print(1)")
    with pytest.raises(SpecError) as caught:
        pack_spec(JUDGED.format(evaluate).encode(), YAML, lab)
    (problem,) = caught.value.problems
    assert problem.pointer == "#/workload/evaluate"
    assert "the packed code has no such file" in problem.detail


def test_an_evaluation_that_git_ignores_is_refused(lab: Path) -> None:
    subprocess.run(["git", "-C", str(lab), "init", "-q"], check=True)
    lab.joinpath("one/judge.py").write_text("print(1)")
    text = JUDGED.format("[python, judge.py]")
    assert pack_spec(text.encode(), YAML, lab).archives
    lab.joinpath(".gitignore").write_text("judge.py\n")
    with pytest.raises(SpecError, match="no such file"):
        pack_spec(text.encode(), YAML, lab)


def test_an_evaluation_at_a_commit_names_no_arm(lab: Path, history: tuple[str, str]) -> None:
    first, _second = history
    text = JUDGED.format(f"{{command: [python, train.py], code: {{git: one, commit: '{first}'}}}}")
    values = load_values(pack_spec(text.encode(), YAML, lab).content, YAML)
    assert values["workload"]["evaluate"]["code"] == tree(lab, "print(1)")
    assert "labels" not in values


@pytest.mark.parametrize("evaluate", ["judge", "7", "{command: judge}", "{code: one}", "[7]", "[]", "{code: [1]}", "~"])
def test_an_evaluation_that_is_none_is_left_to_its_reader(lab: Path, evaluate: str) -> None:
    assert pack_spec(JUDGED.format(evaluate).encode(), YAML, lab).archives
