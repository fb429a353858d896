"""The notebook of the documentation in a real Jupyter kernel of this environment, and a kernel that is interrupted."""

import base64
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from ablate.experiments.system.processes import descendants_of
from tests.architecture.pages import ROOT
from tests.integration.worker_service import links_into
from tests.waiting import LIMIT_S, until

FOLDER = ROOT / "docs/examples/notebook"
MARGIN, SEEDS = 'margin="0.5%",', 'design={"seeds": [1, 2, 3, 4, 5, 6]},'
"""Drawn seeds give another answer once in a while, which a test cannot have."""
ENDLESS = """
import ablate, sys
print(sys.executable)
ablate.compare("python train.py {seed}", variants={"a": {"args": ["1"]}}, check=False, placement={"node_class": "cpu"})
"""


def outputs(notebook: Any) -> dict[str, list[Any]]:
    """Return the outputs of the cells with any, by the last line of the cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source.splitlines()[-1].strip(): cell.outputs for cell in cells}


def test_the_notebook_runs_whole_and_shows_its_answer(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "notebook")
    notebook = nbformat.read(folder / "compare.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
        cell.source = cell.source.replace(MARGIN, f"{MARGIN}{SEEDS}")
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\nprint(sys.executable)"))
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    shown = outputs(notebook)
    assert shown.pop("print(sys.executable)")[0].text.strip() == sys.executable
    check_outputs(shown)
    assert sorted(path.name for path in folder.iterdir()) == ["compare.ipynb", "train.py"], "nothing is left"


def test_the_committed_outputs_are_those_of_its_cells_and_name_no_machine() -> None:
    path = FOLDER / "compare.ipynb"
    notebook = nbformat.read(path, as_version=4)
    check_outputs(outputs(notebook))
    assert re.findall(r"/(?:home|root|tmp|work|Users)\b", path.read_text(encoding="utf-8")) == []
    assert path.stat().st_size < 100_000


def check_outputs(shown: dict[str, list[Any]]) -> None:
    """Check the answer's word, its picture and its frame, in a notebook whose second variant changes nothing."""
    *_progress, answer = shown["answer"]
    text, page = answer.data["text/plain"], answer.data["text/html"]
    assert re.search("momentum +▲ better +\\S+%? .* adopt\n", text.replace("\xa0", "")), text
    assert re.search("one-thread +≡ same +0.00.* same\n", text), text
    assert "▲ better" in page
    (source,) = re.findall('src="data:image/svg\\+xml;base64,([^"]+)"', page)
    picture = base64.b64decode(source).decode()
    assert "change of val_loss against the baseline" in picture
    assert ">momentum</text>" in picture
    (frame,) = shown['answer.to_frame().set_index(["variant", "metric"]).drop(columns="reason")']
    assert "<table" in frame.data["text/html"]
    assert re.search("one-thread +val_loss +6 +same +same", frame.data["text/plain"])
    (spec,) = shown["print(answer.spec)"]
    assert spec.text.startswith("ablation: compare-momentum-one-thread\n")
    (mistakes,) = shown["print(problem)"]
    assert 'hint: write it as a list: ["--momentum", "0.3"]' in mistakes.text
    assert "hint: write the unit: 0.5%" in mistakes.text


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[int, Any, Any]]:
    """A kernel, whose temporary files are in a folder of its own, while it runs an endless program."""
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), env=environment)
    try:
        number = int(manager.provisioner.pid)
        client.execute(ENDLESS)
        shown = ""
        while "rehearsal" not in shown:
            message = client.get_iopub_msg(timeout=LIMIT_S)
            assert message["msg_type"] != "error", message["content"]
            if message["msg_type"] == "update_display_data":
                shown = message["content"]["data"]["text/plain"]
        until(lambda: programs(descendants_of([number])))
        yield number, manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_an_interrupted_kernel_ends_its_trials_and_lives_on(kernel: tuple[int, Any, Any]) -> None:
    number, manager, client = kernel
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=LIMIT_S)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    until(lambda: not programs(descendants_of([number])))
    client.execute("1 + 1")
    assert client.get_shell_msg(timeout=LIMIT_S)["content"]["status"] == "ok"


def test_a_killed_kernel_leaves_neither_trials_nor_files(kernel: tuple[int, Any, Any], tmp_path: Path) -> None:
    number, _manager, _client = kernel
    family = descendants_of([number])
    assert list((tmp_path / "temporary").glob("ablate-*"))
    os.kill(number, signal.SIGKILL)
    until(lambda: not programs(family))
    until(lambda: not list((tmp_path / "temporary").glob("ablate-*")))
    assert not links_into(tmp_path)


def programs(pids: Iterable[int]) -> list[int]:
    """Return those of some processes that run the endless program."""
    running = []
    for pid in pids:
        with suppress(OSError):  # it has ended
            running += [pid] if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return running
