/*
Generation: continues a prompt, for --generate and for samples during training.

The model reads its end-of-text token and the prompt, then draws tokens until end of text, a stop string or a
maximum number of tokens. The tokenizer is the byte tokenizer or GPT-2's, from the model's tokenizer.json or
--vocab. With any other one, token ids are printed as numbers, which scripts/prompt.py turns into text. With
--json-escape prompts are escaped and generated text is unescaped, since the model was trained on escaped
text.

--prompt - reads prompts from standard input, one a line. With --samples N the prompt is read once and
continued N times; the first sample is printed as it is generated, the others after it.

Errors (no tokenizer, too little memory, logits that are not finite) end --generate with a message. A sample
during training that does not fit into the device's memory is skipped with a warning.

Called by main.h and train.h. request.h uses GeneratedText.
*/
#pragma once

#include "../checkpoint/hf/tokenizer.h"
#include "../checkpoint/hf/tokenizer_reader.h"
#include "engine.h"

static const int64_t GENERATE_DEFAULT_TOKENS = 128, GENERATE_ROWS = 512; // ROWS: of a pass during training

// ----------------------------------------------------------------------------
// text

// A stop string: ends a text, and is not part of it.
typedef struct {
    char* text; // [bytes]
    size_t bytes;
    TokenBuffer ids; // or tokens
} Stop;

typedef struct {
    Stop* items;
    int count;
} Stops;

// Generated tokens as text, decoded one at a time
typedef struct {
    const Tokenizer* tokenizer; // vocab_size 0: none
    const Stops* stops;
    bool json_escape;
    ByteBuffer text;   // what is written so far, zero-terminated
    ByteBuffer escape; // bytes of tokens that may be part of an escape
    size_t certain;    // bytes of text that no stop string can take back
    bool stopped;      // text ends where a stop string began
} GeneratedText;

static inline void stops_free(Stops* stops) {
    for (int i = 0; i < stops->count; i++) {
        free(stops->items[i].text);
        free(stops->items[i].ids.data);
    }
    free(stops->items);
    memset(stops, 0, sizeof *stops);
}

// Adds an empty stop and returns it.
static inline Stop* stops_add(Stops* stops) {
    stops->items = (Stop*)xrealloc(stops->items, (size_t)(stops->count + 1) * sizeof *stops->items);
    return (Stop*)memset(&stops->items[stops->count++], 0, sizeof *stops->items);
}

// Whether a stop string begins at `at` of the text, or may begin there, where the text ends within it
static inline bool text_stops_at(const GeneratedText* t, size_t at, bool* possibly) {
    for (int i = 0; i < t->stops->count; i++) {
        const Stop* stop = &t->stops->items[i];
        size_t left = t->text.count - at;
        if (!stop->bytes ||
            memcmp(t->text.data + at, stop->text, left < stop->bytes ? left : stop->bytes) != 0)
            continue;
        if (left >= stop->bytes) return true;
        *possibly = true;
    }
    return false;
}

// Advances `certain` past all that cannot begin a stop string; ends the text where one begins.
static inline void text_search(GeneratedText* t, bool last) {
    while (!t->stopped && t->certain < t->text.count) {
        bool possibly = false;
        if (text_stops_at(t, t->certain, &possibly)) {
            t->stopped = true;
            t->text.count = t->certain;
            t->text.data[t->certain] = '\0';
        } else if (possibly && !last) {
            return;
        } else {
            t->certain++;
        }
    }
}

// Adds the bytes of tokens. An incomplete escape at their end waits for the next ones, unless they are the
// `last`.
static inline void text_add(GeneratedText* t, const char* bytes, size_t n, bool last) {
    byte_buffer_append(&t->escape, bytes, n);
    size_t used = t->escape.count, out = used;
    char* added = byte_buffer_reserve(&t->text, used + 1);
    if (t->json_escape)
        used = json_unescape(t->escape.data, used, last, added, &out);
    else
        memcpy(added, t->escape.data, used);
    memmove(t->escape.data, t->escape.data + used, t->escape.count - used);
    t->escape.count -= used;
    t->text.count += out;
    t->text.data[t->text.count] = '\0';
    text_search(t, last);
}

// Adds the text of the last one of `tokens`. Returns false if the text ends here.
static inline bool text_add_token(GeneratedText* t, const TokenBuffer* tokens, int64_t generated) {
    char number[32];
    size_t bytes = 0;
    const uint32_t token = tokens->data[tokens->count - 1];
    const char* text = tokenizer_decode(t->tokenizer, token, &bytes);
    if (!text) {
        text = number;
        bytes = (size_t)snprintf(number, sizeof number, " %u", token);
    }
    text_add(t, text, bytes, false);
    for (int i = 0; i < t->stops->count && !t->stopped; i++) {
        const TokenBuffer* ids = &t->stops->items[i].ids;
        t->stopped = ids->count > 0 && ids->count <= generated &&
                     memcmp(tokens->data + tokens->count - ids->count, ids->data,
                            (size_t)ids->count * sizeof *ids->data) == 0;
    }
    return !t->stopped;
}

// Ends the text, unless a stop string has ended it.
static inline void text_end(GeneratedText* t) {
    if (!t->stopped) text_add(t, "", 0, true);
}

static inline void text_free(GeneratedText* t) {
    free(t->text.data);
    free(t->escape.data);
    memset(t, 0, sizeof *t);
}

// ----------------------------------------------------------------------------
// what a run asks for

// Most tokens that a sample of the run has, without its prompt
static inline int64_t sample_tokens(const Run* run) {
    return run->options.generate == OPTION_UNSET ? GENERATE_DEFAULT_TOKENS : run->options.generate;
}

// Most tokens that samples during training hold, with the prompt; 0: no samples. A token of the prompt has at
// least one byte, and an escaped byte has six.
static inline int64_t sample_capacity(const Run* run) {
    const Options* o = &run->options;
    if (!o->sample_every || (run->mode != RUN_TRAIN && run->mode != RUN_DRY)) return 0;
    return 1 + (o->prompt ? (int64_t)strlen(o->prompt) : 0) * (o->json_escape ? 6 : 1) + sample_tokens(run);
}

// Sizes of a cache for `count` samples, each of which continues `prompt` tokens by n, in passes of up to
// `rows` tokens. heads: number of rows of the page table a slot.
static inline CacheSizes sample_sizes(int64_t heads, int64_t count, int64_t prompt, int64_t n, int64_t rows) {
    const int64_t most = count > rows ? count : rows;
    CacheSizes s = {.slots = count,
                    .capacity = prompt + n,
                    .rows = prompt > count ? prompt : count,
                    .outputs = count,
                    .drops = true};
    if (s.rows > most) s.rows = most;
    s.pages = count * heads * cache_table_width(&s);
    return s;
}

// Returns the tokenizer of a tokenizer.json's text, which errors call `path`. vocab_size 0: only scripts/ can
// read it.
static inline Tokenizer sample_tokenizer_parse(const char* path, const char* text) {
    Error err;
    Json j;
    Tokenizer t;
    if (!json_parse_tokenizer(&j, path, text, strlen(text), &err)) die("%s", err.msg);
    tokenizer_read_json(&t, &j);
    json_free(&j);
    return t;
}

// Returns the tokenizer of the run's model: --vocab's, or that of the folder that the weights are from, or
// bytes. vocab_size 0: there is none, or only scripts/ can read it, which is an error if `required`.
static inline Tokenizer sample_tokenizer(const Run* run, bool required) {
    Error err;
    Tokenizer t;
    char path[PATH_LENGTH], *json = NULL;
    const char *vocab = run->options.vocab, *folder = run_resumed(run) ? run->checkpoint : run->options.init;
    memset(&t, 0, sizeof t);
    path_join(path, folder ? folder : "", "tokenizer.json");
    if (folder && !vocab && !hf_read(&json, path, &err)) die("%s", err.msg);
    if (vocab && !tokenizer_gpt2(&t, vocab, &err)) die("%s", err.msg);
    if (json)
        t = sample_tokenizer_parse(path, json);
    else if (run_reads_bytes(run))
        tokenizer_bytes(&t);
    if (!t.vocab_size && required && json)
        die("%s: is neither the byte tokenizer nor GPT-2's, which are all that this program reads: "
            "scripts/prompt.py continues text with any",
            path);
    if (!t.vocab_size && required)
        die("--vocab FILE is missing: GPT-2's vocab.bpe, in the repository " GPT2_VOCAB
            ", to read the prompt and write the text; with another "
            "tokenizer, put its tokenizer.json into the folder of --init and use scripts/prompt.py");
    if (t.vocab_size > run->config.vocab_size)
        die("%s: has more tokens than the model's vocabulary of %lld", vocab ? vocab : path,
            (long long)run->config.vocab_size);
    free(json);
    return t;
}

// Appends the tokens of a text, escaped first with json_escape.
static inline void text_encode(const Tokenizer* tokenizer, bool json_escaped, const char* text, size_t bytes,
                               TokenBuffer* ids) {
    ByteBuffer escaped = {NULL, 0, 0};
    if (json_escaped) {
        json_escape(text, bytes, &escaped);
        text = escaped.data ? escaped.data : "";
        bytes = escaped.count;
    }
    tokenizer_encode(tokenizer, text, bytes, ids);
    free(escaped.data);
}

// The sampler settings of the options. Sample number k of a seed has a random stream of its own.
static inline SamplerSettings sampling_of(const Options* o, uint64_t seed, int64_t k) {
    SamplerSettings s = {o->temperature, o->top_k, o->top_p, o->min_p,
                         seed + (uint64_t)k * 0x9e3779b97f4a7c15u};
    return s;
}

// Position of the end of text with which the last document in `ids` begins; 0 without document_reset.
// Generated tokens see nothing before it.
static inline int64_t last_document(const Config* c, const TokenBuffer* ids) {
    int64_t i = ids->count - 1;
    while (i > 0 && !(c->document_reset && ids->data[i] == config_end_of_text(c))) i--;
    return i;
}

// ----------------------------------------------------------------------------
// samples of a prompt

typedef struct Generation Generation;

typedef struct {
    Sequence sequence;
    GeneratedText text;
    Generation* generation;
    size_t printed; // bytes of its text
    bool ended;
} Sample;

struct Generation {
    FILE* stream; // receives the text while it is written; NULL: none
    const char* prompt;
    size_t prompt_bytes;
    Sample* samples; // [count]
    int64_t count, printing;
};

static inline void generation_print(Generation* g, const char* bytes, size_t n) {
    if (fwrite(bytes, 1, n, g->stream) != n || fflush(g->stream) != 0)
        die("cannot write the sample: %s", strerror(errno));
}

// Prints the prompt, with a line that numbers the sample if there are several.
static inline void generation_begin(Generation* g) {
    char line[64];
    int bytes = snprintf(line, sizeof line, "--- sample %lld of %lld\n", (long long)(g->printing + 1),
                         (long long)g->count);
    if (g->count > 1) generation_print(g, line, (size_t)bytes);
    generation_print(g, g->prompt, g->prompt_bytes);
}

// Prints what is new of the sample that is being printed, and of those behind it once it has ended.
static inline void generation_stream(Generation* g) {
    while (g->stream && g->printing < g->count) {
        Sample* s = &g->samples[g->printing];
        generation_print(g, s->text.text.data + s->printed, s->text.certain - s->printed);
        s->printed = s->text.certain;
        if (!s->ended) return;
        generation_print(g, "\n", 1);
        if (++g->printing < g->count) generation_begin(g);
    }
}

static inline bool sample_on_token(Sequence* sequence) {
    Sample* s = (Sample*)sequence->owner;
    bool more = text_add_token(&s->text, &sequence->tokens, sequence->generated);
    generation_stream(s->generation);
    return more;
}

static inline void sample_on_end(Sequence* sequence) {
    Sample* s = (Sample*)sequence->owner;
    if (sequence->failed && s->generation->stream)
        die("the model's logits are not finite: its weights are damaged");
    if (sequence->failed) // in training, whose next step says why
        warn("a sample ends where the model's logits are not finite");
    text_end(&s->text);
    s->ended = true;
    generation_stream(s->generation);
}

// Continues the prompt's tokens by up to n tokens in each of the samples. Returns false if the device has too
// little memory.
static inline bool generation_run(Generation* g, const Run* run, const Trainer* trainer, Model* model,
                                  const TokenBuffer* ids) {
    const int64_t n = sample_tokens(run);
    CacheSizes sizes = sample_sizes(engine_heads(&run->config), g->count, ids->count, n,
                                    run->mode == RUN_GENERATE ? trainer->pass_tokens : GENERATE_ROWS);
    Engine engine;
    Sequence* sequences[ENGINE_MEMBERS];
    if (!engine_open(&engine, trainer, model, &run->config, &sizes, run->world)) return false;
    engine.on_token = sample_on_token;
    engine.on_end = sample_on_end;
    for (int64_t k = 0; k < g->count; k++) {
        Sequence* s = sequences[k] = &g->samples[k].sequence;
        token_buffer_append(&s->tokens, ids->data, ids->count);
        s->most_tokens = n;
        s->sampling = sampling_of(&run->options, (uint64_t)run->options.seed, k);
        s->owner = &g->samples[k];
    }
    if (g->stream) generation_begin(g);
    engine_add(&engine, sequences, g->count);
    while (engine_step(&engine)) {}
    engine_close(&engine);
    return true;
}

// Generates `count` samples of a prompt of prompt_bytes bytes. Returns the first one's text without the
// prompt, which the caller frees, or NULL if the device has too little memory. A stream gets all of them, and
// needs a tokenizer.
static inline char* generate_samples(const Run* run, const Tokenizer* tokenizer, const char* prompt,
                                     size_t prompt_bytes, FILE* stream, const Trainer* trainer,
                                     Model* model) {
    const Options* o = &run->options;
    const int64_t count = stream ? o->samples : 1;
    Stops stops = {NULL, 0};
    TokenBuffer ids = {NULL, 0, 0}; // of the prompt, behind the end of text that documents start with
    Generation g = {.stream = stream,
                    .prompt = prompt,
                    .prompt_bytes = prompt_bytes,
                    .samples = (Sample*)xcalloc((size_t)count, sizeof(Sample)),
                    .count = count};
    for (int i = 0; i < o->stop.count; i++) {
        Stop* stop = stops_add(&stops);
        stop->text = xstrdup(o->stop.items[i]);
        stop->bytes = strlen(o->stop.items[i]);
    }
    token_buffer_add(&ids, (uint32_t)config_end_of_text(&run->config));
    if (tokenizer->vocab_size > 0) text_encode(tokenizer, o->json_escape, prompt, prompt_bytes, &ids);
    const int64_t begin = last_document(&run->config, &ids);
    memmove(ids.data, ids.data + begin, (size_t)(ids.count - begin) * sizeof *ids.data);
    ids.count -= begin;
    for (int64_t k = 0; k < count; k++) {
        GeneratedText text = {.tokenizer = tokenizer, .stops = &stops, .json_escape = o->json_escape};
        g.samples[k].text = text;
        g.samples[k].generation = &g;
        byte_buffer_append(&g.samples[k].text.text, "", 0);
    }
    bool done = generation_run(&g, run, trainer, model, &ids);
    // The caller's text ends with a zero byte. One inside becomes 0xff, which the log shows as U+FFFD.
    ByteBuffer* text = &g.samples[0].text.text;
    for (size_t i = 0; !stream && i < text->count; i++)
        if (text->data[i] == '\0') text->data[i] = (char)0xff;
    char* first = done ? g.samples[0].text.text.data : NULL;
    if (done) g.samples[0].text.text.data = NULL;
    for (int64_t k = 0; k < count; k++) {
        text_free(&g.samples[k].text);
        free(g.samples[k].sequence.tokens.data);
    }
    free(g.samples);
    free(ids.data);
    stops_free(&stops);
    return first;
}

// Returns a sample during training, prompt and continuation, which the caller frees. If the device has too
// little memory, warns and returns NULL: training goes on.
static inline char* generate_sample(const Run* run, const Tokenizer* tokenizer, const Trainer* trainer,
                                    Model* model) {
    const char* prompt = run->options.prompt && tokenizer->vocab_size > 0 ? run->options.prompt : "";
    char* text = generate_samples(run, tokenizer, prompt, strlen(prompt), NULL, trainer, model);
    if (!text)
        warn("step %lld: no sample: too little memory is left on the device for %s",
             (long long)run->state.step, counted(sample_tokens(run), "token").text);
    if (!text) return NULL;
    char* whole = (char*)xrealloc(NULL, strlen(prompt) + strlen(text) + 1);
    strcat(strcpy(whole, prompt), text);
    free(text);
    return whole;
}

// --generate: prints the samples of --prompt, or of each line of standard input.
static inline void generate(const Run* run, const Trainer* trainer, Model* model) {
    const Options* o = &run->options;
    const bool lines = o->prompt && strcmp(o->prompt, "-") == 0;
    Tokenizer tokenizer = sample_tokenizer(run, true);
    char* line = NULL;
    size_t capacity = 0;
    for (bool more = true; more; more = lines) {
        const char* prompt = o->prompt ? o->prompt : "";
        ssize_t bytes = (ssize_t)strlen(prompt);
        if (lines) {
            if (isatty(STDIN_FILENO)) fputs("> ", stderr);
            if ((bytes = getline(&line, &capacity, stdin)) < 0) break;
            if (bytes > 0 && line[bytes - 1] == '\n') bytes--;
            prompt = line;
        }
        char* text = generate_samples(run, &tokenizer, prompt, (size_t)bytes, stdout, trainer, model);
        if (!text)
            die("too little memory is left on the device for a sample of %s",
                counted(sample_tokens(run), "token").text);
        free(text);
    }
    if (lines && ferror(stdin)) die("cannot read prompts from standard input: %s", strerror(errno));
    free(line);
    tokenizer_free(&tokenizer);
}
