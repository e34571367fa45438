"""Transcription of speech by encoder-decoder models that read audio features, such as Whisper.

`Transcriber` has the parts of a transcription for one engine: features of samples, language detection, the decoder's
prompt and the segments of a text. `LongSpeech` cuts audio of any length into windows; its caller transcribes one window
at a time, so that windows of several audios form batches, and reads the `Transcript` at the end. `Speech` holds the
settings of a request.

Invariants: greedy texts equal those of `generate` of transformers for the same features. The feature extractor of
transformers is imported only when samples are given.

`LLM`, `AsyncLLM`, the server and the command line import this package; it imports the engine, never a front end.
"""
