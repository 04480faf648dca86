#!/usr/bin/env python3
"""
Makes training text in which needles are asked for, so that a model trained on it finds those of needle.py's
kinds `single` and `multi-key`:

    scripts/eval/needle_text.py --haystack essays/ --out text/ --documents 2000 --length 16000

A document is a piece of the haystack, --length characters long, with a needle and a question for each --every
characters. A needle and its question, which is answered, stand at two random places between sentences, so
their distance takes every value up to the whole document. Keys and numbers are random: nothing but the text
before says the answer. `data/text_to_shards --doc-len T` makes a training sequence of each document, so that
a needle and its question are in the same one.
"""
import random
import re

from fox import Error, Parser, counted, new_folder, run
from needle import ADJECTIVES, NOUNS, ask, random_pairs, read_text, state, text_files


def make_document(text, rng, needles):
    """The text with so many needles and, behind each, its question with the answer."""
    ends = [m.end() for m in re.finditer(r"\.(?=\s)", text)] or [len(text)]
    inserts = []
    for key, value in random_pairs(rng, needles).items():
        first, second = sorted(rng.random() for _ in range(2))
        inserts += [(first, f"{state(key)} {value}."), (second, f"{ask(key)} {value}.")]
    out, done = [], 0
    for place, sentence in sorted(inserts):
        at = ends[int(place * len(ends))]
        out += [text[done:at], f"\n{sentence}\n"]
        done = at
    return "".join(out) + text[done:]


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--haystack", required=True, metavar="DIR", help="folder of text")
    add("--out", required=True, metavar="DIR", help="new folder: a file a document")
    add("--documents", type=int, required=True, metavar="N")
    add("--length", type=int, required=True, metavar="N", help="characters of haystack a document")
    add("--every", type=int, default=1000, metavar="N", help="characters a needle (default 1000)")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.documents, options.length, options.every) < 1:
        raise Error("--documents, --length and --every must be at least 1")
    text = "".join(read_text(path) for path in text_files(options.haystack))
    if len(text) < options.length:
        raise Error(f"{options.haystack}: has {counted(len(text), 'character')}, fewer than --length")
    needles, keys = max(1, options.length // options.every), len(ADJECTIVES) * len(NOUNS)
    if needles > keys:
        raise Error(f"--length and --every: {counted(needles, 'needle')} a document, of {counted(keys, 'key')}")
    with new_folder(options.out) as out:
        for i in range(options.documents):
            rng = random.Random(f"{options.seed} {i}")
            begin = rng.randrange(len(text) - options.length + 1)
            piece = text[begin:begin + options.length]
            document = make_document(piece, rng, needles)
            (out / f"{i:06d}.txt").write_text(document, encoding="utf-8")


if __name__ == "__main__":
    run(main)
