"""From below host memory to a device behind a link: read into a host slab, then copied to a device slab.

    disk      ──[read 3 → host slab 1]──[read 8 → host slab 4]── …
    link      ────────────────────────── [host slab 1 → slab 7]──[host slab 4 → slab 2]── …
    engine    submit 3, submit 8, … ── wait 3: until it is read; from there the device waits for its copy

The thread that has read a record puts its copy on the link, so nobody has to look. What lies in host memory
already takes the second hop alone. A host slab is held from `submit` until its bytes are on the device;
afterwards the host tier, a slab cache like the device's and under the same policy, evicts it as it likes.

Where records `return`, what leaves the device goes back to a host slab if none has it (`returning`), so that
host slabs of what the device has are the first to be given away: nothing lies in both for long.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from hetero_gpu import Copier, Fence, LinkCopier, SlabCache, Transfer
from hetero_runtime.errors import RequestError
from hetero_runtime.tiers.base import StoredRecord
from hetero_runtime.tiers.reading import ReadingCopier, RecordRead
from hetero_runtime.tiers.returning import ReturningRecords
from hetero_scheduler import EvictionPolicy, ExpertKey, Lookup
from hetero_scheduler.slots import Scores


class TwoHops(Transfer):
    """One record on its way. `read`: the first hop, None where the record lay in host memory."""

    def __init__(
        self,
        owner: TwoHopCopier,
        key: ExpertKey,
        *,
        read: RecordRead | None,
        from_slab: torch.Tensor,
        to_slab: torch.Tensor,
        after: Fence | None,
    ) -> None:
        self.key, self.read, self.after = key, read, after
        self.from_slab, self.to_slab = from_slab, to_slab
        self.copy: Transfer | None = None
        self.error: Exception | None = None
        self.is_given_up = False
        self._owner = owner

    def is_done(self) -> bool:
        return self.copy is not None and self.copy.is_done()

    def is_over(self) -> bool:
        if self.copy is not None:
            return self.copy.is_over()
        if self.read is not None and not self.read.is_over():
            return False
        is_unread = self.read is not None and not self.read.is_done()
        return self.is_given_up or is_unread or self.error is not None

    def wait(self) -> None:
        if self.read is not None:
            self.read.wait()
        self._owner.hand_on(self)
        if self.error is not None:
            raise self.error
        assert self.copy is not None, f"{self.key} was given up and waited for"
        self.copy.wait()

    def hurry(self) -> None:
        if self.read is not None:
            self.read.hurry()

    def give_up(self) -> None:
        self._owner.give_up(self)


class _Return(NamedTuple):
    """One record on its way back to a host slab."""

    key: ExpertKey
    read: RecordRead


class TwoHopCopier(Copier[StoredRecord]):
    """See the module docstring.

    `host`: the cache of host slabs, which nobody else fills, by copies of `reads`, under `eviction`. `link`:
    copies from them to the device, of `link_s` seconds each. `returning`: what `reads` reads from; None where
    nothing returns.
    """

    overlaps, is_spare, keeps_order = True, False, False

    def __init__(
        self,
        host: SlabCache,
        *,
        eviction: EvictionPolicy,
        reads: ReadingCopier,
        link: LinkCopier,
        link_s: float,
        returning: ReturningRecords | None = None,
    ) -> None:
        self._host, self._eviction, self._returning = host, eviction, returning
        self._reads, self._link, self._link_s = reads, link, link_s
        self._guard = threading.Lock()
        self._under_way: list[TwoHops] = []
        self._returns: list[_Return] = []
        self._last_into: dict[int, TwoHops] = {}
        self._is_on_device = np.zeros_like(eviction.score, dtype=np.bool_)
        self.num_spared = 0
        """Records asked for that host memory had, or was about to have."""

    def submit(self, source: StoredRecord, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        self._release_arrived()
        last = self._last_into.pop(slab.data_ptr(), None)
        if last is not None:
            self._is_on_device[last.key] = False
            self._bring_back(last, over=source.key)
        while not self._hold(source.key):
            self._await_oldest()
        read = self._host.under_way(source.key)
        assert read is None or isinstance(read, RecordRead), f"a host slab is filled by {read}"
        hops = TwoHops(
            self,
            source.key,
            read=read,
            from_slab=self._host.slab(source.key),
            to_slab=slab,
            after=after,
        )
        self._under_way.append(hops)
        self._last_into[slab.data_ptr()], self._is_on_device[source.key] = hops, True
        if read is None:
            self.hand_on(hops)
        else:
            self._reads.when_over(read, lambda: self.hand_on(hops))
        return hops

    def fence(self) -> Fence | None:
        return self._link.fence()

    def stall_s(self) -> float:
        return self._link.stall_s() + self._reads.stall_s()

    def copy_s(self, key: ExpertKey) -> float | None:
        """Seconds that `key` takes to the device, by one hop or two; None before the first read."""
        if self._host.lookup(key) is Lookup.HIT:
            return self._link_s
        read_s = self._reads.copy_s(key)
        return None if read_s is None else read_s + self._link_s

    def synchronize(self) -> None:
        self._reads.synchronize()
        for hops in self._under_way:
            self.hand_on(hops)
        self._link.synchronize()
        self._release_arrived()

    def close(self) -> None:
        self._host.close()
        self._link.close()
        self._under_way.clear()
        self._returns.clear()

    # ---- for the records on their way, from any thread

    def hand_on(self, hops: TwoHops) -> None:
        """Put the copy to the device on the link, once, if the record is there and somebody wants it."""
        with self._guard:
            is_read = hops.read is None or hops.read.is_done()
            if hops.copy is not None or hops.error is not None or hops.is_given_up or not is_read:
                return
            try:
                hops.copy = self._link.submit(hops.from_slab, hops.to_slab, after=hops.after)
            except Exception as error:  # for whoever waits
                hops.error = error

    def give_up(self, hops: TwoHops) -> None:
        """No copy of `hops` is put on the link from now on; what is being read stays in host memory."""
        with self._guard:
            hops.is_given_up = True
        self._is_on_device[hops.key] = False

    # ---- host slabs

    def _hold(self, key: ExpertKey) -> bool:
        """Have `key` in a host slab, or on its way there, and keep it. False while all slabs are held."""
        lookup = self._host.lookup(key)
        if lookup is Lookup.MISS:
            return self._host.prefetch(key, score=self._score())
        if lookup is Lookup.HIT:
            self._host.pin(key)
        self.num_spared += 1
        return True

    def _score(self) -> Scores:
        """Who leaves host memory: first what will come back when the device has done with it."""
        score = self._eviction.prefetch_score
        return score if self._returning is None else np.where(self._is_on_device, -np.inf, score)

    def _bring_back(self, last: TwoHops, *, over: ExpertKey) -> None:
        """`over` comes to the slab that `last` filled: save what is there, unless host memory has that, or
        all that it has is worth more."""
        key, copied = last.key, last.copy
        if self._returning is None or copied is None or self._host.lookup(key) is not Lookup.MISS:
            return
        score = self._score()
        if not self._host.num_empty(key.layer) and score[key] <= score[self._host.present()].min():
            return
        with self._guard:
            if not self._returning.bring_back(key, last.to_slab, copied=copied):
                return
        if not self._host.prefetch(key, protected=[over], score=score):
            self._returning.forget(key)
            return
        read = self._host.transfer(key)
        assert isinstance(read, RecordRead), f"a host slab is filled by {read}"
        read.hurry()
        self._returns.append(_Return(key, read))

    def _release_arrived(self) -> None:
        """Host slabs whose bytes nobody needs any more are evictable again."""
        over = [hops for hops in self._under_way if hops.is_over()]
        back = [each for each in self._returns if each.read.is_over()]
        if not over and not back:
            return
        self._under_way = [hops for hops in self._under_way if hops not in over]
        self._returns = [each for each in self._returns if each not in back]
        held = {hops.key for hops in self._under_way}
        for key in dict.fromkeys([*(hops.key for hops in over), *(each.key for each in back)]):
            if key not in held and self._host.lookup(key) is not Lookup.MISS:
                self._release(key)
        for each in back:
            assert self._returning is not None, f"{each.key} came back, and nothing returns"
            self._returning.forget(each.key)

    def _release(self, key: ExpertKey) -> None:
        with suppress(
            RequestError
        ):  # it could not be read: whoever waited for it knows, and it holds no slab
            self._host.wait(key)
            self._host.release([key])
            self._host.unpin(key)

    def _await_oldest(self) -> None:
        """Block until a host slab is free. Every one is held by a record on its way, there or back."""
        assert self._under_way or self._returns, f"host slabs are held by nobody: {self._host.counts()}"
        read = self._returns[0].read if self._returns else self._under_way[0].read
        if read is not None:
            with suppress(RequestError):  # as above
                read.wait()
        for hops in self._under_way[:1]:
            self.hand_on(hops)
        self._link.synchronize()
        self._release_arrived()
