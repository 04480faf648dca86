#!/usr/bin/env python3
"""
Encodes text with any Hugging Face tokenizer and writes the data shards that the trainers read.

    make data/ids_to_shards
    scripts/make_shards.py --tokenizer tokenizer.json --val-fraction 0.001 --out data/web fineweb/*.parquet
    scripts/make_shards.py --tokenizer llama/ --out data/web hf://datasets/HuggingFaceFW/fineweb/sample/10BT

A PATH is a file or a folder, local or hf://. Its name says what is in it: .jsonl, .ndjson, .json (an object a
line) and .parquet have a document in the field --text-field of each row, other files are one document of UTF-8
text each; .gz and .zst are decompressed. Capitals do not matter. Memory stays bounded: long text is encoded in pieces, cut where no token
can cross.

The output depends only on the options, and on names and contents of the files: not on --jobs. From the same
files, data/text_to_shards --tokenizer gpt2 writes the same bytes, much faster. Needs tokenizers,
and what the input needs of huggingface_hub, pyarrow and zstandard (pip install -c scripts/requirements.txt
NAME...).
"""
import argparse
import array
import codecs
import collections
import concurrent.futures
import contextlib
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

from common import ROOT, Error, Parser, as_in_training, package, read_json, run

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

PIECE = 1 << 18  # characters of a document, or bytes of lines, that are encoded at a time
LONGEST = 32 << 20  # without a place to cut
# before a space between letters; after a line break
CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=\S)")
NOT_TEXT = re.compile(r".*_((train|val)_\d{6}\.bin|tokenizer\.json)(\.tmp)?")


# ----------------------------------------------------------------------------
# the tokenizer


@contextlib.contextmanager
def errors_of(what):
    """What a library raises within becomes an Error: Exceptions, and panics of Rust."""
    try:
        yield
    except Error:
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise Error(f"{what}: {(str(e).strip() or type(e).__name__).splitlines()[0]}")


@contextlib.contextmanager
def no_stderr():
    """Without what libraries print by themselves."""
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


class Encoder:
    """A tokenizer.json. Text like "<|endoftext|>" is encoded as it is; no token is added to a text."""

    def __init__(self, path, text):
        library = package("tokenizers")
        with errors_of(f"{path}: is not a tokenizer"), no_stderr():
            settings = json.loads(text)
            self.tokenizer = library.Tokenizer.from_str(text)
        self.path = path
        as_in_training(self.tokenizer)
        normalizer, split = settings.get("normalizer"), json.dumps(settings.get("pre_tokenizer"))
        # a piece would get a space of its own, or words of a fixed length would be counted from its beginning
        own = re.search('"add_prefix_space": true|"Metaspace"|"FixedLength"', split)
        across = any(re.search(r"[A-Za-z] |\n\S", t["content"]) or t["lstrip"] or t["rstrip"]
                     for t in settings.get("added_tokens") or () if not t["special"])  # found in text
        self.cuttable = (normalizer is None or normalizer.get("type") == "NFC") and split != "null" and \
            not own and not across

    def find_cut(self, text):
        """The last place to cut a text, 0: none. Its parts have the tokens of the whole, whatever follows."""
        for start in (max(0, len(text) - 4096), 0) if self.cuttable else ():
            for at in reversed([match.start() for match in CUT.finditer(text, start)]):
                first = max(0, at - 256)
                words = self.tokenizer.pre_tokenizer.pre_tokenize_str(text[first : at + 256])
                if any(first + begin == at for _, (begin, _) in words):
                    return at
        return 0

    def pieces(self, text, last=True):
        """Yields the pieces of a text, the last one only if the text ends there. Returns the rest."""
        begin = 0  # cut once, at the end: a text can have 100 MB
        while len(text) - begin > PIECE and (cut := self.find_cut(text[begin : begin + 2 * PIECE])):
            yield text[begin : begin + cut]
            begin += cut
        text = text[begin:]
        if len(text) > LONGEST:
            raise Error(f"{LONGEST} characters must be encoded as a whole: is it text? divide it")
        if last:
            yield text
        return text

    def encode(self, texts):
        whole = lambda t: t.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        texts = [t if t.isascii() else whole(t) for t in texts]
        with errors_of(f"{self.path}: cannot encode"):
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array.array("I", e.ids) for e in encoded]


def find_end_of_text(path, vocab, given):
    """The id of the token between documents: --eot, tokenizer_config.json's eos_token, or a usual name."""
    candidates, config = [given], os.path.join(os.path.dirname(path), "tokenizer_config.json")
    if given is None:
        if os.path.exists(config):
            eos = read_json(config).get("eos_token")
            eos = eos.get("content") if isinstance(eos, dict) else eos
            if not isinstance(eos, (str, type(None))):
                raise Error(f"{config}: eos_token is not the text of a token")
            candidates = [eos]
        candidates += ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"]
    for candidate in candidates:
        if candidate in vocab:
            return vocab[candidate]
    raise Error(f"--eot {given}: is no token of {path}" if given else
                 f"{path}: which token ends a document? give --eot")


# ----------------------------------------------------------------------------
# input: files as blocks of bytes

# name: decides the split; state: state_of(path)
Source = collections.namedtuple("Source", "path name bytes state")


def remote():
    return package("huggingface_hub").HfFileSystem()


def open_source(path):
    if not path.startswith("hf://"):
        return open(path, "rb")
    with errors_of(path):
        return remote().open(path, "rb")


def state_of(path):
    """What changes with a file: by this it is seen that one was written or replaced while it was read."""
    if path.startswith("hf://"):
        with errors_of(path):
            return state_on_hub(remote().info(path, refresh=True))
    st = os.stat(path)
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns


def state_on_hub(info):
    return info["size"], info.get("blob_id") or info.get("xet_hash")  # the latter of a bucket's file


def check_unchanged(path, state):
    if state_of(path) != state:
        raise Error(f"{path}: changed while it was read; run again when nothing writes it")


def walk(folder):
    """Files below a folder in the order of data/text_to_shards: each folder's by name, but hidden ones."""
    for entry in sorted(os.listdir(folder), key=os.fsencode):
        path = os.path.join(folder, entry)
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode) and entry[0] != ".":
            yield from walk(path)
        elif stat.S_ISREG(mode) and entry[0] != "." and not NOT_TEXT.fullmatch(entry):
            yield path


def find_sources(paths):
    """The files to read, in order, each once; empty ones are left out."""
    found = {}
    for given in paths:
        if given.startswith("hf://"):
            with errors_of(given):
                listed = sorted(remote().find(given, detail=True).items())
            for path, info in listed:
                if info["size"] and not os.path.basename(path).startswith("."):
                    found[path] = Source("hf://" + path, path, info["size"], state_on_hub(info))
            continue
        folder = os.path.isdir(given)
        for path in walk(given) if folder else [given]:
            state = state_of(path)
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise Error(f"{path}: neither a file nor a folder")
            if state[2]:
                name = os.path.relpath(path, given) if folder else path
                found.setdefault(state[:2], Source(path, name, state[2], state))
    if not found:
        raise Error("no input: the paths hold no file that is not empty")
    return list(found.values())


def blocks(file, path):
    """The decompressed bytes of an open file, in blocks."""
    new = stream = None
    if path.lower().endswith(".gz"):
        new = lambda: zlib.decompressobj(31)
    elif path.lower().endswith(".zst"):
        zstandard = package("zstandard")
        new = lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

    def read():
        with errors_of(f"{path}: cannot read"):
            return file.read(1 << 16)

    for raw in iter(read, b""):
        if new is None:
            yield raw
        while new and raw:
            stream = stream or new()
            try:
                yield stream.decompress(raw)
            except Exception as e:  # zlib.error, zstandard.ZstdError
                raise Error(f"{path}: damaged: {e}")
            if not stream.eof:
                break
            raw, stream = stream.unused_data, None  # the next of several streams
    if stream:
        raise Error(f"{path}: is truncated: its compressed data does not end")


def open_parquet(file, path, field):
    library = package("pyarrow.parquet")
    with errors_of(f"{path}: cannot read"):
        table = library.ParquetFile(file, page_checksum_verification=True)
    if field not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise Error(f"{path}: has no column {field!r} but {names}: --text-field names it")
    if table.schema_arrow.names.count(field) > 1:
        raise Error(f"{path}: has more than one column {field!r}: which of them is the text?")
    return table


# ----------------------------------------------------------------------------
# tasks: what a process encodes at a time. Made in order by the main process, as (function, arguments), with
# the number of bytes read of the file


def text_tasks(settings, encoder, source, file):
    def pieces():
        decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
        for block in blocks(file, source.path):
            if b"\0" in block:
                raise Error(f"{source.path}: is not text: it has a zero byte")
            rest += decoder.decode(block)
            if len(rest) > 2 * PIECE:
                rest = yield from encoder.pieces(rest, last=False)
        yield from encoder.pieces(rest + decoder.decode(b"", True))

    split = in_validation(settings, source.name)
    try:
        for i, piece in enumerate(filter(None, pieces())):
            yield encode_pieces, ([(split, i == 0, piece)],), file.tell()
    except UnicodeDecodeError as e:
        raise Error(f"{source.path}: is not UTF-8: {e.reason}")


def jsonl_tasks(_, __, source, file):
    waiting, total, unfinished, line = [], 0, 0, 1  # blocks, joined at the end of a line; bytes of them; of the last line
    for block in blocks(file, source.path):
        end = block.rfind(b"\n") + 1
        unfinished = len(block) - end if end else unfinished + len(block)
        if end and total + end > PIECE:
            lines = b"".join([*waiting, block[:end]])
            yield encode_lines, (source, line, lines), file.tell()
            line += lines.count(b"\n")
            waiting, total, block = [], 0, block[end:]
        waiting.append(block)
        total += len(block)
        if unfinished > 4 * LONGEST:
            line += sum(b.count(b"\n") for b in waiting)
            raise Error(f"{source.path}:{line}: a line of more than {4 * LONGEST} bytes")
    yield encode_lines, (source, line, b"".join(waiting)), file.tell()


def parquet_tasks(settings, _, source, file):
    groups, row = open_parquet(file, source.path, settings.text_field).metadata, 0
    for i in range(groups.num_row_groups):
        yield encode_rows, (source, i, row), source.bytes * (i + 1) // groups.num_row_groups
        row += groups.row_group(i).num_rows


def tasks(settings, encoder, sources):
    """All tasks in order, each with its source and the number of bytes read of all files."""
    before = 0
    kinds = {"jsonl": jsonl_tasks, "ndjson": jsonl_tasks, "json": jsonl_tasks, "parquet": parquet_tasks}
    for source in sources:
        make = kinds.get(re.sub(r"\.(gz|zst)$", "", source.path.lower()).rpartition(".")[2], text_tasks)
        with open_source(source.path) as file:
            for function, arguments, read in make(settings, encoder, source, file):
                yield source, function, arguments, before + read
        before += source.bytes


# ----------------------------------------------------------------------------
# in the processes. A result is a list of (split, is it a document's first piece, characters, ids)

worker = None  # (settings, Encoder)


def start_worker(settings, text):
    global worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also if it is killed
    worker = settings, Encoder(settings.tokenizer, text)


def in_validation(settings, name):
    """The split of a document: 1 or 0, by a hash of seed and name. Other documents do not matter."""
    text = f"{settings.seed} {name}".encode("utf-8", "surrogateescape")
    draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return int(draw < settings.val_fraction * 2**64)


def encode_pieces(pieces):
    ids = worker[1].encode([piece for _, _, piece in pieces])
    return [(split, first, len(piece), i) for (split, first, piece), i in zip(pieces, ids)]


def encode_documents(source, numbered):
    """numbered: (number of the line or row, text) pairs."""
    pieces = []
    for number, text in numbered:
        split = in_validation(worker[0], f"{source.name}:{number}")
        pieces += [(split, i == 0, piece) for i, piece in enumerate(worker[1].pieces(text))]
    return encode_pieces(pieces)


def encode_lines(source, number, lines):
    documents, field = [], worker[0].text_field
    for number, line in enumerate(lines.split(b"\n"), number):
        try:
            row = json.loads(line) if line.strip() else {field: ""}
        except (ValueError, RecursionError) as e:
            raise Error(f"{source.path}:{number}: is not JSON: {e}")
        if isinstance(row, dict) and not isinstance(row.get(field, ""), (str, type(None))):  # null: skipped, as in Parquet
            raise Error(f"{source.path}:{number}: {field!r} is not text but {json.dumps(row[field])[:100]}")
        if not isinstance(row, dict) or field not in row:
            keys = " ".join(", ".join(row).split())[:500] if isinstance(row, dict) else "no object"
            raise Error(f"{source.path}:{number}: has no text {field!r} but {keys}: --text-field names it")
        if row[field]:
            documents.append((number, row[field]))
    return encode_documents(source, documents)


def column_of(table, path, group, field):
    """Yields the texts of a row group, in lists."""
    with errors_of(f"{path}: row group {group} is damaged"):
        for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
            yield batch.column(0).to_pylist()


def encode_rows(source, group, row):
    result, field = [], worker[0].text_field
    with open_source(source.path) as file:
        table = open_parquet(file, source.path, field)
        for texts in column_of(table, source.path, group, field):
            if not all(text is None or isinstance(text, str) for text in texts):
                raise Error(f"{source.path}: column {field!r} is not text")
            result += encode_documents(source, [(row + i, text) for i, text in enumerate(texts) if text])
            row += len(texts)
    return result


# ----------------------------------------------------------------------------
# the conversion


class Writer:
    """data/ids_to_shards, which gets the token ids and replaces the shards of the prefix at the end."""

    def __init__(self, settings, *flags):
        program = ROOT / "data/ids_to_shards"
        if not program.exists():
            raise Error("data/ids_to_shards is not built: make data/ids_to_shards")
        names = "out", "tokenizer", "vocab-size", "end-of-text", "doc-len", "roll", "pack", "shard-tokens"
        values = {name: getattr(settings, name.replace("-", "_"), None) for name in names}
        options = [f"--{name}={value}" for name, value in values.items() if value is not None]
        self.program = subprocess.Popen([program, *options, *flags], stdin=subprocess.PIPE)
        self.tokens = 0

    def write(self, kind, ids):
        try:
            self.program.stdin.write(struct.pack("<2I", kind, len(ids)))
            self.program.stdin.write(ids)
            if kind >= 4:
                self.program.stdin.close()
        except BrokenPipeError:
            pass  # close reports its exit code
        self.check(self.program.poll())
        self.tokens += len(ids)

    def check(self, code):
        """Ends this program if data/ids_to_shards has failed."""
        if code:
            with contextlib.suppress(BrokenPipeError):  # left open, Python 3.13 reports the bytes that it cannot write
                self.program.stdin.close()
        if code and code < 0:
            raise Error(f"data/ids_to_shards was ended by signal {-code}; the old shards remain")
        if code:
            raise SystemExit(1)  # after its message

    def close(self, complete):
        """Without `complete` the old shards remain, and something else says why."""
        if self.program.poll() is None:
            self.write(4 if complete else 5, b"")
        code = self.program.wait()
        if complete:
            self.check(code)


class Progress:
    """A line on stderr: on a terminal in place, else every minute."""

    def __init__(self, total):
        self.total, self.start, self.terminal = total, time.monotonic(), sys.stderr.isatty()
        self.next = self.start + (1 if self.terminal else 60)

    def update(self, done):
        now = time.monotonic()
        if now < self.next or not done:
            return
        rate, self.next = done / (now - self.start), now + (0.25 if self.terminal else 60)
        line = f"encoding: {done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s, " \
               f"{(self.total - done) / rate:.0f} s left"
        print(f"\r\033[K{line}" if self.terminal else line + "\n", end="", file=sys.stderr, flush=True)

    def end(self):
        print("\r\033[K" if self.terminal else "", end="", file=sys.stderr, flush=True)


def ignore_signals():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def interrupt(number, _):
    """Ends the conversion, whose processes and temporary files are then removed: no second signal disturbs that."""
    ignore_signals()
    sys.exit(128 + number)


def convert(settings, sources, encoder, text):
    """Returns the numbers of characters read and of tokens."""
    characters, complete = 0, False
    progress, writer = Progress(sum(source.bytes for source in sources)), Writer(settings)
    pool = concurrent.futures.ProcessPoolExecutor(
        settings.jobs, multiprocessing.get_context("spawn"), start_worker, (settings, text))

    def results():
        """Those of all tasks, in order. So many at most are not taken yet: they take memory."""
        pending = collections.deque()
        for source, function, arguments, read in tasks(settings, encoder, sources):
            pending.append((source, pool.submit(function, *arguments), read))
            if len(pending) > 2 * settings.jobs + 1:
                yield pending.popleft()
        yield from pending

    reading = sources[0]
    try:
        for source, future, read in results():
            if source is not reading:  # all of its results are here
                check_unchanged(reading.path, reading.state)
            reading = source
            for split, first, length, ids in future.result():
                if first and settings.tokens and writer.tokens >= settings.tokens:
                    break
                writer.write(split | first << 1, ids)
                characters += length
            else:
                progress.update(read)
                continue
            break
        check_unchanged(reading.path, reading.state)
        check_unchanged(settings.tokenizer, settings.tokenizer_state)
        ignore_signals()  # first: from here on the shards are replaced, and the exit code says so
        complete = True
    except concurrent.futures.process.BrokenProcessPool:
        raise Error(f"{reading.path}, or a file behind it: a process of --jobs ended; was it killed, is there "
                    "too little memory? lower --jobs")
    finally:
        ignore_signals()
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
    if not 0 <= value < 2**53 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number (suffixes: k M G Ki Mi Gi)")
    return int(value)


def parse_arguments():
    p = Parser(__doc__)
    add = p.add_argument
    add("paths", nargs="+", metavar="PATH", help="files or folders, local or hf://")
    add("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, or a folder that has it")
    add("--out", required=True, metavar="PREFIX", help="PREFIX_train_000000.bin ..., PREFIX_val_000000.bin "
        "..., and PREFIX_tokenizer.json, which the trainers copy into checkpoints")
    add("--text-field", default="text", metavar="NAME", help="field or column of the text [text]")
    add("--doc-len", type=count, default=0, metavar="D", help="cut each document into documents of exactly D "
        "tokens and drop the rest; 0: a token stream, each document preceded by the end-of-text token")
    add("--roll", type=count, metavar="SEED", help="with --doc-len: rotate each document by an offset drawn from "
        "the seed")
    add("--pack", type=count, metavar="T", help="pack documents into rows of T tokens, each of which begins with "
        "a document")
    add("--val-fraction", type=float, default=0, metavar="F", help="fraction of held-out documents")
    add("--seed", type=count, default=0, metavar="N", help="of their choice")
    add("--tokens", type=count, default=0, metavar="N", help="end with the document that reaches N tokens")
    add("--shard-tokens", type=count, default=256 << 20, metavar="N", help="most tokens a shard [256Mi]")
    add("--eot", metavar="TOKEN", help="the end-of-text token [the tokenizer's]")
    add("--jobs", type=count, default=len(os.sched_getaffinity(0)), metavar="N", help="processes [cores]")
    settings = p.parse_args()
    if not 0 <= settings.val_fraction < 1:
        raise Error(f"--val-fraction {settings.val_fraction}: not from 0 to below 1")
    if not 1 <= settings.jobs <= 1024:
        raise Error(f"--jobs {settings.jobs}: not from 1 to 1024")
    if os.path.isdir(settings.tokenizer):
        settings.tokenizer = os.path.join(settings.tokenizer, "tokenizer.json")
    return settings


def main():
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a shell's background
            signal.signal(number, interrupt)
    settings = parse_arguments()
    settings.tokenizer_state = state_of(settings.tokenizer)
    with open(settings.tokenizer, "rb") as f, errors_of(f"{settings.tokenizer}: is not a tokenizer"):
        text = f.read().decode()
    encoder = Encoder(settings.tokenizer, text)
    vocab = encoder.tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise Error(f"{settings.tokenizer}: is not a tokenizer: it has no tokens")
    settings.vocab_size = max(vocab.values()) + 1
    settings.end_of_text = end = find_end_of_text(settings.tokenizer, vocab, settings.eot)
    characters, tokens = convert(settings, find_sources(settings.paths), encoder, text)
    if settings.val_fraction and not os.path.exists(f"{settings.out}_val_000000.bin"):
        print(f"warning: --val-fraction {settings.val_fraction}: no document is held out; give a larger one", file=sys.stderr)
    print(f"{characters / max(tokens, 1):.3f} characters a token; for the trainer: "
          f"--set vocab_size={settings.vocab_size} --set bos_token_id={end} --set eos_token_id={end}")


if __name__ == "__main__":
    run(main)
