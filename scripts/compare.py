#!/usr/bin/env python3
"""
Compares training runs: tables, and pictures of their curves.

    scripts/compare.py out/sweep/*/ --out out/sweep/compare --eval out/sweep/*/eval.json

A RUN is a folder with log.jsonl, or such a file. Runs that differ only in their seed are one group, named by
what sets it apart from the others. The tables have the mean of a group and its standard deviation over seeds,
the pictures means. It writes

    PREFIX_loss.svg       smoothed training loss, and held-out loss as dots, against tokens, FLOPs and hours
    PREFIX_pruned.svg     pruned share of attention's FLOPs, by layer, over the last tenth of the steps
    PREFIX_position.svg   held-out loss by position at the end of training
    PREFIX_half_life.svg  half-lives of the forget gates, a dot a head and seed: measured by --maps, or those
                          of the biases in the newest checkpoint, where the input adds nothing
    PREFIX_eval.svg       of --eval: L(i), smoothed, and P(l), as eval/positions.py draws them

Files of --eval and --maps belong to the run whose folder they are in, or whose checkpoint they name. FLOPs
are the model's, as if nothing were pruned. Hours are those of steps and validations; GPU-hours count ranks,
and steps that were done twice because a run was killed. Pictures need matplotlib, half-lives also safetensors
(scripts/requirements.txt); --no-plots needs nothing. A folder without a log is left out. So is a run whose
log is damaged, and the exit code is then 1.

A run that was resumed with other options has several configurations. It is named by all of them, as in "lr
0.001 then 0.002 from step 512", unless what has changed is only how it is computed and measured.
"""
import argparse
import bisect
import json
import math
import os
import statistics
import sys
from pathlib import Path

from common import BadLine, Error, log_line, package, run

sys.path.append(str(Path(__file__).parent / "eval"))
import positions  # noqa: E402

# Options that do not change what is learnt.
SILENT = set("""seed save-every keep log-every val-every sample-every vocab generate prompt temperature top-k
    top-p min-p samples stop forget-by-seen recompute""".split())
# Of the others, those that a resumed run may change and is still the same run; data as long as its
# fingerprint is the same.
FREE = set("data val-data val-tokens micro-batch deterministic attention".split())


# ----------------------------------------------------------------------------
# logs


class Log:
    """
    A log. steps, validations: [line] in order, without those that a resumed run did again; each has "hours"
    since the start. gpu_hours: all that was spent. eval: the result of --eval, or None. half_lives:
    [layer][head]. damaged: the BadLine where reading stopped, an Error where there is no log, or None.
    """

    def __init__(self, path):
        self.path, self.folder = path, Path(path if os.path.isdir(path) else os.path.dirname(path)).resolve()
        self.start = self.last = None  # the last "run" lines that a step follows, and of all
        self.runs = []  # those that counted steps follow
        self.steps, self.validations, self.gpu_hours = [], [], 0
        self.eval = self.half_lives = self.damaged = None
        file = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        try:
            with open(file, "rb") as f:
                for number, text in enumerate(f, 1):
                    line = log_line(file, number, text)
                    if line:
                        self.add(line)
        except FileNotFoundError as e:
            self.damaged = Error(f"{e.filename}: cannot read: {e.strerror}")
            return
        except OSError as e:
            raise Error(f"{e.filename}: cannot read: {e.strerror}")
        except BadLine as e:
            self.damaged = e
            return
        if not self.start or not self.steps:
            self.damaged = Error(f"{path}: no run with a step in its log")
            return
        self.runs = [line for line in self.runs if line["step"] < self.steps[-1]["step"]] or [self.start]
        self.start, self.last = self.runs[-1], self.start

    def add(self, line):
        event = line["event"]
        if event == "run":
            self.start = line
            self.runs = [earlier for earlier in self.runs if earlier["step"] < line["step"]] + [line]
            for lines in self.steps, self.validations:
                del lines[bisect.bisect_right(lines, line["step"], key=lambda x: x["step"]):]
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
        first, last = self.runs[0]["options"], self.last["options"]
        options = {k: first.get(k) if k in FREE else v for k, v in self.start["options"].items()
                   if k not in SILENT}
        options.update({k: v for k, v in last.items() if k in ("val-data", "val-tokens")})
        options.update(self.changes(free=False))
        options.update(item.partition("=")[::2] for item in options.pop("set", []))
        return options, {"config." + k: v for k, v in self.start["config"].items()}

    def changes(self, free=True):
        """{option: "0.001 then 0.002 from step 9"} of what a resumed run changed; free: FREE too."""
        texts = {}
        for before, line in zip(self.runs, self.runs[1:]):
            was, now = before["options"], line["options"]
            changed = {k: now[k] for k in now if k in was and now[k] != was[k]
                       and k not in SILENT and (free or k not in FREE)}
            data = [run.get("data_fingerprint") for run in (before, line)]
            if None not in data and data[0] != data[1]:
                changed["data"] = f"other data of {now.get('data')}"
            for k, value in changed.items():
                texts[k] = f"{texts.get(k, was.get(k))} then {value} from step {line['step']}"
        return texts

    def finished(self):
        return self.steps[-1]["step"] >= self.start["num_steps"]

    def validation_loss(self):
        """At the last step; None: not measured there."""
        at_end = self.validations and self.validations[-1]["step"] == self.steps[-1]["step"]
        return self.validations[-1]["val_loss"] if at_end else None

    def tokens_per_s(self):
        """Over the second half of the steps, validations and pauses apart."""
        half = self.steps[len(self.steps) // 2:]
        tokens = half[-1]["tokens"] - half[0]["tokens"]
        seconds = sum(line["ms"] for line in half[1:]) / 1000
        return tokens / seconds if seconds else half[-1]["tokens_per_s"]

    def read_gates(self):
        """Half-lives by the gates' biases in the newest checkpoint. False: it has none."""
        if self.start["config"].get("fgate_type", "none") == "none":
            return False
        name = f"fgate_{'proj.' if self.start['config']['fgate_type'] == 'full' else ''}bias"
        layers = self.start["config"].get("num_hidden_layers")
        names = [f"model.layers.{i}.attn.{name}" for i in range(layers if isinstance(layers, int) else 0)]
        for path in sorted(self.folder.glob("step_*/model.safetensors"))[-1:]:
            biases, _ = read_tensors(path, names)
            self.half_lives = [[half_life(bias) for bias in layer] for layer in biases]
        return self.half_lives is not None


def half_life(bias):
    """-ln 2 / log f of a gate f = sigmoid(bias), tokens."""
    decay = max(-bias, 0) + math.log1p(math.exp(-abs(bias)))
    return math.log(2) / decay if decay else math.inf


def differing(dictionaries):
    """Keys whose values are not the same in all, in the order of the first."""
    keys = list(dict.fromkeys(key for d in dictionaries for key in d))
    return [key for key in keys if len({json.dumps(d.get(key)) for d in dictionaries}) > 1]


def group(runs):
    """{name: runs} by what differs, and {name: what else differs}."""
    options, configs = zip(*(run.settings() for run in runs))
    keys = differing(options)
    if not keys:
        options, keys = configs, differing(configs)
    kinds = lambda keys: len({json.dumps([values.get(key) for key in keys]) for values in options})
    telling = []  # the first keys that tell the groups apart
    for key in keys:
        telling += [key] if kinds(telling + [key]) > kinds(telling) else []

    def text(values, keys):
        shown = {key: values[key] for key in keys if values.get(key) is not None}
        names = {key: "" if key == "model" else key.removeprefix("config.") + " " for key in shown}
        return ", ".join(f"{names[key]}{value}" for key, value in shown.items())

    groups, others = {}, {}
    for run, values in zip(runs, options):
        name = text(values, telling) or ("default" if keys else "all")
        groups.setdefault(name, []).append(run)
        others[name] = text(values, [key for key in keys if key not in telling])
    return groups, others


def owner(runs, path, checkpoint):
    """The run of a file: its checkpoint, or else the file itself, is in the run's folder."""
    for place in filter(None, (checkpoint, path)):
        for run in runs:
            if run.folder in Path(place).resolve().parents:
                return run
    raise Error(f"{path}: is of none of these runs: its checkpoint is {checkpoint}")


def read_evals(runs, paths):
    for path in paths:
        result = positions.read_eval(path)
        owner(runs, path, result.get("checkpoint")).eval = result


def read_tensors(path, names):
    """The tensors of a safetensors file as lists, and its metadata. An Error if one cannot be read."""
    library = package("safetensors")
    try:
        with library.safe_open(path, "np") as f:
            return [f.get_tensor(name).tolist() for name in names], f.metadata() or {}
    except (OSError, library.SafetensorError) as e:
        raise Error(f"{path}: cannot read: {e}")


def read_half_lives(runs, paths):
    """Fills in half_lives from files of --maps, else from checkpoints."""
    for path in paths:
        [half_lives], metadata = read_tensors(path, ["half_life"])
        owner(runs, path, metadata.get("checkpoint")).half_lives = half_lives
    try:
        by_bias = [run.read_gates() for run in runs if run.half_lives is None and not run.damaged]
    except Error as e:
        print(f"note: no half-lives of checkpoints: {e}")
        return
    if any(by_bias):
        print("note: half-lives without --maps are those of the gates' biases, where the input adds nothing")


# ----------------------------------------------------------------------------
# tables


def spread(values, digits):
    """Mean and standard deviation, as text."""
    values = [v for v in values if v is not None]
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
        losses = [run.validation_loss() for run in runs]
        known = [loss for loss in losses if loss is not None]
        hours = [run.gpu_hours for run in runs]
        speed, _ = spread([run.tokens_per_s() for run in runs], 0)
        rows.append((statistics.fmean(known) if known else math.inf, name, str(len(runs)),
                     f"{runs[0].steps[-1]['tokens']:,}", *spread(losses, 4), speed,
                     spread(hours, 3)[0], f"{sum(hours):,.3f}"))
    titles = ("run", "seeds", "tokens", "held-out loss", "deviation", "tokens/s", "GPU-hours", "of all seeds")
    return markdown(titles, [row[1:] for row in sorted(rows)])


def eval_table(groups):
    """P(l) at powers of two."""
    evals = {name: [run.eval for run in runs if run.eval] for name, runs in groups.items()}
    lengths = sorted({int(n) for results in evals.values() for e in results for n in e["perplexity"]})
    cell = lambda results, n: " ± ".join(spread([e["perplexity"].get(str(n)) for e in results], 3))
    rows = [(name, str(len(results)), *(cell(results, n).removesuffix(" ± -") for n in lengths))
            for name, results in evals.items() if results]
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
    if any(run.start["device"] == "CPU" for run in runs):
        yield "on the CPU, GPU-hours are hours of a rank"


# ----------------------------------------------------------------------------
# pictures. Each function draws groups on panels; a picture without a line is not written


def smooth(values, window):
    """Means over the last `window` values."""
    total, result = 0, []
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0)
        result.append(total / min(i + 1, window))
    return result


def mean_curve(runs, name, value):
    """Means over runs of tokens, hours and value(line) of lines `name`, at the steps that all have; these."""
    lines = [{line["step"]: line for line in getattr(run, name) if value(line) is not None} for run in runs]
    steps = sorted(set.intersection(*map(set, lines)))
    mean = lambda of: [statistics.fmean(of(by_step[s]) for by_step in lines) for s in steps]
    return mean(lambda x: x.get("tokens", 0)), mean(lambda x: x["hours"]), mean(value), steps


def means(lists):
    """Elementwise."""
    return [statistics.fmean(values) for values in zip(*lists)]


def draw_loss(plots, axes, groups):
    for name, runs in groups.items():
        flops = runs[0].start["flops_per_token"]
        tokens, hours, loss, steps = mean_curve(runs, "steps", lambda line: line["loss"])
        first = len(loss) // 20  # the fall from the initial loss would hide the rest
        loss = smooth(loss, max(1, len(loss) // 20))
        _, val_hours, val_loss, val_steps = mean_curve(runs, "validations", lambda line: line["val_loss"])
        at = dict(zip(steps, tokens))
        val_tokens = [at.get(step, math.nan) for step in val_steps]
        for panel, x, val_x in ((axes[0], tokens, val_tokens), (axes[1], [flops * t for t in tokens],
                                [flops * t for t in val_tokens]), (axes[2], hours, val_hours)):
            plots.curve(panel, x[first:], loss[first:], name)
            panel.plot(val_x, val_loss, "o", markersize=3, color=panel.lines[-1].get_color())
    for panel, title in zip(axes, ("tokens", "model FLOPs", "hours")):
        panel.set(xlabel=title, ylabel="loss, nats")
        panel.locator_params(axis="x", nbins=6)
        if title != "hours":
            panel.xaxis.set_major_formatter(plots.matplotlib.ticker.EngFormatter(sep=""))  # 5k, 2M


def draw_pruned(plots, axes, groups):
    for name, runs in groups.items():
        last = [line for run in runs for line in run.steps[-math.ceil(len(run.steps) / 10):]]
        shares = means([line["pruned_by_layer"] for line in last if "pruned_by_layer" in line])
        if shares:
            plots.curve(axes[0], range(len(shares)), shares, name)
    axes[0].set(xlabel="layer", ylabel="share pruned", ylim=(0, 1))
    axes[0].xaxis.get_major_locator().set_params(integer=True)


def draw_positions(plots, axes, groups):
    for name, runs in groups.items():
        tables = [run.validations[-1]["by_position"] for run in runs if run.validations]
        if tables:
            x = [(row["from"] + row["to"]) / 2 for row in tables[0]]
            plots.curve(axes[0], x, means([[math.nan if row["loss"] is None else row["loss"] for row in table]
                                                for table in tables]), name)
    axes[0].set(xlabel="position in the context", ylabel="held-out loss, nats", xscale="log")


def draw_half_lives(plots, axes, groups):
    dots = {name: [(i, life) for run in runs for i, layer in enumerate(run.half_lives or ()) for life in layer
                   if math.isfinite(life)] for name, runs in groups.items()}
    gated = {name: zip(*points) for name, points in dots.items() if points}
    for k, (name, (layers, lives)) in enumerate(gated.items()):
        shift = (k + 1) / (len(gated) + 1) - 0.5  # groups stand side by side in a layer
        axes[0].plot([i + shift for i in layers], lives, "o", markersize=3, alpha=0.6, label=name)
    axes[0].set(xlabel="layer", ylabel="half-life, tokens", yscale="log")
    axes[0].xaxis.get_major_locator().set_params(integer=True)


PICTURES = {"loss": (3, draw_loss), "pruned": (1, draw_pruned), "position": (1, draw_positions),
            "half_life": (1, draw_half_lives)}  # panels


def draw_eval(path, groups):
    evals = {name: [run.eval for run in runs if run.eval] for name, runs in groups.items()}
    losses = [(name, means([e["loss"] for e in results])) for name, results in evals.items() if results]
    lengths = [e.get("trained_seq_len") for results in evals.values() for e in results]
    positions.draw(path, losses, lengths)


# ----------------------------------------------------------------------------
# main


def main():
    parser = argparse.ArgumentParser(description="compares training runs; see the top of this file")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders with log.jsonl")
    parser.add_argument("--eval", nargs="+", default=[], metavar="FILE.json", help="results of --eval")
    parser.add_argument("--maps", nargs="+", default=[], metavar="FILE.safetensors", help="files of --maps")
    parser.add_argument("--out", default="compare", metavar="PREFIX", help="of the pictures [compare]")
    parser.add_argument("--no-plots", action="store_true", help="only the tables")
    options = parser.parse_args()
    logs = [Log(path) for path in options.runs]
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
    print(*training_table(groups), sep="\n")
    if options.eval:
        print("", *eval_table(groups), "", sep="\n")
    for note in notes(runs, others):
        print(f"note: {note}")
    if options.no_plots:
        return
    import plots
    read_half_lives(logs, options.maps)
    for name, (panels, draw) in PICTURES.items():
        figure, [axes] = plots.panels(panels)
        draw(plots, axes, groups)
        if any(panel.lines for panel in axes):
            plots.save(figure, f"{options.out}_{name}.svg")
            print(f"{options.out}_{name}.svg")
    if options.eval:
        draw_eval(f"{options.out}_eval.svg", groups)
        print(f"{options.out}_eval.svg")


if __name__ == "__main__":
    run(main)
