"""
Tests of scripts/eval/needle.py and needle_text.py, which dev/test/eval/test_eval.py runs.
"""
import json
import math
import random
import re
from pathlib import Path
from unittest import mock

from eval_case import FAKE, ROOT, Case, needs_tokenizers

import fake_requests
import fox
import needle


def haystack_text(sentences):
    rng = random.Random(1)
    words = "the of and to in is that for as with on by this from at which or an be are".split()
    return "".join(" ".join(rng.choices(words, k=rng.randint(4, 12))) + ". " for _ in range(sentences))


class TestNeedle(Case):
    def setUp(self):
        super().setUp()
        self.hay = self.tmp / "hay"
        (self.hay / "b").mkdir(parents=True)
        (self.hay / "b/2.txt").write_text(haystack_text(20))
        (self.hay / "a.txt").write_text("First. " + haystack_text(30))

    def arguments(self, folder, *more, kind="single"):
        return ["--trainer", FAKE, "--haystack", self.hay, "--kind", kind, "--init", folder,
                "--out", self.tmp / "out.json", "--lengths", "600,1200", "--depths", "0:100:50", *more]

    def cells(self):
        found = json.loads((self.tmp / "out.json").read_text())["cells"]
        return {(c["length"], c["depth"], c["sample"]): c for c in found}

    def test_insert(self):
        hay = needle.Haystack(self.hay, fox.Tokenizer(self.model()), 1000)
        text = bytes(hay.ids).decode()
        self.assertTrue(text.startswith("First. "))
        self.assertEqual(bytes(hay.cut(0, 5000)).decode(), (text * 5)[:5000])  # a short haystack repeats
        begin = needle.STRIDE % len(text)
        at = text.index(".", begin) + 1
        self.assertEqual(bytes(hay.cut(1, 5000)).decode(), (text * 6)[at:at + 5000])
        n = 1000
        for depth in range(0, 101, 10):
            out = bytes(hay.insert(hay.cut(0, n), [(depth, list(b"[!]"))])).decode()
            at = out.index("[!]")
            self.assertEqual(out.replace("[!]", ""), text[:n])
            self.assertTrue(at == n if depth == 100 else at == 0 or out[at - 1] == ".")
            self.assertTrue(n * depth / 100 - 120 < at <= n * depth / 100, (depth, at))

    def test_prompts(self):
        tokenizer = fox.Tokenizer(self.model())
        hay = needle.Haystack(self.hay, tokenizer, 1000)
        for kind in needle.KINDS:
            options = type("Options", (), {"kind": kind, "seed": 0})
            made = [needle.make_sample(options, (1500, 50, k), hay, tokenizer) for k in (0, 0, 1)]
            self.assertEqual(made[0][0], made[1][0])
            self.assertNotEqual(made[0][0], made[2][0])
            (generate, score), grade = made[0]
            prompt = bytes(generate["prompt"]).decode()
            self.assertEqual(generate["prompt"], score["context"])
            answer = bytes(score["continuation"]).decode()
            self.assertEqual(grade([{"text": ""}, {"logprob": -1}])["answer"], answer)
            self.assertEqual(prompt.count(answer), 1)
            self.assertLessEqual(len(prompt + answer), 1500)
            statement = prompt.rsplit("? ", 1)[1].removeprefix("Answer: ")
            self.assertEqual(prompt.count(statement + answer), 1)  # what the question's last words complete
            self.assertEqual(prompt.count("special magic number"), {"single": 3, "multi-key": 6}.get(kind, 0))
            self.assertEqual(prompt.count(needle.QUESTION), {"standard": 1, "easy": 2}.get(kind, 0))
            if kind in ("standard", "easy"):  # as the paper's code ends it
                self.assertTrue(prompt.endswith(
                    "\n\nThere is an important piece of information hidden inside the above document. Now that "
                    "you've read the document, I will quiz you about it. Answer the following question: What is "
                    "the best thing to do in San Francisco? Answer: The best thing to do in San Francisco is"))

    @needs_tokenizers
    def test_prompts_of_gpt2(self):
        tokenizer = fox.Tokenizer(self.gpt2())
        self.assertEqual(tokenizer.encode("Hello world."), [15496, 995, 13])
        self.assertNotIn(50256, tokenizer.encode("<|endoftext|>"))  # text, as in the trainer
        for kind in needle.KINDS:
            made = needle.make_needle(kind, random.Random(3))
            question, answer = map(tokenizer.encode, (made.question, made.answer))
            self.assertEqual(tokenizer.encode(made.question + made.answer), question + answer)
            tail = answer[:-1]  # the needle has the answer in the same tokens
            ids = tokenizer.encode(made.texts[0])
            self.assertTrue(any(ids[i:i + len(tail)] == tail for i in range(len(ids))))

    def gpt2(self):
        """A folder with GPT-2's tokenizer.json, made from vocab.bpe."""
        from tokenizers import ByteLevelBPETokenizer
        from tokenizers.pre_tokenizers import ByteLevel
        lines = (ROOT / "dev/test/fixtures/gpt2/vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
        merges = [tuple(line.split(" ")) for line in lines]
        rank = [*range(33, 127), *range(161, 173), *range(174, 256)]  # printable bytes come first
        alphabet = sorted(ByteLevel.alphabet(), key=lambda c: (ord(c) not in rank, ord(c)))
        vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
        library = ByteLevelBPETokenizer(vocab, merges)
        library.add_special_tokens(["<|endoftext|>"])
        folder = self.model(vocab_size=50257)
        library.save(str(folder / "tokenizer.json"))
        return folder

    def test_score(self):
        found = "It is: EAT a  sandwich and\nsit in Dolores Park on a sunny day, no"
        self.assertEqual(needle.score(found, needle.ANSWER), 10)
        self.assertEqual(needle.score(" 1234567. and", " 1234567."), 10)
        self.assertEqual(needle.score("", needle.ANSWER), 1)
        self.assertAlmostEqual(needle.score("sandwich, park and", needle.ANSWER), 1 + 9 * 3 / 12)

    def test_finds_inside_the_window_only(self):
        for kind in needle.KINDS:
            (self.tmp / "out.json").unlink(missing_ok=True)
            folder = self.model(window=900, options={"seq-len": 900, "json-escape": False})
            done = self.start("needle.py", *self.arguments(folder, kind=kind))
            self.assertEqual(done.stderr, "0/6 samples\n12 answers\n")  # said by a trainer that ends by itself
            scores = {cell: c["score"] for cell, c in self.cells().items()}
            self.assertEqual(len(scores), 6)
            missed = scores.pop((1200, 0, 0))
            self.assertLess(missed, 10)
            self.assertEqual(set(scores.values()), {10})
            self.assertIn("mean scores, from 1: nothing of the answer, to 10: all of it\n", done.stdout)
            self.assertIn("0%   10.00", done.stdout)
            self.assertIn("\nscore up to 900 tokens: 10.000 +- 0.000\n", done.stdout)
            self.assertIn(f"\nscore beyond: {(missed + 20) / 3:.3f} +- ", done.stdout)
        logprob = self.cells()[600, 0, 0]["logprob"]
        self.assertAlmostEqual(logprob, 9 * math.log(fake_requests.COPIED))

    def test_resumes(self):
        folder = self.model(options={"json-escape": False})
        self.dies("ended with exit code 3 after 7 of 12 answers", "needle.py",
                  *self.arguments(self.broken(folder, 7)))
        kept = self.cells()
        self.assertLess(len(kept), 4)
        self.run_script("needle.py", *self.arguments(self.broken(folder, 12 - 2 * len(kept))))  # not one more
        self.assertEqual({cell: self.cells()[cell] for cell in kept}, kept)
        whole = (self.tmp / "out.json").read_bytes()
        self.run_script("needle.py", *self.arguments(self.broken(folder, 0)))  # nothing is asked
        (self.tmp / "out.json").unlink()
        self.run_script("needle.py", *self.arguments(self.broken(folder, 12)))
        self.assertEqual((self.tmp / "out.json").read_bytes(), whole)
        self.dies("was made with --kind single", "needle.py", *self.arguments(folder, kind="easy"))
        self.dies("was made with --json-escape False", "needle.py", *self.arguments(folder, "--json-escape"))

    def broken(self, folder, answers):
        (folder / "config.json").write_text(json.dumps({"vocab_size": 257, "fail_after": answers}))
        return folder

    def test_refuses(self):
        folder = self.model()
        self.dies("--depths: percent", "needle.py", *self.arguments(folder, "--depths", "0,101"))
        self.dies("--lengths 210: too short", "needle.py", *self.arguments(folder, "--lengths", "210"))
        self.dies("none: no files", "needle.py", *self.arguments(folder, "--haystack", self.tmp / "none"))
        (self.tmp / "out.json").write_text("{")
        self.dies("out.json: not JSON", "needle.py", *self.arguments(folder))

    def test_training_text(self):
        arguments = ["--haystack", self.hay, "--documents", 20, "--length", 1200, "--every", 150]
        self.run_script("needle_text.py", *arguments, "--out", self.tmp / "text")
        self.run_script("needle_text.py", *arguments, "--out", self.tmp / "again")
        distances = []
        for path in sorted((self.tmp / "text").iterdir()):
            text = path.read_text()
            self.assertEqual(text, (self.tmp / "again" / path.name).read_text())
            asked = re.findall(r"\nWhat is the special magic number for (.*?)\? (.*)\n", text)
            self.assertEqual(len(asked), 8)
            for key, answer in asked:
                self.assertTrue(answer.startswith(needle.state(key)))
                statement, question = text.index(f"\n{answer}\n"), text.index(needle.ask(key))
                distances.append(question - statement)
            self.assertEqual(re.sub(r"\n(The special|What is).*\n", "", text) in
                             "".join(needle.read_text(p) for p in needle.text_files(self.hay)), True)
        self.assertGreater(min(distances), 0)
        self.assertGreater(max(distances), 1000)
        self.dies("text: exists already", "needle_text.py", *arguments, "--out", self.tmp / "text")
        before = sorted(self.tmp.iterdir())
        mocked = mock.patch.object(Path, "write_text", side_effect=[5, OSError(28, "No space left on device")])
        with mocked, self.assertRaisesRegex(fox.Error, "full: cannot write: No space left"):
            with fox.new_folder(self.tmp / "full") as part:
                for name in "ab":
                    (part / name).write_text("text")
        with self.assertRaisesRegex(fox.Error, "full: cannot write: in/text: Permission denied"):
            with fox.new_folder(self.tmp / "full"):
                raise PermissionError(13, "Permission denied", "in/text")
        self.assertEqual(sorted(self.tmp.iterdir()), before)
        arguments[-3] = 10**6
        self.dies("fewer than --length", "needle_text.py", *arguments, "--out", self.tmp / "new")
        (self.hay / "c.txt").write_text(haystack_text(60))
        arguments[-3:] = [1601, "--every", 1]
        self.dies("1601 needles a document, of 1600 keys", "needle_text.py", *arguments, "--out", self.tmp / "new")
