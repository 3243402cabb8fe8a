"""The commands."""

import cdp_repro.launch.in_rank  # noqa: F401 - it notes the parent before torch is imported
