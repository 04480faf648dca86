"""
Stacks of layers of different kinds for Hugging Face transformers: attention of modeling_fox.py and the mixers of
modeling_recurrent.py, which both belong beside this file, in one model. config.json's layer_types names each layer's.
Opened in the same way:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""
import copy
import re

import torch
import torch.nn as nn

from .modeling_fox import (
    Attention, Block, FoxCache, ForgettingTransformerConfig, ForgettingTransformerForCausalLM,
    ForgettingTransformerModel, ForgettingTransformerPreTrainedModel, LayerCache, MLP, RMSNorm, rope_tables)
from .modeling_recurrent import (
    DeltaNetBlock, GatedDeltaNet, HGRN2Block, Mamba2, Recurrent, RecurrentCache, layer_bounds)


# ----------------------------------------------------------------------------
# configuration

# what config.json has of each recurrent kind, with its name in front
SIZES = dict(deltanet=["num_heads"], hgrn2=["num_heads"], mamba2=["num_heads", "state_size"],
             gated_deltanet=["num_heads", "head_dim", "expand_v"])


class FoxStackConfig(ForgettingTransformerConfig):
    """The keys of config.json: attention's, and with a prefix those of the recurrent kinds."""

    model_type = "fox_stack"
    # how the heads of Mamba-2 begin
    time_step_min, time_step_max, time_step_floor, rescale_prenorm_residual = 0.001, 0.1, 1e-4, True

    def __init__(self, layer_types=("attention",), num_hidden_layers=None, **keys):
        own = {key: keys.pop(key) for key in list(keys) if key.startswith(tuple(kind + "_" for kind in BLOCKS))}
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
    match = re.fullmatch("(attention)(:window=(0|[1-9][0-9]*))?(:rope|:norope)?|" + "|".join(BLOCKS), name)
    if not match or int(match[3] or 0) > 1 << 24:
        raise ValueError(f"layer_types: {name!r} is none of {', '.join(BLOCKS)} and attention:window=N:rope or :norope")
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


# ----------------------------------------------------------------------------
# cache and blocks

class StackLayerCache(LayerCache):
    """What one layer of either kind keeps of the tokens before."""

    def __init__(self):
        super().__init__()
        self.state = self.history = None  # as RecurrentLayerCache's


class StackCache(FoxCache):
    """The past_key_values of these models."""

    layer_class = StackLayerCache

    def __getitem__(self, layer_idx):
        return (RecurrentCache if self.layers[layer_idx].k is None else FoxCache).__getitem__(self, layer_idx)


class Mamba2MLPBlock(Block):
    """Mamba-2 with an MLP behind it, as all layers of a stack have."""

    cache_class = StackLayerCache

    def __init__(self, config):
        nn.Module.__init__(self)
        self.attn_norm, self.mixer = RMSNorm(config.hidden_size, config.norm_eps), Mamba2(config)
        self.mlp_norm, self.mlp = RMSNorm(config.hidden_size, config.norm_eps), MLP(config)

    @property
    def attn(self):
        return self.mixer


class GatedDeltaNetMLPBlock(Block):
    """Gated DeltaNet with the MLP of all layers of a stack."""

    cache_class, mixer_class = StackLayerCache, GatedDeltaNet


BLOCKS = dict(attention=Block, deltanet=DeltaNetBlock, gated_deltanet=GatedDeltaNetMLPBlock, hgrn2=HGRN2Block,
              mamba2=Mamba2MLPBlock)


# ----------------------------------------------------------------------------
# the models: one without lm_head and one with it

class Stack(Recurrent):
    """What both share, before the classes of modeling_fox.py."""

    config_class, cache_class = FoxStackConfig, StackCache
    _no_split_modules = ["Block", *Recurrent._no_split_modules, "GatedDeltaNetMLPBlock", "Mamba2MLPBlock"]

    def _init_weights(self, module):
        """The trainer's initialization, of what no checkpoint has."""
        gates = isinstance(module, nn.Linear) and module.bias is not None
        family = ForgettingTransformerPreTrainedModel if gates or isinstance(module, Attention) else Recurrent
        family._init_weights(self, module)

    def block(self, config, layer):
        kind, own = layer_config(config, layer)
        return BLOCKS[kind](own)

    def shared_inputs(self, past, length, device):
        """What block l reads besides the tokens: the tables of RoPE, or the bounds of HGRN2's gates, where it has them."""
        config, L = self.config, self.config.num_hidden_layers
        with_rope = [layer_config(config, layer)[1].use_rope for layer in range(L)]
        rope = rope_tables(past, length, config, device) if any(with_rope) else None
        shared = [rope if uses else None for uses in with_rope]
        if hasattr(self, "lower_bounds"):
            for layer, bound in zip(layers_of(config, "hgrn2"), layer_bounds(self.lower_bounds)):
                shared[layer] = bound
        return shared


class FoxStackModel(Stack, ForgettingTransformerModel):
    def __init__(self, config):
        super().__init__(config)
        if getattr(config, "hgrn2_use_lower_bound", False):
            self.lower_bounds = nn.Parameter(torch.zeros(len(layers_of(config, "hgrn2")), config.hidden_size))


class FoxStackForCausalLM(Stack, ForgettingTransformerForCausalLM):
    model_class = FoxStackModel
