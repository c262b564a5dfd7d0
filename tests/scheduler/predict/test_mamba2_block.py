"""The mixer against transformers' own, and its scan against its recurrence."""

from __future__ import annotations

import pytest
import torch

from hetero_scheduler.predict.mamba2_block import BlockState, Mamba2Block, Mamba2Sizes

SIZES = Mamba2Sizes(d_model=48, state_size=16, head_dim=24, chunk=16)


def block(seed: int = 0) -> Mamba2Block:
    torch.manual_seed(seed)
    mixer = Mamba2Block(SIZES).eval()
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 1.5)
        mixer.D.uniform_(-1, 1)
    return mixer


@pytest.mark.parametrize("steps", [1, 5, 16, 37])
def test_equals_the_mixer_of_transformers_with_its_weights(steps: int) -> None:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=48,
        expand=2,
        head_dim=24,
        num_heads=4,
        state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=16,
        num_hidden_layers=1,
        vocab_size=32,
    )
    reference, ours = Mamba2Mixer(config, layer_idx=0).eval(), block()
    assert {name: tensor.shape for name, tensor in reference.state_dict().items()} == {
        name: tensor.shape for name, tensor in ours.state_dict().items()
    }
    reference.load_state_dict(ours.state_dict())
    inputs = torch.randn(3, steps, 48)
    with torch.no_grad():
        output, _ = ours(inputs, ours.initial_state(3))
        torch.testing.assert_close(output, reference(inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 3, 16, 33, 63])
def test_scan_equals_recurrence(steps: int) -> None:
    mixer, inputs = block(), torch.randn(2, steps, 48)
    with torch.no_grad():
        scanned, end = mixer(inputs, mixer.initial_state(2))
        state, outputs = mixer.initial_state(2), []
        for position in range(steps):
            output, state = mixer.step(inputs[:, position], state)
            outputs.append(output)
    torch.testing.assert_close(scanned, torch.stack(outputs, dim=1), rtol=0, atol=1e-5)
    for one, other in zip(end, state, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_sequence_in_two_parts_equals_the_whole() -> None:
    mixer, inputs = block(), torch.randn(2, 40, 48)
    with torch.no_grad():
        whole, _ = mixer(inputs, mixer.initial_state(2))
        first, state = mixer(inputs[:, :23], mixer.initial_state(2))
        second, _ = mixer(inputs[:, 23:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-5)


def test_a_state_is_not_written_in_place() -> None:
    mixer = block()
    with torch.no_grad():
        _, state = mixer(torch.randn(1, 5, 48), mixer.initial_state(1))
        before = BlockState(*(tensor.clone() for tensor in state))
        mixer.step(torch.randn(1, 48), state)
        mixer(torch.randn(1, 20, 48), state)
    assert all(torch.equal(one, other) for one, other in zip(before, state, strict=True))


def test_gradients_reach_every_parameter() -> None:
    mixer = block().train()
    output, _ = mixer(torch.randn(2, 20, 48), mixer.initial_state(2))
    output.square().mean().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_a_width_that_is_no_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide into heads of 64"):
        Mamba2Sizes(d_model=40)
