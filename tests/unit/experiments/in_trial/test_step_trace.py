"""A profiled step over time: from torch's events, through the program's messages, to what a receipt may hold."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from ablate.experiments.in_trial import ablate, ablate_profile
from ablate.model.measurements import StepTrace
from ablate.workers.commands.ranks import ProgramMarks
from tests.programs import program_config


def event(name: str, start_us: float, us: float, *, device: str = "CPU", place: int = 0, num_bytes: int = 0) -> Any:
    values = {
        "name": name,
        "start_ns": round(1000 * start_us),
        "duration_ns": round(1000 * us),
        "device_type": f"DeviceType.{device}",
        "device_index": 0,
        "device_resource_id": place,
        "start_thread_id": place,
        "nbytes": num_bytes,
    }
    return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})


def profiled(events: list[Any]) -> Any:
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))


def drawn(seed: int) -> list[Any]:
    """Return spans and changes of memory on up to ten threads and four streams, in any order."""
    chance = random.Random(seed)  # noqa: S311
    devices = ["CPU", "CUDA"] if chance.random() < 0.5 else ["CPU"]
    spans = []
    for _ in range(chance.randint(0, 9000)):
        device = chance.choice(devices)
        us = chance.choice([0, chance.expovariate(0.1)])
        place = chance.randrange(10 if device == "CPU" else 4)
        spans.append(event(f"op-{chance.randrange(300)}", chance.uniform(0, 1e6), us, device=device, place=place))
    changes = [
        event(
            "[memory]",
            chance.uniform(0, 1e6),
            0,
            device=chance.choice(devices),
            num_bytes=chance.randint(-(2**30), 2**30),
        )
        for _ in range(chance.randint(0, 3000))
    ]
    events = spans + changes
    chance.shuffle(events)
    return events


@pytest.mark.parametrize("seed", range(8))
def test_a_trace_keeps_the_device_and_the_longest_and_the_peak_of_the_memory(seed: int) -> None:
    events = drawn(seed)
    trace = StepTrace.model_validate(ablate_profile.step_trace(profiled(events)))
    spans = [one for one in events if one.name() != "[memory]" and one.duration_ns() > 0]
    assert len(trace.events) == min(4000, len(spans))
    assert trace.left_out == len(spans) - len(trace.events)
    longest = sorted(spans, key=lambda one: (one.device_type() == "DeviceType.CPU", -one.duration_ns()))[:4000]
    kept = sorted((trace.names[name], us) for name, _track, _start, us in trace.events)
    assert kept == sorted((one.name(), round(one.duration_ns() / 1e3, 3)) for one in longest)
    device = (
        "DeviceType.CUDA"
        if any(one.device_type() != "DeviceType.CPU" for one in events if one.nbytes())
        else "DeviceType.CPU"
    )
    total, totals = 0, []
    for one in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        if one.device_type() == device:
            total += one.nbytes()
            totals.append(total)
    shown = [num_bytes for _moment, num_bytes in trace.memory]
    assert len(shown) <= 401
    assert (max(shown, default=0), shown[-1:]) == (max(totals, default=0), totals[-1:])
    assert [moment for moment, _ in trace.memory] == sorted(moment for moment, _ in trace.memory)


@pytest.mark.parametrize("seed", range(3))
def test_a_program_sends_the_trace_in_pieces_that_give_it_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ablate_profile.step_trace(profiled(drawn(seed)))
    marks, sizes = ProgramMarks(program_config(None)), []
    began = {"event": "began", "rank": 0, "at": 1.0, "world": 1, "python": "3.12.1", "implementation": "CPython"}
    marks.take(json.dumps(began).encode(), 0.0)
    trial = ablate.Trial.__new__(ablate.Trial)
    trial._rank = 0

    def send(message: str) -> None:
        sizes.append(len(message))
        marks.take(message.encode(), 0.0)

    monkeypatch.setattr(trial, "_send_text", send)
    for name, values in ablate_profile.trace_messages(made):
        trial._send(name, **values)
    assert marks.wrong is None
    assert marks.trace == StepTrace.model_validate(made)
    assert max(sizes) < 200_000, "below the limit of a datagram"


@pytest.mark.parametrize(
    "changed",
    [
        {"events": [[1, 0, 0.0, 1.0]]},
        {"events": [[0, 1, 0.0, 1.0]]},
        {"events": [[-1, 0, 0.0, 1.0]]},
        {"events": [[0, 0, -1.0, 1.0]]},
        {"events": [[0, 0, 0.0, float("nan")]]},
        {"memory": [[float("inf"), 1]]},
        {"left_out": -1},
        {"names": ["x" * 121]},
        {"memory": [[0.0, 1]] * 402},
        {"more": 1},
    ],
)
def test_a_trace_that_no_profiler_makes_is_rejected(changed: dict[str, Any]) -> None:
    good = {"names": ["mm"], "tracks": ["thread"], "events": [[0, 0, 0.0, 1.0]], "left_out": 0, "memory": [[0.0, 1]]}
    StepTrace.model_validate(good)
    with pytest.raises(ValidationError):
        StepTrace.model_validate(good | changed)


@pytest.mark.parametrize(
    "values",
    [{"part": "names", "rows": ["x"] * 4001}, {"part": "other", "rows": []}, {"part": "left_out", "rows": [-1]}],
)
def test_a_program_that_sends_another_trace_is_wrong(values: dict[str, Any]) -> None:
    marks = ProgramMarks(program_config(None))
    marks.take(json.dumps({"event": "trace", "rank": 0, **values}).encode(), 0.0)
    assert marks.wrong is not None
