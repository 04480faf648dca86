#!/usr/bin/env python3
"""
lm-evaluation-harness on a checkpoint, answered by the trainer. Options that are not listed by --help are the
harness's own, and its tasks run unchanged:

    pip install -c scripts/requirements.txt lm_eval tokenizers
    scripts/eval/harness.py --init DIR --output_path out/results --tasks \\
        wikitext,lambada_openai,piqa,hellaswag,winogrande,arc_easy,arc_challenge,copa,openbookqa,sciq,boolq

are the paper's short tasks (results.py prints its table). Models trained on LongCrawl64 also need
--json-escape. RULER's tasks, with `pip install "lm_eval[ruler]" transformers`, read the checkpoint's tokenizer:

    scripts/eval/harness.py --init DIR --tasks ruler \\
        --metadata '{"tokenizer": "DIR", "max_seq_lengths": [4096]}'

LongBench as the paper's code has it, also with `pip install jieba fuzzywuzzy rouge`:

    scripts/eval/harness.py --init DIR --longbench --tasks longbench

A prompt of over 15,500 tokens, end of text included, keeps half of them from its beginning and half from its
end. In every task the first line of an answer that is not empty counts: the model writes as many tokens as
the task allows, line breaks that it begins with are removed, and the text is cut at the next one. Prompts are
the paper's: the harness's differ from them by a line break in triviaqa and samsum (before the question), lcc
and repobench-p (at the end). What still differs from the paper: arithmetic (bf16 in other kernels there), and
`longbench` also has the Chinese and synthetic sets, which the paper and results.py leave out.

From Python: import this file, and pass model="fox" to lm_eval.simple_evaluate with the arguments of Fox.

The trainer does what decides a score: it puts end-of-text before every context, prompt and rolling text,
moves white space that ends a context to the continuation, and takes the log-likelihood of
tokens(context + continuation) beyond the first len(tokens(context)).

The harness's own model gives the same numbers on the same folder (dev/test/eval/test_harness.py) if it, too,
puts end-of-text first, and does not cut:

    lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True,dtype=float32,\
        add_bos_token=True,max_length=65536 --tasks ...

with max_length=T alone in the second line for tasks with a rolling text, such as wikitext: the harness puts
end-of-text before it by itself, so there would be two, and cuts it into windows of T tokens, here the length
of training (seq_len in DIR/trainer.json). In transformers 4 add_bos_token does nothing, because the folder's
tokenizer has no template to put it in; there, also give tokenizer=COPY, a folder with a tokenizer.json that
has one (with_end_of_text of the same test).
"""
import json
import sys

from fox import Error, Parser, Tokenizer, Trainer, add_model_options, cut_at, pip_install, run

LONGBENCH_TOKENS = 15500  # of a prompt


def options_parser():
    parser = Parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--longbench", type=int, nargs="?", const=LONGBENCH_TOKENS, metavar="N",
                        help="LongBench as in the paper, prompts of at most N tokens (15500)")
    return parser


try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ImportError as e:
    if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):
        options_parser().print_help()
        sys.exit()
    sys.exit(f"error: Python package {e.name} is missing: {pip_install('lm_eval tokenizers')}")

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


@register_model("fox")
class Fox(LM):
    """
    A checkpoint. Arguments as the command line has them (fox.add_model_options). longbench: LongBench's tasks
    as the paper's code has them, with prompts of so many tokens at most. The harness passes batch_size,
    max_batch_size and device to every model; here the trainer decides.
    """

    def __init__(self, init, trainer, longbench=None, **options):
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):
            options.pop(name, None)
        self.trainer = Trainer(init, trainer, **options)
        self.longbench = longbench
        self.tokenizer = Tokenizer(init, options.get("json_escape")) if longbench else None

    def _ask(self, kind, requests, disable_tqdm, result):
        """[result(answer)] in the requests' order, with a progress bar."""
        results = [None] * len(requests)
        with tqdm(total=len(requests), desc=kind, disable=disable_tqdm) as bar:
            for i, answer in self.trainer.answers([{"type": kind, **r} for r in requests]):
                results[i] = result(answer)
                bar.update()
        return results

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [dict(zip(("context", "continuation"), r.args)) for r in requests]
        return self._ask("score", pairs, disable_tqdm, lambda a: (a["logprob"], a["greedy"]))

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        texts = [{"text": r.args[0]} for r in requests]
        return self._ask("rolling", texts, disable_tqdm, lambda a: a["logprob"])

    def generate_until(self, requests, disable_tqdm=False):
        asked = [self._generate(*r.args) for r in requests]
        long = [bool(self.longbench) and (r.task_name or "").startswith("longbench_") for r in requests]
        for request, r in ((a, r) for a, r, is_long in zip(asked, requests, long) if is_long):
            text = longbench_prompt(r.task_name, r.doc, request["prompt"])
            request.update(prompt=cut_middle(self.tokenizer, text, self.longbench), until=[])
        texts = self._ask("generate", asked, disable_tqdm, lambda a: a["text"])
        return [text.lstrip("\n").split("\n")[0] if is_long else cut_at(text, a["until"])
                for text, a, is_long in zip(texts, asked, long)]

    def _generate(self, prompt, gen_kwargs):
        options = normalize_gen_kwargs(gen_kwargs)
        sampling = {"temperature": 0.0, **{k: options.pop(k) for k in SAMPLING if k in options}}
        until, max_tokens = options.pop("until"), options.pop("max_gen_toks")
        del options["do_sample"]  # the temperature says it
        if options:
            raise Error(f"generation option {next(iter(options))}: not known to the trainer")
        return {"prompt": prompt, "max_tokens": max_tokens, "until": [u for u in until if u], **sampling}


def longbench_prompt(task, doc, prompt):
    """The paper's prompt, of the harness's for the same document."""
    name = task.removeprefix("longbench_").removesuffix("_e")
    if name in ("triviaqa", "samsum") and prompt.endswith(f"{doc['context']}\n{doc['question']}"):
        return prompt.removesuffix(doc["question"]) + "\n" + doc["question"]
    return prompt + "\n" if name in ("lcc", "repobench-p") and prompt.endswith("code:") else prompt


def cut_middle(tokenizer, text, most):
    """
    The ids of a text, without its middle if they and end of text are more than so many. As in the paper, the
    halves are joined as text, which is encoded again, and end of text is one token of the first.
    """
    ids, half = tokenizer.encode(text), most // 2
    if len(ids) + 1 <= most:
        return ids
    return tokenizer.encode(tokenizer.decode(ids[:half - 1]) + tokenizer.decode(ids[len(ids) - half:]))


def main():
    parser = options_parser()
    ours, theirs = parser.parse_known_args()
    if ours.longbench is not None and ours.longbench < 2:
        raise Error("--longbench: at least 2")
    from lm_eval.__main__ import cli_evaluate
    arguments = {k: v for k, v in vars(ours).items() if v is not None}
    sys.argv = ["lm_eval", "run", "--model", "fox", "--model_args", json.dumps(arguments), *theirs]
    try:
        cli_evaluate()
    except SystemExit as e:
        names = [word.partition("=")[0] for word in theirs if word.startswith("--")]
        for name in names if e.code == 2 else []:  # perhaps lm_eval does not know it either
            if near := parser.nearest(name):
                print(f"note: {name}: is {near} meant?", file=sys.stderr)
        raise
    except ImportError as e:  # a task's own
        raise Error(f"--tasks: a package is missing: {e}")
    except ValueError as e:
        if not str(e).startswith(("Tasks not found", "No tasks specified")):
            raise
        raise Error(f"{str(e).rstrip('.')}; `lm_eval ls tasks` lists the harness's own, --include_path DIR adds others")


if __name__ == "__main__":
    run(main)
