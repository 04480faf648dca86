"""Makes the shards of test_masked.sh, and checks what training, --dump and --eval make of their masks. Needs only Python's
standard library.

    masked.py make FOLDER              documents of 16 byte tokens with masks, as below
    masked.py parts DUMP...            the dumps of all, ragged, and the rest of all's targets: their losses and gradients
                                       are parts of one sum
    masked.py step DUMP RUN TOLERANCE  the first step of a run on the dump's batch: loss, norm, first moments
    masked.py close RUN RUN TOLERANCE  logs and weights of two runs
    masked.py eval DUMP EVAL           --eval of the dump's batch: loss by position, means, accuracy
    masked.py log RUN EVAL             the last validation of a log is that of --eval; prints the targets of each step
"""

import json, math, os, struct, sys

from ranks import close as close_weights, tensors

T, DOCUMENTS, VOCAB = 16, 24, 257
COUNTS = 1 << 31


def ids(document):
    state, found = document + 1, []
    for _ in range(T):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(97 + (state >> 33) % 26)
    return found


def ragged(document, t):
    """As different as can be: of a document no target counts, one, some, or all."""
    return (False, t == 7, (t * 5 + document) % 3 == 0, True)[(document * 7 + document // 5) % 4]


MASKS = {
    "all": lambda document, t: True,
    "none": lambda document, t: False,
    "ragged": ragged,
    "rest": lambda document, t: not ragged(document, t),
    "late": lambda document, t: document >= 12 and ragged(document, t),  # none in the first step of 12
}


def make(folder):
    os.makedirs(folder)
    for name, counts in [*MASKS.items(), ("plain", None)]:
        body = [i | (COUNTS if counts and counts(d, t) else 0) for d in range(DOCUMENTS) for t, i in enumerate(ids(d))]
        header = [20240520, 3 if counts else 2, len(body), T, VOCAB] + 251 * [0]
        with open(f"{folder}/{name}.bin", "wb") as f:
            f.write(struct.pack(f"<256i{len(body)}I", *header, *body))
    with open(f"{folder}/tail.bin", "wb") as f:  # a document of 1024 tokens, of which the last one counts
        f.write(struct.pack("<256i1024I", 20240520, 3, 1024, 1024, VOCAB, *(251 * [0]), *(1023 * [97]), 97 | COUNTS))


def close(got, want, tolerance, what):
    assert abs(got - want) <= tolerance * abs(want), f"{what}: {got}, expected {want}"


def difference(a, b):
    """Relative, in the 2-norm; of zeros the norm of a."""
    norm = math.sqrt(math.fsum(y * y for y in b)) or 1
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b))) / norm


def read_dump(path):
    """Losses [B][T], whether each counts, likeliest token of each, {name: gradient}."""
    found = {name: (shape, list(values)) for name, shape, values in tensors(path)}
    (B, width), loss = found.pop("loss")
    shape, logits = found.pop("logits")
    rows = [logits[i : i + shape[2]] for i in range(0, len(logits), shape[2])]
    best = [row.index(max(row)) for row in rows]
    by_row = lambda values: [values[i : i + width] for i in range(0, B * width, width)]
    return by_row(loss), by_row(best), {name: values for name, (_, values) in found.items()}


def parts(whole, *others):
    """With n targets and the mean gradient g, a batch's n g is the sum of its parts' n g."""
    sums = []
    for path in (whole, *others):
        loss, _, gradients = read_dump(path)
        n = sum(x != 0 for row in loss for x in row)
        sums.append((n, loss, {name: [n * x for x in g] for name, g in gradients.items()}))
    (n, loss, gradients), pieces = sums[0], sums[1:]
    assert n == sum(piece[0] for piece in pieces) and all(0 < piece[0] < n for piece in pieces)
    for b, row in enumerate(loss):
        for t, x in enumerate(row):
            assert sorted(piece[1][b][t] for piece in pieces) == [0, x], f"loss of target {t} of sequence {b}"
    for name, g in gradients.items():
        added = [math.fsum(x) for x in zip(*(piece[2][name] for piece in pieces))]
        error = difference(added, g)
        assert error < 1e-13, f"gradient of {name}: off by {error}"


def log(run, event):
    with open(run + "/log.jsonl") as f:
        return [line for line in map(json.loads, f) if line["event"] == event]


def step(path, run, tolerance):
    loss, _, gradients = read_dump(path)
    counted = [x for row in loss for x in row if x]
    line = log(run, "step")[0]
    norm = math.sqrt(math.fsum(x * x for g in gradients.values() for x in g))
    assert line.get("targets", len(counted)) == len(counted), line
    close(line["loss"], math.fsum(counted) / len(counted), float(tolerance), "loss")
    close(line["grad_norm"], norm, float(tolerance), "norm")
    moments = {name: values for name, _, values in tensors(run + "/step_00000001/optimizer.safetensors")}
    for name, g in gradients.items():
        error = difference(moments["exp_avg." + name], [0.1 * min(1, 1 / norm) * x for x in g])
        assert error < max(float(tolerance), 1e-6), f"first moment of {name}: off by {error}"  # the file has floats


def same_runs(a, b, tolerance):
    lines = [log(run, "step") for run in (a, b)]
    assert len(lines[0]) == len(lines[1]) > 1
    for x, y in zip(*lines):
        assert x.get("targets") == y.get("targets")
        for key in ("loss", "grad_norm"):
            close(x[key], y[key], float(tolerance), f"{key} of step {x['step']}")
    close_weights(*(f"{run}/step_{lines[0][-1]['step']:08d}" for run in (a, b)), max(float(tolerance), 1e-6))


def evaluated(path, result):
    loss, best, _ = read_dump(path)
    with open(result) as f:
        got = json.load(f)
    flat = [(d, t, x) for d, row in enumerate(loss) for t, x in enumerate(row) if x]
    total = math.fsum(x for _, _, x in flat)
    n = len(flat)
    assert (got["targets"], got["tokens"]) == (n, len(loss) * T), got["targets"]
    close(got["loss_mean"], total / n, 1e-12, "mean")
    close(got["perplexity"]["16"], math.exp(total / n), 1e-12, "perplexity")
    close(got["accuracy"], sum(best[d][t] == ids(d)[t] for d, t, _ in flat) / n, 1e-12, "accuracy")
    for t in range(T):
        here = [row[t] for row in loss if row[t]]
        want = math.fsum(here) / len(here) if here else None
        assert (got["loss"][t] is None) == (want is None), f"position {t}"
        if here:
            assert abs(got["loss"][t] - want) < 6e-7, f"loss of position {t}"
    residuals = [math.fsum(row) - total / n * sum(x != 0 for x in row) for row in loss]
    m = len(loss)
    close(got["standard_error"], math.sqrt(m / (m - 1) * math.fsum(r * r for r in residuals)) / n, 1e-9, "its error")
    assert (got["loss_error"] is None) == (n < len(loss) * T)


def validation(run, result):
    with open(result) as f:
        got = json.load(f)
    line = log(run, "validation")[-1]
    assert (line["val_tokens"], line["accuracy"]) == (got["targets"], got["accuracy"]), line
    close(line["val_loss"], got["loss_mean"], 1e-12, "val_loss")
    print(*(line["targets"] for line in log(run, "step")))


if __name__ == "__main__":
    command, *args = sys.argv[1:] or [""]
    commands = {"make": make, "parts": parts, "step": step, "close": same_runs, "eval": evaluated, "log": validation}
    if command not in commands:
        sys.exit(__doc__)
    commands[command](*args)
