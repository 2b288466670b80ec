"""Move a real model's parameters and gradients between layouts, over torch.distributed with gloo on CPUs.

    pip install 'milpplan[profile]'
    python examples/switch_torch.py [--processes 16] [--senders relay]

Each process is one rank. A small Llama-like model is built and run once, so that every parameter has a gradient.
Each rank then keeps only what the first layout gives it, and the states travel through all layouts of a circuit:
every rank sends and receives the fused messages of the plan of each switch and nothing else. After every switch
each rank's slices are compared bit by bit with those of the whole model; under the last layout, where every rank
holds everything, the model runs again and has to give the same loss.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from milpplan import Layout, Links, ModelSpec, Plan, SwitchPlan, VirtualStage, plan_switch
from milpplan.problem.model import DenseMlp, GroupedQueryAttention, LayerRun
from milpplan.switching.ownership import ownership
from milpplan.switching.planning import Held, boxes_of_ranks, held_of, keep, view
from milpplan.switching.records import SENDERS, Senders

HIDDEN, HEADS, KEY_VALUE_HEADS, WIDTH, VOCABULARY, LAYERS = 64, 8, 4, 192, 512, 6
SPEC = ModelSpec(
    name="llama-tiny",
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    layers=(
        LayerRun(
            count=LAYERS,
            attention=GroupedQueryAttention(
                num_attention_heads=HEADS, num_key_value_heads=KEY_VALUE_HEADS, head_dim=HIDDEN // HEADS
            ),
            mlp=DenseMlp(intermediate_size=WIDTH),
        ),
    ),
)


class Block(nn.Module):
    """One layer: grouped-query attention and a gated feed-forward block. Parameters are named as in the plan."""

    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        self.attention = nn.ModuleDict(
            {
                "q": nn.Linear(HIDDEN, HIDDEN, bias=False),
                "k": nn.Linear(HIDDEN, KEY_VALUE_HEADS * width, bias=False),
                "v": nn.Linear(HIDDEN, KEY_VALUE_HEADS * width, bias=False),
                "o": nn.Linear(HIDDEN, HIDDEN, bias=False),
            }
        )
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.mlp = nn.ModuleDict(
            {
                "gate": nn.Linear(HIDDEN, WIDTH, bias=False),
                "up": nn.Linear(HIDDEN, WIDTH, bias=False),
                "down": nn.Linear(WIDTH, HIDDEN, bias=False),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Pre-norm residual layer; ``hidden`` [batch, tokens, hidden]."""
        batch, tokens, _ = hidden.shape
        part = self.attention
        normed = self.norms[0](hidden)
        query, key, value = (
            part[name](normed).view(batch, tokens, -1, HIDDEN // HEADS).transpose(1, 2) for name in "qkv"
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + part["o"](mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        normed = self.norms[1](hidden)
        return hidden + self.mlp["down"](nn.functional.silu(self.mlp["gate"](normed)) * self.mlp["up"](normed))


class Llama(nn.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.final_norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of the next token."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.final_norm(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def circuit(processes: int) -> list[Plan]:
    """Layouts to go through: tensor, pipeline (uneven) and context parallelism, ZeRO 1 and 3, replicas last."""
    uneven = ((0, 2), (2, LAYERS))
    whole = ((0, LAYERS),)
    tp = min(processes, HEADS)
    chosen = (
        ({"tp": 2, "pp": 2, "dp": processes // 4, "zero_stage": 3}, uneven),
        ({"tp": tp, "dp": processes // tp, "rank_order": "tp-cp-dp-pp"}, whole),
        ({"tp": 2, "cp": 2, "dp": processes // 4, "zero_stage": 1}, whole),
        ({"pp": 2, "dp": processes // 2, "zero_stage": 3, "rank_order": "pp-tp-cp-dp"}, ((0, 3), (3, LAYERS))),
        ({"dp": processes}, whole),
    )
    return [
        Plan(
            layout=Layout.model_validate({**degrees, "global_batch_size": 64}),
            virtual_stages=tuple(VirtualStage(layers=span) for span in spans),
        )
        for degrees, spans in chosen
    ]


def exchange(rank: int, switch: SwitchPlan, old: Held, new: Held) -> None:
    """Send and receive this rank's fused messages, direct ones first, and fill its new tensors."""
    keep(old, new)
    moved = switch.deliveries
    starts = moved.message_starts()
    stops = np.append(starts[1:], len(moved))
    for relayed in (False, True):
        work, incoming = [], []
        for start, stop in zip(starts, stops, strict=True):
            if bool(moved.relay[start]) is not relayed:
                continue
            pieces = moved.boxes[start:stop]
            if moved.sender[start] == rank:
                packed = torch.cat([view(new if relayed else old, piece).reshape(-1) for piece in pieces])
                work.append(dist.isend(packed, int(moved.receiver[start])))
            elif moved.receiver[start] == rank:
                parts = [view(new, piece) for piece in pieces]
                buffer = torch.empty(sum(part.numel() for part in parts))
                work.append(dist.irecv(buffer, int(moved.sender[start])))
                incoming.append((buffer, parts))
        for one in work:
            one.wait()
        for buffer, parts in incoming:
            for part, values in zip(parts, buffer.split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view(part.shape))


def travel(rank: int, processes: int, senders: Senders, whole: list[Tensor], what: str) -> Held:
    """Take one kind of state through the circuit; what this rank holds in the end."""
    plans = circuit(processes)
    links = Links(max(processes // 2, 1), 200e9, 25e9)
    held: Held = {}
    for number, plan in enumerate(plans):
        owner = ownership(SPEC, plan, what)  # type: ignore[arg-type]
        before = plans[max(number - 1, 0)]
        switch = plan_switch(SPEC, before, plan, links, what, senders)  # type: ignore[arg-type]
        own = boxes_of_ranks(owner, switch.tensors, processes)[rank]
        expected = held_of(own, lambda n, box: whole[n][box[0] : box[1], box[2] : box[3]].clone())
        if number == 0:
            held = expected
            continue
        new = held_of(own, lambda _, box: torch.full((box[1] - box[0], box[3] - box[2]), torch.nan))
        dist.barrier()
        started = time.perf_counter()
        exchange(rank, switch, held, new)
        dist.barrier()
        seconds = time.perf_counter() - started
        same = all(
            torch.equal(array, right)
            for tensor, pieces in new.items()
            for (_, array), (_, right) in zip(pieces, expected[tensor], strict=True)
        )
        verdicts = torch.tensor([int(same)])
        dist.all_reduce(verdicts)
        if rank == 0:
            relays = int(switch.deliveries.relay.sum())
            print(
                f"{what} {degrees(before)} -> {degrees(plan)}: {switch.num_messages} messages, "
                f"{len(switch.deliveries)} slices ({relays} relayed), {seconds * 1e3:.0f} ms wall; "
                f"{int(verdicts)} of {processes} ranks hold exactly their slices",
                flush=True,
            )
        if int(verdicts) != processes:
            raise SystemExit(f"{what}: a rank does not hold its slices")
        held = new
    return held


def degrees(plan: Plan) -> str:
    """The layout in a few words."""
    layout = plan.layout
    names = [f"{name}{getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp") if getattr(layout, name) > 1]
    return " ".join([*names, f"zero{layout.zero_stage}"])


def process(rank: int, processes: int, senders: Senders, port: int) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Llama()
    tokens = torch.randint(VOCABULARY, (4, 32))
    loss = model(tokens)
    loss.backward()
    named = dict(model.named_parameters())
    names = [tensor.name for tensor in plan_switch(SPEC, *circuit(processes)[:2], Links(8, 1.0, 1.0)).tensors]
    assert sorted(names) == sorted(named), "the plan lists other tensors than the model has"

    def matrix(values: Tensor) -> Tensor:
        return values.detach().reshape(len(values), -1).clone()

    travel(rank, processes, senders, [matrix(named[name].grad) for name in names], "gradients")
    held = travel(rank, processes, senders, [matrix(named[name]) for name in names], "parameters")
    with torch.no_grad():
        for number, name in enumerate(names):
            named[name].copy_(held[number][0][1].view(named[name].shape))
        again = model(tokens)
    if not torch.equal(again, loss):
        raise SystemExit(f"rank {rank}: loss {again} after the circuit, {loss} before")
    if rank == 0:
        print(f"loss before {loss:.6f}, after the circuit {again:.6f}: equal", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8, choices=(4, 8, 16))
    parser.add_argument("--senders", default="relay", choices=SENDERS)
    words = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (words.processes, words.senders, port), nprocs=words.processes)


if __name__ == "__main__":
    main()
