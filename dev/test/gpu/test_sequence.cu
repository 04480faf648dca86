/*
Sequences that several ranks share (--sequence-ranks), on one GPU.

    processes   two processes, connected as two GPUs are (peers.cuh), with time slices of one GPU: with heads
                exchanged, with halos, and with both in one model
    answers     four and two processes whose layers have a halo in one pass and none in the next, because one rank's
                tokens do not forget: steps of several passes, validations between them, shorter sequences
                (shared_processes.cuh)
    blocks      heads_split, heads_join and rank-major weights against llmc/sequence/split.h on the host,
                with and without a table of heads
    variants    2 to 4 ranks in this process, which write to one another's buffers: losses, and the sum of the
                gradients, are those of one rank but for rounding. Every family and switch, windows, packed
                documents, all levels of recomputation, which do not change a bit, nor does a second pass. Models
                that prune also with a random table of heads, and with the one that its counts lead to (assignment.cuh)
    halos       the same with a halo of 128 tokens in every layer (halo.cuh), which the gates forget; without one the
                limits would be exceeded. Whether it suffices, against the sums of log gates on the host
    ./test_sequence [PART...]     all parts where none is named; `quick`: small shapes, for compute-sanitizer
*/
#include "shared_processes.cuh"

// A row of the table of heads: any order of them.
static std::vector<int> random_row(int heads, uint64_t seed) {
    std::vector<int> row((size_t)heads);
    for (int h = 0; h < heads; h++) row[(size_t)h] = h;
    for (int h = heads - 1; h > 0; h--)
        std::swap(row[(size_t)h], row[(size_t)(random_u64(seed, 7, (uint64_t)h) % (uint64_t)(h + 1))]);
    return row;
}

// The blocks that all ranks have kept of each head, [L, KVH], which each rank then has from all.
static std::vector<unsigned long long> sum_kept(Model* models, int ranks) {
    const int64_t n = models[0].config.num_hidden_layers * config_key_heads(&models[0].config),
                  bytes = n * (int64_t)sizeof(unsigned long long);
    std::vector<unsigned long long> own((size_t)n), all((size_t)n);
    for (int r = 0; r < ranks; r++) {
        assignment_collect(&models[r].sequence.heads, models[r].stream);
        CUDA_CHECK(cudaStreamSynchronize(models[r].stream));
        device_download(own.data(), models[r].sequence.heads.all_kept, bytes);
        for (size_t i = 0; i < own.size(); i++) all[i] += own[i];
    }
    for (int r = 0; r < ranks; r++)
        CUDA_CHECK(
            cudaMemcpy(models[r].sequence.heads.all_kept, all.data(), (size_t)bytes, cudaMemcpyHostToDevice));
    return all;
}

// Models that prune, with a random table of heads and then with the table that follows from the counts.
// first: of the random table, at any level of recomputation.
static void check_assigned(const char* name, Model* models, int ranks, const Batch* batch,
                           const Result* alone, Result* first) {
    const Config* c = &models[0].config;
    const int64_t L = c->num_hidden_layers, KVH = config_key_heads(c), bytes = L * KVH * (int64_t)sizeof(int);
    char label[300];
    snprintf(label, sizeof label, "%s, heads assigned", name);
    std::vector<int> assignment, assigned((size_t)(L * KVH));
    for (int64_t l = 0; l < L; l++) {
        const std::vector<int> row = random_row((int)KVH, (uint64_t)l);
        assignment.insert(assignment.end(), row.begin(), row.end());
    }
    for (int r = 0; r < ranks; r++) {
        assignment_open(&models[r].sequence.heads, c);
        CUDA_CHECK(cudaMemcpy(models[r].sequence.heads.assignment, assignment.data(), (size_t)bytes,
                              cudaMemcpyHostToDevice));
    }
    Result result = run_ranks(models, ranks, batch->inputs, batch->targets);
    if (first->grads.empty()) {
        compare_results(label, &models[0], ranks, &result, alone);
        *first = result;
    }
    CHECK(result.grads == first->grads && result.losses == first->losses,
          "%s, %d ranks, --recompute %s: other bits", label, ranks,
          option_recompute_names[models[0].recompute]);
    const std::vector<unsigned long long> kept = sum_kept(models, ranks);
    unsigned long long sum = 0;
    for (unsigned long long n : kept) sum += n;
    CHECK(sum == result.kept, "%s, %d ranks: heads have %llu of %llu blocks", label, ranks, sum, result.kept);
    for (int64_t l = 0; l < L; l++)
        sequence_assign_heads(&assignment[(size_t)(l * KVH)], &kept[(size_t)(l * KVH)], ranks,
                              (int)KVH / ranks);
    for (int r = 0; r < ranks; r++) {
        assign_heads(&models[r].sequence.heads, models[r].stream);
        CUDA_CHECK(cudaStreamSynchronize(models[r].stream));
        device_download(assigned.data(), models[r].sequence.heads.assignment, bytes);
        CHECK(assigned == assignment, "%s, rank %d of %d: another table", label, r, ranks);
    }
    result = run_ranks(models, ranks, batch->inputs, batch->targets);
    compare_results(label, &models[0], ranks, &result, alone);
    CHECK(sum_kept(models, ranks) == kept, "%s, %d ranks: other heads' blocks", label, ranks);
}

// A variant on `ranks` ranks, at every level of recomputation, and on one.
static void check_shared(const char* name, int64_t B, int64_t T, int ranks) {
    Batch batch(name, B, T);
    const Result alone = run_alone(&batch, B, T);
    Result first = {}, first_assigned = {};
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        Model models[RANKS_MOST];
        for (int r = 0; r < ranks; r++)
            models[r] = rank_model(&batch.start.config, batch.start.params, B, T, sequence_group(r, ranks),
                                   (Recompute)recompute);
        connect(models, ranks, batch.inputs);
        for (int again = 0; again < 2; again++) {
            const Result result = run_ranks(models, ranks, batch.inputs, batch.targets);
            if (first.grads.empty()) {
                compare_results(name, &models[0], ranks, &result, &alone);
                first = result;
            }
            CHECK(result.grads == first.grads && result.losses == first.losses,
                  "%s, %d ranks, --recompute %s, pass %d: other bits", name, ranks,
                  option_recompute_names[recompute], again);
        }
        if (config_prunes(&batch.start.config))
            check_assigned(name, models, ranks, &batch, &alone, &first_assigned);
        free_models(models, ranks);
    }
}

// ----------------------------------------------------------------------------
// parts

enum BlocksOf { OF_O, OF_PROJ };

// A rank-major weight has, at each place, the element of the model's that `from` has there, and
// its gradient is added to that element; padding is 0.
static void check_rank_major_tensor(const char* what, const RankMajorTensor* t, const HeadLayout* layout,
                                    const std::vector<int64_t>& from) {
    const size_t n = (size_t)(t->padded * t->width);
    std::vector<uint16_t> w(n), got(n);
    Floats sums(n, 0.5f), added(n);
    for (size_t i = 0; i < n; i++) w[i] = (uint16_t)random_u64(5, 0, i), added[i] = (float)i;
    bf16 *dw = (bf16*)device_bytes(2 * n), *to = (bf16*)device_bytes(2 * n);
    float *gradient = (float*)device_bytes(4 * n), *dcopy = (float*)device_bytes(4 * n);
    CUDA_CHECK(cudaMemcpy(dw, w.data(), 2 * n, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(gradient, sums.data(), 4 * n, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(dcopy, added.data(), 4 * n, cudaMemcpyHostToDevice));
    CUDA_LAUNCH(rank_major_weights_kernel, ceil_div<size_t>(n / 8, 256), 256, 0, to, dw, *t, *layout);
    CUDA_LAUNCH(rank_major_add_kernel, ceil_div<size_t>(n / 4, 256), 256, 0, gradient, dcopy, *t, *layout);
    device_download(got.data(), to, (int64_t)(2 * n));
    device_download(sums.data(), gradient, (int64_t)(4 * n));
    device_download(added.data(), dcopy, (int64_t)(4 * n));
    int64_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        const bool padding = i >= from.size();
        wrong += got[i] != (padding ? 0 : w[(size_t)from[i]]) || (!padding && added[i] != 0);
        wrong += !padding && sums[(size_t)from[i]] != 0.5f + (float)i;
    }
    CHECK(wrong == 0, "%s, %d ranks: %lld elements are wrong", what, layout->columns.ranks, (long long)wrong);
    for (void* p : {(void*)dw, (void*)to, (void*)gradient, (void*)dcopy}) device_free(p);
}

// Rank-major weights against what ranks' rows have (head_columns_whole).
static void check_rank_major_weights(const Config* c, const ParamTable* table, const int* assignment,
                                     const int* device_assignment, int ranks) {
    const int d = (int)c->hidden_size;
    const int gate = (int)params_column(table, P_OGATE_PROJ, 0), R = (int)table->by_layer[0].proj.rows,
              width = 16;
    const HeadColumns proj = head_columns_of_proj(table, c, ranks), o = head_columns_of_o(c, ranks);
    const HeadLayout layout = {
        .columns = proj, .assignment = device_assignment, .gate = gate, .width = o.part[0].width, .d = d};
    std::vector<int> rows((size_t)R, -1); // of the rank-major projection, in the model's
    size_t wide = 0;
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < proj.wide; i++) rows[wide++] = head_columns_whole(&proj, assignment, r, i);
    for (int r = 0; r < ranks && gate >= 0; r++)
        for (int i = 0; i < o.columns; i++)
            rows[(size_t)(gate + r * o.columns + i)] = gate + head_columns_whole(&o, assignment, r, i);
    for (int p = 3; p < proj.parts; p++)
        for (int r = 0; r < ranks; r++)
            for (int i = 0, n = proj.heads * proj.part[p].width; i < n; i++)
                rows[(size_t)(proj.part[p].column + r * n + i)] =
                    head_columns_whole(&proj, assignment, r, proj.part[p].local + i);
    for (int row : rows) CHECK(row >= 0, "a row of none of the tensors");
    const RankMajorTensor in_proj = {P_Q_PROJ, R, matmul_padded(R), width, false},
                          o_proj = {P_O_PROJ, 3, 3, d, true};
    std::vector<int64_t> of_rows, of_columns;
    for (int row : rows)
        for (int i = 0; i < width; i++) of_rows.push_back(row * width + i);
    for (int row = 0; row < 3; row++)
        for (int r = 0; r < ranks; r++)
            for (int i = 0; i < o.columns; i++)
                of_columns.push_back((int64_t)row * d + head_columns_whole(&o, assignment, r, i));
    check_rank_major_tensor("the projection", &in_proj, &layout, of_rows);
    check_rank_major_tensor("o_proj", &o_proj, &layout, of_columns);
}

// seed: of the table's row; 0: without a table.
static void check_blocks(const Config& c, int ranks, int64_t B, int64_t Tn, BlocksOf of, uint64_t seed) {
    ParamTable table = params_build(&c);
    const HeadColumns columns =
        of == OF_O ? head_columns_of_o(&c, ranks) : head_columns_of_proj(&table, &c, ranks);
    const int64_t stride = of != OF_O ? matmul_padded(table.by_layer[0].proj.rows) : c.hidden_size,
                  rows = B * Tn;
    const int64_t own = Tn * columns.stride, block = B * own; // elements of a sequence, and of a block
    const std::vector<int> row = random_row((int)config_key_heads(&c), seed);
    const size_t row_bytes = row.size() * sizeof(int);
    const int* assignment = seed ? row.data() : NULL;
    int* device_assignment = seed ? (int*)device_bytes(row_bytes) : NULL;
    if (seed) CUDA_CHECK(cudaMemcpy(device_assignment, assignment, row_bytes, cudaMemcpyHostToDevice));
    if (of == OF_PROJ) check_rank_major_weights(&c, &table, assignment, device_assignment, ranks);
    const HeadRows shape = head_rows(&columns, stride, B, Tn);
    std::vector<uint16_t> x((size_t)(rows * stride)), back(x.size()), blocks((size_t)(ranks * block));
    for (size_t i = 0; i < x.size(); i++) x[i] = (uint16_t)random_u64(3, 0, i);
    bf16 *dx = (bf16*)device_bytes(x.size() * 2), *dblocks = (bf16*)device_bytes(blocks.size() * 2);
    int64_t wrong = 0, lost = 0;
    CUDA_CHECK(cudaMemcpy(dx, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
    HeadBlocks to = {.block_stride = own};
    for (int r = 0; r < ranks; r++) to.ranks[r] = {dblocks + r * block, dx, r};
    heads_split(&to, &shape, 0);
    device_download(blocks.data(), dblocks, (int64_t)blocks.size() * 2);
    for (int64_t i = 0; i < ranks * block; i++) {
        const int64_t at = i % block / columns.stride * stride;
        const int whole = head_columns_whole(&columns, NULL, (int)(i / block), (int)(i % columns.stride));
        wrong += blocks[(size_t)i] != (whole < 0 ? 0 : x[(size_t)(at + whole)]);
    }
    CUDA_CHECK(cudaMemset(dx, 0xFF, x.size() * 2));
    heads_join(&to, &shape, 0);
    device_download(back.data(), dx, (int64_t)x.size() * 2);
    std::vector<char> of_heads((size_t)stride);
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < columns.columns; i++)
            of_heads[(size_t)head_columns_whole(&columns, NULL, r, i)] = 1;
    for (size_t i = 0; i < x.size(); i++) lost += back[i] != (of_heads[i % (size_t)stride] ? x[i] : 0xFFFF);
    CHECK(wrong == 0 && lost == 0,
          "%lld heads, %lld of keys, %d ranks: %lld elements of blocks are wrong, %lld of rows",
          (long long)c.num_heads, (long long)config_key_heads(&c), ranks, (long long)wrong, (long long)lost);
    device_free(dx);
    device_free(dblocks);
    device_free(device_assignment);
    params_free(&table);
}

static Config preset_of(const char* name, int64_t num_kv_heads) {
    Error err;
    Config c;
    Recipe recipe;
    if (!config_preset(&c, &recipe, name, &err)) die("%s", err.msg);
    c.num_kv_heads = num_kv_heads;
    return c;
}

static void test_blocks(void) {
    static const struct {
        const char* preset;
        int64_t num_kv_heads;
    } models[] = {{"fox-pro-125m", 0},
                  {"transformer-llama-125m", 0},
                  {"fox-llama-125m", 0},
                  {"fox-pro-125m", 6},
                  {"transformer-llama-125m", 4}};
    for (const auto& m : models)
        for (int ranks : {2, 3, 4, 6, 12}) {
            const Config c = preset_of(m.preset, m.num_kv_heads);
            if (config_key_heads(&c) % ranks != 0) continue;
            check_blocks(c, ranks, 1, 37, OF_PROJ, 0);
            check_blocks(c, ranks, 3, 5, OF_PROJ, 0);
            check_blocks(c, ranks, 2, 17, OF_O, 0);
            check_blocks(c, ranks, 1, 300, OF_PROJ, 1);
            check_blocks(c, ranks, 3, 5, OF_PROJ, 2);
            check_blocks(c, ranks, 1, 17, OF_O, 3);
        }
}

static void test_variants(void) {
    char name[256];
    for (const cpu::Variant& v : cpu::variants) {
        const Config c = cpu::variant_config(v.name);
        if (!config_all_attention(&c) || config_key_heads(&c) == 1 || v.T == 1) continue;
        const int ranks = (int)config_key_heads(&c); // 2 or 3
        cpu::variant_for_gpu(name, sizeof name, v.name);
        check_shared(name, v.B, ((v.T < 64 ? v.T + 64 : v.T) + ranks - 1) / ranks * ranks, ranks);
    }
    static const struct {
        const char* name;
        int64_t B, T;
    } wide[] = {{"fox-pro num_heads=4 hidden_size=256", 2, 300},
                {"fox-pro num_heads=4 hidden_size=512", 1, 260}, // heads of 128 channels
                {"fox-pro num_heads=4 hidden_size=256 fgate_bias_init=true", 1, 2048},
                {"fox-llama num_heads=8 hidden_size=512 fgate_type=bias_only", 1, 1024},
                {"fox-pro num_heads=4 hidden_size=256 qk_norm_share_param_across_head=true", 2, 128},
                {"fox-pro num_heads=4 hidden_size=256 qk_norm=false window_size=100", 1, 512},
                {"transformer-pro num_heads=4 hidden_size=256", 3, 64},
                {"transformer-llama num_heads=4 hidden_size=256", 2, 200},
                {"transformer-swa num_heads=4 hidden_size=256 window_size=70", 1, 512},
                {"fox-pro num_heads=4 hidden_size=256 document_reset=true", 2, 300},
                {"fox-llama num_heads=4 hidden_size=256 document_reset=true fgate_type=fixed", 1, 300},
                {"transformer-pro num_heads=4 hidden_size=256 document_reset=true", 2, 300},
                {"fox-pro num_heads=4 hidden_size=256 document_reset=true window_size=70", 1, 500},
                {"fox-pro num_heads=12 num_kv_heads=4 hidden_size=768", 1, 260},
                {"fox-llama num_heads=8 num_kv_heads=4 hidden_size=512 document_reset=true", 2, 300},
                {"transformer-llama num_heads=8 num_kv_heads=4 hidden_size=1024", 1, 200}};
    for (const auto& w : wide)
        for (int ranks : {2, 4}) {
            snprintf(name, sizeof name, "%s intermediate_size=72", w.name);
            check_shared(name, w.B, w.T, ranks);
        }
    check_shared("fox-pro layer_types=attention:window=70,attention:rope num_heads=4 hidden_size=256 "
                 "intermediate_size=72",
                 1, 512, 4);
}

static void test_quick(void) {
    poison = false;
    check_blocks(preset_of("fox-pro-125m", 0), 2, 2, 5, OF_PROJ, 0);
    check_shared("fox-pro hidden_size=128 intermediate_size=72", 2, 66, 2);
    check_shared("transformer-llama hidden_size=128 intermediate_size=72", 1, 130, 2);
    check_halos("fox-pro hidden_size=128 intermediate_size=72", 2 * HALO, 2);
}

int main(int argc, char** argv) {
    static const struct {
        const char* name;
        void (*run)(void);
    } parts[] = {
        {"blocks", test_blocks}, {"variants", test_variants}, {"halos", test_halos}, {"quick", test_quick}};
    const int num_parts = (int)(sizeof parts / sizeof parts[0]);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    alarm(SECONDS_MOST); // a rank that waits for ever
    // before this process opens the GPU: a child could not use it
    const bool processes = argc == 1 || strcmp(argv[1], "processes") == 0,
               answers = argc == 1 || strcmp(argv[1], "answers") == 0;
    if (processes) ranks_run(2, process_body);
    if (answers) ranks_run(4, answers_body), ranks_run(2, lengths_body);
    if (argc == 2 && (processes || answers)) return test_report();
    Device device = device_open(0);
    printf("on %s\n", device.name);
    for (int i = 0; i < num_parts; i++) {
        bool named = argc == 1 && i < num_parts - 1;
        for (int a = 1; a < argc; a++) named = named || strcmp(parts[i].name, argv[a]) == 0;
        if (named) parts[i].run();
    }
    for (int which = 0; which < 2; which++)
        printf("%s: at most %.1e, limit %.1e: %s\n", which ? "gradients" : "losses", worst[which],
               which ? GRADIENT_LIMIT : LOSS_LIMIT, worst_where[which]);
    return test_report();
}
