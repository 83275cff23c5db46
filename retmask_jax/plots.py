"""Figures, drawn without a display and handed back as PNG bytes."""

import io
from collections.abc import Collection

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def png(figure: Figure, dpi: int = 120) -> bytes:
    """Renders a figure; the same figure always gives the same bytes."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def head_heatmap(
    means: np.ndarray, selected: Collection[tuple[int, int]] = (), title: str = "Retrieval score"
) -> bytes:
    """Draws the mean score of every head, and beside it all scores in falling order.

    Args:
        means: f[L, N], mean retrieval score of each head.
        selected: (layer, head) of the heads to mark.
        title: heading of the figure.

    Returns:
        A PNG image.
    """
    n_layers, n_heads = means.shape
    figure = Figure(figsize=(4.2 + 0.16 * n_heads + 3.4, 1.6 + 0.13 * n_layers), layout="tight")
    grid, curve = figure.subplots(1, 2, width_ratios=(2, 1))

    image = grid.imshow(means, cmap="magma_r", vmin=0, vmax=max(means.max(), 1e-6), aspect="auto")
    if selected:
        layers, heads = zip(*selected, strict=True)
        grid.scatter(heads, layers, marker="s", s=16, facecolors="none", edgecolors="tab:cyan")
    grid.set(xlabel="head", ylabel="layer", title=title)
    figure.colorbar(image, ax=grid, label="mean score")

    falling = np.sort(means, axis=None)[::-1]
    curve.plot(np.arange(1, falling.size + 1), falling, color="tab:purple")
    if selected:
        curve.axvline(len(selected), color="tab:cyan", label=f"{len(selected)} selected")
        curve.legend()
    curve.set(xscale="log", xlabel="rank of the head", ylabel="mean score", ylim=(0, None))
    return png(figure)
