"""Figures from tables; nothing here runs an experiment. Needs matplotlib, the ``report`` extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedbilevel.studies.rates.design import RatesResult

_SIZE = (10.0, 5.2)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by colour-blind readers
_MARKS = ("o", "s", "^", "D", "v", "P")


def _figure(columns: int) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Figures need matplotlib: install it with `pip install "fedbilevel[report]"`.') from error
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def save_figure(figure: Figure, path: Path) -> None:
    """PNG or SVG by suffix, whole or not at all, without time stamps and random names: equal results give equal files."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "fedbilevel"}), storage.draft(path) as draft:
        figure.savefig(draft, dpi=150, metadata=metadata, format=path.suffix[1:])


def _log_axes(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(True, which="major", color="0.88", linewidth=0.8)


def _reference(axes: Axes, horizons: Any, start: float, exponent: float, label: str) -> None:
    line = start * (horizons / horizons[0]) ** exponent
    axes.plot(horizons, line, color="0.35", linestyle="--", linewidth=1.2, label=label)


def _legend_below(axes: Axes, title: str | None = None, columns: int = 1) -> None:
    """Outside the axes, so that no line is hidden."""
    axes.legend(
        fontsize=8,
        title=title,
        title_fontsize=8,
        ncols=columns,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        frameon=False,
    )


_MEAN_SQUARE = r"mean of $\|\nabla h(\bar x_t)\|^2$ over $t\leq T$"


def _slopes(result: RatesResult) -> Figure:
    figure, panels = _figure(2)
    fitted = result.slopes[result.slopes["range"] == "all"].set_index("variant")["slope"]
    reference = {"fedbio": (-1 / 2, r"slope $-1/2$"), "fedbioacc": (-2 / 3, r"slope $-2/3$")}
    titles = {"fedbio": "FedBiO, no noise", "fedbioacc": "FedBiOAcc, minibatches"}
    for axes, algorithm in zip(panels, titles, strict=True):
        own = result.points[result.points["algorithm"] == algorithm]
        top = 0.0
        for number, (variant, group) in enumerate(own.groupby("variant", sort=False)):
            table = group.pivot(index="run", columns="horizon", values="mean_square")
            horizons, mean = table.columns.to_numpy(dtype=float), table.mean().to_numpy()
            low, high = table.min().to_numpy(), table.max().to_numpy()
            name = str(variant).replace("eta = delta/sqrt(T)", r"$\eta = \delta/\sqrt{T}$")
            label = f"{name}: {fitted[variant]:+.2f}"
            axes.plot(horizons, mean, marker=_MARKS[number], color=_COLOURS[number], markersize=5, label=label)
            axes.fill_between(horizons, low, high, color=_COLOURS[number], alpha=0.15, linewidth=0)
            top = max(top, mean[0]) if algorithm == "fedbio" else (top or mean[0])
        _reference(axes, horizons, top * 1.6, *reference[algorithm])
        _log_axes(axes, titles[algorithm], "local steps $T$", _MEAN_SQUARE)
        _legend_below(axes, "fitted slope; the band holds all runs")
    return figure


def _bounds(result: RatesResult) -> Figure:
    figure, panels = _figure(2)
    titles = {"fedbio": "Theorem 1, its own step sizes", "fedbioacc": "Theorem 2 (corrected), its own step sizes"}
    exponents = {"fedbio": (-1 / 2, r"slope $-1/2$"), "fedbioacc": (-2 / 3, r"slope $-2/3$")}
    for axes, algorithm in zip(panels, titles, strict=True):
        own = result.bounds[result.bounds["algorithm"] == algorithm]
        for number, (variant, group) in enumerate(own.groupby("variant", sort=False)):
            table = group.groupby("horizon")[["measured", "bound"]].mean()
            name = str(variant).removeprefix("theorem 2, ").replace("theorem 1", "mean of all problems")
            style: dict[str, Any] = {"color": _COLOURS[number], "marker": _MARKS[number], "markerfacecolor": "none"}
            style["markersize"] = 5 + 2 * (number // 2)  # variants that coincide stay visible inside one another
            axes.plot(table.index, table["bound"], linestyle="-", linewidth=1.4, label=f"bound, {name}", **style)
            measured = (
                None if number else "measured (dotted), every variant" if algorithm == "fedbioacc" else "measured"
            )
            axes.plot(table.index, table["measured"], linestyle=":", linewidth=1.4, label=measured, **style)
        horizons = np.array(sorted(own["horizon"].unique()), dtype=float)
        _reference(axes, horizons, float(own["bound"].max()) * 3, *exponents[algorithm])
        _log_axes(axes, titles[algorithm], "local steps $T$", _MEAN_SQUARE)
        _legend_below(axes)
    return figure


def _communication(result: RatesResult) -> Figure:
    figure, panels = _figure(2)
    titles = {"fedbio": "FedBiO, constant step, no noise", "fedbioacc": 'FedBiOAcc, tuned, previous="local"'}
    for axes, algorithm in zip(panels, titles, strict=True):
        own = result.communication[result.communication["algorithm"] == algorithm]
        for number, (local_steps, group) in enumerate(own.groupby("local_steps")):
            mean = group[group["bytes"] > 0].groupby("bytes")["mean_square"].mean()
            axes.plot(
                mean.index / 1000, mean.to_numpy(), color=_COLOURS[number], linewidth=1.3, label=f"I = {local_steps}"
            )
        across = "communicated, up and down, all clients (kB)"
        _log_axes(axes, titles[algorithm], across, r"$\|\nabla h(\bar x)\|^2$ at the round")
        axes.set_ylim(bottom=1e-10 if algorithm == "fedbio" else None)  # below lies rounding
        _legend_below(axes, "local steps a round", columns=3)
    return figure


def _clients(result: RatesResult) -> Figure:
    figure, panels = _figure(2)
    table = result.estimator
    counts = table["clients"].to_numpy(dtype=float)
    axes = panels[0]
    axes.plot(counts, table["variance"], color=_COLOURS[0], marker="o", markersize=5, label="variance")
    axes.plot(counts, table["bias_square"], color=_COLOURS[1], marker="s", markersize=5, label="squared bias")
    _reference(axes, counts, float(table["variance"].iloc[0]) * 1.5, -1.0, "slope $-1$")
    _log_axes(axes, "One averaged Neumann estimate", "clients $M$", "squared error of the mean")
    _legend_below(axes, columns=3)
    axes = panels[1]
    for number, (name, group) in enumerate(result.speedup.groupby("estimator", sort=False)):
        mean = group.groupby("clients")[["mean_square", "inner_error"]].mean()
        label = rf"$\|\nabla h\|^2$, {name} hypergradient"
        axes.plot(
            mean.index, mean["mean_square"], color=_COLOURS[number], marker=_MARKS[number], markersize=5, label=label
        )
        if name == "unbiased":
            axes.plot(mean.index, mean["inner_error"], color=_COLOURS[2], marker="^", markersize=5, label="inner error")
    _log_axes(axes, "End of FedBiOAcc, equal clients", "clients $M$", "mean over the last half")
    counts = np.unique(result.speedup["clients"].to_numpy(dtype=float))
    first = result.speedup[(result.speedup["estimator"] == "unbiased") & (result.speedup["clients"] == counts[0])]
    _reference(axes, counts, float(first["mean_square"].mean()) * 0.6, -1.0, "slope $-1$")
    _legend_below(axes, columns=2)
    return figure


def rates_figures(result: RatesResult) -> dict[str, Figure]:
    """The four figures of ``fedbilevel rates``: slopes, bounds, communication, clients."""
    figures = {
        "slopes": _slopes(result),
        "bounds": _bounds(result),
        "communication": _communication(result),
        "clients": _clients(result),
    }
    for figure in figures.values():
        # Lay out once: doing it again for every format moves things a little each time.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figures
