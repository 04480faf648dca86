"""
The pictures of STUDY.md, dev/pictures/study_*.svg. Lines are means over seeds, bands reach from the lowest to the highest.
"""
import collections
import statistics
import sys

import from_scratch
import paper_code
from measures import TRAINED, gpu_of
from plan import ROOT


def draw(report, folder):
    sys.path.insert(0, str(ROOT / "scripts/eval"))
    import plots
    paper_code.draw(paper_code.load(), plots, folder)
    if from_scratch.best_runs("mqar", report.all_lines, report.all_results):
        from_scratch.draw_mqar(report.all_lines, report.all_results, plots, f"{folder}/study_mqar.svg")
    report.packed.draw(plots, f"{folder}/study_packed.svg")
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
