"""Predictions: the bytes, messages and seconds of a run before it runs.

`profiling` measures the blocks of a model, `partition` and `cutting` cut it into stages of equal cost, `forecast`
simulates a run, `closed_forms` and `steady_state` predict the cost table, `memory_reduction` the activation peak, and
`pricing` the seconds of a training step on a cluster. `device_memory` and `training_state` say what a device has to
hold, and `systems` compares all schedules of the field.
"""
