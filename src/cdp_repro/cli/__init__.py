"""The console commands."""

import cdp_repro.launch.in_rank  # noqa: F401 - notes the parent process before torch is imported
