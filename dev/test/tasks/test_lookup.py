"""
Recall for base models: phone books and facts in text, and the results of a model that reads and of one that does not.
"""
import random
import re
import unittest

from task_case import SOLVER, TaskCase, needs_plots

import lookup


class TestLookup(TaskCase):
    def setUp(self):
        super().setUp()
        (self.tmp / "text").mkdir()
        words = ["".join(random.Random(k).choices("abcdefghij", k=4 + k % 6)) for k in range(400)]
        (self.tmp / "text/a.txt").write_text("An x1 " + " ".join(words[:200]) + ".\n")
        (self.tmp / "text/b.txt").write_text(" ".join(words[200:]) + "\n")
        self.text = lookup.Text(self.tmp / "text")

    def test_text(self):
        self.assertEqual((len(self.text.words), len(self.text.names)), (402, 399))  # without An, x1 and the one with a period
        for n in 1, 402, 500:
            piece = self.text.piece(n, random.Random(n))
            at = self.text.words.index(piece[0])
            self.assertEqual(piece, (self.text.words[at:] + 2 * self.text.words)[:n])

    def test_phonebook(self):
        context, right, others = lookup.phonebook(3, 9, self.text, random.Random(1))
        book, again = context.split("\n\n")
        numbers = dict(re.findall(r"^(\w+ \w+):( [2-9]\d\d-\d{4})$", book, re.M))
        *examples, asked = again.split("\n")
        self.assertEqual((len(numbers), len(set(numbers.values())), numbers[asked.rstrip(":")]), (9, 9, right))
        self.assertEqual(examples, [f"{name}:{numbers[name]}" for name in (e.partition(":")[0] for e in examples)])
        self.assertEqual((len(examples), len(set(others))), (2, 3))
        self.assertTrue(set(others) < set(numbers.values()) - {right})
        names = list(numbers)
        self.assertIn(numbers[names[names.index(asked.rstrip(":")) - 1]], others)
        self.assertEqual(len(lookup.phonebook(20, 4, self.text, random.Random(1))[2]), 3)

    def test_facts(self):
        for kind, k in ((kind, k) for kind in (1, 2) for k in range(20)):
            context, right, others = lookup.facts(kind, 100, 3, self.text, random.Random(k))
            told = re.findall(r"(\w+) (went to|took) the (\w+)\.", context)
            self.assertEqual([done for _, done, _ in told], ["went to"] * 3 + ["took"] * 3 * (kind == 2) + ["went to"] * 3)
            places = [where for _, done, where in told if done == "went to"]
            self.assertEqual((len(set(places)), set(others)), (6, {f" {w}" for w in places} - {right}))
            [(thing, name)] = re.findall(r"\n(The )?(\w+) is in the$", context)
            self.assertEqual(bool(thing), kind == 2)
            who = [a for a, done, what in told if done == "took" and what == name][0] if thing else name
            self.assertEqual(right, " " + [where for a, done, where in told if a == who and done == "went to"][-1])
            plain = re.sub(r"\w+ (went to|took) the \w+\. ?", "", context.partition("\n")[0]).split()
            self.assertEqual(len(plain), 100)

    def test_right_and_no_answers(self):
        text = ["--text", self.tmp / "text", "--samples", 6]
        for task, more in ("phonebook", ["--entries", "4,20"]), ("facts", ["--lengths", "30,120"]):
            found, said = self.measure("lookup.py", "right", task, *text, *more)
            self.assertEqual({(m["samples"], m["right"], m["logprob"], m["margin"]) for m in found["means"]}, {(6, 100, 0, 100)})
            self.assertIn("right is the likeliest, %", said)
        found, _ = self.measure("lookup.py", "none", "phonebook", *text, "--entries", 9)
        self.assertEqual([(m["right"], m["margin"]) for m in found["means"]], [(0, 0)])

    def test_refuses(self):
        new = ["--init", self.model(answers="right"), "--trainer", SOLVER, "--out", self.tmp / "new.json"]
        script, text = "tasks/lookup.py", ["--text", self.tmp / "text"]
        self.dies("none: no files", script, "facts", *new, "--text", self.tmp / "none")
        self.dies("has 399 words of 4 to 9 letters, 400 are needed", script, "phonebook", *new, *text, "--entries", 200)
        self.dies("--entries: at least 4", script, "phonebook", *new, *text, "--entries", 3)
        self.dies("--facts: 1 and 2", script, "facts", *new, *text, "--facts", 3)
        self.dies("--lengths at least 5 times --people", script, "facts", *new, *text, "--lengths", 14)

    @needs_plots
    def test_pictures(self):
        for task, more in ("phonebook", ["--entries", "4,20"]), ("facts", ["--lengths", "30,120"]):
            picture = self.tmp / f"{task}.svg"
            self.measure("lookup.py", "right", task, "--text", self.tmp / "text", *more, "--samples", 3, "--picture", picture)
            self.assertIn(lookup.TASKS[task].title, picture.read_text())


if __name__ == "__main__":
    unittest.main(verbosity=2)
