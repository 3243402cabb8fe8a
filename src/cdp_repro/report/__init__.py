"""From finished runs to the paper's tables, figures and claims.

`rows` keeps of a run directory what tables need, as a small file that is committed; `studies` say which runs each
table needs; `groups` average runs that differ in nothing but the seed; `accuracy`, `costs`, `memory` and `claims` say
what they show; `tables`, `figures` and `page` lay it out; `build` writes all of it, or compares it with what is there.
`sweep_results` and `sweep_figure` show the runs of any sweep, which need no rows.
"""
