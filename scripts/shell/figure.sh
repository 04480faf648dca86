# Sourced behind help.sh by scripts of scripts/sweep that train rows with sweep.sh and draw the loss of each by position, on
# LongCrawl64 unless the arguments have --data. OUT is the folder of the rows.
. "${BASH_SOURCE[0]%/*}/trainer.sh"
top=${BASH_SOURCE[0]%/*}/..

# refuse_blank NAME...: lists of what is trained
refuse_blank() {
    local list
    for list; do [[ ${!list} =~ [^[:space:]] ]] || die "$list is blank"; done
}

# figure_data TOKENS OPTION...: sets data, the options that name it and how it is measured. TOKENS are those to download;
# -: LongCrawl64 is refused, for the reason WHY
figure_data() {
    local tokens=$1 prefix=data/longcrawl64 vocab=dev/test/fixtures/gpt2/vocab.bpe # for the checkpoints' tokenizer
    shift
    data=()
    case " $* " in *" --data"[\ =]*) return ;; esac
    [ "$tokens" != - ] || die "$WHY"
    [ -x train_foxcu ] || "$top/check.sh" need gpu # before minutes of compiling
    make train_foxcu data/longcrawl64
    check_options ./train_foxcu "$@"
    data/longcrawl64 --split train --tokens "$tokens" --vocab $vocab --out $prefix ${SOURCE:+--source "$SOURCE"}
    data/longcrawl64 --split heldout --tokens 32Mi --vocab $vocab --out $prefix ${SOURCE:+--source "$SOURCE"}
    data=(--data "${prefix}_train_*.bin" --val-data "${prefix}_val_*.bin" --val-every 2000 --val-tokens 8Mi --save-every 250
        --log-every 10 --json-escape)
}

# train_rows OPTION...: sweep.sh, to which a signal is passed on. Sets code to its exit code
train_rows() {
    choose_trainer
    if [ -x "$TRAINER" ]; then # sweep.sh says that it is not built
        check_options "$TRAINER" ${EVAL:-}
        check_models "$(printf '%s\n' $MODELS | sed 's/^[^:,]*://')" "$@"
    fi
    export OUT TRAINER GPUS=${GPUS:-}
    "$top/sweep.sh" "$@" &
    sweep=$!
    trap 'kill -USR1 $sweep' INT TERM HUP QUIT USR1
    code=0
    while :; do # a signal ends `wait` before the sweep ends
        wait $sweep && code=0 || code=$?
        [ $code -gt 128 ] && kill -0 $sweep 2>/dev/null || break
    done
    trap - INT TERM HUP QUIT USR1
}

# draw_rows NAMES OPTION...: measures the loss by position of the runs that have ended on the options' --val-data, and draws
# it. NAMES: what their folders' names begin with. EVAL: options of --eval, as its length, by default 65,536 tokens where
# documents are that long
draw_rows() {
    local names=$1 name out before='' word held='' files=()
    shift
    for word; do
        [ "$before" != --val-data ] || held=$word
        case $word in --val-data=*) held=${word#*=} ;; esac
        before=$word
    done
    [ -n "$held" ] || return 0
    for name in $names; do
        for out in "$OUT/${name}_lr-"*_seed-*; do
            [ -s "$out/done" ] || continue
            if [ "$out/eval.json" -ot "$out/done" ]; then
                echo "measuring: $out"
                env ${GPUS:+"CUDA_VISIBLE_DEVICES=${GPUS%% *}"} "$TRAINER" --init "$out" --eval "$out/eval.json" \
                    --val-data "$held" ${EVAL:-} >"$out/eval.txt" 2>&1 ||
                    die "$out/eval.txt: $(grep '^error: ' "$out/eval.txt" || tail -n 1 "$out/eval.txt")"
            fi
            name=${out##*/} name=${name%_seed-*}
            files+=("${name%_lr-preset}=$out/eval.json")
        done
    done
    [ ${#files[@]} -gt 0 ] || return 0
    if python3 -c 'import sys, importlib.util as i; sys.exit(not i.find_spec("matplotlib"))' 2>/dev/null; then
        python3 "$top/eval/positions.py" "${files[@]}" --out "$OUT/positions.svg"
        echo "loss by position: $OUT/positions.svg"
    else
        echo "no picture without matplotlib (scripts/requirements.txt): install it and give the same command again"
    fi
}

# figure TOKENS NAMES OPTION...: all of it, and a table of the rows, whose models and settings are in MODELS and SETS
figure() {
    local tokens=$1 names=$2 name out folders=()
    shift 2
    export MODELS SETS
    figure_data "$tokens" "$@"
    train_rows "${data[@]}" "$@"
    [ $code != 75 ] || exit 75
    for name in $names; do
        for out in "$OUT/${name}_lr-"*_seed-*; do [ ! -s "$out/log.jsonl" ] || folders+=("$out"); done
    done
    [ ${#folders[@]} = 0 ] || python3 "$top/compare.py" --no-plots "${folders[@]}"
    draw_rows "$names" "${data[@]}" "$@"
    exit $code
}
