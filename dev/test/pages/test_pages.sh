#!/usr/bin/env bash
# The pages: their links lead somewhere, they are short (pages.py has the numbers), and the README's commands run on a CPU,
# on data and a checkpoint made for them.
cd "$(dirname "$0")/../../.." || exit 1
root=$PWD scratch=build/test/pages
. dev/test/check.sh
mkdir -p $scratch/data
export OMP_NUM_THREADS=1

check "links and sizes" python3 dev/test/pages/pages.py
equals "" "$(cat $scratch/stdout)"

for name in $(grep -oE '\b(scripts|dev|data)/[a-zA-Z0-9_/]+\.(sh|py|cu|md)\b' README.md); do
    check "$name in README.md" test -f "$name"
done
for target in $(grep -oE '\bmake [a-z][a-z_-]+' README.md | cut -d ' ' -f 2); do
    check "make $target in README.md" grep -q "^$target:" Makefile
done

# commands: those of README.md that call the trainer, a line each
commands() { sed -n 's/^    //p' README.md | sed -e ':a' -e '/\\$/N; s/\\\n *//; ta' | grep './train_fox'; }

check "shards" data/text_to_shards --tokenizer byte --val-fraction 0.1 --out $scratch/data/corpus llmc/base llmc/model
model="--model fox-pro-nano --set num_hidden_layers=1 --seq-len 64 --batch-tokens 64 --max-steps 1 --data data/corpus_train_*.bin"
set -f
check "a checkpoint" env -C $scratch "$root/train_fox" $model --out out/quickstart
set +f
mv $scratch/out/quickstart/step_00000001 $scratch/out/quickstart/step_00000896
cp $scratch/data/corpus_train_000000.bin $scratch/data/longcrawl64_train_000000.bin
n=0
while read -r command; do
    n=$((n + 1)) options=${command#*./train_fox}
    case $command in
    mpirun*) options="${options#cu} --dry-run --gpu H100 --ranks 8" ;;
    *--eval*) options+=" --val-tokens 2Ki" ;;
    *--model*) options+=" --max-steps 1 --batch-tokens 512 --val-tokens 512" ;;
    esac
    check "$command" env -C $scratch sh -c "'$root/train_fox'$options"
done < <(commands)
equals "3 commands" "$n commands"
report
