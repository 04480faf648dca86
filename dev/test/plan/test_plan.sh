#!/usr/bin/env bash
# --dry-run for a GPU of another machine: names of GPUs, memory, the levels that fit, hours from measured rates or an
# MFU; the CPU's own plan. A GPU trainer in build/gpu is compared by dev/test/check_without_gpu.sh.
scratch=build/test/plan
. dev/test/check.sh
mkdir -p $scratch
plan() { ${TRAIN_FOX:-./train_fox} --dry-run "$@"; }

# line TEXT: the numbers of the last plan's line that begins with TEXT
line() { sed -n "s/^ *$1 *//p" $scratch/stdout; }
mib() { line "$1" | awk '{ print $2 == "GiB" ? 1024 * $1 : $1 }'; }
# planned: hours of the last plan's time, of a GPU's by its GPU-hours, which have more digits
planned() {
    line time | awk '{
        split("s 3600 minutes 60 hour 1 hours 1 days 0.041666667 years 0.00011407955", unit)
        for (i = 1; unit[i] != $2; i += 2) if (i > 11) exit 1
        h = $1 / unit[i + 1]
        for (i = 3; i < NF; i++) { if ($i == "on") gpus = $(i + 1); if ($(i + 1) ~ /^GPU-hours/) of_gpus = $i }
        if (of_gpus && (of_gpus / gpus > 1.01 * h || of_gpus / gpus < 0.99 * h)) exit 1
        print of_gpus ? of_gpus / gpus : h }'
}
# chosen GPU LEVEL: the level of recomputation that the last plan has for the GPU, and whether it is enough
chosen() { equals "$1; recompute $2" "$(grep "^${1%%:*}: " $scratch/stdout | cut -d: -f1,2)"; }
# close WANT GOT: at most 1% apart
close() {
    if awk -v a="$1" -v b="$2" 'BEGIN { exit !(b >= 0.99 * a && b <= 1.01 * a && a > 0) }'; then
        pass
    else
        fail "$2 instead of $1"
    fi
}

# Memory in use, of the GPU trainer's own plan and of runs on an H100 and two H200s (dev/RESULTS.md), which had 2,560
# rows of logits in memory, where 5,632 are now
logits_more=$(((5632 - 2560) * 50304 * 2 >> 20))
check "760m" plan --model fox-pro-760m --gpu H100 --recompute fused
close $((33690 + logits_more)) "$(mib memory)" # 32.9 GiB measured
chosen "H100: 79.1 GiB" fused
close "$((836730432 * 12 / 1048576))" "$(mib checkpoint)"
said "the newest 3 are kept"
check "two ranks" plan --model fox-pro-760m --gpu H200 --ranks 2 --recompute fused
close $((29900 + logits_more)) "$(mib memory)" # 29.2 GiB measured
check "24 GiB" plan --model fox-pro-760m --gpu 4090
chosen "4090: 23.6 GiB" block
said "--recompute none   largest micro-batch that fits: 0 sequences"
check "one sequence of one" plan --model fox-pro-760m --gpu H200 --batch-tokens 16Ki
said "largest micro-batch that fits: 1 sequence"
if grep -q "fits: 1 sequences" $scratch/stdout; then fail "1 sequences"; else pass; fi
check "16 GiB" plan --model fox-pro-760m --gpu-memory 16
said "a GPU: 16.0 GiB; recompute block is not enough"
said "not known without the GPU's speed: --gpu names it"
check "another level fits" plan --model fox-pro-760m --gpu-memory 36 --recompute none
said "a GPU: 36.0 GiB; recompute none is not enough: give --recompute fused"
check "the last level" plan --model fox-pro-760m --gpu-memory 16 --recompute none
said "recompute none is not enough: lower --seq-len"
check "a level" plan --model fox-pro-125m --gpu A100 --gpu-memory 40 --recompute qkv
chosen "A100: 40.0 GiB" qkv

# The largest micro-batch is planned to fit, the next one is not
for level in none fused qkv block; do
    check $level plan --model fox-pro-760m --gpu H200 --recompute $level --batch-tokens 16Mi
    most=$(sed -n "s/.*--recompute $level .*fits: \([0-9]*\) seq.*/\1/p" $scratch/stdout)
    for more in 0 1; do
        check "$level, $more more" plan --model fox-pro-760m --gpu H200 --recompute $level --micro-batch $((most + more)) \
            --batch-tokens $(((most + more) * 16384))
        chosen "H200: 139.8 GiB" "$level$([ $more = 0 ] || echo " is not enough")"
    done
done

# Hours: the measured rates themselves, tokens / rate
hours() { close "$(awk -v t="$1" -v r="$2" 'BEGIN { print t / r / 3600 }')" "$(planned)"; }
check "measured" plan --model fox-pro-125m --gpu H100
hours 2684354560 259297
said "the MFU measured with fox-pro-125m at 16384 tokens on an H100, nothing pruned"
said "half of attention pruned, as with gates spread over all lengths: 2.12 hours (350928 tokens/s)"
said "while gates are as they begin: 1.35 hours (554118 tokens/s)"
check "measured" plan --model transformer-llama-760m --gpu h200
hours 16106127360 66262
check "measured with --recompute block" plan --model fox-pro-760m --gpu H100 --seq-len 64Ki --recompute block
hours 16106127360 18343
check "without pruning" plan --model fox-pro-125m --gpu H100 --set log_pruning_tolerance=null
hours 2684354560 259297
check "a part of the tokens" plan --model fox-pro-125m --gpu H100 --max-tokens 1e9
hours 1e9 259297

# By model FLOPs where the row is of another size: 360m has 6 x 367,339,904 + 6 x 24 x 1024 x 16384 a token
check "the nearest" plan --model fox-pro-360m --gpu H100
said "the MFU measured with fox-pro-760m at 16384 tokens on an H100"
hours 7516192768 $((58448 * (6 * 759512640 + 6 * 24 * 1536 * 16384) / (6 * 367339904 + 6 * 24 * 1024 * 16384)))
check "a Transformer" plan --model transformer-pro-125m --gpu H200
said "transformer-pro-125m at"
check "windows of its own" plan --model fox-pro-local-125m --gpu H100
hours 2684354560 "$(awk 'BEGIN { flops = 6 * 123910800; layer = 6 * 768
    print 259297 * (flops + 12 * layer * 16384) / (flops + layer * (3 * 16384 + 9 * (4096 - 256))) }')"
check "far" plan --model fox-pro-nano --gpu H100
said "not known: no model near this one was measured; --mfu plans without"
check "far, with --mfu" plan --model fox-pro-nano --gpu H100 --mfu 5
hours 2097152 "$(awk 'BEGIN { print 0.05 * 989.4e12 / (6 * 1152776 + 6 * 4 * 128 * 512) }')"

# --mfu, and GPUs without a measurement: peak x MFU / model FLOPs
check "--mfu" plan --model fox-pro-125m --gpu A100 --mfu 50
hours 2684354560 "$(awk 'BEGIN { print 0.5 * 312e12 / 1649402640 }')"
said "an MFU of 50%, as --mfu says"
check "--mfu before a measurement" plan --model fox-pro-125m --gpu H100 --mfu 50
hours 2684354560 "$(awk 'BEGIN { print 0.5 * 989.4e12 / 1649402640 }')"
check "assumed" plan --model fox-pro-125m --gpu L40S
hours 2684354560 "$(awk 'BEGIN { print 0.4 * 362e12 / 1649402640 }')"
said "an MFU of 40%, assumed"

# N GPUs: 98% of N times one, 93% where they share sequences, and a step lasts as long as its busiest rank
check "eight" plan --model fox-pro-760m --gpu H200 --ranks 8
hours 16106127360 "$(awk 'BEGIN { print 58749 * 8 * 0.98 }')"
check "twelve, of which eight have three sequences" plan --model fox-pro-760m --gpu H200 --ranks 12
hours 16106127360 "$(awk 'BEGIN { print 58749 * 32 / 3 * 0.98 }')"

# Sequences over several GPUs: memory, and hours as of their sum. 203 GB over 8 GPUs for sequences of a million tokens
# and about 25 more for the exchange
long="--model fox-pro-760m --gpu H200 --seq-len 1Mi --batch-tokens 1Mi --recompute block"
activations() { mib "activations, about"; }
check "a million tokens" plan $long
whole=$(activations)
said "1 micro-batch of 1 sequence"
for ranks in 2 8; do
    check "over $ranks" plan $long --sequence-ranks $ranks
    said "1 micro-batch of 1 sequence, 1 at most on each of 1 group of $ranks ranks"
    check "its memory" awk -v w="$whole" -v a="$(activations)" -v n=$ranks \
        'BEGIN { print w, a; exit !(a * n > w && a * n < 1.3 * w) }'
done
check "its hours" plan $long --sequence-ranks 8 --mfu 40
hours 16106127360 "$(awk 'BEGIN { print 8 * 0.98 * 0.4 * 989.4e12 / 2.365e11 }')"
# beyond 65,536 tokens at the MFU of 65,536, and while gates are as they begin at the same tokens/s
check "a million tokens on two H100s" plan --model fox-pro-125m --gpu H100 --seq-len 1Mi --batch-tokens 1Mi \
    --recompute block --sequence-ranks 2
said "the MFU measured with fox-pro-125m at 65536 tokens on an H100, nothing pruned"
said "98% of linear, as measured with two GPUs; with gates as below 95%, and 97%"
hours 2684354560 "$(awk 'BEGIN { flops = 6 * 123910800; attention = 6 * 12 * 768
    print 2 * 0.98 * 0.75 * 98965 * (flops + attention * 65536) / (flops + attention * 1048576) }')"
said "while gates are as they begin: 52.1 minutes (858805 tokens/s)"
check "on four" plan --model fox-pro-125m --gpu H200 --seq-len 1Mi --batch-tokens 1Mi --sequence-ranks 4
said "98% of linear, as measured with two GPUs; with gates as below 95%, and 76% as measured with four"
check "four groups" plan --model fox-pro-760m --gpu H200 --ranks 8 --sequence-ranks 2
said "at most on each of 4 groups of 2 ranks"
hours 16106127360 "$(awk 'BEGIN { print 58749 * 8 * 0.98 }')"
check "--fp8 in groups" plan --model fox-pro-760m --gpu H200 --ranks 8 --sequence-ranks 2 --fp8
said "without --fp8"
dies "--fp8: a rank's tokens of a sequence must be a multiple of 16, not 1000: change --seq-len" \
    plan --model fox-pro-760m --gpu H200 --ranks 8 --sequence-ranks 2 --fp8 --seq-len 2000 --batch-tokens 64000
dies "--fp8: A100 has compute capability 8.0, and FP8 begins with 8.9 (Ada, Hopper): leave it out" \
    plan --model fox-pro-125m --gpu A100 --fp8
dies "4 groups of ranks for the 2 sequences of a step (--batch-tokens / --seq-len): start fewer" \
    plan --model fox-pro-760m --gpu H200 --ranks 8 --sequence-ranks 2 --batch-tokens 32Ki
dies "--micro-batch 2: a step has 2 micro-batches, too few for 4 groups of ranks; lower it" \
    plan --model fox-pro-760m --gpu H200 --ranks 8 --sequence-ranks 2 --batch-tokens 64Ki --micro-batch 2

# The recipes say the same hours
recipe() { # FILE HOURS OPTIONS...
    check "$1" plan --model "${@:3}"
    equals "$2" "$(printf '%.1f' "$(planned)")"
    check "$1 says $2 hours" grep -qE "[^0-9.]$2 hours" "scripts/$1"
}
recipe longcrawl64.sh 2.9 fox-pro-125m --gpu H100 --micro-batch 2
recipe longcrawl64.sh 76.2 fox-pro-760m --gpu H200
recipe longcrawl64.sh 9.7 fox-pro-760m --gpu H200 --ranks 8
for row in "2.8 fox-llama-125m --recipe submission" "20.2 fox-pro-360m" "76.6 fox-pro-760m" "9.8 fox-pro-760m --ranks 8" \
    "76.4 fox-llama-760m --recipe submission" "9.7 fox-llama-760m --recipe submission --ranks 8" \
    "229.6 fox-pro-760m --recipe iclr" "29.3 fox-pro-760m --recipe iclr --ranks 8"; do
    recipe longcrawl64.sh $row --gpu H100
done
for script in multi_node_mpirun.sh slurm.sbatch; do recipe $script 4.9 fox-pro-760m --gpu H200 --ranks 16; done

# and the same memory, in GiB
memory() { # FILE TEXT OPTIONS...
    check "$1" plan --model "${@:3}" --gpu H100
    equals "${2%% *}" "$(mib memory | awk '{ printf "%.0f", $1 / 1024 }')"
    check "$1 says $2 GiB" grep -q "  $2 GiB" "scripts/$1"
}
memory longcrawl64.sh 16 fox-pro-125m --micro-batch 2
memory longcrawl64.sh 41 fox-pro-360m --micro-batch 2
memory longcrawl64.sh "39 and 32" fox-pro-760m
memory longcrawl64.sh "38 and 31" fox-llama-760m --recipe submission
check "eight" plan --model fox-pro-760m --ranks 8 --gpu H100
equals 32 "$(mib memory | awk '{ printf "%.0f", $1 / 1024 }')"
memory gpu_quickstart.sh 16 fox-pro-125m --micro-batch 2 --batch-tokens 128Ki
for script in multi_node_mpirun.sh slurm.sbatch; do memory $script 31 fox-pro-760m --ranks 16; done
memory short_context.sh 24 fox-pro-360m --set vocab_size=32000 --seq-len 2048
for script in ablations lengths tokens; do memory sweep/$script.sh 24 fox-pro-360m; done
memory sweep/sizes.sh "10 and 24" fox-pro-125m
for script in ablations lengths sizes; do recipe sweep/$script.sh 20.1 fox-pro-360m --gpu H200; done

# The page's example is what it prints
check "the page's example" plan --model fox-pro-125m --micro-batch 2 --gpu H100
sed '/^$/,$d' $scratch/stdout >$scratch/printed
sed -n '/^\$ .*--dry-run --model fox-pro-125m --micro-batch 2 --gpu H100$/,/^```/p' dev/SCALE.md |
    sed '1d; /^\.\.\.$/,$d' >$scratch/page
same $scratch/page $scratch/printed

# names of GPUs
while IFS='|' read -r given name; do
    check "$given" plan --model fox-pro-125m --gpu "$given"
    said "$name GiB; recompute"
done <<'END'
NVIDIA H100 80GB HBM3|H100: 79.1
NVIDIA A100-SXM4-40GB|A100 SXM4 40GB: 39.4
a100-40gb|A100 40GB: 39.4
NVIDIA GeForce RTX 4090|4090: 23.6
RTX 6000 Ada Generation|6000 Ada: 47.4
h200 nvl|H200 NVL: 139.8
END
for name in V100 A10G "RTX 4090 D" "RTX 4090 Laptop GPU" "RTX 5070 Ti" "H100 MIG 1g.10gb" 40; do
    dies "--gpu $name: not one of GB200, B200," plan --model fox-pro-125m --gpu "$name"
done
dies "--gpu: is empty: give NAME" plan --model fox-pro-125m --gpu ""

# refused
dies "--gpu, --gpu-memory and --mfu plan for another machine: give them with --dry-run" \
    "${TRAIN_FOX:-./train_fox}" --model fox-pro-nano --gpu H100
dies "--ranks 2: plans for so many: give it with --dry-run; mpirun, torchrun or srun starts ranks" \
    "${TRAIN_FOX:-./train_fox}" --model fox-pro-nano --ranks 2
dies "--mfu: of which GPU?" plan --model fox-pro-125m --mfu 40
dies "--gpu-memory 0: not a number from 1" plan --model fox-pro-125m --gpu-memory 0
dies "head sizes 64 and 128, not 32" plan --model fox-pro-nano --set num_heads=4 --gpu H100
dies "--sequence-ranks 3: does not divide the 4 key heads of the model" plan --model fox-pro-125m \
    --set num_kv_heads=4 --gpu H100 --seq-len 3072 --ranks 3 --sequence-ranks 3
dies "DeltaNetForCausalLM" plan --model deltanet-125m --gpu H100
dies "FoxStackForCausalLM" plan --model fox-gdn-125m --gpu H100
dies "cuDNN has no forget gate" plan --model fox-pro-125m --attention cudnn --gpu H100
dies "have no document_reset" plan --model transformer-pro-125m --attention cudnn --set document_reset=true --gpu H100
dies "have no --sequence-ranks" plan --model transformer-pro-125m --attention cudnn --sequence-ranks 2 --gpu H100
dies "hidden_size, at most 8192" plan --model fox-pro-760m --set hidden_size=16384 --set num_heads=128 --gpu H100

# The CPU's own plan says of a model for GPUs that it is one
check "on the CPU" plan --model fox-pro-125m
said "This model is for a GPU: train it with ./train_foxcu"
OMP_NUM_THREADS=1 check "on one thread" plan --model fox-pro-nano --max-tokens 1024
said " on 1 thread at "
said "1024 tokens: 1 step, peak"
OMP_NUM_THREADS=2 check "on the CPU" plan --model fox-pro-nano
said " on 2 threads at "
said "GFLOP/s each"
close "$(awk 'BEGIN { print 2097152 * (6 * 1152776 + 6 * 4 * 128 * 512) / 90e9 / 3600 }')" "$(planned)"
if grep -q "for a GPU" $scratch/stdout; then fail "nano is for a GPU"; else pass; fi

# Memory, time and checkpoints are its first lines, and its configuration is told when asked for. Time has a unit that
# people use, and counts the measures of held-out loss: 5 of 32,768 tokens, at 0.4 of the time of a token that is trained on
check "the first lines" plan --model fox-pro-nano
equals "memory time checkpoint" "$(grep -v '^ ' $scratch/stdout | sed '/^$/,$d' | awk '{ print $1 }' | paste -sd ' ')"
equals 0 "$(grep -c hidden_size $scratch/stdout)"
hours=$(planned)
check "one token" plan --model fox-pro-nano --seq-len 1 --batch-tokens 1 --max-tokens 1 --warmup-tokens 0
said "  1 token: 1 micro-batch of 1 sequence"
check "config" plan config --model fox-pro-nano
equals "memory 1" "$(head -n 1 $scratch/stdout | awk '{ print $1 }') $(grep -c '"hidden_size": 128' $scratch/stdout)"
check "with held-out data" plan --model fox-pro-nano --val-data none
close "$(awk -v h="$hours" 'BEGIN { print h * (1 + 0.4 * 5 * 32768 / 2097152) }')" "$(planned)"
said "  of which 3% measures the held-out loss, at most --val-tokens 32768 each time"
OMP_NUM_THREADS=1 check "seconds" plan --model fox-pro-nano --max-tokens 256Ki
equals "49.5 s" "$(line time | awk '{ print $1, $2 }')"
OMP_NUM_THREADS=1 check "years" plan --model fox-pro-760m
equals "92.8 years" "$(line time | awk '{ print $1, $2 }')"

# A training larger than the memory is noted in its plan, and ends before it allocates any: an allocation would fail at
# the limit
limited() { (ulimit -v 8000000 && ./train_fox "$@"); }
large="--model fox-pro-nano --seq-len 64Ki --batch-tokens 4Gi --micro-batch 64Ki"
check "the plan of a training larger than the memory" plan $large
takes="this training takes $(line memory), and this machine or its cgroup has "
said "note: $takes"
said "; lower --micro-batch or --seq-len"
dies "out of memory: $takes" limited $large --data none
check "of a model larger than the memory" plan --model fox-pro-nano --set hidden_size=65536 --set intermediate_size=65536 \
    --seq-len 16 --batch-tokens 16
said "; take a smaller model"
report
