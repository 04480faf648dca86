/*
The tensors of a checkpoint: where a rank's shard is in model.safetensors and optimizer.safetensors, reading
it, and verifying the files' checksums. checkpoint.h writes them.

Buffers are laid out by the rank's Shard (llmc/model/shard.h) of the parameter table. A tensor lies in one
bucket, so a rank owns at most one range of each, which is contiguous in the shard and in the file:

    flat buffer  | ... | bucket of layer 3                                        | ... |
    tensors            | norm | q_proj         | ...   | o_proj  | mlp ...        |
    ranks              | part of rank 0        | part of rank 1  | part of rank 2 |
                                       ^^^^^^^^ q_proj: elements [first, count) belong to rank 1

Elements are float or double (element_bytes 4 or 8), and files are written in the same type. Reading converts
from any floating-point type, and refuses what training would spread from: a number that is not finite, a
negative second moment. The files do not depend on the number of ranks, byte for byte.
*/
#pragma once

#include <float.h>
#include "../base/checksum.h"
#include "../model/shard.h"
#include "../dist/world.h"
#include "../formats/safetensors.h"
#include "../model/params.h"

// A rank's weights and AdamW's first and second moments on the host, each [shard_count]. With one rank these
// are the flat buffers. m and v are NULL without training.
typedef struct {
    void *w, *m, *v;
    int element_bytes; // 4: float, 8: double
} CheckpointTensors;

// ----------------------------------------------------------------------------
// ranges of a shard

// The shard of a rank, of a table that was built for `size` ranks. params_shard(table, 0, 1) is the whole
// buffer of any table.
static inline Shard params_shard(const ParamTable* table, int rank, int size) {
    Shard shard = {rank, size, table->num_buckets, table->buckets};
    return shard;
}

// Elements [first, first + count) of a tensor are elements [local, local + count) of the shard; count 0:
// none.
typedef struct {
    int64_t first, count, local;
} TensorRange;

// What a rank owns of a tensor.
static inline TensorRange tensor_range(const Param* p, const Shard* shard) {
    int bucket = 0;
    while (shard->buckets[bucket + 1] <= p->offset) bucket++;
    ShardPart part = shard_overlap(shard, bucket, p->offset, p->offset + p->count);
    TensorRange range = {part.begin - p->offset, part.count, part.local};
    return range;
}

// Index of the first of n numbers that is NaN, infinite or below `least`; n if there is none.
static inline int64_t numbers_first_bad(const void* numbers, int64_t n, int element_bytes, double least) {
    enum { BLOCK = 4096 }; // without a branch inside, so that it vectorises
    const float* f32 = (const float*)numbers;
    const double* f64 = (const double*)numbers;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = n - begin < BLOCK ? n : begin + BLOCK;
        int64_t good = 0, i = begin;
        for (int64_t k = begin; k < end; k++) {
            double x = element_bytes == 8 ? f64[k] : (double)f32[k];
            good += (x >= least) & (x <= DBL_MAX);
        }
        if (good == end - begin) continue;
        for (; i < end - 1; i++) {
            double x = element_bytes == 8 ? f64[i] : (double)f32[i];
            if (!(x >= least && x <= DBL_MAX)) break;
        }
        return i;
    }
    return n;
}

// The name of the first tensor in a buffer of the shard's layout with an element that is NaN or infinite;
// NULL if all are finite.
static inline const char* shard_first_not_finite(const ParamTable* table, const Shard* shard,
                                                 const void* buffer, int element_bytes) {
    for (int r = 0; r < table->num_rows; r++) {
        const TensorRange range = tensor_range(&table->rows[r], shard);
        const char* numbers = (const char*)buffer + range.local * element_bytes;
        if (numbers_first_bad(numbers, range.count, element_bytes, -DBL_MAX) < range.count)
            return table->rows[r].name;
    }
    return NULL;
}

// The same for a whole flat buffer.
static inline const char* params_first_not_finite(const ParamTable* table, const void* buffer,
                                                  int element_bytes) {
    const Shard whole = params_shard(table, 0, 1);
    return shard_first_not_finite(table, &whole, buffer, element_bytes);
}

// Fails unless all numbers of the shard are finite: a checkpoint with NaN would replace one that training can
// resume from. The message names the tensor.
static inline bool checkpoint_check_finite(const ParamTable* table, const Shard* shard,
                                           const CheckpointTensors* t, Error* err) {
    static const char* const prefixes[] = {"", "exp_avg.", "exp_avg_sq."};
    const void* const buffers[] = {t->w, t->m, t->v};
    for (int i = 0; i < 3; i++) {
        const char* name =
            buffers[i] ? shard_first_not_finite(table, shard, buffers[i], t->element_bytes) : NULL;
        if (name) return fail(err, "'%s%s' has become infinite or not a number", prefixes[i], name);
    }
    return true;
}

// ----------------------------------------------------------------------------
// the files

enum {
    CHECKPOINT_MODEL,     // model.safetensors: w
    CHECKPOINT_OPTIMIZER, // optimizer.safetensors: m and v of the trainable tensors
    CHECKPOINT_FILES,
    CHECKPOINT_PIECE_BYTES = 4 << 20,    // read, written or sent at a time
    CHECKPOINT_PROGRESS_BYTES = 64 << 20 // between two calls of watch_alive
};

// Names without ".safetensors".
static const char* const checkpoint_file_names[] = {"model", "optimizer"};

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
    static const char* const prefixes[] = {"", "exp_avg.", "exp_avg_sq."};
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
            snprintf(origin->name, sizeof origin->name, "%s%s", prefixes[buffer], p->name);
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

// What a rank owns of tensor i, and where it is in the rank's buffers.
static inline TensorRange checkpoint_range(const CheckpointFile* f, int i, const Shard* shard,
                                           const CheckpointTensors* t, char** data) {
    char* const buffers[] = {(char*)t->w, (char*)t->m, (char*)t->v};
    TensorRange range = tensor_range(f->origins[i].row, shard);
    *data = range.count > 0 ? buffers[f->origins[i].buffer] + range.local * f->element_bytes : NULL;
    return range;
}

// The next piece of a range of which *done elements are processed; 0 at its end.
static inline int64_t checkpoint_next_piece(const TensorRange* range, int64_t done, int element_bytes) {
    int64_t most = CHECKPOINT_PIECE_BYTES / element_bytes, left = range->count - done;
    return left < most ? left : most;
}

// Counts bytes read or written and reports progress every CHECKPOINT_PROGRESS_BYTES.
typedef struct {
    World* world; // NULL: nobody watches
    int64_t bytes;
} CheckpointProgress;

// Adds bytes that were just processed.
static inline void checkpoint_progress(CheckpointProgress* progress, int64_t bytes) {
    progress->bytes += bytes;
    if (progress->bytes < CHECKPOINT_PROGRESS_BYTES) return;
    progress->bytes = 0;
    if (progress->world) watch_alive(progress->world);
}

// ----------------------------------------------------------------------------
// reading

// Formats a shape: [257, 64].
static inline const char* checkpoint_shape(char text[128], int ndim, const int64_t* shape) {
    int n = snprintf(text, 128, "[");
    for (int i = 0; i < ndim && n < 100; i++)
        n += snprintf(text + n, (size_t)(128 - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + n, (size_t)(128 - n), "]");
    return text;
}

// Checks the name, shape and type of a tensor. have: NULL if the file or index `where` does not contain it.
static inline bool checkpoint_check_tensor(const SafeTensor* want, const SafeTensor* have, const char* where,
                                           Error* err) {
    char is[128], should_be[128];
    bool head = strcmp(want->name, "lm_head.weight") == 0;
    if (!have)
        return fail(err, "%s: tensor '%s' is missing%s", where, want->name,
                    head ? "; a head tied to the embedding is not supported" : "");
    if (have->ndim != want->ndim ||
        memcmp(have->shape, want->shape, (size_t)want->ndim * sizeof(int64_t)) != 0)
        return fail(err, "%s: tensor '%s' has shape %s, but %s fits the config", have->path, want->name,
                    checkpoint_shape(is, have->ndim, have->shape),
                    checkpoint_shape(should_be, want->ndim, want->shape));
    if (have->dtype > SAFETENSORS_BF16)
        return fail(err, "%s: tensor '%s' has type %s, not a floating-point type", have->path, want->name,
                    safetensors_dtypes[have->dtype].name);
    return true;
}

// Fails if the files hold a tensor that is not in f. To ignore it would be to load a model other than the one
// that was trained.
static inline bool checkpoint_check_extra(const CheckpointFile* f, const SafetensorsSet* set, Error* err) {
    for (int file = 0; file < set->count; file++) {
        for (int k = 0; k < set->files[file].count; k++) {
            const SafeTensor* have = &set->files[file].tensors[k];
            bool known = false;
            for (int i = 0; !known && i < f->count; i++) known = strcmp(f->tensors[i].name, have->name) == 0;
            if (!known)
                return fail(err, "%s: tensor '%.200s' is not part of the model that the config describes",
                            have->path, have->name);
        }
    }
    return true;
}

// A folder's weights or moments, open for reading.
typedef struct {
    SafetensorsSet set;
    CheckpointFile file;
} CheckpointSource;

// May be called on one that is zero or already closed.
static inline void checkpoint_source_close(CheckpointSource* s) {
    checkpoint_file_free(&s->file);
    safetensors_set_close(&s->set);
}

// Fails unless the numbers of a tensor that were read from `path` are finite, and those of a second moment at
// least 0: training would go on until a save refuses them, and lose that work. NULL data: there are none.
static inline bool checkpoint_check_numbers(const char* path, const TensorOrigin* origin, const void* data,
                                            int64_t n, int element_bytes, Error* err) {
    const int64_t bad =
        data ? numbers_first_bad(data, n, element_bytes, origin->buffer == 2 ? 0 : -DBL_MAX) : n;
    if (bad == n) return true;
    const double x = element_bytes == 8 ? ((const double*)data)[bad] : (double)((const float*)data)[bad];
    return fail(err, "%s: tensor '%s' contains %g, which is not a valid %s", path, origin->name, x,
                origin->buffer == 0 ? "weight" : "moment");
}

// Opens CHECKPOINT_MODEL or CHECKPOINT_OPTIMIZER, of one file or several, and checks that it contains exactly
// the tensors of the table, but for optional ones. On error there is nothing to close.
static inline bool checkpoint_source_open(CheckpointSource* s, const char* folder, const ParamTable* table,
                                          int file, int element_bytes, Error* err) {
    memset(s, 0, sizeof *s);
    if (!safetensors_set_open(&s->set, folder, checkpoint_file_names[file], err)) return false;
    s->file = checkpoint_file(table, file, element_bytes);
    bool ok = true;
    for (int i = 0; ok && i < s->file.count; i++) {
        const SafeTensor* have = safetensors_set_find(&s->set, s->file.tensors[i].name);
        ok = (!have && s->file.origins[i].row->optional) ||
             checkpoint_check_tensor(&s->file.tensors[i], have, s->set.path, err);
    }
    ok = ok && checkpoint_check_extra(&s->file, &s->set, err);
    if (!ok) checkpoint_source_close(s);
    return ok;
}

// Reads elements [first, first + n) of a tensor; NULL: the file lacks it.
static inline bool checkpoint_read_range(const SafeTensor* from, int64_t first, int64_t n, void* to,
                                         int element_bytes, Error* err) {
    if (from) return safetensors_read_range(from, first, n, to, element_bytes, err);
    memset(to, 0, (size_t)(n * element_bytes));
    return true;
}

// Reads a rank's ranges of one file into its buffers.
static inline bool checkpoint_read_file(const char* folder, const ParamTable* table, int file,
                                        const Shard* shard, const CheckpointTensors* t, World* world,
                                        Error* err) {
    CheckpointProgress progress = {world, 0};
    CheckpointSource s;
    if (!checkpoint_source_open(&s, folder, table, file, t->element_bytes, err)) return false;
    bool ok = true;
    for (int i = 0; ok && i < s.file.count; i++) {
        char* data;
        const SafeTensor* from = safetensors_set_find(&s.set, s.file.tensors[i].name);
        const TensorRange range = checkpoint_range(&s.file, i, shard, t, &data);
        int64_t n;
        for (int64_t at = 0; ok && (n = checkpoint_next_piece(&range, at, t->element_bytes)) > 0; at += n) {
            ok = checkpoint_read_range(from, range.first + at, n, data + at * t->element_bytes,
                                       t->element_bytes, err);
            checkpoint_progress(&progress, n * t->element_bytes);
        }
        ok = ok && checkpoint_check_numbers(from ? from->path : s.set.path, &s.file.origins[i], data,
                                            range.count, t->element_bytes, err);
    }
    checkpoint_source_close(&s);
    return ok;
}

// Reads a rank's part of the weights of a checkpoint or Hugging Face folder, of one file or several, into
// t->w. The files must contain all tensors of the table but optional ones, with its shapes, and no others; otherwise t->w is
// unchanged. Fails also, with t->w changed, where a number is not finite. world may be NULL.
static inline bool checkpoint_load_weights(const char* folder, const ParamTable* table, const Shard* shard,
                                           const CheckpointTensors* t, World* world, Error* err) {
    return checkpoint_read_file(folder, table, CHECKPOINT_MODEL, shard, t, world, err);
}

// Reads a rank's part of AdamW's moments into t->m and t->v, where elements of tensors that are not trained
// stay as they are. Where a check of the file fails both are unchanged. Fails also, with both changed, where
// a number is not finite or a second moment is negative.
static inline bool checkpoint_load_optimizer(const char* folder, const ParamTable* table, const Shard* shard,
                                             const CheckpointTensors* t, World* world, Error* err) {
    return checkpoint_read_file(folder, table, CHECKPOINT_OPTIMIZER, shard, t, world, err);
}

// ----------------------------------------------------------------------------
// verifying: compares the files with the checksums at the end of trainer.json (llmc/base/checksum.h):
//
//     "checksums": {"block_bytes": 67108864, "model.safetensors": ["0123456789abcdef", ...],
//                   "optimizer.safetensors": [...], "config.json": "0123456789abcdef", "trainer.json": "..."}
//
// The last one is of trainer.json itself, up to the comma before it. So a flipped bit in any file is found.
// Older versions had no "checksums", or only those of the two large files.

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

// Adds up the words of bytes [begin, end) of an open file, begin < end being a multiple of 4, with all of
// OpenMP's threads. Returns 0, or the error number if the file cannot be read; EIO if it ends before.
static inline int checkpoint_sum_range(int fd, int64_t begin, int64_t end, uint64_t* sum) {
    int64_t most = CHECKPOINT_PIECE_BYTES;
    if (end - begin < most) most = end - begin;
    const int64_t pieces = (end - begin + most - 1) / most;
    uint64_t total = 0;
    int why = 0;
#pragma omp parallel if (pieces > 1) reduction(+ : total)
    {
        char* buffer = (char*)xrealloc(NULL, (size_t)most);
        int failed = 0;
#pragma omp for schedule(dynamic)
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t first = begin + piece * most;
            const int64_t bytes = end - first < most ? end - first : most;
            int64_t done = 0;
            while (done < bytes && failed == 0) {
                ssize_t n = pread(fd, buffer + done, (size_t)(bytes - done), (off_t)(first + done));
                if (n > 0) done += n;
                if (n == 0) failed = EIO;
                if (n < 0 && errno != EINTR) failed = errno;
            }
            if (failed == 0) total += checksum(buffer, (size_t)bytes, first);
        }
        free(buffer);
#pragma omp critical(checkpoint_sum)
        if (failed != 0) why = failed;
    }
    *sum = total;
    return why;
}

// Where the checksums of a file are recorded, and which of its blocks to verify: i % parts == part.
typedef struct {
    const Json* record;
    int list; // node of the array
    int64_t block_bytes;
    int part, parts;
} BlockList;

// Verifies blocks of one file. The list consists of strings of 16 hexadecimal digits.
static inline bool checkpoint_verify_file(const char* path, const BlockList* list, World* world, Error* err) {
    struct stat st;
    CheckpointProgress progress = {world, 0};
    int fd = open(path, O_RDONLY | O_CLOEXEC), item = json_first(list->record, list->list);
    if (fd < 0) return fail(err, "%s: cannot open: %s", path, strerror(errno));
    bool ok = fstat(fd, &st) == 0 || fail(err, "%s: cannot stat: %s", path, strerror(errno));
    const int64_t recorded = json_count(list->record, list->list), size = ok ? (int64_t)st.st_size : 0;
    const int64_t blocks = checksum_blocks(size, list->block_bytes);
    if (ok && blocks != recorded)
        ok = fail(err, "%s: has %lld blocks of %lld bytes, but trainer.json lists %lld: it is damaged", path,
                  (long long)blocks, (long long)list->block_bytes, (long long)recorded);
    for (int64_t i = 0; ok && i < blocks; i++, item = json_next(list->record, item)) {
        uint64_t want = 0, sum = 0;
        if (i % list->parts != list->part) continue;
        const int64_t begin = i * list->block_bytes;
        const int64_t end = size - begin < list->block_bytes ? size : begin + list->block_bytes;
        int why = checkpoint_sum_range(fd, begin, end, &sum);
        if (why != 0)
            ok = fail(err, "%s: cannot read: %s", path, strerror(why));
        else if (!hex64_parse(json_string(list->record, item), &want) || sum != want)
            ok =
                fail(err,
                     "%s: is damaged: bytes %lld to %lld (block %lld of %lld) do not match their checksum in "
                     "trainer.json",
                     path, (long long)begin, (long long)end - 1, (long long)i, (long long)blocks);
        checkpoint_progress(&progress, end - begin);
    }
    close(fd);
    return ok;
}

// Verifies the first `files` files of a folder. False also where the recorded checksums are not valid.
static inline bool checkpoint_verify_files(const char* folder, int files, BlockList* list, World* world,
                                           Error* err) {
    const Json* j = list->record;
    int node = json_get(j, 0, "checksums");
    if (node < 0) return true; // of an older version
    bool valid = json_is(j, node, JSON_OBJECT) &&
                 json_int64(j, json_get(j, node, "block_bytes"), &list->block_bytes) &&
                 list->block_bytes >= 4 && list->block_bytes % 4 == 0 &&
                 list->block_bytes <= (int64_t)1 << 40;
    for (int f = 0; f < files; f++) {
        char name[64], path[PATH_LENGTH];
        uint64_t sum;
        snprintf(name, sizeof name, "%s.safetensors", checkpoint_file_names[f]);
        path_join(path, folder, name);
        list->list = json_get(j, node, name);
        valid = valid && json_is(j, list->list, JSON_ARRAY);
        for (int item = json_first(j, valid ? list->list : -1); valid && item >= 0; item = json_next(j, item))
            valid = hex64_parse(json_string(j, item), &sum);
        if (!valid) return fail(err, "%s/trainer.json: 'checksums' is not valid", folder);
        if (!checkpoint_verify_file(path, list, world, err)) return false;
    }
    return true;
}

// Verifies blocks i with i % parts == part of both files of a checkpoint whose trainer.json is `record`.
// False names the file and the bytes. True for a checkpoint of an older version, without checksums. world may
// be NULL.
static inline bool checkpoint_verify(const char* folder, const Json* record, int part, int parts,
                                     World* world, Error* err) {
    BlockList list = {record, -1, 0, part, parts};
    return checkpoint_verify_files(folder, CHECKPOINT_FILES, &list, world, err);
}

// The same for a folder of --init, which need not be a checkpoint: verifies model.safetensors and config.json
// where the folder has a trainer.json with checksums.
static inline bool checkpoint_verify_init(const char* folder, int part, int parts, World* world, Error* err) {
    char path[PATH_LENGTH];
    Error why;
    Json record;
    size_t bytes = 0;
    path_join(path, folder, "trainer.json");
    if (access(path, F_OK) != 0) return true;
    memset(&record, 0, sizeof record);
    char* text = read_file(path, &bytes, &why);
    bool ok = text && checkpoint_check_record(path, text, bytes, &why) &&
              json_parse(&record, path, text, bytes, &why);
    free(text);
    path_join(path, folder, "config.json");
    text = ok ? read_file(path, &bytes, &why) : NULL;
    ok = text && checkpoint_check_config(path, text, bytes, &record, &why);
    free(text);
    BlockList list = {&record, -1, 0, part, parts};
    ok = ok && checkpoint_verify_files(folder, 1, &list, world, &why);
    json_free(&record);
    return ok || fail(err, "%.800s; if the folder was changed on purpose, remove its trainer.json", why.msg);
}
