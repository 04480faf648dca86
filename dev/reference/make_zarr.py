#!/usr/bin/env python3
"""Makes Zarr arrays with LongCrawl64's layout for the test of data/longcrawl64, and checks the shards.

    make_zarr.py make DIR                           write the arrays (needs zarr < 3 and numpy)
    make_zarr.py check ARRAY FIRST DOCS D SHARD     exit 1 unless SHARD has documents FIRST .. FIRST+DOCS-1 of
                                                    ARRAY, truncated to D tokens (standard library only)

The tokens are computed by formulas, so the check does not depend on the written arrays:
  heldout   chunks of the real shape, [2048, 2048], in two rows, the second not full. The tokens are periodic,
            so that a chunk of 8 MiB compresses to some KiB. Only chunk columns 0 and 1 are written.
  train     small chunks and tokens without a pattern. The array is one chunk column wider than the default
            --columns. Chunks that must not be read are not written.
  bad_id    has one token outside GPT-2's vocabulary.
"""

import os
import struct
import sys
from array import array

VOCAB = 50257
PERIOD = 251  # 2048 = 40 (mod 251): with phase 40 r in row r the pattern continues from one row to the next

#          documents, columns, chunk, columns written
ARRAYS = {
    "heldout": ((2100, 65536), (2048, 2048), 4096),
    "train": ((3, 20480), (2, 4096), 16384),
    "bad_id": ((2, 64), (2, 64), 64),
}


def document(name, r, n):
    """The first n tokens of document r of an array."""
    if name == "heldout":
        period = [256 + 200 * ((k + 40 * r) % PERIOD) for k in range(PERIOD)]
        return array("H", period * (n // PERIOD + 1))[:n]
    tokens = array("H", [(40503 * (r + 1) + 7919 * k + k * k) % VOCAB for k in range(n)])
    if name == "bad_id" and r == 1:
        tokens[5] = VOCAB
    return tokens


def make(folder):
    import numpy
    import zarr
    from numcodecs import Blosc, blosc

    blosc.set_nthreads(1)  # with more threads, the order of the blocks in a chunk is not deterministic
    for name, (shape, chunks, written) in ARRAYS.items():
        path = os.path.join(folder, "bad_id/train.zarr" if name == "bad_id" else name + ".zarr")
        compressor = Blosc(cname="lz4", clevel=9, shuffle=Blosc.SHUFFLE)
        z = zarr.open_array(path, mode="w", shape=shape, chunks=chunks, dtype="<u2", order="C", fill_value=0,
                            compressor=compressor, zarr_version=2)
        z[:, :written] = numpy.array([document(name, r, written) for r in range(shape[0])])


def checksum(data):
    """The upper 32 bits of the checksum of llmc/base/checksum.h."""
    total = 0
    for i, word in enumerate(struct.unpack(f"<{(len(data) + 3) // 4}I", data + bytes(-len(data) % 4))):
        x = (word + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        total += x ^ x >> 31
    return total % 2**64 >> 32


def check(name, first, docs, D, shard):
    with open(shard, "rb") as f:
        header = struct.unpack("<256i", f.read(1024))
        tokens = array("H", f.read())
    if sys.byteorder == "big":
        tokens.byteswap()
    want = (20240520, 1, docs * D, D, VOCAB) + (0,) * 4
    if header[:9] != want or header[9] <= 0:
        sys.exit(f"{shard}: header {header[:10]}..., expected {want} and a block length")
    block = header[9]  # tokens; the first block and the header are compared with their checksums
    blocks = -(-docs * D // block)
    sums = [checksum(tokens[:block].tobytes()), checksum(struct.pack("<255i", *header[:255]))]
    if [header[10] % 2**32, header[255] % 2**32] != sums or any(header[10 + blocks : 255]):
        sys.exit(f"{shard}: the checksums in the header are wrong")
    if len(tokens) != docs * D:
        sys.exit(f"{shard}: {len(tokens)} tokens, expected {docs * D}")
    for r in range(docs):
        if tokens[r * D : (r + 1) * D] != document(name, first + r, D):
            sys.exit(f"{shard}: document {r} differs from document {first + r} of {name}")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "make":
        make(sys.argv[2])
    elif len(sys.argv) == 7 and sys.argv[1] == "check":
        check(sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6])
    elif {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__.strip())
    else:
        sys.exit(__doc__)
