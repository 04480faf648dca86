/*
--fp8: which GEMMs are in FP8 and what that takes, without CUDA: the plan of memory and the record in
trainer.json. The formats and the scaling are in llmc/cuda/fp8.cuh and llmc/layers/fp8_state.cuh.

Four linear layers of each block, with weights w [N, K]:

    FP8_IN_PROJ      q, k, v and the output gate: the first N rows of the fused projection; those of the
                     forget gate and of the shift gates stay in bf16
    FP8_O_PROJ       attention's output projection
    FP8_GATE_PROJ    the MLP's first matrix, and
    FP8_DOWN_PROJ    its second one

Each has three tensors in FP8: weights and inputs in E4M3, the gradient of the outputs in E5M2. All three
GEMMs of a layer read them. lm_head's GEMMs are in FP8 too, with scales that need no history. Embedding and
attention are in bf16.
*/
#pragma once

#include "../formats/json.h"
#include "params.h"
#include "shapes.h"

enum { FP8_IN_PROJ, FP8_O_PROJ, FP8_GATE_PROJ, FP8_DOWN_PROJ, FP8_LINEARS };

// Tensors with a scale from the largest absolute values (amax) of the last FP8_HISTORY steps. The scale of
// weights is that of the weights as they are.
enum { FP8_INPUT, FP8_GRADIENT, FP8_DELAYED, FP8_WEIGHT = FP8_DELAYED, FP8_TENSORS };

enum { FP8_HISTORY = 16, FP8_ALIGN = 16 }; // steps; elements, of rows in memory

typedef struct {
    ParamKind kind; // of the weights, or of the first tensor of the fused projection
    int64_t N, K;
} Fp8Shape;

// The linear layers of a block, in the order of the enum.
static inline void fp8_shapes(Fp8Shape shapes[FP8_LINEARS], const Config* c, const ParamTable* table) {
    const int64_t d = c->hidden_size, I = config_mlp_size(c), kd = config_key_heads(c) * config_head_size(c);
    const Fp8Shape of_block[FP8_LINEARS] = {
        {table->by_layer[0].proj.first, d * (c->use_output_gate ? 2 : 1) + 2 * kd, d},
        {P_O_PROJ, d, d},
        {P_GATE_PROJ, 2 * I, d},
        {P_DOWN_PROJ, d, I}};
    memcpy(shapes, of_block, sizeof of_block);
}

// Dies where --fp8 does not support the model, or T tokens of a sequence on a rank: cuBLAS demands of FP8
// GEMMs that rows in memory, and all sizes, are multiples of 16.
static inline void fp8_check(const Config* c, int64_t T) {
    const int64_t d = c->hidden_size, I = config_mlp_size(c);
    if (c->mixer != MIXER_ATTENTION || config_is_stack(c))
        die("--fp8: %s has no GEMMs in FP8: leave it out", config_class(c)->architecture);
    if (d % FP8_ALIGN || I % FP8_ALIGN)
        die("--fp8: hidden_size and intermediate_size must be multiples of %d, not %lld and %lld", FP8_ALIGN,
            (long long)d, (long long)I);
    if (T % FP8_ALIGN)
        die("--fp8: a rank's tokens of a sequence must be a multiple of %d, not %lld: change --seq-len",
            FP8_ALIGN, (long long)T);
}

// Bytes of the weights in FP8, and transposed, of a block.
static inline int64_t fp8_block_bytes(const Fp8Shape shapes[FP8_LINEARS]) {
    int64_t bytes = 0;
    for (int i = 0; i < FP8_LINEARS; i++) bytes += 2 * shapes[i].N * shapes[i].K;
    return bytes;
}

// Bytes of lm_head in FP8, with its padding rows, and transposed.
static inline int64_t fp8_head_bytes(const Config* c) {
    return 2 * matmul_padded(c->vocab_size) * c->hidden_size;
}

// Bytes of all weights in FP8, the same on every rank.
static inline int64_t fp8_weight_bytes(const Config* c, const ParamTable* table) {
    Fp8Shape shapes[FP8_LINEARS];
    fp8_shapes(shapes, c, table);
    return c->num_hidden_layers * fp8_block_bytes(shapes) + fp8_head_bytes(c);
}

// A pass needs five buffers in FP8, of a byte an element: rows of inputs, of gradients of the residual stream
// and of the fused projection's; and transposed, for one weight gradient at a time, an input and a gradient.
// The MLP's gradient, its transposed copy, and that of the MLP's second input are where these tensors are in
// bf16. These are elements a row.
typedef struct {
    int64_t input, residual, proj_gradient, x_scratch, dout_scratch;
} Fp8Rows;

static inline Fp8Rows fp8_rows(const Fp8Shape shapes[FP8_LINEARS]) {
    const int64_t d = shapes[FP8_IN_PROJ].K, I = shapes[FP8_DOWN_PROJ].K, N = shapes[FP8_IN_PROJ].N;
    const Fp8Rows rows = {
        .input = I > d ? I : d, .residual = d, .proj_gradient = N, .x_scratch = d, .dout_scratch = N};
    return rows;
}

// Bytes of the buffers of a training pass over `rows` tokens.
static inline int64_t fp8_pass_bytes(const Config* c, const ParamTable* table, int64_t rows) {
    Fp8Shape shapes[FP8_LINEARS];
    fp8_shapes(shapes, c, table);
    const Fp8Rows row = fp8_rows(shapes);
    return rows * (row.input + row.residual + row.proj_gradient + row.x_scratch + row.dout_scratch);
}

// ----------------------------------------------------------------------------
// the record in trainer.json: amax history [L, FP8_LINEARS, FP8_DELAYED, FP8_HISTORY], as bits of bf16, in
// which the values are exact, of four hexadecimal digits each. Step s is entry s % FP8_HISTORY.

static inline int64_t fp8_history_count(int64_t L) { return L * FP8_LINEARS * FP8_DELAYED * FP8_HISTORY; }

// To be freed.
static inline char* fp8_history_text(const uint16_t* history, int64_t count) {
    char* text = (char*)xcalloc((size_t)(4 * count + 1), 1);
    for (int64_t i = 0; i < count; i++) snprintf(text + 4 * i, 5, "%04x", history[i]);
    return text;
}

// Reads the text from a record of trainer.json. False where it has none; dies where that is not valid.
static inline bool fp8_history_read(uint16_t* history, int64_t count, const Json* record) {
    if (!record->nodes || json_get(record, 0, "fp8") < 0) return false;
    const char* text = json_string(record, json_get(record, 0, "fp8"));
    bool valid = text && strlen(text) == (size_t)(4 * count);
    for (int64_t i = 0; valid && i < count; i++) {
        char digits[5] = "";
        memcpy(digits, text + 4 * i, 4);
        const unsigned long value = strtoul(digits, NULL, 16);
        valid = strspn(digits, "0123456789abcdef") == 4 && value < 0x7f80; // finite, not negative
        history[i] = (uint16_t)value;
    }
    if (!valid) die("the checkpoint's trainer.json: 'fp8' is not valid");
    return true;
}
