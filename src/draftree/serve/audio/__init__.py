"""Transcription over HTTP: forms, sound files, and the formats of the answer."""
