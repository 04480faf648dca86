"""
Makes packages of generated text, and checks what dev/study/corpus/corpus.py makes of them: of source packages documents
of 256 tokens, of packages of documentation rows of 256 tokens.
"""
import gzip
import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path[:0] = ["dev/study/corpus", "scripts"]
import corpus  # noqa: E402
import doc_text  # noqa: E402

FOLDER = Path(sys.argv[1])
WORDS = "the value of a node is set when all its parents have been read and none was changed since".split()


def text(seed, lines=60, words=9):
    rng = random.Random(seed)
    return "".join(f"  {' '.join(rng.choices(WORDS, k=words))};\n" for _ in range(lines)).encode()


def pack(name, files):
    path = FOLDER / "get" / f"{name}_1.0.orig.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for file, data in files.items():
            member = tarfile.TarInfo(f"{name}-1.0/{file}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


packages = {
    "held one": {"src/b.c": text(1), "src/a.c": text(2), "lib/c.py": text(3), "data.bin": b"\0" * 500,
                 "numbers.c": b"0x12345678, 0x12345678,\n" * 40, "image.png": text(4)},
    "held two": {"x.c": text(5), "y.c": text(6)},
    "held small": {"x.c": text(7, 10)},
    "train three": {"copy.c": text(1), "changed.c": text(2, 52) + text(8, 60), "own.c": text(9), "twice.c": text(9)},
    "train four": {f"f{i}.c": text(20 + i) for i in range(8)},
}
lines = ["# a comment"]
for name, files in packages.items():
    split, name = name.split()
    lines.append(f"{split} {name} 1.0-1 1 pool/main/{name}_1.0.orig.tar.gz {pack(name, files)}")
(FOLDER / "packages.txt").write_text("\n".join(lines) + "\n")
corpus.D, corpus.HELD_EACH, corpus.HELD, corpus.TRAIN = 256, 2, 4, 10
listed = corpus.read_packages(FOLDER / "packages.txt")
corpus.select(listed, FOLDER)
corpus.shards(listed, FOLDER, FOLDER / "tiny")

# which files were kept: not what is no text; not copies, a tenth of which is in held-out text, nor what occurs twice
kept = sorted(str(p.relative_to(FOLDER / "text")) for p in (FOLDER / "text").glob("**/*.*"))
assert kept == ["held/one/lib/c.py", "held/one/src/a.c", "held/one/src/b.c", "held/small/x.c", "held/two/x.c",
                "held/two/y.c", *(f"train/four/f{i}.c" for i in range(8)), "train/three/own.c"], kept
about = json.loads((FOLDER / "tiny.json").read_text())
assert about["duplicates"]["train"]["dropped_files"] == 3, about["duplicates"]
assert about["duplicates"]["train"]["held_shingles_seen_again"] == 0
documents = about["held"]["documents"]
assert [d["package"] for d in documents] == ["one", "one", "two", "two"], documents  # small has too few
assert about["train"] == {"documents": 10, "packages": ["four", "three"]}, about["train"]

# the shards: their documents are the packages' texts, and a document has as many bytes as it says
data = (FOLDER / "tiny_val_000000.bin").read_bytes()
assert struct.unpack_from("<5i", data) == (20240520, 1, 4 * 256, 256, 50257)
first = next(d for d in documents if d["package"] == "two")
whole = b"".join(f"{gap}==> {name} <==\n".encode() + body for gap, name, body in
                 (("", "x.c", text(5)), ("\n", "y.c", text(6))))
command = ["data/text_to_shards", "--tokenizer", "gpt2", "--vocab", "dev/test/fixtures/gpt2/vocab.bpe",
           "--doc-len", "256", "--out", f"{FOLDER}/whole", f"{FOLDER}/whole.txt"]
(FOLDER / "whole.txt").write_bytes(whole)
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
same = (FOLDER / "whole_train_000000.bin").read_bytes()[1024:]
assert data[1024 + 2 * 2 * 256 :][:512] == same[512 * first["document"] :][:512]
lengths = corpus.token_lengths("dev/test/fixtures/gpt2/vocab.bpe")
assert len(lengths) == 50257 and lengths[-1] == 0
ids = struct.unpack(f"<{len(same) // 2}H", same)
count = sum(lengths[i] for i in ids[256 * first["document"] :][:256])
assert count == first["bytes"] and sum(lengths[i] for i in ids) <= len(whole)
names = [about["name"]]

# ----------------------------------------------------------------------------
# short documents

PAGE = """<!DOCTYPE html><html><head><title>no text</title><script>if (a < b) c();</script></head>
<body class="wy-body"><div class="nav top"><div><a href="x">next</a></div> up</div>
<h1>A  title<a class="headerlink" href="#x">&para;</a></h1>
<p>One &lt;paragraph&gt;, &ldquo;quoted&rdquo;, which is&nbsp;long enough that it does not fit into a line of <b>seventy-nine</b>
characters.<!-- no <b>text --></p><ul><li>first</li><li>one line</li><li><p>second</p></li></ul><hr/>
<table><tr><td>a</td><td>b</td></tr></table><div id="footer">made by hand</div>
<pre>
  if (x)
    <b>y</b> = 1;   
</pre><br>end</body></html>"""
TEXT = """A title

One <paragraph>, "quoted", which is long enough that it does not fit into a
line of seventy-nine characters.

- first
- one line

- second

a b

  if (x)
    y = 1;

end
"""
assert doc_text.page_text(PAGE) == TEXT, doc_text.page_text(PAGE)
assert not doc_text.is_prose("name\nother name\n" * 50) and doc_text.is_prose(text(1, words=16).decode())
for name, document in (("usr/share/doc/a/guide.html", True), ("a/README.md.gz", True), ("a/b.css", False),
                       ("a/_sources/c.txt", False), ("a/changelog.gz", False), ("html/functions_a.html", False),
                       ("html/functional.html", True)):
    assert doc_text.is_document(name) == document, name
assert doc_text.text_of("a.md.gz", gzip.compress(text(2, words=16))) == text(2, words=16)
assert doc_text.text_of("a.txt", b"\xe9" * 500) == b""


def deb(name, files):
    tar, path = io.BytesIO(), FOLDER / "get" / f"{name}_1.0_all.deb"
    with tarfile.open(fileobj=tar, mode="w:xz") as members:
        for file, data in files.items():
            member = tarfile.TarInfo(f"./usr/share/doc/{file}")
            member.size = len(data)
            members.addfile(member, io.BytesIO(data))
    with open(path, "wb") as out:
        out.write(b"!<arch>\n")
        for member, data in (("debian-binary", b"2.0"), ("data.tar.xz", tar.getvalue())):
            out.write(f"{member:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def page(seed, lines=12):
    return b"<html><body><div class='nav'>" + text(99) + b"</div>" + b"".join(
        b"<p>" + line + b"</p>\n" for line in text(seed, lines, 16).splitlines()) + b"</body></html>"


packages = {
    "held five": {f"{i}.html": page(100 + i) for i in range(4)} | {"long.txt": text(110, 90, 16), "b.css": text(111)},
    "held six": {f"{i}.html": page(120 + i) for i in range(3)},
    "held few": {"a.html": page(130)},
    "train seven": {f"{i}.html": page(140 + i) for i in range(12)} | {"copy.html": page(101), "again.html": page(140)},
    "train eight": {f"{i}.txt.gz": gzip.compress(text(160 + i, 12 + i, 16), mtime=0) for i in range(8)},
}
lines = []
for name, files in packages.items():
    split, name = name.split()
    lines.append(f"{split} {name} 1.0-1 1 pool/main/{name}_1.0_all.deb {deb(name, files)}\n")
(FOLDER / "short.txt").write_text("".join(lines))
corpus.ROW, corpus.ROWS, corpus.HELD_ROWS, corpus.INTACT_EACH = 256, 8, 2, 2
listed = corpus.read_packages(FOLDER / "short.txt")
corpus.select(listed, FOLDER)
corpus.shards(listed, FOLDER, FOLDER / "brief")

about = json.loads((FOLDER / "brief.json").read_text())
held = about["held"]["documents"]
assert about["kind"] == "short" and [d["package"] for d in held] == ["five", "five", "six", "six"], held
assert about["duplicates"]["train"]["dropped_files"] == 2 and about["duplicates"]["held"]["files"] == 9, about["duplicates"]
END = corpus.END_OF_TEXT


def tokens_of(name, version, doc_len):
    data = (FOLDER / f"{name}_000000.bin").read_bytes()
    header = struct.unpack_from("<5i", data)
    assert header[:2] == (20240520, version) and header[3:] == (doc_len, 50257), header
    return struct.unpack_from(f"<{header[2]}{'H' if version == 1 else 'I'}", data, 1024)


# a stream: end of text before each document, as many documents as fill the rows and the last row's last target
stream = tokens_of("brief_train", 1, 0)
begins = [i for i, token in enumerate(stream) if token == END]
sizes = [b - a - 1 for a, b in zip(begins, [*begins[1:], len(stream)])]
train = about["train"]
assert begins[0] == 0 and begins[-1] <= 8 * 256 < len(stream) == train["tokens"] and len(begins) == train["documents"]
assert train["mean_tokens"] == round(sum(sizes) / len(sizes)) and train["packages"] == ["eight", "seven"]
starts = [max(b for b in begins if b <= t) for t in range(8 * 256)]
pairs = [(i, j) for row in range(8) for i in range(256) for j in range(i + 1) if starts[256 * row + i] > 256 * row + j]
assert abs(train["pairs_behind_walls"] - len(pairs) / (8 * 256 * 257 / 2)) < 6e-5, train
assert abs(train["documents_a_row"] - sum(len(set(starts[256 * row:][:256])) for row in range(8)) / 8) < 0.006, train
assert len(tokens_of("brief_val", 1, 0)) > 512

# documents alone in their rows: of at most 255 tokens, then end of text, which counts, and no more that does
intact = tokens_of("brief_intact_train", 3, 256)
for n, d in enumerate(held):
    row = intact[256 * n:][:256]
    kept = [token & 0x7FFFFFFF for token in row if token >> 31]
    assert len(kept) == d["tokens"] + 1 <= 256 and kept.index(END) == d["tokens"], (len(kept), d)
    assert list(row[len(kept):]) == [END] * (256 - len(kept))
    assert d["bytes"] == sum(map(lengths.__getitem__, kept)), d
print(*names, about["name"])
