# Hosts of a test, for the tests of this folder: namespaces of this machine with a name, interfaces, mounts and an uptime
# of their own, on a network that leads to them alone. Needs root, util-linux and iproute2. Source it after check.sh.
#
#     h0  eth0 10.213.77.1 ---+
#     h1  eth0 10.213.77.2 ---+--- a bridge in a namespace of its own, the fabric
#     h2  eth0 10.213.77.3 ---+
#         dead0 10.213.88.*        is listed before eth0, and leads nowhere
#
# All processes of hosts are in one PID namespace, which ends with the test, also by SIGKILL.
#
#     make_hosts N       h0 ... in place of those that there are; false, with $why, where this machine does not allow it
#     on HOST COMMAND    runs it there. Signals are for `strike`: this process only waits for the command
#     strike SIGNAL HOST to all its processes
#     unplug HOST        the bridge drops what the host sends and gets: its link stays up, and nobody is told
#     pull HOST          its cable is pulled. plug HOST: undoes both
#     trainers HOST...   how many trainers run there
#     await MESSAGE COMMAND...   until the command succeeds; after $patience seconds a failure
#     end_hosts          ends all that runs there, and with it the hosts
#     make_repository    $repository: a folder with the scripts of this one, whose GPU trainer is the CPU trainer and whose
#                        data are a few sequences; $options make steps of 6 micro-batches of two sequences of 16 tokens
patience=240 # seconds that a busy machine may take
fabric='' keeper=''
declare -A host_pid=() # the process that holds a host's namespaces, in the PID namespace of the hosts

in_fabric() { nsenter -t "$fabric" -a -w "$@"; }
on() { in_fabric nsenter -t "${host_pid[$1]}" -a -w "${@:2}"; }

# cable HOST INTERFACE ADDRESS: the other end is INTERFACE.HOST
cable() {
    in_fabric ip link add "$2.$1" type veth peer name "$2" netns "${host_pid[$1]}" && in_fabric ip link set "$2.$1" up &&
        on "$1" ip address add "$3/24" dev "$2" && on "$1" ip link set "$2" up
}
unplug() { touch "$scratch/cut.$1" && in_fabric ip link set eth0.$1 nomaster; }
pull() { touch "$scratch/cut.$1" && in_fabric ip link set eth0.$1 down; }
plug() { rm -f "$scratch/cut.$1" && in_fabric ip link set eth0.$1 up && in_fabric ip link set eth0.$1 master switch; }

make_hosts() {
    local i host clock made hold='while :; do sleep infinity; done'
    end_hosts
    why="it needs root"
    [ "$(id -u)" = 0 ] || return 1
    why="it needs unshare, nsenter and setpriv (util-linux), and ip (iproute2)"
    command -v unshare nsenter setpriv ip >/dev/null || return 1
    why="namespaces and a bridge cannot be made here"
    mkfifo "$scratch/made"
    exec {made}<>"$scratch/made"
    rm "$scratch/made"
    # bash takes in the processes whose parents have ended
    setpriv --pdeathsig KILL unshare --fork --kill-child --pid --mount-proc --net bash -c "echo >&3; exec 3>&-; $hold" \
        3>&$made {made}>&- &
    keeper=$!
    read -rt 30 <&$made && fabric=$(cat /proc/$keeper/task/$keeper/children) && fabric=${fabric% } &&
        in_fabric ip link add switch type bridge && in_fabric ip link set switch up || return 1
    echo '127.0.0.1 localhost' >"$scratch/etc_hosts"
    for ((i = 0; i < $1; i++)); do echo "10.213.77.$((i + 1)) h$i"; done >>"$scratch/etc_hosts"
    : >"$scratch/etc_resolv" # no name server
    for ((i = 0; i < $1; i++)); do
        host=h$i clock=(--time --monotonic $((i * 3600)) --boottime $((i * 3600)))
        unshare --time true 2>/dev/null || clock=()
        nsenter -t "$fabric" -a -w unshare --fork --net --uts --mount --ipc "${clock[@]}" bash -c 'hostname $0 &&
            mount -t tmpfs none /dev/shm && mount --bind "$1/etc_hosts" /etc/hosts && mount --bind "$1/etc_resolv" /etc/resolv.conf && echo $$ >&3
            exec 3>&-; '"$hold" $host "$scratch" 3>&$made {made}>&- &
        disown
        read -rt 30 "host_pid[$host]" <&$made && cable $host dead0 10.213.88.$((i + 1)) &&
            cable $host eth0 10.213.77.$((i + 1)) && on $host ip link set lo up && plug $host || return 1
    done
    { # in place of ssh for mpirun on h0: HOST COMMAND... As ssh it does not hear that a host behind a cut ends the command
        printf '#!/bin/sh\nhost=$1\nshift\ncase $host in\n'
        for host in "${!host_pid[@]}"; do echo "$host) nsenter -t ${host_pid[$host]} -a env OMPI_MCA_orte_tmpdir_base=/dev/shm sh -c \"\$*\" ;;"; done
        echo '*) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;'
        printf 'esac\ncode=$?\nfor cut in h0 $host; do [ ! -e "%s/cut.$cut" ] || exec tail -f /dev/null; done\nexit $code\n' "$PWD/$scratch"
    } >"$scratch/agent"
    chmod +x "$scratch/agent"
    # mpirun names its folders by hosts and processes, whose numbers are small and the same in every test
    export OMPI_MCA_plm_rsh_agent=$PWD/$scratch/agent OMPI_MCA_orte_tmpdir_base=/dev/shm
    exec {made}>&-
}

end_hosts() {
    [ -z "$keeper" ] || { kill -KILL $keeper && wait $keeper; }
    [ -z "$fabric" ] || pkill -KILL -f "^nsenter -t $fabric " # of a frozen host: it has stopped itself
    keeper='' fabric='' host_pid=()
} 2>/dev/null
trap end_hosts EXIT

# living HOST: its processes, as this machine counts
living() {
    local network link
    network=$(on $1 readlink /proc/self/ns/net)
    for link in /proc/[0-9]*/ns/net; do
        [ "$(readlink "$link")" != "$network" ] || { link=${link#/proc/}; echo "${link%/ns/net}"; }
    done 2>/dev/null
}
strike() {
    kill "-$1" $(living $2)
    [ "$1" != CONT ] || pkill -CONT -P "$begun" # nsenter has stopped itself with its command
}
trainers() {
    local host process
    for host; do
        for process in $(living $host); do readlink "/proc/$process/exe"; done
    done | grep -c '/train_fox$'
}

await() {
    local limit=$((SECONDS + patience)) message=$1
    shift
    until "$@"; do
        [ $SECONDS -lt $limit ] || { fail "$message"; return 1; }
        sleep 0.1
    done
    pass
}
none_left() { [ "$(trainers "$@")" = 0 ]; }

options="--set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=32 --seq-len 16
    --batch-tokens 192 --warmup-tokens 640 --micro-batch 2 --shuffle --val-every 0 --log-every 1"
step() { printf '%s/out/%s/step_%08d' "$repository" "$1" "$2"; } # OUT STEP, as same_bytes takes it
make_repository() {
    local shards=$PWD/$scratch/files/shards
    repository=$PWD/$scratch/repository
    check "make the files" python3 dev/test/cli_files.py make "$scratch/files"
    mkdir -p "$repository/data"
    ln -s "$PWD/train_fox" "$repository/train_foxcu"
    ln -s "$PWD/scripts" "$repository/scripts"
    ln -s "$shards/text.bin" "$repository/data/longcrawl64_train_000000.bin"
    ln -s "$shards/part_2.bin" "$repository/data/longcrawl64_val_000000.bin"
    export MODEL=fox-pro-nano REPEAT=yes OMP_NUM_THREADS=1
}
