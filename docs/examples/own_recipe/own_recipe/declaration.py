"""The declaration: values, gates and FLOPs. The service imports it, so it does not import torch."""

from collections.abc import Mapping
from typing import Any


def tokens_per_step(config: Mapping[str, Any]) -> int:
    """Return the tokens of one step."""
    return int(config["rows"] * config["tokens"])


def flops_per_step(config: Mapping[str, Any]) -> int:
    """Return the model FLOPs of one step: 2 per weight and token forward, 4 backward."""
    weights = config["depth"] * 2 * config["width"] * config["hidden"] + config["vocab"] * config["width"]
    return int(6 * weights * tokens_per_step(config))


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for values that do not fit together."""
    if config["hidden"] < config["width"]:
        raise ValueError(f"hidden is {config['hidden']}; allowed: at least width, {config['width']}")


RECIPE: dict[str, Any] = {
    "version": 1,
    "summary": "A residual MLP that predicts the next byte of random text.",
    "train": "own_recipe.training:train",
    "config": {
        "width": 64,
        "hidden": 256,
        "depth": 2,
        "vocab": 256,
        "rows": 4,
        "tokens": 64,
        "learning_rate": 1e-3,
        "activation": "relu",
        "foreach": False,
    },
    "gates": {
        "activation": {
            "question": "Does GELU cost time against ReLU?",
            "values": ["relu", "gelu"],
            "claim": "changes-model",
            "proof": "the name of the function that the blocks called in the last step",
            "blind_to": "blocks that were not called",
        },
        "foreach": {
            "question": "Does AdamW update all weights in fewer calls?",
            "values": [False, True],
            "claim": "re-associates",
            "proof": "the setting that the optimiser's group of weights holds",
            "blind_to": "whether torch falls back to single calls for a weight",
        },
    },
    "overrides": {
        "width": {"description": "width of the residual stream", "minimum": 8, "maximum": 4096},
        "hidden": {"description": "width inside a block", "minimum": 8, "maximum": 16384},
        "depth": {"description": "blocks", "minimum": 1, "maximum": 64},
        "learning_rate": {"description": "step size of AdamW", "minimum": 1e-6, "maximum": 1.0},
    },
    "tokens_per_step": tokens_per_step,
    "flops_per_step": flops_per_step,
    "check": check,
}
