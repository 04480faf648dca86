"""
lm-evaluation-harness over --requests (scripts/eval/harness.py) against the harness's own model `hf`, which
runs modeling_fox.py of the same folder: the same answer to every request, the same value of every metric, and
no more tokens read than needed. The task definitions are the harness's own, unchanged but for their data,
which is made here in the same format: the paper's short tasks, and one of generate_until. Prints both.

    python3 -m venv build/eval
    build/eval/bin/pip install -r scripts/requirements.txt
    build/eval/bin/python dev/test/eval/test_harness.py [PYTHON]

PYTHON runs `hf` in place of the same Python. It may have other versions: lm_eval 0.4.5, transformers 4.44.2.
test_harness.sh runs this where the packages are installed. harness.py's command line is tested by
dev/test/scripts/eval_harness.py, lm_eval's own nowhere.
"""
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / "build/test/harness"
sys.path.insert(0, str(ROOT / "scripts/eval"))

from fox import Tokenizer  # noqa: E402

TRAIN_FOX = os.environ.get("TRAIN_FOX", str(ROOT / "train_fox"))
VOCAB = ROOT / "dev/test/fixtures/gpt2/vocab.bpe"
TASKS = {  # task: its definition
    "piqa": "piqa/piqa.yaml", "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml", "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml", "copa": "super_glue/copa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml", "sciq": "sciq/sciq.yaml",
    "boolq": "super_glue/boolq/default.yaml", "lambada_openai": "lambada/lambada_openai.yaml",
    "anagrams1": "unscramble/anagrams1.yaml", "wikitext": "wikitext/wikitext.yaml",
}  # fmt: skip
FOUR_CHOICES = ["arc_challenge", "arc_easy", "hellaswag", "openbookqa", "sciq"]
KINDS = ["arc_easy", "lambada_openai", "anagrams1", "wikitext"]  # a task of each kind of request
SEQ_LEN = 256  # of training, and so of rolling windows
DOCUMENTS = 8  # a task
# It learns to spell: to end a word that is begun
BYTES = ("--batch-tokens", 512, "--max-tokens", 512 * 60, "--lr", 5e-3)
GPT2 = ("--set", "vocab_size=50257", "--batch-tokens", 256, "--max-tokens", 256 * 12, "--lr", 5e-3)
# of one token and of several in GPT-2's vocabulary
WORDS = """the of and to in is that for as with on by this from at which or an be are model trainer don't it's
x-ray 3,000 1e-5 state-of-the-art forgets gate's value_2 Paris naïve 2024 GPU quux zygote paragraphs attention
BLEU e.g. a I London when where Why she'd rotary 42 unbelievable cat dogs running jumped quickly greenish
mountain river 7th McDonald ice-cream flour""".split()
# fp32: log-probabilities of tokens differ by about 1e-6, and sums of them are rounded to 24 bits
ABSOLUTE, RELATIVE = 1e-5, 2e-6


# ----------------------------------------------------------------------------
# models and data


def run(*command, **options):
    """Runs a command that must succeed. Returns its stdout and stderr."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout, done.stderr


def some_words(rng, least, most):
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", "", ",", "."]) for _ in range(rng.randint(least, most)))


def train(name, tokenizer, *options):
    """A small model, trained on short lines of WORDS. Returns its folder."""
    rng, text = random.Random(8), WORK / name
    file = WORK / f"{name}.txt"
    file.write_text("\n".join(some_words(rng, 1, 2) for _ in range(4000)), encoding="utf-8")
    vocab = ["--vocab", VOCAB] if tokenizer == "gpt2" else []
    run(ROOT / "data/text_to_shards", "--tokenizer", tokenizer, *vocab, "--val-fraction", 0, "--out", text, file)
    run(TRAIN_FOX, "--model", "fox-pro-nano", "--set", "hidden_size=64", "--set", "num_hidden_layers=2", "--data",
        f"{text}_train_*.bin", "--seq-len", SEQ_LEN, "--out", WORK / f"run_{name}", *options)
    (folder,) = (WORK / f"run_{name}").glob("step_*")
    return folder


def documents():
    """{task: its documents}, in the format of each data set."""
    rng = random.Random(7)

    def text(least, most):
        return some_words(rng, least, most).rstrip(".,")

    def choices():
        return {"text": [text(1, 6) for _ in range(4)], "label": list("ABCD")}

    def sentence():
        return text(4, 12).capitalize() + "."

    def label(n=2):
        return rng.randrange(n)

    begun = iter(rng.sample([word for word in WORDS if len(word) > 4], DOCUMENTS))

    def begun_word():
        word = next(begun)
        return {"context": f"{text(2, 6)} {word[:-2]}", "completion": word[-2:]}

    make = {
        "piqa": lambda: {"goal": text(4, 12), "sol1": text(2, 9), "sol2": text(2, 9), "label": label()},
        "hellaswag": lambda: {"activity_label": text(1, 3), "ctx_a": sentence(), "ctx_b": text(1, 4),
                              "endings": [text(3, 12) + "." for _ in range(4)], "label": str(label(4))},
        "winogrande": lambda: {"sentence": f"{text(2, 9)} _ {sentence()}", "option1": text(1, 1),
                               "option2": text(1, 1), "answer": rng.choice("12")},
        "arc_easy": lambda: {"question": sentence(), "choices": choices(), "answerKey": rng.choice("ABCD")},
        "copa": lambda: {"premise": sentence(), "question": rng.choice(["cause", "effect"]),
                         "choice1": sentence(), "choice2": sentence(), "label": label()},
        "openbookqa": lambda: {"question_stem": text(4, 12), "choices": choices(),
                               "answerKey": rng.choice("ABCD")},
        "sciq": lambda: {"support": " ".join(sentence() for _ in range(label(4))), "question": sentence(),
                         **{f"distractor{i}": text(1, 3) for i in (1, 2, 3)}, "correct_answer": text(1, 3)},
        "boolq": lambda: {"passage": " ".join(sentence() for _ in range(5)), "question": text(4, 9),
                          "label": label()},
        "lambada_openai": lambda: {"text": text(20, 60)},
        "anagrams1": begun_word,
        "wikitext": lambda: {"page": "\n".join(f" = {text(1, 4)} = \n {text(40, 90)} .\n" for _ in range(4))},
    }  # fmt: skip
    make["arc_challenge"] = make["arc_easy"]
    return {task: [make[task]() for _ in range(DOCUMENTS)] for task in TASKS}


def write_tasks(folder, lm_eval, data):
    """Task files that include the definitions of an installed lm_eval, with the documents as every split."""
    folder.mkdir()
    for task, definition in TASKS.items():
        file = folder / f"{task}.jsonl"
        file.write_text("".join(json.dumps(d) + "\n" for d in data[task]))
        splits = dict.fromkeys(("train", "validation", "test"), str(file))
        (folder / f"{task}.yaml").write_text(json.dumps({  # JSON is YAML
            "task": task, "include": f"{lm_eval}/tasks/{definition}", "dataset_path": "json",
            "dataset_name": None, "dataset_kwargs": {"data_files": splits}}))


def with_end_of_text(folder):
    """
    The folder's tokenizer, to which end-of-text is added as a template, for versions of transformers that do
    not do it where add_bos_token says so.
    """
    copy = WORK / f"tokenizer_{folder.parent.name}"
    copy.mkdir()
    shutil.copy(folder / "tokenizer_config.json", copy)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    end = tokenizer["added_tokens"][0]
    special = {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
    template = [{"SpecialToken": {"id": end["content"], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": template, "pair": template,
                                   "special_tokens": {end["content"]: special}}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


# ----------------------------------------------------------------------------
# both


def evaluate(python, name, data, jobs):
    """
    Runs the harness in a Python that has it, once for all jobs: (model fox or hf, its arguments, tasks).
    Returns [(results by task, samples by task)] and stderr.
    """
    code = "import lm_eval; print(*lm_eval.__path__)"
    write_tasks(WORK / f"{name}_tasks", run(python, "-W", "ignore", "-c", code)[0].strip(), data)
    file = WORK / f"{name}.json"
    file.write_text(json.dumps(jobs))
    _, stderr = run(python, __file__, "--evaluate", file, env={
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(WORK / "home"),
        "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"})
    return json.loads(file.read_text()), stderr


def evaluate_here(file):
    """The jobs of a file, whose place the results take."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    sys.path.insert(0, str(ROOT / "scripts/eval"))
    import harness  # noqa: F401: registers fox
    manager = TaskManager(include_path=str(file.with_name(f"{file.stem}_tasks")), include_defaults=False)
    done = []
    for model, arguments, tasks in json.loads(file.read_text()):
        if model == "fox":
            model, arguments = harness.Fox(**arguments), None
        found = lm_eval.simple_evaluate(model, arguments, tasks=tasks, task_manager=manager, batch_size=4,
                                        device="cpu", bootstrap_iters=0)
        if arguments is None:
            for process in model.trainer.processes:  # a trainer says at its end what it has read
                process.stdin.close()
                process.wait()
        samples = {task: [{"resps": s["resps"], "arguments": s["arguments"]} for s in sorted(
            found["samples"][task], key=lambda s: s["doc_id"])] for task in tasks}
        done.append(({task: found["results"][task] for task in tasks}, samples))
    file.write_text(json.dumps(done))


def fox_jobs(folder, tasks):
    """The tasks with four choices alone: of these, what is read is counted."""
    arguments = {"init": str(folder), "trainer": TRAIN_FOX}
    four = [task for task in tasks if task in FOUR_CHOICES]
    return [("fox", arguments, four), ("fox", arguments, [task for task in tasks if task not in four])]


def hf_jobs(folder, tasks, version):
    """As harness.py says: end-of-text first, but not in a rolling text, where the harness puts it."""
    arguments = {"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32"}
    first = {**arguments, "add_bos_token": True, "max_length": 4096}
    if version.startswith("4."):
        first["tokenizer"] = str(with_end_of_text(folder))
    return [("hf", first, [task for task in tasks if task != "wikitext"]),
            ("hf", {**arguments, "max_length": SEQ_LEN}, ["wikitext"])]


class Report:
    passed = failed = 0

    def check(self, ok, message):
        self.passed += bool(ok)
        self.failed += not ok
        if not ok:
            print(f"FAILED {message}")


def near(a, b):
    return abs(a - b) <= ABSOLUTE + RELATIVE * max(abs(a), abs(b))


def flat(response):
    """The numbers, flags and texts of a sample's responses."""
    if isinstance(response, list):
        return [x for r in response for x in flat(r)]
    try:
        return [float(response)]
    except ValueError:
        return [response]


def compare_samples(report, task, fox, hf):
    """Every request's answer. Returns the largest difference of two log-probabilities, and their number."""
    most = count = 0
    report.check(len(fox) == len(hf) == DOCUMENTS, f"{task}: {len(fox)} and {len(hf)} documents")
    for document, (a, b) in enumerate(zip(fox, hf)):
        a, b = flat(a["resps"]), flat(b["resps"])
        equal = len(a) == len(b)
        for x, y in zip(a, b):
            numbers = isinstance(x, float) and isinstance(y, float)
            equal = equal and (near(x, y) if numbers else x == y)
            if numbers:
                most, count = max(most, abs(x - y)), count + 1
        report.check(equal, f"{task}, document {document}: {a}, of hf: {b}")
    return most, count


def compare(report, title, fox, hf):
    """Prints a table of every metric, and checks all requests and metrics."""
    print(f"\n| {title} | --requests | hf | largest difference of a log-probability |\n|---|---|---|---|")
    for task, (wanted, wanted_samples) in hf.items():
        results, samples = fox[task]
        most, count = compare_samples(report, task, samples, wanted_samples)
        note = f"{most:.1e} of {count}" if count else "the same texts"
        for key, value in wanted.items():
            metric = key.split(",")[0]
            if "," not in key or metric.endswith("_stderr"):
                continue
            got, exact = results[key], metric in ("acc", "acc_norm", "exact_match")
            equal = got == value if exact else abs(got / value - 1) < 1e-5
            report.check(equal, f"{task} {metric}: {got}, of hf: {value}")
            print(f"| {task} {metric} | {got:.8g} | {value:.8g} | {note} |")
            note = ""


def check_texts(report, samples):
    """Equality of generated texts says little unless they have letters and depend on the prompt."""
    texts = {str(x) for sample in samples for x in flat(sample["resps"])}
    texts = sorted(x for x in texts if re.search("[A-Za-z]", x))
    report.check(len(texts) >= 5, f"anagrams1: too few texts with letters: {texts}")
    print(f"\nanagrams1: {len(texts)} different texts with letters of {DOCUMENTS} requests: {texts}")


def compare_tokens(report, tokenizer, samples, read):
    """Tokens that the trainer read, against the distinct ones: what choices of a question share, once."""
    distinct = 0
    for sample in samples:
        pairs = ["".join(words) for words in sample["arguments"]]
        texts = [(None, *tokenizer.encode(text)) for text in pairs]  # None: end-of-text. The last is not read
        distinct += len({ids[:n] for ids in texts for n in range(1, len(ids))})
    report.check(read <= 1.1 * distinct, f"{read} tokens read, {distinct} distinct ones")
    print(f"\nfour choices: {read} tokens read, {read / distinct:.3f} times the {distinct} distinct ones")


def by_task(done):
    """{task: (results, samples)} of several jobs."""
    return {task: (results[task], samples[task]) for results, samples in done for task in results}


def main():
    missing = [m for m in ("torch", "transformers", "lm_eval", "accelerate") if not importlib.util.find_spec(m)]
    if missing:
        print(f"skipped: not installed: {', '.join(missing)}\n0 passed, 0 failed")
        return
    if sys.argv[1:2] == ["--evaluate"]:
        return evaluate_here(Path(sys.argv[2]))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    report, data = Report(), documents()
    theirs = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    version = run(theirs, "-c", "from importlib.metadata import version; print(version('transformers'))")[0].strip()
    models = {"bytes": (train("bytes", "byte", *BYTES), KINDS), "gpt2": (train("gpt2", "gpt2", *GPT2), list(TASKS))}
    fox = [job for folder, tasks in models.values() for job in fox_jobs(folder, tasks)]
    hf = [job for folder, tasks in models.values() for job in hf_jobs(folder, tasks, version)]
    if theirs == sys.executable:
        done, stderr = evaluate(theirs, "both", data, fox + hf)
    else:
        done, stderr = evaluate(sys.executable, "fox", data, fox)
        done += evaluate(theirs, "hf", data, hf)[0]
    read = [int(n) for n in re.findall(r"(\d+) tokens read", stderr)]
    for k, (name, (folder, tasks)) in enumerate(models.items()):
        got, wanted = by_task(done[2 * k:2 * k + 2]), by_task(done[2 * k + 4:2 * k + 6])
        compare(report, f"fox-pro-nano, {name}; transformers {version}", got, wanted)
        if name == "bytes":
            check_texts(report, got["anagrams1"][1])
        compare_tokens(report, Tokenizer(folder), [s for task in done[2 * k][1].values() for s in task], read[2 * k])
    print(f"{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
