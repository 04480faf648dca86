# Python scripts without Python's start, for tests that start a hundred: each runs in a fork of one process, warm.py beside this
# file, with the caller's standard output and error, a file or a pipe each, and ends with its own exit code. It has the
# environment of warm_python and no input, and one script runs at a time. Source it after check.sh.
#
#     warm_python PYTHON MODULE...   starts the process, which imports the modules: those that most of the scripts use, as a
#                                    process that has more takes longer to fork and to end. It replaces the one before
#     warm SCRIPT ARGUMENT...        runs a script there
#
# No answer, and that to another request, are code 127 and a line on stderr.
warm_number=0 warm_pid=''

warm_end() {
    [ "$warm_pid" ] || return
    exec {warm_to}>&- {warm_from}<&-
    wait $warm_pid # its CPU time is the test's
}
trap warm_end EXIT

warm_python() {
    local pipes
    warm_end
    pipes=$(mktemp -d) # no coproc: bash closes its descriptors' numbers in subshells, also where they are other files'
    mkfifo "$pipes/to" "$pipes/from"
    "$1" dev/test/warm/warm.py "${@:2}" <"$pipes/to" >"$pipes/from" 3>&1 &
    warm_pid=$!
    exec {warm_to}>"$pipes/to" {warm_from}<"$pipes/from"
    rm -r "$pipes"
}

warm() {
    local number='' code='' pid=$BASHPID
    warm_number=$((warm_number + 1))
    # neither of the two may replace this shell's own streams: warm.py opens them at any moment from here on
    (printf '%d %d %d\n' $warm_number "$pid" $# && printf '%s\0' "$@") >&"$warm_to"
    read -r -u "$warm_from" number code
    if [ "$number" != $warm_number ]; then
        echo "dev/test/warm/warm.py: no answer to request $warm_number, but '$number $code'" >&2
        return 127
    fi
    return "$code"
}
