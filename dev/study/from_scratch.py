"""
Tables and a picture of the tasks that small models learn from scratch: a row a run that has its result, and how many
have not.
"""
import math
import statistics

import plan
from common import counted
from measures import NONE, table

LEARNED = 1  # percent right; chance is 0.02
REACHED = 0.5, 0.9  # shares of right answers whose step is shown


def first_step(validations, share):
    """The first validation with so many right answers."""
    return next((f"{v['step']:,}" for v in validations if v["accuracy"] is not None and v["accuracy"] >= share), "never")


def percent(share):
    return NONE if share is None else f"{100 * share:.1f}"


def lines_of(task, lines):
    return [line for line in lines if plan.task_of(line) == task]


def rows_of_task(task, lines, results, data):
    """Titles; steps to each share of REACHED, and accuracy at the end and the lowest one of the data sets TASK_*, in
    percent, of each run that has learned something. results: also those that diverged."""
    names = [*plan.tests_of(task, data)]
    rows = [("run", "lr", *(f"step of {share:.0%}" for share in REACHED), "at the end", f"lowest of {counted(len(names), 'test')}")]
    mine = lines_of(task, lines)
    for line in mine:
        r = results.get(line.name)
        if r and stays_below(r, names):
            continue
        if r and "diverged" in r:
            rows.append((line.name, plan.rate_of(line), "diverged", *[""] * (len(rows[0]) - 3)))
        elif r:
            shares = [r["tests"][name]["accuracy"] for name in names if name in r["tests"]]
            rows.append((line.name, f"{r['lr']:g}", *(first_step(r["validations"], s) for s in REACHED),
                         percent(r["validations"][-1]["accuracy"]), percent(min(shares, default=None))))
    if left := sum(line.name not in results for line in mine):
        rows.append((counted(left, "run"), NONE, *[""] * (len(rows[0]) - 2)))
    return rows


def stays_below(result, names):
    """Has a run, and it did not diverge, less than LEARNED right at the end and on all of these tests?"""
    if "diverged" in result:
        return False
    shares = [result["validations"][-1]["accuracy"], *(result["tests"].get(name, {}).get("accuracy") for name in names)]
    return all(share is not None and 100 * share < LEARNED for share in shares)


def lines_of_task(task, lines, results, data):
    """The table of rows_of_task; below it the runs that have learned nothing."""
    names = [*plan.tests_of(task, data)]
    below = [line.name for line in lines_of(task, lines) if line.name in results and stays_below(results[line.name], names)]
    losses, groups = [results[name]["val_loss"] for name in below], {}
    for group, _, end in (name.rpartition("_") for name in below):
        groups.setdefault(group, []).append(end)
    short = [f"{group}_{ends[0] if len(ends) == 1 else '{' + ','.join(ends) + '}'}" for group, ends in groups.items()]
    return [*table(*rows_of_task(task, lines, results, data)),
            *(["", f"Below {LEARNED}% right everywhere, last loss {min(losses):.3f} to {max(losses):.3f} nats: {', '.join(short)}."]
              if below else [])]


def rows_of_keys(task, lines, results, tests):
    """Titles; of each run, test of keys.py and number of rewrites, right and stale answers in percent, means over the
    numbers of keys. Runs that stay below LEARNED at every point are left out."""
    rows = [("run", "test", "rewrites", "right", "stale")]
    for line in lines_of(task, lines):
        found = results.get(line.name, {}).get("tasks", {})
        means = [(name, mean) for name in plan.tests_of(task, tests) if name in found for mean in plan.unpacked(found[name])]
        if any(mean["right"] >= LEARNED for _, mean in means):
            for at in dict.fromkeys((name, mean["rewrites"]) for name, mean in means):
                points = [mean for name, mean in means if (name, mean["rewrites"]) == at]
                rows.append((line.name, at[0].removeprefix(f"{task}_"), at[1],
                             *(f"{statistics.fmean(point[kind] for point in points):.1f}" for kind in ("right", "stale"))))
    return rows if len(rows) > 1 else [*rows, ("no run that learned it yet", *[""] * 4)]


def start_of(line):
    """The bias with which all gates of a line begin."""
    words = [word for word in line.options if word.startswith("decay_time_min=")]
    return -math.log(math.expm1(1 / float(words[-1].partition("=")[2]))) if words else 0


def rows_of_gates(task, lines, results, data):
    """Titles; of runs that differ in the seed alone: the step of the last of REACHED of each seed, the lowest and the highest
    share of right answers on each data set, how far the bias of a gate has moved at most, and the largest mean of what the
    data add to it."""
    names = [*plan.tests_of(task, data)]
    rows = [("runs", "seeds", f"step of {REACHED[-1]:.0%}",
             *(f"right, {name.removeprefix(f'{task}_').replace('_', ', ')}" for name in names), "bias moved, at most",
             "mean of w_f a, at most")]
    span = lambda values, form: " to ".join(dict.fromkeys((form(min(values)), form(max(values)))))
    mine = lines_of(task, lines)
    for group in dict.fromkeys(line.name.rpartition("_")[0] for line in mine):
        of_group = [line for line in mine if line.name.rpartition("_")[0] == group]
        found, start = [results[line.name] for line in of_group if line.name in results], start_of(of_group[0])
        if not found:
            rows.append((group, NONE, *[""] * (len(rows[0]) - 2)))
            continue
        learned = [r for r in found if "diverged" not in r]
        right = [[100 * r["tests"][name]["accuracy"] for r in learned if name in r["tests"]] for name in names]
        values = lambda name: [x for r in learned for layer in (r.get("gates") or {}).get(name, []) for x in layer if x is not None]
        moved, added = [abs(bias - start) for bias in values("bias")], values("mean")
        rows.append((group, len(found),
                     ", ".join("diverged" if "diverged" in r else first_step(r["validations"], REACHED[-1]) for r in found),
                     *(span(shares, "{:.1f}".format) if shares else "" for shares in right),
                     f"{max(moved):.2f}" if moved else "", f"{max(added):.2f}" if added else ""))
    return rows


class Gates:
    """The runs of a task whose gates begin alike, gate-TASK-BLOCK-plain or -T16, and what the rules say that were registered
    before them: STUDY.md, the second study. results: also of those that diverged."""

    def __init__(self, task, lines, results):
        self.groups, self.results = {}, results
        for line in lines_of(task, lines):
            block, _, start = line.name.removeprefix(f"{task}-").rpartition("_")[0].rpartition("-")
            self.groups.setdefault(block, {}).setdefault(start, []).append(line)

    def runs(self, block, start):
        """(those that are there, how many are not)."""
        lines = self.groups[block].get(start, [])
        found = [self.results[line.name] for line in lines if line.name in self.results]
        return found, len(lines) - len(found)

    @staticmethod
    def learned(run):
        return "diverged" not in run and first_step(run["validations"], REACHED[-1]) != "never"

    def delay(self, block):
        """Is plain gates' failure only a delay? Yes where at least two seeds have learned it, no where none has."""
        found, left = self.runs(block, "plain")
        count = sum(map(self.learned, found))
        verdict = "yes" if count > 1 else f"open, after {counted(left, 'more run')}" if left else "open" if count else "no"
        return f"{block}: {verdict} ({count} of {counted(len(found), 'seed')})"

    def enough(self, block):
        """The smallest T at which all seeds have learned it."""
        lengths, waits = sorted((start for start in self.groups[block] if start[0] == "T"), key=lambda start: int(start[1:])), []
        for start in lengths:
            found, left = self.runs(block, start)
            if left and all(map(self.learned, found)):
                waits.append(f"{int(start[1:]):,}")
            elif found and not left and all(map(self.learned, found)):
                open_ = f", or {', '.join(waits)}, whose runs are not all there" if waits else ""
                return f"{block}: {int(start[1:]):,} tokens{open_}"
        return f"{block}: {'open' if waits else 'none of them'}"

    def gates(self, block, start):
        """[(bias at the end, mean of w_f a)] of the heads of the runs that have learned it."""
        return [(bias, mean) for run in self.runs(block, start)[0] if self.learned(run) and run.get("gates")
                for biases, means in zip(run["gates"]["bias"], run["gates"]["mean"])
                for bias, mean in zip(biases, means) if bias is not None and mean is not None]

    def moved(self):
        """[(how far a bias has moved at most, half of lr x steps, the sum of the learning rates of a warm-up and a cosine to
        0)] of each group of runs that have ended."""
        rows = []
        for block, starts in self.groups.items():
            for start, lines in starts.items():
                runs = [run for run in self.runs(block, start)[0] if run.get("gates")]
                far = [abs(x - start_of(lines[0])) for run in runs for layer in run["gates"]["bias"] for x in layer if x is not None]
                if far:
                    rows.append((max(far), runs[0]["lr"] * runs[0]["steps"] / 2))
        return rows

    def owed(self, block):
        """To what the longest gate of the plain runs that have learned it, by bias plus mean of w_f a, owes its length; "":
        there are none."""
        gates = self.gates(block, "plain")
        if not gates:
            return ""
        bias, mean = max(gates, key=sum)
        return f"{block} {'`w_f a`' if mean > bias else 'its bias'} (bias {bias:+.2f}, mean of `w_f a` {mean:+.2f})"


def gates_found(lines, results):
    """What the registered rules say, a line of Markdown a question."""
    mqar, over = (Gates(task, lines, results) for task in ("gate-mqar", "gate-over"))
    moved = mqar.moved() + over.moved()
    beyond = [far for far, most in moved if far > most]
    owed = [text for block in mqar.groups if (text := mqar.owed(block))]
    lengths = [*(f"MQAR, {mqar.enough(block)}" for block in mqar.groups),
               *(f"overwritten keys, {over.enough(block)}" for block in over.groups)]
    why = "not refuted: no bias ends further from its start than the sum of the rates" if moved else f"open: {NONE}"
    if beyond:
        why = f"refuted: a bias has moved by {max(beyond):.2f}, further than the sum of the rates"
    if owed:
        why += (". The longest gate of plain runs that have learned MQAR, by bias plus mean of `w_f a`, owes its length to: "
                f"{'; '.join(owed)}")
        if not beyond and all("`w_f a` (" in text for text in owed):  # and none to its bias
            why += ". It does not explain the failure"
    return [f"1. **Is plain gates' failure only a delay?** {'; '.join(map(mqar.delay, mqar.groups))}.",
            f"2. **Which length is enough?** {'; '.join(lengths)}.", f"3. **Why?** The hypothesis is {why}."]


def best_runs(group, lines, results):
    """{model: its run of lr_GROUP-MODEL_* with the lowest validation loss}."""
    prefix, best = f"lr_{group}-", {}
    for line in lines:
        r = results.get(line.name)
        if r and line.name.startswith(prefix):
            model = line.name.removeprefix(prefix).rpartition("_")[0]
            if model not in best or r["val_loss"] < best[model]["val_loss"]:
                best[model] = r
    return best


def draw_mqar(lines, results, plots, path):
    """Accuracy by step, and by the number of pairs at the training length and at the longest one."""
    figure, [[steps, pairs, longest]] = plots.panels(3)
    for k, (model, r) in enumerate(best_runs("mqar", lines, results).items()):
        rows = [(v["step"], 100 * v["accuracy"]) for v in r["validations"] if v["accuracy"] is not None]
        if rows:
            plots.curve(steps, *zip(*rows), k, f"{model}, lr {r['lr']:g}")
        for axes, length in ((pairs, "T512"), (longest, "T4096")):
            points = sorted((int(name.rpartition("_n")[2]), 100 * test["accuracy"])
                            for name, test in r["tests"].items() if f"_{length}_" in name)
            if points:
                plots.curve(axes, *zip(*points), k)
                plots.dots(axes, *zip(*points), k)
    steps.set(xlabel="step", ylabel="right, %")
    for axes, title in ((pairs, "T = 512, as trained"), (longest, "T = 4096")):
        axes.set(xlabel="pairs")
        plots.caption(axes, title)
        plots.log_scale(axes, "x", 2)
    for axes in (steps, pairs, longest):
        axes.set_ylim(-3, 103)
    plots.save(figure, path)
