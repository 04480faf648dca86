"""
A model of any tokenizer from text to answers: make_shards.py, the trainer, prompt.py, needle.py and harness.py.

    python3 -m venv build/eval
    build/eval/bin/pip install -c scripts/requirements.txt tokenizers lm_eval
    build/eval/bin/python dev/test/scripts/test_tokenizers.py

A model is trained on tokens of GPT-2's form, which the trainer reads, and copied with a tokenizer.json that gives
the same ids of ASCII text and that it does not read: what the scripts make of token ids must be what the trainer
makes of text. test_tokenizers.sh runs this where the tokenizers library is installed.
"""
import json
import os
import random
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

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


def train(name, tokenizer, end):
    """A model trained on README.md. Returns its folder."""
    tokenizer.save(str(WORK / f"{name}.json"))
    said = command(sys.executable, "scripts/make_shards.py", "--tokenizer", WORK / f"{name}.json", "--jobs", 1,
                   "--out", WORK / name, "README.md")
    options = said.split("for the trainer: ")[1].split()
    assert options[-1] == f"eos_token_id={end}", said
    command(TRAIN_FOX, "--model", "fox-pro-nano", *options, "--set", "hidden_size=64", "--set",
            "num_hidden_layers=2", "--seq-len", T, "--batch-tokens", 4 * T, "--max-tokens", 4 * T * STEPS,
            "--lr", 1e-2, "--data", f"{WORK / name}_train_*.bin", "--out", WORK / f"run_{name}")
    return WORK / f"run_{name}/step_{STEPS:08}"


class TestTokenizers(Case):
    @classmethod
    def setUpClass(cls):
        from tokenizers import ByteLevelBPETokenizer, SentencePieceBPETokenizer
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        text = str(ROOT / "README.md")
        form = ByteLevelBPETokenizer()  # of GPT-2's form: end of text comes last
        form.train([text], vocab_size=600, show_progress=False)
        form.add_special_tokens(["<|endoftext|>"])
        cls.read = train("form", form, form.get_vocab_size() - 1)
        cls.sent = cls.read.parent / "sent"
        shutil.copytree(cls.read, cls.sent)
        tokenizer = json.loads((cls.sent / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "NFC"}
        (cls.sent / "tokenizer.json").write_text(json.dumps(tokenizer))
        own = ByteLevelBPETokenizer()  # as users train them: end of text comes first
        own.train([text], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
        cls.own = train("own", own, 0)
        words = SentencePieceBPETokenizer()
        words.train([text], vocab_size=600, special_tokens=["<unk>", "</s>"], show_progress=False)
        cls.words = train("words", words, 1)

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
                       "until": rng.choice([[], ["\n"], [" the", "e t"], ["ing"]])}]
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
        asked = [{"type": "generate", "prompt": p, "max_tokens": 12, "seed": 1, "until": []}
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
            self.assertEqual(command(*script, *prompt, "--seed", 3, "--stop", drawn[20:22]),
                             drawn[:drawn.index(drawn[20:22], 11)] + "\n")
        script[-1] = self.own
        several = command(*script, *prompt, "--seed", 2, "--samples", 2).split("--- sample ")
        self.assertEqual(several[2], "2 of 2\n" + command(*script, *prompt, "--seed", 3))
        lines = subprocess.run([*map(str, script), "--prompt", "-", "--generate", "4"], input="One\n\nTwo",
                               capture_output=True, text=True, cwd=ROOT)
        self.assertEqual(lines.returncode, 0, lines.stderr)
        self.assertLess(lines.stdout.index("One"), lines.stdout.index("\nTwo"))
        bad = subprocess.run([*map(str, script), "--generate", "0"], capture_output=True, text=True, cwd=ROOT)
        self.assertEqual((bad.returncode, bad.stderr), (1, "error: --generate and --samples must be at least 1\n"))

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
