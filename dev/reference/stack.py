"""
Reference implementation of stacks of layers of different kinds (layer_types): fox.py's attention and recurrent.py's
mixers, each layer with fox.py's MLP. make_fixtures.py stores its results in float64. A model is built from the keys of
config.json; its state_dict has the tensors of the checkpoint.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
from safetensors.numpy import load_file

import fox
import recurrent

KINDS = dict(attention=fox.Attention, deltanet=recurrent.DeltaNet, gated_deltanet=recurrent.GatedDeltaNet,
             hgrn2=recurrent.HGRN2, mamba2=recurrent.Mamba2)


def make_config(family, layer_types, **changes):
    """The config of a family's attention, with layers and their sizes, and changes."""
    own = {key: changes.pop(key) for key in list(changes) if key.startswith(tuple(kind + "_" for kind in KINDS))}
    return dict(architectures=["FoxStackForCausalLM"], model_type="fox_stack", layer_types=layer_types,
                **own, **fox.make_config(family, num_hidden_layers=len(layer_types), **changes))


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        of, (self.kind, *options) = SimpleNamespace(**vars(c)), c.layer_types[layer].split(":")
        for option in options:
            if option.startswith("window="):
                of.window_size = int(option.removeprefix("window=")) or None
            else:
                of.use_rope = option == "rope"
        for key, value in vars(c).items():  # a kind's sizes
            if key.startswith(self.kind + "_"):
                setattr(of, key.removeprefix(self.kind + "_"), value)
        of.layer_norm_epsilon = c.norm_eps
        number = sum(kind.split(":")[0] == self.kind for kind in c.layer_types[:layer])
        mixer = KINDS[self.kind](*[of, number][:1 if self.kind == "attention" else 2])
        self.attn_norm, self.mlp_norm = (fox.RMSNorm(c.hidden_size, c.norm_eps) for _ in range(2))
        self.mixer_name = "mixer" if self.kind == "mamba2" else "attn"
        setattr(self, self.mixer_name, mixer)
        self.mlp = fox.MLP(c)

    def forward(self, x, lower_bounds):
        of_model = [lower_bounds] if self.kind == "hgrn2" else []
        x = x + getattr(self, self.mixer_name)(self.attn_norm(x), *of_model)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, c = config, SimpleNamespace(**config)
        self.model = nn.ModuleDict(dict(
            embeddings=nn.Embedding(c.vocab_size, c.hidden_size),
            layers=nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers)),
            norm=fox.RMSNorm(c.hidden_size, c.norm_eps)))
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if config.get("hgrn2_use_lower_bound"):
            layers = sum(block.kind == "hgrn2" for block in self.model.layers)
            self.model.lower_bounds = nn.Parameter(torch.zeros(layers, c.hidden_size))

    def forward(self, tokens):
        """Logits [B, T, V] of tokens [B, T]."""
        x = self.model.embeddings(tokens)
        for block in self.model.layers:
            x = block(x, getattr(self.model, "lower_bounds", None))
        return self.lm_head(self.model.norm(x))

    loss = fox.Fox.loss


save = recurrent.save


def load(folder, dtype=torch.float64):
    """Loads the model of a checkpoint folder."""
    model = Stack(json.loads((Path(folder) / "config.json").read_text())).to(dtype)
    weights = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    return model
