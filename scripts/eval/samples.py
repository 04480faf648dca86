"""
Samples of a task: what needle.py and the scripts of tasks/ share. A sample has a key, such as (task, length,
number), some requests, and a grade, which makes a result, {measure: value}, of their answers.

A file keeps every sample. What is there is not asked again, so a measurement that was cut off goes on.
"""
import json
import sys
import time
from pathlib import Path

from fox import Error, Parser, Trainer, add_model_options, check_writable, counted, read_json, recorded_option, write_file

CHUNK = 1 << 22  # tokens of requests in memory, about
LONGEST = 1 << 16  # tokens that the trainer takes in a request without --seq-len
SAVE_EVERY = 2  # seconds
SAY_EVERY = 60  # seconds between lines of progress, where no terminal shows it
MODEL = ("init", "trainer", "vocab", "json_escape", "seq_len", "workers")  # options of add_model_options


def mean_and_error(values):
    """The mean and its standard error; None for one value."""
    mean = sum(values) / len(values)
    squares = sum((v - mean)**2 for v in values)
    return mean, (squares / (len(values) - 1) / len(values))**0.5 if len(values) > 1 else None


def mean_text(mean, error, digits=2):
    return f"{mean:.{digits}f}" + (f" +- {error:.{digits}f}" if error is not None else "")


class Samples:
    """results: {key: result}, of a file {**settings, member: [{name: part of the key, **result}]}."""

    def __init__(self, path, settings, names, member="samples"):
        self.path, self.settings, self.names, self.member = path, settings, names, member
        self.results, self.saved, self.said = {}, 0, -SAY_EVERY
        check_writable(path)
        if not Path(path).exists():
            return
        if not Path(path).is_file():
            raise Error(f"{path}: is not a regular file: --out keeps every sample")
        found = read_json(path)
        for name, value in settings.items():
            if found.get(name) != value:
                option = name.replace("_", "-")
                raise Error(f"{path}: was made with --{option} {found.get(name)}; give another --out")
        try:
            self.results = {tuple(s.pop(name) for name in names): s for s in found[member]}
        except (KeyError, TypeError, AttributeError):
            raise Error(f"{path}: not a file of samples by {', '.join(names)}")

    def save(self, **more):
        rows = [dict(zip(self.names, key), **result) for key, result in sorted(self.results.items())]
        write_file(self.path, json.dumps({**self.settings, **more, self.member: rows}, indent=0))
        self.saved = time.monotonic()

    def measure(self, options, wanted, make, longest=0, ids=False):
        """
        Computes what is missing of the wanted keys. make(key) returns (requests, grade), and grade(answers)
        the result. longest: tokens of a request; ids: answers need no text.
        """
        missing = [key for key in wanted if key not in self.results]
        if not missing:
            return
        if getattr(options, "picture", None):
            import plots
            plots.check(options.picture)
        self._say(missing)
        model = {name: getattr(options, name) for name in MODEL} | {"ids": ids}
        if longest > max(LONGEST, options.seq_len or 0):
            model["seq_len"] = longest
        trainer, chunk, tokens = Trainer(**model), [], 0
        try:
            for key in missing:
                requests, grade = make(key)
                chunk.append((key, requests, grade))
                tokens += sum(len(part) for r in requests for part in r.values() if isinstance(part, list))
                if tokens >= CHUNK or key == missing[-1]:
                    self._ask(trainer, chunk, missing)
                    chunk, tokens = [], 0
        finally:
            if self.results:
                self.save()

    def _ask(self, trainer, chunk, missing):
        places = [(k, i) for k, (_, requests, _) in enumerate(chunk) for i in range(len(requests))]
        answers = [{} for _ in chunk]
        for number, answer in trainer.answers([chunk[k][1][i] for k, i in places]):
            k, i = places[number]
            answers[k][i] = answer
            key, requests, grade = chunk[k]
            if len(answers[k]) < len(requests):
                continue
            self.results[key] = grade([answers[k][i] for i in range(len(requests))])
            if time.monotonic() - self.saved > SAVE_EVERY:
                self.save()
            self._say(missing)

    def _say(self, missing):
        """Progress, from the first moment on: a sample may take minutes."""
        text = f"{sum(key in self.results for key in missing)}/{counted(len(missing), 'sample')}"
        if sys.stderr.isatty():
            print(f"\r{text} ", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.said >= SAY_EVERY:
            print(text, file=sys.stderr, flush=True)
            self.said = time.monotonic()


# ----------------------------------------------------------------------------
# results of samples whose key is (series, x, number)


def means(results, measures):
    """{(series, x): {measure: (mean, standard error, samples)}} of the results that have the measure."""
    points = {}
    for (series, x, _), result in results.items():
        for name in measures:
            if name in result:
                points.setdefault((series, x), {}).setdefault(name, []).append(result[name])
    return {point: {name: (*mean_and_error(values), len(values)) for name, values in measured.items()}
            for point, measured in points.items()}


def rows_of(points, names):
    """The same as a list for a file: [{series, x, samples, measure, measure_error, ...}]."""
    rows = []
    for point, measured in points.items():
        row = dict(zip(names, point), samples=max(n for _, _, n in measured.values()))
        for name, (mean, error, _) in measured.items():
            row |= {name: mean, f"{name}_error": error}
        rows.append(row)
    return rows


def print_means(points, measures, corner):
    """A table of each measure: a row a series, a column for each x, mean +- standard error."""
    columns = sorted({at for _, at in points})
    width = max(len(corner), *(len(str(series)) for series, _ in points))
    for name, title in measures.items():
        found = {point: measured[name] for point, measured in points.items() if name in measured}
        if not found:
            continue
        print(f"\n{title}\n{corner:{width}s}" + "".join(f"{at:>18}" for at in columns))
        for series in dict.fromkeys(series for series, _ in found):
            cells = (found.get((series, at)) for at in columns)
            texts = (mean_text(*c[:2]) if c else "" for c in cells)
            print(f"{series!s:{width}s}" + "".join(f"{text:>18}" for text in texts))


def draw(path, points, measures, names, x, mark=None):
    """A panel a measure, a line a series, bands of one standard error; x on a logarithmic axis, or, from 0, on a
    linear one. names: of series and x; mark: a place of x to mark."""
    import plots
    order = {series: k for k, series in enumerate(dict.fromkeys(series for series, _ in points))}
    drawn = [name for name in measures if any(name in measured for measured in points.values())]
    figure, [panels] = plots.panels(len(drawn))
    for axes, name in zip(panels, drawn):
        for series, k in order.items():
            line = sorted((at, *m[name]) for (of, at), m in points.items() if of == series and name in m)
            if line:
                at, mean, error, _ = map(list, zip(*line))
                band = [m - (e or 0) for m, e in zip(mean, error)], [m + (e or 0) for m, e in zip(mean, error)]
                label = series if isinstance(series, str) else f"{names[0]} {series}"
                plots.curve(axes, at, mean, k, label, band, curves=len(order))
                plots.dots(axes, at, mean, k)
        axes.set(xlabel=x, ylabel=measures[name])
        if measures[name].endswith("%"):
            axes.set_ylim(-3, 103)
        values = sorted({at for _, at in points})
        if values[0] > 0 and len(values) > 1:
            plots.log_scale(axes, "x", 2 if values[0] > 9 else 10)
            if len(values) < 8:
                plots.set_ticks(axes.xaxis, values)
        if mark and values[0] < mark < values[-1]:
            plots.mark(axes, mark)
    plots.caption(panels[0], "bands: one standard error" + (f"; training length {mark}" if mark else ""))
    plots.save(figure, path)


def finish(samples, options, wanted, measures, x, mark=None):
    """Writes means, prints them, draws. measures: {name: title}; x: what the second part of a key is, in words;
    mark: a place of it that the picture marks."""
    points = means({key: samples.results[key] for key in wanted}, measures)
    samples.save(means=rows_of(points, samples.names[:2]))
    print_means(points, measures, f"{samples.names[0]} \\ {x}")
    if options.picture:
        draw(options.picture, points, measures, samples.names, x, mark)


def numbers(text):
    """Rising integers, at least one: `A:B:STEP`, B included, or `A,B,...`."""
    if ":" in text:
        first, last, step = map(int, text.split(":"))
        if first > last or step < 1:
            raise ValueError
        return list(range(first, last + 1, step))
    return sorted(set(map(int, text.split(","))))


def task_parser(doc, tasks):
    """The command line TASK --init DIR .. of a script that has several tasks; doc is its --help."""
    parser = Parser(doc)
    parser.add_argument("task", choices=tasks)
    add_model_options(parser)
    return parser


def add_sample_options(parser, samples):
    """Adds --samples, --seed, --out, --picture."""
    add = parser.add_argument
    add("--samples", type=int, default=samples, metavar="N", help=f"a point (default {samples})")
    add("--seed", type=int, default=0)
    add("--out", required=True, metavar="FILE.json", help="results; what is missing there is computed")
    add("--picture", metavar="FILE.svg", help="measures with their standard errors")


def training_length(options):
    return getattr(options, "train_length", None) or recorded_option(options.init, "seq-len")
