"""The hash of the code, and how versions are named."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from cdp_repro.observe import versions as versions_module
from cdp_repro.observe.versions import code_hash, git_commit, joined, short, versions, versions_since


def test_the_code_hash_depends_on_names_and_contents_of_code(tmp_path, monkeypatch):
    assert code_hash() == code_hash() and re.fullmatch("[0-9a-f]{64}", code_hash())
    monkeypatch.setattr(versions_module, "PACKAGE", tmp_path)
    hashes = [code_hash()]
    (tmp_path / "configs").mkdir()
    for name, content in [("a.py", "1"), ("a.py", "2"), ("configs/b.yaml", "1"), ("configs/c.yaml", "")]:
        (tmp_path / name).write_text(content)
        hashes.append(code_hash())
    assert len(set(hashes)) == 5
    (tmp_path / "a.pyc").write_text("compiled")
    assert code_hash() == hashes[-1]
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert code_hash() not in hashes
    (tmp_path / "d.py").write_text("")
    assert code_hash(["configs", "b.py"]) != code_hash(["configs"])
    before = code_hash(["configs", "b.py"])
    (tmp_path / "d.py").write_text("not a part")
    assert code_hash(["configs", "b.py"]) == before


def test_a_repository_that_only_surrounds_the_package_is_not_its_source(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "cdp_repro"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(versions_module, "PACKAGE", package)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *arguments], check=True)
    assert git_commit() == "unknown"
    for arguments in (["add", "."], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *arguments], check=True)
    assert re.fullmatch("[0-9a-f]{40}", git_commit())


def test_a_short_commit_says_whether_the_tree_was_changed():
    commit = 40 * "a"
    assert [short(commit), short(f"{commit}-dirty"), short("unknown")] == [12 * "a", f"{12 * 'a'}-dirty", "unknown"]
    assert short(f"{commit} and {40 * 'b'}-dirty") == f"{12 * 'a'} and {12 * 'b'}-dirty"


def test_versions_of_several_runs_are_named_once_those_of_one_that_went_on_too():
    assert joined(["A", "A and B", "B", "C"]) == "A and B and C"


@pytest.mark.parametrize("part", ["schedule", "engine", "baselines", "models", "data", "training"])
def test_runs_of_another_code_for_training_are_of_another_version(tmp_path, monkeypatch, part):
    shutil.copytree(versions_module.PACKAGE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(versions_module, "PACKAGE", tmp_path / "copy")
    before = versions()["version/code"]
    (tmp_path / "copy" / "report" / "added.py").write_text("")
    assert versions()["version/code"] == before
    (tmp_path / "copy" / part / "added.py").write_text("")
    assert versions()["version/code"] != before


def test_a_version_whose_name_is_part_of_an_earlier_one_is_another(monkeypatch):
    monkeypatch.setattr(versions_module, "versions", lambda: {"version/torch": "2.1"})
    assert versions_since({"version/torch": "2.11"}) == {"version/torch": "2.11 and 2.1"}
    assert versions_since({"version/torch": "2.11 and 2.1"}) == {"version/torch": "2.11 and 2.1"}
