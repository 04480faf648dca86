#!/usr/bin/env bash
# The recipes on LongCrawl64, with programs that write down their arguments: the trainer has all options that they give,
# the data gets its tokenizer, and the checkpoints are told that the text is escaped.
cd "$(dirname "$0")/../../.." || exit 1
root=$PWD scratch=$PWD/build/test/recipes
rm -rf "$scratch"
mkdir -p "$scratch/bin" "$scratch/data"
. dev/test/check.sh
trainer=${TRAIN_FOX:-./train_fox}
[ -x "$trainer" ] || { fail "$trainer is not built"; report; }

# program PATH: writes its arguments to PATH.log, a line a call
program() { printf '#!/bin/sh\necho "$*" >>"%s.log"\n' "$scratch/$1" >"$scratch/$1" && chmod +x "$scratch/$1"; }
for name in bin/make bin/mpirun bin/srun bin/nvidia-smi train_foxcu data/longcrawl64; do program $name; done
export PATH=$scratch/bin:$PATH

# recipe FILE PROGRAM: the program was called with options of the trainer
recipe() {
    rm -f "$scratch"/*.log "$scratch"/*/*.log
    check "$1" env -C "$scratch" GPUS=2 HOSTS=one:2 bash "$root/scripts/$1" --seed 7 --log-every 3
    check "$2 was called" test -s "$scratch/$2.log"
    options=$(sed -n 's/.*\(--model .*\)/\1/p' "$scratch/$2.log")
    set -f
    check "$1: options of the trainer" "$trainer" $options --dry-run
    set +f
    for option in "--json-escape" "--seed 7" "--resume" "--data data/longcrawl64_train_*.bin"; do
        case " $options " in *" $option "*) pass ;; *) fail "$1: no $option" ;; esac
    done
}
# tokenized N: all N calls of data/longcrawl64 name GPT-2's vocabulary, which exists
tokenized() {
    equals "$1" "$(grep -c -- '--vocab dev/test/fixtures/gpt2/vocab.bpe' "$scratch/data/longcrawl64.log")"
    equals "$1" "$(wc -l <"$scratch/data/longcrawl64.log")"
}
check "the vocabulary" test -s dev/test/fixtures/gpt2/vocab.bpe
recipe longcrawl64.sh train_foxcu
tokenized 2
rm -f "$scratch"/*.log "$scratch"/*/*.log
dies "the default copy of LongCrawl64 has 10 Gi" env -C "$scratch" MODEL=fox-pro-760m sh "$root/scripts/longcrawl64.sh"
check "nothing was begun" test ! -e "$scratch/bin/make.log"
check "with SOURCE" env -C "$scratch" MODEL=fox-pro-760m SOURCE=/copy sh "$root/scripts/longcrawl64.sh"
equals 2 "$(grep -c -- '--source /copy' "$scratch/data/longcrawl64.log")"
recipe multi_gpu.sh bin/mpirun
tokenized 2
recipe multi_node_mpirun.sh bin/mpirun
recipe slurm.sbatch bin/srun
# what follows the training is of the folder that was trained in
mkdir "$scratch/scripts"
program scripts/check.sh
touch "$scratch/data/linux_train_000000.bin"
for out in "--out other" --out=other; do
    rm -f "$scratch/train_foxcu.log"
    check "gpu_quickstart.sh $out" env -C "$scratch" sh "$root/scripts/gpu_quickstart.sh" --out this $out --log-every 3
    equals 2 "$(wc -l <"$scratch/train_foxcu.log")"
    equals 1 "$(grep -c -- '--init other ' "$scratch/train_foxcu.log")"
done
report
