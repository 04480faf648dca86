#!/usr/bin/env bash
# The paper's ablations: from the LLaMA Transformer without RoPE to FoX-Pro, one part at a time, FoX-Pro without each of
# its parts, and LLaMA and Pro blocks whose forget gates do not depend on the data. At the end it prints the
# perplexities beside the paper's, and draws the loss by position, also beyond T (OUT/positions.svg).
#
#   scripts/sweep/ablations.sh                                     # all rows, on LongCrawl64, which it downloads
#   ROWS="fox-pro fox-pro-no-qk-norm" SEEDS="1 2 3" scripts/sweep/ablations.sh
#   SIZE=nano scripts/sweep/ablations.sh --data 'data/mine_train_*.bin' --val-data 'data/mine_val_*.bin'
#
# SIZE is that of the presets; 360m is the paper's. SEEDS, LRS, GPUS, OUT and KEEP are those of scripts/sweep.sh, which
# trains the rows, and so are resuming and interrupting. EVAL are options of --eval. The arguments are options of the
# trainer, of all runs.
#
#   data     7.52 G tokens at 16384 a sequence: the first 16384 of 458,752 documents, at most 15 GB to download
#   compute  4.62 GFLOP per token, 3.47e19 FLOP a row: 14,336 steps of 524,288 tokens; 9.0e20 FLOP for all 26 rows
#   time     of a row, on one H200: 20.1 hours with a forget gate where nothing is pruned, 14.9 where half of attention
#            is; 17.8 without a gate. All rows 513 GPU-hours, or 399; rows are divided over the GPUs. As
#            ./train_fox --dry-run --model fox-pro-360m --gpu H200 plans them, by rates measured with 760m
#   memory   24 GiB a GPU with a micro-batch of one sequence
#   disk     5 GB a row: KEEP=1 checkpoint; while a second one is written, twice that
#
# A row: name, the paper's perplexity (360M parameters, 7.5 B tokens, T = 16384; -: no number, but worse than with gates
# that depend on the data), model. fox-pro-no-shifts belongs to the first group, too. Blocks with an output gate have
# hidden_ratio 3.5, the others 4, which makes up for its parameters: so the paper's repository has it in the models that it
# configures, which are none of the ablations. Gates that do not depend on the data, learned (bias) or not (fixed), start
# long: T_min 2, T_max in the name.
. "$(dirname "$0")/../shell/help.sh"
table='
transformer-llama-no-rope 29.30 transformer-llama,use_rope=false
transformer-llama          7.49 transformer-llama
fox-llama-rope             7.19 fox-llama,use_rope=true
fox-llama                  7.25 fox-llama
fox-llama-qk-norm          7.08 fox-llama,qk_norm=true
fox-llama-output-gate      6.88 fox-llama,qk_norm=true,use_output_gate=true,hidden_ratio=3.5
fox-pro-no-shifts          6.80 fox-pro,use_k_shift=false,use_v_shift=false
fox-pro                    6.62 fox-pro

fox-pro-no-qk-norm         6.79 fox-pro,qk_norm=false
fox-pro-no-output-gate     6.86 fox-pro,use_output_gate=false,hidden_ratio=4
fox-pro-no-output-norm     6.69 fox-pro,use_output_norm=false
fox-pro-rope               6.63 fox-pro,use_rope=true
transformer-pro            6.82 transformer-pro
transformer-pro-no-rope    7.40 transformer-pro,use_rope=false

fox-llama-bias-256         -    fox-llama,fgate_type=bias_only,fgate_bias_init=true,decay_time_max=256
fox-llama-bias-2048        -    fox-llama,fgate_type=bias_only,fgate_bias_init=true,decay_time_max=2048
fox-llama-bias-16384       -    fox-llama,fgate_type=bias_only,fgate_bias_init=true,decay_time_max=16384
fox-llama-fixed-256        -    fox-llama,fgate_type=fixed,fgate_bias_init=true,decay_time_max=256
fox-llama-fixed-2048       -    fox-llama,fgate_type=fixed,fgate_bias_init=true,decay_time_max=2048
fox-llama-fixed-16384      -    fox-llama,fgate_type=fixed,fgate_bias_init=true,decay_time_max=16384

fox-pro-bias-256           -    fox-pro,fgate_type=bias_only,fgate_bias_init=true,decay_time_max=256
fox-pro-bias-2048          -    fox-pro,fgate_type=bias_only,fgate_bias_init=true,decay_time_max=2048
fox-pro-bias-16384         -    fox-pro,fgate_type=bias_only,fgate_bias_init=true,decay_time_max=16384
fox-pro-fixed-256          -    fox-pro,fgate_type=fixed,fgate_bias_init=true,decay_time_max=256
fox-pro-fixed-2048         -    fox-pro,fgate_type=fixed,fgate_bias_init=true,decay_time_max=2048
fox-pro-fixed-16384        -    fox-pro,fgate_type=fixed,fgate_bias_init=true,decay_time_max=16384
'
set -eu
. "${0%/*}/../shell/figure.sh"
names=$(awk '{ print $1 }' <<<"$table")
SIZE=${SIZE:-360m} ROWS=${ROWS:-$names}
refuse_blank ROWS
export OUT=${OUT:-out/ablations-$SIZE} MODELS=
rows= # of the table
for name in $ROWS; do
    row=$(awk -v name="$name" '$1 == name' <<<"$table")
    [ -n "$row" ] || die "ROWS: no row $name; the rows are" $names
    model=${row##* } rows+=$row$'\n'
    family=${model%%,*}
    MODELS+="$name:$family-$SIZE${model#"$family"} "
done

case $SIZE in
125m) tokens=2.5Gi ;;
360m) tokens=7Gi ;;
*) tokens=- ;;
esac
WHY="SIZE=$SIZE: give --data and --val-data; scripts/longcrawl64.sh knows where 760m's come from"
figure_data $tokens "$@"
train_rows "${data[@]}" "$@"
[ $code != 75 ] || exit 75
python3 "${0%/*}/perplexities.py" "$OUT" <<<"$rows"
draw_rows "$(awk '{ print $1 }' <<<"$rows")" "${data[@]}" "$@"
exit $code
