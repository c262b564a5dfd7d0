"""The link measurement: every way on a GPU, a fact on a machine without one."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu.link import LinkFacts, measure_link


def test_no_cuda_device_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_link() == LinkFacts(refusals=("no CUDA device",))


@pytest.mark.gpu
def test_every_way_is_measured() -> None:
    pytest.importorskip("triton")
    facts = measure_link(num_records=4, repeats=3)
    assert facts.refusals == ()
    rates = (facts.pinned, facts.pageable, facts.zero_copy, facts.device_copy, facts.registration)
    assert all(rate is not None and rate > 0 for rate in rates)


@pytest.mark.gpu
def test_records_that_a_kernel_cannot_read_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        measure_link(record_bytes=1000)


@pytest.mark.gpu
def test_a_refused_registration_leaves_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_gpu import link
    from hetero_gpu.host_memory import Registration

    monkeypatch.setattr(link, "register", lambda host, chunk_bytes: Registration("staging", "a quota"))
    facts = measure_link(record_bytes=1 << 20, num_records=2, repeats=1)
    assert facts.refusals == ("a quota",)
    assert facts.pinned is None
    assert facts.zero_copy is None
    assert facts.pageable is not None
