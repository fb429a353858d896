"""`.venv-tpu/bin/python -m tests.xla.random_specs --count 10 --seed 1`: random specs through libtpu, without a TPU.

Each spec names two arms of class `tpu-v6e-compile`, drawn over sizes, patterns, attention and gates, and is run as an
operator would: planned, then executed as a bundle, each arm in two blocks. A spec is right when it is refused before
any work with a reason, or when both compilations of every arm say the same bytes and the bytes add up; one that the
compiler finds too large is right, too, when it says in which memory, and what was needed and there.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HEADS = {64: (1, 2, 4), 128: (1, 2, 4), 192: (1, 3), 256: (1, 2, 4), 384: (3, 6), 640: (5, 10)}
KERNELS = ("flash", "splash", "pallas_softcap")


def drawn(chance: random.Random, number: int) -> dict[str, Any]:
    """Return one random spec."""
    d_model = chance.choice(list(HEADS))
    rows = chance.choice([40, 64, 128, 200, 256, 512, 640, 1024])
    overrides = {
        "pattern": "".join(chance.choice("MAF") for _ in range(chance.randint(1, 4))),
        "d_model": d_model,
        "num_heads": chance.choice(HEADS[d_model]),
        "headdim": chance.choice([16, 32, 64]),
        "d_state": chance.choice([8, 16, 32, 64, 128]),
        "mimo_rank": chance.choice([1, 2, 4, 8]),
        "rope_fraction": chance.choice([0.5, 1.0]),
        "seq_len": rows,
        "micro_batch": chance.choice([1, 2, 3, 5, 8]),
        "vocab_size": chance.choice([300, 512, 1000, 4096]),
        "loss_chunk_tokens": chance.choice([16, 64, 100]),
        "softcap": chance.choice([0.0, 30.0]),
    }
    return {
        "ablation": f"random-{number}",
        "question": "Does the compiler say the same of the same step?",
        "workload": {"recipe": "hybrid-ref-v6e", "overrides": overrides},
        "baseline": {"gates": _gates(chance, overrides)},
        "variants": {"other": {"gates": _gates(chance, overrides)}},
        "design": {"seeds": [1], "blocks": {"count": 2}, "order_seed": number},
        "placement": {"node_class": "tpu-v6e-compile"},
        "limits": {"trial": "30m"},
        "verdict": {"primary": {"metric": "hbm_peak_gib", "margin": "1%"}},
    }


def _gates(chance: random.Random, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the gates of an arm; now and then such as do not fit the model or each other."""
    pattern, careless = str(overrides["pattern"]), chance.random() < 0.1
    gates: dict[str, Any] = {"dtype": chance.choice(["bfloat16", "bfloat16", "float32"])}
    if overrides["loss_chunk_tokens"] < overrides["seq_len"] * overrides["micro_batch"] or careless:
        gates["loss"] = chance.choice(["dense", "chunked"])
    if "A" in pattern or careless:
        gates["attention"] = chance.choice(["sdpa", *(KERNELS if overrides["seq_len"] % 128 == 0 or careless else ())])
    if "M" in pattern or careless:
        gates |= {"chunk_size": chance.choice([8, 16, 32, 64, 128]), "remat": chance.random() < 0.3}
        gates |= {"schedule": chance.choice(["chunk_parallel", "chunk_parallel", "sequential"])}
        gates |= {"psiv_cache": chance.random() < 0.3}
    if (gates.get("schedule") != "sequential" and not gates.get("psiv_cache")) or careless:
        gates["scan_layers"] = chance.random() < 0.3
    return gates


def ran(command: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tried(spec: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return (refused, right or WRONG, what was seen) of one spec."""
    given, plan, bundle = folder / "spec.json", folder / "plan.json", folder / "bundle"
    given.write_text(json.dumps(spec))
    console = "from ablate.experiments.system.console import main; main()"
    code, said = ran([sys.executable, "-c", console, "plan", str(given), "--out", str(plan)])
    if code:
        return ("refused" if "Traceback" not in said else "WRONG"), f"when planned: {last(said)}"
    code, said = ran([sys.executable, "-m", "ablate.workers.offline", str(plan), "--out", str(bundle)])
    if code == 5 and "Traceback" not in said:
        return "refused", f"by the rehearsal: {last(said)}"
    if code:
        return "WRONG", f"exit code {code}: {last(said)}"
    return judged([json.loads(path.read_text()) for path in sorted(bundle.rglob("receipt.json"))])


def last(said: str) -> str:
    """Return the line of an output that says why something was refused, else its last lines as one."""
    lines = said.strip().splitlines()
    why = [line for line in lines if line.startswith("refused:")]
    return " | ".join(why or lines[-4:])[-600:]


def judged(receipts: list[dict[str, Any]]) -> tuple[str, str]:
    """Return (right or WRONG, why) of the receipts of one spec: four, two an arm."""
    if len(receipts) != 4:
        return "WRONG", f"{len(receipts)} receipts in place of 4"
    arms: dict[str, list[dict[str, Any]]] = {}
    for receipt in receipts:
        arms.setdefault(receipt["arm"], []).append(receipt)
    seen = []
    for arm, (one, two) in sorted(arms.items()):
        first, second = said_by(one), said_by(two)
        if first != second:
            return "WRONG", f"{arm}: {first} and then {second}"
        if (lie := lies(one)) is not None:
            return "WRONG", f"{arm}: {lie}"
        seen.append(f"{arm}: {first}")
    return "right", "; ".join(seen)


def said_by(receipt: dict[str, Any]) -> str:
    """Return what the compiler said, durations left out."""
    said = receipt["compilation"] or {}
    kept = {name: said.get(name) for name in ("hlo_digest", "matmul_flops", "kernels", "hbm", "overflow")}
    return f"{receipt['outcome']} {json.dumps(kept, sort_keys=True)}"


def lies(receipt: dict[str, Any]) -> str | None:
    """Return what cannot be true of a receipt, or None."""
    said, attention = receipt["compilation"] or {}, receipt["config"]["model"]["attention"]["backend"]
    layers = receipt["config"]["model"]["pattern"].count("A")
    if bool(said.get("kernels")) != (layers > 0 and attention in KERNELS):
        return f"attention {attention} in {layers} layers, kernels {said.get('kernels')}"
    hbm = said.get("hbm")
    if hbm is None:
        over = said.get("overflow") or {}
        exceeded = receipt["outcome"] == "oom" and over.get("needed_bytes", 0) > over.get("available_bytes", 0) > 0
        return None if exceeded else f"neither memory nor too little of it: {receipt['outcome']}, {receipt['message']}"
    if hbm["peak_bytes"] != hbm["argument_bytes"] + hbm["output_bytes"] - hbm["alias_bytes"] + hbm["temp_bytes"]:
        return f"the bytes do not add up: {hbm}"
    if hbm["argument_bytes"] < 12 * receipt["parameters"]:
        return f"{receipt['parameters']} parameters and their moments do not fit into {hbm['argument_bytes']} bytes"
    return None


def main() -> int:
    """Try specs; return 1 when one of them was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    counts = {"right": 0, "refused": 0, "WRONG": 0}
    for number in range(asked.seed, asked.seed + asked.count):
        spec, began = drawn(random.Random(number), number), time.monotonic()  # noqa: S311 - random cases, no secret
        with tempfile.TemporaryDirectory(prefix="ablate-random-") as folder:
            verdict, why = tried(spec, Path(folder))
        counts[verdict] += 1
        shown = {"overrides": spec["workload"]["overrides"], "baseline": spec["baseline"], **spec["variants"]}
        say(f"{number} {verdict} in {time.monotonic() - began:.0f} s: {why}\n  {json.dumps(shown)}")
    say(json.dumps(counts))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
