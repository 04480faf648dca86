# Sourced behind help.sh by shell scripts that start the trainer.

# Sets TRAINER and GPUS, where they are not set: ./train_foxcu on CUDA_VISIBLE_DEVICES or all GPUs, without a GPU ./train_fox.
choose_trainer() {
    [ -z "${TRAINER:-}" ] || return 0
    GPUS=${GPUS:-${CUDA_VISIBLE_DEVICES:-}} GPUS=${GPUS//,/ }
    # an nvidia-smi that fails says so on standard output
    GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -x '[0-9][0-9]*' | tr '\n' ' ' || true)}
    TRAINER=$([ -n "${GPUS// /}" ] && echo ./train_foxcu || echo ./train_fox)
}

# model_options "MODEL[,SETTING...]": sets settings, in which commas stand within layer_types too, and options, the trainer's
model_options() {
    local parts part
    IFS=, read -ra parts <<<"$1"
    settings=() options=(--model "${parts[0]}")
    for part in "${parts[@]:1}"; do
        if [[ ${settings[*]: -1} = layer_types=* && ! $part =~ ^[a-z0-9_-]+= ]]; then
            settings[-1]+=,$part
        else
            settings+=("$part")
        fi
    done
    for part in "${settings[@]}"; do
        case $part in --*) options+=("$part") ;; *) options+=(--set "$part") ;; esac
    done
}

# check_models "MODEL[,SETTING...]..." OPTION...: ends the script where the trainer refuses to train one of the models with the
# options, KEY=VALUE and --NAME=VALUE. A checkpoint of --resume-from may be gone once runs have begun
check_models() {
    local models=$1 model refused settings options
    shift
    for model in $models; do
        model_options "$model"
        refused=$("$TRAINER" --dry-run config "$@" "${options[@]}" 2>&1 >/dev/null |
            sed -n '/^error: .*trainer.json: cannot open/d; s/^error: //p')
        [ -z "$refused" ] || die "$refused"
    done
}
