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

# mpirun_settings: lets mpirun run as root, as whom containers run, and without a banner after an error or exit code 75,
# which OpenMPI 5 prints in any case: it has no -q
mpirun_settings() {
    [ "$(id -u)" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_MCA_orte_execute_quiet=1
}
