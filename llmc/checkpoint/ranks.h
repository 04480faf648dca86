/*
Checkpoints of several ranks, of which some may not see rank 0's disk: --out on a local disk instead of a
shared file system. A rank that sees the folder reads and writes its own ranges of the files (read.h,
write.h). For any other, rank 0 does it, and the numbers travel over world_send and world_receive:

    saving     rank r -> rank 0    {file, offset, bytes} and the bytes, again and again; file -1 ends
    loading    rank 0 -> rank r    {ok, message}; then the bytes of the ranges, in the order of the files

Also the votes by which all ranks learn whether one of them failed. Called by saver.h, and to load by train.h.
*/
#pragma once

#include "read.h"
#include "write.h"

// ----------------------------------------------------------------------------
// votes

// What a rank tells the others.
typedef struct {
    bool ok;
    Error err; // if not ok
} CheckpointVote;

// Collective: did all ranks succeed? Otherwise err becomes the message of the lowest rank that failed, on
// every rank, and *mine (which may be NULL) says whether this rank is that one.
static inline bool checkpoint_vote(World* world, bool ok, bool* mine, Error* err) {
    CheckpointVote vote, *all = (CheckpointVote*)xcalloc((size_t)world->size, sizeof *all);
    memset(&vote, 0, sizeof vote);
    vote.ok = ok;
    if (!ok) vote.err = *err;
    world_allgather(world, all, &vote, sizeof vote);
    int failed = 0;
    while (failed < world->size && all[failed].ok) failed++;
    if (mine) *mine = failed == world->rank;
    if (failed < world->size) *err = all[failed].err;
    free(all);
    return failed == world->size;
}

// Collective: did rank 0 succeed? Otherwise err becomes its message on every rank.
static inline bool checkpoint_told(World* world, bool ok, Error* err) {
    CheckpointVote vote;
    memset(&vote, 0, sizeof vote);
    vote.ok = ok;
    if (world->rank == 0 && !ok) vote.err = *err;
    world_broadcast(world, &vote, sizeof vote);
    if (!vote.ok) *err = vote.err;
    return vote.ok;
}

// ----------------------------------------------------------------------------
// who sees rank 0's folder

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

// ----------------------------------------------------------------------------
// saving

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
static inline bool checkpoint_receive_shard(CheckpointOutput* o, int rank, char* buffer, World* world,
                                            bool ok, Error* err) {
    CheckpointProgress progress = {world, 0};
    for (;;) {
        CheckpointFrame frame = {-1, 0, 0};
        Error lost;
        bool good = world_receive(world, rank, &frame, sizeof frame) ||
                    fail(&lost, "the connection to rank %d is lost", rank);
        if (good && frame.file < 0) return ok;
        if (good &&
            (frame.file >= CHECKPOINT_FILES || frame.bytes > CHECKPOINT_PIECE_BYTES || frame.offset < 0 ||
             frame.offset > o->writer->files[frame.file].bytes - (int64_t)frame.bytes))
            good = fail(&lost, "rank %d sent a part of another checkpoint", rank);
        if (good && !world_receive(world, rank, buffer, frame.bytes))
            good = fail(&lost, "the connection to rank %d is lost", rank);
        if (!good && ok) *err = lost;
        if (!good) return false;
        ok = ok && checkpoint_write_piece(o, frame.file, buffer, frame.bytes, frame.offset, err);
        checkpoint_progress(&progress, frame.bytes);
    }
}

// On rank 0: writes what the ranks that do not see the folder send, through to the disk. If `ok` is false an
// error has been reported already; the ranks are then heard without writing anything.
static inline bool checkpoint_receive_shards(CheckpointWriter* w, const bool* sees, World* world, bool ok,
                                             Error* err) {
    int others = 0;
    CheckpointOutput o;
    memset(&o, 0, sizeof o);
    o.writer = w;
    for (int rank = 0; rank < world->size; rank++) others += !sees[rank];
    if (others == 0) return ok;
    char* buffer = (char*)xrealloc(NULL, CHECKPOINT_PIECE_BYTES);
    bool is_open = ok && checkpoint_open_files(&o, w, err);
    ok = is_open;
    for (int rank = 0; rank < world->size; rank++)
        if (!sees[rank]) ok = checkpoint_receive_shard(&o, rank, buffer, world, ok, err);
    if (is_open) ok = checkpoint_close_files(&o, ok, err);
    free(buffer);
    return ok;
}

// ----------------------------------------------------------------------------
// loading

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
    CheckpointVote vote;
    CheckpointSource s;
    World* world = part->world;
    const int rank = part->shard->rank;
    memset(&vote, 0, sizeof vote);
    vote.ok = checkpoint_source_open(&s, folder, part->table, file, part->tensors->element_bytes, err);
    if (!vote.ok) vote.err = *err;
    bool connected = world_send(world, rank, &vote, sizeof vote), ok = true;
    if (!vote.ok) return false;
    char* buffer = (char*)xrealloc(NULL, CHECKPOINT_PIECE_BYTES);
    CheckpointPiece p = checkpoint_pieces(&s.file, part);
    while (connected && ok && checkpoint_next_piece(&p)) {
        ok = checkpoint_read_piece(checkpoint_source_find(&s, &p), &p, buffer, err);
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
// failed, which *mine (may be NULL) says of this one; the buffers are then undefined.
static inline bool checkpoint_load(const char* folder, const Json* record, const CheckpointPart* part,
                                   bool* mine, Error* err) {
    World* world = part->world;
    const int files = part->tensors->m ? CHECKPOINT_FILES : 1;
    bool* sees = (bool*)xcalloc((size_t)world->size, sizeof *sees);
    checkpoint_find_readers(world, folder, sees);
    bool ok = !sees[world->rank] || checkpoint_load_alone(folder, record, files, part, sees, err);
    ok = checkpoint_vote(world, ok, mine, err);
    for (int f = 0; f < files && ok; f++) {
        ok = checkpoint_exchange_file(folder, f, part, sees, err);
        ok = checkpoint_vote(world, ok, mine, err);
    }
    free(sees);
    return ok;
}
