#!/bin/sh
# The 760M recipe of the analysis runs in the paper's repository, on several hosts without a batch system: mpirun
# reaches them through ssh.
#
#     HOSTS=node1:8,node2:8 IFNAME=eth0 scripts/multi_node_mpirun.sh
#
# MODEL and RECIPE are those of longcrawl64.sh: RECIPE=iclr takes three times the tokens, FLOP and hours.
#
#   hosts    each with its number of GPUs. This host can log in to all of them through ssh without a
#            password. The repository, with out/, is at the same path on all, on a file system that they share
#   build    once, on one of them: make train_foxcu USE_MPI=1 USE_NCCL=1
#   data     16.1 G tokens, made once beforehand by MODEL=fox-pro-760m DATA_ONLY=yes scripts/longcrawl64.sh, which says what
#            to do where the default copy of LongCrawl64 has less. Fewer tokens are refused, unless REPEAT=yes
#   compute  1.32e20 FLOP in total: 30,720 steps of 524,288 tokens, 32 sequences, two a GPU on 16 GPUs
#   time     0.56 s a step on 16 H200s at 58,749 tokens/s each, nothing pruned: 4.9 hours in total at 98% of that; 3.6
#            with gates spread over all lengths, 2.5 while they are as they begin (./train_fox --dry-run --gpu H200
#            --ranks 16)
#   traffic  3.35 GB of gradients and 1.67 GB of weights out of and into each host, in each step: 0.1 s at 400
#            Gbit/s, 0.4 s at 100 Gbit/s. Computed without any overlap: 85% of linear and 5.7 hours with one
#            adapter of 400 Gbit/s a host, 98% with one a GPU
#   memory   31 GiB a GPU on 16: 24 GiB of activations, 5.3 GiB of weights, gradients and a share of the
#            optimizer's state
#   disk     10 GB a checkpoint, the newest three are kept
#
# IFNAME is the network interface that leads to the other hosts, as `ip addr` names it. Without it MPI and
# NCCL choose one, and may choose one that leads nowhere, such as docker0. Where NCCL finds InfiniBand, it
# uses the interface to start only. MPI is used to start only, so it always uses TCP.
#
# The same command resumes the run, on other hosts or another number of GPUs too. `kill -USR1` to this process
# saves and leaves with exit code 75. SIGTERM and Ctrl-C leave no time to save: mpirun kills the ranks after a
# second.
. "$(dirname "$0")/shell/help.sh"
set -eu
hosts=${HOSTS:-}
[ -n "$hosts" ] || die "HOSTS is not set: the hosts and their numbers of GPUs, as in HOSTS=node1:8,node2:8"

ranks=0
for host in $(echo "$hosts" | tr , ' '); do
    gpus=${host##*:}
    case $gpus in
    '' | *[!0-9]*) die "HOSTS has '$host' without a number of GPUs: write it as in ${host%%:*}:8" ;;
    esac
    ranks=$((ranks + gpus))
done

# unreachable HOST: an error if its name does not resolve, or it has no route to this host's address of IFNAME. mpirun would
# not name the host
unreachable() {
    [ "$1" != "$(uname -n)" ] || return 0
    says=$(${OMPI_MCA_plm_rsh_agent:-ssh -x -o BatchMode=yes} "$1" "$probe" 2>&1 </dev/null) ||
        case $says in
        *'Could not resolve hostname'*) echo "error: HOSTS: the name $1 does not resolve on $(uname -n)" ;;
        *'No route to host'* | *'Network is unreachable'*)
            echo "error: $1 cannot reach $(uname -n) through IFNAME=$IFNAME ($address): take the interface that leads to the other hosts"
            ;;
        esac
}
address=$(ip -o -4 address show dev "${IFNAME:-}" 2>/dev/null | awk '{ sub("/.*", "", $4); print $4; exit }') || :
probe=true
[ -z "${IFNAME:-}" ] || [ -z "$address" ] || probe="timeout 5 bash -c ': </dev/tcp/$address/22'"
found=$(for host in $(echo "$hosts" | tr , ' '); do unreachable "${host%%:*}" & done)
[ -z "$found" ] || {
    echo "$found" | head -n 1 >&2
    exit 1
}

# --bind-to none: mpirun would bind a rank to one core. oob_tcp_keepalive_time 0: mpirun is not to notice a lost host before
# the ranks do, since it ends them without a word; they name it after --timeout, and then end mpirun.
LAUNCH="mpirun -np $ranks --host $hosts --bind-to none --mca pml ob1 --mca btl tcp,self
    --mca oob_tcp_keepalive_time 0
    ${IFNAME:+--mca btl_tcp_if_include $IFNAME --mca oob_tcp_if_include $IFNAME -x NCCL_SOCKET_IFNAME=$IFNAME}"
MODEL=${MODEL:-fox-pro-760m} PREPARED=yes
export LAUNCH MODEL PREPARED
exec "${0%/*}/longcrawl64.sh" "$@" # which becomes mpirun, which passes SIGUSR1 on to the ranks
