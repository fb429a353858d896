"""The reader of compiled kernels, on pieces of code written here: no compiler and no GPU are needed."""

import json
import re
import struct
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.errors import KernelError
from kernels.mamba3_mimo.cuda import attest
from kernels.scan import ScanSwitches

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
  (((TVMFFIAny*)stack_ffi_any)[30].v_int64) = ((int64_t)16);
  (((TVMFFIAny*)stack_ffi_any)[36].v_int64) = ((int64_t)112384);
  (((TVMFFIAny*)stack_ffi_any)[37].v_int64) = (int64_t)0;
"""
PROGRAM = """
gw_s_1 = T.sblock_alloc_buffer(({shape}), "bfloat16", data=gw_s, scope="shared.dyn")
T.tma_copy(T.region(q[b, t0, r, h // 2, 0], 1, 1, 16, 1, 1, 64), T.region(gw_s_1[0], 2, 16, 64), barrier=bar_1[0])
"""


def source(*, ahead: int = 1, parameters: str = "float* out") -> str:
    return SOURCE.format(before=LOADS * ahead, parameters=parameters)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A compiled kernel as TileLang 0.1.15 leaves it in its cache, with `cuobjdump` replaced by what it prints."""
    gpu_code = attest.ELF + bytes(14) + struct.pack("<H", attest.EM_CUDA) + b"code"
    (tmp_path / "executable.so").write_bytes(attest.ELF + bytes(14) + struct.pack("<H", 62) + b"host" + gpu_code)
    (tmp_path / "device_kernel.cu").write_text(source())
    (tmp_path / "host_kernel.cu").write_text(HOST)
    monkeypatch.setattr(attest, "disassembler", lambda: "cuobjdump")
    monkeypatch.setattr(attest, "_disassembled", lambda _tool, code: DISASSEMBLY if code == gpu_code else "")
    program = SimpleNamespace(script=lambda: PROGRAM.format(shape="64, 64"))
    return SimpleNamespace(
        _tilelang_cache_path=str(tmp_path), adapter=SimpleNamespace(pass_configs={}, prim_func=program)
    )


def row(kernel):
    (found,) = attest.table({"outputs": kernel})
    return found


def test_row_counts_what_is_in_the_machine_code(compiled):
    found = row(compiled)
    expected = {
        "read_from": "sass", "threads": 128, "registers": 168, "stack_bytes": 16, "shared_bytes": 112384 + 2048,
        "instructions": 16, "tma_loads": 2, "tma_stores": 1, "cp_async": 1, "wgmma": 1, "mma": 0, "mbarrier": 1,
        "register_reallocations": 1, "barriers": 1, "approximations": 1, "spill_loads": 1, "spill_stores": 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_row_shows_the_gates(compiled):
    found = row(compiled)
    gates = ("tma", "layout_2d", "pipeline_stages", "fast_math", "psiv_cache", "aggressive_smem_merge")
    assert [found[gate] for gate in gates] == [True, True, 1, True, False, False]


def test_row_is_read_from_the_source_where_no_disassembler_is(compiled, monkeypatch):
    monkeypatch.setattr(attest, "disassembler", lambda: None)
    found = row(compiled)
    assert (found["read_from"], found["tma"], found["shared_bytes"], found["tma_loads"]) == ("source", True, 112384, 4)
    assert not {"registers", "fast_math", "binary_sha256"} & set(found)


def test_row_is_kept_beside_the_code_and_made_again_for_another_reader(compiled, tmp_path, monkeypatch):
    first = row(compiled)
    monkeypatch.setattr(attest, "_disassembled", lambda *_: pytest.fail("read again"))
    assert row(compiled) == first
    stored = tmp_path / "attestation.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "reader": "another"}))
    monkeypatch.setattr(attest, "_disassembled", lambda *_: DISASSEMBLY.replace("REG:168", "REG:99"))
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
    assert attest.chunks_ahead(source(ahead=ahead)) == ahead


def test_loads_of_the_first_chunks_may_stand_in_a_loop():
    looped = "  for (int m = 0; m < 2; ++m) {\n" + LOADS.replace("\n  ", "\n    ").replace("  #", "    #", 1) + "  }\n"
    assert attest.chunks_ahead(SOURCE.format(before=looped, parameters="")) == 2


def test_kernel_without_loads_has_no_chunks_ahead():
    assert attest.chunks_ahead("void f() {\n  for (int n = 0; n < 4; ++n) {\n    x[n] = 0;\n  }\n}") is None


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
    assert (attest.roles(ROLES), attest.roles(source())) == (2, 1)


def test_role_that_loads_is_ahead_by_the_slots_of_its_ring():
    assert attest.chunks_ahead(ROLES) == 3


def test_role_with_a_barrier_for_each_kind_of_tile_has_no_depth():
    fixed = ROLES.replace("k_desc, full[(n_1 % 3)]", "k_desc, full[2]")
    assert attest.chunks_ahead(fixed) is None


def test_three_dimensional_staging_shows(compiled):
    compiled.adapter.prim_func.script = lambda: PROGRAM.format(shape="4, 16, 64")
    assert row(compiled)["layout_2d"] is False


def test_saved_psiv_shows_in_the_parameters(compiled, tmp_path):
    (tmp_path / "device_kernel.cu").write_text(source(parameters="const __grid_constant__ CUtensorMap psiv_desc"))
    assert row(compiled)["psiv_cache"] is True


def test_source_hash_ignores_workspace_numbers_only():
    assert attest.normalised("workspace_3[1]") == attest.normalised("workspace_12[1]") != "workspace[2]"


def made(name, **changes):
    same = {"read_from": "sass", "tma": True, "source_sha256": "a", "binary_sha256": "b", "fast_math": True}
    return {"name": name, **same, **changes}


def test_facts_take_a_gate_from_the_walks_alone():
    rows = [made("outputs"), made("tables", tma=False)]
    assert attest.facts(rows)["mamba3_mimo.tma"] is True


def test_facts_of_walks_that_differ_are_mixed():
    rows = [made("outputs"), made("local_states", tma=False)]
    assert attest.facts(rows)["mamba3_mimo.tma"] == "mixed"


def test_facts_without_evidence_are_left_out():
    assert "mamba3_mimo.layout_2d" not in attest.facts([made("outputs")])


def test_source_hash_changes_with_any_kernel_and_binary_hash_by_itself():
    one, other = (attest.facts([made("outputs"), made("tables", source_sha256=which)]) for which in "ac")
    assert one["mamba3_mimo.source_hash"] != other["mamba3_mimo.source_hash"]
    assert one["mamba3_mimo.binary_hash"] == other["mamba3_mimo.binary_hash"]


def test_every_switch_is_read_by_the_kernels():
    folder = Path(attest.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name not in {"attest.py", "variant.py"})
    assert {switch.name for switch in fields(ScanSwitches)} - set(re.findall(r"\.(\w+)", text)) == {"lane"}


def test_every_switch_is_read_from_the_code_unless_the_launch_itself_shows_it():
    of_the_launch = {"lane", "schedule", "chunk_size", "superchunk"}
    assert {switch.name for switch in fields(ScanSwitches)} - of_the_launch == set(attest.SHOWN_BY)
