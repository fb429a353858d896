"""The reader of compiled kernels, on pieces of code written here: no compiler and no GPU are needed."""

import json
import re
import struct
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels.errors import KernelError
from ablate.kernels.mamba3_mimo.cuda.host import attest, cuda_source
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.facts import ModelFact

DISASSEMBLY = """
 Function walk_kernel:
  REG:168 STACK:16 SHARED:2048 LOCAL:0 CONSTANT[0]:2056 TEXTURE:0 SURFACE:0 SAMPLER:0
		Function : walk_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000e620000000800 */
        /*0010*/              @!P0 UTMALDG.5D [UR8], [UR4], desc[UR6] ;  /* 0x00000a00ff017b82 */
        /*0020*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;        /* 0x00000a00ff017b82 */
        /*0030*/                   UTMASTG.5D [UR8], [UR4] ;             /* 0x00000a00ff017b82 */
        /*0040*/             @!UP1 SYNCS.PHASECHK.TRANS64 P0, [R1], R2 ; /* 0x00000a00ff017b82 */
        /*0050*/                   NANOSLEEP.SYNCS 0x989680 ;            /* 0x00000a00ff017b82 */
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc ;  /* 0x00000a00ff017b82 */
        /*0070*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;     /* 0x00000a00ff017b82 */
        /*0080*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;   /* 0x00000a00ff017b82 */
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;         /* 0x00000a00ff017b82 */
        /*00a0*/                   FMUL.FTZ R3, R2, R1 ;                 /* 0x00000a00ff017b82 */
        /*00b0*/                   FADD.FTZ R3, R2, R1 ;                 /* 0x00000a00ff017b82 */
        /*00c0*/                   FMUL.RZ R3, R2, R1 ;                  /* 0x00000a00ff017b82 */
        /*00d0*/                   MUFU.TANH R3, R2 ;                    /* 0x00000a00ff017b82 */
        /*00e0*/                   STL [R1], R2 ;                        /* 0x00000a00ff017b82 */
        /*00f0*/                   LDL.LU R2, [R1] ;                     /* 0x00000a00ff017b82 */
"""

SOURCE = """
extern "C" __global__ void __launch_bounds__(128, 1) walk_kernel(const float* psi, {parameters}) {{
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
{before}
  for (int n = 0; n < 16; ++n) {{
    bar[0].wait((n & 1));
    if (tl::tl_shuffle_elect<128>()) {{
      #pragma unroll
      for (int r = 0; r < 4; ++r) {{
        tl::tma_load(q_desc, bar[0], (&(q_raw[(r * 1024)])), 0);
      }}
      tl::tma_load(states_desc, bar[0], (&(h_s[0])), 0);
    }}
  }}
  out[0] = workspace_3[1];
}}
"""
LOADS = """  #pragma unroll
  for (int r_1 = 0; r_1 < 4; ++r_1) {
    tl::tma_load(q_desc, bar[0], (&(q_raw[(r_1 * 1024)])), 0);
  }
  tl::tma_load(states_desc, bar[0], (&(h_s[0])), 0);
"""
HOST = """
  (((TVMFFIAny*)stack_ffi_any)[29].v_int64) = 0;
  (((TVMFFIAny*)stack_ffi_any)[30].v_int64) = ((int64_t)5);
  (((TVMFFIAny*)stack_ffi_any)[31].v_int64) = ((int64_t){blocks});
  (((TVMFFIAny*)stack_ffi_any)[32].v_int64) = ((int64_t)3);
  (((TVMFFIAny*)stack_ffi_any)[33].v_int64) = ((int64_t)128);
  (((TVMFFIAny*)stack_ffi_any)[34].v_int64) = ((int64_t)1);
  (((TVMFFIAny*)stack_ffi_any)[35].v_int64) = ((int64_t)1);
  (((TVMFFIAny*)stack_ffi_any)[36].v_int64) = ((int64_t)112384);
  (((TVMFFIAny*)stack_ffi_any)[37].v_int64) = (int64_t)0;
"""
PROGRAM = """
for h in T.thread_binding(5, thread="blockIdx.x"):
for s in T.thread_binding(4, thread="blockIdx.y"):
for b in T.thread_binding(3, thread="blockIdx.z"):
q = T.match_buffer(q_handle, (3, 1024, 4, 1, 64), "bfloat16", strides=(262144, 256, 64, 64, 1))
gw_s_1 = T.sblock_alloc_buffer(({shape}), "bfloat16", data=gw_s, scope="shared.dyn")
buffer = T.Buffer((3, 4, 1024, 1, 64), "bfloat16", data=q.data, strides=(262144, 64, 256, 64, 1))
buffer_1 = T.Buffer((4, 16, 64), "bfloat16", data=gw_s, strides=(1024, 64, 1), scope="shared.dyn")
T.tma_copy(T.region(buffer[b, 0, t0, 0, 0], 1, 1, 4, 16, 1, 64), T.region(buffer_1[0], 2, 4, 16, 64), barrier=bar[0])
buffer = T.Buffer((3, 4, 1024, 1, 64), "bfloat16", data=dqh.data, strides=(262144, 64, 256, 64, 1))
T.tma_copy(T.region(buffer_1[0, 0, 0], 1, 4, 16, 64), T.region(buffer[b, 0, t0, h, 0], 2, 1, 4, 16, 1, 64))
T.tma_copy(T.region(v_[b, t0, h, 0], 1, 1, {tokens}, 1, 64), T.region(v_s_1[0, 0], 2, 16, 64), barrier=bar_1[0])
"""


def program(*, shape="64, 64", tokens=16):
    return PROGRAM.format(shape=shape, tokens=tokens)


def source(*, ahead: int = 1, parameters: str = "float* out") -> str:
    return SOURCE.format(before=LOADS * ahead, parameters=parameters)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A compiled kernel as TileLang 0.1.15 leaves it in its cache, with `cuobjdump` replaced by what it prints."""
    gpu_code = attest.ELF + bytes(14) + struct.pack("<H", attest.EM_CUDA) + b"code"
    (tmp_path / "executable.so").write_bytes(attest.ELF + bytes(14) + struct.pack("<H", 62) + b"host" + gpu_code)
    (tmp_path / "device_kernel.cu").write_text(source())
    (tmp_path / "host_kernel.cu").write_text(HOST.format(blocks=4))
    monkeypatch.setattr(attest, "disassembler", lambda: "cuobjdump")
    monkeypatch.setattr(attest, "_disassembled", lambda _tool, code: DISASSEMBLY if code == gpu_code else "")
    return SimpleNamespace(
        _tilelang_cache_path=str(tmp_path),
        adapter=SimpleNamespace(pass_configs={}, prim_func=SimpleNamespace(script=program)),
    )


def row(kernel, name="outputs"):
    (entry,) = attest.table({name: kernel})
    return entry


def test_row_counts_what_is_in_the_machine_code(compiled):
    entry = row(compiled)
    expected = {
        "read_from": "sass", "threads": 128, "registers": 168, "stack_bytes": 16, "shared_bytes": 112384 + 2048,
        "instructions": 16, "tma_loads": 2, "tma_stores": 1, "cp_async": 1, "wgmma": 1, "mma": 0, "mbarrier": 1,
        "register_reallocations": 1, "barriers": 1, "approximations": 1, "spill_loads": 1, "spill_stores": 1,
        "grid": "5 x 4 x 3",
    }  # fmt: skip
    assert {name: entry[name] for name in expected} == expected


def test_row_shows_the_gates(compiled):
    entry = row(compiled)
    assert entry["dtype"] == "bfloat16"
    gates = ("layout_2d", "pipeline_stages", "psiv_cache", "aggressive_smem_merge", "chunk_size", "superchunk")
    assert [entry[gate] for gate in gates] == [True, 1, False, False, 16, 256]


def handles(*dtypes):
    """The buffers q, k, v and z of a program; a buffer of float32 is printed without its type."""
    printed = [f', "{dtype}"' if dtype != "float32" else "" for dtype in dtypes]
    names = zip(("q", "k", "v_", "z"), printed, strict=False)
    return "\n".join(
        f"{name} = T.match_buffer({name}_handle, (3, 1024){dtype}, strides=(4, 1))" for name, dtype in names
    )


@pytest.mark.parametrize(
    ("dtypes", "shown"),
    [
        (("bfloat16",) * 4, "bfloat16"), (("float32",) * 4, "float32"), (("float16",) * 2, "float16"),
        (("bfloat16", "bfloat16", "float32", "bfloat16"), "mixed"), ((), None),
    ],
)  # fmt: skip
def test_a_walk_that_reads_another_dtype_shows_it(compiled, dtypes, shown):
    compiled.adapter.prim_func.script = lambda: handles(*dtypes)
    assert row(compiled).get("dtype") == shown


@pytest.mark.parametrize(
    ("asked", "read", "live"),
    [
        ("bfloat16", "bfloat16", True), ("bfloat16", "float32", False), ("float32", "bfloat16", False),
        ("bfloat16", None, False),
    ],
)  # fmt: skip
def test_the_dtype_gate_believes_the_walks_and_not_the_loss(asked, read, live):
    said = attest.facts([made("outputs", dtype=read), made("gradients", dtype=read)])
    assert read_gates({"dtype": asked}, {**said, ModelFact.HIDDEN_DTYPE: asked})["dtype"].live is live


def shown(compiled, monkeypatch, *changes):
    """The row of the machine code with each (old, new) in `changes` replaced."""
    code = DISASSEMBLY
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    monkeypatch.setattr(attest, "_disassembled", lambda *_: code)
    return row(compiled)


BULK, COPIED = ("LDGSTS.E.BYPASS.128", "LDG.E.128"), (("UTMALDG.5D", "LDG.E.5D"), ("UBLKCP.S.G", "LDG.E"))


@pytest.mark.parametrize(
    ("changes", "tma"), [((), "mixed"), ((BULK,), True), (COPIED, False), ((*COPIED, BULK), False)]
)
def test_bulk_copies_with_a_cp_async_left_are_not_bulk_copies(compiled, monkeypatch, changes, tma):
    assert shown(compiled, monkeypatch, *changes)["tma"] == tma


@pytest.mark.parametrize(
    ("changes", "fast"),
    [
        ((), "mixed"),
        ((("FMUL.RZ", "FMUL.FTZ.RZ"),), True),
        ((("FMUL.FTZ R3", "FMUL R3"), ("FADD.FTZ", "FADD")), False),
    ],
)
def test_fast_math_is_all_or_nothing(compiled, monkeypatch, changes, fast):
    assert shown(compiled, monkeypatch, *changes)["fast_math"] == fast


def test_row_is_read_from_the_source_where_no_disassembler_is(compiled, monkeypatch):
    monkeypatch.setattr(attest, "disassembler", lambda: None)
    entry = row(compiled)
    assert (entry["read_from"], entry["tma"], entry["shared_bytes"], entry["tma_loads"]) == ("source", True, 112384, 4)
    assert not {"registers", "fast_math", "binary_sha256"} & set(entry)


def test_programs_that_load_other_numbers_of_tokens_show_no_chunk_size(compiled):
    compiled.adapter.prim_func.script = lambda: program(tokens=8)
    assert not {"chunk_size", "superchunk"} & set(row(compiled))


@pytest.mark.parametrize(("tokens", "shown"), [(1024, 4), (256, 1), (1000, "unproved"), (128, "unproved")])
def test_super_chunks_of_a_row_are_as_many_as_its_walk_fits_into_it(tokens, shown):
    (entry,) = attest.launched([made("outputs", super_chunks=None, superchunk=256)], tokens=tokens, super_chunks=9)
    assert entry["super_chunks"] == shown


@pytest.mark.parametrize(("handed", "shown"), [(4, 4), (None, "unproved")])
def test_a_kernel_that_hands_states_on_shows_what_it_was_launched_with(handed, shown):
    (entry,) = attest.launched([made("pass_states", super_chunks=None)], tokens=1024, super_chunks=handed)
    assert entry["super_chunks"] == shown


def test_a_walk_whose_trips_are_not_known_shows_no_super_chunks():
    (entry,) = attest.launched([made("outputs", super_chunks=None, superchunk=None)], tokens=1024, super_chunks=None)
    assert "super_chunks" not in entry


def test_grids_may_be_known_at_run_time(compiled, tmp_path):
    (tmp_path / "host_kernel.cu").write_text(HOST.format(blocks="walks"))
    assert row(compiled)["grid"] == "5 x run time x 3"


@pytest.mark.parametrize(
    ("loop", "chunks"),
    [
        ("for (int n = 0; n < 16; ++n) {", 16),
        ("for (int n = 0; n < min(16, (63 - (((int)blockIdx.y) * 16))); ++n) {", 16),
        ("for (int n = 0; n < ((S + 15) >> 4); ++n) {", None),
        ("{", 1),
    ],
)
def test_chunks_that_a_block_walks_are_the_trips_of_its_loop(loop, chunks):
    assert cuda_source.chunks_walked(source().replace("for (int n = 0; n < 16; ++n) {", loop)) == chunks


def test_chunks_that_two_roles_walk_are_those_of_the_one_that_goes_round_less_often():
    again = ROLES.replace("n_1 < 16", "n_1 < (min(16, (63 - (((int)blockIdx.y) * 16))) + 1)")
    assert cuda_source.chunks_walked(ROLES) == cuda_source.chunks_walked(again) == 16


def test_chunks_of_a_kernel_that_loads_nothing_are_unknown():
    assert cuda_source.chunks_walked("void f() {\n  x[0] = 0;\n}") is None


def test_row_is_kept_beside_the_code_and_made_again_for_another_reader(compiled, tmp_path, monkeypatch):
    first = row(compiled)
    monkeypatch.setattr(attest, "_disassembled", lambda *_: pytest.fail("read again"))
    assert row(compiled) == first
    stored = tmp_path / "attestation.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "reader": "another"}))
    monkeypatch.setattr(attest, "_disassembled", lambda *_: DISASSEMBLY.replace("REG:168", "REG:99"))
    assert row(compiled)["registers"] == 99
    for damage in ("", "{", "[]", '{"row": 1}'):
        stored.write_text(damage)
        assert row(compiled)["registers"] == 99


def test_row_read_from_the_source_is_made_again_once_there_is_a_disassembler(compiled, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(attest, "disassembler", lambda: None)
        assert row(compiled)["read_from"] == "source"
    assert row(compiled)["read_from"] == "sass"


def test_kernel_outside_of_the_cache_is_refused():
    with pytest.raises(KernelError, match="TILELANG_DISABLE_CACHE"):
        attest.table({"outputs": SimpleNamespace()})


def test_library_without_gpu_code_is_refused():
    with pytest.raises(KernelError, match="no GPU code"):
        attest.cubin(attest.ELF + bytes(64))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_chunks_ahead_are_the_loads_before_the_loop(ahead):
    assert cuda_source.chunks_ahead(source(ahead=ahead)) == ahead


def test_loads_of_the_first_chunks_may_stand_in_a_loop():
    looped = "  for (int m = 0; m < 2; ++m) {\n" + LOADS.replace("\n  ", "\n    ").replace("  #", "    #", 1) + "  }\n"
    assert cuda_source.chunks_ahead(SOURCE.format(before=looped, parameters="")) == 2


def test_kernel_without_loads_has_no_chunks_ahead():
    assert cuda_source.chunks_ahead("void f() {\n  for (int n = 0; n < 4; ++n) {\n    x[n] = 0;\n  }\n}") is None


ROLES = """
  __shared__ __align__(16) uint64_t full_mem[3];
  __shared__ __align__(16) uint64_t empty_mem[3];
  if (((int)threadIdx.x) < 128) {
    for (int n = 0; n < 16; ++n) {
      full[(n % 3)].wait(((n / 3) & 1));
      if (((int)threadIdx.x) < 64) {
        out[n] = 1;
      }
    }
  } else {
    for (int n_1 = 0; n_1 < 16; ++n_1) {
      empty[(n_1 % 3)].wait((((n_1 / 3) & 1) ^ 1));
      tl::tma_load(k_desc, full[(n_1 % 3)], (&(k_raw[0])), 0);
    }
  }
"""


def test_roles_are_branches_on_the_thread_that_wait_for_each_other():
    assert (cuda_source.roles(ROLES), cuda_source.roles(source())) == (2, 1)


def test_role_that_loads_is_ahead_by_the_slots_of_its_ring():
    assert cuda_source.chunks_ahead(ROLES) == 3


def test_role_with_a_barrier_for_each_kind_of_tile_has_no_depth():
    fixed = ROLES.replace("k_desc, full[(n_1 % 3)]", "k_desc, full[2]")
    assert cuda_source.chunks_ahead(fixed) is None


def test_three_dimensional_staging_shows(compiled):
    compiled.adapter.prim_func.script = lambda: program(shape="4, 16, 64")
    assert row(compiled)["layout_2d"] is False


def test_saved_psiv_shows_in_the_parameters(compiled, tmp_path):
    (tmp_path / "device_kernel.cu").write_text(source(parameters="const __grid_constant__ CUtensorMap psiv_desc"))
    assert row(compiled)["psiv_cache"] is True


def test_source_hash_ignores_workspace_numbers_only():
    assert cuda_source.normalised("workspace_3[1]") == cuda_source.normalised("workspace_12[1]") != "workspace[2]"


def made(name, **changes):
    live = {
        "tma": True, "layout_2d": True, "pipeline_stages": 1, "warp_specialize": False, "aggressive_smem_merge": False,
        "fast_math": True, "psiv_cache": False, "chunk_size": 16, "superchunk": 256, "super_chunks": 4,
        "dtype": "bfloat16",
    }  # fmt: skip
    row = {"name": name, "read_from": "sass", "source_sha256": "a", "binary_sha256": "b", **live, **changes}
    return {key: value for key, value in row.items() if value is not None}


def forward(**changes):
    return [made("local_states", **changes), made("pass_states"), made("outputs")]


def pass_facts(rows):
    return {name.removeprefix("mamba3_mimo."): value for name, value in attest.facts(rows).items()}


def test_facts_of_a_pass_are_what_all_its_walks_show():
    facts = pass_facts([*forward(), made("tables", tma=False, chunk_size=8)])
    shown = [gate for gate, kernels in attest.SHOWN_BY.items() if {"local_states", "outputs"} & set(kernels)]
    assert set(attest.SHOWN_BY) - set(shown) == {"aggressive_smem_merge", "warp_specialize"}  # B3 alone shows them
    assert {name: facts[name] for name in shown} == {name: made("outputs")[name] for name in shown}
    assert (facts["lane"], facts["schedule"]) == ("cuda", "chunk_parallel")


@pytest.mark.parametrize("gate", [gate for gate, kernels in attest.SHOWN_BY.items() if "local_states" in kernels])
def test_one_walk_that_differs_or_shows_nothing_makes_a_gate_mixed(gate):
    assert pass_facts(forward(**{gate: "another"}))[gate] == "mixed"
    assert pass_facts(forward(**{gate: None}))[gate] == "mixed"
    silent = [made("outputs", **{gate: None}), made("gradients", **{gate: None}), made("pass_states")]
    assert pass_facts(silent)[gate] == "unproved"


def test_passes_without_walks_say_nothing_about_gates():
    assert set(pass_facts([made("tables")])) == {"attested_from", "source_hash", "binary_hash"}


def test_fast_math_is_not_asked_of_the_source():
    assert "fast_math" not in pass_facts([made("outputs", read_from="source", fast_math=None)])


def test_walk_of_one_chunk_need_not_show_how_many_are_ahead():
    one = {"superchunk": 16, "chunk_size": 16, "pipeline_stages": None}
    assert "pipeline_stages" not in pass_facts([made("outputs", **one)])
    assert pass_facts([made("outputs", **{**one, "superchunk": None})])["pipeline_stages"] == "unproved"


def test_one_block_for_a_whole_row_shows_no_super_chunk():
    facts = pass_facts([made("outputs", super_chunks=1, superchunk=1008)])
    assert "superchunk" not in facts


@pytest.mark.parametrize(
    ("walks", "handed", "schedule"),
    [
        (4, 4, "chunk_parallel"),
        (1, 1, "chunk_parallel"),
        ("unproved", 4, "mixed"),
        (1, None, "sequential"),
        (4, None, "mixed"),
        (1, 4, "mixed"),
        (4, "unproved", "mixed"),
        (None, None, "mixed"),
        (None, 4, "mixed"),
    ],
)
def test_schedule_is_what_grids_and_launches_say_together(walks, handed, schedule):
    rows = [made("outputs", super_chunks=walks)]
    rows += [] if handed is None else [made("pass_states", super_chunks=handed)]
    assert pass_facts(rows)["schedule"] == schedule


def test_source_hash_changes_with_any_kernel_and_binary_hash_by_itself():
    one, other = (attest.facts([made("outputs"), made("tables", source_sha256=which)]) for which in "ac")
    assert one["mamba3_mimo.source_hash"] != other["mamba3_mimo.source_hash"]
    assert one["mamba3_mimo.binary_hash"] == other["mamba3_mimo.binary_hash"]


def test_every_switch_is_read_by_the_kernels():
    folder = Path(attest.__file__).parents[1]
    text = "".join(path.read_text() for path in folder.rglob("*.py") if path.name not in {"attest.py", "variant.py"})
    assert {switch.name for switch in fields(ScanSwitches)} - set(re.findall(r"\.(\w+)", text)) == {"lane"}


def test_every_switch_is_read_from_the_code_unless_the_launch_itself_shows_it():
    of_the_launch = {"lane", "schedule", "remat", "heads_in_turn"}
    assert {switch.name for switch in fields(ScanSwitches)} - of_the_launch == set(attest.SHOWN_BY) - {"dtype"}
