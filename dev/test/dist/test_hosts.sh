#!/usr/bin/env bash
# The CPU trainer on hosts that are namespaces of this machine (hosts.sh), started by scripts/multi_node_mpirun.sh: the
# same bits as on one host, resumed on any number of hosts, and an end with one line that names the host when one is lost.
# TEST_ALL=1: the latter in all ways; without it one.
scratch=build/test/hosts
by_mpirun=yes
. dev/test/check.sh
. dev/test/dist/hosts.sh
export OMPI_MCA_mpi_yield_when_idle=1
if ! make_hosts 3; then skip "several hosts: $why"; report; fi
unshare --time true 2>/dev/null || skip "uptimes that differ: unshare has no --time here"
command -v mpirun >/dev/null || { fail "mpirun is missing: scripts/setup.sh test"; report; }
make_repository

# run HOSTS STEPS OUT OPTION...: on h0
run() {
    HOSTS=$1 IFNAME=${IFNAME-eth0} on h0 env -C "$repository" timeout $patience scripts/multi_node_mpirun.sh $options \
        --max-tokens $(($2 * 192)) --out "out/$3" "${@:4}"
}
# alone STEPS OUT OPTION...: one process
alone() {
    PREPARED=yes on h0 env -C "$repository" scripts/longcrawl64.sh $options --max-tokens $(($1 * 192)) --out "out/$2" "${@:3}"
}

# one_line TEXT: all that our programs wrote to stderr
one_line() {
    own "$scratch/stderr" >"$scratch/own"
    equals "1 line" "$(wc -l <"$scratch/own") line$(sed '1d; s/^/; /' "$scratch/own")"
    said "$1" own
}

# await_output PATTERN: reads the run's output, descriptor 8, until a line matches
await_output() {
    local line
    while read -rt $patience line <&8; do
        # shellcheck disable=SC2254
        case $line in $1) return ;; esac
    done
    fail "no line '$1'"
}
# begin COMMAND...: in the background, with its output in descriptor 8
begin() {
    rm -f "$scratch/pipe"
    mkfifo "$scratch/pipe"
    "$@" >"$scratch/pipe" 2>"$scratch/stderr" &
    begun=$!
    exec 8<"$scratch/pipe"
}
# ends CODE [HOST...]: the command ends by itself with this exit code, and no trainer is left there
ends() {
    local limit=$((SECONDS + patience)) code=0 reader
    cat <&8 >/dev/null & # without an end where a frozen host has the other end open
    reader=$!
    disown
    exec 8<&-
    while kill -0 $begun 2>/dev/null && [ $SECONDS -lt $limit ]; do sleep 0.1; done
    kill $reader 2>/dev/null
    if kill -0 $begun 2>/dev/null; then
        fail "it has not ended after $patience s: $(tail -n 3 "$scratch/stderr")"
        return
    fi
    wait $begun || code=$?
    equals "exit code $1" "exit code $code"
    [ $# -gt 1 ] || set "$@" h0 h1 h2
    gone "${@:2}"
}
gone() { await "trainers are left on $*" none_left "$@"; }

# ----------------------------------------------------------------------------

short=20
same_numbers() {
    local n hosts=h0:1
    check "one process" alone $short alone
    for n in 2 ${TEST_ALL:+3}; do
        hosts+=,h$((n - 1)):1
        check "$n hosts" run $hosts $short $n
        equals "" "$(own "$scratch/stderr")"
        said "$n ranks with $((6 / n)) micro-batches a step"
        agree $short $n alone 1e-4
        check "$n ranks on one host" run h0:$n $short one_$n
        same_bytes $short $n one_$n
    done
    [ "${TEST_ALL:-}" ] || return
    check "two ranks on a host, one on another" run h0:2,h1:1 $short uneven
    same_bytes $short uneven one_3
}

# to_mpirun SIGNAL
to_mpirun() {
    local process
    for process in $(living h0); do
        [ "$(cat "/proc/$process/comm")" != mpirun ] || kill "-$1" "$process"
    done
}

long=600
all=h0:1,h1:1,h2:1
# Stopped and resumed: on three hosts, on one, and on three again.
elastic() {
    make_hosts 3 || { fail "$why"; return; }
    check "one process" alone $long long
    begin run $all $long elastic
    await_output "step * 5/*"
    to_mpirun USR1
    ends 75
    equals "" "$(own "$scratch/stderr")"
    check "on one host" alone $long elastic --max-steps $((long - 50))
    check "on three" run $all $long elastic
    agree $long elastic long 2e-3 # which grows with the steps
}

# lost HOST STRIKE...: at step 20 a host is lost. Its run ends, with one line that names it, also mpirun,
# which would wait for the host
lost() {
    local host=$1
    shift
    make_hosts 3 || { fail "$why"; return; }
    rm -rf "$repository/out/lost"
    begin run $all 1000000 lost --timeout ${timeout:-10} --log-every 10 --save-every 10
    await_output "step * 20/*"
    "$@"
}
line="has been stopped or is unreachable for " # and its seconds

unplugged() {
    lost h1 unplug h1
    ends 137
    one_line "error: rank 1 (h1, process "
    one_line "$line"
}

# mpirun would notice after 12 s, and end all without a word.
noticed_by_ranks() {
    local timeout=20
    OMPI_MCA_oob_tcp_keepalive_intvl=1 OMPI_MCA_oob_tcp_keepalive_probes=1 lost h1 unplug h1
    ends 137
    one_line "error: rank 1 (h1, process "
}

pulled() {
    lost h2 pull h2
    ends 137
    one_line "error: rank 2 (h2, process "
    one_line "$line"
}

# A frozen host answers on the network; once it goes on, its ranks find the others gone.
frozen() {
    lost h1 strike STOP h1
    ends 137 h0 h2
    one_line "error: rank 1 (h1, process "
    one_line "$line"
    strike CONT h1
    gone h1
}

# The host of mpirun and rank 0, from which the others hear nothing: each side ends by itself.
first_unplugged() {
    lost h0 unplug h0
    ends 137
    one_line "$line"
    check "which host" grep -qE '^error: rank [12] \(h[12], process ' "$scratch/own"
}

first_frozen() {
    lost h0 strike STOP h0
    gone h1 h2
    strike CONT h0 # whose mpirun has the line
    ends 1
    one_line "error: rank 0 (h0, process "
    one_line "$line"
}

# What is wrong from the start.
never_begun() {
    make_hosts 3 || { fail "$why"; return; }
    dies "HOSTS: the name nowhere does not resolve on h0" run h0:1,nowhere:1 $short nowhere
    # rank 0's is a name for torchrun
    local variables="WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_PORT=29400"
    dies "error: rank 1 (h1): cannot reach rank 0 at nowhere, port 29401, within 2 s: " on h1 env -C "$repository" $variables RANK=1 \
        MASTER_ADDR=nowhere ./train_foxcu --model fox-pro-nano --timeout 2
    # an interface that leads nowhere; without a name mpirun finds the one that does
    IFNAME=dead0
    dies "error: h1 cannot reach h0 through IFNAME=dead0 (10.213.88.1)" run h0:1,h1:1 $short dead
    IFNAME=
    check "no IFNAME" run h0:1,h1:1 $short unnamed
    unset IFNAME
    # shards that only rank 0 sees
    on h1 mount -t tmpfs none "$repository/data"
    dies "rank 1 (h1): 'data/longcrawl64_train_*.bin': no file matches" run h0:1,h1:1 $short missing
    on h1 umount "$repository/data"
}

# Checkpoints on a disk that only rank 0 sees: the other ranks' parts come to it.
own_disk() {
    make_hosts 3 || { fail "$why"; return; }
    mkdir -p "$repository/out/own"
    on h0 mount -t tmpfs none "$repository/out/own"
    check "stop" run $all $short own --max-steps 7
    check "go on" run $all $short own
    equals "" "$(own "$scratch/stderr")"
    equals "" "$(ls "$repository/out/own")"
    on h0 cp -r "$repository/out/own" "$repository/out/of_h0"
    same_bytes $short of_h0 3
}

# The clocks of hosts are an hour apart; so are their uptimes, in all tests (hosts.sh).
clocks() {
    make_hosts 3 || { fail "$why"; return; }
    printf '%s\n' '#include <sys/syscall.h>' '#include <time.h>' '#include <unistd.h>' 'time_t time(time_t* t) {
        struct timespec now;
        char host[64] = "";
        syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
        gethostname(host, sizeof host - 1);
        now.tv_sec += 3600 * (50 - host[1]);
        if (t) *t = now.tv_sec;
        return now.tv_sec;
    }' | cc -xc -shared -fPIC - -o "$scratch/clock.so"
    LD_PRELOAD=$PWD/$scratch/clock.so run $all $short clocks >"$scratch/stdout" 2>"$scratch/stderr"
    equals "" "$(own "$scratch/stderr")"
    same_bytes $short clocks 3
    check "h0's clock is ahead" test "$(sed -n 's/.*"started": *"\([^"]*\)".*/\1/p' "$repository/out/clocks/log.jsonl")" '>' \
        "$(date -u -d '+1 hour' +%FT%TZ)"
}

same_numbers
unplugged
if [ "${TEST_ALL:-}" ]; then
    elastic
    noticed_by_ranks
    pulled
    frozen
    first_unplugged
    first_frozen
    never_begun
    own_disk
    clocks
fi
report
