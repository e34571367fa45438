"""Log-probabilities of a text by llama.cpp, by the package `xllamacpp`.

    python llama_losses.py MODEL.gguf --threads 2 < request

Reads {"ids": [...], "first": 16} and writes {"losses": [...], "likeliest": [...]} of the tokens from `first` on. It
asks for the probabilities of the whole vocabulary, 0.3 s a token: with some thousands rare tokens would be missing.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from answering import options
from llama_cpp import server

PROBABILITIES = 1 << 20
"""At most as many as there are tokens are returned."""


def main() -> None:
    """Answer one request."""
    given = options(draft=8)
    running, asked = server(given), json.loads(sys.stdin.readline())
    ids: list[int] = asked["ids"]
    losses, likeliest = [], []
    for place in range(asked["first"], len(ids)):
        request = {
            "prompt": ids[:place],
            "n_predict": 1,
            "logprobs": PROBABILITIES,
            "temperature": 0.0,
            "cache_prompt": True,
            "stream": False,
            "ignore_eos": False,
        }
        done: Any = running.handle_completions(request)
        found = json.loads(done) if isinstance(done, str) else done
        given_back = found["choices"][0]["logprobs"]
        if given_back is None:  # the likeliest token is a part of a character
            raise SystemExit(f"llama.cpp returns no probabilities at token {place}: take a text of ASCII characters")
        entries = given_back["content"][0]["top_logprobs"]
        known = {entry["id"]: entry["logprob"] for entry in entries}
        losses.append(-known[ids[place]])
        likeliest.append(entries[0]["id"])
    print(json.dumps({"losses": losses, "likeliest": likeliest}), flush=True)


if __name__ == "__main__":
    main()
