"""Shell completion of arguments: names from the catalog, the registries and the service.

If the service cannot be reached, the completion is empty: a shell cannot show the error. Every command imports this
module, so each function imports its own list.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from ablate.experiments.block_numbers import block_index, block_number
from ablate.experiments.errors import ExperimentError

if TYPE_CHECKING:
    from ablate.service.client.api import Client

LATEST = "latest"
_NEWEST = 50
"""Number of newest ablations whose names are offered."""


def catalog(incomplete: str) -> list[str]:
    """Offer the catalog's specs. If none matches, the shell offers files."""
    from ablate.experiments.catalog.files import catalog_names

    return _matches(catalog_names(), incomplete)


def gates(incomplete: str) -> list[str]:
    """Offer gates."""
    from ablate.experiments.design.gates import GATES

    return _matches(GATES, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Offer recipes."""
    from ablate.experiments.design.packages import recipe_names

    return _matches(recipe_names(), incomplete)


def metrics(incomplete: str) -> list[str]:
    """Offer metrics."""
    from ablate.experiments.design.metrics import METRICS

    return _matches(METRICS, incomplete)


def node_classes(incomplete: str) -> list[str]:
    """Offer node classes."""
    from ablate.experiments.node_classes import NODE_CLASSES

    return _matches(NODE_CLASSES, incomplete)


def ablations(incomplete: str) -> list[str]:
    """Offer `latest` and the names of the newest ablations, or their ids after "abl_"."""
    return _from_service(lambda client: _ablations(client, incomplete), incomplete)


def trials(incomplete: str) -> list[str]:
    """Offer ABLATION/BLOCK/ARM, one part after the other."""
    return _from_service(lambda client: _trials(client, incomplete), incomplete)


def places(incomplete: str) -> list[str]:
    """Offer ablations, and after a slash their blocks and arms."""
    return trials(incomplete) if "/" in incomplete else ablations(incomplete)


def nodes(incomplete: str) -> list[str]:
    """Offer registered nodes."""
    return _from_service(lambda client: (row.name for row in client.nodes()), incomplete)


def tokens(incomplete: str) -> list[str]:
    """Offer the names of valid tokens."""
    return _from_service(
        lambda client: (row.name for row in client.tokens.list().items if row.revoked_at is None), incomplete
    )


def sessions(incomplete: str) -> list[str]:
    """Offer the names of sessions."""
    return _from_service(lambda client: (row.name for row in client.sessions.list()), incomplete)


def pages(incomplete: str) -> list[str]:
    """Offer what has a page of its own: ablations and sessions."""
    return [*ablations(incomplete), *sessions(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Offer the keys of nodes that are not revoked."""
    return _from_service(
        lambda client: (row.key for row in client.keys.list().items if row.revoked_at is None), incomplete
    )


def _ablations(client: "Client", incomplete: str) -> Iterator[str]:
    rows = list(islice(client.ablations.list(), _NEWEST))
    if incomplete.startswith("abl_"):
        return (row.id for row in rows)
    return iter(dict.fromkeys([LATEST, *(row.name for row in rows)]))


def _trials(client: "Client", incomplete: str) -> Iterator[str]:
    ablation, *rest = incomplete.split("/")
    if not rest:
        return (f"{name}/" for name in _ablations(client, incomplete))
    name = client.ablations.id_of(ablation)
    if len(rest) == 1:
        return (
            f"{ablation}/{number}/" for number in map(block_number, range(client.ablations.get(name).blocks.planned))
        )
    index = block_index(int(rest[0])) if re.fullmatch("[1-9][0-9]{0,8}", rest[0]) else 0
    block = takewhile(lambda row: row.block_index == index, client.ablations.trials(name, from_block=index))
    return (f"{ablation}/{rest[0]}/{row.arm}" for row in block)


def _from_service(request: Callable[["Client"], Iterable[str]], incomplete: str) -> list[str]:
    from ablate.service.client.api import Client, ClientError

    try:
        with Client() as client:
            return _matches(request(client), incomplete)
    except (ClientError, ExperimentError, OSError):
        return []


def _matches(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
