#!/usr/bin/env bash
# A stream is shuffled, documents are read in order, and --shuffle says otherwise; a run goes on as its record says.
# Tests ./train_fox, or TRAIN_FOX.
scratch=build/test/order
. dev/test/check.sh
export OMP_NUM_THREADS=1
trainer_files
tiny="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=32"
run() { "$trainer" "$@"; }

batches="--seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128"
step=step_00000002/model.safetensors
ordered() { # NAME SHARD WORD OPTION...: a run of two steps, which says WORD
    rm -rf "$scratch/order_$1"
    check "$1 on $2" run $tiny $batches --max-steps 2 --data "$shards/$2.bin" --out "$scratch/order_$1" "${@:4}"
    said " ($3), 0 held out"
    check "its plan" run $tiny $batches --data "$shards/$2.bin" --dry-run "${@:4}"
    said " sequences, $3"
    check "its log" grep -q "\"shuffle\":$([ "$3" = shuffled ] && echo true || echo false)" "$scratch/order_$1/log.jsonl"
}
for order in text documents; do
    ordered default $order "$([ $order = text ] && echo shuffled || echo "in order")"
    ordered shuffled $order shuffled --shuffle
    ordered unshuffled $order "in order" --shuffle false
    same "$scratch/order_default/$step" "$scratch/order_$([ $order = text ] && echo shuffled || echo unshuffled)/$step"
    differ "$scratch/order_shuffled/$step" "$scratch/order_unshuffled/$step"
done
ordered resumed text "in order" --shuffle false
check "goes on" run --resume --out "$scratch/order_resumed" --max-steps 3
said " (in order), 0 held out"
dies "--shuffle: the run in $scratch/order_resumed reads its data in order, which cannot change" \
    run --resume --out "$scratch/order_resumed" --shuffle
check "--dump" run $tiny $batches --data "$shards/text.bin" --dump "$scratch/dump"
check "--dump" run $tiny $batches --data "$shards/text.bin" --dump "$scratch/dump_in_order" --shuffle false
check "--dump" run $tiny $batches --data "$shards/text.bin" --dump "$scratch/dump_shuffled" --shuffle
same "$scratch/dump" "$scratch/dump_in_order"
differ "$scratch/dump" "$scratch/dump_shuffled"
report
