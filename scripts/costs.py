"""Execute every setting of the cost table and every system of the field, those runs that are missing.

Usage: python scripts/costs.py [study ...] [--jobs=2] [--slurm=FILE] [key=value ...]

`--help` explains all options. Then: cdp-report build.
"""

from __future__ import annotations

import sys

from cdp_repro.cli.sweep import main
from cdp_repro.studies.catalog import STUDIES

if __name__ == "__main__":
    names = [study.name for study in STUDIES.values() if study.kind in ("costs", "systems")]
    sys.exit(main(names, sys.argv[1:], script=__file__))
