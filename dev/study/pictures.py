"""
The pictures of STUDY.md, dev/pictures/study/*.svg. Lines are means over seeds, bands and bars reach from
the lowest to the highest.
"""
import statistics
import sys
from pathlib import Path

import from_scratch
import paper_code
from common import counted
from measures import NEEDLES, PAIR, SEEDS, TRAINED, comparable, gpu_of
from plan import ROOT


def mean_and_band(plots, axes, points, k, label=None):
    """The mean over the runs that have what the first has, and a band from the lowest to the highest; points: [(x, y)] of
    each run."""
    x = [p[0] for p in points[0]]
    ys = [[p[1] for p in run] for run in points if [p[0] for p in run] == x]
    plots.curve(axes, x, [statistics.fmean(y) for y in zip(*ys)], k, label, plots.band_of(ys))


def length_axis(plots, axes):
    """Tokens on the x axis, by powers of two, with the training length."""
    plots.mark(axes, TRAINED)
    plots.log_scale(axes, "x", 2)
    ticks = axes.get_xticks()
    plots.set_ticks(axes.xaxis, ticks[::1 + (len(ticks) > 6)])  # more of five digits would touch


def labelled(report):
    """[(k, label, runs)] of the pair alone: another model has fewer seeds, and means over other seeds mislead."""
    return [(k, f"{name}, {counted(len(runs), 'seed')}", runs) for k, name in enumerate(PAIR) if (runs := report.seeds(name))]


def draw_loss(report, plots, path):
    """Training loss by tokens, and by minutes of the repeats whose times can be compared."""
    repeats = [[report.results.get(f"{name}_{s}_repeat") for name in PAIR] for s in SEEDS]
    repeats = [pair for pair in repeats if all(pair) and comparable(*pair)]
    figure, [panels] = plots.panels(2 if repeats else 1)
    for k, label, runs in labelled(report):  # 16 steps are 1 Mi tokens
        mean_and_band(plots, panels[0], [[(row[0] / 16, row[1]) for row in r["curve"]] for r in runs], k, label)
    for k, runs in enumerate(zip(*repeats)):
        minutes = [60 * statistics.fmean(column) for column in zip(*([row[2] for row in r["curve"]] for r in runs))]
        mean_and_band(plots, panels[1], [[(at, row[1]) for at, row in zip(minutes, r["curve"])] for r in runs], k)
        panels[1].set_xlabel(f"minutes of training steps on {gpu_of(runs[0])}")
    for axes in panels:
        axes.set_ylim(None, 4)
    panels[0].set(xlabel="tokens, Mi", ylabel="training loss, nats")
    plots.save(figure, path)


def draw_position(report, plots, path):
    figure, [[position, mean]] = plots.panels(2)
    for k, label, runs in labelled(report):
        at = [[p for p in r["eval"]["loss"] if p[0] >= 128] for r in runs]
        up_to = [[(int(length), p) for length, p in r["eval"]["perplexity"].items()] for r in runs]
        mean_and_band(plots, position, at, k, label)
        mean_and_band(plots, mean, up_to, k)
    position.set(xlabel="position i", ylabel="held-out loss L(i), nats")
    mean.set(xlabel="length l", ylabel="perplexity P(l)")
    for axes in (position, mean):
        length_axis(plots, axes)
    plots.save(figure, path, {"dashes": "training length"})


def draw_points(plots, axes, found, k, label=None):
    """Means of (x, values of the seeds) as dots on a line, with bars from the lowest to the highest."""
    if not found:
        return
    x, values = zip(*found)
    mean = [*map(statistics.fmean, values)]
    plots.curve(axes, x, mean, k, label)
    plots.dots(axes, x, mean, k, ([*map(min, values)], [*map(max, values)]))


def points_of(report, task, name, **fixed):
    """[(x, values of the seeds)] of a task's points with the values `fixed`, x being the other key."""
    return [(next(v for key, v in at if key not in fixed), [*found[name].values()])
            for (_, at), found in report.points_of_tasks((task,)).items()
            if found[name] and fixed.items() <= dict(at).items()]


def draw_tasks(report, plots, path):
    """Copy and conflict by distance, corrupted context by its share."""
    figure, [[copy, conflict, corrupted]] = plots.panels(3)
    for k, name in enumerate(PAIR):
        draw_points(plots, copy, points_of(report, "copy", name, segment=64), k, name)
        for stale in (1, 4):
            label = f"{name}, {stale} older" if stale > 1 else None
            draw_points(plots, conflict, points_of(report, "conflict", name, stale=stale), k + 2 * (stale > 1), label)
        draw_points(plots, corrupted, points_of(report, "corrupted", name, length=16128), k)
    copy.set(xlabel="tokens between a segment and its copy", ylabel="fall of the copy's loss, nats")
    conflict.set(xlabel="tokens behind the newer continuation", ylabel="log p(newer) - log p(older)")
    corrupted.set(xlabel="replaced tokens of the context, %", ylabel="rise of the loss, nats")
    for axes in (copy, conflict):
        length_axis(plots, axes)
    plots.save(figure, path, {"dashes": "training length"})


def draw_needles(report, plots, path):
    """Right answers by distance, a panel a number of other pairs, before and after tuning."""
    others = dict.fromkeys(at[0][1] for _, at in report.points_of_tasks(NEEDLES[-1:]))
    figure, [panels] = plots.panels(len(others))
    for axes, count in zip(panels, others):
        for k, name in enumerate(PAIR):
            for task in (NEEDLES[-1], NEEDLES[0]):
                label = f"{name}, {counted(int(task.rpartition('_')[2]), 'step')}" if axes is panels[0] else None
                points = points_of(report, task, name, distractors=count)
                draw_points(plots, axes, points, k + 2 * (task == NEEDLES[0]), label)
        axes.set(xlabel="tokens between value and question", ylim=(-3, 103))
        plots.caption(axes, counted(count, "other pair"))
        length_axis(plots, axes)
    panels[0].set(ylabel="right, %")
    plots.save(figure, path, {"dashes": "training length"})


def draw_gates(report, plots, path):
    """Half-lives of all heads of the first seed at the first and the last moment; the share pruned by step."""
    fox = [r for r in report.seeds(PAIR[0]) if r.get("half_lives")]
    figure, [[lives, shares]] = plots.panels(2)
    moments = [*fox[0]["half_lives"].items()]
    for k, (step, layers) in enumerate((moments[0], moments[-1])):
        points = [(i + k * 0.3 - 0.15, life) for i, layer in enumerate(layers) for life in layer if life]
        color = plots.look(k)["color"]
        if points:
            label = f"step {step}, seed {fox[0]['seed']}"
            lives.plot(*zip(*points), "o", markersize=3, alpha=0.7, color=color, label=label)
    plots.layer_ticks(lives, len(layers))
    lives.set(ylabel="half-life, tokens")
    plots.log_scale(lives, "y")
    pruned = [r for r in fox if r.get("pruned_shares")]
    share_of = lambda r: [(int(step), 100 * statistics.fmean(layers)) for step, layers in r["pruned_shares"].items()]
    if pruned:
        mean_and_band(plots, shares, [*map(share_of, pruned)], 2, f"{PAIR[0]}, {counted(len(pruned), 'seed')}")
    shares.set(xlabel="step", ylabel="blocks pruned of one document, %", ylim=(0, 100))
    plots.save(figure, path)


PICTURES = {  # what draws it, and its caption on the page
    "loss": (draw_loss, "Training loss, mean of 64 steps, by tokens, and by minutes of the repeats."),
    "position": (draw_position, "Held-out loss L(i) by position in bins of a sixth of an octave, and perplexity P(l) of the "
                 "first l positions, over 256 documents."),
    "tasks": (draw_tasks, "Zero-shot tasks: copies, conflicts with one and with four older continuations, corrupted context."),
    "needles": (draw_needles, "Needles before tuning and after 256 steps of it."),
    "gates": (draw_gates, "Half-lives of all heads of one seed at the first and the last moment; blocks pruned of the first "
              "16,384 tokens of one document."),
}


def names(report):
    """Those of PICTURES that have runs."""
    fox = report.seeds(PAIR[0])
    needs = {"tasks": lambda r: "copy" in r["tasks"], "needles": lambda r: NEEDLES[0] in r["tasks"],
             "gates": lambda r: r.get("half_lives")}
    return [name for name in PICTURES if (any(map(needs[name], fox)) if name in needs else labelled(report))]


def draw(report, folder):
    sys.path.insert(0, str(ROOT / "scripts/eval"))
    import plots
    Path(folder, "study").mkdir(exist_ok=True)
    paper_code.draw(paper_code.load(), plots, folder)
    if from_scratch.best_runs("mqar", report.all_lines, report.all_results):
        from_scratch.draw_mqar(report.all_lines, report.all_results, plots, f"{folder}/study/mqar.svg")
    report.packed.draw(plots, f"{folder}/study/packed.svg")
    for name in names(report):
        PICTURES[name][0](report, plots, f"{folder}/study/{name}.svg")
