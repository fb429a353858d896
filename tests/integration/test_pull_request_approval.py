"""Who may start a measurement of a pull request, of which commit, and with which words."""

import itertools
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.errors import SpecError
from ablate.service.cli.commands import pull_request as command
from ablate.service.cli.commits.forges import PullRequest
from tests.answering import answering
from tests.api_stack import Api, api_fixture, served_api
from tests.cli import speaking_to
from tests.forges.fakes import FakeGitHub, FakeGitLab
from tests.forges.world import FORGES, SPEC, VALUES, World, labels_of, world
from tests.repositories import git

api = api_fixture(served_api, kinds=["sqlite"], scope="module")


@pytest.fixture(params=FORGES)
def lab(request: pytest.FixtureRequest, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with speaking_to(api, monkeypatch), world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def github(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with speaking_to(api, monkeypatch), world("github", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def fork(lab: World) -> World:
    """The pull request comes from a fork: no branch of the repository has its head."""
    lab.forge.is_fork = True
    git(lab.hosted.bare, "update-ref", "-d", "refs/heads/faster")
    git(lab.job, "fetch", "-q", "--prune", "origin")
    git(lab.job, "gc", "-q", "--prune=now")
    return lab


def untouched(lab: World, api: Api, before: int) -> None:
    """Assert that nothing was measured, and nothing was written to the forge."""
    assert len(labels_of(api)) == before
    assert lab.forge.states == []
    assert lab.forge.own == []


def test_a_push_to_a_fork_measures_and_writes_nothing(fork: World, api: Api) -> None:
    before = len(labels_of(api))
    done = fork.run()
    assert done.code == 5
    assert "comes from a fork, so nothing runs by itself" in done.err
    untouched(fork, api, before)


def test_an_approved_commit_of_a_fork_is_measured_although_a_push_follows(fork: World, api: Api) -> None:
    approved = fork.forge.head
    fetched_at_head = fork.forge.work

    def push_after_the_look(*arguments: Any) -> Any:
        """Push another commit as soon as the pull request was read once."""
        answer = fetched_at_head(*arguments)
        if fork.forge.head == approved:
            fork.push("print('swapped')\n", from_fork=True)
        return answer

    fork.forge.work = push_after_the_look  # type: ignore[method-assign]
    with answering(api):
        done = fork.run(fork.asked(approved))
    assert done.code == 0, done.err
    assert labels_of(api)[0]["commit.pull-request"] == approved
    assert {commit for commit, _state, _title in fork.forge.states} == {approved}
    assert fork.forge.head != approved
    assert all("Met." not in text for text in fork.forge.own), "the comment is about the newest head"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("", "comes from a fork: name the commit"),
        ("{head:.12}", "is not allowed"),
        ("{head:.39} --blocks 4", "is not allowed"),
        ("{older}", "is not the head"),
        ("HEAD", "every option stands once"),
        ("refs/pull/7/head", "every option stands once"),
        ("--blocks 4", "comes from a fork: name the commit"),
        ("{upper}", "every option stands once"),
    ],
    ids=["nothing", "short", "nearly whole", "older", "HEAD", "reference", "option", "capitals"],
)
def test_only_the_whole_name_of_the_head_approves_a_fork(fork: World, api: Api, words: str, answer: str) -> None:
    before = len(labels_of(api))
    older = fork.forge.head
    fork.push("print('pushed after the look')\n", from_fork=True)
    text = words.format(head=fork.forge.head, older=older, upper=fork.forge.head.upper())
    if words.startswith("{head:.12}"):
        text += " x"
    assert fork.run(fork.asked(text)).code == 5
    assert answer in fork.comment
    assert len(labels_of(api)) == before


PERMISSIONS = ("admin", "write", "read", "none")
ASSOCIATIONS = ("OWNER", "MEMBER", "COLLABORATOR", "CONTRIBUTOR", "FIRST_TIME_CONTRIBUTOR", "MANNEQUIN", "NONE", "")


@pytest.mark.parametrize("action", ["created", "edited", "deleted"])
def test_only_a_new_comment_of_somebody_who_may_push_measures(github: World, api: Api, action: str) -> None:
    assert isinstance(github.forge, FakeGitHub)
    for permission, association in itertools.product(PERMISSIONS, ASSOCIATIONS):
        github.forge.permissions["mallory"] = permission
        variables = github.asked("--blocks x", author="mallory", association=association, action=action)
        done = github.run(variables)
        may = permission in ("admin", "write") and association in ASSOCIATIONS[:3] and action == "created"
        assert done.code == 5
        assert ("mallory may not start a measurement here" in done.err) is not may
        assert bool(github.forge.states) is may, "whoever may not gets no answer, so nobody makes us write"
        github.forge.states.clear()


@pytest.mark.parametrize("text", ["/ablated", "please /ablate", " ", "", "/Ablate", "x\n/ablate"])
def test_another_comment_measures_nothing(github: World, api: Api, text: str) -> None:
    assert isinstance(github.forge, FakeGitHub)
    github.forge.permissions["grace"] = "write"
    before = len(labels_of(api))
    done = github.run(github.forge.asked(github.folder, text))
    assert done.code == 5
    assert "does not begin with /ablate" in done.err
    untouched(github, api, before)


def test_words_choose_a_spec_and_variants(lab: World, api: Api) -> None:
    two = {**VALUES, "variants": {"one": {}, "two": {"args": ["--two"]}, "three": {"args": ["--three"]}}}
    lab.set_spec({**two, "question": "Is it this file?"}, "ablations/other.yaml")
    with answering(api):
        done = lab.run(lab.asked(f"{lab.forge.head} --spec other.yaml --variants three,one --blocks 3"))
    assert done.code == 0, done.err
    assert {name for name in labels_of(api)[0] if name.startswith("commit.")} == {
        *("commit.baseline", "commit.one", "commit.three")
    }
    assert "Is it this file?" in lab.comment
    lab.run(lab.asked("--variants four"))
    assert "the spec has no variant 'four'; it has pull-request" in lab.comment


def drawn_words(draw: random.Random) -> list[str]:
    names = (*command._OPTIONS, "--require", "--s", "-h", "--", "")
    values = (
        "1,2",
        "12",
        "a.yaml",
        "one,two",
        "../a.yaml",
        "/etc/a.yaml",
        "a.yaml/..",
        "-1",
        "1,",
        "a;b",
        "٣",
        "0" * 20,
    )
    noise = "".join(draw.choice(string.printable) for _ in range(draw.randrange(6)))
    return [draw.choice((draw.choice(names), draw.choice(values), noise, "a" * 40)) for _ in range(draw.randrange(7))]


@pytest.mark.parametrize("seed", range(3))
def test_drawn_words_are_refused_or_are_the_options_that_the_page_names(seed: int) -> None:
    """The oracle reads the words by itself: pairs of a known name, once, and a value of plain characters."""
    draw, accepted = random.Random(seed), 0  # noqa: S311
    for _ in range(4000):
        text, is_fork = " ".join(drawn_words(draw)), draw.random() < 0.3
        pull = PullRequest(name="a/b#1", head="a" * 40, base="b" * 40, is_fork=is_fork, words=text, asked_by="")
        words = text.split()
        named = words[:1] == ["a" * 40]
        rest = words[named:]
        pairs = list(zip(rest[::2], rest[1::2], strict=False))
        plain = len(rest) % 2 == 0 and len({name for name, _ in pairs}) == len(pairs) and all(map(_is_plain, pairs))
        try:
            wishes = command._wishes(pull)
        except SpecError:
            assert not (plain and (named or not is_fork)), text
        else:
            assert plain, text
            assert wishes == dict(pairs)
            assert named or not is_fork
            accepted += 1
    assert accepted > 100


def _is_plain(pair: tuple[str, str]) -> bool:
    name, value = pair
    numbers = value.split(",")
    match name:
        case "--spec":
            stem, _, ending = value.rpartition(".")
            return ending in ("yaml", "yml", "json") and bool(stem) and set(stem) <= {*_LETTERS}
        case "--seeds":
            return all(one.isascii() and one.isdecimal() and len(one) <= 16 for one in numbers)
        case "--blocks":
            return value.isascii() and value.isdecimal() and len(value) <= 5
        case "--variants":
            return all(one and set(one) <= {*_LETTERS} for one in numbers)
    return False


_LETTERS = string.ascii_letters + string.digits + "_-"


def test_a_pipeline_of_a_fork_has_no_token_and_says_so(api: Api, tmp_path: Path, monkeypatch: Any) -> None:
    with speaking_to(api, monkeypatch), world("gitlab", tmp_path, monkeypatch) as lab:
        assert isinstance(lab.forge, FakeGitLab)
        done = lab.run({**lab.forge.pipeline(), "GITLAB_TOKEN": ""})
        assert done.code == 5
        assert "GITLAB_TOKEN is not set; a pipeline in a fork has no secrets" in done.err
        assert "allowed: the number" in lab.run({**lab.forge.pipeline(CI_MERGE_REQUEST_IID="x")}).err


def test_an_evaluation_of_the_head_is_not_used(lab: World, api: Api) -> None:
    """The head may change the file that measures it; the target branch's runs."""
    judged = {**VALUES["workload"], "evaluate": {"command": ["python", "judge.py"], "code": "../judge"}}
    judged["metrics"] = {"val": {"better": "lower"}}
    git(lab.hosted.person, "checkout", "-q", "main")
    base = lab.hosted.commit("Judge", {"judge/judge.py": "print('METRIC val=1')\n"})
    lab.hosted.push(base, "refs/heads/main")
    git(lab.hosted.person, "checkout", "-q", "faster")
    lab.set_spec({**VALUES, "workload": judged, "verdict": {"primary": {"metric": "val", "margin": "0%"}}})
    git(lab.job, "pull", "-q")
    lab.forge.head = lab.hosted.commit("Cheat", {"judge/judge.py": "print('METRIC val=0')\n"})
    lab.hosted.push(lab.forge.head, lab.reference, "refs/heads/faster")
    git(lab.job, "fetch", "-q", "origin")
    git(lab.job, "checkout", "-qf", lab.forge.head)
    monkey: dict[str, Any] = {}

    class Kept(Exception):
        """Ends the command where it would submit."""

    def keep(_client: Any, body: Any, *_: Any) -> None:
        monkey["body"] = body
        raise Kept

    lab.patch.setattr(command, "_measure", keep)
    lab.run()
    line = next(line for line in monkey["body"].packed_lines if "../judge" in line)
    assert f"commit {lab.forge.base} of ../judge" in line
    assert SPEC.startswith("ablations/")
