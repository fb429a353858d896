"""The table of cheats in docs/trust.md, from the headers of the programs in tests/cheats."""

from tests.cheating import GROUPS, WORDS, Cheat, Expected, cheats

START, END = "<!-- cheats: written by make docs -->", "<!-- end of cheats -->"
_QUOTED = ("fails", "invalid", "no answer", "rejected", "named")
"""Answers whose header has words of the product."""


def cheats_table() -> str:
    """Return one row for each cheat."""
    rows = "".join(f"| {_did(one)} | {_reports(one.reports)} | {_answers(one)} |\n" for one in cheats().values())
    return f"\n| a program | after | answer |\n|---|---|---|\n{rows}\n"


def _did(cheat: Cheat) -> str:
    does = " ".join(cheat.does.split()).rstrip(".")
    return f"[{does[0].lower()}{does[1:]}](../tests/cheats/{cheat.name}.py)"


def _reports(reports: str) -> str:
    names = (report.strip().partition("#") for report in reports.split(","))
    links = (f"[{repo}#{no}](https://github.com/{repo}/issues/{no})" if no else repo for repo, _, no in names)
    return ", ".join(links)


def _answers(cheat: Cheat) -> str:
    return "; ".join(f"{GROUPS[group].title}: {_answer(answer)}" for group, answer in cheat.answers.items())


def _answer(answer: Expected) -> str:
    words = f"*{answer.words}*" if answer.word in _QUOTED else answer.words
    return f"{WORDS[answer.word]}, {words}"
