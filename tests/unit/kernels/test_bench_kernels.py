"""The kernel table: floors against numbers worked out by hand, the order of checks and speeds, the page, the files."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends import Lane
from kernels.errors import KernelError, KernelUnsupported
from kernels.mamba3_mimo import criterion
from kernels.mamba3_mimo.criterion import Yardstick
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.problem import make_grad, make_inputs
from kernels.scan_switches import ScanFact
from tests.kernels.bench import cases, parts, render, work
from tests.kernels.bench.__main__ import main
from tests.kernels.bench.cases import BenchCase
from tests.kernels.bench.compiling import needed
from tests.kernels.bench.floors import MOVED, PRODUCTS, floors, sizes, whole_pass
from tests.kernels.bench.lane_process import lane_process
from tests.kernels.bench.parts import BenchRun
from tests.kernels.bench.report import (
    AccuracyRow,
    KernelRow,
    Machine,
    SpeedRow,
    TablePart,
    Times,
    sorted_rows,
    store,
    stored,
)
from tests.nvidia_smi import put_smi

REFERENCE = ScanShape(B=8, S=8192, H=16, G=1, N=64, P=64, R=4, A=16, C=16, L=256)
CEILINGS = {"bytes_per_s": 4.28e12, "flops_per_s": 790e12}
GOOD = {"out": (0.005, 0.01), "adt": (0.004, 0.03)}
BAD = {"out": (0.5, 0.9), "adt": (0.004, 0.03)}
PROBLEM = BenchCase(name="small", case=cases.Case(B=2, S=512))


def judged(errors: Any) -> dict[str, Any]:
    """What a worker answers: an error of more than a tenth is wrong."""
    wrong = [name for name, (overall, _) in errors.items() if not overall < 0.1]
    return {"errors": errors, "shares": dict.fromkeys(errors, (2.0, 9.0)), "wrong": wrong}


class FakeLane:
    """Answers like a lane whose runs take `ms` and whose errors are `errors`."""

    def __init__(
        self,
        lane: Lane,
        *,
        ms: float = 1.0,
        errors: Any = None,
        refuses: str | None = None,
        no_graph: str | None = None,
    ) -> None:
        self.lane, self._no_graph = lane, no_graph
        self.asked: list[tuple[str, ...]] = []
        self._ms, self._errors, self._refuses = ms, GOOD if errors is None else errors, refuses

    def ask(self, function: str, *arguments: Any) -> Any:
        self.asked.append((function, *(a for a in arguments if isinstance(a, str))))
        if function in ("errors", "prepare") and self._refuses:
            raise KernelUnsupported(self._refuses)
        passes = self._ms if "forward" in arguments else 4 * self._ms
        answers: dict[str, Any] = {
            "check": judged(self._errors),
            "errors": judged(self._errors),
            "prepare": {"peak_gib": 1.5, "facts": {ScanFact.HEADS_IN_TURN: 2}},
            "capture": self._no_graph,
            "sample_ms": [passes if "eager" in arguments else 0.9 * passes] * 2,
            "kernels_ms": {"b3_gradients_kernel": 2.0, "void at::native::something": 0.1},
            "ceilings": CEILINGS,
        }
        return answers.get(function)


def bench(*lanes: FakeLane) -> BenchRun:
    return BenchRun(lanes=lanes, rounds=3, repeats=2, ceilings=CEILINGS)  # type: ignore[arg-type]


def test_sizes_of_the_reference_problem_by_hand() -> None:
    size = sizes(REFERENCE)
    assert size["direction"] == 8 * 8192 * 4 * 64 * 2  # 32 MiB
    assert size["value"] == 8 * 8192 * 16 * 64 * 2  # 128 MiB
    assert size["summed"] == 16 * size["direction"]
    assert sizes(replace(REFERENCE, in_turn=4))["summed"] == 4 * size["direction"]
    assert size["state"] == 8 * 16 * 32 * 64 * 64 * 4  # 64 MiB: 32 super-chunks of 256
    assert size["chunk_state"] == 8 * 16 * 512 * 64 * 64 * 2  # 512 MiB
    assert size["scalar"] == 8 * 8192 * 16 * 4
    assert size["angle"] == size["rotation"] == size["raw_angle"] == 8 * 8192 * 16 * 16 * 4
    assert sizes(replace(REFERENCE, shared_angles=True))["raw_angle"] == 8 * 8192 * 16 * 4


def test_floors_of_the_reference_problem_by_hand() -> None:
    least = floors(REFERENCE)
    # one product of 64 x 64 x 64 is 524288 FLOPs; 8 * 16 * 512 chunks of one head; F1 does one, F3 four, B3 eleven
    assert least["f1_local_states"].flops == 31 / 32 * 65536 * 524288  # without the last of a row's 32 super-chunks
    assert least["b1_local_gradients"].flops == least["f1_local_states"].flops
    assert least["f3_outputs"].flops == 4 * 65536 * 524288
    assert least["b3_gradients"].flops == 11 * 65536 * 524288
    # q, v, rotations, one scalar, states of the super-chunks
    assert least["f1_local_states"].bytes == 31 / 32 * (32 + 128 + 64 + 4 + 64) * 2**20
    assert least["b1_local_gradients"].bytes == 31 / 32 * (32 + 256 + 64 + 4 + 64) * 2**20
    assert least["f2_pass_states"].bytes == 2 * 2 * 64 * 2**20
    # q and k; v, z, dO, dv, dz; rotations; seven scalars; chunk states; states; dq, dk by head; angle gradients; sums
    assert least["b3_gradients"].bytes == (64 + 640 + 64 + 28 + 512 + 64 + 1024 + 64 + 24) * 2**20
    assert least["b3_gradients"].ms(CEILINGS) == pytest.approx(1e3 * 2484 * 2**20 / 4.28e12)
    slow = least["b3_gradients"].ms({**CEILINGS, "flops_per_s": 1e12})
    assert slow == pytest.approx(least["b3_gradients"].flops / 1e9)
    assert least["b4_reduce_heads"].bytes == 2 * (512 + 32) * 2**20


def test_no_super_chunk_is_left_out_where_a_row_has_one() -> None:
    one = floors(replace(REFERENCE, L=8192))
    assert one["f1_local_states"].flops == one["b1_local_gradients"].flops == 65536 * 524288
    assert one["f3_outputs"].flops == floors(REFERENCE)["f3_outputs"].flops


def test_floors_with_psiv_cache_move_psiv_out_and_in() -> None:
    psiv = 8 * 8192 * 16 * 4 * 64 * 2
    plain, cached = floors(REFERENCE), floors(REFERENCE, psiv_cache=True)
    more = {name: cached[name].bytes - plain[name].bytes for name in plain}
    assert {name for name, extra in more.items() if extra} == {"f3_outputs", "b3_gradients"}
    assert more["f3_outputs"] == psiv


def test_whole_pass_reads_inputs_once_and_writes_results_once() -> None:
    forward, both = whole_pass(REFERENCE, backward=False), whole_pass(REFERENCE, backward=True)
    assert forward.bytes == (2 * 32 + 3 * 128 + 3 * 4 + 64) * 2**20
    assert both.bytes == forward.bytes + (2 * (2 * 32 + 2 * 128 + 3 * 4 + 64) + 128) * 2**20
    assert forward.flops == 4 * 65536 * 524288
    assert both.flops == (4 + 11) * 65536 * 524288
    assert set(PRODUCTS) <= set(MOVED)


def test_floors_are_of_the_walks_that_run() -> None:
    walks = {problem.name: (shape.L, shape.K) for problem in cases.SPEED for shape in (parts.shape_run(problem),)}
    assert walks == {
        "B8 S8192 H16 N64": (1024, 8), "B1 S65536 H16 N64": (1024, 64), "B8 S2048 H32 N128": (2048, 1),
    }  # fmt: skip


def test_floors_are_of_the_heads_in_turn_that_ran() -> None:
    found = {
        row.kernel: row for row in parts.speed(bench(FakeLane(Lane.CUDA)), [PROBLEM]) if isinstance(row, KernelRow)
    }
    least = floors(replace(parts.shape_run(PROBLEM), in_turn=2))
    assert found["b3_gradients"].bytes == least["b3_gradients"].bytes


def test_the_bench_imports_no_tilelang_since_the_official_kernels_process_needs_another() -> None:
    code = "import sys, tests.kernels.bench.__main__; sys.exit('tilelang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_official_problems_are_the_eleven_and_the_hard_ones() -> None:
    names = [problem.name for problem in cases.ACCURACY]
    assert len(cases.OFFICIAL_SHAPES) == 11
    assert names[11:] == ["S8191", "four documents", "G4", "rope 1"]
    assert sum(problem.case.gradients for problem in cases.ACCURACY[:11]) >= 5
    assert cases.ACCURACY[0].options(Lane.PEER) == {"schedule": "sequential", "chunk_size": 8}
    assert cases.ACCURACY[0].options(Lane.CUDA) == {"chunk_size": 16}


def test_compiling_keeps_what_the_official_kernels_are_specialised_for() -> None:
    for problem in cases.ACCURACY:
        small, whole = problem.compiling(Lane.PEER), problem.case
        same = ("N", "P", "R", "rope", "gradients")
        assert [getattr(small, name) for name in same] == [getattr(whole, name) for name in same]
        assert problem.compiling(Lane.CUDA) == whole
        packed = whole.documents > 1 or whole.S % problem.official_chunk > 0
        assert (small.documents > 1 and small.S < 256) if packed else small == whole
        if not packed:
            assert 4 * problem.official_chunk == problem.compiling(Lane.PEER, open_sizes=True).S
    assert {job.function for job in needed("accuracy", cases.ACCURACY, (Lane.PEER,))} == {"compile_s"}


def test_needed_names_every_compilation_once() -> None:
    lanes = (Lane.CUDA, Lane.PEER)
    speed = needed("speed", cases.SPEED, lanes)
    assert [(job.lane, job.case) for job in speed] == [(lane, p.case) for lane in lanes[::-1] for p in cases.SPEED]
    assert {job.function for job in speed} == {"compile_timed_s"}


def test_speed_samples_the_lanes_in_turn() -> None:
    ours, peer = FakeLane(Lane.CUDA, ms=1.0), FakeLane(Lane.PEER, ms=4.0, no_graph="not capturable")
    found = sorted_rows(parts.speed(bench(ours, peer), [PROBLEM]))
    rows, kernels = found["speed"], found["kernels"]
    assert [(row.lane, row.forward.eager_ms, row.both.eager_ms) for row in rows] == [
        ("cuda", [1.0] * 6, [4.0] * 6),
        ("peer", [4.0] * 6, [16.0] * 6),
    ]
    assert [(row.both.graph_ms, row.both.no_graph) for row in rows] == [([3.6] * 6, None), ([], "not capturable")]
    assert [row.forward.kernels_ms for row in rows] == [2.1, 2.1]
    assert [asked[0] for asked in ours.asked][:3] == ["prepare", "check", "capture"]
    assert ours.asked[-1] == peer.asked[-1] == ("forget",)
    together, known, unknown, *official = kernels
    assert [(row.lane, row.floor_ms) for row in official] == [("peer", None)] * 3
    assert (together.kernel, together.ms) == ("all kernels", 2.1)
    assert known.kernel == "b3_gradients"
    assert known.floor_ms is not None
    assert unknown.floor_ms is None


def test_what_is_checked_is_what_is_sampled() -> None:
    """By its name: nothing smaller stands in for it."""
    ours = FakeLane(Lane.CUDA)
    list(parts.speed(bench(ours), [PROBLEM]))
    assert ("check", PROBLEM.name) in ours.asked
    assert {asked[1] for asked in ours.asked if asked[0] in ("sample_ms", "kernels_ms", "capture")} == {PROBLEM.name}
    assert not [asked for asked in ours.asked if asked[0] == "errors"]


def test_ours_is_not_timed_where_it_fails_its_check_and_the_official_lane_says_so() -> None:
    ours, official = FakeLane(Lane.CUDA, errors=BAD), FakeLane(Lane.PEER, errors=BAD)
    rows = sorted_rows(parts.speed(bench(ours, official), [PROBLEM]))["speed"]
    found = {row.lane: row for row in rows}
    assert found["cuda"].refused == "the check failed: out; no speed is measured"
    assert found["cuda"].both.eager_ms == []
    assert "sample_ms" not in [asked[0] for asked in ours.asked]
    assert (found["peer"].refused, found["peer"].wrong) == (None, ["out"])
    assert found["peer"].both.eager_ms
    assert "over: out" in render.page([TablePart(part="speed", machine=_parts()[0].machine, speed=rows)])


@pytest.mark.parametrize("lane", [Lane.CUDA, Lane.PEER])
def test_speed_of_nan_is_not_measured(lane: Lane) -> None:
    rows = list(parts.speed(bench(FakeLane(lane, errors={"out": (float("nan"), 0.0)})), [PROBLEM]))
    assert "the check failed: out" in str(rows[0].refused)


def test_accuracy_keeps_the_reason_of_a_refusal() -> None:
    rows = list(parts.accuracy(bench(FakeLane(Lane.CUDA), FakeLane(Lane.PEER, refuses="G is 4")), [PROBLEM]))
    assert [(row.lane, row.errors, row.refused) for row in rows] == [("cuda", GOOD, None), ("peer", {}, "G is 4")]


def test_attention_is_timed_beside_the_scan() -> None:
    rows = list(parts.attention(bench(FakeLane(Lane.CUDA)), cases.ATTENTION[:1], ["cudnn", "flash"]))
    assert [(row.name, row.lane) for row in rows] == [("S4096 B16", lane) for lane in ("cudnn", "flash", "cuda")]


def _parts() -> list[TablePart]:
    machine = Machine(
        date="2026-11-21T10:00:00+00:00", device="NVIDIA H200", driver="580", clocks_before="1980 MHz, 3201 MHz",
        clocks_after="1980 MHz, 3201 MHz", versions={"cuda": {"tilelang": "0.1.15"}}, absent={"peer": "not installed"},
    )  # fmt: skip
    accuracy = [
        AccuracyRow(name="N64", lane="cuda", errors=GOOD, shares={"out": (2.0, 9.0), "adt": (3.0, 7.0)}),
        AccuracyRow(name="N64", lane="peer", errors={"out": (0.006, 0.02), "adt": (0.103, 0.2)}, wrong=["adt"]),
        AccuracyRow(name="G4", lane="peer", refused="G is 4"),
    ]
    speed = [
        SpeedRow(
            name="B8", lane="cuda", peak_gib=2.5, forward=Times(kernels_ms=1.0, graph_ms=[1.5], eager_ms=[2.0]),
            both=Times(kernels_ms=3.0, graph_ms=[3.1, 3.2, 3.9], eager_ms=[4.0, 4.0, 5.0]),
        ),
        SpeedRow(
            name="B8", lane="peer", forward=Times(kernels_ms=2.5, eager_ms=[3.0], no_graph="not capturable"),
            both=Times(kernels_ms=12.0, graph_ms=[12.8], eager_ms=[16.0]),
        ),
    ]  # fmt: skip
    kernels = [
        KernelRow(name="B8", lane="cuda", kernel="all kernels", ms=3.0),
        KernelRow(name="B8", lane="cuda", kernel="b3_gradients", ms=2.0, floor_ms=0.5, bytes=2e9, flops=4e11),
        *(KernelRow(name="B8", lane="cuda", kernel=name, ms=0.02) for name in ("copy", "fill")),
        KernelRow(name="B8", lane="peer", kernel="all kernels", ms=12.0),
    ]
    return [
        TablePart(part="accuracy", machine=machine, accuracy=accuracy),
        TablePart(part="speed", machine=machine, speed=speed, kernels=kernels),
    ]


def test_page_shows_ratios_floors_refusals_and_who_is_less_accurate() -> None:
    text = render.page(_parts())
    assert "Ours is at least as accurate on 2 of 2 outputs." in text
    ours, official = (line for line in text.splitlines() if "| within" in line or "| over:" in line)
    assert [cell.strip() for cell in ours.split("|")][1:9] == [
        "N64", "cuda", "2", "0.00500 out", "0.03000 adt", "3.0 adt", "9.0 out", "within",
    ]  # fmt: skip
    assert [cell.strip() for cell in official.split("|")][1:9] == [
        "N64", "peer", "2", "0.10300 adt", "0.20000 adt", "-", "-", "over: adt",
    ]  # fmt: skip
    assert "G is 4" in text
    assert "Lane peer did not run: not installed." in text
    rows = [line for line in text.splitlines() if line.startswith("| B8") and "| peer |" in line and "of 1" in line]
    found = [[cell.strip() for cell in line.split("|")][4:12] for line in rows]
    assert found == [
        ["2.500", "-", "3.000", "2.50", "-", "1.50", "1.25", "3.00"],
        ["12.000", "12.800", "16.000", "4.00", "4.00", "4.00", "3.00", "5.33"],
    ]
    assert "The weakest ratio here is 1.25 (B8, forward, peer)." in text
    assert "No graph of B8, forward, peer: not capturable." in text
    kernel_row = next(line for line in text.splitlines() if "b3_gradients" in line)
    assert [cell.strip() for cell in kernel_row.split("|")][4:9] == ["2.000", "2.000", "400.0", "0.500", "25"]
    assert "copy" not in text
    few = next(line for line in text.splitlines() if "2 more, each under 1%" in line)
    assert [cell.strip() for cell in few.split("|")][1:5] == ["B8", "cuda", "2 more, each under 1%", "0.040"]


def test_page_of_speeds_compares_the_checks_of_both_lanes() -> None:
    _, speed = _parts()
    worse = {"out": (0.004, 0.01), "adt": (0.008, 0.02)}
    checked = [row.model_copy(update={"errors": e}) for row, e in zip(speed.speed, (GOOD, worse), strict=True)]
    alone = render.page([speed.model_copy(update={"speed": checked[:1]})])
    assert "Every timed function is checked" in alone
    assert "at least as accurate" not in alone
    text = render.page([speed.model_copy(update={"speed": checked})])
    assert "Ours is at least as accurate on 1 of 2 outputs; less accurate: B8 out." in text


def test_table_lines_up() -> None:
    assert render.table(("a", "number"), [("x", 1.5), ("long", "-")]).splitlines() == [
        "| a    | number |",
        "|------|-------:|",
        "| x    |    1.5 |",
        "| long |      - |",
    ]


def test_stored_parts_come_back_equal_and_know_their_schema(tmp_path: Path) -> None:
    given = _parts()
    for part in given:
        assert json.loads(store(part, tmp_path).read_text())["schema_version"] == 2
    assert stored(tmp_path, ("accuracy", "speed", "attention")) == given
    store(given[0].model_copy(update={"complete": False, "accuracy": []}), tmp_path)
    assert stored(tmp_path, ("accuracy",)) == given[:1]
    store(given[0], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy.json", "speed.json"]


def test_a_run_that_is_ended_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(FakeLane):
        def ask(self, function: str, *arguments: Any) -> Any:
            if function == "versions":
                return {"tilelang": "0.1.15"}
            if len(self.asked) == 4:  # ready, two problems, then
                raise KeyboardInterrupt
            return super().ask(function, *arguments)

    monkeypatch.setattr("sys.argv", ["bench-kernels", "--out", str(tmp_path), "--only", "accuracy", "--jobs", "0"])
    monkeypatch.setattr("tests.kernels.bench.__main__.lane_process", lambda lane: nullcontext(Ended(lane)))
    monkeypatch.setattr(parts, "gpu", lambda _query: "told")
    with pytest.raises(KeyboardInterrupt):
        main()
    (part,) = stored(tmp_path, ("accuracy",))
    assert (part.complete, part.machine.clocks_after) == (False, "not reached")
    assert {row.lane for row in part.accuracy} == {"cuda", "peer"}
    assert "interrupted" in render.page([part])


def test_main_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["bench-kernels", "--out", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tests.kernels.bench.__main__.lane_process", _no_gpu)
    assert main() == 1
    assert "bench-kernels: this machine has no GPU" in capsys.readouterr().err


def _no_gpu(lane: Lane) -> Any:
    raise KernelUnsupported("this machine has no GPU")


@pytest.mark.slow
def test_lane_process_answers_refuses_and_fails() -> None:
    with lane_process(Lane.REFERENCE) as process:
        assert "torch" in process.ask("versions")
        with pytest.raises(KernelError, match=r"lane 'reference', sample_ms: KeyError: 'absent'"):
            process.ask("sample_ms", "absent", "both", "eager", 1)


@pytest.mark.parametrize(("right_from", "asked"), [(2, [2]), (8, [2, 8]), (32, [2, 8, 32]), (99, [2, 8, 32])])
def test_what_few_samples_call_wrong_is_judged_by_more(
    monkeypatch: pytest.MonkeyPatch, right_from: int, asked: list[int]
) -> None:
    inputs = make_inputs(cases.Case(B=1, S=8, H=1, N=16, P=32, R=1), "cpu")
    drawn: list[int] = []

    def counted(*_: Any, samples: int, gradients: bool) -> Yardstick:
        drawn.append(samples)
        return Yardstick({"out": got["out"].double()}, {"out": torch.ones(1)}, {})

    def measured(_: Any, by: Yardstick) -> dict[str, criterion.Share]:
        assert by.exact["out"].dtype == torch.float64
        return {"out": criterion.Share(0.5, 33.0 if drawn[-1] < right_from else 31.0)}

    got = {"out": torch.ones(1, 8, 1, 32)}
    monkeypatch.setattr(work, "yardstick", counted)
    monkeypatch.setattr(criterion, "measured", measured)
    exactly = work._Exact(inputs, make_grad(inputs, 1), gradients=False)
    judged_ = work.Worker(Lane.CUDA)._judged(got, exactly)
    assert (drawn, judged_["wrong"]) == (asked, [] if right_from <= 32 else ["out"])


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("1", "1"), ("GPU-caa7802e,0", "GPU-caa7802e")])
def test_driver_is_asked_about_the_gpu_that_is_timed(
    visible: str | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    put_smi(tmp_path, monkeypatch, 'echo "$1"')
    assert parts.gpu("name") == f"--id={asked}"
