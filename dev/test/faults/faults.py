#!/usr/bin/env python3
"""Lets every call that a program makes fail, one after the other, and checks what is left each time.

    faults.py [--sample K] [SUBJECT [FAULT...]]   K: of the calls of a class, only K, evenly spaced; one subject, or some
                                                  of its faults (faults.c), whose folders stay in build/test/faults

A subject is a program in a given state of its folder. It runs undisturbed first, while faults.c counts its calls. Then it
runs once for each fault of ACTIONS and each call, in a fresh copy of the folder. After each:

  1. It has ended within DEADLINE, with exit code 0 or 1, or by the SIGKILL that was the fault.
  2. Exit code 0 means that the output is whole and flushed. Exit code 1 means one line `error: ...` on stderr.
  3. What has a final name is complete: it has the bytes of the undisturbed run. Nothing complete before has been lost.
  4. The same program, run again without a fault, ends with exit code 0 and the bytes of the undisturbed run, and leaves
     nothing else behind.

Environment: TRAINER (./train_fox), JOBS (number of CPUs). Needs build/test/faults.so; only Python's standard library.
"""

import atexit, concurrent.futures, glob, os, shutil, struct, subprocess, sys, time

import runs

DEADLINE = 120  # seconds; a bound, not a measurement
SCRATCH = os.path.abspath("build/test/faults")
LIBRARY = os.path.abspath("build/test/faults.so")
TRAINER = os.path.abspath(os.environ.get("TRAINER", "./train_fox"))

# What happens to the calls of a class, in the order of faults.c. `+`: to all calls from that one on. cut: a power cut,
# which is `kill`, and then the content of each file that was written and not flushed is lost.
ACTIONS = {
    "open": "EIO EMFILE ENOSPC EIO+ kill",
    "read": "EIO EINTR short EIO+ kill",
    "write": "EIO ENOSPC EINTR short ENOSPC+ kill torn cut",
    "size": "EIO ENOSPC EINTR kill cut",
    "sync": "EIO ENOSPC EIO+ kill cut",
    "close": "EIO EIO+ kill cut",
    "mkdir": "EIO ENOSPC kill cut",
    "rename": "EIO ENOSPC EIO+ kill cut",
    "remove": "EIO EACCES+ kill cut",
    "list": "EIO EIO+ kill",
    "stat": "EIO EACCES+ kill",
    "lock": "EIO kill",
    "alloc": "ENOMEM ENOMEM+",
    "thread": "EAGAIN EAGAIN+",
}
CLASSES = list(ACTIONS)


def run(command, folder, fault=None, counts=None):
    """Runs the command in the folder. Returns its exit code, or None after DEADLINE, and its stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "no_proxy": "127.0.0.1"}
    if counts:
        environment.update(LD_PRELOAD=LIBRARY, FAULT_COUNTS=counts)
    if fault:
        environment["FAULT"] = fault.replace(":cut", ":kill")
    try:
        done = subprocess.run(command, cwd=folder, env=environment, timeout=DEADLINE, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace")  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stderr


def tree(folder):
    """Returns {path: bytes} of the files of a folder."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(path, name)
            found[os.path.relpath(file, folder)] = runs.read(file)
    return found


# ----------------------------------------------------------------------------
# subjects. Each has a command; `again`, the command after a fault; before(folder), which prepares the folder;
# after(folder, code, stderr), which checks it after a fault; end(folder, first), which checks it at
# the end, the first time without a fault.

TRAIN = runs.options(8) + runs.data_options(SCRATCH + "/data") + ["--micro-batch", "2", "--save-every", "2",
                          "--sample-every", "3", "--generate", "4", "--out", "out"]  # fmt: skip


class Train:
    """A run that saves twice and is stopped, from an empty folder."""

    command = [TRAINER, *TRAIN, "--keep", "2", "--max-steps", "4"]
    again = [TRAINER, *TRAIN, "--keep", "2", "--resume"]
    begin, last, kept = 0, 4, 0  # steps of the command; checkpoints that must stay
    reference = SCRATCH + "/reference/out"  # of an undisturbed run that keeps all checkpoints

    def before(self, folder):
        if not os.path.isdir(SCRATCH + "/reference"):
            os.makedirs(SCRATCH + "/reference")
            code, stderr = run([TRAINER, *TRAIN, "--keep", "0"], SCRATCH + "/reference")
            assert code == 0, stderr

    def after(self, folder, code, stderr):
        out = folder + "/out"
        runs.check_checkpoints(out, self.reference)
        there = runs.steps(out)
        newest = (there or [0])[-1]
        assert newest >= self.begin and len(there) >= self.kept, f"of steps {there} some are lost"
        if code != 0:
            return
        assert newest == self.last, f"exit code 0 with checkpoints {runs.steps(out)}"
        losses, _ = runs.log_losses(out)
        warned = "lines missing from the log" in stderr
        assert warned or len(losses) == self.last, f"exit code 0 with steps {list(losses)} in log.jsonl"

    def end(self, folder, first):
        runs.check_end(folder + "/out", self.reference, 8, 1)
        assert not first or runs.steps(folder + "/out") == [6, 8], runs.steps(folder + "/out")


class Resume(Train):
    """The rest of that run, from its checkpoints of steps 2 and 4."""

    command = again = [TRAINER, "--resume", "--out", "out", "--max-steps", "8"]
    begin, last, kept = 4, 8, 2

    def before(self, folder):
        Train.before(self, folder)
        code, stderr = run(Train.command, folder)
        assert code == 0, stderr


class Text:
    """data/text_to_shards, into an empty folder. What a trainer accepts is the corpus of one run, whole."""

    command = again = [os.path.abspath("data/text_to_shards"), *"--tokenizer byte --val-fraction 0.3".split(),
                       *"--shard-tokens 1500 --out shards/text corpus".split()]  # fmt: skip
    older = {}

    def __init__(self):
        self.loaded = {}  # what a trainer said of shards of these bytes: many faults leave the same

    def before(self, folder):
        self.write_corpus(folder, 4)

    def write_corpus(self, folder, files):
        shutil.rmtree(folder + "/corpus", ignore_errors=True)
        os.makedirs(folder + "/corpus")
        for i in range(files):
            with open(f"{folder}/corpus/{i}.txt", "w") as f:
                f.write("".join(f"line {k * files} of file {i}\n" for k in range(60)))

    @staticmethod
    def shards(folder, split):
        found = tree(folder + "/shards")
        return {name: data for name, data in found.items() if name.startswith(f"text_{split}_") and name.endswith(".bin")}

    def load(self, folder, split):
        """Returns whether a trainer accepts the shards of a split, and what it says."""
        shards = split, *sorted(tree(folder + "/shards").items())
        if shards not in self.loaded:
            loader = [TRAINER, *runs.options(1), "--max-steps", "0", "--data", f"shards/text_{split}_*.bin"]
            code, stderr = run(loader, folder)
            assert code in (0, 1), f"the trainer ends with {code}: {stderr}"
            self.loaded[shards] = code == 0, stderr
        return self.loaded[shards]

    def after(self, folder, code, stderr):
        for split in ("train", "val"):
            accepted, message = self.load(folder, split)
            assert accepted or code != 0, f"exit code 0, but the trainer refuses the {split} shards: {message}"
            whole = [self.whole[split]] + ([self.older[split]] if code != 0 and self.older else [])
            found = self.shards(folder, split)
            assert not accepted or found in whole, f"after exit code {code} the trainer accepts {sorted(found)}"

    def end(self, folder, first):
        found = tree(folder)
        if first:
            self.tree = found
            self.whole = {split: self.shards(folder, split) for split in ("train", "val")}
            assert len(self.whole["train"]) > 1
        assert found == self.tree, f"ends with {sorted(found)}, undisturbed with {sorted(self.tree)}"
        assert self.load(folder, "train")[0] and self.load(folder, "val")[0]


class TextAgain(Text):
    """The same, over the shards of an older corpus, which had more."""

    def before(self, folder):
        self.write_corpus(folder, 9)
        code, stderr = run(self.command, folder)
        assert code == 0, stderr
        self.older = {split: self.shards(folder, split) for split in ("train", "val")}
        self.write_corpus(folder, 4)


class LongCrawl:
    """data/longcrawl64 of a local source. A shard with its final name is complete; the same command continues."""

    arrays = os.path.abspath("dev/test/fixtures/zarr")
    tree = None

    def __init__(self):
        self.command = self.again = [os.path.abspath("data/longcrawl64"), "--source", self.source(), "--split", "train",
                                     *"--tokens 48Ki --shard-tokens 32Ki --jobs 1 --tries 1 --out t".split()]  # fmt: skip

    def source(self):
        return self.arrays

    def before(self, folder):
        pass

    def after(self, folder, code, stderr):
        found = {name: data for name, data in tree(folder).items() if name.endswith(".bin")}
        incomplete = found.pop("t_train_incomplete.bin", None) # which the loader refuses
        assert code != 0 or incomplete is None, "exit code 0 with an incomplete dataset"
        assert all(self.tree[name] == data for name, data in found.items()), "a shard with a final name is not complete"
        shards = sum(name.endswith(".bin") for name in self.tree)
        assert code != 0 or len(found) == shards, f"exit code 0 with {sorted(found)}"

    def end(self, folder, first):
        found = tree(folder)
        if first:
            self.tree = found
            assert len(glob.glob(folder + "/t_train_*.bin")) == 2
        assert found == self.tree, f"ends with {sorted(found)}, undisturbed with {sorted(self.tree)}"


class Download(LongCrawl):
    """The same of a server, through the cache."""

    def source(self):
        log = SCRATCH + "/requests"
        server = subprocess.Popen([sys.executable, os.path.abspath("dev/test/data/serve.py"), self.arrays, log],
                                  stdout=subprocess.PIPE, text=True)  # fmt: skip
        atexit.register(server.kill)
        return f"http://127.0.0.1:{int(server.stdout.readline())}/plain"


SUBJECTS = {
    "train": Train,
    "resume": Resume,
    "text": Text,
    "text_again": TextAgain,
    "longcrawl": LongCrawl,
    "download": Download,
}

# ----------------------------------------------------------------------------


class Counts:
    """The file that faults.c counts in: its struct Counts."""

    FORMAT = struct.Struct(f"<{len(CLASSES) + 2}I64Q")

    def __init__(self, path):
        self.path = path
        with open(path, "wb") as f:
            f.write(bytes(self.FORMAT.size))

    def read(self):
        """Returns {class: calls}, the number of faults, and the inodes of files that were not flushed."""
        numbers = self.FORMAT.unpack(runs.read(self.path))
        calls, (faults, lost), dirty = numbers[: len(CLASSES)], numbers[len(CLASSES) : len(CLASSES) + 2], numbers[-64:]
        assert lost == 0, "more files were not flushed than faults.c can list"
        return dict(zip(CLASSES, calls)), faults, set(dirty) - {0}


def cut_power(folder, inodes, zeros):
    """Loses the content of these files: it becomes zeros, or nothing."""
    for path in tree(folder):
        path = os.path.join(folder, path)
        status = os.stat(path)
        if status.st_ino in inodes:
            os.truncate(path, 0)
            os.truncate(path, status.st_size if zeros else 0)


class Campaign:
    def __init__(self, name):
        self.name = name
        self.subject = SUBJECTS[name]()
        self.start = f"{SCRATCH}/{name}"  # the folder before the command
        os.makedirs(self.start)
        self.subject.before(self.start)
        folder = self.copy("undisturbed")
        counts = Counts(folder + ".counts")
        code, stderr = run(self.subject.command, folder, None, counts.path)
        assert code == 0, f"{name}: exit code {code}: {stderr}"
        self.calls = counts.read()[0]
        if self.subject.command != self.subject.again:
            code, stderr = run(self.subject.again, folder)
        assert code == 0, f"{name}: exit code {code}: {stderr}"
        self.subject.end(folder, True)

    def copy(self, what):
        folder = f"{SCRATCH}/{self.name}.{what}"
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(self.start, folder)

    def faults(self, sample):
        """Yields the faults of all calls, or of `sample` calls of each class."""
        for name, actions in ACTIONS.items():
            n = self.calls[name]
            for number, action in enumerate(actions.split()):
                k = min(sample or n, n)
                chosen = {int((i + 0.5) * n / k + number) % n for i in range(k)}  # other calls for another action
                for i in sorted(chosen):
                    yield f"{name}:{i + 1}{'+' if action[-1] == '+' else ''}:{action.rstrip('+')}"

    def check(self, fault, folder):
        """Returns whether the fault has occurred; an AssertionError says what is wrong."""
        counts = Counts(folder + ".counts")
        code, stderr = run(self.subject.command, folder, fault, counts.path)
        _, occurred, dirty = counts.read()
        os.remove(counts.path)
        name, number, action = fault.split(":")
        kills = occurred and action in ("kill", "torn", "cut")
        if kills and action == "cut":
            cut_power(folder, dirty, int(number) % 2)
        assert code is not None, f"has not ended after {DEADLINE} seconds"
        assert code in ((-9,) if kills else (0, 1) if occurred else (0,)), f"exit code {code}: {stderr}"
        errors = [line for line in stderr.splitlines() if line and not line.startswith("warning: ")]
        clear = [line for line in errors if line.startswith(("error: ", "libgomp: Out of memory"))]
        assert len(errors) == len(clear) == (code == 1), f"exit code {code}: {stderr}"
        assert name != "sync" or code != 0 or not occurred, "exit code 0 although a flush has failed"
        self.subject.after(folder, code, stderr)
        code, message = run(self.subject.again, folder)
        assert code == 0, f"again: exit code {code}: {message}; before: {stderr}"
        self.subject.end(folder, False)
        return occurred > 0

    def trial(self, fault, stays=False):
        """Returns (occurred, message); message None: all is well."""
        folder = self.copy(fault.replace(":", "_"))
        try:
            result = self.check(fault, folder), None
        except (AssertionError, OSError, ValueError) as error:
            return True, f"{type(error).__name__}: {error}"
        if not stays:
            shutil.rmtree(folder)
        return result


def main(arguments):
    sample = 0
    if arguments[:1] == ["--sample"]:
        sample, arguments = int(arguments[1]), arguments[2:]
    names = arguments[:1] or list(SUBJECTS)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    os.makedirs(SCRATCH)
    runs.make_data(SCRATCH + "/data")
    passed = failed = 0
    start = time.monotonic()
    for name in names:
        campaign = Campaign(name)
        faults = arguments[1:] or list(campaign.faults(sample))
        begun, absent, bad = time.monotonic(), 0, 0
        with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
            results = pool.map(lambda fault: campaign.trial(fault, bool(arguments[1:])), faults)
            for fault, (occurred, message) in zip(faults, results):
                absent += not occurred
                bad += message is not None
                if message:
                    print(f"FAILED {name} {fault}: {message}", flush=True)
        calls = sum(campaign.calls.values())
        print(f"{name}: {calls} calls, {len(faults)} faults, of which {absent} have not occurred, {bad} failures, "
              f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
        if absent == len(faults):
            print(f"FAILED {name}: none of its faults has occurred", flush=True)
        passed, failed = passed + len(faults) - bad, failed + bad + (absent == len(faults))
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
