"""Trainers of other people, each from PyPI in an environment of its own, ablated as commands."""
