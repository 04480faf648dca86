#pragma once

#include "generate.h"

// Not written yet.
static inline void answer_requests(const Run* run, const Trainer* trainer, Model* model) {
    (void)trainer, (void)model;
    die("--requests %s: not supported", run->options.requests);
}
