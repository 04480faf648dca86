"""
Regenerates dev/test/fixtures/model/: one folder per fixture, with a checkpoint (config.json,
model.safetensors) and the results of fox.py, recurrent.py or stack.py in float64 (expected.safetensors). README.md describes the
tensors.

    python dev/reference/make_fixtures.py [NAME...]    all fixtures, or those named
"""
import copy
import sys
import zlib
from collections import defaultdict
from pathlib import Path

try:
    import numpy as np
    import torch
    from safetensors.numpy import save_file
except ModuleNotFoundError as e:
    sys.exit(f"error: Python package {e.name} is missing: "
             "pip install -c scripts/requirements.txt numpy torch safetensors")

import fox  # noqa: E402
import recurrent  # noqa: E402
import stack  # noqa: E402

OUT = Path(__file__).resolve().parents[1] / "test/fixtures/model"
STEPS = 3
NUDGES = 64  # number of float32 runs for each float32_error

# ----------------------------------------------------------------------------
# the fixtures: the four families, and variants that flip one switch each

V, END = 40, 39
TINY = dict(vocab_size=V, hidden_size=16, num_heads=2, num_hidden_layers=2, intermediate_size=24,
            bos_token_id=END, eos_token_id=END)
WIDE = dict(TINY, hidden_size=128, num_hidden_layers=1, intermediate_size=64)

LLAMA_WITH = {
    "gate-full": dict(fgate_type="full"),
    "gate-full-long": dict(fgate_type="full", fgate_bias_init=True, decay_time_min=4.0, decay_time_max=128.0),
    "gate-bias-only": dict(fgate_type="bias_only"),
    "gate-fixed": dict(fgate_type="fixed", fgate_bias_init=True, decay_time_min=2.0, decay_time_max=256.0),
    "qk-norm": dict(qk_norm=True),
    "qk-norm-shared": dict(qk_norm=True, qk_norm_share_param_across_head=True),
    "output-norm": dict(use_output_norm=True),
    "output-gate": dict(use_output_gate=True),
    "k-shift": dict(use_k_shift=True),
    "v-shift": dict(use_v_shift=True),
    "no-rope": dict(use_rope=False),
    "window": dict(window_size=5),
    "window-whole": dict(window_size=64),  # longer than the sequence
    "grouped": dict(num_heads=4, num_kv_heads=2),
    "tied": dict(tie_word_embeddings=True),
}
PRO_WITH = {
    "rope": dict(use_rope=True),
    "qk-norm-shared": dict(qk_norm_share_param_across_head=True),
    "gate-bias-only": dict(fgate_type="bias_only"),
    "no-gate": dict(fgate_type="none"),
    "no-qk-norm": dict(qk_norm=False),
    "no-output-norm": dict(use_output_norm=False),
    "no-output-gate": dict(use_output_gate=False),
    "no-k-shift": dict(use_k_shift=False),
    "no-v-shift": dict(use_v_shift=False),
    "window": dict(window_size=7),
    "window-whole": dict(window_size=64),
    "grouped": dict(num_heads=4, num_kv_heads=2),
    "tied": dict(tie_word_embeddings=True),
}


def of_family(family, sizes):
    """The sizes that a recurrent family has, and those that follow from them."""
    keys = {key: value for key, value in sizes.items() if key in recurrent.FAMILIES[family]}
    if family == "hgrn2":
        keys["expand_ratio"] = sizes["hidden_size"] // sizes["num_heads"]
    if family == "mamba2":
        keys["head_dim"], keys["state_size"] = 2 * sizes["hidden_size"] // sizes["num_heads"], 12
    if family == "gated-deltanet":
        keys["head_dim"] = 6
    return keys


def fixtures():
    """Yields name, config, sequence length, whether to take optimizer steps."""
    for family in fox.FAMILIES:
        yield family, fox.make_config(family, **TINY), 19, True
    for base, changes in ("transformer-llama", LLAMA_WITH), ("fox-pro", PRO_WITH):
        for name, change in changes.items():
            yield f"{base}-{name}", fox.make_config(base, **{**TINY, **change}), 19, True
    for family in fox.FAMILIES:
        yield f"{family}-dh64", fox.make_config(family, **WIDE), 70, False
    for family in recurrent.FAMILIES:
        yield family, recurrent.make_config(family, **of_family(family, TINY)), 19, True
    yield "hgrn2-lower-bound", recurrent.make_config("hgrn2", **of_family("hgrn2", TINY), use_lower_bound=True), 19, True
    # heads of the paper's size, more tokens than the C code has in a segment
    yield "mamba2-head64", recurrent.make_config("mamba2", **of_family("mamba2", {**WIDE, "hidden_size": 64})) | dict(
        state_size=128), 70, False
    for family in ("deltanet", "hgrn2"):
        yield f"{family}-dh128", recurrent.make_config(family, **of_family(family, {**WIDE, "num_heads": 1})), 70, False
    yield "gated-deltanet-dh128", recurrent.make_config(
        "gated-deltanet", **of_family("gated-deltanet", {**WIDE, "num_heads": 1})) | dict(head_dim=128), 70, False
    yield "fox-pro-dh128", fox.make_config("fox-pro", **{**WIDE, "num_heads": 1}), 70, False
    kinds = "hgrn2", "attention:window=5:rope", "deltanet", "mamba2", "gated_deltanet", "hgrn2"
    yield "stack-all-kinds", stack.make_config(
        "fox-pro", kinds, **{key: value for key, value in TINY.items() if key != "num_hidden_layers"}, deltanet_num_heads=2,
        hgrn2_num_heads=4, hgrn2_use_lower_bound=True, mamba2_num_heads=2, mamba2_state_size=12,
        gated_deltanet_num_heads=2, gated_deltanet_head_dim=6, gated_deltanet_expand_v=2), 19, False
    yield "fox-pro-grouped-dh64", fox.make_config(
        "fox-pro", **{**WIDE, "num_kv_heads": 1}), 70, False


# ----------------------------------------------------------------------------
# the inputs: drawn by numpy with one seed per tensor name; tensors common to two fixtures are equal

def seeded(name):
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))


@torch.no_grad()
def draw_weights(model):
    """Weights for which every module matters: activations around 1, gates half open, uneven attention."""
    long_gate = model.config.get("fgate_type") == "full" and model.config["fgate_bias_init"]
    for name, w in model.state_dict().items():
        if "norm" in name:
            w.copy_(torch.from_numpy(seeded(name).uniform(0.5, 1.5, w.shape)))
        elif name.endswith(("lower_bounds", "dt_bias", "conv1d.bias")):
            w.copy_(torch.from_numpy(seeded(name).normal(0, 1, w.shape)))
        elif name.endswith("A_log"):
            w.copy_(torch.from_numpy(seeded(name).normal(-1, 0.5, w.shape)))
        elif w.dim() >= 2:
            fan_in = 1 if "embeddings" in name else w[0].numel()
            w.copy_(torch.from_numpy(seeded(name).normal(0, fan_in ** -0.5, w.shape)))
        elif not long_gate:
            w.copy_(torch.from_numpy(seeded(name).normal(1.5, 0.5, w.shape)))


def draw_batch(T, B=2):
    stream = torch.from_numpy(seeded(f"tokens {T}").integers(0, V, (B, T + 1)))
    return stream[:, :-1], stream[:, 1:]


# ----------------------------------------------------------------------------
# the expected results

def run(model, tokens, targets):
    """Returns loss, logits and grad.NAME of one forward and backward pass."""
    model.zero_grad()
    with torch.no_grad():
        logits = model(tokens)
    loss = model.loss(tokens, targets)
    loss.mean().backward()
    grads = {"grad." + name: p.grad.clone() for name, p in model.named_parameters()}
    return dict(loss=loss.detach(), logits=logits, **grads)


def float32_errors(model, tokens, targets, expected):
    """Errors of float32 for each tensor of run, relative to expected: RMS over NUDGES nudged models."""
    squares = defaultdict(list)
    for i in range(NUDGES):
        single = copy.deepcopy(model).float()
        for name, w in single.state_dict().items():
            w *= torch.from_numpy(seeded(f"nudge {i} {name}").normal(1, 1e-3, w.shape))
        exact = run(copy.deepcopy(single).double(), tokens, targets)
        for name, x in run(single, tokens, targets).items():
            squares[name].append((x - exact[name]).square().sum() / expected[name].square().sum())
    errors = {"float32_error." + name: torch.stack(square).mean().sqrt() for name, square in squares.items()}
    return errors | dict(float32_error_worst=max(errors.values()))


def train(model, tokens, targets):
    """AdamW steps on one batch; returns losses before, between and after, gradient norms, final weights."""
    groups = recurrent.parameter_groups(model, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(run(model, tokens, targets)["loss"].mean())
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
        for p in model.parameters():
            p.grad *= min(1, 1 / norms[-1])  # not clip_grad_norm_: it adds 1e-6 to the norm
        optimizer.step()
    losses.append(run(model, tokens, targets)["loss"].mean())
    weights = {f"step{STEPS}.{name}": w for name, w in fox.tensors(model).items()}
    return dict(losses=torch.stack(losses), grad_norms=torch.stack(norms), **weights)


def make(name, config, T, steps):
    reference, kind = ((stack, stack.Stack) if "layer_types" in config else
                       (recurrent, recurrent.Recurrent) if "model_type" in config else (fox, fox.Fox))
    drawn = kind(config)
    draw_weights(drawn)
    reference.save(drawn, OUT / name)
    model = reference.load(OUT / name)
    tokens, targets = draw_batch(T)
    expected = run(model, tokens, targets)
    expected |= float32_errors(model, tokens, targets, expected)
    if steps:
        expected |= train(model, tokens, targets)
    expected |= dict(tokens=tokens.int(), targets=targets.int())
    save_file({key: x.numpy() for key, x in expected.items()}, OUT / name / "expected.safetensors")
    print(f"{name}: loss {expected['loss'].mean():.4f}, float32 error {expected['float32_error_worst']:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fixed order of summation, so that each run writes the same files
    torch.manual_seed(0)
    for fixture in fixtures():
        if not sys.argv[1:] or fixture[0] in sys.argv[1:]:
            make(*fixture)
