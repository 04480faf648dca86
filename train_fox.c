/*
Trains the Forgetting Transformer (FoX, arXiv 2503.02130) and its baselines on the CPU, in plain C.

This is the reference: the whole model is below, forward and backward, in the order in which it runs, and
train_fox.cu mirrors it in order and names. `real` is float, or double with -DREAL_IS_DOUBLE for checking
gradients.

Sizes: B sequences of T tokens, L layers, d channels, NH heads of dh = d / NH channels, KVH heads of keys and
values, kd = KVH dh, MLP width I, vocabulary V, R rows in the fused projection of q, k, v and all gates. A
tensor's shape is in a comment, last axis contiguous.

Work is cut into pieces that do not depend on the number of threads, and each sum has one fixed order, so a
run computes the same bits on any number of threads.
*/
#include <omp.h>

#include "llmc/baselines/deltanet/deltanet.h" // defines: deltanet_mixer
#include "llmc/baselines/hgrn2/hgrn2.h"       // defines: hgrn2_mixer
#include "llmc/baselines/mamba2/mamba2.h"     // defines: mamba2_mixer
#include "llmc/cpu/adamw.h"                   // defines: global_squares, clip_scale, adamw_update
#include "llmc/cpu/core_time.h"               // defines: CoreTime, core_time_now, CoreWatch
#include "llmc/cpu/layer.h"            // defines: Layer, Mixer, MIXER_ACTS, Norm, layer_linear, rmsnorm_*
#include "llmc/cpu/matmul.h"           // defines: Linear, linear_*, matmul_serial, rows_of, transpose_of
#include "llmc/cpu/memory.h"           // defines: memory_left
#include "llmc/cpu/threads.h"          // defines: threads_start
#include "llmc/cpu/vector.h"           // defines: real, dot, sigmoid, exp_real, rope_*, norm_*
#include "llmc/exchange/cpu.h"         // defines: exchange_sum, exchange_reduce_scatter, exchange_all_gather
#include "llmc/inference/cpu/extend.h" // defines: cache_*; includes Cache, paged_attention
#include "llmc/model/rotation.h"       // defines: config_rotation, config_rope_gain
#ifndef __CUDACC__
#pragma GCC push_options
#pragma GCC optimize("Og") // nothing of this is hot, and the file compiles in two thirds of the time
#endif
#include "llmc/train/main.h" // defines: run_main; includes Config, ParamTable, Run, Trainer
#ifndef __CUDACC__
#pragma GCC pop_options
#endif

// ----------------------------------------------------------------------------
// embedding: x_t = E[token_t]; x [rows, d], E [V, d]

static void embedding_forward(real* x, const int32_t* tokens, const real* embeddings, int64_t rows,
                              int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
        memcpy(x + t * d, embeddings + tokens[t] * d, (size_t)d * sizeof(real));
}

// Each piece is a range of channels: one thread adds all rows of equal tokens, in their order.
static void embedding_backward(real* dembeddings, const real* dx, const int32_t* tokens, int64_t rows,
                               int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < NUM_PIECES; piece++) {
        int64_t first = d * piece / NUM_PIECES, last = d * (piece + 1) / NUM_PIECES;
        for (int64_t t = 0; t < rows; t++)
            for (int64_t c = first; c < last; c++) dembeddings[tokens[t] * d + c] += dx[t * d + c];
    }
}

// ----------------------------------------------------------------------------
// from the fused projection to attention: shift, QK norm, RoPE
//
// q, k and v differ only in which of the three steps apply, and in their heads: a HeadPath describes one of
// them, and its shape is path_shape's.

typedef struct {
    int64_t column;     // first of q, k or v in a row of proj; head h starts at column + h dh
    int64_t shift;      // column of its shift gate's logits in proj, -1 without shift
    const real* weight; // QK norm's [d] or [dh], NULL without
    real* dweight;
    double eps; // QK norm's
    bool rope;
    real* out;  // [B, T, NH dh]
    real* rstd; // [B, T, NH], with QK norm
    real* dout; // [B, T, NH dh], overwritten by the backward pass
} HeadPath;

// The shape of the heads of path p: q, k or v.
static HeadShape path_shape(const HeadShape* s, int p) { return p == 0 ? *s : key_shape(s); }

// (1 - alpha) now + alpha before, where `before` is the previous token's, NULL at the first one.
static inline void shift_head(real* out, const real* now, const real* before, real alpha, int64_t dh) {
#pragma omp simd
    for (int64_t c = 0; c < dh; c++) out[c] = (1 - alpha) * now[c] + (before ? alpha * before[c] : 0);
}

// Computes head h of token i of B T. row and before are the rows of proj of this and the previous token,
// before is NULL where a document begins; angles is [dh/2, 2].
static void head_forward(const HeadPath* path, const HeadShape* s, int64_t i, int64_t h, const real* row,
                         const real* before, const real* angles) {
    int64_t column = path->column + h * s->dh;
    real* out = path->out + (i * s->NH + h) * s->dh;
    real alpha = path->shift >= 0 ? sigmoid(row[path->shift + h]) : 0;
    shift_head(out, row + column, before ? before + column : NULL, alpha, s->dh);
    if (path->weight)
        path->rstd[i * s->NH + h] =
            norm_forward(out, out, path->weight + h * s->weight_stride, s->dh, path->eps);
    if (path->rope) rope_rotate(out, angles, s->dh, 1);
}

// proj [B, T, R] -> each path's out and rstd; angles [T, dh/2, 2]. before_rows [B T] points at the row before
// each token's, NULL where none is; NULL in a pass over whole sequences, whose rows are all in proj.
static void qkv_forward(const HeadPath paths[3], const real* proj, const real* const* before_rows,
                        const real* angles, const HeadShape* s) {
    const HeadShape shapes[] = {path_shape(s, 0), path_shape(s, 1), path_shape(s, 2)};
#pragma omp parallel for schedule(static)
    for (int64_t bt = 0; bt < s->B * s->T; bt++) {
        int64_t t = bt % s->T;
        const real *row = proj + bt * s->row_stride,
                   *before = begins_document(s->doc_start, bt, s->T) ? NULL : row - s->row_stride;
        if (before_rows) before = before_rows[bt];
        for (int p = 0; p < 3; p++)
            for (int64_t h = 0; h < shapes[p].NH; h++)
                head_forward(&paths[p], &shapes[p], bt, h, row, before, angles + t * s->dh);
    }
}

// Adds the sums of each (batch, head), partial [B, NH, dh], to a norm's weight gradient.
static void add_head_partials(real* dweight, const real* partial, const HeadShape* s, int64_t weight_stride) {
    for (int64_t i = 0; i < s->B * s->NH; i++)
        for (int64_t c = 0; c < s->dh; c++) dweight[i % s->NH * weight_stride + c] += partial[i * s->dh + c];
}

// Writes the columns of dproj that the path reads, from path->dout, and adds to path->dweight. Time runs
// backward: `later` [dh] is the gradient that the shift of token t+1 adds to row t. partial is scratch:
// [B, NH, dh] of the weight's gradient, then [B, NH, 2, dh] of later and shifted.
static void head_backward(const HeadPath* path, real* dproj, const real* proj, const real* angles,
                          real* partial, const HeadShape* s) {
    int64_t T = s->T, dh = s->dh;
    real* scratch = partial + s->B * s->NH * dh;
    memset(partial, 0, (size_t)(s->B * s->NH * dh) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s->B * s->NH; i++) {
        int64_t b = i / s->NH, h = i % s->NH, column = path->column + h * dh;
        real *later = scratch + 2 * i * dh, *shifted = later + dh;
        memset(later, 0, (size_t)dh * sizeof(real));
        for (int64_t t = T - 1; t >= 0; t--) {
            int64_t bt = b * T + t;
            const real *row = proj + bt * s->row_stride, *now = row + column,
                       *before = begins_document(s->doc_start, bt, T) ? NULL : now - s->row_stride;
            real *dout = path->dout + (bt * s->NH + h) * dh, *drow = dproj + bt * s->row_stride;
            real alpha = path->shift >= 0 ? sigmoid(row[path->shift + h]) : 0;
            if (path->rope) rope_rotate(dout, angles + t * dh, dh, -1);
            if (path->weight) {
                shift_head(shifted, now, before, alpha, dh);
                norm_backward(dout, partial + i * dh, dout, shifted, path->weight + h * s->weight_stride,
                              path->rstd[bt * s->NH + h], dh, false);
            }
            real dalpha = 0;
#pragma omp simd reduction(+ : dalpha)
            for (int64_t c = 0; c < dh; c++) {
                drow[column + c] = (1 - alpha) * dout[c] + later[c];
                dalpha += dout[c] * ((before ? before[c] : 0) - now[c]);
                later[c] = before ? alpha * dout[c] : 0;
            }
            if (path->shift >= 0) drow[path->shift + h] = dalpha * alpha * (1 - alpha);
        }
    }
    if (path->weight) add_head_partials(path->dweight, partial, s, s->weight_stride);
}

// proj's columns of q, k, v and the shift gates: writes dproj from each path's dout, which it overwrites, and
// adds to its dweight. partial [3 B NH dh] is scratch.
static void qkv_backward(const HeadPath paths[3], real* dproj, const real* proj, const real* angles,
                         real* partial, const HeadShape* s) {
    for (int p = 0; p < 3; p++) {
        const HeadShape shape = path_shape(s, p);
        head_backward(&paths[p], dproj, proj, angles, partial, &shape);
    }
}

// ----------------------------------------------------------------------------
// forget gate: logf_t = logsigmoid(z_t + bias), cum_logf_t = logf_0 + ... + logf_t, in double for both types
// of real
//
// z [B, T, R] points at the gate's column of proj; NULL where the gate has only a bias. A document's first
// token has logf WALL_LOGF instead, which has no gradient: dlogf_t sums dcum_logf up to the end of t's
// document alone.

static void forget_gate_forward(double* cum_logf, const real* z, const real* bias, const HeadShape* s) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s->B * s->NH; i++) {
        int64_t b = i / s->NH, h = i % s->NH;
        double sum = 0;
        for (int64_t t = 0; t < s->T; t++) {
            real logit = (z ? z[(b * s->T + t) * s->row_stride + h] : 0) + bias[h];
            sum += is_wall(s->doc_start, b * s->T + t, s->T) ? WALL_LOGF : (double)log_sigmoid(logit);
            cum_logf[i * s->T + t] = sum;
        }
    }
}

// dlogf_t = dcum_logf_t + ... + dcum_logf_{T-1}, dz = dlogf sigmoid(-z). partial [B, NH] is scratch.
static void forget_gate_backward(real* dz, real* dbias, const double* dcum_logf, const real* z,
                                 const real* bias, real* partial, const HeadShape* s) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s->B * s->NH; i++) {
        int64_t b = i / s->NH, h = i % s->NH;
        double dlogf = 0, sum = 0;
        for (int64_t t = s->T - 1; t >= 0; t--) {
            int64_t at = (b * s->T + t) * s->row_stride + h;
            real logit = (z ? z[at] : 0) + bias[h];
            dlogf = is_wall(s->doc_start, b * s->T + t, s->T) ? 0 : dlogf + dcum_logf[i * s->T + t];
            double dlogit = dlogf * (double)sigmoid(-logit);
            if (z) dz[at] = (real)dlogit;
            sum += dlogit;
        }
        partial[i] = (real)sum;
    }
    for (int64_t i = 0; i < s->B * s->NH; i++) dbias[i % s->NH] += partial[i];
}

// ----------------------------------------------------------------------------
// attention: o_i = sum_j softmax_j(q_i k_j / sqrt(dh) + cum_logf_i - cum_logf_j) v_j over j <= i, with a
// window of W keys over i - W < j <= i, with documents over doc_start_i <= j <= i
//
// In tiles of TILE x TILE scores with a running maximum and sum (online softmax), so memory is linear in T.
// The gate's bias is the difference of two doubles, computed for each pair: cum_logf falls to -1e5 and below,
// where a float resolves only 2^-7.

enum { TILE = 128 };

typedef struct {
    real* o;                // [B, T, NH, dh]
    real* lse;              // [B, NH, T], log of each row's sum of exponentials
    const real *q, *k, *v;  // [B, T, NH, dh], k and v [B, T, KVH, dh]
    const double* cum_logf; // [B, NH, T], NULL without gate
} AttentionForward;

typedef struct {
    real *dq, *dk, *dv;              // as q, k and v
    double* dcum_logf;               // [B, NH, T], NULL without gate
    const real* dout;                // gradient of o
    const real *q, *k, *v, *o, *lse; // of the forward pass
    const double* cum_logf;
} AttentionBackward;

// The first key that query i of head `head` of B NH sees.
static inline int64_t first_key(const HeadShape* s, int64_t head, int64_t i) {
    int64_t key = head_first_key(s, i), document = s->doc_start ? s->doc_start[head / s->NH * s->T + i] : 0;
    return document > key ? document : key;
}

// The first tile of keys that the tile of queries from i0 on sees.
static inline int64_t first_key_tile(const HeadShape* s, int64_t head, int64_t i0) {
    return first_key(s, head, i0) / TILE * TILE;
}

// The first element of k and v that query head `head` of B NH reads.
static inline int64_t key_base(const HeadShape* s, int64_t head) {
    return head / s->NH * s->T * key_heads(s) * s->dh + head % s->NH / head_group(s) * s->dh;
}

// A tile's part of cum_logf from token t on; zeros without gate, so that loops over it have no branch.
static inline const double* tile_logf(const double* cum_logf, int64_t t) {
    static const double no_gate[TILE] = {0};
    return cum_logf ? cum_logf + t : no_gate;
}

// One tile of m queries from i0 on, over all its keys.
static void attention_forward_tile(const AttentionForward* a, const HeadShape* s, int64_t head, int64_t i0) {
    static _Thread_local real scores[TILE * TILE];
    real row_max[TILE], row_sum[TILE], scale = (real)(1 / sqrt((double)s->dh));
    int64_t T = s->T, dh = s->dh, d = s->NH * dh, kd = key_heads(s) * dh, m = min64(TILE, T - i0),
            first = first_key_tile(s, head, i0);
    int64_t base = head / s->NH * T * d + head % s->NH * dh, keys_base = key_base(s, head);
    const double* cum_logf = a->cum_logf ? a->cum_logf + head * T : NULL;
    real* o = a->o + base + i0 * d;
    for (int64_t i = 0; i < m; i++) {
        row_max[i] = -INFINITY;
        row_sum[i] = 0;
    }
    for (int64_t j0 = first; j0 <= i0; j0 += TILE) {
        const double *logf = tile_logf(cum_logf, i0), *key_logf = tile_logf(cum_logf, j0);
        int64_t n = min64(TILE, T - j0);
        matmul_serial(scores, TILE, rows_of(a->q + base + i0 * d, d),
                      transpose_of(a->k + keys_base + j0 * kd, kd), m, n, dh, false);
        for (int64_t i = 0; i < m; i++) {
            real *row = scores + i * TILE, highest = row_max[i], total = 0;
            int64_t keys = min64(n, i0 + i - j0 + 1);        // those not in the future
            int64_t begin = first_key(s, head, i0 + i) - j0; // of the window and the document
            for (int64_t j = 0; j < min64(begin, n); j++) row[j] = 0;
            if (begin >= keys) continue; // the row sees none of them
            begin = begin < 0 ? 0 : begin;
#pragma omp simd reduction(max : highest)
            for (int64_t j = begin; j < keys; j++) {
                row[j] = scale * row[j] + (real)(logf[i] - key_logf[j]);
                highest = row[j] > highest ? row[j] : highest;
            }
#pragma omp simd reduction(+ : total)
            for (int64_t j = begin; j < keys; j++) {
                row[j] = exp_real(row[j] - highest);
                total += row[j];
            }
            for (int64_t j = keys; j < n; j++) row[j] = 0;
            real rescale = exp_real(row_max[i] - highest);
            row_sum[i] = row_sum[i] * rescale + total;
            row_max[i] = highest;
            if (j0 > first)
                for (int64_t x = 0; x < dh; x++) o[i * d + x] *= rescale;
        }
        matmul_serial(o, d, rows_of(scores, TILE), rows_of(a->v + keys_base + j0 * kd, kd), m, dh, n,
                      j0 > first);
    }
    for (int64_t i = 0; i < m; i++) {
        for (int64_t x = 0; x < dh; x++) o[i * d + x] /= row_sum[i];
        a->lse[head * T + i0 + i] = row_max[i] + (real)log((double)row_sum[i]);
    }
}

static void attention_forward(const AttentionForward* a, const HeadShape* s) {
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t head = 0; head < s->B * s->NH; head++)
        for (int64_t i0 = 0; i0 < s->T; i0 += TILE) attention_forward_tile(a, s, head, i0);
}

// What a tile of the backward pass computes: dq and the queries' part of dcum_logf, dk, dv and the keys'
// part, or all.
enum { OF_QUERIES = 1, OF_KEYS = 2 };

// Queries from i0 and keys from j0 on. The first tile that reaches these keys, on the diagonal of the first
// head that reads them, writes dk and dv; later ones add. key_sums [TILE] += sums of ds over the queries.
static void attention_backward_tile(const AttentionBackward* a, const HeadShape* s, int64_t head, int64_t i0,
                                    int64_t j0, int parts, double* key_sums) {
    static _Thread_local real p[TILE * TILE], ds[TILE * TILE];
    int64_t T = s->T, dh = s->dh, d = s->NH * dh, kd = key_heads(s) * dh, m = min64(TILE, T - i0),
            n = min64(TILE, T - j0);
    int64_t at_i = head / s->NH * T * d + head % s->NH * dh + i0 * d, at_j = key_base(s, head) + j0 * kd;
    bool add = i0 > j0 || head % head_group(s) > 0;
    const double* cum_logf = a->cum_logf ? a->cum_logf + head * T : NULL;
    const double *logf = tile_logf(cum_logf, i0), *key_logf = tile_logf(cum_logf, j0);
    real scale = (real)(1 / sqrt((double)dh));
    matmul_serial(p, TILE, rows_of(a->q + at_i, d), transpose_of(a->k + at_j, kd), m, n, dh, false);
    matmul_serial(ds, TILE, rows_of(a->dout + at_i, d), transpose_of(a->v + at_j, kd), m, n, dh, false);
    for (int64_t i = 0; i < m; i++) {
        real *p_row = p + i * TILE, *ds_row = ds + i * TILE, total = 0;
        real lse = a->lse[head * T + i0 + i];
        real delta = dot(a->dout + at_i + i * d, a->o + at_i + i * d, dh);
        int64_t keys = min64(n, i0 + i - j0 + 1), begin = first_key(s, head, i0 + i) - j0;
        begin = begin < 0 ? 0 : min64(begin, n);
        for (int64_t j = 0; j < begin; j++) p_row[j] = ds_row[j] = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t j = begin; j < keys; j++) {
            real weight = exp_real(scale * p_row[j] + (real)(logf[i] - key_logf[j]) - lse);
            real gradient = weight * (ds_row[j] - delta);
            p_row[j] = weight;
            ds_row[j] = gradient * scale;
            key_sums[j] += (double)gradient;
            total += gradient;
        }
        for (int64_t j = keys; j < n; j++) p_row[j] = ds_row[j] = 0;
        if (a->dcum_logf && parts & OF_QUERIES) a->dcum_logf[head * T + i0 + i] += (double)total;
    }
    if (parts & OF_KEYS) {
        matmul_serial(a->dv + at_j, kd, transpose_of(p, TILE), rows_of(a->dout + at_i, d), n, dh, m, add);
        matmul_serial(a->dk + at_j, kd, transpose_of(ds, TILE), rows_of(a->q + at_i, d), n, dh, m, add);
    }
    if (parts & OF_QUERIES)
        matmul_serial(a->dq + at_i, d, rows_of(ds, TILE), rows_of(a->k + at_j, kd), m, dh, n,
                      j0 > first_key_tile(s, head, i0));
}

// The keys from j0 on, over all tiles of queries of a head that see them.
static void attention_backward_keys(const AttentionBackward* a, const HeadShape* s, int64_t head, int64_t j0,
                                    int parts) {
    double key_sums[TILE] = {0};
    for (int64_t i0 = j0; i0 < s->T && first_key_tile(s, head, i0) <= j0; i0 += TILE)
        attention_backward_tile(a, s, head, i0, j0, parts, key_sums);
    for (int64_t j = j0; a->dcum_logf && j < min64(s->T, j0 + TILE); j++)
        a->dcum_logf[head * s->T + j] -= key_sums[j - j0];
}

// The queries from i0 on, over all tiles of keys that they see.
static void attention_backward_queries(const AttentionBackward* a, const HeadShape* s, int64_t head,
                                       int64_t i0) {
    double key_sums[TILE] = {0};
    for (int64_t j0 = first_key_tile(s, head, i0); j0 <= i0; j0 += TILE)
        attention_backward_tile(a, s, head, i0, j0, OF_QUERIES, key_sums);
}

// With p = exp(score - lse), delta_i = do_i o_i and ds = p (do_i v_j - delta_i):
//   dv_j = sum_i p do_i,  dq_i = sum_j ds k_j / sqrt(dh),  dk_j = sum_i ds q_i / sqrt(dh),
//   dcum_logf_i = sum_j ds_ij - sum_j ds_ji
// A task is all heads of queries that read one head of keys: 5 GEMMs a tile. Where the tasks are too few, or
// too uneven, for the threads, a task is a tile: first those of queries (dq), then those of keys (dk, dv).
// Both compute the scores and their gradients, which makes 7 GEMMs a tile. Either way dk, dv, dq and
// dcum_logf are accumulated in one order, without atomics.
static void attention_backward(const AttentionBackward* a, const HeadShape* s) {
    const int64_t group = head_group(s), heads = s->B * s->NH, tasks = heads / group,
                  threads = omp_get_max_threads();
    if (a->dcum_logf) memset(a->dcum_logf, 0, (size_t)(heads * s->T) * sizeof(double));
    if (5 * ((tasks + threads - 1) / threads) * threads <= 7 * tasks) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t first = 0; first < heads; first += group)
            for (int64_t head = first; head < first + group; head++)
                for (int64_t j0 = 0; j0 < s->T; j0 += TILE)
                    attention_backward_keys(a, s, head, j0, OF_QUERIES | OF_KEYS);
        return;
    }
    const int64_t tiles = (s->T + TILE - 1) / TILE;
#pragma omp parallel
    {
        // those with most work first
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t tile = tiles - 1; tile >= 0; tile--)
            for (int64_t head = 0; head < heads; head++) attention_backward_queries(a, s, head, tile * TILE);
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t first = 0; first < heads; first += group)
                for (int64_t head = first; head < first + group; head++)
                    attention_backward_keys(a, s, head, tile * TILE, OF_KEYS);
    }
}

// ----------------------------------------------------------------------------
// output norm and gate, each of them optional: y = RMSNorm(o) over each head's channels, times sigmoid(g);
// o, y and their gradients [B, T, NH, dh]

typedef struct {
    const real* weight; // [d], NULL without norm
    real* dweight;
    real* rstd;       // [B, T, NH], with norm
    const real* gate; // column of proj [B, T, R], NULL without gate
    real* dgate;      // the same column of dproj
    double eps;
} OutputGate;

static void output_gate_forward(real* y, const real* o, const OutputGate* g, const HeadShape* s) {
    int64_t dh = s->dh;
#pragma omp parallel for schedule(static)
    for (int64_t bt = 0; bt < s->B * s->T; bt++)
        for (int64_t h = 0; h < s->NH; h++) {
            int64_t i = bt * s->NH + h;
            if (g->weight)
                g->rstd[i] = norm_forward(y + i * dh, o + i * dh, g->weight + h * dh, dh, g->eps);
            else
                memcpy(y + i * dh, o + i * dh, (size_t)dh * sizeof(real));
            if (!g->gate) continue;
#pragma omp simd
            for (int64_t c = 0; c < dh; c++)
                y[i * dh + c] *= sigmoid(g->gate[bt * s->row_stride + h * dh + c]);
        }
}

// Writes dout, the gradient of o, and dgate, from dy. partial [B, NH, dh] is scratch.
static void output_gate_backward(real* dout, const real* dy, const real* o, const OutputGate* g,
                                 real* partial, const HeadShape* s) {
    int64_t dh = s->dh;
    memset(partial, 0, (size_t)(s->B * s->NH * dh) * sizeof(real));
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < s->B * s->NH; head++)
        for (int64_t t = 0; t < s->T; t++) {
            int64_t h = head % s->NH, bt = head / s->NH * s->T + t, i = bt * s->NH + h;
            const real *out = o + i * dh, *w = g->weight ? g->weight + h * dh : NULL;
            real *dnormed = dout + i * dh, rstd = w ? g->rstd[i] : 1;
            if (g->gate) {
                const real* gate = g->gate + bt * s->row_stride + h * dh;
                real* dgate = g->dgate + bt * s->row_stride + h * dh;
#pragma omp simd
                for (int64_t c = 0; c < dh; c++) {
                    real open = sigmoid(gate[c]), normed = w ? out[c] * rstd * w[c] : out[c];
                    dgate[c] = dy[i * dh + c] * normed * open * (1 - open);
                    dnormed[c] = dy[i * dh + c] * open;
                }
            } else {
                memcpy(dnormed, dy + i * dh, (size_t)dh * sizeof(real));
            }
            if (w) norm_backward(dnormed, partial + head * dh, dnormed, out, w, rstd, dh, false);
        }
    if (g->weight) add_head_partials(g->dweight, partial, s, dh);
}

// ----------------------------------------------------------------------------
// the attention mixer: out = residual + Wo output_gate(attention(qkv(in)))

// clang-format off
// type, name, kept for every layer, elements of a layer
#define ATTENTION_ACTS(X) \
    X(real, proj, true, BT * R)              /* [L,B,T,R] q~ k~ v~, output gate, forget gate, shift gates */ \
    X(real, q, true, BT * d)                 /* [L,B,T,d] after shift, norm and RoPE, like k and v */ \
    X(real, k, true, BT * kd)                /* [L,B,T,kd] */ \
    X(real, v, true, BT * kd)                /* [L,B,T,kd] */ \
    X(real, q_rstd, true, BT * NH)           /* [L,B,T,NH] */ \
    X(real, k_rstd, true, BT * KVH)          /* [L,B,T,KVH] */ \
    X(double, cum_logf, true, gated * BT * NH) /* [L,B,NH,T] */ \
    X(real, lse, true, BT * NH)              /* [L,B,NH,T] */ \
    X(real, o, true, BT * d)                 /* [L,B,T,d] output of attention */ \
    X(real, o_rstd, true, BT * NH)           /* [L,B,T,NH] */ \
    X(real, y, true, BT * d)                 /* [L,B,T,d] after output norm and gate */ \
    X(real, angles, false, T * dh)           /* [T,dh/2,2] of RoPE */ \
    X(real, dproj, false, BT * R)            /* [B,T,R] */ \
    X(real, dq, false, BT * d)               /* [B,T,d] */ \
    X(real, dk, false, BT * kd)              /* [B,T,kd] */ \
    X(real, dv, false, BT * kd)              /* [B,T,kd] */ \
    X(real, dout, false, BT * d)             /* [B,T,d] of o */ \
    X(double, dcum_logf, false, gated * BT * NH) /* [B,NH,T] */

// clang-format on

typedef struct {
    ATTENTION_ACTS(ACTIVATION_FIELD)
} AttentionActs;

static void attention_activations(Activations* rows, const Layer* layer, bool train) {
    (void)train;
    const Config* config = layer->config;
    int64_t T = layer->T, BT = layer->B * T, d = config->hidden_size, NH = config->num_heads,
            dh = config_head_size(config);
    int64_t KVH = config_key_heads(config), kd = KVH * dh;
    int64_t R = layer_proj(layer).rows, gated = config_has_gate(config);
    ATTENTION_ACTS(ACTIVATION_ROW)
}

#undef ATTENTION_ACTS

MIXER_ACTS(AttentionActs, attention_acts)

// Called once after allocation: fills tensors that passes only read.
static void attention_init(const Layer* layer) {
    AttentionActs a = attention_acts(layer);
    const Rotation rotation = config_rotation(layer->config);
    int64_t dh = config_head_size(layer->config);
    if (!config_uses_rope(layer->config)) return; // does any layer? this is called for the first alone
    for (int64_t t = 0; t < layer->T; t++) rope_angles(a.angles + t * dh, t, dh, &rotation);
}

static HeadShape attention_shape_of(const Layer* layer) {
    int64_t dh = config_head_size(layer->config), R = layer_proj(layer).rows;
    HeadShape s = {.B = layer->B,
                   .T = layer->T,
                   .NH = layer->config->num_heads,
                   .dh = dh,
                   .columns = R,
                   .row_stride = R,
                   .weight_stride = layer->config->qk_norm_share ? 0 : dh,
                   .window = layer->config->window_size,
                   .doc_start = layer->doc_start,
                   .KVH = config_key_heads(layer->config)};
    return s;
}

// Fills the three paths: how q, k and v get from proj to attention.
static void attention_paths(const Layer* layer, const AttentionActs* a, HeadPath paths[3]) {
    const ParamTable* table = layer->table;
    memset(paths, 0, 3 * sizeof paths[0]);
    HeadPath *q = &paths[0], *k = &paths[1], *v = &paths[2];
    q->column = params_column(table, P_Q_PROJ, layer->l);
    k->column = params_column(table, P_K_PROJ, layer->l);
    v->column = params_column(table, P_V_PROJ, layer->l);
    q->shift = -1;
    k->shift = params_column(table, P_K_SHIFT, layer->l);
    v->shift = params_column(table, P_V_SHIFT, layer->l);
    q->weight = layer_param(layer, P_Q_NORM);
    q->dweight = layer_grad(layer, P_Q_NORM);
    k->weight = layer_param(layer, P_K_NORM);
    k->dweight = layer_grad(layer, P_K_NORM);
    q->eps = k->eps = QK_NORM_EPS;
    q->rope = k->rope = layer->config->use_rope;
    q->out = a->q;
    k->out = a->k;
    v->out = a->v;
    q->rstd = a->q_rstd;
    k->rstd = a->k_rstd;
    q->dout = a->dq;
    k->dout = a->dk;
    v->dout = a->dv;
}

// A tensor's first column in proj or dproj; NULL where the model has no such tensor, or the pass no dproj.
static inline real* proj_column(const Layer* layer, real* proj, ParamKind kind) {
    int64_t column = params_column(layer->table, kind, layer->l);
    return proj && column >= 0 ? proj + column : NULL;
}

static OutputGate attention_output_gate(const Layer* layer, real* rstd, real* proj, real* dproj) {
    const real* weight = layer_param(layer, P_OUTPUT_NORM);
    OutputGate g = {.weight = weight,
                    .dweight = layer_grad(layer, P_OUTPUT_NORM),
                    .rstd = rstd,
                    .gate = proj_column(layer, proj, P_OGATE_PROJ),
                    .dgate = proj_column(layer, dproj, P_OGATE_PROJ),
                    .eps = layer->config->norm_eps};
    return g;
}

static void attention_mixer_forward(const Layer* layer, real* out, const real* in, const real* residual) {
    AttentionActs a = attention_acts(layer);
    HeadShape shape = attention_shape_of(layer);
    HeadPath paths[3];
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);
    OutputGate output_gate = attention_output_gate(layer, a.o_rstd, a.proj, NULL);
    AttentionForward attention = {
        .o = a.o, .lse = a.lse, .q = a.q, .k = a.k, .v = a.v, .cum_logf = a.cum_logf};
    attention_paths(layer, &a, paths);

    linear_forward(a.proj, in, NULL, &in_proj);
    qkv_forward(paths, a.proj, NULL, a.angles, &shape);
    if (a.cum_logf)
        forget_gate_forward(a.cum_logf, proj_column(layer, a.proj, P_FGATE_PROJ),
                            layer_param(layer, P_FGATE_BIAS), &shape);
    attention_forward(&attention, &shape);
    output_gate_forward(a.y, a.o, &output_gate, &shape);
    linear_forward(out, a.y, residual, &o_proj);
}

// Writes din, the gradient of `in`; din first holds the gradient of y.
static void attention_mixer_backward(const Layer* layer, real* din, const real* dout, const real* in) {
    AttentionActs a = attention_acts(layer);
    HeadShape shape = attention_shape_of(layer);
    HeadPath paths[3];
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);
    OutputGate output_gate = attention_output_gate(layer, a.o_rstd, a.proj, a.dproj);
    AttentionBackward attention = {.dq = a.dq,
                                   .dk = a.dk,
                                   .dv = a.dv,
                                   .dcum_logf = a.dcum_logf,
                                   .dout = a.dout,
                                   .q = a.q,
                                   .k = a.k,
                                   .v = a.v,
                                   .o = a.o,
                                   .lse = a.lse,
                                   .cum_logf = a.cum_logf};
    attention_paths(layer, &a, paths);

    linear_backward(din, dout, a.y, &o_proj);
    output_gate_backward(a.dout, din, a.o, &output_gate, layer->partial, &shape);
    attention_backward(&attention, &shape);
    if (a.cum_logf)
        forget_gate_backward(proj_column(layer, a.dproj, P_FGATE_PROJ), layer_grad(layer, P_FGATE_BIAS),
                             a.dcum_logf, proj_column(layer, a.proj, P_FGATE_PROJ),
                             layer_param(layer, P_FGATE_BIAS), layer->partial, &shape);
    qkv_backward(paths, a.dproj, a.proj, a.angles, layer->partial, &shape);
    linear_backward(din, a.dproj, in, &in_proj);
}

// out = in + mixer(norm(in)) of the rows of a cache's pass, which attend to the cache.
static void attention_mixer_extend(const Layer* layer, Cache* cache, real* out, const real* in) {
    const Extension* e = cache->pass;
    AttentionActs a = attention_acts(layer);
    HeadShape shape = attention_shape_of(layer);
    HeadPath paths[3];
    Linear in_proj = layer_in_proj(layer), o_proj = layer_linear(layer, P_O_PROJ);
    OutputGate output_gate = attention_output_gate(layer, a.o_rstd, a.proj, NULL);
    PagedAttention attention = {.config = layer->config,
                                .o = a.o,
                                .q = a.q,
                                .k = a.k,
                                .v = a.v,
                                .proj = a.proj,
                                .gate = proj_column(layer, a.proj, P_FGATE_PROJ),
                                .bias = layer_param(layer, P_FGATE_BIAS),
                                .q_weight = layer_param(layer, P_Q_NORM),
                                .k_weight = layer_param(layer, P_K_NORM)};
    const Rotation rotation = config_rotation(layer->config);
    attention_paths(layer, &a, paths);
    const bool fills_angles = layer->config->use_rope && !cache->has_angles; // once a pass, for all layers
    for (int64_t s = 0; fills_angles && s < e->sequences; s++)
        for (int64_t i = e->begins[s]; i < e->begins[s + 1]; i++)
            rope_angles(a.angles + i * shape.dh, cache_position(e, s, i), shape.dh, &rotation);
    cache->has_angles |= fills_angles;

    linear_forward(a.proj, extend_normed(layer, cache, in, P_MIXER_NORM), NULL, &in_proj);
    qkv_forward(paths, a.proj, cache_before(layer, cache, a.proj), a.angles, &shape);
    paged_attention(&attention, &shape, cache, layer->number);
    output_gate_forward(a.y, a.o, &output_gate, &shape);
    linear_forward(out, a.y, in, &o_proj);
}

static const Mixer attention_mixer = {
    .activations = attention_activations,
    .init = attention_init,
    .forward = attention_mixer_forward,
    .backward = attention_mixer_backward,
    .extend = attention_mixer_extend,
};

// ----------------------------------------------------------------------------
// mixers: out = residual + mixer(in), where `in` is the normed residual stream. What another kind needs
// beside a row here: dev/README.md, "A mixer".

static const Mixer* const mixers[] = {&attention_mixer, &deltanet_mixer, &hgrn2_mixer, &mamba2_mixer,
                                      &deltanet_mixer};
static_assert(sizeof mixers / sizeof mixers[0] == NUM_MIXERS, "in the order of MixerKind");

static const Mixer* mixer_of(const Layer* layer) { return mixers[layer->config->mixer]; }

// ----------------------------------------------------------------------------
// the MLP, SwiGLU: out = residual + Wd (silu(g) u), with g and u the two halves of gate_up = Wgu in

// act [rows, I] from gate_up [rows, 2I]
static void swiglu_forward(real* act, const real* gate_up, int64_t rows, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            real g = gate_up[t * 2 * I + i], u = gate_up[t * 2 * I + I + i];
            act[t * I + i] = g * sigmoid(g) * u;
        }
}

// dgate_up [rows, 2I] from dact [rows, I]
static void swiglu_backward(real* dgate_up, const real* dact, const real* gate_up, int64_t rows, int64_t I) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++)
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            real g = gate_up[t * 2 * I + i], u = gate_up[t * 2 * I + I + i], open = sigmoid(g);
            dgate_up[t * 2 * I + i] = dact[t * I + i] * u * open * (1 + g * (1 - open));
            dgate_up[t * 2 * I + I + i] = dact[t * I + i] * g * open;
        }
}

// type, name, kept for every layer, elements of a layer
#define MLP_ACTS(X)                                                                                          \
    X(real, gate_up, true, BT * 2 * I)   /* [L,B,T,2I] */                                                    \
    X(real, act, true, BT* I)            /* [L,B,T,I] */                                                     \
    X(real, dgate_up, false, BT * 2 * I) /* [B,T,2I] */                                                      \
    X(real, dact, false, BT* I)          /* [B,T,I] */

typedef struct {
    MLP_ACTS(ACTIVATION_FIELD)
} MlpActs;

static void mlp_activations(Activations* rows, const Layer* layer, bool train) {
    int64_t BT = layer->B * layer->T, I = config_mlp_size(layer->config);
    (void)train;
    MLP_ACTS(ACTIVATION_ROW)
}

#undef MLP_ACTS

static void mlp_forward(const Layer* layer, real* out, const real* in, const real* residual) {
    MlpActs a;
    Linear gate_up_proj = layer_gate_up_proj(layer), down_proj = layer_linear(layer, P_DOWN_PROJ);
    activations_layer(layer->mlp, layer->l, &a, sizeof a);
    linear_forward(a.gate_up, in, NULL, &gate_up_proj);
    swiglu_forward(a.act, a.gate_up, layer->B * layer->T, down_proj.K);
    linear_forward(out, a.act, residual, &down_proj);
}

static void mlp_backward(const Layer* layer, real* din, const real* dout, const real* in) {
    MlpActs a;
    Linear gate_up_proj = layer_gate_up_proj(layer), down_proj = layer_linear(layer, P_DOWN_PROJ);
    activations_layer(layer->mlp, layer->l, &a, sizeof a);
    linear_backward(a.dact, dout, a.act, &down_proj);
    swiglu_backward(a.dgate_up, a.dact, a.gate_up, layer->B * layer->T, down_proj.K);
    linear_backward(din, a.dgate_up, in, &gate_up_proj);
}

static const Mixer mlp = {.activations = mlp_activations, .forward = mlp_forward, .backward = mlp_backward};

// ----------------------------------------------------------------------------
// classifier: loss_t = -log softmax(logits_t)[target_t]; 0 where the target is TARGET_NONE. With `train`
// logits become the gradient of loss_t times dloss; else loss_t has a minus sign if its target is the
// likeliest token, of equally likely ones the first

// losses, targets [rows], logits [rows, V]
static void classifier(real* losses, real* logits, const int32_t* targets, int64_t rows, int64_t V,
                       real dloss, bool train) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        real *row = logits + t * V, highest = -INFINITY, sum = 0;
        losses[t] = 0;
        if (targets[t] == TARGET_NONE && train) memset(row, 0, (size_t)V * sizeof(real));
        if (targets[t] == TARGET_NONE) continue;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < V; i++) highest = row[i] > highest ? row[i] : highest;
        real target_logit = row[targets[t]] - highest;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < V; i++) {
            real e = exp_real(row[i] - highest);
            sum += e;
            row[i] = train ? e : row[i];
        }
        losses[t] = (real)log((double)sum) - target_logit;
        if (!train && find_number(row, highest, V) == targets[t]) losses[t] = -losses[t];
        if (!train) continue;
        for (int64_t i = 0; i < V; i++) row[i] *= dloss / sum;
        row[targets[t]] -= dloss;
    }
}

// ----------------------------------------------------------------------------
// the model

// clang-format off
// type, name, kept for every layer, elements of a layer
#define MODEL_ACTS(X) \
    X(real, x, true, BT * d)                   /* [L,B,T,d] residual stream that enters each block */ \
    X(real, mixer_rstd, true, BT)              /* [L,B,T] */ \
    X(real, mixer_in, true, BT * d)            /* [L,B,T,d] normed x */ \
    X(real, x_mid, true, BT * d)               /* [L,B,T,d] residual stream between mixer and MLP */ \
    X(real, mlp_rstd, true, BT)                /* [L,B,T] */ \
    X(real, mlp_in, true, BT * d)              /* [L,B,T,d] normed x_mid */ \
    X(real, x_last, false, BT * d)             /* [B,T,d] residual stream after the last block */ \
    X(int32_t, doc_start, false, resets * BT)  /* [B,T], with document_reset */ \
    X(real, rstd, false, BT)                   /* [B,T] of the final norm */ \
    X(real, lm_head_in, false, BT * d)         /* [B,T,d] normed x_last */ \
    X(real, losses, false, BT)                 /* [B,T] */ \
    X(real, logits, false, logit_rows * V)     /* [rows,V] of a chunk of rows, then their gradient */ \
    X(real, dx, false, BT * d)                 /* [B,T,d] gradient of the residual stream */ \
    X(real, dbranch, false, BT * d)            /* [B,T,d] gradient of a norm's output */ \
    X(real, partial, false, NUM_PIECES * d + 3 * B * d) /* pieces of sums over rows */
// clang-format on

typedef struct {
    MODEL_ACTS(ACTIVATION_FIELD)
} Acts;

typedef struct Model {
    Config config;
    ParamTable table;
    Shard shard;  // of the flat buffers; alone: all of them
    real* params; // flat buffer, as grads
    real* grads;
    real* m; // [shard_count] AdamW's two moments
    real* v;
    int64_t B, T; // the shape of a training pass
    Pass pass;
    Acts acts; // of layer 0

    // of a run
    int32_t *inputs, *targets; // [B,T], the loaded batch
    double loss;               // mean loss of the step so far, this rank's share
    StepSums sums;             // of the step, over all ranks
    double grad_norm;          // of the step
    bool own_finite;           // this rank's loss and gradient
    double began;              // the step, in seconds_now()
    CoreWatch core_watch;      // of its forward and backward passes
    World* world;              // the ranks
    real* scratch;             // [shard_largest_part] of an exchange through MPI
    RankTime* times;           // [ranks]
    double marks[NUM_MARKS];   // in seconds_now()
} Model;

static void model_activations(Activations* rows, const Config* config, int64_t B, int64_t T) {
    int64_t BT = B * T, d = config->hidden_size, V = config->vocab_size,
            logit_rows = layer_logit_rows(config, BT), resets = config->document_reset;
    MODEL_ACTS(ACTIVATION_ROW)
}

#undef MODEL_ACTS

// The model's own tensors of layer l.
static Acts pass_acts(const Pass* pass, int64_t l) {
    Acts a;
    activations_layer(&pass->tables[PASS_MODEL], l, &a, sizeof a);
    return a;
}

static Layer model_layer(const Model* model, const Pass* pass, int64_t l) {
    Layer layer = layer_of(&model->table, l, pass->B, pass->T);
    layer.params = model->params;
    layer.grads = model->grads;
    layer.mixer = &pass->tables[PASS_MIXER + layer.config->mixer];
    layer.mlp = &pass->tables[PASS_MLP];
    layer.doc_start = pass_acts(pass, 0).doc_start;
    layer.partial = pass_acts(pass, 0).partial;
    return layer;
}

// What a pass over [B, T] tokens needs; nothing is allocated.
static Pass pass_plan(const Config* config, const ParamTable* table, int64_t B, int64_t T) {
    Pass pass = {.B = B, .T = T};
    for (int64_t l = 0; l < config->num_hidden_layers; l++) {
        const Layer layer = layer_of(table, l, B, T);
        const MixerKind kind = layer.config->mixer;
        if (layer.number == 0) mixers[kind]->activations(&pass.tables[PASS_MIXER + kind], &layer, true);
        if (l == 0) mlp_activations(&pass.tables[PASS_MLP], &layer, true);
        pass.layers[PASS_MIXER + kind]++;
    }
    model_activations(&pass.tables[PASS_MODEL], config, B, T);
    pass.layers[PASS_MODEL] = pass.layers[PASS_MLP] = config->num_hidden_layers;
    return pass;
}

static void* allocate_zeros(size_t bytes) { return xcalloc(bytes, 1); }

// A model without activations, on one of several ranks: parameters for inference; with `train` also gradients
// and AdamW's moments.
static Model model_new(const Config* config, bool train, int rank, int ranks) {
    Model model = {.config = *config, .table = params_build_for(config, ranks)};
    model.shard = params_shard(&model.table, rank, ranks);
    size_t count = (size_t)model.table.count, owned = (size_t)shard_count(&model.shard);
    model.params = (real*)xcalloc(count, sizeof(real));
    if (!train) return model;
    model.grads = (real*)xcalloc(count, sizeof(real));
    model.m = (real*)xcalloc(owned, sizeof(real));
    model.v = (real*)xcalloc(owned, sizeof(real));
    model.times = (RankTime*)xcalloc((size_t)ranks, sizeof(RankTime));
    return model;
}

// Without gradients no backward pass follows: all layers share their activations.
static void model_allocate_activations(Model* model, int64_t B, int64_t T) {
    model->B = B;
    model->T = T;
    model->pass = pass_plan(&model->config, &model->table, B, T);
    pass_allocate(&model->pass, model->grads ? model->config.num_hidden_layers : 1, allocate_zeros);
    model->acts = pass_acts(&model->pass, 0);
    for (int64_t l = 0; l < model->config.num_hidden_layers; l++) {
        Layer layer = model_layer(model, &model->pass, l);
        if (layer.number == 0 && mixer_of(&layer)->init) mixer_of(&layer)->init(&layer);
    }
}

static void model_free(Model* model) {
    pass_free(&model->pass, free);
    free(model->params);
    free(model->grads);
    free(model->m);
    free(model->v);
    free(model->scratch);
    free(model->times);
    params_free(&model->table);
    memset(model, 0, sizeof *model);
}

// A tensor outside the layers, in a buffer of the table's layout.
static inline real* model_param(const Model* model, real* buffer, ParamKind kind) {
    return buffer ? buffer + params_find(&model->table, kind, 0)->offset : NULL;
}

// ----------------------------------------------------------------------------
// forward

// One block: acts.x of layer l -> that of the next one. A block without an MLP ends after its mixer.
static void block_forward(Model* model, int64_t l) {
    const Pass* pass = &model->pass;
    Layer layer = model_layer(model, pass, l);
    Acts a = pass_acts(pass, l);
    real* x_next = l + 1 < model->config.num_hidden_layers ? pass_acts(pass, l + 1).x : a.x_last;
    bool has_mlp = layer_param(&layer, P_GATE_PROJ) != NULL;
    Norm norm = layer_norm(&layer, P_MIXER_NORM, a.mixer_rstd);

    rmsnorm_forward(a.mixer_in, a.x, &norm);
    mixer_of(&layer)->forward(&layer, has_mlp ? a.x_mid : x_next, a.mixer_in, a.x);
    if (!has_mlp) return;
    norm = layer_norm(&layer, P_MLP_NORM, a.mlp_rstd);
    rmsnorm_forward(a.mlp_in, a.x_mid, &norm);
    mlp_forward(&layer, x_next, a.mlp_in, a.x_mid);
}

// The final norm, over acts.x_last.
static Norm model_final_norm(const Model* model, const Pass* pass) {
    Layer layer = model_layer(model, pass, 0);
    return layer_norm(&layer, P_NORM, pass_acts(pass, 0).rstd);
}

// Begins an optimizer step: its loss and gradients are zero.
static void model_begin_step(Model* model) {
    memset(model->grads, 0, (size_t)model->table.count * sizeof(real));
    model->loss = 0;
    model->began = seconds_now();
}

// inputs [B,T] -> acts.x of layer 0, and where documents begin
static void model_embed(const Model* model, const int32_t* inputs) {
    const Config* c = &model->config;
    find_documents(model->acts.doc_start, inputs, model->B, model->T, config_end_of_text(c));
    embedding_forward(model->acts.x, inputs, model_param(model, model->params, P_EMBEDDINGS),
                      model->B * model->T, c->hidden_size);
}

// inputs [B,T] -> acts.lm_head_in [B,T,d]
static void model_forward(Model* model, const int32_t* inputs) {
    const Acts* a = &model->acts;
    Norm norm = model_final_norm(model, &model->pass);
    model_embed(model, inputs);
    for (int64_t l = 0; l < model->config.num_hidden_layers; l++) block_forward(model, l);
    rmsnorm_forward(a->lm_head_in, a->x_last, &norm);
}

// Forward pass over one sequence, whose layers' heads are visited (llmc/run/trainer.h).
static void visit_heads(Model* model, const int32_t* tokens, HeadVisitor visit, void* context) {
    const Config* c = &model->config;
    double* limits = (double*)xcalloc((size_t)c->num_heads, sizeof *limits);
    model_embed(model, tokens);
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const Layer layer = model_layer(model, &model->pass, l);
        block_forward(model, l);
        if (layer.config->mixer != MIXER_ATTENTION) continue;
        const AttentionActs a = attention_acts(&layer);
        const real *q = layer_param(&layer, P_Q_NORM), *k = layer_param(&layer, P_K_NORM);
        const HeadShape s = attention_shape_of(&layer);
        for (int64_t h = 0; h < s.NH; h++)
            limits[h] = head_limit(q, k, &s, h, config_rope_gain(layer.config), c->pruning_rule);
        const LayerHeads heads = {a.q, a.k, a.cum_logf, s.window, limits};
        visit(context, layer.number, &heads);
    }
    free(limits);
}

// The vocabulary projection of some rows.
static Linear model_lm_head(const Model* model, int64_t rows) {
    const Config* c = &model->config;
    Linear linear = {model_param(model, model->params, P_LM_HEAD),
                     model_param(model, model->grads, P_LM_HEAD), rows, c->vocab_size, c->hidden_size};
    return linear;
}

// lm_head and cross entropy of the last forward pass, in chunks of rows: fills acts.losses [B,T] and returns
// their sum. With `train` also writes acts.dbranch, the gradient of lm_head_in, and adds to lm_head's; dloss
// is the weight of a token's loss. all_logits [B,T,V] gets a copy of the logits unless it is NULL.
static double model_loss(Model* model, const int32_t* targets, real dloss, bool train, real* all_logits) {
    const Acts* a = &model->acts;
    int64_t BT = model->B * model->T, d = model->config.hidden_size, V = model->config.vocab_size;
    int64_t chunk = layer_logit_rows(&model->config, BT);
    for (int64_t t = 0; t < BT; t += chunk) {
        Linear lm_head = model_lm_head(model, min64(chunk, BT - t));
        linear_forward(a->logits, a->lm_head_in + t * d, NULL, &lm_head);
        if (all_logits) memcpy(all_logits + t * V, a->logits, (size_t)(lm_head.rows * V) * sizeof(real));
        classifier(a->losses + t, a->logits, targets + t, lm_head.rows, V, dloss, train);
        if (train) linear_backward(a->dbranch + t * d, a->logits, a->lm_head_in + t * d, &lm_head);
    }
    double sum = 0;
    for (int64_t t = 0; t < BT; t++) sum += fabs((double)a->losses[t]);
    return sum;
}

// ----------------------------------------------------------------------------
// backward: adds to all gradients, after model_loss with `train`

// One block: acts.dx, the gradient of its output, becomes that of its input.
static void block_backward(Model* model, int64_t l) {
    Layer layer = model_layer(model, &model->pass, l);
    Acts a = pass_acts(&model->pass, l);
    if (layer_param(&layer, P_GATE_PROJ)) {
        Norm norm = layer_norm(&layer, P_MLP_NORM, a.mlp_rstd);
        mlp_backward(&layer, a.dbranch, a.dx, a.mlp_in);
        rmsnorm_backward(a.dx, a.dbranch, a.x_mid, &norm, a.partial);
    }
    Norm norm = layer_norm(&layer, P_MIXER_NORM, a.mixer_rstd);
    mixer_of(&layer)->backward(&layer, a.dbranch, a.dx, a.mixer_in);
    rmsnorm_backward(a.dx, a.dbranch, a.x, &norm, a.partial);
}

static void model_backward(Model* model, const int32_t* inputs) {
    const Acts* a = &model->acts;
    Norm norm = model_final_norm(model, &model->pass);
    memset(a->dx, 0, (size_t)(norm.rows * norm.d) * sizeof(real));
    rmsnorm_backward(a->dx, a->dbranch, a->x_last, &norm, a->partial);
    for (int64_t l = model->config.num_hidden_layers - 1; l >= 0; l--) block_backward(model, l);
    embedding_backward(model_param(model, model->grads, P_EMBEDDINGS), a->dx, inputs, norm.rows, norm.d);
}

// ----------------------------------------------------------------------------
// update

// Zeroes the gradients of frozen tensors: the global norm excludes them.
static void model_freeze(Model* model) {
    for (int r = 0; r < model->table.num_rows; r++) {
        const Param* p = &model->table.rows[r];
        if (!p->trainable) memset(model->grads + p->offset, 0, (size_t)p->count * sizeof(real));
    }
}

// Sum of squares of the rank's gradient: of all of it on one rank, of its shard on several.
static double model_squares(const Model* model) {
    double squares = 0;
    int parts = model->shard.size > 1 ? model->shard.num_buckets : 1;
    for (int b = 0; b < parts; b++) {
        ShardPart part = shard_part(&model->shard, b);
        int64_t count = parts > 1 ? part.count : model->table.count;
        squares += global_squares(model->grads + part.begin, count);
    }
    return squares;
}

// AdamW on the rank's shard.
static void model_update(Model* model, const AdamWParams* adamw, double grad_scale) {
    for (int r = 0; r < model->table.num_rows; r++) {
        const Param* p = &model->table.rows[r];
        if (!p->trainable) continue;
        AdamWParams of_tensor = *adamw;
        TensorRange range = tensor_range(p, &model->shard);
        int64_t flat = p->offset + range.first;
        if (!p->decays) of_tensor.weight_decay = 0;
        adamw_update(model->params + flat, model->m + range.local, model->v + range.local,
                     model->grads + flat, range.count, grad_scale, &of_tensor);
    }
}

// With several ranks: each gets its shard of the sum of gradients, and after the update all weights.
static void model_reduce_gradients(Model* model) {
    for (int b = model->shard.num_buckets - 1; model->shard.size > 1 && b >= 0; b--)
        exchange_reduce_scatter(model->world, model->grads, model->scratch, &model->shard, b, sizeof(real));
}
static void model_gather_weights(Model* model) {
    for (int b = 0; model->shard.size > 1 && b < model->shard.num_buckets; b++)
        exchange_all_gather(model->world, model->params, &model->shard, b, sizeof(real));
}

// The first tensor with a number that is not finite, for the message that stops the run; NULL: none.
static const char* model_first_not_finite(Model* model, bool gradients) {
    const Shard whole = params_shard(&model->table, 0, 1);
    const real* buffer = gradients ? model->grads : model->params;
    return shard_first_not_finite(&model->table, &whole, buffer, sizeof(real));
}

// ----------------------------------------------------------------------------
// inference (llmc/inference/cpu)

static Cache* cache_new(Model* model, const CacheSizes* sizes) {
    const Pass pass = pass_plan(&model->config, &model->table, 1, 1); // no memory: the cache has its own
    Layer layer = model_layer(model, &pass, 0);
    layer.grads = NULL;
    return cache_allocate(&model->config, &layer, mixers, &mlp, sizes);
}

#ifndef TESTING
// ----------------------------------------------------------------------------
// a step of a run: batches in, results out

static void load_batch(Model* model, DataLoader* data) {
    if (data) model->T = model->pass.T = data->options.seq_len; // at most that of trainer_open
    batch_read(model->inputs, model->targets, data, model->B * model->T, model->config.vocab_size);
}

static void add_gradients(Model* model, int64_t step_tokens, bool last) {
    (void)last; // update reduces them
    const CoreTime begin = core_time_now();
    real dloss = (real)(1 / (double)step_tokens);
    model_forward(model, model->inputs);
    model->loss += model_loss(model, model->targets, dloss, true, NULL) / (double)step_tokens;
    model_backward(model, model->inputs);
    core_watch_add(&model->core_watch, begin, core_time_now());
}

static void update(Model* model, const AdamWParams* adamw, double grad_clip, const StepVotes* votes) {
    const int ranks = model->shard.size;
    RankTime* own = &model->times[model->shard.rank];
    double computed = seconds_now();
    StepSums* sums = &model->sums;
    model_freeze(model);
    model_reduce_gradients(model);
    sums->loss = model->loss;
    sums->squares = model_squares(model);
    sums->votes = *votes;
    model->own_finite = isfinite(sums->loss) && isfinite(sums->squares);
    if (ranks > 1) {
        memset(model->times, 0, (size_t)ranks * sizeof(RankTime));
        own->computing = computed - model->began;
        own->waiting = seconds_now() - computed;
        exchange_sum(model->world, (double*)sums, sizeof *sums / sizeof(double));
        exchange_sum(model->world, (double*)model->times, RANK_TIMES * ranks);
    }
    const double scale = step_scale(&sums->votes);
    model->grad_norm = scale * sqrt(sums->squares);
    if (!step_is_valid(sums->loss, model->grad_norm, &sums->votes)) return;
    if (norm_is_spike(model->grad_norm, adamw->spike_norm)) return;
    model_update(model, adamw, scale * clip_scale(model->grad_norm, grad_clip));
    model_gather_weights(model);
}

static void finish_step(Model* model, LogStep* line) {
    line->loss = model->sums.loss * step_scale(&model->sums.votes);
    line->grad_norm = model->grad_norm;
    line->own_finite = model->own_finite;
    line->votes = model->sums.votes;
    line->ranks = model->shard.size;
    line->times = model->times;
    if (model->shard.rank == 0) core_watch_tell(&model->core_watch, omp_get_max_threads());
}

static void queue_losses(Model* model) {
    model_forward(model, model->inputs);
    model_loss(model, model->targets, 0, false, NULL);
}

static void* finish_losses(Model* model) { return model->acts.losses; }

static void evaluate(Model* model, void* losses, void* logits, void* grads) {
    int64_t BT = model->B * model->T;
    model_forward(model, model->inputs);
    model_loss(model, model->targets, (real)(1 / (double)BT), grads != NULL, (real*)logits);
    memcpy(losses, model->acts.losses, (size_t)BT * sizeof(real));
    if (!grads) return;
    model_backward(model, model->inputs);
    model_freeze(model);
    memcpy(grads, model->grads, (size_t)model->table.count * sizeof(real));
}

// ----------------------------------------------------------------------------
// the trainer: what the run skeleton (llmc/train/main.h) needs of the model

static int64_t planned_cache_bytes(const void* context, const CacheSizes* sizes) {
    const Run* run = (const Run*)context;
    return cache_bytes(&run->config, &run->table, mixers, &mlp, sizes);
}

static CpuPlan make_plan(const Run* run) {
    const Pass pass = pass_plan(&run->config, &run->table, run->micro_batch, run->options.seq_len);
    const int64_t bytes = pass_bytes(&pass, run->config.num_hidden_layers),
                  cache = training_cache_bytes(run, planned_cache_bytes, run);
    return (CpuPlan){run, bytes, cache, memory_left(""), sizeof(real), omp_get_max_threads()};
}

static void print_plan(const Run* run) { plan_print_cpu(make_plan(run)); }

static Model* trainer_open(Run* run) {
    size_t BT = (size_t)(run->micro_batch * run->options.seq_len);
    if (run->mode == RUN_TRAIN) run->planned_seconds = plan_check_cpu(make_plan(run));
    Model* model = (Model*)xcalloc(1, sizeof *model);
    *model = model_new(&run->config, run_has_gradients(run), run->world->rank, run->world->size);
    model->world = run->world;
    if (model->grads && run->world->mpi && run->world->size > 1)
        model->scratch = (real*)xcalloc((size_t)shard_largest_part(&model->shard), sizeof(real));
    if (run_infers(run)) return model;
    model_allocate_activations(model, run->micro_batch, run->options.seq_len);
    model->inputs = (int32_t*)xcalloc(BT, sizeof(int32_t));
    model->targets = (int32_t*)xcalloc(BT, sizeof(int32_t));
    return model;
}

static void trainer_close(Model* model) {
    free(model->inputs);
    free(model->targets);
    model_free(model);
    free(model);
}

// Copies the shard's part of the weights between the flat buffer and a buffer of the shard.
static void copy_params(Model* model, real* shard, bool to_shard) {
    for (int b = 0; b < model->shard.num_buckets; b++) {
        ShardPart part = shard_part(&model->shard, b);
        real *flat = model->params + part.begin, *local = shard + part.local;
        memcpy(to_shard ? local : flat, to_shard ? flat : local, (size_t)part.count * sizeof(real));
    }
}

static void download(Model* model, const CheckpointTensors* to) {
    size_t bytes = (size_t)shard_count(&model->shard) * sizeof(real);
    copy_params(model, (real*)to->w, true);
    memcpy(to->m, model->m, bytes);
    memcpy(to->v, model->v, bytes);
}

static void upload(Model* model, const CheckpointTensors* from) {
    size_t bytes = (size_t)shard_count(&model->shard) * sizeof(real);
    copy_params(model, (real*)from->w, false);
    if (from->m) memcpy(model->m, from->m, bytes);
    if (from->v) memcpy(model->v, from->v, bytes);
    model_gather_weights(model);
}

static void mark(Model* model, int mark) { model->marks[mark] = seconds_now(); }

static double elapsed(Model* model, int from, int to) {
    return 1e3 * (model->marks[to] - model->marks[from]);
}

static const Trainer trainer = {
    .summary = "Trains the Forgetting Transformer, and Transformer and recurrent baselines, on the CPU.",
    .built_with = CPU_BUILT_WITH,
    .suggested_tokens = 4096, // enough for large GEMMs, and little memory
    .pass_tokens = 512,
    .pass_steps = 1,
    .element_bytes = sizeof(real),
    .weight_bytes = sizeof(real),
    .steps_in_flight = 0,
    .threads = omp_get_max_threads,
    .print_plan = print_plan,
    .open = trainer_open,
    .close = trainer_close,
    .host_alloc = allocate_zeros,
    .host_free = free,
    .download = download,
    .upload = upload,
    .load_batch = load_batch,
    .begin_step = model_begin_step,
    .add_gradients = add_gradients,
    .update = update,
    .finish_step = finish_step,
    .first_not_finite = model_first_not_finite,
    .queue_losses = queue_losses,
    .finish_losses = finish_losses,
    .evaluate = evaluate,
    .visit_heads = visit_heads,
    .mark = mark,
    .elapsed = elapsed,
    .page_bytes = page_bytes,
    .cache_new = cache_new,
    .extend = cache_extend,
    .cache_fork = cache_fork,
    .cache_copy_page = cache_copy_page,
    .cache_forgotten = cache_forgotten,
    .cache_free = cache_free};

int main(int argc, char** argv) {
    threads_start(argv);
    return run_main(argc, argv, &trainer);
}

#endif // TESTING
