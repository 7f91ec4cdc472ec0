from __future__ import annotations

import math

import pytest
import torch

from infinity.train.model import GPT, GPTShape


def make(*, recompute: bool = False, seed: int = 0, num_layers: int = 2) -> GPT:
    torch.manual_seed(seed)
    return GPT(
        GPTShape(num_layers=num_layers, hidden_size=32, num_heads=4, seq_length=16, vocab_size=256, recompute=recompute)
    )


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(seed))


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, second, other = make(), make(), make(seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.token_embedding.weight, other.token_embedding.weight)


def test_logits_for_every_position_and_a_loss_near_chance_before_training() -> None:
    model = make()
    assert model(tokens()).shape == (3, 16, 256)
    loss = model(tokens(), tokens(2))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = make()
    probabilities = model(tokens()).log_softmax(-1)
    expected = -probabilities.gather(-1, tokens(2)[..., None]).mean()
    torch.testing.assert_close(model(tokens(), tokens(2)), expected)


def test_a_position_sees_nothing_that_comes_after_it() -> None:
    model = make()
    changed = tokens().clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_a_shorter_sequence_gives_the_same_logits_as_the_beginning_of_a_longer_one() -> None:
    model = make()
    torch.testing.assert_close(model(tokens()[:, :7]), model(tokens())[:, :7])


def test_positions_differ() -> None:
    logits = make()(torch.zeros(1, 16, dtype=torch.int64))
    assert not torch.allclose(logits[0, 3], logits[0, 12])


def test_the_head_is_the_token_embedding() -> None:
    model = make()
    per_block = 12 * 32 * 32 + 13 * 32
    assert sum(p.numel() for p in model.parameters()) == 256 * 32 + 16 * 32 + 2 * per_block + 2 * 32
    seen, unseen = 5, 200
    loss = model(torch.full((1, 4), seen), torch.full((1, 4), seen))
    loss.backward()
    assert model.token_embedding.weight.grad is not None
    assert model.token_embedding.weight.grad[unseen].abs().sum() > 0  # through the head only


def test_initial_scale_of_weights() -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(num_layers=8, hidden_size=128, num_heads=4, seq_length=16, vocab_size=256))
    block = model.blocks[3]
    for weight, std in (
        (model.token_embedding.weight, 0.02),
        (block.get_parameter("mlp_in.weight"), 0.02),
        (block.get_parameter("mlp_out.weight"), 0.02 / 4),
        (block.get_parameter("attention_out.weight"), 0.02 / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.get_parameter("mlp_in.bias").abs().sum() == 0


def test_recomputing_activations_changes_no_bit() -> None:
    kept, recomputed = make(), make(recompute=True)
    for model in (kept, recomputed):
        model(tokens(), tokens(2)).backward()
    for (name, a), (_, b) in zip(kept.named_parameters(), recomputed.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_recomputing_keeps_fewer_tensors_for_backward() -> None:
    def kept_bytes(model: GPT) -> int:
        sizes = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(tokens(), tokens(2))
        return sum(sizes)

    assert kept_bytes(make(recompute=True, num_layers=4)) < kept_bytes(make(num_layers=4)) / 3


def test_in_bf16_the_loss_is_still_fp32() -> None:
    model = make().to(torch.bfloat16)
    assert model(tokens()).dtype == torch.bfloat16
    assert model(tokens(), tokens(2)).dtype == torch.float32
