"""Figures, drawn without a display and handed back as PNG bytes."""

import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator


def label(policy: str) -> str:
    """A policy's name for people: the heads that it names are masked, not used."""
    return re.sub(r"retrieval|random(?=-)", r"\g<0>-masked", policy)


def png(figure: Figure, dpi: int = 120) -> bytes:
    """Renders a figure; the same figure always gives the same bytes."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def head_heatmap(
    means: np.ndarray, selected: Collection[tuple[int, int]] = (), title: str = "Retrieval score"
) -> bytes:
    """Draws the mean score of every head, layer by head.

    Args:
        means: f[L, N], mean retrieval score of each head.
        selected: (layer, head) of the heads to outline.
        title: heading of the figure.

    Returns:
        A PNG image.
    """
    figure = Figure(figsize=(7.2, 1.4 + min(0.14 * len(means), 8)), layout="tight")
    axes = figure.subplots()
    image = axes.imshow(means, cmap="magma_r", vmin=0, vmax=max(means.max(), 1e-6), aspect="auto")
    cells = [Rectangle((head - 0.5, layer - 0.5), 1, 1) for layer, head in selected]
    axes.add_collection(
        PatchCollection(cells, facecolor="none", edgecolor="tab:cyan", linewidth=1.5)
    )
    title += f" ({len(cells)} selected heads outlined)" if cells else ""
    axes.set(xlabel="head", ylabel="layer", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    figure.colorbar(image, ax=axes, label="mean score")
    return png(figure)


def score_distribution(
    means: np.ndarray, selected: Collection[tuple[int, int]] = (), tau: float | None = None
) -> bytes:
    """Draws all head scores in falling order: the steeper the curve, the fewer heads retrieve.

    Args:
        means: f[L, N], mean retrieval score of each head.
        selected: (layer, head) of the heads to mark.
        tau: threshold to draw a line at.

    Returns:
        A PNG image.
    """
    order = np.argsort(-means, axis=None, kind="stable")
    marked = np.zeros(means.shape, bool)
    for head in selected:
        marked[head] = True
    falling, marked = means.ravel()[order], marked.ravel()[order]
    rank = np.arange(1, falling.size + 1)

    figure = Figure(figsize=(7.2, 3.6), layout="tight")
    axes = figure.subplots()
    _open(axes)
    chosen = f"selected: {marked.sum():,} of {marked.size:,} ({marked.mean():.1%})"
    for some, colour, label in ((~marked, "tab:blue", "other heads"), (marked, "tab:red", chosen)):
        axes.vlines(rank[some], 0, falling[some], color=colour, linewidth=1)
        axes.plot(rank[some], falling[some], ".", color=colour, markersize=5, label=label)
    if tau is not None:
        axes.axhline(tau, color="0.2", linestyle="--", linewidth=1, label=f"tau = {tau:g}")
    axes.set(xlabel="rank of the head", ylabel="mean score", xlim=(0, rank[-1] + 1))
    axes.set(title="Head scores in falling order", ylim=(0, None))
    axes.legend(frameon=False)
    return png(figure)


def niah_heatmap(
    lengths: Sequence[int],
    depths: Sequence[float],
    passed: Sequence[Sequence[int]],
    trials: Sequence[Sequence[int]],
    title: str = "Needle in a haystack",
) -> bytes:
    """Draws the share of trials passed by context length and needle depth.

    Args:
        lengths: tokens of the contexts, ascending.
        depths: percent of the context before the needle, ascending.
        passed, trials: counts, indexed [length][depth]; a cell without trials stays grey.
        title: heading of the figure.

    Returns:
        A PNG image.
    """
    counts = np.asarray(trials, float).T
    share = np.full(counts.shape, np.nan)
    np.divide(100 * np.asarray(passed, float).T, counts, out=share, where=counts > 0)

    figure = Figure(figsize=(7.2, 1.6 + 0.35 * min(len(depths), 10)), layout="tight")
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    image = axes.imshow(share, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    across, down = -(-len(lengths) // 12), -(-len(depths) // 12)  # 12 labels an axis at most
    axes.set_xticks(range(0, len(lengths), across), [f"{n:,}" for n in lengths[::across]])
    axes.set_yticks(range(0, len(depths), down), [f"{d:.3g}" for d in depths[::down]])
    axes.set(xlabel="context length (tokens)", ylabel="needle depth (%)", title=title)
    if len(lengths) > 6:
        axes.tick_params(axis="x", rotation=30)
    if share.size <= 150:
        for (row, column), percent in np.ndenumerate(share):
            if counts[row, column]:
                colour = "white" if percent < 60 else "black"
                axes.text(column, row, f"{percent:.0f}", ha="center", va="center", color=colour)
    figure.colorbar(image, ax=axes, label="trials passed (%)")
    return png(figure)


def training_curves(steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> bytes:
    """Draws a panel for each curve (label → value at each optimiser step), two panels a row.

    Returns:
        A PNG image.
    """
    rows = -(-len(curves) // 2)
    figure = Figure(figsize=(7.2, 2.5 * rows), layout="tight")
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for panel, (label, values) in zip(panels, curves.items(), strict=False):
        _open(panel)
        panel.plot(steps, values, color="tab:blue", marker="." if len(steps) <= 40 else None)
        panel.set(ylabel=label, xlabel="optimiser step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in panels[len(curves) :]:
        panel.remove()
    return png(figure)


def _open(axes: Axes) -> None:
    """Takes away the frame's top and right side and adds faint level lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def mesh_bars(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Draws how fast meshes are at best, and their memory, best first.

    Args:
        rows: `program`, the mesh's axes, `step_s`, `mfu`, `needed_gib`, `available_gib`.
        title: heading of the figure.

    Returns:
        A PNG image.
    """
    figure = Figure(figsize=(8.4, 1.6 + 0.24 * len(rows)), layout="tight")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [
        f"{row['program']} {row['data']}·{row['fsdp']}·{row['sequence']}·{row['tensor']}"
        for row in rows
    ]
    places = np.arange(len(rows))
    speed.barh(places, [100 * row["mfu"] for row in rows], color="tab:blue")
    memory.barh(places, [row["needed_gib"] for row in rows], color="tab:orange")
    speed.set(xlabel="MFU at best, %", title=title, ylabel="mesh data·fsdp·sequence·tensor")
    speed.set_yticks(places, names, fontsize=7)
    speed.invert_yaxis()
    memory.set(xlabel="GiB a device")
    if rows:
        memory.axvline(rows[0]["available_gib"], color="tab:red", linestyle="--")
    return png(figure)
