"""An array script for SLURM whose jobs write a checkpoint when they are stopped, queue again, and go on from there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from cdp_repro.launch.failures import LaunchError

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
        scontrol requeue "@job@"
    fi
    exit "$code"
}
trap 'stop requeue' USR2
trap 'stop' TERM

wait "$child"
"""

_HERE = 'kill -TERM "$child" 2>/dev/null'
_JOB = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
"""The last job of an array has the array's number as its own, which would mean all of its jobs."""
_BY_SRUN = f'scancel --signal=TERM "{_JOB}"  # to the ranks: srun would answer a signal by killing them'


@dataclass(frozen=True)
class ArrayScript:
    """A script for `sbatch`."""

    comment: str
    """Lines that begin with #."""
    name: str
    jobs: int
    options: Sequence[str]
    """Options of sbatch, such as `--nodes=1`."""
    output_folder: str
    """Folder of the jobs' output, one file each."""
    command: str
    """Shell command of a job; $SLURM_ARRAY_TASK_ID is the number of the job."""
    prepare: str = ""
    """Shell lines before the command."""
    at_once: int | None = None
    """The most jobs that run at once."""
    by_srun: bool = False
    """Whether the command is an `srun`, which starts one process per rank."""

    def text(self) -> str:
        """Return the script.

        Raises:
            LaunchError: SLURM cannot write into the folder.
        """
        values = {
            "comment": self.comment,
            "name": shlex.quote(self.name),
            "array": f"0-{self.jobs - 1}" + (f"%{self.at_once}" if self.at_once else ""),
            "options": "\n".join(f"#SBATCH {option}" for option in self.options),
            "output": shlex.quote(f"{_literal(self.output_folder)}/%A_%a.log"),
            "prepare": self.prepare,
            "command": self.command,
            "terminate": _BY_SRUN if self.by_srun else _HERE,
            "job": _JOB,
        }
        return re.sub(f"@({'|'.join(values)})@", lambda found: values[found[1]], _SCRIPT)


def _literal(folder: str) -> str:
    """Return a folder as sbatch reads it in a pattern of names: "%a" would be a number.

    Raises:
        LaunchError: no pattern can name it.
    """
    if "\\" in folder:
        raise LaunchError(f"SLURM cannot write into {folder}, whose name has a \\: use another run_dir= or --runs=")
    return folder.replace("%", "%%")
