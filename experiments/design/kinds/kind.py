"""What service, workers and reports ask of an arm's configuration, of any kind of workload. Torch-free.

Each kind is a class in a file of its own beside this one, and an entry in `ablate.experiments.design.arms.KINDS`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ablate.experiments.design.gate import Claim, Facts
from ablate.experiments.design.kinds.gate_readings import GateReading
from ablate.experiments.design.problems import listed, pointer
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import Workload
from ablate.experiments.documents import first_problem
from ablate.experiments.errors import SpecProblem
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.kernels.backends import NodeClass
from ablate.model.config import StepsConfig


class StepWork(NamedTuple):
    """Work of one training step."""

    tokens: int
    flops: int
    """Model FLOPs, forward and backward."""


class LossRows(NamedTuple):
    """Values by name that decide the rows of a training step, and the validation rows. Empty where nobody knows."""

    training: Mapping[str, Any]
    validation: Mapping[str, Any]


class ArmConfig(ABC):
    """Complete configuration of the trials of an arm, and the block's seed: a frozen dataclass for each kind."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    marked_by: ClassVar[str]
    """Field of the JSON that no earlier kind in `KINDS` has."""
    own_process: ClassVar[bool]
    """Whether it is a program that the trial starts, and not code of the trainer's process."""
    attested: ClassVar[bool]
    """Whether facts prove which value of a setting was live."""
    steps: StepsConfig
    seed: int
    """Set by the block; 0 in an arm."""

    @classmethod
    @abstractmethod
    def takes(cls, workload: Workload) -> bool:
        """Return whether a spec with this workload has arms of this kind."""

    @classmethod
    @abstractmethod
    def drafts(cls, spec: AblationSpec) -> "Drafts":
        """Resolve the arms of a spec, the baseline first, and find all problems with them."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration of its JSON. Raises ValueError for an illegal value or an unknown field."""
        try:
            config: Self = _parsed(cls, json.dumps(values))
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        return config

    @cached_property
    def values_with_seed(self) -> dict[str, Any]:
        """Return the JSON, which `read` reads."""
        values: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return values

    @property
    def values_without_seed(self) -> dict[str, Any]:
        """Return the JSON of an arm, which has no seed."""
        return {name: value for name, value in self.values_with_seed.items() if name != "seed"}

    def with_seed(self, seed: int) -> Self:
        """Return the configuration of a trial in a block with this seed."""
        return replace(self, seed=seed)  # type: ignore[type-var]  # every kind is a dataclass

    def with_steps(self, steps: StepsConfig) -> Self:
        """Return the configuration with other steps."""
        return replace(self, steps=steps)  # type: ignore[type-var]  # every kind is a dataclass

    @abstractmethod
    def lane(self) -> str:
        """Return the lane that a node must offer."""

    def back_ends(self) -> frozenset[str]:
        """Return what a node must have besides the lane: members of BACK_ENDS, or secrets."""
        return frozenset()

    @abstractmethod
    def readings(self, gates: Mapping[str, Any], facts: Facts) -> dict[str, GateReading]:
        """Compare the requested settings of an arm with the recorded facts."""

    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """Return the part of the configuration on whose noise a calibration depends, as JSON."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return the work of an arm as JSON, however its spec spells it: without names, seed and steps."""

    def asked_content(self) -> dict[str, Any]:
        """Return the content without sizes that every ablation chooses anew, so that another one asks nothing new."""
        return self.content()

    @abstractmethod
    def claim_of(self, name: str) -> Claim:
        """Return the claim of a setting about the numbers."""

    def claim(self, gates: Mapping[str, Any], base: Mapping[str, Any]) -> Claim:
        """Return the weakest claim among the settings that differ between an arm and the baseline."""
        claims = {self.claim_of(name) for name, value in gates.items() if value != base.get(name)}
        order = (Claim.CHANGES_MODEL, Claim.RE_ASSOCIATES)
        return next((claim for claim in order if claim in claims), Claim.SCHEDULE_ONLY)

    @abstractmethod
    def describe(self) -> str:
        """Say in a few words what a step consists of."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Values besides the gates in which arms may differ, by name."""
        return {}

    def changed_from(self, base: "ArmConfig") -> dict[str, tuple[Any, Any]]:
        """Return by name the values, gates excepted, that differ from another arm's: (own, other)."""
        theirs = base.values
        return {
            name: (value, theirs[name])
            for name, value in self.values.items()
            if name in theirs and value != theirs[name]
        }

    @property
    def rows(self) -> LossRows:
        """Values that decide over which rows a loss is a mean."""
        return LossRows(training={}, validation={})

    @property
    def work(self) -> StepWork | None:
        """Work of a step; None where only the receipts have it."""
        return None

    @property
    def parameters(self) -> int | None:
        """Trainable parameters of the model; None where only the receipts have them."""
        return None

    @property
    def declared(self) -> Mapping[str, Literal["higher", "lower"]]:
        """Better direction of each metric that the program reports, by name."""
        return {}

    def origin_of(self, _metric: str) -> str | None:
        """Return the line that the program prints with a metric, or where it logs it; None if it reports it."""
        return None

    @property
    def has_speed(self) -> bool:
        """Return whether its times are those of training, without the pause of a program that was killed."""
        return True

    @property
    def takes_turns(self) -> bool:
        """Return whether the trials of a block are in memory together and run by turns."""
        return self.turns or self.steps.slice > 0

    @property
    def turns(self) -> bool:
        """Return whether turns end by the clock, and not after equally many steps."""
        return False

    @property
    def untrained_loss(self) -> float | None:
        """Loss of a model that was not trained, in nats; None where nobody knows."""
        return None

    @property
    def compiles(self) -> bool:
        """Whether something is compiled before step 0."""
        return False

    @property
    def devices(self) -> int:
        """Devices of each node for which a trial is planned."""
        return 1

    @property
    def nodes(self) -> int:
        """Nodes over which a trial runs."""
        return 1

    @property
    def environment(self) -> str | None:
        """Name of the node's Python environment in which it runs; None for the worker's own."""
        return None

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the node's secrets that it gets."""
        return ()

    @property
    def corpus(self) -> str | None:
        """Corpus of the training data; None where the program brings its own."""
        return None

    @property
    def prepared(self) -> str | None:
        """Text that is equal for configurations that share what a node prepares before a trial; None for nothing."""
        return None

    @property
    def dataset(self) -> str:
        """Text that is equal for configurations whose trials read equal data."""
        return ""

    @property
    def archive(self) -> str | None:
        """Digest of the archive that a preparation unpacks; None for none."""
        return None

    @property
    def archives(self) -> frozenset[str]:
        """Digests of all archives that a node needs for its trials."""
        return frozenset() if self.archive is None else frozenset({self.archive})

    @property
    def sources(self) -> tuple[Path, ...]:
        """Folders that a preparation reads besides the system's."""
        return ()

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Files and folders that the trial itself reads besides the system's and the worker's."""
        return ()

    @property
    def preparation(self) -> str:
        """Words for a preparation that failed."""
        return "the code could not be copied"

    @property
    def advice(self) -> str:
        """Advice to the user when a preparation takes too long."""
        return ""

    @property
    def threads(self) -> int:
        """Threads on the processor; 0 for as many as there are cores."""
        return 0

    def topology(self, _node_class: NodeClass) -> str | None:
        """Return the topology to compile for on a node class that executes nothing; None without one."""
        return None

    def peak_flops(self, _node_class: NodeClass) -> float | None:
        """Return the peak of the devices in FLOP/s for the dtype of the configuration; None if nobody counts FLOPs."""
        return None


@lru_cache(maxsize=1024)
def _parsed(kind: type[ArmConfig], text: str) -> Any:
    """Return the configuration in a JSON text; a service reads the same plans again and again."""
    return _adapter(kind).validate_json(text, strict=True)


@lru_cache
def _adapter(kind: type[ArmConfig]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Draft(NamedTuple):
    """An arm of a spec, as its kind resolves it."""

    name: str
    gates: Mapping[str, Any]
    """All gates with their values, defaults included; of a command its declared settings."""
    config: ArmConfig


class Drafts(NamedTuple):
    """The arms of a spec without problems of their own, baseline first, and all problems."""

    arms: tuple[Draft, ...]
    problems: tuple[SpecProblem, ...]


MAX_TRIALS = 8
"""Most arms of an ablation whose trials take turns: all of a block are in the machine's memory at the same time."""


def slice_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find reasons why the trials of `spec` cannot run in the slices that it requests."""
    steps = spec.workload.steps
    if not steps.slice:
        return
    where = pointer("workload", "steps", "slice")
    yield from together_problems(spec, where)
    if steps.timed % (2 * steps.slice):
        detail = f"{steps.timed} timed steps do not make an even number of slices of {steps.slice}"
        fitting = [size for size in range(1, steps.timed // 2 + 1) if steps.timed % (2 * size) == 0]
        hint = f"slices that fit: {listed(map(str, fitting))}" if fitting else "use an even number of timed steps"
        yield SpecProblem(pointer=where, detail=detail, hint=hint)


def together_problems(spec: AblationSpec, where: str) -> Iterator[SpecProblem]:
    """Find reasons why the trials of a block cannot take turns in memory, as the key at pointer `where` requests."""
    key, arms = where.rpartition("/")[2], 1 + len(spec.variants)
    node_class = NODE_CLASSES[spec.placement.node_class]
    if not node_class.slices:
        able = listed(name for name, entry in NODE_CLASSES.items() if entry.slices)
        detail = f"the trials of a block cannot take turns on node class '{node_class}': {_why_not(node_class)}"
        yield SpecProblem(pointer=where, detail=detail, hint=f"node classes that can: {able}; or leave {key} out")
    if spec.placement.devices > 1:
        detail = f"turns are for trials on one device; this spec has {spec.placement.devices}"
        yield SpecProblem(pointer=where, detail=detail, hint=f"leave {key} out, or use one device")
    if arms > MAX_TRIALS:
        detail = f"{arms} arms would be in memory together; allowed with turns: {MAX_TRIALS}, with the baseline"
        yield SpecProblem(pointer=where, detail=detail, hint=f"leave {key} out, or remove variants")


def _why_not(node_class: NodeClass) -> str:
    if node_class.compiles_only:
        return "that class executes nothing"
    return "a trial has the device to itself there; any other process on it makes the trial invalid"
