"""The request parameters of vLLM 0.21's server by endpoint, read off its request classes."""

from __future__ import annotations

VLLM_PARAMETERS = {
    "completions": (
        *("add_special_tokens", "allowed_token_ids", "cache_salt", "echo", "frequency_penalty"),
        *("ignore_eos", "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logit_bias"),
        *("logprobs", "max_tokens", "min_p", "min_tokens", "model", "n", "presence_penalty", "priority"),
        *("prompt", "prompt_embeds", "prompt_logprobs", "repetition_detection", "repetition_penalty"),
        *("request_id", "response_format", "return_token_ids", "return_tokens_as_token_ids", "seed"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "stream"),
        *("stream_options", "structured_outputs", "suffix", "temperature", "top_k", "top_p"),
        *("truncate_prompt_tokens", "use_beam_search", "user", "vllm_xargs"),
    ),
    "chat": (
        *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt"),
        *("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo"),
        *("frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output"),
        *("kv_transfer_params", "length_penalty", "logit_bias", "logprobs", "max_completion_tokens"),
        *("max_tokens", "media_io_kwargs", "messages", "min_p", "min_tokens", "mm_processor_kwargs"),
        *("model", "n", "parallel_tool_calls", "presence_penalty", "priority", "prompt_logprobs"),
        *("reasoning_effort", "repetition_detection", "repetition_penalty", "request_id"),
        *("response_format", "return_prompt_text", "return_token_ids", "return_tokens_as_token_ids"),
        *("seed", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids"),
        *("stream", "stream_options", "structured_outputs", "temperature", "thinking_token_budget"),
        *("tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens"),
        *("use_beam_search", "user", "vllm_xargs"),
    ),
    "embeddings": (
        *("add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template"),
        *("chat_template_kwargs", "continue_final_message", "dimensions", "embed_dtype", "encoding_format"),
        *("endianness", "input", "media_io_kwargs", "messages", "mm_processor_kwargs", "model", "priority"),
        *("request_id", "truncate_prompt_tokens", "truncation_side", "use_activation", "user"),
    ),
    "tokenize": (
        *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "media_io_kwargs", "messages", "mm_processor_kwargs", "model"),
        *("prompt", "return_token_strs", "tools"),
    ),
    "detokenize": (*("model", "tokens"),),
}
