"""Which values of a spec look like keys or passwords, and which only have names or letters like them."""

import base64
import random
import string
import uuid
from typing import Any

import pytest
import yaml

from ablate.experiments.credentials import credential, credentials_in, form_of
from ablate.experiments.design.load import parse_spec
from ablate.experiments.errors import SpecError
from tests.factories import command_values as values
from tests.unit.experiments.design.test_command_spec import parse

ALNUM = string.ascii_letters + string.digits
DRAW = random.Random(44)  # noqa: S311 - drawn tests


def _drawn(alphabet: str, length: int) -> str:
    """Return random text in which every kind of character of the alphabet may be; a key has a digit almost surely."""
    return "".join(DRAW.choices(alphabet, k=length))


def _hex(length: int) -> str:
    return "a1" + _drawn("0123456789abcdef", length - 2)


BY_FORM = {
    "hf": lambda: "hf_" + _drawn(string.ascii_letters, 34),
    "openai": lambda: "sk-" + "A1b" + _drawn(ALNUM, 45),
    "openai project": lambda: "sk-proj-" + "aB3" + _drawn(ALNUM + "-_", 121),
    "anthropic": lambda: "sk-ant-api03-" + "aB3" + _drawn(ALNUM + "-_", 92) + "AA",
    "openrouter": lambda: "sk-or-v1-" + _hex(64),
    "stripe": lambda: "sk_live_" + _drawn(ALNUM, 24),
    "github": lambda: f"gh{DRAW.choice('pousr')}_" + _drawn(ALNUM, 36),
    "github fine": lambda: "github_pat_" + _drawn(ALNUM, 22) + "_" + _drawn(ALNUM, 59),
    "gitlab": lambda: "glpat-" + _drawn(ALNUM + "-_", 20),
    "aws": lambda: DRAW.choice(["AKIA", "ASIA"]) + _drawn(string.ascii_uppercase + "234567", 16),
    "slack": lambda: f"xox{DRAW.choice('bpars')}-" + _drawn(string.digits, 12) + "-" + _drawn(ALNUM, 24),
    "jwt": lambda: "eyJhbGciOiJIUzI1NiJ9.eyJ" + _drawn(ALNUM + "-_", 40) + "." + _drawn(ALNUM + "-_", 43),
    "pem": lambda: f"-----BEGIN {DRAW.choice(['', 'RSA ', 'EC ', 'OPENSSH '])}PRIVATE KEY-----\nMIIE",
    "google": lambda: "AIza" + _drawn(ALNUM + "-_", 35),
    "npm": lambda: "npm_" + _drawn(ALNUM, 36),
    "pypi": lambda: "pypi-AgEIcHlwaS5vcmc" + _drawn(ALNUM + "-_", 60),
    "replicate": lambda: "r8_" + _drawn(ALNUM, 37),
    "groq": lambda: "gsk_" + _drawn(ALNUM, 52),
    "nvidia": lambda: "nvapi-" + _drawn(ALNUM + "-_", 64),
    "databricks": lambda: "dapi" + _drawn("0123456789abcdef", 32),
    "langsmith": lambda: "lsv2_pt_" + _hex(32),
    "address": lambda: f"https://{_drawn(ALNUM, 5)}:{_drawn(ALNUM + '%._', 9)}@pypi.lab.example/simple",
    "database": lambda: f"postgresql+psycopg://lab:{_drawn(ALNUM, 7)}@db:5432/runs",
    "redis": lambda: f"redis://:{_drawn(ALNUM, 7)}@host:6379/0",
    "git with a token": lambda: f"git+https://ghp_{_drawn(ALNUM, 36)}@github.com/lab/x.git",
    "header": lambda: f"Authorization: Bearer {_drawn(ALNUM, 30)}",
}
BY_NAME = {
    "WANDB_API_KEY": lambda: _hex(40),
    "COMET_API_KEY": lambda: "a1" + _drawn(ALNUM, 23),
    "NEPTUNE_API_TOKEN": lambda: base64.b64encode(b'{"api_address":"https://' + DRAW.randbytes(30)).decode(),
    "KAGGLE_KEY": lambda: _hex(32),
    "AWS_SECRET_ACCESS_KEY": lambda: "a1" + _drawn(ALNUM + "/+", 38),
    "AZURE_OPENAI_KEY": lambda: str(uuid.UUID(int=DRAW.getrandbits(128), version=4)),
    "HF_TOKEN": lambda: "api_" + "x9" + _drawn(ALNUM, 32),
    "GITLAB_PAT": lambda: "a1" + _drawn(ALNUM, 18),
    "DB_PASSWORD": lambda: "correct" + _drawn(string.ascii_lowercase, 5),
    "PGPASSWORD": lambda: _drawn(ALNUM, 7) + "!",
    "password": lambda: "x" + _drawn(ALNUM, 12),
    "clientSecret": lambda: "x" + _drawn(ALNUM, 20),
    "JWT_SECRET": lambda: "x" + _drawn(ALNUM, 20),
    "apiKey": lambda: _hex(32),
    "wandb.api-key": lambda: _hex(40),
}


@pytest.mark.parametrize("form", BY_FORM)
def test_drawn_keys_show_by_their_form_under_any_name(form: str) -> None:
    for _ in range(50):
        value = BY_FORM[form]()
        assert form_of(value), value
        assert credential("ANYTHING", value), value
        assert list(credentials_in(["python", f"--x={value}"])), value
        assert list(credentials_in(["bash", "-c", f"X={value} python train.py"])), value


@pytest.mark.parametrize("name", BY_NAME)
def test_drawn_keys_show_by_their_name(name: str) -> None:
    for _ in range(50):
        value = BY_NAME[name]()
        assert credential(name, value), value
        option = "--" + name.replace("_", "-")
        assert [index for index, _words in credentials_in(["python", option, value])] == [2], value
        assert list(credentials_in([f"{option}={value}"])), value
        assert list(credentials_in(["bash", "-c", f"export {name}='{value}'; python train.py"])), value
        assert list(credentials_in([f"--url=https://lab.example/x?page=2&{name}={value}&z=1"])), value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "1024"),
        ("SEED_KEY", "3"),
        ("KEYBOARD", "aB3dE5fG7hI9jK1lM3nO5pQ7r"),
        ("MONKEY", "aB3dE5fG7hI9jK1lM3nO5pQ7r"),
        ("TOKEN_DIM", "1024"),
        ("TOKEN_BUDGET", "10_000_000"),
        ("HF_TOKEN_PATH", "/home/me/.cache/huggingface/token"),
        ("HF_TOKEN", "/run/keys/hf"),
        ("HF_TOKEN", "~/.cache/huggingface/token"),
        ("HF_TOKEN", "$HF_TOKEN"),
        ("HF_TOKEN", "{token}"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("PAD_TOKEN", "[PAD]"),
        ("BOS_TOKEN", "begin_of_sentence"),
        ("STOP_TOKEN", "</s></s></s>"),
        ("SORT_KEY", "learning_rate"),
        ("LABEL_KEY", "label_text_2"),
        ("INPUT_KEY", "input_ids_and_attention_mask"),
        ("MODEL_KEY", "llama-3-8b-instruct-v2"),
        ("MODEL_KEY", "mixtral-8x7b-instruct-v0.1"),
        ("CACHE_KEY", "0123456789abcdef0123456789abcdef01234567"),
        ("GIT_COMMIT", "0123456789abcdef0123456789abcdef01234567"),
        ("WANDB_RUN_ID", "3x7k2p9q"),
        ("OPENAI_API_KEY", "EMPTY"),
        ("API_KEY", "none"),
        ("SECRET", "12345678"),
        ("SECRET", "true"),
        ("PASSWORD", "none"),
        ("PASSWORD_FILE", "/run/keys/password"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "./service-account.json"),
        ("NUM_KEY", "1e-8"),
        ("TIMEOUT_KEY", "30s"),
        ("PWD", "/home/me/project"),
        ("MASTER_ADDR", "tcp://127.0.0.1:29500"),
        ("MODEL", "meta-llama/Llama-3.1-8B-Instruct"),
        ("REPOSITORY", "git@github.com:lab/project.git"),
        ("REPOSITORY", "ssh://git@github.com:22/lab/project.git"),
        ("INDEX", "https://pypi.org/simple"),
        ("INDEX", "https://${USER}:${PASSWORD}@pypi.lab.example/simple"),
        ("PAGE", "https://example.org:8443/@me/page:2"),
        ("RUN", "sk-learn-baseline-model-2024-run"),
        ("RUN", "sk_learn_Baseline_2024_model"),
        ("RUN", "hf_transformers_trainer_baseline"),
        ("NAME", "task-1-very-long-name-of-a-run-with-words-2026"),
    ],
)
def test_names_numbers_paths_words_and_placeholders_are_no_keys(name: str, value: str) -> None:
    assert credential(name, value) is None
    option = "--" + name.lower().replace("_", "-")
    assert list(credentials_in(["python", "train.py", option, value, f"{option}={value}", f"{name}={value}"])) == []


def test_ordinary_commands_have_no_keys() -> None:
    commands = (
        ["python", "train.py", "--seed", "{seed}", "--out={out}", "--max-tokens", "1024", "--pad-token", "<pad>"],
        ["torchrun", "--nproc-per-node=2", "--rdzv-endpoint=localhost:29500", "-m", "lab.train", "+trainer.key=value"],
        ["bash", "-c", "set -e; export TOKENIZERS_PARALLELISM=false; python -m lab.train --key input_ids | tee log"],
        ["accelerate", "launch", "--config_file", "configs/8gpu.yaml", "train.py", "--hub_token_file=/run/keys/hf"],
    )
    assert [list(credentials_in(command)) for command in commands] == [[], [], [], []]


@pytest.mark.parametrize("line", ["# {}", "question: Is {} good?", "labels: {{key: '{}'}}"])
def test_a_key_in_a_comment_or_another_text_of_a_spec_is_refused_by_its_line(line: str) -> None:
    made = {name: value for name, value in values().items() if name not in {"question", "labels"}}
    text = f"{yaml.safe_dump(made)}question: Is it good?\n" if "question" not in line else yaml.safe_dump(made)
    whole = text + line.format(KEY) + "\n"
    with pytest.raises(SpecError) as refusal:
        parse_spec(whole.encode(), "application/yaml")
    [problem] = refusal.value.problems
    assert problem.detail.startswith(f"line {len(whole.splitlines())} looks like a Hugging Face token")
    assert "ABCDEFG" not in str(problem)


KEY = "hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"workload__env": {"HF_TOKEN": KEY}}, "#/workload/env/HF_TOKEN"),
        ({"workload__env": {"DB_PASSWORD": "hunter2hunter2"}}, "#/workload/env/DB_PASSWORD"),
        ({"workload__env": {"PEM": "-----BEGIN PRIVATE KEY-----\nhunter2"}}, "#/workload/env/PEM"),
        ({"baseline": {"env": {"X": KEY}}}, "#/baseline/env/X"),
        ({"variants": {"x": {"env": {"X": KEY}}}}, "#/variants/x/env/X"),
        ({"workload__command": ["python", "t.py", f"--token={KEY}"]}, "#/workload/command/2"),
        ({"workload__command": ["python", "t.py", "--password", "hunter2hunter2"]}, "#/workload/command/3"),
        ({"baseline": {"args": [f"--index=https://me:{KEY}@host/simple"]}}, "#/baseline/args/0"),
        ({"variants": {"x": {"args": ["-c", f"HF_TOKEN={KEY} run"]}}}, "#/variants/x/args/1"),
        ({"workload__secrets": [KEY]}, "#/workload/secrets/0"),
        ({"workload__secrets": ["HF_TOKEN=hunter2"]}, "#/workload/secrets/0"),
    ],
)
def test_a_spec_with_a_key_is_refused_where_it_is_and_the_key_is_not_shown(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse(values(**changes))
    [problem] = refusal.value.problems
    assert problem.pointer == where
    text = str(problem) + str(refusal.value)
    assert "ABCDEFG" not in text
    assert "hunter2" not in text
    assert "name" in text if "secrets" in where else "workload.secrets: [NAME]" in str(problem.hint)
