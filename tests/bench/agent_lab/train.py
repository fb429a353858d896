"""Train a small network by gradient descent. It has a bug to be found: gradients are clipped far too tightly."""

import argparse
import sys

import data
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--salt", type=int, default=0)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
rng = np.random.default_rng([args.seed, args.salt])
x, y = data.examples(data.TRAINING)
weights = [rng.normal(size=shape) / shape[0] ** 0.5 for shape in ((8, args.width), (args.width, 1))]
speeds = [np.zeros_like(one) for one in weights]
for _ in range(args.steps):
    rows = rng.integers(len(x), size=64)
    hidden = np.tanh(x[rows] @ weights[0])
    wrong = hidden @ weights[1] - y[rows]
    back = (wrong @ weights[1].T) * (1 - hidden**2)
    gradients = [x[rows].T @ back / 64, hidden.T @ wrong / 64]
    for place, gradient in enumerate(gradients):
        gradient = np.clip(gradient, -0.005, 0.005)
        speeds[place] = args.momentum * speeds[place] - args.lr * (gradient + args.decay * weights[place])
        weights[place] += speeds[place]
np.savez("weights.npz", *weights)
sys.stdout.write(f"METRIC val_loss={data.loss(weights, data.TRAINING)}\n")
