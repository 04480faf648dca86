"""
Runs scripts for warm.sh, each in a process forked from this one, which has imported what they share:

    warm.py MODULE...

A request on standard input is a line `NUMBER PID WORDS` and as many words, each with a NUL behind it: a script and its
arguments. The script writes to standard output and error of process PID. The answer on standard output is `NUMBER CODE`, the exit
code as a shell has it. Modules that are missing are left out: the script then says so, as it would alone.
"""
import contextlib
import gc
import importlib
import os
import sys
import types
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path

LOG = 3  # standard output of the test


def take_streams(pid):
    """The log of a test stays open with its offset; other files are empty before and belong to the script alone."""
    for fd in 1, 2:
        path = f"/proc/{pid}/fd/{fd}"
        same = os.path.samestat(os.stat(path), os.fstat(LOG))
        opened = os.dup(LOG) if same else os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(LOG)


def become(script, arguments):
    """Runs the script as `python3 SCRIPT ARGUMENT...` does, in this process."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__file__ = script
    exec(SourceFileLoader("__main__", script).get_code("__main__"), vars(module))  # the compiled module that Python keeps


def forked():
    """os.fork(), without its warning that NumPy has threads: they have nothing to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def request(requests):
    """(number, PID, words) of the next request; None: there is none."""
    header = requests.readline().split()
    if not header:
        return None
    number, pid, count = map(int, header)
    words = []
    while len(words) < count:
        word = b"".join(iter(lambda: requests.read(1), b"\0"))
        words.append(os.fsdecode(word))
    return number, pid, words


def main():
    path = sys.path[1:]  # without this file's folder
    sys.path[:0] = ["scripts", "scripts/eval"]
    for name in sys.argv[1:]:
        with contextlib.suppress(Exception):  # what a missing package raises differs
            importlib.import_module(name)
    sys.path[:] = path
    gc.freeze()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(LOG, 1)
    while found := request(requests):
        number, pid, words = found
        child = forked()
        if child == 0:
            requests.close()
            os.close(answers)
            take_streams(pid)
            become(words[0], words[1:])
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, b"%d %d\n" % (number, code if code >= 0 else 128 - code))


main()
