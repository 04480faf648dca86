"""Makes the files of test_positions.sh and checks what --eval writes. Needs only Python's standard library.

    positions.py fixture FOLDER OUT          a shard OUT/sequence_N.bin of each sequence of a fixture; prints their length
    positions.py expect FOLDER EVAL LIMIT    checks the losses of --eval against the fixture's fp64 losses
    positions.py dump FILE EVAL LIMIT        the same against the losses of a --dump
    positions.py same EVAL EVAL              checks that two files agree but for the rounding of doubles
    positions.py validation LOG EVAL         checks the last validation of a log against --eval on the same data
    positions.py documents SHARD COUNT D     a shard of COUNT documents of D random bytes
    positions.py cut SHARD OUT BEGIN END     a shard of tokens BEGIN .. END - 1 of each document of SHARD
    positions.py padded SHARD OUT D T        its documents of D tokens cut to D - 1, D - 5 and so on, padded to T and masked
    positions.py alone DUMP EVAL D LIMIT     checks the losses of these against a --dump of the whole ones
    positions.py behind DUMP EVAL C LIMIT    checks the losses of the last targets behind C tokens against a --dump of
                                             documents cut to these
    positions.py numbers EVAL KEY...         prints values of the file
"""

import array, json, math, os, random, struct, sys


def tensors(path):
    """Yields name, shape and values of the tensors of a safetensors file."""
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    for name, t in header.items():
        begin, end = t.get("data_offsets", (0, 0))
        if name != "__metadata__":
            yield name, t["shape"], array.array({"F32": "f", "F64": "d", "I32": "i"}[t["dtype"]], data[begin:end])


def rows(path, name):
    """The rows of a tensor of two axes."""
    shape, values = next((shape, values) for found, shape, values in tensors(path) if found == name)
    return [list(values[r * shape[1] : (r + 1) * shape[1]]) for r in range(shape[0])]


def write_shard(path, ids, doc_len, masked=False):
    header = struct.pack("<4i", 20240520, 3 if masked else 1, len(ids), doc_len)
    with open(path, "wb") as f:
        f.write(header + bytes(1024 - len(header)) + array.array("I" if masked else "H", ids).tobytes())


def load(path):
    def refuse(word):
        raise AssertionError(f"{path} has {word}")

    with open(path) as f:
        return json.load(f, parse_constant=refuse)


def close(a, b, limit, what):
    assert abs(a - b) <= limit * max(1, abs(b)), f"{what} is {a}, expected {b}"


def error_of_mean(values):
    n, mean = len(values), math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def check(got, sequences, limit):
    """sequences: the losses that are expected, a list each."""
    n, T = len(sequences), len(sequences[0])
    by_position = [math.fsum(s[t] for s in sequences) / n for t in range(T)]
    means = [math.fsum(s) / T for s in sequences]
    mean = math.fsum(means) / n
    assert (got["seq_len"], got["sequences"], got["tokens"]) == (T, n, n * T), (got["seq_len"], got["sequences"], n, T)
    assert len(got["loss"]) == T
    for t in range(T):
        close(got["loss"][t], by_position[t], limit + 6e-7, f"loss of position {t + 1}")
    close(got["loss_mean"], mean, limit, "loss_mean")
    if n > 1:
        close(got["standard_error"], error_of_mean(means), limit, "standard_error")
        half = got["loss_error_window"] // 2
        assert (half, len(got["loss_error"])) == (50, T)
        for t in range(T):
            windows = [s[max(0, t - half) : t + half + 1] for s in sequences]
            expected = error_of_mean([math.fsum(w) / len(w) for w in windows])
            close(got["loss_error"][t], expected, limit + 6e-7, f"error of position {t + 1}")
    else:
        assert got["standard_error"] is None and got["loss_error"] is None
    lengths = sorted({2**k for k in range(9, 40) if 2**k <= T} | {T})
    assert list(got["perplexity"]) == [str(l) for l in lengths], list(got["perplexity"])
    for l in lengths:
        close(got["perplexity"][str(l)], math.exp(math.fsum(by_position[:l]) / l), 2 * limit, f"perplexity of {l}")
    if got["documents"]:
        check_documents(got["documents"], sequences, limit)
    assert got["pruned"] is None and got["seconds"] > 0 and got["tokens_per_second"] > 0


def check_documents(got, sequences, limit):
    T = len(sequences[0])
    edges, contexts, last = got["octaves"], got["contexts"], got["last_targets"]
    assert edges == [0] + [2**k for k in range(31) if 2**k < T] + [T], edges
    assert last == 2048 and contexts == [4**k for k in range(5, 15) if 4**k < T - last] + [T - last] * (T > last), contexts
    assert len(got["loss"]) == len(got["last_loss"]) == len(sequences)
    for n, (losses, row) in enumerate(zip(sequences, got["loss"])):
        assert len(row) == len(edges) - 1
        for begin, end, loss in zip(edges, edges[1:], row):
            close(loss, math.fsum(losses[begin:end]) / (end - begin), limit + 6e-7, f"document {n + 1} from {begin}")
        assert len(got["last_loss"][n]) == len(contexts)
        if contexts:
            close(got["last_loss"][n][-1], math.fsum(losses[-last:]) / last, limit + 6e-7, f"document {n + 1}, its end")


def padded(shard, out, D, T):
    with open(shard, "rb") as f:
        ids = array.array("H", f.read()[1024:])
    rows = []
    for n, begin in enumerate(range(0, len(ids), D)):
        kept = D - 1 - 4 * n
        rows += [1 << 31 | i for i in ids[begin : begin + kept]] + [256] * (T - kept)
    write_shard(out, rows, T, masked=True)


def alone(dump, path, D, limit):
    got = load(path)["documents"]
    assert got["contexts"] == [] and got["last_loss"] == [[]] * len(got["loss"])
    for n, losses in enumerate(rows(dump, "loss")):
        for k, (begin, end) in enumerate(zip(got["octaves"], got["octaves"][1:])):
            counted = losses[: D - 1 - 4 * n][begin:end]
            assert got["targets"][n][k] == len(counted), (n, k, got["targets"][n])
            if counted:
                close(got["loss"][n][k], math.fsum(counted) / len(counted), limit + 6e-7, f"document {n + 1} from {begin}")
            else:
                assert got["loss"][n][k] is None


def behind(dump, path, context, limit):
    got = load(path)["documents"]
    column, last = got["contexts"].index(context), got["last_targets"]
    cut = rows(dump, "loss")
    assert len(cut) == len(got["last_loss"]) and len(cut[0]) == context + last
    for n, losses in enumerate(cut):
        close(got["last_loss"][n][column], math.fsum(losses[-last:]) / last, limit + 6e-7, f"document {n + 1}")


def fixture(folder, out):
    inputs, targets = (rows(folder + "/expected.safetensors", name) for name in ("tokens", "targets"))
    os.makedirs(out)
    for b, (before, after) in enumerate(zip(inputs, targets)):
        assert before[1:] == after[:-1]
        write_shard(f"{out}/sequence_{b}.bin", before + after[-1:], 0)
    print(len(inputs[0]))


def same(path_a, path_b):
    a, b = load(path_a), load(path_b)
    for key in ("seq_len", "sequences", "tokens"):
        assert a[key] == b[key], key
    for key in ("loss", "loss_error"):
        assert all(abs(x - y) < 1.5e-6 for x, y in zip(a[key], b[key])) and len(a[key]) == len(b[key]), key
    for key in ("loss_mean", "standard_error"):
        close(a[key], b[key], 1e-12, key)
    assert a["perplexity"].keys() == b["perplexity"].keys()
    assert (a["documents"] is None) == (b["documents"] is None)
    for key in ("octaves", "contexts", "last_targets") if a["documents"] else ():
        assert a["documents"][key] == b["documents"][key], key
    for key in ("loss", "last_loss") if a["documents"] else ():
        x, y = ([v for row in side["documents"][key] for v in row] for side in (a, b))
        assert len(x) == len(y) and all(abs(p - q) < 1.5e-6 for p, q in zip(x, y)), key
    for l in a["perplexity"]:
        close(a["perplexity"][l], b["perplexity"][l], 1e-12, f"perplexity of {l}")


def validation(log, path):
    got = load(path)
    with open(log) as f:
        lines = list(map(json.loads, f))
    line, evaluation = ([v for v in lines if v["event"] == event][-1] for event in ("validation", "evaluation"))
    assert all(evaluation[key] == line[key] for key in line.keys() - {"event", "ms"}), evaluation
    assert evaluation["perplexity_by_length"].keys() == got["perplexity"].keys()
    for l in got["perplexity"]:
        close(evaluation["perplexity_by_length"][l], got["perplexity"][l], 1e-12, f"perplexity of {l}")
    assert line["val_tokens"] == got["tokens"]
    close(line["val_loss"], got["loss_mean"], 1e-12, "val_loss")
    close(line["perplexity"], got["perplexity"][str(got["seq_len"])], 1e-12, "perplexity")
    begins = [0] + [2**k for k in range(31) if 2**k < got["seq_len"]]
    assert [bucket["from"] for bucket in line["by_position"]] == begins
    assert line["by_position"][-1]["to"] == got["seq_len"]
    for bucket in line["by_position"]:
        losses = got["loss"][bucket["from"] : bucket["to"]]
        assert bucket["tokens"] == len(losses) * got["sequences"]
        close(bucket["loss"], math.fsum(losses) / len(losses), 1e-6, f"loss from position {bucket['from']}")


def cut(path, out, begin, end):
    with open(path, "rb") as f:
        data = f.read()
    length = struct.unpack("<4i", data[:16])[3]
    ids = array.array("H", data[1024:])
    write_shard(out, [i for d in range(0, len(ids), length) for i in ids[d + begin : d + end]], length and end - begin)


def documents(path, count, length):
    draw = random.Random(1)
    write_shard(path, [draw.randrange(97, 123) for _ in range(count * length)], length)


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    if command == "fixture":
        fixture(*args)
    elif command == "expect":
        check(load(args[1]), rows(args[0] + "/expected.safetensors", "loss"), float(args[2]))
    elif command == "dump":
        check(load(args[1]), rows(args[0], "loss"), float(args[2]))
    elif command == "same":
        same(*args)
    elif command == "validation":
        validation(*args)
    elif command == "cut":
        cut(args[0], args[1], int(args[2]), int(args[3]))
    elif command == "padded":
        padded(args[0], args[1], int(args[2]), int(args[3]))
    elif command == "alone":
        alone(args[0], args[1], int(args[2]), float(args[3]))
    elif command == "behind":
        behind(args[0], args[1], int(args[2]), float(args[3]))
    elif command == "documents":
        documents(args[0], int(args[1]), int(args[2]))
    elif command == "numbers":
        print(*(load(args[0])[key] for key in args[1:]))
    else:
        sys.exit(__doc__)
