"""Calls noticed from outside of all hooks: who is heard, who is not, and that nothing changes for anybody."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from gpt_guard.hooks import hook, outputs
from gpt_guard.hooks.forward import ForwardTap
from gpt_guard.hooks.module_calls import fits, watched_call

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    assert vars(nn.Module)["_compiled_call_impl"] is None
    yield
    assert vars(nn.Module)["_compiled_call_impl"] is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.act(self.first(x)))
        return y


RETURNED = ["first", "act", "last", ""]


class Tap(ForwardTap):
    """Open from the start; `heard` is what has returned since it was last asked for."""

    def __init__(self, model: nn.Module, ignore: tuple[str, ...] = ()) -> None:
        super().__init__(model, immediate=True)
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.bad: list[str] = []
        self.open(self)
        self.watch_outputs(lambda index, *_: self.bad.append(self.names[index]), ignore)
        self.finish_setup()

    def forward_begins(self) -> None:
        self.begun.append(self.inputs)

    def forward_ended(self, output: Any) -> None:
        self.ended.append(output)

    @property
    def heard(self) -> list[str]:
        found = [self.names[index] for index in self.order]
        self.order.clear()
        return found

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def model() -> Net:
    return Net()


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def batch() -> Tensor:
    return torch.randn(5, 3)


def test_nothing_lies_in_a_module_and_all_of_it_is_heard(model: Net) -> None:
    before = [dict(vars(module)) for module in model.modules()]
    x = batch()
    with Tap(model) as tap:
        out = model(x)
        assert [dict(vars(module)) for module in model.modules()] == before
        assert hooks(model) == 0
        assert tap.heard == RETURNED
        assert tap.begun[0] == ((x,), {})
        assert tap.ended[0] is out
        assert set(tap.entered) == {0}
    model(x)
    assert len(tap.begun) == 1


def clone(module: Any) -> nn.Module:
    """Shares everything but parameters, as libraries for meta-learning do."""
    twin: nn.Module = module.__new__(type(module))
    vars(twin).update(vars(module))
    twin._parameters = {name: each.detach().clone().requires_grad_() for name, each in module._parameters.items()}
    twin._modules = {name: clone(each) for name, each in module._modules.items()}
    return twin


def data_parallel_replica(module: Any) -> nn.Module:
    twin: nn.Module = module._replicate_for_data_parallel()
    twin._parameters = {name: each.detach().clone().requires_grad_() for name, each in module._parameters.items()}
    twin._modules = {name: data_parallel_replica(each) for name, each in module._modules.items()}
    return twin


@pytest.mark.parametrize(
    "made",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), clone, data_parallel_replica, AveragedModel],
    ids=["deepcopy", "pickle", "clone", "replica", "ema"],
)
def test_whatever_is_made_of_a_model_calls_itself_and_is_not_heard(
    model: Net, made: Callable[[nn.Module], nn.Module]
) -> None:
    x = batch()
    with Tap(model) as tap:
        twin = made(model)
        for parameter in twin.parameters():
            parameter.data.zero_()
        assert not twin(x).any()
        assert model(x).any()
        twin(x).sum().backward() if not isinstance(twin, AveragedModel) else None
        assert all(parameter.grad is None for parameter in model.parameters())
        assert tap.heard == RETURNED
    assert not any("_compiled_call_impl" in vars(module) for module in twin.modules())


def test_a_shallow_copy_shares_the_parts_and_they_are_heard(model: Net) -> None:
    with Tap(model) as tap:
        copy.copy(model)(batch())
        assert tap.heard == RETURNED[:-1]


def test_two_taps_leave_in_any_order(model: Net) -> None:
    for first_out in (0, 1):
        taps = [Tap(model), Tap(model)]
        model(batch())
        assert [tap.heard for tap in taps] == [RETURNED, RETURNED]
        taps.pop(first_out).close()
        assert nn.Module._compiled_call_impl is watched_call
        model(batch())
        assert taps[0].heard == RETURNED
        taps[0].close()
        taps[0].close()


def test_what_somebody_else_put_in_the_place_stays_and_ours_passes_through(model: Net) -> None:
    tap, calls = Tap(model), []

    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return watched_call(self, *args, **kwargs)

    nn.Module._compiled_call_impl = theirs
    try:
        assert not fits(Net())
        with Tap(other := Net()) as second:
            other(batch())
            assert second.heard == RETURNED
        tap.close()
        assert vars(nn.Module)["_compiled_call_impl"] is theirs
        model(batch())
        assert calls[-4] is model
    finally:
        nn.Module._compiled_call_impl = None


class OwnCall(Net):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnAttributes(Net):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Taken(Net):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["_compiled_call_impl"] = None


@pytest.mark.parametrize("kind", [OwnCall, OwnAttributes, Taken])
def test_a_class_that_is_called_in_its_own_way_has_hooks(kind: type[Net]) -> None:
    model = kind()
    with Tap(model) as tap:
        assert hooks(model) == len(model._forward_hooks) + len(model._forward_pre_hooks) == 4
        model(batch())
        assert tap.heard == RETURNED
    assert hooks(model) == 0


def test_where_the_call_of_every_module_was_replaced_all_have_hooks(
    model: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: self._call_impl(*args))
    with Tap(model) as tap:
        assert nn.Module._compiled_call_impl is None
        model(batch())
        assert tap.heard == RETURNED


def test_the_fast_path_of_an_encoder_layer_stays_off_as_with_hooks() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with Tap(layer) as tap, torch.no_grad():
        layer(torch.randn(2, 3, 8))
        assert {"norm1", "linear1", "norm2", ""} <= set(tap.heard)


def test_a_model_compiled_inside_keeps_its_compiled_call(model: Net) -> None:
    with Tap(model) as tap:
        model.compile(backend="eager")
        model(batch())
        assert tap.heard == []
    assert model._compiled_call_impl is not None


# Hooks of the user.


def test_a_hook_that_changes_the_output_is_seen_where_it_hangs(model: Net) -> None:
    with Tap(model) as tap:
        model.first.register_forward_hook(lambda _module, _args, output: output * float("nan"))
        model(batch())
        assert tap.bad[0] == "first"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("prepend", [False, True])
def test_a_pre_hook_may_change_the_batch_and_what_it_makes_of_it_counts(model: Net, late: bool, prepend: bool) -> None:
    def register() -> None:
        model.register_forward_pre_hook(lambda _module, args: (args[0] * float("nan"),), prepend=prepend)

    if not late:
        register()
    with Tap(model) as tap:
        if late:
            model(batch())
            register()
        model(batch())
        args, _ = tap.begun[-1]
        assert bool(args[0].isnan().all())
        model(batch())
        assert tap.heard == RETURNED
        assert len(tap.begun) == len(tap.ended) == 2 + late
        assert hooks(model) == 5
    assert hooks(model) == 1


def test_old_weight_norm_and_lazy_layers_work_as_ever() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with Tap(lazy) as tap:
        lazy(batch())
        lazy(batch())
        assert tap.heard == ["0", "1", ""]
        assert type(lazy[0]) is nn.Linear
    assert hooks(lazy) == 0


def test_parametrizations_come_and_go_inside(model: Net) -> None:
    with Tap(model) as tap:
        parametrizations.spectral_norm(model.first)
        parametrizations.weight_norm(model.last)
        model(batch())
        assert tap.heard == RETURNED
        assert not copy.deepcopy(model)(torch.zeros(1, 3)).isnan().any()
        parametrize.remove_parametrizations(model.first, "weight")
        model(batch())
        assert tap.heard == RETURNED


# What is raised inside.


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


def test_an_exception_passes_with_a_frame_for_each_module_and_nothing_counts_as_returned() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Fails()))
    with Tap(model) as tap:
        with pytest.raises(ValueError, match="on purpose") as caught:
            model(batch())
        lines = [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert lines.count("watched_call") == 3
        assert lines[-1] == "forward"
        assert tap.heard == ["0"]
        assert tap.ended == []


# Everything that calls or traces a model.


def outputs_of(how: str, model: Net, x: Tensor) -> Any:
    if how == "functional_call":
        return functional_call(model, {name: each * 2 for name, each in model.named_parameters()}, (x,))
    if how == "checkpoint":
        return checkpoint(model, x.requires_grad_(), use_reentrant=False)
    if how == "reentrant":
        return checkpoint(model, x.requires_grad_(), use_reentrant=True)
    if how == "data_parallel":
        return nn.DataParallel(model)(x)
    if how == "fx":
        traced = fx.symbolic_trace(model)
        return str(traced.graph), traced(x)
    if how == "export":
        program = torch.export.export(model, (x,), strict=False)
        return [str(node.target) for node in program.graph.nodes], program.module()(x)
    if how == "jit":
        script, trace = torch.jit.script(model), torch.jit.trace(model, x)
        return [script.code, trace.code, script(x), trace(x)]
    raise AssertionError(how)


def flat(value: Any) -> list[Any]:
    return [each for part in value for each in flat(part)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("how", ["functional_call", "checkpoint", "reentrant", "data_parallel", "fx", "export", "jit"])
def test_it_comes_out_as_outside(model: Net, how: str) -> None:
    x = batch()
    expected = flat(outputs_of(how, model, x.clone()))
    with Tap(model) as tap:
        found = flat(outputs_of(how, model, x.clone()))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert tap.bad == []
        assert tap.unwatched == set()
        heard = tap.heard
        if how in ("functional_call", "checkpoint", "reentrant", "data_parallel"):
            assert heard == RETURNED
        if how == "export":
            assert (heard, tap.begun) == ([], [])
    assert "watched_call" not in str(found)


def test_vmap_over_models_of_which_one_is_watched() -> None:
    models = [Net() for _ in range(3)]
    for each in models:
        each.act.inplace = False
    parameters, buffers = stack_module_state(models)
    x = batch()

    def run() -> Any:
        return vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)

    expected = run()
    with Tap(models[0]) as tap:
        assert torch.equal(run(), expected)
        assert tap.bad == []


dynamo_reset: Callable[[], None] = torch.compiler.reset


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_compiled_code_is_the_same_inside_and_outside(model: Net, hooked: bool, around: bool) -> None:
    graphs = []

    def backend(graph: fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([node.op for node in graph.graph.nodes])
        return graph.forward

    if hooked:
        model.first.register_forward_hook(lambda _module, _args, output: output + 1)
    dynamo_reset()
    called: Callable[[Tensor], Any] = (lambda x: model(x) * 2) if around else model
    compiled: Any = torch.compile(called, backend=backend, fullgraph=True)
    x = batch()
    expected = compiled(x)
    with Tap(model) as tap:
        assert torch.equal(compiled(x), expected)
        anew: Any = torch.compile(called, backend=backend, fullgraph=True)
        assert torch.equal(anew(x), expected)
        compiled_once = len(graphs)
        assert torch.equal(anew(x), expected)
        assert len(graphs) == compiled_once
        assert (tap.heard, tap.begun) == ([], [])
        model(x)
        assert tap.heard == RETURNED
    assert torch.equal(compiled(x), expected)
    assert all(graph == graphs[0] for graph in graphs)
    dynamo_reset()


def test_the_test_is_that_of_the_hooks() -> None:
    """Of whatever a module may return, both ends say the same."""
    values: list[Any] = [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([float("inf")]).half(),
        torch.full((2, 2), 3e38),
        torch.tensor([1, 2]),
        torch.eye(2).to_sparse(),
        (torch.ones(1), None, torch.tensor(float("nan"))),
        {"a": [torch.tensor(float("inf"), dtype=torch.float64)]},
        torch.ones(1, device="meta"),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        None,
    ]

    class Gives(nn.Module):
        def forward(self, value: Any) -> Any:
            return value

    def told(model: nn.Module) -> Any:
        with Tap(model) as tap:
            for value in values:
                model(value)
            return tap.bad, tap.unwatched

    class GivesInItsOwnWay(Gives):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    assert told(Gives()) == told(GivesInItsOwnWay())
    assert len(told(Gives())[0]) == 5


class Same(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize("grad", [True, False])
def test_the_mode_of_gradients_stays_and_no_graph_grows(value: float, grad: bool) -> None:
    model = nn.Sequential(Same(), Same())
    x = torch.full((2, 3), value, requires_grad=True)
    with Tap(model) as tap, torch.set_grad_enabled(grad):
        for given in (x, x * 2, x.double() * 2, (x * 2).to_sparse(), (x * 2, x)):
            tap.bad.clear()
            model(given)
            assert torch.is_grad_enabled() is grad
            assert tap.bad[:1] == (["0"] if value != 1.0 else [])
    assert x.grad is None


def test_the_mode_of_gradients_stays_where_a_test_raises() -> None:
    def stop(*_: object) -> None:
        raise ArithmeticError("stopped")

    model = nn.Sequential(Same())
    with Tap(model) as tap:
        tap.listen = stop
        for value, error in ((torch.full((2,), float("inf")), ArithmeticError), (torch.ones(2, device="meta"), None)):
            if error is None:
                model(value)
            else:
                with pytest.raises(error):
                    model(value)
            assert torch.is_grad_enabled()
        assert tap.unwatched == {"0: a meta tensor", "the model itself: a meta tensor"}


@pytest.mark.filterwarnings("ignore:Sparse.*beta state:UserWarning")
def test_a_layout_that_cannot_be_described_is_named_and_not_tested() -> None:
    with Tap(model := nn.Sequential(Same())) as tap:
        model(torch.full((2, 2), float("nan")).to_sparse_bsr((1, 1)))
        assert tap.unwatched == {"0: a sparse_bsr tensor", "the model itself: a sparse_bsr tensor"}
        assert tap.bad == []


def test_inference_tensors_have_no_version_and_are_tested_all_the_same() -> None:
    model = nn.Sequential(Same(), Same())
    with Tap(model) as tap, torch.inference_mode():
        model(torch.ones(2))
        assert (tap.bad, tap.entered[0][0]) == ([], -1)
        model(torch.full((2,), float("nan")))
        # Once: the others have returned this very tensor.
        assert tap.bad == ["0"]
        assert not torch.is_grad_enabled()


def test_what_a_composite_module_was_given_is_noted(model: Net) -> None:
    x = batch().mul_(2.0)
    with Tap(model) as tap:
        model(x)
        assert tap.entered == {0: (1, 0)}
        model(x=x)
        assert tap.entered == {0: (None, 0)}
    with Tap(wrapped := nn.Sequential(nn.Linear(3, 3), nn.Sequential(Same()))) as tap:
        wrapped(x)
        assert {tap.names[index]: seen[1] for index, seen in tap.entered.items()} == {"": 0, "1": 1, "1.0": 1}


def test_a_compiler_is_asked_where_its_flag_is_not_known(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (hook, outputs):
        monkeypatch.setattr(each, "compiler", hook._Asked())
    with Tap(model) as tap:
        model(batch())
        assert tap.heard == RETURNED
        tap.begun.clear()
        outputs_of("export", model, batch())
        assert (tap.heard, tap.begun) == ([], [])


def test_a_paused_tap_hears_nothing(model: Net) -> None:
    with Tap(model, ignore=("last",)) as tap:
        tap.paused = True
        model(batch())
        assert (tap.heard, tap.begun, tap.ended) == ([], [], [])
        tap.paused = False
        model(batch())
        assert tap.heard == RETURNED
        assert [tap.names[index] for index in tap.untested] == ["last"]
