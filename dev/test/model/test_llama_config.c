/*
Tests how llmc/config/config_file.h reads the config.json of a LlamaForCausalLM.
*/
#include "../../../llmc/config/config_file.h"
#include "../check.h"

static Error err;

// A LlamaForCausalLM's config.json, with other members; says: text of the error, NULL: accepted.
static void check_llama(const char* members, const char* says, Config* c) {
    char text[512];
    snprintf(text, sizeof text,
             "{\"model_type\": \"llama\", \"vocab_size\": 10, \"hidden_size\": 8, \"intermediate_size\": 24, "
             "\"num_hidden_layers\": 1, \"hidden_act\": \"silu\", \"max_position_embeddings\": 2048%s}",
             members);
    bool ok = config_parse(c, "config.json", text, strlen(text), &err);
    CHECK(ok == !says, "%s: %s", members, ok ? "is accepted" : err.msg);
    CHECK(ok || !says || (strstr(err.msg, says) && strstr(err.msg, "config.json")), "unclear: %s", err.msg);
}

static int test_llama_config(void) {
    Config c;
    check_llama(", \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-5, "
                "\"rope_theta\": 20000.0, \"head_dim\": 2",
                NULL, &c);
    CHECK(config_is_plain_transformer(&c) && c.num_heads == 4 && c.num_kv_heads == 2 && c.norm_eps == 1e-5 &&
              c.rope_base == 20000 && config_mlp_size(&c) == 24,
          "a Llama's config");
    check_llama(", \"num_attention_heads\": 4, \"rope_parameters\": {\"rope_type\": \"default\", "
                "\"rope_theta\": 1e6}",
                NULL, &c);
    CHECK(c.num_kv_heads == 0 && c.rope_base == 1e6 && c.norm_eps == 1e-6, "of transformers 5");
    check_llama(", \"num_attention_heads\": 4", NULL, &c);
    CHECK(c.rope_base == 10000, "its default base, not %g", c.rope_base);
    check_llama(", \"num_attention_heads\": 2, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}", NULL,
                &c);
    CHECK(c.rope_scaling.length == 2048, "YaRN's length is %lld, not max_position_embeddings",
          (long long)c.rope_scaling.length);
    check_llama("", "num_attention_heads is missing", &c);
    check_llama(", \"num_attention_heads\": 4, \"attention_bias\": true", "attention_bias", &c);
    check_llama(", \"num_attention_heads\": 4, \"bos_token_id\": 5, \"eos_token_id\": [6, 9]", NULL, &c);
    CHECK(c.bos_token_id == 5 && config_end_of_text(&c) == 6, "of several ids, %lld ends texts",
          (long long)config_end_of_text(&c));
    check_llama(", \"num_attention_heads\": 4, \"eos_token_id\": [10, 6]", "eos_token_id is not below", &c);
    check_llama(", \"num_attention_heads\": 4, \"eos_token_id\": [\"</s>\"]", "eos_token_id is a text", &c);
    check_llama(", \"num_attention_heads\": 4, \"eos_token_id\": []", "eos_token_id is an array", &c);
    check_llama(", \"num_attention_heads\": 4, \"eos_token_id\": {\"a\": 6}", "eos_token_id is an array", &c);
    // with the file's own keys
    check_llama(", \"num_attention_heads\": 4, \"head_dim\": 4",
                "but hidden_size and num_attention_heads give 2", &c);
    check_llama(", \"num_attention_heads\": 3", "is not a multiple of num_attention_heads 3", &c);
    check_llama(", \"num_attention_heads\": 4, \"num_key_value_heads\": 3",
                "num_key_value_heads 3 does not divide num_attention_heads 4", &c);
    check_llama(", \"num_attention_heads\": 4, \"num_key_value_heads\": 0", "num_key_value_heads=0 is not",
                &c);
    check_llama(", \"num_attention_heads\": 4, \"rms_norm_eps\": \"x\"", "rms_norm_eps", &c);
    return test_report();
}
