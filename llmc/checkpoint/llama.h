/*
Names of the tensors in a LlamaForCausalLM's folder, which --init opens as transformer-llama. The two models
are the same function: they rotate the same pairs of channels, and rows 0 to I - 1 of gate_proj [2I, d] are
Llama's gate_proj, the others its up_proj. Called by read.h; the folder's config.json is read by
llmc/config/config_file.h.
*/
#pragma once

#include "../base/common.h"

// The tensor by which such a folder is known.
#define LLAMA_EMBEDDINGS "model.embed_tokens.weight"

// Number of tensors that one of ours is in a Llama folder.
static inline int llama_parts(const char* ours) { return strstr(ours, ".mlp.gate_proj.") ? 2 : 1; }

// Writes the name that part `part` of our tensor has there.
static inline void llama_name(char name[96], const char* ours, int part) {
    static const char* const names[][2] = {{"model.embeddings.", "model.embed_tokens."},
                                           {".attn_norm.", ".input_layernorm."},
                                           {".attn.", ".self_attn."},
                                           {".mlp_norm.", ".post_attention_layernorm."},
                                           {".gate_proj.", ".up_proj."}};
    const int count = (int)(sizeof names / sizeof names[0]) - (part == 0);
    snprintf(name, 96, "%s", ours);
    for (int i = 0; i < count; i++) {
        const char* at = strstr(ours, names[i][0]);
        if (at) snprintf(name, 96, "%.*s%s%s", (int)(at - ours), ours, names[i][1], at + strlen(names[i][0]));
    }
}

// Is it a table of angles, which old folders have beside the weights?
static inline bool llama_is_table(const char* name) { return strstr(name, ".rotary_emb.inv_freq") != NULL; }
