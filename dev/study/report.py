#!/usr/bin/env python3
"""
Writes the tables of dev/STUDY.md, between its lines `<!-- table NAME -->` and `<!-- end -->`, and the pictures
dev/pictures/study/*.svg, from dev/study/results.jsonl and paper/*.json alone:

    dev/study/report.py [--add FOLDER] [--results FILE] [--page STUDY.md] [--pictures FOLDER | --no-pictures]

--add takes the results of FOLDER, NAME.json (collect.py), into the file first. --results is also such a folder.

What has not run says `no run yet`. The same results give the same bytes. Pictures need matplotlib; without it they
stay as they are.
"""
import collections
import contextlib
import importlib.util
import math
import re
import statistics
from pathlib import Path

import findings
import from_scratch
import lead
import paper_code
import pictures
import plan
import registered
from common import MIN_PAIRS, Parser, counted, paired, run, write_file
from measures import (CROSSED, LONGEST, NEEDLES, NONE, OTHER_PAIRS, PAIR, PRIMARY, SEEDS, TASKS, TRAINED, VALIDATED, alone,
                      by_package, cell_of, collapsed, comparable, error_of, first_below, gpu_of, holm, loss_beyond, loss_within,
                      mean_in, mean_share, reach_ratio, rms, table)
from packed import Packed
from plan import HERE, ROOT, Error, read_json


class Report:
    def __init__(self, lines, results, corpora, sets):
        """corpora: as plan.CORPORA; sets: of the tasks, (data, test)."""
        self.data, self.tests = sets
        corpus = corpora["long"]
        self.with_diverged = results  # with those that diverged
        results = {name: r for name, r in results.items() if "diverged" not in r}
        self.all_lines, self.all_results = lines, results
        self.packed = Packed(results, corpora["short"])
        self.packages = [d["package"] for d in corpus["held"]["documents"]]
        unknown = sorted(set(self.with_diverged) - {line.name for line in lines})
        if unknown:
            raise Error(f"results of {unknown[0]}, which is no run of runs.txt")
        for line in lines:
            found, task = results.get(line.name), plan.task_of(line)
            wanted = " ".join(self.data[task]) if task else corpora[plan.corpus_of(line)]["name"]
            if found and found["corpus"] != wanted:
                raise Error(f"{line.name}: trained on corpus {found['corpus']}, not {wanted}")
            if line.name in self.with_diverged:
                plan.check(line, self.with_diverged[line.name], lines, self.with_diverged)
        self.lines = [line for line in lines if plan.corpus_of(line) == "long"]
        self.results = {line.name: results[line.name] for line in self.lines if line.name in results}
        self.lead = lead.Lead(self)

    def seeds(self, name, seeds=SEEDS):
        return [self.results[f"{name}_{s}"] for s in seeds if f"{name}_{s}" in self.results]

    def table_state(self):
        done = len(self.all_results)
        edges = sum(line.measures == "edge" and line.name not in self.with_diverged for line in self.all_lines)
        hours = sum(r["validations"][-1]["hours"] for r in self.all_results.values() if alone(r))
        gpus = collections.Counter(map(gpu_of, self.all_results.values()))
        lost = [f"{name} ({', '.join(r['missing'])})" for name, r in self.all_results.items() if r.get("missing")]
        diverged = [f"{name} ({r['diverged']})" for name, r in self.with_diverged.items() if "diverged" in r]
        shared = sum(not alone(r) for r in self.all_results.values())
        where = ", ".join(f"{n} on {gpu}" for gpu, n in gpus.most_common())
        left = f" {edges} of the others would only be needed where the best learning rate lies at an edge." if edges else ""
        return [f"{done} of {counted(len(self.all_lines), 'run')} are done{': ' + where if where else ''}; {hours:.1f} GPU-hours of "
                f"training steps of runs alone on their GPU.{left}"
                + (f" {counted(shared, 'run')} shared a GPU, and their times do not count." if shared else "")
                + (f" Diverged: {', '.join(diverged)}." if diverged else "")
                + (f" Measures that failed: {', '.join(lost)}." if lost else "")]

    def table_paper_code(self):
        return paper_code.text(paper_code.load())

    def table_paper_code_python(self):
        return paper_code.text_python(paper_code.load_python())

    def table_paper_code_repeats(self):
        return paper_code.text_repeats(paper_code.load_repeats())

    def table_findings(self):
        return findings.text(self)

    def table_pictures(self):
        """Links of what draw() draws."""
        captions = [(name, pictures.PICTURES[name][1]) for name in pictures.names(self)]
        if not captions:
            return [f"Pictures: {NONE}."]
        return [line for name, text in captions
                for line in (f"![{re.split('[,:;.]| by | of ', text)[0]}](pictures/study/{name}.svg)", "", f"*{text}*", "")][:-1]

    def missing(self, *names):
        """What stands in place of runs that are not there: which models diverged, or that they have not run yet."""
        failed = dict.fromkeys(name.rpartition("_")[0] for name in names if "diverged" in self.with_diverged.get(name, {}))
        return f"{' and '.join(failed)} diverged" if failed else NONE

    def groups(self):
        """The models whose learning rate is searched."""
        return dict.fromkeys(line.name[3:].rpartition("_")[0] for line in self.lines if line.name[:3] == "lr_")

    def table_rates(self):
        rows = [("blocks", "learning rate: last validation loss, seed 1", "chosen", "again, seed 2")]
        for group in self.groups():
            found = plan.losses(group, self.lines, self.with_diverged)
            text = lambda loss: NONE if loss is None else "diverged" if loss == math.inf else f"{loss:.4f}"
            cells = [f"{plan.option(line, '--lr')}: {text(loss)}"
                     for _, loss, line in found if loss is not None or line.measures != "edge"]
            left = [plan.option(line, "--lr") for line in plan.wanted(group, self.lines, self.with_diverged)]
            chosen = plan.best_lr(group, self.lines, self.with_diverged) or f"after {', '.join(left)}"
            others = [line for line in self.lines if line.name.startswith(f"confirm_{group}_")]
            again = [f"{plan.option(line, '--lr')}: {text(plan.loss_of(self.with_diverged.get(line.name)))}" for line in others]
            rows.append((group, ", ".join(cells), chosen, ", ".join(again)))
        return table(*rows)

    def table_primary(self):
        rows, tested = [], []
        for title, difference, form in PRIMARY:
            names = [[f"{name}_{s}{'_repeat' * (difference is reach_ratio)}" for name in PAIR] for s in SEEDS]
            pairs = [[self.results.get(name) for name in pair] for pair in names]
            values = [d for pair in pairs if all(pair) and (d := difference(*pair)) is not None]
            left = sum(name not in self.with_diverged for pair in names for name in pair)
            rows.append([title, len(values), "no pair yet", "", "", "", ""])
            if values:
                found = paired(values)
                rows[-1][2] = form.format(found.mean)
                if found.p is not None:
                    low, high = found.mean - found.half_width, found.mean + found.half_width
                    rows[-1][3:5] = f"{form.format(low)} to {form.format(high)}", f"{found.p:.2g}"
            if left:
                rows[-1][6] = f"after {left} more run{'s' * (left > 1)}"
            elif len(values) < len(SEEDS):  # five pairs were promised
                rows[-1][6] = "no claim: pairs are missing"
            else:
                tested.append((rows[-1], found.p))
        # a comparison that is not there counts among the three
        adjusted = holm([p for _, p in tested] + [1] * (len(PRIMARY) - len(tested)))
        for (row, _), p in zip(tested, adjusted):
            row[5] = f"{p:.2g}"
            row[6] = "no claim" if p >= 0.05 else "fox-pro" if row[2][0] == "-" else "transformer-pro"
        beside = lead.cut_sentence(self)
        return [*table(("fox-pro minus transformer-pro", "pairs", "mean", "95% interval", "p", "p, Holm", "lower"), *rows),
                *(["", f"Beside the second: {beside} (exploratory)."] if beside else [])]

    def best_of(self, group):
        """The run of the best learning rate of lr_GROUP_*; None: not known yet."""
        rate = plan.best_lr(group, self.lines, self.with_diverged)
        return rate and self.results[f"lr_{group}_{rate}"]

    def table_families(self):
        rows = []
        for group in self.groups():
            cells = [NONE, *[""] * 5]
            if r := self.best_of(group):
                minutes = f"{60 * r['validations'][-1]['hours']:.1f}{'' if alone(r) else ', shared'}"
                cells = [f"{r['lr']:g}", *(f"{loss:.4f}" for loss in (r["val_loss"], loss_within(r), loss_beyond(r))), minutes,
                         first_below(r, 3)]
            rows.append((group, *cells))
        return table(("model", "lr", "validation", "1 to 16K", "16K to 64K", "minutes", "step below 3"), *collapsed(rows, 1))

    def repeats(self, name):
        """[(run, its repeat)] of one of the main pair, over seeds."""
        both = [(self.results.get(f"{name}_{s}"), self.results.get(f"{name}_{s}_repeat")) for s in SEEDS]
        return [pair for pair in both if all(pair)]

    def table_noise(self):
        """The standard deviation of a run: of repeats, whose differences have twice its variance, and over seeds."""
        rows = []
        for name in PAIR:
            repeats = self.repeats(name)
            sds = [f"{rms([loss(a) - loss(b) for a, b in repeats]) / math.sqrt(2):.4f}" if repeats else ""
                   for loss in (lambda r: r["val_loss"], loss_within, loss_beyond)]
            losses = [*map(loss_within, self.seeds(name))]
            sd = f"{statistics.stdev(losses):.4f}" if len(losses) > 2 else NONE
            rows.append((name, len(repeats) or NONE, *sds, sd))
        return [*table(("", "repeats", "sd of repeats: validation", "1 to 16K", "16K to 64K", "sd over seeds, 1 to 16K"), *rows),
                *self.again()]

    def again(self):
        """The runs that were repeated to see whether their results come out again."""
        rows = []
        for line in self.lines:
            run, command = self.results.get(line.name), line.name.removeprefix("again_")
            first = self.results.get(f"confirm_{command}") or self.results.get(command)
            if command != line.name and run and first:
                family = next(name for name in PAIR if command.startswith(name))
                noise = rms([a["val_loss"] - b["val_loss"] for a, b in self.repeats(family)] or [math.nan])
                cells = (f"{r['val_loss']:.4f}" for r in (first, run))
                rows.append((first["name"], *cells, f"{run['val_loss'] - first['val_loss']:+.4f}", f"{3 * noise:.4f}"))
        return rows and ["", *table(("command run again", "first validation loss", "second", "difference",
                                     "limit: 3 times the rms of repeats"), *rows)]

    def table_documents(self):
        rows, chose = [], [[], []]  # differences within the training length of documents that chose the learning rates, or not
        for seed in SEEDS:
            pair = [self.results.get(f"{name}_{seed}") for name in PAIR]
            if not all(pair) or any("documents" not in r["eval"] for r in pair):
                rows.append((seed, self.missing(*(f"{name}_{seed}" for name in PAIR)), ""))
                continue
            tables = [r["eval"]["documents"] for r in pair]
            cells = []
            for spans in (("to", TRAINED), ("from", TRAINED)):
                rows_of = [[mean_in(t["ends"], row, spans) for row in t["loss"]] for t in tables]
                differences = [a - b for a, b in zip(*rows_of)]
                if spans[0] == "to":
                    chose[0] += differences[:VALIDATED]
                    chose[1] += differences[VALIDATED:]
                low, high = by_package(differences, self.packages)
                cells.append(f"{statistics.fmean(differences):+.4f} ({low:+.4f} to {high:+.4f}), "
                             f"{sum(d < 0 for d in differences)} of {len(differences)}")
            rows.append((seed, *cells))
        means = ["", f"Mean difference up to 16,384 of the {VALIDATED} documents on which learning rates were chosen: "
                 f"{statistics.fmean(chose[0]):+.4f}, of the others: {statistics.fmean(chose[1]):+.4f}."] if chose[1] else []
        return table(("seed", "1 to 16,384: mean difference (95% by package), documents with fox-pro lower",
                      "16,385 to 65,536"), *rows) + means

    def table_context(self):
        names = dict.fromkeys(line.name.rpartition("_")[0] for line in self.lines if plan.all_of(line))
        means = {name: {s: [statistics.fmean(column) for column in zip(*r["eval"]["documents"]["last_loss"])]
                        for s in SEEDS if (r := self.results.get(f"{name}_{s}")) and "documents" in r["eval"]}
                 for name in names}
        cells = lambda runs, *names, sign="": [error_of(values, 4, sign) for values in zip(*runs)] or [
            self.missing(*(f"{name}_{s}" for name in names for s in SEEDS)), "", "", ""]
        rows = [(name, len(found), *cells(found.values(), name)) for name, found in means.items()]
        one, other = (means[name] for name in PAIR)
        both = [[a - b for a, b in zip(one[s], other[s])] for s in SEEDS if s in one and s in other]
        rows.insert(len(PAIR), (" minus ".join(PAIR), len(both), *cells(both, *PAIR, sign="+")))
        found = (r["eval"]["documents"]["contexts"] for r in self.seeds(PAIR[0]) if "documents" in r["eval"])
        titles = next(found, (1024, 4096, 16384, 63488))
        if found := lead.cut(self):
            context, _, left, _ = found
            before = [""] * (len(titles) - 1)
            rows.insert(len(PAIR) + 1, (f"the same, transformer-pro behind {context:,}", len(left), *before, error_of(left)))
        return table(("", "seeds", *(f"{c:,}" for c in titles)), *collapsed(rows, 2))

    def table_pruning(self):
        rows = []
        for name in ("fox-pro", "fox-pro-long", "fox-llama"):
            runs = [r for r in self.seeds(name) if r.get("unpruned")]
            cells = [NONE, "", "", "", "", ""]
            if runs:
                costs = [r["eval"]["loss_mean"] - r["unpruned"]["loss_mean"] for r in runs]
                speeds = [r["eval"]["tokens_per_second"] / r["unpruned"]["tokens_per_second"] for r in runs if alone(r)]
                pruned = statistics.fmean(share for r in runs for share in r["eval"]["pruned"])
                cells = [f"{1e6 * statistics.fmean(costs):+.1f}", f"{1e6 * max(costs, key=abs):+.0f}",
                         f"{statistics.fmean(speeds):.2f}, {counted(len(speeds), 'run')}" if speeds else "shared GPUs",
                         f"{100 * pruned:.1f}%",
                         *(mean_share(r["maps"].get(rule) for r in runs if r.get("maps"))
                           for rule in ("pruned_share", "pruned_share_acp"))]
            rows.append((name, len(runs), *cells))
        return table(("", "seeds", "loss with minus without pruning, 1e-6 nats", "largest", "speed with to without",
                      "blocks pruned, T = 65,536", "of one document, T = 16,384", "by ACP's rule"), *collapsed(rows, 2))

    def both(self, name, base):
        """The runs of two models, [(run, run)] by seed."""
        runs = [[self.results.get(f"{n}_{s}") for n in (name, base)] for s in SEEDS]
        return [pair for pair in runs if all(pair)]

    def speed(self, a, b):
        """How many times as fast as b a has trained, by these runs or their repeats; None: no times can be compared."""
        hours = lambda r: r["validations"][-1]["hours"]
        again = lambda r: [x for x in (self.results.get(f"{r['name']}_repeat"), r) if x]
        return next((hours(y) / hours(x) for x in again(a) for y in again(b) if comparable(x, y)), None)

    def table_beside(self, models):
        """Each of the models [(name, base)] beside the other, by seed."""
        measures, rows = (lambda r: r["val_loss"], loss_within, loss_beyond), []
        for name, base in models:
            runs = self.both(name, base)
            cells = [self.missing(*(f"{n}_{s}" for s in SEEDS for n in (name, base))), "", "", ""]
            if runs:
                cells = [error_of([loss(a) - loss(b) for a, b in runs]) for loss in measures]
                speeds = [speed for pair in runs if (speed := self.speed(*pair))]
                cells.append(f"{statistics.fmean(speeds):.2f} ({len(speeds)})" if speeds else "")
            rows.append((f"{name} minus {base}", len(runs), *cells))
        return table(("", "seeds", "validation", "1 to 16K", "16K to 64K", "speed, times (pairs)"), *collapsed(rows, 2))

    def variants(self):
        """[(name, base)] of what differs from one of the pair in one thing."""
        names = dict.fromkeys(line.name.rpartition("_")[0] for line in self.lines)
        return [(name, base) for name in names for base in PAIR if name.startswith(f"{base}-")]

    def table_variants(self):
        return self.table_beside(self.variants())

    def table_pairs(self):
        return self.table_beside((PAIR, *CROSSED, *OTHER_PAIRS))

    def table_registered(self):
        return registered.lines(self)

    def extended(self):
        """Transformers that were evaluated beyond the training length in other ways, too, "window" and "yarn":
        {(model, *ways): [run]}. The runs of a group were evaluated in the same ways, so that its means compare."""
        groups = {}
        for r in self.results.values():
            if ways := [way for way in ("window", "yarn") if r.get(way)]:
                groups.setdefault((r["name"].rpartition("_")[0], *ways), []).append(r)
        return dict(sorted(groups.items()))

    def lead_over(self, runs, way):
        """The loss beyond the training length of FoX, with as many heads and of the same seed, minus that of Transformers,
        by run. way: the Transformers' evaluation, "eval", "window" or "yarn"."""
        both = [(self.results.get(r["name"].replace(*reversed(PAIR))), r) for r in runs]
        return [loss_beyond(f) - loss_beyond({"eval": r[way]}) for f, r in both if f]

    def table_window(self):
        rows = []
        for (name, *ways), runs in self.extended().items():
            losses = {way: error_of([loss_beyond({"eval": r[way]}) for r in runs], sign="") for way in ("eval", *ways)}
            costs = error_of([loss_within({"eval": r["yarn"]}) - loss_within(r) for r in runs]) if "yarn" in ways else ""
            leads = ", ".join(error_of(lead) for way in losses if (lead := self.lead_over(runs, way)))
            again = f", seed {', '.join(str(r['seed']) for r in runs)} again" if name.startswith("again_") else ""
            rows.append((name.removeprefix("again_") + again, len(runs), *(losses.get(way, "") for way in ("eval", "window", "yarn")),
                         leads, costs))
        return table(("", "seeds", "16K to 64K", "with a window of 16,384", "with YaRN", "FoX minus each", "what YaRN costs, 1 to 16K"),
                     *(rows or [(NONE, *[""] * 6)]))

    def table_fp8(self):
        return [line for name in ("fox-pro-fp8", "fox-pro-fp8-whole") for line in (self.cost_of_fp8(name), "")][:-1]

    def cost_of_fp8(self, name):
        found = paired([a["val_loss"] - b["val_loss"] for a, b in self.both(name, "fox-pro")] or [math.nan])
        if found.p is None:
            return f"{name}: {NONE}: after three pairs."
        low, high = found.mean - found.half_width, found.mean + found.half_width
        repeats = [(a, self.results.get(f"{b['name']}_repeat")) for a, b in self.both(name, "fox-pro")]
        again = paired([a["val_loss"] - b["val_loss"] for a, b in repeats if b] or [math.nan])
        beside = "" if again.p is None else f" Beside the repeats: {again.mean:+.4f} ± {again.error:.4f}, " \
            f"{again.mean - again.half_width:+.4f} to {again.mean + again.half_width:+.4f}."
        return (f"Last validation loss of {name} minus that in bf16, {counted(found.n, 'pair')}: {found.mean:+.4f} ± {found.error:.4f} "
                f"nats, 95% interval {low:+.4f} to {high:+.4f}.{beside} By the rule above, which goes by the mean of the first, "
                f"it {'stays' if found.mean > 0.01 else 'is not'} experimental.")

    def points_of_tasks(self, tasks):
        """{(task, ((key, value), (key, value)) of the point): {model: {seed: value}}}"""
        points = {}
        for name, seed in ((name, seed) for name in PAIR for seed in SEEDS):
            found = self.results.get(f"{name}_{seed}", {}).get("tasks", {})
            for task in filter(found.__contains__, tasks):
                for row in plan.unpacked(found[task]):
                    at = tuple((k, row[k]) for k in list(row)[:2])
                    if TASKS[task] in row:
                        points.setdefault((task, at), {name: {} for name in PAIR})[name][seed] = row[TASKS[task]]
        return points

    def table_tasks(self):
        rows = []
        for (task, at), found in self.points_of_tasks(("copy", "conflict")).items():
            one, other = (found[name] for name in PAIR)
            both = [one[s] - other[s] for s in one if s in other]
            rows.append((f"{task}: {TASKS[task]}", ", ".join(f"{k} {v:,}" for k, v in at), cell_of(one.values()),
                         cell_of(other.values()), error_of(both, 3) if both else ""))
        return table(("task", "point", *PAIR, "difference, paired by seed"), *(rows or [("copy", NONE, "", "", "")]))

    def copies(self, name, base):
        """{gap: [difference by seed]} of the fall of a copy's loss, of a model minus another."""
        falls = lambda r: {row["gap"]: row["fall"] for row in plan.unpacked(r["tasks"]["copy"])}
        both = [[*map(falls, pair)] for pair in self.both(name, base) if all("copy" in r.get("tasks", {}) for r in pair)]
        gaps = [gap for gap in both[0][0] if all(gap in one and gap in other for one, other in both)] if both else []
        return {gap: [one[gap] - other[gap] for one, other in both] for gap in gaps}

    def table_copies(self):
        """Differences over three seeds and more; to save space not at 1,024 tokens."""
        models = {f"{name} minus {base}": {gap: values for gap, values in self.copies(name, base).items()
                                           if gap != 1024 and len(values) >= MIN_PAIRS}
                  for name, base in (*CROSSED, *self.variants())}
        gaps = sorted({gap for found in models.values() for gap in found} or {LONGEST})
        rows = [(title, *(error_of(found[gap], 3) if gap in found else "" for gap in gaps)) for title, found in models.items() if found]
        return table(("", *(f"{gap:,}" for gap in gaps)), *(rows or [(NONE, "")]))

    def table_needles(self):
        """Before tuning and after it, by distance, means over the numbers of other pairs."""
        rows, ends = [], (NEEDLES[0], NEEDLES[-1])
        for gap in dict.fromkeys(dict(at)["gap"] for _, at in self.points_of_tasks(ends)):
            with contextlib.suppress(findings.Missing):
                found = [findings.at_points(self, task, gap=gap) for task in ends]
                rows.append((f"{gap:,}", *("{:.0f} and {:.0f}".format(*means) for means, _ in found), error_of(found[-1][1], 0)))
        steps = [counted(int(task.rpartition('_')[2]), "step") for task in ends]
        return table(("distance", *steps, "difference after the last"), *(rows or [(NONE, "", "", "")]))

    def table_mqar(self):
        return from_scratch.lines_of_task("mqar", self.all_lines, self.with_diverged, self.data)

    def table_gates_found(self):
        return from_scratch.gates_found(self.all_lines, self.with_diverged)

    def table_gates_mqar(self):
        return table(*from_scratch.rows_of_gates("gate-mqar", self.all_lines, self.with_diverged, self.data))

    def table_gates_overwritten(self):
        return table(*from_scratch.rows_of_gates("gate-over", self.all_lines, self.with_diverged, self.data))

    def table_overwritten(self):
        return from_scratch.lines_of_task("over", self.all_lines, self.with_diverged, self.data)

    def table_overwritten_keys(self):
        return table(*from_scratch.rows_of_keys("over", self.all_lines, self.all_results, self.tests))


# ----------------------------------------------------------------------------
# the page


def fill(page, report):
    def replace(match):
        name = f"table_{match[1]}"
        make = next((found for of in (report, report.packed, report.lead) if (found := getattr(of, name, None))), None)
        if not make:
            raise Error(f"no table is called {match[1]}")
        return "\n".join([f"<!-- table {match[1]} -->", *make(), "<!-- end -->"])
    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.S)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--add", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=plan.RESULTS, metavar="FILE")
    parser.add_argument("--page", type=Path, default=ROOT / "dev/STUDY.md", metavar="FILE")
    parser.add_argument("--pictures", type=Path, default=ROOT / "dev/pictures", metavar="FOLDER")
    parser.add_argument("--no-pictures", action="store_true", help="write the page alone")
    parser.add_argument("--runs", type=Path, default=HERE / "runs.txt", metavar="FILE")
    options = parser.parse_args()
    sets = [plan.read_sets(options.runs, kind) for kind in ("data", "test")]
    corpora = {kind: read_json(path) for kind, path in plan.CORPORA.items()}
    lines = plan.read_lines(options.runs)
    if options.add:
        print(f"{options.results}: added {counted(plan.add_results(options.results, options.add, lines), 'result')}")
    report = Report(lines, plan.read_results(options.results), corpora, sets)
    page = plan.read_text(options.page)
    filled = fill(page, report)
    if filled != page:
        write_file(options.page, filled)
    print(f"{options.page}: {len(report.all_results)} of {counted(len(report.all_lines), 'run')}")
    if options.no_pictures:
        return
    if importlib.util.find_spec("matplotlib"):
        pictures.draw(report, options.pictures)
    else:
        print("note: no matplotlib: the pictures stay as they are")


if __name__ == "__main__":
    run(main)
