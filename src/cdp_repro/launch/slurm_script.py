"""An array script for SLURM whose jobs write a checkpoint when they are stopped, queue again, and go on from there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_SCRIPT = r"""#!/bin/bash
@comment@
#SBATCH --job-name=@name@
#SBATCH --array=@array@
@options@
#SBATCH --output=@output@
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@120

cd "$SLURM_SUBMIT_DIR" || exit 1

# A run starts its ranks in this job: itself, or by srun below. sbatch passes on the environment it was called in:
# called under srun or torchrun, that would make cdp-train think that it is one rank of theirs.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID SLURM_STEP_NODELIST

@prepare@@command@ &
child=$!

# The run writes a checkpoint and ends with 143. USR2 comes before the time limit: the job then queues again, and goes
# on from there. TERM comes from scancel, which means it, or from a pre-emption, after which SLURM itself requeues.
stop() {
    trap '' USR2 TERM  # a second signal would end this script before the run has written its checkpoint
    @terminate@
    wait "$child"
    code=$?
    if [ "$1" = requeue ] && [ "$code" -eq 143 ]; then
        scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    fi
    exit "$code"
}
trap 'stop requeue' USR2
trap 'stop' TERM

wait "$child"
"""

_HERE = 'kill -TERM "$child" 2>/dev/null'
_BY_SRUN = 'scancel --signal=TERM "$SLURM_JOB_ID"  # to the ranks: srun would answer a signal by killing them'


@dataclass(frozen=True)
class ArrayScript:
    """A script for `sbatch`."""

    comment: str
    """Lines that begin with #."""
    name: str
    jobs: int
    options: Sequence[str]
    """Options of sbatch, such as `--nodes=1`."""
    output: str
    """File of a job's output, with %A and %a."""
    command: str
    """Shell command of a job; $SLURM_ARRAY_TASK_ID is the number of the job."""
    prepare: str = ""
    """Shell lines before the command."""
    at_once: int | None = None
    """The most jobs that run at once."""
    by_srun: bool = False
    """Whether the command is an `srun`, which starts one process per rank."""

    def text(self) -> str:
        """Return the script."""
        values = {
            "comment": self.comment,
            "name": shlex.quote(self.name),
            "array": f"0-{self.jobs - 1}" + (f"%{self.at_once}" if self.at_once else ""),
            "options": "\n".join(f"#SBATCH {option}" for option in self.options),
            "output": shlex.quote(self.output),
            "prepare": self.prepare,
            "command": self.command,
            "terminate": _BY_SRUN if self.by_srun else _HERE,
        }
        text = _SCRIPT
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        return text
