"""Context parallel: the ranks of `Ranks.context` hold consecutive pieces of the same rows.

Legend: B batch, S tokens of a piece, C ranks (pieces of a row), K keys that a piece reads, D d_model, H heads,
E head width, P head width of the scan, N state size.

Scan. A rank starts from the state that the rank before leaves after its last token, layer by layer, and the gradient of
that state travels back. Rank 0 goes on to the next layer while rank 1 scans this one, so a rank lags behind the one
before by the scan of one layer, once per pass and not once per layer.

Attention. A rank needs keys and values of earlier ranks only for the document that its first token continues. Each rank
sends every later rank the end of its piece that this rank needs, and nothing where no document reaches so far. The
gradients of these keys come back and are added in float32. Since no rank waits for a later one, the lag stays as it is.
Where documents are longer than a piece, later ranks compute more scores: pieces are equal in tokens, not in work.

Messages go in the order of the layers, to later ranks in the forward pass and to earlier ones in the backward pass. In
each layer a rank first receives and then sends, to the nearest rank first. So no ranks wait for each other, even where
a message waits for its receiver and for all messages before it.

Every rank has to run the same passes, also the backward pass of a piece without a valid target. Before it ends, it has
to wait for the others (`Ranks.agree`), because its last messages may be on their way. A layer must not run again for
its backward pass (activation checkpoints), because it would send again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ablate.kernels.documents import documents, once_per_batch
from ablate.model.data.packing import Batch
from ablate.model.hybrid import Hybrid
from ablate.model.layers.attention import (
    CausalAttention,
    DocumentEdges,
    ScoreRules,
    document_runs,
    fa4_attention,
    flash_attention,
    masked_attention,
)
from ablate.model.layers.mamba3 import Mamba3
from ablate.model.parallel.ranks import Group, Ranks

MOST_PENDING = 16
"""Messages that a rank may have sent before the first of them is received."""


def spread_rows(model: Hybrid, ranks: Ranks) -> "PieceExchange":
    """Make the layers of `model` work on this rank's piece of every row, and return their exchange.

    Afterwards model(tokens [B,S], segment ids [B,S]) takes the pieces of `row_piece` and returns the same piece of the
    hidden states [B,S,D] of whole rows. All ranks of `ranks.context` have to call it, and its backward pass, in one
    order. Gradients of parameters are this piece's part: add them up over `ranks.rows`. The loss of a rank is the sum
    over its own valid targets, divided by the number of valid targets of all ranks.

    `ablate.model.config.check_context_parallel` says which configurations this works for.
    """
    exchange = PieceExchange(ranks.context)
    for block in model.blocks if ranks.context.size > 1 else ():
        if isinstance(block.mixer, Mamba3):
            block.mixer.exchange = exchange
        elif isinstance(block.mixer, CausalAttention):
            block.mixer.pieces_before = ranks.context.index
            block.mixer.attend = partial(exchange.attend, ATTEND_OVER_PIECES[block.mixer.backend])
    return exchange


def row_piece(batch: Batch, group: Group) -> Batch:
    """Return this rank's piece of every row, with targets that may be the first token of the next piece.

    `group`: `Ranks.context`. Raises ValueError if its size does not divide the rows.
    """
    length = batch.tokens.shape[1]
    if length % group.size:
        raise ValueError(f"rows have {length} tokens; allowed on {group.size} ranks: a multiple of {group.size}")
    size = length // group.size
    own: list[Any] = [np.ascontiguousarray(part[:, group.index * size :][:, :size]) for part in batch]
    return Batch(*own)


class PieceExchange:
    """Sends tensors between the ranks that hold the pieces of the same rows (`StateExchange`)."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()
        """Messages on their way, with their tensors."""

    @property
    def index(self) -> int:
        """Number of this rank's piece in every row."""
        return self._group.index

    @property
    def has_next(self) -> bool:
        """Whether another rank holds a later piece."""
        return self.index + 1 < self._group.size

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def state_before(self, values_BSHP: Tensor, state_size: int, segment_ids_BS: Tensor) -> tuple[Tensor, ...] | None:
        """Return state, write [B,H,N,P] and document ids [B] that the rank before leaves; None on the first rank."""
        ids_CBS = once_per_batch(segment_ids_BS, self._gather)
        if self.index == 0:
            return None
        batch, _, heads, width = values_BSHP.shape
        shape = (2, batch, heads, state_size, width)
        state_and_write: Tensor = _ReceiveState.apply(self, values_BSHP, shape)  # type: ignore[no-untyped-call]
        return *state_and_write.unbind(), ids_CBS[self.index - 1, :, -1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hand_on(self, out_BSHP: Tensor, state_BHNP: Tensor, write_BHNP: Tensor) -> Tensor:
        """Send state and write to the next rank; return the output, whose backward pass receives their gradients."""
        out: Tensor = _SendState.apply(self, out_BSHP, state_BHNP, write_BHNP)  # type: ignore[no-untyped-call]
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        over_pieces: "AttendOverPieces",
        q_BSHE: Tensor,
        k_BSHE: Tensor,
        v_BSHE: Tensor,
        segment_ids_BS: Tensor,
        rules: ScoreRules,
    ) -> Tensor:
        """Return the values [B,S,H,E] of this piece's queries over its own keys and those of earlier pieces."""
        visible = once_per_batch(segment_ids_BS, self._visible_keys)
        k_BKHE, v_BKHE = _EarlierKeys.apply(self, visible, k_BSHE, v_BSHE)  # type: ignore[no-untyped-call]
        return over_pieces(q_BSHE, k_BKHE, v_BKHE, visible, rules)

    def send(self, tensor: Tensor, to: int) -> None:
        """Begin to send a contiguous `tensor`, which nobody changes, to a rank of the group."""
        self._wait(MOST_PENDING - 1)
        work = dist.isend(tensor, group=self._group.process_group, group_dst=to)
        if work is not None:
            self._pending.append((work, tensor))

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` with the next message from a rank of the group, and return it."""
        dist.recv(tensor, group=self._group.process_group, group_src=source)
        return tensor

    def finish(self) -> None:
        """Wait for all messages. A profiler that ends earlier is told of their end when it is gone, which crashes."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` messages are on their way."""
        while len(self._pending) > most:
            self._pending.popleft()[0].wait()

    def _gather(self, segment_ids_BS: Tensor) -> Tensor:
        """Return the ids [C,B,S] of all pieces. The messages of earlier batches have arrived then."""
        self._wait(0)
        pieces = [torch.empty_like(segment_ids_BS) for _ in range(self._group.size)]
        dist.all_gather(pieces, segment_ids_BS.contiguous(), group=self._group.process_group)
        return torch.stack(pieces)

    def _visible_keys(self, segment_ids_BS: Tensor) -> "VisibleKeys":
        return visible_keys(once_per_batch(segment_ids_BS, self._gather), self.index)


class _ReceiveState(torch.autograd.Function):
    """State and write of the rank before [2,B,H,N,P]. The backward pass sends their gradients there."""

    @staticmethod
    def forward(ctx: Any, exchange: PieceExchange, values_BSHP: Tensor, shape: tuple[int, ...]) -> Tensor:
        # the values only put this node onto the way from the parameters to the loss
        ctx.exchange = exchange
        dtype = torch.promote_types(values_BSHP.dtype, torch.float32)
        return exchange.receive(values_BSHP.new_empty(shape, dtype=dtype), exchange.index - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.exchange.send(gradient.contiguous(), ctx.exchange.index - 1)
        return None, None, None


class _SendState(torch.autograd.Function):
    """The output of a scan whose state and write go to the next rank. The backward pass receives their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: PieceExchange, out_BSHP: Tensor, state_BHNP: Tensor, write_BHNP: Tensor) -> Tensor:
        ctx.exchange, ctx.shape, ctx.dtype = exchange, state_BHNP.shape, state_BHNP.dtype
        exchange.send(torch.stack((state_BHNP, write_BHNP)), exchange.index + 1)
        return out_BSHP.view_as(out_BSHP)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gradient = grad_out.new_empty((2, *ctx.shape), dtype=ctx.dtype)
        return None, grad_out, *ctx.exchange.receive(gradient, ctx.exchange.index + 1).unbind()


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that the queries of a piece read: the ends of earlier pieces, as long as needed, then the own piece."""

    received: tuple[tuple[int, int], ...]
    """(rank, tokens) of each end of an earlier piece, in the order of the ranks."""
    sent: tuple[tuple[int, int], ...]
    """(rank, tokens) of each end of this piece that a later rank reads."""
    query_runs_BS: Tensor
    """Number of the document in its row, of each query, int64."""
    key_runs_BK: Tensor
    """The same of each key. The last S keys are the own piece."""

    @cached_property
    def mask(self) -> Tensor:
        """Whether query t may attend to key u [B,1,S,K] bool: in the same document and not later."""
        same_BSK = self.query_runs_BS.unsqueeze(2) == self.key_runs_BK.unsqueeze(1)
        return same_BSK.tril(self.key_runs_BK.shape[1] - self.query_runs_BS.shape[1]).unsqueeze(1)

    @cached_property
    def packed(self) -> "PackedKeys":
        """The keys without those of other documents, laid end to end. On a device the host waits for it."""
        return packed_keys(self.query_runs_BS, self.key_runs_BK)


def visible_keys(ids_CBS: Tensor, index: int) -> VisibleKeys:
    """Return the keys that piece `index` reads, from the int64 document ids of all pieces. The host waits for them."""
    pieces, batch, length = ids_CBS.shape
    runs_BCS = document_runs(ids_CBS.transpose(0, 1).reshape(batch, -1)).view(batch, pieces, length)
    first_BC = runs_BCS[:, :, 0]
    needed_BCC = (runs_BCS.unsqueeze(2) == first_BC.unsqueeze(1).unsqueeze(3)).sum(3)
    needed = needed_BCC.amax(0).tolist()  # tokens of piece i that continue into piece j
    received = tuple((source, needed[source][index]) for source in range(index) if needed[source][index])
    sent = tuple((to, needed[index][to]) for to in range(index + 1, pieces) if needed[index][to])
    own_BS = runs_BCS[:, index].contiguous()
    ends = [runs_BCS[:, source, length - tokens :] for source, tokens in received]
    return VisibleKeys(received, sent, own_BS, torch.cat((*ends, own_BS), dim=1))


class PackedKeys(NamedTuple):
    """Keys of the documents of a piece, laid end to end."""

    kept_U: Tensor | None
    """Index of each key among the B * K keys, int64; None if all are kept."""
    edges: DocumentEdges
    """Documents of queries and keys."""

    def of(self, tensor_BKHE: Tensor) -> Tensor:
        """Return the kept keys or values [U,H,E]."""
        tensor = tensor_BKHE.flatten(0, 1)
        return tensor if self.kept_U is None else tensor.index_select(0, self.kept_U)


def packed_keys(query_runs_BS: Tensor, key_runs_BK: Tensor) -> PackedKeys:
    """Return the keys that some query of the same row can see, and the edges of their documents.

    The numbers of documents are those of `VisibleKeys`. A row's first document begins in earlier pieces, so it has more
    keys than queries; the others have as many.
    """
    batch, length = query_runs_BS.shape
    earlier_BX = key_runs_BK[:, :-length] == query_runs_BS[:, :1]
    kept_BK = functional.pad(earlier_BX, (0, length), value=True)
    offsets, most_queries = documents(query_runs_BS)
    keys_D = offsets.diff()
    row_starts_B = torch.arange(batch, dtype=offsets.dtype, device=offsets.device) * length
    keys_D[torch.searchsorted(offsets, row_starts_B)] += earlier_BX.sum(1, dtype=keys_D.dtype)
    key_offsets = functional.pad(keys_D.cumsum(0, dtype=torch.int32), (1, 0))
    kept_U = None if bool(kept_BK.all()) else kept_BK.flatten().nonzero().squeeze(1)
    return PackedKeys(kept_U, DocumentEdges(offsets, key_offsets, most_queries, int(keys_D.max())))


class _EarlierKeys(torch.autograd.Function):
    """Keys and values [B,K,H,E] with the ends of earlier pieces before them. The backward pass adds up gradients."""

    @staticmethod
    def forward(
        ctx: Any, exchange: PieceExchange, visible: VisibleKeys, k_BSHE: Tensor, v_BSHE: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.visible, ctx.length = exchange, visible, k_BSHE.shape[1]
        batch, _, heads, width = k_BSHE.shape
        ends = [
            exchange.receive(k_BSHE.new_empty(2, batch, tokens, heads, width), source)
            for source, tokens in visible.received
        ]
        for to, tokens in visible.sent:
            exchange.send(torch.stack((k_BSHE[:, -tokens:], v_BSHE[:, -tokens:])), to)
        return torch.cat((*(end[0] for end in ends), k_BSHE), 1), torch.cat((*(end[1] for end in ends), v_BSHE), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k_BKHE: Tensor, grad_v_BKHE: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.visible.received, ctx.visible.sent
        gradients = torch.stack((grad_k_BKHE, grad_v_BKHE))
        *ends, own = torch.split(gradients, [*(tokens for _, tokens in received), ctx.length], dim=2)
        summed = own.to(torch.promote_types(own.dtype, torch.float32))
        for to, tokens in sent:
            part = own.new_empty((*own.shape[:2], tokens, *own.shape[3:]))
            summed[:, :, -tokens:] += ctx.exchange.receive(part, to)
        for (source, _), end in zip(reversed(received), reversed(ends), strict=True):
            ctx.exchange.send(end.contiguous(), source)
        return None, None, *summed.to(own.dtype).unbind()


AttendOverPieces: TypeAlias = Callable[[Tensor, Tensor, Tensor, VisibleKeys, ScoreRules], Tensor]
"""(q [B,S,H,E], k, v [B,K,H,E], their documents, rules) -> attended values [B,S,H,E]."""


def _sdpa(q_BSHE: Tensor, k_BKHE: Tensor, v_BKHE: Tensor, visible: VisibleKeys, rules: ScoreRules) -> Tensor:
    return masked_attention(q_BSHE, k_BKHE, v_BKHE, visible.mask, rules)


def _flash(q_BSHE: Tensor, k_BKHE: Tensor, v_BKHE: Tensor, visible: VisibleKeys, rules: ScoreRules) -> Tensor:
    packed = visible.packed
    return flash_attention(q_BSHE, packed.of(k_BKHE), packed.of(v_BKHE), packed.edges, rules)


def _fa4(q_BSHE: Tensor, k_BKHE: Tensor, v_BKHE: Tensor, visible: VisibleKeys, rules: ScoreRules) -> Tensor:
    packed = visible.packed
    return fa4_attention(q_BSHE, packed.of(k_BKHE), packed.of(v_BKHE), packed.edges, rules)


ATTEND_OVER_PIECES: dict[str, AttendOverPieces] = {"sdpa": _sdpa, "flash": _flash, "fa4": _fa4}
"""Back end of attention -> its implementation over pieces."""
