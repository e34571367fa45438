"""Chat templates that behave like those of families of reasoning models; written for the tests, not tests themselves.

Each reads markers of reasoning in the messages that it is given: it tests, splits or strips them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from draftree.text.tokenizer import Tokenizer
from text_backends import byte_level

QWEN3 = """{%- set last = namespace(user=0) %}
{%- for m in messages %}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content = m.content or '' %}
{%- if m.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
QWQ = """{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
R1 = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{%- endif %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' + content + '</s>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""
V31 = """{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}{%- endif %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] %}{%- endif %}
{{- '<|Assistant|></think>' + content + '</s>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' + ('<think>' if thinking else '</think>') }}{%- endif %}"""
GLM = """{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}
{%- if enable_thinking is defined and not enable_thinking and not m.content.endswith('/nothink') %}
{{- '/nothink' }}{%- endif %}
{%- elif m.role == 'assistant' %}
{%- set content, reasoning = m.content, '' %}
{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|assistant|>\n<think>' + (reasoning.strip() if loop.last else '') + '</think>' }}
{%- if content.strip() %}{{- '\n' + content.strip() }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
HARMONY = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>analysis' in m.content or '<|channel|>final' in m.content %}
{{- raise_exception('channels have no place in the content') }}{%- endif %}
{%- if loop.last and not add_generation_prompt and m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MAGISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- else %}
{%- set parts = m.content.split('[/THINK]') %}
{%- if parts | length > 1 %}
{{- '[THINK]' + parts[0].replace('[THINK]', '').strip() + '[/THINK]' }}
{%- endif %}
{{- parts[-1].strip() + eos_token }}
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """A template with its tokens.

    Attributes:
        template: its source.
        special: special tokens beyond those of every tokenizer here.
        added: tokens that are added, but not special.
        opening: of a text of reasoning.
        closing: of a text of reasoning.
    """

    template: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ("<think>", "</think>")
    opening: str = "<think>"
    closing: str = "</think>"

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer of bytes with these tokens."""
        backend: Any = byte_level()
        backend.add_tokens([AddedToken(token, special=True) for token in self.special], special_tokens=True)
        backend.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        backend.chat_template = self.template
        return Tokenizer(backend, name="tiny")


THINK = ("<think>", "</think>")
FAMILIES = {
    "qwen3": Family(QWEN3, added=(*THINK, "<tool_response>", "</tool_response>")),
    "qwq": Family(QWQ),
    "r1": Family(R1, added=(*THINK, "<|User|>", "<|Assistant|>")),
    "deepseek-v3.1": Family(V31, added=(*THINK, "<|User|>", "<|Assistant|>")),
    "glm": Family(GLM, ("<|user|>", "<|assistant|>"), (*THINK, "/nothink")),
    "glm-special": Family(GLM, ("<|user|>", "<|assistant|>", *THINK), ()),
    "gpt-oss": Family(HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"), ()),
    "magistral": Family(MAGISTRAL, ("[INST]", "[/INST]", "[THINK]", "[/THINK]"), (), "[THINK]", "[/THINK]"),
}
