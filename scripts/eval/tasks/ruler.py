#!/usr/bin/env python3
"""
RULER's eleven tasks that need no downloads, by length (ruler_prompts.py describes them):

    scripts/eval/tasks/ruler.py --init DIR --lengths 4096,8192 --text essays/ --out ruler.json --picture ruler.svg

The haystack is the longest with which the prompt and the answer fit into a length, to 0.2%. In tasks with text it
is --text, any folder of text, from a random sentence on and again from its beginning; without it RULER's filler
sentences. Keys and frequent words are made up of syllables, or words of --words.

Decoding is greedy; the trainer puts end-of-text first. score is the percentage of the references that occur in the
output, in any case of letters, as in lm-evaluation-harness. Models too small for the tasks have 0 throughout: then
logprob, the log-probability of the whole answer, is the measure; it rises as soon as a part of the answer is found.
Errors are standard errors over samples. --out keeps every sample; started again, the script computes only what is
missing there.
"""
import itertools
import math
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fox import Error, Parser, Tokenizer, add_model_options, counted, run  # noqa: E402
from needle import read_text, text_files  # noqa: E402
from samples import Samples, add_sample_options, finish, numbers, training_length  # noqa: E402

import ruler_prompts as prompts  # noqa: E402

TASKS = (*prompts.NIAH, "vt", "cwe", "fwe")
WORDS = 20_000  # made up
LEAST_WORDS = 100
SLACK = 512  # the share of a length that may be left over, as its divisor
MEASURES = {"score": "references found, %", "logprob": "log-probability of the answer"}


def longest(make, room, least, most, guess):
    """
    (size, tokens, prompt) of the largest size from least to most whose prompt has at most `room` tokens, or of one
    that fills it but for a share of 1 / SLACK; None: no size fits. make(size): prompt, tokens.
    """
    fits = over = None
    n = min(max(guess, least), most)
    while True:
        prompt, tokens = make(n)
        if tokens <= room:
            fits = n, tokens, prompt
        else:
            over = n, tokens
        low, high = fits[0] if fits else least - 1, over[0] if over else most + 1
        if high - low <= 1 or (fits and room - fits[1] <= room // SLACK):
            return fits
        if fits and over:
            n = low + (high - low) * (room - fits[1]) // (over[1] - fits[1])
        else:
            n = n * room // tokens
        n = min(max(n, low + 1), high - 1)


class Ruler:
    """Makes samples (task, length, number)."""

    def __init__(self, options, tokenizer):
        self.options, self.tokenizer = options, tokenizer
        self.sizes = {}  # of the last sample of a task and a length
        self.words = prompts.made_up_words(WORDS)
        if options.words:
            text = " ".join(map(read_text, text_files(options.words)))
            self.words = sorted({w.lower() for w in re.findall(r"\b[A-Za-z]{3,12}\b", text)})
            if len(self.words) < LEAST_WORDS:
                raise Error(f"--words {options.words}: fewer than {LEAST_WORDS} words")
        self.text = prompts.LINE.split()
        if options.text:
            self.text = " ".join(map(read_text, text_files(options.text))).split()
            if not self.text:
                raise Error(f"--text {options.text}: no text")
        self.begins = [i + 1 for i, word in enumerate(self.text[:-1]) if word.endswith(".")] or [0]
        self.example = longest(self.vt_example, prompts.VT_EXAMPLE, 1, 20, 2)  # in fives of lines, as the harness
        self.example = 5 * self.example[0] if self.example else 5

    def vt_example(self, fives):
        text = prompts.vt_example(5 * fives, prompts.Draws(random.Random(0), self.words))
        return text, len(self.tokenizer.encode(text))

    def sizes_of(self, task, length):
        """The least and the largest size of the haystack."""
        if task == "cwe":
            return 10, len(self.words)
        if task == "vt":
            return 1, length
        return (4, length) if task in prompts.NIAH else (prompts.FWE_LEAST, length)

    def prompt(self, task, length, n, draws):
        if task == "vt":
            return prompts.vt(n, draws, self.example)
        if task == "cwe":
            return prompts.cwe(n, draws, length, not self.options.no_example)
        return prompts.fwe(n, draws, length) if task == "fwe" else prompts.niah(prompts.NIAH[task], n, draws)

    def encoded(self, task, length, n, draws):
        """(prompt, its ids, those of the answer, tokens reserved for the output), tokens in all"""
        prompt = self.prompt(task, length, n, draws)
        ids, answer = self.tokenizer.encode(prompt.text), self.tokenizer.encode(prompt.answer)
        reserved = max(prompt.generated, len(answer))
        return (prompt, ids, answer, reserved), len(ids) + reserved

    def fits(self, task, length):
        """Is a length enough for a task? A line says so if it is not."""
        draws = prompts.Draws(random.Random(0), self.words, self.text)
        needed = math.ceil(1.1 * self.encoded(task, length, self.sizes_of(task, length)[0], draws)[1])  # draws differ
        if needed > length:
            print(f"left out: {task} of {counted(length, 'token')}, which takes {needed}", file=sys.stderr)
        return needed <= length

    def sample(self, key):
        """Its requests, generate and score, and their grade."""
        task, length, _ = key
        seed = f"{self.options.seed} {key}"
        begin = random.Random(f"{seed} text").choice(self.begins)
        text = self.text[begin:] + self.text[:begin]
        make = lambda n: self.encoded(task, length, n, prompts.Draws(random.Random(seed), self.words, text))
        least, most = self.sizes_of(task, length)
        found = longest(make, length, least, most, self.sizes.get((task, length), length // 30))
        if not found:
            raise Error(f"--lengths {length}: too short for {task}, which has {counted(make(least)[1], 'token')}")
        n, tokens, (prompt, ids, answer, reserved) = found
        if task == "cwe" and n == most and tokens < 0.9 * length:
            raise Error(f"--words {self.options.words}: has {counted(most, 'word')}, too few for {task} "
                        f"of {counted(length, 'token')}")
        self.sizes[task, length] = n
        generate = {"type": "generate", "prompt": ids, "max_tokens": reserved, "temperature": 0, "until": []}
        scored = {"type": "score", "context": ids, "continuation": answer}

        def grade(answers):
            text = answers[0]["text"]
            return {"score": prompts.score(text, prompt.references), "logprob": answers[1]["logprob"],
                    "prompt_tokens": len(ids), "answer_tokens": len(answer), "references": prompt.references,
                    "text": text}
        return [generate, scored], grade


def parse():
    parser = Parser(__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--tasks", metavar="NAME,...", default=",".join(TASKS), help="of " + ", ".join(TASKS) + " (all)")
    add("--lengths", type=numbers, default=[4096], metavar="A,B,...", help="tokens of prompt and answer (4096)")
    add("--text", metavar="DIR", help="folder of text for haystacks")
    add("--words", metavar="DIR", help="folder or file of text whose words are keys")
    add("--no-example", action="store_true", help="cwe without an example, as lm-evaluation-harness asks")
    add_sample_options(parser, 10)
    options = parser.parse_args()
    options.tasks = options.tasks.split(",")
    if unknown := set(options.tasks) - set(TASKS):
        raise Error(f"--tasks {min(unknown)}: not one of {', '.join(TASKS)}")
    if options.samples < 1:
        raise Error("--samples: at least 1")
    return options


def main():
    options = parse()
    settings = {name: getattr(options, name) for name in ("init", "text", "words", "no_example", "seed", "json_escape")}
    samples = Samples(options.out, settings, ("task", "length", "sample"))
    ruler = Ruler(options, Tokenizer(options.init, options.json_escape))
    points = [point for point in itertools.product(options.tasks, options.lengths) if ruler.fits(*point)]
    if not points:
        raise Error("--lengths: too short for these tasks")
    wanted = [(*point, k) for point in points for k in range(options.samples)]
    samples.measure(options, wanted, ruler.sample, max(options.lengths))
    finish(samples, options, wanted, MEASURES, "length, tokens", training_length(options))


if __name__ == "__main__":
    run(main)
