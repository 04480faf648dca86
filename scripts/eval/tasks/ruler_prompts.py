"""
Prompts of RULER (https://arxiv.org/abs/2404.06654): the eleven tasks that need no downloads, in the words of the
tasks `ruler` of lm-evaluation-harness 0.4.13. From the same words, numbers and places both make the same prompts
(dev/test/tasks/test_ruler.py). Every task is a function of a size, such as lines of haystack, and of Draws.

    niah_single_1      a needle among equal lines        niah_multikey_1   four keys, one is asked for, in text
    niah_single_2      a needle in text                  niah_multikey_2   among lines that are needles, too
    niah_single_3      the same, its value a uuid        niah_multikey_3   the same of uuids
    niah_multivalue    a key with four values            niah_multiquery   four keys, all are asked for
    vt                 variables that are assigned a number, over four others
    cwe                the ten words that are 10 times as frequent as others
    fwe                the three most frequent words, by Zipf's law

What differs: keys of one prompt differ, so that a question has one answer; text is cut into sentences at ".", "!"
and "?", for which the harness needs data of nltk. cwe has RULER's example before the question, which the harness
makes and does not use (example=False: as there). The answers whose log-probability is taken name what has no order
of its own, values of one key and words of cwe, in the order of the prompt.

Why the harness's generators are not called: this file needs no packages, all of theirs transformers and datasets, those
of needles and cwe also wonderwords. That of needles makes six million keys when it is imported, and downloads nltk's data,
without which it cannot place a needle in text. Needles and fwe's ranks are shuffled alike in every sample, and vt's
number is of numpy's own seed.
"""
import itertools
import math
import re
import string
import uuid
from collections import namedtuple

LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {v} for {key} is: {value}."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # of needles in text, percent
SHORT = 4096  # tokens: cwe of shorter prompts has fewer words

# text: with the words that begin the answer. references: what is to be found in the output. answer: the text whose
# log-probability is taken. generated: tokens of the output, as in the harness
Prompt = namedtuple("Prompt", "text references answer generated")


class Draws:
    """What a prompt is drawn from: a random.Random, a list of words, the words of a text."""

    def __init__(self, rng, words, text=()):
        self.rng, self.words, self.text = rng, words, text

    def value(self, kind):
        if kind == "words":
            return f"{self.rng.choice(self.words)}-{self.rng.choice(self.words)}"
        if kind == "numbers":
            return str(self.rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def new(self, kind, known):
        """A key that differs from the known ones, among which it is put."""
        while (key := self.value(kind)) in known:
            pass
        known.add(key)
        return key

    def names(self, n, letters, length):
        """n different names."""
        known = {}
        while len(known) < n:
            known["".join(self.rng.choices(letters, k=length))] = None
        return list(known)


def made_up_words(n):
    """n different words of three syllables, such as `banuto`, in an order that looks random and is always the same."""
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
    total = len(syllables)**3
    places = (k * 271_829 % total for k in range(n))  # has no common factor with the total
    return ["".join(syllables[place // len(syllables)**i % len(syllables)] for i in range(3)) for place in places]


def sentences(text):
    return re.split(r"(?<=[.!?])\s+", text.strip())


# ----------------------------------------------------------------------------
# needles

Niah = namedtuple("Niah", "haystack key value keys values queries", defaults=(1, 1, 1))
NIAH = {
    "niah_single_1": Niah("line", "words", "numbers"),
    "niah_single_2": Niah("text", "words", "numbers"),
    "niah_single_3": Niah("text", "words", "uuids"),
    "niah_multikey_1": Niah("text", "words", "numbers", keys=4),
    "niah_multikey_2": Niah("needles", "words", "numbers"),
    "niah_multikey_3": Niah("needles", "uuids", "uuids"),
    "niah_multivalue": Niah("text", "words", "numbers", values=4),
    "niah_multiquery": Niah("text", "words", "numbers", keys=4, queries=4),
}


def in_text(needles, n, draws):
    """The first n words of the text, and the needles between sentences."""
    parts = sentences(" ".join(itertools.islice(itertools.cycle(draws.text), n)))
    places = sorted(int(len(parts) * (depth / 100)) for depth in draws.rng.sample(DEPTHS, len(needles)))
    out = []
    for begin, end, needle in zip([0, *places], places, needles):
        out += [" ".join(parts[begin:end]), needle]
    return " ".join([*out, " ".join(parts[places[-1]:])])


def among_lines(needles, lines, draws):
    for place, needle in zip(sorted(draws.rng.sample(range(len(lines)), len(needles)), reverse=True), needles):
        lines.insert(place, needle)
    return "\n".join(lines)


def niah(task, n, draws):
    """n: lines of haystack, or words of text."""
    known, needles, values = set(), [], {}
    for _ in range(task.keys):
        key = draws.new(task.key, known)
        values[key] = [draws.value(task.value) for _ in range(task.values)]
        needles += [NEEDLE.format(v=task.value, key=key, value=value) for value in values[key]]
    draws.rng.shuffle(needles)
    if task.haystack == "text":
        context = in_text(needles, n, draws)
    elif task.haystack == "line":
        context = among_lines(needles, [LINE] * n, draws)
    else:
        pairs = ((draws.new(task.key, known), draws.value(task.value)) for _ in range(n))
        context = among_lines(needles, [NEEDLE.format(v=task.value, key=k, value=v) for k, v in pairs], draws)
    keys = [list(values)[i] for i in draws.rng.sample(range(task.keys), task.queries)]
    references = [value for key in keys for value in values[key]]
    answer = [value for key in keys for value in sorted(values[key], key=context.index)]
    asked = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    some, are, are_all, v = "Some", "are", "are all", task.value
    if len(references) == 1:
        some, are, are_all, v = "A", "is", "is", v.removesuffix("s")
    text = (f"{some} special magic {v} {are} hidden within the following text. Make sure to memorize it. I will quiz "
            f"you about the {v} afterwards.\n{context}\nWhat {are_all} the special magic {v} for {asked} mentioned in "
            f"the provided text? The special magic {v} for {asked} mentioned in the provided text {are}")
    return Prompt(text, references, " " + ", ".join(answer), 128)


# ----------------------------------------------------------------------------
# chains of variables

HOPS = 4
VT_EXAMPLE = 500  # tokens of the example, at most, if so many hold five lines


def chain(n, draws, letters):
    """A question about n lines, without an example: its text, and the names."""
    names = draws.names(HOPS + 1, string.ascii_uppercase, letters)
    number = draws.rng.randrange(10000, 99999)
    said = [f"VAR {names[0]} = {number}", *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:]))]
    lines = [LINE + "\n"] * n
    if len(lines) <= len(said):
        lines = [part + "." if part.strip() else part for line in lines for part in line.split(".")]
    for i, place in enumerate(sorted(draws.rng.sample(range(len(lines)), len(said)))):
        lines.insert(place + i, said[i])
    context = " ".join(lines).replace(". \n", ".\n")
    return ("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{context}\nQuestion: Find all variables that are assigned the value {number} in the text above. Answer: "
            "According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assgined the value {number}, they are: "), names  # the harness writes it so


def vt_example(n, draws):
    text, names = chain(n, draws, 3)
    return f"{text} {' '.join(names)}\n\n"


def vt(n, draws, example_lines):
    """n: lines of haystack."""
    example = vt_example(example_lines, draws)
    text, names = chain(n, draws, 5)
    return Prompt(f"{example}\n\n{text.rstrip()}", names, "  " + " ".join(names), 30)  # two spaces: as the example


# ----------------------------------------------------------------------------
# frequent words


def numbered(words):
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def word_list(n, draws, common, others):
    """A list in which 10 of n words are `common` times and the others `others` times; and the ten, as drawn."""
    words = draws.rng.sample(draws.words, n)
    repeated = words[:10] * common + words[10:] * others
    draws.rng.shuffle(repeated)
    return repeated, words[:10]


def cwe(n, draws, length, example=True):
    """n: different words. length: tokens of the whole."""
    small = length < SHORT
    parts = [word_list(*((20, draws, 3, 1) if small else (40, draws, 10, 3))),
             word_list(n, draws, *((6, 1) if small else (30, 3)))]
    ask = ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
           "that appear most often.\n{}\nQuestion: What are the 10 most common words in the above list?{}Answer: The "
           "top 10 words that appear most often in the list are:")
    words, found = parts[1]
    answer = numbered(sorted(found, key=words.index))
    if not example:
        return Prompt(ask.format(numbered(words), "\n\n"), found, f" {answer}", 120)
    asked = [ask.format(numbered(words), " ") for words, _ in parts]
    return Prompt(f"{asked[0]}{numbered(parts[0][1])}\n{asked[1]}", found, answer, 120)  # no space, as the example


ZETA_2 = math.pi**2 / 6
FWE_LEAST = 53  # words, from which on rank 4 is more frequent than rank 5


def fwe(n, draws, length):
    """n: words of the text, in the limit of all ranks; rank k has n k^-2 / zeta(2), and rank 1 is written as dots."""
    vocab = sorted(draws.names(max(4, length // 50), string.ascii_lowercase, 6))
    draws.rng.shuffle(vocab)
    vocab[0] = "..."
    words = [word for k, word in enumerate(vocab, 1) for _ in range(int(n * k**-2.0 / ZETA_2))]
    draws.rng.shuffle(words)
    text = ("Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(words)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text? Answer: According "
            "to the coded text above, the three most frequently appeared words are:")
    return Prompt(text, vocab[1:4], " " + " ".join(vocab[1:4]), 50)


def score(text, references):
    """Percent of the references that occur in a text, in any case of letters."""
    return 100 * sum(r.lower() in text.lower() for r in references) / len(references)
