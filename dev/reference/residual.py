"""
What a bf16 residual stream costs a Mamba-2 of 48 layers, beside an fp32 one. The model of recurrent.py, its
recurrence as one matrix [T, T], rounded where train_foxcu has bf16: weights, activations, their gradients and
operands of GEMMs. Sums are fp32. The stream and its gradient are bf16 or fp32.

    python dev/reference/residual.py errors SHARD [CHECKPOINT]    loss, logits and gradients against float64
    python dev/reference/residual.py train SHARD SEED..           losses of trainings that differ in this alone

SHARD: tokens of data/text_to_shards --tokenizer byte. Without CHECKPOINT `errors` takes random weights.
"""
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F

import recurrent

SMALL = dict(hidden_size=64, num_heads=2, state_size=32)  # of trainings
NANO = dict(hidden_size=128, num_heads=4, state_size=128)
LAYERS, V = 48, 257


class Round(torch.autograd.Function):
    """x, rounded to bf16 if `value`; its gradient, rounded if `gradient`."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.gradient = gradient
        return x.bfloat16().to(x.dtype) if value else x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.bfloat16().to(g.dtype) if ctx.gradient else g, None, None


relative = lambda x, of: ((x.double() - of).norm() / of.norm()).item()
norm = lambda x, weight: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def logits(model, tokens, stream):
    """Logits [B, T, V]. stream: None, without any rounding; "bf16" or "fp32"."""
    on = stream is not None
    both = lambda x: Round.apply(x, on, on)
    value, gradient = lambda x: Round.apply(x, on, False), lambda x: Round.apply(x, False, on)
    to_stream = both if stream == "bf16" else lambda x: x
    linear = lambda x, layer: F.linear(x, value(layer.weight))
    shell, T = model.backbone, tokens.shape[1]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = to_stream(F.embedding(tokens, value(shell.embeddings.weight)))
    for block in shell.layers:
        m, a = block.mixer, both(norm(x, value(block.norm.weight)))
        di, N = m.out_proj.in_features, m.N
        z, xBC, dt = both(linear(a, m.in_proj)).split((di, di + 2 * N, m.h), -1)
        conv = F.conv1d(xBC.mT, value(m.conv1d.weight), value(m.conv1d.bias), padding=3, groups=di + 2 * N)
        u, B, C = F.silu(conv[..., :T]).mT.split((di, N, N), -1)
        step = F.softplus(dt + m.dt_bias)
        u, heads = u.unflatten(-1, (m.h, -1)), step.unsqueeze(-1)
        v, B, C = both(heads * u), both(B), both(C)
        cum = (-step * m.A_log.exp()).cumsum(1).mT  # [B, h, T]
        decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(future, -torch.inf).exp()
        o = value(torch.einsum("bhts,bshp->bthp", both((C @ B.mT).unsqueeze(1) * decay), v))
        kept = u + (v / heads - u).detach()  # x of the term D x is v / step
        y = both(norm(gradient(o + m.D[:, None] * kept).flatten(2) * F.silu(z), value(m.norm.weight)))
        x = to_stream(x + gradient(linear(y, m.out_proj)))
    return both(linear(both(norm(x, value(shell.norm_f.weight))), model.lm_head))


def random_model(sizes, seed):
    """A model as a training starts it (config.json: time_step_*, rescale_prenorm_residual)."""
    torch.manual_seed(seed)
    model = recurrent.Recurrent(recurrent.make_config("mamba2", vocab_size=V, num_hidden_layers=LAYERS, **sizes))
    with torch.no_grad():
        model.backbone.embeddings.weight.normal_(0, 0.02)
        model.lm_head.weight.uniform_(-1, 1).div_(math.sqrt(sizes["hidden_size"]))
        for block in model.backbone.layers:
            m = block.mixer
            for layer in (m.in_proj, m.out_proj):
                layer.weight.uniform_(-1, 1).div_(math.sqrt(layer.in_features))
            m.out_proj.weight.div_(math.sqrt(LAYERS))
            step = torch.exp(torch.rand(m.h) * math.log(100) + math.log(1e-3))
            m.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
            m.A_log.copy_(torch.arange(1, m.h + 1).log())
    return model


def batches(shard, seed, B, T):
    """Endless batches [B, T + 1] from random places of a shard."""
    tokens, rng = np.fromfile(shard, "<u2")[512:], np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(tokens) - T - 1, size=B)
        yield torch.from_numpy(np.stack([tokens[s:s + T + 1] for s in starts]).astype(np.int64))


def results(model, batch, stream):
    """Loss, logits, and the gradients of each group of layers as one vector."""
    model.zero_grad()
    out = logits(model, batch[:, :-1], stream)
    loss = F.cross_entropy(out.mT, batch[:, 1:])
    loss.backward()
    groups = {}
    for name, p in model.named_parameters():
        part = name.split(".")
        group = f"layers from {int(part[2]) // 12 * 12}" if part[1] == "layers" else "embedding, head"
        groups.setdefault(group, []).append(p.grad.double().flatten())
    return loss.item(), out.detach().double(), {group: torch.cat(g) for group, g in groups.items()}


def errors(shard, checkpoint=None):
    for seed in range(4):
        model = recurrent.load(checkpoint, torch.float32) if checkpoint else random_model(NANO, seed)
        batch = next(batches(shard, seed, 1, 256))
        want_loss, want, want_grads = results(model.double(), batch, None)
        for stream in ("bf16", "fp32"):
            got_loss, got, grads = results(model.float(), batch, stream)
            gradients = ", ".join(f"{g} {relative(grads[g], want_grads[g]):.4f}" for g in grads)
            print(f"seed {seed}, stream {stream}: loss {want_loss:.4f} {got_loss - want_loss:+.5f}, "
                  f"logits {relative(got, want):.4f}; gradients: {gradients}", flush=True)


def train(shard, *seeds, steps=400, warmup=40, lr=2e-3):
    for seed in map(int, seeds):
        for stream in ("bf16", "fp32", None):
            model, data = random_model(SMALL, seed), batches(shard, seed, 4, 64)
            optimizer = torch.optim.AdamW(recurrent.parameter_groups(model, 0.1), betas=(0.9, 0.95), foreach=True)
            losses = []
            for step in range(steps):
                rate = lr * min((step + 1) / warmup, (1 + math.cos(math.pi * step / steps)) / 2)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad()
                batch = next(data)
                loss = F.cross_entropy(logits(model, batch[:, :-1], stream).mT, batch[:, 1:])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            last = np.mean(losses[-steps // 8:])
            print(f"seed {seed}, stream {stream}: loss {last:.4f}, mean of the last {steps // 8} steps", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("errors", "train"):
        sys.exit(__doc__)
    model, tokens = random_model(SMALL, 0).double(), torch.arange(40).reshape(2, 20)
    assert relative(logits(model, tokens, None), model(tokens)) < 1e-12  # unrounded, it is recurrent.py's model
    {"errors": errors, "train": train}[sys.argv[1]](*sys.argv[2:])
