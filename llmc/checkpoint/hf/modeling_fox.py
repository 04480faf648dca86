"""
The Forgetting Transformer (FoX, https://arxiv.org/abs/2503.02130) and its Transformer baselines for Hugging
Face transformers, 4.44 and later: model, cache and generation. It computes what the trainer computes, from its
config.json (configuration_fox.py) and model.safetensors, on CPU and GPU, in fp32 and bf16.

With both files beside the weights, and this one named in the auto_map of config.json:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Attention with a forget gate f_t in (0, 1] per head and token:

    score_ij = q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j,    cum_logf_t = log f_1 + ... + log f_t

Shapes: batch B, tokens T, width d, heads h of dh = d / h channels, key heads n (of keys and values: h / n heads
read each), MLP width I, vocabulary V.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_fox import ForgettingTransformerConfig, TransformerConfig, checked_rotations, mlp_width

QK_NORM_EPS = 1e-5          # a constant in the paper's code, not in config.json
MAX_BIAS_ELEMENTS = 1 << 28  # of the gate's bias [B, h, queries, keys] that attention holds at a time


def widen(x):
    """x in fp32, or in fp64 if it has that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ----------------------------------------------------------------------------
# cache

class LayerCache:
    """What one layer keeps of the tokens before: None until there are any, or where it has no such module."""

    def __init__(self):
        self.k = self.v = None                      # [B, n, T, dh], normalized and rotated; in a window W - 1 tokens
        self.cum_logf = None                        # [B, h, T] in fp64
        self.previous_k = self.previous_v = None    # [B, 1, n, dh], the last token's, not shifted yet
        self.length = 0                             # tokens so far

    def append(self, k, v, cum_logf, window):
        """Adds new tokens. Returns k, v and cum_logf of those that were kept and of the new ones."""
        self.length += k.shape[2]
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
            if cum_logf is not None:
                cum_logf = torch.cat((self.cum_logf, cum_logf + self.cum_logf[..., -1:]), dim=2)
        first = max(0, k.shape[2] - max(1, window - 1)) if window else 0
        self.k, self.v = k[:, :, first:], v[:, :, first:]
        self.cum_logf = None if cum_logf is None else cum_logf[:, :, first:]
        return k, v, cum_logf


class FoxCache:
    """The past_key_values of this model."""

    is_compileable = is_croppable = False  # generate() asks

    layer_class = LayerCache

    def __init__(self, num_layers):
        self.layers = [self.layer_class() for _ in range(num_layers)]
        self.documents = None  # [B, T] of the tokens so far, with document_reset

    def get_seq_length(self, layer_idx=0):
        """The number of tokens it holds."""
        return self.layers[layer_idx].length

    def reorder_cache(self, beam_idx):
        """Sequence i continues sequence beam_idx[i] from now on: beam search."""
        for part in (self, *self.layers):
            for name, x in vars(part).items():
                if torch.is_tensor(x):
                    setattr(part, name, x.index_select(0, beam_idx.to(x.device)))

    def __getitem__(self, layer_idx):
        """The shapes of a layer's k and v, where the generation of older versions of transformers finds the length."""
        k, v, length = (getattr(self.layers[layer_idx], name) for name in ("k", "v", "length"))
        return tuple(x if x is None else x[:, :, :1].expand(-1, -1, length, -1) for x in (k, v))


# ----------------------------------------------------------------------------
# packed documents: with document_reset every token has the number of its document, [B, past + T]

def number_documents(input_ids, config, before):
    """The numbers of the tokens `before` [B, past], or None, and of input_ids [B, T]."""
    end = getattr(config, "eos_token_id", None)
    numbers = (input_ids == (config.vocab_size - 1 if end is None else end)).long().cumsum(1)
    return numbers if before is None else torch.cat((before, numbers + before[:, -1:]), dim=1)


def begins(documents, length):
    """[B, length]: does a document begin at each of the last tokens?"""
    numbers = F.pad(documents, (1, 0), value=-1)
    return numbers[:, -length:] != numbers[:, -length - 1:-1]


# ----------------------------------------------------------------------------
# attention

def rope_frequencies(config, device):
    """
    [dh / 2] in fp64: what position t is multiplied by to an angle, rope_base^(-2i/dh) or less; and the factor of q and
    k, 1 unless they are YaRN's (https://arxiv.org/abs/2309.00071).
    """
    dh = config.hidden_size // config.num_heads
    i = torch.arange(dh // 2, dtype=torch.float64, device=device)
    plain = config.rope_base ** (-2 * i / dh)
    # checked here too: from_pretrained sets what it is given after the config was made
    scaling = checked_rotations(getattr(config, "rope_parameters", None) or {}, config.rope_base, None)
    factor, kind = scaling.get("factor", 1), scaling["rope_type"]
    if kind == "default":
        return plain, 1
    if kind == "linear":
        return plain / factor, 1

    def pair(turns):  # the one that turns so many times in the length of the training before
        length = scaling["original_max_position_embeddings"]
        return dh * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_base))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dh - 1)
    ramp = ((i - low) / (high - low or 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


def rope_tables(start, length, config, device):
    """cos and sin [T, 1, dh / 2] of the angles of positions t from start on, times the factor of q and k, in fp64."""
    t = torch.arange(start, start + length, dtype=torch.float64, device=device)
    frequencies, factor = rope_frequencies(config, device)
    angle = t[:, None, None] * frequencies
    return angle.cos() * factor, angle.sin() * factor


def rotate(x, cos, sin):
    """Rotates the pairs of channels (i, i + dh/2) of x [B, T, h, dh]."""
    x1, x2 = widen(x).chunk(2, dim=-1)
    cos, sin = cos.to(x1), sin.to(x1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def block_attention(q, k, v, cum_logf, key_mask, window, documents=None):
    """
    Attention of the last queries of a sequence, q [B, h, queries, dh], to all its keys, k and v
    [B, h, keys, dh]. cum_logf is [B, h, keys] in fp64 or None. key_mask [B, keys] is False for padding, or
    None. A query sees its own key and the window - 1 before; None or 0: all before. With documents [B, keys]
    it sees those of its own document alone.

    A difference of two cum_logf is exact to fp32 at any length, because it is taken in fp64: the sums reach
    -1e5, where fp32 has 0.008 between neighbours. Scores and softmax have the bias's precision, fp32.
    """
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    own = k.shape[2] - q.shape[2]  # query i has key own + i
    visible = ones.tril(own)
    if window:
        visible = visible & ones.triu(own - window + 1)
    if key_mask is not None:  # padding sees itself: a softmax of nothing is NaN
        visible = visible & (key_mask[:, None, None, :] | ones.triu(own))
    if documents is not None:
        visible = visible & (documents[:, None, own:, None] == documents[:, None, None, :])
    if cum_logf is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    bias = (cum_logf[:, :, own:, None] - cum_logf[:, :, None, :]).to(widen(q).dtype)
    bias = bias.masked_fill(~visible, -math.inf)
    with torch.autocast(q.device.type, enabled=False):  # it would take the bias to bf16
        return F.scaled_dot_product_attention(widen(q), widen(k), widen(v), attn_mask=bias).to(v.dtype)


def attention(q, k, v, cum_logf, key_mask, window=None, documents=None):
    """As block_attention, in blocks of queries, so that memory is not quadratic in T."""
    B, h, queries, _ = q.shape
    keys = k.shape[2]
    plain = cum_logf is None and key_mask is None and documents is None
    if plain and queries == keys and not (window and window < keys):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows = max(1, MAX_BIAS_ELEMENTS // (B * h * keys))
    blocks = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        first = max(0, keys - queries + start - window + 1) if window else 0
        seen = slice(first, keys - queries + stop)
        inputs = (q[:, :, start:stop], k[:, :, seen], v[:, :, seen],
                  None if cum_logf is None else cum_logf[:, :, seen],
                  None if key_mask is None else key_mask[:, seen], window,
                  None if documents is None else documents[:, seen])
        if torch.is_grad_enabled():  # the backward pass computes the bias again instead of keeping it
            blocks.append(checkpoint(block_attention, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(block_attention(*inputs))
    return torch.cat(blocks, dim=2)


# ----------------------------------------------------------------------------
# modules

class RMSNorm(nn.Module):
    """RMSNorm over the last axis of x [..., d], or of x [..., h, dh] with weight [d], or [dh] if shared."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = widen(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.view(-1, x.shape[-1])).to(x.dtype)


class ShiftLinear(nn.Module):
    """y_t = alpha_t y~_{t-1} + (1 - alpha_t) y~_t, y~ = W a, y~_{-1} = 0, one alpha per key head and token."""

    def __init__(self, d, width, n):
        super().__init__()
        self.linear, self.shift_proj = nn.Linear(d, width, bias=False), nn.Linear(d, n, bias=False)

    def forward(self, a, previous, token_mask, documents):
        """
        Returns y [B, T, n dh] and the last y~ [B, 1, n, dh], which is `previous` of the next call; None at the
        start. token_mask [B, T] is False for padding, which counts as no token, or None. The first token of one
        of the documents has none before it.
        """
        alpha = self.shift_proj(a).sigmoid().unsqueeze(-1)             # [B, T, n, 1]
        current = self.linear(a).unflatten(-1, (alpha.shape[2], -1))   # [B, T, n, dh]
        real = current if token_mask is None else current * token_mask[:, :, None, None]
        if previous is None:
            previous = torch.zeros_like(current[:, :1])
        before = torch.cat((previous, real[:, :-1]), dim=1)
        if documents is not None:
            before = before.masked_fill(begins(documents, a.shape[1])[:, :, None, None], 0)
        return torch.lerp(current, before, alpha).flatten(2), real[:, -1:]


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, h = config.hidden_size, config.num_heads
        n = config.num_kv_heads or h
        width = n * (d // h)
        self.config = config
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = ShiftLinear(d, width, n) if config.use_k_shift else nn.Linear(d, width, bias=False)
        self.v_proj = ShiftLinear(d, width, n) if config.use_v_shift else nn.Linear(d, width, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        if config.qk_norm:
            shared = config.qk_norm_share_param_across_head
            self.q_norm = RMSNorm(d // h if shared else d, QK_NORM_EPS)
            self.k_norm = RMSNorm(d // h if shared else width, QK_NORM_EPS)
        if config.use_output_norm:
            self.output_norm = RMSNorm(d, config.norm_eps)
        if config.use_output_gate:
            self.ogate_proj = nn.Linear(d, d, bias=False)
        if config.fgate_type == "full":
            self.fgate_proj = nn.Linear(d, h)
        elif config.fgate_type == "bias_only":
            self.fgate_bias = nn.Parameter(torch.zeros(h))
        elif config.fgate_type == "fixed":  # a buffer: stored in the checkpoint but not trained
            self.register_buffer("fgate_bias", torch.zeros(h))

    def cum_logf(self, a):
        """[B, h, T] in fp64: the running sum of the log gates of tokens a [B, T, d]; None without a gate."""
        gate = self.config.fgate_type
        if gate == "none":
            return None
        z = self.fgate_proj(a) if gate == "full" else self.fgate_bias.expand(a.shape[0], a.shape[1], -1)
        return F.logsigmoid(widen(z)).double().cumsum(1).transpose(1, 2)

    def forward(self, a, rope, mask, documents, cache):
        """a [B, T, d] -> [B, T, d]. rope is (cos, sin); mask, documents [B, past + T] or None; cache a LayerCache."""
        c, T = self.config, a.shape[1]
        token_mask = None if mask is None else mask[:, -T:]
        q, k, v = self.q_proj(a), None, None
        if c.use_k_shift:
            k, cache.previous_k = self.k_proj(a, cache.previous_k, token_mask, documents)
        else:
            k = self.k_proj(a)
        if c.use_v_shift:
            v, cache.previous_v = self.v_proj(a, cache.previous_v, token_mask, documents)
        else:
            v = self.v_proj(a)
        dh = c.hidden_size // c.num_heads
        q, k, v = (x.unflatten(-1, (-1, dh)) for x in (q, k, v))  # [B, T, h, dh], k and v [B, T, n, dh]
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.use_rope:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v, cum_logf = cache.append(k, v, self.cum_logf(a), c.window_size)
        if k.shape[1] != c.num_heads:
            k, v = (x.repeat_interleave(c.num_heads // x.shape[1], dim=1) for x in (k, v))
        key_mask, documents = (None if x is None else x[:, -k.shape[2]:] for x in (mask, documents))
        o = attention(q, k, v, cum_logf, key_mask, c.window_size, documents).transpose(1, 2)
        if c.use_output_norm:
            o = self.output_norm(o)
        o = o.flatten(2)
        if c.use_output_gate:
            o = o * self.ogate_proj(a).sigmoid()
        return self.o_proj(o)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, I = config.hidden_size, mlp_width(config)
        self.gate_proj, self.down_proj = nn.Linear(d, 2 * I, bias=False), nn.Linear(I, d, bias=False)

    def forward(self, m):
        gate, up = self.gate_proj(m).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    mixer_class, cache_class = Attention, LayerCache

    def __init__(self, config):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(config.hidden_size, config.norm_eps), self.mixer_class(config)
        self.mlp_norm, self.mlp = RMSNorm(config.hidden_size, config.norm_eps), MLP(config)

    def forward(self, x, shared, mask, documents, cache):
        # without a cache that outlives the call, a block that is computed again starts from an empty one too
        cache = self.cache_class() if cache is None else cache
        x = x + self.attn(self.attn_norm(x), shared, mask, documents, cache)
        return x + self.mlp(self.mlp_norm(x))


# ----------------------------------------------------------------------------
# the model

def long_gate_bias(config):
    """[h] gate biases for which head i forgets by 1/e in T_i tokens, T_i log-spaced from T_min to T_max."""
    shortest, longest = config.decay_time_min or 2, config.decay_time_max or 256
    times = torch.linspace(math.log(shortest), math.log(longest), config.num_heads, dtype=torch.float64).exp()
    return -torch.log(torch.expm1((1 / times).clamp(max=500)))


class ForgettingTransformerPreTrainedModel(PreTrainedModel):
    config_class = ForgettingTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    norm_name = "norm"      # of the last norm
    block_class = Block
    cache_class = FoxCache
    _is_stateful = True  # for generate(): the cache cannot be rewound, as the shifts keep one token only

    def _init_weights(self, module):
        """The trainer's initialization, of what no checkpoint has."""
        config = self.config
        gate_bias = None
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0, config.initializer_range)
            gate_bias = getattr(module, "bias", None)  # no other matrix has one
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Attention):
            gate_bias = getattr(module, "fgate_bias", None)
        if gate_bias is not None and not getattr(gate_bias, "_is_hf_initialized", False):  # not loaded
            long = config.fgate_bias_init or config.fgate_type == "fixed"
            with torch.no_grad():
                gate_bias.copy_(long_gate_bias(config) if long else torch.zeros(config.num_heads))


class ForgettingTransformerModel(ForgettingTransformerPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.block(config, layer) for layer in range(config.num_hidden_layers))
        setattr(self, self.norm_name, RMSNorm(config.hidden_size, config.norm_eps))
        self.gradient_checkpointing = False
        self.post_init()

    def block(self, config, layer):
        return self.block_class(config)

    def get_input_embeddings(self):
        return self.embeddings

    def set_input_embeddings(self, embeddings):
        self.embeddings = embeddings

    def shared_inputs(self, past, length, device):
        """What block l reads besides the tokens at positions past to past + length, a list of all layers'."""
        config = self.config
        rope = rope_tables(past, length, config, device) if config.use_rope else None
        return [rope] * config.num_hidden_layers

    def forward(
        self,
        input_ids=None,             # [B, T], or
        attention_mask=None,        # [B, past + T], 0 for padding, which comes first
        past_key_values=None,       # a FoxCache of the tokens before
        inputs_embeds=None,         # [B, T, d] in the place of input_ids
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        config = self.config
        if output_attentions:
            raise ValueError("output_attentions: attention weights are computed in blocks and not kept")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("one of input_ids and inputs_embeds is needed")
        if input_ids is None and config.document_reset:
            raise ValueError("inputs_embeds: document_reset needs input_ids, which tell where documents begin")
        if past_key_values is not None and not isinstance(past_key_values, self.cache_class):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}, not a {self.cache_class.__name__}")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        recompute = self.gradient_checkpointing and self.training
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        if past_key_values is None and use_cache and not recompute:
            past_key_values = self.cache_class(config.num_hidden_layers)
        if past_key_values is not None and recompute:
            raise ValueError("gradient checkpointing computes a block twice: it needs past_key_values=None")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        mask = None
        if attention_mask is not None:
            expected = (x.shape[0], past + x.shape[1])
            if tuple(attention_mask.shape) != expected:
                raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, not {expected}")
            mask = None if attention_mask.all() else attention_mask.bool()
        documents = None
        if config.document_reset:
            documents = number_documents(input_ids, config, past_key_values.documents if past else None)
            if past_key_values is not None:
                past_key_values.documents = documents
        shared = self.shared_inputs(past, x.shape[1], x.device)

        hidden_states = [x]
        for i, block in enumerate(self.layers):
            if recompute:
                x = self._gradient_checkpointing_func(block.__call__, x, shared[i], mask, documents, None)
            else:
                cache = None if past_key_values is None else past_key_values.layers[i]
                x = block(x, shared[i], mask, documents, cache)
            hidden_states.append(x)
        hidden_states[-1] = x = getattr(self, self.norm_name)(x)
        output = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=past_key_values,
            hidden_states=tuple(hidden_states) if output_hidden_states else None)
        return output if return_dict is not False else output.to_tuple()


class ForgettingTransformerForCausalLM(ForgettingTransformerPreTrainedModel, GenerationMixin):
    model_class = ForgettingTransformerModel
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # with tie_word_embeddings

    def __init__(self, config):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.base_model.embeddings

    def set_input_embeddings(self, embeddings):
        self.base_model.embeddings = embeddings

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, lm_head):
        self.lm_head = lm_head

    @classmethod
    def _supports_default_dynamic_cache(cls):
        """For generate(): forward makes the cache, not generate."""
        return False

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None,
                                      inputs_embeds=None, use_cache=True, next_sequence_length=None, **_):
        """
        The arguments of forward for the next token. Padding is to be on the left. Newer versions of
        transformers say how many of input_ids are not in the cache; for older ones the mask tells, as
        input_ids lack a prompt of inputs_embeds.
        """
        inputs = dict(past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache,
                      logits_to_keep=1)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if inputs_embeds is not None and past == 0:
            if input_ids.shape[1] > 0:  # without a cache: what has been generated follows
                inputs_embeds = torch.cat((inputs_embeds, self.base_model.embeddings(input_ids)), dim=1)
            return dict(inputs, inputs_embeds=inputs_embeds)
        if past > 0:
            length = (input_ids if attention_mask is None else attention_mask).shape[1]
            input_ids = input_ids[:, -(next_sequence_length or length - past):]
        return dict(inputs, input_ids=input_ids)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,                # [B, T], input_ids themselves: token t + 1 is t's target; -100 is none
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,           # the number of last tokens whose logits are wanted; 0: all
    ):
        """Logits [B, T, V], and with labels the mean cross entropy in nats. Otherwise as the model's."""
        output = self.base_model(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            targets = labels[:, 1:].to(logits.device)
            loss = F.cross_entropy(widen(logits[:, :-1]).flatten(0, 1), targets.flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values,
                                        hidden_states=output.hidden_states)
        return output if return_dict is not False else output.to_tuple()


class TransformerModel(ForgettingTransformerModel):
    config_class = TransformerConfig


class TransformerForCausalLM(ForgettingTransformerForCausalLM):
    config_class = TransformerConfig
