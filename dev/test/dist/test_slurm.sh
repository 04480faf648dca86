#!/usr/bin/env bash
# A Slurm of the system's packages, on hosts that are namespaces of this machine (hosts.sh): scripts/slurm.sbatch trains on
# two hosts with the bits of one, saves and queues itself again after SIGUSR1 and after SIGTERM, goes on after a host was
# lost, ends with the trainer's code where a rank is killed; array jobs share a sweep. With TEST_ALL=1.
scratch=build/test/slurm
. dev/test/check.sh
[ "${TEST_ALL:-}" ] || report
mkdir -p "$scratch/state" "$scratch/munge"
. dev/test/dist/hosts.sh
PATH=$PATH:/usr/sbin
missing=
for program in slurmctld slurmd srun sbatch munged; do command -v $program >/dev/null || missing="$missing $program"; done
if [ "$missing" ]; then skip "Slurm: missing$missing: apt-get install slurmctld slurmd slurm-client munge"; report; fi
if ! make_hosts 2; then skip "Slurm on several hosts: $why"; report; fi
make_repository

# The daemons: munged on each host with one key, slurmctld on h0, slurmd on each. A host has eight cores and GPUs, which are
# files. cred_expire: a job that is queued again may begin so many seconds later.
export SLURM_CONF=$PWD/$scratch/slurm.conf
files=$PWD/$scratch
head -c 1024 /dev/urandom >"$scratch/key"
chmod 400 "$scratch/key"
touch "$scratch"/gpu{0..7}
cat >"$SLURM_CONF" <<EOF
ClusterName=hosts
SlurmctldHost=h0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$files/munge/socket,cred_expire=5
StateSaveLocation=$files/state
SlurmdSpoolDir=$files/spool.%n
SlurmctldPidFile=$files/slurmctld.pid
SlurmdPidFile=$files/slurmd.%n.pid
SlurmctldLogFile=$files/slurmctld.log
SlurmdLogFile=$files/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=10
SlurmdTimeout=20
ReturnToService=2
NodeName=h[0-1] CPUs=8 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
EOF
echo "NodeName=h[0-1] Name=gpu File=$files/gpu[0-7]" >"$scratch/gres.conf"
for host in h0 h1; do
    mkdir -p "$scratch/spool.$host"
    on $host mount -t tmpfs -o mode=755 none "$scratch/munge" # a socket of its own
    check "munged on $host" on $host munged --force --key-file="$files/key" --socket="$files/munge/socket" \
        --pid-file="$files/munge/pid" --seed-file="$files/munge/seed" --log-file="$files/munged.$host.log"
done
check "slurmctld" on h0 slurmctld
for host in h0 h1; do check "slurmd on $host" on $host slurmd -N $host; done

idle() { [ "$(on h0 sinfo -h -t idle -o %D)" = 2 ]; }
if ! await "the hosts are not idle" idle; then
    tail -n 5 "$scratch"/*.log
    report
fi

# submit OPTION... -- TRAINER_OPTION...: prints the job's number; its output is in job.txt
submit() {
    local flags=()
    while [ "$1" != -- ]; do flags+=("$1") && shift; done
    on h0 env -C "$repository" sbatch --parsable --ntasks-per-node=1 --gpus-per-node=1 --output="$files/job.txt" "${flags[@]}" \
        scripts/slurm.sbatch $options --timeout 20 "${@:2}"
}
state() { on h0 scontrol show job "$1" 2>/dev/null | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'; }
is() { [ "$(state "$1")" = "$2" ]; }
printed() { grep -q "$1" "$scratch/job.txt" 2>/dev/null; }

# on two hosts, and the same ranks on one
job=$(submit -- --max-tokens 3840 --out out/two)
await "job $job has not completed" is "$job" COMPLETED
equals 1 "$(grep -c '^2 ranks with 3 micro-batches a step' "$scratch/job.txt")"
rm "$scratch/job.txt"
job=$(submit --nodes=1 --ntasks-per-node=2 -- --max-tokens 3840 --out out/one)
await "job $job has not completed" is "$job" COMPLETED
same_bytes 20 two one

long="--max-tokens 307200" # 1600 steps: seconds on a fast machine, so that a run is stopped before its end
job=$(submit -- $long --out out/long)
await "job $job has not completed" is "$job" COMPLETED

# stopped NAME SCANCEL_OPTION...: saves, is queued again, and goes on to the bytes of a run that was not stopped
stopped() {
    rm -f "$scratch/job.txt"
    job=$(submit -- $long --out "out/$1")
    await "$1: no step 5" printed '^step *5/'
    on h0 scancel "${@:2}" "$job"
    await "$1: job $job has not completed" is "$job" COMPLETED
    equals "restarts: 1" "restarts: $(on h0 scontrol show job "$job" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p')"
    equals "resumed: 1" "resumed: $(grep -c ' resume: at ' "$scratch/job.txt")"
    same_bytes 1600 "$1" long
}
stopped usr1 --signal=USR1 --batch # what Slurm sends two minutes before the time limit (--signal=B:USR1@120)
stopped term --signal=TERM         # to the ranks

# A host that hears and says nothing any more: the other rank ends and names it. Slurm finds the host dead, queues the job
# again, and starts it when the host is back: it goes on from its last checkpoint to the same bytes.
rm -f "$scratch/job.txt"
job=$(submit -- $long --save-every 10 --out out/lost)
await "no step 20" printed '^step *20/' # checkpoints so early may be gone already
unplug h1
await "no line names the lost host" printed '^error: rank 1 (h1, process .* unreachable for'
await "job $job is not queued again" is "$job" PENDING
equals 0 "$(trainers h0)"
plug h1
await "job $job has not completed" is "$job" COMPLETED
equals "resumed: 1" "resumed: $(grep -c ' resume: at ' "$scratch/job.txt")"
same_bytes 1600 lost long

# a rank that is killed ends the job with the trainer's code, and one line names it
rm -f "$scratch/job.txt"
job=$(submit -- --max-tokens 1e9 --out out/killed)
await "no step 5" printed '^step *5/'
for process in $(living h1); do
    case $(readlink "/proc/$process/exe") in */train_fox) kill -KILL "$process" ;; esac
done
await "job $job has not failed" is "$job" FAILED
equals "rank 1 (h1" "$(sed -n 's/^error: \(rank 1 (h1\), process .* ended without a message.*/\1/p' "$scratch/job.txt")"
equals 0 "$(trainers h0 h1)"

# the jobs of an array share the runs of a sweep
sweep="MODELS=fox-pro-nano SEEDS='1 2 3' OUT=out/sweep TRAINER=./train_foxcu scripts/sweep.sh $(echo $options) \
    --data data/longcrawl64_train_000000.bin --max-tokens 3840"
array=$(on h0 env -C "$repository" sbatch --parsable --array=0-1 --nodes=1 --ntasks=1 --output="$files/sweep_%a.txt" --wrap "$sweep")
for task in 0 1; do await "task $task has not completed" is "${array}_$task" COMPLETED; done
equals 3 "$(ls -d "$repository"/out/sweep/*/step_00000020 | wc -l)"
equals 3 "$(cat "$scratch"/sweep_?.txt | grep -c '^training: ')"
report
