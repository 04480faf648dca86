"""
Compares the errors of the GPU trainer's bf16 arithmetic with those of PyTorch's autocast, relative to
float64.

The trainer (with --dump), fox.py in float64 and fox.py under autocast run one forward and backward pass on
the same weights and tokens. The error of a tensor is ||x - exact|| / ||exact||. A tensor passes if the
trainer's error is at most twice autocast's. Squared errors are summed over several draws, because in one draw
a small tensor may be accurate by chance.

    accuracy.py --family fox-pro                    random weights, 4096 random tokens, the width of 125m
    accuracy.py --family fox-pro --num-heads 6      with a head size of 128
    accuracy.py --family fox-pro --fp8              the errors of gradients with --fp8 beside them, without a limit
    accuracy.py --fixture dev/test/fixtures/model/fox-pro-dh64      a fixture, with the stored float64 results
    accuracy.py --program ./train_fox --device cpu --seq-len 64 --hidden-size 64 --num-heads 1
                                                    the CPU trainer, without a GPU
"""
import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.utils.checkpoint import checkpoint

import fox

LIMIT = 2  # maximum ratio of the trainer's error to autocast's

# ----------------------------------------------------------------------------
# fox.py under autocast, with the precautions of a careful user

naive_attention, naive_rope = fox.attention, fox.rope


def one_head(q, k, v, cum_logf, window):
    """Attention with the precision of a fused kernel: under autocast bf16 inputs and outputs, fp32 inside."""
    device, mixed = q.device.type, torch.is_autocast_enabled(q.device.type)
    with torch.autocast(device, enabled=False):
        if mixed:
            q, k, v = (x.bfloat16().float() for x in (q, k, v))
        o = naive_attention(q, k, v, cum_logf, window)
    return o.bfloat16() if mixed else o


def attention(q, k, v, cum_logf, window=None):
    """One head at a time, recomputed in the backward pass: the matrices of all heads exceed GPU memory."""
    gates = repeat(None) if cum_logf is None else cum_logf.split(1, dim=1)
    heads = zip(*(x.split(1, dim=1) for x in (q, k, v)), gates)
    return torch.cat([checkpoint(one_head, *head, window, use_reentrant=False) for head in heads], dim=1)


def rope(x, base):
    return naive_rope(x.to(torch.promote_types(x.dtype, torch.float32)), base)


fox.attention, fox.rope = attention, rope


def keep_float(model):
    """Norms, forget gates and the loss in fp32; the logits of the latter two come from bf16 matmuls."""
    for name, module in model.named_modules():
        if isinstance(module, fox.RMSNorm):
            module.register_forward_pre_hook(lambda module, args: args[0].float())
        elif name.endswith(("fgate_proj", "lm_head")):
            module.register_forward_hook(lambda module, args, out: out.float())


# ----------------------------------------------------------------------------
# the compared implementations: each returns loss, logits and grad.NAME

def run_fox(folder, tokens, targets, dtype, precision):
    model, results = fox.load(folder, dtype), {}
    if dtype == torch.float32:
        keep_float(model)
    model.register_forward_hook(lambda module, args, out: results.update(logits=out.detach()))
    with precision:
        loss = model.loss(tokens, targets)
    loss.mean().backward()
    grads = {"grad." + name: p.grad for name, p in model.named_parameters()}
    return dict(loss=loss.detach(), **results, **grads)


def write_shard(path, tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def run_program(program, folder, stream):
    """Runs the trainer on stream [B, T+1], one shard per row, so that the batch has the rows in order."""
    (B, T), dump = (stream.shape[0], stream.shape[1] - 1), folder / "dump.safetensors"
    for b, row in enumerate(stream.cpu().numpy()):
        write_shard(folder / f"tokens_{b:06}.bin", row)
    subprocess.run([program, "--init", folder, "--data", folder / "tokens_*.bin", "--dump", dump,
                    "--seq-len", str(T), "--batch-tokens", str(B * T), "--micro-batch", str(B)],
                   check=True, stdout=subprocess.DEVNULL)
    return {name if name in ("loss", "logits") else "grad." + name: x for name, x in load_file(dump).items()}


def run_fp8(program, folder, stream):
    """Gradients with --fp8, of the shards of run_program. A first step is in bf16 and measures the scales, so there are
    two epochs of one step, at a learning rate that changes no weight; with beta1 0 AdamW's first moment is the last
    step's gradient."""
    (B, T), out = (stream.shape[0], stream.shape[1] - 1), folder / "fp8"
    subprocess.run([program, "--init", folder, "--data", folder / "tokens_*.bin", "--fp8", "--out", out, "--seq-len", str(T),
                    "--batch-tokens", str(B * T), "--micro-batch", str(B), "--max-tokens", str(2 * B * T), "--lr", "0",
                    "--shuffle", "false", "--warmup-tokens", "0", "--beta1", "0", "--grad-clip", "0", "--val-every", "0",
                    "--save-every", "0"],
                   check=True, stdout=subprocess.DEVNULL)
    moments = load_file(out / "step_00000002" / "optimizer.safetensors")
    return {"grad." + name.removeprefix("exp_avg."): x for name, x in moments.items() if name.startswith("exp_avg.")}


# ----------------------------------------------------------------------------
# weights and tokens

@torch.no_grad()
def draw_family(args, folder):
    """Saves initial weights, with norms around 1 and gates that forget in 3 to 150 tokens; returns tokens."""
    model = fox.Fox(fox.make_config(args.family, vocab_size=args.vocab_size, hidden_size=args.hidden_size,
                                    num_heads=args.num_heads, num_hidden_layers=args.layers))
    for name, p in model.named_parameters():
        if "norm" in name:
            p.normal_(1, 0.1)
        elif name.endswith("bias"):
            p.copy_(torch.linspace(1, 5, args.num_heads))
    fox.save(model, folder)
    return torch.randint(args.vocab_size, (1, args.seq_len + 1))


@torch.no_grad()
def draw_fixture(args, folder, nudged):
    """Saves the fixture, weights changed by 1% if nudged; returns tokens and expected results or None."""
    expected = load_file(args.fixture / "expected.safetensors")
    model = fox.load(args.fixture, torch.float32)
    for w in model.state_dict().values() if nudged else ():
        w *= torch.empty_like(w).normal_(1, 1e-2)
    fox.save(model, folder)
    stream = np.concatenate((expected["tokens"], expected["targets"][:, -1:]), axis=1)
    return torch.from_numpy(stream).long(), None if nudged else expected


def compare(args, folder, draw, squares):
    """Adds one draw to squares[name]: sums of squares of our error, autocast's error, exact values, and the error with
    --fp8, 0 without it."""
    with torch.device("cpu"):
        torch.manual_seed(args.seed + draw)
        stream, exact = (draw_fixture(args, folder, draw > 0) if args.fixture else
                         (draw_family(args, folder), None))
    torch.cuda.empty_cache()  # releases memory of the previous draw, which the trainer may need
    ours = run_program(args.program, folder, stream)
    in_fp8 = run_fp8(args.program, folder, stream) if args.fp8 else {}
    batch = stream.to(args.device)
    batch = batch[:, :-1], batch[:, 1:]
    autocast = run_fox(folder, *batch, torch.float32, torch.autocast(args.device, torch.bfloat16))
    exact = exact or run_fox(folder, *batch, torch.float64, nullcontext())
    for name in autocast:
        if name == "logits" and name not in ours:  # too large for the dump
            continue
        a, b, x, f = (torch.as_tensor(run[name]).to(args.device).double()
                      for run in (ours, autocast, exact, in_fp8 if name in in_fp8 else exact))
        assert a.shape == x.shape, f"{name}: the dump has shape {tuple(a.shape)}, not {tuple(x.shape)}"
        squares[name] += np.array([y.square().sum().item() for y in (a - x, b - x, x, f - x)])


def report(squares):
    """Prints the table; returns the number of tensors that failed."""
    ratios = {}
    print(f"{'tensor':52} {'ours':>9} {'autocast':>9} {'ratio':>7} {'--fp8':>9}")
    for name, (ours, autocast, exact, in_fp8) in squares.items():
        ratios[name] = (ours / autocast) ** 0.5
        print(f"{name:52} {(ours / exact) ** 0.5:9.1e} {(autocast / exact) ** 0.5:9.1e} {ratios[name]:7.2g}"
              + (f" {(in_fp8 / exact) ** 0.5:9.1e}" if in_fp8 else "") + ("" if ratios[name] <= LIMIT else "  FAILED"))
    worst = max(ratios, key=lambda name: np.nan_to_num(ratios[name], nan=np.inf))
    failed = sum(not ratio <= LIMIT for ratio in ratios.values())
    print(f"worst ratio {ratios[worst]:.2g}, of {worst}\n{len(ratios) - failed} passed, {failed} failed")
    return failed


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--family", choices=fox.FAMILIES, default="fox-pro")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--seq-len", type=int, default=4096)
    p.add_argument("--hidden-size", type=int, default=768)
    p.add_argument("--num-heads", type=int, default=12)
    p.add_argument("--vocab-size", type=int, default=50257)
    p.add_argument("--fixture", type=Path, help="a folder of dev/test/fixtures/model [random weights]")
    p.add_argument("--fp8", action="store_true", help="report the errors of gradients with --fp8, too")
    p.add_argument("--draws", type=int, help="[3; 16 with --fixture, whose tensors are small]")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--program", default="./train_foxcu")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of PyTorch")
    args = p.parse_args()
    torch.set_default_device(args.device)  # for the masks and RoPE angles of fox.py
    squares = defaultdict(lambda: np.zeros(4))
    for draw in range(args.draws or (16 if args.fixture else 3)):
        with tempfile.TemporaryDirectory() as folder:
            compare(args, Path(folder), draw, squares)
    return 1 if report(squares) else 0


if __name__ == "__main__":
    sys.exit(main())
