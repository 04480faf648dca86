#!/usr/bin/env bash
# --recipe of the trainer: what the published recipes are, and what is said of them in the plan, at the start of a run,
# in log and checkpoint, and when it resumes; how often a training reads its data. Tests ./train_fox, or TRAIN_FOX.
scratch=build/test/published
. dev/test/check.sh
out=$scratch/out
export OMP_NUM_THREADS=1
trainer_files
sizes="--set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=32"
run() { "$trainer" "$@"; }

# record FILE KEY...: a member of a JSON file or line
record() { "$python" -c 'import json, sys
node = json.loads(open(sys.argv[1]).readline() if sys.argv[1].endswith("l") else open(sys.argv[1]).read())
for key in sys.argv[2:]: node = node.get(key)
print(node)' "$@"; }

# Published recipes: in the plan, at the start of a run, in log and checkpoint, and when it resumes.
recipes() {
    while IFS='|' read -r options tokens lr recipe; do
        check "$options" run $options --dry-run
        said "training           $(printf %15s "$tokens") tokens"
        said "peak learning rate $lr,"
        equals "$recipe" "$(sed -n 's/^recipe  *//p' "$scratch/stdout")"
    done <<'END'
--model fox-pro-760m --recipe iclr|48318382080|0.002|iclr
--model transformer-llama-760m --recipe iclr|48318382080|0.0005|iclr
--model fox-pro-760m --recipe iclr --lr 1e-3 --set num_heads=12|48318382080|0.001|iclr, changed: lr 0.001 (0.002), num_heads 12 (24)
--model fox-pro-760m|16106127360|0.001|analysis
--model fox-llama-760m --recipe submission|16106127360|0.00125|submission
--model fox-llama-760m --recipe submission --lr-end 0|16106127360|0.00125|submission, changed: lr-end 0 (0.1)
--model fox-llama-125m --recipe submission --lr-schedule constant|2600000000|0.003|submission, changed: lr-schedule "constant" ("cosine"), lr-end 0 (0.1)
--model fox-pro-125m --recipe analysis --shuffle --json-escape|2684354560|0.002|analysis, changed: shuffle true (false)
--model fox-pro-nano|2097152|0.002|the preset's
--model fox-pro-nano --set document_reset=true --set pruning_rule=acp|2097152|0.002|the preset's, changed: pruning_rule "acp" ("ours"), document_reset true (false)
--model transformer-llama-nano --set rope_scaling=linear:4|2097152|0.002|the preset's, changed: rope_scaling {"rope_type":"linear","rope_theta":500000,"factor":4} (null)
--model gated-deltanet-760m|16106127360|0.001|the preset's
--model gated-deltanet-760m --recipe gdn --lr 1e-3|100000000000|0.001|gdn, changed: lr 0.001 (0.0004)
--model deltanet-125m --set document_reset=true|2684354560|0.002|analysis, changed: document_reset true (false)
END
    check "heads of 128" run --model fox-llama-760m --recipe submission --dry-run config
    said '"num_heads": 12'
    said "schedule                    cosine to 0.1 of the peak"
    check "another paper's lengths" run --model gated-deltanet-760m --recipe gdn --dry-run
    said "128 micro-batches of 1 sequence"
    for model in fox-pro-125m transformer-pro-760m deltanet-760m; do # it had LLaMA blocks
        dies "--recipe submission: has no row for $model" run --model $model --recipe submission --dry-run
    done

    # how often the data is read: 249 sequences of 16 tokens
    check "more tokens than there are" run --model fox-pro-nano --seq-len 16 --batch-tokens 64 --max-tokens 5976 --dry-run \
        --data "$shards/text.bin"
    said "data                          3984 tokens in 249 sequences, shuffled: the training reads them 1.5 times"
    check "enough tokens" run --model fox-pro-nano --seq-len 16 --batch-tokens 64 --max-tokens 3984 --dry-run \
        --data "$shards/text.bin"
    equals "data                          3984 tokens in 249 sequences, shuffled" "$(grep ^data "$scratch/stdout")"
    check "none yet" run --model fox-pro-nano --dry-run --data none
    said "data               cannot be used: 'none': no file matches"

    local small="$sizes --set vocab_size=257 --seq-len 16 --batch-tokens 64 --max-tokens 384 --warmup-tokens 64"
    local published="--model fox-llama-125m --recipe submission"
    rm -rf "$out"
    check "a run" run $published $small --data "$shards/text.bin" --out "$out" --max-steps 3
    said "recipe: submission, changed: shuffle true (false), seq-len 16 (16384), batch-tokens 64 (524288), max-tokens 384 (2600000000)"
    check "resumed" run $published --resume --out "$out" --max-steps 5
    dies "--recipe analysis: the run in $out has submission, which cannot change when it resumes" \
        run --recipe analysis --resume --out "$out"
    check "resumed again" run --resume --out "$out"
    equals "1.5 2.9339 2.4435 1.65 0.85649 0.36607 " \
        "$(sed -n 's/.*"event":"step".*"lr":\([^,]*\),.*/\1/p' "$out/log.jsonl" | awk '{ printf "%.5g ", 1e3 * $1 }')"
    for file in log.jsonl step_00000006/trainer.json; do
        equals submission "$(record "$out/$file" options recipe)"
        case $(record "$out/$file" recipe) in "submission, changed: shuffle true (false), seq-len 16 "*) pass ;; *) fail "$file: no recipe" ;; esac
    done
    equals 1 "$(record "$out/log.jsonl" epochs)"

    # several sequences of a document are no published recipe
    check "documents" run --model fox-pro-125m $small --shuffle --data "$shards/documents.bin" --dry-run
    said "sequences of a document 2 (1)"
    check "their first sequences" run --model fox-pro-125m $small --data "$shards/documents.bin" --dry-run
    equals 0 "$(grep -c "sequences of a document" "$scratch/stdout")"

    dies "--recipe iclr: the run in $out/step_00000006 has submission" \
        run --resume-from "$out/step_00000006" --recipe iclr --out "$scratch/branch"
    check "a run without a recipe" run --model fox-pro-nano $small --data "$shards/text.bin" --out "$scratch/preset" --max-steps 1
    dies "--recipe iclr: the run in $scratch/preset has none, which cannot change" run --recipe iclr --resume --out "$scratch/preset"
}

recipes
report
