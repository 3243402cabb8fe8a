"""The trace: the one record that both the simulator and the executor write, and its output formats. No torch."""

from cdp_repro.trace.chains import longest_chain
from cdp_repro.trace.csv_tables import step_and_worker, write_actions_csv, write_comms_csv, write_memory_csv
from cdp_repro.trace.perfetto import perfetto, write_perfetto
from cdp_repro.trace.record import Message, SlotRecord, Trace, TraceRecorder

__all__ = [
    "Message",
    "SlotRecord",
    "Trace",
    "TraceRecorder",
    "longest_chain",
    "perfetto",
    "step_and_worker",
    "write_actions_csv",
    "write_comms_csv",
    "write_memory_csv",
    "write_perfetto",
]
