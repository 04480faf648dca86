#!/usr/bin/env bash
# Measures a checkpoint, by loss and by synthetic tasks, for a table or a picture of many:
#
#   DATA='data/web_val_*.bin' TEXT=essays scripts/eval/all.sh out/run/step_00004096 out/run/eval
#
#   loss.json        loss by position up to the training length T
#   long.json        the same up to LONG tokens
#   maps.json        half-life, pruned share and effective window of every head (not of recurrent models)
#   ruler.json       RULER's tasks that fit into LENGTHS
#   copy.json        fall of the loss where a segment comes again after GAPS tokens
#   conflict.json    whether the newer or the older of two continuations is expected
#   corrupted.json   rise of the loss with the share of context tokens that are replaced
#   keys.json        last values of keys that a text updates (of models that have a tokenizer)
#   needle.json      RULER's single needle by length and depth in the folder TEXT; left out without it
#
# DATA are held-out shards. Other variables, with their defaults: TRAINER (train_foxcu where there is a GPU), LONG=4*T, at
# most 65536, TOKENS=4Mi of each loss, SAMPLES=32 a point of copy, conflict and corrupted, LENGTHS=T/4,T of RULER and the
# needle (1024,2048 where T is below 4096), GAPS and UPDATES those of 256,1024,4096,16384,65536 and 3,12,50,200 that fit into
# LONG, VOCAB (GPT-2's vocab.bpe, if DIR has no tokenizer.json), PYTHON. On the CPU LONG is at most 4096 or T, TOKENS=64Ki,
# SAMPLES=4, LENGTHS the first alone.
#
# DIR may be a run: its newest checkpoint is measured. What is there already is not measured again, so the same command
# goes on after an interruption; with another checkpoint, DATA, LONG or TOKENS than those of made.txt it is an error. A
# part that fails does not keep the others from running; they are named at the end, and the exit code is 1.
. "$(dirname "$0")/../shell/help.sh"
set -u
unset CDPATH # cd would print a folder
[ $# -eq 2 ] || die "usage: DATA=GLOB scripts/eval/all.sh DIR OUT"
[ -n "${DATA:-}" ] || die "DATA is not set: held-out shards, as in DATA='data/web_val_*.bin'"
IFS=, read -ra globs <<<"$DATA"
for glob in "${globs[@]}"; do [ -e "$glob" ] || compgen -G "$glob" >/dev/null || die "DATA: '$glob': no file matches"; done
eval=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
init=$(PYTHONPATH=$eval "$PYTHON" -c 'import sys, fox; fox.run(lambda: print(fox.checkpoint(sys.argv[1])))' "$1") || exit 1
[ -f "$init/config.json" ] || die "$1: no checkpoint"
init=$(realpath "$init") || exit 1
facts=$(PYTHONPATH=$eval "$PYTHON" -c '
import sys, fox
folder = sys.argv[1]
has = lambda name: fox.recorded_option(folder, name)
config = fox.read_json(f"{folder}/config.json")
of_bytes = config.get("vocab_size") == fox.BYTE_VOCAB
text = of_bytes or (fox.Path(folder) / "tokenizer.json").exists() or sys.argv[2]
print(has("seq-len") or 512, int(bool(has("json-escape"))), int("fgate_type" in config), int(bool(text)), int(of_bytes))
print(fox.default_trainer())' "$init" "${VOCAB:-}") || die "$init: cannot be read"
{ read -r T escape attention text bytes && read -r trainer; } <<<"$facts"
[ "$bytes" = 0 ] || [ -z "${VOCAB:-}" ] || die "VOCAB: the model in $init reads bytes: leave it out"
TRAINER=${TRAINER:-$trainer}
most=65536 tokens=4Mi samples=32
# RULER's tasks take some 500 tokens and more
lengths=$([ "$T" -ge 4096 ] && echo $((T / 4)),"$T" || echo 1024,2048)
case ${TRAINER##*/} in
*cu*) ;;
*) most=$((T > 4096 ? T : 4096)) tokens=64Ki samples=4 lengths=${lengths%,*} ;;
esac
for count in LONG SAMPLES; do
    [[ ${!count-1} =~ ^[1-9][0-9]{0,8}$ ]] || die "$count=${!count}: not a whole number above 0"
done
[ -z "${TEXT:-}" ] || [ -e "$TEXT" ] || die "TEXT: $TEXT: no such file or folder"
# fit NUMBERS TOKENS: the first of the numbers, and the others that take at most LONG tokens, TOKENS each
fit() { awk -v RS=, -v most="$((LONG / $2))" 'NR == 1 || $1 <= most { printf "%s%d", (NR > 1 ? "," : ""), $1 }' <<<"$1"; }
LONG=${LONG:-$((4 * T < most ? 4 * T : most))} TOKENS=${TOKENS:-$tokens} SAMPLES=${SAMPLES:-$samples}
LENGTHS=${LENGTHS:-$lengths} GAPS=${GAPS:-$(fit 256,1024,4096,16384,65536 1)}
UPDATES=${UPDATES:-$(fit 3,12,50,200 $((bytes ? 112 : 48)))} # of 8 keys, a line each
[ -x "$TRAINER" ] || die "$TRAINER is not built: make ${TRAINER##*/}"
refused=$("$TRAINER" --help --val-tokens "$TOKENS" 2>&1 >/dev/null)
[ -z "$refused" ] || die "TOKENS: ${refused#error: }"
refused=$("$TRAINER" --dry-run --init "$init" --data "$DATA" 2>/dev/null | sed -n 's/^data *cannot be used: //p')
[ -z "$refused" ] || die "DATA: $refused"
mkdir -p "$2" || die "$2: cannot be made"
was=$(sed 's/, DATA=.*//' "$2/made.txt" 2>/dev/null)
[ ! "$was" -ef "$init" ] || init=$was # an older OUT has the path as given, which parts compare as text
made="$init, DATA=$DATA LONG=$LONG TOKENS=$TOKENS"
[ ! -f "$2/made.txt" ] || [ "$(<"$2/made.txt")" = "$made" ] ||
    die "$2: was made of $(<"$2/made.txt"), not of $made: give another OUT"
echo "$made" >"$2/made.txt" || exit 1
echo "by $TRAINER, T=$T: LONG=$LONG TOKENS=$TOKENS SAMPLES=$SAMPLES LENGTHS=$LENGTHS GAPS=$GAPS UPDATES=$UPDATES"
model=(--init "$init" ${VOCAB:+--vocab "$VOCAB"})
[ "$escape" = 0 ] || model+=(--json-escape)
failed=

# part NAME COMMAND...: prints a title and runs the command
part() {
    echo "-- $1"
    "${@:2}" || failed="$failed $1"
}
# loss NAME OPTION...: --eval, unless its file is there
loss() {
    [ -f "$out/$1.json" ] || part "$1" "$TRAINER" --init "$init" --eval "$out/$1.json" --val-data "$DATA" \
        --val-tokens "$TOKENS" "${@:2}"
}
# task NAME SCRIPT OPTION...: a script of this folder
task() { part "$1" "$PYTHON" "$eval/$2" "${@:3}" "${model[@]}" --trainer "$TRAINER" --out "$out/$1.json"; }
maps() {
    [ -f "$out/maps.safetensors" ] || "$TRAINER" --init "$init" --maps "$out/maps.safetensors" --val-data "$DATA" || return
    "$PYTHON" "$eval/maps.py" "$out/maps.safetensors" --json "$out/maps.json"
}
out=$2

loss loss
loss long --seq-len "$LONG"
[ "$attention" = 0 ] || [ -f "$out/maps.json" ] || part maps maps
task copy tasks/zero_shot.py copy --data "$DATA" --gaps "$GAPS" --samples "$SAMPLES"
task conflict tasks/zero_shot.py conflict --data "$DATA" --gaps "$GAPS" --stale 1,4 --samples "$SAMPLES"
task corrupted tasks/zero_shot.py corrupted --data "$DATA" --samples "$SAMPLES" --targets $((T < 512 ? T / 2 : 256))
if [ "$text" = 1 ]; then
    task ruler tasks/ruler.py --lengths "$LENGTHS" --samples 4 ${TEXT:+--text "$TEXT"}
    task keys tasks/keys.py text --updates "$UPDATES" --samples 8
    [ -z "${TEXT:-}" ] || task needle needle.py --haystack "$TEXT" --kind single --lengths "$LENGTHS" \
        --depths 0:100:25 --samples 2
fi
[ -z "$failed" ] || die "failed:$failed"
