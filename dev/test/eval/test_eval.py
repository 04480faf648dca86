"""
Tests of scripts/eval, with a model that copies in place of a trainer (fake_requests.py):

    python3 -m venv build/eval
    build/eval/bin/pip install -c scripts/requirements.txt lm_eval matplotlib safetensors tokenizers
    build/eval/bin/python dev/test/eval/test_eval.py

test_scripts.sh runs the same with whatever is installed. Tests that need a package that is not there are
skipped. The last lines say which packages, and how many tests passed.
"""
import argparse
import json
import math
import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

from eval_case import FAKE, PLOTS, ROOT, Case, needs_plots, run_tests, stop
from eval_harness import TestHarness  # noqa: F401: run here, too
from eval_needle import TestNeedle, haystack_text  # noqa: F401: as well

import fake_requests
import fox
import positions
import results


class TestTrainer(Case):
    def test_answers_come_in_any_order(self):
        folder = self.model()
        model = fake_requests.Model(folder)
        asked = [{"type": "score", "context": "abcabc" * (i % 7), "continuation": f"{i}"} for i in range(300)]
        trainer = self.trainer(folder)
        for _ in range(2):  # the process serves several calls
            got = dict(trainer.answers(asked))
            self.assertEqual(sorted(got), list(range(300)))
            self.assertNotEqual(list(got), sorted(got))
            for i, answer in got.items():
                want = model.score([256, *asked[i]["context"].encode()], str(i).encode())
                self.assertEqual((answer["logprob"], answer["greedy"]), want)
        self.assertEqual(len(trainer.processes), 1)
        self.assertEqual(list(self.trainer(folder).answers([])), [])

    def test_workers_share_the_requests(self):
        folder = self.model()
        asked = [{"type": "score", "context": "ab", "continuation": f"{i}"} for i in range(300)]
        one, three = self.trainer(folder), self.trainer(folder, workers=3)
        self.assertEqual(dict(one.answers(asked)), dict(three.answers(asked)))
        self.assertEqual(len(three.processes), 3)

    def test_workers_have_the_gpus_that_are_named(self):
        program, asked = self.tmp / "program", [{"type": "rolling", "text": "x"}]
        program.write_text(f'#!/bin/sh\necho "gpu $CUDA_VISIBLE_DEVICES" >>"{self.tmp}/gpus"\nexec "{FAKE}" "$@"\n')
        program.chmod(0o755)
        for given, want in (None, "012"), ("5,GPU-a", "55GPU-a"), ("", ""), ("7,8,9", "789"):
            environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
            cleared = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
            with mock.patch.dict(os.environ, {**cleared, **environment}, clear=True):
                trainer = fox.Trainer(self.model(), program, workers=3)
                list(trainer.answers(asked))
            for process in trainer.processes:
                stop(process)
            found = sorted((self.tmp / "gpus").read_text().replace("gpu ", "").splitlines())
            self.assertEqual("".join(found), want)
            (self.tmp / "gpus").unlink()

    def test_failures_are_one_line(self):
        asked = [{"type": "rolling", "text": "x"}] * 10
        with self.assertRaisesRegex(fox.Error, "ended with exit code 3 after 4 of 10 answers"):
            list(self.trainer(self.model(fail_after=4)).answers(asked))
        with self.assertRaisesRegex(fox.Error, r"refused request 3 \(sing\): unknown type sing"):
            list(self.trainer(self.model()).answers([*asked[:3], {"type": "sing"}]))
        with self.assertRaisesRegex(fox.Error, "cannot make text of this model's tokens: put its tokenizer.json"):
            generate = {"type": "generate", "prompt": [97], "max_tokens": 1, "until": []}
            list(self.trainer(self.model()).answers([{**generate, "text": None}]))
        with self.assertRaisesRegex(fox.Error, "nowhere/train_fox: cannot start: No such file"):
            list(fox.Trainer(self.tmp, "nowhere/train_fox").answers(asked))
        with self.assertRaisesRegex(fox.Error, "not an answer: --init hello"):
            list(fox.Trainer("hello", "/bin/echo").answers(asked))
        failing = self.tmp / "failing"
        failing.write_text("#!/bin/sh\nprintf 'warning: slow\\nerror: no \\377\\n' >&2\nexit 1\n")
        failing.chmod(0o755)
        for script in ["../prompt.py"], ["tasks/keys.py", "text", "--updates", 3, "--out", self.tmp / "out.json"]:
            done = self.start(*script, "--init", self.model(), "--trainer", failing)
            self.assertRegex(done.stderr.replace("0/32 samples\n", ""), "^warning: slow\nerror: .*ing ended .*: no \ufffd\n$")

    def test_run_folder(self):
        """As the trainer's --init: the newest checkpoint of a run that has a model, or the folder itself."""
        run = self.tmp / "run"
        for name in ("step_00000002", "step_00000010", "step_00000100.tmp"):
            (run / name).mkdir(parents=True)
            (run / name / "config.json").write_text("{}")
            (run / name / "model.safetensors").touch()
        (run / "step_00000300").mkdir()
        (self.tmp / "empty/step_00000001").mkdir(parents=True)
        with self.assertRaisesRegex(fox.Error, "empty: none of its checkpoints has config.json and model.safetensors"):
            fox.checkpoint(self.tmp / "empty")
        parser = argparse.ArgumentParser()
        fox.add_model_options(parser)
        for folder, init in ((run, run / "step_00000010"), (run / "step_00000002",) * 2, (self.tmp / "none",) * 2):
            self.assertEqual(parser.parse_args(["--init", str(folder)]).init, str(init))
        (run / "config.json").write_text("{}")
        self.assertEqual(fox.checkpoint(str(run)), str(run))

    def test_tokenizer(self):
        self.assertEqual(fox.Tokenizer(self.model()).encode("aé\n"), [97, 0xc3, 0xa9, 10])
        self.assertEqual(fox.Tokenizer(self.model(), True).encode('"\n'), list(b'\\"\\n'))
        with self.assertRaisesRegex(fox.Error, "tokenizer.json: missing"):
            fox.Tokenizer(self.model(vocab_size=50257))
        with self.assertRaisesRegex(fox.Error, "config.json: No such file"):
            fox.Tokenizer(self.tmp / "none")

    def test_escapes(self):
        for text in ('a"\n\\\t', "naïve €", "\U0001f600 x", "\\u00e9", "/"):
            self.assertEqual(fox.unescape(fox.escape(text)), text)
        self.assertEqual(fox.unescape("\\x \\u12 \\ud83d|\\/"), "\\x \\u12 \ufffd|/")

    def test_help(self):
        """Needs no lm_eval."""
        self.assertRegex(self.run_script("harness.py", "--help"), r"\n  --init DIR [\s\S]*\n  --json-escape ")

    def harness(self, ends, *options):
        """(exit code, stderr) of harness.py, with an lm_eval that ends so."""
        program = f"""if True:
            import sys, unittest.mock as mock
            for name in "", ".api", ".api.model", ".api.registry", ".models", ".models.utils", ".__main__":
                sys.modules["lm_eval" + name] = sys.modules["tqdm"] = mock.MagicMock()
            sys.modules["lm_eval.api.model"].LM = object
            sys.modules["lm_eval.__main__"].cli_evaluate = mock.Mock(side_effect={ends})
            import harness
            harness.run(harness.main)"""
        done = subprocess.run([sys.executable, "-c", program, "--init", str(self.model()), *options], capture_output=True,
                              text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        return done.returncode, done.stderr

    def test_mistyped_option_of_the_harness(self):
        """One that lm_eval does not know either."""
        self.assertEqual(self.harness("SystemExit(2)", "--tasks", "piqa", "--longbnech=3", "--limit", "5"),
                         (2, "note: --longbnech: is --longbench meant?\n"))

    def test_length_of_longbench(self):
        for least in "0", "1", "-5":
            self.assertEqual(self.harness("None", f"--longbench={least}"), (1, "error: --longbench: at least 2\n"))

    def test_package_of_a_task(self):
        """As RULER's wonderwords."""
        self.assertEqual(self.harness("ImportError('install `wonderwords`')", "--tasks", "ruler"),
                         (1, "error: --tasks: a package is missing: install `wonderwords`\n"))

    def test_program(self):
        """train_foxcu where there is a GPU and it is built, as sweep.sh."""
        smi, path = self.tmp / "nvidia-smi", os.environ["PATH"]
        smi.write_text("#!/bin/sh\necho 0\n")
        smi.chmod(0o755)
        (self.tmp / "train_fox").touch()

        def chosen(visible=None, path=path):
            environment = {"PATH": path, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
            with mock.patch.dict(os.environ, environment, clear=True), mock.patch("fox.ROOT", self.tmp):
                return Path(fox.default_trainer()).name
        self.assertEqual(chosen("0"), "train_fox")
        (self.tmp / "train_foxcu").touch()
        self.assertEqual([chosen(v) for v in ("0", "2,3", "", "-1")],
                         ["train_foxcu", "train_foxcu", "train_fox", "train_fox"])
        self.assertEqual(chosen(path=str(self.tmp)), "train_foxcu")
        for failing in ("exit 9", "echo No devices were found; exit 6", "echo NVIDIA-SMI has failed"):
            smi.write_text(f"#!/bin/sh\n{failing}\n")
            self.assertEqual(chosen(path=str(self.tmp)), "train_fox")
        smi.unlink()
        self.assertEqual(chosen(path=str(self.tmp)), "train_fox")
        with mock.patch("fox.ROOT", self.tmp), self.assertRaisesRegex(fox.Error, "; build it: make train_foxer"):
            list(fox.Trainer(self.tmp, self.tmp / "train_foxer").answers([{"type": "rolling", "text": "x"}]))


class TestFiles(Case):
    """write_file and check_writable of common.py."""

    def test_replaces_a_file_alone(self):
        file, own, link = (self.tmp / name for name in ("r.json", "r.json.tmp", "link.json"))
        file.write_text("old")
        file.chmod(0o640)
        own.write_text("mine")
        link.symlink_to("r.json")
        for data in "é", b"\xff":
            fox.check_writable(link)
            fox.write_file(link, data)
            self.assertEqual(file.read_bytes(), data if isinstance(data, bytes) else data.encode())
        self.assertEqual((own.read_text(), os.readlink(link), file.stat().st_mode & 0o777), ("mine", "r.json", 0o640))
        fox.write_file(self.tmp / "new", "x")
        self.assertEqual(sorted(p.name for p in self.tmp.iterdir()), ["link.json", "new", "r.json", "r.json.tmp"])

    def test_writes_straight(self):
        fox.write_file("/dev/null", "x")
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        fifo = self.tmp / "fifo"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        fox.write_file(fifo, "piped")
        self.assertEqual(os.read(reader, 99), b"piped")
        os.close(reader)
        with mock.patch("common.READER_SECONDS", 0):
            self.assertRaisesRegex(fox.Error, "fifo: cannot write: no program reads this pipe", fox.write_file, fifo, "x")
        program = "import common; print('a'); common.write_file('/dev/stdout', 'b'); print('c')"
        with open(self.tmp / "out", "w") as out:
            subprocess.run([sys.executable, "-c", program], stdout=out, cwd=ROOT / "scripts", check=True)
        self.assertEqual((self.tmp / "out").read_text(), "a\nbc\n")

    def test_refuses(self):
        (self.tmp / "link").symlink_to("nowhere")
        for path, why in ((self.tmp, "exists and is not a regular file"), (self.tmp / "no/r", "cannot write: No such file"),
                          (self.tmp / "link", "is a link to a file that cannot be found"), ("", "an empty name"),
                          ("/dev/full", "cannot write: No space left")):
            self.assertRaisesRegex(fox.Error, why, fox.write_file, path, "x")
            if path != "/dev/full":
                self.assertRaisesRegex(fox.Error, why, fox.check_writable, path)
        self.assertEqual([p.name for p in self.tmp.iterdir()], ["link"])

    def test_checked_before_it_is_computed(self):
        (self.tmp / "text").write_text("word " * 100)
        needle = ["needle.py", "--init", self.model(fail_after=0), "--trainer", FAKE, "--haystack", self.tmp / "text", "--kind",
                  "easy", "--lengths", 200, "--depths", 50, "--samples", 1]
        self.dies("no/o.json: cannot write", *needle, "--out", self.tmp / "no/o.json")
        self.dies("is not a regular file: --out keeps every sample", *needle, "--out", "/dev/null")
        if not PLOTS:
            self.dies("no/p.svg: cannot write", *needle, "--out", self.tmp / "o.json", "--picture", self.tmp / "no/p.svg")


class TestPositions(Case):
    def test_smooth_and_perplexity(self):
        rng = random.Random(0)
        loss = [rng.uniform(1, 3) for _ in range(300)]
        smoothed = positions.smooth(loss, 101)
        for i in range(300):
            window = loss[max(0, i - 50):i + 51]
            self.assertAlmostEqual(smoothed[i], sum(window) / len(window))
        for n in (1, 128, 300):
            self.assertAlmostEqual(positions.perplexities(loss)[n - 1], math.exp(sum(loss[:n]) / n))
        self.assertEqual(positions.perplexities([0, 11133]), [1, math.inf])

    def test_refuses(self):
        path = self.tmp / "e.json"
        for text, expected in (('{"loss": 1}', "no list of losses"), ('{"loss": [NaN]}', "no list of losses"),
                               (f'{{"loss": [{10**400}]}}', "no list of losses"),
                               ('{"loss": [1, 2]}', "has 2 positions"), ("[1]", "not a JSON object"),
                               ('{"loss": [1, null], "tokens": 2, "targets": 1}', "data with a mask")):
            path.write_text(text)
            self.dies(expected, "positions.py", path)
        for name, value in (("loss_error", 1), ("loss_error", [0.1]), ("loss_error", [None] * 128), ("trained_seq_len", [64]),
                            ("trained_seq_len", "64"), ("checkpoint", 1)):
            path.write_text(json.dumps({"loss": [1] * 128, name: value}))
            self.dies(f"e.json: not a result of --eval: {name} is ", "positions.py", path)
        path.write_text('{"loss": [1, null], "tokens": 2, "targets": 1}')
        self.dies("data with a mask", "results.py", f"masked={path}")
        for loss in "[]", "[1, null]", '"text"':
            path.write_text(f'{{"loss": {loss}}}')
            self.dies("no list of losses", "results.py", path)
        self.dies("--window must be odd", "positions.py", path, "--window", 100)


class TestResults(Case):
    def test_paper_averages(self):
        for name, values in results.PAPER.items():
            self.assertEqual(len(values), len(results.SHORT) + 2)
            self.assertAlmostEqual(sum(values[2:12]) / 10, values[12], delta=0.0051, msg=name)

    def test_tables(self):
        folder = self.tmp / "lm" / "model"
        folder.mkdir(parents=True)
        tasks = {}
        for k, (_, task, metric) in enumerate(results.SHORT):
            tasks.setdefault(task, {"alias": task})[f"{metric},none"] = 0.1 * k if "acc" in metric else 20.5
            tasks[task][f"{metric}_stderr,none"] = 0.03 if "acc" in metric else "N/A"
        (folder / "results_1.json").write_text(json.dumps({"results": {"piqa": {"acc,none": 0.9}}}))
        (folder / "results_2.json").write_text(json.dumps({"results": {**tasks, "mine": {"f1,none": 0.25}}}))
        loss = [2.0] * 512 + [1.0] * 512
        (self.tmp / "eval.json").write_text(json.dumps({
            "loss": loss, "sequences": 7, "standard_error": 0.01, "perplexity": {"512": 7.39, "1024": 4.48}}))
        cells = [{"score": s, "logprob": -s} for s in (10, 4)]
        (self.tmp / "needle.json").write_text(json.dumps({"kind": "easy", "cells": cells}))
        points = [{"task": "vt", "length": 4096, "samples": 4, "score": 25.0, "score_error": 5.0},
                  {"stale": 2, "gap": 64, "samples": 4, "margin": -1.5, "margin_error": 0.25}]
        (self.tmp / "tasks.json").write_text(json.dumps({"task": "conflict", "means": points}))
        files = folder.parent, *(self.tmp / f"{name}.json" for name in ("eval", "needle", "tasks"))
        out = self.run_script("results.py", *(f"m={path}" for path in files))
        accuracies = [f"{10 * k:.2f} ± 3.00" for k in range(2, 12)]
        error = math.sqrt(10 * 3.0**2) / 10
        self.assertIn(f"| m | 20.50 | 20.50 | {' | '.join(accuracies)} | 65.00 ± {error:.2f} |", out)
        self.assertIn("| FoX-Pro, paper (760M, 48B tokens) | 23.04 | 14.91 | 42.75 |", out)
        self.assertIn("| mine f1 | 0.2500 |", out)
        self.assertIn(f"| m | 7 | 1.5000 ± 0.0100 | {math.exp(2):.3f} | {math.exp(1.5):.3f} |", out)
        self.assertIn("| m | easy | 2 | 7.00 ± 3.00 | -7.00 ± 3.00 |", out)
        self.assertIn("| vt, length 4096: score | 25.00 ± 5.00 |", out)
        self.assertIn("| conflict, stale 2, gap 64: margin | -1.50 ± 0.25 |", out)
        self.assertNotIn("LongBench", out)  # no empty tables

    def test_refuses(self):
        (self.tmp / "x.json").write_text("{}")
        self.dies("x.json: not a result of", "results.py", self.tmp / "x.json")
        for other in ({"results": [1]}, {"results": {"piqa": 1}}, {"results": {"piqa": {"acc,none": 10**400}}},
                      {"loss": [1], "perplexity": 1}, {"loss": [1], "perplexity": {"x": 1}}, {"loss": [1], "standard_error": "x"},
                      {"cells": 1}, {"cells": []}, {"cells": [1]}, {"cells": [{"score": 1, "logprob": 1}]},
                      {"kind": "easy", "cells": [{"score": 1}]}, {"kind": "easy", "cells": [{"score": "x", "logprob": 1}]},
                      {"means": 1}, {"means": [1]}, {"means": [{"score": "x", "score_error": 1}]}):
            (self.tmp / "x.json").write_text(json.dumps(other))
            self.dies("x.json: not a result of lm-evaluation-harness,", "results.py", self.tmp / "x.json")
        self.dies("no results*.json below it", "results.py", f"a={self.tmp}")
        self.dies("No such file", "results.py", "a=none.json")


# ----------------------------------------------------------------------------


@needs_plots
class TestPictures(Case):
    def svg(self, name, *arguments, option="--out"):
        """Runs a script that draws, twice. The pictures are the same, small, and of no date."""
        pictures = []
        for k in range(2):
            path = self.tmp / f"{name}{k}.svg"
            self.run_script(name, *arguments, option, path)
            pictures.append(path.read_text())
        self.assertEqual(*pictures)
        self.assertLess(len(pictures[0]), 100_000)
        self.assertNotIn("<dc:date>", pictures[0])
        return pictures[0]

    def test_positions(self):
        rng = random.Random(0)
        loss = [rng.uniform(1, 3) for i in range(20000)]
        for name in ("a", "b"):
            (self.tmp / f"{name}.json").write_text(json.dumps({"loss": loss, "trained_seq_len": 4096}))
        svg = self.svg("positions.py", f"first={self.tmp}/a.json", f"second={self.tmp}/b.json")
        self.assertEqual([svg.count(f">{name}</text>") for name in ("first", "second")], [1, 1])  # one legend
        self.assertEqual(svg.count("stroke-dasharray"), 3)  # the training length: both panels and the legend
        plain = self.tmp / "plain.json"
        plain.write_text(json.dumps({"loss": loss, "trained_seq_len": None}))
        self.assertNotIn("stroke-dasharray", self.svg("positions.py", plain))

    def test_needle(self):
        (self.tmp / "hay.txt").write_text(haystack_text(50))
        arguments = ["--trainer", FAKE, "--haystack", self.tmp / "hay.txt", "--init", self.model(),
                     "--lengths", "600:1200:300", "--depths", "0:100:50", "--out", self.tmp / "n.json",
                     "--train-length"]
        self.assertIn("stroke-dasharray", self.svg("needle.py", *arguments, 1000, option="--picture"))
        self.assertNotIn("stroke-dasharray", self.svg("needle.py", *arguments, 2000, option="--picture"))

    def maps(self, **changed):
        import numpy
        from safetensors.numpy import save_file
        rng = numpy.random.default_rng(0)
        T, queries = 600, numpy.arange(0, 600, 3)
        statistics = "half_life", "pruned_share", "effective_window"
        tensors = {"queries": queries, "layers": numpy.arange(3), **{name: rng.uniform(0.1, 1, (3, 2)) for name in statistics}}
        tensors["half_life"][0, 1] = 1000
        for name in ("0.1", "2.0"):
            tensors[f"{name}.cum_logf"] = -rng.exponential(0.1, T).cumsum()
            tensors[f"{name}.largest"] = rng.uniform(0, 1, len(queries)).astype("float32")
            tensors[f"{name}.key"] = rng.integers(0, queries + 1)
        path = self.tmp / "maps.safetensors"
        save_file({k: v for k, v in {**tensors, **changed}.items() if v is not None}, path)
        return path

    def test_maps(self):
        import numpy
        path = self.maps()
        svg = self.svg("maps.py", path)
        self.assertLess(svg.index("layer 2, head 0: F"), svg.index("layer 0, head 1: F"))  # forgets faster
        table = self.run_script("maps.py", path, "--head", "0.1", "--out", self.tmp / "one.svg",
                                "--heads", self.tmp / "h.svg")
        self.assertNotIn("layer 2", (self.tmp / "one.svg").read_text())
        self.assertIn("effective window", (self.tmp / "h.svg").read_text())
        self.assertEqual([line.split()[0] for line in table.splitlines()], ["layer", "0", "1", "2"])
        numbers = numpy.array([0, 2, 7], "int32")  # of a stack, whose layers 1 and 3 to 6 have no attention
        stack = self.maps(layers=numbers)
        table = self.run_script("maps.py", stack, "--head", "2.0", "--out", self.tmp / "one.svg",
                                "--heads", self.tmp / "h.svg")
        self.assertEqual([line.split()[0] for line in table.splitlines()], ["layer", "0", "2", "7"])
        self.assertIn(">7</text>", (self.tmp / "h.svg").read_text())
        uneven = self.maps(half_life=numpy.array([[1, 3]] * 3, "float32"))
        table = self.run_script("maps.py", uneven, "--heads", self.tmp / "h.svg")
        self.assertEqual(table.splitlines()[1].split()[1:4], ["1", "2", "3"])  # of two heads the median is their mean
        endless = self.maps(half_life=numpy.full((3, 2), numpy.inf))
        self.assertIn("inf", self.run_script("maps.py", endless, "--heads", self.tmp / "h.svg"))
        self.assertIn(">half-life, tokens</text>", (self.tmp / "h.svg").read_text())

    def test_maps_refuses(self):
        import numpy
        zeros = numpy.zeros
        for changed, expected in (
                ({"half_life": None}, "half_life is not [L, NH]"),
                ({"pruned_share": zeros((2, 2))}, "pruned_share is not [L, NH]"),
                ({"2.0.largest": zeros(600)}, "2.0.largest and key do not fit"),
                ({"2.0.key": None}, "2.0.largest and key do not fit"),
                ({"2.0.key": numpy.arange(1, 601, 3)}, "2.0.largest and key do not fit"),  # a key behind its query
                ({"layers": numpy.arange(2)}, "layers are not those of half_life"),
                ({"layers": None}, "layers or queries are missing"),
                ({"queries": numpy.arange(401, 601)}, "0.1.cum_logf does not fit"),
                ({"5.0.cum_logf": zeros(600), "5.0.largest": zeros(200), "5.0.key": zeros(200)}, "statistics of head 5.0")):
            self.dies(expected, "maps.py", self.maps(**changed))
        self.dies("--head 1.1", "maps.py", self.maps(), "--head", "1.1")
        (self.tmp / "x").write_text("no tensors")
        self.dies("x: cannot read", "maps.py", self.tmp / "x")

    def test_map_of_the_gates(self):
        import maps
        import numpy
        c = -numpy.random.default_rng(0).exponential(0.1, 50).cumsum()
        f = maps.forget_map(c, numpy.arange(50))
        for i in range(50):
            for j in range(50):
                self.assertTrue(f.mask[i, j] if j > i else abs(f[i, j] - math.exp(c[i] - c[j])) < 1e-12)
        largest, key = numpy.random.default_rng(1).random(160), numpy.arange(160) // 2
        cells = maps.attention_map(largest, key, 160)
        self.assertEqual(cells.shape, (80, 80))
        for row in range(80):  # two queries, whose keys are one, in a cell
            self.assertEqual(cells[row].max(), cells[row, row // 2])
            self.assertEqual(cells[row, row // 2], largest[2 * row:2 * row + 2].max())


if __name__ == "__main__":
    run_tests()
