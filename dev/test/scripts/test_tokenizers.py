"""
A model of any tokenizer from text to answers: make_shards.py, the trainer, prompt.py, needle.py and harness.py.

    python3 -m venv build/eval
    build/eval/bin/pip install -c scripts/requirements.txt tokenizers lm_eval
    build/eval/bin/python dev/test/scripts/test_tokenizers.py

A model is trained on tokens of GPT-2's form, which the trainer reads, and copied with a tokenizer.json that gives
the same ids of ASCII text and that it does not read: what the scripts make of token ids must be what the trainer
makes of text. Where transformers is installed, its ids are compared with those of training. test_tokenizers.sh runs
this where the tokenizers library is installed.
"""
import importlib.util
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "eval"))
from eval_case import HARNESS, ROOT, TOKENS, Case, run_tests  # noqa: E402

import fox  # noqa: E402

WORK = ROOT / "build/test/tokenizers"
TRAIN_FOX = os.environ.get("TRAIN_FOX", str(ROOT / "train_fox"))
STEPS, T = 20, 64


def command(*words):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def train(name, tokenizer, end, model="fox-pro-nano", text="README.md", steps=STEPS):
    """A model trained on a text. Returns its folder."""
    tokenizer.save(str(WORK / f"{name}.json"))
    said = command(sys.executable, "scripts/make_shards.py", "--tokenizer", WORK / f"{name}.json", "--jobs", 1,
                   "--out", WORK / name, text)
    options = said.split("for the trainer: ")[1].split()
    assert options[-1] == f"eos_token_id={end}", said
    command(TRAIN_FOX, "--model", model, *options, "--set", "hidden_size=64", "--set",
            "num_hidden_layers=2", "--seq-len", T, "--batch-tokens", 4 * T, "--max-tokens", 4 * T * steps,
            "--lr", 1e-2, "--data", f"{WORK / name}_train_*.bin", "--out", WORK / name)
    return WORK / name / f"step_{steps:08}"


def kinds():
    """{name: (a tokenizer whose file adds tokens to a text, the id of its end of text)}"""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    def trained(model, split, trainer, specials):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = split
        tokenizer.train([str(ROOT / "README.md")],
                        trainer(vocab_size=600, special_tokens=specials, show_progress=False))
        return tokenizer

    def template(*names):
        ids = {"<s>": 1, "</s>": 2}
        return processors.TemplateProcessing(single=" ".join(names), special_tokens=[*ids.items()])

    specials = ["<unk>", "<s>", "</s>"]
    words = trained(models.BPE(unk_token="<unk>"), pre_tokenizers.Metaspace(), trainers.BpeTrainer, specials)
    llama = Tokenizer(words.model)
    llama.add_special_tokens(specials)
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama.post_processor = template("<s>", "$A")
    first = trained(models.Unigram(), pre_tokenizers.Metaspace(prepend_scheme="first"),
                    lambda **options: trainers.UnigramTrainer(unk_token="<unk>", **options), specials)
    first.post_processor = template("<s>", "$A")
    added = trained(models.BPE(dropout=0.5), pre_tokenizers.ByteLevel(add_prefix_space=False),
                    trainers.BpeTrainer, [*specials, "[PAD]"])
    added.add_tokens([AddedToken(" --data", lstrip=True), AddedToken("Trains", single_word=True)])
    added.add_special_tokens(["<|im|>"])
    added.post_processor = template("<s>", "$A", "</s>")
    added.enable_truncation(16)
    added.enable_padding(length=64, pad_id=3, pad_token="[PAD]")
    prefix = trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=True), trainers.BpeTrainer, specials)
    prefix.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return {"llama": (llama, 2), "first": (first, 2), "added": (added, 2), "prefix": (prefix, 2)}


class TestIds(Case):
    """The ids of a text are those of training, whatever tokenizer.json adds, cuts off or draws."""

    TEXT = "Trains the model: --data X  --data Y, naïve\n\n 12 <|im|> Trains--. </s> a<s>b [PAD]\n" * 12

    @classmethod
    def setUpClass(cls):
        shutil.rmtree(WORK / "ids", ignore_errors=True)
        (WORK / "ids").mkdir(parents=True)
        text = WORK / "ids/text.txt"
        text.write_text(cls.TEXT, encoding="utf-8", newline="")
        cls.folders = {}  # a checkpoint: the ids that were trained on: end of text, and those of TEXT
        for name, (tokenizer, end) in kinds().items():
            folder = train(f"ids/{name}", tokenizer, end, model="transformer-llama-nano", text=text, steps=1)
            shard = (WORK / f"ids/{name}_train_000000.bin").read_bytes()[1024:]
            cls.folders[folder] = list(struct.unpack(f"<{len(shard) // 2}H", shard))

    def test_ids(self):
        for folder, (_, *want) in self.folders.items():
            with self.subTest(folder.parent.name):
                self.assertTrue(fox.Tokenizer(folder).encode(self.TEXT) == want)
                others = self.tmp / folder.parent.name  # a folder of another origin, with the file as it was
                shutil.copytree(folder, others)
                shutil.copy(f"{folder.parent}.json", others / "tokenizer.json")
                request = {"type": "generate", "prompt": self.TEXT}
                self.assertTrue(fox.Tokenizer(others).request(request)["prompt"] == want)

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers: not installed")
    def test_transformers(self):
        with mock.patch.object(sys, "path", [path for path in sys.path if not path.endswith("dev/test/eval")]):
            from transformers import AutoTokenizer  # its requests are not the requests.py there
        for folder, want in self.folders.items():
            llama = folder.parent / "llama"
            command(sys.executable, "scripts/hf/to_llama.py", folder.parent, llama)
            lines = (folder / "README.md").read_text().split("\n")
            (card,) = [line for line in lines if line.startswith("ids = torch.tensor")]
            for place in (folder, llama):
                with self.subTest(place):
                    self.check(AutoTokenizer.from_pretrained(place, trust_remote_code=False), folder, card, want)

    def check(self, tokenizer, folder, card, want):
        """Checks transformers' tokenizer, and the model card's line with the ids of a prompt."""
        def as_text(text):  # names of special tokens are text
            return tokenizer(text, split_special_tokens=True)
        generation = json.loads((folder / "generation_config.json").read_text())
        model = types.SimpleNamespace(generation_config=types.SimpleNamespace(**generation))
        torch = types.SimpleNamespace(tensor=list)
        names = {"model": model, "tokenizer": as_text, "TEXT": self.TEXT, "torch": torch}
        exec(card, names)
        self.assertTrue(names["ids"] == [want])  # assertEqual takes minutes to show how they differ
        self.assertTrue([tokenizer.bos_token_id, *as_text(self.TEXT).input_ids] == want)
        plain = self.TEXT.translate(str.maketrans("<>[]", "    "))
        self.assertTrue(tokenizer(plain).input_ids == fox.Tokenizer(folder).encode(plain))


class TestTokenizers(Case):
    @classmethod
    def setUpClass(cls):
        from tokenizers import ByteLevelBPETokenizer, SentencePieceBPETokenizer
        shutil.rmtree(WORK / "text", ignore_errors=True)
        (WORK / "text").mkdir(parents=True)
        text = str(ROOT / "README.md")
        form = ByteLevelBPETokenizer()  # of GPT-2's form: end of text comes last
        form.train([text], vocab_size=600, show_progress=False)
        form.add_special_tokens(["<|endoftext|>"])
        cls.read = train("text/form", form, form.get_vocab_size() - 1)
        cls.sent = cls.read.parent / "sent"
        shutil.copytree(cls.read, cls.sent)
        tokenizer = json.loads((cls.sent / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "NFC"}
        (cls.sent / "tokenizer.json").write_text(json.dumps(tokenizer))
        own = ByteLevelBPETokenizer()  # as users train them: end of text comes first
        own.train([text], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
        cls.own = train("text/own", own, 0)
        words = SentencePieceBPETokenizer()
        words.train([text], vocab_size=600, special_tokens=["<unk>", "</s>"], show_progress=False)
        cls.words = train("text/words", words, 1)

    def answers(self, folder, requests, **options):
        trainer = fox.Trainer(folder, TRAIN_FOX, **options)
        self.addCleanup(lambda: [(p.stdin.close(), p.wait(), p.stdout.close()) for p in trainer.processes])
        found = dict(trainer.answers(requests))
        return [found[i] for i in range(len(requests))], trainer

    def requests(self):
        rng = random.Random(3)
        text = "".join(c for c in (ROOT / "README.md").read_text(encoding="utf-8") if c.isascii())
        asked = []
        for _ in range(40):
            at, n, m = rng.randrange(len(text) - 400), rng.randrange(1, 200), rng.randrange(1, 30)
            context, continuation = text[at:at + n], text[at + n:at + n + m]
            asked += [{"type": "score", "context": context, "continuation": continuation},
                      {"type": "score", "context": context + " \n", "continuation": continuation},
                      {"type": "rolling", "text": text[at:at + 400]},
                      {"type": "generate", "prompt": context, "max_tokens": 30, "seed": at,
                       "until": rng.choice([[], ["\n"], [" the", "e t"], ["ing"], ["e"]])}]
        return [*asked, {"type": "score", "context": "", "continuation": "a"},
                {"type": "generate", "prompt": "", "max_tokens": 9, "seed": 5, "until": [], "top_k": 50}]

    def test_ids_answer_as_text(self):
        asked = self.requests()
        for escape in (False, True):
            want, reads = self.answers(self.read, asked, json_escape=escape)
            got, sends = self.answers(self.sent, asked, json_escape=escape)
            self.assertIsNone(reads.tokenizer)
            self.assertIsNotNone(sends.tokenizer)
            stopped = 0
            for request, a, b in zip(asked, want, got):
                if request["type"] == "generate":  # a text may end later, and is cut
                    self.assertEqual((a["text"], a["finish"]), (b["text"], b["finish"]), request)
                    self.assertEqual(a["tokens"], b["tokens"][:len(a["tokens"])])
                    stopped += a["finish"] == "stop"
                else:
                    self.assertEqual((a["tokens"], a["greedy"] if "greedy" in a else 0),
                                     (b["tokens"], b["greedy"] if "greedy" in b else 0), request)
                    self.assertAlmostEqual(a["logprob"], b["logprob"], delta=1e-4)
            self.assertGreater(stopped, 5)

    def test_a_stop_in_one_token_ends_the_text(self):
        asked = [{"type": "generate", "prompt": "The ", "max_tokens": 200, "seed": 3, "until": [" "]}]
        (got,), _ = self.answers(self.own, asked)
        self.assertLess(len(got["tokens"]), 100)
        self.assertEqual(got["finish"], "stop")
        self.assertNotIn(" ", got["text"])

    def test_spaces_of_a_decoder(self):
        """A text goes on with the space that the library's decoder takes from its beginning."""
        asked = [{"type": "generate", "prompt": p, "max_tokens": 12, "seed": seed, "until": []} for seed in range(12)
                 for p in ("The trainer", "the model of", "a", "GPU", "FoX is")]
        got, trainer = self.answers(self.words, asked)
        for request, answer in zip(asked, got):
            ids = trainer.tokenizer.encode(request["prompt"])
            self.assertEqual(trainer.tokenizer.decode(ids + answer["tokens"]), request["prompt"] + answer["text"])
        self.assertTrue(any(a["text"].startswith(" ") for a in got), got)

    def test_prompt(self):
        prompt = ["--prompt", "The trainer", "--generate", 40]
        want = command(TRAIN_FOX, "--init", self.read, *prompt, "--temperature", 0)
        self.assertTrue(want.startswith("The trainer"))
        for folder in (self.read, self.sent):
            script = [sys.executable, "scripts/prompt.py", "--trainer", TRAIN_FOX, "--init", folder]
            self.assertEqual(command(*script, *prompt, "--temperature", 0), want)
            drawn = command(*script, *prompt, "--seed", 3)
            stop = re.search("[!-~][!-,.-~]", drawn[16:])[0]  # not half of a character, nor --
            self.assertEqual(command(*script, *prompt, "--seed", 3, "--stop=" + stop), drawn[:drawn.index(stop, 11)] + "\n")
        script[-1] = self.own
        several = command(*script, *prompt, "--seed", 2, "--samples", 2).split("--- sample ")
        self.assertEqual(several[2], "2 of 2\n" + command(*script, *prompt, "--seed", 3))
        greedy = [*map(str, script), "--prompt", "Größe", "--generate", "4", "--temperature", "0"]
        latin = subprocess.run(greedy, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "latin1"})
        self.assertEqual((latin.stdout.decode(), latin.stderr), (command(*greedy), b""))
        lines = subprocess.run([*map(str, script), "--prompt", "-", "--generate", "4"], input="One\n\nTwo",
                               capture_output=True, text=True, cwd=ROOT)
        self.assertEqual((lines.returncode, lines.stderr), (0, ""))
        self.assertLess(lines.stdout.index("One"), lines.stdout.index("\nTwo"))
        script = [*map(str, script)]
        for arguments, message in ((["--generate", "0"], "--generate and --samples must be at least 1"),
                                   (["--top-p", "nan"], "--top-p nan: not a finite number"),
                                   (["--prompt", b"a\xff"], "--prompt: is not UTF-8"),
                                   (["--stop", b"a\xff"], "--stop: is not UTF-8"),
                                   (["--prompt", "-"], "--prompt -: line 2: is not UTF-8")):
            bad = subprocess.run([*script, *arguments], input=b"One\n\xff\n", capture_output=True, cwd=ROOT)
            self.assertEqual((bad.returncode, bad.stderr.decode()), (1, f"error: {message}\n"))
        closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *script, "--prompt", "-"], capture_output=True,
                                text=True, cwd=ROOT)
        self.assertEqual((closed.returncode, closed.stderr), (1, "error: --prompt -: standard input is closed\n"))

    def test_needle(self):
        (self.tmp / "hay").mkdir()
        text = "".join(c for c in (ROOT / "README.md").read_text(encoding="utf-8") if c.isascii())
        (self.tmp / "hay/a.txt").write_text(text)
        cells = []
        for name, folder in (("read", self.read), ("sent", self.sent)):
            out = self.tmp / f"{name}.json"
            self.run_script("needle.py", "--init", folder, "--trainer", TRAIN_FOX, "--haystack",
                            self.tmp / "hay", "--kind", "easy", "--lengths", "600,900", "--depths", "0,50",
                            "--out", out)
            cells.append(json.loads(out.read_text())["cells"])
        self.assertEqual([(c["text"], c["score"]) for c in cells[0]], [(c["text"], c["score"]) for c in cells[1]])
        for a, b in zip(*cells):
            self.assertAlmostEqual(a["logprob"], b["logprob"], delta=1e-3)

    @unittest.skipIf(HARNESS, "lm_eval: not installed")
    def test_harness(self):
        docs = [{"question": f"Where is {w}?", "answer": f"In {w}."} for w in ("Paris", "the model", "a file")]
        (self.tmp / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
        common = {"dataset_path": "json", "test_split": "test",
                  "dataset_kwargs": {"data_files": {"test": str(self.tmp / "docs.jsonl")}}}
        tasks = {"says": {"output_type": "generate_until", "doc_to_text": "{{question}}",
                          "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
                          "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}},
                 "knows": {"output_type": "loglikelihood", "doc_to_text": "{{question}}",
                           "doc_to_target": " {{answer}}", "metric_list": [{"metric": "perplexity"}]}}
        (self.tmp / "tasks").mkdir()
        for name, task in tasks.items():
            (self.tmp / f"tasks/{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
        os.environ.update(HF_HOME=str(self.tmp / "cache"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        found = []
        for folder in (self.read, self.sent):
            out = self.tmp / f"out{len(found)}"
            self.run_script("harness.py", "--init", folder, "--trainer", TRAIN_FOX, "--include_path",
                            self.tmp / "tasks", "--tasks", "says,knows", "--output_path", out)
            found.append(json.loads(next(out.rglob("results*.json")).read_text())["results"])
        want, got = (f["knows"]["perplexity,none"] for f in found)
        self.assertAlmostEqual(want / got, 1, delta=1e-4)
        self.assertEqual(*(f["says"] for f in found))


if __name__ == "__main__":
    if TOKENS:
        print("skipped: tokenizers: not installed\n0 passed, 0 failed")
        sys.exit()
    run_tests()
