/*
What tests of FP8 share: a tensor that a kernel writes, byte by byte against the formats' definition
(dev/test/fp8_reference.h).
*/
#pragma once

#include "../../../llmc/cuda/fp8.cuh"
#include "../fp8_reference.h"
#include "buffers.cuh"

static inline int mantissa(Fp8Format format) { return format == FP8_E4M3 ? 3 : 2; }

static inline uint32_t bf16_bits(bf16 x) {
    uint16_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline bf16 bf16_of(uint32_t bits) {
    __nv_bfloat16_raw raw;
    raw.x = (unsigned short)bits;
    return bf16(raw);
}

// ----------------------------------------------------------------------------
// a tensor that a kernel writes

struct Written {
    Fp8Format format;
    int64_t rows, columns, stride;
    Buffer<uint8_t> bytes;
    Buffer<uint32_t> lanes;
    Buffer<Fp8Scale> scale;
    Fp8Tensor tensor;

    Written(Fp8Format f, int64_t r, int64_t c, int64_t s, float by, bool alone = false)
        : format(f), rows(r), columns(c), stride(s), bytes((size_t)(r * s)),
          lanes(FP8_LANES * FP8_LANE_STRIDE), scale(vector<Fp8Scale>{{1 / by, by}}) {
        lanes.zero();
        tensor = {bytes, s, scale, lanes, alone};
    }

    uint32_t amax() const {
        uint32_t most = 0;
        for (uint32_t lane : lanes.host()) most = std::max(most, lane);
        return most;
    }

    // Columns [first, first + columns) of the bytes are those of `want` [rows, columns], other columns are
    // untouched, and amax is that of `want`. Eight neighbours are all NaN, or none is.
    void check(const char* name, const vector<bf16>& want, int64_t first = 0) const {
        const vector<uint8_t> got = bytes.host();
        const float by = scale.host()[0].scale;
        int64_t wrong = 0, written = 0;
        uint32_t most = 0;
        for (int64_t i = 0; i < rows * columns; i++) {
            const uint8_t code = got[i / columns * stride + first + i % columns];
            bool finite = true;
            for (int64_t k = i / 8 * 8; k < i / 8 * 8 + 8; k++) finite &= isfinite(value(want[k]));
            const uint8_t wanted = fp8_nearest(finite ? value(want[i]) * by : NAN, mantissa(format));
            const double x = fp8_value(code, mantissa(format)), y = fp8_value(wanted, mantissa(format));
            wrong += isnan(y) ? !isnan(x) : x != y; // the sign of 0 does not matter
            most = std::max(most, bf16_bits(want[i]) & 0x7fff);
        }
        for (int64_t i = 0; i < rows * stride; i++) {
            const int64_t column = i % stride - first;
            written += (column < 0 || column >= columns) && got[i] != 0xFF;
        }
        CHECK(wrong == 0, "%s, %s: %lld of %lld bytes are wrong", test_case, name, (long long)wrong,
              (long long)(rows * columns));
        CHECK(written == 0, "%s, %s: %lld bytes of other columns are written", test_case, name,
              (long long)written);
        CHECK(amax() == most, "%s, %s: amax %x instead of %x", test_case, name, amax(), most);
    }
};
