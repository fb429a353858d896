import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ablate.experiments.catalog.files import CONTENT_TYPE_OF_SUFFIX
from ablate.experiments.design.load import parse_spec
from ablate.experiments.errors import SpecError
from ablate.service.cli.arguments import read_spec
from ablate.service.cli.service_commands import app
from ablate.service.client.settings import get_client_settings


def test_read_spec_takes_a_catalog_name() -> None:
    body = read_spec("demo")
    assert parse_spec(body.content, body.content_type).ablation == "demo"


@pytest.mark.parametrize("suffix", sorted(CONTENT_TYPE_OF_SUFFIX))
def test_read_spec_takes_a_file_with_the_type_of_its_ending(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"spec{suffix}"
    path.write_bytes(b"content")
    body = read_spec(str(path))
    assert (body.content, body.content_type) == (b"content", CONTENT_TYPE_OF_SUFFIX[suffix])


def test_read_spec_prefers_a_file_to_a_catalog_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert b"ablation: demo" in read_spec("demo").content
    Path("demo.yaml").write_bytes(b"mine")
    assert read_spec("demo.yaml").content == b"mine"


def test_read_spec_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ablation: x")))
    assert read_spec("-").content == b"ablation: x"


def test_read_spec_names_the_catalog_when_there_is_nothing() -> None:
    with pytest.raises(SpecError, match=r"no file 'dmeo'.*demo, demo-refused") as refused:
        read_spec("dmeo")
    assert refused.value.problems[0].hint == "did you mean 'demo'?"


@pytest.mark.parametrize(
    "words", [("aa", "cpu", "--like"), ("run",), ("plan",), ("run", "--detach"), ("show",), ("verdict",)]
)
def test_a_file_that_is_not_there_is_said_to_be_missing_and_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("ABLATE_URL", "http://127.0.0.1:1")
    get_client_settings.cache_clear()
    done = CliRunner().invoke(app, [*words, "missing/x.yaml"])
    error = " ".join(done.stderr.split())
    assert (done.exit_code, "there is no file" in error, "'missing/x.yaml'" in error) == (5, True, True), error
    assert "pattern" not in error
    assert "no answer from" not in error


def test_read_spec_refuses_an_unknown_ending(tmp_path: Path) -> None:
    path = tmp_path / "spec.txt"
    path.touch()
    with pytest.raises(SpecError, match=r"'\.txt'.*\.yaml, \.yml, \.json"):
        read_spec(str(path))


def test_a_file_that_is_there_and_is_no_ablation_is_not_said_to_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("ablation: x")
    done = CliRunner().invoke(app, ["show", str(path)])
    assert (done.exit_code, "is neither a bundle nor the name of an ablation" in " ".join(done.stderr.split())) == (
        5,
        True,
    )
