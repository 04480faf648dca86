#!/usr/bin/env python3
"""
Runs the next of the study's runs (runs.txt) that fit into MINUTES, on all GPUs of the machine, one run a GPU:

    dev/study/run.py --minutes 9.5 --corpus /data/study --work /data/study.work --results OUT
    dev/study/report.py --add OUT

Each run trains and measures in one go and leaves one file, RESULTS/NAME.json (collect.py). Runs whose file is in
RESULTS or in dev/study/results.jsonl are done. A run starts if its minutes in runs.txt fit into what is left of MINUTES and
LATER, the minutes that the machine is kept after this command. At the end of MINUTES every run is stopped with a
checkpoint in WORK, from which the next command on the same machine goes on; nothing else outlives the machine, and a
run that did not finish is redone. Exit code: 0 if nothing failed, also if runs were stopped or none fitted.

    --list      says what is done, what would run now, and what waits for a learning rate
    NAME...     these runs alone, in this order; * stands for any text

The corpus decides which runs are chosen: those of `short` need that of short documents, all others the one of long
documents. Runs of a task need no corpus: their data are drawn into WORK.
"""
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import plan
from plan import HERE, ROOT, Error
from common import Parser, counted, run

WATCH = 10  # seconds between two looks at who uses a GPU
LONG = 65536  # tokens of an evaluated document
GRACE = 20  # seconds before the end at which a program is asked to stop; then it is killed
MOMENTS = 512  # steps between checkpoints, of each of which half-lives are kept
TASKS = {"copy": (), "conflict": ("--stale", "1,4"), "corrupted": ()}  # of zero_shot.py, with options


def arguments():
    p = Parser(__doc__)
    add = p.add_argument
    add("names", nargs="*", metavar="NAME")
    add("--minutes", type=float, required=True)
    add("--later", type=float, default=0, metavar="MINUTES")
    add("--corpus", type=Path, metavar="PREFIX", help="of the shards that dev/study/corpus/corpus.sh writes")
    add("--work", type=Path, required=True, metavar="FOLDER", help="checkpoints; 17 GB a GPU")
    add("--results", type=Path, required=True, metavar="FOLDER")
    add("--trainer", type=Path, default=ROOT / "train_foxcu")
    add("--runs", type=Path, default=HERE / "runs.txt")
    add("--moments", type=int, default=MOMENTS, metavar="STEPS")
    add("--rolled", type=int, metavar="SEED", help="evaluate also rolled documents (scripts/eval/rolled.py), which results lack: "
        "RESULTS/rolled has NAME.json and NAME.rolled.json of --eval")
    add("--task-options", default="--samples 32", metavar="OPTIONS", help="of zero_shot.py [--samples 32]")
    add("--gpus", help="as in 0,2 [CUDA_VISIBLE_DEVICES, or all]; cpu: none; one named twice has two runs at a time")
    add("--list", action="store_true")
    options = p.parse_args()
    for name in "corpus", "work", "results", "trainer":  # programs run in ROOT
        if getattr(options, name):
            setattr(options, name, getattr(options, name).absolute())
    return options


def gpus_of(options):
    given = os.environ.get("CUDA_VISIBLE_DEVICES") if options.gpus is None else options.gpus
    if given is None:
        try:
            given = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], check=True,
                                   capture_output=True, text=True).stdout.replace("\n", ",")
        except (OSError, subprocess.CalledProcessError):
            raise Error("nvidia-smi found no GPU: name them with --gpus, or --gpus cpu")
    gpus = [gpu for gpu in given.replace(" ", ",").split(",") if gpu]
    if not gpus:
        raise Error("--gpus or CUDA_VISIBLE_DEVICES is empty: name GPUs with --gpus, or --gpus cpu")
    return gpus


def programs_on(gpu):
    """How many programs compute on a GPU; 0 also where nvidia-smi does not list them."""
    try:
        done = subprocess.run(["nvidia-smi", "-i", gpu, "--query-compute-apps=pid", "--format=csv,noheader"], check=True,
                              capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.strip().isdigit() for line in done.stdout.splitlines())


def checkpoints(folder, every):
    """[(step, checkpoint)] of a run, `every` steps, without those that a stop has left between them."""
    found = [(int(path.name.removeprefix("step_")), path) for path in sorted(folder.glob("step_*"))]
    return [(step, path) for step, path in found if step % every == 0]


class Stopped(Exception):
    """The time is over."""


class Study:
    def __init__(self, options):
        self.options, self.lines = options, plan.read_lines(options.runs)
        self.end = time.monotonic() + 60 * options.minutes
        self.lock, self.taken = threading.Condition(), set()
        self.failed, self.incomplete = [], []  # names of runs; incomplete: a measure failed
        self.data, self.tests = (plan.read_sets(options.runs, kind) for kind in ("data", "test"))
        self.drawing = threading.Lock()
        matches = [[line for line in self.lines if fnmatch.fnmatchcase(line.name, name)]
                   for name in options.names or "*"]
        for name, found in zip(options.names, matches):
            if not found:
                raise Error(f"{options.runs}: has no run {name}")
        self.chosen = [*{line.name: line for found in matches for line in found}.values()]
        if options.corpus and (about := Path(f"{options.corpus}.json")).exists():
            kind = plan.read_json(about).get("kind", "long")
            fit = [line for line in self.chosen if plan.corpus_of(line) in (None, kind)]
            if options.names and not fit:
                raise Error(f"{options.corpus}: a corpus whose documents are {kind}, which {self.chosen[0].name} is not trained on")
            self.chosen = fit
        for line in self.chosen:
            if plan.task_of(line) not in {None, *self.data}:
                raise Error(f"{options.runs}: {line.name}: there is no line `data {plan.task_of(line)}`")

    def results(self):
        return plan.read_results(self.options.runs.parent / plan.RESULTS.name, self.options.results)

    def left(self):
        return (self.end - time.monotonic()) / 60

    def minutes(self, line):
        """What a run still takes, by runs.txt and by what it has spent in WORK."""
        spent = self.options.work / line.name / "spent"
        return line.minutes - min(line.minutes - 1, float(spent.read_text()) if spent.exists() else 0)

    def take(self):
        """(line, options) of the next run, or None: nothing that can run now or later in this command."""
        with self.lock:
            while True:
                results, waiting = self.results(), False
                for line in self.chosen:
                    if line.name in results or line.name in self.taken:
                        continue
                    words = plan.resolve(line, self.lines, results)
                    if words and self.minutes(line) <= self.left() + self.options.later:
                        self.taken.add(line.name)
                        return line, words
                    waiting = waiting or words is None
                running = self.taken - set(results) - set(self.failed)
                if not waiting or not running or self.left() <= 1:
                    return None
                self.lock.wait(min(60, 60 * self.left()))  # another GPU's run may choose a learning rate

    def work(self, gpu):
        while self.left() > 1 and (taken := self.take()):
            line, words = taken
            job = Job(self, line, words, gpu)
            try:
                job.run()
                print(f"done: {line.name}" + (f", without {', '.join(job.missing)}" if job.missing else "")
                      + (f", diverged: {job.diverged}" if job.diverged else ""), flush=True)
                if job.missing:
                    self.incomplete.append(line.name)
            except Stopped:
                print(f"stopped, to go on in {job.folder}: {line.name}", flush=True)
                return
            except Exception as e:  # whatever it is, the other runs go on
                print(f"FAILED: {line.name}: {e}", flush=True)
                self.failed.append(line.name)
            with self.lock:
                self.lock.notify_all()

    def print_list(self):
        results = self.results()
        for line in self.chosen:
            words = plan.resolve(line, self.lines, results)
            state = "done" if line.name in results else "next" if words else \
                "not needed, or not yet" if line.measures == "edge" else "waits for a learning rate"
            print(f"{line.name:34} {line.minutes:>5} min  {state}")


class Job:
    """One run on one GPU."""

    def __init__(self, study, line, words, gpu):
        self.study, self.line, self.words, self.options = study, line, words, study.options
        self.folder = self.options.work / line.name
        self.task = plan.task_of(line)
        self.run_folder = self.folder / "run"
        self.missing, self.diverged = [], None  # measures that failed; what the trainer said
        self.gpu, self.shared = gpu, self.folder / "shared_gpu"  # a file once another program was seen on the GPU
        # in the order of nvidia-smi, which looks who else uses the GPU
        self.environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                            "CUDA_VISIBLE_DEVICES": "" if gpu == "cpu" else gpu}

    def wait(self, process, seconds):
        """Waits for a program, and looks whether another one uses its GPU: then its times do not count."""
        end = time.monotonic() + seconds
        while True:
            try:
                return process.wait(max(0, min(WATCH, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise
                if self.gpu != "cpu" and not self.shared.exists() and programs_on(self.gpu) > 1:
                    self.shared.touch()

    def call(self, *command):
        """Runs a program, its output in WORK/NAME/output.txt. Stopped when the time is over."""
        left = self.study.end - GRACE - time.monotonic()
        if left <= 0:
            raise Stopped
        with open(self.folder / "output.txt", "a", encoding="utf-8") as output:
            print("$", *command, file=output, flush=True)
            process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output, cwd=ROOT,
                                       env=self.environment)
            try:
                code = self.wait(process, left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1 if command[0] == self.options.trainer else signal.SIGTERM)
                try:
                    process.wait(max(0, self.study.end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise Stopped
        if code:
            last = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1]
            raise Error(f"exit code {code}: {last} ({self.folder}/output.txt)")

    def step(self, name, *command):
        """A program that writes WORK/NAME/name, which is left out where it has been done."""
        out, done = self.folder / name, self.folder / f"{name}.done"
        if not done.exists():
            out.parent.mkdir(exist_ok=True)
            self.call(*[str(out) if word == "OUT" else word for word in command])
            done.touch()

    def optional(self, name, *command):
        """The same, but a failure costs this measure alone, not the run's results, which name it."""
        try:
            self.step(name, *command)
        except Error as e:
            print(f"FAILED: {self.line.name}, {name}: {e}", flush=True)
            self.missing.append(name)

    def run(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        started, spent = time.monotonic(), self.folder / "spent"
        before = float(spent.read_text()) if spent.exists() else 0
        print(f"running: {self.line.name}", flush=True)
        self.options.results.mkdir(parents=True, exist_ok=True)
        out = self.options.results / f"{self.line.name}.json"
        try:
            self.diverged = self.train()
            # the hours of a repeat are what it is for
            lost = self.line.name.endswith("_repeat") and self.shared.exists()
            if self.diverged:
                out.write_text(json.dumps({"name": self.line.name, "options": self.words, "diverged": self.diverged}) + "\n")
            elif not lost:
                self.measure()
                self.write_line()
                self.call(sys.executable, HERE / "collect.py", self.folder, self.options.corpus or "-", out)
        finally:
            spent.write_text(str(before + (time.monotonic() - started) / 60))
        shutil.rmtree(self.folder)
        if lost:
            raise Error("another program used its GPU: it begins anew with the next command")

    def write_line(self):
        (self.folder / "line.json").write_text(json.dumps({
            "name": self.line.name, "measures": self.line.measures, "options": self.words, "missing": self.missing}
            | ({"shared_gpu": True} if self.shared.exists() else {})
            | ({"data": " ".join(self.study.data[self.task])} if self.task else {})))

    def drawn(self, name, *command):
        """The prefix of data that the first run that needs them draws."""
        prefix = self.options.work / "data" / name
        with self.study.drawing:
            if not prefix.with_suffix(".done").exists():
                prefix.parent.mkdir(exist_ok=True)
                self.call(sys.executable, *command, "--out", prefix)
                prefix.with_suffix(".done").touch()
        return prefix

    def shards(self, name):
        return self.drawn(name, ROOT / "scripts/eval/recall_shards.py", *self.study.data[name])

    def train(self):
        """What the trainer said if the run diverged."""
        data = self.shards(self.task) if self.task else self.options.corpus
        keep = ("--keep", 1) if self.task else ("--save-every", self.options.moments, "--keep", 0)
        self.write_line()
        try:
            self.step("run", self.options.trainer, *self.words, "--data", f"{data}_train_*.bin", "--val-data",
                      f"{data}_val_*.bin", "--out", "OUT", "--resume", *keep, "--log-every", 64)
        except Error as e:
            diverged = re.search(r"step \d+: the (loss|gradient) is [^(]*", str(e))
            if not diverged:
                raise
            return diverged[0].strip()

    def measure_task(self):
        """The share of right answers in each data set that is named after the task, keys.py's tests, and what the gates
        forget at the end."""
        for name, options in plan.tests_of(self.task, self.study.data).items():
            self.optional(f"eval_{name}.json", self.options.trainer, "--init", self.run_folder, "--eval", "OUT",
                          "--val-data", f"{self.shards(name)}_train_*.bin", "--seq-len",
                          options[options.index("--seq-len") + 1])
        for name, options in plan.tests_of(self.task, self.study.tests).items():
            self.optional(f"tasks/{name}.json", sys.executable, ROOT / "scripts/eval/tasks/keys.py", *options, "--init",
                          self.run_folder, "--trainer", self.options.trainer, "--out", "OUT")
        if plan.option(self.line, "--model").startswith("fox"):
            _, last = checkpoints(self.run_folder, 1)[-1]
            self.optional(f"maps_{last.name}.safetensors", self.options.trainer, "--init", last, "--maps", "OUT",
                          "--val-data", f"{self.shards(self.task)}_val_*.bin")

    def measure(self):
        """Losses by position and document, of a Transformer also cut to its training length, and with YaRN; of `all` also
        what the gates forget at each checkpoint, and the tasks."""
        if self.task:
            self.measure_task()
            return
        trainer, data = self.options.trainer, f"{self.options.corpus}_val_*.bin"
        if self.line.measures == "short":
            data = f"{self.options.corpus}_intact_train_*.bin"
        self.step("eval.json", trainer, "--init", self.run_folder, "--eval", "OUT", "--val-data", data)
        if plan.corpus_of(self.line) == "long" and self.options.rolled is not None:
            self.step("rolled.json", trainer, "--init", self.run_folder, "--eval", "OUT", "--val-data", data, "--roll",
                      self.options.rolled)
            kept = self.options.results / "rolled"
            kept.mkdir(exist_ok=True)
            for name, suffix in ("eval.json", ".json"), ("rolled.json", ".rolled.json"):
                shutil.copy(self.folder / name, kept / f"{self.line.name}{suffix}")
        if plan.corpus_of(self.line) == "long" and plan.option(self.line, "--model").startswith("transformer"):
            length = int(plan.option(self.line, "--seq-len"))
            longer = {"window": f"window_size={length}", "yarn": f"rope_scaling=yarn:{LONG / length:g}"}
            if "use_rope=false" in self.line.options:
                del longer["yarn"]
            for name, setting in longer.items():
                self.optional(f"{name}.json", trainer, "--init", self.run_folder, "--set", setting, "--eval", "OUT",
                              "--val-data", data)
        if not plan.all_of(self.line):
            return
        if plan.option(self.line, "--model").startswith("fox"):
            for _, checkpoint in checkpoints(self.run_folder, self.options.moments):
                self.optional(f"maps_{checkpoint.name}.safetensors", trainer, "--init", checkpoint, "--maps", "OUT",
                          "--val-data", data)
            self.optional("acp.safetensors", trainer, "--init", self.run_folder, "--set", "pruning_rule=acp", "--maps",
                          "OUT", "--val-data", data)
            self.optional("unpruned.json", trainer, "--init", self.run_folder, "--set", "log_pruning_tolerance=null",
                      "--eval", "OUT", "--val-data", data)
        script, seed = ROOT / "scripts/eval/tasks/zero_shot.py", plan.option(self.line, "--seed")
        for task, more in TASKS.items():
            self.optional(f"tasks/{task}.json", sys.executable, script, task, "--init", self.run_folder, "--trainer",
                          trainer, "--data", data, "--out", "OUT", "--seed", seed,
                          *self.options.task_options.split(), *more)
        if self.line.measures == "needle":
            try:
                self.tune()
            except Error as e:
                print(f"FAILED: {self.line.name}, needle: {e}", flush=True)
                self.missing.append("needle")

    def tune(self):
        """Trains the model on needles, and scores it before, and after 1, 2, 4, 8 and so on checkpoints."""
        options, script, trainer = self.study.tests, HERE / "needle.py", self.options.trainer
        data = self.drawn("needle", script, "data", "--data", f"{self.options.corpus}_train_000000.bin",
                          *options["needle_data"])
        self.step("needle", trainer, "--init", self.run_folder, *options["needle_train"], "--data",
                  f"{data}_train_*.bin", "--out", "OUT", "--keep", 0, "--resume")
        every = int(options["needle_train"][options["needle_train"].index("--save-every") + 1])
        doubled = [(step, folder) for step, folder in checkpoints(self.folder / "needle", every)
                   if bin(step // every).count("1") == 1]  # after 1, 2, 4, 8 times as many steps
        for step, folder in [(0, self.run_folder), *doubled]:
            self.step(f"tasks/needle_{step:03}.json", sys.executable, script, "score", "--init", folder, "--trainer",
                      trainer, "--data", f"{self.options.corpus}_val_*.bin", "--out", "OUT", "--seed",
                      plan.option(self.line, "--seed"), *options["needle_score"])


def main():
    options = arguments()
    study = Study(options)
    if options.list:
        study.print_list()
        return
    if not options.trainer.exists():
        raise Error(f"{options.trainer}: not built: make train_foxcu")
    if not all(map(plan.task_of, study.chosen)):
        if not options.corpus:
            raise Error("--corpus PREFIX is missing: of the shards that dev/study/corpus/corpus.sh writes")
        if not Path(f"{options.corpus}.json").exists():
            raise Error(f"{options.corpus}.json: not there: dev/study/corpus/corpus.sh makes the corpus")
    draws = any(line.measures == "needle" or plan.task_of(line) for line in study.chosen)
    if draws and not (ROOT / "data/ids_to_shards").exists():
        raise Error("data/ids_to_shards: not built: make data/ids_to_shards")
    workers = [threading.Thread(target=study.work, args=(gpu,)) for gpu in gpus_of(options)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if study.failed or study.incomplete:
        raise Error("; ".join(f"{counted(len(names), 'run')} {what}: {' '.join(names)}" for names, what in (
            (study.failed, "failed"), (study.incomplete, "lack a measure")) if names))


if __name__ == "__main__":
    run(main)
