"""
Copy, conflict and corrupted context: what is asked, and the results of a model that copies and of one that does not.
"""
import argparse
import array
import json
import math
import random
import struct
import unittest

from task_case import SOLVER, TaskCase, needs_plots

import samples
import zero_shot

COPIED = math.log(0.9 * 256 / 0.1)  # log-probability of a copied token above that of another, in fake_requests.py


def write_shard(path, ids, doc_len=0, version=1):
    header = struct.pack("<256i", 20240520, version, len(ids), doc_len, *[0] * 252)
    path.write_bytes(header + array.array("HII"[version - 1], ids).tobytes())


class TestZeroShot(TaskCase):
    def setUp(self):
        super().setUp()
        rng = random.Random(1)
        self.ids = [rng.randrange(128, 250) for _ in range(6000)]  # no text
        write_shard(self.tmp / "a.bin", self.ids[:4000])
        write_shard(self.tmp / "b.bin", self.ids[4000:], version=2)
        self.data = ["--data", f"{self.tmp}/[ab].bin"]
        self.options = argparse.Namespace(segment=16, targets=20)

    def held_out(self):
        return zero_shot.HeldOut(self.data[1])

    def test_pieces(self):
        data, rng = self.held_out(), random.Random(2)
        texts = ["".join(map(chr, ids)) for ids in (self.ids[:4000], self.ids[4000:])]
        pieces = ["".join(map(chr, data.piece(100, rng))) for _ in range(60)]
        self.assertEqual({len(piece) for piece in pieces}, {100})
        counts = [sum(piece in text for piece in pieces) for text in texts]
        self.assertEqual(sum(counts), 60)
        self.assertGreater(min(counts), 5)
        both = zero_shot.HeldOut(f"{self.tmp}/b.bin,{self.tmp}/a.bin")
        self.assertEqual([len(ids) for ids, _ in both.shards], [4000, 2000])
        write_shard(self.tmp / "documents1.bin", self.ids)  # which the name below matches as a pattern
        write_shard(self.tmp / "documents[1].bin", [i // 50 for i in range(5000)], doc_len=50)
        documents = zero_shot.HeldOut(f"{self.tmp}/documents[1].bin")
        self.assertEqual({len(set(documents.piece(n, rng))) for n in (1, 49, 50) for _ in range(50)}, {1})
        with self.assertRaisesRegex(zero_shot.Error, "asked for 51 tokens, its longest document has 50"):
            documents.piece(51, rng)

    def test_copy(self):
        (begin, end, first), _ = zero_shot.copy((16, 100, 0), self.held_out(), random.Random(3), self.options)
        segment = begin["continuation"] + end["continuation"]
        self.assertEqual([len(segment), len(begin["context"]), len(first["context"])], [16, 116, 116])
        self.assertEqual(begin["context"][:16], segment)
        self.assertEqual(end["context"], begin["context"] + segment[:8])
        self.assertEqual(first["continuation"], segment)
        self.assertEqual(first["context"][16:], begin["context"][16:])
        self.assertNotEqual(first["context"][:16], segment)

    def test_conflict(self):
        requests, grade = zero_shot.conflict((3, 50, 0), self.held_out(), random.Random(3), self.options)
        new, old = (r["continuation"] for r in requests[:2])
        self.assertEqual([r["continuation"] for r in requests], [new, old, old, new])
        self.assertNotEqual(new[0], old[0])
        for (a, b), request in zip(((old, new), (old, new), (new, old), (new, old)), requests):
            context = request["context"]
            cue = context[-8:]
            self.assertEqual(len(context), 3 * (16 + zero_shot.SPACE) + 16 + 50 + 8)
            at = [i for i in range(len(context) - 8) if context[i:i + 8] == cue]
            self.assertEqual(at, [0, 144, 288, 432])
            self.assertEqual([context[i + 8:i + 16] for i in at], [a, a, a, b])
        logprobs = [{"logprob": value} for value in (-1, -3, -5, -1)]
        self.assertEqual(grade(logprobs), {"margin": -1, "newer": 50})

    def test_corrupted(self):
        data, asked = self.held_out(), {}
        for share in (0, 1, 8, 32, 100):
            [request], grade = zero_shot.corrupted((400, share, 0), data, random.Random(4), self.options)
            asked[share] = request["context"]
            self.assertEqual(len(request["context"]), 400)
            text = "".join(map(chr, asked[0] + request["continuation"]))
            self.assertTrue(any(text in "".join(map(chr, ids)) for ids in (self.ids[:4000], self.ids[4000:])))
            self.assertEqual(grade([{"logprob": -30}]), {"loss": 1.5})
        places = {s: {i for i in range(400) if asked[s][i] != asked[0][i]} for s in asked}
        for share, found in places.items():  # some tokens are replaced by the same
            self.assertTrue(0.9 * 4 * share <= len(found) <= 4 * share, (share, len(found)))
        self.assertTrue(places[1] < places[8] < places[32] < places[100])
        self.assertTrue(all(asked[32][i] == asked[8][i] for i in places[8]))

    def test_right_and_no_answers(self):
        small = [*self.data, "--gaps", "64,512", "--stale", "1,3", "--segment", 32, "--lengths", 300, "--targets", 20,
                 "--shares", "8,32", "--samples", 4]
        found = {}
        for task in zero_shot.TASKS:
            for answers in ("right", "none"):
                means = self.measure("zero_shot.py", answers, task, *small)[0]["means"]
                self.assertEqual({m["samples"] for m in means}, {4})
                found[task, answers] = means
        self.assertEqual({m["copied"] for m in found["copy", "right"]}, {100})
        self.assertTrue(all(0.8 * COPIED < m["fall"] <= 1.01 * COPIED for m in found["copy", "right"]))
        self.assertEqual({(m["copied"], m["fall"]) for m in found["copy", "none"]}, {(0, 0)})
        self.assertEqual([(m["stale"], m["gap"], m["newer"]) for m in found["conflict", "right"]],
                         [(1, 64, 100), (1, 512, 100), (3, 64, 100), (3, 512, 100)])
        self.assertTrue(all(m["margin"] > COPIED for m in found["conflict", "right"]))
        self.assertEqual({(m["newer"], m["margin"]) for m in found["conflict", "none"]}, {(0, 0)})
        self.assertEqual([(m["percent"], m["rise"]) for m in found["corrupted", "none"]], [(0, 0), (8, 0), (32, 0)])

    def test_rise_is_of_the_same_text(self):
        """The text is periodic, and the model copies it as long as it finds a whole period."""
        write_shard(self.tmp / "period.bin", list(range(128, 168)) * 100)
        arguments = ["corrupted", "--data", self.tmp / "period.bin", "--lengths", 200, "--targets", 20, "--shares", "100",
                     "--samples", 3]
        means = self.measure("zero_shot.py", "right", *arguments)[0]["means"]
        self.assertAlmostEqual(means[0]["loss"], -math.log(0.9))
        self.assertAlmostEqual(means[1]["rise"], means[1]["loss"] - means[0]["loss"])
        self.assertGreater(means[1]["rise"], 0.5)

        mixed = list(range(128, 168)) * 10 + self.ids[:400]
        write_shard(self.tmp / "mixed.bin", mixed)
        arguments = ["corrupted", "--data", self.tmp / "mixed.bin", "--lengths", 50, "--targets", 20, "--shares", "1",
                     "--samples", 8]
        made = self.measure("zero_shot.py", "right", *arguments)[0]["samples"]
        self.assertGreater(len({s["loss"] for s in made}), 1)
        self.assertEqual({s["rise"] for s in made if "rise" in s}, {0})  # 1% of 50 tokens is none

    def test_standard_errors(self):
        results = {("a", 1, k): {"x": x} for k, x in enumerate((1, 2, 3, 4))} | {("a", 2, 0): {"x": 7, "y": 1}}
        found = samples.means(results, ("x", "y"))
        self.assertEqual(found["a", 1], {"x": (2.5, math.sqrt(5 / 3 / 4), 4)})
        self.assertEqual(found["a", 2], {"x": (7, None, 1), "y": (1, None, 1)})

    def test_resumes_and_refuses(self):
        model = self.model(answers="right", fail_after=5)
        arguments = ["copy", "--init", model, "--trainer", SOLVER, "--out", self.tmp / "out.json", *self.data,
                     "--gaps", 64, "--samples", 4]
        script = "tasks/zero_shot.py"
        self.dies("ended with exit code 3 after 5 of 12 answers", script, *arguments)
        kept = json.loads((self.tmp / "out.json").read_text())["samples"]
        config = {"vocab_size": 257, "answers": "right", "fail_after": 12 - 3 * len(kept)}
        (model / "config.json").write_text(json.dumps(config))
        self.run_script(script, *arguments)
        self.run_script(script, *arguments)  # asks nothing
        self.assertEqual(len(json.loads((self.tmp / "out.json").read_text())["samples"]), 4)
        self.dies("was made with --task copy", script, "conflict", *arguments[1:])
        new = ["--init", model, "--trainer", SOLVER, "--out", self.tmp / "new.json"]
        self.dies("none: no file matches", script, "copy", *new, "--data", f"{self.tmp}/none")
        self.dies("config.json: not a shard of tokens", script, "copy", *new, "--data", model / "config.json")
        write_shard(self.tmp / "masked.bin", self.ids[:4000], version=3)
        self.dies("masked.bin: not a shard of tokens of version 1 or 2", script, "copy", *new, "--data", self.tmp / "masked.bin")
        self.dies("--lengths: missing", script, "corrupted", *new, *self.data)
        self.dies("--shares: percent", script, "corrupted", *new, *self.data, "--lengths", 9, "--shares", "0,101")
        self.dies("at least 1", script, "copy", *new, *self.data, "--gaps", 0)
        for gaps in "5:1:1", "1:5:0", "5:1:-1":
            done = self.start(script, "copy", *new, *self.data, "--gaps", gaps)
            self.assertEqual(done.stderr, f"error: argument --gaps: invalid numbers value: '{gaps}'\n")
        write_shard(self.tmp / "empty.bin", [])
        self.dies("empty.bin: contains no tokens", script, "copy", *new, "--data", self.tmp / "empty.bin")

    def test_other_tokenizer(self):
        model, shard = self.model(), self.tmp / "text_val_000000.bin"
        write_shard(shard, self.ids)
        zero_shot.HeldOut(str(shard), model)  # no tokenizer is known
        beside = self.tmp / "text_tokenizer.json"
        for path, vocab in (beside, {"a": 0, "b": 1}), (model / "tokenizer.json", {"b": 1, "a": 0}):
            path.write_text(json.dumps({"model": {"vocab": vocab, "dropout": len(vocab)}}))
            zero_shot.HeldOut(str(shard), model)  # of one alone, and of both
        beside.write_text(json.dumps({"model": {"vocab": {"a": 1, "b": 0}}}))
        self.dies("text_tokenizer.json, not with the model's tokenizer", "tasks/zero_shot.py", "copy", "--init", model,
                  "--data", shard, "--trainer", SOLVER, "--out", self.tmp / "none.json")

    @needs_plots
    def test_pictures(self):
        for task in zero_shot.TASKS:
            picture = self.tmp / f"{task}.svg"
            self.measure("zero_shot.py", "right", task, *self.data, "--gaps", "64,512", "--stale", "1,3", "--lengths", 300,
                         "--samples", 3, "--picture", picture)
            self.assertIn(zero_shot.TASKS[task].title, picture.read_text())


if __name__ == "__main__":
    unittest.main(verbosity=2)
