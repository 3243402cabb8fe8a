"""The page in a real browser: no picture is broken, nothing is wider than the window, on a desk and on a phone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "results" / "report.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>addEventListener("load", () => {
  const page = document.getElementById("page").contentDocument, root = page.documentElement;
  const scrolls = element => { for (; element; element = element.parentElement)
    if (getComputedStyle(element).overflowX === "auto") return true; return false; };
  const found = {
    images: page.images.length,
    broken: [...page.images].filter(image => !image.complete || image.naturalWidth === 0).length,
    wide: [...page.body.querySelectorAll("*")]
      .filter(element => element.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(element))
      .map(element => element.outerHTML.slice(0, 80)),
    scroll: root.scrollWidth, width: root.clientWidth,
  };
  document.title = "measured"; document.getElementById("found").textContent = JSON.stringify(found);
});</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_whole_and_fits(width, tmp_path):
    (tmp_path / "report.html").write_bytes(PAGE.read_bytes())
    frame = f'<iframe id="page" src="report.html" style="border:0;width:{width}px;height:900px"></iframe>'
    (tmp_path / "probe.html").write_text(f'<!doctype html><pre id="found"></pre>{frame}{PROBE}')
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--hide-scrollbars", "--dump-dom",
        (tmp_path / "probe.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    text = re.search(r"<pre id=.found.>(.*?)</pre>", done.stdout, re.DOTALL)[1]
    found = json.loads(html.unescape(text))
    assert found["width"] == width
    assert found["images"] >= 5 and found["broken"] == 0
    assert found["wide"] == [] and found["scroll"] <= width
