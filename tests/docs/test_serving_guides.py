"""Code of the guides about the server runs against a server with a tiny model."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from documents import blocks, guide, matches

from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from serving import running_server, tiny_model
from text_backends import byte_level
from tool_templates import HERMES

URL = "http://127.0.0.1:8000"


def test_the_guide_of_tools_runs_from_top_to_bottom() -> None:
    found = [block for block in blocks(guide("serving-tools")) if block.language == "python"]
    assert len(found) >= 4
    names: dict[str, Any] = {}
    llm = AsyncLLM(tiny_model(context=2048), "ngram", tokenizer=byte_level(HERMES))
    with running_server([ServedModel("tiny", llm, (), ("ngram",))]) as running:
        for block in found:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * block.line + block.text.replace(URL, running.url), str(block.path), "exec"), names)
            if block.expected is not None:
                assert matches(printed.getvalue(), block.expected), printed.getvalue()
        names["client"].close()
