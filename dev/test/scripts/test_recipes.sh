#!/usr/bin/env bash
# The recipes on LongCrawl64, with programs that write down their arguments: the trainer has all options that they give,
# the data gets its tokenizer, the checkpoints are told that the text is escaped, and what the source does not have is
# refused before anything begins.
cd "$(dirname "$0")/../../.." || exit 1
root=$PWD scratch=$PWD/build/test/recipes
. dev/test/check.sh
mkdir -p "$scratch/bin" "$scratch/data"
trainer=${TRAIN_FOX:-./train_fox}
[ -x "$trainer" ] || { fail "$trainer is not built"; report; }

# program PATH [COMMAND]: writes its arguments to PATH.log, a line a call, but for --dry-run and --help, which run the
# command
program() {
    printf '#!/bin/sh\ncase "$*" in *--dry-run* | *--help) %s ;; esac\necho "$*" >>"%s.log"\n' "${2:+exec $2 \"\$@\"}" "$scratch/$1" >"$scratch/$1"
    chmod +x "$scratch/$1"
}
for name in bin/make bin/mpirun bin/ssh bin/srun bin/nvidia-smi; do program $name; done
program train_fox "'$(realpath "$trainer")'"
program train_foxcu "'$(realpath "$trainer")'"
program data/longcrawl64 "'$root/data/longcrawl64'"
export PATH=$scratch/bin:$PATH
mkdir "$scratch/scripts"
cp -r scripts/*.sh scripts/slurm.sbatch scripts/shell "$scratch/scripts"
program scripts/check.sh

# clean: no program was called
clean() { rm -f "$scratch"/*.log "$scratch"/*/*.log; }
# script VARIABLES... FILE ARGUMENTS...: runs a script
script() { env -C "$scratch" "$@"; }
# called PROGRAM TEXT: its only call has the text
called() { equals "1 of 1" "$(grep -c -e "$2" "$scratch/$1.log") of $(wc -l <"$scratch/$1.log")"; }

# recipe FILE PROGRAM: the program was called with options of the trainer
recipe() {
    clean
    check "$1" script HOSTS=one:2 SOURCE=https://copy bash "scripts/$1" --seed 7 --log-every 3
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
RANKS=2 recipe longcrawl64.sh bin/mpirun
tokenized 2
called bin/mpirun "^-np 2 --bind-to none ./train_foxcu --model fox-pro-125m .*--micro-batch 1 "

# Each published recipe: MODEL, RECIPE, tokens of train
while read -r model name tokens; do
    clean
    check "$model $name" script MODEL="$model" RECIPE="$name" RANKS=2 SOURCE=https://copy scripts/longcrawl64.sh
    called bin/mpirun "--model $model --recipe $name --data .* --out out/$model-$name "
    equals 1 "$(grep -c -e "--split train --tokens $tokens .*--source https://copy --columns 16384" "$scratch/data/longcrawl64.log")"
done <<'END'
fox-pro-125m analysis 2684354560
fox-llama-125m submission 2600000000
transformer-pro-360m analysis 7516192768
fox-llama-760m analysis 16106127360
fox-llama-760m submission 16106127360
mamba2-760m iclr 48318382080
transformer-llama-760m iclr 48318382080
END
clean
dies "--recipe iclr: has no row for fox-pro-125m" script RECIPE=iclr scripts/longcrawl64.sh
check "arguments win" script scripts/longcrawl64.sh --max-tokens 1e9
equals 1 "$(grep -c -e "--split train --tokens 1000000000 " "$scratch/data/longcrawl64.log")"

# What the default copy does not have is refused before anything is downloaded or the GPU trainer is built.
refused() { # MESSAGE VARIABLES...
    clean
    dies "$1" script "${@:2}" scripts/longcrawl64.sh
    equals "train_fox data/longcrawl64" "$(cat "$scratch/bin/make.log")"
    check "nothing was begun" test ! -e "$scratch/data/longcrawl64.log"
}
if [ -x data/longcrawl64 ]; then
    refused "error: MODEL=fox-pro-760m: --tokens 16106127360: 983040 documents of 16384 tokens, 1.5 times the 655360 that the default source has of train (10 Gi tokens, 40 Gi with --columns 65536)" \
        MODEL=fox-pro-760m
    refused "MODEL=fox-pro-760m RECIPE=iclr: --tokens 48318382080: 2949120 documents of 16384 tokens, 4.5 times" \
        MODEL=fox-pro-760m RECIPE=iclr
    refused "737280 documents of 65536 tokens, 1.125 times" MODEL=fox-pro-760m RECIPE=iclr DOC_COLUMNS=65536
    dies "1.125 times" script MODEL=fox-pro-760m RECIPE=iclr DOC_COLUMNS=65536 scripts/longcrawl64.sh
    said "not as published, where tokens 0 to 16383 of each document are read alone, in order"
    clean
    check "REPEAT; COLUMNS is a terminal's width" script COLUMNS=80 MODEL=fox-pro-760m REPEAT=yes scripts/longcrawl64.sh
    equals 1 "$(grep -c -e "--columns 16384 --at-most" "$scratch/data/longcrawl64.log")"
    clean
    check "DOC_COLUMNS" script MODEL=fox-pro-760m DOC_COLUMNS=65536 scripts/longcrawl64.sh
    called train_foxcu "--data data/longcrawl64_65536_train_\*.bin --val-data data/longcrawl64_val_\*.bin --shuffle "
    check "SOURCE" script MODEL=fox-pro-760m SOURCE=https://copy scripts/longcrawl64.sh
else
    skip "data/longcrawl64 is not built"
fi
dies "DOC_COLUMNS=100: tokens of each document, 16384 as published" script DOC_COLUMNS=100 scripts/longcrawl64.sh
clean
check "DATA_ONLY" script DATA_ONLY=yes scripts/longcrawl64.sh
# no GPU: nothing is built or downloaded, but for DATA_ONLY
clean
printf '#!/bin/sh\necho "error: missing GPU: $*" >&2\nexit 1\n' >"$scratch/scripts/check.sh"
dies "missing GPU: need gpu" script scripts/longcrawl64.sh
check "nothing was called" test ! -e "$scratch/bin/make.log" -a ! -e "$scratch/data/longcrawl64.log"
check "DATA_ONLY without a GPU" script DATA_ONLY=yes scripts/longcrawl64.sh
program scripts/check.sh
check "no training" test ! -e "$scratch/train_foxcu.log"
tokenized 2

# Where data is made beforehand, it must be there and be enough.
dies "error: HOSTS is not set" scripts/multi_node_mpirun.sh
dies "error: $scratch/bin: not the repository's root: run sbatch there" env -C "$scratch/bin" bash "$root/scripts/slurm.sbatch"
for pair in multi_node_mpirun.sh:bin/mpirun slurm.sbatch:bin/srun; do
    file=${pair%:*} program=${pair#*:}
    clean
    dies "--data 'data/longcrawl64_train_*.bin': no file matches; DATA_ONLY=yes scripts/longcrawl64.sh writes it" \
        script HOSTS=one:2 bash scripts/$file
done
cat llmc/*/*.h llmc/*/*/*.h >"$scratch/text"
check "a document" data/text_to_shards --tokenizer gpt2 --vocab dev/test/fixtures/gpt2/vocab.bpe --doc-len 16384 \
    --out "$scratch/data/longcrawl64" "$scratch/text"
for pair in multi_node_mpirun.sh:bin/mpirun slurm.sbatch:bin/srun; do
    file=${pair%:*} program=${pair#*:}
    clean
    dies "the training reads them" script HOSTS=one:2 bash scripts/$file
    said "write more, or set REPEAT=yes" stderr
    check "nothing was begun" test ! -e "$scratch/$program.log"
    REPEAT=yes recipe $file $program
    called $program "--model fox-pro-760m "
done
rm "$scratch/data/"*.bin

# what follows the training is of the folder that was trained in
touch "$scratch/data/linux_train_000000.bin"
for out in "--out other" --out=other; do
    rm -f "$scratch/train_foxcu.log"
    check "gpu_quickstart.sh $out" env -C "$scratch" sh "$root/scripts/gpu_quickstart.sh" --out this $out --log-every 3
    equals 2 "$(wc -l <"$scratch/train_foxcu.log")"
    equals 1 "$(grep -c -- '--init other ' "$scratch/train_foxcu.log")"
done

# a quick start leaves the folder of another one, or of a trainer, that is running
mkdir -p "$scratch/out/quickstart/step_00000896"
touch "$scratch/data/corpus_train_000000.bin"
running() { # LOCK MESSAGE
    exec 8>"$scratch/out/$1"
    flock 8
    dies "$2" script scripts/quickstart.sh 8>&-
    exec 8>&-
    check "the folder is where it was" test -e "$scratch/out/quickstart" -a ! -e "$scratch/out/quickstart_1"
}
running quickstart.lock "out/quickstart: another quick start is running here"
running quickstart/lock "out/quickstart: a training is running here"
check "quickstart.sh" script scripts/quickstart.sh
said "the previous run is now in out/quickstart_1"

# sequences of a million tokens, over two GPUs
mkdir "$scratch/scripts/sweep"
cp scripts/sweep/million.sh "$scratch/scripts/sweep"
program data/text_to_shards
million() { script "$@" scripts/sweep/million.sh --max-tokens 256Mi; }
clean
dies "error: TREES: folders of source trees" million RANKS=2
check "which is said before anything is compiled" test ! -e "$scratch/bin/make.log"
check "million.sh" million TREES="one/ two/"
called data/text_to_shards "--document folder --skip-binary --doc-len 1Mi --val-fraction 0.05 --out data/million one/ two/$"
called bin/mpirun "^-np 2 --bind-to none ./train_foxcu --model fox-pro-125m --sequence-ranks 2 --seq-len 1Mi .*--val-data data/million_val_\*.bin "
options=$(sed -n 's/.*\(--model .*\)/\1/p' "$scratch/bin/mpirun.log")
set -f
check "options of the trainer" "$trainer" $options --dry-run --gpu H200 --ranks 2
set +f
said "1 micro-batch of 1 sequence, 1 at most on each of 1 group of 2 ranks"
clean
touch "$scratch/data/code_held_train_000000.bin"
check "held-out trees" million NAME=code TREES=one/ VAL_TREES=three/ RANKS=4 SEQUENCE_RANKS=2
equals "data/code_held three/,data/code one/" "$(sed 's/.*--out //' "$scratch/data/text_to_shards.log" | paste -sd,)"
called bin/mpirun "^-np 4 .*--sequence-ranks 2 .*--val-data data/code_held_train_\*.bin .*--out out/code-fox-pro-125m --resume --max-tokens 256Mi$"
# the held-out shards are those of the same conversion, which is one of these trees
cat >"$scratch/data/text_to_shards" <<'END'
#!/bin/sh
out=${*#*--out } out=${out%% *}
touch "${out}_train_000000.bin"
case $* in *--val-fraction*) touch "${out}_val_000000.bin" ;; *) rm -f "${out}_val_000000.bin" ;; esac
END
touch "$scratch/data/old_held_train_000000.bin"
for trees in TREES=one/ TREES=one/ TREES=; do
    clean
    check "held-out shards of another time" million NAME=old $trees
    called bin/mpirun "--val-data data/old_val_\*.bin "
done
made="made with TREES=one/ VAL_TREES= DOC_LEN=1Mi; set NAME to make others, or remove them"
dies "error: data/old_train_*.bin: $made" million NAME=old TREES=two/
dies "error: data/old_train_*.bin: $made" million NAME=old TREES=one/ VAL_TREES=three/
rm "$scratch/data/old_train_000000.bin"
clean
check "made again" million NAME=old TREES=one/ VAL_TREES=three/
called bin/mpirun "--val-data data/old_held_train_\*.bin "
report
