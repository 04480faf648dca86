"""
Stacks of layers of different kinds for Hugging Face transformers: attention of modeling_fox.py and the mixers of
modeling_recurrent.py in one model. Both belong beside this file, with configuration_fox.py, in which config.json's
layer_types are read. Opened in the same way:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""
import torch
import torch.nn as nn

from .configuration_fox import FoxStackConfig, layer_config, layers_of
from .modeling_fox import (
    Attention, Block, FoxCache, ForgettingTransformerForCausalLM, ForgettingTransformerModel,
    ForgettingTransformerPreTrainedModel, LayerCache, MLP, RMSNorm, rope_tables)
from .modeling_recurrent import (
    DeltaNetBlock, GatedDeltaNet, HGRN2Block, Mamba2, Recurrent, RecurrentCache, layer_bounds)


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
