"""A byte-level tokenizer with a chat template of the Qwen kind, and a generator that answers as a test writes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.types import Completion, GenerateRequest

SPECIALS = ("<|im_end|>", "<|im_start|>", "<|pad|>")
TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if loop.last and not '</think>' in message.content %}<think>

</think>

{% endif %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Leaves out the thoughts of earlier answers, as Qwen3's does: it is not append-only."""


def chat_tokenizer(end: str = SPECIALS[0]) -> Any:
    """Return the tokenizer, whose turns end with the token `end`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [end, *SPECIALS[1:]]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, pad_token=SPECIALS[2], chat_template=TEMPLATE
    )


class Scripted:
    """Answers each request with `answer(text of the prompt)`, or raises it."""

    def __init__(self, tokenizer: Any, answer: Callable[[str], str | Exception]) -> None:
        self.requests: list[GenerateRequest] = []
        self._tokenizer, self._answer = tokenizer, answer

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        answer = self._answer(self._tokenizer.decode(request.prompt_ids))
        if isinstance(answer, Exception):
            raise answer
        ids = self._tokenizer.encode(answer, add_special_tokens=False)
        length = len(ids) > request.sampling.max_new_tokens
        ids = ids[: request.sampling.max_new_tokens]
        number = len(self.requests)
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5 / number, np.float32),
            versions=np.full(len(ids), 3, np.int32),
            finish_reason="length" if length else "stop",
        )


class OneVersion(Scripted):
    """Answers with the weights of version 0."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, versions=np.zeros_like(completion.versions))
