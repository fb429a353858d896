"""The example package in an environment of its own: from its installation over the page of gates to a verdict."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ablate.experiments.records.receipt_check import verify
from tests.acceptance.test_own_code import answer
from tests.acceptance.test_stack import ROOT, Home
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "docs" / "examples" / "own_recipe"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example beside this program, in an environment that sees this one's packages."""
    folder = tmp_path_factory.mktemp("environment")
    source = shutil.copytree(EXAMPLE, folder / "source")
    venv.create(folder / "own", with_pip=False)
    interpreter = folder / "own" / "bin" / "python"
    (site,) = (folder / "own").glob("lib/python*/site-packages")
    site.joinpath("ablate.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n", encoding="utf-8")
    install = ["-m", "pip", "--python", str(interpreter), "install", "--no-deps", "--no-build-isolation", str(source)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=LIMIT_S)
    return interpreter


@pytest.fixture
def home(tmp_path: Path, python: Path) -> Iterator[Home]:
    program = "from ablate.experiments.system.console import main; main()"
    made = Home(tmp_path / "home", (str(python), "-c", program))
    made.environment |= {"ABLATE_CONTROL_EVERY": "0", "PYTHONPATH": ""}
    yield made
    made.run("down")


def test_a_package_brings_its_recipe_from_installation_to_a_verdict(home: Home, tmp_path: Path) -> None:
    values = yaml.safe_load((EXAMPLE / "spec.yaml").read_text(encoding="utf-8"))
    del values["variants"]["foreach"]
    values["placement"]["max_foreign_load"] = "99%"  # other tests run meanwhile
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(values), encoding="utf-8")
    assert "own-mlp" in home.run("catalog", "recipes").stdout
    home.up()
    gates = answer(home, "catalog", "gates")
    assert {gate["name"] for gate in gates if "own-mlp" in gate["recipes"]} == {"activation", "foreach"}
    ran = home.run("run", str(spec))
    assert ran.returncode in range(5), ran.stdout + ran.stderr
    verdict = answer(home, "verdict", "own-mlp-gates")
    assert {one["gates_live"] for one in verdict["variants"]} == {"12/12"}, verdict
    receipts = json.loads(home.run("offline", "receipts", "own-mlp-gates").stdout)
    assert len(receipts) == 12
    for receipt in receipts:
        assert verify({name: value for name, value in receipt.items() if name != "signature"}) == []
        assert receipt["outcome"] == "measured"
        assert receipt["gates"]["activation"]["how"] == "attested by the program"
        assert receipt["flops_per_step"] > 0
        assert {step["tokens"] for step in receipt["steps"]} == {256}
    page = home.run("history", "own-mlp")
    assert page.returncode == 0, page.stderr
