"""Request fields that OpenAI and other servers define and this server does not have, and what it does with each.

An ignored field cannot change the meaning of a response: any value is accepted, and named in a `Warning` header. A
refused one would change it: only values that ask for nothing are accepted. The page `guides/fields.md` is made of this
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CHAT", "COMPLETIONS", "ELSEWHERE", "RESPONSES", "SHARED", "Effect", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Effect:
    """What the server does with a field.

    Attributes:
        reason: why the field has no effect, or what to do instead.
        neutral: values that ask for nothing, besides null.
        is_ignored: whether other values are accepted, too.
    """

    reason: str
    neutral: tuple[Any, ...]
    is_ignored: bool

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether the field could as well be absent."""
        return value is None or any(value == one for one in self.neutral)


def ignored(reason: str, *neutral: Any) -> Effect:
    """Return the effect of a field that is accepted and named."""
    return Effect(reason, neutral, is_ignored=True)


def refused(reason: str, *neutral: Any) -> Effect:
    """Return the effect of a field that is an error unless it asks for nothing."""
    return Effect(reason, neutral, is_ignored=False)


_CACHE = "cached prefixes are kept while there is memory, for all requests"
_TEXT_ONLY = "only text is supported"
_ADAPTERS = "serve the adapted model under a name of its own"
_NO_TRANSFER = "keys and values are not transferred between servers"
_NO_ROUTING = "requests are not routed by it"
_NO_SAMPLER = "the server has no such sampler"
_PART_OF_SAMPLER = "it has no effect without its sampler, which the server does not have"
_DRAFTING = "drafting never changes the text; choose a loaded drafter with 'draft'"
_LOADED = "models stay loaded"
_NO_TIMINGS = "'usage', 'metrics' and /metrics have the statistics"
_APART = "reasoning is always apart from the answer"
_TOKEN_IDS = "use 'return_token_ids'"

ELSEWHERE: Mapping[str, Mapping[str, Effect]] = {
    "OpenAI": {
        "user": ignored("requests are not attributed to end users"),
        "safety_identifier": ignored("requests are not attributed to end users"),
        "metadata": ignored("nothing is stored", {}),
        "store": ignored("nothing is stored", False),
        "prompt_cache_key": ignored(_CACHE),
        "prompt_cache_options": ignored(_CACHE, {}),
        "prompt_cache_retention": ignored(_CACHE),
        "verbosity": refused("the models have no such setting", "medium"),
        "moderation": refused("nothing is moderated"),
    },
    "vLLM": {
        "cache_salt": refused("cached prefixes are shared by all requests"),
        "ec_transfer_params": refused(_NO_TRANSFER, {}),
        "guided_decoding_backend": ignored("there is one grammar engine"),
        "guided_whitespace_pattern": refused("write the whitespace into a 'guided_regex' or 'guided_grammar'"),
        "kv_transfer_params": refused(_NO_TRANSFER, {}),
        "logits_processors": refused("use 'logit_bias', 'bad_words' or 'allowed_token_ids'", []),
        "logprob_token_ids": refused("use 'top_logprobs' or 'logprobs'", []),
        "lora_request": refused(_ADAPTERS),
        "media_io_kwargs": ignored(_TEXT_ONLY, {}),
        "mm_processor_kwargs": ignored(_TEXT_ONLY, {}),
        "repetition_detection": refused("use 'stop' or 'max_tokens'"),
        "return_mm_kwargs": ignored(_TEXT_ONLY),
        "return_prompt_text": refused("use /tokenize with 'return_token_strs'", False),
        "return_token_offsets": ignored("generated texts have no such offsets", False),
        "return_tokens_as_token_ids": refused(_TOKEN_IDS, False),
        "routed_experts_prompt_start": ignored("routed experts are not returned", 0),
        "session_id": ignored(_NO_ROUTING),
        "stream_interval": ignored("every round is sent at once"),
        "structural_tag": refused("use 'guided_grammar'"),
        "thinking_token_budget": refused("use 'max_tokens'", -1),
        "truncation_side": refused("'truncate_prompt_tokens' keeps the end of the prompt", "left"),
        "vllm_xargs": refused("the server has no such extensions", {}),
        "watermarking": refused("texts are not marked", False),
    },
    "SGLang": {
        "bootstrap_host": refused(_NO_TRANSFER),
        "bootstrap_port": refused(_NO_TRANSFER),
        "bootstrap_room": refused(_NO_TRANSFER),
        "custom_labels": ignored("metrics have labels of their own", {}),
        "custom_logit_processor": refused("use 'logit_bias', 'bad_words' or 'allowed_token_ids'"),
        "custom_params": refused("the server has no such extensions", {}),
        "data_parallel_rank": ignored(_NO_ROUTING),
        "disagg_prefill_dp_rank": ignored(_NO_ROUTING),
        "extra_key": refused("cached prefixes are shared by all requests"),
        "images_config": ignored(_TEXT_ONLY, {}),
        "input_ids": refused("use 'prompt' of /v1/completions"),
        "lora_path": refused(_ADAPTERS),
        "max_dynamic_patch": ignored(_TEXT_ONLY),
        "min_dynamic_patch": ignored(_TEXT_ONLY),
        "ngram_corpus_id": ignored(_DRAFTING),
        "no_stop_trim": refused("use 'include_stop_str_in_output'", False),
        "return_cached_tokens_details": ignored(_NO_TIMINGS, False),
        "return_hidden_states": refused("hidden states are not returned", False),
        "return_meta_info": ignored(_NO_TIMINGS, False),
        "return_prompt_token_ids": refused(_TOKEN_IDS, False),
        "return_routed_experts": refused("routed experts are not returned", False),
        "rid": ignored("the id of a request is 'request_id'"),
        "routed_dp_rank": ignored(_NO_ROUTING),
        "routed_experts_start_len": ignored("routed experts are not returned", 0),
        "separate_reasoning": refused(_APART, True),
        "session_params": refused("send the whole conversation", {}),
        "stop_regex": refused("use 'stop'", []),
        "stream_reasoning": ignored("reasoning is streamed as it comes", True),
        "task": refused("the server has no such tasks"),
        "use_audio_in_video": ignored(_TEXT_ONLY, False),
    },
    "llama.cpp": {
        "adaptive_decay": ignored(_PART_OF_SAMPLER),
        "adaptive_target": refused(_NO_SAMPLER, -1),
        "backend_sampling": ignored("it does not change the text"),
        "cache_prompt": ignored("cached prefixes never change the text"),
        "dry_allowed_length": ignored(_PART_OF_SAMPLER),
        "dry_base": ignored(_PART_OF_SAMPLER),
        "dry_multiplier": refused("use 'no_repeat_ngram_size' or 'repetition_penalty'", 0),
        "dry_penalty_last_n": ignored(_PART_OF_SAMPLER),
        "dry_sequence_breakers": ignored(_PART_OF_SAMPLER),
        "dynatemp_exponent": ignored(_PART_OF_SAMPLER),
        "dynatemp_range": refused("use 'temperature'", 0),
        "grammar_lazy": refused("a grammar holds from the first token", False),
        "grammar_triggers": refused("a grammar holds from the first token", []),
        "id_slot": ignored("requests have no fixed slots"),
        "lora": refused(_ADAPTERS, []),
        "min_keep": refused("'top_p' and 'min_p' keep at least one token", 0, 1),
        "mirostat": refused("use 'top_p' or 'min_p'", 0),
        "mirostat_eta": ignored(_PART_OF_SAMPLER),
        "mirostat_tau": ignored(_PART_OF_SAMPLER),
        "n_cache_reuse": ignored("cached prefixes never change the text"),
        "n_cmpl": refused("use 'n'", 1),
        "n_discard": ignored("a prompt that does not fit is refused"),
        "n_indent": refused("use 'guided_regex'", 0),
        "n_keep": ignored("a prompt that does not fit is refused"),
        "n_predict": refused("use 'max_tokens'"),
        "n_probs": refused("use 'logprobs'", 0),
        "parse_tool_calls": refused("calls of tools are always parsed", True),
        "post_sampling_probs": refused("log-probabilities are those of the model", False),
        "preserved_tokens": ignored("markers of calls are always kept", []),
        "reasoning_control": ignored("there is no endpoint to control a running request", False),
        "reasoning_format": refused(_APART, "auto", "deepseek"),
        "repeat_last_n": ignored(_PART_OF_SAMPLER),
        "repeat_penalty": refused("use 'repetition_penalty', which reads the whole text", 1),
        "response_fields": ignored("responses are complete", []),
        "return_progress": ignored("the progress of reading a prompt is not reported", False),
        "return_tokens": refused(_TOKEN_IDS, False),
        "samplers": refused("the order of the sampling filters is fixed"),
        "slot_id": ignored("requests have no fixed slots"),
        "speculative.n_max": ignored(_DRAFTING),
        "speculative.n_min": ignored(_DRAFTING),
        "speculative.ngram_m_hits": ignored(_DRAFTING),
        "speculative.ngram_size_m": ignored(_DRAFTING),
        "speculative.ngram_size_n": ignored(_DRAFTING),
        "speculative.p_min": ignored(_DRAFTING),
        "speculative.type": ignored(_DRAFTING),
        "sse_ping_interval": ignored("silent streams have a comment every 15 seconds"),
        "t_max_predict_ms": refused("use 'max_tokens'", 0),
        "timings_per_token": ignored(_NO_TIMINGS, False),
        "top_n_sigma": refused("use 'top_p' or 'min_p'", 0, -1),
        "typical_p": refused("use 'top_p' or 'min_p'", 1),
        "xtc_probability": refused(_NO_SAMPLER, 0),
        "xtc_threshold": ignored(_PART_OF_SAMPLER),
    },
    "Ollama, LM Studio": {
        "_debug_render_only": refused("use /tokenize with 'return_token_strs'", False),
        "context": refused("send the whole conversation", []),
        "draft_model": ignored(_DRAFTING),
        "format": refused("use 'response_format'", ""),
        "images": refused(_TEXT_ONLY, []),
        "keep_alive": ignored(_LOADED),
        "num_ctx": ignored("the context is that of the model"),
        "num_predict": refused("use 'max_tokens'"),
        "options": refused("set the fields of the body, such as 'temperature'", {}),
        "raw": refused("use /v1/completions", False),
        "shift": ignored("a prompt that does not fit is refused"),
        "system": refused("send a message of the role system", ""),
        "template": refused("templates of clients are not run", ""),
        "think": ignored("use 'reasoning_effort'"),
        "truncate": ignored("a prompt that does not fit is refused"),
        "ttl": ignored(_LOADED),
    },
}
"""Fields of all endpoints that generate, by the server that defines them."""
SHARED: Mapping[str, Effect] = {name: effect for fields in ELSEWHERE.values() for name, effect in fields.items()}
"""The same fields without their servers."""
CHAT: Mapping[str, Effect] = {
    "add_special_tokens": refused("the chat template writes the special tokens", False),
    "audio": refused(_TEXT_ONLY),
    "chat_template": refused("templates of clients are not run"),
    "documents": refused("put the documents into a message", []),
    "echo": refused("use /v1/completions", False),
    "function_call": refused("use 'tool_choice'", "none", "auto"),
    "functions": refused("use 'tools'", []),
    "reasoning": ignored("use 'reasoning_effort'", {}),
    "modalities": refused(_TEXT_ONLY, ["text"]),
    "prompt": refused("use 'messages', or /v1/completions"),
    "suffix": refused("use /v1/completions", ""),
    "web_search_options": refused("the server has no web search"),
}
"""Fields of /v1/chat/completions."""
COMPLETIONS: Mapping[str, Effect] = {
    "add_special_tokens": refused("give token ids for full control of the prompt", True),
    "max_completion_tokens": refused("use 'max_tokens'"),
    "messages": refused("use /v1/chat/completions"),
    "reasoning": ignored("a continuation is returned as it is", {}),
    "reasoning_effort": ignored("a continuation is returned as it is", "none"),
    "prompt_embeds": refused("give texts or token ids as 'prompt'"),
    "tool_choice": refused("use /v1/chat/completions", "none", "auto"),
    "tools": refused("use /v1/chat/completions", []),
}
"""Fields of /v1/completions."""
RESPONSES: Mapping[str, Effect] = {
    "access_programs": ignored("the server has no such programs", {}),
    "background": refused("keep the connection open, or use 'stream'", False),
    "background_options": ignored("requests do not run in the background", {}),
    "beam_options": refused("it belongs to beam search", {}),
    "context_management": ignored("a conversation that does not fit is refused", []),
    "conversation": refused("the server stores no conversations: send the whole conversation as 'input'"),
    "early_stopping": refused("it belongs to beam search", False),
    "enable_response_messages": refused("use 'return_token_ids' of /v1/chat/completions", False),
    "image": ignored(_TEXT_ONLY, {}),
    "length_penalty": refused("it belongs to beam search", 1),
    "logprobs": refused("use 'include' with \"message.output_text.logprobs\"", False),
    "max_completion_tokens": refused("use 'max_output_tokens'"),
    "max_tokens": refused("use 'max_output_tokens'"),
    "max_tool_calls": ignored("the server runs no tools"),
    "messages": refused("use 'input'"),
    "n": refused("send one request for each text", 1),
    "n_predict": refused("use 'max_output_tokens'"),
    "num_predict": refused("use 'max_output_tokens'"),
    "previous_input_messages": refused("send the whole conversation as 'input'", []),
    "previous_response": refused("send the whole conversation as 'input'"),
    "prompt": refused("the server stores no prompts: use 'instructions' and 'input'"),
    "prompt_logprobs": refused("use /v1/completions"),
    "reasoning_effort": refused("use 'reasoning'", "none"),
    "response_format": refused("use 'text'", {"type": "text"}),
    "return_token_ids": refused("use /v1/chat/completions", False),
    "truncation": ignored("a conversation that does not fit is refused", "disabled"),
    "use_beam_search": refused("use /v1/chat/completions or /v1/completions", False),
}
"""Fields of /v1/responses."""
