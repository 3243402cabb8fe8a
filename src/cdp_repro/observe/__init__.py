"""Observation: the run directory with all records of a run, and the same as text, figures and W&B pages.

Nothing here takes part in training: a run computes the same with or without it.
"""
