"""The bank: aligned, zero-copy, registered and released, gone after close."""

from __future__ import annotations

import psutil
import pytest
import torch

from hetero_gpu.host_memory import Registration
from hetero_runtime.errors import DeviceError
from hetero_runtime.experts.bank import HUGE_PAGE_BYTES, HostBank


def test_the_bank_is_one_aligned_zeroed_run_of_bytes() -> None:
    bank = HostBank(10_000)
    assert bank.bytes.shape == (10_000,)
    assert bank.bytes.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not bank.bytes.any()
    bank.bytes[123:456].fill_(7)
    assert bank.bytes.data_ptr() == bank.bytes[0:].data_ptr()
    assert int(bank.bytes.sum()) == 7 * 333
    bank.close()


def test_close_gives_the_memory_back_even_under_a_forgotten_view() -> None:
    process = psutil.Process()
    bank = HostBank(64 << 20)
    view = bank.bytes
    view.fill_(1)
    filled = process.memory_info().rss
    bank.close()
    assert filled - process.memory_info().rss > 60 << 20
    assert not view[:4096].any()
    bank.close()


def test_a_closed_bank_is_not_addressed() -> None:
    bank = HostBank(4096)
    bank.close()
    with pytest.raises(AssertionError, match="the bank is closed"):
        _ = bank.bytes


def test_more_than_the_address_space_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"refused \d+\.\d GB for the experts .*free memory"):
        HostBank(1 << 62)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_registration_is_none_and_says_why() -> None:
    bank = HostBank(4096)
    registration = bank.register(chunk_bytes=4096)
    assert (registration.kind, registration.reason) == ("none", "there is no CUDA device")
    bank.close()


def test_close_unregisters_first() -> None:
    bank = HostBank(4096)
    released = []

    class Fake(Registration):
        def release(self) -> None:
            released.append(bank.bytes.numel())

    bank.registration = Fake("registered", "fake")
    bank.close()
    assert released == [4096]
