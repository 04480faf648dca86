/*
A run's data as this rank reads it: its share of a step's micro-batches, that of its group where ranks share
sequences (llmc/model/sequence.h), in loaders of the run's sequences.

Called by llmc/train, and by llmc/eval for what it measures. Errors end the program.
*/
#pragma once

#include <sys/resource.h>
#include "../tokens/vocab_check.h"
#include "chosen_model.h"
#include "recipe.h"
#include "run.h"

// This rank's share of a number of micro-batches: that of its group.
static inline DataShare run_share(const Run* run, int64_t micro_batches) {
    const int N = run->group.size;
    return data_share(micro_batches, run->micro_batch, run->world->rank / N, run->world->size / N);
}

// Warns of data that was encoded for another model: its vocabulary does not have the model's end of text, or,
// where that is the data's own (model_complete), much less than the model's.
static inline void run_warn_vocabulary(const Run* run, const DataLoader* data, const char* glob) {
    enum { PADDING = 128 }; // rows that are added for the sake of GEMMs
    static int64_t warned;  // of training and held-out data once
    const int64_t V = data->set.shards[0].header.vocab_size, end = config_end_of_text(&run->config);
    const bool own = !run_resumed(run) && !run->options.init && !model_sets(&run->options, "eos_token_id");
    const bool fits = end < V && (!own || run->config.vocab_size < V + PADDING);
    if (V == 0 || V == warned || fits || run->world->rank != 0) return;
    warned = V;
    warn("'%s': has a vocabulary of %s, the model one of %lld with end of text at %lld: the model will not "
         "meet the others; a new model of this data is made with --set vocab_size=%lld (and bos_token_id and "
         "eos_token_id, unless its last token ends texts)",
         glob, counted(V, "token").text, (long long)run->config.vocab_size, (long long)end, (long long)V);
}

// Warns of a token stream whose texts begin with another token than the model's end of text: the model would
// begin its own texts, and those that it scores, with a token that it never sees in training. Only streams
// that a conversion wrote (set_shards) are known to begin with end of text. An unreadable shard is reported where
// it is used.
static inline void run_warn_end_of_text(const Run* run, const DataLoader* data, const char* glob) {
    static bool warned; // of training and held-out data once
    const DataShard* shard = &data->set.shards[0];
    const ShardHeader* h = &shard->header;
    const int64_t end = config_end_of_text(&run->config);
    int32_t token = 0;
    int fd;
    Error ignored;
    if (h->doc_len || !h->set_shards || h->set_index || warned || run->world->rank != 0) return;
    if (!shard_open(shard->path, &fd, &ignored)) return;
    const bool read = shard_read_tokens(fd, shard->path, h, 0, 1, &token, &ignored);
    close(fd);
    const int64_t first = h->masked ? (int64_t)((uint32_t)token & ~SHARD_COUNTS) : token;
    if (!read || first == end) return;
    warned = true;
    warn("'%s': its texts begin with token %lld, the model ends texts with %lld; a new model of this data is "
         "made with --set bos_token_id=%lld --set eos_token_id=%lld",
         glob, (long long)first, (long long)end, (long long)first, (long long)first);
}

// Dies where the data was encoded with another tokenizer than that of the weights which the run starts from,
// as far as both are known. Rank 0 alone reads the folder.
static inline void run_check_tokenizer(const Run* run, const DataLoader* data, const char* glob) {
    const char* folder = run_resumed(run) ? run->checkpoint : run->options.init;
    char path[PATH_LENGTH];
    if (!folder || run->world->rank != 0) return;
    path_join(path, folder, "tokenizer.json");
    if (vocab_differs(dataset_vocab_hash(&data->set), vocab_hash_of_file(path)))
        die("'%s': was encoded with another tokenizer than the model's, %s; encode the text with that one",
            glob, path);
}

// Opens shards in sequences and micro-batches of the run, this rank's share of each `micro_batches`. They are
// read in order.
static inline void run_open_data(const Run* run, DataLoader* data, const char* glob, int64_t micro_batches) {
    Error err;
    const Options* o = &run->options;
    DataOptions options = data_options(&run->config, o->seq_len);
    options.batch = run->micro_batch;
    options.share = run_share(run, micro_batches);
    options.seed = (uint64_t)o->seed;
    if (!dataloader_open(data, glob, &options, &err)) die("%s", err.msg);
    data->counts_documents = run->config.document_reset;
    data->windows = model_windows(&run->config);
    run_warn_vocabulary(run, data, glob);
    run_warn_end_of_text(run, data, glob);
    run_check_tokenizer(run, data, glob);
}

// Sets the order in which a training reads its data, before anything is read.
static inline void run_choose_order(Run* run, DataLoader* data) {
    if (run->options.shuffle == OPTION_UNSET) run->options.shuffle = data_default_order(data);
    data->options.shuffle = run->options.shuffle == SHUFFLE_TRUE;
}

// Dies where the process may not open all files that it will need at once: the shards that its loaders keep
// open (val_data may be NULL), and some for a save. Raises its limit as far as it may itself.
static inline void run_reserve_files(const DataLoader* data, const DataLoader* val_data) {
    enum { OTHERS = 16, MOST = 2 * DATALOADER_OPEN_FILES + OTHERS };
    const DataLoader* const loaders[] = {data, val_data};
    int fds[MOST], files = OTHERS, opened = 0;
    for (int i = 0; i < 2; i++) {
        const int64_t shards = loaders[i] ? loaders[i]->set.num_shards : 0;
        files += shards < DATALOADER_OPEN_FILES ? (int)shards : (int)DATALOADER_OPEN_FILES;
    }
    for (bool raised = false;; raised = true) {
        while (opened < files && (fds[opened] = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)) >= 0) opened++;
        const int why = errno, missing = files - opened;
        while (opened > 0) close(fds[--opened]);
        if (missing == 0) return;
        struct rlimit limit = {0, 0};
        getrlimit(RLIMIT_NOFILE, &limit);
        const rlim_t wanted = limit.rlim_cur + (rlim_t)missing;
        if (raised)
            die("the shards and a save need %s at once, %d more than this process may have: %s; raise its "
                "limit with ulimit -n %lld",
                counted(files, "open file").text, missing, strerror(why), (long long)wanted);
        limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit); // the next attempt tells whether it was enough
    }
}
