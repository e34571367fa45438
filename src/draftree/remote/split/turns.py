"""What a pass of a split sends: states of all nodes, after the first layers ran over those of no draft pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftree.core.tree import ROOT
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.remote.link import Link
from draftree.remote.split.exchange import Turn
from draftree.remote.split.results import rows_of
from draftree.remote.split.slots import SplitSlot, split_slot
from draftree.remote.split.states import StateFormat

__all__ = ["captured_states", "make_turns", "note_pass"]


def make_turns(
    local: LanguageModel, form: StateFormat, jobs: Sequence[Extend], *, capture: Sequence[int]
) -> list[tuple[Turn, list[int]]]:
    """Return for each job what is sent, and its nodes in the local slot.

    Args:
        local: the first layers.
        form: format of states.
        jobs: of a whole pass, on slots of the split.
        capture: as for `Pass`, of the whole model; if there is any, all nodes have results, else those from the first
            with logits on.
    """
    lower = tuple(layer for layer in capture if layer < local.num_layers)
    found: list[tuple[SplitSlot, Extend, list[int]]] = []
    late: list[tuple[SplitSlot, Extend]] = []
    for job in jobs:
        slot = split_slot(job.slot)
        # nodes of drafts have no states of lower layers
        nodes, missing = slot.find(job.tokens, job.parents, is_new=bool(lower))
        found.append((slot, job, nodes))
        if missing:
            known = [*slot.nodes, *nodes]
            above = [ROOT if job.parents[place] == ROOT else known[job.parents[place]] for place in missing]
            late.append((slot, Extend(slot.local, [job.tokens[place] for place in missing], above, logits_at=())))
    below: dict[int, Tensor] = {}
    if late:
        result = local.run(Pass([extend for _, extend in late], capture=(*lower, local.num_layers)))
        for index, (slot, extend) in enumerate(late):
            slot.note_local(extend.tokens, extend.parents, result.hidden_of(index)[:, -1])
            below[id(slot)] = result.hidden_of(index)[:, :-1]
    turns = []
    for slot, job, nodes in found:
        wanted = len(nodes) if capture else len(nodes) - min(rows_of(job), default=len(nodes))
        packed = form.pack(slot.states_of(nodes))
        turn = Turn(slot, tuple(job.parents), packed, wanted, below[id(slot)].float().cpu() if lower else None)
        turns.append((turn, nodes))
    return turns


def captured_states(
    capture: Sequence[int],
    turns: Sequence[tuple[Turn, list[int]]],
    *,
    split: int,
    returned: Mapping[int, Tensor],
) -> Tensor:
    """Return captured states of all nodes, shape (nodes, captured layers, hidden), float32.

    Args:
        capture: as for `Pass`.
        turns: what was sent, as returned by `make_turns` with the same `capture`.
        split: layers of the device.
        returned: states from the server by layer, shape (nodes, hidden).
    """
    each = dict(returned)
    lower = [layer for layer in capture if layer < split]
    if lower:
        below = torch.cat([turn.lower for turn, _ in turns if turn.lower is not None])
        each |= {layer: below[:, place] for place, layer in enumerate(lower)}
    if split in capture:
        each[split] = torch.cat([turn.slot.states_of(nodes) for turn, nodes in turns]).float().cpu()
    return torch.stack([each[layer] for layer in capture], dim=1)


def note_pass(
    link: Link,
    turns: Sequence[tuple[Turn, list[int]]],
    jobs: Sequence[Extend],
    *,
    row_bytes: int,
    times: tuple[float, float, float],
) -> None:
    """Note times and bytes of a pass; states of nodes without logits are those of prompts, and do not count.

    Args:
        link: the connection.
        turns: what was sent.
        jobs: of the pass.
        row_bytes: of a packed state.
        times: seconds of the pass, of the server's queue, and of the server's pass.
    """
    up, down = link.traffic()
    latency, read = link.latency, [min(rows_of(job), default=len(job.tokens)) for job in jobs]
    for (turn, _), job, count in zip(turns, jobs, read, strict=True):
        turn.slot.num_read = count if job.num_logits else None
    num_decoding = sum(bool(job.num_logits) for job in jobs)
    prompts = sum(read) * row_bytes
    latency.prompt_bytes += prompts if num_decoding else up
    if not num_decoding:
        return
    latency.bytes_up += max(0, up - prompts)
    latency.bytes_down += down
    seconds, queue, passed = times
    latency.seconds += seconds
    latency.note_round(seconds, queue=queue, passed=passed, texts=num_decoding, tokens=0)
