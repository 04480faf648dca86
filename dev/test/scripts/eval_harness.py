"""
Tests of scripts/eval/harness.py, which dev/test/eval/test_eval.py runs.
"""
import contextlib
import functools
import io
import json
import os
import random
import re
import sys
from types import SimpleNamespace
from unittest import mock

from eval_case import FAKE, Case, needs_harness, stop

import fake_requests
import fox


@needs_harness
class TestHarness(Case):
    """The harness with our model class against its own code for tokenizing, splitting and windows."""

    TASKS = {
        "choices": """
            output_type: multiple_choice
            doc_to_text: "{{question}} "
            doc_to_choice: "{{choices}}"
            doc_to_target: "{{label}}"
            metric_list: [{metric: acc}, {metric: acc_norm}]
        """,
        "words": """
            output_type: loglikelihood
            doc_to_text: "{{question}}"
            doc_to_target: " {{choices[label]}}"
            metric_list: [{metric: perplexity}, {metric: acc}]
        """,
        "rolling": """
            output_type: loglikelihood_rolling
            doc_to_text: ""
            doc_to_target: "{{question}}"
            metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
        """,
        "generate": """
            output_type: generate_until
            doc_to_text: "{{question}}"
            doc_to_target: "{{choices[label]}}"
            generation_kwargs: {until: [".", "zz"], max_gen_toks: 9, do_sample: false, temperature: 1}
            metric_list: [{metric: exact_match}]
        """,
    }

    def setUp(self):
        super().setUp()
        rng = random.Random(5)
        docs = []
        for _ in range(40):
            question = "".join(rng.choices("ab c. ", k=rng.randint(1, 200)))
            choices = ["".join(rng.choices("ab c", k=rng.randint(1, 8))) or "a" for _ in range(4)]
            docs.append({"question": question, "choices": choices, "label": rng.randrange(4)})
        docs[0]["question"] = ""
        (self.tmp / "tasks").mkdir()
        (self.tmp / "docs.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
        for name, text in self.TASKS.items():
            lines = [line[12:] for line in text.strip("\n").split("\n")]
            lines += [f"task: {name}", "dataset_path: json", "test_split: test",
                      f"dataset_kwargs: {{data_files: {{test: {self.tmp}/docs.jsonl}}}}"]
            (self.tmp / "tasks" / f"{name}.yaml").write_text("\n".join(lines))
        os.environ.update(HF_HOME=str(self.tmp / "cache"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

    def evaluate(self, model):
        import lm_eval
        from lm_eval.tasks import TaskManager
        manager = TaskManager(include_path=str(self.tmp / "tasks"), include_defaults=False)
        with contextlib.redirect_stderr(io.StringIO()):
            found = lm_eval.simple_evaluate(
                model, tasks=list(self.TASKS), task_manager=manager, bootstrap_iters=0)
        samples = {t: [(s["doc_id"], s["resps"]) for s in found["samples"][t]] for t in self.TASKS}
        return found["results"], samples

    def test_equals_its_own_code(self):
        import harness
        folder = self.model(vocab_size=513)
        model = harness.Fox(str(folder), str(FAKE), seq_len=50)
        self.addCleanup(lambda: [stop(p) for p in model.trainer.processes])
        got, got_samples = self.evaluate(model)
        want, want_samples = self.evaluate(reference_model(folder, 50))
        self.assertEqual(got, want)
        self.assertEqual(got_samples, want_samples)
        self.assertTrue(0 < got["choices"]["acc,none"] < 1)

    def test_command_line(self):
        folder = self.model(vocab_size=513)
        code, said = self.run_here(folder, "--seq-len", 50, "--tasks", "choices,generate", "--output_path", self.tmp / "out")
        self.assertEqual(code, None, said)
        want, _ = self.evaluate(reference_model(folder, 50))
        found = json.loads(next((self.tmp / "out").rglob("results*.json")).read_text())
        self.assertEqual(found["config"]["model"], "fox")
        for task in ("choices", "generate"):
            for name, value in want[task].items():
                if "stderr" not in name:
                    self.assertEqual(found["results"][task][name], value, (task, name))
        table = self.run_script("results.py", f"fox={self.tmp / 'out'}")
        self.assertIn(f"| choices acc | {want['choices']['acc,none']:.4f} ± ", table)

    def run_here(self, folder, *arguments):
        """
        The command line in this process and without a list of the harness's own tasks, which takes longer than the rest
        (test_tokenizers.py starts it as users do). Returns the code of its end and its stderr.
        """
        import harness
        from lm_eval import tasks
        words = ["harness.py", "--trainer", FAKE, "--init", folder, "--include_path", self.tmp / "tasks", *arguments]
        manager = functools.partialmethod(tasks.TaskManager.__init__, include_defaults=False)
        code, ours = None, os.dup(2)
        with open(self.tmp / "stderr", "w+") as stderr, mock.patch.object(tasks.TaskManager, "__init__", manager), \
                mock.patch.object(sys, "argv", [*map(str, words)]), contextlib.redirect_stdout(io.StringIO()):
            os.dup2(stderr.fileno(), 2)  # the trainer's too
            try:
                harness.run(harness.main)
            except SystemExit as e:
                code = e.code
            finally:
                os.dup2(ours, 2)
                os.close(ours)
        return code, (self.tmp / "stderr").read_text()

    def dies_here(self, expected, *arguments):
        """It must end with `error: ...expected...`. Returns what it said before."""
        code, said = self.run_here(*arguments)
        self.assertRegex(str(code), rf"^error: [^\n]*{re.escape(expected)}[^\n]*$")
        return said

    def test_failures(self):
        said = self.dies_here("ended with exit code 3 after 5 of 160 answers: fake_requests: out of memory",
                              self.model(fail_after=5), "--tasks", "choices")
        self.assertNotIn("error: ", said)

    def test_tasks_that_are_not_there(self):
        folder = self.model()
        self.dies_here("Tasks not found: nosuch, none; `lm_eval ls tasks` lists the harness's own, ", folder,
                       "--tasks", "nosuch,choices,none")
        self.dies_here("No tasks specified, or no tasks found. Please verify the task names; `lm_eval ls tasks` ", folder)

    def test_generation_options(self):
        import harness
        for text, stops, want in (("a.b\nc", ["\n", "."], "a"), ("abc", ["x"], "abc"), ("abc", ["abc"], "")):
            self.assertEqual(harness.cut_at(text, stops), want)
        model = harness.Fox(str(self.model()), str(FAKE))
        asked = model._generate("x", {"until": ["\n", ""], "max_gen_toks": 3})
        self.assertEqual(asked, {"prompt": "x", "max_tokens": 3, "until": ["\n"], "temperature": 0})
        sampled = model._generate("x", {"until": [], "do_sample": True, "temperature": 0.7, "top_p": 0.9})
        self.assertEqual(sampled, {"prompt": "x", "max_tokens": 256, "until": [],
                                   "temperature": 0.7, "top_p": 0.9})
        with self.assertRaisesRegex(fox.Error, "generation option num_beams: not known"):
            model._generate("x", {"num_beams": 4})

    def test_longbench(self):
        """Prompts, their cut and the end of answers are those of the paper's code."""
        import harness
        model, asked = harness.Fox(str(self.model()), str(FAKE), longbench=10), []
        model._ask = lambda kind, requests, *_: asked.extend(requests) or ["\n\n one\ntwo\n"] * len(requests)
        cases = (  # task, context, question, the harness's prompt, the paper's, which keeps 4 and 5 bytes
            ("longbench_trec", "a", "b", "a\nb", b"a\nb"),
            ("longbench_trec", "a", "b", "012345678", b"012345678"),
            ("longbench_trec", "a", "b", "0123456789", b"012356789"),
            ("longbench_trec_e", "a", "b", "0123456789abc", b"012389abc"),
            ("longbench_triviaqa", "c", "qq", "a\nc\nqq", b"a\nc\n\nqq"),
            ("longbench_samsum_e", "c\n", "q", "c\n\nq", b"c\n\n\nq"),
            ("longbench_samsum", "c", "q", "c\n\nq", b"c\n\nq"),
            ("longbench_lcc", "c", "", "c code:", b"c code:\n"),
            ("longbench_repobench-p", "c", "q", "cqcode:", b"cqcode:\n"),
            ("longbench_qasper", "c", "q", "code:", b"code:"),
        )
        options = {"until": ["\n"], "max_gen_toks": 32}
        requests = [SimpleNamespace(task_name=task, doc={"context": context, "question": question},
                                    args=(prompt, options)) for task, context, question, prompt, _ in cases]
        other = SimpleNamespace(task_name="triviaqa", doc={}, args=("0123456789abc", options))
        self.assertEqual(model.generate_until([*requests, other]), [" one"] * len(cases) + [""])
        self.assertEqual([bytes(a["prompt"]) for a in asked[:-1]], [want for *_, want in cases])
        self.assertEqual([(a["until"], a["max_tokens"]) for a in asked[:-1]], [([], 32)] * len(cases))
        self.assertEqual((asked[-1]["prompt"], asked[-1]["until"]), ("0123456789abc", ["\n"]))


def reference_model(folder, max_length):
    """The fake trainer's model in the harness's own frame: the harness splits text and makes windows."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Reference(TemplateLM):
        eot_token_id = fake_requests.END_OF_TEXT
        model = fake_requests.Model(folder)

        def tok_encode(self, string, add_special_tokens=None, **_):
            return fake_requests.tokenize(string, self.model.vocab_size)

        def _loglikelihood_tokens(self, requests, **_):
            with_end = [([256] + c if c[:1] != [256] else c, rest) for _, c, rest in requests]
            return [self.model.score(*pair) for pair in with_end]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for r in requests:
                windows = get_rolling_token_windows(self.tok_encode(r.args[0]), 256, max_length, 1)
                totals.append(sum(self.model.score(*make_disjoint_window(w))[0] for w in windows))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            asked = [(self.tok_encode(prompt), options) for prompt, options in (r.args for r in requests)]
            return [self.model.generate(ids, o["max_gen_toks"], o["until"])[1] for ids, o in asked]

    return Reference()
