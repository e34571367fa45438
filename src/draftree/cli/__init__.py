"""The `draftree` command: one module per command. It formats and prints; the packages below do the work.

`commands` is the list of commands, `main` the entry point, `layout` their common behaviour, `options` and `flags` the
options that several commands share, `render` what a terminal shows, `prompt` their prompts and `runs` their models.

* Help and lists import no torch: a command is imported when it is used, and what decodes inside its function.
* Exit status: 0 success, 1 an error, 2 wrong usage, 130 Ctrl-C, 141 a closed pipe, 143 SIGTERM. An error is one
  sentence on standard error, without a traceback.
* Flags of the sampling, beam and server settings are derived from their dataclasses; no list of them exists twice.
* An option that is given twice is refused, and no option is silently ignored.
* Every line of a prompt file is checked before a model is loaded.
* Texts of models and files may hold terminal escapes: they are printed through `core.errors.harmless` or `runs.Screen`.

Nothing imports this package.
"""
