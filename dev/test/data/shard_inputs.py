"""Makes and checks the files of test_make_shards.sh.

    shard_inputs.py records FILE KIND:ID,ID,... ...   records for data/ids_to_shards: kind, count, ids
    shard_inputs.py hash SHARD             prints version, vocabulary size and hash of a shard's header
    shard_inputs.py tokenizers FOLDER      tokenizer.json of GPT-2, of bytes, of 70,000 words, and broken ones
    shard_inputs.py inputs FOLDER          the same documents as text files, .jsonl, .gz, .zst and .parquet; few.parquet
                                           of the short ones, and reversed.parquet of these in reverse
    shard_inputs.py corpora FOLDER         documents of such words, laid out as FineWeb and as SlimPajama
    shard_inputs.py documents FOLDER D     prints how many documents of D words SlimPajama's are cut into
    shard_inputs.py broken FOLDER          files that cannot be read, and tokenizers that are none
"""
import glob
import gzip
import json
import os
import struct
import sys


def records(path, *items):
    with open(path, "wb") as f:
        for item in items:
            kind, _, ids = item.partition(":")
            ids = [int(i) for i in ids.split(",") if i]
            f.write(struct.pack(f"<2I{len(ids)}I", int(kind), len(ids), *ids))


def print_hash(path):
    with open(path, "rb") as f:
        header = f.read(1024)
    print(*struct.unpack_from("<i", header, 4), *struct.unpack_from("<i", header, 16),
          *struct.unpack_from("<Q", header, 1000))


def save(folder, name, tokenizer):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(tokenizer, f)


def make_tokenizers(folder):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    symbols = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    with open("dev/test/fixtures/gpt2/vocab.bpe", encoding="utf-8") as f:
        merges = f.read().split("\n")[1:-1]
    end = lambda i: [{"id": i, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"version": "1.0", "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst",
             "stride": 0}, "padding": None, "normalizer": None, "post_processor": None, "decoder": level}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    names = [*symbols, *(m.replace(" ", "") for m in merges), "<|endoftext|>"]
    save(folder, "gpt2.json", {**parts, "added_tokens": end(50256), "pre_tokenizer": level,
                               "model": {**model, "vocab": {n: i for i, n in enumerate(names)}, "merges": merges}})
    in_order = dict(zip([*printable, *others], symbols))
    names = [*(in_order[b] for b in range(256)), "<|endoftext|>"]
    save(folder, "byte.json", {**parts, "added_tokens": end(256), "pre_tokenizer": {**level, "use_regex": False},
                               "model": {**model, "vocab": {n: i for i, n in enumerate(names)}, "merges": []}})
    # the same names, as another kind of model that has a list of them
    save(folder, "unigram.json", {**parts, "added_tokens": end(256), "pre_tokenizer": None, "model": {
        "type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [[n, -1.0] for n in names]}})
    words = {"[UNK]": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 70000)}}
    save(folder, "words.json", {**parts, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                                "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}})
    save(folder, "no_end.json", {**parts, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                                 "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}})
    save(folder, "no_tokenizer.json", {"a": 1})


def make_inputs(folder):
    import pyarrow.parquet
    import zstandard
    documents = [open(path, encoding="utf-8").read() for path in sorted(glob.glob("llmc/base/*.h"))]
    # Longer than a piece, with all that words can begin and end with. Without white space at their end, for a
    # tokenizer sees a document as a whole
    odd = "it's <|endoftext|> 12345 a\u0301 \u00e9t\u00e9 \u4f60\u597d\u3002\r\n\n  x\t\u3000y we'll\n'tis \U0001f600 "
    documents += [("".join(documents) * 30)[:600000] + odd * 5, odd * 200, "x", "  two\n"]
    os.makedirs(folder + "/text/deep/.hidden")
    for i, text in enumerate(documents):
        with open(f"{folder}/text/{'deep/' if i % 2 else ''}{i:03d}.txt", "w", encoding="utf-8", newline="") as f:
            f.write(text)
    open(folder + "/text/empty", "w").close()
    open(folder + "/text/deep/.hidden/a", "w").write("hidden")
    order = sorted(range(len(documents)), key=lambda i: ("deep/" if i % 2 else "") + f"{i:03d}")
    documents = [documents[i] for i in order]
    with open(folder + "/all.jsonl", "w") as f:
        for i, text in enumerate(documents):
            f.write(json.dumps({"id": i, "text": text}) + "\n")
            f.write({3: "\n", 4: json.dumps({"text": ""}) + "\n", 5: json.dumps({"text": None}) + "\n"}.get(i, ""))
    with open(folder + "/all.jsonl", "rb") as f:
        lines = f.readlines()
    halves = b"".join(lines[:5]), b"".join(lines[5:])  # two streams, one behind the other
    with open(folder + "/all.json.gz", "wb") as f:
        f.write(gzip.compress(halves[0]) + gzip.compress(halves[1]))
    with open(folder + "/all.jsonl.zst", "wb") as f:
        f.write(zstandard.compress(halves[0]) + zstandard.compress(halves[1]))
    table = pyarrow.table({"content": [*documents, None, ""], "id": list(range(len(documents) + 2))})
    pyarrow.parquet.write_table(table, folder + "/all.parquet", row_group_size=3)
    few = [text for text in documents if len(text) < 10000]
    for name, texts in ("few", few), ("reversed", few[::-1]):
        pyarrow.parquet.write_table(pyarrow.table({"content": texts}), f"{folder}/{name}.parquet", row_group_size=3)
    with open(folder + "/words.jsonl", "w") as f:
        for i in range(100):
            f.write(json.dumps({"text": " ".join(f"w{2 + (i * 7919 + j * 104729) % 69998}" for j in range(30))}) + "\n")


def make_corpora(folder):
    import pyarrow.parquet
    import zstandard
    texts = [" ".join(f"w{65500 + (i * 31 + j * 17) % 100}" for j in range(20 + i * 37 % 300)) for i in range(200)]
    os.makedirs(folder + "/fineweb/sample/10BT")
    for part in range(2):
        rows = [{"text": text, "id": f"<urn:uuid:{i}>", "dump": "CC-MAIN-2024-10", "url": f"http://x/{i}",
                 "date": "2024-02-20T00:00:00Z", "file_path": "s3://x", "language": "en", "language_score": 0.9,
                 "token_count": len(text.split())} for i, text in enumerate(texts)][part * 100:part * 100 + 100]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), row_group_size=30,
                                    where=f"{folder}/fineweb/sample/10BT/{part:03d}_00000.parquet")
    for chunk in range(2):
        os.makedirs(f"{folder}/slimpajama/train/chunk{chunk + 1}")
        for part in range(2):
            first = chunk * 100 + part * 50
            lines = [json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}}) for text in texts]
            with open(f"{folder}/slimpajama/train/chunk{chunk + 1}/example_train_{part}.jsonl.zst", "wb") as f:
                f.write(zstandard.compress(("\n".join(lines[first:first + 50]) + "\n").encode()))


def print_documents(folder, length):
    import zstandard
    count = 0
    for path in glob.glob(folder + "/*/*.zst"):
        lines = zstandard.ZstdDecompressor().decompressobj().decompress(open(path, "rb").read()).splitlines()
        count += sum(len(json.loads(line)["text"].split()) // int(length) for line in lines)
    print(count)


def make_broken(folder):
    import pyarrow.parquet
    import zstandard
    os.makedirs(folder)
    text = os.urandom(100000).hex().encode()
    files = {"cut.gz": gzip.compress(text)[:-100], "cut.txt.zst": zstandard.compress(text)[:-100],
             "flipped.gz": b"\x1f\x8b" + b"\xff" * 50, "latin1.txt": b"abc \xe9t\xe9", "zero.txt": b"a\0b",
             "half.jsonl": b'{"text": "a"}\n{"text": "b', "other.jsonl": b'\n{"body": "a"}\n',
             "number.jsonl": b'{"text": 5}\n', "list.jsonl": b"[1]\n", "fake.parquet": b"PAR1 no",
             "deep.jsonl": b'{"text": "a"}\n{"text": ' + b"[" * 100000, "keys.jsonl": b'{"a\\nb": 5}\n',
             # tokenizers
             "list.json": b"[]", "number.json": b"5", "nothing.json": b"", "binary.json": bytes(range(256)),
             "cut.json": b'{"model": ', "deep.json": b"[" * 100000}
    for name, content in files.items():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(content)
    for name, checksum in ("page.parquet", True), ("snappy.parquet", False):
        path = os.path.join(folder, name)
        table = pyarrow.table({"text": [os.urandom(500).hex() for _ in range(60)]})
        pyarrow.parquet.write_table(table, path, use_dictionary=False, write_page_checksum=checksum, row_group_size=20,
                                    compression="NONE" if checksum else "SNAPPY")
        with open(path, "r+b") as f:
            f.seek(os.path.getsize(path) // 2)
            f.write(b"\xff" * (1 if checksum else 5000))
    two = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(two, os.path.join(folder, "two.parquet"))
    parts = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}}
    words = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "x"}
    save(folder, "no_tokens.json", {**parts, "model": {**words, "vocab": {}}})
    save(folder, "no_unknown.json", {**parts, "model": words})
    save(folder, "panic.json", {**parts, "model": words,
                                "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    {"records": records, "hash": print_hash, "tokenizers": make_tokenizers, "inputs": make_inputs,
     "corpora": make_corpora, "documents": print_documents, "broken": make_broken}[command](*args)
