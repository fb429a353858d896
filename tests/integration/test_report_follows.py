"""A report follows its verdict by some seconds: who asks in between waits for it, and nobody for what never comes."""

import threading
from collections.abc import Iterator

import pytest

from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.client.api import Client, Refused
from ablate.service.lifecycle import OutboxKind
from tests.answering import EXACT
from tests.api_stack import ADMIN, Api, api_fixture, served_api

api = api_fixture(served_api, kinds=["sqlite"])


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with Client(str(api.client.base_url), ADMIN) as made:
        yield made


def refusal(client: Client, ablation: str, patience_s: float) -> str:
    with pytest.raises(Refused) as refused:
        client.ablations.report(ablation, patience_s=patience_s)
    return str(refused.value)


def test_a_report_is_waited_for_once_there_is_a_verdict(api: Api, client: Client) -> None:
    ablation = api.submit(**EXACT)["id"]
    assert "when every block has ended" in refusal(client, ablation, 60)
    api.finish(api.register(), **EXACT)
    assert "its report is being written" in refusal(client, ablation, 60), "without a verdict nobody waits"
    handlers = OutboxHandlers(api.store)
    while handlers.run_due(OutboxKind.JUDGE):
        pass
    assert "its report is being written" in refusal(client, ablation, 0)
    begin = threading.Timer(0.3, lambda: handlers.run_due(OutboxKind.REPORT))
    begin.start()
    assert ablation in client.ablations.report(ablation)
    begin.join()


def test_nobody_waits_for_the_report_of_a_cancelled_ablation(api: Api, client: Client) -> None:
    ablation = api.submit(**EXACT)["id"]
    api.cancel(ablation)
    assert "was cancelled and has no report" in refusal(client, ablation, 60)
