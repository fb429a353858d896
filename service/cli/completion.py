"""What the shell offers for arguments: names of the catalog, of gates, and of what the service knows.

Nothing is offered, and nothing is said, when the service cannot be asked: a shell has no place for it. Every command
imports this module, so each list is imported where it is offered.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from experiments.block_numbers import block_number
from experiments.errors import ExperimentError

if TYPE_CHECKING:
    from service.client.api import Client

LATEST = "latest"
_MOST = 50
"""Newest ablations among which names are looked for."""


def catalog(incomplete: str) -> list[str]:
    """Offer the specs of the catalog; where none fits, the shell offers files."""
    from experiments.design.spec_files import catalog_names

    return _beginning(catalog_names(), incomplete)


def gates(incomplete: str) -> list[str]:
    """Offer gates."""
    from experiments.design.gates import GATES

    return _beginning(GATES, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Offer recipes."""
    from experiments.design.recipes import RECIPES

    return _beginning(RECIPES, incomplete)


def metrics(incomplete: str) -> list[str]:
    """Offer metrics."""
    from experiments.design.metrics import METRICS

    return _beginning(METRICS, incomplete)


def node_classes(incomplete: str) -> list[str]:
    """Offer node classes."""
    from kernels.backends import NODE_CLASSES

    return _beginning(NODE_CLASSES, incomplete)


def ablations(incomplete: str) -> list[str]:
    """Offer the names of the newest ablations and `latest`; their ids where an id was begun."""
    return _asked(lambda client: _ablations(client, incomplete), incomplete)


def trials(incomplete: str) -> list[str]:
    """Offer ABLATION/BLOCK/ARM, one part after the other."""
    return _asked(lambda client: _trials(client, incomplete), incomplete)


def nodes(incomplete: str) -> list[str]:
    """Offer the nodes that have registered."""
    return _asked(lambda client: (row.name for row in client.nodes()), incomplete)


def tokens(incomplete: str) -> list[str]:
    """Offer the names of tokens that count."""
    return _asked(lambda client: (row.name for row in client.tokens.list().items if row.revoked_at is None), incomplete)


def keys(incomplete: str) -> list[str]:
    """Offer the keys of nodes that were not revoked."""
    return _asked(lambda client: (row.key for row in client.keys.list().items if row.revoked_at is None), incomplete)


def _ablations(client: "Client", incomplete: str) -> Iterator[str]:
    rows = list(islice(client.ablations.list(), _MOST))
    if incomplete.startswith("abl_"):
        return (row.id for row in rows)
    return iter(dict.fromkeys([LATEST, *(row.name for row in rows)]))


def _trials(client: "Client", incomplete: str) -> Iterator[str]:
    ablation, *rest = incomplete.split("/")
    if not rest:
        return (f"{name}/" for name in _ablations(client, incomplete))
    rows = client.ablations.trials(client.ablations.id_of(ablation))
    if len(rest) == 1:
        return (f"{ablation}/{number}/" for number in dict.fromkeys(block_number(row.block_index) for row in rows))
    return (f"{ablation}/{rest[0]}/{arm}" for arm in dict.fromkeys(row.arm for row in rows))


def _asked(ask: Callable[["Client"], Iterable[str]], incomplete: str) -> list[str]:
    from service.client.api import Client, ClientError

    try:
        with Client() as client:
            return _beginning(ask(client), incomplete)
    except (ClientError, ExperimentError, OSError):
        return []


def _beginning(offered: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in offered if name.startswith(incomplete)]
