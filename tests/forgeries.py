"""Forgeries of a bundle: drawn edits by four kinds of forgers, and what catches each.

The bundle is like one of an H200, with two blocks and a broken attempt, signed by a key that these tests have. A forger
redoes every summary, digest and manifest that follows from an edit. `python -m tests.forgeries` writes the table of
docs/trust.md.
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import create_engine

from ablate.experiments.analysis.guards import block_problems, order_problems
from ablate.experiments.design.plan import seeds_of
from ablate.experiments.documents import seal
from ablate.experiments.errors import BundleError, PlanFileError
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_files import BLOCK, LOG, MANIFEST, PLAN, RECEIPT
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.circumstances import REGISTERED, EarlierAblation, Family, Registration
from ablate.experiments.records.plan_file import PlanFile, plan_file_text, read_plan_file, registered_file
from ablate.experiments.records.receipts import Receipt, summarise
from ablate.experiments.records.signing import Signer
from ablate.kernels.scan_switches import ScanFact
from ablate.model.measurements import Step
from ablate.service.store.access import keys
from ablate.service.store.tables import metadata, node_keys
from tests.bundles import broken_attempt, make_bundle, make_file, resealed, sealed
from tests.factories import NOTHING_HAPPENED, PAUSE_S

Files: TypeAlias = dict[str, bytes]
Values: TypeAlias = dict[str, Any]
Edit: TypeAlias = Callable[[random.Random, Files], Files]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/trust.md"
START, END = "<!-- forgeries: written by python -m tests.forgeries -->", "<!-- end of forgeries -->"
NODE, FRESH, OTHER = Signer(b"n" * 32), Signer(b"f" * 32), Signer(b"o" * 32)
FIRST, SECOND = "blocks/0001", "blocks/0002"
ARM = "ours"

CONTRADICTION, SIGNATURE, NOTHING = "contradiction", "signature", "**nothing**"
UNKNOWN_KEY, OTHER_NODE, REGISTRATION, GUARD = "unknown key", "key of another node", "registration", "guard"
HOLDERS: dict[str, Signer | None] = {"no key": None, "a fresh key": FRESH, "another node's key": OTHER, "own key": NODE}


def _values(files: Mapping[str, bytes], path: str) -> Values:
    return dict(json.loads(files[path]))


def _written(files: Files, path: str, **changes: Any) -> Files:
    return {**files, path: json.dumps({**_values(files, path), **changes}).encode()}


def _receipt_of(files: Files, arm: str = ARM, block: str = FIRST) -> str:
    return next(path for path in files if path.startswith(f"{block}/") and path.endswith(f"-{arm}/{RECEIPT}"))


def _attempt_of(files: Files) -> str:
    return next(path for path in files if path.startswith("attempts/"))


def _node_of(files: Files) -> str:
    return next(path for path in files if path.startswith("nodes/"))


def _with_receipt(files: Files, path: str, values: Values) -> Files:
    """Return the files with a receipt whose summary and digest follow from its other values."""
    if values["summary"] is not None:
        fresh = summarise(
            [Step.model_validate(step) for step in values["steps"]],
            flops_per_step=values["flops_per_step"],
            loss_val=values["summary"]["loss_val"],
            peak_flops=values["environment"]["peak_flops"],
        )
        values["summary"] = fresh.model_dump(mode="json")
    return {**files, path: seal(Receipt.model_validate(values)).model_dump_json().encode()}


def _put(values: Values, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        values = values[name]
    values[last] = value


def _of_receipt(path: str, draw: Callable[[random.Random, Any], Any], arm: str = ARM) -> Edit:
    """Return the edit that draws another value of one field."""

    def edit(rng: random.Random, files: Files) -> Files:
        where = _receipt_of(files, arm, rng.choice((FIRST, SECOND)))
        values = _values(files, where)
        old: Any = values
        for name in path.split("."):
            old = old[name]
        _put(values, path, draw(rng, old))
        return _with_receipt(files, where, values)

    return edit


def _of_steps(change: Callable[[random.Random, list[Values]], list[Values]], *more: str, arm: str = ARM) -> Edit:
    """Return the edit that changes the steps of a receipt; `more` are fields that get the number of timed steps."""

    def edit(rng: random.Random, files: Files) -> Files:
        where = _receipt_of(files, arm, rng.choice((FIRST, SECOND)))
        values = _values(files, where)
        values["steps"] = change(rng, values["steps"])
        for path in more:
            _put(values, path, sum(step["phase"] == "timed" for step in values["steps"]))
        return _with_receipt(files, where, values)

    return edit


def _timed(steps: list[Values], change: Callable[[Values], Values]) -> list[Values]:
    return [{**step, **change(step)} if step["phase"] == "timed" else step for step in steps]


def _faster(rng: random.Random, steps: list[Values], low: float = 0.9, high: float = 0.99) -> list[Values]:
    """Scale the timed steps and let every clock follow."""
    factor, gained, changed = rng.uniform(low, high), 0.0, []
    for step in steps:
        gain = step["seconds"] * (1 - factor) if step["phase"] == "timed" else 0.0
        clocks = {"began_s": step["began_s"] - gained, "ended_s": step["ended_s"] - gained - gain}
        changed.append({**step, "seconds": step["seconds"] - gain, **clocks})
        gained += gain
    return changed


def _relabelled(_rng: random.Random, steps: list[Values]) -> list[Values]:
    last = max(step["index"] for step in steps if step["phase"] == "warmup")
    return [{**step, "phase": "timed"} if step["index"] == last else step for step in steps]


def _without_slowest(rng: random.Random, steps: list[Values]) -> list[Values]:
    timed = sorted((s for s in steps if s["phase"] == "timed"), key=lambda step: float(step["seconds"]))
    gone = {step["index"] for step in timed[-rng.randint(1, 5) :]}
    return [step for step in steps if step["index"] not in gone]


def _exchanged(one: tuple[str, str], other: tuple[str, str], *parts: str) -> Edit:
    """Return the edit that exchanges parts of two receipts, named by (arm, block)."""

    def edit(_rng: random.Random, files: Files) -> Files:
        paths = [_receipt_of(files, *place) for place in (one, other)]
        first, second = (_values(files, path) for path in paths)
        for part in parts:
            first[part], second[part] = second[part], first[part]
        for path, values in zip(paths, (first, second), strict=True):
            files = _with_receipt(files, path, values)
        return files

    return edit


def _out_of_memory(_rng: random.Random, files: Files) -> Files:
    path = _receipt_of(files)
    changes = {"outcome": "oom", "failure_class": "oom", "summary": None}
    return _with_receipt(files, path, {**_values(files, path), **changes})


def _twice(_rng: random.Random, files: Files) -> Files:
    copies = {path.replace("/0002/", "/0003/"): data for path, data in files.items() if path.startswith(SECOND)}
    return _written({**files, **copies}, f"blocks/0003/{BLOCK}", index=2)


def _without(prefix: str) -> Edit:
    return lambda _rng, files: {path: data for path, data in files.items() if not path.startswith(prefix)}


def _renumbered(rng: random.Random, files: Files) -> Files:
    return _written(_without("attempts/")(rng, files), f"{SECOND}/{BLOCK}", attempt_no=1)


def _of_attempt(**draws: Callable[[random.Random], Any]) -> Edit:
    return lambda rng, files: _written(files, _attempt_of(files), **{name: draw(rng) for name, draw in draws.items()})


def _of_block(**draws: Callable[[random.Random], Any]) -> Edit:
    return lambda rng, files: _written(files, f"{FIRST}/{BLOCK}", **{name: draw(rng) for name, draw in draws.items()})


def _of_node(change: Callable[[Values], None]) -> Edit:
    def edit(_rng: random.Random, files: Files) -> Files:
        values = _values(files, _node_of(files))
        change(values)
        return {**files, _node_of(files): json.dumps(values).encode()}

    return edit


def _log(rng: random.Random, files: Files) -> Files:
    return {**files, _receipt_of(files).replace(RECEIPT, LOG): f"all was well {rng.random()}\n".encode()}


def _with_plan(files: Files, file: PlanFile) -> Files:
    return {**files, PLAN: plan_file_text(file).encode()}


def _other_rule(rng: random.Random, files: Files) -> Files:
    file = read_plan_file(files[PLAN])
    wider = file.spec_text.replace('"margin": "0.5%"', f'"margin": "{rng.randint(2, 9)}%"')
    return _with_plan(files, resealed(file, spec_text=wider))


def _other_labels(rng: random.Random, files: Files) -> Files:
    """Change what decides nothing, and the digest of the spec in the plan and in every receipt."""
    file = read_plan_file(files[PLAN])
    changed = resealed(file, spec_text=file.spec_text.replace('"kernels"', f'"p{rng.randint(0, 99)}"'))
    plan = changed.plan.model_copy(update={"spec_digest": changed.spec.digest})
    files = _with_plan(files, resealed(changed, plan=plan))
    for path in [path for path in files if path.endswith(RECEIPT)]:
        values = _values(files, path)
        values["digests"]["spec"] = plan.spec_digest
        files = _with_receipt(files, path, values)
    return files


def _other_seeds(rng: random.Random, files: Files) -> Files:
    """Change the drawn seeds in the plan and in every receipt."""
    file = read_plan_file(files[PLAN])
    forged = {seed: rng.randrange(2**31) for seed in seeds_of(file.plan)}
    blocks = tuple(block.model_copy(update={"seed": forged[block.seed]}) for block in file.plan.blocks)
    files = _with_plan(files, resealed(file, plan=file.plan.model_copy(update={"blocks": blocks})))
    for path in [path for path in files if path.endswith(RECEIPT)]:
        values = _values(files, path)
        values["seed"] = values["config"]["seed"] = forged[values["seed"]]
        files = _with_receipt(files, path, values)
    return files


def _fewer_askings(_rng: random.Random, files: Files) -> Files:
    file = read_plan_file(files[PLAN])
    own = Registration(registered_at="2026-11-19T11:00:00.000Z", family=Family())
    return _with_plan(files, resealed(file, registered=own))


def _other_order(_rng: random.Random, files: Files) -> Files:
    file = read_plan_file(files[PLAN])
    blocks = (file.plan.blocks[0].model_copy(update={"order": file.plan.blocks[0].order[::-1]}), *file.plan.blocks[1:])
    return _with_plan(files, resealed(file, plan=file.plan.model_copy(update={"blocks": blocks})))


def _scaled(low: float, high: float) -> Callable[[random.Random, Any], Any]:
    return lambda rng, old: type(old)(old * rng.uniform(low, high))


def _name(rng: random.Random, _old: Any = None) -> str:
    return f"other-{rng.randint(0, 999)}"


def _moment(rng: random.Random, _old: Any = None) -> str:
    return f"2026-11-{rng.randint(10, 22)}T12:00:00+00:00"


def _moved_clock(rng: random.Random, old: Any) -> str:
    return str(old).replace("2026-11-20", f"2026-11-{rng.randint(21, 28)}")


EDITS: dict[str, Edit] = {
    "timed steps of a variant shorter": _of_steps(
        lambda rng, steps: _timed(steps, lambda step: {"seconds": step["seconds"] * rng.uniform(0.9, 0.97)})
    ),
    "timed steps of a variant shorter, clocks too": _of_steps(_faster),
    "timed steps of the baseline longer, clocks too": _of_steps(
        lambda rng, steps: _faster(rng, steps, 1.001, 1.002), arm="baseline"
    ),
    "a warm-up step counted": _of_steps(_relabelled),
    "the slowest steps left out": _of_steps(_without_slowest),
    "the slowest steps left out, configuration too": _of_steps(_without_slowest, "config.steps.timed"),
    "tokens of a step": _of_steps(lambda _rng, steps: _timed(steps, lambda step: {"tokens": 2 * step["tokens"]})),
    "loss of a step": _of_steps(
        lambda rng, steps: _timed(steps, lambda step: {"loss": step["loss"] - rng.uniform(0.1, 0.5)})
    ),
    "gradient norms left out": _of_steps(lambda _rng, steps: _timed(steps, lambda _step: {"grad_norm": None})),
    "one more step": _of_steps(lambda _rng, steps: [*steps, {**steps[-1], "index": len(steps)}]),
    "device clocks higher": _of_steps(
        lambda rng, steps: _timed(steps, lambda step: {"clock_mhz": step["clock_mhz"] + rng.randint(10, 200)})
    ),
    "device clocks left out": _of_steps(lambda _rng, steps: _timed(steps, lambda _step: {"clock_mhz": None})),
    "validation loss": _of_receipt("summary.loss_val", _scaled(0.5, 0.99)),
    "peak of memory": _of_receipt("memory.peak_reserved_bytes", _scaled(0.5, 0.99)),
    "compile time": _of_receipt("compile_s", _scaled(0.5, 0.9)),
    "FLOPs of a step": _of_receipt("flops_per_step", _scaled(1.5, 2)),
    "number of parameters": _of_receipt("parameters", _scaled(0.5, 0.9)),
    "requested value of a gate": _of_receipt("gates.psiv_cache.requested", lambda _rng, old: not old),
    "observed value of a gate": _of_receipt("gates.psiv_cache.observed", lambda _rng, old: not old),
    "a gate that was not live": _of_receipt("gates.remat.live", lambda _rng, old: not old),
    "fact behind a gate": _of_receipt("facts", lambda _rng, old: {**old, ScanFact.LANE: "reference"}),
    "an unused fact": _of_receipt("facts", lambda rng, old: {**old, "unused": rng.random()}),
    "learning rate in the configuration": _of_receipt("config.optim.learning_rate", _scaled(1.1, 2)),
    "slow-downs of the device": _of_receipt("environment.throttle.sw_power_cap", _scaled(0.1, 0.9)),
    "driver's report of the device left out": _of_receipt("environment.throttle", lambda _rng, _old: None),
    "serial number of the device": _of_receipt("environment.device_serial", _name),
    "name of the device": _of_receipt("environment.device_name", _name),
    "version of torch": _of_receipt("environment.versions.torch", _name),
    "peak of the device": _of_receipt("environment.peak_flops", _scaled(1.1, 2)),
    "digest of the code": _of_receipt("digests.code", _name),
    "digest of the data": _of_receipt("digests.data", _name),
    "digest of the rule": _of_receipt("digests.rule", _name),
    "seed": _of_receipt("seed", lambda rng, old: old + rng.randint(1, 9)),
    "start of a trial": _of_receipt("started_at", _moved_clock),
    "wall time of a trial": _of_receipt("wall_s", _scaled(0.1, 0.5)),
    "a measurement as out of memory": _out_of_memory,
    "results of two blocks exchanged": _exchanged((ARM, FIRST), (ARM, SECOND), "steps", "summary", "memory"),
    "results of two arms exchanged": _exchanged((ARM, FIRST), ("other", FIRST), "steps", "summary", "memory"),
    "results of variant and baseline exchanged": _exchanged((ARM, FIRST), ("baseline", FIRST), "steps", "summary"),
    "ids of two blocks exchanged": _exchanged((ARM, FIRST), (ARM, SECOND), "ids"),
    "a block twice": _twice,
    "a block left out": _without(SECOND),
    "a trial left out": lambda _rng, files: _without(_receipt_of(files).removesuffix(RECEIPT))(_rng, files),
    "a broken attempt left out": _without("attempts/"),
    "a broken attempt left out, the rest renumbered": _renumbered,
    "cause of a broken attempt": _of_attempt(failure_class=lambda _rng: "oom"),
    "arm of a broken attempt": _of_attempt(arm=lambda rng: rng.choice(("baseline", ARM))),
    "message of a broken attempt": _of_attempt(message=_name),
    "block of a broken attempt": _of_attempt(index=lambda _rng: 3),
    "times of a broken attempt": _of_attempt(started_at=_moment, ended_at=_moment),
    "times of a block": _of_block(started_at=_moment, ended_at=_moment),
    "number of an attempt": _of_block(attempt_no=lambda rng: rng.randint(2, 9)),
    "id of an attempt": _of_block(attempt_id=lambda _rng: f"att_{'0' * 26}"),
    "a log": _log,
    "serial number of the node's device": _of_node(
        lambda node: _put(node, "registration.devices", [{**node["registration"]["devices"][0], "serial": "1"}])
    ),
    "code of the node": _of_node(lambda node: _put(node, "registration.code_digest", "sha256:other")),
    "missing parts of the node": _of_node(lambda node: _put(node, "registration.lacks", ["an isolation"])),
    "name of the node": _of_node(lambda node: _put(node, "name", "elsewhere")),
    "a wider margin in the rule": _other_rule,
    "labels of the spec, in every receipt": _other_labels,
    "running order of the plan": _other_order,
    "drawn seeds of the plan, in every receipt": _other_seeds,
    "earlier askings in the plan's registration": _fewer_askings,
    "registration of the plan left out": lambda _rng, files: _with_plan(
        files, resealed(read_plan_file(files[PLAN]), registered=None)
    ),
}
"""By what is changed. Each draws its own place and value."""


@cache
def original() -> Files:
    """Return a bundle with two blocks and one broken attempt before the second, signed by NODE."""
    changes: dict[str, Any] = {
        "workload__recipe": "hybrid-ref-h200",
        "baseline": {"gates": {"lane": "cuda", "schedule": "chunk_parallel"}},
        "variants": {ARM: {"gates": {"psiv_cache": True}}, "other": {"gates": {"chunk_size": 32}}},
        "placement": {"node_class": "h200", "devices": 1},
        "labels": {"purpose": "kernels"},
        "design__seeds": 2,
    }
    one = EarlierAblation(ablation="abl_1", name="before", state=REGISTERED, created_at="", asked=(ARM,), words={})
    registration = Registration(registered_at="2026-11-20T11:00:00.000Z", family=Family(earlier=(one,)))
    file = registered_file(make_file(to_register=True, **changes), [314159, 271828], registration)
    broken = broken_attempt(1, 1, FailureClass.INVALID_MEASUREMENT, arm="other")
    made = {"environment": {"throttle": {**NOTHING_HAPPENED, "sw_power_cap": 1.5}}, "compile_s": PAUSE_S}
    files = make_bundle(file, range(2), broken=[broken], **made)
    for number, path in enumerate(sorted(path for path in files if path.endswith(RECEIPT))):
        files = _with_receipt(files, path, _of_own_speed(_values(files, path), 1 - number / 50))
    return signed_by(files, NODE)


def _of_own_speed(values: Values, factor: float) -> Values:
    """Return a receipt whose timed steps, clocks and training time are scaled, so that no two trials are alike."""
    steps = _faster(random.Random(0), values["steps"], factor, factor)  # noqa: S311  # both bounds are equal
    spared_s = values["steps"][-1]["ended_s"] - steps[-1]["ended_s"]
    return {**values, "steps": steps, "training_s": values["training_s"] - spared_s}


def signed_by(files: Files, signer: Signer) -> Files:
    """Return the files as if the node of `signer` had written all of them."""
    files = dict(files)
    try:
        file = read_plan_file(files[PLAN])
    except PlanFileError:
        file = read_plan_file(original()[PLAN])
    node = _values(files, _node_of(files))
    node["registration"]["public_key"] = signer.key
    files[_node_of(files)] = json.dumps(node).encode()
    return sealed(file, files, signer)


def with_old_signature(files: Files) -> Files:
    """Return the files with a fitting manifest and its signature of before the edit, which nobody could make anew."""
    file = read_plan_file(files[PLAN])
    manifest = json.loads(sealed(file, files)[MANIFEST])
    signature = json.loads(original()[MANIFEST])["signature"]
    return {**files, MANIFEST: json.dumps({**manifest, "signature": signature}).encode()}


def forged(name: str, signer: Signer | None, seed: int = 0) -> Files:
    """Return the bundle after a drawn edit, handed in by a forger with this key."""
    files = EDITS[name](random.Random(f"{name} {seed}"), original())  # noqa: S311  # reproducible draws
    return with_old_signature(files) if signer is None else signed_by(files, signer)


def caught_by(files: Files) -> str:
    """Return what catches a bundle on its way to a verdict; the service trusts NODE for its node, OTHER for another."""
    try:
        bundle = open_bundle(files)
    except BundleError as error:
        signature = all("signature" in one.detail or "signed by" in one.detail for one in error.problems)
        return SIGNATURE if signature else CONTRADICTION
    return _refused(bundle) or _invalid(bundle) or NOTHING


def _refused(bundle: Bundle) -> str | None:
    engine = create_engine("sqlite://")
    metadata.create_all(engine, tables=[node_keys])
    with engine.begin() as connection:
        keys.trust(connection, "far-node", NODE.key, by="operator")
        keys.trust(connection, "laptop", OTHER.key, by="operator")
        reasons = [keys.refusal(connection, n.name, str(n.registration.public_key)) for n in bundle.nodes.values()]
    engine.dispose()
    if any(reasons):
        return UNKNOWN_KEY if "is not known here" in str(reasons) else OTHER_NODE
    return None if bundle.plan_file.digest == read_plan_file(original()[PLAN]).digest else REGISTRATION


def _invalid(bundle: Bundle) -> str | None:
    """Return the guard if the verdict calls a block invalid."""
    blocks = [[trial.receipt for trial in block.trials] for block in bundle.blocks]
    return GUARD if any(any(block_problems(own)) or any(order_problems(own)) for own in blocks) else None


def rows(seed: int = 0) -> dict[str, tuple[str, ...]]:
    """Return what catches each edit, by holder."""
    return {name: _row(name, seed) for name in EDITS}


def _row(name: str, seed: int) -> tuple[str, ...]:
    caught = dict.fromkeys(HOLDERS, "")
    for holder, signer in reversed(HOLDERS.items()):  # a contradiction does not depend on the key that signs it
        same = signer is not None and caught["own key"] == CONTRADICTION
        caught[holder] = CONTRADICTION if same else caught_by(forged(name, signer, seed))
    return tuple(caught.values())


def table() -> str:
    """Return the table of docs/trust.md: the edits that the same checks catch share a row."""
    lines = [f"| changed | {' | '.join(HOLDERS)} |", f"|---|{'---|' * len(HOLDERS)}"]
    edits: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows().items():
        edits.setdefault(row, []).append(name)
    lines += [f"| {'; '.join(names)} | {' | '.join(row)} |" for row, names in edits.items()]
    return "\n".join(lines) + "\n"


def published() -> str:
    """Return the table in docs/trust.md."""
    return PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0].strip() + "\n"


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n\n{table()}\n{END}{after}", encoding="utf-8")
