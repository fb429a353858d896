"""Recurrent block with a matrix state per head, which is not linear in time (M2RNN, Mishra et al., 2026).

    h_t = f_t h_{t-1} + (1 - f_t) tanh(h_{t-1} W + k_t v_t^T)        y_t = q_t h_t

f_t = exp(-exp(A_log) softplus(x_t + dt_bias)) is a number per head and token. All heads read one k and one q. These and
v pass a causal depthwise convolution and SiLU. State and convolution begin anew with each document. The output is
(y + D v) silu(g), normed over all heads, times a matrix.

The tanh makes the recurrence serial: no chunk can begin before the one before has ended. The loop over the tokens of a
row, in torch's operations, runs on any device, and is slow on all of them: a few microseconds a token and operation on
a GPU, whatever the width. torch's compiler leaves it out of its graphs. On a GPU the gate `recurrence` can choose one
kernel a pass instead (kernels/recurrence.py). Both compute in float32.

Legend: B batch, S sequence, D d_model, H heads, K key width, V value width, C channels of the convolution, W its width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ablate.kernels import facts
from ablate.kernels.documents import document_starts
from ablate.model.config import HybridConfig
from ablate.model.facts import ModelFact
from ablate.model.layers.linear import RMSNorm, projections


class Recurrence(nn.Module):
    """Mixer with a state [K,V] per head. All parameters except the projections are float32 for every compute dtype."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        own, projection = config.recurrence, projections(config, compute_dtype)
        self.num_heads, self.key_width, self.value_width = own.num_heads, own.key_width, own.value_width
        values = own.num_heads * own.value_width
        self.widths = [own.channels, values, own.num_heads]
        self.walk = fused if own.walk == "fused" else recurrence
        self.in_proj = projection(config.d_model, sum(self.widths))
        self.out_proj = projection(values, config.d_model)
        self.conv = nn.Parameter(torch.empty(own.channels, 1, own.conv_width, dtype=torch.float32))
        self.state_weight = nn.Parameter(
            torch.empty(own.num_heads, own.value_width, own.value_width, dtype=torch.float32)
        )
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(own.num_heads, dtype=torch.float32)) for _ in range(2))
        self.D = nn.Parameter(torch.empty(values, dtype=torch.float32))
        self.out_norm = RMSNorm(values)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the mixed tokens [B,S,D]. Documents of a row do not affect each other."""
        channels_BSC, gate_BSX, decay_BSH = torch.split(self.in_proj(x_BSD), self.widths, dim=2)
        starts_BS = document_starts(segment_ids_BS)
        channels_BSC = functional.silu(convolved(channels_BSC.float(), self.conv, starts_BS))
        widths = [self.key_width, self.key_width, self.num_heads * self.value_width]
        q_BSK, k_BSK, v_BSX = torch.split(channels_BSC, widths, dim=2)
        rate_BSH = self.A_log.exp() * functional.softplus(decay_BSH.float() + self.dt_bias)
        v_BSHV = v_BSX.view(*v_BSX.shape[:2], self.num_heads, self.value_width)
        out_BSHV = self.walk(q_BSK, k_BSK, v_BSHV, torch.exp(-rate_BSH), self.state_weight, starts_BS)
        out_BSX = (out_BSHV.flatten(2) + self.D * v_BSX) * functional.silu(gate_BSX.float())
        mixed: Tensor = self.out_proj(self.out_norm(out_BSX))
        return mixed


def convolved(x_BSC: Tensor, weight_C1W: Tensor, starts_BS: Tensor) -> Tensor:
    """Return the causal depthwise convolution [B,S,C] within documents. The last weight is that of the token itself."""
    runs_BS, length = starts_BS.cumsum(1), x_BSC.shape[1]
    out_BSC = x_BSC * weight_C1W[:, 0, -1]
    for back in range(1, min(weight_C1W.shape[2], length)):
        same_BT = runs_BS[:, back:] == runs_BS[:, :-back]
        earlier_BTC = x_BSC[:, :-back] * same_BT.unsqueeze(2) * weight_C1W[:, 0, -1 - back]
        out_BSC = out_BSC + functional.pad(earlier_BTC, (0, 0, back, 0))
    return out_BSC


def fused(q_BSK: Tensor, k_BSK: Tensor, v_BSHV: Tensor, f_BSH: Tensor, weight_HVV: Tensor, starts_BS: Tensor) -> Tensor:
    """Return what `recurrence` returns, by one kernel. Its operator records the fact when the kernel runs."""
    from ablate.kernels import recurrence as kernels  # lazy: a CPU node has no tilelang

    return kernels.recurrence(q_BSK, k_BSK, v_BSHV, f_BSH, weight_HVV, starts_BS)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def recurrence(
    q_BSK: Tensor, k_BSK: Tensor, v_BSHV: Tensor, f_BSH: Tensor, weight_HVV: Tensor, starts_BS: Tensor
) -> Tensor:
    """Return the outputs [B,S,H,V]. The state is 0 before a row and before each start of a document."""
    facts.record(ModelFact.RECURRENCE, "loop")
    batch, length, heads, width = v_BSHV.shape
    state_BHKV = v_BSHV.new_zeros(batch, heads, q_BSK.shape[2], width)
    keeps_BS = (~starts_BS).to(v_BSHV.dtype)
    outs = []
    for t in range(length):
        state_BHKV = state_BHKV * keeps_BS[:, t, None, None, None]
        written_BHKV = k_BSK[:, t, None, :, None] * v_BSHV[:, t, :, None, :]
        candidate_BHKV = torch.tanh(state_BHKV @ weight_HVV + written_BHKV)
        state_BHKV = torch.lerp(candidate_BHKV, state_BHKV, f_BSH[:, t, :, None, None])
        outs.append((q_BSK[:, t, None, None] @ state_BHKV).squeeze(2))
    return torch.stack(outs, dim=1)
