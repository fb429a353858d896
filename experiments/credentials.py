"""Values of a spec that look like keys or passwords, which every reader of an answer would see.

A value is a credential by its own form, such as `ghp_...`, or by its name together with a value that nobody types by
heart. Numbers, booleans, paths and words are none.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

SHORTEST = 8
"""Fewest characters of a credential; a node's store takes no shorter secret, because its redaction would eat a log."""

_ALNUM = "[A-Za-z0-9]"
_FORMS = {
    "a Hugging Face token": rf"hf_{_ALNUM}{{20,}}",
    "an API key": rf"sk-(?:[a-z]+[0-9]*-)*(?=[A-Za-z_-]*[0-9])(?=[^A-Z]*[A-Z]|{_ALNUM}{{20}})[\w-]{{20,}}"
    r"|[sr]k_(?:live|test)_\w{16,}",
    "a GitHub token": rf"gh[pousr]_{_ALNUM}{{30,}}|github_pat_\w{{22,}}",
    "a GitLab token": r"gl(?:pat|dt|rt|ptt|ft|soat|cbt|agent|imt)-[\w-]{20,}",
    "an AWS key": r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "a Slack token": r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}",
    "a JSON Web Token": r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a Google key": r"AIza[\w-]{35}|ya29\.[\w-]{20,}",
    "a token": rf"npm_{_ALNUM}{{36}}|pypi-[\w-]{{50,}}|dckr_pat_[\w-]{{20,}}|r8_{_ALNUM}{{30,}}|gsk_{_ALNUM}{{30,}}"
    rf"|nvapi-[\w-]{{30,}}|hvs\.[\w-]{{20,}}|SG\.[\w-]{{16,}}\.[\w-]{{16,}}|dapi[0-9a-f]{{32}}|whsec_[\w+/=]{{20,}}"
    rf"|lsv2_[a-z]{{2}}_{_ALNUM}{{20,}}|wandb_v1_\w{{20,}}",
    "a bearer token": r"(?i:bearer) +[\w.~+/=-]{16,}",
    "an address with a password": r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@'\"]*:(?![{$*<])[^/\s@'\"]+@",
}
_BY_FORM = re.compile(
    "|".join(rf"(?P<f{number}>(?<!{_ALNUM})(?:{form}))" for number, form in enumerate(_FORMS.values()))
)
_ASSIGNED = re.compile(r"(?<![\w.-])-{0,2}\+{0,2}([A-Za-z_][\w.-]*)\s*[=:]\s*(?:[Bb]asic +)?[\"']?([^\s\"'&;,?]+)")
"""`NAME=value` inside of an argument: an option, a line of a shell, a header, or a part of a query."""
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PASSWORDS = frozenset({"password", "passwd", "passphrase", "secret", "credential", "credentials", "pwd"})
_KEYS = frozenset({"key", "token", "apikey", "auth", "authorization", "pat"})
_NO_KEYS = frozenset({"cache", "config", "hash", "public", "sort", "dataset", "partition"})
"""Words before `key` that name something else."""
_READABLE = re.compile(
    r"[A-Za-z]{1,19}|[A-Z]?[a-z]+|[0-9]{1,8}|[A-Za-z]{1,12}[0-9]{1,3}|(?:[0-9]{1,4}[A-Za-z]{1,4}){1,2}|"
)
"""A part of a name that people write, such as `llama`, `3`, `v2` and `8b`."""
_PLAIN = re.compile(
    r"[-+]?[0-9][0-9_.,]*(?:[eE][-+]?[0-9]+)?[a-zA-Z%]{0,3}|(?i:true|false|yes|no|on|off|none|null)"
    r"|(?:~|\.{1,2})?/[^+=]*|[A-Za-z]:\\.*|[\w.-]+(?:/[\w.-]+)*\.[a-z]{1,5}|.*[\[\]<>|{}$*].*"
)
"""Numbers with a unit, booleans, paths and files, special tokens such as <|eos|>, and placeholders."""
_RANDOM = 16
"""Fewest characters of a key that has no form of its own."""


def form_of(text: str) -> str | None:
    """Return words for a credential in `text` that shows by its form, None without one."""
    match = _BY_FORM.search(text)
    return None if match is None or match.lastgroup is None else list(_FORMS)[int(match.lastgroup[1:])]


def credential(name: str, value: str) -> str | None:
    """Return words for a value of this name that is a credential, by its form or by its name; None for another one."""
    form = form_of(value)
    if form is not None or len(value) < SHORTEST or _PLAIN.fullmatch(value):
        return form
    words = [word.lower() for word in _WORD.findall(name)]
    last = words[-1] if words else ""
    if last == "id" and words[-3:-1] == ["access", "key"]:
        last = "key"
    if last in _PASSWORDS or name.lower().endswith(("password", "passwd", "passphrase")):
        return "a password"
    named = last in _KEYS or name.lower().endswith(("apikey", "authtoken", "accesstoken"))
    return "a key" if named and not _NO_KEYS.intersection(words[-2:-1]) and _is_random(value) else None


def _is_random(value: str) -> bool:
    """Return whether people would not write `value` by hand."""
    if len(value) < _RANDOM or re.search(r"\s", value):
        return False
    parts = re.split(r"[-_./:]", value)
    return not all(_READABLE.fullmatch(part) for part in parts)


def credentials_in(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield index and words for every argument that contains a credential, or is the value of an option that asks."""
    for index, (before, argument) in enumerate(pairwise(["", *arguments])):
        option = _OPTION.fullmatch(before)
        named = [*([(option[1], argument)] if option else []), *_ASSIGNED.findall(argument)]
        words = form_of(argument) or next((one for name, value in named if (one := credential(name, value))), None)
        if words is not None:
            yield index, words
