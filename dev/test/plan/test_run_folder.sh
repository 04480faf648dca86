#!/usr/bin/env bash
# A run's folder, by commands that train nothing in it: a plan of the run, a run at
# its end, and records of options that are others today.
scratch=build/test/run_folder
. dev/test/check.sh
export OMP_NUM_THREADS=1
trainer_files
data="--data $scratch/files/shards/text.bin"
tiny="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=32
    --seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128"
# shellcheck disable=SC2086
train() { "$trainer" $tiny $data "$@"; }
resume() { "$trainer" --resume --out "$@"; }
# last OUT: the newest checkpoint
last() { find "$1" -name 'step_*' | sort | tail -n 1; }

# the plan is the run's, with what the command changes
run=$scratch/run
check "a run of three steps" train --out "$run" --max-steps 3
cp -r "$run" "$scratch/before"
check "--dry-run of a run" resume "$run" --dry-run config
said '"hidden_size": 32'
said "64 tokens: 1 micro-batch of 4 sequences"
said "1280 tokens: 20 steps, peak learning rate 0.002"
said "3 of $run/step_00000003: 17 steps to train"
check "with another micro-batch" resume "$run" --dry-run --micro-batch 2
said "64 tokens: 2 micro-batches of 2 sequences"
dies "--seq-len 32: the run in $run has 16, which cannot change when it resumes" resume "$run" --dry-run --seq-len 32
check "nothing is changed" diff -r "$run" "$scratch/before"
dies "has no checkpoint to resume from: give --model NAME or --init DIR" resume "$scratch/nowhere" --dry-run
check "nor made" test ! -e "$scratch/nowhere"
for how in --dry-run ""; do # a run would start anew in there
    dies "--out $run/step_00000003: is a checkpoint: give the folder of its run" train --out "$run/step_00000003" --resume $how
done
dies "--out $run/step_00000003: is a checkpoint: give the folder of its run" train --out "$run/step_00000003"
check "nothing is changed in it" diff -r "$run" "$scratch/before"

# a newest folder without a model is passed over by --init, by the scripts, and by --resume
dies "$run/step_00000003: config.json: model_type is " python3 scripts/hf/to_llama.py "$run" "$scratch/llama"
check "a Llama" "$trainer" --model transformer-llama-nano --set num_kv_heads=1 --seq-len 16 --batch-tokens 16 --max-steps 1 $data --out "$scratch/llama_run"
limited() { (ulimit -f 1000; "$@"); } # KiB, fewer than the weights
dies "$scratch/llama: cannot write: File too large" limited python3 scripts/hf/to_llama.py "$scratch/llama_run" "$scratch/llama"
equals "" "$(find "$scratch" -maxdepth 1 -name '*llama*' ! -name llama_run)"
check "with room" python3 scripts/hf/to_llama.py "$scratch/llama_run" "$scratch/llama"
dies "error: $scratch/nowhere/config.json: No such file or directory" python3 scripts/hf/to_llama.py "$scratch/nowhere" "$scratch/llama"
dies "$scratch/llama: exists already" python3 scripts/hf/to_llama.py "$scratch/llama_run" "$scratch/llama"
# shellcheck disable=SC2086
for from in llama llama_run; do # the weights come back, under our names
    check "the tensors of $from" "$trainer" --init "$scratch/$from" --dump "$scratch/$from.dump" $data --seq-len 16 --batch-tokens 16
done
check "the same model" cmp "$scratch/llama.dump" "$scratch/llama_run.dump"

# YaRN without the length of the training before: as in transformers that of the folder's sequences
cp -r "$scratch/llama_run/step_00000001" "$scratch/yarn"
# scaled JSON: makes it the rotations of that folder; llama_of [OPTION...]: converts it
scaled() { sed -i "s/\"max_position_embeddings.*/\"max_position_embeddings\": 16, $1,/" "$scratch/yarn/config.json"; }
llama_of() { rm -rf "$scratch/longer" && python3 scripts/hf/to_llama.py "$scratch/yarn" "$scratch/longer" "$@"; }
# written KEY: what config.json of the Llama has
written() { sed -n "s/^ *\"$1\": \(.*[^,]\),*$/\1/p" "$scratch/longer/config.json"; }
scaled '"rope_parameters": {"rope_type": "yarn", "factor": 4}'
check "YaRN" llama_of
equals "16 64" "$(written original_max_position_embeddings) $(written max_position_embeddings)"
check "YaRN with a length of its own" llama_of --length 48
equals "16 48" "$(written original_max_position_embeddings) $(written max_position_embeddings)"
scaled '"rope_parameters": {"rope_type": "yarn", "factor": 4}, "rope_scaling": {"rope_type": "linear", "factor": 2}'
check "both keys of transformers" llama_of
equals '"linear"' "$(written rope_type)" # the older goes before
scaled '"rope_parameters": {"rope_theta": 500000}'
check "no rope_type" llama_of
scaled '"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8}'
sed -i 's/"max_position_embeddings": 16, //' "$scratch/yarn/config.json"
check "YaRN as save_pretrained writes it" llama_of
equals "8 32" "$(written original_max_position_embeddings) $(written max_position_embeddings)"

mkdir "$scratch/cut"
cp "$scratch/llama/config.json" "$scratch/cut"
sed 's/up_proj/op_proj/' "$scratch/llama/model.safetensors" >"$scratch/cut/model.safetensors"
# shellcheck disable=SC2086
dies "tensor 'model.layers.0.mlp.up_proj.weight' is missing" "$trainer" --init "$scratch/cut" --dump "$scratch/cut.dump" $data --seq-len 16 --batch-tokens 16
cp -r "$run" "$scratch/newest"
mkdir "$scratch/newest/step_00000030"
passed_over() {
    check "an empty folder: $*" "$@"
    said "warning: $scratch/newest/step_00000030" stderr
    said "; going back to the checkpoint before it" stderr
}
passed_over "$trainer" --init "$scratch/newest" --dry-run
passed_over resume "$scratch/newest" --dry-run
passed_over python3 scripts/prompt.py --trainer "$trainer" --init "$scratch/newest" --generate 2
mkdir -p "$scratch/no_model/step_00000030"
for program in "$trainer" "python3 scripts/prompt.py --trainer $trainer"; do
    # shellcheck disable=SC2086
    dies "$scratch/no_model: none of its checkpoints has config.json and model.safetensors" $program --init "$scratch/no_model" --generate 2
done

# at its end, or where --max-steps is
check "behind --max-steps" resume "$run" --max-steps 1
said "nothing left to do: the run is at step 3 of 20, behind --max-steps 1"
check "at --max-steps" resume "$run" --max-steps 3
said "nothing left to do: the run is at step 3 of 20, at --max-steps 3"
dies "--lr 0.1 (was 0.002): the run in $run is at step 3 of 20, behind --max-steps 2, where nothing is left to train" \
    resume "$run" --lr 0.1 --max-steps 2

# A longer warm-up on the way lets the learning rate fall and rise again; a shorter one, or the same, does not
check "a run in its warm-up" train --out "$scratch/rise" --max-steps 1
check "the same warm-up" resume "$scratch/rise" --max-steps 2
equals "" "$(cat "$scratch/stderr")"
check "one that ended within the last step" train --out "$scratch/ragged" --warmup-tokens 40 --max-steps 1
check "goes on" resume "$scratch/ragged" --max-steps 2
equals "" "$(cat "$scratch/stderr")"
check "a longer one" resume "$scratch/rise" --max-steps 3 --warmup-tokens 640
said "at 128 tokens the learning rate falls, from 0.75 to 0.25 of --lr, and rises again up to 640: --warmup-tokens was 128" stderr
equals 1 "$(grep -c '"event":"warning","step":2,"text":"at 128 tokens the learning rate falls' "$scratch/rise/log.jsonl")"
check "a shorter one" resume "$scratch/rise" --max-steps 4 --warmup-tokens 320
equals "" "$(cat "$scratch/stderr")"
check "behind the peak" resume "$scratch/rise" --max-steps 12
check "a longer one" resume "$scratch/rise" --max-steps 13 --warmup-tokens 1024
said "at 768 tokens the learning rate rises again, from 0.604 of --lr, up to 1024: --warmup-tokens was 320" stderr

dies "--data GLOB is missing: the shards to train on; data/README.md tells how" "$trainer" $tiny
# A command that fails before it has written anything leaves no lock, and no folder that it has made
mkdir -p "$scratch/empty" "$scratch/full"
touch "$scratch/full/notes"
for folder in "$scratch/made/run" "$scratch/empty" "$scratch/full"; do
    dies "'none': no file matches" "$trainer" $tiny --data none --out "$folder"
done
equals "empty full full/lock full/notes made" "$(cd "$scratch" && find empty full made | LC_ALL=C sort | xargs)"

report
