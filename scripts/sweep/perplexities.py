#!/usr/bin/env python3
"""
Prints the table of scripts/sweep/ablations.sh:

    scripts/sweep/perplexities.py OUT <<<"fox-pro 6.62 fox-pro,..."

A line of standard input is a name, the paper's perplexity or -, and the model. Perplexity is e to the held-out loss at
the end of training, of contexts as long as those in training: means over seeds, and their standard deviation. The
learning rate of a row that counts is the one with the most seeds and, among equals, the lowest loss.
"""
import math
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import BadLine, Error, Parser, run  # noqa: E402
from compare import Log, markdown, number_of_seeds, spread  # noqa: E402


def read_runs(out, name):
    """{(learning rate, tokens): [Log]} of the runs of a row that have ended and were validated then."""
    groups = {}
    for folder in sorted(Path(out).glob(f"{name}_lr-*_seed-*")):
        log = Log(str(folder))
        if isinstance(log.damaged, BadLine):
            raise log.damaged
        if not log.damaged and log.finished() and log.validation_loss() is not None:
            groups.setdefault((log.start["options"].get("lr"), log.steps[-1]["tokens"]), []).append(log)
    return groups


def row(out, name, paper):
    groups = read_runs(out, name)
    if not groups:
        return [name, "-", "-", paper, *["-"] * 5]
    loss = lambda logs: statistics.fmean(log.validation_loss() for log in logs)
    (rate, tokens), logs = min(groups.items(), key=lambda item: (-len(item[1]), loss(item[1])))
    mean, deviation = spread(logs, lambda log: math.exp(log.validation_loss()), 3)
    device = ", ".join(sorted({log.start["device"].split(",")[0] for log in logs}))
    return [name, mean, deviation, paper, number_of_seeds(logs), f"{rate:g}", f"{tokens:,}",
            str(logs[0].start["options"].get("seq-len")), device]


def main():
    parser = Parser(__doc__)
    parser.add_argument("out", metavar="OUT", help="the folder of the runs")
    out = parser.parse_args().out
    lines = [line.split() for line in sys.stdin if line.strip()]
    if not lines or min(map(len, lines)) < 2:
        raise Error("standard input: not lines of a name and the paper's perplexity, or -")
    rows = [row(out, *line[:2]) for line in lines]
    titles = ("row", "perplexity", "deviation", "paper: 360M, 7.5 B tokens, T = 16384", "seeds", "lr", "tokens", "T",
              "device")
    print("", *markdown(titles, rows), sep="\n")


if __name__ == "__main__":
    run(main)
