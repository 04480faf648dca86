#!/usr/bin/env python3
"""
Loss by position with and without rolled documents, in one picture (the paper's appendix B): what position says of content,
as in texts that begin alike, is gone where each document is rotated by a random offset.

    scripts/eval/rolled.py fox-pro=out/fox transformer-pro=out/transformer --val-data 'data/c_val_*.bin' --out rolled

Evaluates each checkpoint twice, by --eval and by --eval --roll SEED, into FOLDER/NAME.K.json and FOLDER/NAME.K.rolled.json,
K counting the checkpoints of one NAME, which are seeds; draws FOLDER/rolled.svg as positions.py does, and prints the mean
losses. What was measured of the same checkpoint, data, seed and length is not measured again. The shards have documents
(--doc-len).
"""
import collections
from pathlib import Path

import positions
from fox import Error, Parser, checkpoint, counted, default_trainer, named_files, read_json, run, run_trainer


def evaluate(options, folder, path, rolled):
    """The result of --eval in a file, measured where it is missing."""
    roll = options.roll if rolled else None
    if path.exists():
        found = read_json(path)
        same = [found.get(key) for key in ("checkpoint", "data", "roll")] == [folder, options.val_data, roll]
        if same:
            return positions.read_eval(path)
    run_trainer(folder, options.trainer, "--init", folder, "--eval", str(path), "--val-data", options.val_data,
                *["--roll", str(roll)] * rolled, *["--seq-len", str(options.seq_len)] * bool(options.seq_len))
    print(path, flush=True)
    return positions.read_eval(path)


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="NAME=DIR", help="checkpoint, or a run, whose newest one it is; of one NAME: seeds")
    add("--val-data", required=True, metavar="GLOB", help="held-out shards of documents")
    add("--roll", type=int, default=1, metavar="SEED", help="of the offsets (1)")
    add("--seq-len", type=int, metavar="N", help="tokens of a document (all)")
    add("--trainer", metavar="FILE", default=default_trainer(), help="train_foxcu if there is a GPU, else train_fox")
    add("--out", required=True, metavar="FOLDER", help="results and rolled.svg")
    options = parser.parse_args()
    if options.roll < 0:
        raise Error(f"--roll: {options.roll} is below 0")
    out, groups, count = Path(options.out), {}, collections.Counter()
    import plots
    out.mkdir(parents=True, exist_ok=True)
    plots.check(out / "rolled.svg")
    for name, folder in named_files(options.checkpoints):
        folder = checkpoint(str(folder))
        stem = f"{name}.{count[name]}".replace("/", "_") + f".{options.seq_len}" * bool(options.seq_len)
        count[name] += 1
        results = {rolled: evaluate(options, folder, out / f"{stem}{'.rolled' * rolled}.json", rolled)
                   for rolled in (True, False)}  # a stream refuses to be rolled: before it is measured
        for rolled in False, True:
            groups.setdefault(name + ", rolled" * rolled, []).append(results[rolled])
    for name, results in groups.items():
        losses = ", ".join(f"{r['loss_mean']:.4f}" for r in results)
        print(f"{name}: mean loss {losses} of {counted(results[0]['sequences'], 'document')}")
    positions.draw(out / "rolled.svg", groups, [r.get("trained_seq_len") for results in groups.values() for r in results])
    print(out / "rolled.svg")


if __name__ == "__main__":
    run(main)
