"""A service with something of everything that its pages show, through its own interface, for tests and pictures."""

import math
import random
from dataclasses import dataclass
from typing import Any

from sqlalchemy import update

from ablate.experiments.catalog.files import read_catalog_file
from ablate.experiments.design.load import load_values
from ablate.experiments.outcomes import Outcome
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.tables import ablations
from tests import views
from tests.api_stack import Api, receipts_of
from tests.factories import spec_values

STEPS = 40
BLOCK_S = 95.0
LOG = "".join(f"step {step}: loss {8 - 0.1 * step:.3f}\n" for step in range(200)) + "CUDA error: device lost\n"

SESSION = "night"
"""A session without a proposal."""

JUDGED: dict[str, Any] = {"ablation": "psiv-cache"}
FAILING: dict[str, Any] = {"ablation": "chunk-sizes", "question": "Which chunk size trains fastest?"}
RUNNING: dict[str, Any] = {"ablation": "loss-chunks", "limits": {"priority": 70}}
ELSEWHERE: dict[str, Any] = {
    "ablation": "waits-for-a-gpu",
    "workload__recipe": "hybrid-ref-h200",
    "placement": {"node_class": "h200"},
}


TRIED: dict[str, dict[str, str | None]] = {
    "hopper-1": {"peer": None, "attention=fa4": None, "attention=flex": None, "loss=quack": None},
    "hopper-2": {
        "peer": "refused: the official kernels are not installed",
        "attention=fa4": "refused: attention 'fa4' needs the package flash-attn-4: No module named 'flash_attn'",
        "attention=flex": "wrong: relative error 1.1; allowed: 0.02",
        "loss=quack": "crashed: TypeError: Context variable is not set",
    },
}
"""Results of back ends by node of class h100."""
VERSIONS = {
    "hopper-1": {"torch": "2.11.0", "driver": "580.95", "flash-attn-4": "4.0.0b36"},
    "hopper-2": {"torch": "2.11.0", "driver": "570.12"},
}


@dataclass(frozen=True, kw_only=True)
class WebWorld:
    """Ids of ablations, and the block that runs."""

    judged: str
    failing: str
    running: str
    waiting: str
    elsewhere: str
    """Waits for a node class that nobody has."""
    block: dict[str, Any]


def fill(api: Api) -> WebWorld:
    """Let ablations end, fail, run and wait, on nodes that work, are drained and are quarantined."""
    node = api.register("two-core")
    for name in ("gpu-7", "gpu-8"):
        api.register(name)
    for name, results in TRIED.items():
        api.register(name, "h100", devices=1, lanes={"cuda": None, **results}, versions=VERSIONS[name])
    act(api, "gpu-7", "drain")
    act(api, "gpu-8", "quarantine", reason="its worker says: device 0 still holds 1.2 GiB after its trainer ended")
    opened = api.client.post(f"/v1/sessions/{SESSION}:open", headers=api.admin, json=spec_values(**JUDGED))
    assert opened.status_code == 201, opened.text
    judged = api.submit(**JUDGED)["id"]
    while block := api.claim(node):
        report(api, block, node, changed=speeds(block["block_index"]), **JUDGED)
    settle(api)
    failing = api.submit(**FAILING)["id"]
    break_block(api, api.claimed(node))
    while block := api.claim(node):
        report(api, block, node, changed=troubles(block["block_index"]), **FAILING)
    settle(api)
    running = api.submit(**RUNNING)["id"]
    report(api, api.claimed(node), node, **RUNNING)
    block = api.claimed(node)
    beat(api, block, range(1, STEPS // 2))
    let_time_pass(api)
    waiting = api.submit(ablation="compiled")["id"]
    elsewhere = api.submit(**ELSEWHERE)["id"]
    return WebWorld(judged=judged, failing=failing, running=running, waiting=waiting, elsewhere=elsewhere, block=block)


def decide(api: Api) -> str:
    """Let the catalog's `demo` end with its three decisions; return its id."""
    demo = load_values(read_catalog_file("demo"), "application/yaml")
    demo["limits"]["priority"] = 100  # before what the world left waiting
    demo["design"]["seeds"] = [1, 2]  # as receipts_of plans them
    made, node = api.submit(**demo)["id"], api.register("demo-node")
    peaks = {"baseline": 87_660_000, "chunk-16": 71_510_000, "chunked-loss": 87_660_000, "psiv-on": 89_760_000}
    changed = {arm: {"peak_bytes": 2 * peak} for arm, peak in peaks.items()}
    for _ in range(demo["design"]["blocks"]["count"]):
        report(api, api.claimed(node), node, changed=changed, **demo)
    settle(api)
    return str(made)


def speeds(block_index: int) -> dict[str, dict[str, Any]]:
    """Return what a block measures: one variant is 6 % faster, the other 3 % slower, all with some noise.

    Each trial has a profiled step, those of the first block also over time.
    """
    chance = random.Random(block_index)  # noqa: S311  # not for secrets
    means = {"baseline": 5000.0, "psiv-on": 5300.0, "chunk-32": 4850.0}
    step: dict[str, Any] = {} if block_index else {"step_trace": views.trace(5)}
    return {
        arm: {
            "tokens_per_s": mean * (1 + chance.gauss(0, 0.004)),
            "step_kernels": (("aten::mm", 4, 2e6 / mean), ("aten::exp", 2, 50.0)),
            "kernel_facts": {"aten::mm": views.kernel_facts(128 if arm == "baseline" else 168, us=2e6 / mean)},
            **step,
        }
        for arm, mean in means.items()
    }


def let_time_pass(api: Api) -> None:
    """Let every block that is done have taken a while."""
    with api.store.write() as connection:
        connection.execute(update(ablations).values(settled_s=BLOCK_S * ablations.c.blocks_done))


def act(api: Api, node: str, verb: str, **body: str) -> None:
    """Let an operator stop a node or let it go on."""
    assert api.client.post(f"/v1/nodes/{node}:{verb}", headers=api.admin, **({"json": body} if body else {})).is_success


def report(api: Api, block: dict[str, Any], node: str, **changes: Any) -> None:
    """Hand a block in; `changes` as in receipts_of."""
    answer = api.attempt(block, "report", receipts=receipts_of(block, node, **changes))
    assert answer.status_code == 200, answer.text


def break_block(api: Api, block: dict[str, Any]) -> None:
    """Break a block by its second arm, which leaves a log."""
    trial = block["trials"][1]
    logs = [{"trial_id": trial["trial_id"], "offset": 0, "text": LOG}]
    why = {"failure_class": "preempted", "arm": trial["arm"], "message": "the node was wanted for something else"}
    assert api.attempt(block, "report", logs=logs, **why).status_code == 200


def troubles(block_index: int) -> dict[str, dict[str, Any]]:
    """Return what goes wrong in a block: an arm never fits, another times out once."""
    short = {"outcome": Outcome.OOM, "failure_class": "oom", "message": "139.2 GiB reserved of 139.8 GiB at step 0"}
    late = {"outcome": Outcome.TIMEOUT, "failure_class": "timeout", "message": "took longer than 20 min", "steps": ()}
    return {"chunk-32": {**short, "steps": ()}, **({"psiv-on": late} if block_index == 3 else {})}


def beat(api: Api, block: dict[str, Any], steps: range) -> None:
    """Tell how the first trial of a block goes, step by step."""
    trial = block["trials"][0]["trial_id"]
    for step in steps:
        progress = {"trial_id": trial, "steps_done": step, "steps_total": STEPS}
        progress |= {"step_s": BLOCK_S / len(block["trials"]) / STEPS}
        progress |= {"tokens_per_s": 5000 + 60 * math.sin(step), "loss": 4 + 4 * math.exp(-step / 9)}
        assert api.attempt(block, "heartbeat", progress=[progress]).status_code == 200


def settle(api: Api) -> None:
    """Let verdicts and reports be made."""
    handlers = OutboxHandlers(api.store)
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
        while handlers.run_due(kind):
            pass
