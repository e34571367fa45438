"""Chat templates with the structure of the families that define a format for calls; written for the tests."""

from __future__ import annotations

CHAT_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = """{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Functions:\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nCall them as\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{- 'Think. ' }}{{- enable_thinking }}{%- endif %}
{%- endif %}"""
QWEN_CODER = """{%- if tools %}
{{- '<|im_start|>system\nFunctions:' }}
{%- for tool in tools %}
{%- set tool = tool.function %}
{{- '\n<function>\n<name>' ~ tool.name ~ '</name>\n' }}
{%- for name, fields in tool.parameters.properties | items %}
{{- '<parameter>' ~ name ~ ' ' ~ fields.type ~ ' ' ~ fields.description ~ '</parameter>\n' }}
{%- endfor %}
{{- '</function>' }}
{%- endfor %}
{{- '\nCall them as\n<tool_call>\n<function=name>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value | tojson) ~ '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|im_start|>assistant\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|im_end|>' }}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
{{- '<|im_start|>ipython\n' + (m.content | tojson) + '<|im_end|>' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if loop.first and tools is not none %}
{{- 'Answer with {"name": function name, "parameters": dictionary of arguments} to call one of\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
{%- endif %}
{{- m.content | trim + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}
{%- if tools is not none and loop.first %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m['content'] + '[/INST]' }}
{%- elif m['tool_calls'] is defined and m['tool_calls'] is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m['tool_calls'] %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('ids of calls have 9 characters') }}{%- endif %}
{{- call.function | tojson }}{{- ', ' if not loop.last else '' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif m['role'] == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (m['content'] | tojson) }}
{{- ', "call_id": "' + m['tool_call_id'] + '"}[/TOOL_RESULTS]' }}
{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}
{%- endif %}
{%- endfor %}"""
TEMPLATES = {"hermes": HERMES, "qwen3-coder": QWEN_CODER, "llama": LLAMA, "mistral": MISTRAL}
