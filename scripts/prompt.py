#!/usr/bin/env python3
"""
Continues a text with a checkpoint, whatever its tokenizer:

    scripts/prompt.py --init out/RUN/step_00001000 --prompt 'Once upon' --generate 200

The options are those of `train_fox --init DIR --prompt TEXT --generate N`, which does the same without Python
for bytes and for GPT-2's vocabulary. Here DIR/tokenizer.json makes the token ids that the trainer gets, and
text of those that come back (`pip install -c scripts/requirements.txt tokenizers`). A text is printed when it
is complete; the trainer stays for all lines of --prompt -.
"""
import itertools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "eval"))
from fox import Error, Parser, Trainer, add_model_options, run  # noqa: E402

CUTS = ("temperature", "top_k", "top_p", "min_p")


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
    for name in CUTS:
        if not math.isfinite(getattr(options, name) or 0):
            raise Error(f"--{name.replace('_', '-')} {getattr(options, name)}: not a finite number")
    for name, text in [("prompt", options.prompt), *(("stop", text) for text in options.stop)]:
        check_text(f"--{name}", text)
    return options


def check_text(name, text):
    """An Error where Python has made surrogates of bytes that are not UTF-8, or argparse, before Python 3.13, [] of --."""
    if text == []:
        raise Error(f"{name} --: this text alone is taken for the end of the options")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Error(f"{name}: is not UTF-8")


def prompts(options):
    if options.prompt != "-":
        yield options.prompt
        return
    if sys.stdin is None:
        raise Error("--prompt -: standard input is closed")
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number in itertools.count(1):
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        check_text(f"--prompt -: line {number}", line)
        yield line.removesuffix("\n")


def main():
    options = parse()
    sys.stdout.reconfigure(encoding="utf-8")  # as the trainer writes it, whatever the locale
    names = ("init", "trainer", "vocab", "json_escape", "seq_len", "workers")
    trainer = Trainer(**{name: getattr(options, name) for name in names}, quiet=True)
    cuts = {name: getattr(options, name) for name in CUTS}
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
