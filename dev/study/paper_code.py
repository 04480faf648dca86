"""
Training beside the paper's own code: the picture, table and paragraph of STUDY.md, all from paper_code.json.

It has of each model the losses of some steps of both programs, and of each span of steps the largest and the mean
difference of their losses over every step, for fox-pro also the largest one of two runs of this program.
"""
from plan import HERE, read_json

PICTURE = "study/paper_code.svg"
REPEATS = "two_runs_of_this_program"


def load():
    return read_json(HERE / "paper_code.json")


def spans(run):
    """[(first step, last step, largest difference, mean difference, largest of two runs of this program or None)]."""
    repeats = run.get(REPEATS, {})
    return [(*map(int, span.split("-")), d["largest"], d["mean"], repeats.get(span))
            for span, d in run["largest_difference"].items()]


def facts(data):
    """What the paragraph and the README say, by name."""
    runs, fox = data["runs"], spans(data["runs"]["fox-pro"])
    return {"largest": max(row[2] for row in fox), "noise": max(row[4] for row in fox), "steps": fox[-1][1],
            "others": {name: ([row[2] for row in spans(run)], spans(run)[-1][1]) for name, run in runs.items()
                       if name != "fox-pro"}}


def text(data):
    """Lines of Markdown."""
    speed, known, fox = data["tokens_per_s"], facts(data), spans(data["runs"]["fox-pro"])
    rows = [f"| {name} | {first} to {last} | {largest:.4f} | {abs(mean):.4f} | {'' if noise is None else f'{noise:.4f}'} |"
            for name, run in data["runs"].items() for first, last, largest, mean, noise in spans(run)]
    paper = next(tokens for name, tokens in speed.items() if name.startswith("fox-pro of"))
    others = "; ".join(
        f"{name} by {', '.join(f'{x:.4f}' for x in found)} in the spans of its {steps} steps"
        for name, (found, steps) in known["others"].items())
    return [
        f"![loss of both programs by step, and their difference](pictures/{PICTURE})", "",
        "| model | steps | largest difference of the loss | mean difference with its sign, absolute value | largest of two runs of "
        "this program |", "|---|---|---|---|---|", *rows, "",
        f"The loss of fox-pro differs by {known['largest']:.3f} at most over {known['steps']} steps, where two runs of "
        f"this program differ by {known['noise']:.3f}. What is unfavourable: up to step {fox[1][1]} the programs differ "
        f"by {max(row[2] for row in fox[:2]):.4f} and two runs by {max(row[4] for row in fox[:2]):.4f}; {others}, "
        "without repeats to compare with.", "",
        f"Speed of fox-pro, by `--bench` on the same day: {speed['fox-pro'] / 1000:.0f}K beside {paper / 1000:.0f}K "
        f"tokens/s, {speed['fox-pro'] / paper:.1f} times."]


def draw(data, plots, folder):
    """Left the losses of both programs, right their largest difference by span of steps, and that of two runs."""
    figure, [[loss, difference]] = plots.panels(2)
    for k, (name, run) in enumerate(data["runs"].items()):
        steps = [s["step"] for s in run["steps"]]
        plots.curve(loss, steps, [s["loss"] for s in run["steps"]], k, name)
        plots.dots(loss, steps, [s["loss_paper"] for s in run["steps"]], k)
        for column, style in ((2, "-"), (4, (0, (1, 1)))):
            rows = [row for row in spans(run) if row[column] is not None]
            x, y = [at for row in rows for at in row[:2]], [row[column] for row in rows for _ in range(2)]
            difference.plot(x, y, color=plots.look(k)["color"], linestyle=style)
    loss.set(xlabel="step", ylabel="training loss, nats")
    difference.set(xlabel="step", ylabel="largest difference of the loss, nats")
    plots.caption(difference, "dotted: two runs of this program")
    plots.log_scale(difference, "y")
    plots.save(figure, f"{folder}/{PICTURE}", {"line": "this program", "dots": "the paper's code"})
