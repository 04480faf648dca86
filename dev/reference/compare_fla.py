"""
Compares the errors of the GPU trainer with those of flash-linear-attention's models, relative to float64.

    python dev/reference/compare_fla.py --family mamba2 hgrn2 hgrn2-lower-bound deltanet gated-deltanet

The trainer (with --dump), flash-linear-attention in bf16 and recurrent.py in float64 run one forward and
backward pass on the same weights, which bf16 holds exactly, and tokens. The error of a tensor is
||x - exact|| / ||exact||; of the tensors of all layers and draws that have one name, the rms. A tensor passes
if the trainer's error is at most twice flash-linear-attention's.

Both run with an epsilon of 1e-5 in every norm: flash-linear-attention ignores the config's in HGRN2's g_norm.
"""
import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import recurrent
from accuracy import LIMIT, run_program
from bench_fla import autotune_part, fla_model

# ----------------------------------------------------------------------------
# weights


@torch.no_grad()
def draw_weights(args, family, folder):
    """Saves a model with norms around 1 and decays of Mamba-2's initialization."""
    eps, bound = {"layer_norm_epsilon" if family == "mamba2" else "norm_eps": 1e-5}, {}
    if family == "hgrn2-lower-bound":
        family, bound = "hgrn2", dict(use_lower_bound=True)
    model = recurrent.Recurrent(recurrent.make_config(
        family, vocab_size=args.vocab_size, hidden_size=args.hidden_size, num_hidden_layers=args.layers,
        num_heads=args.hidden_size // (32 if family == "mamba2" else 128), **eps, **bound))
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(p).uniform_(np.log(1e-3), np.log(0.1)).exp()
            p.copy_(step + (-(-step).expm1()).log())
        elif name.endswith("lower_bounds"):
            p.normal_()
        elif "norm" in name or name.endswith(".D"):
            p.normal_(1, 0.1)
        p.copy_(p.bfloat16())
    recurrent.save(model, folder)


def fla_names(weights, has_bound):
    """Our tensors under flash-linear-attention's names, which keeps gate and up projection apart."""
    result = {}
    for name, x in weights.items():
        if name.endswith("mlp.gate_proj.weight") and name.replace("gate", "up") not in weights:
            result[name], result[name.replace("gate", "up")] = x.chunk(2)
        elif has_bound or not name.endswith("lower_bounds"):
            result[name] = x
    return result


def our_names(grads):
    """The reverse of fla_names."""
    up = {name: x for name, x in grads.items() if "mlp.up_proj" in name}
    joined = {}
    for name, x in up.items():
        name = name.replace("up", "gate")
        joined[name] = torch.cat((grads[name], x))
    return {name: x for name, x in {**grads, **joined}.items() if name not in up}


# ----------------------------------------------------------------------------
# the compared implementations: each returns loss, logits and grad.NAME


def run_model(model, logits, targets):
    loss = F.cross_entropy(logits.mT, targets, reduction="none")
    loss.mean().backward()
    grads = {"grad." + name: p.grad for name, p in model.named_parameters()}
    return dict(loss=loss.detach(), logits=logits.detach(), **grads)


def run_exact(folder, tokens, targets):
    model = recurrent.load(folder).to(tokens.device)
    return run_model(model, model(tokens), targets)


def run_fla(folder, tokens, targets):
    config = json.loads((folder / "config.json").read_text())
    with tokens.device:
        model = fla_model(config)
    model.load_state_dict(fla_names(load_file(folder / "model.safetensors"), config.get("use_lower_bound")))
    result = run_model(model, model(tokens, use_cache=False).logits.float(), targets)
    return result if config["model_type"] == "gated_deltanet" else our_names(result)


# ----------------------------------------------------------------------------


def compare(args, family, length, squares):
    """Adds one draw to squares[name]: relative squares of our error and of theirs, and 1."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        draw_weights(args, family, folder)
        stream = torch.randint(args.vocab_size, (1, length + 1))
        tokens, targets = stream[:, :-1].to(args.device), stream[:, 1:].to(args.device)
        ours = run_program(args.program, folder, stream)
        theirs, exact = run_fla(folder, tokens, targets), run_exact(folder, tokens, targets)
    assert ours.keys() == theirs.keys() == exact.keys(), sorted(ours.keys() ^ exact.keys())
    for name, x in exact.items():
        a, b = (torch.as_tensor(run[name]).to(x) for run in (ours, theirs))
        assert a.shape == b.shape == x.shape, f"{name}: {tuple(a.shape)}, {tuple(b.shape)}, {tuple(x.shape)}"
        errors = [((y - x).square().sum() / x.square().sum()).item() for y in (a, b)]
        squares[re.sub(r"\.\d+\.", ".*.", name)] += np.array(errors + [1])


def report(family, squares):
    """Prints the table; returns the number of tensors that failed."""
    failed = 0
    print(f"{family:42} {'ours':>9} {'theirs':>9} {'ratio':>7}")
    for name, (ours, theirs, draws) in squares.items():
        bad = not ours <= LIMIT ** 2 * theirs
        failed += bad
        print(f"{name:42} {(ours / draws) ** 0.5:9.1e} {(theirs / draws) ** 0.5:9.1e} "
              f"{(ours / theirs) ** 0.5:7.2f}" + "  FAILED" * bad)
    print(f"{len(squares) - failed} passed, {failed} failed", flush=True)
    return failed


def main():
    families = [*recurrent.FAMILIES, "hgrn2-lower-bound"]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--family", nargs="+", choices=families, default=families)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--seq-len", type=int, nargs="+", default=[200, 1024])
    p.add_argument("--hidden-size", type=int, default=1536)
    p.add_argument("--vocab-size", type=int, default=1024)
    p.add_argument("--draws", type=int, default=1, help="of each length")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--program", default="./train_foxcu")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of PyTorch")
    args = p.parse_args()
    torch.manual_seed(args.seed)
    autotune_part(0, sys.maxsize)  # a kernel's first configuration will do
    failed = 0
    for family in args.family:
        squares = defaultdict(lambda: np.zeros(3))
        for length in args.seq_len * args.draws:
            compare(args, family, length, squares)
        failed += report(family, squares)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
