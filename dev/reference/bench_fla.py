"""
Forward and backward passes of the recurrent baselines by flash-linear-attention, with Triton kernels, beside
the trainer's: the comparison in dev/SPEED.md. compare_fla.py compares their results.

    pip install flash-linear-attention mamba-ssm causal-conv1d      # the last two for Mamba-2 alone
    python dev/reference/bench_fla.py --family mamba2 hgrn2 deltanet gated-deltanet [--compile] [--program ./train_foxcu]

Weights and tokens are random; matrices and activations are bf16, nothing is recomputed but what
flash-linear-attention always recomputes, and no optimizer runs. Its vocabulary has 50304 entries, for an
aligned lm_head; the trainer pads its own. Each figure is the median of several passes. A model runs in a
process of its own, so that one that fails does not stop the others.

Triton compiles the configurations of its autotuning one after another, which takes minutes. Here several
processes compile a part each before (--workers); the timed process finds them in Triton's cache.
"""
import argparse
import importlib.util
import re
import statistics
import subprocess
import sys
import types

import torch
import triton
from triton.runtime.autotuner import Autotuner, OutOfResources

import recurrent

# ----------------------------------------------------------------------------
# flash-linear-attention's models from our configs and weights


def find_mamba_kernels():
    """Lets mamba_ssm's Triton kernels be imported without its compiled extension, which they do not use."""
    spec = "mamba_ssm" not in sys.modules and importlib.util.find_spec("mamba_ssm")
    if spec and not importlib.util.find_spec("selective_scan_cuda"):
        sys.modules["mamba_ssm"] = package = types.ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)


def fla_model(config):
    """The model of a config of recurrent.py: matrices and convolutions bf16, vectors fp32."""
    find_mamba_kernels()
    import fla.models as models
    keys = {key: x for key, x in config.items() if key not in ("architectures", "model_type")}
    if "layer_norm_epsilon" in keys:
        # Its residual stream is bf16 as ours: an fp32 stream needs autocast.
        keys.update(norm_eps=keys["layer_norm_epsilon"], residual_in_fp32=False)
        model = models.Mamba2ForCausalLM(models.Mamba2Config(**keys))
        # Training needs causal-conv1d. Without it: the path of evaluation, with a Triton convolution.
        model.train(importlib.util.find_spec("causal_conv1d_cuda") is not None)
    elif "allow_neg_eigval" in keys:
        model = models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig(**keys))
    elif "expand_ratio" in keys:
        model = models.HGRN2ForCausalLM(models.HGRN2Config(**keys))
    else:
        model = models.DeltaNetForCausalLM(models.DeltaNetConfig(**keys))
    for name, p in model.named_parameters():
        if (p.ndim > 1 or "conv1d" in name) and not name.endswith("lower_bounds"):
            p.data = p.data.bfloat16()
    return model


def size_config(family, size):
    """The config of one of the published sizes."""
    sizes = dict(zip(("125m", "360m", "760m"), recurrent.SIZES[family]))
    L, d, h = sizes[size]
    return recurrent.make_config(family, num_hidden_layers=L, hidden_size=d, num_heads=h, vocab_size=50304)


# ----------------------------------------------------------------------------
# autotuning


def autotune_part(part, parts):
    """This process tries every parts-th configuration of a kernel; all, if none of these fits the GPU."""
    prune, run = Autotuner.prune_configs, Autotuner.run

    def prune_part(self, kwargs):
        configs = list(prune(self, kwargs))
        return configs if self in whole else configs[part::parts] or configs[:1]

    def run_part(self, *args, **kwargs):
        try:
            return run(self, *args, **kwargs)
        except OutOfResources:
            whole.append(self)
            self.cache.clear()
            return run(self, *args, **kwargs)

    whole = []
    Autotuner.prune_configs, Autotuner.run = prune_part, run_part


def shorten_autotuning():
    """Times a configuration for 10 ms instead of 100."""
    do_bench = triton.testing.do_bench
    triton.testing.do_bench = lambda call, **options: do_bench(call, **{**options, "warmup": 2, "rep": 10})


# ----------------------------------------------------------------------------
# time


def one_pass(model, tokens):
    model(tokens, labels=tokens, use_cache=False).loss.sum().backward()
    model.zero_grad(set_to_none=True)


def milliseconds(model, tokens, passes):
    """Median time of a forward and backward pass."""
    times = []
    for _ in range(passes):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        one_pass(model, tokens)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def report(name, ms, tokens):
    peak = torch.cuda.max_memory_allocated() / 2**30  # 0 of the trainer
    memory = f" {peak:8.1f} GiB" if peak else ""
    print(f"{name:44} {ms:9.2f} ms {1e3 * tokens / ms:10.0f} tokens/s{memory}", flush=True)


def time_fla(args, family):
    shorten_autotuning()
    config = size_config(family, args.size)
    if args.part:  # two layers have all kernels
        autotune_part(*map(int, args.part.split("/")))
        config["num_hidden_layers"] = 2
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = fla_model(config)
        tokens = torch.randint(config["vocab_size"], (1, args.seq_len))
    for compiled in range(1 + args.compile):
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # layers differ in their index
            for layer in (model.backbone if family == "mamba2" else model.model).layers:
                layer.compile()
        for _ in range(3):
            one_pass(model, tokens)
        torch.cuda.reset_peak_memory_stats()
        if not args.part:
            report(f"{family}-{args.size}, flash-linear-attention" + ", compiled" * compiled,
                   milliseconds(model, tokens, args.passes), tokens.numel())


def bench_program(args, model, *settings):
    """Milliseconds of the same by the trainer, from its --bench."""
    size = str(args.seq_len)
    output = subprocess.run(
        [args.program, "--model", model, "--bench", str(args.passes), "--seq-len", size, "--batch-tokens", size,
         "--micro-batch", "1", "--recompute", "none", *settings], check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output, flush=True)
    ms = float(re.search(r"forward and backward +([\d.]+) ms", output)[1])
    report(f"{model}, {args.program}", ms, args.seq_len)
    return ms


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--family", nargs="+", choices=recurrent.FAMILIES, default=list(recurrent.FAMILIES))
    p.add_argument("--size", choices=("125m", "360m", "760m"), default="760m")
    p.add_argument("--seq-len", type=int, default=16384)
    p.add_argument("--passes", type=int, default=7)
    p.add_argument("--compile", action="store_true", help="also each layer by torch.compile")
    p.add_argument("--program", help="the GPU trainer, timed too")
    p.add_argument("--workers", type=int, default=5, help="processes for each model's autotuning [5]")
    p.add_argument("--tune", type=int, default=120, help="seconds that they may take [120]")
    p.add_argument("--part", help=argparse.SUPPRESS)
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        return time_fla(args, *args.family)
    sizes = ["--size", args.size, "--seq-len", str(args.seq_len), "--passes", str(args.passes)]
    commands = {family: [sys.executable, __file__, "--worker", *sizes, "--family", family]
                for family in args.family}
    parts = [subprocess.Popen(["timeout", str(args.tune), *command, "--part", f"{i}/{args.workers}",
                               *["--compile"] * (args.compile and i == 0)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
             for command in commands.values() for i in range(args.workers)]
    for part in parts:
        part.wait()
    failed = 0
    for family, command in commands.items():
        if args.program:
            bench_program(args, f"{family}-{args.size}")
        failed += subprocess.run(command + ["--compile"] * args.compile).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
