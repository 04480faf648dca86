/*
Reading a checkpoint's tensors, or those of a Hugging Face folder, by one process: verifying the checksums
of the files and reading a rank's ranges.

    checkpoint_verify, checkpoint_verify_init    a share of the blocks of a folder's files
    checkpoint_read_file                         a rank's ranges of one file into its buffers

A folder of a LlamaForCausalLM has other names (llama.h), and some of our tensors in two parts. A Gated
DeltaNet of flash-linear-attention's first months has the MLP's gate_proj and up_proj as one matrix gate_proj
[2I, d].

All names, shapes, types and file sizes are checked before anything is written to the caller's buffers.
Reading converts from any floating-point type, and refuses what training would spread from: a number that
is not finite, a negative second moment.

Called by load.h on every rank that sees the folder.
*/
#pragma once

#include "../formats/safetensors_set.h"
#include "format.h"
#include "llama.h"
#include "record.h"

// ----------------------------------------------------------------------------
// verifying

// Sums the words of bytes [begin, end) of an open file, begin < end being a multiple of 4, with all of
// OpenMP's threads. Returns 0, or the error number if the file cannot be read; EIO if it ends before.
static inline int checkpoint_sum_range(int fd, int64_t begin, int64_t end, uint64_t* sum) {
    const int64_t most = min64(end - begin, CHECKPOINT_PIECE_BYTES);
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
            const size_t bytes = (size_t)min64(end - first, most);
            if (failed == 0 && read_at(fd, buffer, bytes, first) < bytes) failed = errno ? errno : EIO;
            if (failed == 0) total += checksum(buffer, bytes, first);
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
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), item = json_first(list->record, list->list);
    if (fd < 0) return fail(err, "%s: cannot open: %s", path, strerror(errno));
    bool ok = fstat(fd, &st) == 0 || fail(err, "%s: cannot stat: %s", path, strerror(errno));
    const int64_t recorded = json_count(list->record, list->list), size = ok ? (int64_t)st.st_size : 0;
    const int64_t blocks = checksum_blocks(size, list->block_bytes);
    if (ok && blocks != recorded)
        ok =
            fail(err, "%s: has %s of %s, but trainer.json lists %lld: it is damaged", path,
                 counted(blocks, "block").text, counted(list->block_bytes, "byte").text, (long long)recorded);
    for (int64_t i = 0; ok && i < blocks; i++, item = json_next(list->record, item)) {
        uint64_t want = 0, sum = 0;
        if (i % list->parts != list->part) continue;
        const int64_t begin = i * list->block_bytes;
        const int64_t end = size - begin < list->block_bytes ? size : begin + list->block_bytes;
        int why = checkpoint_sum_range(fd, begin, end, &sum);
        if (why != 0)
            ok = fail(err, "%s: cannot read: %s", path, strerror(why));
        else if (!hex64_parse(json_string(list->record, item), &want) || sum != want)
            ok = fail(err,
                      "%s: is damaged: bytes %lld to %lld (block %lld of %lld) do not match their "
                      "checksum in trainer.json",
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
    if (node < 0) return true;
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

// Verifies blocks i with i % parts == part of both safetensors files of a checkpoint whose trainer.json is
// `record`. False names the file and the bytes. True for a checkpoint without checksums. world may be NULL.
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
    return ok || fail(err, "%s; if the folder was changed on purpose, remove its trainer.json", why.msg);
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
                    head ? "; a head tied to the embedding needs tie_word_embeddings true in config.json"
                         : "");
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

// The two tensors of an MLP whose input projections are apart
#define CHECKPOINT_GATE_PROJ ".mlp.gate_proj."
#define CHECKPOINT_UP_PROJ   ".mlp.up_proj."

// Elements [first, first + count) of a tensor of the folder.
typedef struct {
    const SafeTensor* from; // NULL: an optional one that the folder lacks
    int64_t first, count;
} CheckpointPlace;

// A folder's weights or moments, open for reading.
typedef struct {
    SafetensorsSet set;
    CheckpointFile file;
    CheckpointPlace (*places)[2]; // [file.count]: where the elements of each tensor are, in turn
    bool llama;                   // the names are Llama's
    bool joined;                  // gate_proj also has the rows of up_proj
} CheckpointSource;

// May be called on one that is zero or already closed.
static inline void checkpoint_source_close(CheckpointSource* s) {
    checkpoint_file_free(&s->file);
    safetensors_set_close(&s->set);
    free(s->places);
    s->places = NULL;
}

// Finds and checks part `part` of the `parts` that the folder has of a tensor.
static inline bool checkpoint_source_find(CheckpointSource* s, int tensor, int part, int parts, Error* err) {
    const Param* row = s->file.origins[tensor].row;
    SafeTensor want = s->file.tensors[tensor];
    CheckpointPlace* place = &s->places[tensor][part];
    char name[96];
    snprintf(name, sizeof name, "%s", want.name);
    if (s->llama) llama_name(name, want.name, part);
    want.name = name;
    want.shape[0] /= parts;
    place->count = row->count / parts;
    char* up = s->joined ? strstr(name, CHECKPOINT_UP_PROJ) : NULL;
    if (up) { // the second half of gate_proj
        snprintf(up, sizeof name - (size_t)(up - name), CHECKPOINT_GATE_PROJ "weight");
        place->first = row->count;
    }
    if (s->joined && strstr(name, CHECKPOINT_GATE_PROJ)) want.shape[0] *= 2;
    place->from = safetensors_set_find(&s->set, name);
    return (!place->from && row->optional) || checkpoint_check_tensor(&want, place->from, s->set.path, err);
}

// Fails if the files hold a tensor that is not in the table. To ignore it would be to load a model other than
// the one that was trained.
static inline bool checkpoint_check_extra(const CheckpointSource* s, Error* err) {
    const SafetensorsSet* set = &s->set;
    for (int file = 0; file < set->count; file++) {
        for (int k = 0; k < set->files[file].count; k++) {
            const SafeTensor* have = &set->files[file].tensors[k];
            bool known = s->llama && llama_is_table(have->name);
            for (int i = 0; i < s->file.count && !known; i++)
                known = have == s->places[i][0].from || have == s->places[i][1].from;
            if (!known)
                return fail(err, "%s: tensor '%.200s' is not part of the model that the config describes%s",
                            have->path, have->name,
                            strcmp(have->name, "lm_head.weight") == 0
                                ? ": tie_word_embeddings true makes the embedding the head; set it to false "
                                  "to read both"
                                : "");
        }
    }
    return true;
}

// Opens CHECKPOINT_MODEL or CHECKPOINT_OPTIMIZER, of one file or several, and checks that it contains exactly
// the tensors of the table, but for optional ones. On error there is nothing to close.
static inline bool checkpoint_source_open(CheckpointSource* s, const char* folder, const ParamTable* table,
                                          int file, int element_bytes, Error* err) {
    memset(s, 0, sizeof *s);
    if (!safetensors_set_open(&s->set, folder, checkpoint_file_names[file], err)) return false;
    s->file = checkpoint_file(table, file, element_bytes);
    s->places = (CheckpointPlace(*)[2])xcalloc((size_t)s->file.count, sizeof *s->places);
    s->llama = safetensors_set_find(&s->set, LLAMA_EMBEDDINGS) != NULL;
    for (int i = 1; i < s->file.count; i++) {
        const SafeTensor *gate = &s->file.tensors[i - 1], *have = safetensors_set_find(&s->set, gate->name);
        if (strstr(gate[1].name, CHECKPOINT_UP_PROJ) && have && have->shape[0] == 2 * gate->shape[0])
            s->joined = true;
    }
    bool ok = true;
    for (int i = 0; ok && i < s->file.count; i++) {
        const int parts = s->llama ? llama_parts(s->file.tensors[i].name) : 1;
        for (int part = 0; ok && part < parts; part++) ok = checkpoint_source_find(s, i, part, parts, err);
    }
    ok = ok && checkpoint_check_extra(s, err);
    if (!ok) checkpoint_source_close(s);
    return ok;
}

// Reads a piece into `to`, zeros of a tensor that the folder lacks.
static inline bool checkpoint_read_piece(const CheckpointSource* s, const CheckpointPiece* p, void* to,
                                         Error* err) {
    const int size = p->file->element_bytes;
    const int64_t end = p->first + p->count;
    int64_t begin = 0; // of the place
    for (int part = 0; part < 2; part++) {
        const CheckpointPlace* place = &s->places[p->tensor][part];
        const int64_t first = p->first > begin ? p->first : begin; // what the piece has of it
        const int64_t last = end < begin + place->count ? end : begin + place->count;
        char* out = (char*)to + (first - p->first) * size;
        const int64_t at = place->first + first - begin, n = last - first;
        if (n > 0 && !place->from) memset(out, 0, (size_t)(n * size));
        if (n > 0 && place->from && !safetensors_read_range(place->from, at, n, out, size, err)) return false;
        begin += place->count;
    }
    return true;
}

// Fails unless the numbers of a piece that came from `path` are finite, and those of a second moment at least
// 0: training would go on until a save refuses them, and lose that work.
static inline bool checkpoint_check_piece(const char* path, const CheckpointPiece* p, Error* err) {
    const TensorOrigin* origin = &p->file->origins[p->tensor];
    const int size = p->file->element_bytes;
    const int64_t bad = numbers_first_bad(p->data, p->count, size, origin->buffer == 2 ? 0 : -DBL_MAX);
    if (bad == p->count) return true;
    const double x = size == 8 ? ((const double*)p->data)[bad] : (double)((const float*)p->data)[bad];
    return fail(err, "%s: tensor '%s' contains %g, which is not a valid %s", path, origin->name, x,
                origin->buffer == 0 ? "weight" : "moment");
}

// Reads a rank's ranges of CHECKPOINT_MODEL into its weights, or of CHECKPOINT_OPTIMIZER into its moments,
// where elements of tensors that are not trained stay as they are. The files of a checkpoint or Hugging
// Face folder, one or several, must contain all tensors of the table but optional ones, with its shapes,
// and no others; otherwise the buffers are unchanged. Fails also, with the buffers changed, where a number
// is not finite or a second moment is negative.
static inline bool checkpoint_read_file(const char* folder, int file, const CheckpointPart* part,
                                        Error* err) {
    CheckpointSource s;
    if (!checkpoint_source_open(&s, folder, part->table, file, part->tensors->element_bytes, err))
        return false;
    CheckpointPiece p = checkpoint_pieces(&s.file, part);
    bool ok = true;
    while (ok && checkpoint_next_piece(&p)) {
        const SafeTensor* from = s.places[p.tensor][0].from;
        ok = checkpoint_read_piece(&s, &p, p.data, err) &&
             checkpoint_check_piece(from ? from->path : s.set.path, &p, err);
    }
    checkpoint_source_close(&s);
    return ok;
}
