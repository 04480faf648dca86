#!/usr/bin/env python3
"""
Needle in a haystack: whether a model finds a sentence in a long text, by length and depth.

    scripts/eval/needle.py --init DIR --haystack essays/ --kind easy --out easy.json --picture easy.svg

The haystack is any folder of text: its files in sorted order, concatenated, tokenized and cut to length - 200
- needle tokens. The needle goes to depth percent of it, moved back to the end of a sentence ("."); at 100 to
the very end. Sample 0 of a cell takes the text from its beginning, as the paper does, each further one STRIDE
tokens later; where the text ends it begins again. The needle takes its place as tokens; the whole is encoded
again as one text, as in the paper's code. The kinds:

    standard    the needle is the paper's sentence about San Francisco; the prompt ends with the paper's
                question, and the first words of the answer
    easy        the question stands before the needle, too
    single      as RULER: a random number of a random key; the prompt ends with the words that stand before it
    multi-key   the same with three more needles, of other keys, at random depths

Decoding is greedy; the trainer puts end-of-text first. The score is 10 if the answer occurs in the text
generated (case and spaces folded), else 1 + 9 x the share of its words that occur; beside it stands the
log-probability of the answer. What differs from the paper: the score, which GPT-4o gives there; the order of
the files, which is the file system's there; at most twice the answer's tokens are generated, not 1,024; and
where the question is longer than the 200 tokens that the paper reserves, as in bytes, it is reserved whole.

--out keeps every sample. Started again, the script computes only what is missing there, and draws.
"""
import itertools
import random
from collections import namedtuple
from pathlib import Path

from fox import Error, Parser, Tokenizer, add_model_options, counted, run
from samples import Samples, add_sample_options, mean_and_error, mean_text, numbers, training_length

RESERVED = 200  # tokens of a prompt for the question and the answer, at least
STRIDE = 65536  # tokens between the haystacks of two samples
TASK = ("There is an important piece of information hidden inside the above document. Now that you've read the "
        "document, I will quiz you about it. Answer the following question: ")
QUESTION = "What is the best thing to do in San Francisco? Answer: "
SENTENCE = "The best thing to do in San Francisco is"
ANSWER = " eat a sandwich and sit in Dolores Park on a sunny day."
KINDS = ("standard", "easy", "single", "multi-key")
ADJECTIVES = """brave calm clever cold curious early empty fancy gentle golden happy hidden honest late lazy
    little lonely loud lucky modest noisy old polite proud quick quiet rapid round sharp silent silver small
    smooth soft solid strange sunny sweet tidy wild""".split()
NOUNS = """anchor apple badger basket bridge candle canyon castle cloud comet desert dragon eagle engine
    falcon forest garden glacier hammer harbor island kettle ladder lantern lemon meadow mirror mountain
    orchard otter pepper piano pocket rabbit river saddle tiger tunnel violin window""".split()

# texts put into the haystack, the one asked for first; the end of the prompt; the answer
Needle = namedtuple("Needle", "texts question answer")


def random_pairs(rng, n):
    """n keys such as "brave otter", and for each a value, a number of seven digits."""
    pairs = {}
    while len(pairs) < n:
        pairs[f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"] = str(rng.randrange(10**6, 10**7))
    return pairs


def state(key):
    """The words before a key's value, in needles and behind questions."""
    return f"The special magic number for {key} is"


def ask(key):
    return f"What is the special magic number for {key}? {state(key)}"


def make_needle(kind, rng):
    """The needle of a sample, drawn from rng."""
    if kind in ("standard", "easy"):
        question = QUESTION if kind == "easy" else ""
        return Needle([f"\n{question}{SENTENCE}{ANSWER}\n"], f"\n\n{TASK}{QUESTION}{SENTENCE}", ANSWER)
    pairs = random_pairs(rng, 4 if kind == "multi-key" else 1)
    key, value = next(iter(pairs.items()))
    return Needle([f"\n{state(k)} {v}.\n" for k, v in pairs.items()], f"\n{ask(key)}", f" {value}.")


# ----------------------------------------------------------------------------
# prompts


def text_files(folder):
    """The files below a folder, or the file itself, in sorted order."""
    path = Path(folder)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise Error(f"{folder}: no files")
    return files


def read_text(path):
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise Error(f"{path}: cannot read: {e.strerror}")


class Haystack:
    """The tokens of a folder of text; no more files are read than the samples need."""

    def __init__(self, folder, tokenizer, wanted):
        self.ids = []
        self.period = tokenizer.encode(".")[0]
        for path in text_files(folder):
            self.ids += tokenizer.encode(read_text(path))
            if len(self.ids) >= wanted:
                break
        if not self.ids:
            raise Error(f"{folder}: no text")

    def cut(self, sample, n):
        """n tokens for a sample; but for the first sample they begin with a sentence."""
        begin = sample * STRIDE % len(self.ids)
        if sample and self.period in self.ids[begin:]:
            begin = self.ids.index(self.period, begin) + 1
        return list(itertools.islice(itertools.cycle(self.ids), begin, begin + n))

    def insert(self, hay, needles):
        """The hay with the needles [(depth in percent, ids)] in it."""
        cuts = []
        for depth, ids in needles:
            at = len(hay) if depth == 100 else int(len(hay) * depth / 100)
            while 0 < at < len(hay) and hay[at - 1] != self.period:
                at -= 1
            cuts.append((at, ids))
        out, done = [], 0
        for at, ids in sorted(cuts):
            out += hay[done:at] + ids
            done = at
        return out + hay[done:]


def make_sample(options, cell, haystack, tokenizer):
    """The requests of a cell (length, depth, sample), generate and score of the answer, and their grade."""
    length, depth, sample = cell
    rng = random.Random(f"{options.seed} {cell}")
    needle = make_needle(options.kind, rng)
    depths = [depth, *(rng.uniform(0, 100) for _ in needle.texts[1:])]
    needles = list(zip(depths, map(tokenizer.encode, needle.texts)))
    answer = tokenizer.encode(needle.answer)
    reserved = max(RESERVED, len(tokenizer.encode(needle.question)) + len(answer))
    n = length - reserved - sum(len(ids) for _, ids in needles)
    if n < 0:
        raise Error(f"--lengths {length}: too short for the needle and {counted(reserved, 'more token')}")
    context = tokenizer.decode(haystack.insert(haystack.cut(sample, n), needles))
    prompt = tokenizer.encode(context + needle.question)
    generate = {"type": "generate", "prompt": prompt, "max_tokens": 2 * len(answer), "temperature": 0}
    scored = {"type": "score", "context": prompt, "continuation": answer}

    def grade(answers):
        text = answers[0]["text"]
        return {"score": score(text, needle.answer), "logprob": answers[1]["logprob"], "answer": needle.answer,
                "text": text}
    return [{**generate, "until": []}, scored], grade


def score(text, answer):
    """10 if the answer occurs in the text, else 1 + 9 x the share of its words that do."""
    text, answer = (" ".join(t.lower().split()) for t in (text, answer.rstrip(".")))
    words = answer.split()
    found = {word.strip(".,;:!?\"'()") for word in text.split()}
    return 10.0 if answer in text else 1 + 9 * sum(w in found for w in words) / len(words)


# ----------------------------------------------------------------------------
# results


def table(results, lengths, depths):
    """Mean scores [depth][length]."""
    def mean(length, depth):
        return mean_and_error([r["score"] for c, r in results.items() if c[:2] == (length, depth)])[0]
    return [[mean(length, depth) for length in lengths] for depth in depths]


def print_means(results, train_length):
    """Mean scores and log-probabilities of all cells, and of those up to and beyond the training length."""
    parts = {"": lambda length: True}
    if train_length:
        parts[f" up to {counted(train_length, 'token')}"] = lambda length: length <= train_length
        parts[" beyond"] = lambda length: length > train_length
    for name in ("score", "logprob"):
        for part, holds in parts.items():
            values = [r[name] for cell, r in results.items() if holds(cell[0])]
            if values:
                print(f"{name}{part}: {mean_text(*mean_and_error(values), digits=3)}")


def draw(path, scores, lengths, depths, train_length):
    import plots
    figure, [[axes]] = plots.panels(1, width=6)
    plots.heat_map(axes, scores, "mean score, 10: found", [1, 4, 7, 10], vmin=1, vmax=10)
    plots.label_ticks(axes.xaxis, lengths)
    plots.label_ticks(axes.yaxis, [f"{d}%" for d in depths])
    axes.tick_params("x", rotation=45)
    axes.set(xlabel="length, tokens", ylabel="depth of the needle")
    trained = sum(length <= train_length for length in lengths) if train_length else 0
    if 0 < trained < len(lengths):  # between lengths up to that of training and longer ones
        plots.mark(axes, trained - 0.5)
        plots.caption(axes, f"dashed line: training length, {counted(train_length, 'token')}")
    plots.save(figure, path)


def parse():
    parser = Parser(__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--haystack", required=True, metavar="DIR", help="folder of text")
    add("--kind", choices=KINDS, default="easy")
    add("--lengths", type=numbers, default=numbers("1000:32000:3100"), metavar="A:B:STEP",
        help="or a list A,B,... (1000:32000:3100)")
    add("--depths", type=numbers, default=numbers("0:100:10"), metavar="A:B:STEP", help="percent (0:100:10)")
    add_sample_options(parser, 1)
    add("--train-length", type=int, metavar="T", help="of means and dashed line (default: as trained)")
    options = parser.parse_args()
    if options.samples < 1:
        raise Error("--samples: at least 1")
    if options.depths[0] < 0 or options.depths[-1] > 100:
        raise Error("--depths: percent, 0 to 100")
    return options


def main():
    options = parse()
    settings = {name: getattr(options, name) for name in ("init", "haystack", "kind", "seed", "json_escape")}
    samples = Samples(options.out, settings, ("length", "depth", "sample"), "cells")
    wanted = list(itertools.product(options.lengths, options.depths, range(options.samples)))
    missing = [cell for cell in wanted if cell not in samples.results]
    if missing:
        tokenizer = Tokenizer(options.init, options.json_escape)
        tokens = max(length + (sample + 1) * STRIDE for length, _, sample in missing)
        haystack = Haystack(options.haystack, tokenizer, tokens)
        samples.measure(options, missing, lambda cell: make_sample(options, cell, haystack, tokenizer))

    results = {cell: samples.results[cell] for cell in wanted}
    scores = table(results, options.lengths, options.depths)
    train_length = training_length(options)
    print("mean scores, from 1: nothing of the answer, to 10: all of it")
    print("depth \\ length" + "".join(f"{length:8d}" for length in options.lengths))
    for depth, row in zip(options.depths, scores):
        print(f"{depth:13d}%" + "".join(f"{value:8.2f}" for value in row))
    print_means(results, train_length)
    if options.picture:
        draw(options.picture, scores, options.lengths, options.depths, train_length)


if __name__ == "__main__":
    run(main)
