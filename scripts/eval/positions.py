#!/usr/bin/env python3
"""
Draws the loss by position, as in the paper, from the files of `--eval`:

    scripts/eval/positions.py fox-pro=fox.json transformer-pro=transformer.json --out positions.svg

Left L(i), the mean loss of the i-th token, smoothed by a centred window that is cut at the ends; right P(l),
the perplexity of the first l tokens, exp(mean of L(1..l)), not smoothed; both from position 128 on. A dashed
line marks the training length: --train-length, or what the files say. Files of one NAME are seeds: lines are
their means.

The band of L(i) is its standard error: of the held-out sequences, where the files have it for the same window
(loss_error), and of the seeds, added in squares. Models evaluated on the same sequences share most of the
former: their differences are surer than the bands. The band of P(l) is the lowest and the highest seed.
"""
import itertools
import math
import statistics
import sys

from fox import Error, Parser, counted, named_files, read_json, run

FIRST = 128
WINDOW = 101


def smooth(values, window):
    """Means over a centred window of `window` values, fewer at the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    half = window // 2
    spans = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def perplexities(loss):
    """P(1), P(2), ...; infinite where a float cannot hold it."""
    means = (total / n for n, total in enumerate(itertools.accumulate(loss), 1))
    return [math.exp(mean) if mean < 700 else math.inf for mean in means]


def check_losses(path, result):
    """An Error unless a file's result has finite losses. Data with a mask has no L(i) and P(l) of whole sequences."""
    if result.get("targets", result.get("tokens")) != result.get("tokens"):
        raise Error(f"{path}: measured on data with a mask; it has loss_mean and accuracy of the targets that count")
    if not are_numbers(result.get("loss")):
        raise Error(f"{path}: not a result of --eval: no list of losses")


def are_numbers(value):
    """Is it a list of numbers, which are finite and not too large for a float?"""
    return (isinstance(value, list) and len(value) > 0
            and all(isinstance(x, (int, float)) and abs(x) <= sys.float_info.max for x in value))


def read_eval(path):
    """The result of --eval in a file. An Error if it is another file, or has fewer than FIRST positions."""
    result = read_json(path)
    check_losses(path, result)
    loss = result["loss"]
    if len(loss) < FIRST:
        raise Error(f"{path}: has {counted(len(loss), 'position')}; the picture begins at {FIRST}")
    errors = result.get("loss_error") or loss
    if not are_numbers(errors) or len(errors) != len(loss):
        raise Error(f"{path}: not a result of --eval: loss_error is not a list of as many numbers as loss")
    for name, kind, words in ("trained_seq_len", int, "a whole number"), ("checkpoint", str, "a text"):
        if not isinstance(result.get(name), (kind, type(None))):
            raise Error(f"{path}: not a result of --eval: {name} is not {words}")
    return result


def means(lists):
    """Elementwise, of the shortest."""
    return [statistics.fmean(values) for values in zip(*lists)]


def standard_errors(results, curves, window):
    """Standard errors of the mean of curves, one a result: ([error], of sequences?, of seeds?). []: none is known."""
    known = [r["loss_error"] for r in results if r.get("loss_error_window") == window and r.get("loss_error")]
    of_sequences, of_seeds = len(known) == len(results), len(results) > 1
    squares = [0.0] * len(curves[0])
    if of_sequences:  # seeds see the same sequences: their errors do not average out
        squares = means([[e * e for e in errors] for errors in known])
    if of_seeds:
        squares = [s + statistics.variance(values) / len(values) for s, values in zip(squares, zip(*curves))]
    return [math.sqrt(s) for s in squares] if of_sequences or of_seeds else [], of_sequences, of_seeds


def draw(path, groups, train_lengths, window=WINDOW):
    """groups: {name: results of --eval, one of each seed}"""
    import plots
    figure, [[left, right]] = plots.panels(2)
    sources = {"sequences": False, "seeds": False}  # of standard errors
    for k, (name, results) in enumerate(groups.items()):
        length = min(len(r["loss"]) for r in results)
        x, cut = range(FIRST, length + 1), slice(FIRST - 1, length)
        losses = [smooth(r["loss"], window)[cut] for r in results]
        results = [{**r, "loss_error": (r.get("loss_error") or [])[cut]} for r in results]
        mean, (errors, *found) = means(losses), standard_errors(results, losses, window)
        band = errors and ([m - e for m, e in zip(mean, errors)], [m + e for m, e in zip(mean, errors)])
        sources = {source: old or new for (source, old), new in zip(sources.items(), found)}
        plots.curve(left, x, mean, k, name, band, 2 * len(groups))
        seeds = [perplexities(r["loss"])[cut] for r in results]
        plots.curve(right, x, means(seeds), k, name, plots.band_of(seeds), 2 * len(groups))
    lengths = set(train_lengths) - {None}
    for panel in left, right:
        for length in lengths:
            plots.mark(panel, length)
        plots.binary_ticks(panel.xaxis)
    if any(sources.values()):
        known = " and ".join(source for source, found in sources.items() if found)
        plots.caption(left, f"bands: ± standard error of {known}")
    if sources["seeds"]:
        plots.caption(right, "bands: lowest to highest seed")
    left.set(xlabel="position i", ylabel="loss L(i), nats")
    right.set(xlabel="context length l", ylabel="perplexity P(l)")
    plots.save(figure, path, {"dashes": "training length"} if lengths else {})


def main():
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="[NAME=]FILE", help="several of one NAME are seeds")
    parser.add_argument("--out", default="positions.svg", metavar="FILE")
    parser.add_argument("--window", type=int, default=WINDOW, metavar="N", help="positions averaged (101)")
    parser.add_argument("--train-length", type=int, metavar="T")
    options = parser.parse_args()
    if options.window < 1 or options.window % 2 == 0:
        raise Error("--window must be odd")
    groups = {}
    for name, path in named_files(options.files):
        groups.setdefault(name, []).append(read_eval(path))
    trained = [r.get("trained_seq_len") for results in groups.values() for r in results]
    lengths = [options.train_length] if options.train_length else trained
    draw(options.out, groups, lengths, options.window)


if __name__ == "__main__":
    run(main)
