#!/usr/bin/env python3
"""
What a checkpoint's forget gates spare of attention, by length, as the figures of ACP's paper (arXiv 2504.06949):

    scripts/eval/pruning.py --init DIR --val-data 'data/c_val_*.bin' --out pruning.json --picture pruning.svg

pruned: share of attention's blocks that is skipped, by --rules: ours (llmc/attention/pruning.cuh), and acp, that of the
paper. On a GPU --eval measures it, with tokens/s of forward passes over --tokens held-out tokens, and how many times as
fast that is as with nothing pruned (none). The CPU trainer does not prune: there --maps says what would be skipped of the
first sequence alone. Errors are standard errors over layers. --out keeps every point; started again, the script measures
only what is missing there.
"""
import itertools
import json
import tempfile
from pathlib import Path

from fox import Error, Parser, checkpoint, counted, default_trainer, read_json, run, run_trainer
from samples import Samples, finish, numbers, training_length

RULES = {"none": "log_pruning_tolerance=null", "ours": "pruning_rule=ours", "acp": "pruning_rule=acp"}
MEASURES = {"pruned": "blocks of attention skipped, %", "tokens_per_s": "forward passes, tokens/s",
            "faster": "times as fast as with nothing pruned"}


def prunes(trainer):
    return "cu" in Path(trainer).name


def ask(options, rule, length, *arguments):
    """Runs the trainer on the held-out data."""
    run_trainer(f"{rule}, {counted(length, 'token')}", options.trainer, "--init", options.init, "--val-data", options.val_data,
                "--seq-len", str(length), "--set", RULES[rule], *arguments)


def measure(options, rule, length, folder):
    """[{measure: value}] of the layers; tokens/s are the first one's."""
    path = f"{folder}/result"
    if not prunes(options.trainer):
        from maps import read
        ask(options, rule, length, "--maps", path)
        return [{"pruned": 100 * float(layer.mean())} for layer in read(path)["pruned_share"]]
    ask(options, rule, length, "--eval", path, "--val-tokens", options.tokens)
    result = json.loads(Path(path).read_text())
    layers = [{"pruned": 100 * share} for share in result["pruned"] or []] or [{}]
    layers[0]["tokens_per_s"] = result["tokens_per_second"]
    return layers


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--init", required=True, type=checkpoint, metavar="DIR", help="checkpoint, or a run, whose newest one it is")
    add("--val-data", required=True, metavar="GLOB", help="held-out shards, as long as the longest of --lengths")
    add("--lengths", type=numbers, default=numbers("4096,8192,16384,32768,65536"), metavar="A,B,...",
        help="tokens (4096 to 65536)")
    add("--rules", default="ours,acp", metavar="A,B", help="ours, acp (both)")
    add("--tokens", default="1Mi", metavar="N", help="held-out tokens of a point, on a GPU (1Mi)")
    add("--trainer", metavar="FILE", default=default_trainer(), help="train_foxcu if there is a GPU, else train_fox")
    add("--out", required=True, metavar="FILE.json", help="results; what is missing there is measured")
    add("--picture", metavar="FILE.svg", help="measures by length")
    options = parser.parse_args()
    options.rules = options.rules.split(",")
    if not set(options.rules) <= {"ours", "acp"}:
        raise Error(f"--rules {','.join(options.rules)}: ours, acp or both")
    if options.lengths[0] < 1:
        raise Error("--lengths: at least 1")
    if read_json(Path(options.init) / "config.json").get("fgate_type", "none") == "none":
        raise Error(f"--init {options.init}: a model without forget gates, of which nothing is pruned")
    return options


def main():
    options = parse()
    settings = {name: getattr(options, name) for name in ("init", "val_data", "tokens", "trainer")}
    samples = Samples(options.out, settings, ("rule", "length", "layer"), "points")
    if options.picture:
        import plots
        plots.check(options.picture)
    rules = ["none"] * prunes(options.trainer) + options.rules
    with tempfile.TemporaryDirectory() as folder:
        for rule, length in itertools.product(rules, options.lengths):
            if (rule, length, 0) not in samples.results:
                layers = measure(options, rule, length, folder)
                samples.results |= {(rule, length, k): layer for k, layer in enumerate(layers)}
                samples.save()
    for (rule, length, layer), result in samples.results.items():
        if layer == 0 and ("none", length, 0) in samples.results:
            result["faster"] = result["tokens_per_s"] / samples.results["none", length, 0]["tokens_per_s"]
    wanted = [key for key in samples.results if key[0] in rules and key[1] in options.lengths]
    wanted.sort(key=lambda key: (rules.index(key[0]), *key[1:]))
    finish(samples, options, wanted, MEASURES, "length, tokens", training_length(options))


if __name__ == "__main__":
    run(main)
