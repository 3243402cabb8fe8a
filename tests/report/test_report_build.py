"""The whole report: what is committed is what the rows give, and bad input harms nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from report_rows import row_of

from cdp_repro.cli import report as command
from cdp_repro.report.build import build, drawn, marked, stale, undrawn, write
from cdp_repro.report.charts import _draw_accuracy
from cdp_repro.report.contents import Report
from cdp_repro.report.groups import Group
from cdp_repro.studies.catalog import STUDIES
from cdp_repro.studies.rows import RowError, write_row

ROOT = Path(__file__).parents[2]
DP, V1, V2 = STUDIES["digits"].cells


@pytest.fixture(scope="module")
def committed():
    """What is committed, built anew. `stale` compares digests of pictures, so that only one form of each is drawn."""
    return build(ROOT / "results", marked(ROOT), lambda shown, form: (drawn if form == "svg" else undrawn)(shown, form))


@pytest.fixture
def results(tmp_path):
    """Two seeds of two modes on digits, which take no time to draw."""
    for cell, top1 in ((DP, 97.0), (V2, 96.0)):
        for seed in (0, 1):
            write_row(row_of(cell, seed, top1=top1 + seed / 3), tmp_path / "results" / "rows")
    return tmp_path / "results"


def test_what_is_committed_is_what_the_rows_give(committed):
    assert stale(committed) == []


def test_the_page_is_small_and_holds_every_table_and_figure(committed):
    text = committed[ROOT / "results" / "report.html"].decode()
    assert len(text) < 3_000_000
    assert not re.search(r"https?:|//[a-z]", re.sub(r'src="data:[^"]*"', "", text))  # it loads nothing
    figures = ("timelines", "peaks", "communication", "accuracy", "staleness", "reduction", "memory")
    for name in ("claims", "accuracy", "memory", "costs_N4", *(f"figure-{figure}" for figure in figures)):
        assert text.count(f'id="{name}"') == 1, name
    places = [
        text.index(f'id="{name}"') for name in ("figure-peaks", "explorer-section", "claims", "memory", "accuracy")
    ]
    assert places == sorted(places)
    assert text.index('id="figure-staleness"') < text.index('id="explorer-section"')
    assert text.count('<details class="evidence">') >= 4 and "N = 3" in text


def test_nothing_committed_speaks_of_this_machine(committed):
    for path, content in committed.items():
        if path.suffix in (".md", ".csv", ".tex", ".html"):
            assert not re.search(rb"/tmp/|/root/|/work/", content), path


def test_building_twice_changes_nothing_the_second_time(results):
    files = build(results)
    assert {path.name for path in write(files)} >= {"claims.md", "accuracy.tex", "report.html", "accuracy.svg"}
    assert write(build(results)) == [] and stale(build(results)) == []
    assert not [path for path in results.rglob("*") if path.name.startswith(".")]


def test_a_changed_number_is_stale_and_a_redrawn_figure_is_not(results):
    write(build(results))
    table = results / "accuracy.md"
    table.write_text(table.read_text().replace("97.17", "99.99"))
    picture = results / "figures" / "accuracy.svg"
    picture.write_text(picture.read_text().replace("#555555", "#555554"))
    assert stale(build(results)) == [f"{table} differs from what the rows give"]
    (results / "claims.csv").unlink()
    write_row(row_of(V1, top1=95.0), results / "rows")
    found = stale(build(results))
    assert f"{results / 'claims.csv'} is missing" in found
    assert f"{picture} differs from what the rows give" in found


def test_a_cell_without_runs_shows_the_command_that_fills_it(results):
    table = Report(results).tables["accuracy"]
    assert [row[5] for row in table.rows if row[:3] == ["digits", "resnet8", "cdp_v1"]] == [
        "not run: `cdp-train mode=cdp_v1`"
    ]
    assert any("experiment=paper/cifar10_resnet18" in row[5] for row in table.rows)


def test_a_lowest_loss_at_the_edge_of_the_rates_is_told(results):
    study = STUDIES["cifar10-tuning"]
    dp = [cell for cell in study.cells if cell.settings["mode.name"] == "dp"]
    for cell, loss in zip(dp, (1.2, 1.1, 1.005, 1.0), strict=True):
        write_row(row_of(cell, 0, study.name, **{"train/loss": loss}), results / "rows")
    told = [row[-1] for row in Report(results).tables["tuning"].rows if row[1] == "dp"]
    assert told == ["", "", "yes", "lowest, at the edge"]


def test_accuracy_is_compared_seed_by_seed_and_the_paper_column_is_read(results):
    (results / "paper_values.yaml").write_text("digits/resnet8/dp: 97.5\n")
    rows = {row[2]: row for row in Report(results).tables["accuracy"].rows if row[0] == "digits"}
    assert rows["dp"][5] == "97.17 ± 0.24 (2)" and rows["dp"][6] == "" and rows["dp"][-1] == "97.5"
    assert rows["cdp_v2"][6] == "-1.00 (2)" and rows["cdp_v2"][-1] == ""


@pytest.mark.parametrize("text", ["digits: high", "- 1", "{", "cifar10/dp: 3", "cifar10/resnet18/cdp_v3: 3"])
def test_paper_values_that_are_no_numbers_are_refused(results, text):
    (results / "paper_values.yaml").write_text(text)
    with pytest.raises(RowError, match=r"paper_values\.yaml"):
        build(results)


def test_documents_are_renewed_between_their_marks(results, tmp_path):
    readme, other = tmp_path / "README.md", tmp_path / "docs" / "results.md"
    other.parent.mkdir()
    (tmp_path / "docs" / "plain.md").write_text("no table")
    readme.write_text("before\n<!-- report:claims -->\nold\n<!-- /report -->\nafter\n")
    other.write_text("<!-- report:verdicts -->\n<!-- /report -->\n")
    assert marked(tmp_path) == [readme, other]
    files = build(results, marked(tmp_path))
    text = files[readme].decode()
    assert text.startswith("before\n<!-- report:claims -->\n|  | claim |") and text.endswith(
        "<!-- /report -->\nafter\n"
    )
    assert files[other].decode().count("| not measured yet |") == 5  # accuracy too: the claim names no digits
    readme.write_text("<!-- report:speed -->\n<!-- /report -->")
    with pytest.raises(RowError, match=r"README\.md asks for 'speed': there are claims, accuracy"):
        build(results, marked(tmp_path))


def test_a_figure_is_stale_when_only_the_course_of_a_run_has_changed(results):
    write(build(results))
    (row, path) = next((row, Path(row.source)) for row in Report(results).rows)
    path.unlink()
    write_row(
        replace(row, epochs={**row.epochs, "eval/top1_percent": [50.0 for _ in row.epochs["epoch"]]}), results / "rows"
    )
    assert f"{results / 'figures' / 'accuracy.svg'} differs from what the rows give" in stale(build(results))


def test_what_is_not_drawn_is_compared_all_the_same(results):
    write(build(results, form=drawn))
    assert stale(build(results, form=undrawn)) == []
    write_row(row_of(V1, top1=95.0), results / "rows")
    assert f"{results / 'figures' / 'accuracy.png'} differs from what the rows give" in stale(
        build(results, form=undrawn)
    )


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_that_is_cut_short_is_told(results, kind):
    write(build(results))
    picture = results / "figures" / f"accuracy.{kind}"
    picture.write_bytes(picture.read_bytes()[:1500])
    assert re.search(rb"data [0-9a-f]{16}", picture.read_bytes()), "it says that its data are those of the rows"
    assert stale(build(results, form=undrawn)) == [f"{picture} is not a whole picture"]


def test_the_curve_of_a_run_has_its_numbers_at_the_epochs_that_were_evaluated(results):
    row = row_of(DP, 0)
    every_third = replace(
        row,
        config={**row.config, "epochs": 7, "evaluate_every_epochs": 3},
        epochs={"epoch": [*range(7)], "eval/top1_percent": [10.0, 20.0, 30.0]},
    )
    axis = Figure().subplots()
    _draw_accuracy(axis, "dp", Group((every_third,)), "eval/top1_percent", [])
    (line,) = axis.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([3, 6, 7], [10.0, 20.0, 30.0])


def test_a_study_of_ones_own_gets_lines(results):
    write_row(row_of(V1, study="mine"), results / "rows")
    write_row(row_of(DP, study="mine"), results / "rows")
    rows = [row for row in Report(results).tables["accuracy"].rows if row[0] == "mine"]
    assert [row[2] for row in rows] == ["dp", "cdp_v1"] and rows[1][6] == "+0.00 (1)"


def test_an_empty_folder_and_damaged_simulations_are_explained(results, tmp_path):
    with pytest.raises(RowError, match=r"holds no rows: train with scripts/accuracy\.py"):
        Report(tmp_path / "nowhere")
    (results / "simulated.json").write_text(json.dumps({"parts": 3}))
    with pytest.raises(RowError, match=r"simulated\.json is damaged"):
        build(results)


def test_a_folder_that_cannot_be_made_stops_before_anything_is_written(results):
    (results / "figures").write_text("a file in the way")
    before = sorted(path.name for path in results.iterdir())
    with pytest.raises(RowError, match="nothing was written"):
        write(build(results))
    assert sorted(path.name for path in results.iterdir()) == before


def on_read_only(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command that cannot write to a folder, not even as root, who gets it mounted read-only."""
    if os.geteuid() == 0:
        mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        command = ("unshare", "--mount", "sh", "-c", mount, folder, *command)
    folder.chmod(0o555)
    try:
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    finally:
        folder.chmod(0o755)


def test_a_read_only_folder_is_explained(results):
    build_it = [sys.executable, "-m", "cdp_repro.cli.report", "build", f"--results={results}"]
    before = sorted(path.name for path in results.iterdir())
    done = on_read_only(results, *build_it)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"root cannot mount here: {done.stderr.strip()}")
    assert done.returncode == 2
    assert f"cannot write to {results}: it is read-only; nothing was written" in done.stderr
    assert sorted(path.name for path in results.iterdir()) == before


# --- the command ---------------------------------------------------------------------------------------------------


def test_build_and_check_from_the_command_line(results, capsys):
    option = f"--results={results}"
    assert command.main(["check", option]) == 1
    assert "is missing" in capsys.readouterr().out
    assert command.main(["build", option]) == 0
    assert "files changed" in capsys.readouterr().out
    assert command.main(["check", option]) == 0
    row = next((results / "rows").rglob("*.json"))
    shutil.copy(row, row.with_name("twin.json"))
    assert command.main(["check", option]) == 2
    assert "the same cell with the same seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bild"], "unknown command 'bild': choose build, check, collect, status"),
        (["build", "--result=x"], "cdp-report build knows no --result=: it takes --results=, --root="),
        (["check", "here"], "knows no here"),
        (["build", "--results=nowhere"], "there is no folder nowhere"),
        (["collect"], "needs the directory of a finished run"),
        (["collect", "nowhere"], "nowhere is not a run directory"),
        (["collect", "--study=../x", "nowhere"], "use letters, digits"),
        (["status", "cifar"], "unknown study cifar: choose cifar10"),
    ],
)
def test_mistakes_are_explained(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_help_teaches(capsys):
    assert command.main(["--help"]) == 0
    assert "cdp-report collect" in capsys.readouterr().out
    assert command.main([]) == 2
