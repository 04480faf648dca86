#!/usr/bin/env python3
"""Ends runs of a trainer at random moments, by the thousand, and resumes them until they are done.

    torture.py HOURS SEED

Each of JOBS workers takes one run after the other: without mpirun, or on 1 to 3 ranks where mpirun and the trainer's MPI
are there. It starts the run with --resume, strikes it after a random time, and starts it again, until it ends by itself. A
strike is one of STRIKES, on a random process of the run or on all. After each:

  1. No process of the run is left within DEADLINE.
  2. The exit code is that of the strike; 0 only where the run has ended.
  3. Each checkpoint is, byte for byte, that of the undisturbed run. The newest is not older than before the strike.

A run that has ended has the checkpoints of the undisturbed run. When the hours are over, the last runs end undisturbed.
The seed fixes ranks, strikes and delays, not where in the program they hit.

Environment: TRAINER (./train_fox), JOBS (number of CPUs; 1 for train_foxcu). Standard library only.
"""

import collections, os, random, re, shutil, signal, subprocess, sys, threading, time

import runs

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../trainer"))
import ranks

DEADLINE = 120  # seconds; a bound, not a measurement
STEPS = 40
SCRATCH = os.path.abspath("build/test/torture")
TRAINER = os.path.abspath(os.environ.get("TRAINER", "./train_fox"))
ON_GPU = os.path.basename(TRAINER).startswith("train_foxcu")

# signals, one after the other; and whether all processes of the run get them, or one
STRIKES = [
    (("KILL",), False),
    (("KILL",), True),
    (("STOP", "KILL"), False),
    (("STOP", "KILL"), True),
    (("TERM",), False),
    (("USR1",), False),
    (("INT",), True),
]
EXIT_INTERRUPTED = 75


def launch(n, *options):
    """The command of a run on n ranks; 0: without mpirun."""
    start = ["mpirun", "--bind-to", "none", "-np", str(n)] if n else []
    model = runs.options(STEPS, 2) + (["--set", "hidden_size=128", "--deterministic"] if ON_GPU else [])
    return start + [TRAINER, *model, *runs.data_options(SCRATCH + "/data"), *"--micro-batch 1 --val-every 7".split(),
                    *"--sample-every 9 --generate 4 --timeout 5 --out out".split(), *options]  # fmt: skip


class Run(ranks.Run):
    """A run in a folder; its stderr goes to a file there."""

    def __init__(self, command, folder):
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}.{threading.get_ident()}"
        self.stderr = folder + "/stderr"
        with open(self.stderr, "wb") as stderr:
            self.program = subprocess.Popen(command, cwd=folder, bufsize=0, env={**os.environ, ranks.MARK: self.mark},
                                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)  # fmt: skip
        self.stdout = self.program.stdout

    def ends_within(self, seconds):
        try:
            self.program.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def strike(self, signals, everyone, chance):
        there = sorted(ranks.processes(self.mark))
        struck = there if everyone or not there else [chance.choice(there)]
        for name in signals:
            for process in struck:
                try:
                    os.kill(process, getattr(signal, "SIG" + name))
                except ProcessLookupError:
                    pass

    def end(self, strike):
        """Waits until all processes of the run have ended, and returns its exit code."""
        try:
            self.await_end(time.monotonic() + DEADLINE)
            return self.program.wait(DEADLINE)
        except AssertionError as error:
            if not self.mpirun_is_stuck():
                raise AssertionError(f"after {strike}: {error}")
            self.program.kill()
            return self.program.wait()
        finally:
            for process in ranks.processes(self.mark):
                os.kill(process, signal.SIGKILL)
            self.stdout.close()

    def mpirun_is_stuck(self):
        """OpenMPI 4.1: an mpirun that is interrupted while its ranks connect to it, or leave, may never end."""
        return all(rank is None for rank in ranks.processes(self.mark).values())


class Torture:
    def __init__(self, hours, seed):
        self.seed = seed
        self.start = time.monotonic()
        self.stop = self.start + 3600 * hours
        self.counts = collections.Counter()
        self.failures = []
        self.durations = {n: self.reference(n) for n in self.rank_counts()}

    @staticmethod
    def rank_counts():
        several = shutil.which("mpirun") and subprocess.run(
            ["mpirun", "-np", "2", TRAINER, "--nonsense"], capture_output=True, text=True
        ).stderr.count("no such option")
        most = 3
        if ON_GPU:
            most = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
            most = len(re.findall(r"^GPU \d+: ", most, re.MULTILINE))
        return range(min(3, most) + 1) if several == 1 else [0]

    @staticmethod
    def reference(n):
        """Makes the undisturbed run, with all its checkpoints. Returns its duration."""
        folder = f"{SCRATCH}/reference_{n}"
        os.makedirs(folder)
        start = time.monotonic()
        run = Run(launch(n, "--save-every", "1", "--keep", "0"), folder)
        code = run.end("no strike")
        assert code == 0, f"undisturbed on {n} ranks: exit code {code}: {runs.read(folder + '/stderr').decode()}"
        return time.monotonic() - start

    def attempt(self, n, folder, chance):
        """Starts the run and strikes it, unless it ends before. Returns whether it has ended."""
        out, reference = folder + "/out", f"{SCRATCH}/reference_{n}/out"
        before = (runs.steps(out) or [0])[-1]
        run = Run(launch(n, "--resume", "--save-every", str(chance.choice((1, 2, 3, 7))), "--keep", "3"), folder)
        signals, everyone = chance.choice(STRIKES)
        delay = 1.1 * chance.random() * self.durations[n]
        struck = time.monotonic() < self.stop and not run.ends_within(delay)
        strike = f"{' '.join(signals)}{' to all' * everyone}" if struck else "no strike"
        if struck:
            run.strike(signals, everyone, chance)
            self.counts[strike] += 1
        code = run.end(strike)
        said = f"exit code {code} after {strike}: {runs.read(folder + '/stderr').decode()}"
        expected = {0}
        if struck:
            expected.add(-getattr(signal, "SIG" + signals[-1]))
            expected.update([EXIT_INTERRUPTED] if signals[-1] != "KILL" else [])
        assert code in expected or (struck and n and code != 0), said
        runs.check_checkpoints(out, reference)
        after = (runs.steps(out) or [0])[-1]
        assert after >= before, f"step {before} is lost: {runs.steps(out)}; {said}"
        if code == 0:
            runs.check_end(out, reference, STEPS, self.counts.total())
        elif code == EXIT_INTERRUPTED:
            assert after > 0, f"no checkpoint; {said}"
        return code == 0

    def work(self, worker):
        chance = random.Random(f"{self.seed}.{worker}")
        folder = f"{SCRATCH}/worker_{worker}"
        try:
            while time.monotonic() < self.stop and not self.failures:
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder)
                n = chance.choice(list(self.durations)) if chance.random() < 0.5 else 0
                attempts = 1
                while not self.attempt(n, folder, chance):
                    attempts += 1
                self.counts["runs"] += 1
                self.counts["resumes"] += attempts - 1
        except Exception as error:
            self.failures.append(f"FAILED {folder}, seed {self.seed}, {n} ranks: {type(error).__name__}: {error}")

    def report(self):
        hours = (time.monotonic() - self.start) / 3600
        finished, resumes = self.counts.pop("runs", 0), self.counts.pop("resumes", 0)
        print(f"seed {self.seed}, {hours:.3f} hours: {finished} runs on {list(self.durations)} ranks have ended as "
              f"undisturbed ones, after {self.counts.total()} strikes and {resumes} resumes")  # fmt: skip
        print("strikes: " + ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))
        for failure in self.failures:
            print(failure)
        print(f"{finished} passed, {len(self.failures)} failed")


def main(hours, seed):
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", OMPI_ALLOW_RUN_AS_ROOT="1",
                      OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                      OMPI_MCA_btl_vader_single_copy_mechanism="none", OMPI_MCA_orte_execute_quiet="1",
                      PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")  # fmt: skip
    shutil.rmtree(SCRATCH, ignore_errors=True)
    os.makedirs(SCRATCH)
    runs.make_data(SCRATCH + "/data")
    torture = Torture(hours, seed)
    jobs = int(os.environ.get("JOBS", 1 if ON_GPU else os.cpu_count()))
    workers = [threading.Thread(target=torture.work, args=(i,)) for i in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torture.report()
    return len(torture.failures) > 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
