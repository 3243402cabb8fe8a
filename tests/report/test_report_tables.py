"""One table, four forms."""

from __future__ import annotations

import csv
import io
import re

import pytest

from cdp_repro.report.page import Finding, Picture, Section, page
from cdp_repro.report.tables import Table

TABLE = Table("t", "100 % of it", ("a_b", "±"), [["1 | 2", "<b> & `x`"], ["", "50 %"]], ["Run by `cdp-train x=1`."])


def test_markdown_escapes_pipes():
    assert TABLE.markdown().splitlines()[:3] == ["| a_b | ± |", "| --- | --- |", r"| 1 \| 2 | &lt;b> & `x` |"]


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("*x* _y_ __z__ a_b", r"\*x\* \_y\_ \_\_z\_\_ a_b"),
        ("~~gone~~ ~", r"\~\~gone\~\~ \~"),
        ("<script> a < b </p>", "&lt;script> a < b &lt;/p>"),
        ("[-1.0, +2.0] (5) [x](http://y)", r"[-1.0, +2.0] (5) [x]\(http://y)"),
        ("&lt; & R&D", r"\&lt; & R&D"),
        (r"\* C:\x", r"\\\* C:\x"),
        ("`*x* <b>` *y*", r"`*x* <b>` \*y\*"),
        ("one ` alone", r"one \` alone"),
        ("two\nlines", "two lines"),
    ],
)
def test_markdown_shows_text_as_it_is(text, markdown):
    table = Table("t", "T", ("a",), [[text]], [text])
    assert table.markdown().splitlines()[2:] == [f"| {markdown} |", "", markdown]


def test_csv_reads_back():
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [list(TABLE.columns), *TABLE.rows]


def test_latex_escapes_what_is_special():
    latex = TABLE.latex()
    assert r"a\_b & $\pm$ \\" in latex and r"100 \% of it" in latex and r"<b> \& `x` \\" in latex
    assert latex.count("\\begin") == latex.count("\\end") == 2


def test_html_escapes_and_marks_code():
    text = TABLE.html()
    assert "&lt;b&gt; &amp; <code>x</code>" in text and "<code>cdp-train x=1</code>" in text


def test_html_puts_numbers_to_the_right_and_folds_the_evidence():
    rows = [["a", "97.17 ± 0.24 (2)", "12.5 KiB", "-1.00 [-1.40, -0.60] (5)", "3"],
            ["b", "not run: `x`", "", "< 0.001", "three"]]  # fmt: skip
    table = Table("t", "T", ("name", "top-1", "bytes", "minus", "mixed"), rows, ["How."], ["Run by `x`."])
    text = table.html()
    assert re.findall(r"<th( [^>]*)?>", text) == ["", *[' class="number"'] * 3, ""]
    before, folded = text.split("<details")
    assert "How." in before and "<code>x</code>" in folded and "How." not in folded
    assert "<details" not in TABLE.html()
    assert table.markdown().endswith("\n\nHow.\n\nRun by `x`.\n") and "Run by x." in table.latex()


@pytest.mark.parametrize(
    ("cells", "looks"),
    [
        (["12.82 KiB (c, s)", "–", "c 12.82 KiB; e 12.95 KiB"], ' class="number"'),
        (["3", "c 3; e four"], ""),
        (["–", ""], ""),
    ],
)
def test_a_number_with_its_sources_and_one_that_nobody_knows_stand_to_the_right(cells, looks):
    text = Table("t", "T", ("bytes",), [[cell] for cell in cells]).html()
    assert re.findall(r"<t[hd]( [^>]*)?>", text) == [looks] * (1 + len(cells))


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="a row of 1 cells in 2 columns"):
        Table("t", "", ("a", "b"), [["1"]])


def test_the_page_loads_nothing_from_elsewhere():
    picture = Picture("f", b"<svg/>", 'look "here"')
    finding = Finding("It is so", "holds in <part>", False, "7 of 8", [picture])
    section = Section("s", "S", ["p"], [finding], "<p title='x'>&amp;</p>", [picture], [picture], [TABLE])
    text = page("T", ["in <general>"], [section])
    assert "http" not in text and 'src="data:image/svg+xml;base64,' in text
    assert '<span class="verdict fails">holds in &lt;part&gt;</span>' in text and "<p>7 of 8</p>" in text
    assert "srcdoc='<p title=&#39;x&#39;>&amp;amp;</p>'" in text
    assert "&lt;general&gt;" in text and 'href="#s-section"' in text and 'id="s-section"' in text
