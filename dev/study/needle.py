#!/usr/bin/env python3
"""
Needles among distractors, in ids of the study's corpus (GPT-2's), which need no tokenizer:

    dev/study/needle.py data  --data 'data/study_train_000000.bin' --out WORK/needle
    dev/study/needle.py score --init WORK/needle_run/step_00000256 --data 'data/study_val_*.bin' --out needle.json

A pair is "\\nThe special magic number for KEY is VALUE.", KEY two and VALUE three random ids out of those that occur in
the data. The question is the same text up to VALUE.

data    documents of --length tokens of text, every other one with --pairs pairs and, somewhere behind each, its question
        with the answer; all tokens are targets
score   the text has the pair that is asked for --gaps tokens before the question, and so many other pairs
        (--distractors) at random places before and behind it. right: percent of answers that are the likeliest
        throughout; logprob: of the answer. --out keeps every sample, as those of scripts/eval/tasks do
"""
import argparse
import array
import itertools
import random
import sys

from plan import ROOT

sys.path[:0] = [str(ROOT / "scripts/eval"), str(ROOT / "scripts/eval/tasks")]
from fox import Error, Parser, add_model_options, run  # noqa: E402
from make_shards import Writer  # noqa: E402
from samples import Samples, add_sample_options, finish, numbers  # noqa: E402
from zero_shot import HeldOut, scored  # noqa: E402

END = 50256
MEASURES = {"right": "right, %", "logprob": "log p(right)"}
KEY, VALUE = 2, 3  # ids
SEEN = 1 << 20  # ids of the data of which keys and values are drawn


class Text(HeldOut):
    """Pieces of text with pairs in them."""

    def __init__(self, options):
        super().__init__(options.data)
        self.before, self.between, self.behind = options.words
        self.ids = sorted(set(self.shards[0][0][:SEEN].tolist()))

    def pairs(self, rng, n):
        """n (question, answer, end) with different keys."""
        found = {}
        while len(found) < n:
            found[tuple(rng.choices(self.ids, k=KEY))] = rng.choices(self.ids, k=VALUE)
        return [([*self.before, *key, *self.between], value, self.behind) for key, value in found.items()]

    def tokens_of_pair(self):
        return sum(map(len, (self.before, self.between, self.behind))) + KEY + VALUE

    def with_inserts(self, inserts, n, rng):
        """n tokens, of which `inserts` are [(place of 0 to 1 in the text, ids)]."""
        text = self.piece(n - sum(len(ids) for _, ids in inserts), rng)
        out, done = [], 0
        for place, ids in sorted(inserts):
            at = round(place * len(text))
            out += text[done:at] + ids
            done = at
        return out + text[done:]

    def document(self, rng, n, pairs):
        """A training document."""
        inserts = []
        for parts in self.pairs(rng, pairs):
            ids = [*itertools.chain(*parts)]
            inserts += [(place, ids) for place in (rng.random(), rng.random())]
        return self.with_inserts(inserts, n, rng)

    def sample(self, rng, distractors, gap):
        """(context, answer): gap tokens from the pair to the question; as many in front of it, at most 1,024."""
        (question, answer, end), *others = self.pairs(rng, 1 + distractors)
        others = [(rng.random(), [*itertools.chain(*parts)]) for parts in others]
        front = min(1024, gap)
        share = front / (front + gap)
        halves = [[((place - low) / width, ids) for place, ids in others if low <= place < low + width]
                  for low, width in ((0, share), (share, 1 - share))]
        first, second = (self.with_inserts(half, max(n, sum(len(ids) for _, ids in half) + 1), rng)
                         for half, n in zip(halves, (front, gap)))
        return [*first, *question, *answer, *end, *second, *question], answer


def write(options):
    text, complete = Text(options), False
    settings = argparse.Namespace(out=options.out, tokenizer=None, vocab_size=END + 1, end_of_text=END,
                                  doc_len=options.length, shard_tokens=256 << 20)
    if options.vocab_size:
        settings.vocab_size, settings.end_of_text = options.vocab_size, options.vocab_size - 1
    writer = Writer(settings)
    try:
        for i in range(options.documents):
            rng = random.Random(f"{options.seed} {i}")
            ids = text.document(rng, options.length, options.pairs * (i % 2))
            writer.write(2, array.array("I", ids))
        complete = True
    finally:
        writer.close(complete)


def score(options):
    text, names = Text(options), ("distractors", "gap")
    settings = {name: getattr(options, name) for name in ("init", "data", "seed")}
    samples = Samples(options.out, settings, (*names, "sample"))
    wanted = list(itertools.product(options.distractors, options.gaps, range(options.samples)))

    def make(key):
        context, answer = text.sample(random.Random(f"{options.seed} {key}"), *key[:2])
        return [scored(context, answer)], lambda found: {"right": 100 * found[0]["greedy"],
                                                         "logprob": found[0]["logprob"]}
    longest = max(options.gaps) + 1024 + (max(options.distractors) + 2) * text.tokens_of_pair()
    samples.measure(options, wanted, make, longest, ids=True)
    finish(samples, options, wanted, MEASURES, "gap, tokens")


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    ids = lambda text: [[int(i) for i in part.split(",")] for part in text.split("/")]
    add("what", choices=["data", "score"])
    add("--data", required=True, metavar="GLOB")
    add("--words", type=ids, default=ids("198,464,2041,5536,1271,329/318/13"), metavar="IDS/IDS/IDS",
        help="before the key, the value, and behind it [GPT-2's]")
    if "score" in sys.argv[1:2]:
        add_model_options(parser)
        add_sample_options(parser, 16)
        add("--distractors", type=numbers, default=[0, 7, 63], metavar="A,B,...")
        add("--gaps", type=numbers, default=[1024, 4096, 16384, 63488], metavar="A,B,...")
    else:
        add("--out", required=True, metavar="PREFIX")
        add("--seed", type=int, default=0)
        add("--documents", type=int, default=1024)
        add("--length", type=int, default=16384, metavar="T")
        add("--pairs", type=int, default=64)
        add("--vocab-size", type=int, metavar="N", help="end of text is the last id [GPT-2's]")
    options = parser.parse_args()
    if len(options.words) != 3:
        raise Error("--words: not three lists of ids, as in 1,2/3/4")
    return options


def main():
    options = parse()
    score(options) if options.what == "score" else write(options)


if __name__ == "__main__":
    run(main)
