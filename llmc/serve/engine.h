/*
The inference engine: reads, scores and continues many sequences at once.

Each pass extends the sequences in the cache's slots by some tokens: prompts by a chunk, generations by one
token. Sequences join and leave at every pass (continuous batching). One pass (engine_step):

    engine_start_waiting    waiting nodes get slots while slots and pages last; children fork slots
    engine_build            each running node, oldest first, adds its next rows, pages for them, and the
                            outputs that its members want
    Trainer.extend          the model reads the rows: a score or a drawn token for each output
    engine_deliver          members get scores and tokens; a sequence that has ended leaves
    engine_finish_node      a node that has read its tokens ends, goes on with one member, or is held while
                            its children read on where its members differ
    engine_forget           pages that every later token would skip are given back

Sequences that are added together share the reading of a common beginning: they form a tree of nodes (tree.h).

Invariants:

 1. A node is in one list: waiting (no slot), running (its rows are in passes) or held (its slot waits to be
    forked).
 2. Without free slots or pages a node waits or is put back: it gives up its slot and pages and reads its
    tokens again later. The oldest running node is never put back, so the engine always makes progress.
 3. An output is delivered once, also when its row is read again (EngineNode.delivered).
 4. On the CPU a sequence's results have the same bits whatever else runs, put back or not. On the GPU they
    differ by rounding: the sizes of passes select GEMM kernels and the pruning of prompts.

Called by requests.h and generate.h, which get a sequence's tokens and its end through callbacks (on_token,
on_end). engine_open returns false where memory is too small; a model whose logits are not finite marks the
sequence failed.
*/
#pragma once

#include "../run/trainer.h"
#include "pages.h"
#include "tree.h"

enum {
    ENGINE_FIRST_PASS = 600, // seconds that the first pass may take, where the watch's timeout is shorter
    ENGINE_MEMBERS = 512     // most sequences that are added together
};

// An output of a pass: of row `row` of the sequences of a node's members [first, last).
typedef struct {
    EngineNode* node;
    int64_t row, first, last;
} EngineOutput;

typedef struct {
    const Trainer* trainer;
    int64_t V, end_of_text;
    // on_token: called for each generated token but end of text, when it is the sequence's last; false ends
    // the sequence. on_end: called at the end of a sequence, which its owner may then free.
    bool (*on_token)(Sequence* sequence);
    void (*on_end)(Sequence* sequence);

    CacheSizes sizes;
    Cache* cache;
    PageTable pages;
    World* world; // NULL: nobody watches
    bool* slot_used;
    EngineList waiting, running, held; // invariant 1; oldest first
    int64_t num_running;

    // arrays of a pass
    Extension pass;
    int32_t *tokens, *slots, *targets, *copies, *first_pages;
    int64_t *begins, *lengths, *output_rows;
    EngineNode** nodes; // [slots] the node of each of the pass's sequences
    EngineOutput* outputs;
    RowScore* scores; // [outputs]; [steps, outputs] in a pass of several steps
    Draw* draws;      // [outputs]
    int64_t unread;   // tokens read since engine_forget was last called

    int64_t tokens_read, passes, put_back; // so far
} Engine;

// ----------------------------------------------------------------------------
// open and close

// Number of rows of the page table a slot: one a head of keys of each layer with attention.
static inline int64_t engine_heads(const Config* c) {
    return config_layers_of(c, MIXER_ATTENTION) * config_key_heads(c);
}

// Sizes of a cache for passes of the trainer's size. `pages` and `drops` are left 0, for the caller to set.
static inline CacheSizes engine_sizes(const Trainer* trainer, int64_t slots, int64_t capacity) {
    const int64_t rows = trainer->pass_tokens;
    CacheSizes sizes = {.slots = slots, .capacity = capacity, .rows = rows, .outputs = rows + ENGINE_MEMBERS};
    return sizes;
}

// Frees all that the engine holds, also where opening it stopped halfway.
static inline void engine_close(Engine* g) {
    if (g->cache) g->trainer->cache_free(g->cache);
    page_table_free(&g->pages);
    void* memory[] = {g->slot_used,   g->tokens, g->slots,   g->targets,     g->copies,
                      g->first_pages, g->begins, g->lengths, g->output_rows, g->nodes,
                      g->outputs,     g->scores, g->draws};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) free(memory[i]);
    memset(g, 0, sizeof *g);
}

// Allocates the arrays of a pass. Returns false if memory is too small.
static inline bool engine_allocate(Engine* g, int64_t heads) {
    const CacheSizes* s = &g->sizes;
    size_t slots = (size_t)s->slots, rows = (size_t)s->rows, outputs = (size_t)s->outputs;
    g->slot_used = (bool*)calloc(slots, sizeof *g->slot_used);
    g->tokens = (int32_t*)calloc(rows, sizeof *g->tokens);
    g->slots = (int32_t*)calloc(slots, sizeof *g->slots);
    g->targets = (int32_t*)calloc(outputs, sizeof *g->targets);
    g->copies = (int32_t*)calloc(2 * (size_t)heads + 1, sizeof *g->copies); // a recurrent mixer has no heads
    g->first_pages = (int32_t*)calloc(slots * (size_t)heads + 1, sizeof *g->first_pages);
    g->begins = (int64_t*)calloc(slots + 1, sizeof *g->begins);
    g->lengths = (int64_t*)calloc(slots, sizeof *g->lengths);
    g->output_rows = (int64_t*)calloc(outputs, sizeof *g->output_rows);
    g->nodes = (EngineNode**)calloc(slots, sizeof(EngineNode*));
    g->outputs = (EngineOutput*)calloc(outputs, sizeof *g->outputs);
    g->scores = (RowScore*)calloc(outputs + slots * (size_t)g->trainer->pass_steps, sizeof *g->scores);
    g->draws = (Draw*)calloc(outputs, sizeof *g->draws);
    return g->slot_used && g->tokens && g->slots && g->targets && g->copies && g->first_pages && g->begins &&
           g->lengths && g->output_rows && g->nodes && g->outputs && g->scores && g->draws;
}

// Opens an engine for sequences of up to sizes->capacity tokens, with sizes->pages pages. If the device or
// the host has less memory, halves the pages, down to those of one sequence; returns false if even these do
// not fit. The watch allows the first pass more time, as it loads kernels.
static inline bool engine_open(Engine* g, const Trainer* trainer, Model* model, const Config* config,
                               const CacheSizes* sizes, World* world) {
    int64_t heads = engine_heads(config), least = heads * cache_table_width(sizes);
    int64_t pages = sizes->pages < least ? least : sizes->pages;
    for (;; pages = pages / 2 < least ? least : pages / 2) {
        memset(g, 0, sizeof *g);
        g->trainer = trainer;
        g->V = config->vocab_size;
        g->end_of_text = config_end_of_text(config);
        g->sizes = *sizes, g->sizes.pages = pages;
        g->world = world;
        g->cache = trainer->cache_new(model, &g->sizes); // first: it leaves memory for the others
        if (g->cache) g->pages = page_table_new(&g->sizes, heads);
        const bool allocated = g->pages.table && engine_allocate(g, heads);
        if (allocated && world) watch_allow(world, ENGINE_FIRST_PASS);
        if (allocated) return true;
        engine_close(g);
        if (pages == least) return false;
    }
}

// ----------------------------------------------------------------------------
// add

// Adds up to ENGINE_MEMBERS sequences, and sorts the array. Each has at least one row to read and, with the
// tokens to generate, at most sizes.capacity tokens.
static inline void engine_add(Engine* g, Sequence** sequences, int64_t count) {
    EngineList nodes = {NULL, NULL};
    assert(count <= ENGINE_MEMBERS);
    if (count == 0) return;
    qsort(sequences, (size_t)count, sizeof *sequences, sequence_compare);
    engine_split(&nodes, NULL, 0, sequences, count);
    for (EngineNode *node = nodes.first, *next; node; node = next) {
        next = node->next;
        engine_push_back(&g->waiting, node);
    }
}

// Number of nodes that have not started. Callers add more sequences when there are few.
static inline int64_t engine_waiting(const Engine* g) {
    int64_t count = 0;
    for (const EngineNode* node = g->waiting.first; node; node = node->next) count++;
    return count;
}

// ----------------------------------------------------------------------------
// slots

static inline int64_t engine_free_slot(const Engine* g) {
    for (int64_t i = 0; i < g->sizes.slots; i++)
        if (!g->slot_used[i]) return i;
    return -1;
}

static inline void engine_release(Engine* g, EngineNode* node) {
    page_table_release(&g->pages, node->slot, node->length);
    g->slot_used[node->slot] = false;
    node->slot = -1;
    node->length = 0;
}

// Frees a node's slot and pages. A running node waits again; a held node is freed, and its children will read
// its tokens themselves.
static inline void engine_put_back(Engine* g, EngineNode* node, bool held) {
    engine_release(g, node);
    engine_remove(held ? &g->held : &g->running, node);
    g->put_back++;
    if (!held) {
        g->num_running--;
        engine_push_front(&g->waiting, node);
        return;
    }
    for (EngineNode* child = g->waiting.first; child; child = child->next)
        if (child->parent == node) child->parent = NULL;
    engine_free_node(node);
}

// Whether one more node of several members may start. Such nodes have at most half of the slots, so that the
// others are left for their children.
static inline bool engine_may_part(const Engine* g) {
    int64_t parting = 1;
    for (const EngineNode* node = g->held.first; node; node = node->next) parting++;
    for (const EngineNode* node = g->running.first; node; node = node->next) parting += node->count > 1;
    return parting == 1 || parting <= g->sizes.slots / 2;
}

// Gives a waiting node a slot: a fork of its parent's or, for the last child, that slot itself. Returns false
// if the node has to wait; *others then says whether other nodes might start.
static inline bool engine_start(Engine* g, EngineNode* node, bool* others) {
    EngineNode* parent = node->parent;
    bool takes_over = parent && parent->waiting == 1;
    int64_t slot = takes_over ? parent->slot : engine_free_slot(g);
    int64_t pages = g->pages.heads * (pages_of(node->end) - (parent ? parent->end / PAGE_TOKENS : 0) +
                                      g->num_running); // one more for each of the others
    *others = slot >= 0 && (g->num_running == 0 || pages <= g->pages.num_free);
    if (!*others || (node->count > 1 && !takes_over && !engine_may_part(g))) return false;
    engine_remove(&g->waiting, node);
    engine_push_back(&g->running, node);
    g->num_running++;
    g->slot_used[slot] = true;
    node->slot = slot;
    node->length = parent ? parent->end : 0;
    node->parent = NULL;
    if (takes_over) {
        engine_remove(&g->held, parent);
        engine_free_node(parent);
    } else if (parent) {
        page_table_fork(&g->pages, parent->slot, slot, parent->end);
        g->trainer->cache_fork(g->cache, parent->slot, slot);
        parent->waiting--;
    }
    return true;
}

// Starts all waiting nodes that can start. If none runs after that, held nodes are put back until one can.
static inline void engine_start_waiting(Engine* g) {
    while (g->waiting.first) {
        bool others = true;
        for (EngineNode *node = g->waiting.first, *next; node && others; node = next) {
            next = node->next;
            engine_start(g, node, &others);
        }
        if (g->num_running > 0) return;
        engine_put_back(g, g->held.last, true); // all slots are held
    }
}

// Gives back the pages that were forgotten since the last call.
static inline void engine_forget(Engine* g) {
    g->unread = 0;
    if (!g->sizes.drops || g->pages.heads == 0) return;
    g->trainer->cache_forgotten(g->cache, g->first_pages);
    const EngineList* lists[] = {&g->running, &g->held};
    for (int i = 0; i < 2; i++)
        for (const EngineNode* node = lists[i]->first; node; node = node->next)
            if (node->length > 0)
                page_table_forget(&g->pages, node->slot, g->first_pages + node->slot * g->pages.heads);
}

// ----------------------------------------------------------------------------
// a pass

// Adds the outputs that the members of a node want of a row. Returns false, with none added, if there is no
// room. All members want the same score, except at the node's last row, behind which they differ. Members
// that draw have an output each; those that take the most likely token share one.
static inline bool engine_add_outputs(Engine* g, EngineNode* node, int64_t row, int64_t pass_row) {
    Extension* p = &g->pass;
    const int64_t first = p->outputs;
    bool drawn = false; // whether the last output is drawn from
    if (row < node->delivered) return true;
    for (int64_t i = 0; i < node->count; i++) {
        const Sequence* s = node->members[i];
        if (!member_wants(s, row)) continue;
        int32_t target = s->most_tokens ? -1 : (int32_t)s->tokens.data[row + 1];
        bool draws = s->most_tokens && s->sampling.temperature != 0;
        if (p->outputs > first && g->targets[p->outputs - 1] == target && !draws && !drawn) {
            g->outputs[p->outputs - 1].last = i + 1;
            continue;
        }
        if (p->outputs == g->sizes.outputs) {
            p->outputs = first;
            return false;
        }
        EngineOutput output = {node, row, i, i + 1};
        Draw draw = {s->sampling, (uint64_t)s->generated};
        if (!s->most_tokens) memset(&draw, 0, sizeof draw);
        if (draws) p->draws = g->draws;
        drawn = draws;
        g->draws[p->outputs] = draw;
        g->outputs[p->outputs] = output;
        g->targets[p->outputs] = target;
        g->output_rows[p->outputs++] = pass_row;
    }
    return true;
}

// Returns how many of the node's next n rows fit into free pages. Puts younger nodes back until at least one
// fits; 0 if the node is the youngest.
static inline int64_t engine_find_pages(Engine* g, EngineNode* node, int64_t n) {
    if (page_table_needed(&g->pages, node->slot, node->length, n) > g->pages.num_free && g->unread > 0)
        engine_forget(g);
    while (page_table_needed(&g->pages, node->slot, node->length, n) > g->pages.num_free) {
        if (n > 1)
            n /= 2;
        else if (g->held.last)
            engine_put_back(g, g->held.last, true);
        else if (g->running.last != node)
            engine_put_back(g, g->running.last, false);
        else
            return 0;
    }
    return n;
}

// Adds up to n rows of a node to the pass.
static inline void engine_add_rows(Engine* g, EngineNode* node, int64_t n) {
    Extension* p = &g->pass;
    int64_t begin = p->rows;
    n = engine_find_pages(g, node, n);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = node->length + i;
        if (!engine_add_outputs(g, node, row, p->rows)) break;
        g->tokens[p->rows++] = (int32_t)node->members[0]->tokens.data[row];
    }
    if (p->rows == begin) return;
    int64_t pairs = page_table_append(&g->pages, node->slot, node->length, p->rows - begin, g->copies);
    for (int64_t i = 0; i < pairs; i++)
        g->trainer->cache_copy_page(g->cache, g->copies[2 * i], g->copies[2 * i + 1]);
    g->nodes[p->sequences] = node;
    g->slots[p->sequences] = (int32_t)node->slot;
    g->lengths[p->sequences] = node->length;
    g->begins[p->sequences++] = begin;
    g->begins[p->sequences] = p->rows;
}

// Builds the next pass from the running nodes, oldest first, each with at least one row if there are pages.
static inline void engine_build(Engine* g) {
    Extension* p = &g->pass;
    int64_t seen = 0;
    memset(p, 0, sizeof *p);
    p->tokens = g->tokens;
    p->slots = g->slots;
    p->begins = g->begins;
    p->lengths = g->lengths;
    p->pages = g->pages.table;
    p->output_rows = g->output_rows;
    p->targets = g->targets;
    for (EngineNode* node = g->running.first; node; node = node->next) {
        int64_t others = g->num_running - ++seen, room = g->sizes.rows - p->rows - others;
        int64_t n = node->end - node->length;
        engine_add_rows(g, node, n < room ? n : room);
    }
}

// Appends a drawn token to a sequence. Returns whether the sequence goes on.
static inline bool engine_continue(Engine* g, Sequence* s, int64_t token) {
    s->failed = token < 0;
    s->stopped = token == g->end_of_text;
    if (s->failed || s->stopped) return false;
    token_buffer_add(&s->tokens, (uint32_t)token);
    s->generated++;
    s->stopped = !g->on_token(s);
    return !s->stopped && s->generated < s->most_tokens;
}

// Gives the outputs of a step to the members that want them. Ends sequences whose generation is complete.
static inline void engine_deliver(Engine* g, int64_t step) {
    const RowScore* scores = g->scores + step * g->pass.outputs;
    for (int64_t i = 0; i < g->pass.outputs; i++) {
        const EngineOutput* output = &g->outputs[i];
        for (int64_t m = output->first; m < output->last; m++) {
            Sequence** member = &output->node->members[m];
            Sequence* s = *member;
            if (!s || !member_wants(s, output->row + step)) continue;
            if (s->most_tokens == 0) {
                s->logprob += scores[i].logprob;
                s->greedy = s->greedy && scores[i].best == (int32_t)s->tokens.data[output->row + 1];
                s->failed = s->failed || scores[i].best < 0;
            } else if (!engine_continue(g, s, scores[i].drawn)) {
                g->on_end(s);
                *member = NULL;
            }
        }
    }
}

// Called when a node has read its tokens. Members without further rows end. One that is left goes on in the
// node's slot; several become children, and the node is held.
static inline void engine_finish_node(Engine* g, EngineNode* node) {
    int64_t kept = 0;
    for (int64_t i = 0; i < node->count; i++) {
        Sequence* s = node->members[i];
        if (!s) continue;
        if (sequence_rows(s) > node->end)
            node->members[kept++] = s;
        else
            g->on_end(s);
    }
    node->count = kept;
    if (kept == 1) {
        node->end = sequence_rows(node->members[0]);
        return;
    }
    engine_remove(&g->running, node);
    g->num_running--;
    if (kept == 0) {
        engine_release(g, node);
        engine_free_node(node);
        return;
    }
    qsort(node->members, (size_t)kept, sizeof *node->members,
          sequence_compare); // what was drawn is not in order
    node->waiting = engine_split(&g->waiting, node, node->end, node->members, kept);
    engine_push_back(&g->held, node);
}

// Returns the number of steps of the pass, and appends their pages: several if the pass only generates,
// nothing waits, and free pages suffice; else 1.
static inline int64_t engine_steps(Engine* g) {
    const Extension* p = &g->pass;
    int64_t steps = g->trainer->pass_steps, pages = 0;
    if (!extension_decodes(p) || g->waiting.first) return 1;
    for (int64_t i = 0; i < p->sequences; i++) {
        const Sequence* s = g->nodes[i]->members[0];
        if (g->nodes[i]->count > 1) return 1;
        if (s->most_tokens - s->generated < steps) steps = s->most_tokens - s->generated;
    }
    if (steps <= 1) return 1;
    for (int64_t i = 0; i < p->sequences; i++)
        pages += page_table_needed(&g->pages, p->slots[i], p->lengths[i] + 1, steps - 1);
    if (pages > g->pages.num_free) return 1;
    for (int64_t i = 0; i < p->sequences; i++)
        page_table_append(&g->pages, p->slots[i], p->lengths[i] + 1, steps - 1, g->copies);
    return steps;
}

// Runs one pass, and tells the watch so, as other ranks may wait for this one. Returns false if nothing is
// left to do.
static inline bool engine_step(Engine* g) {
    engine_start_waiting(g);
    if (!g->running.first) return false;
    engine_build(g);
    Extension* p = &g->pass;
    p->steps = engine_steps(g);
    g->trainer->extend(g->cache, p, g->scores, NULL);
    if (g->world) watch_alive(g->world);
    g->tokens_read += p->rows * p->steps, g->unread += p->rows * p->steps, g->passes += p->steps;
    for (int64_t i = 0; i < p->sequences; i++) {
        EngineNode* node = g->nodes[i];
        node->length += p->steps > 1 ? p->steps : g->begins[i + 1] - g->begins[i];
        if (p->steps > 1) node->end = node->length;
    }
    for (int64_t step = 0; step < p->steps; step++) engine_deliver(g, step);
    for (int64_t i = 0; i < p->sequences; i++) {
        EngineNode* node = g->nodes[i];
        if (node->length > node->delivered) node->delivered = node->length;
        if (node->length == node->end) engine_finish_node(g, node);
    }
    if (g->unread >= PAGE_TOKENS * (1 + g->num_running)) engine_forget(g);
    return true;
}

// Ends all sequences as they are, and frees the nodes.
static inline void engine_abandon(Engine* g) {
    EngineList* const lists[] = {&g->waiting, &g->running, &g->held};
    for (int i = 0; i < 3; i++)
        for (EngineNode *node = lists[i]->first, *next; node; node = next) {
            next = node->next;
            // a held node's members are also its waiting children's
            for (int64_t m = 0; m < node->count && lists[i] != &g->held; m++)
                if (node->members[m]) g->on_end(node->members[m]);
            engine_free_node(node);
        }
}
