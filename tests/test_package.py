"""The wheel: built here, installed elsewhere, run in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_trains_in_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".yaml", ".html", ".css", ".js", ".typed")]
    assert files and {str(path.relative_to(ROOT / "src")) for path in files} <= packed
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel]
    subprocess.run(install, check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [tmp_path / "site" / "bin" / "cdp-train", "model=mlp", "epochs=1", "run_dir=run", "wandb=disabled"]
    subprocess.run(command, cwd=empty, env=environment, check=True, capture_output=True)
    where = "import cdp_repro; print(cdp_repro.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=empty, env=environment, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "site")
    assert json.loads((empty / "run" / "summary.json").read_text())["status"] == "finished"
    assert [path.name for path in empty.iterdir()] == ["run"]


def test_schedule_partition_and_pricing_import_no_torch():
    imports = "import sys, cdp_repro.schedule, cdp_repro.predict.partition, cdp_repro.predict.pricing"
    code = f"{imports}; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
