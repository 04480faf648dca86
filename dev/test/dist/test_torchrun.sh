#!/usr/bin/env bash
# PyTorch's torchrun on two hosts that are namespaces of this machine (hosts.sh), with its rendezvous on one of them: the
# bits of two ranks on one host, an end with one line where a host is lost, and a start anew after that. With TEST_ALL=1.
scratch=build/test/torchrun
. dev/test/check.sh
[ "${TEST_ALL:-}" ] || report
. dev/test/dist/hosts.sh
for python in ${HF_PYTHON:-} python3 build/hf/bin/python ''; do
    [ "$python" ] && python=$(command -v "$python") && "$python" -c 'import torch.distributed.run' 2>/dev/null && break
done
if [ -z "$python" ]; then skip "torchrun: PyTorch is missing"; report; fi
if ! make_hosts 2; then skip "torchrun on several hosts: $why"; report; fi
make_repository
[ "${python#/}" != "$python" ] || python=$PWD/$python

# torchrun HOST HOSTS RANKS OPTION...: its part on a host
torchrun() {
    on $1 env -C "$repository" TMPDIR="$PWD/$scratch" timeout $patience "$python" -m torch.distributed.run \
        --nnodes $2 --nproc_per_node $3 --rdzv_backend c10d --rdzv_endpoint h0:29400 --rdzv_id fox \
        --no_python ./train_foxcu --model fox-pro-nano $options \
        --data data/longcrawl64_train_000000.bin --timeout 15 "${@:4}"
}
both() { # OPTION...: on both hosts
    torchrun h1 2 1 "$@" >"$scratch/out_h1" 2>"$scratch/err_h1" &
    torchrun h0 2 1 "$@" >"$scratch/out_h0" 2>"$scratch/err_h0"
    codes=$?
    wait $!
    codes="$codes $?"
}

both --max-tokens 3840 --out out/two
equals "0 0" "$codes"
check "two ranks on one host" torchrun h0 1 2 --max-tokens 3840 --out out/one
same_bytes 20 two one

# A host that hears and says nothing any more, at step 20: on each side the trainer ends, and names the other. So does
# rank 0's torchrun; the one that is cut off has not ended in 16 minutes (PyTorch 2.8).
rm "$scratch/out_h0" # of the run before, which has a step 20
both --max-tokens 1e9 --save-every 10 --log-every 10 --out out/lost &
await "no step 20" grep -q '^step *20/' "$scratch/out_h0"
unplug h1
await "trainers are left" none_left h0 h1
end_hosts
for rank in 0 1; do
    equals "1 in h$rank" "$(grep -c "^error: rank $((1 - rank)) (h$((1 - rank)), process .* unreachable for" "$scratch/err_h$rank") in h$rank"
done
report
