"""Mark the steps of a training program, so that Ablate can measure it.

    import ablate

    with ablate.trial() as trial:
        for step in trial.steps():
            loss = train_step(next(batches))
            step.report(loss=loss, tokens=batch.numel())
        trial.report(val_bpb=evaluate(model))

A loop without room for a `with` statement iterates over `ablate.steps()`.

Outside of a trial nothing is measured and nothing is sent. This file needs the standard library only and Python 3.9 or
newer, because it runs in the interpreter of the measured program. The program never reports a time: this module stamps
moments, and the worker compares them with the kernel's stamps of the messages.
"""

import io
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Optional

VARIABLE = "ABLATE_TRIAL"
"""Environment variable with the trial's settings as JSON; absent outside of a trial."""
_FLUSH_S = 0.25
"""Least time between two messages with steps."""
_MOST_ROWS = 500
"""Most rows in one message, which keeps it far below the kernel's limit of a datagram."""
_MOST_NAMED = 100
"""Most named values in one message: names and texts take up to six bytes a letter."""
MOST_RESULTS, LONGEST_NAME, MOST_RESULT_BYTES = 10_000, 250, 800_000
"""Most results of a trial, letters in the name of one, and bytes of all of them as JSON."""

_LONGEST_POINT = 63
_live: "set[str]" = set()
"""Names that were passed to `live`."""
_IMPLEMENTATIONS = {"cpython": "CPython", "pypy": "PyPy"}
_now = time.monotonic
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables of launchers that set no RANK: the number of a process, and how many there are."""


def name_problem(name: str) -> Optional[str]:
    """Return why a result cannot have this name; None if it can."""
    if len(name) > LONGEST_NAME:
        return f"the name of result {name[:60]!a}... has {len(name):,} letters; allowed: {LONGEST_NAME}"
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        return f"the name of result {name[:60]!a} has a letter that no text can store; allowed: any other"
    return None


def result_bytes(name: str) -> int:
    """Return the most bytes of a result as JSON."""
    return len(json.dumps(name)) + 28


def too_many_results(number: int, num_bytes: int) -> str:
    """Say that a trial has more results than allowed."""
    return (
        f"the trial has {number:,} results of {num_bytes:,} bytes as JSON; allowed: {MOST_RESULTS:,} results of "
        f"{MOST_RESULT_BYTES:,} bytes; report fewer, or write the others to a file"
    )


def print_whole_lines() -> None:
    """Write text at the end of each line: lines of several processes then stay whole, and a killed one loses none."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class MarkedStep:
    """One step of the training loop."""

    __slots__ = ("index", "loaded", "loss", "timed", "tokens", "waited")

    def __init__(self, index: int, *, timed: bool = False) -> None:
        self.index = index
        """From 0."""
        self.timed = timed
        """Whether the step belongs to the measured window."""
        self.loss: Any = None
        self.tokens = 0
        self.waited = 0.0
        """Seconds in `waiting()`."""
        self.loaded = 0.0
        """Seconds in `loading()`."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say that this rank waits for others meanwhile, as in a collective operation that is not hidden behind work.

        It waits for the device at both ends. The time still counts for the step, but a slow rank is found by the rest:
        the others wait for it, so that whole steps take all ranks equally long.
        """
        _synchronize()
        began = _now()
        try:
            yield
            _synchronize()
        finally:
            self.waited += _now() - began

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Say that this rank waits for data meanwhile, as in `with step.loading(): batch = next(batches)`."""
        began = _now()
        try:
            yield
        finally:
            self.loaded += _now() - began

    def report(self, *, loss: Any = None, tokens: Optional[int] = None) -> None:
        """Report the loss and the tokens of this step on this rank.

        `loss` is a number or a tensor with one element in any unit that all arms share. A tensor on an accelerator is
        read after the window, so that the report does not wait for the device. `tokens` of all ranks are added up.
        Raises TypeError or ValueError for other values.
        """
        if tokens is not None:
            if isinstance(tokens, bool) or int(tokens) != tokens or tokens < 0:
                raise ValueError(f"tokens is {tokens!r}; allowed: a whole number from 0")
            self.tokens = int(tokens)
        if loss is not None:
            self.loss = loss.detach() if hasattr(loss, "detach") else float(loss)


class Trial:
    """The connection of this process to the worker that measures it; without a worker, it does nothing."""

    def __init__(self, settings: Optional[dict[str, Any]], *, seed: Optional[int] = None) -> None:
        self._settings = settings
        self._slice: int = (settings or {}).get("slice") or 0
        """Steps after which it lets the other trials of its block run; 0 for none."""
        self._asks = bool(settings and settings.get("asks"))
        """Whether the worker answers."""
        self._echo = seed
        self._rank, self._world = (0, 1) if settings is None else _place()
        self._process: Optional[int] = None
        """The process that entered the `with` statement."""
        self._socket: Optional[socket.socket] = None
        self._steps: list[MarkedStep] = []
        self._ended: list[float] = []
        self._sent = 0
        self._flushed_at = 0.0
        self._reported: dict[str, float] = {}
        self._reported_bytes = 0
        self._attested: dict[str, Any] = {}
        self._marked = False

    @property
    def active(self) -> bool:
        """Whether a worker measures this process."""
        return self._settings is not None

    @property
    def seed(self) -> int:
        """The seed that the program has to use; 0 outside of a trial."""
        if self._settings is None:
            return 0
        self._echo = int(self._settings["seed"])
        return self._echo

    @property
    def out(self) -> Path:
        """A folder for the program's files; the working folder outside of a trial."""
        return Path.cwd() if self._settings is None else Path(self._settings["out"])

    @property
    def resumed(self) -> bool:
        """Whether the program was killed, and has to go on from its checkpoint."""
        return self._settings is not None and bool(self._settings.get("resumed"))

    def steps(self, total: Optional[int] = None, *, first: int = 0) -> Iterator[MarkedStep]:
        """Yield the steps to run: the first one, warm-up steps, then the measured window.

        In a trial, Ablate sets their number; `ablate ask` sets at most `total`. Outside of a trial there are `total`
        steps, or no end. A program that goes on from a checkpoint names the `first` one. Raises RuntimeError when
        called twice in one trial.
        """
        if self._settings is None:
            yield from map(MarkedStep, count(first) if total is None else range(first, total))
            return
        if self._marked:
            raise RuntimeError("trial.steps() was called twice; a trial has one training loop")
        self._marked = True
        copy = self._copy()
        if copy is not None:
            raise ImportError(copy)
        untimed, timed = 1 + int(self._settings["warmup"]), int(self._settings["timed"])
        yield from self._measured(untimed, timed, first, total)
        if self._settings["profile"]:
            yield from self._profiled()

    def report(self, **values: Any) -> None:
        """Report results of the whole run, such as `val_bpb`: numbers, or tensors with one element.

        Raises ValueError for more than 10,000 results, and for a name of more than 250 letters.
        """
        for name, value in values.items():
            if name not in self._reported:
                self._make_room(name)
            self._reported[name] = _number(value)

    def _make_room(self, name: str) -> None:
        problem, number = name_problem(name), len(self._reported) + 1
        self._reported_bytes += result_bytes(name)
        if problem is None and (number > MOST_RESULTS or self._reported_bytes > MOST_RESULT_BYTES):
            problem = too_many_results(number, self._reported_bytes)
        if problem is not None:
            raise ValueError(problem)

    def attest(self, **values: Any) -> None:
        """Say which value of a gate of a recipe was live: true or false, a whole number, or text.

        Read it from the objects that run, not from the configuration. Two different values of one gate become the text
        `mixed`. Raises TypeError for other types.
        """
        for name, value in values.items():
            if type(value) not in (bool, int, str):
                raise TypeError(f"{name} is {value!r}; allowed: true or false, a whole number, or text")
            known = self._attested.setdefault(name, value)
            if type(known) is not type(value) or known != value:
                self._attested[name] = "mixed"

    def _measured(self, untimed: int, timed: int, first: int, total: Optional[int]) -> Iterator[MarkedStep]:
        self._rank, self._world = _place()
        self._send(
            "began",
            at=_now(),
            world=self._world,
            process=os.getpid(),
            closes=os.getpid() == self._process,
            first=first,
            total=None if total is None else max(0, int(total)),
            python=sys.version.split()[0],
            implementation=_IMPLEMENTATIONS.get(sys.implementation.name, sys.implementation.name),
        )
        self._flushed_at = _now()
        killed_after = None if self._settings is None or self.resumed or first else self._settings.get("resume_at")
        begins = range(untimed, untimed + timed, self._slice or timed)
        ends = range(untimed + begins.step - 1, untimed + timed, begins.step)
        for index in range(first, untimed + timed):
            if index in begins:
                self._wait_for_turn()
                self._edge("window began")
            step = MarkedStep(index, timed=index >= untimed)
            self._steps.append(step)
            yield step
            if index in ends:
                self._ended.append(self._edge("window ended"))
                self._flush()
            else:
                now = _now()
                self._ended.append(now)
                if now - self._flushed_at >= _FLUSH_S:
                    self._flush()
                while len(self._ended) == killed_after:  # until the worker kills this process
                    self._flush()
                    self._send_details()
                    time.sleep(3600)
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Wait until the worker has noted the processor time, and other trials that take turns have run their steps."""
        if self._asks and self._socket is not None:
            self._send("turn")
            self._socket.recv(1)

    def _copy(self) -> Optional[str]:
        code = None if self._settings is None else self._settings.get("code")
        if code is None:
            return None
        from ablate_imports import installed_copy  # beside this file in every trial, and nowhere else

        copy: Optional[str] = installed_copy(Path(code))
        return copy

    def _edge(self, which: str) -> float:
        """Wait for the device, send a mark, and return its moment."""
        head = self._text(which)[:-1]
        _synchronize()
        now = _now()
        self._send_text(f'{head}, "at": {now!r}}}')  # at once: the kernel stamps the message when it is sent
        return now

    def _flush(self) -> None:
        """Send the steps that ended and were not sent yet, without waiting for a device."""
        while self._sent < len(self._ended):
            upto = min(self._sent + _MOST_ROWS, len(self._ended))
            rows = [[self._steps[i].index, self._ended[i], self._steps[i].tokens, _free_number(self._steps[i].loss)]
                    for i in range(self._sent, upto)]  # fmt: skip
            self._send("steps", steps=rows)
            self._sent = upto
        self._flushed_at = _now()

    def _profiled(self) -> Iterator[MarkedStep]:
        """Yield one more step after the window, under torch's profiler where torch is loaded; send its kernels."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        from ablate_profile import messages, profiler  # beside this file in every trial, and nowhere else

        profile = profiler(torch)
        with warnings.catch_warnings():  # some versions warn of cycles, and a program may make errors of warnings
            warnings.simplefilter("ignore")
            profile.start()
        try:
            yield MarkedStep(len(self._ended))
            _synchronize()
        finally:
            profile.stop()
        for event, values in messages(profile, torch, traced=self._settings is not None and self._settings["trace"]):
            self._send(event, **values)

    def __enter__(self) -> "Trial":
        if self._settings is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.connect(self._settings["socket"])
            if self._asks:
                self._socket.bind(f"\0ablate-turns-{os.urandom(16).hex()}")  # the worker answers there
            self._process = os.getpid()
            print_whole_lines()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._settings is None or self._process != os.getpid():  # a fork leaves the trial of its parent open
            return
        whole = _is_good_end(error)
        if not whole:
            self._send("failed", type=f"{kind.__module__}.{kind.__qualname__}", message=str(error)[:2000])
        else:
            copy = self._copy()  # again: a program may import late
            if copy is not None:
                self._send("failed", type="builtins.ImportError", message=copy)
        self._flush()
        self._send_details()
        self._send_values("reported", self._reported)
        self._send_values("attested", {**dict.fromkeys(sorted(_live), True), **self._attested})
        from ablate_imports import packages  # beside this file in every trial, and nowhere else

        self._send("ended", at=_now(), seed=self._echo, whole=whole, memory=_memory(), packages=packages())
        if self._socket is not None:
            self._socket.close()

    def _send_details(self) -> None:
        """Send losses, which may wait for a device, tokens and waits of all steps."""
        waits = [[step.index, step.waited] for step in self._steps if step.waited]
        loads = [[step.index, step.loaded] for step in self._steps if step.loaded]
        losses = [[step.index, _number(step.loss)] for step in self._steps if step.loss is not None]
        tokens = [[step.index, step.tokens] for step in self._steps]
        for event, rows in (("waits", waits), ("loads", loads), ("losses", losses), ("tokens", tokens)):
            for first in range(0, len(rows), _MOST_ROWS):
                self._send(event, **{event: rows[first : first + _MOST_ROWS]})

    @property
    def settings(self) -> dict[str, Any]:
        """The worker's settings of this trial. Raises RuntimeError outside of one."""
        if self._settings is None:
            raise RuntimeError(f"this process is not part of a trial: {VARIABLE} is not set")
        return self._settings

    def send_package(self, digest: str) -> None:
        """Send the digest of the code of a recipe's package."""
        self._send("package", digest=digest)

    def _send_values(self, event: str, values: dict[str, Any]) -> None:
        """Send named values in messages of a size that the kernel takes."""
        names = list(values)
        for first in range(0, len(names), _MOST_NAMED):
            self._send(event, values={name: values[name] for name in names[first : first + _MOST_NAMED]})

    def _send(self, event: str, **values: Any) -> None:
        self._send_text(self._text(event, **values))

    def _text(self, event: str, **values: Any) -> str:
        return json.dumps({"event": event, "rank": self._rank, **_round(), **values})

    def _send_text(self, message: str) -> None:
        if self._socket is None:
            raise RuntimeError("the trial is not open: write `with ablate.trial() as trial:`")
        try:
            self._socket.send(message.encode())
        except (ConnectionError, FileNotFoundError):  # the worker is gone, and the kernel ends this process, too
            return


def trial(*, seed: Optional[int] = None) -> Trial:
    """Return the trial that this process is a part of, for a `with` statement.

    Pass the `seed` that the program used if it got it by other ways than `trial.seed`, such as an argument.
    """
    text = os.environ.get(VARIABLE)
    return Trial(None if not text else json.loads(text), seed=seed)


def steps(total: Optional[int] = None, *, first: int = 0, seed: Optional[int] = None) -> Iterator[MarkedStep]:
    """Yield the steps of a trial that begins and ends with them, for a loop that has no room for a `with` statement.

    Arguments are those of `Trial.steps` and `trial`. The program reports results of the run by lines such as
    `METRIC name=value`.
    """
    with trial(seed=seed) as current:
        yield from current.steps(total, first=first)


def live(name: str) -> None:
    """Say that a code path runs, such as a fused kernel that may fall back; `workload.require_live` asks for it.

    Call it in a process that opens the trial, before the trial ends. A compiled function calls it when it is compiled.
    Raises ValueError for a name that is no text of 1 to 63 printable letters.
    """
    if name not in _live:
        if not (isinstance(name, str) and 0 < len(name) <= _LONGEST_POINT and name.isprintable()):
            raise ValueError(f"the name is {name!a}; allowed: 1 to {_LONGEST_POINT} printable letters")
        _live.add(name)


live._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets


def trainer_callback(trial: Trial, *, tokens_per_step: Optional[int] = None) -> Any:
    """Return a callback for `transformers.Trainer` that marks its steps and stops it after the window.

    Losses arrive with `logging_steps=1`. Tokens are `tokens_per_step`, or counted with
    `include_num_input_tokens_seen=True`.
    """
    from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]

    class TrainerMarks(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Marks of one training loop."""

        def __init__(self) -> None:
            self._steps: Iterator[MarkedStep] = iter(())
            self._current: Optional[MarkedStep] = None
            self._last: Optional[MarkedStep] = None
            self._seen = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_rest: Any) -> None:
            total = int(getattr(state, "max_steps", 0) or 0)  # Trainer itself ends there
            self._steps = trial.steps(total or None, first=int(state.global_step) if trial.resumed else 0)
            self._seen = int(getattr(state, "num_input_tokens_seen", 0) or 0)  # a checkpoint has those before it
            self._current = next(self._steps, None)

        def on_step_end(self, args: Any, state: Any, control: Any, **_rest: Any) -> None:
            if self._current is None:
                return
            seen = int(getattr(state, "num_input_tokens_seen", 0) or 0)
            self._current.report(tokens=seen - self._seen if tokens_per_step is None else tokens_per_step)
            self._seen, self._last = seen, self._current
            self._current = next(self._steps, None)
            if self._current is None:
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_rest: Any) -> None:
            if self._last is not None and logs and "loss" in logs:
                self._last.report(loss=float(logs["loss"]))

    return TrainerMarks()


def run_recipe(train: str) -> None:
    """Call the function `train`, written `module:function`, of a recipe's package with the trial and its values."""
    from importlib import import_module

    from ablate_imports import package_digest  # beside this file in every trial, and nowhere else

    module, _colon, function = train.partition(":")
    with trial() as current:
        settings = current.settings
        current.send_package(package_digest(module.partition(".")[0]))  # before the package can run
        getattr(import_module(module), function)(current, dict(settings["values"]))


def _is_good_end(error: Optional[BaseException]) -> bool:
    """Return whether an exception that leaves a trial, if any, is no failure.

    Programs end well by `sys.exit(0)`, and by the exception of command line libraries that stands for it. An iterator
    that is closed does not know why.
    """
    if isinstance(error, SystemExit):
        return error.code is None or error.code == 0
    if type(error).__name__ == "Exit":
        return getattr(error, "exit_code", None) == 0
    return error is None or isinstance(error, GeneratorExit)


def _place() -> tuple[int, int]:
    """Return the number of this process among those that train together, and how many there are.

    torch knows it where a process group is up; else the launcher has set variables, of which empty ones do not count.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    rank, local = _variable("RANK"), _variable("LOCAL_RANK")
    world = _variable("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if rank is None and local is not None and world is not None:
        rank = local + (_variable("GROUP_RANK", "NODE_RANK") or 0) * (_variable("LOCAL_WORLD_SIZE") or 0)
    if rank is not None:
        return rank, world or 1
    for rank_name, world_name in _LAUNCHERS:
        rank = _variable(rank_name)
        if rank is not None:
            return rank, _variable(world_name) or 1
    return local or 0, world or 1


def _variable(*names: str) -> Optional[int]:
    """Return the number in the first of these environment variables that is not empty, None without one."""
    for name in names:
        text = os.environ.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"the environment variable {name} is {text!r}; allowed: a whole number from 0")
            return int(text)
    return None


def _round() -> dict[str, Any]:
    """Return the round of a launcher that starts all processes again when one fails; empty without one."""
    number = _variable("TORCHELASTIC_RESTART_COUNT")
    if number is None:
        return {}
    left = max(0, (_variable("TORCHELASTIC_MAX_RESTARTS") or 0) - number)
    return {"run": os.environ.get("TORCHELASTIC_RUN_ID", ""), "round": number, "restarts": left}


def _synchronize() -> None:
    """Wait until the devices of this process have done their work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if _is_used(torch, device):
                torch.cuda.synchronize(device)
    xla = sys.modules.get("torch_xla")
    if xla is not None:
        xla.sync(wait=True)


def _is_used(torch: Any, device: int) -> bool:
    """Return whether this process computes on a GPU; to wait for another one would take memory there."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return device == torch.cuda.current_device() or (has_context is not None and has_context(device))


def _number(value: Any) -> float:
    """Return a number or a tensor's only element as float."""
    return float(value.item() if hasattr(value, "item") else value)


def _free_number(value: Any) -> Optional[float]:
    """Return the value as float if that does not wait for a device, else None."""
    if value is None or isinstance(value, float):
        return value
    device = getattr(getattr(value, "device", None), "type", None)
    return _number(value) if device == "cpu" else None


def _memory() -> Optional[tuple[int, int]]:
    """Return the peaks of torch's allocator in bytes over all devices of this process: allocated, reserved."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    devices = range(torch.cuda.device_count())
    return (
        max(torch.cuda.max_memory_allocated(device) for device in devices),
        max(torch.cuda.max_memory_reserved(device) for device in devices),
    )


if __name__ == "__main__":
    import importlib

    importlib.import_module("ablate").run_recipe(sys.argv[1])  # in the module that the recipe imports, not in a copy
