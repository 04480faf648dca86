/*
What is in a checkpoint's folder, which is a Hugging Face model folder. write.h writes it, read.h reads it.

    config.json              the model's sizes and switches (config/config.h)
    model.safetensors        master weights, named and shaped by the parameter table
    optimizer.safetensors    AdamW's exp_avg.NAME and exp_avg_sq.NAME of trainable tensors
    trainer.json             step, tokens, schedule, data position, options, checksums
    ...                      what transformers needs besides (hf/folder.h)

The files are the same, byte for byte, for any number of ranks. A rank has at most one range of each tensor
(model/shard.h), which is read, written and sent in pieces of at most 4 MiB (CheckpointPiece).

Checksums at the end of trainer.json cover these four files, itself included, so that any flipped bit is
found:

    "checksums": {"block_bytes": 67108864, "model.safetensors": ["0123456789abcdef", ...],
                  "optimizer.safetensors": [...], "config.json": "0123456789abcdef", "trainer.json": "..."}

The last one is of trainer.json itself, up to the comma before it. Older versions had no "checksums", or
only those of the two large files.

Elements are float or double (element_bytes 4 or 8), and files are written in the same type. Called by read.h,
write.h and ranks.h; run.h parses the texts of a checkpoint to resume.
*/
#pragma once

#include "../base/checksum.h"
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
    CheckpointPiece p;
    memset(&p, 0, sizeof p);
    p.file = file;
    p.part = part;
    p.progress.world = part->world;
    p.tensor = -1;
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

// ----------------------------------------------------------------------------
// trainer.json and the checksum of config.json

typedef struct {
    int64_t step;         // optimizer steps done
    int64_t tokens;       // trained on so far
    int64_t position;     // sequences consumed from the training data
    int64_t sequences;    // in an epoch of the training data; 0: not recorded
    uint64_t fingerprint; // of the training data (tokens/fingerprint.h); 0: not recorded
    int64_t seed;
    double lr; // peak learning rate of the schedule
    int64_t warmup_tokens, max_tokens;
} TrainerState;

// Writes a state as the first members of trainer.json.
static inline void checkpoint_put_state(JsonWriter* w, const TrainerState* s) {
    char hex[17];
    json_put_int(w, "step", s->step);
    json_put_int(w, "tokens", s->tokens);
    json_put_int(w, "seed", s->seed);
    json_begin_object(w, "schedule");
    json_put_double(w, "lr", s->lr);
    json_put_int(w, "warmup_tokens", s->warmup_tokens);
    json_put_int(w, "max_tokens", s->max_tokens);
    json_end(w);
    json_begin_object(w, "data");
    json_put_int(w, "position", s->position);
    if (s->sequences) json_put_int(w, "sequences", s->sequences);
    if (s->fingerprint) json_put_string(w, "fingerprint", hex64(hex, s->fingerprint));
    json_end(w);
}

// The end of trainer.json from its own checksum on, of which %s is the value.
#define CHECKPOINT_RECORD_END ",\n    \"trainer.json\": \"%s\"\n  }\n}\n"

// Fails unless the text of a trainer.json matches the checksum at its end. One that names neither of the two
// last checksums is of an older version, and is not checked: one flipped bit cannot hide both.
static inline bool checkpoint_check_record(const char* path, const char* text, size_t bytes, Error* err) {
    static const char own[] = "\"trainer.json\": \"", config[] = "\"config.json\": \"";
    char end[64], hex[17];
    if (!memmem(text, bytes, own, sizeof own - 1) && !memmem(text, bytes, config, sizeof config - 1))
        return true;
    const size_t n = (size_t)snprintf(end, sizeof end, CHECKPOINT_RECORD_END, hex64(hex, 0));
    if (bytes > n) {
        snprintf(end, sizeof end, CHECKPOINT_RECORD_END, hex64(hex, checksum(text, bytes - n, 0)));
        if (memcmp(text + bytes - n, end, n) == 0) return true;
    }
    return fail(err, "%s: is damaged: does not match the checksum at its end", path);
}

// Fails unless the text of a config.json matches its checksum in trainer.json, `record`, if that has one.
static inline bool checkpoint_check_config(const char* path, const char* text, size_t bytes,
                                           const Json* record, Error* err) {
    const int node = json_get(record, json_get(record, 0, "checksums"), "config.json");
    uint64_t want;
    if (node < 0) return true; // of an older version
    if (hex64_parse(json_string(record, node), &want) && checksum(text, bytes, 0) == want) return true;
    return fail(err, "%s: is damaged: does not match its checksum in trainer.json", path);
}

// Reads an integer of trainer.json. If it is not valid and *bad is NULL, sets *bad to its key.
static inline void checkpoint_read_count(const Json* j, int object, const char* key, int64_t* value,
                                         const char** bad) {
    bool ok = json_int64(j, json_get(j, object, key), value) && *value >= 0 &&
              *value <= (int64_t)1 << 60; // sums must not overflow
    if (!ok && !*bad) *bad = key;
}

// Parses the text of a trainer.json, whose path messages name: the state, and all of it as *record, which the
// caller frees with json_free and whose member "options" options_restore reads. Fails also where the text
// does not match its checksum. On error record is empty and *state undefined.
static inline bool checkpoint_parse_state(const char* path, const char* text, size_t bytes,
                                          TrainerState* state, Json* record, Error* err) {
    if (!json_parse(record, path, text, bytes, err)) return false;
    int schedule = json_get(record, 0, "schedule"), data = json_get(record, 0, "data");
    int fingerprint = json_get(record, data, "fingerprint");
    const char* bad = NULL; // the first key whose value is not valid
    checkpoint_read_count(record, 0, "step", &state->step, &bad);
    checkpoint_read_count(record, 0, "tokens", &state->tokens, &bad);
    checkpoint_read_count(record, schedule, "warmup_tokens", &state->warmup_tokens, &bad);
    checkpoint_read_count(record, schedule, "max_tokens", &state->max_tokens, &bad);
    checkpoint_read_count(record, data, "position", &state->position, &bad);
    state->sequences = 0; // which older versions did not record
    if (json_get(record, data, "sequences") >= 0)
        checkpoint_read_count(record, data, "sequences", &state->sequences, &bad);
    if (!bad && (!json_int64(record, json_get(record, 0, "seed"), &state->seed) || state->seed < 0))
        bad = "seed";
    state->fingerprint = 0;
    if (!bad && fingerprint >= 0 && !hex64_parse(json_string(record, fingerprint), &state->fingerprint))
        bad = "fingerprint";
    if (!bad && !json_double(record, json_get(record, schedule, "lr"), &state->lr)) bad = "lr";
    if (!bad && !json_is(record, json_get(record, 0, "options"), JSON_OBJECT)) bad = "options";
    if (!bad && checkpoint_check_record(path, text, bytes, err)) return true;
    json_free(record);
    return bad ? fail(err, "%s: '%s' is missing or not valid", path, bad) : false;
}
