"""The runs of a sweep as an array of SLURM jobs: one job a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from cdp_repro.config import ConfigError
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.studies.missing_runs import Options

_SCRIPT = r"""#!/bin/bash
# Trains @runs@ runs, one a job of the array. Submit it in the folder in which it was written: sbatch @file@
# Submit it again to go on: jobs whose run is done end at once. Add what your cluster asks for (--partition, --time,
# --gres, fewer --cpus-per-task where a node has fewer) here, or give it to sbatch.
#SBATCH --job-name=@name@
#SBATCH --array=0-@last@
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=@cores@
#SBATCH --output=@output@
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@120

cd "$SLURM_SUBMIT_DIR" || exit 1

# A run of several ranks starts them itself, in this job. sbatch passes on the environment it was called in: called
# under srun or torchrun, that would make cdp-train think that it is one rank of theirs.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID SLURM_STEP_NODELIST

"${PYTHON:-python}" @command@ --run="$SLURM_ARRAY_TASK_ID" &
child=$!

# The run writes a checkpoint and ends with 143. USR2 comes before the time limit: the job then queues again, and goes
# on from there. TERM comes from scancel, which means it, or from a pre-emption, after which SLURM itself requeues.
stop() {
    trap '' USR2 TERM  # a second signal would end this script before the run has written its checkpoint
    kill -TERM "$child" 2>/dev/null
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


def write_array_script(options: Options, path: Path, script: str) -> Path:
    """Write the array script; return the folder of the jobs' output, which it makes, as SLURM would fail silently.

    Raises:
        ConfigError: the script or the folder cannot be written.
    """
    output = options.runs / "slurm"
    text = _script(options, script, path, output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            [f"cannot write {error.filename}: {error.strerror}; pass another --slurm= or --runs="]
        ) from error
    return output


def _script(options: Options, script: str, path: Path, output: Path) -> str:
    runs = options.listed()
    arguments = [script, *options.studies, *options.overrides, f"--runs={options.runs}", f"--results={options.results}"]
    if options.seeds is not None:
        arguments.append(f"--seeds={options.seeds}")
    most = max(cell.config.processes for cell in {run.cell for run in runs})
    values = {
        "runs": str(len(runs)),
        "file": path.name,
        "name": f"cdp-{'-'.join(options.studies)}",
        "last": str(len(runs) - 1),
        "cores": str(max(4, most)),
        "output": shlex.quote(f"{output}/%A_%a.log"),
        "command": shlex.join(arguments),
    }
    text = _SCRIPT
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text
