"""litellm against a server: PYTHON with_litellm.py URL MODEL. Prints JSON."""

import json
import sys

import litellm


def main(url: str, model: str) -> None:
    litellm.suppress_debug_info = True
    common = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "sk-any",
        "temperature": 0,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": "Name three rivers."}],
    }
    whole = litellm.completion(**common)
    chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
    tuned = litellm.completion(**common, extra_body={"draft": "none", "top_k": 5})
    try:
        litellm.completion(**{**common, "model": "openai/absent"})
        refused = ""
    except litellm.NotFoundError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "whole": whole.choices[0].message.content,
                "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
                "usage": whole.usage.total_tokens,
                "without_draft": tuned.choices[0].message.content,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
