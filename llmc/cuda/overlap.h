/*
Whether a kernel may start before the one ahead of it has ended: only where kernel_wait (launch.cuh) waits for
that one, which it does in code for sm_90 and later. launch.cuh passes ptx_version, the architecture that the
loaded code was compiled for, from cudaFuncAttributes of one of the kernels.
*/
#pragma once

#include <stdbool.h>

static inline bool launch_overlaps_of(int ptx_version) { return ptx_version >= 90; }
