#!/usr/bin/env python3
"""
Prints the results of several models as Markdown tables, beside the paper's:

    scripts/eval/results.py fox-pro=out/results fox-pro=fox.json transformer-pro=... >results.md

A file is a result of lm-evaluation-harness, of --eval, of needle.py or of a script of tasks/; a folder stands for
all results of the harness below it. A name may have several; of a task that is measured twice the file given last counts.
Values are followed by their standard errors. Accuracies are in percent.
"""
import math

from fox import Error, Parser, named_files, read_json, run
from needle import mean_and_error
from positions import check_losses, perplexities

# The paper's columns: title, task, metric
SHORT = [
    ("Wiki ppl", "wikitext", "word_perplexity"), ("LMB ppl", "lambada_openai", "perplexity"),
    ("LMB", "lambada_openai", "acc"), ("PIQA", "piqa", "acc"), ("Hella", "hellaswag", "acc_norm"),
    ("Wino", "winogrande", "acc"), ("ARCe", "arc_easy", "acc"), ("ARCc", "arc_challenge", "acc_norm"),
    ("COPA", "copa", "acc"), ("OBQA", "openbookqa", "acc_norm"), ("SciQ", "sciq", "acc"),
    ("BoolQ", "boolq", "acc"),
]
LONG = [
    (task.removesuffix("_en"), f"longbench_{task}", "score")
    for task in """narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news
        trec triviaqa samsum lcc repobench-p""".split()
]
# 760M parameters, 48B tokens: the columns of SHORT, their average, the mean of LONG
PAPER = """
    FoX-Pro           23.04 14.91 42.75 64.09 38.39 52.33 52.23 26.54 71 29.8 85.1 46.57 50.88 21.5
    Transformer-Pro   24.12 16.16 41.47 64.04 36.6 49.72 51.98 25.26 62 29.2 82.8 60.86 50.39 21.2
    FoX-LLaMA         26.45 18.27 40.17 63.44 35.17 51.78 49.66 25.09 69 28 81.9 54.04 49.82 18.3
    Transformer-LLaMA 28.14 22.34 38.27 63.22 34.2 49.49 47.98 24.49 66 29.4 78.9 58.93 49.09 17.2
    Mamba-2           28.2 21.05 36.5 63.17 35.86 50.59 49.96 25.6 71 31 80.9 57.49 50.21 13.7
    HGRN2             30.57 20.14 38.6 63.49 34.94 51.78 50.13 25.51 66 30 75.6 58.41 49.45 nan
    DeltaNet          29.17 29.14 34.27 62.73 33.28 50.28 47.39 24.32 70 29 74.3 54.37 47.99 12.6
"""
PAPER = {name: [*map(float, values)] for name, *values in map(str.split, PAPER.strip().split("\n"))}


class Model:
    """
    What was measured of a model. tasks: {task: {metric: (value, standard error or None)}}. Others are cells of tables but for
    P(1), P(2), ... and the lengths at which to print it: evals: [(sequences, loss, P, lengths)], needles: [row],
    synthetic: {row's name: cell}.
    """

    def __init__(self):
        self.tasks, self.evals, self.needles, self.synthetic = {}, [], [], {}

    def add(self, path):
        paths = sorted(path.rglob("results*.json"), key=lambda p: p.name) if path.is_dir() else [path]
        if not paths:
            raise Error(f"{path}: no results*.json below it")
        for p in paths:
            result = read_json(p)
            try:
                self.read(p, result)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # members of another kind
                raise Error(f"{p}: not a result of lm-evaluation-harness, --eval, needle.py or tasks/")

    def read(self, path, result):
        if "results" in result:
            for task, metrics in result["results"].items():
                self.tasks[task] = read_metrics(metrics)
        elif "loss" in result:
            check_losses(path, result)
            self.evals.append(read_losses(result))
        elif "cells" in result:
            self.needles.append(read_needles(result))
        else:
            self.synthetic |= read_means(result)


def read_metrics(metrics):
    """{metric: (value, error)} of a task's entry with the keys `metric,filter` and `metric_stderr,filter`."""
    values = {}
    for key, value in metrics.items():
        name, _, kind = key.partition(",")
        error = metrics.get(f"{name}_stderr,{kind}")
        if kind and not name.endswith("_stderr") and isinstance(value, (int, float)):
            values.setdefault(name, (float(value), float(error) if isinstance(error, (int, float)) else None))
    return values


def read_losses(result):
    """Loss, and perplexity at powers of two."""
    loss, lengths = result["loss"], {int(n) for n in result.get("perplexity", {})}
    mean = cell(sum(loss) / len(loss), result.get("standard_error"), 4)
    return str(result.get("sequences", "")), mean, perplexities(loss), lengths


def read_needles(result):
    cells = result["cells"]
    means = [mean_and_error([c[key] for c in cells]) for key in ("score", "logprob")]
    return [str(result["kind"]), str(len(cells)), *(cell(*mean) for mean in means)]


def read_means(result):
    """{a measure of a point of a synthetic task, in words: cell}"""
    values = {}
    for point in result["means"]:
        measures = [name for name in point if f"{name}_error" in point]
        known = {*measures, *(f"{name}_error" for name in measures), "task", "samples"}
        at = ", ".join(f"{name} {value}" for name, value in point.items() if name not in known)
        task = point.get("task") or result.get("task")
        values |= {f"{task}, {at}: {name}": cell(point[name], point[f"{name}_error"]) for name in measures}
    return values


def cell(value, error=None, digits=2):
    if value is None or math.isnan(value):
        return ""
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")


def average(values):
    """The mean of independent [(value, error)], and its error; None where a value is missing."""
    if None in values:
        return None, None
    errors = [error for _, error in values]
    error = None if None in errors else sum(e * e for e in errors)**0.5 / len(errors)
    return sum(value for value, _ in values) / len(values), error


def print_table(title, head, rows, paper=()):
    """Prints a Markdown table, with the paper's rows below; nothing where no row has a value."""
    if any(any(row[1:]) for row in rows):
        print(f"### {title}\n")
        for row in (head, ["---"] * len(head), *rows, *paper):
            print(f"| {' | '.join(row)} |")
        print()


def task_row(name, model, columns):
    """A model's cells, and the mean of all columns but perplexities."""
    cells, shares = [name], []
    for _, task, metric in columns:
        value = model.tasks.get(task, {}).get(metric)
        if "perplexity" not in metric:
            value = value and tuple(x and 100 * x for x in value)
            shares.append(value)
        cells.append(cell(*value) if value else "")
    return cells + [cell(*average(shares))]


def print_tasks(models):
    """The paper's tables, and one of all other tasks. Its rows say their size and tokens, which are not the models'."""
    measured = {name: m for name, m in models.items() if m.tasks}
    short = [task_row(name, m, SHORT) for name, m in measured.items()]
    paper = [[f"{name}, paper (760M, 48B tokens)", *map(cell, values[:-1])] for name, values in PAPER.items()]
    print_table("Short tasks", ["", *(title for title, _, _ in SHORT), "Avg"], short, paper)
    long = [task_row(name, m, LONG) for name, m in measured.items()]
    paper = [[f"{name}, paper (760M, 48B tokens)", *[""] * len(LONG), cell(values[-1])] for name, values in PAPER.items()]
    print_table("Long tasks (LongBench)", ["", *(title for title, _, _ in LONG), "Mean"], long, paper)

    known = {task for _, task, _ in SHORT + LONG}
    pairs = {(task, metric) for m in measured.values() for task in m.tasks for metric in m.tasks[task]}
    rows = []
    for task, metric in sorted(pair for pair in pairs if pair[0] not in known):
        values = [m.tasks.get(task, {}).get(metric, (None,)) for m in measured.values()]
        rows.append([f"{task} {metric}", *(cell(*v, digits=4) for v in values)])
    print_table("Other tasks", ["", *measured], rows)


def print_evals(models):
    evals = [(name, *e) for name, m in models.items() for e in m.evals]
    columns = sorted({n for *_, lengths in evals for n in lengths})
    rows = [[name, sequences, loss, *(cell(upto[n - 1], digits=3) if 1 <= n <= len(upto) else "" for n in columns)]
            for name, sequences, loss, upto, _ in evals]
    head = ["", "sequences", "loss", *map(str, columns)]
    print_table("Loss, and perplexity P(l) of the first l tokens", head, rows)


def print_needles(models):
    rows = [[name, *row] for name, m in models.items() for row in m.needles]
    head = ["", "kind", "samples", "score, 1 to 10", "log-probability of the answer"]
    print_table("Needle in a haystack", head, rows)


def print_synthetic(models):
    measured = {name: m.synthetic for name, m in models.items() if m.synthetic}
    names = {name: None for cells in measured.values() for name in cells}
    table = [[name, *(cells.get(name, "") for cells in measured.values())] for name in names]
    print_table("Synthetic tasks", ["", *measured], table)


def main():
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="[NAME=]PATH", help="a result or a folder of results")
    models = {}
    for name, path in named_files(parser.parse_args().files):
        models.setdefault(name, Model()).add(path)
    print_tasks(models)
    print_evals(models)
    print_needles(models)
    print_synthetic(models)


if __name__ == "__main__":
    run(main)
