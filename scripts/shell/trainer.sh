# Sourced by shell scripts that start the trainer.

# Sets TRAINER and GPUS, where they are not set: ./train_foxcu on CUDA_VISIBLE_DEVICES or all GPUs, without a GPU ./train_fox.
choose_trainer() {
    [ -z "${TRAINER:-}" ] || return 0
    GPUS=${GPUS:-${CUDA_VISIBLE_DEVICES:-}} GPUS=${GPUS//,/ }
    # an nvidia-smi that fails says so on standard output
    GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -x '[0-9][0-9]*' | tr '\n' ' ' || true)}
    TRAINER=$([ -n "${GPUS// /}" ] && echo ./train_foxcu || echo ./train_fox)
}

# check_models "MODEL[,SETTING...]..." OPTION...: ends the script, whose die() it calls, where the trainer refuses to train one
# of the models with the options, KEY=VALUE and --NAME=VALUE
check_models() {
    local models=$1 model refused
    shift
    for model in $models; do
        refused=$("$TRAINER" --dry-run config --model "${model%%,*}" "$@" $(tr , '\n' <<<"$model" | sed '1d; /^--/!s/^/--set /') \
            2>&1 >/dev/null | sed -n '/^error: --resume-from: only a training/d; s/^error: //p')
        [ -z "$refused" ] || die "$refused"
    done
}
