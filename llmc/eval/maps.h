/*
--maps FILE: what the heads of --init's model forget and attend to on a text, for scripts/eval/maps.py.

The text is --prompt, standard input with --prompt -, or the first sequence of --val-data; of it the first
--seq-len tokens, T with end of text. FILE has, in safetensors format, of the L layers with attention

    layers            [L]       their numbers in the model
    half_life         [L, NH]   -ln 2 / mean(log f), tokens; infinite without a forget gate
    pruned_share      [L, NH]   skipped share of the blocks of MAPS_BLOCK keys at or below the diagonal, with
                                document_reset of those that any of their queries' documents has keys in
    effective_window  [L, NH]   mean over the queries of the smallest w for which the keys j > i - w have
                                MAPS_WINDOW_SHARE of the attention, tokens
    queries           [Q]       positions i of the rows below, evenly spaced: all where T <= MAPS_ROWS

and of head H of the model's layer L

    L.H.cum_logf      [T]       running sum of log f; 0 without a gate
    L.H.largest       [Q]       the largest attention of each row,
    L.H.key           [Q]       and its key: no other key of the row has more than 0.5
    L.H.attention     [Q, T]    softmax(q k^T / sqrt(dh) + log F), of the heads with the shortest and the
                                longest half-life; where T <= MAPS_ROWS

Its metadata has "checkpoint", which is --init, and where they were given "set", the texts of --set as a list
in JSON.

The trainer computes q, k and cum_logf of all layers in a forward pass; the rest is done here in double, in
tiles of queries and keys, from a layer's tensors on the host.

Pruning: with |q k| / sqrt(dh) <= U the keys up to e have at most exp(2 U) sum_{j <= e} exp(-c_j) / sum_{j <=
i} exp(-c_j) of row i's weight, c being cum_logf. A block of keys is skipped by a block of queries if this is
below eps for its first query, whose sum is the least. With pruning_rule=acp it is skipped if
c_i - c_j < -(2 U + ln T) + ln eps for its last key j and that query i. U is the trainer's or follows from the
text's norms, whichever is less; with pruning_rule=acp the latter without QK norm alone.

Called by main.h. Errors end the program.
*/
#pragma once

#include "../model/documents.h"
#include "../serve/generate.h"
#include "positions.h"
#include "result_file.h"

enum {
    MAPS_ROWS = 2048, // queries whose attention is computed, at most
    MAPS_BLOCK = 128, // tokens, as the GPU's attention prunes
    MAPS_TILE = 16,   // queries that read a tile of keys together
    MAPS_KEYS = 256   // keys of a tile
};

static const double MAPS_WINDOW_SHARE = 0.95;

typedef struct {
    const Trainer* trainer;
    const Config* config;
    int64_t L, NH, KVH, dh, T, Q, window;                // window: of the layer in progress
    int32_t *tokens, *queries, *layers;                  // [T], [Q], [L]
    double *half_life, *pruned_share, *effective_window; // [L, NH]
    double* cum_logf;                                    // [L, NH, T]
    float* largest;                                      // [L, NH, Q]
    int32_t* key;                                        // [L, NH, Q]
    int32_t* doc_start;                                  // [T]; NULL without document_reset
    double* windows;                                     // [Q] of one head
    int64_t shown[2];                                    // l NH + h of the heads with a matrix,
    float* matrices[2];                                  // [Q, T]; NULL where they are too large
    Progress progress;
    ResultFile file;
} Maps;

// One head of a layer: its queries and keys in the layer's tensors.
typedef struct {
    const LayerHeads* layer;
    int64_t h;
    const double* cum_logf; // [T]
    int64_t at;             // l NH + h
    float* matrix;          // [Q, T]; NULL: is not kept
} MapsHead;

// ----------------------------------------------------------------------------
// the text

// The tokens of --prompt behind end of text.
static inline TokenBuffer maps_prompt(const Run* run) {
    const Options* o = &run->options;
    char* text = NULL;
    size_t bytes = strlen(o->prompt), capacity = 0;
    if (strcmp(o->prompt, "-") == 0) { // all of it, up to a zero byte
        ssize_t got = getdelim(&text, &capacity, '\0', stdin);
        if (ferror(stdin)) die("--prompt -: cannot read standard input: %s", strerror(errno));
        bytes = got < 0 ? 0 : (size_t)got;
    } else {
        text = xstrdup(o->prompt);
    }
    Tokenizer tokenizer = sample_tokenizer(run, true);
    TokenBuffer ids = {NULL, 0, 0};
    token_buffer_add(&ids, (uint32_t)config_end_of_text(&run->config));
    text_encode(&tokenizer, o->json_escape, text, bytes, &ids);
    tokenizer_free(&tokenizer);
    free(text);
    return ids;
}

// Before the model is opened: checks FILE, reads the text, and sets --seq-len to its tokens. Free with
// maps_run.
static inline Maps* maps_open(Run* run) {
    Error err;
    Options* o = &run->options;
    Maps* m = (Maps*)xcalloc(1, sizeof *m);
    m->config = &run->config;
    if (!config_has_attention(&run->config)) die("--maps: the model of --init has no attention");
    if (!o->prompt == !o->val_data)
        die("--maps: on which text? give --prompt TEXT, - for standard input, or --val-data GLOB");
    result_open(&m->file, "maps", o->maps);
    m->T = o->seq_len;
    if (o->prompt) {
        TokenBuffer ids = maps_prompt(run);
        if (ids.count < m->T) m->T = ids.count;
        m->tokens = (int32_t*)xcalloc((size_t)m->T, sizeof *m->tokens);
        for (int64_t t = 0; t < m->T; t++) m->tokens[t] = (int32_t)ids.data[t];
        free(ids.data);
    } else {
        DataLoader data;
        m->tokens = (int32_t*)xcalloc(2 * (size_t)m->T, sizeof *m->tokens); // and targets
        run_open_data(run, &data, o->val_data, 1);
        if (!dataloader_next(&data, m->tokens, m->tokens + m->T, &err)) die("%s", err.msg);
        dataloader_close(&data);
    }
    o->seq_len = m->T;
    return m;
}

// ----------------------------------------------------------------------------
// a head

// Channel x of head h's query, or of the key that it reads, of token t.
static inline double maps_query_number(const Maps* m, const LayerHeads* layer, int64_t h, int64_t t,
                                       int64_t x) {
    return host_number(m->trainer, layer->q, (t * m->NH + h) * m->dh + x);
}
static inline double maps_key_number(const Maps* m, const LayerHeads* layer, int64_t h, int64_t t,
                                     int64_t x) {
    const int64_t key_head = h / (m->NH / m->KVH);
    return host_number(m->trainer, layer->k, (t * m->KVH + key_head) * m->dh + x);
}

// Scores [count, T] of queries r .. r + count with the keys that any of them sees.
static inline void maps_scores(double* scores, const Maps* m, const MapsHead* head, int64_t r,
                               int64_t count) {
    double *q = (double*)xcalloc((size_t)(MAPS_TILE * m->dh), sizeof *q),
           *k = (double*)xcalloc((size_t)(MAPS_KEYS * m->dh), sizeof *k);
    const int64_t keys = m->queries[r + count - 1] + 1;
    for (int64_t i = 0; i < count; i++)
        for (int64_t x = 0; x < m->dh; x++)
            q[i * m->dh + x] =
                maps_query_number(m, head->layer, head->h, m->queries[r + i], x) / sqrt((double)m->dh);
    for (int64_t first = 0; first < keys; first += MAPS_KEYS) {
        const int64_t n = min64(keys - first, MAPS_KEYS);
        for (int64_t j = 0; j < n; j++)
            for (int64_t x = 0; x < m->dh; x++)
                k[x * MAPS_KEYS + j] = maps_key_number(m, head->layer, head->h, first + j, x);
        for (int64_t i = 0; i < count; i++) {
            double sums[MAPS_KEYS] = {0};
            for (int64_t x = 0; x < m->dh; x++)
                for (int64_t j = 0; j < MAPS_KEYS; j++) sums[j] += q[i * m->dh + x] * k[x * MAPS_KEYS + j];
            memcpy(scores + i * m->T + first, sums, (size_t)n * sizeof *sums);
        }
    }
    free(q);
    free(k);
}

// The attention of query number r, whose scores [T] become weights; what is said of them.
static inline void maps_query(double* row, Maps* m, const MapsHead* head, int64_t r) {
    const int64_t i = m->queries[r];
    double highest = -INFINITY, sum = 0, near = 0;
    int64_t best = 0, first = i + 1;
    for (int64_t j = 0; j <= i; j++) {
        row[j] += head->cum_logf[i] - head->cum_logf[j];
        if ((m->window && j + m->window <= i) || (m->doc_start && j < m->doc_start[i])) row[j] = -INFINITY;
        if (row[j] > highest) highest = row[j], best = j;
    }
    for (int64_t j = 0; j <= i; j++) sum += row[j] = exp(row[j] - highest);
    for (int64_t j = 0; j <= i; j++) row[j] /= sum;
    while (first > 0 && near < MAPS_WINDOW_SHARE) near += row[--first];
    m->windows[r] = isfinite(sum) ? (double)(i + 1 - first) : NAN;
    m->largest[head->at * m->Q + r] = (float)row[best];
    m->key[head->at * m->Q + r] = (int32_t)best;
    for (int64_t j = 0; head->matrix && j <= i; j++) head->matrix[r * m->T + j] = (float)row[j];
}

// Fills largest, key, the effective window and the matrix of a head.
static inline void maps_attention(Maps* m, const MapsHead* head) {
    double sum = 0;
#pragma omp parallel
    {
        double* scores = (double*)xcalloc((size_t)(MAPS_TILE * m->T), sizeof *scores);
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < m->Q; r += MAPS_TILE) {
            const int64_t count = min64(m->Q - r, MAPS_TILE);
            maps_scores(scores, m, head, r, count);
            for (int64_t i = 0; i < count; i++) maps_query(scores + i * m->T, m, head, r + i);
        }
        free(scores);
    }
    for (int64_t r = 0; r < m->Q; r++) sum += m->windows[r];
    m->effective_window[head->at] = sum / (double)m->Q;
}

// The product of the largest norms of a head's queries and keys, over sqrt(dh).
static inline double maps_norm_limit(const Maps* m, const LayerHeads* layer, int64_t h) {
    double largest[2] = {0, 0};
    for (int64_t i = 0; i < 2 * m->T; i++) {
        double square = 0;
        for (int64_t x = 0; x < m->dh; x++) {
            double value = (i % 2 ? maps_key_number : maps_query_number)(m, layer, h, i / 2, x);
            square += value * value;
        }
        largest[i % 2] = fmax(largest[i % 2], square);
    }
    return sqrt(largest[0] * largest[1] / (double)m->dh);
}

// U of a head.
static inline double maps_score_limit(const Maps* m, const LayerHeads* layer, int64_t h) {
    const double limit = layer->limits[h];
    if (!isnan(limit) && m->config->pruning_rule == PRUNING_ACP) return limit;
    return fmin(limit, maps_norm_limit(m, layer, h)); // fmin passes over NAN
}

// The share of the blocks that are skipped, by the bounds above.
static inline double maps_pruned_share(const Maps* m, const double* cum_logf, double limit) {
    const int64_t T = m->T, blocks = (T + MAPS_BLOCK - 1) / MAPS_BLOCK;
    const bool acp = m->config->pruning_rule == PRUNING_ACP;
    double *sums = (double*)xcalloc((size_t)T, sizeof *sums), // ln sum exp(-c_j), j <= t
        sum = -INFINITY;
    int64_t skipped = 0, count = blocks; // those on the diagonal are never skipped
    for (int64_t t = 0; t < T; t++) {
        double highest = fmax(sum, -cum_logf[t]);
        sum = highest + log(exp(sum - highest) + exp(-cum_logf[t] - highest));
        sums[t] = acp ? -cum_logf[t] : sum;
    }
    for (int64_t query = 0; query < blocks; query++)
        for (int64_t block = 0; block < query; block++) {
            if (m->doc_start && (block + 1) * MAPS_BLOCK <= m->doc_start[query * MAPS_BLOCK]) continue;
            count++;
            skipped += (acp ? log((double)T) : 0) + 2 * limit + sums[(block + 1) * MAPS_BLOCK - 1] -
                           sums[query * MAPS_BLOCK] <
                       m->config->log_pruning_tolerance;
        }
    free(sums);
    return (double)skipped / (double)count;
}

// -ln 2 / mean(log f) of the tokens before which no wall is.
static inline double maps_half_life(const Maps* m, const double* cum_logf) {
    double sum = cum_logf[m->T - 1];
    int64_t walls = 0;
    for (int64_t t = 0; t < m->T; t++) walls += is_wall(m->doc_start, t, m->T);
    sum -= (double)walls * WALL_LOGF;
    return sum < 0 && walls < m->T ? -log(2) * (double)(m->T - walls) / sum : INFINITY;
}

// A HeadVisitor: cum_logf and half-life of the heads of layer l.
static inline void maps_visit_gates(void* context, int64_t l, const LayerHeads* layer) {
    Maps* m = (Maps*)context;
    const size_t count = (size_t)(m->NH * m->T);
    if (layer->cum_logf) memcpy(m->cum_logf + l * m->NH * m->T, layer->cum_logf, count * sizeof(double));
    for (int64_t at = l * m->NH; at < (l + 1) * m->NH; at++)
        m->half_life[at] = layer->cum_logf ? maps_half_life(m, m->cum_logf + at * m->T) : INFINITY;
}

// A HeadVisitor: all that the file says of the heads of layer l.
static inline void maps_visit(void* context, int64_t l, const LayerHeads* layer) {
    Maps* m = (Maps*)context;
    maps_visit_gates(m, l, layer);
    m->window = layer->window;
    for (int64_t h = 0; h < m->NH; h++) {
        const int64_t at = l * m->NH + h;
        MapsHead head = {layer, h, m->cum_logf + at * m->T, at, NULL};
        for (int i = 0; i < 2; i++)
            if (m->shown[i] == at && m->matrices[i]) head.matrix = m->matrices[i];
        if (config_prunes(m->config))
            m->pruned_share[at] = maps_pruned_share(m, head.cum_logf, maps_score_limit(m, layer, h));
        maps_attention(m, &head);
        progress_update(&m->progress, (double)(at + 1));
    }
}

// Chooses the heads with a matrix, as maps.py does: the first one of the shortest half-life, the last one of
// the longest. They can be the same.
static inline void maps_choose(Maps* m) {
    m->shown[0] = m->shown[1] = 0;
    for (int64_t at = 1; at < m->L * m->NH; at++) {
        if (m->half_life[at] < m->half_life[m->shown[0]]) m->shown[0] = at;
        if (m->half_life[at] >= m->half_life[m->shown[1]]) m->shown[1] = at;
    }
    for (int i = 0; i <= (m->shown[0] != m->shown[1]); i++)
        m->matrices[i] = (float*)xcalloc((size_t)(m->Q * m->T), sizeof(float));
}

// ----------------------------------------------------------------------------
// the file

// Adds the rows of a head, whose names go to names[3].
static inline int maps_put_head(SafeTensor* to, char names[3][64], const Maps* m, int64_t at) {
    const SafetensorsDtype dtypes[] = {SAFETENSORS_F64, SAFETENSORS_F32, SAFETENSORS_I32};
    static const char* const kinds[] = {"cum_logf", "largest", "key"};
    const void* data[] = {m->cum_logf + at * m->T, m->largest + at * m->Q, m->key + at * m->Q};
    for (int i = 0; i < 3; i++) {
        snprintf(names[i], 64, "%d.%lld.%s", m->layers[at / m->NH], (long long)(at % m->NH), kinds[i]);
        to[i] = safetensors_tensor(names[i], dtypes[i], 1, i == 0 ? &m->T : &m->Q, data[i]);
    }
    return 3;
}

static inline void maps_write(Maps* m, const Run* run) {
    const int64_t heads = m->L * m->NH, of_heads[] = {m->L, m->NH}, of_matrix[] = {m->Q, m->T};
    const struct {
        const char* name;
        const double* values;
    } statistics[] = {{"half_life", m->half_life},
                      {"pruned_share", m->pruned_share},
                      {"effective_window", m->effective_window}};
    SafeTensor* tensors = (SafeTensor*)xcalloc((size_t)(7 + 3 * heads), sizeof *tensors);
    char(*names)[64] = (char(*)[64])xcalloc((size_t)(2 + 3 * heads), sizeof *names);
    int count = 0, named = 0;
    for (int i = 0; i < 3; i++)
        tensors[count++] =
            safetensors_tensor(statistics[i].name, SAFETENSORS_F64, 2, of_heads, statistics[i].values);
    tensors[count++] = safetensors_tensor("layers", SAFETENSORS_I32, 1, &m->L, m->layers);
    tensors[count++] = safetensors_tensor("queries", SAFETENSORS_I32, 1, &m->Q, m->queries);
    for (int64_t at = 0; at < heads; at++, named += 3)
        count += maps_put_head(tensors + count, names + named, m, at);
    for (int i = 0; i < 2; i++) {
        if (!m->matrices[i]) continue;
        snprintf(names[named], sizeof *names, "%d.%lld.attention", m->layers[m->shown[i] / m->NH],
                 (long long)(m->shown[i] % m->NH));
        tensors[count++] = safetensors_tensor(names[named++], SAFETENSORS_F32, 2, of_matrix, m->matrices[i]);
    }
    const CliList* list = &run->options.set;
    JsonWriter set = json_writer(0);
    json_begin_array(&set, NULL);
    for (int i = 0; i < list->count; i++) json_put_string(&set, NULL, list->items[i]);
    json_end(&set);
    const char* metadata[] = {"checkpoint", run->options.init, list->count ? "set" : NULL, set.text, NULL};
    result_put_tensors(&m->file, tensors, count, metadata);
    json_writer_free(&set);
    free(tensors);
    free(names);
}

// ----------------------------------------------------------------------------
// the run

// Fills all that the file says, of m's tokens.
static inline void maps_measure(Maps* m, const Trainer* trainer, Model* model) {
    const Config* c = m->config;
    m->trainer = trainer;
    m->L = config_layers_of(c, MIXER_ATTENTION);
    m->layers = (int32_t*)xcalloc((size_t)m->L, sizeof *m->layers);
    for (int64_t l = 0, n = 0; l < c->num_hidden_layers; l++)
        if (config_layer(c, l).mixer == MIXER_ATTENTION) m->layers[n++] = (int32_t)l;
    m->NH = c->num_heads;
    m->KVH = config_key_heads(c);
    m->dh = config_head_size(c);
    m->Q = min64(m->T, MAPS_ROWS);
    const size_t heads = (size_t)(m->L * m->NH), rows = heads * (size_t)m->Q;
    m->queries = (int32_t*)xcalloc((size_t)m->Q, sizeof *m->queries);
    for (int64_t r = 0; r < m->Q; r++) m->queries[r] = (int32_t)((r + 1) * m->T / m->Q - 1);
    m->half_life = (double*)xcalloc(3 * heads, sizeof(double));
    m->pruned_share = m->half_life + heads;
    m->effective_window = m->pruned_share + heads;
    m->cum_logf = (double*)xcalloc(heads * (size_t)m->T, sizeof(double));
    m->largest = (float*)xcalloc(rows, sizeof(float));
    m->key = (int32_t*)xcalloc(rows, sizeof(int32_t));
    m->windows = (double*)xcalloc((size_t)m->Q, sizeof(double));
    if (c->document_reset) m->doc_start = (int32_t*)xcalloc((size_t)m->T, sizeof *m->doc_start);
    find_documents(m->doc_start, m->tokens, 1, m->T, config_end_of_text(c));
    if (m->T <= MAPS_ROWS) {
        trainer->visit_heads(model, m->tokens, maps_visit_gates, m);
        maps_choose(m);
    }
    progress_start(&m->progress, "maps", (double)heads, "heads", 1);
    trainer->visit_heads(model, m->tokens, maps_visit, m);
    progress_end(&m->progress);
}

static inline void maps_free(Maps* m) {
    void* memory[] = {m->tokens, m->queries, m->layers,      m->half_life,   m->cum_logf,  m->largest,
                      m->key,    m->windows, m->matrices[0], m->matrices[1], m->doc_start, m};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) free(memory[i]);
}

// Measures and writes the file, and frees m. Dies where the model's numbers are not finite.
static inline void maps_run(Maps* m, const Trainer* trainer, Model* model, const Run* run) {
    maps_measure(m, trainer, model);
    for (int64_t i = 0; i < m->L * m->NH; i++)
        if (!isfinite(m->effective_window[i]))
            die("--init %s: the attention of layer %d, head %lld is not finite: the weights are damaged",
                run->options.init, m->layers[i / m->NH], (long long)(i % m->NH));
    maps_write(m, run);
    printf("%s: %s on %s; draw them with scripts/eval/maps.py\n", run->options.maps,
           counted(m->L * m->NH, "head").text, counted(m->T, "token").text);
    maps_free(m);
}
