/*
What is known of GPUs by their names: peak speed, for MFU, and memory, for --dry-run --gpu NAME. Called by
llmc/cuda/device.cuh and llmc/plan. A GPU that is missing here trains too, but without MFU.
*/
#pragma once

#include <ctype.h>
#include "common.h"

typedef struct {
    const char* name;
    int compute_capability; // 90 for 9.0
    double tflops;          // of dense bf16 GEMMs with fp32 accumulation, from the vendor's data sheets
    double gib;             // of memory, as programs see it: ECC takes a part of GDDR memory
} Gpu;

// Where one name is a prefix of another, the longer one comes first.
static const Gpu gpus[] = {
    {"GB200", 100, 2500, 184},
    {"B200", 100, 2250, 178},
    {"B100", 100, 1750, 178},
    {"GH200", 90, 989.4, 94.5},
    {"H200 NVL", 90, 835, 139.8},
    {"H200", 90, 989.4, 139.8},
    {"H100 PCIe", 90, 756, 79.1},
    {"H100 NVL", 90, 835, 93},
    {"H100", 90, 989.4, 79.1},
    {"H800 PCIe", 90, 756, 79.1},
    {"H800", 90, 989.4, 79.1},
    {"H20", 90, 148, 95},
    {"A100 40GB", 80, 312, 39.4},
    {"A100 SXM4 40GB", 80, 312, 39.4},
    {"A100 PCIE 40GB", 80, 312, 39.4},
    {"A100", 80, 312, 79.1},
    {"A800", 80, 312, 79.1},
    {"A30", 80, 165, 23.5},
    {"A40", 86, 149.7, 44.4},
    {"A10", 86, 125, 22},
    {"L40S", 89, 362, 44.4},
    {"L40", 89, 181, 44.4},
    {"L4", 89, 121, 22},
    {"A6000", 86, 154.8, 47.4},
    {"6000 Ada", 89, 364.2, 47.4},
    {"3090", 86, 71, 23.6},
    {"4090", 89, 165.2, 23.6},
    {"5090", 120, 209.5, 31.3},
};
enum { NUM_GPUS = sizeof gpus / sizeof gpus[0] };

// Is `name` a prefix of `text`, up to a space, a hyphen or the end? Hyphens count as spaces; case does not
// matter.
static inline bool gpu_name_matches(const char* name, const char* text) {
    for (; *name; name++, text++)
        if (tolower((unsigned char)*name) != tolower((unsigned char)(*text == '-' ? ' ' : *text)))
            return false;
    return *text == '\0' || *text == ' ' || *text == '-';
}

// The row of a GPU by the name that its driver gives, or by a part of it: "NVIDIA GeForce RTX 4090", "RTX
// 4090" and "4090" are one. NULL where it is not known, as are slower variants of a name: slices of a GPU,
// laptops, cut-down models.
static inline const Gpu* gpu_find(const char* text) {
    static const char* const makers[] = {"NVIDIA", "GeForce", "RTX"};
    if (strstr(text, " MIG ") || strstr(text, "Laptop") || strstr(text, " Ti") || strstr(text, " D"))
        return NULL;
    for (int i = 0; i < 3; i++)
        if (gpu_name_matches(makers[i], text) && strlen(text) > strlen(makers[i]))
            text += strlen(makers[i]) + 1;
    for (int i = 0; i < NUM_GPUS; i++)
        if (gpu_name_matches(gpus[i].name, text)) return &gpus[i];
    return NULL;
}

// Writes the names of all rows, with commas between them.
static inline void gpu_names(char* text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < NUM_GPUS && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? ", " : "", gpus[i].name);
}
