"""
CPU baseline: speed and memory of a float32 training step (forward, backward, clipping, AdamW) of fox-pro-nano
in eager PyTorch, with the model of fox.py and a faster attention. Called by bench_cpu.sh. Prints a
line of JSON: median step time, tokens per second, and peak memory of the process, including import_rss_mib
for PyTorch.

    python dev/reference/bench_cpu.py --threads 1 --batch 4
"""
import argparse
import json
import math
import resource
import statistics
import time

import torch
import torch.nn.functional as F

import fox

T, V = 512, 257
NANO = dict(hidden_size=128, num_heads=2, num_hidden_layers=4, vocab_size=V)


# faster versions of fox.attention, of a model without a window: cum_logf in float32, sufficient at T = 512; fewer
# T x T operations

def softmax_attention(q, k, v, cum_logf, window):
    assert window is None
    s = (q / math.sqrt(q.shape[-1])) @ k.mT
    s += cum_logf.float()[..., :, None]
    s -= cum_logf.float()[..., None, :]
    s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return s.softmax(-1) @ v


def flash_attention(q, k, v, cum_logf, window):
    """Without a T x T matrix: the bias c_i - c_j, c = cum_logf, is 2 more channels of q and k (80 in all)."""
    assert window is None
    root, pad = math.sqrt(q.shape[-1]), 16
    c = root * cum_logf.float()[..., None]
    one, zeros = torch.ones_like(c), c.new_zeros(*c.shape[:-1], pad - 2)
    q, k = torch.cat((q, c, one, zeros), -1), torch.cat((k, one, -c, zeros), -1)
    o = F.scaled_dot_product_attention(q, k, F.pad(v, (0, pad)), is_causal=True, scale=1 / root)
    return o[..., :-pad]


ATTENTION = dict(naive=fox.attention, softmax=softmax_attention, flash=flash_attention)


def peak_rss_mib():
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--threads", type=int, default=1)
    args.add_argument("--batch", type=int, default=4, help="sequences of 512 tokens per step")
    args.add_argument("--steps", type=int, default=10, help="timed steps, after two warm-up steps")
    args.add_argument("--attention", choices=ATTENTION, default="flash")
    args = args.parse_args()

    torch.set_flush_denormal(True)  # strong decay gives denormal weights, which halve PyTorch's speed
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    import_rss_mib = peak_rss_mib()
    model = fox.Fox(fox.make_config("fox-pro", **NANO))
    optimizer = torch.optim.AdamW(fox.parameter_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    stream = torch.randint(V, (args.batch, T + 1))
    tokens, targets = stream[:, :-1], stream[:, 1:]

    fox.attention = ATTENTION[args.attention]
    times = []
    for _ in range(2 + args.steps):
        start = time.perf_counter()
        model.loss(tokens, targets).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    step = statistics.median(times[2:])
    print(json.dumps(dict(ms_per_step=round(step * 1e3, 1), tokens_per_s=round(args.batch * T / step),
                          peak_rss_mib=peak_rss_mib(), import_rss_mib=import_rss_mib)))


if __name__ == "__main__":
    main()
