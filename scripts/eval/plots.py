"""
The pictures of all scripts: curves and heat maps in one style, saved as small SVG files that have the same
bytes for the same data. Needs matplotlib.

Lines have the colours of Okabe and Ito, cells those of viridis: colour-blind readers can tell both apart.
Ticks are plain numbers. The legend is one column beside the panels.
"""
import io
import math
import os
import re

from common import Error, check_writable, package, write_file

matplotlib = package("matplotlib")
matplotlib.use("Agg")
pyplot = package("matplotlib.pyplot")

matplotlib.rcParams.update({
    "svg.hashsalt": "train_fox", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.linewidth": 0.4, "grid.alpha": 0.5, "lines.linewidth": 1.3,
    "axes.formatter.useoffset": False, "axes.formatter.limits": (-99, 99),
    "legend.frameon": False, "image.interpolation": "nearest", "figure.constrained_layout.use": True,
})
# of Okabe and Ito, without yellow, which is faint on white
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES = ["-", (0, (5, 1)), (0, (1, 1))]  # of the first seven lines, the next, and the rest
GREY = "#555555"
# viridis without the colours that are faint on white, dark for large values
MARKS = matplotlib.colors.ListedColormap(matplotlib.colormaps["viridis"](range(192, -1, -1)))
POINTS = 2000  # of all curves of a picture, at most
CURVE = 200  # of one of them: more cannot be seen


def panels(columns, rows=1, width=3.9, height=3.0):
    """(figure, axes[rows][columns]), of width x height inches a panel."""
    return pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)


def caption(axes, text):
    """A line in grey over a panel, such as what its bands are."""
    axes.set_title(text, loc="left", color=GREY, fontsize=8)


# ----------------------------------------------------------------------------
# units of axes: (size, name)

TOKENS = [(2**40, "tokens, Ti"), (2**30, "tokens, Gi"), (2**20, "tokens, Mi"), (2**10, "tokens, Ki"),
          (1, "tokens")]
FLOPS = [(1e21, "model FLOPs, 10²¹"), (1e18, "model FLOPs, 10¹⁸"), (1e15, "model FLOPs, 10¹⁵"),
         (1e12, "model FLOPs, 10¹²"), (1e9, "model FLOPs, 10⁹"), (1e6, "model FLOPs, 10⁶"),
         (1, "model FLOPs")]
HOURS = [(1, "hours"), (1 / 60, "minutes"), (1 / 3600, "seconds")]


def unit(largest, units):
    """The largest (size, name) of units that `largest` has at least twice."""
    return next(((size, name) for size, name in units if largest >= 2 * size), units[-1])


# ----------------------------------------------------------------------------
# curves. `k` counts what a picture compares: each has a colour of its own in all panels


def look(k):
    return {"color": COLORS[k % len(COLORS)], "linestyle": STYLES[k // len(COLORS) % len(STYLES)]}


def band_of(curves):
    """(lowest, highest) of several curves at each point; None of one curve."""
    return ([*map(min, zip(*curves))], [*map(max, zip(*curves))]) if len(curves) > 1 else None


def curve(axes, x, y, k, label=None, band=None, curves=1):
    """A line, and a band (low, high) around it. curves: how many the picture has in all."""
    step = math.ceil(len(x) / max(30, min(CURVE, POINTS // curves)))
    keep = range((len(x) - 1) % step, len(x), step)  # the last one among them
    some = lambda values: [values[i] for i in keep]
    axes.plot(some(x), some(y), label=label, **look(k))
    if band:
        axes.fill_between(some(x), *map(some, band), color=look(k)["color"], alpha=0.2, linewidth=0)


def dots(axes, x, y, k, band=None):
    """Dots, with bars over a band (low, high)."""
    color = look(k)["color"]
    axes.plot(x, y, "o", markersize=3, color=color)
    if band:
        bars = [(at, at, math.nan) for at in x], [(low, high, math.nan) for low, high in zip(*band)]
        axes.plot(*([value for bar in values for value in bar] for values in bars), color=color, linewidth=1)


def mark(axes, x):
    """A dashed vertical line, as at the training length, that is seen on any colour."""
    axes.axvline(x, color="white", linewidth=3, zorder=1.6)  # above cells and the grid, below curves
    axes.axvline(x, **KEYS["dashes"], zorder=1.6)


# ----------------------------------------------------------------------------
# ticks


def plain(value, _=None):
    """A number without an exponent."""
    return f"{value + 0:.6f}".rstrip("0").rstrip(".") if abs(value) >= 1e-6 else "0"


def set_ticks(axis, ticks):
    axis.set_ticks(ticks, [*map(plain, ticks)])
    axis.set_ticks([], minor=True)


def layer_ticks(axes, layers):
    """The x axis of something by layer."""
    axes.set(xlabel="layer", xlim=(-0.5, layers - 0.5))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1))


def binary_ticks(axis):
    """Ticks at multiples of a power of two, of an axis that counts tokens."""
    low, high = sorted(axis.get_view_interval())
    step = 2.0**math.ceil(math.log2((high - low) / 6))
    axis.set_major_locator(matplotlib.ticker.MultipleLocator(step))
    axis.set_major_formatter(plain)


def logarithmic(low, high, base=10):
    """At most eight round numbers between two, for a logarithmic scale."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    for factors in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [f * float(base)**e for e in range(first, last + 1) for f in factors if f < base]
        ticks = [t for t in ticks if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(ticks) > 2:
            return ticks[::math.ceil(len(ticks) / 8)]
    ticks = matplotlib.ticker.MaxNLocator(5).tick_values(low, high)
    return [t for t in ticks if low <= t <= high]


def log_scale(axes, name, base=10):
    """Makes the axis "x" or "y" logarithmic, once all is drawn."""
    axes.set(**{f"{name}scale": matplotlib.scale.LogScale(None, base=base)})
    axis = getattr(axes, f"{name}axis")
    set_ticks(axis, logarithmic(*sorted(axis.get_view_interval()), base))


# ----------------------------------------------------------------------------
# heat maps


def heat_map(axes, rows, label, ticks=None, **options):
    """A matrix as coloured cells, the first row on top, with a colour bar. options: imshow's (vmin, cmap)."""
    image = axes.imshow(rows, **{"aspect": "auto", "cmap": "viridis", **options})
    axes.grid(False)
    bar = axes.figure.colorbar(image, ax=axes, label=label)
    if ticks is not None:
        set_ticks(bar.ax.yaxis, ticks)


def log_heat_map(axes, rows, label, low, high):
    """The same on a logarithmic scale."""
    norm = matplotlib.colors.LogNorm(low, high)
    heat_map(axes, rows, label, logarithmic(low, high), norm=norm)


def label_ticks(axis, labels):
    """Labels the cells of a heat map's XAxis or YAxis, with white lines between them."""
    axis.set_ticks(range(len(labels)), [str(label) for label in labels])
    axis.set_ticks([i - 0.5 for i in range(1, len(labels))], minor=True)
    axis.grid(True, which="minor", color="white", linewidth=1, alpha=1)
    axis.set_tick_params(which="minor", length=0)


# ----------------------------------------------------------------------------
# files

# what a legend can explain beside its lines
KEYS = {"line": {"linestyle": "-"}, "dots": {"linestyle": "", "marker": "o", "markersize": 3},
        "dashes": {"color": "black", "linewidth": 1, "linestyle": (0, (4, 3))}}


def add_legend(figure, keys):
    handles = {label: line for a in figure.axes for line, label in zip(*a.get_legend_handles_labels())}
    for kind, label in keys.items():
        handles[label] = matplotlib.lines.Line2D([], [], **{"color": GREY, **KEYS[kind]})
    if not handles:
        return
    legend = figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    width, height = figure.get_size_inches()
    box = legend.get_window_extent(figure.canvas.get_renderer())
    figure.set_size_inches(width + box.width / figure.dpi, max(height, box.height / figure.dpi + 0.1))


def shorten(svg):
    """An SVG with two decimals in its coordinates: a hundredth of a point is not seen."""
    number = lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip(".")
    return re.sub(r' (d|x|y)="[^"]*"', lambda m: re.sub(r"-?\d+\.\d{3,}", number, m[0]), svg)


def check(path):
    """An Error unless save can write there, before time is spent on what is drawn."""
    kind = os.path.splitext(path)[1][1:] or "svg"
    known = matplotlib.backend_bases.FigureCanvasBase.filetypes
    if kind not in known:
        raise Error(f"{path}: a picture ends in one of {', '.join(sorted(known))}")
    check_writable(path)


def save(figure, path, keys=None):
    """Writes a figure in the format of the path's ending, as SVG without one. One legend serves all panels. keys:
    what it explains besides the curves, {one of KEYS: text}"""
    add_legend(figure, keys or {})
    kind, data = os.path.splitext(path)[1][1:] or "svg", io.BytesIO()
    svg = kind == "svg"
    try:
        figure.savefig(data, format=kind, dpi=150, **({"metadata": {"Date": None, "Creator": None}} if svg else {}))
    except ValueError as e:
        raise Error(f"{path}: cannot write: {e}")
    write_file(path, shorten(data.getvalue().decode()) if svg else data.getvalue())
    pyplot.close(figure)
