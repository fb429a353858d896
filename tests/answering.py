"""A worker and a background process in a thread of the test: every block is reported, every ablation judged."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ablate.experiments.records.receipts import seal
from ablate.kernels.backends import NODE_CLASSES
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.blocks.block_wire import plan_of
from tests.api_stack import Api
from tests.factories import GIB, make_receipt
from tests.program_receipts import program_receipt

EXACT: dict[str, Any] = {
    "design__seeds": [1],
    "design__blocks": {"count": 2},
    "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}},
    "variants": {"psiv-on": {"gates": {"psiv_cache": True}}},
}
"""The factories' spec with one variant and a metric without noise, which has its word on any machine."""
LESS_MEMORY = {"psiv-on": {"peak_bytes": GIB // 2}}
"""What makes that variant better."""


LANES: dict[str, None] = {"command": None, **{lane.value: None for lane in NODE_CLASSES["cpu"].lanes}}
"""Commands and every lane of class cpu run on the node that answers."""


@contextmanager
def answering(api: Api, changed: dict[str, dict[str, Any]] | None = None, *, reports: bool = False) -> Iterator[None]:
    """Answer every ablation that waits, with receipts that are `changed` by arm as in make_receipt, and with `reports`.

    When that fails, everything is cancelled, so that nobody waits for ever, and the failure is raised in the end.
    """
    kinds = [OutboxKind.JUDGE, *([OutboxKind.REPORT] if reports else [])]
    over, node, failures = threading.Event(), api.register("answerer", lanes=LANES), list[BaseException]()

    def answer() -> None:
        handlers = OutboxHandlers(api.store)
        try:
            while not over.wait(0.05):
                while block := api.claim(node):
                    report(api, block, node, changed or {})
                while any(handlers.run_due(kind) for kind in kinds):
                    pass
        except BaseException as failure:
            failures.append(failure)
            for row in api.get("/v1/ablations?limit=500").json()["items"]:
                api.cancel(row["id"])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if failures:
            raise failures[0]


def report(api: Api, block: dict[str, Any], node: str, changed: dict[str, dict[str, Any]]) -> None:
    """Report a claimed block of whatever spec."""
    ablation = block["ablation_id"]
    plan = plan_of(api.store, ablation)
    own = {"ablation": ablation, "block": block["block_id"], "attempt": block["attempt_id"], "node": node}
    receipts = []
    for trial in block["trials"]:
        ids, changes = {**own, "trial": trial["trial_id"]}, changed.get(trial["arm"], {})
        if plan.arms[0].config.own_process:
            receipt = program_receipt(plan, plan.blocks[block["block_index"]], trial["arm"], reported={}, **changes)
            receipt = seal({**receipt.model_dump(), "ids": receipt.ids.model_copy(update=ids)})
        else:
            receipt = make_receipt(plan, block["block_index"], trial["arm"], ids=ids, **changes)
        receipts.append(receipt.model_dump(mode="json"))
    answer = api.attempt(block, "report", receipts=receipts)
    assert answer.status_code == 200, answer.text
