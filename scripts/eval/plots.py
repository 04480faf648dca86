"""
The pictures of all scripts: curves and heat maps in one style, saved as small SVG files that have the same
bytes for the same data. Needs matplotlib.
"""
import math

from common import Error, package

matplotlib = package("matplotlib")
matplotlib.use("Agg")
pyplot = package("matplotlib.pyplot")

matplotlib.rcParams.update({
    "svg.hashsalt": "train_fox", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.linewidth": 0.4, "grid.alpha": 0.5, "lines.linewidth": 1.3,
    "legend.frameon": False, "image.interpolation": "nearest", "figure.constrained_layout.use": True,
})
SCORES = matplotlib.colors.LinearSegmentedColormap.from_list("scores", ["#F0496E", "#EBB839", "#0CD79F"])
POINTS = 400  # of a curve, at most: more cannot be seen


def panels(columns, rows=1, width=4.2, height=3.0):
    """(figure, axes[rows][columns]), of width x height inches a panel."""
    return pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)


def curve(axes, x, y, label=None):
    """A line through at most POINTS of the points, the last one among them."""
    step = math.ceil(len(x) / POINTS)
    keep = range((len(x) - 1) % step, len(x), step)
    axes.plot([x[i] for i in keep], [y[i] for i in keep], label=label)


def mark(axes, x):
    """A dashed vertical line, as at the training length."""
    axes.axvline(x, color="#444444", linewidth=1, linestyle=(0, (4, 3)))


def heat_map(axes, rows, **options):
    """A matrix as coloured cells, the first row on top, with a colour bar. options: imshow's (cmap, vmin)."""
    image = axes.imshow(rows, **{"aspect": "auto", "cmap": "viridis", **options})
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes)


def label_ticks(axis, labels):
    """Labels the cells of a heat map's XAxis or YAxis, with white lines between them."""
    axis.set_ticks(range(len(labels)), [str(label) for label in labels])
    axis.set_ticks([i - 0.5 for i in range(1, len(labels))], minor=True)
    axis.grid(True, which="minor", color="white", linewidth=1, alpha=1)
    axis.set_tick_params(which="minor", length=0)


def save(figure, path):
    """Writes a figure in the format of the path's ending. One legend serves all panels."""
    handles = {label: line for a in figure.axes for line, label in zip(*a.get_legend_handles_labels())}
    if handles:
        columns = min(len(handles), 4)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    svg = {"metadata": {"Date": None, "Creator": None}} if str(path).endswith(".svg") else {}
    try:
        figure.savefig(path, dpi=150, **svg)
    except (OSError, ValueError) as e:
        raise Error(f"{path}: cannot write: {e.strerror if isinstance(e, OSError) else e}")
    pyplot.close(figure)
