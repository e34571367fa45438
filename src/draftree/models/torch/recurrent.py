"""Recurrent layers of a transformers model, run along token trees by the family's own modules.

A mixer is a module that reads and updates states in transformers' cache: a delta net, a state-space layer, a short
convolution. Mixers are found by a pass that watches the cache, not by the name of the family. In our passes the tokens
of one tree level take one step together, each from its parent's state; a settled chain, such as a prompt, is one call.
Linear layers at a mixer's input and output run once for all rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.models.kv.states import StateKey, StateMemory, StatePlan, StateShape, StateStep
from draftree.models.torch.inspection import cache_layers, cache_name
from draftree.models.torch.packing import PackedLinear

PROBE_TOKENS = 6
MIN_CHAIN = 4  # settled tokens that a mixer takes in one call; fewer take a step each, as in the model's own decoding
LINEAR = (nn.Linear, PackedLinear)


class StepLayer:
    """States of one layer, numbered by kind."""

    record_past = False

    def __init__(self, states: Mapping[StateKey, Tensor], layer: int) -> None:
        self.conv_states = {key.place: state for key, state in states.items() if key[:2] == (layer, "conv")}
        self.recurrent_states = {key.place: state for key, state in states.items() if key[:2] == (layer, "recurrent")}


class StepCache:
    """Cache of one call of a mixer, with the methods of transformers' cache that mixers use."""

    def __init__(self, states: Mapping[StateKey, Tensor]) -> None:
        self.states = dict(states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, shape (sequences, channels, inputs)."""
        return self.states.get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, shape (sequences, ...)."""
        return self.states.get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution; returns the new ones after those kept before, or after zeros."""
        key = StateKey(layer_idx, "conv", state_idx)
        kept = self.states.get(key)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if kept is None:
            inputs = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = kept.shape[-1]
            inputs = torch.cat([kept, conv_states], dim=-1)
        self.states[key] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace a recurrent state, and return it."""
        self.states[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the sequences have tokens."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether a convolution keeps all its inputs."""
        return False

    @property
    def layers(self) -> Mapping[int, StepLayer]:
        """States by layer, as mixers read them before transformers 5.20."""
        return {key.layer: StepLayer(self.states, key.layer) for key in self.states}


@dataclass(frozen=True, slots=True)
class WideLinear:
    """Linear layer that reads a mixer's input times a factor, or the output of an earlier one of these layers."""

    name: str  # in the mixer
    source: int | None  # index of the earlier layer; None for the mixer's input
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Mixer:
    """Facts about a module with states."""

    name: str  # in the model
    cache_name: str | int  # its argument for the cache, by name or by position
    shapes: Mapping[StateKey, StateShape]  # of its states
    inputs: Sequence[WideLinear]  # linear layers that read its input
    output: str | None  # name in the mixer of the linear layer that computes what it returns; None if there is none
    reads_states: bool  # whether a call with several tokens continues from states

    def run(self, module: nn.Module, call: Call, memory: StateMemory, plan: StatePlan) -> Any:
        """Return a module's output for all rows of a pass, and move its states in memory."""
        if len(plan.steps) == 1:
            step = plan.steps[0]
            is_whole = plan.num_rows == call.num_rows and (step.is_chain or step.num_rows == 1)
            output = self._step(call, memory, step, rows_of=None if is_whole else _rows_of(step))
            return output if is_whole else _joined([output], plan, call.num_rows)
        wide: list[Tensor] = []
        linears = [module.get_submodule(linear.name) for linear in self.inputs]
        last = None if self.output is None else module.get_submodule(self.output)
        for linear, facts in zip(linears, self.inputs, strict=True):
            source = call.hidden if facts.source is None else wide[facts.source]
            wide.append(linear(source if facts.factor == 1 else source * facts.factor))
        outputs = []
        for step in plan.steps:
            with ExitStack() as stack:
                for linear, values in zip(linears, wide, strict=True):
                    rows = _rows_of(step)(values)
                    stack.enter_context(replaced_forward(linear, lambda _, rows=rows: rows))
                if last is not None:
                    stack.enter_context(replaced_forward(last, lambda value: value))
                outputs.append(self._step(call, memory, step, rows_of=_rows_of(step)))
        joined = _joined(outputs, plan, call.num_rows)
        return joined if last is None else last(joined)

    def _step(self, call: Call, memory: StateMemory, step: StateStep, *, rows_of: Part | None) -> Any:
        states = {}
        if step.sources is not None:
            states = {key: memory[key][step.sources] for key in self.shapes}
            if isinstance(step.sources, slice) and not step.is_in_place:
                states = {key: state.clone() for key, state in states.items()}  # mixers change them in place
        cache = StepCache(states)
        output = call.run(self.cache_name, cache, part=rows_of)
        for key, state in cache.states.items():
            if not (step.is_in_place and state is states.get(key)):
                memory[key][step.targets] = state
        return output

    def read(self, call: Call, cache: StepCache) -> tuple[Any, dict[StateKey, Tensor]]:
        """Return the output for prompts, padded on the left, and the states before their last tokens.

        `cache`: the states before them, which move on.
        """
        outputs = []
        width = call.num_rows - 1
        states: dict[StateKey, Tensor] = {}
        for first, end in ((0, width), (width, width + 1)):
            if first == width:
                states = {key: state.clone() for key, state in cache.states.items()}
            if first < end:
                outputs.append(call.run(self.cache_name, cache, part=_tokens(first, end)))
        return _concatenated(outputs), states


Forward = Callable[..., Any]
Part = Callable[[Tensor], Tensor]


def _rows_of(step: StateStep) -> Part:
    """Return a function that takes the rows of a step from values of shape (1, rows, ...).

    Its result has shape (1, tokens, ...) for a chain, else (sequences, 1, ...).
    """
    return lambda values: values[:, step.rows] if step.is_chain else values[0, step.rows].unsqueeze(1)


def _tokens(first: int, end: int) -> Part:
    return lambda values: values[:, first:end]


def _joined(outputs: Sequence[Any], plan: StatePlan, num_rows: int) -> Any:
    """Return outputs of all steps in the order of the pass, padded to `num_rows`, shape (1, rows, ...)."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(parts, plan, num_rows) for parts in zip(*outputs, strict=True))
    if not isinstance(first, Tensor):
        return first
    rows = [out[0] if step.is_chain else out[:, 0] for out, step in zip(outputs, plan.steps, strict=True)]
    joined = rows[0] if len(rows) == 1 else torch.cat(rows)
    if plan.places is not None:
        joined = joined.index_select(0, plan.places)
    if num_rows > plan.num_rows:
        joined = torch.cat([joined, joined.new_zeros(num_rows - plan.num_rows, *joined.shape[1:])])
    return joined.unsqueeze(0)


def _concatenated(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(map(_concatenated, zip(*outputs, strict=True)))
    return torch.cat(list(outputs), dim=1) if isinstance(first, Tensor) else first


@contextmanager
def replaced_forward(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Let a module compute something else inside."""
    attributes = module.__dict__  # setting an attribute of a module takes several microseconds
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a mixer; arguments of shape (sequences, tokens, ...) have one entry for each token."""

    forward: Forward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The mixer's input."""
        return next(value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor))

    @property
    def num_rows(self) -> int:
        """Number of tokens of each sequence, padding included."""
        return self.hidden.shape[1]

    def name_of(self, argument: Any) -> str | int | None:
        """Return the name or the position of an argument; None if it is none of them."""
        named: list[tuple[str | int, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return next((name for name, value in named if value is argument), None)

    def run(self, cache_name: str | int, cache: StepCache, *, part: Part | None = None) -> Any:
        """Run the mixer with a cache over a part of the tokens; None for all."""
        shape = self.hidden.shape[:2]

        def chosen(value: Any) -> Any:
            is_by_token = isinstance(value, Tensor) and value.shape[:2] == shape
            return value if part is None or not is_by_token else part(value)

        args = [chosen(value) for value in self.args]
        kwargs = {name: chosen(value) for name, value in self.kwargs.items()}
        if isinstance(cache_name, str):
            kwargs[cache_name] = cache
        else:
            args[cache_name] = cache
        return self.forward(*args, **kwargs)


class Mixers:
    def __init__(self, model: nn.Module, mixers: Sequence[Mixer]) -> None:
        self.mixers = mixers
        self._modules: list[nn.Module] = []
        self.bind(model)

    def bind(self, model: nn.Module) -> None:
        self._modules = [model.get_submodule(mixer.name) for mixer in self.mixers]

    def release(self) -> None:
        self._modules = []

    @property
    def layers(self) -> set[int]:
        """Indices of the layers with a state."""
        return {key.layer for key in self.shapes}

    @property
    def shapes(self) -> dict[StateKey, StateShape]:
        return {key: shape for mixer in self.mixers for key, shape in mixer.shapes.items()}

    @property
    def continues(self) -> bool:
        """Whether all mixers take several tokens after a state in one call."""
        return all(mixer.reads_states for mixer in self.mixers)

    @contextmanager
    def running(self, memory: StateMemory, plan: StatePlan) -> Iterator[None]:
        """Let the mixers take the steps of a plan in the model's forward pass inside."""
        with self._replaced(lambda mixer, module, call: mixer.run(module, call, memory, plan)):
            yield

    @contextmanager
    def reading(self) -> Iterator[dict[StateKey, Tensor]]:
        """Record the states before the last tokens in a pass over prompts inside, shape (prompts, ...) each."""
        states: dict[StateKey, Tensor] = {}
        caches = {mixer.name: StepCache({}) for mixer in self.mixers}

        def read(mixer: Mixer, module: nn.Module, call: Call) -> Any:
            output, before_last = mixer.read(call, caches[mixer.name])
            states.update(before_last)
            return output

        with self._replaced(read):
            yield states

    @contextmanager
    def _replaced(self, handler: Callable[[Mixer, nn.Module, Call], Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for mixer, module in zip(self.mixers, self._modules, strict=True):
                stack.enter_context(replaced_forward(module, _handled(handler, mixer, module)))
            yield


def _handled(handler: Callable[[Mixer, nn.Module, Call], Any], mixer: Mixer, module: nn.Module) -> Forward:
    forward = module.forward
    return lambda *args, **kwargs: handler(mixer, module, Call(forward, args, kwargs))


def keeps_states(config: Any) -> bool:
    """Return whether the cache of transformers keeps states besides keys and values for this configuration."""
    return any(hasattr(layer, "update_conv_state") for layer in cache_layers(config))


@torch.inference_mode()
def find_mixers(model: Any) -> Mixers:
    """Find a model's mixers in a pass over a few tokens with transformers' cache.

    The modules are those that receive the cache and are innermost when a state is updated; a mixer inside another is
    part of it.
    """
    watch = _Watch(model)
    with watch.watching():
        tokens = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
        takes_params = "cache_params" in inspect.signature(model.forward).parameters
        cache_argument = "cache_params" if takes_params else cache_name(model.forward)
        model(**{"input_ids": tokens, "use_cache": True, cache_argument: watch.cache})
    names = {module: name for name, module in model.named_modules()}
    outermost = [
        module
        for module in watch.calls
        if not any(other is not module and module in set(other.modules()) for other in watch.calls)
    ]
    mixers = [_mixer(names[module], module, watch.calls[module], watch.cache) for module in outermost]
    return Mixers(model, mixers)


class _Watch:
    """Watches which modules update states in a forward pass."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self._model = model
        self.cache: Any = DynamicCache(config=model.config.get_text_config())
        self._running: list[tuple[nn.Module, Call]] = []
        self.calls: dict[nn.Module, Call] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        for name in ("update_conv_state", "update_recurrent_state"):
            setattr(self.cache, name, self._noting(getattr(self.cache, name)))
        with ExitStack() as stack:
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append((module, Call(module.forward, args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _noting(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            module, call = next(
                (module, call) for module, call in reversed(self._running) if call.name_of(self.cache) is not None
            )
            self.calls[module] = call
            return update(*args, **kwargs)

        return noted


def _mixer(name: str, module: nn.Module, watched: Call, watched_cache: Any) -> Mixer:
    """Run a mixer alone, to learn its states, its outer linear layers, and whether it continues from states."""
    cache_argument = watched.name_of(watched_cache)
    assert cache_argument is not None, "a mixer receives the cache"
    cache = StepCache({})
    with _Linears(module).watching() as linears:
        output = watched.run(cache_argument, cache)
    return Mixer(
        name,
        cache_argument,
        shapes={key: StateShape(tuple(state.shape[1:]), state.dtype) for key, state in cache.states.items()},
        inputs=linears.inputs(watched.hidden),
        output=linears.last(output),
        reads_states=all(_reads_state(watched, cache_argument, cache.states, key) for key in cache.states),
    )


def _reads_state(call: Call, cache_argument: str | int, states: Mapping[StateKey, Tensor], key: StateKey) -> bool:
    """Return whether a call with several tokens depends on a state."""
    outputs = []
    for state in (states[key].clone(), states[key] + 1):
        cache = StepCache({name: other.clone() for name, other in states.items()} | {key: state})
        output = call.run(cache_argument, cache)
        outputs.append(output if isinstance(output, tuple) else (output,))
    return any(not torch.equal(one, other) for one, other in zip(*outputs, strict=True) if isinstance(one, Tensor))


class _Linears:
    """Watches the inputs and outputs of the linear layers in a module."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {
            child: name for name, child in module.named_modules() if isinstance(child, LINEAR)
        }
        self._calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[_Linears]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self._calls.append((module, args[0], output))

        with ExitStack() as stack:
            for module in self._names:
                stack.callback(module.register_forward_hook(note).remove)
            yield self

    def last(self, output: Any) -> str | None:
        """Return the name of the layer whose output is this value."""
        return next((self._names[module] for module, _, result in self._calls if result is output), None)

    def inputs(self, hidden: Tensor) -> list[WideLinear]:
        """Return the layers that read a mixer's input times a factor, or the outputs of such layers."""
        wide: list[WideLinear] = []
        results: list[Tensor] = []
        for module, value, result in self._calls:
            if self._num_calls(module) > 1:
                continue
            source = next((index for index, earlier in enumerate(results) if _is_same(earlier, value)), None)
            factor = 1.0 if source is not None else _factor(hidden, value)
            if factor is not None:
                wide.append(WideLinear(self._names[module], source, factor))
                results.append(result)
        return wide

    def _num_calls(self, module: nn.Module) -> int:
        return sum(other is module for other, _, _ in self._calls)


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.data_ptr() == second.data_ptr() and first.stride() == second.stride()


def _factor(hidden: Tensor, value: Tensor) -> float | None:
    """Return the number by which a value is a multiple of hidden states; None if it is not."""
    if hidden.shape != value.shape or hidden.dtype != value.dtype:
        return None
    if _is_same(hidden, value):
        return 1.0
    largest = hidden.abs().argmax()
    factor = float(value.flatten()[largest] / hidden.flatten()[largest])
    return factor if torch.equal(hidden * factor, value) else None
