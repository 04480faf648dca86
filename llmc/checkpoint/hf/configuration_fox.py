"""
The configurations of the Forgetting Transformer and of all models to compare it with, for Hugging Face transformers: the
keys of config.json. The file of each model imports them.
"""
import copy
import math
import re

from transformers import PretrainedConfig

CONV_WIDTH = 4  # tokens that a convolution reads, its own included


# ----------------------------------------------------------------------------
# attention: one class for each model_type, since save_pretrained writes the one of the class

def checked_rotations(scaling, base, length):
    """rope_parameters, with what transformers takes for a missing rope_type and for YaRN's missing length."""
    kind = scaling.get("rope_type") or scaling.get("type") or (None if "factor" in scaling else "default")
    factor = scaling.get("factor")
    if kind not in ("default", "linear", "yarn") or not (factor or kind == "default"):
        raise ValueError(f"rope_parameters={scaling!r} are not supported, only linear and yarn with a factor")
    scaling = dict(scaling, rope_type=kind, rope_theta=base)
    if kind == "yarn":
        only = dict(beta_fast=32, beta_slow=1, mscale=None, mscale_all_dim=None, truncate=True,
                    attention_factor=0.1 * math.log(factor) + 1)
        for key, value in only.items():
            given = scaling.get(key)
            if given is not None and (value is None or abs(given - value) > 1e-6):
                raise ValueError(f"rope_scaling: {key}={given!r} is not supported, only {value}")
        if not scaling.setdefault("original_max_position_embeddings", length):
            raise ValueError("rope_scaling: which length was the model trained at? give original_max_position_embeddings")
        if base <= 1:
            raise ValueError("rope_scaling: yarn needs a rope_base above 1")
    return scaling


class ForgettingTransformerConfig(PretrainedConfig):
    """The keys of config.json. A combination that the model does not compute is a ValueError."""

    model_type = "forgetting_transformer-project_fox"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_attention_heads": "num_heads"}

    def __init__(
        self,
        vocab_size=50257,
        hidden_size=768,
        hidden_ratio=4,
        intermediate_size=None,         # I; None derives it from hidden_ratio
        num_hidden_layers=12,
        num_heads=12,
        num_kv_heads=None,              # n; None: h
        hidden_act="swish",
        window_size=None,               # W: a token attends to itself and the W - 1 before it; None, 0: to all
        max_position_embeddings=None,
        initializer_range=0.02,
        norm_eps=1e-6,
        rope_base=None,                 # None: rope_theta of rope_parameters, or 500000
        use_rope=False,
        rope_parameters=None,           # as transformers': linear or yarn; None: plain
        rope_scaling=None,              # its older name, which wins over it
        use_output_gate=False,
        ogate_act="sigmoid",
        use_output_norm=False,
        qk_norm=False,
        qk_norm_share_param_across_head=False,
        use_k_shift=False,
        use_v_shift=False,
        fgate_type="full",              # full, bias_only, fixed or none
        fgate_bias_init=False,          # head i starts with a decay time of T_i tokens, see modeling_fox.long_gate_bias
        decay_time_min=None,
        decay_time_max=None,
        log_pruning_tolerance=None,     # a matter of speed in the trainer; nothing is pruned here
        document_reset=False,           # no token sees anything before the last end of text, eos_token_id
        tie_word_embeddings=False,
        use_cache=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.hidden_act = hidden_act
        self.window_size = window_size
        if max_position_embeddings is not None:  # tools take an attribute that is None for a length
            self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.norm_eps = norm_eps
        rope_parameters = rope_scaling or rope_parameters
        self.rope_base = rope_base or (rope_parameters or {}).get("rope_theta") or 500000.0
        self.use_rope = use_rope
        self.use_output_gate = use_output_gate
        self.ogate_act = ogate_act
        self.use_output_norm = use_output_norm
        self.qk_norm = qk_norm
        self.qk_norm_share_param_across_head = qk_norm_share_param_across_head
        self.use_k_shift = use_k_shift
        self.use_v_shift = use_v_shift
        self.fgate_type = fgate_type
        self.fgate_bias_init = fgate_bias_init
        self.decay_time_min = decay_time_min
        self.decay_time_max = decay_time_max
        self.log_pruning_tolerance = log_pruning_tolerance
        self.document_reset = document_reset
        self.use_cache = use_cache
        supported = dict(hidden_act=("swish",), ogate_act=("sigmoid",),
                         fgate_type=("full", "bias_only", "fixed", "none"))
        for key, values in supported.items():
            if getattr(self, key) not in values:
                raise ValueError(f"{key}={getattr(self, key)!r} is not supported, only {values}")
        if window_size is not None and (type(window_size) is not int or window_size < 0):
            raise ValueError(f"window_size={window_size!r} is no number of tokens")
        if hidden_size % num_heads != 0:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}")
        if num_kv_heads is not None and (type(num_kv_heads) is not int or num_kv_heads < 1 or num_heads % num_kv_heads):
            raise ValueError(f"num_kv_heads={num_kv_heads!r} does not divide num_heads {num_heads}")
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        if rope_parameters:  # afterwards: transformers 5 would look for a max_position_embeddings
            self.rope_parameters = checked_rotations(rope_parameters, self.rope_base, max_position_embeddings)

    def _validate_yarn_rope_parameters(self, *_, **__):
        """Replaces that of transformers 5, which looks for a max_position_embeddings."""


class TransformerConfig(ForgettingTransformerConfig):
    """The plain Transformer, which has a model_type of its own."""

    model_type = "transformer-project_fox"

    def __init__(self, fgate_type="none", use_rope=True, **kwargs):
        super().__init__(fgate_type=fgate_type, use_rope=use_rope, **kwargs)


def mlp_width(config):
    """I: intermediate_size, or else 2/3 of hidden_ratio times the width, rounded up to a multiple of 256."""
    wanted = math.floor(config.hidden_size * config.hidden_ratio * 2 / 3)
    return config.intermediate_size or 256 * math.ceil(wanted / 256)


# ----------------------------------------------------------------------------
# recurrent baselines

class RecurrentConfig(PretrainedConfig):
    """The keys of config.json, from a family's defaults. What the model does not compute is a ValueError."""

    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_attention_heads": "num_heads"}

    def __init__(self, defaults=None, only=None, tie_word_embeddings=False, **keys):
        """defaults: {key: value} of what `keys` lack; only: {key: value} of those with one value."""
        common = dict(vocab_size=50257, hidden_size=768, num_hidden_layers=12, num_heads=6,
                      initializer_range=0.02, use_cache=True, document_reset=False)
        for key, value in {**common, **(defaults or {}), **(only or {})}.items():
            setattr(self, key, keys.pop(key, value))
            if key in (only or {}) and getattr(self, key) != value:
                raise ValueError(f"{key}={getattr(self, key)!r} is not supported, only {value!r}")
        super().__init__(tie_word_embeddings=tie_word_embeddings, **keys)

    def check_heads(self, channels, head_size):
        """ValueError unless heads of head_size channels, or if None of any, have that many together."""
        if channels % self.num_heads or head_size not in (None, channels // self.num_heads):
            raise ValueError(f"num_heads {self.num_heads} of {head_size or 'equal'} channels are not {channels}")


SHELL = dict(hidden_ratio=4, intermediate_size=None, norm_eps=1e-6)


class DeltaNetConfig(RecurrentConfig):
    model_type = "delta_net-project_fox"

    def __init__(self, **keys):
        only = dict(attn_mode="chunk", expand_k=1, expand_v=1, use_gate=False, use_short_conv=True,
                    conv_size=CONV_WIDTH, use_beta=True, use_output_norm=True, qk_norm="l2", qk_activation="silu",
                    hidden_act="swish")
        super().__init__(SHELL, only, **keys)
        self.check_heads(self.hidden_size, None)


class GatedDeltaNetConfig(RecurrentConfig):
    """flash-linear-attention's keys."""

    model_type = "gated_deltanet"

    def __init__(self, num_v_heads=None, **keys):
        keys["num_v_heads"] = None if num_v_heads == keys.get("num_heads") else num_v_heads
        only = dict(attn_mode="chunk", num_v_heads=None, use_gate=True, use_short_conv=True, conv_size=CONV_WIDTH,
                    allow_neg_eigval=False, attn=None, hidden_act="swish")
        super().__init__(dict(SHELL, head_dim=256, expand_v=2), only, **keys)


class HGRN2Config(RecurrentConfig):
    model_type = "hgrn2-project_fox"

    def __init__(self, **keys):
        only = dict(attn_mode="chunk", use_short_conv=False, elementwise_affine=True, hidden_act="swish")
        super().__init__(dict(SHELL, expand_ratio=128, use_lower_bound=False), only, **keys)
        self.check_heads(self.hidden_size, self.expand_ratio)


class Mamba2Config(RecurrentConfig):
    model_type = "mamba2-project_fox"
    attribute_map = dict(RecurrentConfig.attribute_map, norm_eps="layer_norm_epsilon")

    def __init__(self, **keys):
        defaults = dict(num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, layer_norm_epsilon=1e-5,
                        time_step_min=0.001, time_step_max=0.1, time_step_floor=1e-4,
                        rescale_prenorm_residual=True,
                        residual_in_fp32=True, chunk_size=256)  # of other programs; nothing depends on them here
        only = dict(n_groups=1, expand=2, conv_kernel=CONV_WIDTH, use_bias=False, use_conv_bias=True,
                    hidden_act="silu")
        super().__init__(defaults, only, **keys)
        self.check_heads(2 * self.hidden_size, self.head_dim)


# ----------------------------------------------------------------------------
# stacks of layers of different kinds

# what config.json has of each kind alone, with its name in front
SIZES = dict(attention=[], deltanet=["num_heads"], gated_deltanet=["num_heads", "head_dim", "expand_v"], hgrn2=["num_heads"],
             mamba2=["num_heads", "state_size"])


class FoxStackConfig(ForgettingTransformerConfig):
    """The keys of config.json: attention's, and with a prefix those of the recurrent kinds."""

    model_type = "fox_stack"
    # how the heads of Mamba-2 begin
    time_step_min, time_step_max, time_step_floor, rescale_prenorm_residual = 0.001, 0.1, 1e-4, True

    def __init__(self, layer_types=("attention",), num_hidden_layers=None, **keys):
        own = {key: keys.pop(key) for key in list(keys) if key.startswith(tuple(kind + "_" for kind in SIZES))}
        if not isinstance(layer_types, (list, tuple)) or not layer_types or {*map(type, layer_types)} != {str}:
            raise ValueError(f"layer_types={layer_types!r} is no list of names")
        super().__init__(num_hidden_layers=num_hidden_layers or len(layer_types), **keys)
        self.layer_types = list(layer_types)  # afterwards: transformers 5 would rename and refuse the kinds
        for key, value in own.items():
            setattr(self, key, value)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} layers, not {self.num_hidden_layers}")
        for layer in range(self.num_hidden_layers):
            layer_config(self, layer)

    def validate(self):
        """That of transformers 5, which knows other kinds."""
        layer_types, self.layer_types = self.layer_types, None
        super().validate()
        self.layer_types = layer_types


def layer_config(config, layer):
    """The kind of a layer, and the config as the layer's block sees it."""
    own = copy.copy(config)
    name = config.layer_types[layer]
    match = re.fullmatch("(attention)(:window=(0|[1-9][0-9]*))?(:rope|:norope)?|" + "|".join(SIZES), name)
    if not match or int(match[3] or 0) > 1 << 24:
        raise ValueError(f"layer_types: {name!r} is none of {', '.join(SIZES)} and attention:window=N:rope or :norope")
    kind, window, rope = name.split(":")[0], match[3], match[4]
    if kind != "attention":
        own.head_dim, own.use_rope = None, False
        for size in SIZES[kind]:
            value = getattr(config, f"{kind}_{size}", None)
            if type(value) is not int or value < 1:
                raise ValueError(f"{kind}_{size}={value!r} is not a whole number of at least 1")
            setattr(own, size, value)
        channels = config.hidden_size * (2 if kind == "mamba2" else 1)
        if own.head_dim is None and channels % own.num_heads:
            raise ValueError(f"{kind}_num_heads {own.num_heads} does not divide {channels}")
    if window:
        own.window_size = int(window)
    if rope:
        own.use_rope = rope == ":rope"
    return kind, own


def layers_of(config, kind):
    return [layer for layer, name in enumerate(config.layer_types) if name.split(":")[0] == kind]
