#!/usr/bin/env python3
"""
Compares training runs: tables, and pictures of their curves.

    scripts/compare.py out/sweep/*/ --out out/sweep/compare --eval out/sweep/*/eval.json

A RUN is a folder with log.jsonl, or such a file. Runs that differ only in their seed are one group, named by
what sets it apart from the others. The tables have the mean of a group and its standard deviation over seeds;
where groups have seeds in common, also the mean of their differences to the best group with the same seed, its
standard error and 95% interval (Student's t), which stands for one comparison: of twenty, one misses by chance.
Nothing is claimed from two pairs or fewer. The pictures have means, and the lowest and the highest seed as
bands. It writes

    PREFIX_loss.svg       training loss after the first tenth, in means of 5% of the steps, and held-out loss,
                          against tokens; against FLOPs and time where a token costs 5% more in one group
    PREFIX_pruned.svg     pruned share of attention's FLOPs, by layer, over the last tenth of the steps
    PREFIX_position.svg   held-out loss by position at the end of training, unless --eval has it of all groups
    PREFIX_half_life.svg  half-lives of the forget gates, a dot a head and seed: measured by --maps, or those
                          of the biases in the newest checkpoint, where the input adds nothing; of runs in
                          which one has moved by 10% from where it started
    PREFIX_eval.svg       of --eval: L(i), smoothed, with errors, and P(l), as eval/positions.py draws

Files of --eval and --maps belong to the run whose folder they are in, or whose checkpoint they name. FLOPs
are the model's, as if nothing were pruned or in other documents. Hours are those of steps and validations;
GPU-hours, on the CPU rank-hours, count ranks, and steps that were done twice because a run was killed. Pictures need matplotlib,
half-lives also safetensors (scripts/requirements.txt); --no-plots needs nothing. A folder without a log is
left out. So is a run whose log is damaged, and the exit code is then 1.

A run that was resumed with other options has several configurations. It is named by all of them, as in "lr
0.001 then 0.002 from step 512", unless what has changed is only how it is computed and measured.
"""
import math
import os
import statistics
import sys
from pathlib import Path

from common import MIN_PAIRS, NUMBER, BadLine, Error, Parser, attention_layers, paired, run

sys.path.append(str(Path(__file__).parent / "eval"))
import positions  # noqa: E402
from positions import means  # noqa: E402
from runs import Log, group, read_evals, read_half_lives  # noqa: E402


# ----------------------------------------------------------------------------
# tables


def by_seed(runs, value):
    """value(run) where it is not None, of a seed's repeats their mean."""
    values = {}
    for run in runs:
        if value(run) is not None:
            values.setdefault(run.start["options"].get("seed"), []).append(value(run))
    return [statistics.fmean(repeats) for repeats in values.values()]


def number_of_seeds(runs):
    return str(len(by_seed(runs, lambda run: 1)))


def spread(runs, value, digits):
    """Mean and standard deviation over seeds, as text."""
    values = by_seed(runs, value)
    if not values:
        return "-", "-"
    deviation = f"{statistics.stdev(values):.{digits}f}" if len(values) > 1 else "-"
    return f"{statistics.fmean(values):,.{digits}f}", deviation


def markdown(titles, rows):
    """Lines of a Markdown table."""
    rows = [titles, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = ["| " + " | ".join(cell.rjust(w) if i else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|")
    return lines


def training_table(groups):
    """The lowest held-out loss first."""
    rows = []
    for name, runs in groups.items():
        losses = by_seed(runs, Log.validation_loss)
        rows.append((statistics.fmean(losses) if losses else math.inf, name, number_of_seeds(runs),
                     f"{runs[0].steps[-1]['tokens']:,}", *spread(runs, Log.validation_loss, 4),
                     spread(runs, Log.tokens_per_s, 0)[0], spread(runs, lambda run: run.gpu_hours, 3)[0],
                     f"{sum(run.gpu_hours for run in runs):,.3f}"))
    hours = "rank-hours" if any(r.start["device"] == "CPU" for runs in groups.values() for r in runs) else "GPU-hours"
    titles = ("run", "seeds", "tokens", "held-out loss", "deviation", "tokens/s", hours, "of all seeds")
    return markdown(titles, [row[1:] for row in sorted(rows)])


def part_table(groups):
    """The held-out loss of each part of --val-data at the end, where it has several."""
    losses = lambda run: run.validation_loss() is not None and run.validations[-1].get("val_loss_of") or {}
    groups = {name: [run for run in runs if losses(run)] for name, runs in groups.items()}
    parts = sorted({part for runs in groups.values() for run in runs for part in losses(run)})
    cell = lambda runs, part: " ± ".join(spread(runs, lambda run: losses(run).get(part), 4))
    rows = [(name, number_of_seeds(runs), *(cell(runs, part).removesuffix(" ± -") for part in parts))
            for name, runs in groups.items() if runs]
    return markdown(("held-out loss of", "seeds", *parts), rows) if rows else []


def pair_differences(groups):
    """(best group, {other group: differences of held-out losses, a seed each}), of runs of as many tokens."""
    losses = {}
    for name, runs in groups.items():
        for run in runs:
            if run.validation_loss() is not None:
                kind = (run.start["options"].get("seed"), run.steps[-1]["tokens"])
                losses.setdefault(name, {}).setdefault(kind, []).append(run.validation_loss())
    losses = {name: {kind: statistics.fmean(repeats) for kind, repeats in kinds.items()}
              for name, kinds in losses.items()}
    best, *others = sorted(losses, key=lambda name: statistics.fmean(losses[name].values())) or [None]
    pairs = {name: [loss - losses[best][kind] for kind, loss in losses[name].items() if kind in losses[best]]
             for name in others}
    return best, {name: differences for name, differences in pairs.items() if differences}


def pair_table(best, pairs):
    rows = []
    for name, differences in pairs.items():
        mean, error, n, half_width, _ = paired(differences)
        interval = "-" if half_width is None else f"{mean - half_width:.4f} to {mean + half_width:.4f}"
        rows.append((name, str(n), f"{mean:.4f}", "-" if error is None else f"{error:.4f}", interval))
    titles = (f"held-out loss less that of {best}", "pairs", "difference", "standard error", "95% interval")
    return markdown(titles, rows)


def eval_table(groups):
    """P(l) at powers of two."""
    groups = {name: [run for run in runs if run.eval] for name, runs in groups.items()}
    lengths = sorted({int(n) for runs in groups.values() for run in runs for n in run.eval["perplexity"]})
    cell = lambda runs, n: " ± ".join(spread(runs, lambda run: run.eval["perplexity"].get(str(n)), 3))
    rows = [(name, number_of_seeds(runs), *(cell(runs, n).removesuffix(" ± -") for n in lengths))
            for name, runs in groups.items() if runs]
    return markdown(("perplexity of the first tokens", "seeds", *map(str, lengths)), rows)


def notes(runs, others):
    """What a reader of the tables must know."""
    for name, differences in others.items():
        if differences:
            yield f"{name}: {differences}"
    for run in runs:
        for key, text in run.changes().items():
            yield f"{run.path}: several configurations: {key} {text}"
        if not run.finished():
            yield f"{run.path}: at step {run.steps[-1]['step']} of {run.start['num_steps']}"
        elif run.validation_loss() is None:
            yield f"{run.path}: its end was not validated"
    for key in ("version", "device", "ranks"):
        values = sorted({str(run.start[key]).split(",")[0] for run in runs})  # of a device its name
        if len(values) > 1:
            yield f"{key} differs: {'; '.join(values)}"


# ----------------------------------------------------------------------------
# pictures. Each function returns a figure of the groups, and what its legend explains besides; None: nothing
# is to be drawn. A group has the same colour in all of them, by its number


def common_lines(runs, name, value):
    """[[line] of each run]: lines `name` that have value(line), at the steps that all runs have."""
    lines = [{line["step"]: line for line in getattr(run, name) if value(line) is not None} for run in runs]
    steps = sorted(set.intersection(*map(set, lines)))
    return [[by_step[step] for step in steps] for by_step in lines]


def differ(values):
    return max(values) > 1.05 * min(values)


def flops_per_token(run):
    """Model FLOPs, of which those of pairs of tokens in different documents (document_reset) are none."""
    number = lambda values, name: values.get(name) if isinstance(values.get(name), NUMBER) else 0
    hidden = statistics.fmean(number(line, "attention_in_other_documents") for line in run.steps)
    return run.start["flops_per_token"] - hidden * number(run.start, "attention_flops_per_token")


def draw_loss(plots, groups):
    """Against what a token costs in different groups: nothing, FLOPs, time."""
    steps = {name: common_lines(runs, "steps", lambda line: line["loss"]) for name, runs in groups.items()}
    steps = {name: lines for name, lines in steps.items() if lines[0]}
    if not steps:
        return None
    flops = {name: flops_per_token(groups[name][0]) for name in steps}
    end = lambda name, key: statistics.fmean(lines[-1][key] for lines in steps[name])
    scales = [(plots.TOKENS, lambda name, line: line["tokens"])]
    if differ(flops.values()):
        scales += [(plots.FLOPS, lambda name, line: flops[name] * line["tokens"])]
    if differ([end(name, "hours") / end(name, "tokens") for name in steps]):
        scales += [(plots.HOURS, lambda name, line: line["hours"])]
    figure, [axes] = plots.panels(len(scales), width=3.9 if len(scales) < 3 else 3.3)
    held_out = False
    for panel, (units, scale) in zip(axes, scales):
        size, title = plots.unit(max(scale(name, lines[-1]) for name in steps for lines in steps[name]), units)
        for k, (name, runs) in enumerate(groups.items()):
            if name not in steps:
                continue
            x = means([[scale(name, line) / size for line in lines] for lines in steps[name]])
            window = len(x) // 20 // 2 * 2 + 1
            loss = [positions.smooth([line["loss"] for line in lines], window) for lines in steps[name]]
            cut = slice(len(x) // 10, None)  # the fall from the initial loss would hide the rest
            loss = [values[cut] for values in loss]
            plots.curve(panel, x[cut], means(loss), k, name, plots.band_of(loss), len(steps) * len(scales))
            at = {line["step"]: line["tokens"] for line in steps[name][0]}
            lines = common_lines(runs, "validations", lambda v: v["val_loss"] if v["step"] in at else None)
            first = steps[name][0][cut][0]["step"]
            lines = [[{"tokens": at[v["step"]], **v} for v in row if v["step"] >= first] for row in lines]
            losses = [[line["val_loss"] for line in row] for row in lines]
            x = means([[scale(name, line) / size for line in row] for row in lines])
            held_out = held_out or bool(x)
            plots.dots(panel, x, means(losses), k, plots.band_of(losses))
        panel.set(xlabel=title, ylabel="loss, nats")
        if units is plots.TOKENS:
            plots.binary_ticks(panel.xaxis)
        if any(len(runs) > 1 for runs in groups.values()):
            plots.caption(panel, "bands and bars: lowest to highest seed")
    dots = {"dots": "held-out, of one step: can be lower"} if held_out else {}
    return figure, {"line": "training, mean of 5% of the steps", **dots}


def draw_by_layer(plots, groups, curves_of, finish):
    """One panel of means and bands. curves_of(run): x and y, or None; finish(axes): its axes."""
    figure, [[axes]] = plots.panels(1)
    seeds = False
    for k, (name, runs) in enumerate(groups.items()):
        curves = [curve for curve in map(curves_of, runs) if curve]
        if curves:
            ys = [y for _, y in curves]
            seeds = seeds or len(ys) > 1
            plots.curve(axes, curves[0][0], means(ys), k, name, plots.band_of(ys), len(groups))
    if not axes.lines:
        return None
    finish(axes)
    if seeds:
        plots.caption(axes, "bands: lowest to highest seed")
    return figure, {}


def draw_pruned(plots, groups):
    def shares(run):
        last = run.steps[-math.ceil(len(run.steps) / 10):]
        y = means([line["pruned_by_layer"] for line in last if "pruned_by_layer" in line])
        return (attention_layers(run.start["config"], len(y)), y) if y else None

    def finish(axes):
        axes.set(ylabel="share pruned", ylim=(0, 1))
        plots.layer_ticks(axes, 1 + max(max(line.get_xdata()) for line in axes.lines))

    return draw_by_layer(plots, groups, shares, finish)


def draw_positions(plots, groups):
    def losses(run):
        if not run.validations:
            return None
        table = run.validations[-1]["by_position"]  # of tokens from + 1 .. to of a context
        x = [(row["from"] + 1 + row["to"]) / 2 for row in table]
        return x, [math.nan if row["loss"] is None else row["loss"] for row in table]

    def finish(axes):
        axes.set(xlabel="position i", ylabel="held-out loss, nats")
        plots.log_scale(axes, "x", base=2)

    if all(run.eval or not losses(run) for runs in groups.values() for run in runs):
        return None  # --eval has more of the same
    return draw_by_layer(plots, groups, losses, finish)


def draw_half_lives(plots, groups):
    points = {name: [(i, life) for run in runs for i, layer in enumerate(run.half_lives or ())
                     for life in layer if math.isfinite(life)] for name, runs in groups.items()}
    drawn = [name for name in groups if points[name]]
    if not drawn:
        return None
    figure, [[axes]] = plots.panels(1)
    many = sum(map(len, points.values())) > 1000  # as a bitmap, which is smaller then
    for k, name in enumerate(groups):
        if name in drawn:
            shift = (drawn.index(name) + 1) / (len(drawn) + 1) - 0.5  # groups stand side by side in a layer
            layers, lives = zip(*points[name])
            axes.plot([i + shift for i in layers], lives, "o", markersize=3, alpha=0.6, label=name,
                      color=plots.look(k)["color"], rasterized=many)
    axes.set(ylabel="half-life, tokens")
    plots.layer_ticks(axes, 1 + max(i for dots in points.values() for i, _ in dots))
    plots.log_scale(axes, "y")
    return figure, {}


PICTURES = {"loss": draw_loss, "pruned": draw_pruned, "position": draw_positions,
            "half_life": draw_half_lives}


def draw_eval(path, groups):
    evals = {name: [run.eval for run in runs if run.eval] for name, runs in groups.items()}
    evals = {name: results for name, results in evals.items() if results}
    positions.draw(path, evals, [e.get("trained_seq_len") for results in evals.values() for e in results])


# ----------------------------------------------------------------------------
# main


def main():
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders with log.jsonl")
    parser.add_argument("--eval", nargs="+", default=[], metavar="FILE.json", help="results of --eval")
    parser.add_argument("--maps", nargs="+", default=[], metavar="FILE.safetensors", help="files of --maps")
    parser.add_argument("--out", default="compare", metavar="PREFIX", help="of the pictures [compare]")
    parser.add_argument("--no-plots", action="store_true", help="only the tables")
    options = parser.parse_args()
    logs, paths = [Log(path) for path in options.runs], {}
    for log in logs:
        other = paths.setdefault(os.path.realpath(log.file), log)
        if other is not log:
            raise Error(f"{log.path}: is given twice, also as {other.path}")
    runs = [log for log in logs if not log.damaged]
    read_evals(logs, options.eval)
    report(runs, logs, options)
    if not runs or any(isinstance(log.damaged, BadLine) for log in logs):
        sys.exit(1)


def report(runs, logs, options):
    """Prints tables of the runs, and which of the logs are damaged, and draws the pictures."""
    for log in logs:
        if log.damaged and runs and not isinstance(log.damaged, BadLine):
            print(f"note: {log.damaged}; goes on without it")
        elif log.damaged:
            print(f"error: {log.damaged}{'; goes on without this run' if runs else ''}", file=sys.stderr)
    if not runs:
        return
    groups, others = group(runs)
    tables = [table for table in (training_table(groups), part_table(groups)) if table]
    best, pairs = pair_differences(groups)
    if max(map(len, pairs.values()), default=0) > 1:
        tables.append(pair_table(best, pairs))
    if options.eval:
        tables.append(eval_table(groups))
    for table in tables:
        print(*table, *[""] * (len(tables) > 1), sep="\n")
    if min(map(len, pairs.values()), default=MIN_PAIRS) < MIN_PAIRS:
        print(f"note: nothing is claimed from fewer than {MIN_PAIRS} pairs of runs with equal seeds: they have no interval")
    for note in notes(runs, others):
        print(f"note: {note}")
    if options.no_plots:
        return
    try:
        import plots
    except Error as e:
        raise Error(f"{e}, or give --no-plots for the tables alone")
    read_half_lives(runs, options.maps)
    for name, draw in PICTURES.items():
        picture = draw(plots, groups)
        if picture:
            plots.save(picture[0], f"{options.out}_{name}.svg", picture[1])
            print(f"{options.out}_{name}.svg")
    if options.eval:
        draw_eval(f"{options.out}_eval.svg", groups)
        print(f"{options.out}_eval.svg")


if __name__ == "__main__":
    run(main)
