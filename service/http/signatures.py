"""Checks that reports and bundles are signed by keys that this service trusts."""

from collections.abc import Collection, Iterator

from experiments.errors import SpecProblem
from experiments.records.bundle import Bundle
from experiments.records.messages import BlockReport
from experiments.records.signing import Signature, signature_problem
from service.errors import Invalid
from service.http.block_wire import claimed_block
from service.store.access import keys
from service.store.session import Store

_SHOWN = 5


def checked_signature(store: Store, attempt_id: str, report: BlockReport) -> Signature:
    """Return the signature of the attempt's node. Raises Invalid unless it fits this report."""
    with store.read() as connection:
        key = keys.key_of_attempt(connection, attempt_id)
        refused = keys.refusals(connection, [key] if key else [])
    if key in refused:
        raise _unsigned_report(f"key {key} {refused[key]}")
    signature = report.signature
    if signature is None or signature.key != key:
        signer = "nobody" if signature is None else signature.key
        raise _unsigned_report(f"is by {signer}; the node that holds this attempt registered {key or 'no key'}")
    problem = signature_problem(signature, report.statement(claimed_block(store, attempt_id)))
    if problem is not None:
        raise _unsigned_report(problem)
    return signature


def _unsigned_report(problem: str) -> Invalid:
    return Invalid("the report is not signed by its node", problems=[_at("#/signature", problem)])


def check_bundle(store: Store, bundle: Bundle, *, trusted: Collection[str], unsigned: bool) -> None:
    """Check that all files of `bundle` are signed, by keys that are trusted here or in `trusted`. Raises Invalid."""
    with store.read() as connection:
        refused = keys.refusals(connection, bundle.keys - set(trusted))
    problems = [*_untrusted(refused), *_unused(bundle, trusted)]
    if bundle.unsigned and not unsigned:
        problems.append(_unsigned(bundle.unsigned))
    if problems:
        raise Invalid("the origin of these bundles is not proved; nothing was imported", problems=problems)


def _untrusted(refused: dict[str, str]) -> Iterator[SpecProblem]:
    for key, why in refused.items():
        hint = f"compare it with the key that `ablate exec` printed on the node, then import with --trust {key}"
        yield _at("query:trust", f"the bundles are signed by {key}, which {why}", hint)


def _unused(bundle: Bundle, trusted: Collection[str]) -> Iterator[SpecProblem]:
    for key in sorted(set(trusted) - bundle.keys):
        yield _at("query:trust", f"{key} signed nothing in these bundles; they are signed by {_listed(bundle.keys)}")


def _unsigned(files: Collection[str]) -> SpecProblem:
    hint = "if you know their origin, import with --unsigned; the verdict will mention it"
    return _at("query:unsigned", f"{len(files)} files are not signed: {_listed(files)}", hint)


def _listed(names: Collection[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return (", ".join(ordered[:_SHOWN]) or "nobody") + rest


def _at(pointer: str, detail: str, hint: str | None = None) -> SpecProblem:
    return SpecProblem(pointer=pointer, detail=detail, hint=hint)
