"""Disturbs runs of several ranks, and compares what they leave. Used by test_ranks.sh; needs Linux, and only Python's
standard library.

    ranks.py close FOLDER FOLDER TOLERANCE   checks that two checkpoints have the same tensors: the relative error of each
                                             in the 2-norm is at most the tolerance
    ranks.py losses LOG LOG TOLERANCE        checks that two logs have the same steps, that the first has the second's
                                             validations, and that losses agree; of a step that is logged twice, the last
                                             line counts
    ranks.py evaluations LOG LOG TOLERANCE   checks that they have the same evaluations, but for their duration, whose numbers
                                             agree
    ranks.py positions EVAL EVAL RANKS       checks that two --eval files agree, also where the tokens of RANKS ranks begin
    ranks.py validated LOG EVAL TOLERANCE    checks that a log's last validation has the mean loss of an --eval file
    ranks.py peak COMMAND...                 runs the command, and prints the most memory that it held, in MiB
    ranks.py record FOLDER                   prints step, tokens and position in the data of a checkpoint
    ranks.py token SHARD NEW INDEX ID        copies a shard and changes one token
    ranks.py strike SIGNAL WHOM EVENT SPIN LIMIT COMMAND...
                                             runs the command and waits for the event: a step number that is printed, or
                                             FOLDER:STEP, when a checkpoint of the step begins in the folder. SPIN loop
                                             iterations later sends the signal to the rank of the number WHOM, or to
                                             mpirun, and prints mpirun's exit code. Fails if a process of the run, on
                                             whatever host of this machine, lives LIMIT seconds after the signal. Ranks
                                             print to $RANKS_PY_STDOUT, a pipe for some 50 lines: mpirun, which would
                                             read all lines, is not in between, and no run ends before the signal
"""

import array, fcntl, fnmatch, json, math, os, resource, select, signal, struct, subprocess, sys, time

# ----------------------------------------------------------------------------
# checkpoints and logs


def tensors(path):
    """Yields name, shape and values of the tensors of a safetensors file."""
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    for name, tensor in sorted(header.items()):
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield name, tensor["shape"], array.array({"F32": "f", "F64": "d"}[tensor["dtype"]], data[begin:end])


def close(folder_a, folder_b, tolerance):
    a, b = (list(tensors(folder + "/model.safetensors")) for folder in (folder_a, folder_b))
    assert a and [t[:2] for t in a] == [t[:2] for t in b], "other tensors"
    for (name, _, x), (_, _, y) in zip(a, b):
        error = math.sqrt(sum((p - q) ** 2 for p, q in zip(x, y)))
        norm = math.sqrt(sum(q * q for q in y))
        assert norm > 0 or name == "model.lower_bounds", f"{name}: zeros"  # those are, where they are not used
        assert error <= tolerance * norm, f"{name}: error {error} of {norm}"


def losses(log_a, log_b, tolerance):
    runs = []
    for path in (log_a, log_b):
        with open(path) as f:
            lines = [json.loads(line) for line in f]
        run = {("step", line["step"]): line["loss"] for line in lines if line["event"] == "step"}
        run.update({("validation", line["step"]): line["val_loss"] for line in lines if line["event"] == "validation"})
        runs.append(run)
    a, b = runs
    assert b and b.keys() <= a.keys(), b.keys() - a.keys()
    assert all(kind == "validation" for kind, _ in a.keys() - b.keys()), a.keys() - b.keys()
    for event in b:
        assert abs(a[event] - b[event]) <= tolerance * b[event], f"{event}: {a[event]}, expected {b[event]}"


def evaluations(log_a, log_b, tolerance):
    def numbers(value, name):
        """Yields (name, number) of all numbers in a JSON value."""
        if isinstance(value, (dict, list)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from numbers(item, f"{name}.{key}")
        elif isinstance(value, (int, float)) and not name.endswith(".ms"):
            yield name, value

    runs = []
    for path in (log_a, log_b):
        with open(path) as f:
            runs.append([dict(numbers(v, "")) for v in map(json.loads, f) if v["event"] == "evaluation"])
    assert runs[0] and len(runs[0]) == len(runs[1])
    for a, b in zip(*runs):
        assert a.keys() == b.keys() and ".val_loss" in a, a.keys() ^ b.keys()
        for name in a:
            assert abs(a[name] - b[name]) <= tolerance * abs(b[name]), f"{name}: {a[name]}, {b[name]}"


def positions(eval_a, eval_b, ranks):
    with open(eval_a) as a, open(eval_b) as b:
        a, b = json.load(a), json.load(b)
    T = len(a["loss"])
    assert T == len(b["loss"]) and (a["sequences"], a["targets"]) == (b["sequences"], b["targets"])
    assert abs(a["loss_mean"] - b["loss_mean"]) <= 2e-3, f"{a['loss_mean']}, {b['loss_mean']}"
    assert all(abs(x - y) <= 1e-2 for x, y in zip(a["pruned"] or [], b["pruned"] or [])), f"{a['pruned']}, {b['pruned']}"
    for begin in range(0, T, T // ranks):
        for i in range(begin, begin + 8):
            assert abs(a["loss"][i] - b["loss"][i]) <= 0.1, f"position {i}: {a['loss'][i]}, {b['loss'][i]}"


def validated(log, evaluation, tolerance):
    with open(log) as f:
        of_run = [line["val_loss"] for line in map(json.loads, f) if line["event"] == "validation"]
    with open(evaluation) as f:
        mean = json.load(f)["loss_mean"]
    assert abs(of_run[-1] - mean) <= tolerance * mean, f"{of_run[-1]}, {mean}"


def peak(command):
    code = subprocess.run(command).returncode
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, flush=True)
    sys.exit(code)


def record(folder):
    with open(folder + "/trainer.json") as f:
        state = json.load(f)
    print(state["step"], state["tokens"], state["data"]["position"])


def token(shard, new, index, value):
    with open(shard, "rb") as f:
        data = bytearray(f.read())
    struct.pack_into("<H", data, 1024 + 2 * index, value)
    with open(new, "wb") as f:
        f.write(data)


# ----------------------------------------------------------------------------
# a run that is disturbed. Its processes are found by a variable of their environment, also when they have lost their
# parent.

MARK = "RANKS_PY"


def processes(mark):
    """Returns {process: rank} of the living processes with the mark; mpirun and its daemons have rank None."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/environ", "rb") as f:  # of a zombie it is empty
                variables = dict(v.split(b"=", 1) for v in f.read().split(b"\0") if b"=" in v)
        except (OSError, ValueError):
            continue
        if variables.get(MARK.encode()) == mark.encode():
            rank = variables.get(b"OMPI_COMM_WORLD_RANK")
            found[int(entry)] = None if rank is None else int(rank)
    return found


class Run:
    def __init__(self, command):
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        reading, self.writing = os.pipe()
        fcntl.fcntl(reading, 1031, 4096)  # F_SETPIPE_SZ: fcntl has this name since Python 3.10
        self.stdout = os.fdopen(reading, "rb", buffering=0)
        environment = {**os.environ, MARK: self.mark, MARK + "_STDOUT": f"/proc/{os.getpid()}/fd/{self.writing}"}
        self.program = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

    def await_event(self, event, deadline):
        """Reads what the run prints until it is over, or until the event has happened."""
        text = b""
        folder, _, step = event.rpartition(":")
        begun = f"*step_{int(step):08d}"
        while time.monotonic() < deadline:
            if folder and any(fnmatch.fnmatch(name, begun) for name in self.list(folder)):
                return
            if self.writing and (text or self.program.poll() is not None):  # the ranks have it open
                os.close(self.writing)
                self.writing = None
            if select.select([self.stdout], [], [], 0 if folder else 1)[0]:
                data = self.stdout.read(65536)
                assert data, f"the run ended before the signal: exit code {self.program.wait()}, {text[-500:]}"
                text = (text + data)[-65536:]
                steps = [line.split()[1] for line in text.split(b"\n")[:-1] if line.startswith(b"step ")]
                if not folder and steps and int(steps[-1].split(b"/")[0]) >= int(step):
                    return
        raise AssertionError(f"{event} has not come")

    @staticmethod
    def list(folder):
        return os.listdir(folder) if os.path.isdir(folder) else []

    def await_end(self, deadline):
        """Waits until no process of the run is left. Reads the pipe: a full one would hold a rank."""
        while True:
            left = {}
            for process in processes(self.mark):
                try:
                    left[os.pidfd_open(process)] = process
                except ProcessLookupError:
                    pass
            if not left:
                return
            poll = select.poll()
            for descriptor in left:
                poll.register(descriptor, select.POLLIN)
            if not self.stdout.closed:
                poll.register(self.stdout, select.POLLIN)
            ready = poll.poll(max(0, int((deadline - time.monotonic()) * 1000)))
            for descriptor in left:
                os.close(descriptor)
            assert ready, f"processes {sorted(left.values())} are still there"
            if not self.stdout.closed and self.stdout.fileno() in (fd for fd, _ in ready):
                if not self.stdout.read(65536):
                    self.stdout.close()

    def rank(self, number):
        found = [process for process, rank in processes(self.mark).items() if rank == number]
        assert len(found) == 1, f"{len(found)} processes of rank {number}"
        return found[0]

    def disturb(self, event, spin, limit, action):
        try:
            self.await_event(event, time.monotonic() + 300)
            for _ in range(spin):
                pass
            action(self)
            self.await_end(time.monotonic() + limit)
            print(self.program.wait())
        finally:
            for process in processes(self.mark):
                os.kill(process, signal.SIGKILL)


def strike(name, whom, event, spin, limit, command):
    number = getattr(signal, "SIG" + name)
    action = lambda run: os.kill(run.program.pid if whom == "mpirun" else run.rank(int(whom)), number)
    Run(command).disturb(event, spin, limit, action)


if __name__ == "__main__":
    command, *args = sys.argv[1:] or [""]
    if command == "close":
        close(args[0], args[1], float(args[2]))
    elif command == "losses":
        losses(args[0], args[1], float(args[2]))
    elif command == "evaluations":
        evaluations(args[0], args[1], float(args[2]))
    elif command == "positions":
        positions(args[0], args[1], int(args[2]))
    elif command == "validated":
        validated(args[0], args[1], float(args[2]))
    elif command == "peak":
        peak(args)
    elif command == "record":
        record(args[0])
    elif command == "token":
        token(args[0], args[1], int(args[2]), int(args[3]))
    elif command == "strike":
        strike(*args[:3], int(args[3]), float(args[4]), args[5:])
    else:
        sys.exit(__doc__)
