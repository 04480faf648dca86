#!/usr/bin/env bash
# scripts/compare.py: its tables for logs with known numbers, and its pictures. PYTHON: a python with
# matplotlib and safetensors.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/compare
. dev/test/check.sh
python=${PYTHON:-python3}
logs() { $python dev/test/scripts/logs.py "$@"; }
compare() { $python scripts/compare.py "$@"; }
# picture NAME [LABEL...]: $scratch/NAME.svg has plain ticks and a legend of one column. bands COUNT NAME
picture() { check "ticks and legend of $1" $python dev/test/scripts/picture.py "$scratch/$1.svg" "${@:2}"; }
bands() { equals "$1" "$(grep -c 'fill-opacity: 0.2' "$scratch/$2.svg")"; }
logs runs $scratch/runs || fail "logs"
check "statistics of pairs" $python dev/test/scripts/paired.py
r=$scratch/runs

# 100 steps of 36 s and a validation of 72 s on 2 ranks: 2.04 GPU-hours; one has 10 steps more, done twice
row() { sed -n "$1p" $scratch/stdout | tr -s ' '; }
check "families" compare --no-plots $r/fox? $r/transformer?
equals "| fox | 3 | 10,000 | 2.1000 | 0.1000 | 3 | 2.107 | 6.320 |" "$(row 3)"
equals "| transformer | 3 | 10,000 | 2.6000 | 0.1000 | 3 | 2.040 | 6.120 |" "$(row 4)"
sed 's/"device": "A GPU"/"device": "CPU"/' $r/fox1/log.jsonl >$scratch/cpu.jsonl
check "on the CPU" compare --no-plots $scratch/cpu.jsonl
said "| tokens/s | rank-hours |"
equals 0 "$(grep -c GPU $scratch/stdout)"
dies "$r/fox1/log.jsonl: is given twice, also as $r/fox1/" compare --no-plots $r/fox1/ $r/fox2 $r/fox1/log.jsonl
check "learning rates" compare --no-plots $r/fox1 $r/fox2 $r/other/log.jsonl
equals "| lr 0.002 | 1 | 10,000 | 1.5000 | - | 3 | 2.040 | 2.040 |" "$(row 3)"
said "| lr 0.001 |"
check "all different" compare --no-plots $r/*
said "| fox, lr 0.002 "
said "| transformer, lr 0.001 "
equals "" "$(grep 'held-out loss of' $scratch/stdout)"
for k in 1 2; do sed '/"val_loss"/s/}$/, "val_loss_of": {"a": '$k', "b": 4}}/' $r/fox$k/log.jsonl >$scratch/part$k.jsonl; done
check "parts of the held-out data" compare --no-plots $scratch/part?.jsonl $r/transformer1
said "| held-out loss of | seeds |"
said "2 | 1.5000 ± 0.7071 | 4.0000 ± 0.0000 |"
# scripts/speedrun.sh and its table: 100 steps of 36 s on 2 ranks to the only validation
to_loss() { $python scripts/sweep/to_loss.py "$@"; }
check "to a loss" to_loss --driver 9.8 2.2 $r/fox2 $r/transformer1
equals "| fox | 2.2 | 2.1000 | 10,000 | 3,600.0 | 2.0000 | 2.1000 | 3 | 2 | A GPU | 9.8 | 1a | - | - |" "$(row 3)"
equals "| transformer | 2.2 | not reached | - | - | - | 2.5000 | 3 | 1 | A GPU | 9.8 | 1a | - | - |" "$(row 4)"
dies "LOSS nan: not a number above 0" to_loss nan $r/fox1
dies "$r/none: cannot read" to_loss 2 $r/none
dies "SIZE=micro: study or nano" env SIZE=micro scripts/speedrun.sh
mkdir $scratch/bin && printf '#!/bin/sh\n' >$scratch/bin/make && chmod +x $scratch/bin/make
check "data" data/text_to_shards --tokenizer byte --val-fraction 0.2 --out $scratch/bytes llmc/base
speedrun() { PATH=$PWD/$scratch/bin:$PATH SIZE=nano CORPUS=$scratch/bytes OUT=$scratch/speedrun scripts/speedrun.sh "$@"; }
check "a speed run" speedrun --set hidden_size=32 --set num_heads=2 --set num_hidden_layers=1 --seq-len 16 --batch-tokens 64 \
    --max-tokens 256 --val-every 2 --val-tokens 64
for model in fox-pro transformer-pro; do said "| $model-nano "; done
dies "--hlep: no such option" speedrun --hlep
for target in low 0 nan; do TARGET=$target dies "TARGET=$target: a loss above 0" speedrun --data none; done
# pairs of the same seed: differences of 0.5, 0.5 and 0.6, whose interval is 4.30 errors
pairs=$scratch/pairs
mkdir $pairs
sed 's/"val_loss": 2.7/"val_loss": 2.8/' $r/transformer3/log.jsonl >$pairs/3.jsonl
check "three pairs" compare --no-plots $r/fox? $r/transformer[12] $pairs/3.jsonl
equals "| held-out loss less that of fox | pairs | difference | standard error | 95% interval |" "$(row 6)"
equals "| transformer | 3 | 0.5333 | 0.0333 | 0.3899 to 0.6768 |" "$(row 8)"
equals "" "$(grep 'nothing is claimed' $scratch/stdout)"
claimed="note: nothing is claimed from fewer than 3 pairs of runs with equal seeds: they have no interval"
check "two pairs" compare --no-plots $r/fox? $r/transformer1 $pairs/3.jsonl
equals "| transformer | 2 | 0.5500 | 0.0500 | - |" "$(row 8)"
said "$claimed"
check "one pair" compare --no-plots $r/fox1 $r/transformer?
equals "" "$(grep less $scratch/stdout)"
said "$claimed"
check "no pairs" compare --no-plots $r/fox1 $r/transformer[23]
equals "" "$(grep 'less\|claimed' $scratch/stdout)"
# a seed's repeats are one; a run that ended elsewhere, or was not validated there, is in no pair
sed 's/"val_loss": 2.5/"val_loss": 2.7/' $r/transformer1/log.jsonl >$pairs/1.jsonl
check "repeats" compare --no-plots $r/fox? $r/transformer[12] $pairs/[13].jsonl
equals "| transformer | 3 | 0.5667 | 0.0333 | 0.4232 to 0.7101 |" "$(row 8)"
equals "| transformer | 3 | 10,000 | 2.6667 | 0.1155 |" "$(row 4 | cut -d'|' -f-6)|"
for line in 'logs cut $r/fox3/log.jsonl 9000' 'grep -v val_loss $r/fox3/log.jsonl'; do
    eval $line >$pairs/fox3.jsonl
    check "unfinished" compare --no-plots $r/fox[12] $pairs/fox3.jsonl $r/transformer[12] $pairs/3.jsonl
    equals "| transformer | 2 | 0.5000 | 0.0000 | - |" "$(row 8)"
done
{ sed 's/"step": 100/"step": 99/; s/"tokens": 10000/"tokens": 9999/' $r/fox3/log.jsonl; } >$pairs/fox3.jsonl
check "other tokens" compare --no-plots $r/fox[12] $pairs/fox3.jsonl $r/transformer[12] $pairs/3.jsonl
equals "| transformer | 2 | 0.5000 | 0.0000 | - |" "$(row 8)"
# what tells no groups apart is a note
sed 's/"set": \[\]/"set": ["decay_time_max=512"]/' $r/fox1/log.jsonl >$scratch/long.jsonl
check "another difference" compare --no-plots $scratch/long.jsonl $r/transformer1
said "| transformer | "
said "| fox  "
said "note: fox: decay_time_max 512"
# by the config, where options do not tell
sed 's/"hidden_size": 64/"hidden_size": 32/' $r/fox1/log.jsonl >$scratch/narrow.jsonl
check "configs" compare --no-plots $r/fox1 $scratch/narrow.jsonl
said "| hidden_size 32 "
# by both: a key of the config tells runs apart that options group otherwise; --set of what a model has is no difference
of_config() { sed "s/\"hidden_size\": 64/&, \"document_reset\": $1/; ${3:-}" $r/$2/log.jsonl; }
groups() { sed -n '3,/^$/p' $scratch/stdout | cut -d'|' -f-3 | grep '^|' | tr -s ' ' | sort | xargs; }
of_config true fox2 >$scratch/walls.jsonl
check "documents apart" compare --no-plots $r/fox1 $scratch/walls.jsonl
equals "| document_reset false | 1 | document_reset true | 1" "$(groups)"
check "and learning rates" compare --no-plots $r/fox1 $r/other $scratch/walls.jsonl
equals "| lr 0.001, document_reset false | 1 | lr 0.001, document_reset true | 1 | lr 0.002, document_reset false | 1" "$(groups)"
of_config false fox2 's/"set": \[\]/"set": ["document_reset=false"]/' >$scratch/none.jsonl
check "no documents apart" compare --no-plots $r/fox1 $scratch/none.jsonl
equals "| fox | 2" "$(groups)"
of_config true fox3 's/"set": \[\]/"set": ["document_reset=true"]/' >$scratch/set.jsonl
check "documents apart by --set" compare --no-plots $r/fox1 $scratch/walls.jsonl $scratch/set.jsonl
equals "| default | 1 | document_reset true | 2" "$(groups)"
check "and models" compare --no-plots $r/fox1 $r/transformer1 $scratch/set.jsonl
equals "| fox | 1 | fox, document_reset true | 1 | transformer | 1" "$(groups)"
equals "" "$(grep "^note:.*\(use_rope\|document_reset\)" $scratch/stdout)"
# another recipe, whose model differs, and another schedule
newer='s/"lr": 0.001, "seed"/"recipe": "analysis", "lr-schedule": "cosine", "lr-end": 0, &/'
sed "$newer" $r/fox2/log.jsonl >$scratch/newer.jsonl
sed "$newer; s/analysis/iclr/" $r/fox3/log.jsonl >$scratch/iclr.jsonl
check "another recipe" compare --no-plots $scratch/newer.jsonl $scratch/iclr.jsonl
equals "| recipe analysis | 1 | recipe iclr | 1" "$(groups)"
sed "$newer; s/\"lr-end\": 0/\"lr-end\": 0.1/" $r/fox3/log.jsonl >$scratch/end.jsonl
check "another end" compare --no-plots $scratch/newer.jsonl $scratch/end.jsonl
equals "| lr-end 0 | 1 | lr-end 0.1 | 1" "$(groups)"
# other data under the same name
for i in 1 2; do sed "s/\"seed\"/\"data_fingerprint\": \"0$i\", &/" $r/fox$i/log.jsonl >$scratch/data$i.jsonl; done
check "other data" compare --no-plots $scratch/data[12].jsonl
equals "| data_fingerprint 01 | 1 | data_fingerprint 02 | 1" "$(groups)"
sed 's/"data": "d"/"data": "e"/' $scratch/data2.jsonl >$scratch/data3.jsonl
check "data of another name" compare --no-plots $scratch/data[13].jsonl
equals "| data d | 1 | data e | 1" "$(groups)"
# not finished
logs cut $r/fox1/log.jsonl 9000 >$scratch/part.jsonl
check "a part" compare --no-plots $scratch/part.jsonl
said "note: $scratch/part.jsonl: at step "
equals "-" "$(sed -n 3p $scratch/stdout | cut -d'|' -f5 | xargs)"
# a run that was resumed with other options is none of the seeds of either, and named by both
logs=$scratch/resumed
mkdir $logs
of() { sed "$2" $r/fox2/log.jsonl >$logs/$1.jsonl; } # line 62 is the run that resumes after step 50
of lr '62s/"lr": 0.001/"lr": 0.004/'
check "another learning rate" compare --no-plots $r/fox1 $r/fox3 $logs/lr.jsonl
said "| lr 0.001                         |     2 |"
said "| lr 0.001 then 0.004 from step 50 |     1 |"
said "note: $logs/lr.jsonl: several configurations: lr 0.001 then 0.004 from step 50"
of moved '62s/"data": "d"/"data": "e"/'
check "data that moved" compare --no-plots $r/fox1 $logs/moved.jsonl
said "| fox |     2 |"
said "note: $logs/moved.jsonl: several configurations: data d then e from step 50"
of other 's/"seed"/"data_fingerprint": "0a", &/; 62s/0a/0b/'
check "other data" compare --no-plots $r/fox1 $logs/other.jsonl
said "| data d then other data of d from step 50 |"
# what no step followed is no configuration: a run that was done, or had nothing done after its checkpoint
{ cat $r/fox1/log.jsonl && sed '1!d; s/"step": 0/"step": 100/; s/"lr": 0.001/"lr": 0/' $r/fox1/log.jsonl; } >$logs/done.jsonl
{ sed 61q $r/fox2/log.jsonl && sed '62!d; s/"lr": 0.001/"lr": 7/' $r/fox2/log.jsonl && sed '1,61d' $r/fox2/log.jsonl; } >$logs/killed.jsonl
check "nothing trained with it" compare --no-plots $logs/done.jsonl $logs/killed.jsonl $r/fox3
said "| fox |     3 |"
equals "" "$(grep configurations $scratch/stdout)"
# --eval: means and deviations over seeds, by the folder of the file or by the checkpoint that it names
check "--eval" compare --no-plots $r/fox? $r/transformer? --eval $r/fox?/eval.json $r.eval/*
said "| perplexity of the first tokens | seeds |           128 |           256 |"
said "| fox                            |     3 | 7.100 ± 0.100 | 6.100 ± 0.100 |"
said "| transformer                    |     3 | 7.600 ± 0.100 | 6.600 ± 0.100 |"
check "--eval of one seed" compare --no-plots $r/fox1 --eval $r/fox1/eval.json
said "|     1 | 7.000 | 6.000 |"
dies "transformer1.json: is of none of these runs" compare --no-plots $r/fox? --eval $r.eval/transformer1.json
dies "log.jsonl: not JSON" compare --no-plots $r/fox? --eval $r/fox1/log.jsonl
dies "none/log.jsonl: cannot read: No such file" compare --no-plots none/log.jsonl
mkdir $scratch/empty && : >$scratch/empty/log.jsonl
# a damaged log is left out; the others are compared
log=$r/fox3/log.jsonl
damaged() {
    dies "$scratch/bad/log.jsonl: line $1" compare --no-plots $r/fox1 $scratch/bad --eval $r/fox1/eval.json
    said "; goes on without this run" stderr
    equals "| fox | 1 | 10,000 | 2.0000 | - | 3 | 2.040 | 2.040 |" "$(row 3)"
    dies "$scratch/bad/log.jsonl: line $1" compare --no-plots $scratch/bad
    equals "" "$(cat $scratch/stdout)"
}
mkdir $scratch/bad
bad=$scratch/bad/log.jsonl
for line in '[1]' '"x"' 7 null; do
    sed "3s/.*/$line/" $log >$bad
    damaged "3: not a JSON object"
done
{ head -n 4 $log; printf '{"event": "note", "text": "\xff"}\n'; sed 1,4d $log; } >$bad
damaged "5: not UTF-8"
{ cat $log; printf '%0100000d\n' 0 | tr 0 '['; } >$bad
damaged "104: nested too deeply"
# without LINE MEMBER: the member has another name there
without() {
    sed "$1s/\"$2\":/\"other\":/" $log >$bad
    damaged "$1: '$2' is missing or not of the kind that a run writes"
}
for member in event step num_steps ranks started version device flops_per_token options config; do without 1 $member; done
for member in event step tokens loss ms tokens_per_s; do without 7 $member; done
for member in event step val_loss ms by_position from to; do without 102 $member; done
sed '7s/"ms": [0-9]*/"ms": "1"/' $log >$bad
damaged "7: 'ms'"
sed '7s/"step": [0-9]*/"step": 1'"$(printf '%0400d' 0)"'/' $log >$bad
damaged "7: 'step'"
sed '7s/"pruned_by_layer": [^]]*]/"pruned_by_layer": 1/' $log >$bad
damaged "7: 'pruned_by_layer'"
sed '1s/"set": \[\]/"set": [1]/' $log >$bad
damaged "1: 'set'"
sed '1s/"seed": [0-9]*/"seed": {}/g' $log >$bad
damaged "1: 'seed'"
cp $log $bad
printf '{"event": "note", "text": "\xc3' >>$bad # cut by a kill
check "a line that is cut in a character" compare --no-plots $r/fox1 $scratch/bad
cp $r/fox1/eval.json $scratch/bad/eval.json
echo 1 >$bad
dies "line 1: not a JSON object" compare --no-plots $r/fox1 $scratch/bad --eval $r/fox1/eval.json $scratch/bad/eval.json

dies "$scratch/empty: no run with a step in its log" compare --no-plots $scratch/empty
# folders without a log, as of a run that has just begun
mkdir $scratch/no_log
check "go on without them" compare --no-plots $scratch/empty $r/fox1 $scratch/no_log $r/fox2 --eval $r/fox1/eval.json
said "note: $scratch/empty: no run with a step in its log; goes on without it"
said "note: $scratch/no_log/log.jsonl: cannot read: No such file or directory; goes on without it"
equals "| fox | 2 |" "$(row 5 | cut -d'|' -f-3)|"

if $python -c 'import matplotlib, safetensors' 2>$scratch/stderr; then
    check "drawings of eval/" $python dev/test/scripts/drawings.py $scratch
    check "half-lives" logs gates $scratch/gates
    said "note: half-lives without --maps are those of the gates' biases"
    g=$scratch/gates
    check "their picture" compare $g/{full,mapped} --maps $g/maps.safetensors --out $scratch/g
    said "$scratch/g_half_life.svg"
    # 8 heads, of which one never forgets, and one dot of the legend
    equals 8 "$(grep -c '<use .*fill-opacity: 0.6' $scratch/g_half_life.svg)"
    picture g_half_life fox
    check "gates as they started" logs still $scratch/still
    check "no picture of them" compare $scratch/still/{zero,long} --out $scratch/s
    said "note: no picture of the half-lives of 2 runs: within 10% of where the gates started"
    equals "s_loss.svg" "$(cd $scratch && echo s_*.svg)"
    check "one that moved" compare $scratch/still/{zero,moved} --out $scratch/s
    said "note: no picture of the half-lives of 1 run: "
    said "$scratch/s_half_life.svg"
    equals "" "$(grep -o '>0[.][0-9]*</text>' $scratch/s_half_life.svg)" # no fractions of a layer
    dies "eval.json: cannot read: " compare $r/fox1 --maps $r/fox1/eval.json --out $scratch/g
    evals="--eval $r/fox1/eval.json $r/fox2/eval.json $r.eval/transformer1.json"
    check "pictures" compare $r/fox? $r/transformer? --out $scratch/a $evals
    check "again" compare $r/fox? $r/transformer? --out $scratch/b $evals
    for name in loss pruned position eval; do
        same $scratch/a_$name.svg $scratch/b_$name.svg
    done
    picture a_loss fox transformer "training, mean of 5% of the steps" "held-out, of one step: can be lower"
    picture a_position fox transformer
    picture a_eval fox transformer "training length"
    picture a_pruned fox
    # a panel, as tokens, FLOPs and time say the same; the bands of a family are 3 seeds
    scales() { grep -oE '>(tokens|model FLOPs|hours)[^<]*' "$scratch/$1_loss.svg" | tr -d '>' | tr '\n' ';'; }
    equals "tokens, Ki;" "$(scales a)"
    bands 2 a_loss
    bands 2 a_position
    bands 1 a_pruned
    # L(i) of 2 seeds and 1, whose error of sequences is known; P(l) of 2 seeds
    bands 3 a_eval
    check "its caption" grep -q '>bands: ± standard error of sequences and seeds<' $scratch/a_eval.svg
    equals 3 "$(grep -c stroke-dasharray $scratch/a_eval.svg)" # the training length: panels and legend
    sed 's/1000000.0/3000000.0/; s/36000/72000/' $r/transformer1/log.jsonl >$scratch/costly.jsonl
    check "other FLOPs and time" compare $r/fox1 $scratch/costly.jsonl --out $scratch/c
    picture c_loss fox transformer "training, mean of 5% of the steps" "held-out, of one step: can be lower"
    equals "tokens, Ki;model FLOPs, 10⁹;hours;" "$(scales c)"
    bands 0 c_loss
    equals "" "$(grep 'bands' $scratch/c_*.svg)"
    sed 's/"ms"/"attention_in_other_documents": 1, &/' $r/transformer1/log.jsonl >$scratch/costly.jsonl
    check "attention within documents" compare $r/fox1 $scratch/costly.jsonl --out $scratch/c
    equals "tokens, Ki;model FLOPs, 10⁹;" "$(scales c)"
    rm $scratch/a_*
    check "no shares" compare $r/transformer? --out $scratch/a
    equals "a_loss.svg a_position.svg" "$(cd $scratch && echo a_*)"
    rm $scratch/a_*
    check "--eval has the positions" compare $r/fox? --eval $r/fox?/eval.json --out $scratch/a
    equals "a_eval.svg a_loss.svg a_pruned.svg" "$(cd $scratch && echo a_*)"
    check "many runs" logs many $scratch/many
    check "their pictures" compare $scratch/many/* --out $scratch/m
    picture m_loss lr\ 0.00{1..9} "training, mean of 5% of the steps" "held-out, of one step: can be lower"
    dies "no/where_loss.svg: cannot write" compare $r/fox1 --out no/where
else
    skip "pictures of compare.py: $(tail -n 1 $scratch/stderr)"
fi

# What cannot be printed is an error: a table, and help, of any script
unset PYTHONUNBUFFERED
full() { "$@" >/dev/full; }
closed() { "$@" >&-; }
lost() {
    dies "cannot write to standard output: " full "$@"
    dies "standard output is closed" closed "$@"
}
lost compare $r/fox1 --no-plots
for script in compare make_shards eval/results sweep/learning_rate; do lost python3 scripts/$script.py --help; done
report
