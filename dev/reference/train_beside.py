"""
Trains the paper's own code as a run of this program has trained, and again: how far are the two programs from one another,
and each from itself? PyTorch, AdamW, on the same weights, batches and learning rates.

    ./train_foxcu --model fox-pro-125m --data 'SHARD' --max-steps 1 ... --out out/start
    ./train_foxcu --init out/start/step_00000001 --data 'SHARD' --max-steps 40 ... --out out/one    # and out/two
    python dev/reference/train_beside.py out/one --again out/two --code paper --runs 2 --out paper_code.json

The run must have begun with --init, have read its data in order (one shard that is a token stream, no --shuffle) and
not be resumed. --code paper is zhixuan-lin/forgetting-transformer, in src/ of the folder in PYTHONPATH, under bf16 autocast on
a GPU; --code reference is fox.py, in fp32 on the CPU, which checks this script with nano models. The file has the loss of
every step of every run, and by span of steps the mean and the largest difference from the run's own.
"""
import argparse
import contextlib
import glob
import json
import sys
from pathlib import Path

import numpy as np
import torch

import fox

SPANS = (1, 12), (13, 30), (31, 60), (61, 100)


def read_run(folder):
    """(the run event, [step event]) of a run's log.jsonl."""
    events = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    runs, steps = ([e for e in events if e["event"] == kind] for kind in ("run", "step"))
    options = runs[0]["options"]
    problem = ("was resumed" if len(runs) > 1 else "did not begin with --init" if not options.get("init") else
               "was shuffled" if options.get("shuffle") else None)
    if problem:
        sys.exit(f"error: {folder}: {problem}")
    return runs[0], steps


def read_stream(pattern):
    """The tokens of a shard without documents."""
    path, *others = sorted(glob.glob(pattern)) or [pattern]
    if others:
        sys.exit(f"error: {pattern}: {1 + len(others)} shards; this takes one")
    header = np.fromfile(path, "<i4", 256)
    if header[0] != 20240520 or header[1] not in (1, 2) or header[3]:
        sys.exit(f"error: {path}: not a shard that is one token stream without a mask")
    return np.memmap(path, "<u2" if header[1] == 1 else "<u4", "r", 1024)


def load_model(code, folder):
    if code == "reference":
        return fox.load(folder, torch.float32)
    from safetensors.torch import load_file
    config = json.loads(Path(folder, "config.json").read_text())
    if config["fgate_type"] == "none" and "ForgettingTransformer" not in config["architectures"][0]:
        from forgetting_transformer.model.transformer.configuration_transformer import TransformerConfig as Config
        from forgetting_transformer.model.transformer.modeling_transformer import TransformerForCausalLM as Model
    else:
        from forgetting_transformer.model.forgetting_transformer import modeling_forgetting_transformer as modeling
        Config, Model = modeling.ForgettingTransformerConfig, modeling.ForgettingTransformerForCausalLM
    model = Model(Config(**{**config, "use_cache": False}))
    model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    return model.cuda()


def train(model, code, run, steps, tokens):
    """The loss of each step."""
    o = run["options"]
    T, B, rows = o["seq-len"], run["micro_batch"], o["batch-tokens"] // o["seq-len"]
    optimizer = torch.optim.AdamW(fox.parameter_groups(model, o["weight-decay"]), lr=1, betas=(o["beta1"], o["beta2"]),
                                  eps=o["adam-eps"])
    device = next(model.parameters()).device
    losses = []
    for k, step in enumerate(steps):
        total = 0.0
        for first in range(k * rows, (k + 1) * rows, B):
            n = min(B, (k + 1) * rows - first)
            batch = np.stack([tokens[i * T:(i + 1) * T + 1] for i in range(first, first + n)]).astype(np.int64)
            batch = torch.from_numpy(batch).to(device)
            inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            with torch.autocast("cuda", torch.bfloat16) if code == "paper" else contextlib.nullcontext():
                loss = model(inputs, labels=targets).loss if code == "paper" else model.loss(inputs, targets)
            loss = loss.float().sum() / (rows * T)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o["grad-clip"])
        for group in optimizer.param_groups:
            group["lr"] = step["lr"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {step['step']}  loss {total:.4f}  this program {step['loss']:.4f}", flush=True)
    return losses


def differences(losses, of):
    """{"1-12": [mean difference, largest absolute one]}"""
    found = {}
    for begin, end in SPANS:
        parts = [a - b for a, b in zip(losses, of)][begin - 1:end]
        if parts:
            found[f"{begin}-{begin + len(parts) - 1}"] = [round(sum(parts) / len(parts), 4), round(max(map(abs, parts)), 4)]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run of this program")
    parser.add_argument("--again", metavar="RUN", help="another run of the same command")
    parser.add_argument("--code", choices=("paper", "reference"), default="paper")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", required=True, metavar="FILE")
    args = parser.parse_args()
    run, steps = read_run(args.run)
    tokens = read_stream(run["options"]["data"])
    curves = {"this program": [step["loss"] for step in steps]}
    if args.again:
        curves["this program, again"] = [step["loss"] for step in read_run(args.again)[1]]
    for n in range(args.runs):
        name = {"paper": "the paper's code", "reference": "fox.py"}[args.code] + f", run {n + 1}"
        curves[name] = train(load_model(args.code, run["options"]["init"]), args.code, run, steps, tokens)
    own, others = curves["this program"], [name for name in curves if name[:12] != "this program"]
    result = {"version": run["version"], "device": run["device"], "options": run["options"],
              "from_this_program": {name: differences(losses, own) for name, losses in curves.items() if losses is not own},
              "from_the_others_first": {name: differences(curves[name], curves[others[0]]) for name in others[1:]},
              "loss": {name: [round(x, 5) for x in losses] for name, losses in curves.items()}}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("from_this_program", "from_the_others_first")}, indent=1))


if __name__ == "__main__":
    main()
