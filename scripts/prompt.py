#!/usr/bin/env python3
"""
Continues a text with a checkpoint, whatever its tokenizer:

    scripts/prompt.py --init out/RUN/step_00001000 --prompt 'Once upon' --generate 200

The options are those of `train_fox --init DIR --prompt TEXT --generate N`, which does the same without Python
for bytes and for GPT-2's vocabulary. Here DIR/tokenizer.json makes the token ids that the trainer gets, and
text of those that come back (`pip install -c scripts/requirements.txt tokenizers`). A text is printed when it
is complete; the trainer stays for all lines of --prompt -.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "eval"))
from fox import Error, Parser, Trainer, add_model_options, run  # noqa: E402


def parse():
    parser = Parser(__doc__)
    add_model_options(parser)
    add = parser.add_argument_group("text").add_argument
    add("--prompt", default="", metavar="TEXT", help="text to continue; -: standard input, a line each")
    add("--generate", type=int, default=128, metavar="N", help="at most N tokens, until end of text (128)")
    add("--samples", type=int, default=1, metavar="N", help="of each prompt (1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--temperature", type=float, metavar="X", help="0: the most likely token (1)")
    add("--top-k", type=int, metavar="N", help="of the N most likely tokens")
    add("--top-p", type=float, metavar="X", help="of the most likely ones with this total probability")
    add("--min-p", type=float, metavar="X", help="of those at least X times as likely as the most likely")
    add("--seed", type=int, default=1, metavar="N", help="of the first sample; the next ones follow (1)")
    options = parser.parse_args()
    if options.generate < 1 or options.samples < 1:
        raise Error("--generate and --samples must be at least 1")
    return options


def prompts(options):
    if options.prompt != "-":
        yield options.prompt
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.removesuffix("\n")


def main():
    options = parse()
    names = ("init", "trainer", "vocab", "json_escape", "seq_len", "workers")
    trainer = Trainer(**{name: getattr(options, name) for name in names}, quiet=True)
    cuts = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    common = {"type": "generate", "max_tokens": options.generate, "until": options.stop,
              **{name: value for name, value in cuts.items() if value is not None}}
    for prompt in prompts(options):
        seeds = range(options.seed, options.seed + options.samples)
        answers = dict(trainer.answers([{**common, "prompt": prompt, "seed": seed} for seed in seeds]))
        for i in range(options.samples):
            if options.samples > 1:
                print(f"--- sample {i + 1} of {options.samples}")
            print(prompt + answers[i]["text"], flush=True)


if __name__ == "__main__":
    run(main)
