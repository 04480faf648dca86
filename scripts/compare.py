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
import bisect
import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path

from common import MIN_PAIRS, NUMBER, BadLine, Error, Parser, attention_layers, log_line, package, paired, run

sys.path.append(str(Path(__file__).parent / "eval"))
import positions  # noqa: E402
from positions import means  # noqa: E402

# Options that do not change what is learnt.
SILENT = set("""seed save-every keep log-every val-every eval-every eval-requests sample-every vocab generate
    prompt temperature top-k top-p min-p samples stop recompute""".split())
# Those of the others that a resumed run may change and is still the same run; data as long as its
# fingerprint is the same.
FREE = set("data val-data val-tokens micro-batch deterministic attention".split())


# ----------------------------------------------------------------------------
# logs


class Log:
    """
    A log. steps, validations: [line] in order, without those that a resumed run did again; each has "hours"
    since the start. gpu_hours: all that was spent. eval: the result of --eval, or None. half_lives:
    [layer][head], no heads of layers without gates. damaged: the BadLine where reading stopped, an Error where there is no log, or None.
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
        """What decides the outcome, but for the seed: options with those of --set, and config and data."""
        first, last = self.runs[0]["options"], self.last["options"]
        options = {k: first.get(k) if k in FREE else v for k, v in self.start["options"].items()
                   if k not in SILENT}
        options.update({k: v for k, v in last.items() if k in ("val-data", "val-tokens")})
        options.update(self.changes(free=False))
        options.update(item.partition("=")[::2] for item in options.pop("set", []))
        config = {"config." + k: v for k, v in self.start["config"].items()}
        if isinstance(config.get("config.layer_types"), list):
            config["config.layer_types"] = pattern(config["config.layer_types"])
        return options, {**config, "data_fingerprint": self.start.get("data_fingerprint")}

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

    def moved(self):
        """Whether a gate's half-life is 10% from its initial one."""
        initial = initial_half_lives(self.start["config"])
        if initial is None or self.start["options"].get("init"):  # the weights of another run
            return True
        return any(not start / 1.1 <= life <= start * 1.1
                   for layer in self.half_lives for start, life in zip(initial, layer))

    def read_gates(self):
        """Half-lives by the gates' biases in the newest checkpoint. False: it has none."""
        if self.start["config"].get("fgate_type", "none") == "none":
            return False
        name = f"fgate_{'proj.' if self.start['config']['fgate_type'] == 'full' else ''}bias"
        layers = self.start["config"].get("num_hidden_layers")
        gated = attention_layers(self.start["config"], layers if isinstance(layers, int) else 0)
        for path in sorted(self.folder.glob("step_*/model.safetensors"))[-1:]:
            biases, _ = read_tensors(path, [f"model.layers.{i}.attn.{name}" for i in gated])
            self.half_lives = by_layer(gated, [[half_life(bias) for bias in layer] for layer in biases])
        return self.half_lives is not None


def by_layer(numbers, rows):
    """[layer][head] of the rows of some layers, whose numbers rise; the others have no heads."""
    found = dict(zip(numbers, rows))
    return [found.get(layer, []) for layer in range(max(numbers, default=-1) + 1)]


def pattern(kinds):
    """The shortest pattern of layers that repeats, as --set layer_types has it."""
    length = next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    runs = [(kind, len(list(layers))) for kind, layers in itertools.groupby(kinds[:length])]
    return ",".join(kind + (f"*{count}" if count > 1 else "") for kind, count in runs)


def half_life(bias):
    """-ln 2 / log f of a gate f = sigmoid(bias), tokens."""
    decay = max(-bias, 0) + math.log1p(math.exp(-abs(bias)))
    return math.log(2) / decay if decay else math.inf


def initial_half_lives(config):
    """Half-lives of a layer's heads, from the biases that training starts with (config/config.h). None: unknown."""
    heads, first, last = (config.get(key) for key in ("num_heads", "decay_time_min", "decay_time_max"))
    if not isinstance(heads, int):
        return None
    if not config.get("fgate_bias_init"):
        return [half_life(0)] * heads
    if not all(isinstance(time, (int, float)) and time > 0 for time in (first, last)):
        return None
    return [math.log(2) * first * (last / first)**(i / max(1, heads - 1)) for i in range(heads)]


def differing(dictionaries):
    """Keys whose values are not the same in all, in the order of the first."""
    keys = list(dict.fromkeys(key for d in dictionaries for key in d))
    return [key for key in keys if len({json.dumps(d.get(key)) for d in dictionaries}) > 1]


def all_settings(runs):
    """
    (settings, given, derived). A run's settings are one dictionary, with false for switches that it lacks; `given` are the
    keys that it was given, others being its model's own; `derived` are the keys that options do not have, of all runs.
    """
    options, configs = zip(*(run.settings() for run in runs))
    partial = {key for key in ("recipe", "data_fingerprint")  # options and config have what a recipe decides
               if any({**o, **c}.get(key) is None for o, c in zip(options, configs))}
    named = {key for o in options for key in o if any("config." + key in c for c in configs)}  # by --set
    settings = []
    for o, c in zip(options, configs):
        values = {**o, **{key: c.pop("config." + key) for key in named if "config." + key in c}, **c}
        settings.append({key: value for key, value in values.items() if key not in partial})
    absent = {key: False for values in settings for key, value in values.items() if isinstance(value, bool)}
    settings = [{**values, **{key: absent[key] for key in absent if key not in values}} for values in settings]
    derived = {key for c in configs for key in c}
    given = [{key for key in values if key in o or key not in named} for o, values in zip(options, settings)]
    return settings, given, derived


def group(runs):
    """{name: runs} by what differs, and {name: what else differs}."""
    settings, given, derived = all_settings(runs)
    kind = lambda values, keys: json.dumps([values.get(key) for key in keys])
    kinds = lambda keys: len({kind(values, keys) for values in settings})
    keys = sorted(differing(settings), key=lambda key: key in derived)  # options first
    # what follows from a model's name, and from that of its data, goes without saying
    keys = [key for key in keys
            if key not in derived or kinds(["model", "data", key]) > kinds(["model", "data"])]
    telling = []  # the first keys that tell the groups apart
    for key in keys:
        telling += [key] if kinds(telling + [key]) > kinds(telling) else []

    def text(values, keys):
        shown = {key: values[key] for key in keys if values.get(key) is not None}
        names = {key: "" if key == "model" else key.removeprefix("config.") + " " for key in shown}
        return ", ".join(names[key] + (json.dumps(value) if isinstance(value, bool) else str(value))
                         for key, value in shown.items())

    said = {}  # of each group the keys that one of its runs was given
    for values, of in zip(settings, given):
        said.setdefault(kind(values, telling), set()).update(of)
    names = {kind(values, telling): text(values, [key for key in telling if key in said[kind(values, telling)]])
             for values in settings}
    if len(set(names.values())) < len(names):  # values that no run was given tell two of them apart
        names = {kind(values, telling): text(values, telling) for values in settings}
    groups, others = {}, {}
    for run, values, of in zip(runs, settings, given):
        name = names[kind(values, telling)] or ("default" if keys else values.get("model") or "all")
        groups.setdefault(name, []).append(run)
        others[name] = text(values, [key for key in keys if key not in telling and key in of])
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
        (half_lives, layers), metadata = read_tensors(path, ["half_life", "layers"])
        owner(runs, path, metadata.get("checkpoint")).half_lives = by_layer(layers, half_lives)
    by_bias = False
    try:
        for run in runs:
            if run.half_lives is None and not run.damaged and run.read_gates() and run.moved():
                by_bias = True
    except Error as e:
        print(f"note: no half-lives of checkpoints: {e}")
    if by_bias:
        print("note: half-lives without --maps are those of the gates' biases, where the input adds nothing")
    still = [run for run in runs if run.half_lives is not None and not run.damaged and not run.moved()]
    for run in still:
        run.half_lives = None
    if still:
        print(f"note: no picture of the half-lives of {len(still)} run{'s' * (len(still) > 1)}: within 10% "
              "of where the gates started")


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
    hours = "rank-hours" if any(r.start["device"] == "CPU" for runs in groups.values() for r in runs) else "GPU-hours"
    titles = ("run", "seeds", "tokens", "held-out loss", "deviation", "tokens/s", hours, "of all seeds")
    return markdown(titles, [row[1:] for row in sorted(rows)])


def part_table(groups):
    """The held-out loss of each part of --val-data at the end, where it has several."""
    losses = {name: [run.validations[-1]["val_loss_of"] for run in runs
                     if run.validation_loss() is not None and "val_loss_of" in run.validations[-1]]
              for name, runs in groups.items()}
    parts = sorted({part for of_seeds in losses.values() for of_seed in of_seeds for part in of_seed})
    cell = lambda of_seeds, part: " ± ".join(spread([of_seed.get(part) for of_seed in of_seeds], 4))
    rows = [(name, str(len(of_seeds)), *(cell(of_seeds, part).removesuffix(" ± -") for part in parts))
            for name, of_seeds in losses.items() if of_seeds]
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
    tables = [table for table in (training_table(groups), part_table(groups)) if table]
    best, pairs = pair_differences(groups)
    if max(map(len, pairs.values()), default=0) > 1:
        tables.append(pair_table(best, pairs))
    if options.eval:
        tables.append(eval_table(groups))
    for table in tables:
        print(*table, *[""] * (len(tables) > 1), sep="\n")
    if min(map(len, pairs.values()), default=MIN_PAIRS) < MIN_PAIRS:
        print(f"note: nothing is claimed from {MIN_PAIRS - 1} pairs of a seed or fewer: they have no interval")
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
