"""A stand-in for the cache of the hub's client: its folders, references and links, without a network. Not a test."""

from __future__ import annotations

import hashlib
from pathlib import Path

COMMIT = "c0ffee" + 34 * "0"


def put_in_hub(hub: Path, repository: str, folder: Path, *, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Store the files of a folder as a snapshot of a repository; return the folder of the snapshot.

    As the client does: contents are blobs, and a snapshot links to them.
    """
    place = hub / f"models--{repository.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir(exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    if ref is not None:
        (place / "refs" / ref).write_text(commit)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        blob = place / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot
