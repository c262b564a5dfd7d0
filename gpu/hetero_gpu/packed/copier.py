"""Packed copies by the copy engine: over the link into a small ring on the device, then decoded to the slab.

    link     ──[copy 0 → buffer 0]──[copy 1 → buffer 1]── … ──[wait: decode 0]──[copy 4 → buffer 0]──
    decode   ──[wait: copy 0, last read of slab 7]──[buffer 0 → slab 7]──(done)──[wait: copy 1]── …
    compute  ──[expert in slab 7]──(read)──── … ──[wait: done]──[new expert in slab 7]──

The link does not stand still while a record is decoded, nor while a slab is still read: only the decode
writes slabs, so only it waits for their last read. Both streams work in the order of submission, so copies
finish in that order too.
"""

from __future__ import annotations

import torch

from hetero_gpu.cuda_transfer import CopyBytes, CudaCopier, CudaTransfer, copy_directly
from hetero_gpu.packed.decode import Decoder
from hetero_gpu.packed.layout import RING_BUFFERS, PackedLayout
from hetero_gpu.transfer import Fence, Transfer


class PackedCopier(CudaCopier):
    """See the module docstring. Sources are packed records, slabs hold plain ones."""

    def __init__(
        self,
        device: torch.device,
        layout: PackedLayout,
        *,
        copy: CopyBytes = copy_directly,
        num_buffers: int = RING_BUFFERS,
    ) -> None:
        super().__init__(device, copy)
        self._layout, self._decoder = layout, Decoder(layout)
        self._decode_stream = torch.cuda.Stream(device, priority=-1)  # ahead of the waves of a computation
        memory = torch.empty((num_buffers, layout.packed_bytes), dtype=torch.uint8, device=device)
        for stream in (self._stream, self._decode_stream):
            memory.record_stream(stream)
        self._buffers = list(memory)
        self._arrived = [torch.cuda.Event() for _ in self._buffers]
        made = torch.cuda.Event()
        made.record(torch.cuda.current_stream(device))  # before, the memory may have been another tensor's
        self._decoded = [made] * num_buffers
        self._next = 0

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        assert slab.numel() == self._layout.plain_bytes, f"a slab of {slab.numel()} bytes"
        turn, self._next = self._next, (self._next + 1) % len(self._buffers)
        buffer, arrived = self._buffers[turn], self._arrived[turn]
        self._stream.wait_event(self._decoded[turn])
        self._copy(source, buffer, self._stream)
        arrived.record(self._stream)
        self._decode_stream.wait_event(arrived)
        if after is not None:
            assert isinstance(after, torch.cuda.Event), f"a CUDA copy cannot wait for {type(after).__name__}"
            self._decode_stream.wait_event(after)
        self._decoder.decode(buffer.data_ptr(), slab.data_ptr(), self._decode_stream)
        done = torch.cuda.Event()
        done.record(self._decode_stream)
        self._decoded[turn] = done
        return CudaTransfer(done, self._clock)

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._decode_stream.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._buffers.clear()
