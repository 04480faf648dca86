/*
What the ranks of a run must have in common. Ranks that differ in what they train would not fail: they would
compute something that nobody asked for.

Called by llmc/train and llmc/eval. Everything here is collective, and trivial for one rank alone.
*/
#pragma once

#include "../base/checksum.h"
#include "../config/config_file.h"
#include "../formats/safetensors_set.h"
#include "../ranks/world.h"
#include "run.h"

// Before a message that one rank alone should print: returns on the first rank where `mine` is true, on rank
// 0 if there is none. The others wait until that message ends them.
static inline void ranks_wait_turn(World* world, bool mine) {
    bool* all = (bool*)xcalloc((size_t)world->size, sizeof *all);
    int first = 0;
    world_allgather(world, all, &mine, sizeof mine);
    while (first < world->size && !all[first]) first++;
    if (world->rank != first % world->size) world_barrier(world);
    free(all);
}

// ----------------------------------------------------------------------------
// comparisons at the start

// Something that all ranks must have in common, and this rank's hash of it.
typedef struct {
    const char* what; // in a message: "rank 3 (node07) differs from other ranks in its WHAT"
    uint64_t hash;
} RankField;

enum { RANK_FIELDS = 2 }; // compared at a time

// Dies where a rank differs from the others in a field; the one that agrees with the fewest is named.
static inline void ranks_compare(World* world, const RankField fields[RANK_FIELDS]) {
    typedef struct {
        uint64_t hashes[RANK_FIELDS];
        char host[sizeof world->host];
    } Card;
    const int N = world->size;
    Card mine, *all = (Card*)xcalloc((size_t)N, sizeof *all);
    memset(&mine, 0, sizeof mine);
    memcpy(mine.host, world->host, sizeof mine.host);
    for (int f = 0; f < RANK_FIELDS; f++) mine.hashes[f] = fields[f].hash;
    world_allgather(world, all, &mine, sizeof mine);
    int odd = -1, field = 0, fewest = N;
    for (int f = 0; f < RANK_FIELDS; f++)
        for (int r = 0; r < N; r++) {
            int same = 0;
            for (int i = 0; i < N; i++) same += all[i].hashes[f] == all[r].hashes[f];
            bool tie = same == fewest && f == field; // the higher rank: most often rank 0 is right
            if (same < fewest || (same < N && tie)) odd = r, field = f, fewest = same;
        }
    if (odd >= 0) {
        ranks_wait_turn(world, false);
        die("rank %d (%s) differs from other ranks in its %s", odd, all[odd].host, fields[field].what);
    }
    free(all);
}

// Before anything else that is collective: the program and its command line. element_bytes: of the trainer.
static inline void ranks_compare_start(World* world, int argc, char** argv, int element_bytes) {
    uint64_t program = hash64(0, CODE_VERSION, strlen(CODE_VERSION)), line = 0;
    for (int i = 1; i < argc; i++) line = hash64(line, argv[i], strlen(argv[i]) + 1);
    const RankField fields[] = {
        {"program: build them all from the same code", hash64(program, &element_bytes, sizeof element_bytes)},
        {"command line", line}};
    ranks_compare(world, fields);
}

// A hash of the names, places and first values of the weights in --init.
static inline uint64_t ranks_hash_init(const char* folder) {
    SafetensorsSet set;
    Error err;
    uint64_t hash = 0;
    char first[4096];
    if (!safetensors_set_open(&set, folder, "model", &err)) die("%s", err.msg);
    for (int f = 0; f < set.count; f++)
        for (int i = 0; i < set.files[f].count; i++) {
            const SafeTensor* t = &set.files[f].tensors[i];
            hash = hash64(hash, t->name, strlen(t->name));
            hash = hash64(hash, &t->begin, sizeof t->begin);
            const size_t n = t->bytes < sizeof first ? t->bytes : sizeof first;
            if (!safetensors_read_bytes(t, 0, n, first, &err)) die("%s", err.msg);
            hash = hash64(hash, first, n);
        }
    safetensors_set_close(&set);
    return hash;
}

// Before a model is made: its configuration, and the weights of --init.
static inline void ranks_compare_model(const Run* run) {
    const char* init = run->options.init;
    JsonWriter config = json_writer(0);
    config_put_all(&run->config, &config);
    const RankField fields[] = {{"model's configuration", hash64(0, config.text, config.length)},
                                {"weights in --init", init && !run_resumed(run) ? ranks_hash_init(init) : 0}};
    if (run->world->size > 1) ranks_compare(run->world, fields);
    json_writer_free(&config);
}
