/*
What a run asks of its data at the start: that it is the data which the checkpoint was trained on, that it was
encoded with the model's tokenizer, and which tokenizer checkpoints get. Data that cannot be used ends the
program.

Called by train.h, in all ranks.
*/
#pragma once

#include "../serve/generate.h"
#include "../checkpoint/hf/tokenizer.h"
#include "../run/agreement.h"
#include "../run/resume.h"
#include "../tokens/vocab_check.h"
#include "../tokens/fingerprint.h"

enum { DATA_WARNING_BYTES = PATH_LENGTH + 160 };

// Dies where the data is not the one that the checkpoint was trained on. Ranks must agree on the data, too.
static inline void data_check(Run* run, const DataLoader* data, const DataLoader* val_data) {
    Error err;
    TrainerState* state = &run->state;
    const Options* o = &run->options;
    uint64_t print = 0, val_print = 0;
    int64_t sequences = dataloader_sequences(data);
    bool ok = dataset_fingerprint(&data->set, &print, &err) &&
              (!val_data || dataset_fingerprint(&val_data->set, &val_print, &err));
    if (!ok) die("%s", err.msg);
    const RankField fields[] = {{"shards in --data", print}, {"shards in --val-data", val_print}};
    ranks_compare(run->world, fields);
    if (state->fingerprint && state->fingerprint != print && !o->data_changed)
        die("--data %s: not the data that the run in %s was trained on (%s now, %lld then); give "
            "--data-changed to go on with it",
            o->data, resume_name(run), counted(sequences, "sequence").text, (long long)state->sequences);
    run->data_changed = state->fingerprint && state->fingerprint != print;
    char at[RUN_PROGRESS_BYTES];
    if (run->data_changed && state->step >= run->last_step)
        die("--data-changed: the run in %s is at %s, where nothing is left to train on other data",
            resume_name(run), run_progress(at, run));
    state->fingerprint = print;
    state->sequences = sequences;
}

// Rank 0 reads the tokenizer of checkpoints and samples: beside the data, in the checkpoint that is resumed
// or in --init, or else the run's own, unless the data says that it has another.
static inline void data_find_tokenizer(HfTokenizer* t, const Run* run, const DataLoader* data) {
    Error err;
    const char* folder = run_resumed(run) ? run->checkpoint : run->options.init;
    const bool infers = run->options.sample_every || run->options.eval_requests;
    if ((!run->options.out && !infers) || run->world->rank != 0) return;
    bool ok =
        hf_tokenizer_find(t, data->set.shards[0].path, folder, &run->config, run->options.json_escape, &err);
    if (ok && !t->json) {
        Tokenizer own = sample_tokenizer(run, false);
        ByteBuffer json = {NULL, 0, 0};
        if (own.vocab_size > 0 && !vocab_differs(dataset_vocab_hash(&data->set), vocab_hash(&own))) {
            tokenizer_json(&own, &json);
            ok = hf_tokenizer_set(t, "tokenizer.json", json.data, &run->config, run->options.json_escape,
                                  &err);
        }
        tokenizer_free(&own);
    }
    if (!ok) die("%s", err.msg);
}

// Are the tokens bytes, also by the data's vocabulary where it is known?
static inline bool data_is_bytes(const Run* run, const DataLoader* data) {
    Tokenizer bytes;
    if (!run_reads_bytes(run)) return false;
    tokenizer_bytes(&bytes);
    const bool other = vocab_differs(dataset_vocab_hash(&data->set), vocab_hash(&bytes));
    tokenizer_free(&bytes);
    return !other;
}

// Dies where the data was encoded with another tokenizer than the held-out data or the one beside its shards,
// which checkpoints get, as far as both are known. Rank 0 alone reads files.
static inline void data_check_tokenizer(const Run* run, const DataLoader* data, const DataLoader* val_data) {
    const Options* o = &run->options;
    const uint64_t hash = dataset_vocab_hash(&data->set);
    char path[PATH_LENGTH];
    if (val_data && vocab_differs(hash, dataset_vocab_hash(&val_data->set)))
        die("--val-data %s: was encoded with another tokenizer than --data %s", o->val_data, o->data);
    if (run->world->rank != 0) return;
    if (shard_tokenizer_beside(path, data->set.shards[0].path) &&
        vocab_differs(hash, vocab_hash_of_file(path)))
        die("%s: is not the tokenizer of the shards beside it, which their headers know by a hash; restore "
            "it, or move it away to train without one",
            path);
}

// Dies where the first batch of the held-out data cannot be read, as where it was encoded for a larger
// vocabulary: the run would end at its first validation, and lose what was trained by then. Measuring begins
// there again.
static inline void data_check_held_out(DataLoader* val_data) {
    Error err;
    const DataOptions* o = &val_data->options;
    const size_t count = (size_t)o->batch * (size_t)o->seq_len;
    if (o->share.count == 0) return;
    int32_t* tokens = (int32_t*)xcalloc(2 * count, sizeof *tokens);
    if (!dataloader_next(val_data, tokens, tokens + count, &err)) die("%s", err.msg);
    free(tokens);
}

// Whether shards of the validation data, or copies of them, are in the training data, too. Writes the warning
// to text[DATA_WARNING_BYTES].
static inline bool data_is_shared(const DataLoader* data, const DataLoader* val_data, char* text) {
    Error err;
    int64_t shared;
    const char* example = NULL; // where none is shared
    if (!dataset_shared(&val_data->set, &data->set, &shared, &example, &err)) die("%s", err.msg);
    if (!shared) return false;
    snprintf(
        text, DATA_WARNING_BYTES,
        "--val-data: %s is also in --data (shards that are in both: %lld); the validation loss is that of "
        "text which is trained on",
        example, (long long)shared);
    return true;
}
