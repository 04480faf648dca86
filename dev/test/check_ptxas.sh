#!/usr/bin/env bash
# Reads the output of `nvcc -Xptxas -v` from the file $1. Fails if a kernel spills more than 40 bytes (ten
# registers), or if ptxas serialized wgmma instructions (its warnings C75xx). A few spills can pay:
# qkv_backward is 10% faster with 34 bytes spilled and three blocks per SM than with no spills and two blocks.
#
# ssd_dq_kernel<1>, for SMs whose shared memory holds one stage of it, is never launched on sm_100, where it spills
# 44 bytes.
awk -v most=40 '
/C75[0-9][0-9]/ { print "serialized wgmma: " $0; bad = 1 }
/Compiling entry function/ {
    name = $0; sub(/.*function ./, "", name); sub(/. for .*/, "", name)
    arch = $0; sub(/.* for ./, "", arch); sub(/[^0-9a-z_].*/, "", arch)
}
/bytes spill stores/ {
    kernels++
    if ($5 > most && !(arch == "sm_100" && name ~ /^_Z13ssd_dq_kernelILi1E/)) {
        print name ", " arch ": " $5 " bytes spilled"
        bad = 1
    }
}
END {
    if (!kernels) { print FILENAME ": reports no kernels"; bad = 1 }
    else if (!bad) print kernels " kernels: none spills more than " most " bytes, no serialized wgmma"
    exit bad
}' "$1"
