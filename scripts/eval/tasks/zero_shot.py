#!/usr/bin/env python3
"""
How a model uses what stood before, zero-shot on the ids of held-out shards:

    scripts/eval/tasks/zero_shot.py copy      --init DIR --data 'data/c_val_*.bin' --out copy.json --picture copy.svg
    scripts/eval/tasks/zero_shot.py conflict  --init DIR --data 'data/c_val_*.bin' --out conflict.json
    scripts/eval/tasks/zero_shot.py corrupted --init DIR --data 'data/c_val_*.bin' --out corrupted.json --lengths 16384

copy       [segment] text [segment], the text --gaps tokens long. fall: how much lower the loss on the repeat is, in
           nats a token, than with another segment in the first place. copied: percent of repeats of which every
           token of the second half is the likeliest.
conflict   [cue A] text [cue A] text .. [cue B] text [cue]: the cue went on in another way --stale times, then once in
           a new one, --gaps tokens ago. margin: log p(B) - log p(A), in nats. newer: percent of samples in which B
           is likelier. Each sample is asked a second time with A and B exchanged, so that what a model expects of
           the two anyway cancels; its result is the mean. Stale copies are SPACE tokens apart, the cue and what
           follows have half of --segment tokens each.
corrupted  --lengths tokens of text, of which --shares percent are replaced by tokens from random places of the
           shards, before --targets intact ones. loss: of the targets, nats a token; rise: above that of the same
           sample with nothing replaced. What is replaced at a small share is replaced at a larger one, too.

Text and segments are drawn at random from the shards; of documents (data/text_to_shards --doc-len) from within one.
Errors are standard errors over samples. --out keeps every sample; started again, the script computes only what is
missing there.
"""
import glob
import itertools
import random
import re
import struct
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fox import Error, counted, read_json, run  # noqa: E402
from samples import Samples, add_sample_options, finish, numbers, task_parser, training_length  # noqa: E402

SPACE = 128  # tokens of text behind each stale copy


def vocabulary(path):
    """The tokens of a tokenizer.json; None: it has none."""
    model = read_json(path).get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def check_tokenizer(paths, own):
    """An Error if the tokenizer beside a shard has other tokens than the model's, the file `own`; either may be missing."""
    beside = {re.sub(r"_[a-z]+_\d+\.bin$", "_tokenizer.json", path) for path in paths} - {*paths}
    for file in sorted(beside) if own.exists() else []:
        if Path(file).exists() and vocabulary(file) != vocabulary(own):
            raise Error(f"--data: encoded with {file}, not with the model's tokenizer; encode the text with that one")


class HeldOut:
    """Tokens of shards, in pieces from random places."""

    def __init__(self, pattern, model=None):
        """model: the folder of a model. Shards of another tokenizer than its own are an Error, where both are known."""
        paths = sorted(path for part in pattern.split(",")  # as the trainer's --val-data
                       for path in ([part] if Path(part).exists() else glob.glob(part)))
        self.shards = [self.read(path) for path in paths]
        if not self.shards:
            raise Error(f"--data {pattern}: no file matches")
        if model:
            check_tokenizer(paths, Path(model) / "tokenizer.json")
        self.pattern, self.places = pattern, {}

    def read(self, path):
        """(tokens, length of a document)"""
        with open(path, "rb") as f:
            data = f.read()
        magic, version, count, doc_len = struct.unpack_from("<4i", data) if len(data) >= 1024 else (0,) * 4
        size = {1: 2, 2: 4}.get(version, 0)
        if magic != 20240520 or len(data) != 1024 + count * size:
            raise Error(f"{path}: not a shard of tokens of version 1 or 2, or cut off")
        if not count:
            raise Error(f"{path}: contains no tokens")
        return memoryview(data)[1024:].cast("H" if size == 2 else "I"), doc_len or count

    def piece(self, n, rng):
        """n tokens from one place of one document, all places being equally likely."""
        if n not in self.places:
            self.places[n] = [(len(ids) // doc_len) * max(0, doc_len - n + 1) for ids, doc_len in self.shards]
        if not any(self.places[n]):
            longest = max(doc_len for _, doc_len in self.shards)
            raise Error(f"--data {self.pattern}: asked for {counted(n, 'token')}, its longest document has {longest}")
        [(ids, doc_len)] = rng.choices(self.shards, self.places[n])
        begin = rng.randrange(len(ids) // doc_len) * doc_len + rng.randrange(doc_len - n + 1)
        return ids[begin:begin + n].tolist()


def scored(context, continuation):
    return {"type": "score", "context": context, "continuation": continuation}


# ----------------------------------------------------------------------------
# the tasks: (requests, grade) of a sample (series, x, number)


def copy(key, data, rng, options):
    n = options.segment
    segment, other, text = data.piece(n, rng), data.piece(n, rng), data.piece(key[1], rng)
    half = n // 2

    def grade(answers):
        begin, end, first = answers
        repeat = begin["logprob"] + end["logprob"]
        return {"fall": (repeat - first["logprob"]) / n, "copied": 100 * end["greedy"], "loss": -repeat / n,
                "first_loss": -first["logprob"] / n}
    before = segment + text
    return [scored(before, segment[:half]), scored(before + segment[:half], segment[half:]),
            scored(other + text, segment)], grade


def conflict(key, data, rng, options):
    stale, gap, _ = key
    half = options.segment // 2
    cue, a, text = data.piece(half, rng), data.piece(half, rng), data.piece(gap, rng)
    spaces = [data.piece(SPACE, rng) for _ in range(stale)]
    while (b := data.piece(half, rng))[0] == a[0]:
        pass
    requests = []
    for old, new in ((a, b), (b, a)):
        copies = (cue + old + space for space in spaces)
        context = [*itertools.chain(*copies), *cue, *new, *text, *cue]
        requests += [scored(context, new), scored(context, old)]

    def grade(answers):
        margins = [new["logprob"] - old["logprob"] for new, old in zip(answers[::2], answers[1::2])]
        return {"margin": sum(margins) / 2, "newer": sum(50 * (m > 0) for m in margins)}
    return requests, grade


def corrupted(key, data, rng, options):
    length, share, _ = key
    ids = data.piece(length + options.targets, rng)
    context, targets = ids[:length], ids[length:]
    order = sorted(range(length), key=[rng.random() for _ in context].__getitem__)
    for place in order[:length * share // 100]:
        [context[place]] = data.piece(1, rng)
    return [scored(context, targets)], lambda answers: {"loss": -answers[0]["logprob"] / options.targets}


# make; names of the parts of a key before the number of the sample, and options with their values; what else counts
Task = namedtuple("Task", "make series x series_option x_option settings measures title")
TASKS = {
    "copy": Task(copy, "segment", "gap", "segments", "gaps", (),
                 {"fall": "fall of the loss, nats a token", "copied": "repeats copied, %"}, "gap, tokens"),
    "conflict": Task(conflict, "stale", "gap", "stale", "gaps", ("segment",),
                     {"margin": "log p(newer) - log p(older)", "newer": "newer is likelier, %"}, "gap, tokens"),
    "corrupted": Task(corrupted, "length", "percent", "lengths", "shares", ("targets",),
                      {"loss": "loss on intact targets, nats a token", "rise": "rise of this loss"}, "replaced, %"),
}


def parse():
    parser = task_parser(__doc__, TASKS)
    add = parser.add_argument
    add("--data", required=True, metavar="GLOB", help="held-out shards")
    add("--gaps", type=numbers, default=numbers("256,1024,4096,16384,65536"), metavar="A,B,...",
        help="of copy and conflict (256,1024,4096,16384,65536)")
    add("--stale", type=numbers, default=numbers("1,2,4,8"), metavar="A,B,...", help="of conflict (1,2,4,8)")
    add("--segment", type=int, default=64, metavar="N", help="tokens that come again (64)")
    add("--lengths", type=numbers, default=[], metavar="A,B,...", help="contexts of corrupted (as trained)")
    add("--shares", type=numbers, default=numbers("0,1,2,4,8,16,32"), metavar="A,B,...",
        help="of corrupted, percent (0,1,2,4,8,16,32)")
    add("--targets", type=int, default=256, metavar="N", help="of corrupted (256)")
    add_sample_options(parser, 256)
    options = parser.parse_args()
    if options.task == "corrupted" and not options.lengths:
        if not training_length(options):
            raise Error("--lengths: missing, and the checkpoint does not say its own")
        options.lengths = [training_length(options) - options.targets]
    options.shares, options.segments = sorted({0, *options.shares}), [options.segment]
    if min(options.samples, options.segment // 2, options.targets, *options.gaps, *options.stale, *options.lengths) < 1:
        raise Error("--samples, --segment, --targets, --gaps, --stale and --lengths: at least 1, --segment 2")
    if not 0 <= options.shares[0] <= options.shares[-1] <= 100:
        raise Error("--shares: percent, 0 to 100")
    return options


def main():
    options = parse()
    task = TASKS[options.task]
    settings = {"task": options.task} | {n: getattr(options, n) for n in ("init", "data", "seed", *task.settings)}
    samples = Samples(options.out, settings, (task.series, task.x, "sample"))
    series, values = getattr(options, task.series_option), getattr(options, task.x_option)
    wanted = list(itertools.product(series, values, range(options.samples)))
    data = HeldOut(options.data, options.init)

    def make(key):
        seed = (key[0], key[2]) if options.task == "corrupted" else key  # the same text for all shares
        return task.make(key, data, random.Random(f"{options.seed} {options.task} {seed}"), options)
    around = options.targets + (max(options.stale) + 2) * (SPACE + options.segment)
    samples.measure(options, wanted, make, max(*series, *values) + around)
    for length, share, k in wanted if options.task == "corrupted" else []:
        result = samples.results[length, share, k]
        result["rise"] = result["loss"] - samples.results[length, 0, k]["loss"]
    mark = training_length(options) if task.x == "gap" else None
    finish(samples, options, wanted, task.measures, task.title, mark)


if __name__ == "__main__":
    run(main)
