"""
Reference implementation of the Forgetting Transformer and its Transformer baselines in PyTorch: about one
line per equation, attention as a full T x T matrix. It is the oracle for the C and CUDA code:
make_fixtures.py stores its results in float64. A model is built from the keys of config.json; its state_dict
has the tensors of the checkpoint.

    python dev/reference/fox.py --check    checks parameter counts, causality and gradients of this file
"""
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file

# ----------------------------------------------------------------------------
# config.json

DEFAULTS = dict(
    vocab_size=50257, hidden_size=768, hidden_ratio=4, intermediate_size=None, num_hidden_layers=12,
    num_heads=12, num_kv_heads=None, hidden_act="swish", window_size=None, max_position_embeddings=None,
    initializer_range=0.02, norm_eps=1e-6, rope_base=500000.0, use_rope=False, use_output_gate=False,
    ogate_act="sigmoid", use_output_norm=False, qk_norm=False, qk_norm_share_param_across_head=False,
    use_k_shift=False, use_v_shift=False, fgate_type="full", fgate_bias_init=False, decay_time_min=None,
    decay_time_max=None, log_pruning_tolerance=None, tie_word_embeddings=False, bos_token_id=None,
    eos_token_id=None)
PRO = dict(qk_norm=True, use_output_norm=True, use_output_gate=True, use_k_shift=True, use_v_shift=True,
           hidden_ratio=3.5)
FAMILIES = {
    "fox-pro": dict(fgate_type="full", use_rope=False, **PRO),
    "fox-llama": dict(fgate_type="full", use_rope=False),
    "transformer-pro": dict(fgate_type="none", use_rope=True, **PRO),
    "transformer-llama": dict(fgate_type="none", use_rope=True),
}
QK_NORM_EPS = 1e-5  # a constant in the paper's code, not in config.json


def make_config(family, **changes):
    """The config of a family, with changes."""
    unknown = changes.keys() - DEFAULTS.keys()
    assert not unknown, f"no such config key: {unknown}"
    return {**DEFAULTS, **FAMILIES[family], **changes}


def intermediate_size(c):
    return c.intermediate_size or 256 * math.ceil(math.floor(c.hidden_size * c.hidden_ratio * 2 / 3) / 256)


def long_gate_bias(c):
    """[h] gate biases for which head i decays by 1/e in T_i tokens, T_i log-spaced from T_min to T_max."""
    low, high = c.decay_time_min or 2, c.decay_time_max or 256  # the defaults give ALiBi's slopes
    times = torch.linspace(math.log(low), math.log(high), c.num_heads, dtype=torch.float64).exp()
    return -torch.log(torch.expm1(1 / times))


# ----------------------------------------------------------------------------
# modules

class RMSNorm(nn.Module):
    """RMSNorm over the last axis of x [..., d], or of x [..., h, dh] with weight [d], or [dh] if shared."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight.view(-1, x.shape[-1])


class ShiftLinear(nn.Module):
    """y_t = alpha_t y~_{t-1} + (1 - alpha_t) y~_t, y~ = W a, y~_{-1} = 0, one alpha per key head and token."""

    def __init__(self, d, width, n):
        super().__init__()
        self.linear, self.shift_proj = nn.Linear(d, width, bias=False), nn.Linear(d, n, bias=False)

    def forward(self, a):
        alpha = self.shift_proj(a).sigmoid().unsqueeze(-1)             # [B, T, n, 1]
        current = self.linear(a).unflatten(-1, (alpha.shape[2], -1))   # [B, T, n, dh]
        previous = F.pad(current, (0, 0, 0, 0, 1, -1))
        return torch.lerp(current, previous, alpha).flatten(2)


def rope(x, base):
    """Rotates pairs (i, i + dh/2) of x [B, T, h, dh] by angles t base^(-2i/dh), computed in float64."""
    T, half = x.shape[1], x.shape[3] // 2
    angle = torch.arange(T).double()[:, None, None] * base ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def attention(q, k, v, cum_logf, window):
    """
    q, k, v [B, h, T, dh]; cum_logf [B, h, T] in float64, the running sum of log gates, or None. A token attends to
    itself and the window - 1 tokens before it; None: to all before it.
    """
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if cum_logf is not None:
        s = s + (cum_logf[..., :, None] - cum_logf[..., None, :]).to(s)
    ones = torch.ones(s.shape[-2:], dtype=torch.bool)
    hidden = ones.triu(1) | ones.tril(-window) if window else ones.triu(1)
    return s.masked_fill(hidden, -math.inf).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, h = c.hidden_size, c.num_heads
        n = c.num_kv_heads or h  # heads of keys and values
        width = n * (d // h)
        self.c = c
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = ShiftLinear(d, width, n) if c.use_k_shift else nn.Linear(d, width, bias=False)
        self.v_proj = ShiftLinear(d, width, n) if c.use_v_shift else nn.Linear(d, width, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        if c.qk_norm:
            shared = c.qk_norm_share_param_across_head
            self.q_norm = RMSNorm(d // h if shared else d, QK_NORM_EPS)
            self.k_norm = RMSNorm(d // h if shared else width, QK_NORM_EPS)
        if c.use_output_norm:
            self.output_norm = RMSNorm(d, c.norm_eps)
        if c.use_output_gate:
            self.ogate_proj = nn.Linear(d, d, bias=False)
        if c.fgate_type == "full":
            self.fgate_proj = nn.Linear(d, h)
        elif c.fgate_type == "bias_only":
            self.fgate_bias = nn.Parameter(torch.zeros(h))
        elif c.fgate_type == "fixed":  # a buffer: stored in the checkpoint but not trained
            self.register_buffer("fgate_bias", long_gate_bias(c).to(torch.get_default_dtype()))

    def log_gate(self, a):
        """[B, T, h]"""
        z = self.fgate_proj(a) if self.c.fgate_type == "full" else self.fgate_bias.expand(*a.shape[:2], -1)
        return F.logsigmoid(z)

    def forward(self, a):
        c = self.c
        dh = c.hidden_size // c.num_heads
        q, k, v = (p(a).unflatten(-1, (-1, dh)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.use_rope:
            q, k = rope(q, c.rope_base), rope(k, c.rope_base)
        k, v = (x.repeat_interleave(c.num_heads // x.shape[2], dim=2) for x in (k, v))
        cum_logf = None if c.fgate_type == "none" else self.log_gate(a).double().cumsum(1).mT
        o = attention(*(x.transpose(1, 2) for x in (q, k, v)), cum_logf, c.window_size).transpose(1, 2)
        if c.use_output_norm:
            o = self.output_norm(o)
        o = o.flatten(2)
        if c.use_output_gate:
            o = o * self.ogate_proj(a).sigmoid()
        return self.o_proj(o)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, I = c.hidden_size, intermediate_size(c)
        self.gate_proj, self.down_proj = nn.Linear(d, 2 * I, bias=False), nn.Linear(I, d, bias=False)

    def forward(self, m):
        g, u = self.gate_proj(m).chunk(2, dim=-1)
        return self.down_proj(F.silu(g) * u)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(c.hidden_size, c.norm_eps), Attention(c)
        self.mlp_norm, self.mlp = RMSNorm(c.hidden_size, c.norm_eps), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


# ----------------------------------------------------------------------------
# the model

class Fox(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = SimpleNamespace(**config)
        assert c.hidden_act == "swish" and c.ogate_act == "sigmoid"
        assert c.fgate_type in ("full", "bias_only", "fixed", "none")
        self.config = config
        self.model = nn.ModuleDict(dict(
            embeddings=nn.Embedding(c.vocab_size, c.hidden_size),
            layers=nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers)),
            norm=RMSNorm(c.hidden_size, c.norm_eps)))
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    p.normal_(0, c.initializer_range)
                elif name.endswith("bias"):
                    p.copy_(long_gate_bias(c) if c.fgate_bias_init else torch.zeros(c.num_heads))

    def forward(self, tokens):
        """Logits [B, T, V] of tokens [B, T]."""
        x = self.model.embeddings(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))

    def loss(self, tokens, targets):
        """The cross entropy of every token, [B, T]."""
        return F.cross_entropy(self(tokens).mT, targets, reduction="none")


def parameter_groups(model, weight_decay):
    """For an optimizer: weight decay for matrices and the embedding, none for biases and norms."""
    return [dict(params=[p for p in model.parameters() if (p.dim() == 2) == decayed],
                 weight_decay=weight_decay if decayed else 0.0) for decayed in (True, False)]


def tensors(model):
    """{name: tensor} of a checkpoint: a tied lm_head is none of its own."""
    return {name: x for name, x in model.state_dict().items()
            if name != "lm_head.weight" or not model.config.get("tie_word_embeddings")}


def save(model, folder):
    """Writes config.json and model.safetensors (float32)."""
    c, folder = model.config, Path(folder)
    plain = c["fgate_type"] == "none" and not any(c[key] for key in PRO if key != "hidden_ratio")
    name = "Transformer" if plain else "ForgettingTransformer"
    head = dict(architectures=[name + "ForCausalLM"],
                model_type=("transformer" if plain else "forgetting_transformer") + "-project_fox")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**head, **c}, indent=2) + "\n")
    save_file({key: x.float().numpy() for key, x in tensors(model).items()}, folder / "model.safetensors")


def load(folder, dtype=torch.float64):
    """Loads the model of a checkpoint folder."""
    stored = json.loads((Path(folder) / "config.json").read_text())
    model = Fox({key: stored.get(key, default) for key, default in DEFAULTS.items()}).to(dtype)
    weights = load_file(Path(folder) / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embeddings.weight"])
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    return model


# ----------------------------------------------------------------------------
# checks that do not depend on the weights

# Published parameter counts without the input embedding. Key: L, d, heads of FoX, heads of the Transformer;
# values: one per family, in the order of FAMILIES
SIZES = {(12, 768, 12, 12): (123_910_800, 123_661_968, 123_800_064, 123_551_232),
         (24, 1024, 16, 16): (367_339_904, 360_188_288, 366_946_304, 359_794_688),
         (24, 1536, 24, 12): (759_512_640, 757_632_576, 757_742_592, 756_747_264)}


def check_sizes():
    for (L, d, *heads), counts in SIZES.items():
        for (family, switches), count in zip(FAMILIES.items(), counts):
            h = heads[switches["fgate_type"] == "none"]
            with torch.device("meta"):
                model = Fox(make_config(family, num_hidden_layers=L, hidden_size=d, num_heads=h))
            found = sum(p.numel() for p in model.lm_head.parameters()) + \
                sum(p.numel() for name, p in model.model.named_parameters() if name != "embeddings.weight")
            assert found == count, f"{family} with d {d} has {found} parameters, not {count}"


def check_model(name, model):
    model, config = model.double(), model.config
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    tokens, targets = torch.randint(config["vocab_size"], (2, 2, 6))

    # causality: changing a token changes no earlier loss
    loss = model.loss(tokens, targets)
    for t in range(1, tokens.shape[1]):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % config["vocab_size"]
        difference = (model.loss(changed, targets) - loss).abs()
        assert difference[:, :t].max() == 0 and difference[:, t:].min() > 0, f"{name}: token {t} leaks"

    # all gradients against finite differences
    names, values = zip(*((n, p.detach().requires_grad_()) for n, p in model.named_parameters()))
    run = lambda *ps: F.cross_entropy(
        torch.func.functional_call(model, dict(zip(names, ps)), (tokens,)).mT, targets, reduction="none")
    assert torch.autograd.gradcheck(run, values, fast_mode=True), name
    print(f"{name}: causal; gradients agree with finite differences")


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        sys.exit(__doc__)
    torch.manual_seed(1)
    check_sizes()
    print("parameter counts: as published")
    tiny = dict(vocab_size=7, hidden_size=8, num_heads=2, num_hidden_layers=2, intermediate_size=5)
    for family in FAMILIES:
        check_model(family, Fox(make_config(family, **tiny)))
    for change in (dict(fgate_type="bias_only", use_rope=True),
                   dict(fgate_type="fixed", qk_norm_share_param_across_head=True), dict(window_size=3),
                   dict(num_heads=4, num_kv_heads=2)):
        check_model(f"fox-pro with {change}", Fox(make_config("fox-pro", **{**tiny, **change})))
