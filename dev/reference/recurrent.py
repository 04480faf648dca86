"""
Reference implementation of the recurrent baselines, DeltaNet, Gated DeltaNet, HGRN2 and Mamba-2, in PyTorch: the recurrence token by
token, about one line per equation. The counterpart of fox.py, from which norms and MLP come; make_fixtures.py stores
its results in float64. A model is built from the keys of config.json; its state_dict has the tensors of the
checkpoint.

    python dev/reference/recurrent.py --check    checks parameter counts, causality and gradients of this file
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

import fox

# ----------------------------------------------------------------------------
# config.json

ENDS = dict(initializer_range=0.02, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
SHELL = dict(hidden_ratio=4, intermediate_size=None, hidden_act="swish", norm_eps=1e-6)
FAMILIES = {
    "deltanet": dict(
        architectures=["DeltaNetForCausalLM"], model_type="delta_net-project_fox", vocab_size=50257, hidden_size=768,
        num_hidden_layers=12, num_heads=6, attn_mode="chunk", expand_k=1, expand_v=1, use_gate=False,
        use_short_conv=True, conv_size=4, use_beta=True, use_output_norm=True, qk_norm="l2", qk_activation="silu",
        **SHELL, **ENDS),
    "hgrn2": dict(
        architectures=["HGRN2ForCausalLM"], model_type="hgrn2-project_fox", vocab_size=50257, hidden_size=768,
        num_hidden_layers=12, num_heads=6, attn_mode="chunk", expand_ratio=128, use_short_conv=False,
        use_lower_bound=False, elementwise_affine=True, **SHELL, **ENDS),
    "mamba2": dict(
        architectures=["Mamba2ForCausalLM"], model_type="mamba2-project_fox", vocab_size=50257, hidden_size=768,
        num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1, expand=2, conv_kernel=4,
        use_bias=False, use_conv_bias=True, hidden_act="silu", layer_norm_epsilon=1e-5, residual_in_fp32=True,
        time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4, rescale_prenorm_residual=True, chunk_size=256,
        **ENDS),
    "gated-deltanet": dict(
        architectures=["GatedDeltaNetForCausalLM"], model_type="gated_deltanet", vocab_size=50257, hidden_size=768,
        num_hidden_layers=11, num_heads=4, attn_mode="chunk", head_dim=128, expand_v=2, num_v_heads=None, use_gate=True,
        use_short_conv=True, conv_size=4, allow_neg_eigval=False, attn=None, **SHELL, **ENDS),
}


def make_config(family, **changes):
    """The config of a family, with changes."""
    unknown = changes.keys() - FAMILIES[family].keys()
    assert not unknown, f"no such config key: {unknown}"
    return {**FAMILIES[family], **changes}


# ----------------------------------------------------------------------------
# mixers: x [B, T, d] -> [B, T, d]

class CausalConv(nn.Conv1d):
    """silu(conv4(x)) of x [B, T, C], each channel alone."""

    def __init__(self, channels, bias):
        super().__init__(channels, channels, 4, groups=channels, bias=bias, padding=3)

    def forward(self, x):
        return F.silu(super().forward(x.mT)[..., :x.shape[1]]).mT


class DeltaNet(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        d, self.h = c.hidden_size, c.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.b_proj = nn.Linear(d, self.h, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (CausalConv(d, bias=False) for _ in range(3))
        self.o_norm = fox.RMSNorm(d // self.h, c.norm_eps)

    def forward(self, a):
        q, k, v = (conv(p(a)).unflatten(-1, (self.h, -1)) for conv, p in (  # [B, T, h, dh]
            (self.q_conv1d, self.q_proj), (self.k_conv1d, self.k_proj), (self.v_conv1d, self.v_proj)))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        beta = self.b_proj(a).sigmoid().unsqueeze(-1)
        S, o = torch.zeros_like(v[:, 0, :, :, None] * k[:, 0, :, None, :]).mT, []  # [B, h, K, V]
        for t in range(a.shape[1]):
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t] * k[:, t], error)
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / math.sqrt(k.shape[-1]))
        return self.o_proj(self.o_norm(torch.stack(o, 1)).flatten(2))


class GatedDeltaNet(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        d, self.h = c.hidden_size, c.num_heads
        kd, vd = self.h * c.head_dim, self.h * c.head_dim * c.expand_v
        self.q_proj, self.k_proj = (nn.Linear(d, kd, bias=False) for _ in range(2))
        self.v_proj, self.g_proj = (nn.Linear(d, vd, bias=False) for _ in range(2))
        self.a_proj, self.b_proj = (nn.Linear(d, self.h, bias=False) for _ in range(2))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (CausalConv(n, bias=False) for n in (kd, kd, vd))
        self.A_log, self.dt_bias = (nn.Parameter(torch.ones(self.h)) for _ in range(2))
        self.o_norm, self.o_proj = fox.RMSNorm(vd // self.h, c.norm_eps), nn.Linear(vd, d, bias=False)

    def forward(self, a):
        q, k, v = (conv(p(a)).unflatten(-1, (self.h, -1)) for conv, p in (  # [B, T, h, dh or dv]
            (self.q_conv1d, self.q_proj), (self.k_conv1d, self.k_proj), (self.v_conv1d, self.v_proj)))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        beta = self.b_proj(a).sigmoid().unsqueeze(-1)
        alpha = torch.exp(-F.softplus(self.a_proj(a) + self.dt_bias) * self.A_log.exp())[..., None, None]
        S, o = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :]), []  # [B, h, K, V]
        for t in range(a.shape[1]):
            S = alpha[:, t] * S
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t] * k[:, t], error)
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / math.sqrt(k.shape[-1]))
        return self.o_proj(self.o_norm(torch.stack(o, 1)).flatten(2) * F.silu(self.g_proj(a)))


class HGRN2(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        d, self.h, self.layer = c.hidden_size, c.num_heads, layer
        self.q_proj, self.f_proj, self.i_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.g_norm = fox.RMSNorm(d, c.norm_eps)

    def forward(self, a, lower_bounds=None):
        f = self.f_proj(a).sigmoid()
        if lower_bounds is not None:
            parts = lower_bounds.softmax(0)
            bound = (parts.cumsum(0) - parts[0])[self.layer]
            f = bound + (1 - bound) * f
        q, f, v = (x.unflatten(-1, (self.h, -1)) for x in (F.silu(self.q_proj(a)), f, self.i_proj(a)))
        S, o = torch.zeros_like(v[:, 0, :, None, :] * f[:, 0, :, :, None]), []  # [B, h, K, V]
        for t in range(a.shape[1]):
            S = f[:, t, :, :, None] * S + torch.einsum("bhk,bhv->bhkv", 1 - f[:, t], v[:, t])
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / math.sqrt(f.shape[-1]))
        return self.o_proj(self.g_norm(torch.stack(o, 1).flatten(2)))


class Mamba2(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        d, di, self.h, self.N = c.hidden_size, 2 * c.hidden_size, c.num_heads, c.state_size
        self.in_proj = nn.Linear(d, 2 * di + 2 * self.N + self.h, bias=False)
        self.conv1d = CausalConv(di + 2 * self.N, bias=True)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.ones(self.h)) for _ in range(3))
        self.norm, self.out_proj = fox.RMSNorm(di, c.layer_norm_epsilon), nn.Linear(di, d, bias=False)

    def forward(self, a):
        di, N, h = self.out_proj.in_features, self.N, self.h
        z, xBC, dt = self.in_proj(a).split((di, di + 2 * N, h), -1)
        x, B, C = self.conv1d(xBC).split((di, N, N), -1)
        x, step = x.unflatten(-1, (h, -1)), F.softplus(dt + self.dt_bias)
        decay = torch.exp(-step * self.A_log.exp())
        S, y = torch.zeros_like(x[:, 0, :, None, :] * B[:, 0, None, :, None]), []  # [B, h, N, P]
        for t in range(a.shape[1]):
            S = decay[:, t, :, None, None] * S + torch.einsum("bn,bhp->bhnp", B[:, t], step[:, t, :, None] * x[:, t])
            y.append(torch.einsum("bhnp,bn->bhp", S, C[:, t]) + self.D[:, None] * x[:, t])
        return self.out_proj(self.norm(torch.stack(y, 1).flatten(2) * F.silu(z)))


# ----------------------------------------------------------------------------
# the model

MIXERS = {"delta_net-project_fox": DeltaNet, "gated_deltanet": GatedDeltaNet, "hgrn2-project_fox": HGRN2}


class ApartMLP(fox.MLP):
    """The same with gate and up projection apart."""

    def __init__(self, c):
        super().__init__(c)
        I, d = self.down_proj.in_features, c.hidden_size
        self.gate_proj, self.up_proj = nn.Linear(d, I, bias=False), nn.Linear(d, I, bias=False)

    def forward(self, m):
        return self.down_proj(F.silu(self.gate_proj(m)) * self.up_proj(m))


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attn_norm, self.attn = fox.RMSNorm(c.hidden_size, c.norm_eps), MIXERS[c.model_type](c, layer)
        mlp = ApartMLP if c.model_type == "gated_deltanet" else fox.MLP
        self.mlp_norm, self.mlp = fox.RMSNorm(c.hidden_size, c.norm_eps), mlp(c)

    def forward(self, x, **of_model):
        x = x + self.attn(self.attn_norm(x), **of_model)
        return x + self.mlp(self.mlp_norm(x))


class Mamba2Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.norm, self.mixer = fox.RMSNorm(c.hidden_size, c.layer_norm_epsilon), Mamba2(c, layer)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        c = SimpleNamespace(**config)
        self.mamba = c.model_type == "mamba2-project_fox"
        block, eps = (Mamba2Block, c.layer_norm_epsilon) if self.mamba else (Block, c.norm_eps)
        shell = nn.ModuleDict(dict(
            embeddings=nn.Embedding(c.vocab_size, c.hidden_size),
            layers=nn.ModuleList(block(c, l) for l in range(c.num_hidden_layers))))
        shell["norm_f" if self.mamba else "norm"] = fox.RMSNorm(c.hidden_size, eps)
        setattr(self, "backbone" if self.mamba else "model", shell)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.model_type == "hgrn2-project_fox":  # a buffer where it is off: in the checkpoint, but not trained
            bounds = torch.zeros(c.num_hidden_layers, c.hidden_size)
            if c.use_lower_bound:
                self.model.lower_bounds = nn.Parameter(bounds)
            else:
                self.model.register_buffer("lower_bounds", bounds)

    def forward(self, tokens):
        """Logits [B, T, V] of tokens [B, T]."""
        shell = self.backbone if self.mamba else self.model
        x = shell.embeddings(tokens)
        of_model = dict(lower_bounds=self.model.lower_bounds) if self.config.get("use_lower_bound") else {}
        for block in shell.layers:
            x = block(x, **of_model)
        return self.lm_head((shell.norm_f if self.mamba else shell.norm)(x))

    loss = fox.Fox.loss


def parameter_groups(model, weight_decay):
    """For an optimizer: weight decay for matrices, convolutions and the embedding, none for the rest."""
    decays = lambda name, p: p.dim() >= 2 and not name.endswith("lower_bounds")
    return [dict(params=[p for name, p in model.named_parameters() if decays(name, p) == decayed],
                 weight_decay=weight_decay if decayed else 0.0) for decayed in (True, False)]


def save(model, folder):
    """Writes config.json and model.safetensors (float32)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    save_file({key: x.float().numpy() for key, x in model.state_dict().items()}, folder / "model.safetensors")


def load(folder, dtype=torch.float64):
    """Loads the model of a checkpoint folder."""
    model = Recurrent(json.loads((Path(folder) / "config.json").read_text())).to(dtype)
    weights = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    return model


# ----------------------------------------------------------------------------
# checks that do not depend on the weights

# Parameter counts without the input embedding, of L, d and heads.
SIZES = {"deltanet": {(12, 768, 6): 123_718_656, (24, 1024, 8): 360_289_280, (24, 1536, 12): 757_635_072},
         "hgrn2": {(12, 768, 6): 123_569_664, (24, 1024, 8): 359_843_840, (24, 1536, 12): 756_820_992},
         "mamba2": {(24, 768, 24): 128_965_824, (48, 1024, 32): 368_314_880, (48, 1536, 48): 780_113_664},
         "gated-deltanet": {(11, 768, 4): 125_283_160, (21, 1024, 6): 365_815_292, (21, 1536, 9): 771_867_258}}


def check_sizes():
    for family, sizes in SIZES.items():
        for (L, d, h), count in sizes.items():
            with torch.device("meta"):
                model = Recurrent(make_config(family, num_hidden_layers=L, hidden_size=d, num_heads=h))
            found = sum(p.numel() for name, p in model.state_dict().items() if "embeddings" not in name)
            assert found == count, f"{family} with d {d} has {found} parameters, not {count}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        sys.exit(__doc__)
    torch.manual_seed(1)
    check_sizes()
    print("parameter counts: as published")
    tiny = dict(vocab_size=7, hidden_size=8, num_heads=2, num_hidden_layers=2)
    for family in FAMILIES:
        mlp = dict(intermediate_size=5) if "intermediate_size" in FAMILIES[family] else {}
        if "expand_v" in FAMILIES[family] and family != "deltanet":
            mlp["head_dim"] = 3
        fox.check_model(family, Recurrent(make_config(family, **tiny, **mlp)))
    fox.check_model("hgrn2 with lower bounds", Recurrent(make_config("hgrn2", **tiny, use_lower_bound=True)))
