# The harness of the shell tests, to be sourced by one that has set `scratch`, a folder for this test's files.
set -u

passed=0
failed=0

# report: the closing line that run.sh adds up
report() {
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
}

pass() { passed=$((passed + 1)); }

# fail MESSAGE: prints where in the test we are, outside of the functions of this file
fail() {
    local level=0
    failed=$((failed + 1))
    while [ "${BASH_SOURCE[level]}" = "${BASH_SOURCE[0]}" ]; do level=$((level + 1)); done
    echo "FAILED ${BASH_SOURCE[level]}:${BASH_LINENO[level - 1]}: $1"
}

# check MESSAGE COMMAND...: the command succeeds; its output is left in $scratch/stdout and $scratch/stderr
check() {
    local message=$1
    shift
    if "$@" >"$scratch/stdout" 2>"$scratch/stderr"; then
        pass
    else
        fail "$message: exit code $?: $(tail -n 3 "$scratch/stderr")"
    fi
}

# said TEXT [FILE]: the last command printed this (to $scratch/FILE)
said() {
    if grep -qF -- "$1" "$scratch/${2:-stdout}"; then
        pass
    else
        fail "'$1' is not in: $(tail -n 5 "$scratch/${2:-stdout}")"
    fi
}

# dies EXPECTED COMMAND...: exit code 1, and all that is on standard error is one line `error: ...EXPECTED...`
dies() {
    local expected=$1 code=0
    shift
    "$@" >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    if [ $code = 1 ] && [ "$(wc -l <"$scratch/stderr")" = 1 ] && grep -q '^error: ' "$scratch/stderr" &&
        grep -qF -- "$expected" "$scratch/stderr"; then
        pass
    else
        fail "expected exit code 1 and one line with '$expected', got $code and: $(head -n 5 "$scratch/stderr")"
    fi
}

# same A B: two files have the same bytes
same() { if cmp -s "$1" "$2"; then pass; else fail "$1 and $2 differ"; fi; }

# differ A B: two files, both there, have not
differ() { if [ -f "$1" ] && [ -f "$2" ] && ! cmp -s "$1" "$2"; then pass; else fail "$1 and $2 are the same"; fi; }

# equals WANT GOT: two texts are the same
equals() { if [ "$1" = "$2" ]; then pass; else fail "expected '$1', got '$2'"; fi; }
