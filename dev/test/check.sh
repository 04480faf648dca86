# The harness of the shell tests. A test sets `scratch`, the folder of its files, and then sources this file, which
# empties it.
set -u
rm -rf "$scratch"
mkdir -p "$scratch"

# mpirun as root, with more ranks than cores, in containers, and without its banner after an error, which OpenMPI 5 always
# prints
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_orte_execute_quiet=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_btl_vader_single_copy_mechanism=none

passed=0
failed=0

# report: prints the summary line that run.sh sums, and exits
report() {
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
}

pass() { passed=$((passed + 1)); }

# skip WHY: says what of the test is left out on this machine; run.sh reports it
skip() { echo "skipped: $1"; }

# fail MESSAGE: prints the message with the line of the test that called into this file, and those that led there
fail() {
    local level=0 lines
    failed=$((failed + 1))
    while [ "${BASH_SOURCE[level]}" = "${BASH_SOURCE[0]}" ]; do level=$((level + 1)); done
    lines=${BASH_LINENO[*]:level - 1}
    lines=${lines% 0}
    echo "FAILED ${BASH_SOURCE[level]}:${lines// / from }: $1"
}

# check MESSAGE COMMAND...: the command succeeds. Its output stays in $scratch/stdout and $scratch/stderr
check() {
    local message=$1
    shift
    if "$@" >"$scratch/stdout" 2>"$scratch/stderr"; then
        pass
    else
        fail "$message: exit code $?: $(tail -n 3 "$scratch/stderr")"
    fi
}

# said TEXT [FILE]: the last command printed TEXT, to stdout or to $scratch/FILE
said() {
    if grep -qF -- "$1" "$scratch/${2:-stdout}"; then
        pass
    else
        fail "'$1' is not in: $(tail -n 5 "$scratch/${2:-stdout}")"
    fi
}

# own FILE: the lines of our programs in the stderr of a command. A test whose programs mpirun starts sets by_mpirun:
# mpirun adds lines of its own, whose words and number are its own affair. There the lines that begin as our messages do,
# and the sanitizers', are ours.
own() {
    if [ "${by_mpirun:-}" ]; then
        grep -E '^(error|warning|note): |runtime error:|Sanitizer|^libgomp: ' "$1"
    else
        cat "$1"
    fi
}

# dies EXPECTED COMMAND...: exit code 1, and stderr is one line, `error: ...EXPECTED...`
dies() {
    local expected=$1 code=0
    shift
    "$@" >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    own "$scratch/stderr" >"$scratch/own"
    if [ $code = 1 ] && [ "$(wc -l <"$scratch/own")" = 1 ] && grep -q '^error: ' "$scratch/own" &&
        grep -qF -- "$expected" "$scratch/own"; then
        pass
    else
        fail "expected exit code 1 and one line with '$expected', got $code and: $(head -n 5 "$scratch/stderr")"
    fi
}

# same A B: the two files have the same bytes
same() { if cmp -s "$1" "$2"; then pass; else fail "$1 and $2 differ"; fi; }

# differ A B: both files exist and their bytes differ
differ() { if [ -f "$1" ] && [ -f "$2" ] && ! cmp -s "$1" "$2"; then pass; else fail "$1 and $2 are the same"; fi; }

# equals WANT GOT: the two strings are the same
equals() { if [ "$1" = "$2" ]; then pass; else fail "expected '$1', got '$2'"; fi; }

# make_files: cli_files.py's files, of which $shards are the shards; $python may run in another folder
make_files() {
    shards=$scratch/files/shards
    python=$(python3 -c 'import sys; print(sys.executable)') || { fail "python3 is missing"; report; }
    check "make the files" files make "$scratch/files"
}
files() { "$python" -S dev/test/cli_files.py "$@"; } # without packages, which take longer to find than this to run

# trainer_files: make_files for a test of $trainer, ./train_fox or TRAIN_FOX
trainer_files() {
    trainer=${TRAIN_FOX:-./train_fox}
    [ -x "$trainer" ] || { fail "$trainer is not built"; report; }
    make_files
}

# What runs leave. step OUT STEP: the checkpoint's folder; checkpoints OUT: the steps of all, and .tmp-* folders
step() { printf '%s/step_%08d' "$1" "$2"; }
checkpoints() { (cd "$1" && echo .tmp-* step_*) | sed 's/\.tmp-\* //; s/step_0*\([0-9]\)/\1/g'; }

# same_bytes STEP OUT OUT: both runs have the same weights and moments at a step
same_bytes() {
    local file
    for file in model optimizer; do same "$(step "$2" $1)/$file.safetensors" "$(step "$3" $1)/$file.safetensors"; done
}

# near LIMIT OUT OUT: the first run has the steps and validations of the second, with losses that differ by at most LIMIT,
# relative. OUT: in $scratch
near() {
    check "losses of $2 and $3" "$python" dev/test/trainer/ranks.py losses "$scratch/$2/log.jsonl" "$scratch/$3/log.jsonl" "$1"
}

# agree STEP OUT OUT TOLERANCE: both runs have the same weights at a step, and losses up to it, but for rounding, in the same
# place of the data
agree() {
    local ranks=("${python:-python3}" dev/test/trainer/ranks.py) first second
    first=$(step "$2" $1) second=$(step "$3" $1)
    check "weights of $2" "${ranks[@]}" close "$first" "$second" $4
    check "losses of $2" "${ranks[@]}" losses "${first%/*}/log.jsonl" "${second%/*}/log.jsonl" $4
    equals "$("${ranks[@]}" record "$second")" "$("${ranks[@]}" record "$first")"
}

# each_trainer PART...: calls the functions with $trainer ./train_fox and then the one with sanitizers, or with TRAIN_FOX alone,
# in an empty $scratch but for its files, and reports
each_trainer() {
    local part
    for trainer in ${TRAIN_FOX:-./train_fox build/test/train_fox_sanitized}; do
        if [ ! -x "$trainer" ]; then
            fail "$trainer is not built: make $trainer"
            continue
        fi
        find "$scratch" -mindepth 1 -maxdepth 1 ! -name files -exec rm -rf {} +
        for part; do $part; done
    done
    report
}
