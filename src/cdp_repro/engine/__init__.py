"""The engine: executes a validated program on torch."""
