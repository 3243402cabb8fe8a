"""What a result depends on: versions, commit, hardware, and a hash of the code."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import cdp_repro

PACKAGE = Path(cdp_repro.__file__).parent

_NUMERICS = (
    "schedule", "engine", "baselines", "models", "data", "training", "config/numerics.py", "predict/cutting.py",
    "predict/partition.py", "predict/profiling.py",
)  # fmt: skip
"""The parts of the package that what is trained depends on: runs that share them are of one code version.

What is read off a trace, such as idle share, is not among it: tests compare it with simulations and closed forms.
"""


_AND = " and "


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, and the hardware it was measured on."""
    import torch  # here: it takes seconds, and `code_hash` needs none of it

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "version/cdp_repro": cdp_repro.__version__,
        "version/git_commit": git_commit(),
        "version/code": code_hash(_NUMERICS)[:16],
        "version/torch": torch.__version__,
        "version/python": platform.python_version(),
        "hardware": f"{hardware}, {torch.get_num_threads()} CPU threads",
    }


def versions_since(earlier: Mapping[str, str]) -> dict[str, str]:
    """Return the present versions for a run that goes on, each after the `earlier` ones that differ: "A and B".

    So no run of two codes passes for one of the later code.
    """
    found = {}
    for name, present in versions().items():
        past = earlier.get(name, present)
        found[name] = past if present in past.split(_AND) else f"{past}{_AND}{present}"
    return found


def joined(versions: Iterable[str]) -> str:
    """Return the versions of several runs, each once, in order: those of a run that went on may be "A and B"."""
    return _AND.join(dict.fromkeys(each for version in versions for each in version.split(_AND)))


def devices(hardware: str) -> str:
    """Return what the entry `hardware` of `versions` names, such as `NVIDIA H200`, whatever the number of threads."""
    return joined(each.rpartition(", ")[0] or each for each in hardware.split(_AND))


def git_commit() -> str:
    """Return the commit of the source tree that runs, with "-dirty" if it was changed; "unknown" outside of one.

    An installed package may also lie in a repository, e.g. in a virtual environment there, which does not track it.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def short(commit: str) -> str:
    """Return the first 12 digits of a commit, or of each of several, with "-dirty" if the tree was changed."""
    parts = (each.partition("-") for each in commit.split(_AND))
    return _AND.join(f"{number[:12]}{dash}{changed}" for number, dash, changed in parts)


def code_hash(parts: Sequence[str] = (".",)) -> str:
    """Return the SHA-256 over this package's Python and YAML files, names and contents.

    `parts` are the folders and files of the package that count; by default the whole of it.
    """
    digest = hashlib.sha256()
    found = {path for part in parts for path in (PACKAGE / part).rglob("*")} | {PACKAGE / part for part in parts}
    for path in sorted(path for path in found if path.suffix in (".py", ".yaml")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
