/*
Query heads that share heads of keys and values, for test_attention: the kernels' results have the bits of
those where each query head has a copy of its keys, dk and dv of a head of keys are the sums of its copies'.
*/
#pragma once

#include "attention_case.cuh"

// x [B, T, KVH, dh] with each head repeated for its query heads
static vector<bf16> repeat_heads(const vector<bf16>& x, const Shape& s, int64_t KVH) {
    vector<bf16> out((size_t)s.size());
    for (int64_t i = 0; i < s.size(); i++) {
        int64_t h = i / s.dh % s.NH, bt = i / s.dh / s.NH;
        out[(size_t)i] = x[(size_t)((bt * KVH + h / (s.NH / KVH)) * s.dh + i % s.dh)];
    }
    return out;
}

// The sums of a gradient [B, T, NH, dh] over the query heads of each head of keys, in the order of the kernel
static vector<bf16> sum_heads(const vector<bf16>& x, const Shape& s, int64_t KVH) {
    const int64_t group = s.NH / KVH;
    vector<bf16> out((size_t)(s.size() / group));
    for (size_t i = 0; i < out.size(); i++) {
        int64_t head = (int64_t)i / s.dh * group; // b T NH + t NH + h
        float sum = 0;
        for (int64_t g = 0; g < group; g++) sum += (float)x[(size_t)((head + g) * s.dh + (int64_t)i % s.dh)];
        out[i] = (bf16)sum;
    }
    return out;
}

static void check_grouped(const Shape& s, int64_t KVH, GateKind kind, const AttentionBounds* bounds) {
    char name[128];
    snprintf(name, sizeof name, "%lldx%lld on %lld, dh %lld, T %lld, gates %d, W %lld%s", (long long)s.B,
             (long long)s.NH, (long long)KVH, (long long)s.dh, (long long)s.T, (int)kind, (long long)s.window,
             bounds ? ", bounds" : "");
    Inputs whole(s, kind != NO_GATE), grouped(s, whole.gate);
    const size_t keys = (size_t)(s.size() / (s.NH / KVH));
    vector<bf16> k = grouped.k.host(0, keys), v = grouped.v.host(0, keys);
    grouped.k.poison(), grouped.v.poison(); // nothing is read behind the keys
    grouped.k = k, grouped.v = v;
    grouped.q = whole.q.host(), grouped.dout = whole.dout.host();
    whole.k = repeat_heads(k, s, KVH), whole.v = repeat_heads(v, s, KVH);
    if (whole.gate) whole.cum_logf = make_gates(kind, 0.3, s), grouped.cum_logf = whole.cum_logf.host();
    grouped.s.KVH = KVH;
    Results a(s), b(grouped.s);
    a.compute(whole, bounds);
    b.compute(grouped, bounds);
    CHECK(same_bits(a.o, b.o) && same_bits(a.lse, b.lse), "%s: o or lse differ", name);
    CHECK(same_bits(a.dq, b.dq) && same_bits(a.dcum_logf, b.dcum_logf), "%s: dq or dcum_logf differ", name);
    // the kernels alone, as on_sm80 calls them, leave the sums to attention_backward
    const size_t count = on_sm80 ? (size_t)s.size() : keys;
    vector<bf16> dk = a.dk.host(), dv = a.dv.host();
    if (!on_sm80) dk = sum_heads(dk, s, KVH), dv = sum_heads(dv, s, KVH);
    CHECK(same_bits(dk, b.dk.host(0, count)), "%s: dk differs", name);
    CHECK(same_bits(dv, b.dv.host(0, count)), "%s: dv differs", name);
}

static void test_grouped(int64_t longest) {
    for (int64_t dh : {64, 128})
        for (int64_t T : {1, 65, 300, 1000})
            for (int64_t KVH : {1, 2, 6}) {
                if (T > longest) continue;
                check_grouped({2, T, 6, dh}, KVH, RANDOM, NULL);
                check_grouped({2, T, 6, dh}, KVH, NO_GATE, NULL);
                check_grouped({2, T, 6, dh, 100}, KVH, RANDOM, NULL);
            }
    // band heads, of which other kernels compute all tensors: three of every four
    const Shape s = {2, std::min<int64_t>(longest, 1000), 8, 64};
    const int heads = (int)s.heads(), blocks = (int)ceil_div<int64_t>(s.T, ATTENTION_BLOCK);
    vector<int> order;
    for (int band = 0; band < 2; band++)
        for (int head = 0; head < heads; head++)
            if ((head % 4 != 3) == band) order.push_back(head);
    order.push_back(heads / 4);
    Buffer<int> first_key_block(vector<int>((size_t)(heads * blocks), 0)),
        last_query_block(vector<int>((size_t)(heads * blocks), blocks - 1)), head_order(order);
    AttentionBounds bounds = {first_key_block, last_query_block, head_order};
    for (int64_t KVH : {1, 2, 4}) check_grouped(s, KVH, BANDS, &bounds);
}
