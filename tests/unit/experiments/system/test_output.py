"""What a program prints in a shell without UTF-8, into a pipe that ends early, and where nobody reads."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from ablate.experiments.system.logs import accept_every_text
from tests.architecture.pages import ROOT
from tests.waiting import LIMIT_S

ABLATE = str(Path(sys.executable).with_name("ablate"))
TABLE = str(next((ROOT / "docs" / "published").glob("*.yaml")))
SHELLS = {
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "ascii": {"PYTHONIOENCODING": "ascii:strict"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "utf-16": {"PYTHONIOENCODING": "utf-16"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


def run(*words: str | bytes, shell: dict[str, str], **options: object) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "ABLATE_HOME": "/no/such/home", **shell}
    return subprocess.run(
        [ABLATE, *words], env=environment, capture_output=True, check=False, timeout=LIMIT_S, **options
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "words", [("offline", "assess", TABLE), ("catalog", "recipes"), ("plan", b"\xff-\xe2\x80\xa6")]
)
def test_every_shell_shows_every_text(words: tuple[str | bytes, ...], shell: str) -> None:
    done = run(*words, shell=SHELLS[shell])
    assert b"Traceback" not in done.stderr
    assert b"codec can't encode" not in done.stderr
    assert done.returncode == (5 if words[0] == "plan" else 0), done.stderr


@pytest.mark.parametrize("shell", ["ascii", "C", "cp1252"])
def test_json_keeps_its_values_in_every_shell(shell: str) -> None:
    value = {"name": "\u0141\xf3d\u017a \u2192 \xb1 \U0001f600", "list": []}
    code = f"from ablate.service.cli.output import print_json; print_json({value!a})"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **SHELLS[shell]}, capture_output=True, check=True, cwd=ROOT
    )
    assert json.loads(done.stdout.decode("ascii")) == value


def test_a_character_that_the_stream_lacks_becomes_ascii() -> None:
    text = "\xb1 \u0141 \U0001f600 \udcff \u2014"
    code = f"from ablate.experiments.system import logs; logs.accept_every_text(); print({text!a})"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **SHELLS["ascii"]}, capture_output=True, check=True, cwd=ROOT
    )
    assert done.stdout == b"+/- \\u0141 \\ud83d\\ude00 \\udcff \\u2014\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error_in_one_sentence(unbuffered: str) -> None:
    variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [ABLATE, "catalog", "recipes"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=variables,
            check=False,
            timeout=LIMIT_S,
        )
    assert (done.returncode, done.stderr) == (5, b"error: [Errno 28] No space left on device\n")


def test_closed_streams_give_no_traceback() -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        shell = subprocess.run(
            ["sh", "-c", f"{ABLATE} catalog recipes {closed}"], capture_output=True, check=False, timeout=LIMIT_S
        )
        assert (shell.returncode, b"Traceback" in shell.stderr) == (0, False)


def test_a_pipe_that_ends_early_is_quiet() -> None:
    for words in ("catalog recipes", "catalog schema", "show missing/x.yaml"):
        shell = subprocess.run(
            ["sh", "-c", f"{ABLATE} {words} 2>&1 | head -c 1 >/dev/null"],
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert shell.stderr == b""


def test_accept_every_text_leaves_streams_without_an_encoding_alone(capsys: pytest.CaptureFixture[str]) -> None:
    accept_every_text()
    sys.stdout.write("\u2014")
    assert capsys.readouterr().out == "\u2014"


def test_every_mark_of_our_own_sentences_has_a_form_in_ascii() -> None:
    files = [path for root in ("service", "experiments", "workers") for path in (ROOT / root).rglob("*.py")]
    names = {name for path in files for name in re.findall(r"\\N\{([A-Z0-9 -]+)\}", path.read_text(encoding="utf-8"))}
    marks = "".join(unicodedata.lookup(name) for name in names if not name.startswith("SYMBOL FOR"))
    assert marks
    assert "\\u" not in marks.encode("ascii", "ablate.ascii").decode()
