#!/bin/sh
# Compares a training step of fox-pro-nano with the same model in eager float32 PyTorch (bench_cpu.py), with
# the same batch and number of threads. Prints PyTorch's version, tokens per second, peak memory and their ratios.
#
#     dev/reference/bench_cpu.sh        environment: PYTHON (with torch), THREADS, BATCH, STEPS
. "$(dirname "$0")/../../scripts/shell/help.sh"
set -eu
python=${PYTHON:-python3} threads=${THREADS:-$(nproc)} batch=${BATCH:-8} steps=${STEPS:-10}

"$python" -c 'import torch' 2>/dev/null ||
    die "$python has no PyTorch; set PYTHON to one that has it (dev/reference/README.md)"
report=$(OMP_NUM_THREADS=$threads ./train_fox --model fox-pro-nano --bench "$steps" --micro-batch "$batch" \
    --batch-tokens $((512 * batch)))
# by the units, wherever they stand in the lines of the step and of the memory
ours=$(echo "$report" | sed -n 's|^ *step .* \([0-9.]*\) tokens/s.*|\1|p; s|^ *host memory.* \([0-9.]*\) MiB.*|\1|p' | xargs)
case $ours in
*' '*) ;;
*) die "no lines 'step ... tokens/s' and 'host memory ... MiB' in what ./train_fox --bench prints: $report" ;;
esac
echo "$("$python" -c 'import torch; print("PyTorch", torch.__version__)'), threads: $threads"
printf '%-28s %10s %10s\n' "threads $threads, batch $batch" tokens/s MiB
printf '%-28s %10.0f %10.0f\n' train_fox $ours
for attention in flash softmax; do
    report=$("$python" dev/reference/bench_cpu.py --threads "$threads" --batch "$batch" --steps "$steps" --attention $attention)
    theirs=$(echo "$report" |
        "$python" -c 'import json, sys; r = json.load(sys.stdin); print(r["tokens_per_s"], r["peak_rss_mib"])')
    printf '%-28s %10.0f %10.0f\n' "PyTorch eager, $attention" $theirs
    echo "$ours $theirs" | awk '{ printf "%-28s %9.2fx %9.2fx\n", "  train_fox / PyTorch", $1 / $3, $2 / $4 }'
done
