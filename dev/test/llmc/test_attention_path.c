// The Hopper kernels run on compute capability 9.0 with sm_90a code; everything else runs the sm_80 kernels.
// Kernels overlap where they were compiled with a kernel_wait that waits, whichever GPU runs them.
#include "../check.h"
#include "../../../llmc/attention/path.h"
#include "../../../llmc/cuda/overlap.h"
#include "../../../llmc/inference/cuda/path.h"

int main(void) {
    static const int capabilities[] = {80, 86, 87, 89, 90, 100, 103, 110, 120, 121};
    static const int ptx_versions[] = {80, 90, 100, 120};
    for (size_t i = 0; i < sizeof capabilities / sizeof *capabilities; i++)
        for (size_t k = 0; k < sizeof ptx_versions / sizeof *ptx_versions; k++) {
            bool hopper = capabilities[i] == 90 && ptx_versions[k] == 90;
            CHECK(attention_path_of(capabilities[i], ptx_versions[k]) ==
                      (hopper ? ATTENTION_SM90 : ATTENTION_SM80),
                  "compute capability %d, kernel compiled for %d", capabilities[i], ptx_versions[k]);
        }
    for (size_t k = 0; k < sizeof ptx_versions / sizeof *ptx_versions; k++)
        CHECK(launch_overlaps_of(ptx_versions[k]) == (ptx_versions[k] != 80),
              "kernels compiled for %d overlap", ptx_versions[k]);
    for (size_t k = 0; k < sizeof ptx_versions / sizeof *ptx_versions; k++)
        CHECK(decode_runs_of(ptx_versions[k], 2, 2) == (ptx_versions[k] != 80) &&
                  !decode_runs_of(ptx_versions[k], 1, 2),
              "decoding with kernels compiled for %d", ptx_versions[k]);
    return test_report();
}
