"""Train a logistic regression on drawn points; its last line is the loss on points that it has not seen."""

import argparse

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--seed", type=int, required=True)
args = parser.parse_args()

rng = np.random.default_rng(args.seed)
truth = rng.normal(size=20)
points = rng.normal(size=(2500, 20))
labels = (points @ truth + rng.normal(size=2500) > 0).astype(float)
seen, unseen = slice(0, 500), slice(500, None)

weights, velocity = np.zeros(20), np.zeros(20)
for _ in range(60):
    errors = 1 / (1 + np.exp(-points[seen] @ weights)) - labels[seen]
    velocity = args.momentum * velocity - args.lr * points[seen].T @ errors / 500
    weights += velocity

scores = points[unseen] @ weights
print(f"METRIC val_loss={np.mean(np.logaddexp(0, scores) - labels[unseen] * scores)}")
