/*
Tests llmc/model/fp8.h: shapes, memory, the record in trainer.json; and the reference of the formats that GPU
tests use, dev/test/fp8_reference.h.
*/
#include "../../../llmc/baselines/mixers.h"
#include "../../../llmc/model/fp8.h"
#include "../check.h"
#include "models.h"
#include "../fp8_reference.h"

// ----------------------------------------------------------------------------
// formats

static void check_format(int mantissa, double largest, double least) {
    const int last = fp8_largest_code(mantissa);
    CHECK(fp8_value((uint8_t)last, mantissa) == largest && fp8_value(1, mantissa) == least, "%d: the range",
          mantissa);
    for (int code = 0; code <= last; code++) {
        const double x = fp8_value((uint8_t)code, mantissa), next = fp8_value((uint8_t)(code + 1), mantissa);
        CHECK(fp8_nearest(x, mantissa) == code, "%d: code %d", mantissa, code);
        CHECK(fp8_nearest(-x, mantissa) == (code | 0x80), "%d: code -%d", mantissa, code);
        if (code == last) continue;
        const double half = (x + next) / 2; // exact
        const int even = code % 2 ? code + 1 : code;
        CHECK(next > x && fp8_nearest(half, mantissa) == even, "%d: between %d and the next", mantissa, code);
        CHECK(fp8_nearest(nextafter(half, 0), mantissa) == code &&
                  fp8_nearest(nextafter(half, 1e9), mantissa) == code + 1,
              "%d: beside the middle of %d and the next", mantissa, code);
    }
    CHECK(fp8_nearest(1.001 * largest, mantissa) == last && fp8_nearest(INFINITY, mantissa) == last &&
              fp8_nearest(-1e30, mantissa) == (last | 0x80),
          "%d: saturation", mantissa);
    CHECK(isnan(fp8_value(fp8_nearest(NAN, mantissa), mantissa)), "%d: NaN", mantissa);
}

static void check_formats(void) {
    check_format(3, 448, ldexp(1, -9));
    check_format(2, 57344, ldexp(1, -16));
    CHECK(fp8_value(0x38, 3) == 1 && fp8_value(0x3c, 2) == 1, "one");
    CHECK(isnan(fp8_value(0x7f, 3)) && isinf(fp8_value(0x7c, 2)) && isnan(fp8_value(0x7d, 2)), "not finite");
}

// ----------------------------------------------------------------------------
// shapes

// The first N rows of the fused projection are those of q, k, v and the output gate; all weights but those of
// gates and norms are in FP8.
static void check_shapes(const char* name, int64_t num_kv_heads, int64_t small) {
    Config c = preset(name);
    c.num_kv_heads = num_kv_heads; // 0: as many as heads
    ParamTable table = params_build(&c);
    Fp8Shape shapes[FP8_LINEARS];
    fp8_shapes(shapes, &c, &table);
    int64_t rows = 0, count = 0;
    for (int r = 0; r < table.num_rows; r++) {
        const Param* p = &table.rows[r];
        if (p->layer != 0 || p->ndim != 2 || p->shape[0] <= c.num_heads) continue;
        count += p->count;
        if (p->column < 0) continue;
        CHECK(p->column == rows, "%s: %s at row %lld", name, p->name, (long long)p->column);
        rows += p->shape[0];
    }
    CHECK(rows == shapes[FP8_IN_PROJ].N && table.by_layer[0].proj.rows - rows == small, "%s: %lld rows", name,
          (long long)rows);
    for (int i = 0; i < FP8_LINEARS; i++) {
        const Param* p = params_find(&table, shapes[i].kind, 0);
        CHECK(p && p->shape[1] == shapes[i].K && (i == FP8_IN_PROJ || p->shape[0] == shapes[i].N),
              "%s: linear layer %d", name, i);
    }
    CHECK(fp8_block_bytes(shapes) == 2 * count, "%s: a block's bytes", name);
    CHECK(fp8_weight_bytes(&c, &table) == 2 * count * c.num_hidden_layers + fp8_head_bytes(&c),
          "%s: bytes of weights", name);
    params_free(&table);
}

static void check_model_shapes(void) {
    check_shapes("fox-pro-760m", 0, 3 * 24);
    check_shapes("fox-pro-760m", 6, 24 + 2 * 6);
    check_shapes("fox-llama-125m", 0, 12);
    check_shapes("transformer-pro-125m", 0, 24);
    check_shapes("transformer-llama-360m", 4, 0);
    const Config c = preset("fox-pro-760m");
    ParamTable table = params_build(&c);
    CHECK(fp8_weight_bytes(&c, &table) == (int64_t)2 * 1536 * (24 * (5 * 1536 + 3 * 3584) + 50304),
          "760m: weights");
    CHECK(fp8_pass_bytes(&c, &table, 16384) == (int64_t)16384 * (3584 + 1536 + 6144 + 1536 + 6144),
          "760m: a pass");
    params_free(&table);
}

static void check_refusals(void) {
    Config c = preset("fox-pro-125m");
    fp8_check(&c, 16384);
    CHECK_DIES("--fp8: a rank's tokens of a sequence must be a multiple of 16, not 1000",
               fp8_check(&c, 1000));
    c.intermediate_size = 1000;
    CHECK_DIES("--fp8: hidden_size and intermediate_size must be multiples of 16, not 768 and 1000",
               fp8_check(&c, 16384));
    c = preset("mamba2-125m");
    CHECK_DIES("has no GEMMs in FP8", fp8_check(&c, 16384));
}

// ----------------------------------------------------------------------------
// the record

// The history in a record; false: it has none.
static bool parse(uint16_t* history, int64_t count, const char* text) {
    Error error;
    Json record;
    if (!json_parse(&record, "a record", text, strlen(text), &error)) die("%s", error.msg);
    const bool found = fp8_history_read(history, count, &record);
    json_free(&record);
    return found;
}

static void check_record(void) {
    enum { COUNT = 5 };
    const uint16_t history[COUNT] = {0, 0x3f80, 0x7f7f, 0x00a1, 0xbeef & 0x7fff};
    uint16_t again[COUNT] = {0};
    char json[100];
    char* text = fp8_history_text(history, COUNT);
    CHECK(strcmp(text, "00003f807f7f00a13eef") == 0, "'%s'", text);
    snprintf(json, sizeof json, "{\"step\": 3, \"fp8\": \"%s\"}", text);
    CHECK(parse(again, COUNT, json) && memcmp(again, history, sizeof history) == 0, "read back");
    CHECK(!parse(again, COUNT, "{\"step\": 3}"), "without scales");
    static const char* const bad[] = {
        "{\"fp8\": \"00003f807f7f00a13ee\"}",   "{\"fp8\": 3}",
        "{\"fp8\": \"00003f807f7f00a13eefa\"}", "{\"fp8\": \"00003f807f7f00a17f80\"}",
        "{\"fp8\": \"00003f807f7f00a1bf80\"}",  "{\"fp8\": \"00003f807f7f00a13eeX\"}"};
    for (int i = 0; i < 6; i++) CHECK_DIES("trainer.json: 'fp8' is not valid", parse(again, COUNT, bad[i]));
    free(text);
}

static int test_fp8(void) {
    check_formats();
    check_model_shapes();
    check_refusals();
    check_record();
    return test_report();
}
