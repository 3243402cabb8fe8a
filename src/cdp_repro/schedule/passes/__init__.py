"""Passes: each takes the slots of a run and returns them with one thing added."""
