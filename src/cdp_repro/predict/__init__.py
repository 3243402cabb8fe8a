"""Predictions: what a program costs before it runs, in bytes and in seconds. No torch but where stages are measured."""
