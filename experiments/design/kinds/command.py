"""A user's command as a kind of workload: its arms differ by arguments, variables and code. Torch-free.

Arms of a command are declared: their arguments, variables and code are recorded, and nothing proves that the program
obeyed them. They are stored like gates, so that pages and MLflow show them in the same place.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ablate.experiments.design.gate import Claim, Facts
from ablate.experiments.design.kinds.gate_readings import GateReading, declared_readings
from ablate.experiments.design.kinds.kind import Draft, Drafts
from ablate.experiments.design.kinds.program import (
    Evaluation,
    ProgramArm,
    logged_problems,
    marked_steps,
    requirement_problems,
    requirements,
    shared_fields,
    turn_problems,
)
from ablate.experiments.design.metrics import LOSS_METRICS, PROCESS_METRICS, SEED_METRICS
from ablate.experiments.design.packages import lane_over
from ablate.experiments.design.problems import listed, pointer, shown
from ablate.experiments.design.program_files import (
    ARCHIVE,
    Commit,
    DataBeside,
    LockedEnvironment,
    RepositoryCommit,
    SentCode,
)
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.spec_values import SpecPart
from ablate.experiments.design.workload import COMMAND, VariantSpec, Workload
from ablate.experiments.errors import SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import BASELINE
from ablate.kernels.backends import NodeClass

SHORT_DIGEST_CHARS = 19
"""Characters of an archive's digest that everybody may see; the whole one is for those who may use the archive."""


@dataclass(frozen=True, kw_only=True)
class CommandArm(ProgramArm):
    """A command of the user."""

    marked_by = "command"
    attested = False

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        """Return whether the spec has a command."""
        return workload.command is not None

    @classmethod
    def drafts(cls, spec: AblationSpec) -> Drafts:
        """Resolve the arms of a spec with a command."""
        problems = tuple(program_problems(spec))
        return Drafts(arms=() if problems else tuple(_drafts(spec)), problems=problems)

    def lane(self) -> str:
        """Return the lane of commands in the Python environment."""
        lane = COMMAND if self.environment is None else f"{COMMAND}:{self.environment}"
        return lane_over(lane, self.nodes)

    def readings(self, gates: Mapping[str, Any], _facts: Facts) -> dict[str, GateReading]:
        """Return the settings as declared: nothing observes them."""
        return declared_readings(gates)

    def shape(self) -> dict[str, Any]:
        """Return the command that all arms share, where it runs, and on how many devices and nodes."""
        evaluation = {} if self.evaluate is None else {"evaluate": self.evaluate.command}
        nodes = {} if self.nodes == 1 else {"nodes": self.nodes}
        lock = {} if self.lock is None else {"lock": self.lock}
        own = {name: self.values_with_seed[name] for name in ("command", "environment", "devices")}
        return own | lock | evaluation | nodes

    def content(self) -> dict[str, Any]:
        """Return the command line, the variables and the code, wherever the spec divides a command from arguments."""
        optional = [name for name in ("evaluate", "lock", "resume_at") if getattr(self, name) is not None]
        names = ("env", "code", "environment", *optional)
        return {"argv": [*self.command, *self.args], **{name: self.values_with_seed[name] for name in names}}

    def claim_of(self, _name: str) -> Claim:
        """Return the weakest claim there is: nobody knows what an argument changes."""
        return Claim.CHANGES_MODEL

    def describe(self) -> str:
        """Return the command."""
        return " ".join(self.command)


def _drafts(spec: AblationSpec) -> Iterator[Draft]:
    """Yield the arms with their declared settings, the baseline first."""
    workload, base = spec.workload, spec.baseline
    first = CommandArm(
        command=workload.command or (),
        args=base.args,
        env={**workload.env, **base.env},
        code=_plain(workload.code),
        data=tuple(one.model_dump() if isinstance(one, DataBeside) else one for one in workload.data),
        environment=workload.environment if isinstance(workload.environment, str) else None,
        lock=_lock_of(workload),
        evaluate=_evaluation(workload),
        turns=workload.turns,
        **shared_fields(spec),
    )
    configs = {BASELINE: first, **{name: _changed(spec, first, own) for name, own in spec.variants.items()}}
    variables = sorted({name for config in configs.values() for name in config.env})
    for name, config in configs.items():
        declared: dict[str, Any] = {"args": " ".join(config.args), "code": _shown_code(config.code)}
        if any(one.resume_at is not None for one in configs.values()):
            declared["resume_at"] = config.resume_at or 0
        declared |= {f"env.{variable}": config.env.get(variable, "") for variable in variables}
        if any(variant.environment for variant in spec.variants.values()):
            declared["environment"] = config.lock or ""
        yield Draft(name, declared, replace(config, **requirements(workload, name)))


def _evaluation(workload: Workload) -> Evaluation | None:
    """Return the evaluation, whose code is the workload's and never a variant's."""
    own = workload.evaluate
    if own is None:
        return None
    code = _plain(own.code or workload.code)
    if code is None:
        raise AssertionError("an evaluation without code has a problem of its own")
    return Evaluation(command=own.command, code=code, env=workload.env)


def _changed(spec: AblationSpec, first: CommandArm, own: VariantSpec) -> CommandArm:
    changes: dict[str, Any] = {}
    if own.args is not None:
        changes["args"] = own.args
    if own.env is not None:
        changes["env"] = {**spec.workload.env, **own.env}
    if own.resume_at is not None:
        changes["resume_at"] = own.resume_at
    if own.code is not None:
        repository = first.code if isinstance(own.code, Commit) and isinstance(first.code, Mapping) else {}
        code = _plain(own.code)
        changes["code"] = {**repository, **code} if isinstance(code, dict) else code
    if own.environment is not None:
        changes["lock"] = own.environment.lock
    return replace(first, **changes)


def _plain(code: str | SpecPart | None) -> str | dict[str, str] | None:
    return code.model_dump() if isinstance(code, SpecPart) else code


def _lock_of(own: Workload | VariantSpec) -> str | None:
    return own.environment.lock if isinstance(own.environment, LockedEnvironment) else None


def _shown_code(code: str | Mapping[str, str] | None) -> str:
    if code is None or isinstance(code, str):
        return code or ""
    return code[ARCHIVE][:SHORT_DIGEST_CHARS] if ARCHIVE in code else f"{code['git']} {code['commit'][:12]}"


def code_of(spec: AblationSpec) -> Iterator[tuple[str, str | SpecPart]]:
    """Yield every code of a spec with its pointer."""
    if spec.workload.code is not None:
        yield pointer("workload", "code"), spec.workload.code
    if spec.workload.evaluate is not None and spec.workload.evaluate.code is not None:
        yield pointer("workload", "evaluate", "code"), spec.workload.evaluate.code
    for name, own in spec.variants.items():
        if own.code is not None:
            yield pointer("variants", name, "code"), own.code


def sent_code(spec: AblationSpec) -> dict[str, str]:
    """Return the digests of the archives that a spec names, by pointer."""
    return {where: code.archive for where, code in code_of(spec) if isinstance(code, SentCode)}


def program_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find parts of a spec with a command that only fit a recipe, or do not fit each other."""
    node_class = NODE_CLASSES[spec.placement.node_class]
    if node_class.compiles_only or node_class.device_type == "xla":
        able = [name for name, entry in NODE_CLASSES.items() if entry.device_type in ("cpu", "cuda")]
        detail = f"commands do not run on node class '{node_class}'; allowed: {', '.join(able)}, and any other GPU"
        yield SpecProblem(pointer=pointer("placement", "node_class"), detail=detail)
    yield from _placement_problems(spec, node_class)
    yield from _secret_problems(spec)
    if spec.baseline.gates:
        detail = "gates belong to recipes; this workload is a command"
        yield SpecProblem(pointer=pointer("baseline", "gates"), detail=detail, hint="use args or env")
    yield from _relative_problems(spec)
    yield from _environment_problems(spec)
    for name, own in spec.variants.items():
        if own.gates is not None:
            detail = "gates belong to recipes; this workload is a command"
            where = pointer("variants", name, "gates")
            yield SpecProblem(pointer=where, detail=detail, hint="use args, env, code or environment")
        if own.overrides:
            where, detail = pointer("variants", name, "overrides"), "overrides belong to recipes; this is a command"
            yield SpecProblem(pointer=where, detail=detail, hint="use args or env")
        if isinstance(own.code, Commit) and not isinstance(spec.workload.code, RepositoryCommit):
            detail = "a commit alone needs workload.code with a repository"
            where, hint = pointer("variants", name, "code"), "write {git: folder, commit: ...}"
            yield SpecProblem(pointer=where, detail=detail, hint=hint)
    if spec.verdict.primary.metric in PROCESS_METRICS and hides_failures(spec.workload.command or ()):
        where, detail = pointer("workload", "command"), f"{HIDDEN_FAILURES}, and {spec.verdict.primary.metric} decides"
        yield SpecProblem(pointer=where, detail=detail, hint="write [bash, -o, pipefail, -c, ...]")
    yield from _evaluation_problems(spec)
    yield from logged_problems(spec)
    yield from turn_problems(spec)
    yield from _resume_problems(spec)
    yield from requirement_problems(spec)


def _environment_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find locks that nothing can read, or that would change more than their arm."""
    workload = spec.workload
    own = [pointer("variants", name, "environment") for name, variant in spec.variants.items() if _lock_of(variant)]
    for where in [*([pointer("workload", "environment")] if _lock_of(workload) else []), *own][:1]:
        if workload.code is None:
            detail = "a lock is a file of the code, and this workload has none"
            yield SpecProblem(pointer=where, detail=detail, hint="write workload.code: . with the lock in it")
        if workload.evaluate is not None:
            detail = "the evaluation runs with the packages of its arm, so no code of an arm may choose them"
            yield SpecProblem(pointer=where, detail=detail, hint="let the program report its metrics")
    if own and isinstance(workload.environment, str):
        detail = f"the baseline runs in environment '{workload.environment}' of the node, whose packages no lock names"
        yield SpecProblem(pointer=own[0], detail=detail, hint="write workload.environment: {lock: FILE}, too")


def _evaluation_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find reasons why an evaluation would measure nothing, or nothing that counts."""
    workload, primary = spec.workload, spec.verdict.primary.metric
    if workload.evaluate is None:
        return
    where = pointer("workload", "evaluate")
    if spec.placement.nodes > 1:
        detail = "an evaluation reads the files of one node, and this program runs on several"
        yield SpecProblem(pointer=where, detail=detail, hint="let the program report its metrics")
    if not workload.metrics:
        detail = "an evaluation measures the declared metrics, and workload.metrics declares none"
        yield SpecProblem(pointer=where, detail=detail, hint="write metrics: {val_loss: {better: lower}}")
    if primary in SEED_METRICS:
        detail = f"the evaluation measures the declared metrics, but {primary} decides, which the program itself says"
        hint = f"decide by one of: {listed(workload.metrics)}" if workload.metrics else None
        yield SpecProblem(pointer=pointer("verdict", "primary", "metric"), detail=detail, hint=hint)
    if workload.evaluate.code is None and workload.code is None:
        detail = "an evaluation runs in a copy of its code, and there is none"
        yield SpecProblem(pointer=where, detail=detail, hint="write workload.code: . with the evaluation's files in it")
    if hides_failures(workload.evaluate.command):
        yield SpecProblem(pointer=where, detail=HIDDEN_FAILURES, hint="write [bash, -o, pipefail, -c, ...]")


def _resume_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find resumed runs that cannot be, and numbers that a killed program would not share with the others."""
    total = marked_steps(warmup=spec.workload.steps.warmup, timed=spec.workload.steps.timed).total
    resumed = {name: own.resume_at for name, own in spec.variants.items() if own.resume_at is not None}
    for name, at in resumed.items():
        where = pointer("variants", name, "resume_at")
        if at >= total:
            detail = f"resume_at is {at}, and a trial has {total} steps, the first one and the warm-up included"
            yield SpecProblem(pointer=where, detail=detail, hint=f"write 1 to {total - 1}")
        if spec.placement.nodes > 1:
            detail = "a program is killed and started again on one node, and this one runs on several"
            yield SpecProblem(pointer=where, detail=detail, hint="leave placement.nodes out")
        if any(metric.tracker for metric in spec.workload.metrics.values()):
            detail = "what a killed program has logged may end within a record"
            yield SpecProblem(pointer=where, detail=detail, hint="let it report its metrics: trial.report(name=...)")
        key = "turns" if spec.workload.turns else "steps.slice"
        if spec.workload.turns or spec.workload.steps.slice:
            detail = "a program is killed and started again in one go, without turns of other trials"
            yield SpecProblem(pointer=where, detail=detail, hint=f"leave workload.{key} out")
        if spec.workload.profile or spec.workload.require_kernels:
            detail = "a program that is resumed has no profiled step"
            yield SpecProblem(pointer=where, detail=detail, hint="leave profile and require_kernels out")
    rules = [("primary", spec.verdict.primary.metric)]
    rules += [(f"require/{index}", part.metric) for index, part in enumerate(spec.verdict.require)]
    for place, metric in rules if resumed else ():
        if metric not in LOSS_METRICS and metric not in spec.workload.metrics:
            detail = f"{metric} of a program that is killed and started again is no cost of training"
            allowed = listed([*("loss_step1", "loss_final"), *spec.workload.metrics])
            yield SpecProblem(
                pointer=f"#/verdict/{place}/metric", detail=detail, hint=f"decide by {allowed}, such as with margin 0%"
            )


def _relative_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find folders of the submitter, which its client has to replace."""
    for where, code in code_of(spec):
        named = code.git if isinstance(code, RepositoryCommit) else code
        if isinstance(named, str) and not named.startswith("/"):
            detail = f"code {shown(named)} is a folder of the submitter, which nothing has packed and sent"
            yield SpecProblem(
                pointer=where, detail=detail, hint="submit the file with `ablate run`, or send an archive"
            )
    for number, data in enumerate(spec.workload.data):
        if isinstance(data, str) and not data.startswith("/"):
            detail = f"data {shown(data)} is a path of the submitter, which nothing has made absolute"
            hint = "submit the file with `ablate run`, or write an absolute path on the node"
            yield SpecProblem(pointer=pointer("workload", "data", str(number)), detail=detail, hint=hint)


def _secret_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find variables that an arm sets although they are secrets of the node."""
    places: dict[tuple[str, ...], Mapping[str, str]] = {
        ("workload",): spec.workload.env,
        ("baseline",): spec.baseline.env,
    }
    places |= {("variants", name): own.env or {} for name, own in spec.variants.items()}
    for place, variables in places.items():
        for name in set(variables).intersection(spec.workload.secrets):
            detail = f"variable {name} is one of workload.secrets, so every arm gets the node's value"
            yield SpecProblem(pointer=pointer(*place, "env", name), detail=detail, hint="leave it out here")


_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
HIDDEN_FAILURES = "a shell ends as the last program of a pipe does, so a failure of an earlier one is not seen"


def hides_failures(command: Sequence[str]) -> bool:
    """Return whether a command has the text of a shell with a pipe, and no `pipefail`."""
    shells = [place for place, word in enumerate(command) if word.rpartition("/")[2] in _SHELLS]
    if not shells or any("pipefail" in word for word in command):
        return False
    words = iter(command[shells[0] + 1 :])
    if not any(word.startswith("-") and word.endswith("c") for word in words):
        return False
    lexer = shlex.shlex(next(words, ""), posix=True, punctuation_chars=True)
    with suppress(ValueError):  # quotes without end, of which the shell itself complains
        return any(token in {"|", "|&"} for token in lexer)
    return False


def _placement_problems(spec: AblationSpec, node_class: NodeClass) -> Iterator[SpecProblem]:
    most = node_class.command_devices
    if spec.placement.devices > most:
        allowed = "1" if most == 1 else f"1 to {most}"
        detail = f"{spec.placement.devices} devices for a command on node class '{node_class}'; allowed: {allowed}"
        yield SpecProblem(pointer=pointer("placement", "devices"), detail=detail)
