"""A sweep's results as files: the table, and a figure with mean and deviation over seeds, a line per series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from cdp_repro.config import ConfigError
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.figures import save_figure
from cdp_repro.report.charts import plain_axes, style
from cdp_repro.report.sweep_results import EPOCH, SweepResults

_MOST_TICKS = 12
_LEGEND_LETTERS = 56
"""That fit beside each other below a figure."""
_SPAN_OF_A_LOG_AXIS = 10


def write_sweep(results: SweepResults, folder: Path) -> list[Path]:
    """Write the table as CSV and the figure as SVG and PNG into a folder; return their paths.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = folder / results.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(table := Path(f"{path}.csv"), results.table().csv().encode())
        figure, figures = sweep_figure(results), [Path(f"{path}{suffix}") for suffix in (".svg", ".png")]
        for each in figures:
            save_figure(figure, each)
    except OSError as error:
        raise ConfigError([f"cannot write to {folder}: {error.strerror or error}; pass another --out="]) from error
    return [table, *figures]


def sweep_figure(results: SweepResults) -> Figure:
    """Draw every series; x is evenly spaced if it is text, and logarithmic if it is a setting that spans a decade."""
    names = [results.label(values) for values in results.series]
    longest = max(map(len, names), default=0) + 6
    figure = Figure(figsize=(max(6.4, 6.4 * longest / _LEGEND_LETTERS), 3.8), layout="constrained")
    axis = figure.subplots()
    places = list(dict.fromkeys(x for points in results.series.values() for x in points))
    numbers = [x for x in places if not isinstance(x, str)]
    is_text = len(numbers) < len(places)
    for name, points in zip(names, results.series.values(), strict=True):
        xs = [places.index(x) if is_text else x for x in points]
        look = style(name, names)
        errors = [sample.deviation for sample in points.values()]  # NaN for one run, which draws no bar
        axis.errorbar(xs, [sample.mean for sample in points.values()], errors, label=name, marker="o", markersize=4,
                      capsize=3, linewidth=1.3, **({**look, "linestyle": ""} if is_text else look))  # fmt: skip
    if is_text:
        axis.set_xticks(range(len(places)), list(map(str, places)))
    else:
        _number_axis(axis, results.x, sorted(numbers))
    axis.set(xlabel=results.x, ylabel=results.y)
    plain_axes(axis)
    if results.left_out:
        axis.set_title(f"without {_counted(results.left_out.values())}", fontsize="small", loc="left")
    if results.group:
        columns = max(1, min(3, _LEGEND_LETTERS // longest))
        figure.legend(frameon=False, loc="outside lower center", ncols=columns, title=", ".join(results.group))
    return figure


def _counted(reasons: Iterable[str]) -> str:
    """Return how many runs are left out, by the first word of the reason, such as `2 diverged, 1 missing`."""
    return ", ".join(f"{n} {state}" for state, n in Counter(reason.partition(" (")[0] for reason in reasons).items())


def _labels(values: Sequence[float]) -> list[str]:
    """Return numbers as text, as short as tells them apart."""
    for digits in range(6, 18):  # 6 as by default, 17 are all of a float
        labels = [f"{value:.{digits}g}" for value in values]
        if len({*labels}) == len(values):
            return labels
    return [*map(str, values)]


def _number_axis(axis: Axes, x: str, values: Sequence[float]) -> None:
    if x != EPOCH and values[0] > 0 and values[-1] / values[0] >= _SPAN_OF_A_LOG_AXIS:
        axis.set_xscale("log")
    if len(values) <= _MOST_TICKS:
        axis.set_xticks(values, _labels(values))
        axis.xaxis.set_minor_locator(NullLocator())
    elif all(isinstance(value, int) for value in values):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.xaxis.set_major_formatter(ScalarFormatter())
