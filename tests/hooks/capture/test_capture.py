"""Capture: what is kept of a step, for how long, and that nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.hooks.capture.capture import Capture, versions_of
from gpt_guard.hooks.capture.output_gradients import gradients_of, reached

from ..dropping_net import Net


def call(capture: Capture, model: nn.Module, x: Tensor, *, evaluation: bool = False) -> Tensor:
    capture.forward_begins(((x,), {}), 0, evaluation=evaluation)
    out: Tensor = model(x)
    capture.forward_ended(out)
    return out


def backward(capture: Capture, loss: Tensor, micro_batch: int) -> None:
    capture.backward_begins((loss,))
    loss.backward()
    capture.backward_ended(micro_batch)


def test_inputs_are_kept_themselves_and_not_copied() -> None:
    model, x = Net(), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    call(capture, model, x)
    assert capture.now is not None
    assert capture.now.args[0] is x
    assert capture.now.versions == [0]
    x.add_(1)
    assert versions_of(capture.now.args, capture.now.kwargs) == [1]


def test_a_written_parameter_shows() -> None:
    model = Net()
    capture = Capture(model, immediate=True)
    call(capture, model, torch.ones(2, 3))
    with torch.no_grad():
        model.layer.bias.add_(1)
    assert capture.now is not None
    differing = [
        before != now for before, now in zip(capture.now.parameters, capture.parameter_versions(), strict=True)
    ]
    assert differing == [False, True]


def test_a_step_takes_everything_away() -> None:
    model = Net()
    capture = Capture(model, immediate=False)
    backward(capture, call(capture, model, torch.ones(2, 3)).sum(), 1)
    assert len(capture.calls) == 1
    capture.step_ended()
    assert (list(capture.calls), capture.now) == ([], None)


def test_micro_batches_are_counted_and_kept_until_the_step_is_judged() -> None:
    model = Net()
    capture = Capture(model, immediate=False)
    for place in range(3):
        backward(capture, call(capture, model, torch.ones(2, 3)).sum(), place + 1)
    assert [each.micro_batch for each in capture.calls] == [0, 1, 2]
    assert all(each.losses and each.outputs[0].gradient is not None for each in capture.calls)
    capture.judged()
    assert not any(each.losses or each.outputs[0].gradient is not None for each in capture.calls)


def test_where_each_backward_is_judged_at_once_only_what_comes_after_it_is_kept() -> None:
    model = Net()
    capture = Capture(model, immediate=True)
    for place in range(3):
        backward(capture, call(capture, model, torch.ones(2, 3)).sum(), place + 1)
        assert not capture.calls[-1].losses
    assert [each.micro_batch for each in capture.calls] == [2]


def test_of_large_batches_only_the_newest_is_kept() -> None:
    model = Net()
    capture = Capture(model, immediate=False)
    large = torch.ones(500_000, 3)
    for place in range(2):
        backward(capture, call(capture, model, large).sum(), place + 1)
    assert [each.micro_batch for each in capture.calls] == [1]


def test_a_watched_loss_belongs_to_the_forward_before_it_or_inside_of_it() -> None:
    model, x = Net(), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    out = call(capture, model, x)
    after = capture.loss_begins(torch.sum, (out,), {})
    capture.loss_ended(after, out.sum())
    around = capture.loss_begins(torch.sum, (x,), {})
    capture.loss_ended(around, call(capture, model, x).sum())
    assert not after.calls_model
    assert around.calls_model
    assert [each.loss_calls for each in capture.calls] == [[after], [around]]


def test_an_evaluation_leaves_the_training_call_in_its_place() -> None:
    model, x = Net(), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    call(capture, model, x)
    training = capture.now
    with torch.no_grad():
        call(capture, model, x, evaluation=True)
    assert capture.now is training
    assert capture.evaluation is None


class WithLoss(Net):
    """Returns its loss beside its output."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, out.square().mean()


def steps(capture: Capture, model: nn.Module, count: int, loss_of: Any) -> Tensor:
    """So many steps, of which the last stands where its backward is to be judged."""
    for place in range(count):
        if place:
            capture.backward_ended(1)
        capture.step_ended()
        loss: Tensor = loss_of(call(capture, model, torch.ones(2, 3)))
        capture.backward_begins((loss,))
        loss.backward()
    return loss


def test_once_the_loss_is_known_to_be_returned_no_hook_waits() -> None:
    model = WithLoss()
    capture = Capture(model, immediate=True)
    loss = steps(capture, model, 6, lambda output: output[1])
    (kept,) = capture.calls
    assert [each.gradient for each in kept.outputs] == [None, None]
    assert kept.losses[0] is loss
    # A replay asks for them by name.
    assert [each.position for each in kept.outputs] == ["[0]", "[1]"]
    assert gradients_of(kept.outputs, kept.losses) == {"[1]": torch.ones(())}
    capture.backward_ended(1)
    assert kept.losses == ()


@pytest.mark.parametrize(
    "loss_of",
    [lambda output: output[1].div_(4), lambda output: output[1] + output[0].sum(), lambda output: output[0].sum()],
)
def test_a_loss_from_elsewhere_is_noticed_where_nothing_waits(loss_of: Any) -> None:
    model = WithLoss()
    capture = Capture(model, immediate=True)
    steps(capture, model, 6, lambda output: output[1])
    capture.backward_ended(1)
    steps(capture, model, 1, loss_of)
    (kept,) = capture.calls
    # Nothing waited this time, and it is not taken for the loss that the model returned.
    assert gradients_of(kept.outputs, kept.losses) == {}
    first, _ = reached(kept.losses, {each.number for each in kept.outputs})
    assert first
    capture.backward_ended(1)
    steps(capture, model, 1, loss_of)
    assert any(each.gradient is not None for each in capture.calls[0].outputs)


def test_two_calls_in_a_step_are_both_seen_as_returned() -> None:
    model = WithLoss()
    capture = Capture(model, immediate=False)
    steps(capture, model, 6, lambda output: output[1])
    capture.step_ended()
    for place in range(2):
        backward(capture, call(capture, model, torch.ones(2, 3))[1], place + 1)
    assert [each.micro_batch for each in capture.calls] == [0, 1]
    assert all(len(gradients_of(each.outputs, each.losses)) == 1 for each in capture.calls)
    capture.step_ended()
    # Both belong to one backward, as the real and the made-up batch of a GAN.
    losses = [call(capture, model, torch.ones(2, 3))[1] for _ in range(2)]
    backward(capture, losses[0] + losses[1], 1)
    steps(capture, model, 1, lambda output: output[1])
    assert any(each.gradient is not None for each in capture.calls[0].outputs)


def test_gradients_are_let_go_though_no_loss_was_a_tensor() -> None:
    """`backward()` may be called on an edge of the graph."""
    model = Net()
    capture = Capture(model, immediate=True)
    out = call(capture, model, torch.ones(2, 3)).sum()
    capture.backward_begins(())
    out.backward()
    (kept,) = capture.calls
    assert kept.outputs[0].gradient is not None
    capture.backward_ended(1)
    assert kept.outputs[0].gradient is None


def test_versions_are_counted_alike_whatever_the_model_is_called_with() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    y.add_(1)
    with torch.inference_mode():
        frozen = torch.ones(2)
    given: list[tuple[tuple[Any, ...], dict[str, Any], list[int]]] = [
        ((x, y), {}, [0, 1]),
        ((x,), {"y": y, "mask": None, "scale": 2.0}, [0, 1]),
        ((), {"y": y}, [1]),
        ((), {}, []),
        ((frozen, y), {}, [-1, 1]),
        (({"x": x, "y": y},), {}, [0, 1]),
        ((x,), {"y": [y]}, [0, 1]),
        ((nn.Parameter(x),), {"text": "a"}, [0]),
    ]
    for args, kwargs, versions in given:
        assert versions_of(args, kwargs) == versions


def test_a_dict_is_kept_as_it_was_given() -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    capture = Capture(model, immediate=True)
    batch = {"x": x, "labels": x}
    capture.forward_begins(((batch, "text"), {"more": x}), 0, evaluation=False)
    batch.pop("labels")
    assert capture.now is not None
    assert capture.now.args == ({"x": x, "labels": x}, "text")
    assert capture.now.versions == [0, 0, 0]
