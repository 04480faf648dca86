/*
Environment variables of the tests' ranks.
*/
#pragma once

#include "../../../llmc/base/common.h"

// Sets a variable to a number.
static inline void set_number(const char* name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

// Removes every variable that says how a process was started.
static inline void clear_environment(void) {
    static const char* const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "TORCHELASTIC_RUN_ID",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_RANK",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_NODEID",
                                        "SLURM_LOCALID",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_TASKS_PER_NODE",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_LAUNCH_NODE_IPADDR"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

// The variables of a rank that torchrun starts on this host.
static inline void set_torchrun(int rank, int size, int port) {
    clear_environment();
    set_number("RANK", rank);
    set_number("WORLD_SIZE", size);
    set_number("LOCAL_RANK", rank);
    set_number("LOCAL_WORLD_SIZE", size);
    set_number("MASTER_PORT", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
}
