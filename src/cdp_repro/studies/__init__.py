"""Many runs: the studies of the report and the sweeps of `cdp-train`.

Studies say which runs the report needs. `study` defines what a study is, `catalog`, `delay_studies` and `cost_settings`
list them, `missing_runs` trains what is missing here, `slurm_array` on SLURM. `collecting` turns a run directory into a
row, `rows` keeps rows as files, `status` shows the state of each run.

Sweeps are a user's: `cells` says what the cells are, `start_cells` trains or queues them, `sweep_status` shows how far
they are. Both train by `at_once`, and lock the log of a run by `locked_log`.
"""
