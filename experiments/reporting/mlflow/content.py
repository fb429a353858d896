"""The content of a run in MLflow as plain data: shared tags, parameters, and short names for lists and headings.

All values, including times, are derived from the view, so projecting twice writes the same bytes.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Any, NamedTuple

from ablate.experiments.analysis.verdicts import OwnNoise
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.command import SHORT_DIGEST_CHARS
from ablate.experiments.digest import canonical_json, digest, digest_bytes
from ablate.experiments.outcomes import Decision
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.verdict_layout import VariantLayout
from ablate.experiments.reporting.view import AblationView

KIND_TAG = "ablation.kind"


class RunKind(StrEnum):
    """Kind of a run."""

    ABLATION = "ablation"
    """The parent run with the whole answer."""
    ARM = "arm"
    """One arm over all blocks: the answer of a variant, or the A/A evidence of the baseline."""
    TRIAL = "trial"


LAYOUT = 8
"""Increase it when the same view is written differently; the next projection then rewrites every run."""
ID_TAG, RUN_TAG, DONE_TAG = "ablation.id", "ablation.run", "ablation.projected"
NOTE_TAG, COMMIT_TAG, DIRTY_TAG = "mlflow.note.content", "mlflow.source.git.commit", "mlflow.source.git.dirty"
LONGEST_NAME = 60
"""Longest name of a run, in characters. MLflow rejects more than 250."""
LONGEST_TAG, LONGEST_PARAM = 7900, 6000
"""MLflow silently cuts tags beyond 8000 characters, and parameters beyond 6000."""
LONGEST_KEY = 220
"""Longest key of a result. MLflow rejects more than 250, with the prefix of a tag for a value that is not finite."""


class Point(NamedTuple):
    """One metric value."""

    key: str
    value: float
    at_ms: int
    step: int


class RunDataset(NamedTuple):
    """Training data of a run."""

    name: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """Complete content of one run."""

    identity: str
    """`parent`, `arm/<name>` or `<trial>/<attempt>`; unique within the ablation."""
    name: str
    status: str
    started_ms: int
    ended_ms: int | None
    """None while the ablation is running."""
    tags: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Artefacts by path."""
    datasets: tuple[RunDataset, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the whole content; a run in MLflow with this digest is up to date."""
        texts = {path: digest_bytes(text.encode()) for path, text in self.texts.items()}
        facts = [self.identity, self.name, self.status, self.started_ms, self.ended_ms, self.datasets]
        return digest([LAYOUT, *facts, self.tags, self.params, self.points, texts])


def common_tags(view: AblationView, kind: RunKind, identity: str) -> dict[str, str]:
    """Return the tags that all runs of an ablation share."""
    return {
        ID_TAG: view.ablation_id,
        "ablation.name": view.name,
        RUN_TAG: identity,
        KIND_TAG: kind,
        "ablation.spec_digest": view.spec_digest,
        "ablation.node_class": view.plan.node_class,
        "mlflow.source.name": "ablate",
        "mlflow.source.type": "JOB",
        "mlflow.user": "ablate",
    }


def source_tags(receipts: Iterable[Receipt]) -> dict[str, str]:
    """Return the commit that ran and whether its tree was dirty; reruns can add further commits.

    A program of a user is not in Ablate's repository, so it has none.
    """
    ran = [receipt.environment for receipt in receipts if not receipt.config.own_process]
    commits = sorted({environment.git_commit for environment in ran if environment.git_commit})
    dirty = any(environment.git_dirty_digest is not None for environment in ran)
    return {COMMIT_TAG: ", ".join(commits), DIRTY_TAG: str(dirty).lower()} if commits else {}


def datasets(receipts: Iterable[Receipt]) -> tuple[RunDataset, ...]:
    """Return the distinct data sets of the trials of `receipts`."""
    corpora = {r.digests.data: PurePath(c).name for r in receipts if (c := r.config.corpus) is not None}
    return tuple(RunDataset(name, data) for data, name in sorted(corpora.items()))


def params(arm: Arm) -> dict[str, str]:
    """Return resolved gates as `gate.*`, and every leaf of the configuration as `shape.<name>` or by its path.

    Leaves that a gate sets are left out, except sizes, which users look for among the shapes.
    """
    fields = {f"gate.{name}": text(value) for name, value in arm.gates.items()}
    set_by_gates = {gate.path for gate in GATES.values()}
    for path, value in _leaves(arm.config.values_without_seed):
        if path in set_by_gates and type(value) is not int:
            continue
        if path in ("code.archive", "evaluate.code.archive"):  # the whole digest is for those who may use the archive
            value = str(value)[:SHORT_DIGEST_CHARS]
        leaf = path.rsplit(".", 1)[-1]
        is_shape = path.startswith(("model.", "data.")) or "." not in path
        fields[f"shape.{leaf}" if is_shape and f"shape.{leaf}" not in fields else f"config.{path}"] = text(value)
    return {allowed_key(name): value[:LONGEST_PARAM] for name, value in fields.items()}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def text(value: Any) -> str:
    """Return the text of a parameter's value."""
    return value if isinstance(value, str) else canonical_json(value)


def finite(content: RunContent) -> RunContent:
    """Move non-finite metric values, which MLflow distorts, to tags, and drop empty tags."""
    tags = {key: value for key, value in content.tags.items() if value}
    for point in content.points:
        if not math.isfinite(point.value):
            tags.setdefault(f"ablation.nonfinite.{point.key}", f"{point.value} at step {point.step}")
    points = tuple(point for point in content.points if math.isfinite(point.value))
    return replace(content, tags=tags, points=points)


def ended_ms(view: AblationView) -> int:
    """Return the end of the last trial in ms since 1970; without receipts the time of submission."""
    return max((receipt_ended_ms(receipt) for receipt in view.receipts), default=milliseconds(view.created_at))


def receipt_ended_ms(receipt: Receipt) -> int:
    """Return the end of a trial in ms since 1970."""
    return milliseconds(receipt.started_at) + round(1000 * (receipt.wall_s + (receipt.waited_s or 0.0)))


def milliseconds(rfc3339: str) -> int:
    """Return an RFC 3339 time as ms since 1970."""
    return round(1000 * datetime.fromisoformat(rfc3339).timestamp())


def allowed_key(wanted: str) -> str:
    """Replace characters that MLflow does not allow in keys."""
    return re.sub(r"[^\w\-./: ]", "_", wanted, flags=re.ASCII)


_FOREIGN = re.compile(
    r"[^\w\-./ ]|_(?=x)|^/|/$|/(?=/)|(?<=/)\.(?=\.?(?:/|$))|(?<=/\.)\.(?=/|$)|^\.(?=\.?(?:/|$))|(?<=^\.)\.(?=/|$)|^ | $"
)
"""Letters that MLflow's keys cannot have, parts of paths with another meaning, and the beginning of our own escapes."""


def reported_key(name: str) -> str:
    """Return the key of a program's result: `reported/` and its name, other letters as `_x` and hex digits and `_`.

    Two names never have one key. The name is read back from a key unless it is so long that a digest ends it.
    """
    written = _FOREIGN.sub(lambda letter: f"_x{ord(letter[0]):x}_", name) or "_x_"
    if len(written) > LONGEST_KEY - len("reported/"):
        end = f"_x_{digest(name).removeprefix('sha256:')[:32]}"
        written = written[: LONGEST_KEY - len("reported/") - len(end)] + end
    return f"reported/{written}"


def ablation_name(view: AblationView) -> str:
    """Return an ablation's name with its answer or state, for example "psiv-cache: adopt psiv-on +2.49 %; reject 2"."""
    if view.answer is None:
        return run_name(view.name, f": {view.state}")
    if view.verdict is not None and view.verdict.own_noise is not None:
        return run_name(view.name, f": {_noise(view.verdict.own_noise)}")
    *fuller, shortest = _answers(view.answer.variants)
    room = LONGEST_NAME - len(f"{view.name}: ")
    return run_name(view.name, f": {next((one for one in fuller if len(one) <= room), shortest)}")


def _noise(noise: OwnNoise) -> str:
    sd = "" if noise.sd_pct is None else f", sd {wording.size_percent(noise.sd_pct)}"
    return f"{wording.counted(noise.blocks, 'A/A block')}{sd}"


def variant_name(variant: VariantLayout) -> str:
    """Return a variant's name with verdict and effect, for example "psiv-on: better +2.49 %"."""
    return run_name(variant.arm, f": {_with_effect(variant.word.text, variant)}")


def run_name(name: str, end: str = "") -> str:
    """Return `name` and `end`; `name` is cut if both are too long together."""
    return f"{wording.shorten(name, LONGEST_NAME - len(end))}{end}"


def _answers(variants: Sequence[VariantLayout]) -> tuple[str, str, str]:
    """Return the answer in three lengths: all decisions; the first with its best variant; without its name."""
    groups = [own for word in Decision if (own := [v for v in variants if v.decision.text == word])]
    first, *others = groups
    best = first[0]
    more = f" {'or' if best.decision.text == Decision.ADOPT else 'and'} {len(first) - 1} more" if len(first) > 1 else ""
    named = f"{_with_effect(f'{best.decision.text} {best.arm}', best)}{more}"
    counts = [f"{other[0].decision.text} {len(other)}" for other in others]
    return "; ".join([named, *counts]), named, f"{_with_effect(best.decision.text, best)}{more}"


def _with_effect(text: str, variant: VariantLayout) -> str:
    return text if variant.effect.text == wording.NOTHING else f"{text} {variant.effect.text}"
