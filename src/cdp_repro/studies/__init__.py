"""Studies: which runs the report needs, training those that are missing, and keeping a row of each.

`catalog` lists the studies, `study` defines what a study is, `missing_runs` trains them here, `slurm_array` on SLURM,
`collecting` turns a run directory into a row, `rows` keeps rows as files, `status` shows the state of each run.
"""
