"""Transcription of speech by encoder-decoder models that read audio features, such as Whisper."""
