#!/usr/bin/env python3
"""
Draws what a model forgets and what it attends to, as the paper's figure, from the file of `--maps`:

    scripts/eval/maps.py maps.safetensors --out maps.svg --heads heads.svg

--out: for two heads, the one with the shortest half-life and the one with the longest (or --head LAYER.HEAD,
several times), F[i][j] = exp(cum_logf[i] - cum_logf[j]) above the places where attention is over 0.5.
--heads: half-life, pruned share and effective window of all heads. Layers and heads count from 0.

The file, in safetensors format, has floats of 32 or 64 bits:

    half_life         [L, NH]   -ln 2 / mean(log f), tokens; infinite without a forget gate
    pruned_share      [L, NH]   skipped share of the blocks of keys at or below the diagonal, 0 to 1
    effective_window  [L, NH]   mean over the rows i of the smallest w for which the keys j > i - w have 0.95
                                of the attention, tokens
    layers            [L]       numbers in the model of the layers with attention
    queries           [Q]       rising: the positions of the rows below, of all heads

and of each head H of layer L that can be drawn

    L.H.cum_logf      [T]       running sum of log f; the first entry is log f of token 0
    L.H.largest       [Q]       the largest attention of each row, and
    L.H.key           [Q]       its key: all that is over 0.5

where `L.H` is written as numbers, such as `3.11`. llmc/eval/maps.h writes it, and attention itself of two heads.
"""
import json
import math
import re
import statistics

from fox import Error, Parser, check_writable, package, run, write_file

GRID = 200  # cells of a side of F, at most
DOTS = 80  # the same of attention: few enough that one place is seen
SHOWN = 0.5  # attention that is drawn
STATISTICS = ("half_life", "pruned_share", "effective_window")
LONGEST = 10**7  # half-life that colours tell apart, tokens


def read(path):
    """{name: array} of a --maps file. An Error if the file, a name or a shape is wrong."""
    safetensors = package("safetensors.numpy")
    try:
        tensors = safetensors.load_file(path)
    except (OSError, package("safetensors").SafetensorError) as e:
        raise Error(f"{path}: cannot read: {e}")
    for name in STATISTICS:
        values = tensors.get(name)
        if values is None or values.ndim != 2 or values.shape != tensors["half_life"].shape:
            raise Error(f"{path}: not a file of --maps: {name} is not [L, NH]")
    if not {"layers", "queries"} <= tensors.keys():
        raise Error(f"{path}: not a file of --maps: layers or queries are missing")
    rows, queries = rows_of(tensors), tensors["queries"]
    if len(rows) != len(tensors["half_life"]):
        raise Error(f"{path}: layers are not those of half_life")
    for layer, head in mapped_heads(tensors):
        c, largest, key = (tensors.get(f"{layer}.{head}.{name}") for name in ("cum_logf", "largest", "key"))
        if queries.max(initial=0) >= len(c):
            raise Error(f"{path}: {layer}.{head}.cum_logf does not fit queries")
        if largest is None or key is None or not largest.shape == key.shape == queries.shape \
                or (key > queries).any() or key.min(initial=0) < 0:
            raise Error(f"{path}: {layer}.{head}.largest and key do not fit queries")
        if layer not in rows or head >= len(tensors["half_life"][0]):
            raise Error(f"{path}: has no statistics of head {layer}.{head}")
    return tensors


def rows_of(tensors):
    """{layer of the model: its row of the statistics}"""
    return {int(layer): row for row, layer in enumerate(tensors["layers"])}


def mapped_heads(tensors):
    """[(layer, head)] that have maps."""
    found = (re.fullmatch(r"(\d+)\.(\d+)\.cum_logf", name) for name in tensors)
    return sorted((int(m[1]), int(m[2])) for m in found if m)


def forget_map(cum_logf, queries):
    """F of some queries, and in each cell of keys of the last one up to the query, where F is largest: so the
    diagonal is always seen. At most GRID x GRID values, masked where all keys of a cell are > i."""
    import numpy
    T, n = len(cum_logf), min(GRID, len(cum_logf))
    i = queries[numpy.linspace(0, len(queries) - 1, min(GRID, len(queries))).round().astype(int)][:, None]
    first, last = (numpy.arange(k, n + k) * T // n - k for k in (0, 1))
    log_f = cum_logf[i] - cum_logf[numpy.minimum(last, i)]
    return numpy.ma.masked_where(first > i, numpy.exp(numpy.minimum(log_f, 0)))


def attention_map(largest, key, T):
    """The largest attention of each cell of a picture of at most DOTS x DOTS, of the largest ones of their rows."""
    import numpy
    rows, columns = min(DOTS, len(largest)), min(DOTS, T)
    cells = numpy.zeros((rows, columns))
    row, column = numpy.arange(len(largest)) * rows // len(largest), key.astype(numpy.int64) * columns // T
    numpy.maximum.at(cells, (row, column), largest)
    return cells


def draw_maps(path, tensors, heads):
    import numpy
    import plots
    figure, axes = plots.panels(len(heads), rows=2, width=3.4, height=2.9)
    queries = tensors["queries"]
    for column, (layer, head) in enumerate(heads):
        c, *maps = (tensors[f"{layer}.{head}.{name}"] for name in ("cum_logf", "largest", "key"))
        extent = (0, len(c), int(queries[-1]) + 1, int(queries[0]))
        half_life = tensors["half_life"][rows_of(tensors)[layer]][head]
        plots.heat_map(axes[0][column], forget_map(c, queries), "F", extent=extent, vmin=0, vmax=1)
        drawn = attention_map(*maps, len(c))
        drawn = numpy.ma.masked_less_equal(drawn, SHOWN)
        plots.heat_map(axes[1][column], drawn, "attention", extent=extent, vmin=SHOWN, vmax=1,
                       cmap=plots.MARKS)
        life = f"{half_life:,.0f}" if half_life >= 10 else f"{half_life:.2g}"
        life += " token" if life == "1" else " tokens"
        title = f"layer {layer}, head {head}: F\nhalf-life {life}"
        axes[0][column].set(title=title, ylabel="query i")
        axes[1][column].set(title=f"attention over {SHOWN}", xlabel="key j", ylabel="query i")
        for panel in axes[0][column], axes[1][column]:
            plots.binary_ticks(panel.xaxis)
            plots.binary_ticks(panel.yaxis)
    plots.save(figure, path)


def draw_heads(path, tensors):
    import plots
    titles = {"half_life": "half-life, tokens", "pruned_share": "pruned share of blocks",
              "effective_window": "effective window, tokens"}
    if not tensors["pruned_share"].any():
        del titles["pruned_share"]  # on the CPU nothing is pruned
    figure, [axes] = plots.panels(len(titles), width=3.4)
    for ax, (name, title) in zip(axes, titles.items()):
        values = tensors[name].clip(0, LONGEST)
        if name == "pruned_share":
            plots.heat_map(ax, values, title, vmin=0, vmax=1)
        else:
            plots.log_heat_map(ax, values, title, max(values.min(), 0.1), max(values.max(), 1))
        ax.set(xlabel="head", ylabel="layer")
        for axis, names in ((ax.xaxis, range(values.shape[1])), (ax.yaxis, list(rows_of(tensors)))):
            shown = range(0, len(names), max(1, len(names) // 8))
            axis.set_ticks(shown, [names[i] for i in shown])
    plots.save(figure, path)


def finite(values):
    """The rows of a matrix as lists."""
    return [[float(x) if math.isfinite(x) else None for x in row] for row in values]


def main():
    parser = Parser(__doc__)
    parser.add_argument("file", metavar="FILE.safetensors")
    parser.add_argument("--out", metavar="FILE.svg", help="F and attention of some heads")
    parser.add_argument("--head", action="append", metavar="LAYER.HEAD", help="a head to draw; several times")
    parser.add_argument("--heads", metavar="FILE.svg", help="statistics of all heads")
    parser.add_argument("--json", metavar="FILE.json", help="the same as numbers, [layer][head]; an infinite one is null")
    options = parser.parse_args()
    for path in filter(None, (options.out, options.heads, options.json)):
        check_writable(path)
    tensors = read(options.file)
    found = {f"{layer}.{head}": (layer, head) for layer, head in mapped_heads(tensors)}
    for name in options.head or []:
        if name not in found:
            raise Error(f"--head {name}: {options.file} has no map of it")
    if options.out and not found:
        raise Error(f"{options.file}: has no map of any head")
    if options.out:
        rows = rows_of(tensors)
        by_life = sorted(found, key=lambda name: tensors["half_life"][rows[found[name][0]], found[name][1]])
        chosen = dict.fromkeys(options.head or [by_life[0], by_life[-1]])
        draw_maps(options.out, tensors, [found[name] for name in chosen])
    if options.heads:
        draw_heads(options.heads, tensors)
    if options.json:
        write_file(options.json, json.dumps({name: finite(tensors[name]) for name in STATISTICS}, indent=0))
    print("layer   half-life of its heads: shortest  median  longest, tokens   pruned")
    for layer, lives, pruned in zip(rows_of(tensors), tensors["half_life"], tensors["pruned_share"]):
        lives = sorted(lives)
        middle, share = statistics.median(lives), 100 * pruned.mean()
        print(f"{layer:5d} {lives[0]:35.4g} {middle:7.4g} {lives[-1]:8.4g} {share:15.1f}%")


if __name__ == "__main__":
    run(main)
