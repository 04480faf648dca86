#!/usr/bin/env python3
"""
Prints after how many tokens and how much time runs first had a held-out loss, as a table for an issue:

    scripts/sweep/to_loss.py 1.5 out/speedrun/fox-pro out/speedrun/transformer-pro

Time is that of the steps before the first validation at or below LOSS, without validations, checkpoints and pauses;
GPU-hours, on the CPU rank-hours, count ranks.
"""
import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import Error, Parser, run  # noqa: E402
from compare import Log, markdown  # noqa: E402


def row(log, loss, driver):
    start, end = log.start, log.steps[-1]["step"]
    reached = next((v for v in log.validations if (v["val_loss"] or math.inf) <= loss), None)
    cells = ["not reached", "-", "-", "-"]
    if reached:
        end = reached["step"]
        seconds = sum(line["ms"] for line in log.steps if line["step"] <= end) / 1000
        tokens = next(line["tokens"] for line in log.steps if line["step"] == end)
        cells = [f"{reached['val_loss']:.4f}", f"{tokens:,}", f"{seconds:,.1f}", f"{seconds * start['ranks'] / 3600:.4f}"]
    last = log.validations[-1]["val_loss"] if log.validations else None
    return [start["options"].get("model") or "-", f"{loss:g}", *cells, "-" if last is None else f"{last:.4f}",
            f"{log.tokens_per_s():,.0f}", str(start["seed"]), start["device"].split(",")[0], driver, start["version"],
            start.get("data_fingerprint", "-")[:8], start.get("recipe", "-").removeprefix("the preset's, changed: ")]


def main():
    parser = Parser(__doc__)
    parser.add_argument("--driver", default="-", metavar="VERSION", help="of the GPU")
    parser.add_argument("loss", type=float, metavar="LOSS", help="nats per token")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder with log.jsonl")
    options = parser.parse_args()
    if not 0 < options.loss < math.inf:
        raise Error(f"LOSS {options.loss:g}: not a number above 0")
    logs = [Log(path) for path in options.runs]
    for log in logs:
        if log.damaged:
            raise log.damaged
    hours = "rank-hours" if any(log.start["device"] == "CPU" for log in logs) else "GPU-hours"
    titles = ("model", "to a loss of", "loss", "tokens", "seconds", hours, "loss at the end", "tokens/s", "seed", "device", "driver",
              "commit", "data", "options")
    print(*markdown(titles, [row(log, options.loss, options.driver) for log in logs]), sep="\n")


if __name__ == "__main__":
    run(main)
