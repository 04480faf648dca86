#!/usr/bin/env python3
"""
Recall for base models: no instruction, no generated answer; the right continuation is scored beside the others that the
context holds. All words are those of --text, a folder of the machine's own text.

    scripts/eval/tasks/lookup.py phonebook --init DIR --text /usr/share/doc/bash --out phonebook.json
    scripts/eval/tasks/lookup.py facts     --init DIR --text /usr/share/doc/bash --out facts.json --lengths 512,4096

phonebook  --entries lines "name name: 123-4567"; then two of them again, as examples, and the name of a third (as in
           arXiv 2402.01032). Others: the numbers of up to --others lines, the newest before the right one's among them.
facts      after BABILong (arXiv 2406.10149): facts, in the order of time, hidden in --lengths words of the text. With 1
           fact, --people people went to a place, and then to another; where is one of them? With 2, one took a thing, and
           went on: where is the thing? Others: all places but the right one, where the asked one was among them.

right: percent of samples in which the right continuation is likelier than all others, by chance 100 / (others + 1);
logprob: of the right one; margin: above the likeliest other, in nats. Errors are standard errors over samples. --out
keeps every sample; started again, the script computes only what is missing there.
"""
import itertools
import random
import re
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fox import Error, Tokenizer, counted, run  # noqa: E402
from needle import read_text, text_files  # noqa: E402
from samples import Samples, add_sample_options, finish, numbers, task_parser  # noqa: E402

MEASURES = {"right": "right is the likeliest, %", "logprob": "log p(right)", "margin": "log p(right) - log p(likeliest other)"}
EXAMPLES = 2  # lines of the phone book that come again before the question
# a task: parts of a key before the number of the sample, with the options that have their values; a title
Task = namedtuple("Task", "series x options title")
TASKS = {"phonebook": Task("others", "entries", ("others", "entries"), "entries"),
         "facts": Task("facts", "words", ("facts", "lengths"), "words of text")}


class Text:
    """The words of a folder of text: in order, and those that can be names."""

    def __init__(self, folder):
        self.folder = folder
        self.words = " ".join(map(read_text, text_files(folder))).split()
        self.names = sorted({w.lower() for w in self.words if re.fullmatch(r"[A-Za-z]{4,9}", w)})

    def draw(self, n, rng):
        """n words, none twice."""
        if n > len(self.names):
            raise Error(f"--text {self.folder}: has {counted(len(self.names), 'word')} of 4 to 9 letters, {n} are needed")
        return rng.sample(self.names, n)

    def piece(self, n, rng):
        """n words from a random place on, and again from the beginning."""
        begin = rng.randrange(len(self.words))
        return list(itertools.islice(itertools.cycle(self.words), begin, begin + n))


# ----------------------------------------------------------------------------
# the tasks: (context, right continuation, the others) of a sample


def phonebook(others, entries, text, rng):
    words = text.draw(2 * entries, rng)
    names = [f"{a.capitalize()} {b.capitalize()}" for a, b in zip(words[::2], words[1::2])]
    book = dict(zip(names, (f"{n // 10000}-{n % 10000:04d}" for n in rng.sample(range(2000000, 10000000), entries))))
    *examples, asked = rng.sample(names, EXAMPLES + 1)
    lines = [f"{name}: {number}\n" for name, number in book.items()]
    again = [f"{name}: {book[name]}\n" for name in examples]
    before = names[names.index(asked) - 1]  # of the first one the last
    rest = [name for name in names if name not in (asked, before)]
    shown = [before, *rng.sample(rest, min(others - 1, len(rest)))]
    return f"{''.join(lines)}\n{''.join(again)}{asked}:", f" {book[asked]}", [f" {book[name]}" for name in shown]


def facts(kind, length, people, text, rng):
    words = text.draw(4 * people, rng)
    names, things, places = [w.capitalize() for w in words[:people]], words[people:2 * people], words[2 * people:]
    told = [f"{name} went to the {place}." for name, place in zip(names, places)]
    if kind == 2:
        told += [f"{name} took the {thing}." for name, thing in zip(names, things)]
    told += [f"{name} went to the {place}." for name, place in zip(names, places[people:])]
    asked = rng.randrange(people)
    words = text.piece(length, rng)
    for place, fact in zip(sorted(rng.sample(range(length + 1), len(told)), reverse=True), reversed(told)):
        words[place:place] = [fact]
    subject = f"The {things[asked]}" if kind == 2 else names[asked]
    right = places[people + asked]
    return f"{' '.join(words)}\n{subject} is in the", f" {right}", [f" {place}" for place in places if place != right]


# ----------------------------------------------------------------------------


class Maker:
    def __init__(self, options):
        self.options, self.text = options, Text(options.text)
        self.tokenizer = Tokenizer(options.init, options.json_escape)

    def sample(self, key):
        task, (series, x, _) = self.options.task, key
        rng = random.Random(f"{self.options.seed} {task} {key}")
        if task == "phonebook":
            return phonebook(series, x, self.text, rng)
        return facts(series, x, self.options.people, self.text, rng)

    def __call__(self, key):
        """(requests, grade) of a sample (series, x, number)."""
        context, *choices = self.sample(key)
        right, others = choices
        ids = self.tokenizer.encode(context)
        requests = [{"type": "score", "context": ids, "continuation": self.tokenizer.encode(choice)}
                    for choice in (right, *others)]

        def grade(answers):
            first, *rest = (answer["logprob"] for answer in answers)
            return {"right": 100 * (first > max(rest)), "logprob": first, "margin": first - max(rest)}
        return requests, grade

    def longest(self, wanted):
        """Tokens of the longest sample, about."""
        context, *_ = self.sample(max(wanted, key=lambda key: key[1]))
        return len(self.tokenizer.encode(context)) * 5 // 4 + 64


def parse():
    parser = task_parser(__doc__, TASKS)
    add = parser.add_argument
    add("--text", required=True, metavar="DIR", help="folder of text whose words are used")
    add("--entries", type=numbers, default=numbers("8,16,32,64,128"), metavar="A,B,...",
        help="of phonebook, lines (8,16,32,64,128)")
    add("--others", type=numbers, default=[4], metavar="A,B,...", help="of phonebook, numbers beside the right one (4)")
    add("--lengths", type=numbers, default=numbers("256,1024,4096"), metavar="A,B,...",
        help="of facts, words of text (256,1024,4096)")
    add("--facts", type=numbers, default=[1, 2], metavar="A,B", help="of facts, how many an answer needs (1,2)")
    add("--people", type=int, default=3, metavar="N", help="of facts (3)")
    add_sample_options(parser, 64)
    options = parser.parse_args()
    if min(options.samples, options.people, *options.others) < 1 or options.lengths[0] < 5 * options.people:
        raise Error("--samples, --people and --others: at least 1; --lengths at least 5 times --people")
    if options.entries[0] < EXAMPLES + 2:
        raise Error(f"--entries: at least {EXAMPLES + 2}, of which {EXAMPLES} are examples")
    if not set(options.facts) <= {1, 2}:
        raise Error("--facts: 1 and 2")
    return options


def main():
    options = parse()
    task, settings = TASKS[options.task], ("init", "text", "people", "seed", "json_escape")
    samples = Samples(options.out, {"task": options.task} | {n: getattr(options, n) for n in settings},
                      (task.series, task.x, "sample"))
    values = (getattr(options, name) for name in task.options)
    wanted = list(itertools.product(*values, range(options.samples)))
    make = Maker(options)
    samples.measure(options, wanted, make, make.longest(wanted))
    finish(samples, options, wanted, MEASURES, task.title)


if __name__ == "__main__":
    run(main)
