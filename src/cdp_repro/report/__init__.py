"""From finished runs to the paper's tables, figures and claims.

The package `studies` says which runs each table needs and keeps rows of them: of a run directory what tables need, as a
small file that is committed. Here `groups` average runs that differ in nothing but the seed; `accuracy`, `tuning`,
`delay_costs`, `late_systems`, `cost_table`, `systems_table`, `activation_memory` and `claims` say what they show;
`tables`, `charts` and `page` lay it out; `build` writes all of it, or compares it with what is there. `sweep_results`
and `sweep_figure` show the runs of any sweep, which need no rows; `explorer` is the page of `cdp-plan --html`.
"""
