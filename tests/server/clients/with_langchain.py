"""LangChain's OpenAI adapter against a server: PYTHON with_langchain.py URL MODEL. Prints JSON."""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI


def main(url: str, model: str) -> None:
    common = {"base_url": f"{url}/v1", "api_key": "sk-any", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**common, max_tokens=24, stream_usage=True)
    question = [("system", "You are brief."), ("user", "Name three rivers.")]
    whole = chat.invoke(question)
    chunks = list(chat.stream(question))
    several = asyncio.run(chat.abatch([question, [("user", "Count to five.")]]))
    scored = ChatOpenAI(**common, max_tokens=8, logprobs=True, top_logprobs=2).invoke(question)
    text = OpenAI(**common, max_tokens=16).invoke("Once upon a time")
    print(
        json.dumps(
            {
                "whole": whole.content,
                "streamed": "".join(chunk.content for chunk in chunks),
                "usage": whole.usage_metadata,
                "streamed_usage": next(c.usage_metadata for c in reversed(chunks) if c.usage_metadata),
                "several": [answer.content for answer in several],
                "num_logprobs": len(scored.response_metadata["logprobs"]["content"]),
                "completion": text,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
