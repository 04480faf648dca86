"""What test_documents.sh compares with --dry-run and log.jsonl: documents and pairs of attention, one by one.

    documents.py texts FOLDER           files of 0 to 60 bytes for data/text_to_shards
    documents.py plan SHARD T W         "DOCUMENTS SHARE" of all sequences of T tokens in a window of W keys (0: none; W of
                                        each layer, separated by commas), as printed by --dry-run
    documents.py flops RUN SHARD W      model FLOPs a token of the run, as printed, less that share of its attention;
                                        W "none": the model has no attention
    documents.py steps RUN SHARD W N    every step of the run, of N sequences, has its own numbers, and FLOPs without them
    documents.py none RUN KEY...        no step has these keys
"""
import json
import os
import random
import struct
import sys

END = 256


def texts(folder):
    rng = random.Random(1)
    for k in range(300):
        with open(os.path.join(folder, f"{k:03d}"), "wb") as f:
            f.write(bytes(rng.randrange(97, 123) for _ in range(rng.randrange(61))))


def sequences(path, T):
    with open(path, "rb") as f:
        data = f.read()
    tokens = struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])
    return [tokens[p : p + T] for p in range(0, len(tokens) - T, T)]


def count(rows, windows):
    """(documents a sequence, share of pairs whose tokens are of different documents)."""
    documents = pairs = apart = 0
    windows = [int(W) for W in windows.split(",")]
    for row in rows:
        number = [sum(id == END for id in row[1 : t + 1]) for t in range(len(row))]
        documents += number[-1] + 1
        for i in range(len(row)):
            for W in windows:
                for j in range(max(0, i - W + 1) if W else 0, i + 1):
                    pairs += 1
                    apart += number[i] != number[j]
    return documents / len(rows), apart / pairs


def plan(shard, T, W):
    documents, share = count(sequences(shard, int(T)), W)
    print(f"{documents:.4g} {100 * share:.4g}%")


def lines(run):
    with open(os.path.join(run, "log.jsonl")) as f:
        read = [json.loads(line) for line in f]
    return read[0], [line for line in read if line["event"] == "step"]


def of_documents(start, share):
    return start["flops_per_token"] - share * start["attention_flops_per_token"]


def flops(run, shard, W):
    start, _ = lines(run)
    share = 0 if W == "none" else count(sequences(shard, start["options"]["seq-len"]), W)[1]
    print(f"{of_documents(start, share):.4g}")


def steps(run, shard, W, N):
    start, logged = lines(run)
    rows, N = sequences(shard, start["options"]["seq-len"]), int(N)
    for line in logged:
        first = (line["step"] - 1) * N
        documents, share = count([rows[i % len(rows)] for i in range(first, first + N)], "0" if W == "none" else W)
        assert line["documents_per_sequence"] == documents > 1, (line, documents)
        hidden = line.get("attention_in_other_documents")
        assert hidden is None if W == "none" else abs(hidden - share) < 1e-15, (line, share)
        flops_per_s = of_documents(start, hidden or 0) * line["tokens_per_s"]
        assert abs(line["model_flops_per_s"] / flops_per_s - 1) < 1e-12, line
    assert len(logged) > 2


def none(run, *keys):
    assert not [k for line in lines(run)[1] for k in keys if k in line]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
