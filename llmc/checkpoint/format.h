/*
What is in a checkpoint's folder, which is a Hugging Face model folder. write.h writes it, read.h reads it.

    config.json              the model's sizes and switches (config/config.h)
    model.safetensors        master weights, named and shaped by the parameter table
    optimizer.safetensors    AdamW's exp_avg.NAME and exp_avg_sq.NAME of trainable tensors
    trainer.json             step, tokens, schedule, data position, options, checksums
    ...                      what transformers needs besides (hf/folder.h)

The files are the same, byte for byte, for any number of ranks. A rank has at most one range of each tensor
(model/shard.h), which is read, written and sent in pieces of at most 4 MiB (CheckpointPiece).

Elements are float or double (element_bytes 4 or 8), and files are written in the same type. Called by read.h
and write.h, and by load.h and send.h for ranks that do not see the folder.
*/
#pragma once

#include "../formats/safetensors.h"
#include "../model/shard.h"
#include "../ranks/world.h"

// ----------------------------------------------------------------------------
// tensors

// A rank's weights and AdamW's first and second moments on the host, each [shard_count]. With one rank these
// are the flat buffers. m and v are NULL without training.
typedef struct {
    void *w, *m, *v;
    int element_bytes; // 4: float, 8: double
} CheckpointTensors;

// A rank's part of a model, and who is told of progress.
typedef struct {
    const ParamTable* table;
    const Shard* shard;
    const CheckpointTensors* tensors;
    World* world; // NULL: nobody watches
} CheckpointPart;

enum {
    CHECKPOINT_MODEL,     // model.safetensors: w
    CHECKPOINT_OPTIMIZER, // optimizer.safetensors: m and v of the trainable tensors
    CHECKPOINT_FILES,
    CHECKPOINT_PIECE_BYTES = 4 << 20,    // read, written or sent at a time
    CHECKPOINT_PROGRESS_BYTES = 64 << 20 // between two calls of watch_alive
};

// Names without ".safetensors".
static const char* const checkpoint_file_names[] = {"model", "optimizer"};

// What precedes a parameter's name in a file: of w, m and v.
static const char* const checkpoint_prefixes[] = {"", "exp_avg.", "exp_avg_sq."};

// Whose numbers a tensor of a file are.
typedef struct {
    const Param* row;
    int buffer;    // 0: w, 1: m, 2: v
    char name[96]; // in the file
} TensorOrigin;

// The tensors of one file, without data, in the file's order, and where each comes from.
typedef struct {
    SafeTensor* tensors;
    TensorOrigin* origins;
    int count;
    int element_bytes;
} CheckpointFile;

// Lists the tensors of a file, CHECKPOINT_MODEL or CHECKPOINT_OPTIMIZER. Free with checkpoint_file_free.
static inline CheckpointFile checkpoint_file(const ParamTable* table, int file, int element_bytes) {
    SafetensorsDtype dtype = element_bytes == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32;
    const bool optimizer = file == CHECKPOINT_OPTIMIZER;
    size_t most = 2 * (size_t)table->num_rows;
    CheckpointFile f;
    f.tensors = (SafeTensor*)xcalloc(most, sizeof *f.tensors);
    f.origins = (TensorOrigin*)xcalloc(most, sizeof *f.origins);
    f.count = 0;
    f.element_bytes = element_bytes;
    for (int buffer = optimizer; buffer <= 2 * optimizer; buffer++) {
        for (int r = 0; r < table->num_rows; r++) {
            const Param* p = &table->rows[r];
            if (optimizer && !p->trainable) continue;
            TensorOrigin* origin = &f.origins[f.count];
            origin->row = p;
            origin->buffer = buffer;
            snprintf(origin->name, sizeof origin->name, "%s%s", checkpoint_prefixes[buffer], p->name);
            f.tensors[f.count++] = safetensors_tensor(origin->name, dtype, p->ndim, p->shape, NULL);
        }
    }
    return f;
}

// May be called on one that is zero.
static inline void checkpoint_file_free(CheckpointFile* f) {
    free(f->tensors);
    free(f->origins);
    memset(f, 0, sizeof *f);
}

// ----------------------------------------------------------------------------
// pieces of a rank's ranges

// Pieces that all threads of this process have read or written, and sent or received.
static int64_t checkpoint_pieces_done;

// Counts bytes read or written and reports progress every CHECKPOINT_PROGRESS_BYTES.
typedef struct {
    World* world; // NULL: nobody watches
    int64_t bytes;
} CheckpointProgress;

// Adds bytes that were just processed.
static inline void checkpoint_progress(CheckpointProgress* progress, int64_t bytes) {
    progress->bytes += bytes;
    __atomic_add_fetch(&checkpoint_pieces_done, 1, __ATOMIC_RELAXED);
    if (progress->bytes < CHECKPOINT_PROGRESS_BYTES) return;
    progress->bytes = 0;
    if (progress->world) watch_alive(progress->world);
}

// A walk through what a rank has of a file, in the file's order:
//
//     CheckpointPiece p = checkpoint_pieces(&file, &part);
//     while (checkpoint_next_piece(&p)) ...
//
// Each piece is elements [first, first + count) of a tensor.
typedef struct {
    const CheckpointFile* file;
    const CheckpointPart* part;
    CheckpointProgress progress;
    int tensor; // index in the file
    int64_t first, count;
    size_t bytes;
    int64_t offset;    // in the file's data; where safetensors_header has laid it out
    char* data;        // in the part's tensors
    TensorRange range; // what the part has of the tensor
    int64_t done;      // elements of it that precede this piece
} CheckpointPiece;

// The walk before its first piece.
static inline CheckpointPiece checkpoint_pieces(const CheckpointFile* file, const CheckpointPart* part) {
    CheckpointPiece p = {.file = file, .part = part, .progress = {part->world, 0}, .tensor = -1};
    return p;
}

// The next piece; false at the end of the file. The piece before it has been processed.
static inline bool checkpoint_next_piece(CheckpointPiece* p) {
    const CheckpointTensors* t = p->part->tensors;
    void* const buffers[] = {t->w, t->m, t->v};
    const int size = t->element_bytes;
    checkpoint_progress(&p->progress, (int64_t)p->bytes);
    p->done += p->count;
    while (p->done == p->range.count) {
        if (++p->tensor == p->file->count) return false;
        p->range = tensor_range(p->file->origins[p->tensor].row, p->part->shard);
        p->done = 0;
    }
    const int64_t most = CHECKPOINT_PIECE_BYTES / size, left = p->range.count - p->done;
    p->first = p->range.first + p->done;
    p->count = left < most ? left : most;
    p->bytes = (size_t)(p->count * size);
    p->offset = (int64_t)p->file->tensors[p->tensor].begin + p->first * size;
    p->data = (char*)buffers[p->file->origins[p->tensor].buffer] + (p->range.local + p->done) * size;
    return true;
}
