/*
llmc/attention/cudnn.cuh against llmc/attention/attention.cuh, which test_attention checks against the
formulas in double.

Both round to bf16 at the same places but not from the same partial sums, so they differ by about as much as
each differs from the exact result; the limits are those of test_attention between attention.cuh and the exact
result.

    test_attention_cudnn           everything
    test_attention_cudnn quick     small shapes, for compute-sanitizer
*/
#include <time.h>
#include "../../../llmc/attention/attention.cuh"
#include "../../../llmc/attention/cudnn.cuh"
#include "../gpu/buffers.cuh"

#ifdef USE_CUDNN

struct Results {
    Buffer<bf16> o, dq, dk, dv;
    Buffer<float> lse;
    Results(size_t n, size_t keys, size_t rows) : o(n), dq(n), dk(keys), dv(keys), lse(rows) {}
    AttentionForward forward(const bf16* q, const bf16* k, const bf16* v, void* scratch) const {
        return {o, lse, q, k, v, NULL, NULL, scratch};
    }
    AttentionBackward backward(const AttentionForward& f, const bf16* dout, bool deterministic) const {
        return {dq, dk, dv, NULL, dout, f.q, f.k, f.v, o, lse, NULL, NULL, NULL, deterministic, f.scratch};
    }
    bool ends_untouched() const {
        return o.end_untouched() && dq.end_untouched() && dk.end_untouched() && dv.end_untouched() &&
               lse.end_untouched();
    }
};

// Root mean square difference relative to `want`, which is zero in exact arithmetic in dq and dk of a single
// token.
template <class T> static double difference(const vector<T>& got, const vector<T>& want) {
    double error = 0, sum = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double e = value(got[i]) - value(want[i]);
        error += e * e;
        sum += value(want[i]) * value(want[i]);
    }
    return sqrt(error / (sum + 1e-6 * (double)want.size()));
}

static double greatest_difference(const vector<float>& got, const vector<float>& want) {
    double most = 0;
    for (size_t i = 0; i < want.size(); i++) most = worse(most, fabs((double)got[i] - want[i]));
    return most;
}

// KVH heads of keys; 0: NH
static void test_shape(int64_t B, int64_t T, int64_t NH, int64_t dh, int64_t KVH = 0) {
    size_t n = (size_t)(B * T * NH * dh), keys = KVH ? (size_t)(B * T * KVH * dh) : n,
           rows = (size_t)(B * T * NH);
    Buffer<bf16> q(draw<bf16>(n, 1)), k(draw<bf16>(keys, 1)), v(draw<bf16>(keys, 1)), dout(draw<bf16>(n, 1));
    char name[96];
    snprintf(name, sizeof name, "B %lld, T %lld, NH %lld, KVH %lld, dh %lld", (long long)B, (long long)T,
             (long long)NH, (long long)KVH, (long long)dh);
    HeadShape shape = {B, T, NH, dh, NH * dh, NH * dh, dh, 0, NULL, KVH};
    Results ours(n, keys, rows);
    Buffer<char> scratch(attention_scratch_bytes(&shape, true));
    AttentionForward forward = ours.forward(q, k, v, scratch);
    AttentionBackward backward = ours.backward(forward, dout, false);
    attention_forward(&forward, &shape, 0);
    attention_backward(&backward, &shape, 0);

    for (int deterministic = 0; deterministic < 2; deterministic++) {
        Buffer<char> workspace(attention_cudnn_workspace(&shape, deterministic, true));
        Results first(n, keys, rows), second(n, keys, rows);
        for (Results* r : {&first, &second}) {
            forward = r->forward(q, k, v, workspace);
            backward = r->backward(forward, dout, deterministic);
            attention_cudnn_forward(&forward, &shape, 0);
            attention_cudnn_backward(&backward, &shape, 0);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        double lse = noted("lse", greatest_difference(first.lse.host(), ours.lse.host()));
        double o = noted("o", difference(first.o.host(), ours.o.host()));
        double dq = noted("dq", difference(first.dq.host(), ours.dq.host()));
        double dk = noted("dk", difference(first.dk.host(), ours.dk.host()));
        double dv = noted("dv", difference(first.dv.host(), ours.dv.host()));
        CHECK(lse <= 3e-5, "%s: lse differs by %.2e", name, lse);
        CHECK(o <= 6e-3, "%s: o differs by %.2e", name, o);
        CHECK(dq <= 1e-2, "%s: dq differs by %.2e", name, dq);
        CHECK(dk <= 1e-2, "%s: dk differs by %.2e", name, dk);
        CHECK(dv <= 6e-3, "%s: dv differs by %.2e", name, dv);
        CHECK(first.ends_untouched() && second.ends_untouched() && workspace.end_untouched(),
              "%s: wrote past the end of a tensor", name);
        CHECK(same_bits(first.o.host(), second.o.host()) && same_bits(first.lse.host(), second.lse.host()),
              "%s: two forward passes differ", name);
        CHECK(!deterministic || (same_bits(first.dq.host(), second.dq.host()) &&
                                 same_bits(first.dk.host(), second.dk.host()) &&
                                 same_bits(first.dv.host(), second.dv.host())),
              "%s: two deterministic backward passes differ", name);
    }
}

int main(int argc, char** argv) {
    bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
    printf("cuDNN %zu, seed %llu\n", cudnnGetVersion(), (unsigned long long)seed);
    // before this process initializes CUDA, which a forked process could not use then
    HeadShape head_size_7 = {1, 128, 1, 7, 7, 7, 7, 0};
    CHECK_DIES("head of 7 here", attention_cudnn_workspace(&head_size_7, false, true));
    for (int64_t dh : {64, 128}) {
        test_shape(2, 1, 3, dh);
        test_shape(1, 65, 2, dh);
        test_shape(2, 200, 3, dh);
        test_shape(2, 200, 6, dh, 2);
        if (quick) continue;
        for (int64_t T : {2, 63, 64, 127, 128, 129, 1000}) test_shape(2, T, 3, dh);
        test_shape(3, 2048, 12, dh);
        test_shape(1, 4097, 4, dh);
        test_shape(1, 4097, 8, dh, 1);
        test_shape(1, 16384, 2, dh);
    }
    print_noted();
    return test_report();
}

#else // USE_CUDNN

int main(void) {
    HeadShape shape = {1, 128, 1, 64, 64, 64, 64, 0, NULL};
    CHECK_DIES("USE_CUDNN=1", attention_cudnn_workspace(&shape, false, true));
    return test_report();
}

#endif
