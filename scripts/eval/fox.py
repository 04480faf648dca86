"""
What the scripts of this folder share besides ../common.py: the trainer as a subprocess that answers requests
(--requests -), a checkpoint's tokenizer and recorded options. Standard library only, but for the `tokenizers`
library, which reads a tokenizer.json.
"""
import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import ROOT, Error, named_files, package, read_json, run, write_file  # noqa: E402,F401

BYTE_VOCAB = 257  # 256 bytes and end-of-text


# ----------------------------------------------------------------------------
# the model


def add_model_options(parser):
    """Adds the options that say which model answers, and by which program."""
    programs = [p for p in (ROOT / "train_foxcu", ROOT / "train_fox") if p.exists()]
    add = parser.add_argument_group("model").add_argument
    add("--init", required=True, metavar="DIR", help="checkpoint")
    add("--trainer", metavar="FILE", default=str(programs[0] if programs else ROOT / "train_fox"),
        help="program that answers requests (default: train_foxcu if it is built, else train_fox)")
    add("--vocab", metavar="FILE", help="vocab.bpe, for models with GPT-2's vocabulary")
    add("--json-escape", action="store_true", help="the model's text is JSON-escaped, as in LongCrawl64")
    add("--seq-len", type=int, metavar="N", help="longest window of rolling requests (default: as trained)")
    add("--workers", type=int, default=1, metavar="N", help="processes; with several, each has a GPU")


def recorded_option(folder, name, default=None):
    """An option of the run that trained a checkpoint, as its trainer.json records it."""
    path = Path(folder) / "trainer.json"
    return read_json(path).get("options", {}).get(name, default) if path.exists() else default


class Tokenizer:
    """Text to ids as the trainer does it: bytes, or the checkpoint's tokenizer.json."""

    def __init__(self, folder, json_escape=False):
        self.json_escape = json_escape
        self.library = None
        if read_json(Path(folder) / "config.json").get("vocab_size") == BYTE_VOCAB:
            return
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise Error(f"{path}: missing; only models of bytes need none")
        self.library = package("tokenizers").Tokenizer.from_file(str(path))
        self.library.encode_special_tokens = True  # "<|endoftext|>" is text, as in the trainer

    def encode(self, text):
        if self.json_escape:
            text = json.dumps(text)[1:-1]
        if self.library:
            return self.library.encode(text, add_special_tokens=False).ids
        return list(text.encode("utf-8", "surrogateescape"))


# ----------------------------------------------------------------------------
# the trainer


class Trainer:
    """
    The program `trainer --init DIR --requests -`, started at the first request and kept for the next calls.
    Its stderr is ours. Several workers are several such processes; each takes blocks of BLOCK requests in a
    row, so that a question's choices stay together.
    """

    BLOCK = 64

    def __init__(self, init, trainer, vocab=None, json_escape=False, seq_len=None, workers=1):
        if workers < 1:
            raise Error("--workers must be at least 1")
        self.command = [str(trainer), "--init", str(init), "--requests", "-"]
        self.command += ["--vocab", str(vocab)] if vocab else []
        self.command += ["--json-escape"] if json_escape else []
        self.command += ["--seq-len", str(seq_len)] if seq_len else []
        self.workers, self.processes, self.lines = workers, [], queue.Queue()
        self.waiting = set()  # requests that have no answer yet

    def _start(self):
        for k in range(self.workers):
            gpu = {"CUDA_VISIBLE_DEVICES": str(k)} if self.workers > 1 else {}
            try:
                process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           encoding="utf-8", env={**os.environ, **gpu})
            except OSError as e:
                raise Error(f"{self.command[0]}: cannot start: {e.strerror}")
            self.processes.append(process)
            atexit.register(self._stop, process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _stop(self, process):
        """Ends a program. One that has answered everything ends by itself, and says what it has read."""
        if self.waiting:
            process.kill()
        else:
            process.stdin.close()
        process.wait()

    def _read(self, process):
        for line in process.stdout:
            self.lines.put((process, line))
        self.lines.put((process, None))

    def _write(self, worker, requests):
        process = self.processes[worker]
        try:
            for i, request in enumerate(requests):
                if i // self.BLOCK % self.workers == worker:
                    process.stdin.write(json.dumps({"id": i, **request}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the program has ended, which its reader reports

    def answers(self, requests):
        """
        Yields (index, answer) of a list of requests, in any order, each as soon as it is there. An Error if
        the program refuses a request or ends.
        """
        if requests and not self.processes:
            self._start()
        for worker in range(len(self.processes)):
            threading.Thread(target=self._write, args=(worker, requests), daemon=True).start()
        waiting = self.waiting = set(range(len(requests)))
        while waiting:
            process, line = self.lines.get()
            if line is None:
                raise Error(f"{self.command[0]} ended with exit code {process.wait()} after "
                            f"{len(requests) - len(waiting)} of {len(requests)} answers")
            try:
                answer = json.loads(line)
                i = answer.get("id")
            except (ValueError, AttributeError):
                raise Error(f"{self.command[0]}: not an answer: {line.strip()[:100]}")
            if "error" in answer:
                kind = f" ({requests[i]['type']})" if i in waiting else ""
                raise Error(f"{self.command[0]} refused request {i}{kind}: {answer['error']}")
            if i not in waiting:
                raise Error(f"{self.command[0]}: an answer to no request: {line.strip()[:100]}")
            if answer.get("text", "") is None:
                raise Error(f"{self.command[0]} cannot make text of this model's tokens: give --vocab")
            waiting.remove(i)
            yield i, answer
