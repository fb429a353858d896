"""The peer lane with a stand-in for mamba-ssm: a package of the same shape that computes with our reference."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo import peer
from tests.kernels.accuracy import compare
from tests.kernels.bench import runs
from tests.kernels.bench.work import Worker
from tests.kernels.exact import reference
from tests.kernels.problem import Case, make_grad, make_inputs, outputs

STAND_IN = """
import torch


class Dynamic:
    # a size known at run time: TileLang makes a new object in every call and takes long to print it

    def __init__(self, name):
        self.name = name

    __str__ = None


def mamba_mimo_forward(q, k, v, segsum=None, chunk_size=16):
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_fwd

    return mamba3_mimo_fwd.mamba_mimo_fwd(*map(Dynamic, "BSHG"), 64, threads=128)


def mamba_mimo_bwd_combined(dout, q, k, v, segsum=None, chunk_size=16):
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd

    return mamba3_mimo_bwd.mamba_mimo_bwd_bwd(*map(Dynamic, "BSHG"), 64, threads=256)


def mamba_mimo_forward_varlen(q, k, v, segsum=None, chunk_size=16):
    return None


mamba_mimo_bwd_combined_varlen = mamba_mimo_forward_varlen


from ablate.kernels import facts
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import cumulated_angles, psiv, state_turned_back
from ablate.kernels.mamba3_mimo.reference import chunk_parallel


def mamba3_mimo(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D, Z,
                chunk_size, rotary_dim_divisor, dtype, return_state=False, cu_seqlens=None):
    assert Trap.dtype == dtype == Q.dtype == torch.bfloat16
    assert ADT.dtype == DT.dtype == Angles.dtype == Q_bias.dtype == D.dtype == torch.float32
    assert rotary_dim_divisor * Angles.shape[-1] == Q.shape[-1]
    launch = mamba_mimo_forward if cu_seqlens is None else mamba_mimo_forward_varlen
    segsum = DT.new_zeros(*DT.shape[:2], -(-DT.shape[2] // chunk_size), chunk_size, chunk_size)  # with the axes of q
    launch(Q, K, V, segsum, chunk_size=chunk_size)
    if cu_seqlens is None:
        rows = [slice(0, Q.shape[1])]
    else:
        assert cu_seqlens.dtype == torch.int32 and Q.shape[0] == 1
        cuts = cu_seqlens.tolist()
        rows = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
    outputs = []
    for t in rows:
        inputs = ScanInputs(
            q=Q[:, t], k=K[:, t], v=V[:, t], z=Z[:, t], q_bias=Q_bias, k_bias=K_bias, psi=MIMO_V, zeta=MIMO_Z,
            phi=MIMO_Out, D=D, adt=ADT[..., t], dt=DT[..., t], trap=Trap[..., t], angles=Angles[:, t],
        )
        with facts.collect():
            o, state = chunk_parallel(inputs, psiv(inputs.v, inputs.psi), chunk_size=chunk_size)
        last = cumulated_angles(inputs, None)[:, :, -1]
        outputs.append((o, state_turned_back(state, last.cos(), -last.sin())))  # counted from the document's start
    out = torch.cat([o for o, _ in outputs], dim=1)
    state = torch.cat([s for _, s in outputs]).transpose(2, 3)
    return (out, None, state.detach(), None, None) if return_state else out
"""


BUILDERS = """
from dataclasses import dataclass

from tilelang import PassConfigKey

ROLES = "if (128 <= threadIdx.x) {\\n  full.wait(0);\\n} else {\\n  empty.wait(0);\\n}"


class Kernel(list):
    source = "copy();"

    def get_kernel_source(self):
        return self.source


@dataclass
class Builder:
    pass_configs: dict

    def __call__(self, *sizes, **named):
        kernel = Kernel([sizes, named])
        off = {self.pass_configs[PassConfigKey.TL_DISABLE_TMA_LOWER],
               self.pass_configs[PassConfigKey.TL_DISABLE_WARP_SPECIALIZED]}
        if off == {False}:
            kernel.source = ROLES
        assert len(off) == 1 and self.pass_configs["kept"]
        return kernel


OFF = {PassConfigKey.TL_DISABLE_TMA_LOWER: True, PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True, "kept": True}
"""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has loaded neither TileLang nor mamba-ssm."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("mamba_ssm", "tilelang")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    peer.official.cache_clear()
    yield
    peer.official.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("mamba_ssm", "tilelang")]:
        del sys.modules[name]


VERSIONS = {"release": peer.MAMBA_SSM, "checkout": f"{peer.MAMBA_SSM}+ge9594ce1c732"}
OF_A_CHECKOUT = {
    '*map(Dynamic, "BSHG")': "*q.shape[:2], v.shape[2], q.shape[3]",
    "cu_seqlens=None):": "cu_seqlens=None, fuse_norm=False, norm_eps=1e-5):\n    assert not fuse_norm",
}
"""Text of the stand-in for the release -> that of one for main: fixed sizes, and arguments of a fused norm."""


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, bare: None) -> Path:
    """A folder with the stand-in, whose own __init__ must not run. Its parameter is a key of VERSIONS."""
    kind = getattr(request, "param", "release")
    stand_in = STAND_IN
    for text, of_main in OF_A_CHECKOUT.items() if kind == "checkout" else ():
        assert text in stand_in
        stand_in = stand_in.replace(text, of_main)
    package = tmp_path / "mamba_ssm" / "ops" / "tilelang" / "mamba3"
    package.mkdir(parents=True)
    for name, builders in peer.BUILDERS.items():
        (package / f"{name}.py").write_text(BUILDERS + "".join(f"{builder} = Builder(OFF)\n" for builder in builders))
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("raise RuntimeError('the CUDA extension would load here')\n")
    (package / "mamba3_mimo.py").write_text(stand_in)
    options = "TL_DISABLE_TMA_LOWER TL_DISABLE_WARP_SPECIALIZED"
    (tmp_path / "tilelang.py").write_text(
        f"import enum\n__version__ = {peer.TILELANG!r}\nPassConfigKey = enum.Enum('PassConfigKey', {options!r})\n"
    )
    for name, version in (("tilelang", peer.TILELANG), ("mamba_ssm", VERSIONS[kind])):
        described = tmp_path / f"{name}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return tmp_path


@pytest.mark.parametrize(("site", "version"), VERSIONS.items(), indirect=["site"])
@pytest.mark.parametrize(
    ("length", "documents", "shared", "kernels"),
    [(48, 1, False, "dense"), (45, 1, False, "packed"), (45, 3, False, "packed"), (48, 3, True, "packed")],
)
def test_peer_scan_agrees_with_the_reference(
    site: Path, version: str, length: int, documents: int, shared: bool, kernels: str
) -> None:
    peer.use_site(site)
    case = Case(B=2, S=length, H=4, N=32, P=32, R=2, documents=documents, shared_angles=shared)
    inputs = make_inputs(case, "cpu")
    grad_out = make_grad(inputs, case.seed + 1)
    with facts.collect() as said:
        got = outputs(lambda given: peer.peer_scan(given, chunk_size=16, return_final_state=True), inputs, grad_out)
    errors = compare(got, reference(inputs, grad_out))
    assert max(overall for overall, _ in errors.values()) < 0.03
    assert got["state"].shape == (2, 4, 32, 32)
    assert said["mamba3_mimo.lane"] == "peer"
    assert said["mamba3_mimo.dtype"] == "bfloat16"
    assert said["mamba3_mimo.peer_kernels"] == kernels
    assert said["mamba3_mimo.peer"] == f"mamba-ssm {version}, tilelang 0.1.8"
    assert Worker(Lane.PEER).versions()["mamba-ssm"] == version, "the page of the bench names it"


def test_peer_scan_takes_the_dense_kernels_when_no_row_changes_document(site: Path) -> None:
    peer.use_site(site)
    inputs = make_inputs(Case(B=2, S=32, N=32, P=32, R=2), "cpu")
    same = torch.tensor([[7] * 32, [3] * 32])
    with facts.collect() as said:
        peer.peer_scan(type(inputs)(**{**vars(inputs), "segment_ids": same}), chunk_size=16)
    assert said["mamba3_mimo.peer_kernels"] == "dense"


def test_official_kernels_are_built_once_for_equal_sizes(site: Path) -> None:
    peer.use_site(site)
    peer.official()
    built = sys.modules[f"{peer.FOLDER}.mamba3_mimo_bwd"].mamba_mimo_bwd_fwd
    assert built(64, "S", threads=128) is built(64, "S", threads=128)
    assert built(64, "S", threads=256) is not built(64, "S", threads=128)
    assert built(32, "S") == [(32, "S"), {}]


@pytest.mark.parametrize("site", ["release", "checkout"], indirect=True)
def test_official_kernels_of_dense_rows_are_built_for_their_sizes(site: Path) -> None:
    peer.use_site(site)
    peer.official()
    module = sys.modules[f"{peer.FOLDER}.mamba3_mimo"]
    q, v = torch.zeros(2, 48, 4, 1, 64), torch.zeros(2, 48, 16, 64)
    assert module.mamba_mimo_forward(q, q, v) == [(2, 48, 16, 1, 64), {"threads": 128}]
    assert module.mamba_mimo_bwd_combined(v, q, q, v) == [(2, 48, 16, 1, 64), {"threads": 256}]
    assert module.mamba_mimo_forward(q, q, v) is module.mamba_mimo_forward(q, q, v)
    assert module.mamba_mimo_forward(q[:1], q[:1], v[:1])[0][0] == 1


def test_forward_kernel_has_a_copying_warp_group_where_a_scan_asks_for_it(site: Path) -> None:
    peer.use_site(site)
    inputs = make_inputs(Case(B=2, S=32, N=32, P=32, R=2), "cpu")
    hashes = set()
    for asked in (False, True, False):
        with facts.collect() as recorded:
            peer.peer_scan(inputs, chunk_size=16, warp_specialize=asked)
        assert recorded["mamba3_mimo.warp_specialize"] is asked
        hashes.add(recorded["mamba3_mimo.source_hash.forward"])
    assert len(hashes) == 2
    module = sys.modules[f"{peer.FOLDER}.mamba3_mimo_bwd"]
    assert module.mamba_mimo_bwd_bwd(64).get_kernel_source() == "copy();"


@pytest.mark.parametrize(("length", "documents"), [(45, 1), (48, 3)])
def test_copying_warp_group_is_refused_for_packed_rows(site: Path, length: int, documents: int) -> None:
    peer.use_site(site)
    inputs = make_inputs(Case(B=2, S=length, N=32, P=32, R=2, documents=documents), "cpu")
    with pytest.raises(KernelUnsupported, match="allowed: one document of whole chunks each"):
        peer.peer_scan(inputs, chunk_size=16, warp_specialize=True)


def test_arguments_pack_rows_and_name_every_document() -> None:
    inputs = make_inputs(Case(B=2, S=6, H=2, N=32, P=32, R=2), "cpu")
    ids = torch.tensor([[7, 7, 7, 9, 9, 9], [9, 9, 9, 9, 9, 7]])
    packed = peer.packing(replace(inputs, segment_ids=ids), 2)
    assert packed is not None
    arguments = peer.arguments(inputs, packed)
    assert arguments["cu_seqlens"].tolist() == [0, 3, 6, 11, 12]
    assert arguments["cu_seqlens"].dtype == torch.int32
    assert packed.last_B.tolist() == [1, 3]
    assert arguments["Q"].shape == (1, 12, 2, 1, 32)
    assert torch.equal(arguments["Q"][0, 7], inputs.q[1, 1])
    assert torch.equal(arguments["DT"][0, 1, 8], inputs.dt[1, 1, 2])


def test_packing_of_rows_without_documents_is_known_without_the_device() -> None:
    inputs = make_inputs(Case(B=3, S=10, N=32, P=32, R=2), "cpu")
    packed = peer.packing(inputs, 16)
    assert packed is not None
    assert packed.offsets.tolist() == [0, 10, 20, 30]
    assert packed.last_B.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_packing_agrees_with_a_count_row_by_row(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    batch, tokens = (int(torch.randint(1, high, (), generator=gen)) for high in (4, 40))
    ids = torch.randint(0, 3, (batch, tokens), generator=gen)
    inputs = replace(make_inputs(Case(B=batch, S=tokens, N=32, P=32, R=1), "cpu"), segment_ids=ids)
    flat = [(row, ids[row, at].item()) for row in range(batch) for at in range(tokens)]
    starts = [at for at in range(len(flat)) if at == 0 or flat[at] != flat[at - 1]]
    packed = peer.packing(inputs, 8)
    if len(starts) == batch and tokens % 8 == 0:
        assert packed is None
        return
    assert packed is not None
    assert packed.offsets.tolist() == [*starts, len(flat)]
    assert packed.last_B.tolist() == [sum(at < (row + 1) * tokens for at in starts) - 1 for row in range(batch)]


class NoWaiting(TorchDispatchMode):
    """Fails at what makes the host wait for a GPU: reading a tensor's content."""

    reading = ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "unique_consecutive", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.reading, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_nothing_waits_and_nothing_is_looked_up_in_a_dense_scan(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.use_site(site)
    inputs = make_inputs(Case(B=2, S=32, N=32, P=32, R=2), "cpu")
    grad_out = make_grad(inputs, 1)
    outputs(lambda given: peer.peer_scan(given, chunk_size=16, return_final_state=True), inputs, grad_out)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pytest.fail(f"version of {name} looked up"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail(f"{name} looked for"))
    with facts.collect() as said, NoWaiting():
        outputs(lambda given: peer.peer_scan(given, chunk_size=16, return_final_state=True), inputs, grad_out)
    assert said["mamba3_mimo.peer"] == "mamba-ssm 2.3.2.post1, tilelang 0.1.8"


@pytest.mark.parametrize(("length", "documents"), [(32, 1), (45, 1), (45, 3), (32, 3)])
def test_a_batch_is_looked_at_once(length: int, documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the rows are packed; the stand-in, which reads the offsets, is replaced by one that does not."""
    inputs = make_inputs(Case(B=2, S=length, N=32, P=32, R=2, documents=documents), "cpu")

    def computes_nothing(**given: Any) -> tuple[Any, ...]:
        rows = 2 if given["cu_seqlens"] is None else given["cu_seqlens"].numel() - 1
        return given["V"] * 1, None, torch.zeros(rows, 4, 32, 32), None, None

    monkeypatch.setattr(peer, "official", lambda: peer.Official(function=computes_nothing, release=""))
    if documents > 1:
        with pytest.raises(AssertionError, match="nonzero waits for the device"), NoWaiting():
            peer.peer_scan(inputs, chunk_size=16)
        peer.peer_scan(inputs, chunk_size=16)
    with NoWaiting():
        out, state = peer.peer_scan(inputs, chunk_size=16, return_final_state=True)
    assert torch.equal(out, inputs.v)
    assert state.shape == (2, 4, 32, 32)


def test_arguments_leave_out_what_is_not_given() -> None:
    inputs = make_inputs(Case(S=6, N=32, P=32, R=2), "cpu")
    bare_inputs = type(inputs)(**{**vars(inputs), "z": None, "zeta": None, "phi": None, "D": None})
    arguments = peer.arguments(bare_inputs, None)
    assert all(arguments[name] is None for name in ("Z", "MIMO_Z", "MIMO_Out", "D", "cu_seqlens"))


def test_official_function_is_timed_as_its_users_call_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.use_site(site)
    monkeypatch.setattr(runs, "make_inputs", lambda case: make_inputs(case, "cpu"))
    timed = runs.scan(Lane.PEER, Case(B=2, S=32, N=32, P=32, R=2), {"chunk_size": 16})
    assert timed.inputs is not None
    got = {name: t.detach() for name, t in zip(timed.names, timed.both(), strict=True)}
    want = reference(timed.inputs, timed.grad_out)
    assert {*want} - {*got} == {"state"}
    assert max(overall for overall, _ in compare(got, {name: want[name] for name in got}).values()) < 0.03
    monkeypatch.setattr(peer, "packing", lambda *_: pytest.fail("the peer's wrapper ran"))
    monkeypatch.setattr(peer, "arguments", lambda *_: pytest.fail("the peer's wrapper ran"))
    with NoWaiting():
        (out,) = timed.forward()
        timed.both()
    assert torch.equal(out, got["out"])


def test_rows_that_must_be_packed_are_not_timed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.use_site(site)
    monkeypatch.setattr(runs, "make_inputs", lambda case: make_inputs(case, "cpu"))
    with pytest.raises(KernelUnsupported, match="packed rows are not timed"):
        runs.scan(Lane.PEER, Case(S=30, N=32, P=32, R=2), {"chunk_size": 16})


def test_use_site_without_the_package_says_how_to_install_it(tmp_path: Path, bare: None) -> None:
    before = list(sys.path)
    with pytest.raises(KernelUnsupported, match=r"not installed; .*`make peer`.*ABLATE_PEER_SITE.*folder: /"):
        peer.use_site(tmp_path)
    assert sys.path == before


def test_use_site_after_another_tilelang_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = type(sys)("tilelang")
    loaded.__version__ = "0.1.15"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tilelang", loaded)
    with pytest.raises(KernelUnsupported, match=r"TileLang is 0.1.15 and loaded here, .*only one"):
        peer.use_site(site)


def test_use_site_with_a_wrong_tilelang_is_refused(site: Path) -> None:
    (site / "tilelang-0.1.8.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 9\n")
    with pytest.raises(KernelUnsupported, match="TileLang is 9"):
        peer.use_site(site)


@pytest.mark.parametrize(
    ("case", "chunk_size", "reason"),
    [
        (Case(N=48), 16, "N is 48; allowed: 16, 32, 64, 128, 256"),
        (Case(P=16), 16, "P is 16; allowed: 32, 64, 128"),
        (Case(R=3), 16, "R is 3; allowed: 1, 2, 4, 8"),
        (Case(N=256, P=128, R=1), 16, "N=256 with P=128 does not compile"),
        (Case(H=8, G=4), 16, "G is 4 with H=8; allowed: 1 or H"),
        (Case(), 4, "chunk_size is 4; allowed: 8, 16, 32, 64"),
        (Case(), 32, "chunk_size \\* R is 128; allowed: up to 64"),
        (Case(cumulated=True), 16, "angles are cumulated; allowed: raw angles"),
        (Case(S=1), 16, "S is 1; allowed: at least 2"),
    ],
)
def test_refusal_names_what_was_given_and_what_is_allowed(site: Path, case: Case, chunk_size: int, reason: str) -> None:
    peer.use_site(site)
    with pytest.raises(KernelUnsupported, match=f"lane 'peer': {reason}"):
        peer.peer_scan(make_inputs(case, "cpu"), chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("text", "other", "why"),
    [
        ("return_state=False, cu", "norm, return_state=False, cu", "missing a required argument: 'norm'"),
        ("return_state=False, cu", "return_state=False, offsets=None, of", "argument 'cu_seqlens'"),
        ("def mamba_mimo_forward(", "def forward(", "no attribute 'mamba_mimo_forward'"),
        ("def mamba3_mimo(", "def mamba3(", "no attribute 'mamba3_mimo'"),
        ("import torch", "import no_such_package", "No module named 'no_such_package'"),
    ],
)
@pytest.mark.parametrize("site", ["checkout"], indirect=True)
def test_package_with_another_scan_is_refused(site: Path, text: str, other: str, why: str) -> None:
    module = site / "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo.py"
    assert text in module.read_text()
    module.write_text(module.read_text().replace(text, other, 1))
    peer.use_site(site)
    with pytest.raises(KernelUnsupported) as refused:
        peer.official()
    assert why in str(refused.value)
    assert f"the scan of mamba-ssm {VERSIONS['checkout']}, tilelang 0.1.8" in str(refused.value)
    assert "make peer PEER=path" in str(refused.value)


def test_refusal_of_another_dtype(site: Path) -> None:
    inputs = make_inputs(Case(S=8), "cpu")
    wide = inputs.with_tensors(tuple(t.double() for t in inputs.tensors()))
    assert "q, k, v have dtype torch.float64; allowed: torch.bfloat16" in str(peer.refusal(wide, 16))
    assert peer.refusal(inputs, 16) is None


def test_refusal_of_a_backward_pass_at_the_smallest_state(site: Path) -> None:
    inputs = make_inputs(Case(S=8, N=16), "cpu")
    trained = inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))
    assert "N is 16; allowed: from 32 for a backward pass" in str(peer.refusal(trained, 16))
    with torch.no_grad():
        assert peer.refusal(trained, 16) is None
