/*
Loading a checkpoint's tensors, or those of a Hugging Face folder, on all ranks. A rank that sees rank 0's
folder verifies its share of the checksums and reads its own ranges of the files (read.h). To any other, whose
--out is on a local disk, rank 0 sends {ok, message} and then the bytes of its ranges, in the order of the
files.

Called by train/initial_weights.h.
*/
#pragma once

#include "read.h"
#include "votes.h"

// A hash of the identity of a folder's files: inode number, size and time of the last change. The same on two
// ranks only if these are the same files.
static inline uint64_t checkpoint_identity(const char* folder) {
    static const char* const names[] = {"config.json", "trainer.json", "model.safetensors",
                                        "model.safetensors.index.json", "optimizer.safetensors"};
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[PATH_LENGTH];
        struct stat st;
        path_join(path, folder, names[i]);
        if (stat(path, &st) != 0) memset(&st, 0, sizeof st);
        const int64_t facts[] = {(int64_t)st.st_ino, (int64_t)st.st_size, (int64_t)st.st_mtim.tv_sec,
                                 (int64_t)st.st_mtim.tv_nsec};
        hash = hash64(hash, facts, sizeof facts);
    }
    return hash;
}

// Collective: sees[size] becomes true for the ranks whose folder holds the same files as rank 0's. The folder
// may be read-only.
static inline void checkpoint_find_readers(World* world, const char* folder, bool* sees) {
    uint64_t mine = checkpoint_identity(folder);
    uint64_t* all = (uint64_t*)xcalloc((size_t)world->size, sizeof *all);
    world_allgather(world, all, &mine, sizeof mine);
    for (int r = 0; r < world->size; r++) sees[r] = all[r] == all[0];
    free(all);
}

// What a rank that sees the folder does alone: verifies its share of the blocks, and reads its ranges of
// the first `files` files. Without a record verifies a folder of --init.
static inline bool checkpoint_load_alone(const char* folder, const Json* record, int files,
                                         const CheckpointPart* part, const bool* sees, Error* err) {
    World* world = part->world;
    int mine = 0, all = 0;
    for (int rank = 0; rank < world->size; rank++) {
        if (rank == world->rank) mine = all;
        all += sees[rank];
    }
    bool ok = record ? checkpoint_verify(folder, record, mine, all, world, err)
                     : checkpoint_verify_init(folder, mine, all, world, err);
    for (int f = 0; ok && f < files; f++) ok = checkpoint_read_file(folder, f, part, err);
    return ok;
}

// On rank 0: reads another rank's ranges of a file and sends them. The rank calls checkpoint_receive_file.
// `part` is that rank's, but for the tensors: rank 0's own, which do not change.
static inline bool checkpoint_serve_file(const char* folder, int file, const CheckpointPart* part,
                                         Error* err) {
    CheckpointSource s;
    World* world = part->world;
    const int rank = part->shard->rank;
    bool ok = checkpoint_source_open(&s, folder, part->table, file, part->tensors->element_bytes, err);
    const CheckpointVote vote = checkpoint_vote_of(ok, err);
    bool connected = world_send(world, rank, &vote, sizeof vote);
    if (!ok) return false;
    char* buffer = (char*)xrealloc(NULL, CHECKPOINT_PIECE_BYTES);
    CheckpointPiece p = checkpoint_pieces(&s.file, part);
    while (connected && ok && checkpoint_next_piece(&p)) {
        ok = checkpoint_read_piece(&s, &p, buffer, err);
        connected = ok && world_send(world, rank, buffer, p.bytes);
    }
    free(buffer);
    checkpoint_source_close(&s);
    if (ok && !connected) return fail(err, "the connection to rank %d is lost", rank);
    return ok;
}

// On a rank that does not see the folder: receives its ranges of a file into its buffers. Fails with rank 0's
// message if that cannot read the file; the buffers are then unchanged. Fails also, with all received, where
// the numbers are not valid.
static inline bool checkpoint_receive_file(const char* folder, int file, const CheckpointPart* part,
                                           Error* err) {
    CheckpointVote vote;
    World* world = part->world;
    char path[PATH_LENGTH];
    bool connected = world_receive(world, 0, &vote, sizeof vote), valid = true;
    if (connected && !vote.ok) {
        *err = vote.err;
        return false;
    }
    snprintf(path, sizeof path, "%.4000s/%s.safetensors", folder, checkpoint_file_names[file]);
    CheckpointFile f = checkpoint_file(part->table, file, part->tensors->element_bytes);
    CheckpointPiece p = checkpoint_pieces(&f, part);
    while (connected && checkpoint_next_piece(&p)) {
        connected = world_receive(world, 0, p.data, p.bytes);
        valid = valid && connected && checkpoint_check_piece(path, &p, err);
    }
    checkpoint_file_free(&f);
    return connected ? valid : fail(err, "the connection to rank 0 is lost");
}

// Rank 0 and the ranks that do not see the folder: sends or receives one file's ranges.
static inline bool checkpoint_exchange_file(const char* folder, int file, const CheckpointPart* part,
                                            const bool* sees, Error* err) {
    World* world = part->world;
    if (!sees[world->rank]) return checkpoint_receive_file(folder, file, part, err);
    bool ok = true;
    for (int rank = 0; world->rank == 0 && rank < world->size; rank++) {
        Error why; // the first error is reported, and every rank is served
        const Shard shard = params_shard(part->table, rank, world->size);
        const CheckpointPart other = {part->table, &shard, part->tensors, world};
        if (sees[rank] || checkpoint_serve_file(folder, file, &other, &why)) continue;
        if (ok) *err = why;
        ok = false;
    }
    return ok;
}

// Collective: verifies the checksums of rank 0's folder, then reads every rank's shard from it: weights, and
// moments if the part has them. record: the checkpoint's trainer.json on the ranks that see the folder; NULL
// on all ranks for --init. Succeeds on all ranks or fails on all, with the message of the lowest rank that
// failed; the buffers are then undefined.
static inline bool checkpoint_load(const char* folder, const Json* record, const CheckpointPart* part,
                                   Error* err) {
    World* world = part->world;
    const int files = part->tensors->m ? CHECKPOINT_FILES : 1;
    bool* sees = (bool*)xcalloc((size_t)world->size, sizeof *sees);
    checkpoint_find_readers(world, folder, sees);
    bool ok = !sees[world->rank] || checkpoint_load_alone(folder, record, files, part, sees, err);
    ok = checkpoint_vote(world, ok, err);
    for (int f = 0; f < files && ok; f++) {
        ok = checkpoint_exchange_file(folder, f, part, sees, err);
        ok = checkpoint_vote(world, ok, err);
    }
    free(sees);
    return ok;
}
