"""Fields of request bodies that OpenAI and other servers define, read from their descriptions in November 2026.

OpenAI: the OpenAPI description and the official client; vLLM and SGLang: the protocol files; llama.cpp: the server's
README and parser; Ollama: the structures of its OpenAI endpoints, and of its own API, whose fields clients send there.
Not a test itself.
"""

UPSTREAM: dict[str, dict[str, str]] = {
    "OpenAI": {
        "chat": """
            audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
            messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
            prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
            safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
            top_logprobs top_p user verbosity web_search_options
        """,
        "completions": """
            best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
            stream stream_options suffix temperature top_p user
        """,
        "responses": """
            access_programs background background_options context_management conversation image include input
            instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
            previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
            safety_identifier service_tier store stream stream_options temperature text tool_choice tools
            top_logprobs top_p truncation user
        """,
    },
    "vLLM": {
        "chat": """
            add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
            chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
            guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
            ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
            logits_processors logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages
            min_p min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
            prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id response_format
            return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
            routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
            stop_token_ids stream stream_interval stream_options structural_tag structured_outputs temperature
            thinking_token_budget tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side
            use_beam_search user vllm_xargs watermarking
        """,
        "completions": """
            add_special_tokens allowed_token_ids bad_words best_of cache_salt ec_transfer_params echo
            frequency_penalty guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
            guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
            logit_bias logits_processors logprob_token_ids logprobs max_tokens min_p min_tokens model n
            presence_penalty priority prompt prompt_embeds prompt_logprobs repetition_detection repetition_penalty
            request_id response_format return_mm_kwargs return_token_ids return_token_offsets
            return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
            spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structural_tag
            structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens
            truncation_side use_beam_search user vllm_xargs watermarking
        """,
        "responses": """
            background cache_salt enable_response_messages ignore_eos include include_stop_str_in_output input
            instructions logit_bias max_output_tokens max_tool_calls metadata mm_processor_kwargs model
            parallel_tool_calls previous_input_messages previous_response previous_response_id priority prompt
            prompt_cache_key reasoning repetition_penalty request_id seed service_tier skip_special_tokens stop
            store stream structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation
            user vllm_xargs
        """,
    },
    "SGLang": {
        "chat": """
            bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
            custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key
            frequency_penalty ignore_eos images_config input_ids logit_bias logprobs lora_path max_completion_tokens
            max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens model n ngram_corpus_id
            no_stop_trim parallel_tool_calls presence_penalty priority reasoning reasoning_effort regex
            repetition_penalty response_format return_cached_tokens_details return_hidden_states return_meta_info
            return_prompt_token_ids return_routed_experts return_token_ids rid routed_dp_rank
            routed_experts_start_len seed separate_reasoning session_id session_params skip_special_tokens stop
            stop_regex stop_token_ids stream stream_options stream_reasoning task temperature tool_choice tools
            top_k top_logprobs top_p use_audio_in_video user
        """,
        "completions": """
            best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
            custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty ignore_eos
            images_config json_schema logit_bias logprobs lora_path max_tokens min_p min_tokens model n
            ngram_corpus_id no_stop_trim presence_penalty priority prompt regex repetition_penalty response_format
            return_cached_tokens_details return_hidden_states return_routed_experts return_token_ids rid
            routed_dp_rank routed_experts_start_len seed session_id session_params skip_special_tokens stop
            stop_regex stop_token_ids stream stream_options suffix temperature top_k top_p user
        """,
    },
    "llama.cpp": {
        "chat": """
            adaptive_decay adaptive_target add_generation_prompt backend_sampling cache_prompt chat_template_kwargs
            dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
            dynatemp_range frequency_penalty grammar grammar_lazy grammar_triggers id_slot ignore_eos json_schema
            logit_bias logprobs lora max_completion_tokens max_tokens messages min_keep min_p mirostat mirostat_eta
            mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parallel_tool_calls
            parse_tool_calls post_sampling_probs presence_penalty preserved_tokens reasoning_control
            reasoning_effort reasoning_format repeat_last_n repeat_penalty response_fields response_format
            return_progress return_tokens samplers seed speculative.n_max speculative.n_min speculative.ngram_m_hits
            speculative.ngram_size_m speculative.ngram_size_n speculative.p_min speculative.type sse_ping_interval
            stop stream stream_options t_max_predict_ms temperature timings_per_token tool_choice tools top_k
            top_logprobs top_n_sigma top_p typical_p xtc_probability xtc_threshold
        """,
        "completions": """
            adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base dry_multiplier
            dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty grammar
            grammar_lazy grammar_triggers id_slot ignore_eos json_schema logit_bias logprobs lora max_tokens
            min_keep min_p mirostat mirostat_eta mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep
            n_predict n_probs post_sampling_probs presence_penalty preserved_tokens prompt repeat_last_n
            repeat_penalty response_fields return_progress return_tokens samplers seed speculative.n_max
            speculative.n_min speculative.ngram_m_hits speculative.ngram_size_m speculative.ngram_size_n
            speculative.p_min speculative.type sse_ping_interval stop stream stream_options suffix t_max_predict_ms
            temperature timings_per_token top_k top_n_sigma top_p typical_p xtc_probability xtc_threshold
        """,
    },
    "Ollama, LM Studio": {
        "chat": """
            _debug_render_only draft_model format frequency_penalty images keep_alive logit_bias logprobs max_tokens
            messages model options presence_penalty reasoning reasoning_effort repeat_penalty response_format seed
            shift stop stream stream_options temperature think tools top_k top_logprobs top_p truncate ttl
        """,
        "completions": """
            _debug_render_only context format frequency_penalty keep_alive logprobs max_tokens model options
            presence_penalty prompt raw seed stop stream stream_options suffix system temperature template top_p ttl
        """,
    },
}
"""By server and endpoint."""
