"""
Tokens a second of transformers' `generate` on a checkpoint's folder, which runs its modeling_fox.py: what the
trainer's inference is compared with in dev/SPEED.md. The trainer's own figures: --bench.

    python dev/reference/bench_generate.py DIR [--context 1024] [--tokens 64] [--batch 1,64] [--dtype bfloat16]

The prompts are random tokens. A figure is the time of the longer of two generations less that of the shorter, so
that reading the prompt is not part of it; of each the best of three counts, after one to warm up.
"""
import argparse
import time

import torch
import transformers


def seconds(model, prompts, tokens):
    start = time.perf_counter()
    model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, min_new_tokens=tokens,
                   max_new_tokens=tokens, pad_token_id=0)
    if prompts.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.dir, trust_remote_code=True, torch_dtype=getattr(torch, options.dtype)).to(device).eval()
    torch.manual_seed(0)
    for batch in map(int, options.batch.split(",")):
        prompts = torch.randint(model.config.vocab_size, (batch, options.context), device=device)
        short, long = (min(seconds(model, prompts, n) for _ in range(4)) for n in (2, 2 + options.tokens))
        rate = batch * options.tokens / (long - short)
        print(f"{batch} x 1 token behind {options.context}: {1e3 * (long - short) / options.tokens:.2f} ms, "
              f"{rate:.0f} tokens/s; transformers {transformers.__version__}, {device}, {options.dtype}")


if __name__ == "__main__":
    main()
