"""The cached branch of `ablate nightly`, from real remote repositories."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ablate.experiments.errors import CodeArchiveError, SpecError
from ablate.service.cli.commits.branch import Branch, Remote, own_cache
from tests.ports import free_port
from tests.repositories import git
from tests.waiting import until


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A clone with one commit, which it has pushed to its bare origin."""
    git(tmp_path, "init", "-q", "--bare", "-b", "main", "origin.git")
    git(tmp_path, "clone", "-q", "origin.git", "work")
    made = tmp_path / "work"
    git(made, "config", "user.email", "a@example.org")
    git(made, "config", "user.name", "a")
    (made / "lab" / "code").mkdir(parents=True)
    pushed(made, "begin")
    return made


def pushed(work: Path, title: str, name: str = "lab/code/train.py") -> str:
    (work / name).write_text(title)
    git(work, "add", ".")
    git(work, "commit", "-qm", title)
    git(work, "push", "-q", "--force", "origin", "HEAD:main")
    return git(work, "rev-parse", "HEAD")


def fetched(work: Path, url: str | None = None, name: str = "main") -> Branch:
    remote = Remote(url=url or str(work.parent / "origin.git"), code="lab/code")
    return Branch.fetched(work.parent / "cache", remote, name)


def test_a_branch_follows_its_remote_and_leaves_the_clone_of_the_user_alone(work: Path) -> None:
    first = git(work, "rev-parse", "HEAD")
    git(work, "tag", "v0")
    git(work, "push", "-q", "origin", "v0")
    (work / "lab" / "code" / "draft.py").write_text("of the user")
    state = git(work, "status", "--porcelain"), git(work, "for-each-ref")
    remote = Remote.of(None, work / "lab" / "spec.yaml", "code")
    assert remote == Remote(url=str(work.parent / "origin.git"), code="lab/code")
    branch = Branch.fetched(work.parent / "cache", remote, "main")
    assert (branch.head, branch.repository.commit("v0"), list(branch.folder.iterdir())) == (first, first, [])
    assert (git(work, "status", "--porcelain"), git(work, "for-each-ref")) == state
    (work / "lab" / "code" / "draft.py").unlink()
    words, code = pushed(work, "words", "README"), pushed(work, "code")
    branch = fetched(work)
    assert branch.history == {first, words, code}
    assert (branch.commits_since(first), branch.commits_since(first, words)) == (1, 0)
    assert branch.code_of(words) == branch.code_of(first) != branch.code_of(code)
    assert branch.repository.is_before(first, code)
    assert not branch.repository.is_before(code, words)


def test_a_rewritten_branch_forgets_the_commits_that_it_lost(work: Path) -> None:
    first, lost = git(work, "rev-parse", "HEAD"), pushed(work, "lost")
    assert fetched(work).history == {first, lost}
    git(work, "reset", "-q", "--hard", first)
    kept = pushed(work, "kept")
    branch = fetched(work)
    assert branch.history == {first, kept}
    assert not branch.repository.is_before(lost, kept)
    assert (branch.commit(first[:9]), branch.commit(lost), branch.commit("nothing")) == (first, None, None)


def test_a_daemon_over_the_network_is_a_remote_too(work: Path) -> None:
    port = free_port()
    serve = ["git", "daemon", f"--port={port}", "--listen=127.0.0.1", f"--base-path={work.parent}", "--export-all"]
    with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as daemon:
        try:
            until(lambda: answers(work, f"git://127.0.0.1:{port}/origin.git"))
            assert fetched(work, f"git://127.0.0.1:{port}/origin.git").head == git(work, "rev-parse", "HEAD")
        finally:
            daemon.terminate()


def answers(work: Path, url: str) -> bool:
    return subprocess.run(["git", "ls-remote", url], cwd=work, capture_output=True, check=False).returncode == 0


def test_a_remote_without_the_branch_or_its_history_is_refused_and_shows_no_password(work: Path) -> None:
    pushed(work, "second")
    shallow = work.parent / "shallow"
    git(work.parent, "clone", "-q", "--depth", "1", f"file://{work.parent}/origin.git", "shallow")
    for url in (str(shallow), f"file://{shallow}"):
        with pytest.raises(CodeArchiveError, match="lacks older commits: the repository is a shallow clone"):
            fetched(work, url)
    assert len(fetched(work).history) == 2, "the cache is whole again"
    with pytest.raises(CodeArchiveError, match=r"branch 'none' of .* cannot be fetched: .*none"):
        fetched(work, name="none")
    with pytest.raises(CodeArchiveError, match="cannot be fetched") as refusal:
        fetched(work, "http://ada:hunter2@127.0.0.1:9/x.git")
    assert "hunter2" not in str(refusal.value)
    for url in ("ext::sh -c true", "--upload-pack=true", str(work.parent / "nowhere")):
        with pytest.raises(CodeArchiveError, match="cannot be fetched"):
            fetched(work, url)


def test_code_outside_of_the_repository_and_a_repository_without_origin_are_refused(work: Path) -> None:
    spec = work / "lab" / "spec.yaml"
    assert Remote.of("https://git.example/x", spec, "./code/").code == "code"
    assert Remote.of("https://git.example/x", spec, ".").code == ""
    for code in ("../code", "/code", "a/../../b"):
        with pytest.raises(SpecError, match="outside of it"):
            Remote.of("https://git.example/x", spec, code)
    git(work, "remote", "remove", "origin")
    with pytest.raises(SpecError, match="has no remote named origin"):
        Remote.of(None, spec, "code")
    branch = Branch.fetched(work.parent / "other", Remote(url=str(work), code="none"), "main")
    with pytest.raises(CodeArchiveError, match="has no folder 'none/'"):
        branch.code_of(branch.head)


def test_a_message_is_owed_until_each_receiver_has_it(work: Path) -> None:
    branch = fetched(work)
    branch.owe("abl_1", ["json://a/secret", "json://b"])
    branch.paid("abl_1", "json://b")
    again = fetched(work)
    assert again.owes("abl_1", "json://a/secret")
    assert not again.owes("abl_1", "json://b")
    assert not again.owes("abl_2", "json://a/secret")
    assert "secret" not in again.repository.read("for-each-ref").decode()


def test_a_cache_belongs_to_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with own_cache("a/main", "u") as cache:
        assert cache.is_relative_to(tmp_path / ".cache" / "ablate")
        with (
            pytest.raises(CodeArchiveError, match="another `ablate nightly` of a/main is running here"),
            own_cache("a/main", "u"),
        ):
            pass
        with own_cache("b/main", "u") as other:
            assert other != cache
    with own_cache("a/main", "u") as again:
        assert again == cache
