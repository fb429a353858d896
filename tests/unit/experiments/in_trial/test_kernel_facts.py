"""Launches and matrix products of kernels: from torch's events, through the program's messages, to a receipt."""

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ablate.experiments.in_trial import ablate_profile
from ablate.model.measurements import KernelFacts
from ablate.workers.commands.ranks import ProgramMarks
from tests.programs import program_config

H200 = SimpleNamespace(
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472,
    multi_processor_count=132,
)
TYPES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "c10::Float8_e4m3fn": 1}


def event(name: str, ns: int, *, device: str = "CUDA", metadata: str | None = "", **values: Any) -> Any:
    known = {
        "name": name,
        "duration_ns": ns,
        "device_type": f"DeviceType.{device}",
        "device_index": 0,
        "correlation_id": 0,
        "linked_correlation_id": 0,
        "shapes": [],
        "dtypes": [],
        **values,
    }
    if metadata is not None:
        known["metadata_json"] = metadata
    return SimpleNamespace(**{key: (lambda value=value: value) for key, value in known.items()})


def facts_of(events: list[Any], names: list[str] | None = None) -> dict[str, KernelFacts]:
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    every = list(dict.fromkeys(one.name()[:300] for one in events))
    read = ablate_profile.kernel_facts(profile, every if names is None else names, lambda _index: H200)
    return {name: KernelFacts.model_validate_json(json.dumps(known)) for name, known in read.items()}


def metadata_of(launch: dict[str, Any]) -> str:
    """Return the text that torch has for a launch; it has more than we read."""
    return ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {"stream": 7, **launch}.items())


def drawn_launch(chance: random.Random) -> dict[str, Any]:
    """Return what CUDA, ROCm or a torch without an estimate says of a launch."""
    launch = {
        "registers per thread": chance.choice([16, 32, 128, 168, 255]),
        "shared memory": chance.choice([0, 1024, 48 * 1024]),
        "block": [chance.choice([32, 128, 256]), chance.choice([1, 2]), 1],
        "grid": [chance.choice([1, 64, 4096]), 1, chance.choice([1, 16])],
        "est. achieved occupancy %": chance.choice([0, 6, 50, 100]),
    }
    lacking = chance.choice([(), (), ("est. achieved occupancy %",), ("registers per thread",), tuple(launch)])
    return {key: value for key, value in launch.items() if key not in lacking}


def expected(calls: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the facts of the launches of one kernel, each with its nanoseconds."""
    keys = {"registers": "registers per thread", "shared_bytes": "shared memory", "block": "block", "grid": "grid"}
    texts: Counter[str] = Counter()
    for ns, launch in calls:
        texts[json.dumps([launch.get(key) for key in keys.values()])] += ns
    longest = texts.most_common(1)[0][0]  # of equals the first, as drawn nanoseconds are never equal
    known = {name: value for name, value in zip(keys, json.loads(longest), strict=True) if value is not None}
    if known:
        known["launches"] = len(texts)
    whole = [launch for _ns, launch in calls if len(launch) == 5]
    if len(whole) == len(calls):
        weighted = sum(Fraction(ns * launch["est. achieved occupancy %"], 100) for ns, launch in calls)
        known["occupancy"] = round(float(weighted / sum(ns for ns, _launch in calls)), 4)
    return known


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_launch_and_the_mean_occupancy_are_read_where_torch_knows_them(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    calls: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    events = []
    for _ in range(chance.randint(1, 400)):
        name, ns, launch = f"k{chance.randrange(30)}", chance.randint(1, 10**9), drawn_launch(chance)
        calls.setdefault(name, []).append((ns, launch))
        events.append(event(name, ns, metadata=metadata_of(launch)))
    known = {name: facts for name, own in calls.items() if (facts := expected(own))}
    read = {name: json.loads(facts.model_dump_json()) for name, facts in facts_of(events).items()}
    assert read.keys() == known.keys()
    for name, facts in known.items():
        assert read[name] == facts, name
    named = [name for name in calls if chance.random() < 0.5]
    assert facts_of(events, named).keys() == known.keys() & set(named), "of the kernels of the table only"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        "",
        '"blocks per SM": inf, "registers per thread": 32',
        '"registers per thread": -1, "shared memory": 1.5, "block": [0, 1, 1], "grid": [1, 1]',
        '"registers per thread": true, "shared memory": "48", "block": 128, "grid": null',
        "no JSON",
    ],
)
def test_without_known_arguments_there_are_no_facts(metadata: str | None) -> None:
    assert facts_of([event("kernel", 1000, metadata=metadata)]) == {}


def test_operators_of_the_processor_have_no_facts() -> None:
    shapes = {"shapes": [[8, 8], [8, 8]], "dtypes": ["c10::BFloat16"] * 2, "correlation_id": 1}
    launch = metadata_of({"registers per thread": 32})
    assert facts_of([event("aten::mm", 1000, device="CPU", metadata=launch, **shapes)]) == {}


def resident_blocks(registers: int, shared: int, threads: int) -> int:
    """Return how many blocks fit, by putting one after another into the four parts of a multiprocessor of Hopper."""
    parts, slots, memory, blocks = [65536 // 4] * 4, 2048 // 32, 233472, 0
    while True:
        memory -= (shared + 1024 + 127) // 128 * 128
        for _warp in range((threads + 31) // 32):
            roomiest = max(range(4), key=lambda place: parts[place])
            parts[roomiest] -= (registers * 32 + 255) // 256 * 256
            slots -= 1
        if memory < 0 or slots < 0 or min(parts) < 0:
            return blocks
        blocks += 1


DRIVER = (
    *((110, 98304, 256, 2), (208, 98304, 128, 2), (208, 131072, 128, 1), (64, 16384, 128, 8), (126, 98304, 128, 2)),
    *((184, 147456, 256, 1), (184, 196608, 256, 1), (168, 98304, 256, 1), (168, 65536, 64, 3), (126, 40960, 32, 5)),
    *((123, 49152, 128, 4), (80, 98304, 128, 2), (128, 73728, 64, 3), (88, 24576, 32, 9), (102, 98304, 256, 2)),
)
"""Registers, shared memory, threads and resident blocks of kernels of Triton, as the driver of an H200 gave them by
cuFuncGetAttribute and cuOccupancyMaxActiveBlocksPerMultiprocessor."""


@pytest.mark.parametrize(("registers", "shared", "threads", "blocks"), DRIVER)
def test_the_occupancy_is_that_of_the_driver(registers: int, shared: int, threads: int, blocks: int) -> None:
    assert resident_blocks(registers, shared, threads) == blocks
    assert ablate_profile._occupancy(registers, shared, threads, 10**6, H200) == blocks * threads / 2048


def test_events_of_an_h200_give_what_the_exported_trace_says() -> None:
    """Torch 2.11 on CUDA 13.0; `traced` are the arguments of the same event in the exported trace."""
    recorded = json.loads((Path(__file__).parent / "events_h200.json").read_text())
    events = [
        event(
            one["name"],
            one["ns"],
            device=one["device"],
            metadata=one["metadata"],
            linked_correlation_id=one.get("linked", 0),
            correlation_id=one.get("correlation", 0),
            shapes=one.get("shapes", []),
            dtypes=one.get("dtypes", []),
        )
        for one in recorded
    ]
    read = facts_of(events)
    kernels = [one for one in recorded if one.get("traced")]
    assert {one["name"] for one in kernels} == read.keys()
    for name, facts in read.items():
        traced = max((one for one in kernels if one["name"] == name), key=lambda one: one["ns"])["traced"]
        launch = (facts.registers, facts.shared_bytes, list(facts.block or ()), list(facts.grid or ()))
        assert launch == tuple(traced[key] for key in ("registers per thread", "shared memory", "block", "grid"))
        assert facts.launches == (2 if name == "mm_kernel" else 1)
        assert facts.occupancy is not None
    occupancies = {name: facts.occupancy for name, facts in read.items()}
    assert occupancies["add_kernel"] == 1.0
    assert occupancies["nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"] == 0.1875, "torch's estimate is 0"
    products = {name: facts.flops_per_s for name, facts in read.items() if facts.flops_per_s}
    assert products == {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": pytest.approx(2 * 4096**3 / 176.385e-6, rel=1e-6),
        "nvjet_sm90_tst_64x32_64x16_4x2_h_bz_splitK_bias_TNT": pytest.approx(2 * 64 * 8192 * 512 / 9.088e-6, rel=1e-6),
    }, "with the memset and the sum of the parts; a product in float32 does not count"


def test_the_occupancy_above_48_kib_is_that_of_blocks_put_in_one_by_one() -> None:
    chance = random.Random(1)  # noqa: S311
    counts: Counter[int] = Counter()
    for _ in range(3000):
        registers, threads = chance.randint(1, 255), chance.randint(1, 1024)
        shared, blocks = chance.randint(48 * 1024 + 1, 232448), chance.choice([1, 100, 132, 200, 10**6])
        launch = {"registers per thread": registers, "shared memory": shared, "est. achieved occupancy %": 0}
        launch |= {"block": [threads, 1, 1], "grid": [blocks, 1, 1]}
        fitting = resident_blocks(registers, shared, threads)
        counts[fitting] += 1
        facts = facts_of([event("kernel", 1000, metadata=metadata_of(launch))])["kernel"]
        if fitting:
            assert facts.occupancy == round(min(fitting, blocks / 132) * threads / 2048, 4)
        else:
            assert facts.occupancy is None, "such a kernel cannot run, so the limits are not known well enough"
    assert {0, 1, 2, 3, 4} <= counts.keys()


def drawn_product(chance: random.Random, correlation: int) -> tuple[Any, int, int]:
    """Return a product of matrices, with its FLOPs and bytes; 0 where it does not count."""
    name, left = chance.choice([("aten::mm", 0), ("aten::addmm", 1), ("aten::bmm", 0), ("aten::baddbmm", 1)])
    batch = [chance.randint(1, 8)] if "bmm" in name else []
    rows, inner, columns = (chance.choice([0, 1, 16, 777, 4096]) for _ in range(3))
    of_type = chance.choice(list(TYPES))
    bias = [[columns]] * left
    shapes = [*bias, [*batch, rows, inner], [*batch, inner, columns], []]
    made = event(
        name,
        chance.randint(1, 1000),
        device="CPU",
        correlation_id=correlation,
        shapes=shapes,
        dtypes=[of_type] * (left + 2) + [""],
    )
    counted = TYPES[of_type] == 2
    flops = sum(2 * rows * inner * columns for _ in range(batch[0] if batch else 1)) * counted
    elements = (rows * inner + inner * columns + rows * columns) * (batch[0] if batch else 1)
    return made, flops, 2 * elements if flops else 0


@pytest.mark.parametrize("seed", range(20))
def test_products_count_once_beside_the_longest_kernel_of_their_operator(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    events, flops, num_bytes, spent = [], Counter[str](), Counter[str](), Counter[str]()
    for correlation in range(1, chance.randint(2, 60)):
        product, of_product, bytes_of_product = drawn_product(chance, correlation)
        parts = [(chance.randint(1, 10**6), f"k{chance.randrange(8)}") for _ in range(chance.randrange(4))]
        events += [product, *(event(name, ns, linked_correlation_id=correlation) for ns, name in parts)]
        events.append(event("cudaLaunchKernel", 5, device="CPU", linked_correlation_id=correlation))
        events.append(event(f"k{chance.randrange(8)}", 99, linked_correlation_id=chance.choice([0, 10_000])))
        if of_product and parts:
            longest = max(parts)[1]
            flops[longest] += of_product
            num_bytes[longest] += bytes_of_product
            spent[longest] += sum(ns for ns, _name in parts)
    chance.shuffle(events)
    read = facts_of(events)
    assert {name: facts.product_flops for name, facts in read.items()} == flops
    assert {name: facts.product_bytes for name, facts in read.items()} == num_bytes
    for name, facts in read.items():
        assert facts.product_us == pytest.approx(spent[name] / 1e3, abs=1e-3)
        assert facts.flops_per_s == pytest.approx(flops[name] / spent[name] * 1e9, rel=1e-3)
        assert facts.bytes_per_s == pytest.approx(num_bytes[name] / spent[name] * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    "changed",
    [
        {"shapes": [], "dtypes": []},
        {"shapes": [[8, 8]]},
        {"shapes": [[8, 8], []]},
        {"shapes": [[8, 8], [8]]},
        {"dtypes": ["c10::Half", "float"]},
        {"name": "aten::linear"},
        {"device_type": "DeviceType.CUDA"},
    ],
)
def test_a_product_without_two_16_bit_matrices_has_no_flops(changed: dict[str, Any]) -> None:
    good = {"correlation_id": 1, "shapes": [[8, 8], [8, 8]], "dtypes": ["c10::Half"] * 2}
    kernel = event("gemm", 1000, linked_correlation_id=1)
    assert facts_of([kernel, event("aten::mm", 1, device="CPU", **good)])["gemm"].product_flops == 1024
    other = {"name": "aten::mm", "device": "CPU", **good, **changed}
    assert facts_of([kernel, event(other.pop("name"), 1, **other)]) == {}


def test_a_program_sends_the_facts_with_its_table() -> None:
    launch = metadata_of({"registers per thread": 40, "shared memory": 0, "block": [64, 2, 1], "grid": [9, 1, 1]})
    events = [event(f"kernel-{'x' * 280}-{place}", 1000 + place, metadata=launch) for place in range(400)]
    averages = [
        SimpleNamespace(key=one.name(), count=1, device_type="DeviceType.CUDA", self_device_time_total=1.0)
        for one in events
    ]
    profile = SimpleNamespace(
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)), key_averages=lambda: averages
    )
    torch = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _index: H200))
    marks, sizes = ProgramMarks(program_config(None)), []
    began = {"event": "began", "rank": 0, "at": 1.0, "world": 1, "python": "3.12.1", "implementation": "CPython"}
    marks.take(json.dumps(began).encode(), 0.0)
    for name, values in ablate_profile.messages(profile, torch, traced=False):
        content = json.dumps({"event": name, "rank": 0, **values}).encode()
        sizes.append(len(content))
        marks.take(content, 0.0)
    assert marks.wrong is None
    assert max(sizes) < 200_000, "below the limit of a datagram"
    assert len(marks.kernels) == 400
    assert marks.kernel_facts == facts_of(events)
    assert {facts.threads for facts in marks.kernel_facts.values()} == {128}


@pytest.mark.parametrize(
    "facts",
    [
        {"registers": -1},
        {"registers": 2**31},
        {"block": [1, 1]},
        {"occupancy": 1.01},
        {"occupancy": float("nan")},
        {"product_us": 0.0},
        {"product_flops": 0},
        {"more": 1},
        None,
    ],
)
def test_a_program_that_sends_other_facts_is_wrong(facts: Any) -> None:
    marks = ProgramMarks(program_config(None))
    rows = [["gemm", 1, 1.0, facts]]
    marks.take(json.dumps({"event": "kernels", "rank": 0, "rows": rows}).encode(), 0.0)
    assert marks.wrong is not None
