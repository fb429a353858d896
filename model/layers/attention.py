"""Causal self-attention within documents, with rotary positions, and its implementations.

Legend: B batch, S sequence, D d_model, H heads of queries, K heads of keys and values, E head width, L rank of latent
attention. Positions run over the whole row. They need no reset per document, because rotary scores depend only on
differences.

The gate `attention` chooses the implementation. Each takes q [B,S,H,E], k and v [B,S,K,E] and segment ids [B,S] and
returns [B,S,H,E], so that tensors and gradients cross the border of a compiled graph as they lie in memory. A token
attends to itself and to the earlier tokens of its document, or with a window W to W of them. Query head h reads the
keys of head h // (H / K). A document is a run of equal ids, so an id that returns later in the
row starts another document.

    sdpa    torch chooses the kernel, with an explicit mask [B,1,S,S]; dense attention on XLA
    flash   on a GPU, FlashAttention-2 over documents laid end to end, without a mask. Never traced: the number of
            documents and the longest one change with every batch, so a specialised graph would be compiled every time.
            On XLA, torch_xla's kernel for TPUs
    fa4     FlashAttention-4 (package flash-attn-4) for Hopper GPUs, over documents as `flash`, deterministic
    cudnn   cuDNN's kernel, with an explicit mask; not in a deterministic step, so in no trial
    flex    a kernel that torch generates from the mask's definition and that skips blocks of other documents
    splash, pallas_softcap   kernels for TPUs (kernels/xla/attention.py)

No implementation replaces another. One that cannot run, cannot cap scores (`softcap`) or has no window raises
KernelUnsupported with the reason. All get a copy of shared heads of keys for every head of queries.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ablate.kernels import facts
from ablate.kernels.documents import documents, once_per_batch
from ablate.kernels.errors import KernelUnsupported
from ablate.model.back_end_limits import FA4_WIDTHS, NEVER_CAPPED, NO_WINDOW, RULED_WIDTHS
from ablate.model.config import HybridConfig
from ablate.model.facts import ModelFact
from ablate.model.layers.linear import RMSNorm, projections

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class ScoreRules(NamedTuple):
    """What an implementation does to the scores besides the document mask."""

    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap) before the mask; 0 caps nothing."""
    window: int = 0
    """Tokens that a token sees at most, itself among them; 0: its whole document."""


PLAIN = ScoreRules()

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, ScoreRules], Tensor]
"""(q [B,S,H,E], k, v [B,S,K,E], segment ids [B,S], rules) -> attended values [B,S,H,E]."""

Rotary: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and sine [S,1,E/2] of the angles of a row's positions, float32."""

HALF_DTYPES = (torch.bfloat16, torch.float16)
HOPPER = 9
"""Major compute capability of an H100 or H200."""


class CausalAttention(nn.Module):
    """Multi-head attention of a token over itself and the earlier tokens of its document."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        attention = config.attention
        self.backend, self.rules = attention.backend, ScoreRules(attention.softcap, attention.window)
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.kv_heads
        self.head_width, self.rope_theta = config.head_width, attention.rope_theta
        self.latent_rank = attention.latent_rank
        self.rotated_width = self.head_width // 2 if self.latent_rank else self.head_width
        projection = projections(config, compute_dtype)
        self.qkv_proj = projection(config.d_model, sum(config.attention_widths))
        self.out_proj = projection(config.d_model, config.d_model)
        self.q_norm = self.k_norm = self.latent_norm = None
        if attention.qk_norm != "none":
            self.q_norm, self.k_norm = RMSNorm(self.head_width), RMSNorm(self.head_width)
        if self.latent_rank:
            self.latent_norm = RMSNorm(self.latent_rank)
            self.latent_proj = projection(self.latent_rank, config.latent_width)
        self.pieces_before = 0
        """Pieces of each row that other devices hold before this one (model/parallel/context.py)."""
        self.attend = ATTEND[self.backend]

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Return the attended tokens [B,S,D]. Raises KernelUnsupported if the backend cannot run here.

        `rotary` are the tables of `rotary_tables` for S positions; without them this layer computes its own.
        """
        rotary = rotary or self.rotary_tables(x_BSD.shape[1], x_BSD.device)
        heads = self._latent_heads if self.latent_rank else self._heads
        attended_BSHE = self.attend(*heads(self.qkv_proj(x_BSD), rotary), segment_ids_BS, self.rules)
        mixed: Tensor = self.out_proj(attended_BSHE.flatten(2))
        return mixed

    def _heads(self, projected_BSX: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B,S,H,E], k and v [B,S,K,E]."""
        heads_BSYE = projected_BSX.view(*projected_BSX.shape[:2], -1, self.head_width)
        q_BSHE, k_BSKE, v_BSKE = torch.split(heads_BSYE, [self.num_heads, *[self.num_kv_heads] * 2], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = (norm(x).to(x.dtype) for norm, x in ((self.q_norm, q_BSHE), (self.k_norm, k_BSKE)))
        return rotate(q_BSHE, rotary), rotate(k_BSKE, rotary), v_BSKE.contiguous()

    def _latent_heads(self, projected_BSX: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [B,S,H,E]. The second half of a head is rotated, the first one knows no positions."""
        half, widths = self.rotated_width, [self.num_heads * self.head_width, self.latent_rank, self.rotated_width]
        q_BSX, latent_BSL, turned_BSJ = torch.split(projected_BSX, widths, dim=2)
        shape = (*projected_BSX.shape[:2], self.num_heads, -1)
        assert self.latent_norm is not None  # noqa: S101  # latent attention has one
        made_BSHY = self.latent_proj(self.latent_norm(latent_BSL)).view(shape)
        q_BSHE, (k_BSHJ, v_BSHE) = q_BSX.reshape(shape), torch.split(made_BSHY, [half, self.head_width], dim=3)
        turned_BSHJ = rotate(turned_BSJ.unsqueeze(2), rotary).expand_as(k_BSHJ)
        q_BSHE = torch.cat((q_BSHE[..., :half], rotate(q_BSHE[..., half:], rotary)), dim=-1)
        return q_BSHE, torch.cat((k_BSHJ, turned_BSHJ), dim=-1), v_BSHE.contiguous()

    def rotary_tables(self, length: int, device: torch.device) -> Rotary:
        """Return the tables of this layer's angles for the `length` positions of this device's piece."""
        return rotary_tables(length, self.rotated_width, self.rope_theta, device, first=self.pieces_before * length)


def rotary_tables(length: int, width: int, theta: float, device: torch.device, *, first: int = 0) -> Rotary:
    """Return cosine and sine [S,1,E/2] float32 of the angles position * theta^(-2j/E) of pair j, from `first` on."""
    exponent_J = torch.arange(width // 2, device=device, dtype=torch.float32) / (width // 2)
    position_S = torch.arange(first, first + length, device=device, dtype=torch.float32)
    angle_S1J = (position_S.unsqueeze(1) * theta**-exponent_J).unsqueeze(1)
    return angle_S1J.cos(), angle_S1J.sin()


def rotate(x_BSHE: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs (j, E/2 + j) of every token by its angles, in float32. Returns a contiguous tensor like x."""
    cos_S1J, sin_S1J = rotary
    left, right = x_BSHE.float().chunk(2, dim=-1)
    turned = (left * cos_S1J - right * sin_S1J, left * sin_S1J + right * cos_S1J)
    return torch.cat(turned, dim=-1).to(x_BSHE.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _record(backend: str) -> None:
    facts.record(ModelFact.ATTENTION, backend)


def document_mask(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,1,S,S] bool: row t may attend to column u, that is u <= t in the same document."""
    run_BS = document_runs(segment_ids_BS)
    same_BSS = run_BS.unsqueeze(2) == run_BS.unsqueeze(1)
    return same_BSS.tril().unsqueeze(1)


def document_runs(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,S] int64: the number of document changes up to each token of its row."""
    changes = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return functional.pad(changes.cumsum(1), (1, 0))


def _sdpa(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, segment_ids_BS: Tensor, rules: ScoreRules = PLAIN) -> Tensor:
    return masked_attention(q_BSHE, k_BSHE, v_BSHE, document_mask(segment_ids_BS), rules)


def masked_attention(q_BSHE: Tensor, k: Tensor, v: Tensor, mask_B1SU: Tensor, rules: ScoreRules) -> Tensor:
    """Return the values [B,S,H,E] of queries over any keys and values [B,U,K,E] (`sdpa`).

    `mask_B1SU` says whether a query may see a key. The last key is at the position of the last query.
    """
    _record("sdpa")
    mask_B1SU, k, v = in_window(mask_B1SU, rules.window), *(for_every_head(t, q_BSHE) for t in (k, v))
    if rules.softcap:
        return _by_heads(partial(_capped_attention, mask_B1SK=mask_B1SU, softcap=rules.softcap), q_BSHE, k, v)
    return _by_heads(partial(functional.scaled_dot_product_attention, attn_mask=mask_B1SU), q_BSHE, k, v)


def in_window(mask_B1SU: Tensor, window: int) -> Tensor:
    """Return the mask without keys that lie `window` or more tokens before the query; 0 leaves all."""
    return mask_B1SU.triu(mask_B1SU.shape[3] - mask_B1SU.shape[2] - window + 1) if window else mask_B1SU


def for_every_head(t: Tensor, q: Tensor) -> Tensor:
    """Return keys or values [...,K,E] with a copy for each head of the queries [...,H,E]."""
    copies = q.shape[-2] // t.shape[-2]
    return t if copies == 1 else t.repeat_interleave(copies, dim=-2)


def _by_heads(attend: Callable[..., Any], q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor) -> Tensor:
    """Call `attend` with views [B,H,S,E] and return its result as a view [B,S,H,E]."""
    attended_BHSE: Tensor = attend(q_BSHE.transpose(1, 2), k_BSHE.transpose(1, 2), v_BSHE.transpose(1, 2))
    return attended_BHSE.transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _flash(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, segment_ids_BS: Tensor, rules: ScoreRules = PLAIN) -> Tensor:
    if q_BSHE.device.type == "xla":
        return _on_tpu("flash", q_BSHE, k_BSHE, v_BSHE, segment_ids_BS, rules)
    edges, longest = once_per_batch(segment_ids_BS, documents)
    return flash_attention(q_BSHE, k_BSHE, v_BSHE, DocumentEdges(edges, edges, longest, longest), rules)


class DocumentEdges(NamedTuple):
    """Documents of queries and of keys that are laid end to end, the same documents in the same order.

    A document has at least as many keys as queries, and its last query belongs to its last key.
    """

    of_queries: Tensor
    """[documents + 1] int32: first query of each document, then the number of queries."""
    of_keys: Tensor
    """[documents + 1] int32: first key of each document, then the number of keys."""
    most_queries: int
    """Queries of the longest document, or more."""
    most_keys: int
    """Keys of the longest document, or more."""


def flash_attention(q_BSHE: Tensor, k: Tensor, v: Tensor, edges: DocumentEdges, rules: ScoreRules) -> Tensor:
    """Return the values [B,S,H,E] of queries over the keys of their documents (`flash` on a GPU).

    `k` and `v` [...,K,E] are laid end to end. Raises KernelUnsupported if the kernel cannot run here.
    """
    from torch.nn.attention.varlen import varlen_attn

    _need_gpu("flash", q_BSHE, HALF_DTYPES, rules)
    _record("flash")
    q_THE, k_UHE, v_UHE = (for_every_head(t, q_BSHE).flatten(0, -3) for t in (q_BSHE, k, v))
    attended: Any = varlen_attn(q_THE, k_UHE, v_UHE, *edges, window_size=(rules.window - 1, 0))
    attended_BSHE: Tensor = attended.view(q_BSHE.shape)
    return attended_BSHE


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _fa4(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, segment_ids_BS: Tensor, rules: ScoreRules = PLAIN) -> Tensor:
    edges, longest = once_per_batch(segment_ids_BS, documents)
    return fa4_attention(q_BSHE, k_BSHE, v_BSHE, DocumentEdges(edges, edges, longest, longest), rules)


def fa4_attention(q_BSHE: Tensor, k: Tensor, v: Tensor, edges: DocumentEdges, rules: ScoreRules) -> Tensor:
    """Return the values [B,S,H,E] of queries over the keys of their documents (`fa4`), as `flash_attention`."""
    _need_gpu("fa4", q_BSHE, HALF_DTYPES, rules)
    problem = _fa4_problem(q_BSHE)
    if problem is not None:
        raise KernelUnsupported(f"attention 'fa4' {problem}")
    from flash_attn.cute import flash_attn_varlen_func

    attended: Any = flash_attn_varlen_func(
        *(for_every_head(t, q_BSHE).flatten(0, -3) for t in (q_BSHE, k, v)),
        cu_seqlens_q=edges.of_queries,
        cu_seqlens_k=edges.of_keys,
        max_seqlen_q=edges.most_queries,
        max_seqlen_k=edges.most_keys,
        causal=True,
        window_size=(rules.window - 1, 0) if rules.window else (None, None),
        softcap=rules.softcap,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    _record("fa4")
    attended_THE: Tensor = attended[0] if isinstance(attended, tuple) else attended
    return attended_THE.view(q_BSHE.shape)


def _fa4_problem(q_BSHE: Tensor) -> str | None:
    """Return why FlashAttention-4 cannot compute these heads, None if it can."""
    width, capability = q_BSHE.shape[-1], torch.cuda.get_device_capability(q_BSHE.device)
    if capability[0] != HOPPER:
        return f"runs on Hopper GPUs (compute capability 9.0); this one has {capability[0]}.{capability[1]}"
    if width not in FA4_WIDTHS:
        return f"takes heads of {', '.join(map(str, FA4_WIDTHS))} numbers; these have {width}"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "needs the package flash-attn-4"
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compared with float64 only so
def _cudnn(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, segment_ids_BS: Tensor, rules: ScoreRules = PLAIN) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _need_gpu("cudnn", q_BSHE, HALF_DTYPES, rules)
    _record("cudnn")
    attend = partial(functional.scaled_dot_product_attention, attn_mask=document_mask(segment_ids_BS))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _by_heads(attend, q_BSHE, *(for_every_head(t, q_BSHE) for t in (k_BSHE, v_BSHE)))


def _flex(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, segment_ids_BS: Tensor, rules: ScoreRules = PLAIN) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    _need_gpu("flex", q_BSHE, (*HALF_DTYPES, torch.float32), rules)
    _record("flex")
    mask = once_per_batch(segment_ids_BS, _block_mask_of(rules.window))
    k_BSHE, v_BSHE = (for_every_head(t, q_BSHE) for t in (k_BSHE, v_BSHE))
    return _by_heads(partial(_compiled(flex_attention), block_mask=mask), q_BSHE, k_BSHE, v_BSHE)


@cache
def _block_mask_of(window: int) -> Callable[[Tensor], "BlockMask"]:
    return partial(block_mask, window=window)


def block_mask(segment_ids_BS: Tensor, window: int = 0) -> "BlockMask":
    """Return the blocks of 128 by 128 scores with a visible score, and the mask's definition inside them."""
    from torch.nn.attention.flex_attention import create_block_mask

    run_BS = document_runs(segment_ids_BS)

    batch, length = segment_ids_BS.shape
    seen = window or length

    def visible(row: Tensor, _head: Tensor, t: Tensor, u: Tensor) -> Tensor:
        return (t >= u) & (t - u < seen) & (run_BS[row, t] == run_BS[row, u])

    make = _compiled(create_block_mask) if segment_ids_BS.is_cuda else create_block_mask
    mask: BlockMask = make(visible, batch, None, length, length, device=segment_ids_BS.device)
    return mask


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled. Uncompiled, both functions of flex attention build all S by S scores."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def _need_gpu(backend: str, q_BSHE: Tensor, dtypes: tuple[torch.dtype, ...], rules: ScoreRules) -> None:
    if not q_BSHE.is_cuda:
        raise KernelUnsupported(f"attention '{backend}' runs on an NVIDIA GPU; q is on {q_BSHE.device.type}")
    if q_BSHE.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        dtype = str(q_BSHE.dtype).removeprefix("torch.")
        raise KernelUnsupported(f"attention '{backend}' takes {allowed}; q is {dtype}")
    if rules.softcap and backend in NEVER_CAPPED:
        detail = f"cannot cap scores on a GPU; softcap is {rules.softcap}, allowed: 0"
        raise KernelUnsupported(f"attention '{backend}' {detail}")
    if rules.window and backend in NO_WINDOW:
        raise KernelUnsupported(f"attention '{backend}' has no window; it is {rules.window}, allowed: 0")
    if rules != PLAIN and q_BSHE.shape[-1] not in RULED_WIDTHS:
        allowed = ", ".join(map(str, RULED_WIDTHS))
        detail = f"with a window or capped scores takes heads of {allowed} numbers; these have {q_BSHE.shape[-1]}"
        raise KernelUnsupported(f"attention '{backend}' {detail}")


def _capped_attention(q_BHSE: Tensor, k_BHKE: Tensor, v_BHKE: Tensor, mask_B1SK: Tensor, softcap: float) -> Tensor:
    scores_BHSK = (q_BHSE @ k_BHKE.mT).float() * q_BHSE.shape[-1] ** -0.5
    capped_BHSK = softcap * torch.tanh(scores_BHSK / softcap)
    weights_BHSK = capped_BHSK.masked_fill(~mask_B1SK, -torch.inf).softmax(-1)
    return weights_BHSK.to(v_BHKE.dtype) @ v_BHKE


def _on_tpu(
    backend: str, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, segment_ids_BS: Tensor, rules: ScoreRules = PLAIN
) -> Tensor:
    from ablate.kernels.xla import attention as xla_attention  # lazy, for torch_xla and jax

    if rules.window or k_BSHE.shape[2] != q_BSHE.shape[2]:
        raise KernelUnsupported(f"attention '{backend}' on XLA has no window and no shared heads of keys")
    run_BS = document_runs(segment_ids_BS)

    def attend(*heads_BHSE: Tensor) -> Tensor:
        return xla_attention.KERNELS[backend](*heads_BHSE, run_BS, softcap=rules.softcap)

    attended_BSHE = _by_heads(attend, q_BSHE, k_BSHE, v_BSHE)
    _record(backend)
    return attended_BSHE


ATTEND: dict[str, Attend] = {
    "sdpa": _sdpa,
    "flash": _flash,
    "fa4": _fa4,
    "cudnn": _cudnn,
    "flex": _flex,
    "splash": partial(_on_tpu, "splash"),
    "pallas_softcap": partial(_on_tpu, "pallas_softcap"),
}
"""Value of the gate -> implementation."""
