"""The page that compares nodes: which lanes and back ends work on which, why others do not, and the versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ablate.experiments.design.gates import BACK_ENDS
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Table, Tone, row, texts
from ablate.kernels.backends import Lane
from ablate.service.schemas.nodes import CalibrationPublic, NodePublic
from ablate.service.web.overview import NodeLine, node_line

_TRIED = (*map(str, Lane), *BACK_ENDS)
_ENDS = {
    "refused": Cell(text="refused", sign="○", tone=Tone.OPEN),
    "wrong": Cell(text="wrong", sign="✗", tone=Tone.BROKEN),
    "crashed": Cell(text="crashes", sign="✗", tone=Tone.BROKEN),
}
_WORKS = Cell(text="works", sign="✓", tone=Tone.GOOD)
_FAILS = Cell(text="fails", sign="✗", tone=Tone.BROKEN)
"""Of a worker of an earlier version, whose reason does not begin with the kind of its failure."""
_MOST_DIFFERING = 6
"""Packages that the note below the versions names."""


@dataclass(frozen=True, kw_only=True)
class ClassPage:
    """The nodes of one class."""

    node_class: str
    results: Table
    """Nodes by lanes and back ends; without rows if none was tried."""
    failures: Table
    """Without rows if everything works."""
    versions: Table


def node_lines(
    nodes: Sequence[NodePublic], noise: Sequence[CalibrationPublic], loads: Mapping[str, float]
) -> tuple[NodeLine, ...]:
    """Return the nodes with their load and running work; `loads` are the shares of time that others took."""
    return tuple(replace(node_line(node, noise), load=_load(node, loads.get(node.id))) for node in nodes)


def _load(node: NodePublic, others: float | None) -> str:
    busy = len(node.devices) - node.devices_free
    text = f"{busy:,} of {wording.counted(len(node.devices), 'device')} busy"
    cores = "" if node.cores is None else wording.counted(node.cores, "core")
    if others is None:
        return "; ".join(filter(None, [text, cores]))
    taken = f"{wording.plain_percent(100 * others)} of the CPU time"
    if node.cores is not None:
        taken = f"{wording.fixed(others * node.cores, 1)} of {cores}"
    return f"{text}; other processes took {taken} during its last trial"


def nodes_page(nodes: Sequence[NodePublic]) -> tuple[ClassPage, ...]:
    """Compare the nodes of each class that has any."""
    ordered = sorted(nodes, key=lambda node: (node.node_class, node.name))
    return tuple(_class_page(name, list(own)) for name, own in groupby(ordered, key=lambda node: node.node_class))


def _class_page(node_class: str, nodes: Sequence[NodePublic]) -> ClassPage:
    tried = [name for name in _TRIED if any(name in (node.lanes or {}) for node in nodes)]
    rows = tuple(row(node.name, node.health, *(_result(node, name) for name in tried)) for node in nodes if tried)
    return ClassPage(
        node_class=node_class,
        results=Table(title=f"Lanes and back ends on {node_class}", columns=texts("node", "health", *tried), rows=rows),
        failures=_failures(node_class, tried, nodes),
        versions=_versions(node_class, nodes),
    )


def _result(node: NodePublic, name: str) -> Cell:
    results = node.lanes or {}
    return ending(results[name]) if name in results else Cell(text="not tried", tone=Tone.NEUTRAL)


def ending(problem: str | None) -> Cell:
    """Return how a small problem of a lane or a back end ended, by the reason that the worker registered."""
    return _WORKS if problem is None else _ENDS.get(problem.partition(": ")[0], _FAILS)


def _failures(node_class: str, tried: Sequence[str], nodes: Sequence[NodePublic]) -> Table:
    """Return a row for each different reason, with the nodes that gave it."""
    rows = []
    for name in tried:
        reasons: dict[str, list[str]] = {}
        for node in nodes:
            problem = (node.lanes or {}).get(name)
            if problem is not None:
                reasons.setdefault(problem, []).append(node.name)
        for problem, names in reasons.items():
            kind, _colon, reason = problem.partition(": ")
            rows.append(row(name, ending(problem), ", ".join(names), reason if kind in _ENDS else problem))
    columns = texts("lane or back end", "result", "nodes", "reason")
    return Table(title=f"What does not work on {node_class}", columns=columns, rows=tuple(rows))


def _versions(node_class: str, nodes: Sequence[NodePublic]) -> Table:
    names = sorted({name for node in nodes for name in node.versions})
    differing = [name for name in names if len({node.versions.get(name) for node in nodes}) > 1]
    note = f"Different between these nodes: {_listed(differing)}." if differing else ""
    rows = tuple(row(node.name, *_versions_of(node.versions, names)) for node in nodes)
    return Table(title=f"Versions on {node_class}", columns=texts("node", *names), rows=rows, note=note)


def _versions_of(versions: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [versions.get(name, "none") for name in names]


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_DIFFERING
    return wording.listed([*names[:_MOST_DIFFERING], *([f"{more} more"] if more > 0 else [])])
