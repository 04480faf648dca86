"""
The recurrent baselines of the Forgetting Transformer for Hugging Face transformers, 4.44 and later: DeltaNet,
Gated DeltaNet, HGRN2 and Mamba-2. Model, cache and generation are those of modeling_fox.py, the configurations those of
configuration_fox.py, which both belong beside this file; here are the mixers and their blocks. Opened in the same way:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

A head keeps a state S [K, V] of its tokens so far, and token t reads o_t = S_t^T q_t:

    DeltaNet    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
    Gated       the same from a_t S_{t-1} instead of S_{t-1}             a_t per head
    HGRN2       S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T                f_t per channel
    Mamba-2     S_t = a_t S_{t-1} + B_t (step_t x_t)^T                   a_t per head, q = C, k = B

Computed in chunks of tokens, states in fp32. Shapes as in modeling_fox.py; K, V: channels of a head's keys and
values.
"""
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .configuration_fox import CONV_WIDTH, DeltaNetConfig, GatedDeltaNetConfig, HGRN2Config, Mamba2Config, mlp_width
from .modeling_fox import (
    Block, FoxCache, ForgettingTransformerForCausalLM, ForgettingTransformerModel, RMSNorm, widen)

L2_NORM_EPS = 1e-6   # a constant in the paper's code, not in config.json
CHUNK = 64           # tokens of a chunk whose scores are a GEMM
CHANNEL_CHUNK = 16   # where every channel decays by itself: scores take [B, h, chunk, chunk, K] elements


# ----------------------------------------------------------------------------
# cache: of constant size

class RecurrentLayerCache:
    """What one layer keeps of the tokens before: None until there are any, or where it has no such module."""

    def __init__(self):
        self.state = None    # [B, h, K, V], fp32
        self.history = None  # [B, 3, channels] the convolution's last inputs
        self.length = 0      # tokens so far


class RecurrentCache(FoxCache):
    """The past_key_values of these models."""

    layer_class = RecurrentLayerCache

    def __getitem__(self, layer_idx):
        """Shapes that have the length where the generation of older versions of transformers looks for it."""
        layer = self.layers[layer_idx]
        return (None if layer.state is None else layer.state[:, :, :1].expand(-1, -1, layer.length, -1),) * 2


# ----------------------------------------------------------------------------
# recurrences: q, k [B, h or 1, T, K], v [B, h, T, V], S [B, h, K, V]

def document_masks(documents, length, chunk):
    """
    Yields for each chunk of the last tokens, given documents [B, past + T]: which of its tokens share a document
    [B, 1, C, C]; which share that of the token before the chunk, and which that of its last token [B, 1, C, 1].
    """
    numbers = F.pad(documents, (1, 0), value=-1)[:, None, -length - 1:]
    for start in range(0, length, chunk):
        own, before = numbers[:, :, start + 1:start + 1 + chunk], numbers[:, :, start:start + 1]
        yield own[..., None] == own[..., None, :], (own == before)[..., None], (own == own[:, :, -1:])[..., None]


def delta_chunk(S, q, k, v, beta, *rest):
    """
    One chunk of the delta rule, beta [B, h, C, 1]: what tokens add to the state, after what those before them
    in the chunk added, comes from a triangular system of equations. rest: with decays their logarithms
    [B, h, C, 1], taken as in decay_chunk, and the masks. Returns o and the next S.
    """
    *log_decay, masks = rest
    A, P, seen, read, written, kept = beta * (k @ k.mT), q @ k.mT, k, q, k, S
    for x in log_decay:
        b = x.double().cumsum(2)
        weight = (b - b.mT).clamp(max=0).to(q.dtype).exp()  # above the diagonal A and P are not read
        A, P, since, until = A * weight, P * weight, b.to(q.dtype).exp(), (b[:, :, -1:] - b).to(q.dtype).exp()
        seen, read, written, kept = k * since, q * since, k * until, S * since[:, :, -1:]
    if masks is not None:  # A and P are of documents, tokens of a later one neither read nor keep the state before
        same, first, last = masks
        A, P, seen, read = A * same, P * same, seen * first, read * first
        written, kept = written * last, kept * first[:, :, -1:]
    W, U = torch.linalg.solve_triangular(  # the unit diagonal of A is implied
        A.tril(-1), beta * torch.cat((seen, v), -1), upper=False, unitriangular=True).split(
            (k.shape[-1], v.shape[-1]), -1)
    new = U - W @ S
    return read @ S + P.tril() @ new, kept + written.mT @ new


def decay_chunk(S, q, k, v, log_decay, masks):
    """
    One chunk of S_t = decay_t S_{t-1} + k_t v_t^T, log_decay [B, h, C, 1 or K]. All exponents are <= 0; their
    differences are taken in fp64, where those of long sums are exact to fp32. Returns o and the next S.
    """
    b = log_decay.double().cumsum(2)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    if masks is not None:
        hidden = hidden | ~masks[0]
    weight = (b[:, :, :, None] - b[:, :, None]).to(q.dtype).masked_fill(hidden[..., None], -math.inf).exp()
    if weight.shape[-1] == 1:
        scores = (q @ k.mT) * weight[..., 0]
    else:
        scores = (q[:, :, :, None] * k[:, :, None] * weight).sum(-1)
    end = b[:, :, -1:]
    read, kept, written = q * b.to(q.dtype).exp(), S * end.to(q.dtype).exp().mT, k * (end - b).to(q.dtype).exp()
    if masks is not None:
        read, kept, written = read * masks[1], kept * masks[1][:, :, -1:], written * masks[2]
    return read @ S + scores @ v, kept + written.mT @ v


def recurrence(step, cache, chunk, documents, *inputs):
    """
    Runs step over chunks of the inputs q, k, v and the gate, each [B, T, h, channels]; documents as the mixers
    have them. Starts from the cache's state and updates it. Returns o [B, T, h, V]. The backward pass computes a
    chunk again from its state.
    """
    inputs = [widen(x).transpose(1, 2) for x in inputs]
    q, k, v = inputs[:3]
    S, outputs = cache.state, []
    if S is None:
        S = v.new_zeros(v.shape[0], v.shape[1], k.shape[-1], v.shape[-1])
    with torch.autocast(v.device.type, enabled=False):
        chunks = zip(*(x.split(chunk, dim=2) for x in inputs))
        masks = itertools.repeat(None) if documents is None else document_masks(documents, v.shape[2], chunk)
        for parts in ((*x, m) for x, m in zip(chunks, masks)):
            if torch.is_grad_enabled():
                o, S = checkpoint(step, S, *parts, use_reentrant=False, preserve_rng_state=False)
            else:
                o, S = step(S, *parts)
            outputs.append(o)
    cache.state, cache.length = S, cache.length + v.shape[2]
    return torch.cat(outputs, dim=2).transpose(1, 2)


# ----------------------------------------------------------------------------
# mixers: a [B, T, d] -> [B, T, d]. mask [B, past + T] is False for padding, which comes first, or None: padding
# leaves the state at zero, as it has no v, and the convolutions read zeros in its place. documents [B, past + T]
# are the numbers of the tokens' documents, or None.

def uniform(module, bound):
    """module, whose weight and bias begin uniform in +-bound."""
    module.init_bound = bound
    return module


def xavier_linear(rows, columns):
    return uniform(nn.Linear(columns, rows, bias=False), 2**-2.5 * math.sqrt(6 / (rows + columns)))


def initial_dt_bias(heads, least, most, floor):
    """softplus of it is log-uniform between least and most."""
    low, high = math.log(least), math.log(most)
    step = (low + (high - low) * torch.rand(heads)).exp().clamp(min=floor)
    return step + torch.log(-torch.expm1(-step))


def conv1d(channels, bias):
    return uniform(nn.Conv1d(channels, channels, CONV_WIDTH, groups=channels, bias=bias), CONV_WIDTH**-0.5)


def hide_padding(x, mask):
    """x [B, T, channels], zero where the mask of the past and these tokens is False."""
    return x if mask is None else x * mask[:, -x.shape[1]:, None]


def causal_conv(x, weight, bias, documents, cache):
    """silu(conv4(x)) of x [B, T, C], each channel alone, after the inputs in the cache, which it updates."""
    before = x.new_zeros(x.shape[0], CONV_WIDTH - 1, x.shape[2]) if cache.history is None else cache.history
    x = torch.cat((before, x), dim=1)
    cache.history = x[:, 1 - CONV_WIDTH:].clone()  # not a view, which would keep all of x
    if documents is not None:  # a token reads those of its own document
        T, number = x.shape[1] - CONV_WIDTH + 1, F.pad(documents, (CONV_WIDTH - 1, 0), value=-1)[:, -x.shape[1]:]
        own = (number[:, tap:tap + T] == number[:, -T:] for tap in range(CONV_WIDTH))
        y = sum(weight[:, 0, tap] * x[:, tap:tap + T] * same[..., None] for tap, same in enumerate(own))
        return F.silu(y if bias is None else y + bias)
    return F.silu(F.conv1d(x.mT, weight, bias, groups=x.shape[2])).mT


class DeltaNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.h = config.hidden_size, config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (xavier_linear(d, d) for _ in range(4))
        self.b_proj = xavier_linear(self.h, d)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (conv1d(d, bias=False) for _ in range(3))
        self.o_norm = RMSNorm(d // self.h, config.norm_eps)

    def forward(self, a, _, mask, documents, cache):
        x = torch.cat((self.q_proj(a), self.k_proj(a), self.v_proj(a)), dim=-1)
        weight = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight))
        x = causal_conv(hide_padding(x, mask), weight, None, documents, cache)
        q, k, v = (widen(part).unflatten(-1, (self.h, -1)) for part in x.chunk(3, dim=-1))  # [B, T, h, dh]
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_NORM_EPS) for part in (q, k))
        beta = widen(self.b_proj(a)).sigmoid().unsqueeze(-1)
        o = recurrence(delta_chunk, cache, CHUNK, documents, q / math.sqrt(q.shape[-1]), k, v, beta)
        return self.o_proj(self.o_norm(o).flatten(2).to(a.dtype))


class GatedDeltaNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.h = config.hidden_size, config.num_heads
        kd = self.h * config.head_dim
        vd = int(kd * config.expand_v)  # flash-linear-attention may write 2.0
        self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj = (
            nn.Linear(d, n, bias=False) for n in (kd, kd, vd, vd, self.h, self.h))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(n, n, CONV_WIDTH, groups=n, bias=False) for n in (kd, kd, vd))
        self.A_log, self.dt_bias = (nn.Parameter(torch.ones(self.h)) for _ in range(2))
        self.o_norm, self.o_proj = RMSNorm(vd // self.h, config.norm_eps), nn.Linear(vd, d, bias=False)

    def initial_heads(self, config):
        """How A_log and dt_bias begin: rates uniform in 0 to 16, time steps as Mamba-2's."""
        return dict(A_log=(16 * (1 - torch.rand(self.h))).log(), dt_bias=initial_dt_bias(self.h, 1e-3, 0.1, 1e-4))

    def forward(self, a, _, mask, documents, cache):
        x = torch.cat((self.q_proj(a), self.k_proj(a), self.v_proj(a)), dim=-1)
        weight = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight))
        x = causal_conv(hide_padding(x, mask), weight, None, documents, cache)
        widths = [len(conv.weight) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        q, k, v = (widen(part).unflatten(-1, (self.h, -1)) for part in x.split(widths, dim=-1))
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_NORM_EPS) for part in (q, k))
        beta = widen(self.b_proj(a)).sigmoid().unsqueeze(-1)
        step = F.softplus(widen(self.a_proj(a)) + widen(self.dt_bias)).unsqueeze(-1)
        log_decay = -step * widen(self.A_log).exp()[:, None]
        o = recurrence(delta_chunk, cache, CHUNK, documents, q / math.sqrt(q.shape[-1]), k, v, beta, log_decay)
        return self.o_proj((self.o_norm(o).flatten(2) * F.silu(widen(self.g_proj(a)))).to(a.dtype))


class HGRN2(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.h = config.hidden_size, config.num_heads
        self.q_proj, self.f_proj, self.i_proj, self.o_proj = (xavier_linear(d, d) for _ in range(4))
        self.g_norm = RMSNorm(d, config.norm_eps)

    def forward(self, a, bound, mask, documents, cache):
        """bound [d]: of the forget gates from below, or None for 0."""
        z, open = widen(self.f_proj(a)), 1
        log_f = F.logsigmoid(z)
        if bound is not None:
            open = 1 - bound
            log_f = (bound + open * z.sigmoid()).log()
        q, k, v = F.silu(self.q_proj(a)), open * (-z).sigmoid(), hide_padding(self.i_proj(a), mask)
        q, k, v, log_f = (widen(x).unflatten(-1, (self.h, -1)) for x in (q, k, v, log_f))
        o = recurrence(decay_chunk, cache, CHANNEL_CHUNK, documents, q / math.sqrt(q.shape[-1]), k, v, log_f)
        return self.o_proj(self.g_norm(o.flatten(2)).to(a.dtype))


class Mamba2(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, di, self.h, self.N = config.hidden_size, 2 * config.hidden_size, config.num_heads, config.state_size
        parts = math.sqrt(config.num_hidden_layers) if config.rescale_prenorm_residual else 1
        self.in_proj = uniform(nn.Linear(d, 2 * di + 2 * self.N + self.h, bias=False), d**-0.5)
        self.out_proj = uniform(nn.Linear(di, d, bias=False), di**-0.5 / parts)
        self.conv1d = conv1d(di + 2 * self.N, bias=True)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.ones(self.h)) for _ in range(3))
        self.norm = RMSNorm(di, config.norm_eps)

    def initial_heads(self, config):
        """How dt_bias, A_log and D begin: softplus(dt_bias) log-uniform in time_step_min to time_step_max."""
        dt_bias = initial_dt_bias(self.h, config.time_step_min, config.time_step_max, config.time_step_floor)
        return dict(dt_bias=dt_bias, A_log=torch.arange(1.0, self.h + 1).log(), D=torch.ones(self.h))

    def forward(self, a, _, mask, documents, cache):
        di, N = self.out_proj.in_features, self.N
        z, xBC, dt = self.in_proj(a).split((di, di + 2 * N, self.h), dim=-1)
        xBC = causal_conv(hide_padding(xBC, mask), self.conv1d.weight, self.conv1d.bias, documents, cache)
        x, k, q = (widen(part) for part in xBC.split((di, N, N), dim=-1))
        step = F.softplus(widen(dt) + widen(self.dt_bias)).unsqueeze(-1)                  # [B, T, h, 1]
        log_decay = -step * widen(self.A_log).exp()[:, None]
        v = step * hide_padding(x, mask).unflatten(-1, (self.h, -1))
        y = recurrence(decay_chunk, cache, CHUNK, documents, q.unsqueeze(2), k.unsqueeze(2), v, log_decay)
        y = y + widen(self.D)[:, None] * x.unflatten(-1, (self.h, -1))
        return self.out_proj(self.norm(y.flatten(2) * F.silu(widen(z))).to(a.dtype))


# ----------------------------------------------------------------------------
# blocks

class RecurrentBlock(Block):
    cache_class = RecurrentLayerCache

    def __init__(self, config):
        super().__init__(config)
        self.mlp.down_proj.init_scale = (2 * config.num_hidden_layers) ** -0.5


class DeltaNetBlock(RecurrentBlock):
    mixer_class = DeltaNet


class ApartMLP(nn.Module):
    """The MLP of modeling_fox.py with its two input projections apart, as flash-linear-attention stores them."""

    def __init__(self, config):
        super().__init__()
        d, I = config.hidden_size, mlp_width(config)
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(n, m, bias=False) for n, m in ((d, I), (d, I), (I, d)))

    def forward(self, m):
        return self.down_proj(F.silu(self.gate_proj(m)) * self.up_proj(m))


class GatedDeltaNetBlock(Block):
    cache_class, mixer_class = RecurrentLayerCache, GatedDeltaNet

    def __init__(self, config):
        super().__init__(config)
        self.mlp = ApartMLP(config)


class HGRN2Block(RecurrentBlock):
    mixer_class = HGRN2


class Mamba2Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.mixer = RMSNorm(config.hidden_size, config.norm_eps), Mamba2(config)

    def forward(self, x, shared, mask, documents, cache):
        cache = RecurrentLayerCache() if cache is None else cache
        return x + self.mixer(self.norm(x), shared, mask, documents, cache)


# ----------------------------------------------------------------------------
# the models: of each family one without lm_head and one with it

class Recurrent:
    """What the families share, before the classes of modeling_fox.py."""

    cache_class = RecurrentCache
    _no_split_modules = ["DeltaNetBlock", "GatedDeltaNetBlock", "HGRN2Block", "Mamba2Block"]

    def _init_weights(self, module):
        """The trainer's initialization, of what no checkpoint has."""
        bound = getattr(module, "init_bound", None)
        if bound is not None:
            for p in module.parameters():
                nn.init.uniform_(p, -bound, bound)
        elif isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):
            nn.init.normal_(module.weight, 0, self.config.initializer_range * getattr(module, "init_scale", 1))
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, (GatedDeltaNet, Mamba2)):
            for name, x in module.initial_heads(self.config).items():
                if not getattr(getattr(module, name), "_is_hf_initialized", False):  # not loaded
                    with torch.no_grad():
                        getattr(module, name).copy_(x)
        elif hasattr(module, "lower_bounds"):
            nn.init.zeros_(module.lower_bounds)

    def shared_inputs(self, past, length, device):
        return [None] * self.config.num_hidden_layers


class DeltaNetModel(Recurrent, ForgettingTransformerModel):
    config_class, block_class = DeltaNetConfig, DeltaNetBlock


class DeltaNetForCausalLM(Recurrent, ForgettingTransformerForCausalLM):
    config_class, model_class = DeltaNetConfig, DeltaNetModel


class GatedDeltaNetModel(Recurrent, ForgettingTransformerModel):
    config_class, block_class = GatedDeltaNetConfig, GatedDeltaNetBlock


class GatedDeltaNetForCausalLM(Recurrent, ForgettingTransformerForCausalLM):
    config_class, model_class = GatedDeltaNetConfig, GatedDeltaNetModel


def layer_bounds(lower_bounds):
    """The bound [d] of each layer's forget gates: the sum of the softmax over the layers after the first, up to its own."""
    return [None, *widen(lower_bounds).softmax(0)[1:].cumsum(0)]


class HGRN2Model(Recurrent, ForgettingTransformerModel):
    config_class, block_class = HGRN2Config, HGRN2Block

    def __init__(self, config):
        super().__init__(config)
        bounds = torch.zeros(config.num_hidden_layers, config.hidden_size)
        if config.use_lower_bound:
            self.lower_bounds = nn.Parameter(bounds)
        else:  # a buffer: stored in the checkpoint but not trained
            self.register_buffer("lower_bounds", bounds)

    def shared_inputs(self, past, length, device):
        """The bounds [d] of each layer's forget gates: None where there is none, as in the first layer."""
        if not self.config.use_lower_bound:
            return [None] * self.config.num_hidden_layers
        return layer_bounds(self.lower_bounds)


class HGRN2ForCausalLM(Recurrent, ForgettingTransformerForCausalLM):
    config_class, model_class = HGRN2Config, HGRN2Model


class Mamba2Model(Recurrent, ForgettingTransformerModel):
    config_class, block_class = Mamba2Config, Mamba2Block
    base_model_prefix, norm_name = "backbone", "norm_f"


class Mamba2ForCausalLM(Recurrent, ForgettingTransformerForCausalLM):
    config_class, model_class = Mamba2Config, Mamba2Model
    base_model_prefix = "backbone"
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}

    def _init_weights(self, module):
        if module is self.lm_head and not self.config.tie_word_embeddings:
            uniform(module, module.in_features**-0.5)
        super()._init_weights(module)
