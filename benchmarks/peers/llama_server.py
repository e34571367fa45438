"""llama.cpp's HTTP server, by the package `xllamacpp`: python llama_server.py MODEL.gguf PORT [--parallel 16]."""

from __future__ import annotations

import argparse
import os
import signal

import xllamacpp


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port = given.model, given.port
    params.n_parallel, params.n_ctx = given.parallel, given.parallel * given.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    params.cont_batching, params.use_jinja = True, True
    running = xllamacpp.Server(params)
    print(running.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
