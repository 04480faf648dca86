"""
How scripts/make_shards.py divides its input: lines of every length come in order with their numbers, and no byte is
copied more often the longer a line is.
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
import make_shards  # noqa: E402

copied = 0


class Block(bytes):
    """Counts the bytes that are copied where it is added to others."""

    def __radd__(self, other):
        global copied
        copied += len(other) + len(self)
        return bytes(other) + bytes(self)


class Text(str):
    """Counts the characters that are copied out of it."""

    def __getitem__(self, key):
        global copied
        part = Text(str.__getitem__(self, key))
        copied += len(part)
        return part


class File:
    def tell(self):
        return 0


def tasks(data, size):
    found = [data[i:i + size] for i in range(0, len(data), size)]
    with mock.patch.object(make_shards, "blocks", lambda file, path: map(Block, found)), \
            mock.patch.object(make_shards, "PIECE", 100), mock.patch.object(make_shards, "LONGEST", 1000):
        source = make_shards.Source("a.jsonl", "a.jsonl", len(data), None)
        return [arguments[1:] for _, arguments, _ in make_shards.jsonl_tasks(None, None, source, File())]


lines = [b"x" * n for n in (5, 0, 300, 99, 1, 0, 0, 3900, 100, 101, 7)]
for data in b"\n".join(lines), b"\n".join(lines) + b"\n", b"", b"\n":
    for size in 1, 10, 64, 5000:
        found = tasks(data, size)
        assert b"".join(text for _, text in found) == data, (data, size)
        for i, (line, text) in enumerate(found):
            assert line == 1 + b"".join(t for _, t in found[:i]).count(b"\n"), (size, line)
            assert i == len(found) - 1 or text.endswith(b"\n"), (size, text)
copied = 0
tasks(b"x" * 4000, 10)
assert copied <= 3 * 4000, copied
for data, line in (b"x" * 4100, 1), (b"\n\nabc\n" + b"x" * 4100 + b"\n", 4), (b"".join(b"y\n" for _ in range(300)) + b"x" * 4100, 301):
    try:
        tasks(data, 10)
    except make_shards.Error as e:
        assert str(e) == f"a.jsonl:{line}: a line of more than 4000 bytes", e
    else:
        assert False, line

encoder = make_shards.Encoder.__new__(make_shards.Encoder)
encoder.find_cut = lambda text: len(text) // 2
with mock.patch.object(make_shards, "PIECE", 100):
    copied = 0
    text = "abcdefghij" * 2000
    pieces = list(encoder.pieces(Text(text)))
assert "".join(pieces) == text and len(pieces) == 200 and copied <= 4 * len(text), (len(pieces), copied)
