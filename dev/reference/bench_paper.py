"""
Forward and backward passes of the paper's own code, PyTorch and Triton, and of a LLaMA by torch.compile with cuDNN's
attention, beside the trainer's: the first table of README.md.

    git clone https://github.com/zhixuan-lin/forgetting-transformer paper     # needs einops and transformers
    PYTHONPATH=paper/src python dev/reference/bench_paper.py --program ./train_foxcu [unpruned spread llama]

unpruned     fox-pro with pruning off
spread       fox-pro whose gates forget in 2 to T tokens, log-spaced over heads; each program prunes by its own rule
llama        transformer-llama; beside it transformers' Llama in bf16, compiled as a whole

Weights and tokens are random, no optimizer runs. The paper's code has fp32 weights and autocast to bf16, as it trains, and
no checkpointed blocks. Each program runs in a process of its own, the trainer before and behind the other one; each figure
is the median of several passes, of the trainer their mean.
"""
import argparse
import contextlib
import json
import math
import re
import subprocess
import sys

import torch

import fox
from bench_fla import bench_program, milliseconds, one_pass, report

FAMILIES = {"unpruned": "fox-pro", "spread": "fox-pro", "llama": "transformer-llama"}


def settings(case, T):
    """Options of the trainer."""
    return {"unpruned": ["--set", "log_pruning_tolerance=null"],
            "spread": ["--set", "fgate_bias_init=true", "--set", "decay_time_min=2", "--set", f"decay_time_max={T}"],
            "llama": []}[case]


def read_config(args, case):
    """config.json of the trainer's model."""
    model = f"{FAMILIES[case]}-{args.size}"
    command = [args.program, "--model", model, "--dry-run", "config", *settings(case, args.seq_len)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output[output.index("\n{\n"):])


def paper_model(config):
    """The paper's code refuses the initialization of full gates: it is done here."""
    from forgetting_transformer.model.forgetting_transformer import modeling_forgetting_transformer as modeling
    plain = {"use_cache": False, "fgate_bias_init": False, "decay_time_min": None, "decay_time_max": None}
    model = modeling.ForgettingTransformerForCausalLM(modeling.ForgettingTransformerConfig(**{**config, **plain}))
    if config["fgate_bias_init"]:
        logs = torch.linspace(math.log(config["decay_time_min"]), math.log(config["decay_time_max"]), config["num_heads"])
        for layer in model.model.layers:
            layer.attn.fgate_proj.bias.data.copy_(-torch.log(torch.expm1(torch.exp(-logs))))
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
    return model


def causal_attention(module, q, k, v, mask, scaling=None, **_):
    """transformers' own sdpa, compiled by PyTorch before 2.14, has a mask of T x T, which flash kernels do not take."""
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    return y.transpose(1, 2), None


def llama_model(config, T):
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    AttentionInterface.register("causal", causal_attention)  # a name without a function for masks gets none
    keys = ("vocab_size", "hidden_size", "num_hidden_layers")
    model = LlamaForCausalLM(LlamaConfig(
        **{key: config[key] for key in keys}, intermediate_size=fox.intermediate_size(argparse.Namespace(**config)),
        num_attention_heads=config["num_heads"], num_key_value_heads=config["num_heads"], max_position_embeddings=T,
        rms_norm_eps=config["norm_eps"], attn_implementation="causal")).bfloat16()
    return torch.compile(model)


def time_other(args, case):
    """What the trainer is compared with."""
    config, T = read_config(args, case), args.seq_len
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    tokens = torch.randint(config["vocab_size"], (1, T))
    if case == "llama":
        from torch.nn.attention import SDPBackend, sdpa_kernel
        model, kernels, name = llama_model(config, T), sdpa_kernel(SDPBackend.CUDNN_ATTENTION), "torch.compile with cuDNN"
    else:
        model, kernels, name = paper_model(config), contextlib.nullcontext(), "the paper's code"
    with kernels:
        for _ in range(3):
            one_pass(model, tokens)
        torch.cuda.reset_peak_memory_stats()
        report(f"{FAMILIES[case]}-{args.size}, {case}, {name}", milliseconds(model, tokens, args.passes), T)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(FAMILIES) + " [all]")
    p.add_argument("--program", default="./train_foxcu", help="the GPU trainer [./train_foxcu]")
    p.add_argument("--size", choices=("125m", "360m", "760m"), default="760m")
    p.add_argument("--seq-len", type=int, default=16384)
    p.add_argument("--passes", type=int, default=7)
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if unknown := set(args.cases) - set(FAMILIES):
        p.error(f"{unknown.pop()}: not one of {', '.join(FAMILIES)}")
    if args.worker:
        return time_other(args, *args.cases)
    failed = 0
    for case in args.cases or FAMILIES:
        model = f"{FAMILIES[case]}-{args.size}"
        ours = lambda: bench_program(args, model, *settings(case, args.seq_len))
        before = ours()
        worker = [case, "--worker", "--program", args.program, "--size", args.size, "--seq-len", str(args.seq_len),
                  "--passes", str(args.passes)]
        done = subprocess.run([sys.executable, __file__, *worker], stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        after = ours()
        if found := re.search(r"([\d.]+) ms", done.stdout):
            print(f"{case}: {2 * float(found[1]) / (before + after):.2f} times as fast", flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
