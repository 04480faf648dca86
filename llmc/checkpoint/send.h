/*
Saving on ranks of which some may not see rank 0's disk: --out on a local disk instead of a shared file
system. A rank that sees the folder writes its own ranges of the files (write.h). Any other sends rank 0
messages of {file, offset, bytes} and the bytes; file -1 ends.

Called by saver.h.
*/
#pragma once

#include "votes.h"
#include "write.h"

// Collective: sees[size] becomes true for the ranks that see OUT as rank 0 does, of which rank 0 is one. Rank
// 0 writes a random token to OUT/.ranks, the others look for it. Fails on all ranks if rank 0 cannot write. A
// FIFO of this name blocks nobody: rank 0 replaces it, and the others do not wait for a writer.
static inline bool checkpoint_find_writers(World* world, const char* out, bool* sees, Error* err) {
    char path[PATH_LENGTH];
    uint64_t token[2] = {0, 0}, found[2] = {0, 0};
    bool ok = true;
    path_join(path, out, ".ranks");
    if (world->rank == 0) {
        FILE* f = NULL;
        ok = make_folders(out, err);
        if (ok && getentropy(token, sizeof token) != 0)
            ok = fail(err, "cannot draw random bytes: %s", strerror(errno));
        if (ok) unlink(path); // a leftover
        const int fd = ok ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
        if (ok && (fd < 0 || !(f = fdopen(fd, "wb"))))
            ok = fail(err, "%s: cannot create: %s", path, strerror(errno));
        if (f) {
            fwrite(token, sizeof token, 1, f); // flush_and_close reports errors
            ok = flush_and_close(f, path, err);
        }
    }
    ok = checkpoint_told(world, ok, err);
    if (ok) world_broadcast(world, token, sizeof token);
    bool here = world->rank == 0;
    if (ok && !here) {
        const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        here = fd >= 0 && read(fd, found, sizeof found) == (ssize_t)sizeof found &&
               memcmp(found, token, sizeof token) == 0;
        if (fd >= 0) close(fd);
    }
    if (ok) world_allgather(world, sees, &here, sizeof here);
    if (world->rank == 0 && unlink(path) != 0 && errno != ENOENT && errno != ENOTDIR)
        warn("%s: cannot remove: %s", path, strerror(errno));
    return ok;
}

// What precedes the bytes of a piece. bytes <= CHECKPOINT_PIECE_BYTES.
typedef struct {
    int32_t file; // -1: the rank has sent everything, or has failed and votes so
    uint32_t bytes;
    int64_t offset;
} CheckpointFrame;

// On a rank that does not see the folder: sends its numbers to rank 0, which calls checkpoint_receive_shard.
// Sends none unless `valid`.
static inline bool checkpoint_send_shard(const CheckpointWriter* w, const CheckpointPart* part, bool valid,
                                         Error* err) {
    World* world = part->world;
    const CheckpointFrame end = {-1, 0, 0};
    bool sent = true;
    for (int f = 0; valid && f < CHECKPOINT_FILES; f++) {
        CheckpointPiece p = checkpoint_pieces(&w->files[f].tensors, part);
        while (sent && checkpoint_next_piece(&p)) {
            const CheckpointFrame frame = {f, (uint32_t)p.bytes, w->files[f].header_bytes + p.offset};
            sent = world_send(world, 0, &frame, sizeof frame) && world_send(world, 0, p.data, p.bytes);
        }
    }
    sent = sent && world_send(world, 0, &end, sizeof end);
    return sent || fail(err, "the connection to rank 0 is lost");
}

// Receives a rank's pieces into buffer[CHECKPOINT_PIECE_BYTES] and writes them. After an error of the disk,
// or if `ok` is false from the start, receives the rest without writing it, so that the sender does not wait
// for ever.
static inline bool checkpoint_receive_shard(CheckpointWriter* w, int rank, char* buffer, World* world,
                                            bool ok, Error* err) {
    CheckpointProgress progress = {world, 0};
    for (;;) {
        CheckpointFrame frame = {-1, 0, 0};
        Error lost;
        bool good = world_receive(world, rank, &frame, sizeof frame) ||
                    fail(&lost, "the connection to rank %d is lost", rank);
        if (good && frame.file < 0) return ok;
        if (good && (frame.file >= CHECKPOINT_FILES || frame.bytes > CHECKPOINT_PIECE_BYTES ||
                     frame.offset < 0 || frame.offset > w->files[frame.file].bytes - (int64_t)frame.bytes))
            good = fail(&lost, "rank %d sent a part of another checkpoint", rank);
        if (good && !world_receive(world, rank, buffer, frame.bytes))
            good = fail(&lost, "the connection to rank %d is lost", rank);
        if (!good && ok) *err = lost;
        if (!good) return false;
        ok = ok && checkpoint_write_piece(w, frame.file, buffer, frame.bytes, frame.offset, err);
        checkpoint_progress(&progress, frame.bytes);
    }
}

// On rank 0: writes what the ranks that do not see the folder send, through to the disk. If `ok` is false an
// error has been reported already; the ranks are then heard without writing anything.
static inline bool checkpoint_receive_shards(CheckpointWriter* w, const bool* sees, World* world, bool ok,
                                             Error* err) {
    int others = 0;
    for (int rank = 0; rank < world->size; rank++) others += !sees[rank];
    if (others == 0) return ok;
    char* buffer = (char*)xrealloc(NULL, CHECKPOINT_PIECE_BYTES);
    bool is_open = ok && checkpoint_open_files(w, err);
    ok = is_open;
    for (int rank = 0; rank < world->size; rank++)
        if (!sees[rank]) ok = checkpoint_receive_shard(w, rank, buffer, world, ok, err);
    if (is_open) ok = checkpoint_close_files(w, ok, err);
    free(buffer);
    return ok;
}
