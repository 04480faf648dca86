// The scans of Mamba-2, DeltaNet and Gated DeltaNet under one name, chosen by the shape, for their test and
// benchmark.
#pragma once

#include "../../../llmc/baselines/deltanet/delta_rule_backward.cuh"
#include "../../../llmc/baselines/mamba2/ssd_backward.cuh"

static bool scan_is_delta(const ScanShape* s) { return s->V >= DELTA_D; }

static size_t scan_saved_bytes(const ScanShape* s) {
    return scan_is_delta(s) ? delta_rule_saved_bytes(s) : ssd_saved_bytes(s);
}

static size_t scan_scratch_bytes(const ScanShape* s, bool backward) {
    return scan_is_delta(s) ? delta_rule_scratch_bytes(s, backward) : ssd_scratch_bytes(s, backward);
}

static void scan_forward(bf16* o, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    (scan_is_delta(s) ? delta_rule_forward : ssd_forward)(o, a, s, stream);
}

static void scan_backward(const ScanBackward* g, const Scan* a, const ScanShape* s, cudaStream_t stream) {
    (scan_is_delta(s) ? delta_rule_backward : ssd_backward)(g, a, s, stream);
}
