/*
Sequences, and the tree in which they share the reading of a common beginning.

Sequences that are added together are sorted and form a tree; a node is a run of tokens that its members, some
of the sequences, have in common.

    <eot> Question: ...  Answer:     node of 4 sequences
          |- yes, of course          its slot goes on as the last of them, the others fork it
          |- no
          ...

A node is in one list of the engine. Called by engine.h.
*/
#pragma once

#include "../base/common.h"
#include "../model/sampler.h"
#include "../tokens/tokenizer.h"

enum {
    ENGINE_LEAST_SHARED = 4 // tokens; a shorter common beginning is read again, which is cheaper than a fork
};

// Tokens that are read, and then scored or continued. Fields that the owner does not set are zero.
typedef struct {
    TokenBuffer tokens;  // prompt, then generated tokens; the owner frees it
    int64_t scored;      // tokens[i] for i >= scored >= 1 are scored, if nothing is generated
    int64_t most_tokens; // most tokens to generate; 0: none
    SamplerSettings sampling;
    void* owner;

    double logprob;    // sum over the scored tokens
    bool greedy;       // each scored token was the most likely one
    bool failed;       // the model's logits are not finite
    bool stopped;      // by an end of text, or by the owner
    int64_t generated; // tokens so far
} Sequence;

typedef struct EngineNode EngineNode;
struct EngineNode {
    Sequence** members; // [count] sorted by their tokens, the first `end` of which they have in common
    int64_t count, end;
    int64_t length;     // tokens in the slot
    int64_t delivered;  // number of rows whose outputs the members have got
    int64_t slot;       // -1: none
    EngineNode* parent; // the node whose slot is forked at the start; NULL: reads from the first token on
    int64_t waiting;    // number of children that have yet to start
    EngineNode* next;   // in its list
};

typedef struct {
    EngineNode *first, *last;
} EngineList;

// ----------------------------------------------------------------------------
// lists

static inline void engine_push_back(EngineList* list, EngineNode* node) {
    node->next = NULL;
    *(list->last ? &list->last->next : &list->first) = node;
    list->last = node;
}

static inline void engine_push_front(EngineList* list, EngineNode* node) {
    node->next = list->first;
    list->first = node;
    if (!list->last) list->last = node;
}

static inline void engine_remove(EngineList* list, EngineNode* node) {
    EngineNode *before = NULL, *at = list->first;
    while (at != node) before = at, at = at->next;
    *(before ? &before->next : &list->first) = node->next;
    if (list->last == node) list->last = before;
}

// ----------------------------------------------------------------------------
// members

// Number of rows that a sequence reads. A sequence that is only scored does not read its last token.
static inline int64_t sequence_rows(const Sequence* s) { return s->tokens.count - (s->most_tokens == 0); }

static inline int sequence_compare(const void* a, const void* b) {
    const TokenBuffer *x = &(*(Sequence*const*)a)->tokens, *y = &(*(Sequence*const*)b)->tokens;
    for (int64_t i = 0; i < x->count && i < y->count; i++)
        if (x->data[i] != y->data[i]) return x->data[i] < y->data[i] ? -1 : 1;
    return x->count < y->count ? -1 : x->count > y->count;
}

// Number of first rows that sorted members have in common.
static inline int64_t members_shared(Sequence** members, int64_t count) {
    const TokenBuffer *x = &members[0]->tokens, *y = &members[count - 1]->tokens;
    int64_t shared = 0, least = sequence_rows(members[0]);
    for (int64_t i = 1; i < count; i++)
        if (sequence_rows(members[i]) < least) least = sequence_rows(members[i]);
    while (shared < least && x->data[shared] == y->data[shared]) shared++;
    return shared;
}

// Whether a member wants an output of row `row`: the score of the next token, or a drawn next token.
static inline bool member_wants(const Sequence* s, int64_t row) {
    return s->most_tokens ? row + 1 == s->tokens.count : s->scored <= row + 1 && row + 1 < s->tokens.count;
}

// ----------------------------------------------------------------------------
// nodes

static inline void engine_free_node(EngineNode* node) {
    free(node->members);
    free(node);
}

// Adds nodes for sorted members, whose first `start` tokens `parent` has read, to the front of a list, and
// returns their number. Members that share ENGINE_LEAST_SHARED more tokens become one node.
static inline int64_t engine_split(EngineList* list, EngineNode* parent, int64_t start, Sequence** members,
                                   int64_t count) {
    int64_t end = members_shared(members, count), nodes = 0;
    if (count == 1 || end - start >= ENGINE_LEAST_SHARED) {
        EngineNode* node = (EngineNode*)xcalloc(1, sizeof *node);
        node->members = (Sequence**)xcalloc((size_t)count, sizeof *members);
        memcpy(node->members, members, (size_t)count * sizeof *members);
        node->count = count;
        node->end = end;
        node->delivered = start;
        node->slot = -1;
        node->parent = parent;
        engine_push_front(list, node);
        return 1;
    }
    for (int64_t i = 0, j; i < count; i = j) {
        bool whole = sequence_rows(members[i]) == end; // it has no further row to compare
        for (j = i + 1; j < count && !whole; j++)
            if (sequence_rows(members[j]) == end ||
                members[j]->tokens.data[end] != members[i]->tokens.data[end])
                break;
        nodes += engine_split(list, parent, start, members + i, j - i);
    }
    return nodes;
}
