#!/usr/bin/env bash
# The GPU trainer on two hosts that are namespaces of this machine (hosts.sh), with half of its GPUs each: NCCL over TCP
# between them, copies within. By hand, as root, on two or four GPUs of which each reaches the others; needs neither mpirun
# nor a network. Prints what was seen, and a summary line.
#
#     TRAINER=./train_foxcu STEPS=4 dev/test/dist/gpu_hosts.sh
#
# IP=FOLDER: for a machine where iproute2 is missing, a folder with its program `ip`, the libraries that ldd lists for it, and
# ld-linux-x86-64.so.2. Where namespaces cannot be made NCCL_HOSTID makes hosts for NCCL alone, on the loopback interface:
# then what needs two hosts of the trainer is left out. MODELS=: no benchmark
scratch=build/test/gpu_hosts
. dev/test/check.sh
if [ "${IP:-}" ]; then
    mkdir "$scratch/bin"
    folder=$(cd "$IP" && pwd)
    printf '#!/bin/sh\nexec %s/ld-linux-x86-64.so.2 --library-path %s %s/ip "$@"\n' "$folder" "$folder" "$folder" >"$scratch/bin/ip"
    chmod +x "$scratch/bin/ip"
    export PATH=$PWD/$scratch/bin:$PATH
fi
. dev/test/dist/hosts.sh
trainer=${TRAINER:-./train_foxcu} steps=${STEPS:-4} log=$scratch/stderr
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -cx '[0-9][0-9]*')
[ "$gpus" -lt 4 ] || gpus=4
if [ "$gpus" -lt 2 ]; then skip "fewer than two GPUs"; report; fi
half=$((gpus / 2)) port=29400 namespaces=yes
if ! make_hosts 2; then
    echo "no namespaces: $why"
    namespaces=
fi
files=$PWD/$scratch/files
check "make the files" python3 dev/test/cli_files.py make "$files"

# launch HOSTS OPTION...: a rank a GPU, on one host (1) or on two; output in $scratch/rank_N, $code is rank 0's
launch() {
    local hosts=$1 rank host size pids=() run variables
    shift
    port=$((port + 10)) code=0
    for ((rank = 0; rank < gpus; rank++)); do
        size=$gpus host=h0 run=
        [ "$hosts" = 1 ] || { size=$half host=h$((rank / half)); }
        variables="RANK=$rank WORLD_SIZE=$gpus LOCAL_RANK=$((rank % size)) LOCAL_WORLD_SIZE=$size MASTER_PORT=$port"
        if [ "$namespaces" ]; then
            run="on $host" variables="$variables MASTER_ADDR=h0 NCCL_SOCKET_IFNAME=$([ "$hosts" = 1 ] && echo lo || echo eth0)"
        else
            variables="$variables MASTER_ADDR=127.0.0.1 NCCL_SOCKET_IFNAME=lo"
            [ "$hosts" = 1 ] || variables="$variables NCCL_HOSTID=$host"
        fi
        [ "$hosts" = 1 ] || variables="$variables CUDA_VISIBLE_DEVICES=$(seq -s, $((rank / half * half)) $((rank / half * half + half - 1)))"
        # shellcheck disable=SC2086
        $run env $variables OMP_NUM_THREADS=2 NCCL_DEBUG="${NCCL_DEBUG:-WARN}" "$trainer" "$@" \
            >"$scratch/rank_$rank" 2>"$scratch/rank_$rank.err" &
        pids+=($!)
    done
    wait "${pids[0]}" || code=$?
    wait "${pids[@]:1}"
    cat "$scratch"/rank_?.err >"$log"
}
errors() { grep -h '^error: ' "$log"; }

# ----------------------------------------------------------------------------
echo "== losses on two hosts and on one, $gpus GPUs"
tiny="--model fox-pro-nano --set hidden_size=256 --set num_heads=4 --set num_hidden_layers=2 --set intermediate_size=72 --seq-len 256 --batch-tokens 3072 --micro-batch 1
    --warmup-tokens 12288 --deterministic --shuffle --data $files/shards/text.bin --max-tokens 61440 --lr 5e-3 --timeout 30"
for hosts in 1 2; do
    NCCL_DEBUG=INFO launch $hosts $tiny --out "$scratch/losses_$hosts"
    equals "exit code 0" "exit code $code"
    errors
    grep -h 'gradients by' "$scratch/rank_0"
    cat "$scratch"/rank_? "$log" | grep -o 'via [A-Z0-9/]*[A-Za-z/]*' | sort | uniq -c # NCCL's paths between GPUs
done
check "losses" python3 dev/test/trainer/ranks.py losses "$scratch/losses_2/log.jsonl" "$scratch/losses_1/log.jsonl" 1e-3

if [ "$namespaces" ]; then
    echo "== --sequence-ranks over two hosts: refused"
    launch 2 $tiny --sequence-ranks $gpus --out "$scratch/shared"
    equals "exit code 1, 1 line" "exit code $code, $(errors | wc -l) line"
    errors
    if [ "$half" -gt 1 ]; then
        echo "== --sequence-ranks $half, a group a host"
        launch 2 $tiny --sequence-ranks $half --out "$scratch/groups"
        equals "exit code 0" "exit code $code"
        errors
        check "losses" python3 dev/test/trainer/ranks.py losses "$scratch/groups/log.jsonl" "$scratch/losses_1/log.jsonl" 1e-3
    fi

    echo "== a host that is unplugged at step 20"
    rm -f "$scratch/rank_0" # of the launch before, which has a step 20
    launch 2 ${tiny/--max-tokens 61440/--max-tokens 1e9} --timeout 10 --log-every 10 --out "$scratch/lost" &
    await "no step 20" grep -qs '^step *20/' "$scratch/rank_0"
    began=$SECONDS
    unplug h1
    wait $!
    echo "ended after $((SECONDS - began)) s"
    cat "$scratch"/rank_?.err >"$log"
    errors
    equals 1 "$(errors | grep -c '(h1, process .* unreachable for')"
    plug h1
fi

for model in ${MODELS-fox-pro-125m fox-pro-760m}; do
    for hosts in 1 2; do
        echo "== $model, the recipe's step, $gpus GPUs on $hosts host(s) of this machine$([ $hosts = 1 ] || echo ", TCP between them")"
        launch $hosts --bench "$steps" --model $model --batch-tokens 512Ki --micro-batch $([ $model = fox-pro-760m ] && echo 1 || echo 2) --timeout 300
        equals "exit code 0" "exit code $code"
        errors
        cat "$scratch/rank_0"
    done
done
report
