"""The engine: executes a checked program on torch."""
