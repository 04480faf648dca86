#!/usr/bin/env bash
# Documents of 1,048,576 tokens: text_to_shards makes them of source trees, and a step, a validation and --eval read them
# whole. The model attends to 8 tokens, so that this takes seconds.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/long_documents
. dev/test/check.sh
mkdir -p $scratch/tree/b
export OMP_NUM_THREADS=1 # threads of small models mostly wait for each other
fox=${TRAIN_FOX:-./train_fox} shards=$scratch/long_train_000000.bin

# 2.9 M bytes in three files: two documents, whose border is inside a file
for file in a b/c d; do seq -f "$file %.0f" $((${#file} * 100000)) $((${#file} * 100000 + 100000)) >$scratch/tree/$file.txt; done
check "shards" data/text_to_shards --tokenizer byte --document folder --doc-len 1Mi --out $scratch/long $scratch/tree
said "train: 2 documents, 2097152 tokens, 1 shard"
equals "1 2097152 1048576 257" "$(od -An -td4 -v -j4 -N16 $shards | xargs)" # version, tokens, D, vocabulary
check "the files in order, cut at each 1,048,576 tokens" python3 -c 'import sys
shard, names = open(sys.argv[1], "rb").read()[1024:], sys.argv[2:]
text = b"".join(b"\n" * (i > 0) + b"==> %s <==\n" % n.encode() + open(sys.argv[1][:-len("long_train_000000.bin")] + "tree/" + n, "rb").read()
                for i, n in enumerate(names))
assert not any(shard[1::2]), "bytes"
assert shard[::2] == text[:len(shard) // 2], [i for i in range(len(shard) // 2) if shard[2 * i] != text[i]][:3]
' $shards a.txt b/c.txt d.txt

small="--model transformer-swa-nano --set num_hidden_layers=1 --set hidden_size=8 --set num_heads=1 --set intermediate_size=8
    --set window_size=8 --seq-len 1Mi --batch-tokens 1Mi --micro-batch 1"
check "a step" $fox $small --data $shards --max-tokens 2Mi --warmup-tokens 1Mi --max-steps 1 --val-data $shards \
    --val-tokens 1 --out $scratch/run
said "2 steps of 1 x 1048576 tokens, micro-batches of 1; 2 training sequences (in order), 1 held out"
said " 524288 .. 1048575     524288 "
check "L(i)" $fox --init $scratch/run --eval $scratch/eval.json --val-data $shards --seq-len 1Mi --val-tokens 1
said "1 of 2 sequences of 1048576 tokens, each the beginning of a document"
check "at each of the positions" python3 -c 'import json, math, sys
e = json.load(open(sys.argv[1]))
v = [json.loads(line) for line in open(sys.argv[2]) if "validation" in line][-1]
T = 1048576
assert (e["seq_len"], e["tokens"], len(e["loss"])) == (T, T, T)
assert abs(math.fsum(e["loss"]) / T - v["val_loss"]) < 1e-6 and abs(e["loss_mean"] - v["val_loss"]) < 1e-6
assert e["documents"]["contexts"] == [1024, 4096, 16384, 65536, 262144, T - 2048]
assert abs(math.log(e["perplexity"][str(T)]) - v["val_loss"]) < 1e-6' $scratch/eval.json $scratch/run/log.jsonl
rm -rf $scratch/run $scratch/long*
report
