#!/usr/bin/env python3
"""
Makes the study's corpora out of packages that dev/study/corpus/corpus.sh has fetched: long documents out of source packages,
short ones where the list has binary packages of documentation (.deb).

    dev/study/corpus/corpus.py select PACKAGES.txt FOLDER      FOLDER/get/*.tar.* -> FOLDER/text/{held,train}/NAME/...
    dev/study/corpus/corpus.py shards PACKAGES.txt FOLDER PREFIX    FOLDER/text -> PREFIX_train_*.bin, PREFIX_val_*.bin,
                                                             of short documents also PREFIX_intact_train_*.bin

select keeps files of text by their suffix (SUFFIXES), in UTF-8, of 200 bytes to 1 MB, that are not mainly tables of
numbers (an eighth of digits), have a fiftieth of non-ASCII bytes at most (translations), and lines of at most 120 bytes
in the mean. It keeps a package's folders, in the order of a hash of their paths, up to the number of megabytes that
PACKAGES.txt gives. Then near-duplicates are removed. Every
run of five lines of a file that are not empty, spaces folded, has a hash, and a fourth of the hashes are the file's shingles. A
file is dropped if half of its shingles stand in files kept before; a file for training also if a tenth of them stand
in held-out files, which are read first. What then remains of held-out shingles in the training text is counted.

In .deb packages each document is a file (doc_text.py makes its text), of 400 bytes to 64 KiB, in the order of a hash.

shards of long documents encodes each package as one text, its files in order (data/text_to_shards --document folder), cuts it into
documents of 65,536 tokens, and takes of each held-out package four documents at equal distances. From short documents it
makes token streams, all packages mixed in the order of a hash; and `intact`: of each held-out package eight documents
that fit into a row of 16,384 targets, each alone in its row, its last target the end-of-text token, the rest masked.
Nothing depends on time, machine or the order of a folder. Writes FOLDER/select.json and PREFIX.json, which say what was
taken.
"""
import array
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import doc_text

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from common import Error, Parser, counted, run, write_file  # noqa: E402

D, HELD_EACH, HELD, TRAIN = 65536, 4, 256, 4096  # tokens; documents: of a held-out package, of all, for training
ROW, ROWS, HELD_ROWS, INTACT_EACH = 16384, 8192, 128, 8  # of short documents: tokens, rows of the streams; documents
VOCAB, END_OF_TEXT = ROOT / "dev/test/fixtures/gpt2/vocab.bpe", 50256
SUFFIXES = set("""c h cc cpp cxx hpp hh hxx inl m mm cl glsl cu java kt groovy scala cs py pyx pxd pl pm t php rb js ts
go rs hs ml mli v el lisp lsp scm ss sld rkt scrbl erl hrl ex exs pas pp inc f f90 f77 f03 F F90 tcl lua r R jl sql sh bash
cmake mk am ac y l ll td tex texi texinfo rst md txt pod sgml adoc asciidoc ly asm s S 1 2 3 4 5 6 7 8 vim""".split())
SMALLEST, LARGEST = 200, 1_000_000
SHORT = 400, 65536  # bytes of a short document


class Package:
    def __init__(self, line):
        self.split, self.name, self.version, limit, self.path, self.sha256 = line.split()
        self.limit = int(limit) * 1_000_000  # bytes of text
        self.archive = self.path.rpartition("/")[2]
        self.short = self.archive.endswith(".deb")


def read_packages(path):
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Package(line) for line in lines if line.strip() and line[0] != "#"]


# ----------------------------------------------------------------------------
# select


def is_text(data, smallest=SMALLEST, largest=LARGEST):
    if not smallest <= len(data) <= largest or b"\0" in data:
        return False
    lines = data.count(b"\n") + 1
    digits = sum(map(data.count, (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9")))
    other = len(data) - len(data.translate(None, bytes(range(128, 256))))
    if len(data) > 120 * lines or digits > len(data) / 8 or other > len(data) / 50:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def draw(text):
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def safe(name):
    parts = name.split("/")
    return ".." not in parts and not any(part.startswith(".") for part in parts) and len(name) < 400


def read_archive(path):
    """{folder: [(path within the package, bytes)]} of its files of text."""
    folders = {}
    with tarfile.open(path) as tar:
        for member in tar:
            name = member.name.removeprefix("./").partition("/")[2]  # without the package's own folder
            suffix = name.rpartition("/")[2].rpartition(".")[2]
            if member.isreg() and name and suffix in SUFFIXES and SMALLEST <= member.size <= LARGEST and safe(name):
                data = tar.extractfile(member).read()
                if is_text(data):
                    folders.setdefault(name.rpartition("/")[0], []).append((name, data))
            tar.members = []  # else tarfile keeps every header
    return folders


def read_documents(path):
    """As read_archive, of a .deb: each of its documents a folder of its own, not made text yet."""
    with doc_text.archive(path) as tar:
        names = ((member, member.name.removeprefix("./")) for member in tar)
        return {name: [(name, tar.extractfile(member).read())] for member, name in names
                if member.isreg() and doc_text.is_document(name) and member.size <= LARGEST and safe(name)}


def shingles(data):
    lines = [hash(line) for line in (b" ".join(line.split()) for line in data.split(b"\n")) if line]
    runs = zip(lines, lines[1:], lines[2:], lines[3:], lines[4:])
    return {h for h in map(hash, runs) if h % 4 == 0}


def select(packages, folder):
    seen, held = set(), set()
    totals = {}
    shutil.rmtree(folder / "text", ignore_errors=True)
    for split in "held", "train":
        total = totals[split] = dict.fromkeys(["packages", "files", "bytes", "dropped_files", "dropped_bytes"], 0)
        remaining = 0
        for package in packages:
            if package.split != split:
                continue
            total["packages"] += 1
            read = read_documents if package.short else read_archive
            folders, size = read(folder / "get" / package.archive), 0
            for name in sorted(folders, key=lambda name: draw(f"{package.name}/{name}")):
                for path, data in sorted(folders[name]):
                    if size >= package.limit:
                        break
                    if package.short and not is_text(data := doc_text.text_of(path, data), *SHORT):
                        continue
                    mine = shingles(data)
                    if len(mine & seen) * 2 > len(mine) or split == "train" and len(mine & held) * 10 > len(mine):
                        total["dropped_files"] += 1
                        total["dropped_bytes"] += len(data)
                        continue
                    remaining += len(mine & held) if split == "train" else 0
                    seen |= mine
                    out = folder / "text" / split / package.name / path
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.write_bytes(data)
                    size += len(data)
                    total["files"] += 1
            total["bytes"] += size
            print(f"{split} {package.name}: {size / 1e6:.1f} MB", flush=True)
        if split == "held":
            held = set(seen)
        else:
            total["held_shingles_seen_again"], totals["held"]["shingles"] = remaining, len(held)
    write_file(folder / "select.json", json.dumps(totals, indent=1) + "\n")
    print(json.dumps(totals))


# ----------------------------------------------------------------------------
# shards


def token_lengths(vocab):
    """Bytes of each GPT-2 token, by id: 256 bytes, then one a merge, then end-of-text."""
    lines = Path(vocab).read_text(encoding="utf-8").splitlines()[1:]
    lengths, of = [1] * 256, {}
    for line in lines:
        if line:
            left, right = line.split(" ")
            of[left + right] = of.get(left, 1) + of.get(right, 1)
            lengths.append(of[left + right])
    return lengths + [0]


def encode(scratch, *what):
    """The tokens that text_to_shards makes; none if there is no document."""
    prefix = scratch / "package"
    command = [ROOT / "data/text_to_shards", "--tokenizer", "gpt2", "--vocab", VOCAB, "--shard-tokens", "1Gi", "--out", prefix]
    done = subprocess.run([*command, *what], capture_output=True, text=True)
    tokens = array.array("H")
    if done.returncode and "has no document" in done.stderr:
        return tokens
    if done.returncode:
        raise Error(f"{what[-1]}: {done.stderr.strip()}")
    tokens.frombytes((scratch / "package_train_000000.bin").read_bytes()[1024:])
    return tokens


def write_shards(prefix, scratch, documents, *options):
    """documents: (kind of ids_to_shards, its ids as array("I"))."""
    command = [ROOT / "data/ids_to_shards", "--out", prefix, "--tokenizer", scratch / "package_tokenizer.json",
               "--vocab-size", "50257", "--end-of-text", str(END_OF_TEXT), "--shard-tokens", "64Mi", *options]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE)
    for kind, ids in documents:
        writer.stdin.write(array.array("I", [kind, len(ids)]).tobytes() + ids.tobytes())
    writer.stdin.write(array.array("I", [4, 0]).tobytes())
    writer.stdin.close()
    if writer.wait():
        raise Error("data/ids_to_shards failed")


def long_documents(packages, folder, prefix, scratch):
    """Writes the shards. {"train", "held"} of PREFIX.json, and whether there is as much as is wanted."""
    lengths = token_lengths(VOCAB)
    taken = {"held": [], "train": []}  # (package, number of its document, its tokens)
    for package in sorted(packages, key=lambda p: p.split):  # held-out ones first
        source = folder / "text" / package.split / package.name
        if package.split == "held" and len(taken["held"]) >= HELD or not source.is_dir():
            continue
        tokens = encode(scratch, "--document", "folder", "--doc-len", str(D), source)
        count = len(tokens) // D
        chosen = range(count)
        if package.split == "held":
            chosen = [(2 * k + 1) * count // (2 * HELD_EACH) for k in range(HELD_EACH)] if count >= HELD_EACH else []
        taken[package.split] += [(package.name, i, tokens[i * D : (i + 1) * D]) for i in chosen]
        print(f"{package.split} {package.name}: {len(chosen)} of {counted(count, 'document')}", flush=True)
    # of more documents than are wanted, those with the lowest draws, in their order
    order = sorted(taken["train"], key=lambda t: draw(f"{t[0]} {t[1]}"))[:TRAIN]
    wanted = {(name, i) for name, i, _ in order}
    taken["train"] = [t for t in taken["train"] if t[:2] in wanted]
    write_shards(prefix, scratch, ((kind, array.array("I", tokens)) for kind, split in ((2, "train"), (3, "held"))
                                   for _, _, tokens in taken[split]), "--doc-len", str(D))
    return {
        "document_tokens": D,
        "train": {"documents": len(taken["train"]), "packages": sorted({t[0] for t in taken["train"]})},
        "held": {"documents": [{"package": name, "document": i, "bytes": sum(map(lengths.__getitem__, tokens))}
                               for name, i, tokens in taken["held"]]},
    }, len(taken["train"]) >= TRAIN and len(taken["held"]) >= HELD


def read_stream(folder, split, scratch):
    """[(package, tokens)] of the short documents of a split, in the order of their draws."""
    base = folder / "text" / split
    names = sorted((str(path.relative_to(base)) for path in base.glob("**/*") if path.is_file()), key=draw)
    (scratch / "list").write_bytes(b"".join(os.fsencode(base / name) + b"\0" for name in names))
    tokens = encode(scratch, "--list", scratch / "list")
    begins = [i for i, token in enumerate(tokens) if token == END_OF_TEXT]
    if len(begins) != len(names):
        raise Error(f"{counted(len(names), 'document')} of {split} became {len(begins)}")
    return [(name.partition("/")[0], array.array("I", tokens[begin + 1 : end]))
            for name, begin, end in zip(names, begins, [*begins[1:], len(tokens)])]


def first_rows(documents, rows):
    """As many documents as fill rows of a stream with their end-of-text tokens, and the last row's last target."""
    total = 0
    for i, (_, tokens) in enumerate(documents):
        total += len(tokens) + 1
        if total > rows * ROW:
            return documents[: i + 1], True
    return documents, False


def walls(documents):
    """(documents in a row, share of the pairs of a token and one before it, or itself, with a wall between) of the rows
    of a stream, means."""
    begins = [0]
    for _, tokens in documents:
        begins.append(begins[-1] + len(tokens) + 1)
    rows = (begins[-1] - 1) // ROW
    edges = sorted({begin for begin in begins if begin < rows * ROW} | {ROW * row for row in range(rows + 1)})
    pairs = sum((b - a) * (b - a + 1) for a, b in zip(edges, edges[1:]))
    return (len(edges) - 1) / rows, 1 - pairs / (rows * ROW * (ROW + 1))


def short_documents(packages, folder, prefix, scratch):
    """As long_documents, of a stream of short documents; the held-out ones intact, too."""
    lengths = token_lengths(VOCAB)
    held, train = (read_stream(folder, split, scratch) for split in ("held", "train"))
    whole, enough_held = first_rows(held, HELD_ROWS)
    taken, enough = first_rows(train, ROWS)
    write_shards(prefix, scratch, [*((2, ids) for _, ids in taken), *((3, ids) for _, ids in whole)],
                 "--shard-tokens", "256Mi")  # one shard: no row crosses two
    intact = []
    for package in sorted({name for name, _ in held}):
        mine = [ids for name, ids in held if name == package and len(ids) < ROW]
        intact += [(package, ids) for ids in mine[:INTACT_EACH]] if len(mine) >= INTACT_EACH else []
    counts = lambda ids: array.array("I", [1 << 31 | i for i in (*ids, END_OF_TEXT)])
    write_shards(f"{prefix}_intact", scratch,
                 ((2, counts(ids) + array.array("I", [END_OF_TEXT]) * (ROW - 1 - len(ids))) for _, ids in intact),
                 "--doc-len", str(ROW), "--masked")
    a_row, behind = walls(taken)
    sizes = [len(ids) for _, ids in taken]
    return {
        "kind": "short", "document_tokens": ROW,
        "train": {"documents": len(taken), "tokens": sum(sizes) + len(sizes), "mean_tokens": round(statistics.fmean(sizes)),
                  "median_tokens": round(statistics.median(sizes)), "documents_a_row": round(a_row, 2),
                  "pairs_behind_walls": round(behind, 4), "packages": sorted({name for name, _ in taken})},
        "held": {"stream_documents": len(whole), "stream_tokens": sum(len(ids) + 1 for _, ids in whole),
                 "documents": [{"package": name, "tokens": len(ids), "bytes": sum(map(lengths.__getitem__, ids))}
                               for name, ids in intact]},
    }, enough and enough_held


def shards(packages, folder, prefix):
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    make = short_documents if packages[0].short else long_documents
    about, enough = make(packages, folder, prefix, scratch)
    shutil.rmtree(scratch)
    files = sorted(prefix.parent.glob(f"{prefix.name}_*_[0-9]*.bin"))
    sums = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
    about = {"name": hashlib.sha256(" ".join(sums).encode()).hexdigest()[:12], **about,
             "duplicates": json.loads((folder / "select.json").read_text())}
    write_file(f"{prefix}.sha256", "".join(f"{s}  {f.name}\n" for s, f in zip(sums, files)))
    text = json.dumps(about, indent=1)
    write_file(f"{prefix}.json", re.sub(r'\n {2,}(?=[]"\d}])', " ", text) + "\n")
    held = about["held"]["documents"]
    print(f"corpus {about['name']}: {about['train']['documents']} and {counted(len(held), 'document')}, "
          f"{len(about['train']['packages'])} and {counted(len({d['package'] for d in held}), 'package')}")
    if not enough:
        raise Error("the packages have too few documents for what is wanted")


def main():
    parser = Parser(__doc__)
    parser.add_argument("what", choices=["select", "shards"])
    parser.add_argument("packages", metavar="PACKAGES.txt")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("prefix", metavar="PREFIX", type=Path, nargs="?", help="shards: of the files to write")
    options = parser.parse_args()
    if (options.what == "shards") != (options.prefix is not None):
        raise Error("shards: PREFIX is missing" if options.what == "shards" else "select: takes no PREFIX")
    info = sys.hash_info
    if (info.width, info.algorithm, info.cutoff) != (64, "siphash13", 0):
        raise Error("another hash() than that of 64-bit Python 3.11 and later, which the corpus was made with")
    if os.environ.get("PYTHONHASHSEED") != "0":  # hash() decides which shingles are kept
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    packages = read_packages(options.packages)
    if options.what == "select":
        select(packages, options.folder)
    else:
        shards(packages, options.folder, options.prefix)


if __name__ == "__main__":
    run(main)
