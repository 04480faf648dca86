/*
Votes, by which all ranks learn whether one of them failed. Called by load.h, send.h and saver.h.
*/
#pragma once

#include "../ranks/world.h"

// What a rank tells the others.
typedef struct {
    bool ok;
    Error err; // if not ok
} CheckpointVote;

// err: of one that has failed.
static inline CheckpointVote checkpoint_vote_of(bool ok, const Error* err) {
    CheckpointVote vote;
    memset(&vote, 0, sizeof vote);
    vote.ok = ok;
    if (!ok) vote.err = *err;
    return vote;
}

// Collective: did all ranks succeed? Otherwise err becomes the message of the lowest rank that failed, on
// every rank.
static inline bool checkpoint_vote(World* world, bool ok, Error* err) {
    const CheckpointVote vote = checkpoint_vote_of(ok, err);
    CheckpointVote* all = (CheckpointVote*)xcalloc((size_t)world->size, sizeof *all);
    world_allgather(world, all, &vote, sizeof vote);
    int failed = 0;
    while (failed < world->size && all[failed].ok) failed++;
    if (failed < world->size) *err = all[failed].err;
    free(all);
    return failed == world->size;
}

// Collective: did rank 0 succeed? Otherwise err becomes its message on every rank.
static inline bool checkpoint_told(World* world, bool ok, Error* err) {
    CheckpointVote vote = checkpoint_vote_of(ok, err);
    world_broadcast(world, &vote, sizeof vote);
    if (!vote.ok) *err = vote.err;
    return vote.ok;
}
