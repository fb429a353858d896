"""The training program. It runs in a trial's process only."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

_ACTIVATIONS = {"relu": functional.relu, "gelu": functional.gelu}


class Block(nn.Module):
    """A residual block: B, S, width in and out."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation = _ACTIVATIONS[activation]
        self.called = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus its block."""
        self.called = self.activation.__name__
        return x + self.down(self.activation(self.up(x)))


def train(trial: Any, config: dict[str, Any]) -> None:
    """Train the model for the steps of the trial, and attest both gates from the objects that ran."""
    torch.manual_seed(trial.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = [Block(config["width"], config["hidden"], config["activation"]) for _ in range(config["depth"])]
    embedding = nn.Embedding(config["vocab"], config["width"])
    model = nn.Sequential(embedding, *blocks, nn.Linear(config["width"], config["vocab"])).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"], foreach=config["foreach"])
    for step in trial.steps():
        rows = torch.randint(config["vocab"], (config["rows"], config["tokens"] + 1), device=device)
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.report(loss=loss, tokens=rows[:, 1:].numel())
    for name in sorted({block.called for block in blocks}):
        trial.attest(activation=name)
    trial.attest(foreach=bool(optimizer.param_groups[0]["foreach"]))
