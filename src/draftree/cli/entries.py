"""The list of commands, each imported when it is used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from draftree.cli.layout import PlainCommand, PlainGroup

__all__ = ["COMMANDS", "Entry"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A command that is not imported yet.

    Attributes:
        name: name on the command line.
        home: "module:attribute" of a function or a `typer.Typer`.
        summary: one line for the list of commands.
        examples: lines that can be pasted into a shell.
    """

    name: str
    home: str
    summary: str
    examples: tuple[str, ...]

    def load(self) -> Any:
        """Import the command and prepare it for invocation."""
        module, _, attribute = self.home.partition(":")
        found = getattr(import_module(module), attribute)
        holder = typer.Typer(rich_markup_mode=None, add_completion=False)
        holder.callback()(lambda: None)  # otherwise typer makes it a single command
        epilog = "\n".join(self.examples)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name, cls=found.info.cls or PlainGroup, epilog=epilog)
        else:
            holder.command(self.name, cls=PlainCommand, epilog=epilog)(found)
        return get_command(holder).commands[self.name]  # type: ignore[attr-defined]


COMMANDS = {
    entry.name: entry
    for entry in (
        Entry(
            "generate",
            "draftree.cli.generate:generate",
            "Generate text.",
            (
                'draftree generate smollm2-135m-instruct "What is a prime number?"',
                "draftree generate stories15m 'Once upon a time' --max-tokens 200 --seed 7",
                "cat task.txt | draftree generate smollm2-135m-instruct --draft ngram --compare",
                "draftree generate tinyllama-1.1b-chat --draft model:stories15m,k=4 --json 'Tell me a story.'",
            ),
        ),
        Entry(
            "chat",
            "draftree.cli.chat:chat",
            "Chat with a model in the terminal.",
            (
                "draftree chat smollm2-135m-instruct --draft ngram",
                "draftree chat tinyllama-1.1b-chat --draft model:stories15m,k=4 --temperature 0.7",
                "echo 'What is a prime number?' | draftree chat smollm2-135m-instruct --json",
            ),
        ),
        Entry(
            "beam",
            "draftree.cli.beam:beam",
            "Search the most likely texts with beams.",
            (
                "draftree beam stories15m 'Once upon a time' --beam-width 8 --num-return-sequences 3",
                "draftree beam smollm2-135m-instruct 'Translate to French: good morning' --length-penalty 0.6 --json",
                "draftree beam stories15m 'The cat' --force-phrase ' dog' --force-phrase ' tree' --max-new-tokens 40",
            ),
        ),
        Entry(
            "transcribe",
            "draftree.cli.transcribe:transcribe",
            "Transcribe sound files.",
            (
                "draftree transcribe whisper-tiny.en speech.wav",
                "draftree transcribe openai/whisper-tiny talk.wav --translate --format srt",
            ),
        ),
        Entry(
            "serve",
            "draftree.cli.serve:serve",
            "Serve models with an OpenAI-compatible HTTP API.",
            (
                "draftree serve smollm2-135m-instruct",
                "draftree serve chat=smollm2-135m-instruct stories15m --draft suffix --draft chat=ngram,k=4",
                "draftree serve smollm2-135m-instruct --host 0.0.0.0 --api-key-file keys.txt",
            ),
        ),
        Entry(
            "verify-server",
            "draftree.cli.verify_server:verify_server",
            "Serve models to devices that draft.",
            ("draftree verify-server smollm2-135m-instruct",),
        ),
        Entry(
            "watch",
            "draftree.cli.watch:watch",
            "Show the load and the rounds of a running server.",
            ("draftree watch http://127.0.0.1:8000", "draftree watch http://127.0.0.1:8000 --once --json"),
        ),
        Entry(
            "methods",
            "draftree.cli.methods:methods",
            "List drafters, verifiers and planners.",
            ("draftree methods", "draftree methods --json"),
        ),
        Entry(
            "models",
            "draftree.cli.models:app",
            "List, fetch, find and remove model weights.",
            (
                "draftree models",
                "draftree models get smollm2-135m-instruct",
                "draftree models path smollm2-135m-instruct",
            ),
        ),
        Entry(
            "doctor",
            "draftree.cli.doctor:doctor",
            "Report how a model runs on this machine, and why.",
            (
                "draftree doctor",
                "draftree doctor smollm2-135m-instruct --draft ngram",
                "draftree doctor tinyllama-1.1b-chat --draft model:stories15m,k=4 --measure",
            ),
        ),
        Entry(
            "explain",
            "draftree.cli.explain:explain",
            "Explain the planner's decisions for a drafter with measurements.",
            (
                "draftree explain smollm2-135m-instruct --draft ngram",
                "draftree explain tinyllama-1.1b-chat 'Tell me a story.' --draft model:stories15m",
            ),
        ),
        Entry(
            "demo",
            "draftree.cli.demo:demo",
            "Show a real model generate the same text, plain and with speculation.",
            ("draftree demo", "draftree demo --dtype float32"),
        ),
        Entry(
            "bench",
            "draftree.cli.bench:bench",
            "Measure methods against plain decoding.",
            (
                "draftree bench smollm2-135m-instruct --draft none --draft ngram",
                "draftree bench smollm2-135m-instruct --draft none --draft ngram --peer",
            ),
        ),
        Entry(
            "trace",
            "draftree.cli.trace:trace",
            "Summarize recorded rounds, and convert them to timelines, tables and a page.",
            (
                "draftree trace show trace.jsonl",
                "draftree trace export trace.jsonl --to chrome --output timeline.json",
                "draftree trace page trace.jsonl --output playground.html",
            ),
        ),
        Entry(
            "analyse",
            "draftree.cli.analyse:analyse",
            "Draw measured acceptance and speed beside their theory.",
            (
                "draftree analyse --list",
                "draftree analyse smollm2-135m-instruct --draft head:smollm2-135m-instruct --output figures",
                "draftree analyse --trace trace.jsonl --figures verified-cdf,phases --output figures",
            ),
        ),
        Entry(
            "size",
            "draftree.cli.size:size",
            "Estimate the devices that serve a rate of requests.",
            (
                "draftree size --model-size 8B --device h100 --devices 4 --rate 10",
                "draftree size --model-size 70B --device h100 --devices 16 --rate 5 --nodes 8 --tokens-per-round 2.8",
            ),
        ),
        Entry(
            "tune",
            "draftree.cli.tune:tune",
            "Measure which drafter is fastest for a model on this machine, and keep it.",
            (
                "draftree tune smollm2-135m-instruct --minutes 10",
                "draftree tune --show",
                "draftree tune layers smollm2-135m-instruct --prompts prompts.jsonl --trials 60",
            ),
        ),
        Entry(
            "train",
            "draftree.cli.train:train",
            "Make training data from a model's own texts, and train drafters.",
            (
                "draftree train data smollm2-135m-instruct --output data --limit-tokens 100000",
                "draftree train head smollm2-135m-instruct --data data --output head --minutes 60",
                "draftree train export head --to speculators --target smollm2-135m-instruct --output exported",
            ),
        ),
    )
}
