"""A cluster of Ray Serve on this machine with replicas of the tiny model. Not a test itself; needs the extra `ray`."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftree.serve.ray.options import ReplicaOptions
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings
from serving import tiny_tokenizer

SECONDS = 300.0
RESOURCES: dict[str, Any] = {"cpus_per_replica": 0.1, "health_check_period": 1.0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def save_exact_model(folder: Path) -> None:
    """Save a tiny random model for which passes in C exist: its texts do not depend on the batch."""
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 384, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **sizes, **heads, **ids)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Cluster:
    """Replicas of the model in a folder.

    Args:
        folder: the model.
        port: of the HTTP server.
        changes: settings of every server.
    """

    def __init__(self, folder: Path, port: int, **changes: Any) -> None:
        self.folder, self.port, self._changes = folder, port, changes
        self.url = f"http://127.0.0.1:{port}"

    def settings(self, **changes: Any) -> ServerSettings:
        return ServerSettings(
            models=(ModelChoice("tiny", str(self.folder)),), port=self.port, exact=True, **self._changes | changes
        )

    def deploy(self, settings: ServerSettings, **options: Any) -> None:
        """Deploy or update the application, and wait until it runs."""
        from ray import serve

        from draftree.serve.ray.app import APP_NAME, build

        serve.run(build(settings, ReplicaOptions(**RESOURCES, **options)), name=APP_NAME, route_prefix="/")

    def replicas(self) -> list[dict[str, Any]]:
        """Id, process, threads and running sequences of each replica that responds."""
        from ray import serve

        from draftree.serve.ray.app import APP_NAME

        handle = serve.get_deployment_handle("Replica", APP_NAME)
        found = handle.broadcast("describe").results(return_exceptions=True)
        return [each for each in found if isinstance(each, dict)]

    def num_repeated(self) -> int:
        """Number of repetitions of requests since the start."""
        from ray import serve

        from draftree.serve.ray.app import APP_NAME

        facts = serve.get_deployment_handle("Ingress", APP_NAME).describe.remote().result()
        return int(facts["num_repeated"])

    def ids(self) -> set[str]:
        return {each["replica"] for each in self.replicas()}

    def kill(self, replica: str) -> None:
        """End the process of a replica without warning."""
        (pid,) = (each["pid"] for each in self.replicas() if each["replica"] == replica)
        os.kill(pid, signal.SIGKILL)


@contextmanager
def running_cluster(folder: Path, **changes: Any) -> Iterator[Cluster]:
    """Run two replicas with these settings until the block ends."""
    with warnings.catch_warnings(action="ignore"):
        import ray
        from ray import serve

        from draftree.serve.ray.app import start_ray
    cluster = Cluster(folder, free_port(), **changes)
    start_ray(ReplicaOptions(num_replicas=2, **RESOURCES), cluster.settings())
    try:
        cluster.deploy(cluster.settings(), num_replicas=2)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
