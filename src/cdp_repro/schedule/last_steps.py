"""Whether a method against delay finds what it needs: the last training steps of whole stages."""

from __future__ import annotations

from cdp_repro.schedule.schedule import Schedule


def refusal(schedule: Schedule, method: str) -> str | None:
    """Return why `delay=method` cannot work with a schedule, and what can; None if it works."""
    updates = schedule.sizes.updates
    if updates > 1:
        return (
            f"delay={method} counts training steps, but mode={schedule.mode} makes {updates} updates in each: use "
            "delay=none"
        )
    if schedule.placement.is_sharded:
        return (
            f"delay={method} keeps the last steps of whole stages, but {schedule} holds shards of them by collectives: "
            "use collectives=false, or delay=none"
        )
    return None
