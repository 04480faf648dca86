/*
Causal attention without a gate by cuDNN's fused kernels, for the baselines: what attention.cuh computes with
cum_logf NULL, on the same structs and layouts and for more head sizes. A build with USE_CUDNN=1 needs cuDNN
9.10 or later and nothing else; in any other build these functions end the program with a message. The trainer
calls them for --attention cudnn.

cuDNN has no call "attention". It is given the formula as a graph of small operations on tensors, most of them
virtual (never stored), recognizes the pattern, and returns a plan: one or a few fused kernels. So the graphs
below cannot be simplified: with one operation more, less or elsewhere cuDNN may not recognize the pattern.
Each tensor has dimensions [B, NH, rows, columns] and its own strides, which describe the layout
[B, T, NH, dh]. k and v may have fewer heads, KVH: matmuls repeat them, and dk and dv of each query head are
summed behind the plan, as attention_backward does.

A plan is for one shape and is slow to make. Plans are kept until the program ends, for the GPU that was
current at the first call. Not thread-safe.
*/
#pragma once

#include "../cuda/range.cuh"
#include "attention.cuh"

#ifdef USE_CUDNN

#include <cudnn.h>
#include <initializer_list>
#include <math.h>
#include <utility>

#if CUDNN_VERSION < 91000
#error "llmc/attention/cudnn.cuh needs cuDNN 9.10 or later: update it, or build without USE_CUDNN"
#endif

// ----------------------------------------------------------------------------
// checked calls

static inline const char* cudnn_reason(cudnnStatus_t status) {
    static char text[200];
    snprintf(text, sizeof text, "%s: ", cudnnGetErrorString(status));
    size_t n = strlen(text);
    cudnnGetLastErrorString(text + n, sizeof text - n);
    for (char* p = text; *p; p++) // one line, like every message
        if (*p == '\n') *p = ' ';
    return text;
}

static inline void cudnn_check(cudnnStatus_t status, const char* call, const char* file, int line) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    const char* hint = CUDNN_STATUS_CATEGORY(status) == 1000 // not initialized, mismatched libraries
                           ? "; see LD_LIBRARY_PATH: are all of cuDNN's libraries there, and of one version?"
                           : "; --attention fox needs no cuDNN";
    die("%s:%d: %s: %s%s", file, line, call, cudnn_reason(status), hint);
}
#define CUDNN_CHECK(call) cudnn_check(call, #call, __FILE__, __LINE__)

// ----------------------------------------------------------------------------
// descriptors: every object of cuDNN's graph interface. Attributes are set one by one, then the descriptor is
// finalized.

typedef cudnnBackendDescriptor_t CudnnDescriptor;

// A row of a descriptor's table: a name and a value, or `count` values.
struct CudnnAttribute {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t count;      // 0: the attribute is left out, as is a descriptor that is NULL
    const void* values; // of the statement that makes the table

    CudnnAttribute(cudnnBackendAttributeName_t n, cudnnBackendAttributeType_t t, int64_t c, const void* v)
        : name(n), type(t), count(c), values(v) {}
    CudnnAttribute(cudnnBackendAttributeName_t n, const CudnnDescriptor& value)
        : CudnnAttribute(n, CUDNN_TYPE_BACKEND_DESCRIPTOR, value != NULL, &value) {}
#define CUDNN_VALUE(value_type, type)                                                                        \
    CudnnAttribute(cudnnBackendAttributeName_t n, const value_type& value)                                   \
        : CudnnAttribute(n, type, 1, &value) {}
    CUDNN_VALUE(bool, CUDNN_TYPE_BOOLEAN)
    CUDNN_VALUE(int64_t, CUDNN_TYPE_INT64)
    CUDNN_VALUE(cudnnDataType_t, CUDNN_TYPE_DATA_TYPE)
    CUDNN_VALUE(cudnnPointwiseMode_t, CUDNN_TYPE_POINTWISE_MODE)
    CUDNN_VALUE(cudnnReduceTensorOp_t, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE)
    CUDNN_VALUE(cudnnBackendHeurMode_t, CUDNN_TYPE_HEUR_MODE)
    CUDNN_VALUE(cudnnHandle_t, CUDNN_TYPE_HANDLE)
#undef CUDNN_VALUE
};

typedef std::initializer_list<CudnnAttribute> CudnnTable;

static inline CudnnDescriptor cudnn_descriptor(cudnnBackendDescriptorType_t type, CudnnTable table) {
    CudnnDescriptor d;
    CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &d));
    for (const CudnnAttribute& a : table)
        if (a.count > 0) CUDNN_CHECK(cudnnBackendSetAttribute(d, a.name, a.type, a.count, a.values));
    return d;
}
static inline CudnnDescriptor cudnn_final(cudnnBackendDescriptorType_t type, CudnnTable table) {
    CudnnDescriptor d = cudnn_descriptor(type, table);
    CUDNN_CHECK(cudnnBackendFinalize(d));
    return d;
}

// ----------------------------------------------------------------------------
// graphs

enum { CUDNN_OPERATIONS = 32 };
typedef struct {
    HeadShape s;
    CudnnDescriptor operations[CUDNN_OPERATIONS];
    int64_t count, virtual_tensors;
} CudnnGraph;

typedef struct {
    int64_t sizes[4], strides[4];
} CudnnLayout;

// The tensors that are passed to a plan, CUDNN_VIRTUAL apart
enum {
    CUDNN_VIRTUAL,
    CUDNN_Q,
    CUDNN_K,
    CUDNN_V,
    CUDNN_O,
    CUDNN_LSE,
    CUDNN_DOUT,
    CUDNN_DQ,
    CUDNN_DK,
    CUDNN_DV
};
// Float scratch: [B, NH, T, dh], to which blocks of keys add dq, and [B, NH, T], dout_i o_i
enum { CUDNN_DQ_SUM = CUDNN_DV + 1, CUDNN_DELTA };
// Scalars: floats on the host
enum { CUDNN_SCALE = CUDNN_DELTA + 1, CUDNN_MASKED, CUDNN_ONE, CUDNN_TENSORS };

// x: sizes [B, NH, rows, columns] and strides. transposed: the tensor is x with rows and columns exchanged.
static inline CudnnDescriptor cudnn_tensor(CudnnGraph* g, int64_t id, cudnnDataType_t type, CudnnLayout x,
                                           bool transposed) {
    int64_t number = id ? id : CUDNN_TENSORS + g->virtual_tensors++, alignment = 16;
    if (transposed) std::swap(x.sizes[2], x.sizes[3]), std::swap(x.strides[2], x.strides[3]);
    return cudnn_final(CUDNN_BACKEND_TENSOR_DESCRIPTOR,
                       {{CUDNN_ATTR_TENSOR_UNIQUE_ID, number},
                        {CUDNN_ATTR_TENSOR_DATA_TYPE, type},
                        {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment},
                        {CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, x.sizes},
                        {CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, x.strides},
                        {CUDNN_ATTR_TENSOR_IS_VIRTUAL, id == CUDNN_VIRTUAL},
                        {CUDNN_ATTR_TENSOR_IS_BY_VALUE, id >= CUDNN_SCALE}});
}

// bf16 [B, T, heads, dh], each head a [T, dh] matrix, or its transpose
static inline CudnnDescriptor cudnn_matrices(CudnnGraph* g, int64_t id, int64_t heads, bool transposed) {
    int64_t B = g->s.B, T = g->s.T, dh = g->s.dh, row = heads * dh;
    return cudnn_tensor(g, id, CUDNN_DATA_BFLOAT16, {{B, heads, T, dh}, {T * row, dh, row, 1}}, transposed);
}
static inline CudnnDescriptor cudnn_heads(CudnnGraph* g, int64_t id) {
    return cudnn_matrices(g, id, g->s.NH, false);
}
// k or v
static inline CudnnDescriptor cudnn_keys(CudnnGraph* g, int64_t id, bool transposed) {
    return cudnn_matrices(g, id, key_heads(&g->s), transposed);
}
// [B, NH, T, columns], each head a matrix, or its transpose
static inline CudnnDescriptor cudnn_rows(CudnnGraph* g, int64_t id, cudnnDataType_t type, int64_t columns,
                                         bool transposed = false) {
    int64_t B = g->s.B, T = g->s.T, NH = g->s.NH, head = T * columns;
    return cudnn_tensor(g, id, type, {{B, NH, T, columns}, {NH * head, head, columns, 1}}, transposed);
}
static inline CudnnDescriptor cudnn_statistic(CudnnGraph* g, int64_t id) {
    return cudnn_rows(g, id, CUDNN_DATA_FLOAT, 1);
}
static inline CudnnDescriptor cudnn_scores(CudnnGraph* g, cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return cudnn_rows(g, CUDNN_VIRTUAL, type, g->s.T);
}
static inline CudnnDescriptor cudnn_scalar(CudnnGraph* g, int64_t id) {
    return cudnn_tensor(g, id, CUDNN_DATA_FLOAT, {{1, 1, 1, 1}, {1, 1, 1, 1}}, false);
}

// Each operation returns its output.
static inline CudnnDescriptor cudnn_add(CudnnGraph* g, CudnnDescriptor output,
                                        cudnnBackendDescriptorType_t type, CudnnTable table) {
    if (g->count == CUDNN_OPERATIONS) die("a cuDNN graph is too large");
    g->operations[g->count++] = cudnn_final(type, table);
    return output;
}

static inline CudnnDescriptor cudnn_matmul(CudnnGraph* g, CudnnDescriptor a, CudnnDescriptor b,
                                           CudnnDescriptor c) {
    auto matmul =
        cudnn_final(CUDNN_BACKEND_MATMUL_DESCRIPTOR, {{CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT}});
    return cudnn_add(g, c, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
                     {{CUDNN_ATTR_OPERATION_MATMUL_DESC, matmul},
                      {CUDNN_ATTR_OPERATION_MATMUL_ADESC, a},
                      {CUDNN_ATTR_OPERATION_MATMUL_BDESC, b},
                      {CUDNN_ATTR_OPERATION_MATMUL_CDESC, c}});
}

static inline CudnnDescriptor cudnn_reduce(CudnnGraph* g, cudnnReduceTensorOp_t op, CudnnDescriptor x,
                                           CudnnDescriptor y) {
    auto reduction =
        cudnn_final(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, {{CUDNN_ATTR_REDUCTION_OPERATOR, op},
                                                         {CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT}});
    return cudnn_add(g, y, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
                     {{CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction},
                      {CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x},
                      {CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y}});
}

// y = x transposed: the same elements with other strides
static inline CudnnDescriptor cudnn_reshape(CudnnGraph* g, CudnnDescriptor x, CudnnDescriptor y) {
    return cudnn_add(g, y, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
                     {{CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x}, {CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y}});
}
static inline CudnnDescriptor cudnn_transpose_scores(CudnnGraph* g, CudnnDescriptor x) {
    return cudnn_reshape(g, x, cudnn_rows(g, CUDNN_VIRTUAL, CUDNN_DATA_BFLOAT16, g->s.T, true));
}

// y = mode(x), mode(x, b) or, with t, t ? x : b. GEN_INDEX gives the index along `axis`.
static inline CudnnDescriptor cudnn_pointwise(CudnnGraph* g, cudnnPointwiseMode_t mode, CudnnDescriptor x,
                                              CudnnDescriptor b, CudnnDescriptor y, CudnnDescriptor t = NULL,
                                              cudnnDataType_t computes = CUDNN_DATA_FLOAT,
                                              int64_t axis = -1) {
    auto pointwise = cudnn_final(CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
                                 {{CUDNN_ATTR_POINTWISE_MODE, mode},
                                  {CUDNN_ATTR_POINTWISE_MATH_PREC, computes},
                                  {CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis >= 0, &axis}});
    return cudnn_add(g, y, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
                     {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise},
                      {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x},
                      {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b},
                      {CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t},
                      {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y}});
}

// Scores of keys after their query become -inf.
static inline CudnnDescriptor cudnn_causal(CudnnGraph* g, CudnnDescriptor scores) {
    auto row = cudnn_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, scores, NULL, cudnn_scores(g, CUDNN_DATA_INT32),
                               NULL, CUDNN_DATA_FLOAT, 2);
    auto column = cudnn_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, scores, NULL,
                                  cudnn_scores(g, CUDNN_DATA_INT32), NULL, CUDNN_DATA_FLOAT, 3);
    auto seen = cudnn_pointwise(g, CUDNN_POINTWISE_CMP_GE, row, column, cudnn_scores(g, CUDNN_DATA_BOOLEAN),
                                NULL, CUDNN_DATA_BOOLEAN);
    return cudnn_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, scores, cudnn_scalar(g, CUDNN_MASKED),
                           cudnn_scores(g), seen);
}

static inline void cudnn_forward_graph(CudnnGraph* g) {
    auto s = cudnn_matmul(g, cudnn_heads(g, CUDNN_Q), cudnn_keys(g, CUDNN_K, true), cudnn_scores(g));
    s = cudnn_pointwise(g, CUDNN_POINTWISE_MUL, s, cudnn_scalar(g, CUDNN_SCALE), cudnn_scores(g));
    s = cudnn_causal(g, s);
    auto row_max = cudnn_reduce(g, CUDNN_REDUCE_TENSOR_MAX, s, cudnn_statistic(g, CUDNN_VIRTUAL));
    s = cudnn_pointwise(g, CUDNN_POINTWISE_SUB, s, row_max, cudnn_scores(g));
    auto e = cudnn_pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, cudnn_scores(g));
    auto sum = cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e, cudnn_statistic(g, CUDNN_VIRTUAL));
    auto log_sum = cudnn_pointwise(g, CUDNN_POINTWISE_LOG, sum, NULL, cudnn_statistic(g, CUDNN_VIRTUAL));
    cudnn_pointwise(g, CUDNN_POINTWISE_ADD, row_max, log_sum, cudnn_statistic(g, CUDNN_LSE));
    auto p = cudnn_pointwise(g, CUDNN_POINTWISE_DIV, e, sum, cudnn_scores(g, CUDNN_DATA_BFLOAT16));
    cudnn_matmul(g, p, cudnn_keys(g, CUDNN_V, false), cudnn_heads(g, CUDNN_O));
}

// deterministic: dq is one matmul, for which all of ds is stored; otherwise blocks of keys add to dq in any
// order.
static inline void cudnn_backward_graph(CudnnGraph* g, bool deterministic) {
    auto q = cudnn_heads(g, CUDNN_Q), kt = cudnn_keys(g, CUDNN_K, true), vt = cudnn_keys(g, CUDNN_V, true),
         dout = cudnn_heads(g, CUDNN_DOUT);
    auto scale = cudnn_scalar(g, CUDNN_SCALE);

    auto products = cudnn_pointwise(g, CUDNN_POINTWISE_MUL, dout, cudnn_heads(g, CUDNN_O),
                                    cudnn_rows(g, CUDNN_VIRTUAL, CUDNN_DATA_FLOAT, g->s.dh));
    auto delta = cudnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, products, cudnn_statistic(g, CUDNN_VIRTUAL));
    // the pattern has the scale of dropout here
    delta = cudnn_pointwise(g, CUDNN_POINTWISE_MUL, delta, cudnn_scalar(g, CUDNN_ONE),
                            cudnn_statistic(g, CUDNN_DELTA));

    auto s = cudnn_matmul(g, q, kt, cudnn_scores(g));
    s = cudnn_pointwise(g, CUDNN_POINTWISE_MUL, s, scale, cudnn_scores(g));
    s = cudnn_pointwise(g, CUDNN_POINTWISE_SUB, s, cudnn_statistic(g, CUDNN_LSE), cudnn_scores(g));
    s = cudnn_causal(g, s);
    auto p = cudnn_pointwise(g, CUDNN_POINTWISE_EXP, s, NULL, cudnn_scores(g));
    cudnn_matmul(g, cudnn_transpose_scores(g, p), dout, cudnn_heads(g, CUDNN_DV));

    auto ds = cudnn_matmul(g, dout, vt, cudnn_scores(g));
    ds = cudnn_pointwise(g, CUDNN_POINTWISE_SUB, ds, delta, cudnn_scores(g));
    ds = cudnn_pointwise(g, CUDNN_POINTWISE_MUL, ds, p, cudnn_scores(g));
    ds = cudnn_pointwise(g, CUDNN_POINTWISE_MUL, ds, scale, cudnn_scores(g));
    cudnn_matmul(g, cudnn_transpose_scores(g, ds), q, cudnn_heads(g, CUDNN_DK));

    auto k = cudnn_reshape(g, kt, cudnn_keys(g, CUDNN_VIRTUAL, false)), dq = cudnn_heads(g, CUDNN_DQ);
    auto sum = deterministic ? dq : cudnn_rows(g, CUDNN_DQ_SUM, CUDNN_DATA_FLOAT, g->s.dh);
    cudnn_matmul(g, ds, k, sum);
    if (!deterministic) cudnn_pointwise(g, CUDNN_POINTWISE_IDENTITY, sum, NULL, dq);
}

// ----------------------------------------------------------------------------
// plans

typedef enum { CUDNN_FORWARD, CUDNN_BACKWARD, CUDNN_BACKWARD_DETERMINISTIC } CudnnPass;

typedef struct CudnnPlan {
    CudnnPass pass;
    HeadShape s; // its B, T, NH, KVH and dh
    CudnnDescriptor plan;
    int64_t workspace; // bytes that cuDNN itself needs
    struct CudnnPlan* next;
} CudnnPlan;

static inline cudnnHandle_t cudnn_handle(void) {
    static cudnnHandle_t handle;
    if (handle) return handle;
    if (cudnnGetVersion() < 91000)
        die("this program was built for cuDNN 9.10 or later and found %zu.%zu: update it, or see "
            "LD_LIBRARY_PATH",
            cudnnGetVersion() / 10000, cudnnGetVersion() / 100 % 100);
    CUDNN_CHECK(cudnnCreate(&handle));
    return handle;
}

// The first of cuDNN's suggested plans that runs on this GPU; NULL, with the reason in *status, if there is
// none.
static inline CudnnDescriptor cudnn_best_plan(CudnnGraph* g, cudnnHandle_t handle, cudnnStatus_t* status) {
    enum { MAX = 8 };
    auto graph = cudnn_descriptor(
        CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
        {{CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->count, g->operations},
         {CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle}});
    if ((*status = cudnnBackendFinalize(graph)) != CUDNN_STATUS_SUCCESS) return NULL;

    CudnnDescriptor configs[MAX];
    auto heuristics = cudnn_descriptor(
        CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
        {{CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph}, {CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A}});
    if ((*status = cudnnBackendFinalize(heuristics)) != CUDNN_STATUS_SUCCESS) return NULL;
    for (int i = 0; i < MAX; i++) configs[i] = cudnn_descriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, {});
    int64_t found = 0;
    *status = cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX, &found, configs);
    if (*status == CUDNN_STATUS_SUCCESS && found == 0) *status = CUDNN_STATUS_NOT_SUPPORTED;
    for (int64_t i = 0; i < found && i < MAX; i++) {
        auto plan = cudnn_descriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
                                     {{CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle},
                                      {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]}});
        if ((*status = cudnnBackendFinalize(plan)) == CUDNN_STATUS_SUCCESS) return plan;
        cudnnBackendDestroyDescriptor(plan);
    }
    return NULL;
}

// The plan for a shape, made at the first call. It keeps the descriptors of its graph.
static inline const CudnnPlan* cudnn_plan(CudnnPass pass, const HeadShape* s) {
    static CudnnPlan* plans;
    static const char* const names[] = {"forward", "backward", "deterministic backward"}; // of CudnnPass
    for (CudnnPlan* p = plans; p; p = p->next)
        if (p->pass == pass && p->s.B == s->B && p->s.T == s->T && p->s.NH == s->NH && p->s.dh == s->dh &&
            key_heads(&p->s) == key_heads(s))
            return p;
    CudnnGraph g = {.s = *s};
    if (pass == CUDNN_FORWARD)
        cudnn_forward_graph(&g);
    else
        cudnn_backward_graph(&g, pass == CUDNN_BACKWARD_DETERMINISTIC);

    CudnnPlan* p = (CudnnPlan*)xcalloc(1, sizeof *p);
    cudnnStatus_t status;
    p->pass = pass;
    p->s = *s;
    p->plan = cudnn_best_plan(&g, cudnn_handle(), &status);
    if (!p->plan)
        die("cuDNN %zu has no attention, %s, for %s of %s and %s of %lld here: use --attention fox (%s)",
            cudnnGetVersion(), names[pass], counted(s->B, "sequence").text, counted(s->T, "token").text,
            counted(s->NH, "head").text, (long long)s->dh, cudnn_reason(status));
    CUDNN_CHECK(cudnnBackendGetAttribute(p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                                         1, NULL, &p->workspace));
    p->next = plans;
    return plans = p;
}

// Runs a plan on the tensors at[CUDNN_Q] and so on; NULL: not part of the plan. The scalars of both passes
// are added here.
static inline void cudnn_run(const CudnnPlan* p, const void* at[CUDNN_TENSORS], void* workspace,
                             cudaStream_t stream) {
    float scale = 1 / sqrtf((float)p->s.dh), masked = -INFINITY;
    at[CUDNN_SCALE] = &scale;
    at[CUDNN_MASKED] = &masked;
    int64_t ids[CUDNN_TENSORS], count = 0;
    const void* pointers[CUDNN_TENSORS];
    for (int64_t id = 1; id < CUDNN_TENSORS; id++)
        if (at[id]) {
            ids[count] = id;
            pointers[count++] = at[id];
        }
    CudnnDescriptor pack =
        cudnn_final(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
                    {{CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids},
                     {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers},
                     {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace}});
    CUDNN_CHECK(cudnnSetStream(cudnn_handle(), stream));
    CUDNN_CHECK(cudnnBackendExecute(cudnn_handle(), p->plan, pack));
    CUDNN_CHECK(cudnnBackendDestroyDescriptor(pack));
}

// ----------------------------------------------------------------------------
// attention

static inline CudnnPass attention_cudnn_backward_pass(bool deterministic) {
    return deterministic ? CUDNN_BACKWARD_DETERMINISTIC : CUDNN_BACKWARD;
}
// Workspace of a backward pass: dk and dv of each query head where they share keys, delta, then unless
// deterministic the float sums of dq, then cuDNN's own
static inline size_t attention_cudnn_dq_bytes(const CudnnPlan* p) {
    return p->pass == CUDNN_BACKWARD ? attention_float_bytes(p->s.B * p->s.NH * p->s.T * p->s.dh) : 0;
}

// Bytes of scratch of a forward pass; with `backward`, enough for either pass. A smaller shape may need more.
// A deterministic backward pass stores all of ds, 2 B NH T^2 bytes: 6.4 GB for 12 heads of 16384 tokens; any
// other one stores the float sums of dq.
static inline size_t attention_cudnn_workspace(const HeadShape* s, bool deterministic, bool backward) {
    size_t first = (size_t)cudnn_plan(CUDNN_FORWARD, s)->workspace;
    if (!backward) return first;
    const CudnnPlan* plan = cudnn_plan(attention_cudnn_backward_pass(deterministic), s);
    size_t second = 2 * attention_group_bytes(s) + attention_delta_bytes(s) + attention_cudnn_dq_bytes(plan) +
                    (size_t)plan->workspace;
    return first > second ? first : second;
}

// As attention_forward with cum_logf and bounds NULL and without a window: writes o and lse.
static inline void attention_cudnn_forward(const AttentionForward* a, const HeadShape* s,
                                           cudaStream_t stream) {
    Range range("attention", RANGE_FORWARD, stream);
    assert(!a->cum_logf && !a->bounds && !s->window);
    const void* at[CUDNN_TENSORS] = {};
    at[CUDNN_Q] = a->q;
    at[CUDNN_K] = a->k;
    at[CUDNN_V] = a->v;
    at[CUDNN_O] = a->o;
    at[CUDNN_LSE] = a->lse;
    cudnn_run(cudnn_plan(CUDNN_FORWARD, s), at, a->scratch, stream);
}

// As attention_backward with cum_logf, dcum_logf and bounds NULL and without a window: writes dq, dk and dv.
// delta is always computed here. Unless deterministic, the last bits of dq differ from run to run.
static inline void attention_cudnn_backward(const AttentionBackward* a, const HeadShape* s,
                                            cudaStream_t stream) {
    Range range("attention", RANGE_BACKWARD, stream);
    assert(!a->cum_logf && !a->dcum_logf && !a->bounds && !s->window);
    const CudnnPlan* p = cudnn_plan(attention_cudnn_backward_pass(a->deterministic), s);
    float one = 1;
    const bool grouped = head_group(s) > 1;
    char *dk = (char*)a->scratch, *dv = dk + attention_group_bytes(s), *rest = dv + attention_group_bytes(s);
    const void* at[CUDNN_TENSORS] = {};
    at[CUDNN_Q] = a->q;
    at[CUDNN_K] = a->k;
    at[CUDNN_V] = a->v;
    at[CUDNN_O] = a->o;
    at[CUDNN_LSE] = a->lse;
    at[CUDNN_DOUT] = a->dout;
    at[CUDNN_DQ] = a->dq;
    at[CUDNN_DK] = grouped ? dk : (char*)a->dk;
    at[CUDNN_DV] = grouped ? dv : (char*)a->dv;
    at[CUDNN_ONE] = &one;
    at[CUDNN_DELTA] = rest;
    rest += attention_delta_bytes(s);
    if (!a->deterministic) {
        at[CUDNN_DQ_SUM] = rest;
        rest += attention_cudnn_dq_bytes(p);
    }
    cudnn_run(p, at, rest, stream);
    if (!grouped) return;
    attention_add_groups(a->dk, (const bf16*)dk, s, stream);
    attention_add_groups(a->dv, (const bf16*)dv, s, stream);
}

#else // without cuDNN

static inline void attention_cudnn_missing(void) {
    die("this program was built without cuDNN: build it with USE_CUDNN=1, or use --attention fox");
}
static inline size_t attention_cudnn_workspace(const HeadShape*, bool, bool) {
    attention_cudnn_missing();
    return 0;
}
static inline void attention_cudnn_forward(const AttentionForward*, const HeadShape*, cudaStream_t) {
    attention_cudnn_missing();
}
static inline void attention_cudnn_backward(const AttentionBackward*, const HeadShape*, cudaStream_t) {
    attention_cudnn_missing();
}

#endif // USE_CUDNN
