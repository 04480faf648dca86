"""
Training beside the paper's own code: the picture, tables and paragraphs of STUDY.md, all from paper/c_files.json (Linux's
C files), paper/python_packages.json and paper/repeats.json (the study's corpus).

The first has of each model the losses of some steps of both programs, and of each span of steps the largest and the mean
difference of their losses over every step, for fox-pro also the largest one of two runs of this program. The second has
of each model and span the mean and the largest difference from this program's first run, of its second run, of a run
with --fp8 and of the paper's code. The third has of each model the losses of both programs, each run twice, and by span
the differences of the paper's code from this program, and of each from itself.
"""
from plan import HERE, read_json  # finds common
from common import counted  # noqa: E402,I001
from measures import table

PICTURE = "study/paper_code.svg"
REPEATS = "two_runs_of_this_program"


def load():
    return read_json(HERE / "paper/c_files.json")


def load_python():
    return read_json(HERE / "paper/python_packages.json")


def load_repeats():
    return read_json(HERE / "paper/repeats.json")


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


def largest(run, measure, after=0):
    """The largest difference of a run of paper/python_packages.json, of all spans behind a step."""
    return max(found[1] for span, found in run[measure].items() if int(span.split("-")[0]) > after)


def text(data):
    """Lines of Markdown."""
    known, fox = facts(data), spans(data["runs"]["fox-pro"])
    rows = [(name, f"{first} to {last}", f"{most:.4f}", f"{mean:+.4f}", "" if noise is None else f"{noise:.4f}")
            for name, run in data["runs"].items() for first, last, most, mean, noise in spans(run)]
    others = "; ".join(
        f"{name} by {', '.join(f'{x:.4f}' for x in found)} in the spans of its {counted(steps, 'step')}"
        for name, (found, steps) in known["others"].items())
    speeds = "; ".join(f"{what} {ours:,} beside {theirs:,} tokens/s, {ours / theirs:.1f} times"
                       for what, (ours, theirs) in data["speed"]["fox-pro-125m"].items())
    return [
        f"![loss of both programs by step, and their difference](pictures/{PICTURE})", "",
        *table(("model", "steps", "largest difference of the loss", "the paper's code minus this program, mean",
                "largest of two runs of this program"), *rows), "",
        f"The loss of fox-pro differs by {known['largest']:.3f} at most over {counted(known['steps'], 'step')}, where two runs of "
        f"this program differ by {known['noise']:.3f}. What is unfavourable: up to step {fox[1][1]} the programs differ "
        f"by {max(row[2] for row in fox[:2]):.4f} and two runs by {max(row[4] for row in fox[:2]):.4f}; {others}, "
        "without repeats to compare with.", "",
        f"Speed of fox-pro-125m like for like, {data['speed']['how']}: {speeds}."]


def text_python(data):
    """Lines of Markdown of the second corpus."""
    cell = lambda found: "" if found is None else f"{found[0]:+.4f}, {found[1]:.4f}"
    by_span = lambda run, measure: {int(span.split("-")[0]): (span, found) for span, found in run[measure].items()}
    rows = [(name, by_span(run, "paper_code")[first][0].replace("-", " to "),
             *(cell(by_span(run, measure)[first][1]) for measure in ("paper_code", "repeat", "fp8")))
            for name, run in data["runs"].items() for first in by_span(run, "paper_code")]
    fox, other = (data["runs"][name] for name in ("fox-pro", "transformer-pro"))
    return [
        f"On Python packages fox-pro's loss differs by {largest(fox, 'paper_code'):.3f} at most, in steps 1 to 12, and by "
        f"{largest(fox, 'paper_code', 12):.3f} after them, where two runs of this program differ by "
        f"{largest(fox, 'repeat'):.3f}: more than they do. transformer-pro's differs by "
        f"{largest(other, 'paper_code'):.3f}, two runs by {largest(other, 'repeat'):.3f}.", "",
        *table(("model", "steps", "the paper's code: mean, largest", "a second run", "a run with `--fp8`"), *rows)]


def text_repeats(data):
    """Lines of Markdown of both programs beside themselves."""
    cell = lambda run, measure, span: "{:+.4f}, {:.4f}".format(*run[measure][span]) if span in run.get(measure, {}) else ""
    rows = [(name, span.replace("-", " to "),
             *(cell(run, measure, span) for measure in ("paper_code", "repeat", "paper_repeat")))
            for name, run in data["runs"].items() for span in run["paper_code"]]
    fox, other = (data["runs"][name] for name in ("fox-pro", "transformer-pro"))
    again = len(data["loss"]["transformer-pro"]["the paper's code, run 2"])
    return [
        f"The paper's code computes the same losses twice: fox-pro's {len(data['loss']['fox-pro']['this program'])} in all five "
        f"recorded digits, transformer-pro's {again} that were repeated in all four. This program, whose gradients "
        f"are summed in any order without `--deterministic`, differs from itself by {largest(fox, 'repeat'):.4f} at most, "
        f"from the paper's code by {largest(fox, 'paper_code'):.4f} (fox-pro) and {largest(other, 'paper_code'):.4f} "
        "(transformer-pro): the programs are further apart than repeats are.", "",
        *table(("model", "steps", "the paper's code minus this program: mean, largest", "this program again",
                "the paper's code again"), *rows)]


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
