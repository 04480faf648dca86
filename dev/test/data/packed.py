"""Makes and checks the ids of test_packing.sh.

    packed.py ids FILE COUNT T   records for data/ids_to_shards of COUNT documents of 1 to 3 T tokens; token j of
                                 document k is 4096 k + j. Every fourth document is held out
    packed.py check PREFIX COUNT T CROPPED
                                 every row begins with a document or a full row's rest of one, in a row an end of text
                                 comes after each, all tokens are there once but CROPPED, each in its split
"""
import random
import struct
import sys

END = 1 << 30


def documents(count, row):
    rng = random.Random(1)
    lengths = [1, row - 1, row, row + 1, 2 * row, 3 * row]
    lengths += [min(3 * row, 1 + int(rng.expovariate(3 / row))) for _ in range(int(count))]
    rng.shuffle(lengths)
    return lengths


def write_ids(path, count, row):
    with open(path, "wb") as f:
        for k, length in enumerate(documents(count, int(row))):
            ids = [4096 * k + j for j in range(length)]
            for first in range(0, length, 100):  # in records of 100
                piece = ids[first : first + 100]
                kind = (k % 4 == 3) | (first == 0) << 1
                f.write(struct.pack(f"<2I{len(piece)}I", kind, len(piece), *piece))
        f.write(struct.pack("<2I", 4, 0))


def read_rows(path, row):
    with open(path, "rb") as f:
        data = f.read()
    tokens, length = struct.unpack_from("<2i", data, 8)
    assert length == row and tokens % row == 0, (length, tokens)
    ids = struct.unpack_from(f"<{tokens}I", data, 1024)
    return [ids[i : i + row] for i in range(0, tokens, row)]


def check(prefix, count, row, cropped):
    row = int(row)
    lengths, seen = documents(count, row), {}
    for split in range(2):
        for ids in read_rows(f"{prefix}_{('train', 'val')[split]}_000000.bin", row):
            at = 0
            while at < row:
                k, first = divmod(ids[at], 4096)
                assert first % row == 0 and (k, first) not in seen and split == (k % 4 == 3), (k, first)
                end = at
                while end < row and ids[end] == ids[at] + end - at:
                    end += 1
                whole = min(row, lengths[k] - first)  # a row of it, or the rest
                assert end == row or (end - at == whole and ids[end] == END), (k, first, ids[at:])
                seen[k, first] = end - at
                at = end + 1
    assert sum(lengths) - sum(seen.values()) == int(cropped), sum(lengths) - sum(seen.values())


if __name__ == "__main__":
    {"ids": write_ids, "check": check}[sys.argv[1]](*sys.argv[2:])
