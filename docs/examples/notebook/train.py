"""Train a linear model on drawn points; its last line is the loss on points that it has not seen."""

import argparse

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--seed", type=int, required=True)
args = parser.parse_args()

rng = np.random.default_rng(args.seed)
points = rng.normal(size=(3000, 20))
targets = points @ rng.normal(size=20) + 0.5 * rng.normal(size=3000)
seen, unseen = slice(0, 1000), slice(1000, None)

weights, velocity = np.zeros(20), np.zeros(20)
for _ in range(10):
    errors = points[seen] @ weights - targets[seen]
    velocity = args.momentum * velocity - args.lr * points[seen].T @ errors / 1000
    weights += velocity

print(f"METRIC val_loss={np.mean((points[unseen] @ weights - targets[unseen]) ** 2)}")
