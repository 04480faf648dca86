"""
lm-evaluation-harness over --requests (scripts/eval/harness.py) against the harness's own model `hf`, which
runs modeling_fox.py of the same folder: the same answer to every request, the same value of every metric, and
no more tokens read than needed. The task definitions are the harness's own, unchanged but for their data,
which is made here in the same format: the paper's short tasks, and one of generate_until. Prints both.

    python3 -m venv build/eval
    build/eval/bin/pip install -r scripts/requirements.txt
    build/eval/bin/python dev/test/eval/test_harness.py [PYTHON]

PYTHON runs `hf` in place of the same Python. It may have other versions: lm_eval 0.4.5, transformers 4.44.2.
test_harness.sh runs this where the packages are installed.
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
    "triviaqa": "triviaqa/default.yaml", "wikitext": "wikitext/wikitext.yaml",
}  # fmt: skip
LOCAL = "local_"  # before a task's name: lm_eval 0.4.5 keeps its own tasks where names are equal
FOUR_CHOICES = ["arc_challenge", "arc_easy", "hellaswag", "openbookqa", "sciq"]
SEQ_LEN = 256  # of training, and so of rolling windows
PAGES = ["README.md", "dev/TRAINING.md", "dev/EVALUATION.md", "dev/INFERENCE.md"]  # 40 KB of text
PIECE = 25  # words of the pages between two rounds of questions
DOCUMENTS = 8  # a task
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


def pages():
    return "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)


def write_text(file, questions):
    """
    Pieces of the pages, and after each all questions with their answers. A model learns these by heart, so
    that what it generates has letters and depends on the prompt.
    """
    rng = random.Random(8)
    words = pages().split()
    lines = [f"Question: {q['question']}?\nAnswer: {q['answer']['aliases'][0]}.\n" for q in questions]
    with file.open("w", encoding="utf-8") as out:
        for at in range(0, len(words), PIECE):
            out.write(" ".join(words[at:at + PIECE]) + "\n")
            out.writelines(rng.sample(lines, len(lines)))


def train(name, tokenizer, file, steps, sequences, *options):
    """A model trained on a text file, in steps of that many sequences. Returns its folder."""
    text = WORK / name
    vocab = ["--vocab", VOCAB] if tokenizer == "gpt2" else []
    batch = sequences * SEQ_LEN
    run(ROOT / "data/text_to_shards", "--tokenizer", tokenizer, *vocab, "--val-fraction", 0, "--out", text,
        file)
    run(TRAIN_FOX, "--model", "fox-pro-nano", "--data", f"{text}_train_*.bin", "--seq-len", SEQ_LEN,
        "--batch-tokens", batch, "--max-tokens", batch * steps, "--warmup-tokens", 32 * SEQ_LEN,
        "--lr", 5e-3, "--out", WORK / f"run_{name}", *options)
    return WORK / f"run_{name}/step_{steps:08}"


def documents():
    """{task: its documents}, in the format of each data set."""
    rng = random.Random(7)
    words = re.findall(r"[\w'-]{1,12}[.,;:]?", pages())

    def text(least, most):
        at = rng.randrange(len(words) - most)
        return " ".join(words[at:at + rng.randint(least, most)]).rstrip(".,;:") or "nothing"

    def choices():
        return {"text": [text(1, 6) for _ in range(4)], "label": list("ABCD")}

    def sentence():
        return text(4, 12).capitalize() + "."

    def label(n=2):
        return rng.randrange(n)

    def answer():
        return rng.choice([word for word in words if word.isalpha() and len(word) > 2])

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
        "triviaqa": lambda: {"question": text(4, 12), "answer": {"aliases": [answer(), answer()]}},
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
            "task": LOCAL + task, "include": f"{lm_eval}/tasks/{definition}", "dataset_path": "json",
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


class Harness:
    """A Python with lm_eval: its task files, and runs of the harness."""

    OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(WORK / "home"),
               "PYTHONWARNINGS": "ignore"}

    def __init__(self, python, name, data):
        self.python, self.out, self.tasks = python, WORK / name, WORK / f"{name}_tasks"
        code = "import lm_eval, transformers; print(transformers.__version__, *lm_eval.__path__)"
        self.version, path = run(python, "-W", "ignore", "-c", code)[0].split()
        write_tasks(self.tasks, path, data)

    def evaluate(self, name, tasks, *command):
        """Runs `python command`. Returns (results by task, samples by task, stderr)."""
        out = self.out / name
        _, stderr = run(self.python, *command, "--include_path", self.tasks, "--tasks",
                        ",".join(LOCAL + task for task in tasks), "--log_samples", "--output_path", out,
                        env={**os.environ, **self.OFFLINE})
        (path,) = out.rglob("results_*.json")
        samples = {}
        for task in tasks:
            (file,) = out.rglob(f"samples_{LOCAL}{task}_*.jsonl")
            lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
            samples[task] = sorted(lines, key=lambda s: s["doc_id"])
        results = json.loads(path.read_text())["results"]
        return {task: results[LOCAL + task] for task in tasks}, samples, stderr

    def fox(self, name, folder):
        """Returns results, samples, and how many tokens were read for the tasks with four choices."""
        command = (ROOT / "scripts/eval/harness.py", "--init", folder, "--trainer", TRAIN_FOX)
        results, samples, stderr = self.evaluate(f"{name}_four", FOUR_CHOICES, *command)
        rest = [task for task in TASKS if task not in FOUR_CHOICES]
        others = self.evaluate(f"{name}_rest", rest, *command)
        read = re.search(r"(\d+) tokens read", stderr)
        return results | others[0], samples | others[1], int(read[1])

    def hf(self, name, folder):
        """As harness.py says: end-of-text first, but not in a rolling text, where the harness puts it."""
        model = f"pretrained={folder},trust_remote_code=True,dtype=float32"
        first = "add_bos_token=True,max_length=4096"
        if self.version.startswith("4."):
            first += f",tokenizer={with_end_of_text(folder)}"
        common = ("-m", "lm_eval", "--device", "cpu", "--batch_size", 4, "--model", "hf", "--model_args")
        tasks = [task for task in TASKS if task != "wikitext"]
        results, samples, _ = self.evaluate(f"{name}_first", tasks, *common, f"{model},{first}")
        rolling = self.evaluate(f"{name}_rolling", ["wikitext"], *common, f"{model},max_length={SEQ_LEN}")
        return results | rolling[0], samples | rolling[1]


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
    results, samples, _ = fox
    print(f"\n| {title} | --requests | hf | largest difference of a log-probability |\n|---|---|---|---|")
    for task in TASKS:
        most, count = compare_samples(report, task, samples[task], hf[1][task])
        note = f"{most:.1e} of {count}" if count else "the same texts"
        for key, value in hf[0][task].items():
            metric = key.split(",")[0]
            if "," not in key or metric.endswith("_stderr"):
                continue
            got, exact = results[task][key], metric in ("acc", "acc_norm", "exact_match")
            equal = got == value if exact else abs(got / value - 1) < 1e-5
            report.check(equal, f"{task} {metric}: {got}, of hf: {value}")
            print(f"| {task} {metric} | {got:.8g} | {value:.8g} | {note} |")
            note = ""


def check_texts(report, samples):
    """Equality of generated texts says little unless they have letters and depend on the prompt."""
    texts = {str(x) for sample in samples["triviaqa"] for x in flat(sample["resps"])}
    texts = sorted(x for x in texts if re.search("[A-Za-z]", x))
    report.check(len(texts) >= 5, f"triviaqa: too few texts with letters: {texts}")
    print(f"\ntriviaqa: {len(texts)} different texts with letters of {DOCUMENTS} requests: {texts}")


def compare_tokens(report, tokenizer, samples, read):
    """Tokens that the trainer read, against the distinct ones: what choices of a question share, once."""
    distinct = 0
    for sample in (s for task in FOUR_CHOICES for s in samples[task]):
        pairs = [a["arg_0"] + a["arg_1"] for a in sample["arguments"].values()]
        texts = [(None, *tokenizer.encode(text)) for text in pairs]  # None: end-of-text. The last is not read
        distinct += len({ids[:n] for ids in texts for n in range(1, len(ids))})
    report.check(read <= 1.1 * distinct, f"{read} tokens read, {distinct} distinct ones")
    print(f"\nfour choices: {read} tokens read, {read / distinct:.3f} times the {distinct} distinct ones")


def main():
    missing = [m for m in ("torch", "transformers", "lm_eval", "accelerate") if not importlib.util.find_spec(m)]
    if missing:
        print(f"skipped: not installed: {', '.join(missing)}\n0 passed, 0 failed")
        return
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    report, data, text = Report(), documents(), WORK / "text.txt"
    write_text(text, data["triviaqa"])
    (WORK / "pages.txt").write_text(pages(), encoding="utf-8")
    ours = Harness(sys.executable, "fox", data)
    theirs = Harness(sys.argv[1] if len(sys.argv) > 1 else sys.executable, "hf", data)
    small = ("--set", "vocab_size=50257", "--set", "hidden_size=64")
    models = {"bytes": train("bytes", "byte", text, 240, 2),
              "gpt2": train("gpt2", "gpt2", WORK / "pages.txt", 80, 4, *small)}
    for name, folder in models.items():
        found = ours.fox(name, folder)
        wanted = theirs.hf(name, folder)
        compare(report, f"fox-pro-nano, {name}; transformers {theirs.version}", found, wanted)
        if name == "bytes":  # by heart, gpt2's log-probabilities differ by 4e-4 in fp32
            check_texts(report, found[1])
        compare_tokens(report, Tokenizer(folder), *found[1:])
    print(f"{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
