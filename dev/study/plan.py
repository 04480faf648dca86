"""
What dev/study/runs.txt says, what has run, and what is next. Shared by run.py, collect.py and report.py.
"""
import collections
import json
import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from common import Error, read_json, write_file  # noqa: E402

Line = collections.namedtuple("Line", "name minutes measures options")  # options: of `every`, then its own
BEST = "best:"
ALL = "all", "needle"
TASK = "task:"
READ = "--model", "--lr", "--seed", "--seq-len"  # options that the study reads, too
RESULTS = HERE / "results.jsonl"  # a run a line, as thinned() has it, in the order of runs.txt
# what dev/study/corpus/corpus.py says of each
CORPORA = {"long": HERE / "corpus/corpus.json", "short": HERE / "corpus/short_corpus.json"}


def read_text(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Error(f"{path}: is not UTF-8")


def read_lines(path):
    """The runs, in order."""
    every, lines = [], []
    for number, text in enumerate(read_text(path).splitlines(), 1):
        words = text.split()
        if not words or words[0].startswith("#"):
            continue
        for word, value in zip(words, [*words[1:], "--"]):
            if word in READ and value.startswith("--"):
                raise Error(f"{path}: line {number}: {word} has no value")
        if words[0] == "every":
            every = words[1:]
            continue
        if words[0] in ("data", "test"):
            continue
        try:
            name, minutes, measures, options = words[0], float(words[1]), words[2], words[3:]
        except (IndexError, ValueError):
            raise Error(f"{path}: line {number}: not a name, minutes, measures and options")
        if measures not in ("all", "needle", "loss", "edge", "short") and not measures.startswith(TASK):
            raise Error(f"{path}: line {number}: {measures} is not all, needle, loss, edge, short or task:DATA")
        if any(line.name == name for line in lines):
            raise Error(f"{path}: line {number}: {name} occurs twice")
        line = Line(name, minutes, measures, every + options)
        if name.startswith("lr_") and not is_number(option(line, "--lr")):
            raise Error(f"{path}: line {number}: a run lr_GROUP_* needs --lr, a number")
        lines.append(line)
    return lines


def is_number(text):
    try:
        return text is not None and math.isfinite(float(text))
    except ValueError:
        return False


def read_sets(path, kind):
    """{name: options} of the lines `data NAME OPTIONS` or `test NAME OPTIONS`, in order."""
    rows = [text.split() for text in read_text(path).splitlines()]
    return {words[1]: words[2:] for words in rows if len(words) > 2 and words[0] == kind}


def all_of(line):
    """Is everything measured?"""
    return line.measures in ALL


def task_of(line):
    """The data that a run of a task is trained on; None: it is the corpus."""
    return line.measures.removeprefix(TASK) if line.measures.startswith(TASK) else None


def corpus_of(line):
    """The kind of corpus that a run is trained on, of CORPORA; None: a task's data."""
    return None if task_of(line) else "short" if line.measures == "short" else "long"


def tests_of(task, sets):
    """Those of read_sets that are named after a task: {TASK_NAME: options}."""
    return {name: options for name, options in sets.items() if name.startswith(f"{task}_")}


def read_results(*paths):
    """{name of a run: its JSON object}, of files NAME.json in folders, and of the lines of .jsonl files. A path that is not
    there has none. A run that diverged has {"name", "options", "diverged": what the trainer said} alone, and counts as the
    worst of its group."""
    results = {}
    for path in map(Path, paths):
        if path.suffix == ".jsonl" and path.exists():
            for number, text in enumerate(read_text(path).splitlines(), 1):
                try:
                    result = json.loads(text)
                    results[result["name"]] = result
                    if "validations" in result:
                        table = result["validations"]
                        result["validations"] = [dict(zip(table["names"], row)) for row in table["rows"]]
                except (ValueError, TypeError, KeyError):
                    raise Error(f"{path}: line {number}: not the result of a run")
        else:
            results.update((file.stem, read_json(file)) for file in sorted(path.glob("*.json")))
    return results


def add_results(path, folder, lines):
    """Takes the results of a folder into a .jsonl file, in the order of the lines, each in place of an older one of its name."""
    if not Path(folder).is_dir():
        raise Error(f"--add {folder}: not a folder")
    added = read_results(folder)
    for name, result in added.items():
        if not {"name", "options"} <= result.keys() or not {"corpus", "diverged"} & result.keys():
            raise Error(f"{Path(folder) / name}.json: not the result of a run")
    results, order = read_results(path, folder), {line.name: i for i, line in enumerate(lines)}
    if unknown := sorted(set(results) - set(order)):
        raise Error(f"{unknown[0]}: a result of no run of runs.txt")
    text = "".join(json.dumps(thinned(results[name]), separators=(",", ":")) + "\n" for name in sorted(results, key=order.get))
    write_file(path, text)
    return len(added)


def thinned(result):
    """A result as the file of all keeps it, with what report.py reads: validations packed and without octaves; the curve
    only of runs with an --eval of whole documents, losses by position and document only where all is measured."""
    kept = {name: value for name, value in result.items() if name != "curve" or "eval" in result}
    if "eval" in kept and kept["measures"] not in ALL:
        kept["eval"] = {name: value for name, value in kept["eval"].items() if name not in ("loss", "documents")}
    if "validations" in kept:
        kept["validations"] = packed([{name: value for name, value in row.items() if name != "by_octave"}
                                      for row in kept["validations"]])
    return kept


def packed(rows):
    """{"names", "rows"} of objects of which most have the same members: a third of the bytes."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {"names": names, "rows": [[row.get(name) for name in names] for row in rows]}


def unpacked(table):
    """The objects; members that are null are left out."""
    return [{name: value for name, value in zip(table["names"], row) if value is not None} for row in table["rows"]]


def option(line, name):
    """The last value of an option of a line; None: it is not there."""
    places = [i for i, word in enumerate(line.options) if word == name]
    return line.options[places[-1] + 1] if places else None


def rate_of(line):
    """The learning rate of a line, as tables name it."""
    return option(line, "--lr").replace(BEST, "best of ")


def check(line, result, lines, results):
    """Dies if a result is not that of the line: of other options, or of a learning rate that is not the best one."""
    rate, words = option(line, "--lr"), result["options"]
    places = [i for i, word in enumerate(line.options) if word.startswith(BEST)]
    want = [words[i] if i in places and i < len(words) else word for i, word in enumerate(line.options)]
    if words != want:
        other = next((pair for pair in zip(want, words) if pair[0] != pair[1]), ("all", "others"))
        raise Error(f"{line.name}: was not trained with the options of runs.txt: {other[1]} in place of {other[0]}")
    best = best_lr(rate.removeprefix(BEST), lines, results) if places else None
    if best and words[places[-1]] != best:
        raise Error(f"{line.name}: was trained at {words[places[-1]]}, and the best of {rate.removeprefix(BEST)} is {best}")


def loss_of(result):
    """The last validation loss; infinite of a run that diverged; None: it has not run."""
    return result and (math.inf if "diverged" in result else result["val_loss"])


def losses(group, lines, results):
    """[(learning rate, validation loss or None where it has not run, line)] of lr_GROUP_*, by learning rate."""
    mine = [line for line in lines if line.name.startswith(f"lr_{group}_")]
    rows = [(float(option(line, "--lr")), loss_of(results.get(line.name)), line) for line in mine]
    return sorted(rows, key=lambda row: row[0])


def wanted(group, lines, results):
    """The lines of lr_GROUP_* that are still to run, those of `edge` only where the best is beside them."""
    rows = losses(group, lines, results)
    missing = [line for _, loss, line in rows if loss is None and line.measures != "edge"]
    done = [i for i, (_, loss, _) in enumerate(rows) if loss is not None]
    if missing or not done:
        return missing
    best = min(done, key=lambda i: rows[i][1])
    return [rows[i][2] for i in (best - 1, best + 1) if 0 <= i < len(rows) and rows[i][1] is None]


def best_lr(group, lines, results):
    """The text of the best learning rate; None: not known yet."""
    rows = [(loss, line) for _, loss, line in losses(group, lines, results) if loss is not None and loss < math.inf]
    if not rows or wanted(group, lines, results):
        return None
    return option(min(rows, key=lambda row: row[0])[1], "--lr")


def resolve(line, lines, results):
    """The options of a run with its learning rate; None: it is not to run, or not yet."""
    rate = option(line, "--lr") or ""
    if line.measures == "edge":
        group = line.name.removeprefix("lr_").rpartition("_")[0]
        return line.options if line in wanted(group, lines, results) else None
    if not rate.startswith(BEST):
        return line.options
    best = best_lr(rate.removeprefix(BEST), lines, results)
    return best and [best if word == rate else word for word in line.options]
