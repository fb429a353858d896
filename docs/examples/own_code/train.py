"""A training program as a user has it, with the four lines that Ablate needs: a small language model on random text."""

import argparse

import torch
from torch import nn

import ablate

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--attention", choices=["sdpa", "by-hand"], default="by-hand")
parser.add_argument("--foreach", action="store_true")
arguments = parser.parse_args()
torch.manual_seed(arguments.seed)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Attention and MLP: B, S, width in and out."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus attention, plus the MLP."""
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if arguments.attention == "sdpa":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


model = nn.Sequential(nn.Embedding(256, 128), Block(), Block(), nn.Linear(128, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=arguments.foreach)
with ablate.trial(seed=arguments.seed) as trial:
    for step in trial.steps(arguments.steps):
        rows = torch.randint(0, 256, (4, 257), device=device)
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.report(loss=loss, tokens=4 * 256)
