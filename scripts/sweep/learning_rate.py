#!/usr/bin/env python3
"""
Chooses the next learning rates of a search over {1, 2, 5} x 10^i, for scripts/sweep.sh:

    scripts/sweep/learning_rate.py --out FILE.json 1e-3 5e-4=RUN 1e-3=RUN 2e-3=diverged

START and its two neighbours come first, then the next rate beyond the best one, until the best one is inside. RUN
is the folder of a run that has ended. The best one has the lowest held-out loss at the end of training, or where a
run has none the lowest training loss, a mean of the last 5% of the steps; of equal ones the lowest rate is the best.
Prints `next: LR ...`, or `chosen: LR` and the losses, which FILE.json then has, too.
"""
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import Error, Parser, run, write_file  # noqa: E402
from compare import Log  # noqa: E402

LOWEST, HIGHEST = -27, 9  # 1e-9 to 1e3, the trainer's largest


def rate(index):
    """Names the rates of the grid: 0 is 1, 1 is 2, 2 is 5, 3 is 10."""
    return f"{(1, 2, 5)[index % 3]}e{index // 3}"


def index_of(text):
    for index in range(LOWEST, HIGHEST + 1):
        if math.isclose(float(rate(index)), text_to_number(text), rel_tol=1e-9):
            return index
    raise Error(f"learning rate {text}: not of the grid: 1, 2 or 5 times a power of ten, from {rate(LOWEST)} to "
                f"{rate(HIGHEST)}")


def text_to_number(text):
    try:
        return float(text)
    except ValueError:
        raise Error(f"learning rate {text}: not a number")


def read_losses(runs):
    """({index: loss at the end, inf where the run diverged}, what loss that is)"""
    logs = {index: Log(folder) for index, folder in runs.items() if folder != "diverged"}
    for log in logs.values():
        if log.damaged:
            raise log.damaged
    losses = {index: log.validation_loss() for index, log in logs.items()}
    measure = "held-out loss"
    if None in losses.values():
        losses, measure = {index: training_loss(log) for index, log in logs.items()}, "training loss"
    return {index: losses.get(index, math.inf) for index in runs}, measure


def training_loss(log):
    last = [line["loss"] for line in log.steps[-math.ceil(len(log.steps) / 20):]]
    known = [loss for loss in last if loss is not None]  # null: none of the step's targets counts
    return statistics.fmean(known) if known else math.inf


def search(start, losses):
    """(rates to train next, None), or ([], the best one), by their indices."""
    low, high = start - 1, start + 1
    while True:
        missing = [index for index in range(low, high + 1) if index not in losses]
        if missing:
            return missing, None
        best = min(range(low, high + 1), key=lambda index: losses[index])
        if low < best < high:
            return [], best
        low, high = (low - 1, high) if best == low else (low, high + 1)
        if low < LOWEST or high > HIGHEST:
            raise Error("no learning rate is better than both of its neighbours: the best one of the grid is its edge, "
                        + rate(best))


def main():
    parser = Parser(__doc__)
    parser.add_argument("start", metavar="START", help="1, 2 or 5 times a power of ten")
    parser.add_argument("--out", required=True, metavar="FILE.json", help="written once the rate is chosen")
    parser.add_argument("runs", nargs="*", metavar="LR=RUN", help="folders of runs, or `diverged`")
    options = parser.parse_args()
    runs = {index_of(lr): folder for lr, _, folder in (text.partition("=") for text in options.runs)}
    losses, measure = read_losses(runs)
    missing, best = search(index_of(options.start), losses)
    if missing:
        print("next:", *map(rate, missing))
        return
    known = [(rate(index), losses[index]) for index in sorted(losses)]
    print("chosen:", rate(best))
    print(f"{measure}:", ", ".join(f"{lr} {f'{loss:.4f}' if loss < math.inf else 'diverged'}" for lr, loss in known))
    rows = [{"lr": float(lr), "loss": loss if loss < math.inf else None} for lr, loss in known]
    write_file(options.out, json.dumps({"lr": float(rate(best)), "measure": measure, "runs": rows}) + "\n")


if __name__ == "__main__":
    run(main)
