/*
Models for the tests of this folder.
*/
#pragma once

#include "../../../llmc/config/config_check.h"
#include "../../../llmc/config/presets.h"
#include "../../../llmc/model/params.h"

// The config of a preset.
static inline Config preset(const char* name) {
    Config c;
    Recipe recipe;
    Error err;
    if (!config_preset(&c, &recipe, name, &err) || !config_check(&c, name, &err)) die("%s", err.msg);
    return c;
}

// Has a model a tensor of this name?
static inline bool has_param(const Config* c, const char* name) {
    ParamTable t = params_build(c);
    bool found = false;
    for (int r = 0; r < t.num_rows; r++) found = found || strcmp(t.rows[r].name, name) == 0;
    params_free(&t);
    return found;
}
