#!/usr/bin/env python3
"""
Values of keys that are written several times; only the last one counts:

    scripts/eval/tasks/keys.py text        --init DIR --out text.json --picture text.svg
    scripts/eval/tasks/keys.py overwritten --init DIR --out overwritten.json --keys 16,32,64 --rewrites 0,1,2,4,8
    scripts/eval/tasks/keys.py mqar        --init DIR --out mqar.json --pairs 4,8,16,32,64 --lengths 512,4096

text         a stream of lines "key: word", --updates a key in random order, then a question for each of --keys keys
             (PI-LLM, arXiv 2506.08184). Words do not come twice. For models of text, any tokenizer.
overwritten  ids of models that are trained on them (../recall.py, which makes the samples): --keys keys, each
             overwritten --rewrites times
mqar         the same without overwriting: --pairs keys and values, each asked once

The first word or token that is generated (greedy) is the last value of the key (right), a value that it had before
(stale), or another; right and stale are printed in percent. A small model that answers wrong throughout still
shows logprob, that of the right answer, and margin, which is above the one of the newest stale value.

A sample is a stream with all its questions; errors are standard errors over samples. --out keeps every sample;
started again, the script computes only what is missing there.
"""
import itertools
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fox import Error, Tokenizer, package, run  # noqa: E402
from needle import NOUNS  # noqa: E402
from ruler_prompts import made_up_words  # noqa: E402
from samples import Samples, add_sample_options, finish, mean_and_error, numbers, task_parser  # noqa: E402

BEFORE = "Remember the last value of every key. In each line, a key gets a new value.\n\n"
MEASURES = {"right": "right, %", "stale": "stale, %", "logprob": "log p(right)", "margin": "log p(right) - log p(stale)"}
# a task: parts of a key before the number of the sample, with the options that have their values; a title
TASKS = {"text": (("keys", "updates"), ("keys", "updates"), "updates a key"),
         "overwritten": (("keys", "rewrites"), ("keys", "rewrites"), "rewrites a key"),
         "mqar": (("length", "pairs"), ("lengths", "pairs"), "pairs")}


def ask(key):
    return f"\nWhat is the last value of {key}? The last value of {key} is"


def stream(keys, updates, rng):
    """A text, and the values of each key, the oldest first."""
    names = rng.sample(NOUNS, keys)
    order = names * updates
    rng.shuffle(order)
    values = {name: [] for name in names}
    for name, word in zip(order, rng.sample(made_up_words(2 * len(order)), len(order))):
        values[name].append(word)
    count = dict.fromkeys(names, 0)
    lines = []
    for name in order:
        lines.append(f"{name}: {values[name][count[name]]}\n")
        count[name] += 1
    return BEFORE + "".join(lines), values


def questions_of_text(keys, updates, rng, tokenizer):
    """Yields (context, last value, stale values, the oldest first, all as ids, and the words) of a stream's keys."""
    text, values = stream(keys, updates, rng)
    before = tokenizer.encode(text)
    for name, words in values.items():
        *stale, right = (tokenizer.encode(f" {word}") for word in words)
        yield before + tokenizer.encode(ask(name)), right, stale, words


def questions_of_ids(ids, counts):
    """The same of a sample of recall.py, without words."""
    for t, right, stale in package("recall").questions(ids, counts):
        yield ids[:t].tolist(), [right], [[value] for value in stale], None


def sample_of(questions):
    """(requests, grade) of the questions of a stream: three requests each; two, if nothing is stale."""
    requests, asked = [], []
    for context, right, stale, words in questions:
        longest = max(map(len, [right, *stale]))
        asked.append((right, stale, words))
        requests.append({"type": "generate", "prompt": context, "max_tokens": longest, "temperature": 0, "until": []})
        requests += [{"type": "score", "context": context, "continuation": value} for value in [right, *stale[-1:]]]

    def grade(answers):
        rows, left = [], iter(answers)
        for right, stale, words in asked:
            said, logprob = next(left), next(left)["logprob"]
            if words:
                first = re.match(r"\W*(\w*)", said["text"])[1].lower()
                row = {"right": 100 * (first == words[-1]), "stale": 100 * (first in words[:-1])}
            else:
                row = {"right": 100 * (said["tokens"] == right), "stale": 100 * (said["tokens"] in stale)}
            rows.append({**row, "logprob": logprob} | ({"margin": logprob - next(left)["logprob"]} if stale else {}))
        return {name: mean_and_error([row[name] for row in rows])[0] for name in rows[0]}
    return requests, grade


class Maker:
    def __init__(self, options):
        self.options = options
        self.tokenizer = Tokenizer(options.init, options.json_escape) if options.task == "text" else None

    def longest(self):
        """Tokens of the longest sample, about."""
        if self.options.task != "text":
            return max(self.options.lengths)
        text, _ = stream(self.options.keys[-1], self.options.updates[-1], random.Random(0))
        return len(self.tokenizer.encode(text + 10 * ask(NOUNS[0])))

    def __call__(self, key):
        """(requests, grade) of a sample (series, x, number)."""
        task, (series, x, _) = self.options.task, key
        seed = f"{self.options.seed} {task} {key}"
        if task == "text":
            return sample_of(questions_of_text(series, x, random.Random(seed), self.tokenizer))
        recall = package("recall")
        rng = package("numpy").random.default_rng(list(seed.encode()))
        if task == "mqar":
            ids, counts = recall.mqar(rng, 1, series, (x, x))
        else:
            ids, counts = recall.overwritten(rng, 1, self.options.lengths[0], (series, series), (x, x))
        return sample_of(questions_of_ids(ids[0], counts[0]))


def parse():
    parser = task_parser(__doc__, TASKS)
    add = parser.add_argument
    add("--keys", type=numbers, metavar="A,B,...", help="of text (8) and overwritten (16,32,64)")
    add("--updates", type=numbers, default=numbers("3,6,12,25,50,100,200,400"), metavar="A,B,...",
        help="of text, a key (3,6,12,25,50,100,200,400)")
    add("--rewrites", type=numbers, default=numbers("0,1,2,4,8"), metavar="A,B,...",
        help="of overwritten, a key (0,1,2,4,8)")
    add("--pairs", type=numbers, default=numbers("4,8,16,32,64"), metavar="A,B,...", help="of mqar (4,8,16,32,64)")
    add("--lengths", type=numbers, default=None, metavar="A,B,...",
        help="tokens of mqar (512) and, one number, of overwritten (2048)")
    add_sample_options(parser, 32)
    options = parser.parse_args()
    options.keys = options.keys or ([8] if options.task == "text" else [16, 32, 64])
    options.lengths = options.lengths or ([512] if options.task == "mqar" else [2048])
    if options.task == "text" and options.keys[-1] > len(NOUNS):
        raise Error(f"--keys {options.keys[-1]}: of text there are {len(NOUNS)} at most")
    if options.task == "overwritten" and len(options.lengths) > 1:
        raise Error("--lengths: overwritten takes one; give another --out for each")
    if min(options.samples, *options.keys, *options.updates, *options.pairs) < 1:
        raise Error("--samples, --keys, --updates and --pairs: at least 1")
    return options


def main():
    options = parse()
    names, (series, x), title = TASKS[options.task]
    settings = {"task": options.task, "init": options.init, "seed": options.seed}
    if options.task == "text":
        settings["json_escape"] = options.json_escape
    elif options.task == "overwritten":
        settings["lengths"] = options.lengths
    samples = Samples(options.out, settings, (*names, "sample"))
    wanted = list(itertools.product(getattr(options, series), getattr(options, x), range(options.samples)))
    maker = Maker(options)
    samples.measure(options, wanted, maker, maker.longest(), ids=options.task != "text")
    finish(samples, options, wanted, MEASURES, title)


if __name__ == "__main__":
    run(main)
