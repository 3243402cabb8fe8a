"""Train the runs of the accuracy tables and of the choice of the learning rate, those that are missing.

Usage: python scripts/accuracy.py [study ...] [--jobs=2] [--seeds=K] [--slurm=FILE] [key=value ...]

`paper-...` studies, the authors' networks at full length, take a GPU and are trained only if named. `--help` explains
all options. CIFAR-10 is looked for in data/ (dataset.root= names another place). Then:
cdp-report build.
"""

from __future__ import annotations

import sys

from cdp_repro.cli.sweep import main
from cdp_repro.studies.catalog import STUDIES

KINDS = ("accuracy", "tuning", "delay-tuning", "delay-finals", "delay", "late-systems")

if __name__ == "__main__":
    names = [study.name for study in STUDIES.values() if study.kind in KINDS and "paper" not in study.name]
    sys.exit(main(names, sys.argv[1:], script=__file__))
