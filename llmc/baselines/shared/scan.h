/*
The recurrence of DeltaNet, Gated DeltaNet, HGRN2 and Mamba-2 on the CPU, as written. A head's state S [K, V]
is updated by every token:

    S' = diag(f_t) S_{t-1}                          f_t: a decay per channel of K, one per head, or none
    u_t = v_t, or beta_t (v_t - S'^T k_t)           the delta rule: what S' holds under k_t is replaced
    S_t = S' + k_t u_t^T
    o_t = scale S_t^T q_t

    DeltaNet  no decay, beta        HGRN2  a decay per channel        Mamba-2  a decay per head
    Gated DeltaNet  a decay per head, beta

Columns of S do not depend on one another, so a piece of work is a sequence, a head and COLUMNS columns.

The backward pass with dS the gradient of S_t, from the last token to the first:

    dS += scale q_t do_t^T          dq_t = scale S_t do_t           du_t = dS^T k_t
    dk_t = dS u_t                   dv_t = du_t without beta
    with beta: dbeta_t = (v_t - S'^T k_t) . du_t    dv_t = beta_t du_t    dk_t -= S' dv_t    dS -= k_t dv_t^T
    df_t = rowsum(dS * S_{t-1})     dS = diag(f_t) dS

It needs the states of all tokens. The forward pass keeps one of SEGMENT (checkpoints); the backward pass
computes a segment's states from its checkpoint.

A document begins with S = 0, and no gradient leaves it there.

Called by the recurrent mixers, and with state by their extension: one function for both.
*/
#pragma once

#include "../../cpu/layer.h"

enum { SEGMENT = 64, COLUMNS = 64 };

typedef struct {
    int64_t B, T, NH, K, V;
    int64_t key_row;     // elements of q and k from token to token
    int64_t key_head;    // from head to head; 0: heads share them
    int64_t decay_width; // K: a decay per channel; 1: per head; 0: none
    int64_t value_row;   // elements of v and of its gradient from token to token; heads are adjacent
    real scale;
    const int32_t* doc_start; // [B,T], as Layer's; NULL: a sequence is one document
} ScanShape;

// The shape of a layer's recurrence where heads have keys of their own.
static inline ScanShape scan_shape(const Layer* layer, int64_t decay_width, int64_t value_row) {
    const int64_t NH = layer->config->num_heads, dh = config_head_size(layer->config);
    ScanShape s = {.B = layer->B,
                   .T = layer->T,
                   .NH = NH,
                   .K = dh,
                   .V = config_inner_size(layer->config) / NH,
                   .key_row = NH * dh,
                   .key_head = dh,
                   .decay_width = decay_width,
                   .value_row = value_row,
                   .scale = (real)(1 / sqrt((double)dh)),
                   .doc_start = layer->doc_start};
    return s;
}

typedef struct {
    const real *q, *k; // [B,T,..] as shape
    const real* v;     // [B,T,NH,V], rows as shape
    const real* decay; // [B,T,NH,decay_width]
    const real* beta;  // [B,T,NH], NULL: not the delta rule
    real* checkpoints; // [B,NH,segments,K,V] states before each segment; NULL: not kept
    real* state;       // [B,NH,K,V] of the tokens before, updated; NULL: the sequences begin here
} Scan;

// Gradients. The parts are those of a piece: dq and dk [B,T,NH,pieces,K], ddecay [.., decay_width], dbeta
// [.., 1], which scan_sum reduces.
typedef struct {
    real *dq_parts, *dk_parts, *ddecay_parts, *dbeta_parts;
    real* dv;         // [B,T,NH,V], rows as shape
    const real* dout; // [B,T,NH,V] gradient of o
} ScanBackward;

static inline int64_t scan_segments(int64_t T) { return (T + SEGMENT - 1) / SEGMENT; }
// Pieces of a head.
static inline int64_t scan_pieces(int64_t V) { return (V + COLUMNS - 1) / COLUMNS; }

// A piece of work: columns [column, column + width) of a head.
typedef struct {
    int64_t b, h, piece, column, width;
} ScanPiece;

static inline ScanPiece scan_piece(const ScanShape* s, int64_t i) {
    int64_t pieces = scan_pieces(s->V), column = i % pieces * COLUMNS;
    ScanPiece p = {i / pieces / s->NH, i / pieces % s->NH, i % pieces, column, min64(COLUMNS, s->V - column)};
    return p;
}

// What one token brings to a piece.
typedef struct {
    const real *q, *k, *v, *decay;
    int64_t decay_step; // 1: a decay per channel; 0: one
    real beta;
} ScanToken;

static inline ScanToken scan_token(const Scan* r, const ScanShape* s, const ScanPiece* p, int64_t t) {
    static const real no_decay = 1;
    int64_t bt = p->b * s->T + t, i = bt * s->NH + p->h, keys = bt * s->key_row + p->h * s->key_head;
    ScanToken x = {.q = r->q + keys,
                   .k = r->k + keys,
                   .v = r->v + bt * s->value_row + p->h * s->V + p->column,
                   .decay = s->decay_width ? r->decay + i * s->decay_width : &no_decay,
                   .decay_step = s->decay_width > 1,
                   .beta = r->beta ? r->beta[i] : 0};
    return x;
}

// Copies the piece's columns of a state [K, V] from, or to, a buffer [K, width].
static inline void scan_load(real* piece, const real* state, int64_t K, int64_t V, const ScanPiece* p) {
    for (int64_t c = 0; c < K; c++)
        memcpy(piece + c * p->width, state + c * V + p->column, (size_t)p->width * sizeof(real));
}
static inline void scan_store(real* state, const real* piece, int64_t K, int64_t V, const ScanPiece* p) {
    for (int64_t c = 0; c < K; c++)
        memcpy(state + c * V + p->column, piece + c * p->width, (size_t)p->width * sizeof(real));
}

// next [K, n] = the state after x, from the one before; next may be before. With delta, error [n] gets
// v - S'^T k.
static inline void scan_step(real* next, real* error, const real* before, const ScanToken* x, int64_t K,
                             int64_t n, bool delta) {
    real u[COLUMNS];
    memcpy(u, x->v, (size_t)n * sizeof(real));
    for (int64_t c = 0; delta && c < K; c++) {
        real weight = x->k[c] * x->decay[c * x->decay_step];
        for (int64_t j = 0; j < n; j++) u[j] -= weight * before[c * n + j];
    }
    for (int64_t j = 0; delta && j < n; j++) error[j] = u[j], u[j] *= x->beta;
    for (int64_t c = 0; c < K; c++) {
        real decay = x->decay[c * x->decay_step], key = x->k[c];
        for (int64_t j = 0; j < n; j++) next[c * n + j] = decay * before[c * n + j] + key * u[j];
    }
}

// o [B,T,NH,V]. Keeps checkpoints and updates the state where there are any.
static inline void scan_forward(real* o, const Scan* r, const ScanShape* s) {
    int64_t K = s->K, V = s->V, pieces = s->B * s->NH * scan_pieces(V);
#pragma omp parallel if (s->B * s->T * s->NH * K * V > 32768)
    {
        real* S = (real*)xcalloc((size_t)(K * COLUMNS), sizeof(real));
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < pieces; i++) {
            const ScanPiece p = scan_piece(s, i);
            int64_t n = p.width, head = p.b * s->NH + p.h;
            real error[COLUMNS], *state = r->state ? r->state + head * K * V : NULL;
            memset(S, 0, (size_t)(K * n) * sizeof(real));
            if (state) scan_load(S, state, K, V, &p);
            for (int64_t t = 0; t < s->T; t++) {
                const ScanToken x = scan_token(r, s, &p, t);
                if (is_wall(s->doc_start, p.b * s->T + t, s->T)) memset(S, 0, (size_t)(K * n) * sizeof(real));
                real* out = o + ((p.b * s->T + t) * s->NH + p.h) * V + p.column;
                if (r->checkpoints && t % SEGMENT == 0)
                    scan_store(r->checkpoints + (head * scan_segments(s->T) + t / SEGMENT) * K * V, S, K, V,
                               &p);
                scan_step(S, error, S, &x, K, n, r->beta != NULL);
                memset(out, 0, (size_t)n * sizeof(real));
                for (int64_t c = 0; c < K; c++)
                    for (int64_t j = 0; j < n; j++) out[j] += x.q[c] * S[c * n + j];
                for (int64_t j = 0; j < n; j++) out[j] *= s->scale;
            }
            if (state) scan_store(state, S, K, V, &p);
        }
        free(S);
    }
}

// Where the gradients of a token go.
typedef struct {
    real *dq, *dk, *dv;
    real* ddecay; // NULL without decay
    real* dbeta;  // NULL without beta
    const real* dout;
} ScanTokenGradients;

static inline ScanTokenGradients scan_gradients(const ScanBackward* g, const ScanShape* s, const ScanPiece* p,
                                                int64_t t) {
    int64_t bt = p->b * s->T + t, i = bt * s->NH + p->h, part = i * scan_pieces(s->V) + p->piece;
    ScanTokenGradients at = {.dq = g->dq_parts + part * s->K,
                             .dk = g->dk_parts + part * s->K,
                             .dv = g->dv + bt * s->value_row + p->h * s->V + p->column,
                             .ddecay = s->decay_width ? g->ddecay_parts + part * s->decay_width : NULL,
                             .dbeta = g->dbeta_parts ? g->dbeta_parts + part : NULL,
                             .dout = g->dout + i * s->V + p->column};
    return at;
}

// Turns dS [K, n], the gradient of the state after the token, into that of the state before it.
static inline void scan_step_backward(real* dS, const ScanTokenGradients* g, const real* before,
                                      const real* after, const real* error, const ScanToken* x,
                                      const ScanShape* s, int64_t n) {
    real u[COLUMNS];
    const real beta = g->dbeta ? x->beta : 1;
    for (int64_t j = 0; j < n; j++) u[j] = g->dbeta ? beta * error[j] : x->v[j];
    memset(g->dv, 0, (size_t)n * sizeof(real));
    for (int64_t c = 0; c < s->K; c++) {
        real *row = dS + c * n, query = s->scale * x->q[c];
        for (int64_t j = 0; j < n; j++) {
            row[j] += query * g->dout[j];
            g->dv[j] += x->k[c] * row[j];
        }
        g->dq[c] = s->scale * dot(after + c * n, g->dout, n);
        g->dk[c] = dot(row, u, n);
    }
    if (g->dbeta) *g->dbeta = dot(error, g->dv, n);
    for (int64_t j = 0; j < n; j++) g->dv[j] *= beta;
    if (g->ddecay) g->ddecay[0] = 0;
    for (int64_t c = 0; c < s->K; c++) {
        const real* old = before + c * n;
        real *row = dS + c * n, decay = x->decay[c * x->decay_step];
        if (g->dbeta) {
            g->dk[c] -= decay * dot(old, g->dv, n);
            for (int64_t j = 0; j < n; j++) row[j] -= x->k[c] * g->dv[j];
        }
        if (!g->ddecay) continue;
        if (x->decay_step)
            g->ddecay[c] = dot(row, old, n);
        else
            g->ddecay[0] += dot(row, old, n);
        for (int64_t j = 0; j < n; j++) row[j] *= decay;
    }
}

// Writes the gradients in g. r has the checkpoints of the forward pass.
static inline void scan_backward(const ScanBackward* g, const Scan* r, const ScanShape* s) {
    int64_t K = s->K, V = s->V, pieces = s->B * s->NH * scan_pieces(V), segments = scan_segments(s->T);
#pragma omp parallel
    {
        // states [SEGMENT + 1, K, n] before and after each token of a segment, errors [SEGMENT, n], dS
        // [K, n], and zeros [K, n], the state before a document
        real* states =
            (real*)xcalloc((size_t)((SEGMENT + 3) * K * COLUMNS + SEGMENT * COLUMNS), sizeof(real));
        const real* zeros = states + (SEGMENT + 2) * K * COLUMNS + SEGMENT * COLUMNS;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < pieces; i++) {
            const ScanPiece p = scan_piece(s, i);
            int64_t n = p.width, size = K * n;
            real *dS = states + (SEGMENT + 1) * size, *errors = dS + size;
            memset(dS, 0, (size_t)size * sizeof(real));
            for (int64_t segment = segments - 1; segment >= 0; segment--) {
                int64_t first = segment * SEGMENT, count = min64(SEGMENT, s->T - first);
                scan_load(states, r->checkpoints + ((p.b * s->NH + p.h) * segments + segment) * K * V, K, V,
                          &p);
                for (int64_t t = 0; t < count; t++) {
                    const ScanToken x = scan_token(r, s, &p, first + t);
                    const bool wall = is_wall(s->doc_start, p.b * s->T + first + t, s->T);
                    scan_step(states + (t + 1) * size, errors + t * n, wall ? zeros : states + t * size, &x,
                              K, n, r->beta != NULL);
                }
                for (int64_t t = count - 1; t >= 0; t--) {
                    const ScanToken x = scan_token(r, s, &p, first + t);
                    const ScanTokenGradients at = scan_gradients(g, s, &p, first + t);
                    const bool wall = is_wall(s->doc_start, p.b * s->T + first + t, s->T);
                    scan_step_backward(dS, &at, wall ? zeros : states + t * size, states + (t + 1) * size,
                                       errors + t * n, &x, s, n);
                    if (wall) memset(dS, 0, (size_t)size * sizeof(real));
                }
            }
        }
        free(states);
    }
}

// out [n] = the sum of `count` adjacent parts of n numbers: the pieces of a head, or those of all heads of a
// token where these share what it is the gradient of.
static inline void scan_sum(real* out, const real* parts, int64_t count, int64_t n) {
    memset(out, 0, (size_t)n * sizeof(real));
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < n; c++) out[c] += parts[i * n + c];
}

// Adds the sums over all tokens of terms [B T, NH] to the gradient of a parameter that is a number a head.
static inline void scan_add_heads(const Layer* layer, ParamKind kind, const real* terms) {
    int64_t NH = layer->config->num_heads, rows = layer->B * layer->T;
    real* grad = layer_grad(layer, kind);
#pragma omp parallel for schedule(static)
    for (int64_t h = 0; h < NH; h++) {
        double sum = 0;
        for (int64_t t = 0; t < rows; t++) sum += (double)terms[t * NH + h];
        grad[h] += (real)sum;
    }
}
