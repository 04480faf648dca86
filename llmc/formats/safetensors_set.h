/*
The tensors of a Hugging Face folder, in one safetensors file or in several that are listed in an index. Index
and files must agree on which tensor is in which file.

Called by llmc/checkpoint/read.h and llmc/run/agreement.h. Names that end in an underscore are private.
*/
#pragma once

#include "safetensors.h"

typedef struct {
    char* path; // of the index, or of the only file
    Safetensors* files;
    int count;
} SafetensorsSet;

// Closes all files. May be called on a set that is empty or already closed.
static inline void safetensors_set_close(SafetensorsSet* set) {
    for (int i = 0; i < set->count; i++) safetensors_close(&set->files[i]);
    free(set->files);
    free(set->path);
    memset(set, 0, sizeof *set);
}

// The file of this path, opened if it is not open yet; NULL on error.
static inline const Safetensors* safetensors_set_file_(SafetensorsSet* set, const char* path, Error* err) {
    for (int i = 0; i < set->count; i++)
        if (strcmp(set->files[i].path, path) == 0) return &set->files[i];
    set->files = (Safetensors*)xrealloc(set->files, (size_t)(set->count + 1) * sizeof *set->files);
    if (!safetensors_open(&set->files[set->count], path, err)) return NULL;
    return &set->files[set->count++];
}

// Fails unless each tensor of the files is one that the index has in that file.
static inline bool safetensors_set_check_index_(const SafetensorsSet* set, const Json* index, int map,
                                                Error* err) {
    for (int i = 0; i < set->count; i++) {
        const Safetensors* file = &set->files[i];
        const char* file_name = strrchr(file->path, '/') + 1;
        for (int k = 0; k < file->count; k++) {
            const SafeTensor* t = &file->tensors[k];
            const char* mapped = json_string(index, json_get(index, map, t->name));
            if (!mapped)
                return fail(err, "%s: tensor '%.200s': %s does not list it", t->path, t->name, set->path);
            if (strcmp(mapped, file_name) != 0)
                return fail(err, "%s: tensor '%.200s': is also in %.200s, as %s says", t->path, t->name,
                            mapped, set->path);
        }
    }
    return true;
}

// Opens the files that the index at set->path lists.
static inline bool safetensors_set_open_index_(SafetensorsSet* set, const char* folder, const Json* index,
                                               Error* err) {
    const int map = json_get(index, 0, "weight_map");
    if (!json_is(index, map, JSON_OBJECT) || json_count(index, map) == 0)
        return fail(err, "%s: 'weight_map' is missing, empty or not an object", set->path);
    for (int item = json_first(index, map); item >= 0; item = json_next(index, item)) {
        char path[PATH_LENGTH];
        const char *name = json_key(index, item), *file_name = json_string(index, item);
        bool plain = file_name && file_name[0] && strcmp(file_name, "..") != 0 && !strchr(file_name, '/') &&
                     strlen(folder) + strlen(file_name) + 2 <= PATH_LENGTH;
        if (!plain) // a path out of the folder, for example
            return fail(err, "%s: tensor '%.200s' is not mapped to the name of a file in this folder",
                        set->path, name);
        path_join(path, folder, file_name);
        const Safetensors* file = safetensors_set_file_(set, path, err);
        if (!file) return false;
        if (!safetensors_find(file, name))
            return fail(err, "%s: tensor '%.200s' is missing, which %s maps to this file", path, name,
                        set->path);
    }
    return safetensors_set_check_index_(set, index, map, err);
}

// Opens FOLDER/NAME.safetensors or, if there is none, the files of FOLDER/NAME.safetensors.index.json. The
// name of a model's weights is "model". On error the set is empty.
static inline bool safetensors_set_open(SafetensorsSet* set, const char* folder, const char* name,
                                        Error* err) {
    char path[PATH_LENGTH], file_name[64];
    Json index;
    memset(set, 0, sizeof *set);
    snprintf(file_name, sizeof file_name, "%s.safetensors", name);
    path_join(path, folder, file_name);
    const bool single = access(path, F_OK) == 0;
    if (!single) path_join(path, folder, strcat(file_name, ".index.json"));
    if (!single && access(path, F_OK) != 0)
        return fail(err, "%s: holds neither %s.safetensors nor %s.safetensors.index.json", folder, name,
                    name);
    set->path = xstrdup(path);
    bool ok;
    if (single) {
        ok = safetensors_set_file_(set, path, err) != NULL;
    } else {
        ok = json_parse_file(&index, path, err) && safetensors_set_open_index_(set, folder, &index, err);
        json_free(&index);
    }
    if (!ok) safetensors_set_close(set);
    return ok;
}

// The tensor of this name in any file of the set, or NULL. Valid until the set is closed.
static inline const SafeTensor* safetensors_set_find(const SafetensorsSet* set, const char* name) {
    const SafeTensor* t = NULL;
    for (int i = 0; i < set->count && !t; i++) t = safetensors_find(&set->files[i], name);
    return t;
}
