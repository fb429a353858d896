"""The parts of the honest trainer: logistic regression over drawn rows, and a wait as for a device."""

import json
import math
import random
import time
from pathlib import Path

ROWS, WIDTH, RATE, DEVICE_S = 500, 8, 0.002, 0.05
LAW = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25]


def rows(name, number=ROWS):
    draw, drawn = random.Random(name), []
    for _ in range(number):
        row = [draw.gauss(0, 1) for _ in range(WIDTH)]
        drawn.append((row, float(draw.random() < chance(LAW, row))))
    return drawn


def chance(weights, row):
    return 1 / (1 + math.exp(-sum(map(float.__mul__, weights, row))))


def loss_of(weights, drawn):
    chances = ((chance(weights, row), answer) for row, answer in drawn)
    return -sum(math.log(one if answer else 1 - one) for one, answer in chances) / len(drawn)


def train(weights, drawn):
    """Change the weights; return the mean loss. Most of a step is a wait, which load by others hardly changes."""
    time.sleep(DEVICE_S * len(drawn) / ROWS)
    total = 0.0
    for row, answer in drawn:
        one = chance(weights, row)
        total -= math.log(one if answer else 1 - one)
        for place, value in enumerate(row):
            weights[place] += RATE * (answer - one) * value
    return total / len(drawn)


def step(weights, seed, index):
    """Draw the rows of a step and train on them; return the loss."""
    return train(weights, rows(f"{seed} {index}"))


def save(weights):
    Path("weights.json").write_text(json.dumps(weights))
