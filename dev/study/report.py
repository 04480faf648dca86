#!/usr/bin/env python3
"""
Writes the tables of dev/STUDY.md, between its lines `<!-- table NAME -->` and `<!-- end -->`, and the pictures
dev/pictures/study_*.svg, from dev/study/results/*.json (collect.py) and paper_code.json alone:

    dev/study/report.py [--results FOLDER] [--page STUDY.md] [--pictures FOLDER]

What has not run says `no run yet`. The same results give the same bytes. Pictures need matplotlib; without it they
stay as they are.
"""
import argparse
import collections
import importlib.util
import math
import random
import re
import statistics
import sys
from pathlib import Path

import from_scratch
import paper_code
import plan
from plan import HERE, ROOT, Error, read_json
from common import MIN_PAIRS, paired, run, write_file

PAIR, SEEDS = ("fox-pro", "transformer-pro"), range(11, 16)
TRAINED, LONGEST = 16384, 65536
DRAWS = 2000  # of the bootstrap
NONE = "no run yet"
SHORT_SEEDS, WALLS = range(11, 14), {"": "without", "-walls": "with"}  # of the runs short-MODEL[-walls]_SEED


# ----------------------------------------------------------------------------
# what is compared


def loss_within(result):
    """Mean loss of the positions up to the training length, in --eval's pass over whole documents."""
    return math.log(result["eval"]["perplexity"][str(TRAINED)])


def loss_beyond(result):
    e = result["eval"]
    return (LONGEST * e["loss_mean"] - TRAINED * loss_within(result)) / (LONGEST - TRAINED)


def hours_to(result, loss):
    """GPU-hours of training steps until the validation loss is `loss`, between validations by a line."""
    before = None
    for v in result["validations"]:
        if v["loss"] <= loss:
            if before is None:
                return v["hours"]
            share = (before["loss"] - loss) / (before["loss"] - v["loss"])
            return before["hours"] + share * (v["hours"] - before["hours"])
        before = v
    return None


def hours_ratio(fox, transformer):
    """log of the hours' ratio, to the last validation loss that both reach; None: on different devices."""
    if fox["device"] != transformer["device"]:
        return None
    loss = max(r["validations"][-1]["loss"] for r in (fox, transformer))
    return math.log(hours_to(fox, loss) / hours_to(transformer, loss))


PRIMARY = [  # name, difference of a pair, how a difference is printed
    ("loss at positions 1 to 16,384, nats", lambda f, t: loss_within(f) - loss_within(t), "{:+.4f}"),
    ("loss at positions 16,385 to 65,536, nats", lambda f, t: loss_beyond(f) - loss_beyond(t), "{:+.4f}"),
    ("GPU-hours to the same validation loss, log of the ratio", hours_ratio, "{:+.3f}"),
]


def holm(ps):
    """p-values adjusted for their number, by Holm's rule."""
    order, adjusted, largest = sorted(range(len(ps)), key=lambda i: ps[i]), [0.0] * len(ps), 0
    for rank, i in enumerate(order):
        largest = max(largest, min(1, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def by_package(differences, packages, weights=None):
    """95% interval of the mean of differences by document, packages drawn with replacement."""
    groups = {}
    for d, package, weight in zip(differences, packages, weights or [1] * len(packages)):
        group = groups.setdefault(package, [0, 0])
        group[0] += weight * d
        group[1] += weight
    groups, rng = list(groups.values()), random.Random(0)
    means = []
    for _ in range(DRAWS):
        drawn = rng.choices(groups, k=len(groups))
        means.append(sum(total for total, _ in drawn) / sum(weight for _, weight in drawn))
    means.sort()
    return means[DRAWS * 25 // 1000], means[DRAWS * 975 // 1000 - 1]


# ----------------------------------------------------------------------------
# tables


def table(*rows):
    """Rows of cells, the first the titles."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


class Report:
    def __init__(self, lines, results, corpora, sets):
        """corpora: as plan.CORPORA; sets: of the tasks, (data, test)."""
        self.data, self.tests = sets
        corpus, self.short = corpora["long"], corpora["short"]
        self.rates = results  # with those that diverged
        results = {name: r for name, r in results.items() if "diverged" not in r}
        self.all_lines, self.all_results = lines, results
        self.packages = [d["package"] for d in corpus["held"]["documents"]]
        self.bytes = sum(d["bytes"] for d in corpus["held"]["documents"])
        self.tokens = corpus["document_tokens"] * len(self.packages)
        unknown = sorted(set(self.rates) - {line.name for line in lines})
        if unknown:
            raise Error(f"results of {unknown[0]}, which is no run of runs.txt")
        for line in lines:
            found, task = results.get(line.name), plan.task_of(line)
            wanted = " ".join(self.data[task]) if task else corpora[plan.corpus_of(line)]["name"]
            if found and found["corpus"] != wanted:
                raise Error(f"{line.name}: trained on corpus {found['corpus']}, not {wanted}")
        self.lines = [line for line in lines if plan.corpus_of(line) == "long"]
        self.results = {line.name: results[line.name] for line in self.lines if line.name in results}
        self.pairs = {s: pair for s in SEEDS if all(pair := [results.get(f"{name}_{s}") for name in PAIR])}

    def seeds(self, name, seeds=SEEDS):
        return [self.results[f"{name}_{s}"] for s in seeds if f"{name}_{s}" in self.results]

    def table_state(self):
        done, hours = len(self.all_results), sum(r["validations"][-1]["hours"] for r in self.all_results.values())
        gpus = collections.Counter(map(gpu_of, self.all_results.values()))
        lost = [f"{name} ({', '.join(r['missing'])})" for name, r in self.all_results.items() if r.get("missing")]
        diverged = [f"{name} ({r['diverged']})" for name, r in self.rates.items() if "diverged" in r]
        where = ", ".join(f"{n} on {gpu}" for gpu, n in gpus.most_common())
        return [f"{done} of {len(self.all_lines)} runs are done{': ' + where if where else ''}; {hours:.1f} GPU-hours of "
                "training steps. Runs that are needed only where the best learning rate lies at an edge count among them."
                + (f" Diverged: {', '.join(diverged)}." if diverged else "")
                + (f" Measures that failed: {', '.join(lost)}." if lost else "")]

    def table_paper_code(self):
        return paper_code.text(paper_code.load())

    def table_pictures(self):
        """Links of what draw() draws."""
        if not self.drawn():
            return [f"Pictures: {NONE}."]
        pictures = ["loss", "position"] + ["half_lives"] * any(r.get("half_lives") for r in self.seeds("fox-pro"))
        return [f"![{name.replace('_', ' ')}](pictures/study_{name}.svg)" for name in pictures]

    def drawn(self):
        """{name: runs} of what the pictures compare."""
        names = *PAIR, "fox-pro-long", "fox-llama", "transformer-llama"
        return {name: runs for name in names if (runs := self.seeds(name))}

    def table_rates(self):
        rows = [("blocks", "learning rate: last validation loss, seed 1", "chosen")]
        for group in dict.fromkeys(line.name[3:].rpartition("_")[0] for line in self.lines if line.name[:3] == "lr_"):
            found = plan.losses(group, self.lines, self.rates)
            text = lambda loss: NONE if loss is None else "diverged" if loss == math.inf else f"{loss:.4f}"
            cells = [f"{plan.option(line, '--lr')}: {text(loss)}"
                     for _, loss, line in found if loss is not None or line.measures != "edge"]
            left = [plan.option(line, "--lr") for line in plan.wanted(group, self.lines, self.rates)]
            chosen = plan.best_lr(group, self.lines, self.rates) or f"after {', '.join(left)}"
            rows.append((group, ", ".join(cells), chosen))
        return table(*rows)

    def table_primary(self):
        rows, tested = [], []
        for title, difference, form in PRIMARY:
            values = [d for pair in self.pairs.values() if (d := difference(*pair)) is not None]
            rows.append([title, len(values), NONE, "", "", "", ""])
            if not values:
                continue
            found = paired(values)
            rows[-1][2] = form.format(found.mean)
            if found.p is not None:
                tested.append((len(rows) - 1, found.p))
                low, high = found.mean - found.half_width, found.mean + found.half_width
                rows[-1][3:5] = f"{form.format(low)} to {form.format(high)}", f"{found.p:.2g}"
        left = [name for name in (f"{name}_{s}" for name in PAIR for s in SEEDS) if name not in self.rates]
        if left:  # five pairs were promised: nothing is claimed on the way
            for i, _ in tested:
                rows[i][5:] = "", f"after {len(left)} more run{'s' * (len(left) > 1)}"
            tested = []
        # a comparison that too few pairs of one kind of GPU have counts among the three
        adjusted = holm([p for _, p in tested] + [1] * (len(PRIMARY) - len(tested)))
        for (i, _), p in zip(tested, adjusted):
            rows[i][5] = f"{p:.2g}"
            rows[i][6] = "no claim" if p >= 0.05 else "fox-pro" if rows[i][2][0] == "-" else "transformer-pro"
        return table(("fox-pro minus transformer-pro", "pairs", "mean", "95% interval", "p", "p, Holm", "lower"), *rows)

    def row_of(self, name, r):
        bits = r["eval"]["loss_mean"] / math.log(2) * self.tokens / self.bytes
        hours = r["validations"][-1]["hours"]
        pruned = r.get("pruned_by_layer")
        return (name, f"{r['lr']:g}", r["seed"], f"{r['val_loss']:.4f}", f"{loss_within(r):.4f}",
                f"{loss_beyond(r):.4f}", f"{bits:.4f}", f"{60 * hours:.1f}",
                f"{100 * statistics.fmean(pruned):.0f}%" if pruned else "", first_below(r, 3), first_below(r, 2))

    def table_runs(self):
        rows = [self.row_of(line.name, self.results[line.name]) if line.name in self.results else
                (line.name, plan.option(line, "--lr").replace(plan.BEST, "best of "), plan.option(line, "--seed"),
                 self.rates.get(line.name, {}).get("diverged", NONE), *[""] * 7)
                for line in self.lines if line.measures != "edge" or line.name in self.results]
        return table(("run", "lr", "seed", "validation", "1 to 16K", "16K to 64K", "bits a byte", "minutes", "pruned",
                      "step below 3", "below 2"), *rows)

    def table_noise(self):
        rows = []
        for name in PAIR:
            pair = [self.results.get(f"{name}_11{suffix}") for suffix in ("", "_repeat")]
            cells = [NONE, "", ""] if None in pair else [
                f"{abs(f(pair[0]) - f(pair[1])):.4f}" for f in (lambda r: r["val_loss"], loss_within, loss_beyond)]
            spread = self.seeds(name)
            sd = f"{statistics.stdev(map(loss_within, spread)):.4f}" if len(spread) > 2 else NONE
            rows.append((name, *cells, sd))
        return table(("", "repeat: validation", "1 to 16K", "16K to 64K", "sd over seeds, 1 to 16K"), *rows)

    def table_documents(self):
        rows = []
        for seed in SEEDS:
            pair = self.pairs.get(seed)
            if not pair or any("documents" not in r["eval"] for r in pair):
                failed = [n for n in PAIR if "diverged" in self.rates.get(f"{n}_{seed}", {})]
                rows.append((seed, f"{' and '.join(failed)} diverged" if failed else NONE, ""))
                continue
            tables = [r["eval"]["documents"] for r in pair]
            cells = []
            for spans in (("to", TRAINED), ("from", TRAINED)):
                rows_of = [[mean_in(t["ends"], row, spans) for row in t["loss"]] for t in tables]
                differences = [a - b for a, b in zip(*rows_of)]
                low, high = by_package(differences, self.packages)
                cells.append(f"{statistics.fmean(differences):+.4f} ({low:+.4f} to {high:+.4f}), "
                             f"{sum(d < 0 for d in differences)} of {len(differences)}")
            rows.append((seed, *cells))
        return table(("seed", "1 to 16,384: mean difference (95% by package), documents with fox-pro lower",
                      "16,385 to 65,536"), *rows)

    def table_context(self):
        names = dict.fromkeys(line.name.rpartition("_")[0] for line in self.lines if plan.all_of(line)
                              and not line.name.endswith("_repeat"))
        rows, titles = [], None
        for name in names:
            runs = [r["eval"]["documents"] for r in self.seeds(name) if "documents" in r["eval"]]
            if runs:
                titles = runs[0]["contexts"]
                means = [statistics.fmean(row[k] for d in runs for row in d["last_loss"]) for k in range(len(titles))]
                rows.append((name, len(runs), *[f"{m:.4f}" for m in means]))
            else:
                rows.append((name, 0, NONE, "", "", ""))
        return table(("", "seeds", *(f"{c:,}" for c in titles or (1024, 4096, 16384, 63488))), *rows)

    def table_pruning(self):
        rows = []
        for name in ("fox-pro", "fox-pro-long", "fox-llama"):
            runs = [r for r in self.seeds(name) if r.get("unpruned")]
            cells = [NONE, "", "", "", "", ""]
            if runs:
                costs = [r["eval"]["loss_mean"] - r["unpruned"]["loss_mean"] for r in runs]
                speed = statistics.fmean(r["eval"]["tokens_per_second"] / r["unpruned"]["tokens_per_second"]
                                         for r in runs)
                pruned = statistics.fmean(share for r in runs for share in r["eval"]["pruned"])
                cells = [f"{statistics.fmean(costs):+.5f}", f"{max(costs, key=abs):+.5f}", f"{speed:.2f}",
                         f"{100 * pruned:.1f}%",
                         *(mean_share(r["maps"].get(rule) for r in runs if r.get("maps"))
                           for rule in ("pruned_share", "pruned_share_acp"))]
            rows.append((name, len(runs), *cells))
        return table(("", "seeds", "loss with minus without pruning", "largest", "speed with to without",
                      "blocks pruned, T = 65,536", "of one document, T = 16,384", "by ACP's rule"), *rows)

    def table_variants(self):
        """Runs that differ from one of the pair's in one thing, beside that of the same seed."""
        rows = []
        measures, hours = (lambda r: r["val_loss"], loss_within, loss_beyond), lambda r: r["validations"][-1]["hours"]
        names = dict.fromkeys(line.name.rpartition("_")[0] for line in self.lines)
        for base, name in ((base, name) for name in names for base in PAIR if name.startswith(f"{base}-")):
            runs = [[self.results.get(f"{n}_{s}") for n in (name, base)] for s in SEEDS]
            runs, cells = [both for both in runs if all(both)], [NONE, "", "", ""]
            if runs:
                cells = [error_of([loss(a) - loss(b) for a, b in runs]) for loss in measures]
                speeds = [hours(b) / hours(a) for a, b in runs if gpu_of(a) == gpu_of(b)]
                cells.append(f"{statistics.fmean(speeds):.2f}" if speeds else "other GPUs")
            rows.append((f"{name} minus {base}", len(runs), *cells))
        return table(("", "seeds", "validation", "1 to 16K", "16K to 64K", "speed, times"), *rows)

    def table_tasks(self):
        rows = [("task", "point", *PAIR)]
        points = {}
        for name in PAIR:
            for r in self.seeds(name):
                for task, means in r.get("tasks", {}).items():
                    for row in plan.unpacked(means):
                        keys, measure = list(row)[:2], next(iter(list(row)[3:]))
                        if task == "corrupted":
                            measure = "rise"
                        point = task, measure, ", ".join(f"{k} {row[k]}" for k in keys)
                        if measure in row:
                            points.setdefault(point, {}).setdefault(name, []).append(row[measure])
        for (task, measure, at), found in points.items():
            rows.append((f"{task}: {measure}", at, *(cell_of(found.get(name, [])) for name in PAIR)))
        return table(*rows, *([] if points else [("copy, conflict, corrupted", NONE, "", "")]))

    def short_pairs(self):
        """short_runs of the seeds that have all four."""
        return [runs for seed in SHORT_SEEDS if (runs := self.short_runs(seed))]

    def short_runs(self, seed):
        """{(model, walls or not): result} of a seed; None: one of the four has not run."""
        runs = {(name, walls): self.all_results.get(f"short-{name}{walls}_{seed}") for name in PAIR for walls in WALLS}
        return runs if all(runs.values()) else None

    def table_packed(self):
        """What walls gain, and how much more one model gains: paired t-tests over seeds."""
        found = self.short_pairs()
        gain = lambda loss, runs, name: loss(runs[name, ""]) - loss(runs[name, "-walls"])
        lead = lambda loss, runs, walls: loss(runs[PAIR[0], walls]) - loss(runs[PAIR[1], walls])
        a_token, a_document = lambda r: r["intact"]["loss_mean"], lambda r: statistics.fmean(r["intact"]["documents"])
        both = lambda loss, runs: gain(loss, runs, PAIR[0]) - gain(loss, runs, PAIR[1])
        rows = []
        for title, value in (
                ("**gain of fox-pro minus gain of transformer-pro**", lambda r: both(a_token, r)),
                *((f"gain of {name}", lambda r, name=name: gain(a_token, r, name)) for name in PAIR),
                *((f"fox-pro minus transformer-pro, {WALLS[w]} walls", lambda r, w=w: lead(a_token, r, w)) for w in WALLS),
                ("gain of fox-pro minus gain of transformer-pro, mean of documents", lambda r: both(a_document, r))):
            values = [value(runs) for runs in found]
            row = [title, len(values), NONE, "", ""]
            if values:
                p = paired(values)
                row[2] = f"{p.mean:+.4f}"
                if p.p is not None:
                    row[3:] = f"{p.mean - p.half_width:+.4f} to {p.mean + p.half_width:+.4f}", f"{p.p:.2g}"
            rows.append(row)
        sentences = []
        if len(found) >= MIN_PAIRS:
            compared = (lambda r: lead(a_token, r, "-walls"), lambda r: lead(a_token, r, ""), lambda r: both(a_token, r))
            sentences = [self.packed_sentences(*([value(runs) for runs in found] for value in compared)), ""]
        return sentences + table(("nats a token, intact documents", "seeds", "mean", "95% interval", "p"), *rows)

    @staticmethod
    def packed_sentences(with_walls, without, gains):
        """What the table says, from fox-pro minus transformer-pro by seed with walls, without, and in what walls gain."""
        side = lambda values, less, more: f"{abs(mean := statistics.fmean(values)):.4f} nats {less if mean < 0 else more}"
        seeds = lambda values: f"in {sum(v < 0 for v in values)} of {len(values)} seeds"
        p = paired(gains).p
        return (f"With walls the loss of fox-pro is {side(with_walls, 'lower', 'higher')} than that of transformer-pro "
                f"(lower {seeds(with_walls)}), without walls {side(without, 'lower', 'higher')} ({seeds(without)}): "
                f"exploratory. Walls gain fox-pro {side(gains, 'less', 'more')} than transformer-pro, p = {p:.2g}: "
                f"{'claimed' if p < 0.05 else 'not claimed'}.")

    def table_packed_documents(self):
        documents = self.short["held"]["documents"]
        packages, weights = [d["package"] for d in documents], [d["tokens"] + 1 for d in documents]
        rows = []
        for seed in SHORT_SEEDS:
            runs, cells = self.short_runs(seed), [NONE, "", ""]
            if runs:
                losses = {key: r["intact"]["documents"] for key, r in runs.items()}
                gains = [[a - b for a, b in zip(losses[name, ""], losses[name, "-walls"])] for name in PAIR]
                cells = []
                for values in (*gains, [a - b for a, b in zip(*gains)]):
                    mean = sum(w * v for w, v in zip(weights, values)) / sum(weights)
                    cells.append("{:+.4f} ({:+.4f} to {:+.4f})".format(mean, *by_package(values, packages, weights)))
            rows.append((seed, *cells))
        return table(("seed", *(f"gain of {name} (95% by package)" for name in PAIR), "the first minus the second"), *rows)

    def table_packed_octaves(self):
        found = self.short_pairs()
        rows = [] if found else [(NONE, *[""] * 5)]
        ends = found[0][PAIR[0], ""]["intact"]["octaves"] if found else ()
        for k, (begin, end) in enumerate(zip([0, *ends], ends)):
            of = [{key: r["intact"]["by_octave"][k] for key, r in runs.items()} for runs in found]
            targets = found[0][PAIR[0], ""]["intact"]["octave_targets"][k]
            if not targets:
                continue
            gains = [[o[name, ""] - o[name, "-walls"] for o in of] for name in PAIR]
            rows.append((f"{begin + 1:,} to {end:,}" if end > begin + 1 else end, f"{targets:,}",
                         f"{statistics.fmean(o[PAIR[1], ''] for o in of):.3f}",
                         *(error_of(values) for values in (*gains, [a - b for a, b in zip(*gains)]))))
        picture = ["![gain by walls, and the lead of fox-pro, by token of the document](pictures/study_packed.svg)", ""]
        return (picture if found else []) + table(
            ("tokens of the document", "targets", "transformer-pro without walls", *(f"gain of {n}" for n in PAIR),
             "the first minus the second"), *rows)

    def table_packed_runs(self):
        rows = []
        for line in self.all_lines:
            r = self.all_results.get(line.name)
            if plan.corpus_of(line) != "short":
                continue
            rows.append((line.name, f"{r['lr']:g}", r["seed"], f"{r['intact']['loss_mean']:.4f}",
                         f"{statistics.fmean(r['intact']['documents']):.4f}", f"{r['val_loss']:.4f}",
                         f"{60 * r['validations'][-1]['hours']:.1f}") if r else
                        (line.name, plan.option(line, "--lr").replace(plan.BEST, "best of "), plan.option(line, "--seed"),
                         self.rates.get(line.name, {}).get("diverged", NONE), "", "", ""))
        return table(("run", "lr", "seed", "intact, a token", "intact, mean of documents", "stream as trained", "minutes"), *rows)

    def table_mqar(self):
        drawn = from_scratch.best_runs("mqar", self.all_lines, self.all_results)
        picture = ["![accuracy of MQAR by step and by pairs](pictures/study_mqar.svg)", ""] if drawn else []
        return picture + table(*from_scratch.rows_of_task("mqar", self.all_lines, self.all_results, self.data))

    def table_overwritten(self):
        return table(*from_scratch.rows_of_task("over", self.all_lines, self.all_results, self.data))

    def table_overwritten_keys(self):
        return table(*from_scratch.rows_of_keys("over", self.all_lines, self.all_results, self.tests))


def cell_of(values):
    """Mean and standard error over seeds."""
    if not values:
        return NONE
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}" if len(values) >= MIN_PAIRS else ""
    return f"{statistics.fmean(values):.3f}{error} ({len(values)})"


def gpu_of(result):
    return result["device"].split(",")[0]


def error_of(values):
    """Mean of differences and, over at least MIN_PAIRS seeds, its standard error."""
    found = paired(values)
    return f"{found.mean:+.4f}" + (f" ± {found.error:.4f}" if found.p is not None else "")


def mean_share(tables):
    """Mean over runs, layers and heads, of the runs that have the table."""
    shares = [share for layers in tables if layers for heads in layers for share in heads]
    return f"{100 * statistics.fmean(shares):.1f}%" if shares else NONE


def mean_in(ends, row, span):
    """Mean of a document's losses up to, or from, a position."""
    parts = [(end - begin, x) for begin, end, x in zip([0, *ends], ends, row)
             if (end <= span[1] if span[0] == "to" else begin >= span[1])]
    return sum(n * x for n, x in parts) / sum(n for n, _ in parts)


def first_below(result, loss):
    """The step after which the training loss, in the mean of a span of 64 steps, is below."""
    return next((f"{row[0]:,}" for row in result["curve"] if row[1] is not None and row[1] < loss), "never")


# ----------------------------------------------------------------------------
# pictures


def draw(report, folder):
    sys.path.insert(0, str(ROOT / "scripts/eval"))
    import plots
    paper_code.draw(paper_code.load(), plots, folder)
    if from_scratch.best_runs("mqar", report.all_lines, report.all_results):
        from_scratch.draw_mqar(report.all_lines, report.all_results, plots, f"{folder}/study_mqar.svg")
    draw_packed(report, plots, f"{folder}/study_packed.svg")
    groups = report.drawn()
    if not groups:
        return

    def lines(axes, points, k, label=None):
        """The mean over runs, and a band from the lowest to the highest; points: of each run [(x, y)]."""
        x, curves = [p[0] for p in points[0]], [[p[1] for p in run] for run in points]
        mean = [statistics.fmean(ys) for ys in zip(*curves)]
        plots.curve(axes, x, mean, k, label, plots.band_of(curves), len(groups))

    figure, [[tokens, hours]] = plots.panels(2)
    figure2, [[position, mean]] = plots.panels(2)
    [(gpu, _)] = collections.Counter(gpu_of(r) for runs in groups.values() for r in runs).most_common(1)
    for k, (name, runs) in enumerate(groups.items()):
        count = len(runs[0]["curve"])
        runs = [r for r in runs if len(r["curve"]) == count]
        label = f"{name}, {len(runs)} seed{'s' * (len(runs) > 1)}"
        # 16 steps are 1 Mi tokens
        lines(tokens, [[(row[0] / 16, row[1]) for row in r["curve"]] for r in runs], k, label)
        timed = [r for r in runs if gpu_of(r) == gpu]
        if timed:
            x = [statistics.fmean(60 * r["curve"][i][2] for r in timed) for i in range(count)]
            lines(hours, [[(at, row[1]) for at, row in zip(x, r["curve"])] for r in timed], k)
        lines(position, [[p for p in r["eval"]["loss"] if p[0] >= 128] for r in runs], k, label)
        lines(mean, [[(int(at), p) for at, p in r["eval"]["perplexity"].items()] for r in runs], k)
    tokens.set(xlabel="tokens, Mi", ylabel="training loss, nats", ylim=(None, 4))
    hours.set(xlabel=f"minutes of training steps on {gpu}", ylim=(None, 4))
    position.set(xlabel="position i", ylabel="held-out loss L(i), nats")
    mean.set(xlabel="length l", ylabel="perplexity P(l)")
    for axes in (position, mean):
        plots.mark(axes, TRAINED)
        plots.log_scale(axes, "x", 2)
    plots.save(figure, f"{folder}/study_loss.svg")
    plots.save(figure2, f"{folder}/study_position.svg")

    fox = [r for r in groups.get("fox-pro", []) if r.get("half_lives")]
    if fox:
        figure, [[lives]] = plots.panels(1)
        for k, (step, layers) in enumerate(fox[0]["half_lives"].items()):
            if k in (0, len(fox[0]["half_lives"]) - 1):
                points = [(i + (k > 0) * 0.3 - 0.15, life) for i, layer in enumerate(layers) for life in layer if life]
                color = plots.look(k > 0)["color"]
                lives.plot(*zip(*points), "o", markersize=3, alpha=0.7, color=color, label=f"step {step}")
        plots.layer_ticks(lives, len(layers))
        lives.set(ylabel="half-life, tokens")
        plots.log_scale(lives, "y")
        plots.save(figure, f"{folder}/study_half_lives.svg")


def draw_packed(report, plots, path):
    """By position in a document: what walls gain either model, and the lead of one over the other with and without."""
    found = report.short_pairs()
    if not found:
        return
    figure, [[gains, leads]] = plots.panels(2)
    a_run = found[0][PAIR[0], ""]["intact"]
    ends = [end for end, targets in zip(a_run["octaves"], a_run["octave_targets"]) if targets]

    def curve(axes, k, label, one, other):
        """Loss of the run `one` minus that of `other`: the mean of seeds, and a band from the lowest to the highest."""
        curves = [[a - b for a, b in zip(*(runs[key]["intact"]["by_octave"][:len(ends)] for key in (one, other)))]
                  for runs in found]
        mean = [statistics.fmean(values) for values in zip(*curves)]
        plots.curve(axes, ends, mean, k, label, plots.band_of(curves))

    for k, name in enumerate(PAIR):
        curve(gains, k, name, (name, ""), (name, "-walls"))
    for k, (walls, word) in enumerate(WALLS.items(), len(PAIR)):
        curve(leads, k, f"{word} walls", *((name, walls) for name in PAIR))
    gains.set(ylabel="gain by walls, nats")
    leads.set(ylabel=f"{PAIR[0]} minus {PAIR[1]}, nats")
    for axes in (gains, leads):
        axes.set(xlabel="token of the document")
        plots.log_scale(axes, "x", 2)
    plots.save(figure, path)


# ----------------------------------------------------------------------------
# the page


def fill(page, report):
    def replace(match):
        make = getattr(report, f"table_{match[1]}", None)
        if not make:
            raise Error(f"no table is called {match[1]}")
        return "\n".join([f"<!-- table {match[1]} -->", *make(), "<!-- end -->"])
    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.S)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=ROOT / "dev/STUDY.md", metavar="FILE")
    parser.add_argument("--pictures", type=Path, default=ROOT / "dev/pictures", metavar="FOLDER")
    parser.add_argument("--corpus", type=Path, default=plan.CORPORA["long"], metavar="FILE")
    parser.add_argument("--short-corpus", type=Path, default=plan.CORPORA["short"], metavar="FILE")
    parser.add_argument("--runs", type=Path, default=HERE / "runs.txt", metavar="FILE")
    options = parser.parse_args()
    sets = [plan.read_sets(options.runs, kind) for kind in ("data", "test")]
    corpora = {"long": read_json(options.corpus), "short": read_json(options.short_corpus)}
    report = Report(plan.read_lines(options.runs), plan.read_results(options.results), corpora, sets)
    page = options.page.read_text(encoding="utf-8")
    filled = fill(page, report)
    if filled != page:
        write_file(options.page, filled)
    print(f"{options.page}: {len(report.all_results)} of {len(report.all_lines)} runs")
    if importlib.util.find_spec("matplotlib"):
        draw(report, options.pictures)
    else:
        print("note: no matplotlib: the pictures stay as they are")


if __name__ == "__main__":
    run(main)
