"""A small language model as a recipe of Ablate."""
