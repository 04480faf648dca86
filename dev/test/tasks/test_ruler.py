"""
RULER's prompts: as those of lm-evaluation-harness of the same draws, and answered by a reader who finds everything
and by one who says nothing.
"""
import argparse
import collections
import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import logging
import math
import random
import re
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

from task_case import SOLVER, TaskCase, needs_harness, needs_plots

import fox
import ruler
import ruler_prompts as prompts

SEED = 5
LENGTH = 4096
TEXT = "A first sentence of text. Is this one of them? Yes! " + "So it goes on, word by word. " * 400
WORDS = prompts.made_up_words(3000)


class Fresh(random.Random):
    """Shuffles alike however often: the harness shuffles in a loop, and with a seed of its own."""

    def shuffle(self, x):
        random.Random(SEED).shuffle(x)


def draws():
    return prompts.Draws(Fresh(SEED), WORDS, TEXT.split())


class Drawn:
    """What the harness's modules take for the module `random`: begun anew before each prompt."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.rng = Fresh(SEED)

    def __getattr__(self, name):
        return getattr(self.rng, name)

    def Random(self, _):
        return self.rng


class Bytes:
    """A tokenizer of transformers, as far as the harness uses one."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def __call__(self, text):
        return types.SimpleNamespace(input_ids=text.encode())


def import_harness():
    """The harness's `ruler`, for which packages and data that this test does not need are fakes."""
    kinds = ("noun", "adjective", "verb", "nouns", "adjectives", "verbs")
    words = types.SimpleNamespace(_categories=dict.fromkeys(kinds, WORDS[:50]))
    found = types.SimpleNamespace(find=lambda _: None)
    for name, fake in (("wonderwords", types.SimpleNamespace(RandomWord=lambda: words)),
                       ("nltk", types.SimpleNamespace(sent_tokenize=prompts.sentences, data=found)),
                       ("transformers", types.SimpleNamespace(AutoTokenizer=Bytes, PreTrainedTokenizerBase=Bytes))):
        if name not in sys.modules and (name == "nltk" or not importlib.util.find_spec(name)):
            sys.modules[name] = fake
    version = importlib.metadata.version
    with mock.patch("importlib.metadata.version", lambda name: "9" if name == "nltk" else version(name)):
        from lm_eval.tasks.ruler import common_utils, prepare_niah
    common_utils.AutoTokenizer = Bytes
    return common_utils, prepare_niah


class TheirTask:
    """A task of the harness. prompt: the text that it asks; references; size: of its haystack."""

    def __init__(self, name, prepare_niah, length=LENGTH):
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks import ruler as package
        from lm_eval.tasks._yaml_loader import load_yaml
        config = load_yaml(Path(*package.__path__) / f"{name}.yaml")
        module = config["custom_dataset"].__globals__
        maker = vars(prepare_niah) if name.startswith("niah") else module
        drawn, sizes, make = Drawn(), [], maker["generate_input_output"]

        def make_and_record(size, *rest, **named):
            drawn.begin()
            sizes.append(named.get("num_words", size))
            return make(size, *rest, **named)

        changes = {"random": drawn, "RNG": drawn, "WORDS": WORDS, "randomize_icl": lambda text: text,
                   "generate_input_output": make_and_record, "cached_sent_tokenize": prompts.sentences, "tqdm": lambda x, **_: x,
                   "generate_random_word": lambda: f"{drawn.choice(WORDS)}-{drawn.choice(WORDS)}"}
        if name == "vt":
            integer = types.SimpleNamespace(randint=lambda a, b: drawn.randrange(a, b))
            changes["np"] = types.SimpleNamespace(random=integer)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(maker, changes))
            stack.enter_context(mock.patch.dict(module, {"get_haystack": their_haystack} | {
                f: functools.partial(one_sample, module[f]) for f in LOOPS if f in module}))
            stack.enter_context(mock.patch("builtins.print"))
            task = ConfigurableTask(config={**config, "metadata": {"max_seq_lengths": [length], "tokenizer": "x"}})
        doc = task.dataset["test"][0]
        self.prompt = task.fewshot_context(doc, 0, gen_prefix=task.doc_to_prefix(doc))
        self.references, self.example = doc["outputs"], doc.get("input_example")
        self.generated = config["generation_kwargs"]["max_gen_toks"]
        self.size = sizes[-1]


LOOPS = ("generate_samples", "sys_vartrack_w_noise_random", "sys_word_pair_random", "sys_kwext")


def one_sample(loop, *arguments, **named):
    """A loop of the harness over samples, which makes one, not 500. The example of vt has five lines."""
    if named.get("max_seq_length") == prompts.VT_EXAMPLE:
        named["max_seq_length"] = 1200  # bytes: the harness ends never if they are too few
    return loop(*arguments, **{**named, "num_samples": 1})


def their_haystack(type_haystack):
    return {"essay": TEXT.split(), "repeat": prompts.LINE,
            "needle": "One of the special magic {type_needle_v} for {key} is: {value}."}[type_haystack]


@needs_harness
class TestHarness(TaskCase):
    def setUp(self):
        super().setUp()
        logging.disable()
        self.addCleanup(logging.disable, logging.NOTSET)
        self.common_utils, self.prepare_niah = import_harness()
        # task files import the harness's modules anew, and with them AutoTokenizer, which would ask the network
        self.enterContext(mock.patch("transformers.AutoTokenizer", Bytes))

    def test_same_prompts(self):
        prepare_niah = self.prepare_niah
        for name, task in prompts.NIAH.items():
            theirs = TheirTask(name, prepare_niah)
            ours = prompts.niah(task, theirs.size, draws())
            self.assertEqual(ours.text, theirs.prompt, name)
            self.assertEqual((ours.references, ours.generated), (theirs.references, theirs.generated), name)

        theirs = TheirTask("vt", prepare_niah)
        example = prompts.vt_example(5, draws())
        text, names = prompts.chain(theirs.size, draws(), 5)
        self.assertEqual(f"{example}\n\n{text.rstrip()}", theirs.prompt)
        self.assertEqual((names, 30), (theirs.references, theirs.generated))
        ours = prompts.vt(theirs.size, draws(), 5)
        self.assertEqual(len(ours.text), len(theirs.prompt))
        self.assertTrue(ours.text.startswith(example + "\n\nMemorize"))

        for length in (3000, 16384):
            theirs = TheirTask("cwe", prepare_niah, length)
            self.assertGreaterEqual(theirs.size, 20)
            ours = prompts.cwe(theirs.size, draws(), length, example=False)
            self.assertEqual(ours.text, theirs.prompt)
            self.assertEqual((ours.references, ours.generated), (theirs.references, theirs.generated))
            ours = prompts.cwe(theirs.size, draws(), length)  # with the example that the harness makes
            self.assertEqual(ours.text, f"{theirs.example}\n" + " Answer:".join(theirs.prompt.split("\n\nAnswer:")))

        theirs = TheirTask("fwe", prepare_niah)
        ours = prompts.fwe(theirs.size, draws(), LENGTH)
        self.assertEqual(ours.text, theirs.prompt)
        self.assertEqual((ours.references, ours.generated), (theirs.references, theirs.generated))

    def test_same_score(self):
        for text in ("", "a b", "xxABC12xx\x01 d", "abc12"):
            theirs = self.common_utils.process_results({"max_length": 4096, "outputs": ["aBc12", "d"]}, [text])
            self.assertEqual(prompts.score(text, ["aBc12", "d"]), 100 * theirs["4096"])


class TestRuler(TaskCase):
    def test_right_and_no_answers(self):
        text = self.tmp / "text.txt"
        text.write_text(TEXT)
        (self.tmp / "words.txt").write_text(" ".join(WORDS[:300]) + " Banana it's x")
        for more in ([], ["--text", text, "--words", self.tmp / "words.txt"], ["--no-example"]):
            options = ["--lengths", "2048", "--samples", 3, *more]
            found, _ = self.measure("ruler.py", "right", *options)
            self.assertEqual([(m["task"], m["score"], m["logprob"], m["samples"]) for m in found["means"]],
                             [(task, 100, 0, 3) for task in ruler.TASKS])
            found, said = self.measure("ruler.py", "none", *options)
            self.assertEqual({(m["score"], m["score_error"]) for m in found["means"]}, {(0, 0)})
            self.assertLess(max(m["logprob"] for m in found["means"]), -8 * math.log(257) + 0.1)
            self.assertIn("\ncwe                        0.00 +- 0.00\n", said)

    def test_lengths_are_filled(self):
        found, _ = self.measure("ruler.py", "right", "--lengths", "2048,6000,16384", "--samples", 2)
        for s in found["samples"]:
            generated = max({"vt": 30, "cwe": 120, "fwe": 50}.get(s["task"], 128), s["answer_tokens"])
            free = s["length"] - s["prompt_tokens"] - generated
            self.assertGreaterEqual(free, 0, s)
            self.assertLess(free, 400 if s["task"] == "cwe" else 150, s)  # a word of cwe comes 30 times
        self.assertEqual(len({s["text"] for s in found["samples"]}), len(found["samples"]))  # each asks another thing

    def test_short_lengths(self):
        """A task is left out, or made for every sample."""
        tokenizer = fox.Tokenizer(self.model())
        text = self.tmp / "text.txt"
        text.write_text("A b c d. " + "Longer sentences follow everywhere. " * 300)
        options = argparse.Namespace(words=None, text=text, no_example=False, seed=0)
        maker = ruler.Ruler(options, tokenizer)
        for task in ruler.TASKS:
            with contextlib.redirect_stderr(io.StringIO()):
                shortest = next(length for length in range(500, 3000) if maker.fits(task, length))
            for number in range(20):
                maker.sample((task, shortest, number))

    def test_longest(self):
        for room in range(10, 300, 7):
            for cost in (lambda n: 3 * n, lambda n: 10 + n * n, lambda n: 7 * n + 5 * (n % 3 == 0)):
                fits = [n for n in range(2, 61) if cost(n) <= room]
                found = ruler.longest(lambda n: (str(n), cost(n)), room, 2, 60, 9)
                self.assertEqual(found and found[0], fits[-1] if fits else None, (room, fits))
                self.assertTrue(not found or found == (fits[-1], cost(fits[-1]), str(fits[-1])))

    def test_one_answer(self):
        """Keys of a prompt differ; of fwe, ranks 2 to 4 are more frequent than the others."""
        few = prompts.Draws(random.Random(1), ["ab", "cd"], TEXT.split())
        for task in (prompts.NIAH["niah_multikey_2"], prompts.NIAH["niah_multikey_1"]):
            for _ in range(20):
                keys = re.findall(r"numbers for (\S+) is:", prompts.niah(task, 3, few).text)
                self.assertEqual(len(set(keys)), 4)
        for n in range(prompts.FWE_LEAST, 300):
            made = prompts.fwe(n, draws(), 2048)
            counts = collections.Counter(re.findall(r"\b[a-z]{6}\b", made.text.partition("coded words. ")[2]
                                                    .partition("\nQuestion")[0])).most_common(4)
            self.assertEqual([word for word, _ in counts[:3]], made.references)
            self.assertEqual(len({count for _, count in counts}), 4, n)

    def test_made_up_words(self):
        words = prompts.made_up_words(ruler.WORDS)
        self.assertEqual(len(set(words)), len(words))
        self.assertEqual({len(word) for word in words}, {6})

    def test_refuses(self):
        model = self.model(answers="right")
        arguments = ["--init", model, "--trainer", SOLVER, "--out", self.tmp / "out.json"]
        self.dies("--tasks qa: not one of niah_single_1", "tasks/ruler.py", *arguments, "--tasks", "vt,qa")
        said = self.dies("--lengths: too short for these tasks", "tasks/ruler.py", *arguments, "--lengths", 300)
        self.assertIn("left out: vt of 300 tokens, which takes ", said)
        self.dies("none: no files", "tasks/ruler.py", *arguments, "--text", self.tmp / "none")
        words = self.tmp / "words.txt"
        words.write_text("a few words")
        self.dies("words.txt: fewer than 100 words", "tasks/ruler.py", *arguments, "--words", words)
        words.write_text(" ".join(WORDS[:120]))
        self.dies("has 120 words, too few for cwe", "tasks/ruler.py", *arguments, "--words", words, "--lengths", 65536,
                  "--tasks", "cwe")
        self.run_script("tasks/ruler.py", *arguments, "--tasks", "vt", "--lengths", 2048, "--samples", 1)
        self.dies("was made with --seed 0; give another --out", "tasks/ruler.py", *arguments, "--seed", 1)

    @needs_plots
    def test_picture(self):
        model = self.model(answers="right", options={"seq-len": 3000})
        picture = self.tmp / "ruler.svg"
        self.run_script("tasks/ruler.py", "--init", model, "--trainer", SOLVER, "--out", self.tmp / "out.json",
                        "--lengths", "2048,4096", "--samples", 2, "--picture", picture)
        svg = picture.read_text()
        self.assertEqual([svg.count(f">{task}</text>") for task in ruler.TASKS], [1] * len(ruler.TASKS))
        self.assertIn("stroke-dasharray", svg)


if __name__ == "__main__":
    unittest.main(verbosity=2)
