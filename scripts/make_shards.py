#!/usr/bin/env python3
"""
Encodes text with any Hugging Face tokenizer and writes the data shards that the trainers read.

    scripts/make_shards.py --tokenizer tokenizer.json --val-fraction 0.001 --out data/web fineweb/*.parquet
    scripts/make_shards.py --tokenizer llama/ --out data/web hf://datasets/HuggingFaceFW/fineweb/sample/10BT

A PATH is a file or a folder, local or (where huggingface_hub is installed) hf://. Its name says what is in it:
.jsonl, .json (an object a line) and .parquet have a document in the field --text-field of each row, other files are one
document of UTF-8 text each; .gz and .zst are decompressed. Memory stays bounded: large text is encoded in pieces, cut
where no token can cross. Beside the shards is PREFIX_tokenizer.json, which the trainers copy into checkpoints.

The output depends only on the options, and on names and contents of the files: not on --jobs. Of the same files,
data/text_to_shards --tokenizer gpt2 writes the same bytes.

Needs scripts/requirements.txt: tokenizers and numpy; pyarrow, zstandard and huggingface_hub for what they read.
"""
import argparse
import codecs
import collections
import concurrent.futures
import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import time
import zlib

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
try:
    import numpy as np
    import tokenizers
except ImportError as missing:
    sys.exit(f"error: {missing}: pip install -r scripts/requirements.txt")

PIECE = 1 << 20  # characters of a document, or bytes of lines, that are encoded at a time
LONGEST = 32 << 20  # without a place to cut
NOT_TEXT = re.compile(r".*_((train|val)_\d{6}\.bin|tokenizer\.json)(\.tmp)?")


class Failed(Exception):
    """An error that the user can act on; its text is the message."""


# ----------------------------------------------------------------------------
# the tokenizer


class Encoder:
    """A tokenizer.json. Text like "<|endoftext|>" is encoded as ordinary text, and no token is added to a text."""

    def __init__(self, text):
        try:
            settings = json.loads(text)
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as e:  # the library raises plain Exceptions
            raise Failed(f"is not a tokenizer.json: {e}")
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if settings["model"].get("dropout"):
            self.tokenizer.model.dropout = None
        normalizer, pre = settings.get("normalizer"), json.dumps(settings.get("pre_tokenizer"))
        self.cuttable = (normalizer is None or normalizer["type"] == "NFC") and pre != "null" and \
            not re.search('"add_prefix_space": true|"Metaspace"', pre)

    def is_cut(self, text, at):
        """Do words end at text[at], whatever is farther away?"""
        first = max(0, at - 256)
        words = self.tokenizer.pre_tokenizer.pre_tokenize_str(text[first : at + 256])
        return any(first + begin == at for _, (begin, _) in words)

    def find_cut(self, text):
        """
        The last place where text can be cut: its parts have the tokens of the whole, whatever follows. 0: none. That
        is before a space between letters, or after a single line break.
        """
        for start in (max(0, len(text) - 4096), 0) if self.cuttable else ():
            for match in reversed(list(CUT.finditer(text, start))):
                if self.is_cut(text, match.start()):
                    return match.start()
        return 0

    def pieces(self, text, last=True):
        """The pieces of a text, the last one only if the text ends there; then the rest."""
        while len(text) > PIECE:
            cut = self.find_cut(text[: 2 * PIECE])
            if not cut:
                break
            yield text[:cut]
            text = text[cut:]
        if len(text) > LONGEST:
            raise Failed(f"has {LONGEST} characters that this tokenizer must encode as a whole: is it text? divide it")
        if last:
            yield text
        return text

    def encode(self, texts):
        texts = [t if t.isascii() else t.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for t in texts]
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, "<u4") for e in encoded]


CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=\S)")


def find_end_of_text(path, vocab, given):
    """The id of the token between documents: --eot, tokenizer_config.json's eos_token, or a usual name."""
    candidates, config = [given], os.path.join(os.path.dirname(path), "tokenizer_config.json")
    if given is None:
        if os.path.exists(config):
            with open(config, encoding="utf-8") as f:
                eos = json.load(f).get("eos_token")
            candidates = [eos["content"] if isinstance(eos, dict) else eos]
        candidates += ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"]
    for candidate in candidates:
        if candidate in vocab:
            return vocab[candidate]
    raise Failed(f"--eot {given}: is no token of {path}" if given else f"{path}: which token ends a document? give --eot")


# ----------------------------------------------------------------------------
# input: files as blocks of bytes

Source = collections.namedtuple("Source", "path name bytes state")  # name: decides the split; state: to see changes


def remote():
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise Failed("hf:// needs huggingface_hub: pip install -r scripts/requirements.txt")
    return HfFileSystem()


def open_source(path):
    return remote().open(path, "rb") if path.startswith("hf://") else open(path, "rb")


def state_of(path):
    st = os.stat(path)
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns


def walk(folder):
    """Files below a folder in the order of data/text_to_shards: each folder's entries by name, without hidden ones."""
    for entry in sorted(os.listdir(folder), key=os.fsencode):
        path = os.path.join(folder, entry)
        mode = os.lstat(path).st_mode
        if entry.startswith("."):
            continue
        if stat.S_ISDIR(mode):
            yield from walk(path)
        elif stat.S_ISREG(mode) and not NOT_TEXT.fullmatch(entry):
            yield path


def find_sources(paths):
    """The files to read, in order, each once; empty ones are left out."""
    found, seen = [], set()
    for given in paths:
        if given.startswith("hf://"):
            files = remote().find(given, detail=True) or {}
            for path, info in sorted(files.items()):
                if os.path.basename(path)[0] != "." and path not in seen and info["size"]:
                    found.append(Source("hf://" + path.removeprefix("hf://"), path, info["size"], None))
                    seen.add(path)
            continue
        folder = os.path.isdir(given)
        for path in walk(given) if folder else [given]:
            state = state_of(path)
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise Failed(f"{path}: neither a file nor a folder")
            if state[2] and state[:2] not in seen:
                found.append(Source(path, os.path.relpath(path, given) if folder else path, state[2], state))
                seen.add(state[:2])
    if not found:
        raise Failed("no input: the paths hold no file that is not empty")
    return found


def decompressor(path):
    """What makes a decompressor for this file, None for a plain one."""
    if path.endswith(".gz"):
        return lambda: zlib.decompressobj(31)
    if path.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise Failed(f"{path}: needs zstandard: pip install -r scripts/requirements.txt")
        return lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    return None


def blocks(file, path):
    """The decompressed bytes of an open file, in blocks."""
    new, stream = decompressor(path), None
    for raw in iter(lambda: file.read(1 << 16), b""):
        if new is None:
            yield raw
        while new and raw:
            stream = stream or new()
            try:
                yield stream.decompress(raw)
            except Exception as e:  # zlib.error, zstandard.ZstdError
                raise Failed(f"{path}: damaged: {e}")
            if not stream.eof:
                break
            raw, stream = stream.unused_data, None
    if stream:
        raise Failed(f"{path}: is truncated: its compressed data does not end")


def in_validation(settings, name):
    """The split of a document, by a hash of seed and name: other documents do not matter."""
    draw = hashlib.blake2b(f"{settings.seed} {name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(draw, "little") < settings.val_fraction * 2**64


# ----------------------------------------------------------------------------
# tasks: what a process encodes at a time. Made in order by this process, as (function, arguments), with the number of
# bytes read of the file. A result is a list of (split, is it a document's first piece, characters, ids).


def text_pieces(encoder, file, path):
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    for block in blocks(file, path):
        if b"\0" in block:
            raise Failed(f"{path}: is not text: it has a zero byte")
        rest += decoder.decode(block)
        if len(rest) > 2 * PIECE:
            rest = yield from encoder.pieces(rest, last=False)
    yield from encoder.pieces(rest + decoder.decode(b"", True))


def text_tasks(settings, encoder, source, file):
    split, first, characters = in_validation(settings, source.name), True, 0
    try:
        for piece in text_pieces(encoder, file, source.path):
            yield encode_text, (split, first, piece), file.tell()
            first = False
    except UnicodeDecodeError as e:
        raise Failed(f"{source.path}: is not UTF-8: {e.reason}")


def jsonl_tasks(_, __, source, file):
    rest, line = b"", 1
    for block in blocks(file, source.path):
        rest += block
        end = rest.rfind(b"\n") + 1 if len(rest) > PIECE else 0
        if not end and len(rest) > 4 * LONGEST:
            raise Failed(f"{source.path}:{line}: a line of more than {4 * LONGEST} bytes")
        if end:
            yield encode_lines, (source, line, rest[:end]), file.tell()
            line += rest.count(b"\n", 0, end)
            rest = rest[end:]
    yield encode_lines, (source, line, rest), file.tell()


def open_parquet(file, path, field):
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Failed(f"{path}: needs pyarrow: pip install -r scripts/requirements.txt")
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as e:
        raise Failed(f"{path}: cannot read: {e}")
    if field not in table.schema_arrow.names:
        raise Failed(f"{path}: has no column {field!r} but {', '.join(table.schema_arrow.names)}: --text-field names it")
    return table


def parquet_tasks(settings, _, source, file):
    groups, row = open_parquet(file, source.path, settings.text_field).metadata, 0
    for i in range(groups.num_row_groups):
        yield encode_rows, (source, i, row), source.bytes * (i + 1) // groups.num_row_groups
        row += groups.row_group(i).num_rows


def tasks(settings, encoder, sources):
    """All tasks in order, each with the number of bytes read of all files."""
    before = 0
    for source in sources:
        kind = re.sub(r"\.(gz|zst)$", "", source.path).rpartition(".")[2]
        make = {"jsonl": jsonl_tasks, "json": jsonl_tasks, "parquet": parquet_tasks}.get(kind, text_tasks)
        with open_source(source.path) as file:
            for function, arguments, read in make(settings, encoder, source, file):
                yield function, arguments, before + read
        if source.state and state_of(source.path) != source.state:
            raise Failed(f"{source.path}: changed while it was read; run again when nothing writes it")
        before += source.bytes


# ----------------------------------------------------------------------------
# in the processes

worker = None  # (settings, Encoder)


def start_worker(settings, text):
    global worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also if it is killed
    worker = settings, Encoder(text)


def encode_documents(documents):
    """documents: (name, text) pairs."""
    settings, encoder = worker
    pieces = [(in_validation(settings, name), i == 0, piece)
              for name, text in documents for i, piece in enumerate(encoder.pieces(text))]
    ids = encoder.encode([piece for _, _, piece in pieces])
    return [(split, first, len(piece), i) for (split, first, piece), i in zip(pieces, ids)]


def encode_text(split, first, piece):
    return [(split, first, len(piece), *worker[1].encode([piece]))]


def encode_lines(source, number, lines):
    documents, field = [], worker[0].text_field
    for number, line in enumerate(lines.split(b"\n"), number):
        if not line.strip():
            continue
        where = f"{source.path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as e:
            raise Failed(f"{where}: is not JSON: {e}")
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            keys = ", ".join(row) if isinstance(row, dict) else "no object"
            raise Failed(f"{where}: has no text {field!r} but {keys}: --text-field names it")
        if row[field]:
            documents.append((f"{source.name}:{number}", row[field]))
    return encode_documents(documents)


def encode_rows(source, group, row):
    result, field = [], worker[0].text_field
    with open_source(source.path) as file:
        table = open_parquet(file, source.path, field)
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
            texts = batch.column(0).to_pylist()
            if not all(text is None or isinstance(text, str) for text in texts):
                raise Failed(f"{source.path}: column {field!r} is not text")
            result += encode_documents([(f"{source.name}:{row + i}", text) for i, text in enumerate(texts) if text])
            row += len(texts)
    return result


# ----------------------------------------------------------------------------
# the conversion


class Writer:
    """data/ids_to_shards, which gets the token ids and replaces the shards of the prefix at the end."""

    def __init__(self, settings):
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../data/ids_to_shards")
        if not os.path.exists(program):
            raise Failed("data/ids_to_shards is not built: make data/ids_to_shards")
        options = {"out": settings.out, "tokenizer": settings.tokenizer, "vocab-size": settings.vocab_size,
                   "end-of-text": settings.end_of_text, "doc-len": settings.doc_len,
                   "shard-tokens": settings.shard_tokens}
        command = [program, *(f"--{name}={value}" for name, value in options.items())]
        self.program = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.tokens = 0

    def write(self, kind, ids):
        try:
            self.program.stdin.write(struct.pack("<2I", kind, len(ids)))
            self.program.stdin.write(ids)
            self.program.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(self.program.wait() or 1)  # after its message
        self.tokens += len(ids)

    def close(self, complete):
        """Without `complete` the old shards remain."""
        if complete:
            self.write(4, b"")
            self.program.stdin.close()
        else:
            self.program.kill()
        if self.program.wait() and complete:
            raise SystemExit(1)


class Progress:
    """A line on stderr: in place on a terminal, else every ten seconds."""

    def __init__(self, total):
        self.total, self.start, self.terminal = total, time.monotonic(), sys.stderr.isatty()
        self.next = self.start + (1 if self.terminal else 10)

    def update(self, done):
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + (0.25 if self.terminal else 10)
        rate = done / (now - self.start)
        left = (self.total - done) / rate if rate else 0
        line = f"encoding: {done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, {left:.0f}s left"
        print(f"\r\033[K{line}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def end(self):
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def convert(settings, sources, encoder, text):
    """Returns the number of characters read."""
    characters, progress, writer = 0, Progress(sum(source.bytes for source in sources)), Writer(settings)
    pool = concurrent.futures.ProcessPoolExecutor(settings.jobs, multiprocessing.get_context("spawn"), start_worker,
                                                  (settings, text))

    def results():
        """Those of all tasks, in order. So many at most are not taken yet: they take memory."""
        pending = collections.deque()
        for function, arguments, read in tasks(settings, encoder, sources):
            pending.append((pool.submit(function, *arguments), read))
            if len(pending) > 2 * settings.jobs + 1:
                future, read = pending.popleft()
                yield from future.result()
                progress.update(read)
        for future, read in pending:
            yield from future.result()
            progress.update(read)

    complete = False
    try:
        for split, first, length, ids in results():
            if first and settings.tokens and writer.tokens >= settings.tokens:
                break
            writer.write(split | first << 1, ids)
            characters += length
        complete = True
    except concurrent.futures.process.BrokenProcessPool:
        raise Failed("a process of --jobs ended: it was killed, or is there too little memory? lower --jobs")
    finally:
        pool.shutdown(cancel_futures=True)
        progress.end()
        writer.close(complete)
    return characters, writer.tokens


# ----------------------------------------------------------------------------
# main


def count(text):
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)(k|M|G|Ki|Mi|Gi)?", text)
    scale = {None: 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    value = float(match[1]) * scale[match[2]] if match else -1
    if value != int(value) or not 0 <= value < 2**53:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number (suffixes: k M G Ki Mi Gi)")
    return int(value)


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.error = lambda message: sys.exit(f"error: {message}")
    p.add_argument("paths", nargs="+", metavar="PATH", help="files or folders, local or hf://")
    p.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, or a folder that has it")
    p.add_argument("--out", required=True, metavar="PREFIX", help="PREFIX_train_000000.bin ..., PREFIX_val_000000.bin")
    p.add_argument("--text-field", default="text", metavar="NAME", help="field or column of the text [text]")
    p.add_argument("--doc-len", type=count, default=0, metavar="D", help="cut each document into documents of exactly "
                   "D tokens and drop the rest; 0: a token stream, each document preceded by the end-of-text token")
    p.add_argument("--val-fraction", type=float, default=0, metavar="F", help="fraction of held-out documents")
    p.add_argument("--seed", type=count, default=0, metavar="N", help="of their choice")
    p.add_argument("--tokens", type=count, default=0, metavar="N", help="end with the document that reaches N tokens")
    p.add_argument("--shard-tokens", type=count, default=256 << 20, metavar="N", help="most tokens a shard [256Mi]")
    p.add_argument("--eot", metavar="TOKEN", help="the end-of-text token [the tokenizer's]")
    p.add_argument("--jobs", type=count, default=len(os.sched_getaffinity(0)), metavar="N", help="processes [cores]")
    settings = p.parse_args()
    if not 0 <= settings.val_fraction < 1:
        raise Failed(f"--val-fraction {settings.val_fraction}: not from 0 to below 1")
    if not 1 <= settings.jobs <= 1024:
        raise Failed(f"--jobs {settings.jobs}: not from 1 to 1024")
    if not max(settings.doc_len, 1) <= settings.shard_tokens < 2**31:
        raise Failed(f"--shard-tokens {settings.shard_tokens}: not from --doc-len to {2**31 - 1}")
    if not os.path.basename(settings.out):
        raise Failed(f"--out {settings.out}: must end with the start of a file name")
    return settings


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the temporary files removed
    settings = parse_arguments()
    path = settings.tokenizer
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    with open(path, encoding="utf-8") as f:
        text = f.read()
    try:
        encoder = Encoder(text)
    except Failed as e:
        raise Failed(f"{path}: {e}")
    vocab = encoder.tokenizer.get_vocab(with_added_tokens=True)
    settings.tokenizer, settings.vocab_size = path, max(vocab.values()) + 1
    settings.end_of_text = find_end_of_text(path, vocab, settings.eot)
    characters, tokens = convert(settings, find_sources(settings.paths), encoder, text)
    print(f"{characters / max(tokens, 1):.3f} characters a token; for the trainer: "
          f"--set vocab_size={settings.vocab_size} --set bos_token_id={settings.end_of_text} "
          f"--set eos_token_id={settings.end_of_text}")


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"error: {e}")
    except OSError as e:
        sys.exit(f"error: {e.filename + ': ' if e.filename else ''}{e.strerror or e}")
    except KeyboardInterrupt:
        sys.exit(130)
