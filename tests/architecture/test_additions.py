"""What a reader adds is one entry: each test adds one in a fresh interpreter, and the product knows it everywhere.

A kind of workload is added in `tests/integration/fourth_kind.py`.
"""

import json
import subprocess
import sys

from tests.architecture.pages import ROOT

BEFORE = """
import importlib.abc, importlib.util, json, sys, types
CHANGES = json.loads(sys.stdin.readline())

class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name in CHANGES else None

    def get_source(self, name):
        return CHANGES[name]

    def is_package(self, name):
        return False

sys.meta_path.insert(0, Changed())
"""


def run_with(entries: dict[str, tuple[str, str]], code: str) -> None:
    """Run code with an entry after a place of the source of each module."""
    changes = {}
    for path, (place, entry) in entries.items():
        source = (ROOT / path).read_text(encoding="utf-8")
        assert source.count(place) == 1, place
        changes[f"ablate.{path.removesuffix('.py').replace('/', '.')}"] = source.replace(place, place + entry)
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + code],
        cwd=ROOT,
        input=json.dumps(changes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


GATE = """
    Gate(
        name="heads",
        question="Do fewer heads change the loss?",
        values=(4, 2),
        path="model.attention.num_heads",
        claim=Claim.CHANGES_MODEL,
        attest=lambda facts: facts.get("heads"),
        attested_by="fact heads",
        proof="nothing, it is a test",
        blind_to="everything",
    ),
"""
WITH_THE_GATE = """
from dataclasses import replace
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.experiments.design.listings import public_gates
from tests.factories import make_plan, make_spec

plan = make_plan(make_spec(variants={"few": {"gates": {"heads": 2}}}))
base, few = (arm.config for arm in plan.arms)
assert (base.model.attention.num_heads, few.model.attention.num_heads) == (4, 2)
assert few == replace(base, model=replace(base.model, attention=replace(base.model.attention, num_heads=2)))
assert [read_gates(plan.arms[1].gates, {"heads": ran})["heads"].live for ran in (2, 4)] == [True, False]
assert "heads" in {gate.name for gate in public_gates()}
try:
    make_spec(variants={"few": {"gates": {"heads": 3}}})
except ValueError as error:
    assert "allowed: 4, 2" in str(error), error
else:
    raise AssertionError("3 is no value of the gate")
"""


def test_a_gate_is_one_entry() -> None:
    run_with({"experiments/design/gates.py": ("_ENTRIES = (", GATE)}, WITH_THE_GATE)


BLOCK = """
    "L": BlockKind(
        name="one matrix",
        module="one_matrix:OneMatrix",
        parameters=lambda model: model.d_model**2,
        flops=lambda model, _seq_len: 2 * model.d_model**2,
    ),
"""
WITH_THE_BLOCK = """
import torch
from ablate.experiments.design.listings import public_recipes
from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.back_end_limits import check_back_ends
from ablate.model.config import HybridConfig, MeshConfig, TrainConfig, check_mesh
from ablate.model.counts import forward_flops_per_token, num_parameters
from ablate.model.errors import ConfigError
from ablate.model.hybrid import build
from ablate.model.layers.linear import Linear
from tests.factories import make_plan, make_spec

class OneMatrix(torch.nn.Module):
    def __init__(self, config, *, compute_dtype):
        super().__init__()
        self.out_proj = Linear(config.d_model, config.d_model, compute_dtype=compute_dtype)

    def forward(self, x_BSD, segment_ids_BS):
        return self.out_proj(x_BSD)

sys.modules["one_matrix"] = types.ModuleType("one_matrix")
sys.modules["one_matrix"].OneMatrix = OneMatrix
config = TrainConfig(model=HybridConfig(pattern="LFL"))
model = build(config)
assert num_parameters(config.model) == sum(weight.numel() for weight in model.parameters())
without = HybridConfig(pattern="F")
assert forward_flops_per_token(config.model, 8) - forward_flops_per_token(without, 8) == 4 * without.d_model**2
tokens = torch.zeros((1, 8), dtype=torch.int64)
assert model(tokens, tokens).shape == (1, 8, config.model.d_model)
plan = make_plan(make_spec(workload__overrides={"pattern": "LMFA"}))
assert plan.baseline.config.model.pattern == "LMFA"
assert "one matrix" in public_recipes()[0].sizes.layers
try:
    check_mesh(TrainConfig(model=HybridConfig(pattern="LF"), mesh=MeshConfig(devices=2, tensor=2)))
except ConfigError as error:
    assert "has block 'L', which devices cannot share" in str(error), error
else:
    raise AssertionError("devices cannot share the block")
for words, changes in (("cannot do", {"projections": "fp8"}), ("lane xla", {"scan": ScanSwitches(lane=Lane.XLA)})):
    try:
        check_back_ends(TrainConfig(model=HybridConfig(pattern="L", **changes)))
    except ConfigError as error:
        assert "block 'L' (one matrix)" in str(error) and words in str(error), error
    else:
        raise AssertionError(words)
"""


def test_a_block_letter_is_a_module_and_an_entry() -> None:
    run_with({"model/blocks.py": ("BLOCKS: dict[str, BlockKind] = {", BLOCK)}, WITH_THE_BLOCK)


FAILURE = '\n    MELTED = "melted", FailureRule(2, (3.0,), final_when=FinalWhen.ARM, outcome=Outcome.INVALID)\n'
WITH_THE_FAILURE = """
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.identity import BlockReport
from ablate.experiments.retries import Break, final_failures, may_retry, retry_wait_s
from tests.golden.freeze_openapi import document

melted = BlockReport.model_validate({"token": "-" * 22, "failure_class": "melted", "message": "m"}).failure_class
once = [Break(0, melted, "a")]
assert may_retry(once, once[-1]) and retry_wait_s(once, once[-1]) == 3.0
assert melted not in final_failures((), 0, "a") and melted in final_failures(once, 1, "a")
assert not may_retry(once * 2, once[-1])
assert melted.rule.outcome is Outcome.INVALID
assert "melted" in json.dumps(document())
"""


def test_a_failure_class_is_one_entry() -> None:
    place = '    USER_ERROR = "user_error", FailureRule(is_result=True)'
    run_with({"experiments/outcomes.py": (place, FAILURE)}, WITH_THE_FAILURE)
