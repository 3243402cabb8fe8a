"""The runs of a sweep as an array of SLURM jobs: one job a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from cdp_repro.config import ConfigError
from cdp_repro.launch.slurm_script import ArrayScript
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.studies.missing_runs import Options

_COMMENT = """\
# Trains {jobs} runs, one a job of the array. Submit it in the folder in which --slurm= was given: sbatch {file}
# Submit it again to go on: jobs whose run is done end at once. Add what your cluster asks for (--partition, --time,
# --gres, fewer --cpus-per-task where a node has fewer) here, or give it to sbatch."""


def write_array_script(options: Options, path: Path, script: str) -> Path:
    """Write the array script; make and return the folder of the jobs' output, without which SLURM fails silently.

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
    return ArrayScript(
        comment=_COMMENT.format(jobs=len(runs), file=shlex.quote(str(path))),
        name=f"cdp-{'-'.join(options.studies)}",
        jobs=len(runs),
        options=["--nodes=1", "--ntasks=1", f"--cpus-per-task={max(4, most)}"],
        output_folder=str(output),
        command=f'"${{PYTHON:-python}}" {shlex.join(arguments)} --run="$SLURM_ARRAY_TASK_ID"',
    ).text()
