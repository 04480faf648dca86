"""
Keys with several values: streams of text and ids, and the results of models that answer right, stale and not at all.
"""
import importlib.util
import json
import random
import re
import unittest

from task_case import SOLVER, TaskCase, needs_plots

import fox
import keys

NEEDED = [m for m in ("numpy", "recall") if not importlib.util.find_spec(m)]
needs_recall = unittest.skipIf(NEEDED, f"not installed: {', '.join(NEEDED)}")


class TestText(TaskCase):
    def test_stream(self):
        text, values = keys.stream(5, 30, random.Random(1))
        lines = re.findall(r"^(\w+): (\w+)$", text, re.M)
        self.assertEqual(len(lines), 150)
        self.assertEqual(len({word for _, word in lines}), 150)
        self.assertEqual({k: [word for key, word in lines if key == k] for k in values}, values)
        self.assertEqual([len(v) for v in values.values()], [30] * 5)
        self.assertGreater(sum(a[0] != b[0] for a, b in zip(lines, lines[1:])), 90)  # not one key after the other
        self.assertNotEqual(keys.stream(5, 30, random.Random(2)), (text, values))

    def test_questions(self):
        tokenizer = fox.Tokenizer(self.model())
        text, values = keys.stream(4, 3, random.Random(1))
        asked = keys.questions_of_text(4, 3, random.Random(1), tokenizer)
        for (key, known), (context, right, stale, words) in zip(values.items(), asked, strict=True):
            self.assertEqual(bytes(context).decode(),
                             text + f"\nWhat is the last value of {key}? The last value of {key} is")
            self.assertEqual([bytes(ids).decode() for ids in (*stale, right)], [f" {word}" for word in known])
            self.assertEqual(words, known)

    def test_grade(self):
        question = [1, 2], [7, 8], [[3], [4, 5]], ["old", "elder", "new"]
        requests, grade = keys.sample_of([question])
        self.assertEqual([r["type"] for r in requests], ["generate", "score", "score"])
        self.assertEqual([r["continuation"] for r in requests[1:]], [[7, 8], [4, 5]])  # the newest stale value
        for text, right, stale in ((" new", 100, 0), (" NEW; old", 100, 0), ("\n - old.", 0, 100), (" elder", 0, 100),
                                   (" newer", 0, 0), ("", 0, 0), (" ?", 0, 0)):
            found = grade([{"text": text}, {"logprob": -1}, {"logprob": -3}])
            self.assertEqual(found, {"right": right, "stale": stale, "logprob": -1, "margin": 2}, text)
        requests, grade = keys.sample_of([([1], [7], [], None), ([1], [8], [], None)])
        found = grade([{"tokens": [7]}, {"logprob": -1}, {"tokens": [9]}, {"logprob": -3}])
        self.assertEqual(found, {"right": 50, "stale": 0, "logprob": -2})

    def test_one_sample(self):
        """It has no standard error. What is computed is said from the first moment on."""
        out, model = self.tmp / "one.json", self.model(answers="right")
        done = self.start("tasks/keys.py", "text", "--init", model, "--trainer", SOLVER, "--out", out, "--keys", 2,
                          "--updates", "1,3", "--samples", 1)
        self.assertEqual((done.returncode, done.stderr.splitlines()[:1]), (0, ["0/2 samples"]), done.stderr)
        self.assertEqual({m["right_error"] for m in json.loads(out.read_text())["means"]}, {None})
        self.assertRegex(done.stdout, r"right, %\n.*\n2 +100\.00 +100\.00\n")

    def test_right_stale_and_no_answers(self):
        options = ["text", "--keys", "2,5", "--updates", "3,20", "--samples", 3]
        for answers, right, stale in (("right", 100, 0), ("stale", 0, 100), ("none", 0, 0)):
            found, said = self.measure("keys.py", answers, *options)
            self.assertEqual([(m["keys"], m["updates"], m["right"], m["stale"]) for m in found["means"]],
                             [(k, n, right, stale) for k in (2, 5) for n in (3, 20)])
            self.assertEqual({m["margin"] for m in found["means"]}, {{"right": 100, "stale": 0, "none": 0}[answers]})
            self.assertIn("right, %\nkeys \\ updates a key", said)

    def test_resumes_and_refuses(self):
        model = self.model(answers="right", fail_after=8)
        arguments = ["--init", model, "--trainer", SOLVER, "--out", self.tmp / "out.json", "--keys", 2, "--updates", 3,
                     "--samples", 2]
        self.dies("ended with exit code 3 after 8 of 12 answers", "tasks/keys.py", "text", *arguments)
        kept = json.loads((self.tmp / "out.json").read_text())["samples"]
        config = {"vocab_size": 257, "answers": "right", "fail_after": 12 - 6 * len(kept)}
        (model / "config.json").write_text(json.dumps(config))
        self.run_script("tasks/keys.py", "text", *arguments)
        self.dies("was made with --task text", "tasks/keys.py", "mqar", *arguments)
        new = ["--init", model, "--trainer", SOLVER, "--out", self.tmp / "new.json"]
        self.dies("--keys 41: of text there are 40", "tasks/keys.py", "text", *new, "--keys", 41)
        self.dies("overwritten takes one", "tasks/keys.py", "overwritten", *new, "--lengths", "512,1024")
        self.dies("at least 1", "tasks/keys.py", "text", *new, "--updates", "0,3")

    @needs_plots
    def test_picture(self):
        picture = self.tmp / "text.svg"
        self.measure("keys.py", "stale", "text", "--keys", "2,4", "--updates", "3,30", "--samples", 2, "--picture", picture)
        self.assertEqual(picture.read_text().count(">keys 4</text>"), 1)
        out = self.tmp / "other.json"
        self.dies("text.xyz: a picture ends in one of", "tasks/keys.py", "text", "--init", self.model(answers="stale"), "--trainer", SOLVER,
                  "--out", out, "--picture", self.tmp / "text.xyz")
        self.assertFalse(out.exists())  # before anything was measured


@needs_recall
class TestIds(TaskCase):
    def measured(self, answers, task, *options):
        out = self.tmp / f"{task}_{answers}.json"
        self.run_script("tasks/keys.py", task, "--init", self.model(vocab_size=8192, answers=answers), "--trainer", SOLVER,
                        "--out", out, "--samples", 3, *options)
        return json.loads(out.read_text())["means"]

    def test_right_and_no_answers(self):
        grid = ["--keys", "4,8", "--rewrites", "0,2", "--lengths", 128]
        for answers, right in (("right", 100), ("none", 0)):
            means = self.measured(answers, "overwritten", *grid)
            self.assertEqual([(m["keys"], m["rewrites"]) for m in means], [(4, 0), (4, 2), (8, 0), (8, 2)])
            self.assertEqual({(m["right"], m["stale"]) for m in means}, {(right, 0)})
            self.assertEqual(["margin" in m for m in means], [False, True, False, True])
            means = self.measured(answers, "mqar", "--pairs", "4,16", "--lengths", "128,256")
            self.assertEqual([(m["length"], m["pairs"], m["right"]) for m in means],
                             [(t, n, right) for t in (128, 256) for n in (4, 16)])

    def test_stale_ids(self):
        requests, grade = keys.sample_of([([5, 1, 2], [7], [[3], [4]], None)])
        self.assertEqual(requests[0]["max_tokens"], 1)
        for tokens, right, stale in (([7], 100, 0), ([3], 0, 100), ([4], 0, 100), ([9], 0, 0), ([], 0, 0)):
            found = grade([{"tokens": tokens}, {"logprob": -1}, {"logprob": -1}])
            self.assertEqual((found["right"], found["stale"]), (right, stale))


if __name__ == "__main__":
    unittest.main(verbosity=2)
