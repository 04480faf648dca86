#!/usr/bin/env python3
"""
Draws the loss by position, as in the paper, from the files of `--eval`:

    scripts/eval/positions.py fox-pro=fox.json transformer-pro=transformer.json --out positions.svg

Left L(i), the mean loss of the i-th token, smoothed by a centred window that is cut at the ends; right P(l),
the perplexity of the first l tokens, exp(mean of L(1..l)), not smoothed; both from position 128 on. A dashed
line marks the training length: --train-length, or what the files say. compare.py draws means over seeds.
"""
import argparse
import itertools
import math

from fox import Error, named_files, read_json, run

FIRST = 128
WINDOW = 101


def smooth(values, window):
    """Means over a centred window of `window` values, fewer at the ends."""
    sums = [0.0, *itertools.accumulate(values)]
    half = window // 2
    spans = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def perplexities(loss):
    """P(1), P(2), ..."""
    return [math.exp(total / n) for n, total in enumerate(itertools.accumulate(loss), 1)]


def read_eval(path):
    """The result of --eval in a file. An Error if it is another file, or has fewer than FIRST positions."""
    result = read_json(path)
    loss = result.get("loss")
    if not isinstance(loss, list) or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in loss):
        raise Error(f"{path}: not a result of --eval: no list of losses")
    if len(loss) < FIRST:
        raise Error(f"{path}: has {len(loss)} positions; the picture begins at {FIRST}")
    return result


def draw(path, losses, train_lengths, window=WINDOW):
    """losses: [(name, [L(1), L(2), ...])]"""
    import plots
    figure, [[left, right]] = plots.panels(2)
    for name, loss in losses:
        x = range(FIRST, len(loss) + 1)
        plots.curve(left, x, smooth(loss, window)[FIRST - 1:], name)
        plots.curve(right, x, perplexities(loss)[FIRST - 1:], name)
    for length in set(train_lengths) - {None}:
        plots.mark(left, length)
        plots.mark(right, length)
    left.set(xlabel="position i", ylabel="loss L(i), nats")
    right.set(xlabel="context length l", ylabel="perplexity P(l)")
    plots.save(figure, path)


def main():
    parser = argparse.ArgumentParser(description="draws the loss by position of one or several --eval files")
    parser.add_argument("files", nargs="+", metavar="[NAME=]FILE")
    parser.add_argument("--out", default="positions.svg", metavar="FILE")
    parser.add_argument("--window", type=int, default=WINDOW, metavar="N", help="positions averaged (101)")
    parser.add_argument("--train-length", type=int, metavar="T")
    options = parser.parse_args()
    if options.window < 1 or options.window % 2 == 0:
        raise Error("--window must be odd")
    results = [(name, read_eval(path)) for name, path in named_files(options.files)]
    lengths = [options.train_length or r.get("trained_seq_len") for _, r in results]
    draw(options.out, [(name, r["loss"]) for name, r in results], lengths, options.window)


if __name__ == "__main__":
    run(main)
