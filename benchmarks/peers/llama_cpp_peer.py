"""llama.cpp through llama-cpp-python: continuous batching over slots, as its own server does it.

Each decode call carries one token of every running slot and, in the room left in the batch, the
prompts of slots that were just taken. The loop is Python, but it does a handful of integer writes a
token; the rest is llama.cpp's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
from peer import Completion, PeerRequest, main

_CACHE_TYPES = {"float32": llama_cpp.GGML_TYPE_F32, "float16": llama_cpp.GGML_TYPE_F16}


@dataclass
class Slot:
    """A running request: `num_computed` of its prompt and its output tokens are in the cache."""

    index: int
    request_index: int
    request: PeerRequest
    num_computed: int = 0
    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0

    @property
    def decoding(self) -> bool:
        """Whether its whole prompt is in the cache."""
        return self.num_computed >= len(self.request.prompt_token_ids)


class LlamaCppEngine:
    """libllama with `--slots` sequences in one context."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.dtype not in _CACHE_TYPES:
            raise SystemExit(f"--dtype {args.dtype}: llama.cpp runs with {sorted(_CACHE_TYPES)}")
        self._num_slots: int = args.slots
        self._batch_tokens: int = args.batch_tokens
        threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        self.settings: dict[str, Any] = {
            "version": version("llama-cpp-python"),
            "model": os.path.basename(args.model),
            "slots": args.slots,
            "batch_tokens": args.batch_tokens,
            "threads": threads,
            "plain_buffers": args.plain_buffers,
        }
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = not args.plain_buffers
        model = llama_cpp.llama_model_load_from_file(args.model.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = args.slots * args.slot_len
        params.n_seq_max = args.slots
        params.n_batch = params.n_ubatch = args.batch_tokens
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _CACHE_TYPES[args.dtype]
        params.kv_unified = args.unified
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit("llama.cpp could not make a context with these settings")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(args.batch_tokens, 0, 1)

    def generate(self, requests: list[PeerRequest]) -> list[Completion]:
        """See `peer.Engine`."""
        began_s = time.perf_counter()
        waiting = deque(enumerate(requests))
        free = list(range(self._num_slots))
        running: list[Slot] = []
        done: dict[int, Completion] = {}
        while waiting or running:
            while waiting and free:
                running.append(Slot(free.pop(), *waiting.popleft()))
            ready = self._step(running)
            now_s = time.perf_counter() - began_s
            for slot, token_id in ready:
                slot.token_ids.append(token_id)
                slot.first_token_s = slot.first_token_s or now_s
                if len(slot.token_ids) == slot.request.max_tokens:
                    done[slot.request_index] = Completion(slot.token_ids, slot.first_token_s, now_s)
                    llama_cpp.llama_memory_seq_rm(self._memory, slot.index, -1, -1)
                    running.remove(slot)
                    free.append(slot.index)
        return [done[index] for index in range(len(requests))]

    def _step(self, running: list[Slot]) -> list[tuple[Slot, int]]:
        """One decode call; returns the slots that got a token, each with it."""
        batch = self._batch
        batch.n_tokens = 0
        ready: list[tuple[Slot, int]] = []
        for slot in running:
            if slot.decoding:
                ready.append((slot, batch.n_tokens))
                position = len(slot.request.prompt_token_ids) + len(slot.token_ids) - 1
                self._add(slot.token_ids[-1], position, slot.index, wants_logits=True)
        for slot in running:
            prompt = slot.request.prompt_token_ids
            room = self._batch_tokens - batch.n_tokens
            for position in range(slot.num_computed, min(len(prompt), slot.num_computed + room)):
                last = position == len(prompt) - 1
                if last:
                    ready.append((slot, batch.n_tokens))
                self._add(prompt[position], position, slot.index, wants_logits=last)
                slot.num_computed = position + 1
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed: the context has no room for the batch")
        return [(slot, self._greedy(row)) for slot, row in ready]

    def _add(self, token_id: int, position: int, slot: int, *, wants_logits: bool) -> None:
        row = self._batch.n_tokens
        self._batch.token[row] = token_id
        self._batch.pos[row] = position
        self._batch.n_seq_id[row] = 1
        self._batch.seq_id[row][0] = slot
        self._batch.logits[row] = wants_logits
        self._batch.n_tokens = row + 1

    def _greedy(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._num_vocab))
        return int(np.frombuffer(address.contents, dtype=np.float32).argmax())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--slot-len", type=int, default=512, help="tokens a slot can hold")
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument(
        "--plain-buffers",
        action="store_true",
        help="weights as the file has them: repacking for AMX crashes in 0.3.36",
    )
    parser.add_argument("--unified", action="store_true", help="one KV buffer for all slots")


if __name__ == "__main__":
    main("llama.cpp", LlamaCppEngine, _add_arguments)
