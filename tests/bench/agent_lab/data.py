"""Examples of a noisy teacher: those to train on, and others for the judge."""

import numpy as np

TRAINING, HELD_OUT = 1, 2


def examples(part):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(8, 16)) / 8**0.5, rng.normal(size=(16, 1)) / 2
    rng = np.random.default_rng(part)
    x = rng.normal(size=(2048, 8))
    return x, np.tanh(x @ first) @ second + 0.1 * rng.normal(size=(2048, 1))


def loss(weights, part):
    x, y = examples(part)
    return float(np.mean((np.tanh(x @ weights[0]) @ weights[1] - y) ** 2))
