"""
Training runs as ../compare.py reads them: logs and their settings, which of them are one group, and what --eval and --maps
measured of them.
"""
import bisect
import itertools
import json
import math
import os
import sys
from pathlib import Path

import positions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BadLine, Error, attention_layers, log_line, package  # noqa: E402

# Options that do not change what is learnt.
SILENT = set("""seed save-every keep log-every val-every eval-every eval-requests sample-every vocab generate
    prompt temperature top-k top-p min-p samples stop recompute""".split())
# Those of the others that a resumed run may change and is still the same run; data as long as its
# fingerprint is the same.
FREE = set("data val-data val-tokens micro-batch deterministic attention".split())


class Log:
    """
    A log, read from `file`. steps, validations: [line] in order, without those that a resumed run did again; each has
    "hours" since the start. gpu_hours: all that was spent. eval: the result of --eval, or None. half_lives:
    [layer][head], no heads of layers without gates. damaged: the BadLine where reading stopped, an Error where there
    is no log, or None.
    """

    def __init__(self, path):
        self.path, self.folder = path, Path(path if os.path.isdir(path) else os.path.dirname(path)).resolve()
        self.start = self.last = None  # the last "run" lines that a step follows, and of all
        self.runs = []  # those that counted steps follow
        self.steps, self.validations, self.gpu_hours = [], [], 0
        self.eval = self.half_lives = self.damaged = None
        self.file = file = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
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
