"""
Tests of scripts/eval/recall.py and recall_shards.py, run by test_tasks.py: each rule of the two tasks, read off the
samples.
"""
import importlib.util
import subprocess
import sys
import unittest

from task_case import SCRIPTS, Case

import fox
import recall

needs_numpy = unittest.skipUnless(importlib.util.find_spec("numpy"), "not installed: numpy")


def rng(*seed):
    import numpy
    return numpy.random.default_rng(seed)


@needs_numpy
class TestRecall(Case):
    def questions(self, ids, counts):
        """Those of a sample, with their keys; a value behind its key is all that may count."""
        asked = [(t, int(ids[t - 1]), right, stale) for t, right, stale in recall.questions(ids, counts)]
        self.assertEqual(len({key for _, key, _, _ in asked}), len(asked), "each key is asked once")
        self.assertEqual([t for t, *_ in asked], [t for t, due in enumerate(counts) if due])
        self.assertTrue(all(t % 2 and 1 <= key < 4096 <= right < 8192 for t, key, right, _ in asked))
        self.assertTrue(1 <= ids.min() and ids.max() < recall.VOCAB)
        return asked

    def test_mqar(self):
        for T, low, high in ((64, 4, 4), (512, 4, 64), (1024, 256, 256), (8, 1, 2)):
            ids, counts = recall.mqar(rng(1), 50, T, (low, high))
            sizes = counts.sum(1)
            self.assertTrue(low <= sizes.min() <= sizes.max() <= high)
            self.assertEqual(sizes.min() == sizes.max(), low == high)
            for i in range(50):
                n, asked = int(sizes[i]), self.questions(ids[i], counts[i])
                pairs = dict(ids[i, : 2 * n].reshape(n, 2).tolist())
                self.assertEqual({key: right for _, key, right, _ in asked}, pairs)
                self.assertEqual(len(set(pairs.values())), n)
                self.assertTrue(all(t > 2 * n and not stale for t, _, _, stale in asked))
                self.assertTrue(all((ids[i] == key).sum() == 2 for key in pairs))

    def test_vocabulary(self):
        for ids, counts in (recall.mqar(rng(4), 50, 64, (4, 8), 256),
                            recall.overwritten(rng(4), 50, 64, (2, 4), (0, 3), 256)):
            self.assertTrue(1 <= ids.min() and ids.max() < 256)
            self.assertTrue((ids[counts] >= 128).all())
            self.assertTrue((ids[:, :-1][counts[:, 1:]] < 128).all())

    def test_gaps_of_mqar(self):
        """With one pair p(gap) ~ gap^-0.99; a gap drawn earlier is shorter on average."""
        ids, counts = recall.mqar(rng(2), 20000, 20, (1, 1))
        gap = counts.argmax(1) // 2 - 1
        weights = [g ** -0.99 for g in range(1, 10)]
        for g in range(9):
            self.assertAlmostEqual((gap == g).mean(), weights[g] / sum(weights), delta=0.012)

    def test_overwritten(self):
        for T, keys, rewrites in ((1024, (16, 64), (0, 8)), (512, (6, 6), (32, 32)), (256, (8, 8), (0, 0))):
            ids, counts = recall.overwritten(rng(3), 30, T, keys, rewrites)
            numbers, stale_counts = set(), set()
            for i in range(30):
                asked = self.questions(ids[i], counts[i])
                numbers.add(len(asked))
                values = []
                for t, key, right, stale in asked:
                    self.assertGreaterEqual(t, T - 2 * len(asked))
                    before = [int(b) for a, b in zip(ids[i], ids[i][1:t - 1]) if a == key]
                    self.assertEqual(before, [*stale, right])
                    stale_counts.add(len(stale))
                    values += before
                self.assertEqual(len(set(values)), len(values), "values do not repeat")
            self.assertTrue(keys[0] <= min(numbers) <= max(numbers) <= keys[1])
            self.assertEqual(stale_counts, set(range(rewrites[0], rewrites[1] + 1)))

    def test_same_seed_same_samples(self):
        for sample in (lambda seed: recall.mqar(rng(seed), 9, 128, (2, 20)),
                       lambda seed: recall.overwritten(rng(seed), 9, 128, (2, 9), (0, 4))):
            a, b, other = sample(4), sample(4), sample(5)
            self.assertTrue((a[0] == b[0]).all() and (a[1] == b[1]).all())
            self.assertFalse((a[0] == other[0]).all())

    def test_distinct_ids_are_uniform(self):
        ids = recall.draw_distinct(rng(6), (6000, 3), 10, 14)
        self.assertTrue(all(len(set(row)) == 3 for row in ids.tolist()))
        orders = {}
        for row in ids.tolist():
            orders[tuple(row)] = orders.get(tuple(row), 0) + 1
        self.assertEqual(len(orders), 24)
        self.assertTrue(all(180 < n < 320 for n in orders.values()), orders)

    def shards(self, *arguments):
        """Writes shards of a seed; returns header and tokens of both splits."""
        import numpy
        said = self.run_script("recall_shards.py", *arguments, "--seed", 7, "--out", self.tmp / "s")
        self.assertIn("--set vocab_size=8192 --set bos_token_id=0 --set eos_token_id=0", said)
        files = [numpy.fromfile(self.tmp / f"s_{split}_000000.bin", "<u4") for split in ("train", "val")]
        for split, file in zip(("train", "val"), files):
            documents = (len(file) - 256) // arguments[2]
            self.assertIn(f"{split}: {documents} documents, {len(file) - 256} tokens, 1 shard\n", said)
        return [(file[:256].tolist(), file[256:]) for file in files]

    def test_shards(self):
        for task, T, options, sample in (
                ("mqar", 64, ["--pairs", "2:8"], lambda rng, n: recall.mqar(rng, n, 64, (2, 8))),
                ("overwritten", 128, ["--keys", "3:9", "--rewrites", 2],
                 lambda rng, n: recall.overwritten(rng, n, 128, (3, 9), (2, 2)))):
            splits = self.shards(task, "--seq-len", T, *options, "--tokens", "160Ki", "--val-tokens", 1000)
            for split, (header, tokens) in enumerate(splits):
                self.assertEqual(header[:5], [20240520, 3, len(tokens), T, recall.VOCAB])
                self.assertEqual(len(tokens), (160 << 10, 1000 // T * T)[split])
                ids, counts = sample(rng(7, split, 0), min(1024, len(tokens) // T))
                first = tokens[: ids.size].reshape(ids.shape)
                self.assertTrue(((first & 0x7FFFFFFF) == ids).all() and ((first >> 31) == counts).all())
            tokens = splits[0][1]
            self.assertGreater(len(tokens), 1024 * T)
            self.assertFalse((tokens[1024 * T :] == tokens[: len(tokens) - 1024 * T]).all(), "samples repeat")

    def test_shards_of_a_large_vocabulary(self):
        """A table of all ids for each of the 1,024 samples of a batch, 16 GiB, is never in memory."""
        limit = f'ulimit -v {8 << 20} && exec env OPENBLAS_NUM_THREADS=1 "$@"'
        arguments = "mqar", "--seq-len", 64, "--pairs", 4, "--vocab", "16Mi", "--tokens", "64Ki", "--out", self.tmp / "v"
        command = ["sh", "-c", limit, "-", sys.executable, SCRIPTS / "recall_shards.py", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_shards_refuses(self):
        common = ["--seq-len", 64, "--tokens", 640, "--out", self.tmp / "r"]
        self.dies("mqar needs --pairs", "recall_shards.py", "mqar", *common)
        self.dies("mqar has no --keys", "recall_shards.py", "mqar", "--pairs", 4, "--keys", 4, *common)
        self.dies("64 pairs", "recall_shards.py", "mqar", "--pairs", 64, *common)
        self.dies("a vocabulary of 4294967296: not an even number from 4 to 16777216", "recall_shards.py", "mqar", "--pairs", 4,
                  "--vocab", "4Gi", *common)
        self.dies("--pairs 8:2: the lower number stands first", "recall_shards.py", "mqar", "--pairs", "8:2", *common)
        self.assertFalse(list(self.tmp.glob("r*")))

    def test_refuses(self):
        for expected, wrong in (
                ("a quarter of the length 64", lambda: recall.mqar(rng(1), 1, 64, (4, 17))),
                ("must be even", lambda: recall.mqar(rng(1), 1, 65, (4, 4))),
                ("5 to 4 pairs: not", lambda: recall.mqar(rng(1), 1, 64, (5, 4))),
                ("64 keys with 32 rewrites each: not for the length 1024, which must be even and at least 4352", lambda: recall.overwritten(rng(1), 1, 1024, (64, 64), (32, 32))),
                ("a vocabulary of 9", lambda: recall.mqar(rng(1), 1, 64, (4, 4), 9)),
                ("less than 5000 different ids", lambda: recall.overwritten(rng(1), 1, 65536, (50, 50), (99, 99)))):
            with self.assertRaisesRegex(fox.Error, expected):
                wrong()
