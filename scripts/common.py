"""
What all scripts share: command lines, errors in one line, files, optional packages, the statistics of paired runs.
Standard library only.
"""
import argparse
import contextlib
import difflib
import errno
import importlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import statistics
import sys
import time
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READER_SECONDS = 5  # how long a pipe's reader may take to open it


class Error(Exception):
    """Bad input, or a program that failed. The message is one line."""


def error_line(text):
    """One line, whatever the names of files in it are."""
    return "error: " + re.sub(r"[\0-\x1f\x7f]", "?", str(text))


def run(main):
    """
    Runs main(): an Error becomes the line `error: ...` and exit code 1; Ctrl-C exit code 130. What cannot be printed is
    an error, after --help too.
    """
    try:
        if sys.stdout is None:
            raise Error("standard output is closed")
        try:
            main()
        except SystemExit as e:
            if e.code:
                raise
        flush_stdout()
    except Error as e:
        sys.exit(error_line(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout has gone
        drop_stdout()
        sys.exit(1)
    except OSError as e:
        sys.exit(error_line(f"{f'{e.filename}: ' if e.filename else ''}{e.strerror or e}"))


class Parser(argparse.ArgumentParser):
    """The command line of a script; doc is what its --help says. An error is one line and exit code 2."""

    def __init__(self, doc):
        super().__init__(description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args=None, namespace=None):
        """Looks for mistyped options before those that are missing."""
        for arg in sys.argv[1:] if args is None else args:
            if arg == "--":
                break
            name = arg.partition("=")[0]
            if re.fullmatch(r"-[^\d.\s]\S*", name) and name not in self._option_string_actions:
                near = self.nearest(name)
                self.error(f"{name}: no such option{f' (is {near} meant?)' if near else ''}; --help lists them")
        return super().parse_args(args, namespace)

    def nearest(self, name):
        """The option whose name is like this one, or begins so. None: there is none."""
        names = self._option_string_actions
        near = difflib.get_close_matches(name, names, 1, 0.8) or [n for n in names if n.startswith(name)]
        return near[0] if near else None

    def error(self, message):
        self.exit(2, f"error: {message}\n")


def drop_stdout():
    """What is still to be printed goes nowhere: it would fail again when Python ends, with a message of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_stdout():
    """Writes what was printed. An Error if it cannot be written, but for a reader who has gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        drop_stdout()
        raise Error(f"cannot write to standard output: {e.strerror}")


def pip_install(packages):
    """The command that installs packages: for this Python's environment, or a new one, as systems refuse plain pip."""
    if sys.prefix != sys.base_prefix:
        return f"pip install -c scripts/requirements.txt {packages}"
    return f"python3 -m venv build/python && build/python/bin/pip install -c scripts/requirements.txt {packages}; then " \
        "start the script with build/python/bin/python"


def package(name):
    """Imports an optional package. An Error if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        wanted = (e.name or name).partition(".")[0]
        raise Error(f"Python package {wanted} is missing: {pip_install(wanted)}")


def has_model(folder):
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (folder / "config.json").exists() and any((folder / name).exists() for name in weights)


def checkpoint(folder):
    """
    The folder of a model that a user names, as the trainer's --init takes it: of a run its newest checkpoint. One
    without a model is passed over with a warning.
    """
    steps = [path for path in Path(folder).glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    if not steps or (Path(folder) / "config.json").exists():
        return folder
    steps.sort(key=lambda path: int(path.name[5:]))
    while steps:
        path = steps.pop()
        if has_model(path):
            return str(path)
        if not steps:
            raise Error(f"{folder}: none of its checkpoints has config.json and model.safetensors")
        print(f"warning: {path}: has no config.json and model.safetensors; going back to the checkpoint before it",
              file=sys.stderr)


def as_in_training(tokenizer):
    """
    Makes a tokenizer of the tokenizers library encode a text as data shards have it, but for what
    add_special_tokens=False leaves out: text like "<|endoftext|>" as it is, all of it, and always in the same way.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


def read_json(path):
    """The JSON object in a file. An Error if it cannot be read or is something else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise Error(f"{path}: {e.strerror if isinstance(e, OSError) else f'not JSON: {e}'}")
    if not isinstance(value, dict):
        raise Error(f"{path}: not a JSON object")
    return value


class BadLine(Error):
    """A line of a log that no run writes."""


NUMBER, MAYBE = (int, float), (int, float, type(None))  # null: not finite
LOG_MEMBERS = {  # of the events that the scripts read
    "run": {"step": int, "num_steps": int, "ranks": int, "started": str, "version": str, "device": str,
            "flops_per_token": NUMBER, "options": dict, "config": dict},
    "step": {"step": int, "tokens": int, "loss": MAYBE, "ms": NUMBER, "tokens_per_s": MAYBE},
    "validation": {"step": int, "val_loss": MAYBE, "ms": NUMBER, "by_position": list},
    "evaluation": {"step": int, "ms": NUMBER},
    "checkpoint": {"step": int},
}
LOG_OBJECTS = ("perplexity_by_length", "requests", "val_loss_of")  # where there are any
LOG_ITEMS = {"by_position": dict, "pruned_by_layer": MAYBE, "set": str}  # of lists
POSITION_MEMBERS = {"from": NUMBER, "to": NUMBER, "loss": MAYBE}


def bad_member(values, members):
    """The first of the members that is missing or of another type; None: all are as they should be."""
    for name, kind in members.items():
        if name not in values or not isinstance(values[name], kind) or isinstance(values[name], bool):
            return name
    for name in LOG_OBJECTS:
        if name in values and not isinstance(values[name], dict):
            return name
    for name, kind in LOG_ITEMS.items():
        if name in values and not (isinstance(values[name], list)
                                   and all(isinstance(item, kind) for item in values[name])):
            return name
    return None


def log_line(path, number, text):
    """The object of a line of log.jsonl, bytes. None: a process was killed while it wrote it. Else a BadLine."""
    try:
        line = json.loads(text.decode("utf-8"), parse_int=lambda digits: int(digits) if len(digits) < 20 else math.inf)
    except UnicodeDecodeError as e:
        if e.reason == "unexpected end of data":
            return None
        raise BadLine(f"{path}: line {number}: not UTF-8")
    except ValueError:
        return None
    except RecursionError:
        raise BadLine(f"{path}: line {number}: nested too deeply")
    if not isinstance(line, dict):
        raise BadLine(f"{path}: line {number}: not a JSON object")
    event = line.get("event")
    if not isinstance(event, str):
        raise BadLine(f"{path}: line {number}: 'event' is missing or not of the kind that a run writes")
    bad = bad_member(line, LOG_MEMBERS.get(event, {}))
    if event == "run":
        bad = bad or bad_member(line["options"], {"seed": int} if "seed" in line["options"] else {})
    for row in line.get("by_position", []) if not bad else []:
        bad = bad or bad_member(row, POSITION_MEMBERS)
    if bad:
        raise BadLine(f"{path}: line {number}: '{bad}' is missing or not of the kind that a run writes")
    return line


def replaced_file(path):
    """The regular file, behind all links, that write_file replaces. None: it writes straight to what is there, a pipe,
    a terminal, a device, or whatever standard output or error goes to. An Error if it does neither."""
    if not os.fspath(path):
        raise Error("a file to write has an empty name")
    try:
        found = os.stat(path)
    except OSError:
        if os.path.islink(path):
            raise Error(f"{path}: is a link to a file that cannot be found: remove it, or make the file")
        return os.fspath(path)
    if standard_stream(found) or stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise Error(f"{path}: exists and is not a regular file")
    if not os.access(path, os.W_OK):
        raise Error(f"{path}: cannot write: {os.strerror(errno.EACCES)}")
    return os.path.realpath(path)


def standard_stream(found):
    """The descriptor of standard output or error if it is this file; else None. /dev/stdout is one."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(fd)):
                return fd


def create_beside(file):
    """(descriptor, name) of a new file in the same folder, with the permissions of the one that it replaces."""
    for i in itertools.count():
        new = os.path.join(os.path.dirname(file), f".result-{os.getpid()}-{i}.tmp")
        with contextlib.suppress(FileExistsError):
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(os.stat(file).st_mode))
            return fd, new


def open_straight(path):
    """A descriptor of what write_file writes straight. A pipe's reader may take seconds to open it."""
    fd = standard_stream(os.stat(path))
    if fd:
        sys.stdout.flush()
        return os.dup(fd)
    until = time.monotonic() + READER_SECONDS
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.set_blocking(fd, True)
            return fd
        except OSError as e:
            if e.errno != errno.ENXIO or time.monotonic() > until:
                raise
            time.sleep(0.01)


def check_writable(path):
    """An Error unless write_file can write there, before time is spent on what it is to write."""
    file = replaced_file(path)
    if file is None:
        return
    try:
        fd, new = create_beside(file)
    except OSError as e:
        raise Error(f"{path}: cannot write: {e.strerror}")
    os.close(fd)
    os.remove(new)


def write_file(path, data):
    """Writes text or bytes. Replaces a regular file, or one that a link leads to, as a whole, or leaves it as it was;
    of several programs that write the same one, the last counts. Writes straight to a pipe or a device."""
    data = data.encode() if isinstance(data, str) else data
    file, new = replaced_file(path), None
    try:
        fd, new = create_beside(file) if file else (open_straight(path), None)
        with open(fd, "wb") as f:
            f.write(data)
            f.flush()
            if new:
                os.fsync(fd)
        if new:
            os.replace(new, file)
    except OSError as e:
        why = "no program reads this pipe" if e.errno == errno.ENXIO else e.strerror
        raise Error(f"{path}: cannot write: {why}")
    finally:
        if new:
            with contextlib.suppress(FileNotFoundError):
                os.remove(new)


@contextlib.contextmanager
def new_folder(path):
    """A folder to fill, which gets its name when it is complete. An error leaves nothing of it."""
    path = Path(path)
    if os.path.lexists(path):
        raise Error(f"{path}: exists already")
    part = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(path)
    except OSError as e:
        of = f"{e.filename}: " if e.filename else ""  # perhaps a file that it is filled from
        raise Error(f"{path}: cannot write: {of}{e.strerror}")
    finally:
        shutil.rmtree(part, ignore_errors=True)


def counted(n, noun):
    """1 token, 2 tokens: a count with its noun, whose last word is in the plural unless n is 1."""
    if n == 1:
        return f"1 {noun}"
    if re.search("[^aeiou]y$", noun):
        return f"{n} {noun[:-1]}ies"
    return f"{n} {noun}{'es' if re.search('(s|x|[cs]h)$', noun) else 's'}"


def counted_range(least, most, noun):
    """2 keys, 1 to 2 keys"""
    return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"


def named_files(arguments):
    """[(name, path)] of arguments NAME=PATH, or PATH, which is its own name."""
    pairs = [a.split("=", 1) if "=" in a else (a, a) for a in arguments]
    return [(name, Path(path)) for name, path in pairs]


# What was measured of n pairs: mean difference, its standard error, half the width of the mean's 95% interval, p of
# the two-sided paired t-test. None: not known from so few pairs
Paired = namedtuple("Paired", "mean error n half_width p")
MIN_PAIRS = 3  # nothing is claimed from fewer


def paired(differences):
    """The Paired of n differences of pairs. error needs two of them, half_width and p need MIN_PAIRS."""
    n = len(differences)
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    if n < MIN_PAIRS:
        return Paired(mean, error, n, None, None)
    if error:
        p = t_tail(mean / error, n - 1)
    else:
        p = 0 if mean else 1
    return Paired(mean, error, n, t_quantile(n - 1) * error, p)


def t_tail(t, degrees):
    """The probability that |Student's t| is larger than |t|: Abramowitz and Stegun 26.7.3 and 26.7.4, finite sums."""
    angle = math.atan2(abs(t), math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1
    total = 0
    for i in range(odd + 1, degrees, 2):
        total += term
        term *= cosine**2 * i / (i + 1)
    within = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return max(0, 1 - within)


def t_quantile(degrees, confidence=0.95):
    """The t that |Student's t| is below with this probability."""
    low, high = 0, 1
    while t_tail(high, degrees) > 1 - confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - confidence else (low, middle)
    return high


def attention_layers(config, count):
    """Numbers in the model of its layers with attention; of layers of one kind there are `count`."""
    types = config.get("layer_types")
    return [i for i, kind in enumerate(types) if kind.startswith("attention")] if types else list(range(count))
