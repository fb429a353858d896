"""`ablate.compare`: ask from Python, in a script or a notebook; `ablate.answer`: the answer of any ablation.

Both return an `AblationAnswer`, and raise `NotCompared` with a text that says what to do.
"""

import shlex
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import Any, Literal

from rich.text import Text
from yaml.representer import RepresenterError

from ablate.experiments.analysis.verdicts import Comparison, VariantVerdict, Verdict
from ablate.experiments.block_numbers import block_number
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import ExperimentError, SpecError, SpecProblem
from ablate.experiments.outcomes import AblationState, ExitCode
from ablate.experiments.records.bundle_files import is_bundle
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.experiments.reporting.view import bundle_view
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.experiments.system.shell_python import in_shell_python
from ablate.service.cli import offline, tables, verdict_tables
from ablate.service.cli.asking import MARGIN, AskedQuestion, CheckedTimes, check_devices, checked, slug
from ablate.service.cli.commands.offline.receipts import fetch
from ablate.service.cli.follow import follow, in_place
from ablate.service.cli.output import err, html, out, plain_text, problem_lines, problem_of
from ablate.service.client.api import Client
from ablate.service.client.connection import ClientError, names_service
from ablate.service.errors import ServiceError
from ablate.service.schemas.submissions import SpecBody

_CODE = """
import signal
from ablate.experiments.system.console import main
from ablate.experiments.system.processes import die_with_parent
die_with_parent(signal.SIGTERM)
main()
"""
_ABLATE = ("env", "TTY_COMPATIBLE=0", *OWN_PYTHON, "-c", _CODE)
"""The command line, which ends with this process. Kernels of notebooks force colours on, also on pipes."""
_REMOVE = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
"""Removes a folder once no process has the other end of its input. Trials of a killed one may take a moment to end."""
_FRAMES = ("pandas", "polars")
_NUMBERS = {
    **{"effect_pct": "delta_pct", "low_pct": "ci_low_pct", "high_pct": "ci_high_pct"},
    **{"mde_pct": "mde_pct", "blocks": "blocks"},
}
"""Columns of a frame, with the fields of a comparison."""


class NotCompared(Exception):
    """There is no answer; the text says why, and what to type."""


@dataclass(frozen=True, repr=False)
class AblationAnswer:
    """The answer of an ablation, which is shown with its picture, on a terminal and in a notebook."""

    verdict: Verdict
    spec: str
    """The spec that ran, for `ablate run`."""
    _receipts: Callable[[], dict[str, dict[str, Any]]]
    _report: Callable[[], str]

    def __repr__(self) -> str:
        picture = map(Text, verdict_tables.picture(self.verdict))
        return plain_text(verdict_tables.verdict(self.verdict), *picture, width=out().width)

    def _repr_html_(self) -> str:
        return html(verdict_tables.verdict(self.verdict)) + self._picture()

    def _picture(self) -> str:
        if find_spec("matplotlib") is None:
            return "<p>For the picture: pip install matplotlib</p>"
        from ablate.experiments.reporting.pictures.forest import effects

        picture = effects(self.verdict)
        if picture is None:
            return ""
        source = f"data:image/svg+xml;base64,{b64encode(picture.standalone().encode()).decode()}"
        return f'<img alt="{escape(picture.caption)}" src="{source}" style="width: 36em; max-width: 100%">'

    @property
    def receipts(self) -> dict[str, dict[str, Any]]:
        """The receipt of every trial by BLOCK/ARM, such as "1/baseline"."""
        with _explained():
            return self._receipts()

    @property
    def report(self) -> str:
        """The report as one HTML page."""
        with _explained():
            return self._report()

    @property
    def markdown(self) -> str:
        """The verdict as Markdown, as `ablate verdict --markdown` prints it."""
        return pull_request_markdown(self.verdict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each variant and metric, with the columns of `to_frame`."""
        return [row for variant in self.verdict.variants for row in _rows(self.verdict, variant)]

    def to_frame(self) -> Any:
        """Return `rows` as a data frame of pandas, or of polars where pandas is not installed."""
        library = next((name for name in _FRAMES if find_spec(name) is not None), None)
        if library is None:
            raise NotCompared("to_frame needs pandas or polars: pip install pandas; `rows` has the same as a list")
        return import_module(library).DataFrame(self.rows)


def _rows(verdict: Verdict, variant: VariantVerdict) -> Iterator[dict[str, Any]]:
    judged = {"verdict": str(variant.verdict), "decision": str(variant.decision), "reason": variant.reason}
    metric = verdict.rule["primary"]["metric"]
    yield {"variant": variant.arm, "metric": metric, "decides": True, **_numbers(variant), **judged}
    for one in variant.secondary:
        rest = {**_numbers_of(one), **dict.fromkeys(judged)}
        yield {"variant": variant.arm, "metric": one.metric, "decides": False, **rest}


def _numbers(variant: VariantVerdict) -> dict[str, float | None]:
    """Return the numbers of the metric that decides; None where the variant has none."""
    if variant.primary is not None:
        return _numbers_of(variant.primary)
    numbers: dict[str, float | None] = dict.fromkeys(_NUMBERS)
    if variant.exact is not None:
        changes = [one.change_pct for one in variant.exact.seeds if one.change_pct is not None]
        mean = sum(changes) / len(changes) if changes else None
        ends = {"low_pct": min(changes, default=None), "high_pct": max(changes, default=None)}
        numbers |= {"effect_pct": mean, **ends, "blocks": variant.exact.blocks}
    return numbers


def _numbers_of(comparison: Comparison) -> dict[str, float | None]:
    return {column: getattr(comparison, field) for column, field in _NUMBERS.items()}


def compare(
    command: str | Sequence[str],
    *,
    variants: Mapping[str, Any],
    baseline: Mapping[str, Any] | None = None,
    metric: str | None = None,
    better: Literal["lower", "higher"] | None = None,
    margin: str = MARGIN,
    check: bool = True,
    **sections: Mapping[str, Any],
) -> AblationAnswer:
    """Ask whether variants of a command are better than its baseline: check, measure and return the answer.

    It runs on the service in ABLATE_URL or the stack of this folder (`ablate up`), without both on this machine in a
    temporary folder. An interrupt cancels the ablation.

    Args:
        command: program and arguments that all arms share; {seed} is filled in. Its files are those of this folder.
        variants: by name, `args`, `env` or `code`, as in a spec.
        baseline: the same of the baseline.
        metric: one of ours, a name that the program reports, or a line that it prints, with {}. Default: speed.
        better: better direction of a metric that the program reports.
        margin: differences that do not matter.
        check: run a short trial of each arm on this machine first, which sizes the ablation.
        sections: other sections of the spec, whose keys replace those that `ablate ask` would choose:
            workload, design, placement, limits, verdict, labels; also `ablation`, its name, and `question`.

    Raises:
        NotCompared: the text says what was wrong, and what to type.

    """
    with _explained():
        shell = in_shell_python(_words(command))
        names = [str(name) for name in variants] if isinstance(variants, Mapping) else []
        question = AskedQuestion(
            name=f"compare-{slug(' '.join(names))}",
            change=" or ".join(names),
            command=shell.argv,
            baseline={} if baseline is None else baseline,
            variants=variants,
            metric=None if metric is None else str(metric),
            better=better,
            margin=margin,
            data=shell.folders,
            search_path=shell.search_path,
        )
        values = _merged(question.spec(), sections, placed=check)
        question = _sized(question, _parsed(values), sections)
        has_service = names_service()
        if not has_service:
            check_devices()
        if check:
            question, times = _checked(question, sections)
            values = _merged(question.spec(times), sections)
        text = spec_yaml(values).decode()
        body = SpecBody.packed(text.encode())
        return _by_service(body, text) if has_service else _here(body, text)


def answer(name: str | Path) -> AblationAnswer:
    """Wait for the end of an ablation of the service, or judge a bundle; return its answer. An interrupt ends nothing.

    Raises NotCompared.
    """
    with _explained():
        if is_bundle(Path(name)):
            return _of_bundle(Path(name))
        with Client() as client:
            ablation = client.ablations.id_of(str(name))
            follow(client, ablation, err())
            return _answer_of(client, ablation, client.ablations.spec(ablation).content.decode())


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (ClientError, ExperimentError, ServiceError, OSError) as error:
        raise NotCompared(plain_text(*problem_lines(problem_of(error)))) from error


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command) if isinstance(command, str) else command or ())
    except ValueError as error:
        detail = f"a shell would not read {command!r}: {error}"
        raise SpecError([SpecProblem(pointer="command", detail=detail, hint="close the quotes")]) from error
    if not words or not all(isinstance(word, str) for word in words):
        detail = f"the command is {command!r}; allowed: text, or a list of texts"
        hint = 'ablate.compare("python train.py --seed {seed}", ...)'
        raise SpecError([SpecProblem(pointer="command", detail=detail, hint=hint)])
    return words


def _merged(values: dict[str, Any], sections: Mapping[str, Any], *, placed: bool = True) -> dict[str, Any]:
    """Return a spec whose sections, and primary metric, have the keys of `sections` instead of their own.

    It has the node class of this machine only if it is `placed`, and no section asks for a GPU.
    """
    merged = dict(values)
    for name, own in sections.items():
        both = isinstance(merged.get(name), dict) and isinstance(own, Mapping)
        merged[name] = {**merged[name], **own} if both else own
    rule, place = sections.get("verdict"), sections.get("placement", {})
    if isinstance(rule, Mapping) and isinstance(rule.get("primary"), Mapping):
        merged["verdict"]["primary"] = {**values["verdict"]["primary"], **rule["primary"]}
    if isinstance(place, Mapping) and "node_class" not in place and ("gpu" in place or not placed):
        merged["placement"] = {key: value for key, value in merged["placement"].items() if key != "node_class"}
    return merged


def _parsed(values: Mapping[str, Any]) -> AblationSpec:
    """Return the spec of these values, with its folders packed. Raises SpecError."""
    try:
        body = SpecBody.packed(spec_yaml(values))
    except RepresenterError as error:
        detail = f"{error.args[1]!r} is of type {type(error.args[1]).__name__}; allowed: what YAML has"
        raise SpecError([SpecProblem(pointer="#", detail=detail, hint="write it as text or as a number")]) from error
    spec = parse_spec(body.content, body.content_type)
    if spec.placement.node_class and not spec.design.blocks.auto:
        make_plan(spec)
    return spec


def _sized(question: AskedQuestion, spec: AblationSpec, sections: Mapping[str, Any]) -> AskedQuestion:
    """Return the question with the numbers of blocks and steps that its sections ask for."""
    blocks = MIN_BLOCKS if spec.design.blocks.auto else spec.design.blocks.number
    steps = spec.workload.steps.timed if "steps" in sections.get("workload", {}) else None
    return replace(question, blocks=blocks, steps=steps, may_take_turns=steps is None and "verdict" not in sections)


def _checked(question: AskedQuestion, sections: Mapping[str, Any]) -> tuple[AskedQuestion, CheckedTimes]:
    """Run a short trial of every arm here; raise NotCompared if one fails."""

    def check(one: AskedQuestion) -> tuple[int, CheckedTimes]:
        code, document, lines = _run("check", "--json", "-", stdin=spec_yaml(_merged(one.spec(), sections)))
        if not document:
            raise NotCompared(_nothing("".join(lines.partition("not run:")[1:]) or lines))
        return code, CheckedTimes.read(document)

    code, question, times = checked(question, check)
    remarks = [one for one in times.checks if not one["passed"]]
    if code:
        failed = [f"  {one['name']}: {one['detail']}" for one in remarks if one["needed"]]
        raise NotCompared(_nothing("\n".join(["the check failed", *failed])))
    for line in (*(f"{one['name']}: {one['detail']}" for one in remarks), *question.remarks(times)):
        err().print(Text(line))
    return question, times


def _run(*words: str | Path, stdin: bytes = b"", keeps: Sequence[int] = ()) -> tuple[int, str, str]:
    """Run a command of ours with its newest line in place; return its exit code, its output and these lines.

    The command has the files of `keeps` open until it ends.
    """
    with TemporaryFile() as given, TemporaryFile() as output:
        given.write(stdin)
        given.seek(0)
        command = [*_ABLATE, *map(str, words)]
        lines = []
        with subprocess.Popen(
            command, stdin=given, stdout=output, stderr=subprocess.PIPE, text=True, pass_fds=keeps
        ) as process:
            try:
                with in_place(err()) as show:
                    for line in process.stderr or ():
                        lines.append(line)
                        show(Text(line.rstrip(), style="dim"))
                    show(Text())
            except BaseException:  # interrupts, too
                process.terminate()  # it ends its trials before it ends
                process.wait()
                err().print("stopped: its trials are ended, and nothing of them is kept")
                raise
        output.seek(0)
        return process.returncode, output.read().decode(), "".join(lines)


def _nothing(why: str) -> str:
    return f"nothing was measured: {why.rstrip()}"


def _by_service(body: SpecBody, text: str) -> AblationAnswer:
    with Client() as client:
        accepted = client.ablations.submit(body)
        try:
            err().print(tables.remarks(accepted))
            follow(client, accepted.id, err())
        except KeyboardInterrupt:
            client.ablations.cancel(accepted.id)
            err().print(f"{accepted.id} is cancelled")
            raise
        except ClientError as error:
            raise NotCompared(f"{error}\n{accepted.id} goes on; come back: ablate.answer({accepted.id!r})") from error
        return _answer_of(client, accepted.id, text)


def _answer_of(client: Client, ablation: str, text: str) -> AblationAnswer:
    row = client.ablations.wait(ablation)
    if row.state == AblationState.CANCELLED:
        raise NotCompared(f"{ablation} was cancelled; its measurements are kept: ablate show {ablation}")
    return AblationAnswer(client.ablations.verdict(ablation), text, lambda: _fetched(ablation), lambda: _page(ablation))


def _fetched(ablation: str) -> dict[str, dict[str, Any]]:
    with Client() as client:
        signed = fetch(client, ablation)
    return {name.partition("/")[2]: one.model_dump(mode="json") for name, one in dict(signed).items()}


def _page(ablation: str) -> str:
    with Client() as client:
        return client.ablations.report(ablation)


def _here(body: SpecBody, text: str) -> AblationAnswer:
    """Run a spec on this machine without a service."""
    err().print("no service: the trials run here, in a temporary folder, and nobody counts the question")
    with _temporary_folder() as (folder, keeper):
        plan, bundle = folder / "plan.tar", folder / "bundle"
        offline.write_plan(body, plan)
        words = ("offline", "exec", plan, "--out", bundle, "--key", folder / "key", "--json")
        code, _summary, lines = _run(*words, keeps=[keeper])
        if code not in (ExitCode.DONE, ExitCode.UNMET):
            raise NotCompared(_nothing("".join(lines.partition("refused:")[1:]) or lines))
        return replace(_of_bundle(bundle), spec=text)


@contextmanager
def _temporary_folder() -> Iterator[tuple[Path, int]]:
    """Make a folder, and a file that keeps it. Another process removes it, because somebody may kill this one."""
    folder = mkdtemp(prefix="ablate-")
    command = [*OWN_PYTHON, "-c", _REMOVE, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as remover:
        assert remover.stdin is not None  # noqa: S101
        yield Path(folder), remover.stdin.fileno()


def _of_bundle(path: Path) -> AblationAnswer:
    bundle = offline.read_bundle(path)[1]
    view = bundle_view(bundle)
    if view.verdict is None:
        raise AssertionError("a bundle is judged when it is read")

    def report() -> str:
        from ablate.experiments.reporting.pages.report import render  # imports matplotlib

        return render(view)

    receipts = {
        f"{block_number(one.block_index)}/{one.arm}": one.receipt.model_dump(mode="json")
        for one in view.trials
        if one.receipt is not None
    }
    return AblationAnswer(view.verdict, view.spec_text, lambda: receipts, report)
