#!/usr/bin/env bash
# Reads what `nvcc -Xptxas -v` said, from the file $1, and fails where a kernel keeps more than ten registers in memory,
# or where the assembler made products of a warpgroup wait for one another. A few do pay: qkv's backward pass is a
# tenth faster with 34 bytes spilled and three blocks a multiprocessor than with none and two.
awk -v most=40 '
/C75[0-9][0-9]/ { print "serialized products: " $0; bad = 1 }
/Compiling entry function/ { name = $0; sub(/.*function ./, "", name); sub(/. for .*/, "", name) }
/bytes spill stores/ {
    kernels++
    if ($5 > most) { print name ": " $5 " bytes of registers spilled"; bad = 1 }
}
END {
    if (!kernels) { print FILENAME ": says nothing of kernels"; bad = 1 }
    else if (!bad) print kernels " kernels: none spills more than " most " bytes, none serializes its products"
    exit bad
}' "$1"
