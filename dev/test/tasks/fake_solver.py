#!/usr/bin/env python3
"""
Stands in for a trainer in tests of scripts/eval/tasks, as fake_requests.py does. DIR/config.json says with
"answers" what it answers:

    right   what a perfect reader of the prompt writes; log-probability 0 of that, else -100. For ids that are no
            prompt of text, what fake_requests.py answers, which copies
    stale   of keys.py's text, the value that the key had first
    none    nothing; every token has the same probability
"""
import collections
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "eval"))
import fake_requests  # noqa: E402


def needles(text):
    *_, asked = re.finditer(r"What (?:is|are all) the special magic \w+ for (.*?) mentioned in the provided", text)
    said = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", text)
    return " " + ", ".join(v for key in re.split(", and |, ", asked[1]) for k, v in said if k == key)


def variables(text):
    *_, number = re.findall(r"assigned the value (\d+) in", text)
    said = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text[text.rindex("Memorize and track"):])
    names = [number]
    for name, value in said:  # in the order of the text
        if value in names:
            names.append(name)
    return "  " + " ".join(names[1:])


def common_words(text):
    words = re.findall(r"\d+\. (\w+)", text[text.rindex("Below is a numbered list"):])
    ten = [word for word, _ in collections.Counter(words).most_common(10)]
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(sorted(ten, key=words.index), 1))
    return answer if text.count("numbered list") > 1 else " " + answer  # an example has no space before it


def frequent_words(text):
    words = text[text.index("coded words. ") + 13:text.index("\nQuestion: ")].split()
    words = [word for word in words if word != "..."]
    return " " + " ".join(word for word, _ in collections.Counter(words).most_common(3))


def last_values(text, place=-1):
    *_, key = re.findall(r"last value of (\w+) is", text)
    values = re.findall(rf"^{key}: (\w+)$", text, re.M)
    return f" {values[place]}"


def number(text):
    *_, name = re.findall(r"\n(\w+ \w+):$", text)
    return re.search(rf"^{name}:( \d+-\d+)$", text, re.M)[1]


def place(text):
    told = re.findall(r"(\w+) (went to|took) the (\w+)\.", text)
    [(thing, who)] = re.findall(r"\n(The )?(\w+) is in the$", text)
    if thing:
        [who] = [name for name, done, what in told if done == "took" and what == who]
    *_, last = (where for name, done, where in told if name == who and done == "went to")
    return f" {last}"


SOLVERS = {"went to the": place, "last value of": last_values, "special magic": needles,
           "chain(s) of variable": variables, "numbered list": common_words, "coded text": frequent_words}


class Solver(fake_requests.Model):
    def __init__(self, folder):
        super().__init__(folder)
        self.right, self.stale = self.config["answers"] != "none", self.config["answers"] == "stale"

    def solve(self, ids):
        """The answer to a prompt of text; a ValueError for other ids."""
        text = fake_requests.detokenize(ids)
        for words, solver in SOLVERS.items():
            if words in text:
                return last_values(text, 0) if self.stale else solver(text)
        if re.search(r": \d{3}-\d{4}\n", text):
            return number(text)
        raise ValueError("a prompt of no task")

    def generate(self, prompt, max_tokens, until):
        if not self.right:
            return [], "", True
        try:
            text = self.solve(prompt)[:max_tokens]
            return self.ids(text), text, True
        except ValueError:
            return [self.next(prompt)], None, False  # as a trainer without a tokenizer

    def score(self, context, continuation):
        if not self.right:
            return -len(continuation) * math.log(self.vocab_size), False
        try:
            found = fake_requests.detokenize(continuation) == self.solve(context)
            return 0.0 if found else -100.0, found
        except ValueError:
            return super().score(context, continuation)


if __name__ == "__main__":
    fake_requests.main(Solver)
