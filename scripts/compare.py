#!/usr/bin/env python3
"""
Compares training runs: a table, and pictures of their curves.

    scripts/compare.py out/sweep/* --out out/sweep/compare

A RUN is a folder with log.jsonl, or such a file. Runs that differ only in their seed are one group, named by what
sets it apart from the others; the table has the mean of a group and its standard deviation over seeds. It writes

    PREFIX_loss.svg      smoothed training loss, and held-out loss as dots, against tokens, FLOPs and hours
    PREFIX_pruned.svg    share of attention's FLOPs that was pruned, by layer, over the last tenth of the steps
    PREFIX_position.svg  held-out loss by position at the end

FLOPs are the model's, as if nothing were pruned. Hours are those of steps and validations; GPU-hours count ranks, and
steps that were done twice because a run was killed. For L(i) and P(l) of --eval there is scripts/eval/positions.py.
Needs matplotlib (scripts/requirements.txt); --no-plots needs nothing.
"""
import argparse
import bisect
import json
import math
import os
import statistics
import sys

# Options that do not change what is learnt.
SILENT = {"seed", "save-every", "keep", "log-every", "val-every", "sample-every", "vocab", "generate", "prompt",
          "temperature", "top-k", "top-p", "recompute"}


class Failed(Exception):
    """An error that the user can act on; its text is the message."""


# ----------------------------------------------------------------------------
# logs


class Log:
    """
    A log. steps, validations: [line] in order, without those that a resumed run did again; each has "hours" since the
    start. gpu_hours: all that was spent.
    """

    def __init__(self, path):
        self.path = path
        self.start = None  # the last "run" line
        self.steps, self.validations, self.gpu_hours = [], [], 0
        try:
            with open(os.path.join(path, "log.jsonl") if os.path.isdir(path) else path, encoding="utf-8") as f:
                for text in f:
                    self.add(text)
        except OSError as e:
            raise Failed(f"{e.filename}: cannot read: {e.strerror}")
        if not self.start or not self.steps:
            raise Failed(f"{path}: no run with a step in its log")

    def add(self, text):
        try:
            line = json.loads(text)
        except ValueError:
            return  # of a process that was killed while it wrote
        event = line.get("event")
        if event == "run":
            self.start = line
            for lines in self.steps, self.validations:
                del lines[bisect.bisect_right(lines, line["step"], key=lambda x: x["step"]) :]
        if event not in ("step", "validation") or not self.start:
            return
        self.gpu_hours += line["ms"] / 3.6e6 * self.start["ranks"]
        hours = max((lines[-1]["hours"] for lines in (self.steps, self.validations) if lines), default=0)
        line["hours"] = hours + line["ms"] / 3.6e6
        lines = self.steps if event == "step" else self.validations
        if lines and lines[-1]["step"] == line["step"]:
            lines.pop()  # measured again at the end
        lines.append(line)

    def settings(self):
        """What decides the outcome, but for the seed: options, and the config where options do not tell."""
        options = {k: v for k, v in self.start["options"].items() if k not in SILENT}
        for item in options.pop("set", []):
            key, _, value = item.partition("=")
            options[key] = value
        config = {"config." + k: v for k, v in self.start["config"].items()}
        return options, config

    def finished(self):
        return self.steps[-1]["step"] >= self.start["num_steps"]

    def validation_loss(self):
        """At the last step; None: not measured there."""
        at_end = self.validations and self.validations[-1]["step"] == self.steps[-1]["step"]
        return self.validations[-1]["val_loss"] if at_end else None

    def tokens_per_s(self):
        """Over the second half of the steps, validations and pauses apart."""
        half = self.steps[len(self.steps) // 2 :]
        tokens = half[-1]["tokens"] - half[0]["tokens"]
        seconds = sum(line["ms"] for line in half[1:]) / 1000
        return tokens / seconds if seconds else half[-1]["tokens_per_s"]


def differing(dictionaries):
    """Keys whose values are not the same in all, in the order of the first."""
    keys = list(dict.fromkeys(key for d in dictionaries for key in d))
    return [key for key in keys if len({json.dumps(d.get(key)) for d in dictionaries}) > 1]


def group(runs):
    """{name: runs} by what differs."""
    options, configs = zip(*(run.settings() for run in runs))
    keys = differing(options)
    if not keys:
        options, keys = configs, differing(configs)
    groups = {}
    for run, values in zip(runs, options):
        shown = {key: values[key] for key in keys if values.get(key) is not None}
        name = ", ".join(str(v) if k == "model" else f"{k.removeprefix('config.')} {v}" for k, v in shown.items())
        groups.setdefault(name or ("all" if not keys else "default"), []).append(run)
    return groups


# ----------------------------------------------------------------------------
# table


def spread(values, digits):
    """Mean and standard deviation, as text."""
    values = [v for v in values if v is not None]
    if not values:
        return "-", "-"
    deviation = f"{statistics.stdev(values):.{digits}f}" if len(values) > 1 else "-"
    return f"{statistics.fmean(values):,.{digits}f}", deviation


def table(groups):
    """Lines of a Markdown table, the lowest held-out loss first."""
    rows = []
    for name, runs in groups.items():
        losses = [run.validation_loss() for run in runs]
        known = [loss for loss in losses if loss is not None]
        rows.append((statistics.fmean(known) if known else math.inf, name, str(len(runs)),
                     f"{runs[0].steps[-1]['tokens']:,}", *spread(losses, 4),
                     spread([run.tokens_per_s() for run in runs], 0)[0],
                     spread([run.gpu_hours for run in runs], 3)[0], f"{sum(run.gpu_hours for run in runs):,.3f}"))
    titles = ("run", "seeds", "tokens", "held-out loss", "deviation", "tokens/s", "GPU-hours", "of all seeds")
    rows = [titles, *(row[1:] for row in sorted(rows))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = ["| " + " | ".join(cell.rjust(w) if i else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|")
    return lines


def notes(runs):
    """What a reader of the table must know."""
    for run in runs:
        if not run.finished():
            yield f"{run.path}: at step {run.steps[-1]['step']} of {run.start['num_steps']}"
        elif run.validation_loss() is None:
            yield f"{run.path}: its end was not validated"
    for key in ("version", "device", "ranks"):
        values = sorted({str(run.start[key]).split(",")[0] for run in runs})  # of a device its name
        if len(values) > 1:
            yield f"{key} differs: {'; '.join(values)}"
    if any(run.start["device"] == "CPU" for run in runs):
        yield "on the CPU, GPU-hours are hours of a rank"


# ----------------------------------------------------------------------------
# pictures


def smooth(values, window):
    """Means over the last `window` values."""
    total, result = 0, []
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0)
        result.append(total / min(i + 1, window))
    return result


def mean_curve(runs, name, value):
    """{step: means over runs} of tokens, hours and value(line) of their lines `name`, where all have the step."""
    lines = [{line["step"]: line for line in getattr(run, name) if value(line) is not None} for run in runs]
    steps = sorted(set.intersection(*map(set, lines)))
    mean = lambda of: [statistics.fmean(of(by_step[s]) for by_step in lines) for s in steps]
    return mean(lambda x: x.get("tokens", 0)), mean(lambda x: x["hours"]), mean(value), steps


def draw_loss(plots, groups, path):
    figure, [axes] = plots.panels(3)
    for name, runs in groups.items():
        flops = runs[0].start["flops_per_token"]
        tokens, hours, loss, steps = mean_curve(runs, "steps", lambda line: line["loss"])
        first = len(loss) // 50  # the fall from the initial loss would hide the rest
        loss = smooth(loss, max(1, len(loss) // 50))
        _, val_hours, val_loss, val_steps = mean_curve(runs, "validations", lambda line: line["val_loss"])
        at = dict(zip(steps, tokens))
        val_tokens = [at.get(step, math.nan) for step in val_steps]
        for panel, x, val_x in ((axes[0], tokens, val_tokens), (axes[1], [flops * t for t in tokens],
                                [flops * t for t in val_tokens]), (axes[2], hours, val_hours)):
            plots.curve(panel, x[first:], loss[first:], name)
            panel.plot(val_x, val_loss, "o", markersize=3, color=panel.lines[-1].get_color())
    for panel, title in zip(axes, ("tokens", "model FLOPs", "hours")):
        panel.set(xlabel=title, ylabel="loss, nats")
        if title != "hours":
            panel.xaxis.set_major_formatter(plots.matplotlib.ticker.EngFormatter(sep=""))  # 5k, 2M
    plots.save(figure, path)


def draw_pruned(plots, groups, path):
    figure, [[axes]] = plots.panels(1)
    for name, runs in groups.items():
        shares = [line["pruned_by_layer"] for run in runs for line in run.steps[-math.ceil(len(run.steps) / 10) :]
                  if "pruned_by_layer" in line]
        if shares:
            plots.curve(axes, range(len(shares[0])), [statistics.fmean(layer) for layer in zip(*shares)], name)
    axes.set(xlabel="layer", ylabel="share pruned", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.lines:
        plots.save(figure, path)
    return bool(axes.lines)


def draw_positions(plots, groups, path):
    figure, [[axes]] = plots.panels(1)
    for name, runs in groups.items():
        tables = [run.validations[-1]["by_position"] for run in runs if run.validations]
        if tables:
            x = [(row["from"] + row["to"]) / 2 for row in tables[0]]
            plots.curve(axes, x, [statistics.fmean(row["loss"] for row in rows) for rows in zip(*tables)], name)
    axes.set(xlabel="position in the context", ylabel="held-out loss, nats", xscale="log")
    if axes.lines:
        plots.save(figure, path)
    return bool(axes.lines)


# ----------------------------------------------------------------------------
# main


def main():
    parser = argparse.ArgumentParser(description="compares training runs")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders with log.jsonl")
    parser.add_argument("--out", default="compare", metavar="PREFIX", help="of the pictures [compare]")
    parser.add_argument("--no-plots", action="store_true", help="only the table")
    options = parser.parse_args()
    runs = [Log(path) for path in options.runs]
    groups = group(runs)
    print(*table(groups), sep="\n")
    for note in notes(runs):
        print(f"note: {note}")
    if options.no_plots:
        return
    import plots
    for name, draw in (("loss", draw_loss), ("pruned", draw_pruned), ("position", draw_positions)):
        path = f"{options.out}_{name}.svg"
        if draw(plots, groups, path) is not False:
            print(path)


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"error: {e}")
