"""HTTP server around `AsyncLLM`: OpenAI's API, those of Anthropic and Ollama, and the page at `/`.

FastAPI, uvicorn, pydantic and prometheus-client are imported here only, and only when a server starts. Only `cli`
imports this package.

A request passes the middleware of `server.guarded` (log and request id, headers, keys, size and time of the body, time
of the whole request), becomes a body of `schema` and, by `request`, `RequestOptions`. `request.running_job` waits at
the `Gate`, encodes the prompts and submits one `Submission` for each; a `Job` merges their updates in order of arrival.
Each module of `api` has the body, the endpoint and the JSON of one API; `streams.EventStream` sends the events.
Conversations of other protocols become a `ChatBody`, and the deltas of `api.chat.Chat` their events.
`errors` turns every exception into a response; texts of unexpected ones go to the log, since they may hold paths.

Invariants:

* Token ids, texts and finish reasons equal those of `LLM` for the same seed, under every load.
* A field is honoured, or ignored with a note, or refused; an unknown one is refused.
* No pydantic object is made after the body was read: chunks are plain dictionaries, and what all chunks of a stream
  share is encoded once.
* Work of a client that left is cancelled: generators and whole responses run inside `streams.unless_gone`, and leaving
  the context of a `Job` aborts its sequences within one round.

The event loop serves all clients: tokenizers, chat templates and grammars run on other threads. An update's `sequence`
is written by the engine's thread until it is finished; before, only the update's own fields and the counts may be read.
Middleware is plain ASGI, because Starlette's `BaseHTTPMiddleware` hides disconnects from the endpoints.
"""
