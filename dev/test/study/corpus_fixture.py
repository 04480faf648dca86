"""Makes source packages of generated text, and checks what dev/study/corpus.py makes of them, documents of 256 tokens."""
import hashlib
import io
import json
import random
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path[:0] = ["dev/study", "scripts"]
import corpus  # noqa: E402

FOLDER = Path(sys.argv[1])
WORDS = "the value of a node is set when all its parents have been read and none was changed since".split()


def text(seed, lines=60):
    rng = random.Random(seed)
    return "".join(f"  {' '.join(rng.choices(WORDS, k=9))};\n" for _ in range(lines)).encode()


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
print(about["name"])
