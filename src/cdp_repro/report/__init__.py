"""From finished runs to the paper's tables, figures and claims.

The package `studies` says which runs each table needs and keeps a row of each: the part of a run directory that tables
need, as a small committed file. Here `groups` averages runs that differ only in the seed. `accuracy`, `tuning`,
`delay_costs`, `late_systems`, `cost_table`, `systems_table`, `activation_memory` and `claims` say what they show.
`standing` and `two_one_sided` give verdicts on fresh seeds; `delay_advice` and `delay_goal` put them into words.
`tables`, `charts` and `page` lay it out; `contents` holds all of it, `pictures` and `sections` make the figures and the
page. `build` writes all of it, or compares it with the files that exist. `sweep_results` and `sweep_figure` show the
runs of any sweep, without rows. `explorer` is the page of `cdp-plan --html`.
"""
