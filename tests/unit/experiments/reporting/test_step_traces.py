"""The profiled step on the page, as a picture, and as a file for a trace viewer, for recipes and commands."""

import json
import random

import pytest

from ablate.experiments.reporting.mlflow.runs import arm_runs
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.pictures.memory import step_memory
from ablate.experiments.reporting.step_traces import TRACE_FILE, chrome_trace, step_table, traces
from ablate.model.measurements import StepTrace
from tests import views
from tests.unit.experiments.reporting.test_kernel_tables import FUSED, command_view, recipe_view


@pytest.mark.parametrize("made", [command_view, recipe_view])
def test_page_picture_and_files_show_each_arms_step(made: object) -> None:
    view = views.traced(made(FUSED))  # type: ignore[operator]
    arms = [arm.name for arm in view.plan.arms]
    assert list(traces(view)) == arms
    table = step_table(view)
    assert [one[0].text for one in table.rows] == arms
    base, own = table.rows
    assert (base[1].text, own[1].text) == ("0.57", "0.501")
    assert [cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in own[2:4]] == [
        "\N{MINUS SIGN}0.069",
        "\N{MINUS SIGN}12.11 %",
    ]
    assert [base[4].text, own[4].text, own[5].text, own[6].text] == ["5.0", "7.0", "2", "3"]
    picture = step_memory(view)
    assert picture is not None
    page = render(view)
    assert "Where a step spends its time and memory" in page
    assert picture.svg in page
    assert "<script>alert" not in page
    files = {run.identity: run.texts.get(TRACE_FILE) for run in arm_runs(view)}
    assert all(files[f"arm/{arm}"] for arm in arms)


def test_without_profiled_steps_there_is_neither_section_nor_file() -> None:
    view = views.view(num_blocks=6, timed=4)
    assert step_table(view).rows == ()
    assert step_memory(view) is None
    assert "Where a step spends" not in render(view)
    assert all(TRACE_FILE not in run.texts for run in arm_runs(view))


@pytest.mark.parametrize("seed", range(20))
def test_the_file_has_every_event_and_every_moment_of_the_memory(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    names = tuple(f"op \N{GREEK SMALL LETTER PSI} {place}" for place in range(chance.randint(1, 30)))
    tracks = tuple(f"thread {place}" for place in range(chance.randint(1, 9)))
    events = tuple(
        (chance.randrange(len(names)), chance.randrange(len(tracks)), chance.uniform(0, 1e7), chance.expovariate(0.01))
        for _ in range(chance.randint(0, 500))
    )
    memory = tuple((chance.uniform(0, 1e7), chance.randint(-(2**40), 2**40)) for _ in range(chance.randint(0, 50)))
    made = StepTrace(names=names, tracks=tracks, events=events, left_out=0, memory=memory)
    read = json.loads(chrome_trace("name: arm", made))["traceEvents"]
    threads = {one["tid"]: one["args"]["name"] for one in read if one["name"] == "thread_name"}
    assert [(one["name"], threads[one["tid"]], one["ts"], one["dur"]) for one in read if one["ph"] == "X"] == [
        (names[name], tracks[track], start, us) for name, track, start, us in events
    ]
    counters = [(one["ts"], one["args"]["above the start"]) for one in read if one["ph"] == "C"]
    assert counters == list(memory)
    assert {one["pid"] for one in read} == {1}
