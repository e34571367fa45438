"""Loading: from a name, folder or file to a `LanguageModel`."""
