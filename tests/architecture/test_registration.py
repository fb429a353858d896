"""What is declared in one file and has to be known in another: a step that was forgotten fails here."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest
from pydantic import BaseModel

from ablate.experiments.design import recipes
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.reporting.pictures import registry
from ablate.service import routes
from ablate.service.client.settings import ClientSettings
from ablate.service.settings import ServiceSettings
from ablate.workers.settings import Settings
from tests.architecture.pages import PACKAGES, ROOT, SOURCES, nodes
from tests.architecture.test_pages import DOCUMENTS
from tests.architecture.test_shape import OPERATIONS
from tests.factories import make_plan, make_receipt
from tests.golden.freeze_openapi import document

NOT_FOR_THE_CLIENT = {"/v1/schema/ablation.json"}
"""`ablate catalog schema` writes it without a service."""


@pytest.mark.parametrize("settings", [ServiceSettings, ClientSettings, Settings], ids=lambda kind: kind.__module__)
def test_every_setting_is_read(settings: type[BaseModel]) -> None:
    package = settings.__module__.split(".")[1]
    sources = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == package]
    read = {node.attr for path in sources for node in nodes(path) if isinstance(node, ast.Attribute)}
    by_name = {f"{name}_token" for name in ("admin", "worker")} if settings is ServiceSettings else set()
    assert set(settings.model_fields) - read - by_name == set()


def test_every_failure_class_is_told_by_somebody() -> None:
    tables = {ROOT / f"experiments/{name}.py" for name in ("outcomes", "retries")}
    names = {
        name
        for path in SOURCES
        if path not in tables
        for name in re.findall(r"FailureClass\.([A-Z_]+)(?!: Outcome|\w)", path.read_text(encoding="utf-8"))
    }
    assert {failure for failure in FailureClass if failure.name not in names} == set()


def test_every_route_is_served() -> None:
    names = [module.name for module in pkgutil.iter_modules(routes.__path__)]
    routers = [importlib.import_module(f"ablate.service.routes.{name}").router for name in names]
    declared = {route.operation_id for router in routers for route in router.routes}
    served = {operation["operationId"] for item in document()["paths"].values() for operation in item.values()}
    assert declared == served


def test_the_python_client_speaks_every_route_for_people() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "service/client").glob("*.py"))
    for_people = {
        path
        for path, item in document()["paths"].items()
        for operation in item.values()
        if not {"workers", "health"} & set(operation["tags"])
    }
    assert {path for path in for_people if f'"{path}"' not in text} == NOT_FOR_THE_CLIENT


def test_every_picture_is_shown() -> None:
    modules = [
        importlib.import_module(f"ablate.experiments.reporting.pictures.{path.stem}")
        for path in (ROOT / "experiments/reporting/pictures").glob("*.py")
    ]
    drawn = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and inspect.signature(function) == inspect.signature(registry.DRAWN[0])  # a view's picture, or None
    }
    assert drawn == set(registry.DRAWN)


def test_every_recipe_can_be_asked_for() -> None:
    made = [value for value in vars(recipes).values() if isinstance(value, recipes.Recipe)]
    assert {recipe.name for recipe in made} == set(recipes.RECIPES)


NEW_MEASUREMENT = """
    energy_j: Annotated[
        OmitNone[float],
        Metric("energy", "energy of training", "J"),
    ] = None
"""
READ_IT = """
import sys, types
source = sys.stdin.read()
module = types.ModuleType("ablate.model.measurements")
sys.modules["ablate.model.measurements"] = module
exec(compile(source, "measurements.py", "exec"), module.__dict__)

from ablate.experiments import documents
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.records.receipts import Receipt, read_metric
from ablate.model.training.train import TrainResult
from tests.factories import make_plan, make_receipt
from ablate.workers.trials.result import TrialResult

assert "energy_j" in TrainResult.model_fields
result = TrialResult.partial(energy_j=7.5)
assert TrialResult.model_validate_json(result.model_dump_json()).energy_j == 7.5
old = make_receipt(make_plan(), 0, "baseline")
new = documents.seal(old.model_copy(update={"energy_j": result.energy_j}))
assert read_metric(METRICS["energy"], Receipt.model_validate_json(new.model_dump_json())) == 7.5
assert read_metric(METRICS["energy"], old) is None
print(old.digest)
"""


def test_one_declaration_takes_a_measurement_to_result_receipt_and_metrics() -> None:
    """A receipt without the new measurement keeps the digest that it had before."""
    source = (ROOT / "model/measurements.py").read_text(encoding="utf-8")
    declared = source.replace("    parameters: int\n", f"{NEW_MEASUREMENT}    parameters: int\n", 1)
    done = subprocess.run(
        [sys.executable, "-c", READ_IT], cwd=ROOT, input=declared, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == make_receipt(make_plan(), 0, "baseline").digest


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_reference_and_a_test(name: str) -> None:
    assert (ROOT / "kernels" / name / "reference.py").is_file()
    assert (ROOT / "tests" / "kernels" / f"test_{name}.py").is_file()


QUOTED = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs)/[\w./-]+\.\w+)(?:::(\w+))?`")


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "docs/LOG.md"])
def test_files_and_tests_that_a_page_names_exist(name: str) -> None:
    named = QUOTED.findall((ROOT / name).read_text(encoding="utf-8"))
    assert [path for path, _ in named if not (ROOT / path).is_file()] == []
    assert [test for path, test in named if test and f"def {test}(" not in (ROOT / path).read_text()] == []
