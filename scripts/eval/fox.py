"""
What the scripts of this folder and ../prompt.py share besides ../common.py: the trainer as a subprocess that
answers requests (--requests -), a checkpoint's tokenizer and recorded options. Standard library only, but for
the `tokenizers` library, which reads a tokenizer.json.

The trainer itself reads and writes text of bytes and of GPT-2's vocabulary. With any other tokenizer the
scripts send token ids, and make text of those that come back.
"""
import atexit
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (ROOT, Error, Parser, as_in_training, check_writable, checkpoint, counted, counted_range,  # noqa: E402,F401
                    named_files, new_folder, package, pip_install, read_json, run, write_file)  # fmt: skip

BYTE_VOCAB = 257  # 256 bytes and end-of-text


# ----------------------------------------------------------------------------
# the model


def has_gpu():
    """Is there a GPU? As sweep.sh finds it: CUDA_VISIBLE_DEVICES, or what nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible not in ("", "-1")
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True).stdout.split(b"\n")
    except OSError:
        return False
    return any(line.strip().isdigit() for line in listed)  # one that fails says so on standard output


def default_trainer():
    """train_foxcu where it is built and there is a GPU, else train_fox."""
    gpu = ROOT / "train_foxcu"
    return str(gpu if gpu.exists() and has_gpu() else ROOT / "train_fox")


def run_trainer(what, trainer, *arguments):
    """Runs the trainer. An Error with its last error of `what` if it fails."""
    try:
        done = subprocess.run([trainer, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as e:
        raise Error(f"--trainer {trainer}: cannot run: {e.strerror}")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or ["error: no word"]
        raise Error(f"{what}: {said[-1].removeprefix('error: ')}")


def add_model_options(parser):
    """Adds the options that say which model answers, and by which program."""
    add = parser.add_argument_group("model").add_argument
    add("--init", required=True, type=checkpoint, metavar="DIR", help="checkpoint, or a run, whose newest one it is")
    add("--trainer", metavar="FILE", default=default_trainer(),
        help="program that answers requests (default: train_foxcu if there is a GPU, else train_fox)")
    add("--vocab", metavar="FILE", help="GPT-2's vocab.bpe (dev/test/fixtures/gpt2/vocab.bpe), if DIR has no tokenizer.json")
    add("--json-escape", action="store_true", help="the model's text is JSON-escaped, as in LongCrawl64")
    add("--seq-len", type=int, metavar="N", help="longest window of rolling requests (default: as trained)")
    add("--workers", type=int, default=1, metavar="N", help="processes; with several, each has a GPU")


def recorded_option(folder, name, default=None):
    """An option of the run that trained a checkpoint, as its trainer.json records it."""
    path = Path(folder) / "trainer.json"
    return read_json(path).get("options", {}).get(name, default) if path.exists() else default


def is_bytes(path):
    """Is a tokenizer.json that of the byte tokenizer?"""
    model = read_json(path).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return (isinstance(vocab, dict) and len(vocab) == BYTE_VOCAB and not model.get("merges")
            and all(vocab.get(chr(i)) == i for i in range(33, 127)))


ESCAPES = re.compile(r'(?:\\u[0-9a-fA-F]{4})+|\\["\\/bfnrt]')


def escape(text):
    return json.dumps(text)[1:-1]


def unescape(text):
    """The inverse of escape, of any text: what is no escape stays."""
    def character(match):
        return json.loads(f'"{match[0]}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return ESCAPES.sub(character, text)


def cut_at(text, stops):
    """The text before the first of the stop strings."""
    return text[:min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


class Tokenizer:
    """Text to ids as the trainer does it, and back: bytes, or the checkpoint's tokenizer.json."""

    STOP_IDS = 2000  # most tokens that end a text early

    def __init__(self, folder, json_escape=False):
        self.json_escape = json_escape
        self.library = self.texts = None
        path = Path(folder) / "tokenizer.json"
        vocab_size = read_json(Path(folder) / "config.json").get("vocab_size")
        if not path.exists() and vocab_size != BYTE_VOCAB:
            raise Error(f"{path}: missing; only models of bytes need none")
        if not path.exists() or is_bytes(path):
            return
        try:
            self.library = package("tokenizers").Tokenizer.from_file(str(path))
        except Error:
            raise
        except Exception as e:  # the library has no class for its errors
            raise Error(f"{path}: {e}")
        as_in_training(self.library)

    def encode(self, text):
        if self.json_escape:
            text = escape(text)
        text = text.encode("utf-8", "surrogateescape")
        if self.library:
            return self.library.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return list(text)

    def decode(self, ids):
        if self.library:
            text = self.library.decode(ids, skip_special_tokens=False)
        else:
            text = bytes(i for i in ids if i < 256).decode("utf-8", "surrogateescape")
        return unescape(text) if self.json_escape else text

    def stops(self, until):
        """
        Ids at which the trainer may end a text that is cut at these strings: what certainly has one of them.
        A string that comes in other tokens is found when all the tokens are there.
        """
        if self.texts is None:
            self.texts = self.library.decode_batch([[i] for i in range(self.library.get_vocab_size())],
                                                   skip_special_tokens=False)
        found = []
        for stop in until:
            raw = escape(stop) if self.json_escape else stop
            ids = [[i] for i, text in enumerate(self.texts) if raw in text]
            found += ids if len(ids) <= self.STOP_IDS else []
            if raw in self.library.decode(self.encode(stop), skip_special_tokens=False):
                found.append(self.encode(stop))
        return found

    def request(self, request):
        """A request of text as one of ids, which the trainer would make of it."""
        texts = {k: v for k, v in request.items() if isinstance(v, str) and k != "type"}
        ids = {k: self.encode(v) for k, v in texts.items()}
        if "context" in ids and "continuation" in ids:  # white space between them belongs to the latter
            whole = self.encode(texts["context"] + texts["continuation"])
            n = len(self.encode(texts["context"].rstrip()))
            ids = {"context": whole[:n], "continuation": whole[n:]}
        until = [u for u in request.get("until") or [] if isinstance(u, str)]
        return {**request, **ids, **({"until": self.stops(until)} if until else {})}

    def answer(self, request, asked, answer):
        """The answer to `asked`, a request of ids, with the text that the request of text would have had."""
        if request["type"] != "generate":
            return answer
        before = asked["prompt"][-8:]  # a decoder may take the first token's space away
        head, whole = self.decode(before), self.decode(before + answer["tokens"])
        whole = whole.removeprefix(head) if whole.startswith(head) else self.decode(answer["tokens"])
        text = cut_at(whole, [u for u in request.get("until") or [] if isinstance(u, str)])
        return {**answer, "text": text, "finish": "stop" if text != whole else answer["finish"]}


# ----------------------------------------------------------------------------
# the trainer


class Trainer:
    """
    The program `trainer --init DIR --requests -`, started at the first request and kept for the next calls.
    Its stderr is ours, but for the error that it ends with, which the Error has. Several workers are several such
    processes; each takes blocks of BLOCK requests in a row, so that a question's choices stay together. ids: of a
    model without a tokenizer, whose answers are ids.
    quiet: without the line in which a program says, at its end, how many answers it gave.
    """

    BLOCK = 64

    def __init__(self, init, trainer, vocab=None, json_escape=False, seq_len=None, workers=1,
                 ids=False, quiet=False):
        if workers < 1:
            raise Error("--workers must be at least 1")
        self.command = [str(trainer), "--init", str(init), "--requests", "-"]
        self.command += ["--vocab", str(vocab)] if vocab else []
        self.command += ["--json-escape"] if json_escape else []
        self.command += ["--seq-len", str(seq_len)] if seq_len else []
        self.init, self.vocab, self.json_escape = Path(init), vocab, json_escape
        self.tokenizer, self.ids, self.quiet = None, ids, quiet  # tokenizer: that the trainer does not have
        self.workers, self.processes, self.lines, self.warners = workers, [], queue.Queue(), {}
        self.errors = {}  # the last one that a program wrote
        self.waiting = set()  # requests that have no answer yet

    def _start(self):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = list(map(str, range(self.workers))) if visible is None else visible.split(",")
        for k in range(self.workers):
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[k % len(gpus)]} if self.workers > 1 else {}
            try:
                process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
                                           env={**os.environ, **gpu})
            except OSError as e:
                program = Path(self.command[0])
                hint = f"; build it: make {program.name}" if program.parent == ROOT else ""
                raise Error(f"{program}: cannot start: {e.strerror}{hint}")
            self.processes.append(process)
            atexit.register(self._stop, process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()
            self.warners[process] = threading.Thread(target=self._warn, args=(process,), daemon=True)
            self.warners[process].start()
        if not self.vocab and (self.init / "tokenizer.json").exists() and not self._writes_text():
            self.tokenizer = Tokenizer(self.init, self.json_escape)

    def _writes_text(self):
        """Does the trainer have the model's tokenizer? A text of one token says so."""
        self._write(0, [{"type": "generate", "prompt": [], "max_tokens": 1, "temperature": 0, "until": []}])
        process, line = self.lines.get()
        if line is None:
            raise self._ended(process, "before its first answer")
        return self._parse(line).get("text") is not None

    def _parse(self, line):
        try:
            answer = json.loads(line)
            answer.get("id")
        except (ValueError, AttributeError):
            raise Error(f"{self.command[0]}: not an answer: {line.strip()[:100]}")
        return answer

    def _stop(self, process):
        """Ends a program. One that has answered everything ends by itself, and says what it has read."""
        if self.waiting:
            process.kill()
        with contextlib.suppress(BrokenPipeError):  # it has ended before, unread requests in its pipe
            process.stdin.close()
        self._wait(process)

    def _wait(self, process):
        """The exit code of a program, after its last words."""
        self.warners[process].join()
        return process.wait()

    def _ended(self, process, when):
        """The Error of a program that should not have ended."""
        code = self._wait(process)
        return Error(f"{self.command[0]} ended with exit code {code} {when}{self.errors.get(process, '')}")

    def _read(self, process):
        for line in process.stdout:
            self.lines.put((process, line))
        self.lines.put((process, None))

    def _warn(self, process):
        for line in process.stderr:
            if line.startswith("error: "):
                self.errors[process] = f": {line.removeprefix('error: ').rstrip()}"
            elif not (self.quiet and re.match(r"\d+ answers?, ", line)):
                sys.stderr.write(line)

    def _write(self, worker, requests):
        process = self.processes[worker]
        try:
            for i, request in enumerate(requests):
                if i // self.BLOCK % self.workers == worker:
                    process.stdin.write(json.dumps({"id": i, **request}) + "\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # the program has ended, which its reader reports; or _stop has closed its pipe

    def answers(self, requests):
        """
        Yields (index, answer) of a list of requests, in any order, each as soon as it is there. An Error if
        the program refuses a request or ends.
        """
        if requests and not self.processes:
            self._start()
        asked = list(map(self.tokenizer.request, requests)) if self.tokenizer else requests
        for worker in range(len(self.processes)):
            threading.Thread(target=self._write, args=(worker, asked), daemon=True).start()
        waiting = self.waiting = set(range(len(requests)))
        while waiting:
            process, line = self.lines.get()
            if line is None:
                raise self._ended(process, f"after {len(requests) - len(waiting)} of {counted(len(requests), 'answer')}")
            answer = self._parse(line)
            i = answer.get("id")
            if "error" in answer:
                kind = f" ({requests[i]['type']})" if i in waiting else ""
                raise Error(f"{self.command[0]} refused request {i}{kind}: {answer['error']}")
            if i not in waiting:
                raise Error(f"{self.command[0]}: an answer to no request: {line.strip()[:100]}")
            if self.tokenizer:
                answer = self.tokenizer.answer(requests[i], asked[i], answer)
            if answer.get("text", "") is None and not self.ids:
                raise Error(f"{self.command[0]} cannot make text of this model's tokens: put its "
                            f"tokenizer.json into {self.init}, or give --vocab")
            waiting.remove(i)
            yield i, answer
