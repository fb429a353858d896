"""The node's file of secrets, and the mask over their values in logs and results."""

import base64
import json
import random
import string
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.workers.blocks.block_runner import Mask
from ablate.workers.errors import SettingsError
from ablate.workers.isolation.node_secrets import lacks_secret, read_secrets
from ablate.workers.processes import trial_output
from ablate.workers.processes.trial_output import LogTail
from ablate.workers.trials.result import TrialResult
from tests.programs import LOOP, order_for, program_config, run_trial, write_program

TOKEN = "hf_Plant3dInTheN0de/of+Ada=="
MASK = Mask({"HF_TOKEN": TOKEN})


def stored(tmp_path: Path, text: str, *, mode: int = 0o600) -> Path:
    path = tmp_path / "secrets"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_lines_of_a_file_are_secrets_by_name(tmp_path: Path) -> None:
    lines = ("# keys of the lab", "", f"HF_TOKEN={TOKEN}", "export WANDB_API_KEY='0123456789abcdef'")
    text = "\n".join((*lines, "URL = https://me:pass word@h/", ""))
    assert read_secrets(stored(tmp_path, text)) == {
        "HF_TOKEN": TOKEN,
        "WANDB_API_KEY": "0123456789abcdef",
        "URL": "https://me:pass word@h/",
    }


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f"A={TOKEN}", 0o640, "mode 0640"),
        (f"A={TOKEN}", 0o604, "chmod 600"),
        (f"A={TOKEN}\nA={TOKEN}", 0o600, "line 2: A is there twice"),
        (f"{TOKEN}", 0o600, "line 1 is no NAME=value"),
        (f"1A={TOKEN}", 0o600, "line 1 is no NAME=value"),
        ("SHORT=hf_abcd", 0o600, "the value of SHORT has 7 characters; allowed: at least 8"),
        ("EMPTY=", 0o600, "has 0 characters"),
        (f"A=a\x1b{TOKEN}", 0o600, "printable"),
        (f"PYTHONPATH={TOKEN}", 0o600, "belongs to the worker"),
        (f"ABLATE_TOKEN={TOKEN}", 0o600, "belongs to the worker"),
        (f"LD_PRELOAD={TOKEN}", 0o600, "belongs to the worker"),
    ],
)
def test_a_bad_file_is_refused_and_no_value_is_shown(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")) as refusal:
        read_secrets(stored(tmp_path, text, mode=mode))
    assert TOKEN not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none cannot be read: No such file or directory \(ABLATE_SECRETS\)"):
        read_secrets(tmp_path / "none")
    assert lacks_secret("gpu-7", "B", ["C", "A"]) == "node 'gpu-7' has no secret B (ABLATE_SECRETS); it has: A, C"


FORMS = {
    "plain": TOKEN,
    "in an address": f"https://ada:{quote(TOKEN, safe='')}@host",
    "with small escapes": quote(TOKEN, safe="").replace("%2F", "%2f").replace("%3D", "%3d").replace("%2B", "%2b"),
    "JSON": json.dumps({"token": TOKEN}),
    "repr": repr(TOKEN),
    **{f"Base64 after {n}": base64.b64encode(b"ada:"[:n] + TOKEN.encode() + b"!").decode() for n in range(5)},
    **{f"Base64 for files after {n}": base64.urlsafe_b64encode(b"ada"[:n] + TOKEN.encode()).decode() for n in range(4)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_masked_in_its_length(form: str) -> None:
    text = f"before {FORMS[form]} after"
    masked = MASK.text(text)
    assert len(masked) == len(text)
    assert "[HF_TOKEN]" in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    assert not any(TOKEN[start : start + 10] in masked for start in range(len(TOKEN) - 9))


def test_a_name_that_is_longer_than_the_value_is_stars() -> None:
    assert Mask({"A_VERY_LONG_NAME": "12345678"}).text("x 12345678 y") == "x ******** y"


def test_without_secrets_nothing_changes() -> None:
    assert Mask({}).text("hf_" + "x" * 99) == "hf_" + "x" * 99
    assert Mask({}).held(b"hf_") == 0


@given(st.integers(min_value=8, max_value=len(TOKEN)), st.sampled_from([63, 100, 120, 200, 300]), st.integers(0, 20))
def test_a_text_that_was_cut_inside_of_a_secret_shows_at_most_three_letters(shown: int, length: int, more: int) -> None:
    cut = ("x" * (length - shown) + TOKEN)[:length]
    masked = MASK.text(cut)
    assert len(masked) == length
    assert TOKEN[:4] not in masked[length - shown :]
    assert MASK.text(cut + "'" + "y" * more)[length - shown :].count(TOKEN[:8]) == (shown < max(8, len(TOKEN) // 2))


SECRET = st.text(string.ascii_letters + string.digits + "+/=:@ é'\"\\", min_size=8, max_size=40).filter(
    lambda text: text.strip() == text and text.isprintable()
)


@given(
    st.lists(SECRET, min_size=1, max_size=3, unique=True),
    st.randoms(use_true_random=False),
    st.integers(min_value=1, max_value=200),
)
def test_a_drawn_log_in_pieces_equals_the_masked_whole_and_has_no_secret(
    tmp_path_factory: pytest.TempPathFactory, secrets: list[str], draw: random.Random, chunk: int
) -> None:
    """The oracle looks for every value in the joined text."""
    mask = Mask({f"S{number}": value for number, value in enumerate(secrets)})
    parts = [draw.choice([*secrets, "step 3 loss 1.25\n", value[: draw.randrange(len(value))], "é"])
             for value in secrets for _ in range(20)]  # fmt: skip
    whole = "".join(part + draw.choice(["\n", " ", ""]) for part in parts)
    path = tmp_path_factory.mktemp("log") / "log.txt"
    path.touch()
    tail, texts = LogTail("trl_1", path, mask), []
    with pytest.MonkeyPatch.context() as patch, path.open("ab") as file:
        patch.setattr(trial_output, "CHUNK_BYTES", chunk + 300)
        data = whole.encode()
        while data:
            size = draw.randrange(1, 90)
            file.write(data[:size])
            file.flush()
            data = data[size:]
            _take(tail, texts)
        tail.is_whole = True
        _take(tail, texts)
    sent = "".join(texts)
    assert not [value for value in secrets if value in sent]
    assert len(sent.encode()) == len(whole.encode())
    mask.file(path)
    kept = path.read_bytes()
    assert not [value for value in secrets if value.encode() in kept]
    assert len(kept) == len(whole.encode())


def _take(tail: LogTail, texts: list[str]) -> None:
    while (chunk := tail.next_chunk()) is not None:
        texts.append(chunk.text)
        tail.accepted(chunk)


def test_a_file_is_masked_across_the_pieces_in_which_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.workers.isolation.node_secrets._PIECE_BYTES", 100)
    for before in range(70, 110):
        path = tmp_path / str(before)
        path.write_text("x" * before + TOKEN + "y" * 150 + TOKEN, encoding="utf-8")
        MASK.file(path)
        text = path.read_text(encoding="utf-8")
        filling = MASK.text(TOKEN)
        assert text == "x" * before + filling + "y" * 150 + filling


def test_a_link_in_the_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    tmp_path.joinpath("other").write_text(TOKEN, encoding="utf-8")
    tmp_path.joinpath("log.txt").symlink_to(tmp_path / "other")
    MASK.file(tmp_path / "log.txt")
    assert tmp_path.joinpath("other").read_text(encoding="utf-8") == TOKEN


LEAKING = LOOP.replace(
    "    trial.report(val_bpb=1.5)",
    """
    import os
    token = os.environ["HF_TOKEN"]
    print("token", token, flush=True)
    print("TOKEN=" + token, file=sys.stderr, flush=True)
    trial.report(val_bpb=1.5, **{token: 1.0})
    trial.attest(gate=token)
    trial._send("kernels", rows=[[token, 1, 2.0, {}], ["k" * 290 + token, 1, 2.0, {}]])
    """,
)


def _result(tmp_path: Path, source: str) -> tuple[TrialResult, str]:
    """Run a program as a trial with the secret, in a process of its own as the worker does."""
    config = program_config(write_program(tmp_path / "code", source), secrets=("HF_TOKEN",), needs="process")
    order = replace(order_for(config, tmp_path / "home"), secrets={"HF_TOKEN": TOKEN})
    prepared = run_trial(replace(order, prepare_only=True))
    assert prepared is not None
    result = run_trial(replace(order, dataset=prepared.data_folder))
    assert result is not None
    MASK.file(order.paths.log)
    everything = b"".join(path.read_bytes() for path in order.paths.folder.rglob("*") if path.is_file())
    return result, everything.decode("utf-8", "replace")


def test_a_program_gets_its_secret_and_no_file_of_the_trial_keeps_it(tmp_path: Path) -> None:
    result, files = _result(tmp_path, LEAKING)
    assert result.failure_class is None, result.message
    assert TOKEN not in files
    assert TOKEN[:10] not in files
    assert "token [HF_TOKEN]" in files
    assert result.program is not None
    assert set(result.program.reported) == {"val_bpb", MASK.text(TOKEN)}


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError(token)",
        "raise ValueError('x' * 1990 + token)",
        "trial.__exit__(None, None, None)\n    sys.exit('No module named \\'train\\' ' + 'x' * 240 + token)",
        "trial.__exit__(None, None, None)\n    sys.exit('x' * 280 + token)",
        "trial._send('nothing', at=token)",
        "trial._send('reported', values={token: 'x'})",
    ],
)
def test_the_message_of_a_failure_has_no_secret(tmp_path: Path, end: str) -> None:
    result, files = _result(tmp_path, LEAKING + end)
    assert result.failure_class is not None
    assert TOKEN[:10] not in files
    assert TOKEN[:10] not in str(result.message)
