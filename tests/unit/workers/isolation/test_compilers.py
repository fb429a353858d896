"""Compilers in a trial: a process forked from the fork server, which has already imported torch's compiler."""

import subprocess
import sys

import pytest

from ablate.experiments.system.processes import OWN_PYTHON


@pytest.mark.parametrize("imported", ["", "import torch._inductor.config"], ids=["not imported", "imported before"])
def test_torch_compiles_in_the_process_of_the_trial(imported: str) -> None:
    code = (
        f"{imported}\n"
        "from ablate.workers.isolation.environment import compile_in_process\n"
        "compile_in_process()\n"
        "import torch._inductor.config as settings\n"
        "print(settings.compile_threads)"
    )
    ended = subprocess.run([sys.executable, *OWN_PYTHON[1:], "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "1\n"
