"""Tokens and model FLOPs of a step, counted from the shapes of the matrices, independently of `ablate.model.counts`."""

from ablate.experiments.design.kinds.kind import ArmConfig


def step_tokens(config: ArmConfig) -> int:
    values = config.values_with_seed
    return int(values["micro_batch"]) * int(values["data"]["seq_len"])


def step_flops(config: ArmConfig) -> int:
    """Two FLOPs a multiply-add, backward twice the forward pass, whole score matrices, least work of the scan."""
    values = config.values_with_seed
    model, length = values["model"], int(values["data"]["seq_len"])
    width, mamba = int(model["d_model"]), model["mamba"]
    inner, state, rank = width * mamba["expand"], mamba["d_state"], mamba["mimo_rank"]
    heads = inner // mamba["headdim"]
    angles = int(state * mamba["rope_fraction"]) // 2
    outputs = 2 * inner + 2 * state * mamba["ngroups"] * rank + 3 * heads + angles
    hidden = int(width * model["mlp_ratio"])
    multiply_adds = {
        "M": width * outputs + inner * width + heads * rank * 2 * state * mamba["headdim"],
        "A": 4 * width * width + 2 * length * width,
        "F": 3 * width * hidden,
    }
    per_token = sum(multiply_adds[letter] for letter in model["pattern"]) + width * model["vocab_size"]
    return 3 * 2 * per_token * step_tokens(config)
