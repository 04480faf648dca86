# Sourced by shell scripts below their opening comment: -h or --help among the arguments prints that comment, and ends the
# script before it does anything.
for word; do
    case $word in
    -h | --help)
        sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"
        exit
        ;;
    esac
done

# die MESSAGE: ends the script
die() {
    echo "error: $*" >&2
    exit 1
}

# check_options TRAINER OPTION...: ends the script where the trainer does not know an option, before anything is made
check_options() { "$@" --help >/dev/null || exit 1; }
