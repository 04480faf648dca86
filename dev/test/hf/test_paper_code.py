"""
Tests grouped heads and tied embeddings against the paper's own code, zhixuan-lin/forgetting-transformer, which has neither: it
opens the expanded checkpoint, in which each query head has a copy of its group's keys, values, shift gates and K norm, and
lm_head is a copy of the embedding. Logits are the trainer's, and so are the gradients, those of copies summed. By hand, in an
environment of its own, as that code is written for transformers 4.44, and Triton 3.4 for NumPy 2.2:

    pip install torch==2.8.0 transformers==4.44.2 numpy==2.2.6 einops pytest
    PYTHONPATH=forgetting-transformer/src python dev/test/hf/test_paper_code.py [WORD]

WORD: only the models whose name has it. The paper's Triton kernels run in Triton's interpreter on the CPU, in fp32, which they
take and the function around them refuses. One line each; exit code 1 if any fails.
"""
import contextlib
import importlib.util
import json
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from test_hf import check_below, error, run_checks  # noqa: E402
from test_hf_trained import dump, train  # noqa: E402

MODELS = {  # by --set; heads of 16 channels, the fewest that the paper's kernels take
    "fox-pro-grouped": ("fox-pro", "num_kv_heads=2"),
    "fox-pro-one-key-head": ("fox-pro", "num_kv_heads=1", "qk_norm_share_param_across_head=true"),
    "fox-pro-grouped-rope-tied": ("fox-pro", "num_kv_heads=2", "use_rope=true", "tie_word_embeddings=true"),
    "fox-llama-grouped-bias-only": ("fox-llama", "num_kv_heads=2", "fgate_type=bias_only"),
    "transformer-pro-grouped": ("transformer-pro", "num_kv_heads=2"),
    "transformer-llama-grouped-tied": ("transformer-llama", "num_kv_heads=2", "tie_word_embeddings=true"),
}


def on_cpu():
    """What the paper's code asks of a GPU: one configuration a kernel, which nothing times; formulas that are compiled there."""
    tune = triton.autotune
    triton.autotune = lambda configs, key, **options: tune(configs[:1], key, **options)
    torch.cpu.device = torch.cuda.device = lambda index: contextlib.nullcontext()
    torch.cuda.device_of = lambda tensor: None
    torch.cuda.get_device_capability = lambda *index: (9, 0)
    torch.cuda.jiterator = SimpleNamespace(_create_jit_fn=lambda code: glu(code, 1),
                                           _create_multi_output_jit_fn=lambda code, num_outputs: glu(code, num_outputs))


def glu(code, outputs):
    """z = act(x) y and its gradients dx, dy, for act x sigmoid(x) or sigmoid(x)"""
    def function(x, y, g=None):
        s = x.sigmoid()
        act, slope = (x * s, s * (1 + x * (1 - s))) if "swiglu" in code else (s, s * (1 - s))
        return act * y if outputs == 1 else (slope * g * y, act * g, act * y)[:outputs]
    return function


def expand(name, x, heads, key_heads):
    """A tensor with a copy of its group's rows for each query head, where it has those of key heads."""
    grouped = any(part in name for part in ("k_proj", "v_proj", "k_norm")) and x.shape[0] % key_heads == 0
    if not grouped or ("k_norm" in name and x.shape[0] == 16):
        return x
    return x.unflatten(0, (key_heads, -1)).repeat_interleave(heads // key_heads, 0).flatten(0, 1)


def fold(name, grad, of, heads, key_heads):
    """The gradient of a tensor of this shape: the sum of its copies'."""
    if grad.shape == of.shape:
        return grad
    return grad.unflatten(0, (key_heads, heads // key_heads, -1)).sum(1).flatten(0, 1)


def check_model(name, work):
    from forgetting_transformer.model.forgetting_transformer import modeling_forgetting_transformer as paper
    from forgetting_transformer.model.forgetting_transformer import fuse_norm_gate, layernorm
    from forgetting_transformer.ops.forgetting_attention import ForgettingAttention
    fuse_norm_gate.get_multiprocessor_count = layernorm.get_multiprocessor_count = lambda *index: 1
    preset, *settings = MODELS[name]
    sizes = ("hidden_size=64", "num_hidden_layers=2", "num_heads=4", "initializer_range=0.2")
    checkpoint = train(work, name, "--model", preset + "-nano", *(w for s in (*sizes, *settings) for w in ("--set", s)))
    dumped, tokens, targets = dump(checkpoint, work)
    config = json.loads((checkpoint / "config.json").read_text())
    heads, key_heads = config["num_heads"], config["num_kv_heads"]
    stored = load_file(checkpoint / "model.safetensors")
    weights = {key: expand(key, x, heads, key_heads) for key, x in stored.items()}
    tied = "lm_head.weight" not in weights
    weights.setdefault("lm_head.weight", weights["model.embeddings.weight"].clone())
    model = paper.ForgettingTransformerForCausalLM(paper.ForgettingTransformerConfig(**{
        **config, "num_kv_heads": None, "tie_word_embeddings": False, "use_cache": False, "log_pruning_tolerance": None}))
    model.load_state_dict(weights)
    paper.forgetting_attention = lambda q, k, v, log_gates, head_first, sm_scale, adaptive_threshold: (
        ForgettingAttention.apply(q, k, v, log_gates, None, True, sm_scale, None, False, False, None, False, False))
    logits = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    if tied:
        grads["model.embeddings.weight"] += grads.pop("lm_head.weight")
    errors = {"logits": error(logits.detach(), dumped["logits"])}
    for key, x in stored.items():
        errors[key] = error(fold(key, grads[key], x, heads, key_heads), dumped[key])
    worst = check_below(3e-5, "the paper's code", errors)
    return f"logits {errors['logits']:.1e}, all {worst:.1e}"


if __name__ == "__main__":
    if not importlib.util.find_spec("forgetting_transformer"):
        sys.exit("skipped: zhixuan-lin/forgetting-transformer is not in PYTHONPATH")
    on_cpu()
    run_checks(list(MODELS), check_model)
