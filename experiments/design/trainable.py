"""One interface to all that a trial can train: the built-in model, or a command with another program. Torch-free.

Service, workers and reports ask `trainable(config)` and do not know which of them they have. Each class here reads one
kind of configuration.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from experiments.design.config_fields import read_config, value_at
from experiments.design.gate import Claim, Facts, show
from experiments.design.gate_readings import GateReading, declared_readings, read_gates
from experiments.design.gates import GATES, back_ends_of
from experiments.design.packages import code_folders, lane_of_package
from experiments.design.program import ProgramConfig, is_program, lane_of, needed_secret, read_program
from experiments.design.recipes import OF_AN_ARM, OF_TRAINING, OF_VALIDATION, OVERRIDES
from experiments.design.workload import ARCHIVE
from experiments.digest import canonical_json
from kernels.backends import NodeClass
from model.config import TrainConfig
from model.counts import step_flops
from model.data.corpus import BUILT_IN

_ALSO_SHAPE = {"micro_batch"}
"""Gates whose value is a size. It is part of the shape, because the noise of a step depends on its duration."""
_ONLY_WITH = {"M": ("model.mamba", "model.scan"), "A": ("model.attention",), "F": ("model.mlp_ratio",)}
"""Fields that have an effect only in a model with blocks of a kind."""
_GATE_PATHS = frozenset(gate.path for gate in GATES.values()) - _ALSO_SHAPE


class StepWork(NamedTuple):
    """Work of one training step."""

    tokens: int
    flops: int
    """Model FLOPs, forward and backward."""


class LossRows(NamedTuple):
    """Values by name that decide the rows of a training step, and the validation rows. Empty where nobody knows."""

    training: Mapping[str, Any]
    validation: Mapping[str, Any]


class Trainable(ABC):
    """One kind of workload, with the JSON of a configuration of it. The JSON may lack the seed or be of older code."""

    own_process: bool
    """Whether it is a program that the trial starts, and not code of the trainer's process."""
    attested: bool
    """Whether facts prove which value of a setting was live."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError when the configuration has illegal values, or fields that this code does not know."""

    @abstractmethod
    def lane(self, gates: Mapping[str, Any]) -> str:
        """Return the lane that a node must offer for an arm with these gates."""

    def back_ends(self, _gates: Mapping[str, Any]) -> frozenset[str]:
        """Return what a node must have besides the lane: members of BACK_ENDS, or secrets."""
        return frozenset()

    @abstractmethod
    def readings(self, gates: Mapping[str, Any], facts: Facts) -> dict[str, GateReading]:
        """Compare the requested settings of an arm with the recorded facts."""

    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """Return the part of the configuration on whose noise a calibration depends, as JSON."""

    @abstractmethod
    def content(self, gates: Mapping[str, Any]) -> dict[str, Any]:
        """Return the work of an arm as JSON, however its spec spells it: without names, seed and steps."""

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
        """Values besides the gates in which arms may differ, by name; a configuration of earlier code may lack some."""
        return {}

    @property
    def rows(self) -> LossRows:
        """Values that decide over which rows a loss is a mean."""
        return LossRows(training={}, validation={})

    @property
    def work(self) -> StepWork | None:
        """Work of a step; None where only the receipts have it."""
        return None

    @property
    def devices(self) -> int:
        """Devices of one node for which a trial is planned."""
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
    def sources(self) -> tuple[Path, ...]:
        """Folders that a preparation reads besides the system's."""
        return ()

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Folders of code that the trial itself reads besides the system's and the worker's."""
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
        return int(self.config.get("threads") or 0)

    def topology(self, _node_class: NodeClass) -> str | None:
        """Return the topology to compile for on a node class that executes nothing; None without one."""
        return None

    def peak_flops(self, _node_class: NodeClass) -> float | None:
        """Return the peak of the devices in FLOP/s for the dtype of the configuration; None if nobody counts FLOPs."""
        return None


class BuiltInModel(Trainable):
    """A recipe of the built-in hybrid model; its arms differ by gates."""

    own_process = False
    attested = True

    @cached_property
    def _typed(self) -> TrainConfig:
        return read_config({"seed": 0, **self.config}, may_be_older=True)

    def check(self) -> None:
        """Raise ConfigError when the configuration has illegal values, or fields that this code does not know."""
        read_config({"seed": 0, **self.config})

    def lane(self, gates: Mapping[str, Any]) -> str:
        """Return the lane of the scan."""
        return str(gates["lane"])

    def back_ends(self, gates: Mapping[str, Any]) -> frozenset[str]:
        """Return the back ends that a worker on a GPU tries, of those that the gates ask for."""
        return back_ends_of(gates, str(self.config["model"]["pattern"]))

    def readings(self, gates: Mapping[str, Any], facts: Facts) -> dict[str, GateReading]:
        """Compare the requested gates with the recorded facts of the model and its kernels."""
        return read_gates(gates, facts, pattern=self._typed.model.pattern, devices=self.devices)

    def shape(self) -> dict[str, Any]:
        """Return the configuration without its gates, seed and steps."""
        return _without_gates({name: value for name, value in self.config.items() if name not in {"seed", "steps"}})

    def content(self, gates: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that have an effect and differ from the defaults, so that a later field changes nothing."""
        pattern, unused = self.config["model"]["pattern"], {"seed", "steps"}
        unused |= {path for letter, paths in _ONLY_WITH.items() if letter not in pattern for path in paths}
        entries = [gate for name in gates if (gate := GATES.get(name))]
        unused |= {gate.path for gate in entries if gate.unused_because(gates, devices=self.devices)}
        unused |= set() if self.config["loss"] == "chunked" else {"loss_chunk_tokens"}
        return _differing(self.config, asdict(TrainConfig()), unused)

    def claim_of(self, name: str) -> Claim:
        """Return the claim of a gate."""
        return GATES[name].claim

    def describe(self) -> str:
        """Return rows and tokens: an answer holds only for rows of the same length."""
        rows, tokens = self.config["micro_batch"], self.config["data"]["seq_len"]
        return f"{rows:,} row{'' if rows == 1 else 's'} of {tokens:,} tokens"

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the model and the optimiser."""
        values = {name: value_at(self.config, OVERRIDES[name].path) for name in OF_AN_ARM}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def rows(self) -> LossRows:
        """Values of data, vocabulary and batch."""
        training, validation = (
            {name: value_at(self.config, OVERRIDES[name].path) for name in names}
            for names in (OF_TRAINING, OF_VALIDATION)
        )
        return LossRows(training=training, validation={**validation, "val_seq_len": self._typed.data.val_row})

    @property
    def work(self) -> StepWork:
        """Work of a step by the sizes of the model."""
        return StepWork(tokens=self._typed.tokens_per_step, flops=step_flops(self._typed))

    @property
    def devices(self) -> int:
        """Devices that share a step."""
        return self._typed.mesh.devices

    @property
    def corpus(self) -> str:
        """Corpus of the training data."""
        return str(self.config["data"]["corpus"])

    @property
    def prepared(self) -> str:
        """Text of everything that decides the prepared dataset."""
        data = replace(self._typed.data, second_share=0.0, documents="separate", val_seq_len=self._typed.data.val_row)
        return f"{data!r} {self._typed.model.vocab_size}"

    @property
    def dataset(self) -> str:
        """As `prepared`."""
        return self.prepared

    @property
    def sources(self) -> tuple[Path, ...]:
        """The folders of the corpora."""
        return tuple(Path(name) for name in self._typed.data.corpora if name not in BUILT_IN)

    @property
    def preparation(self) -> str:
        """Words for a preparation that failed."""
        return "the data could not be prepared"

    @property
    def advice(self) -> str:
        """Advice to the user when a preparation takes too long."""
        return "; use a smaller corpus or max_corpus_mib"

    def topology(self, node_class: NodeClass) -> str | None:
        """Return the topology with as many chips as the step uses."""
        return node_class.topologies.get(self._typed.mesh.devices)

    def peak_flops(self, node_class: NodeClass) -> float | None:
        """Return the peak of all devices of the step for its dtype."""
        return node_class.peak(self._typed.dtype, self._typed.mesh.devices)


class Program(Trainable):
    """A user's command; its arms differ by arguments, variables and code, which are declared and not proved."""

    own_process = True
    attested = False

    @cached_property
    def _typed(self) -> ProgramConfig:
        return read_program(self.config)

    def check(self) -> None:
        """Raise ConfigError when the configuration has illegal values, or fields that this code does not know."""
        read_program({"seed": 0, **self.config})

    def lane(self, _gates: Mapping[str, Any]) -> str:
        """Return the lane of commands in the configuration's Python environment."""
        return lane_of(self.config)

    def back_ends(self, _gates: Mapping[str, Any]) -> frozenset[str]:
        """Return the secrets that a node must have."""
        return frozenset(map(needed_secret, self._typed.secrets))

    def readings(self, gates: Mapping[str, Any], _facts: Facts) -> dict[str, GateReading]:
        """Return the settings as declared: nothing observes them."""
        return declared_readings(gates)

    def shape(self) -> dict[str, Any]:
        """Return the command that all arms share, where it runs, and on how many devices."""
        return {name: self.config[name] for name in ("command", "environment", "devices")}

    def content(self, _gates: Mapping[str, Any]) -> dict[str, Any]:
        """Return the command line, the variables and the code, wherever the spec divides a command from arguments."""
        named = {name: self.config.get(name) for name in ("env", "code", "environment")}
        return {"argv": [*self.config["command"], *self.config["args"]], **named}

    def claim_of(self, _name: str) -> Claim:
        """Return the weakest claim there is: nobody knows what an argument changes."""
        return Claim.CHANGES_MODEL

    def describe(self) -> str:
        """Return the command."""
        return " ".join(self.config["command"])

    @property
    def devices(self) -> int:
        """Devices that the command sees."""
        return self._typed.devices

    @property
    def environment(self) -> str | None:
        """Name of the node's Python environment in which the command runs; None for the worker's own."""
        return self._typed.environment

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the node's secrets that the program gets."""
        return self._typed.secrets

    @property
    def prepared(self) -> str | None:
        """Text of the command's code; None without files."""
        return None if self._typed.code is None else canonical_json(self.config["code"])

    @property
    def archive(self) -> str | None:
        """Digest of the archive with the command's code; None for other code."""
        code = self._typed.code
        return code.get(ARCHIVE) if isinstance(code, Mapping) else None

    @property
    def sources(self) -> tuple[Path, ...]:
        """The folder or repository of the command's code; an archive lies in the folder of prepared data."""
        code = self._typed.code
        source = code.get("git") if isinstance(code, Mapping) else code
        return () if source is None else (Path(source),)


class PackagedRecipe(Program):
    """The recipe of an installed package: a program whose arms differ by gates, which it attests."""

    attested = True

    @property
    def _package(self) -> Mapping[str, Any]:
        package: Mapping[str, Any] = self.config["package"]
        return package

    def lane(self, _gates: Mapping[str, Any]) -> str:
        """Return the lane of the nodes with the recipe and its code."""
        return lane_of_package(self._package["recipe"], self._package["digest"])

    @property
    def libraries(self) -> tuple[Path, ...]:
        """The folders of the package and of the search path."""
        return code_folders(self._package["train"])

    def readings(self, gates: Mapping[str, Any], facts: Facts) -> dict[str, GateReading]:
        """Compare the requested gates with what the program attested."""
        return {name: _attested(value, facts.get(name)) for name, value in gates.items()}

    def shape(self) -> dict[str, Any]:
        """Return the recipe with its values, gates excepted, and the number of devices."""
        package = self._package
        shared = {name: package[name] for name in ("recipe", "version")}
        return {**shared, "values": dict(self.values), "devices": self.config["devices"]}

    def content(self, _gates: Mapping[str, Any]) -> dict[str, Any]:
        """Return the program and its values; its recipe may have any name."""
        return {name: self._package[name] for name in ("train", "values")}

    def claim_of(self, name: str) -> Claim:
        """Return the declared claim of a gate."""
        return Claim(self._package["claims"][name])

    def describe(self) -> str:
        """Return the recipe and its values."""
        values = ", ".join(f"{name} {show(value)}" for name, value in self._package["values"].items())
        return f"{self._package['recipe']}: {values}"

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the recipe that are no gates."""
        package = self._package
        return {name: value for name, value in package["values"].items() if name not in package["claims"]}

    @property
    def work(self) -> StepWork | None:
        """Work of a step where the recipe declares it."""
        tokens, flops = self._package["tokens_per_step"], self._package["flops_per_step"]
        return None if tokens is None or flops is None else StepWork(tokens=tokens, flops=flops)


def _attested(requested: Any, observed: Any) -> GateReading:
    if observed is None:
        return GateReading(requested=requested, observed=None, live=False, how="the program attested nothing")
    live = type(observed) is type(requested) and observed == requested
    return GateReading(requested=requested, observed=observed, live=live, how="attested by the program")


def trainable(config: Mapping[str, Any]) -> Trainable:
    """Return the workload of a configuration as JSON."""
    if config.get("package"):
        return PackagedRecipe(config)
    return Program(config) if is_program(config) else BuiltInModel(config)


def changed_values(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return by name the values, gates excepted, that differ between two configurations: (own, base).

    A missing value is no difference: a configuration of earlier code may lack some.
    """
    mine, theirs = trainable(own).values, trainable(base).values
    return {name: (mine[name], theirs[name]) for name in mine if name in theirs and mine[name] != theirs[name]}


def _differing(
    config: Mapping[str, Any], defaults: Mapping[str, Any], unused: Set[str], where: str = ""
) -> dict[str, Any]:
    """Return the fields of `config` that differ from `defaults`, except at the dotted paths `unused`."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        default = defaults.get(name)
        if f"{where}{name}" in unused or value == default:
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            kept |= _differing(value, default, unused, f"{where}{name}.")
        else:
            kept[f"{where}{name}"] = value
    return kept


def _without_gates(config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    return {
        name: _without_gates(value, f"{where}{name}.") if isinstance(value, dict) else value  # plain JSON
        for name, value in config.items()
        if f"{where}{name}" not in _GATE_PATHS
    }
