"""A replica whose model two processes compute, without ray: `replica_ranks.py FOLDER PROMPT`. Not a test itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import httpx

from draftree.serve.ray.serving import LoadedApp
from draftree.serve.settings import ServerSettings, choose_models
from operated import children

ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.7, "seed": 3, "ignore_eos": True}


async def main(folder: str, prompt: str) -> None:
    settings = ServerSettings.of(models=choose_models([folder], ["suffix,min=1"]), tp=2, dtype="float32", device="cpu")
    replica = await LoadedApp.load(settings, threads=1)
    before = len(children(os.getpid()))
    transport: Any = httpx.ASGITransport(replica.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **ASKED})
    await replica.check_health()
    await replica.close()
    print(json.dumps([answer.json()["choices"][0]["text"], before, len(children(os.getpid()))]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
