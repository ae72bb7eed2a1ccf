"""Plain loops: what is restored equals what was committed, whatever the model and the optimizers do."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from tests.standby.processes import Net, build, step, undisturbed
from torchext.standby import NoStateError, Replicator, StandbyError, StateMismatchError
from torchext.standby import tree as trees
from torchext.standby.daemon import Daemon
from torchext.standby.link import State, fetch, remove, status
from torchext.standby.replicator import default_job

pytestmark = pytest.mark.usefixtures("one_thread")


def _replicator(daemon: Daemon, model: Any, optimizer: Any, **options: Any) -> Replicator:
    return Replicator(model, optimizer, standby=daemon.address, job="job", **options)


def _fetch(daemon: Daemon) -> State:
    return fetch(daemon.address, "job")


def _assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            _assert_same(a, b)
    else:
        assert left == right


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_a_restored_run_is_the_undisturbed_one_bit_for_bit(daemon: Daemon, transport: Any, mode: Any) -> None:
    """Lightning-AI/pytorch-lightning#17543, #18098: dropout after a restart."""
    losses, weights = undisturbed(12)
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, transport=transport, mode=mode) as replicator:
        assert replicator.restore() is None
        for i in range(7):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i, state={"position": i})
    model, optimizer = build(seed=99)
    with _replicator(daemon, model, optimizer, transport=transport, mode=mode) as replicator:
        found = replicator.restore()
        assert found is not None
        assert (found.step, found.state) == (6, {"position": 6})
        for i in range(7, 12):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i)
    _assert_same(model.state_dict(), weights)
    _assert_same(_fetch(daemon).tree["models"]["model"], weights)
    assert status(daemon.address)["jobs"]["job"]["step"] == 11


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam for-loop": lambda p: torch.optim.Adam(p, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_commit_is_exact_with(daemon: Daemon, name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i in range(4):
            step(model, optimizer)
            replicator.commit(i)
            tree = _fetch(daemon).tree
            _assert_same(tree["models"]["model"], model.state_dict())
            _assert_same(tree["optimizers"][0], optimizer.state_dict())


def test_lbfgs_whose_closure_runs_within_its_step(daemon: Daemon) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(8, 32)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i in range(3):
            optimizer.step(closure)
            replicator.commit(i)
            _assert_same(_fetch(daemon).tree["optimizers"][0], optimizer.state_dict())
            _assert_same(_fetch(daemon).tree["models"]["model"], model.state_dict())


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_rows_of_sparse_gradients_are_all_that_is_pulled(daemon: Daemon, transport: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Embedding(5000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with _replicator(daemon, model, optimizer, mode="rpo0", transport=transport) as replicator:
        for i in range(6):
            before = replicator.stats["bytes_pulled"]
            optimizer.zero_grad()
            ids = torch.randint(0, 5000, (40,))
            model(ids).square().sum().backward()
            optimizer.step()
            replicator.commit(i)
            tree = _fetch(daemon).tree
            _assert_same(tree["models"]["model"], model.state_dict())
            _assert_same(tree["optimizers"][0], optimizer.state_dict())
            touched = len(ids.unique()) * 16 * 4 * 3
            pulled = replicator.stats["bytes_pulled"] - before
            if i > 0:  # the state of torch's generator comes with it: 5056 bytes
                assert touched <= pulled <= touched + 5056


def test_only_what_is_trained_is_pulled(daemon: Daemon) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200, bias=False), torch.nn.Linear(200, 20, bias=False))
    model[0].weight.requires_grad = False
    optimizer = torch.optim.AdamW(model[1].parameters())
    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i in range(3):
            before = replicator.stats["bytes_pulled"]
            model(torch.randn(4, 200)).sum().backward()
            optimizer.step()
            replicator.commit(i)
        trained = 3 * model[1].weight.nbytes
        assert replicator.stats["bytes_pulled"] - before == trained + 5056
        with torch.no_grad():
            model[0].weight.mul_(2.0)  # nobody owns it, yet it changed
        replicator.commit(3)
        _assert_same(_fetch(daemon).tree["models"]["model"], model.state_dict())
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        replicator.commit(4)
        _assert_same(_fetch(daemon).tree["models"]["model"], model.state_dict())


def test_a_skipped_or_partial_step_and_accumulation(daemon: Daemon) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i, used in enumerate([(0, 1, 2), (0,), (), (1, 2), (2,)]):
            optimizer.zero_grad()
            for _ in range(2):
                for k in used:
                    model[k](torch.randn(4, 32)).sum().backward()
            optimizer.step()
            replicator.commit(i)
            tree = _fetch(daemon).tree
            _assert_same(tree["models"]["model"], model.state_dict())
            _assert_same(tree["optimizers"][0], optimizer.state_dict())


def test_several_models_and_optimizers_an_average_a_scheduler_and_a_scaler(daemon: Daemon) -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(3)
        g, d = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        optimizers = [torch.optim.Adam(g.parameters()), torch.optim.SGD(d.parameters(), lr=0.1)]
        average = torch.optim.swa_utils.AveragedModel(g, use_buffers=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
        return g, d, optimizers, average, scheduler, torch.amp.GradScaler("cpu", init_scale=2.0)

    def train(parts: tuple[Any, ...], i: int) -> None:
        g, d, optimizers, average, scheduler, scaler = parts
        loss = d(g(torch.randn(4, 32))).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        if i % 2:
            scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        average.update_parameters(g)
        scheduler.step()

    def replicate(parts: tuple[Any, ...]) -> Replicator:
        g, d, optimizers, average, scheduler, scaler = parts
        extra = {"average": average, "scheduler": scheduler, "scaler": scaler}
        return _replicator(daemon, {"g": g, "d": d}, optimizers, extra=extra)

    reference = make()
    for i in range(8):
        train(reference, i)
    first, second = make(), make()
    with replicate(first) as replicator:
        for i in range(5):
            train(first, i)
            replicator.commit(i)
    with replicate(second) as replicator:
        found = replicator.restore()
        assert found is not None
        for i in range(found.step + 1, 8):
            train(second, i)
            replicator.commit(i)
    for left, right in zip(
        (*reference[:2], *reference[2], *reference[3:]), (*second[:2], *second[2], *second[3:]), strict=True
    ):
        _assert_same(left.state_dict(), right.state_dict())


def test_tensors_are_adopted_again_after_they_were_replaced(daemon: Daemon) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i in range(8):
            step(model, optimizer)
            if i == 1:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif i == 2:
                old = list(model.parameters())
                model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
                new = optimizer.param_groups[0]["params"] = list(model.parameters())
                for before_it, parameter in zip(old, new, strict=True):
                    if before_it in optimizer.state:
                        optimizer.state[parameter] = optimizer.state.pop(before_it)
            elif i == 3:
                model.layers[0].weight.data = model.layers[0].weight.data.clone() * 2
            elif i == 4:
                model.layers[0].weight.data = torch.randn(64, 32)[:, :]
            elif i == 5:
                kept = model.layers[0].weight.data  # somebody else looks at the memory
                before = kept.clone()
                model.layers[0].weight.data = torch.zeros(64, 32)
            replicator.commit(i)
            tree = _fetch(daemon).tree
            _assert_same(tree["models"]["model"], model.state_dict())
            _assert_same(tree["optimizers"][0], optimizer.state_dict())
        assert torch.equal(kept, before)
        size = replicator.stats["arena_bytes"]
        for i in range(8, 40):
            step(model, optimizer)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            replicator.commit(i)
        assert replicator.stats["arena_bytes"] == size


def test_memory_that_others_look_at_is_copied_instead_of_moved(daemon: Daemon) -> None:
    torch.manual_seed(0)
    flat = torch.zeros(2, 32, 32)
    model = torch.nn.ParameterList([torch.nn.Parameter(flat[0]), torch.nn.Parameter(flat[1])])
    watched = torch.nn.Parameter(torch.randn(32, 32))
    view = watched.detach().numpy()
    model.append(watched)
    model.append(torch.nn.Parameter(torch.randn(32, 32).t()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i in range(3):
            sum(p.square().sum() + p.sum() for p in model).backward()
            optimizer.step()
            optimizer.zero_grad()
            replicator.commit(i)
            _assert_same(_fetch(daemon).tree["models"]["model"], model.state_dict())
    assert torch.equal(flat[0], model[0].detach())
    assert np.array_equal(view, watched.detach().numpy())


def test_a_change_between_commit_and_step_drops_the_commit_and_never_tears_it(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer) as replicator:
        step(model, optimizer)
        replicator.commit(0)
        step(model, optimizer)  # seals 0
        expected = copy.deepcopy(model.state_dict())
        replicator.commit(1)
        step(model, optimizer)  # seals 1
        replicator.commit(2)
        with torch.no_grad():
            model.layers[0].weight.clamp_(-0.01, 0.01)  # as a Wasserstein GAN does
        step(model, optimizer)
        assert "step 2 is not committed: model.layers.0.weight was changed" in caplog.text
        _assert_same(_fetch(daemon).tree["models"]["model"], expected)
        replicator.commit(3)
        replicator.gate()
        state = _fetch(daemon)
        while state.step != 3:  # sealed without waiting
            state = _fetch(daemon)
        _assert_same(state.tree["models"]["model"], model.state_dict())


def test_a_change_of_small_optimizer_state_between_commit_and_step_drops_the_commit(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)  # so small that it is pickled, by the thread that sends
    optimizer = torch.optim.Adam(model.parameters())
    with _replicator(daemon, model, optimizer) as replicator:
        for i in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()  # seals the one before
            replicator.commit(i)
        optimizer.state[model.weight]["exp_avg"].zero_()
        replicator.gate()
        assert "step 1 is not committed: the state of an optimizer was changed" in caplog.text
        replicator.commit(2)
        replicator._publisher.settle()
        assert not _fetch(daemon).tree["optimizers"][0]["state"][0]["exp_avg"].any()


def test_what_is_pickled_later_does_not_see_what_is_put_into_an_optimizers_state_meanwhile() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    rest = trees.dump(trees.later_states(optimizer.state_dict()), lambda _: None, lambda _: 0)
    optimizer.state[parameter]["step"] = torch.tensor(99.0)
    assert trees.load(rest(), lambda _: torch.empty(0))["state"][0]["step"] == 1


def test_a_fault_of_what_follows_the_steps_is_none_of_the_standby(daemon: Daemon) -> None:
    model, optimizer = build()
    for mode in ("lag1", "rpo0"):
        with _replicator(daemon, model, optimizer, mode=mode) as replicator:

            def tell(*_: Any) -> None:
                raise OSError("no room for a copy")

            replicator._publisher.on_sealed.append(tell)
            with pytest.raises(OSError, match="no room for a copy"):
                replicator.commit(0), replicator.gate()
            replicator._publisher.on_sealed.clear()
            assert replicator.stats["connected"]
            replicator.commit(1)
            replicator._publisher.settle()
            assert _fetch(daemon).step == 1
        remove(daemon.address, "job")


def test_a_dropped_last_commit_does_not_keep_close_waiting(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer) as replicator:
        step(model, optimizer)
        replicator.commit(0)
        step(model, optimizer)
        replicator.commit(1)
        with torch.no_grad():
            model.layers[0].weight.mul_(2.0)
    assert "step 1 is not committed" in caplog.text
    assert "may be lost" not in caplog.text  # as after a timeout
    assert _fetch(daemon).step == 0


def test_a_state_that_cannot_be_pickled_raises_within_a_step(daemon: Daemon) -> None:
    """google/orbax#605: a failure in the background reaches the user within one step."""
    model, optimizer = build()
    replicator = _replicator(daemon, model, optimizer)
    step(model, optimizer)
    optimizer.state[next(model.parameters())]["mine"] = lambda: None  # what optimizers keep is pickled by a thread
    replicator.commit(0)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        replicator.gate()
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        replicator.close()


def test_restoring_after_a_commit_is_refused(daemon: Daemon) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer) as replicator:
        replicator.commit(7)
        with pytest.raises(StandbyError, match=r"restore\(\) after commit\(\) of step 7: call it before"):
            replicator.restore()


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_one_rank_drops_costs_that_step_alone(daemon: Daemon, times: int) -> None:
    def make(rank: int) -> tuple[Any, Any, Replicator]:
        torch.manual_seed(rank)
        model = torch.nn.Embedding(500, 16, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        return model, optimizer, _replicator(daemon, model, optimizer, rank=rank, world_size=2)

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 500, (10,))).square().sum().backward()
        optimizer.step()

    parts = [make(rank) for rank in range(2)]
    with parts[0][2], parts[1][2]:
        for i in range(12):
            dropping = i in range(3, 3 + times) or i in range(8, 8 + times)
            for model, optimizer, replicator in parts:
                train(model, optimizer)
                replicator.commit(i)
            if dropping:
                with torch.no_grad():
                    parts[i % 2][0].weight.mul_(1.5)
            expected = [copy.deepcopy(model.state_dict()) for model, *_ in parts]
            for _, _, replicator in parts:
                replicator.gate()
            if not dropping:
                while status(daemon.address)["jobs"]["job"]["step"] != i:
                    pass  # sealed without waiting
                for rank in range(2):
                    _assert_same(fetch(daemon.address, "job", rank=rank).tree["models"]["model"], expected[rank])
        assert all(replicator.stats["connected"] for *_, replicator in parts)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_in_rpo0_each_parameter_is_read_as_soon_as_it_is_updated(daemon: Daemon, transport: Any) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    large = sum(3 * p.nbytes for p in model.parameters() if p.ndim == 2)
    with _replicator(daemon, model, list(optimizers.values()), mode="rpo0", transport=transport) as replicator:
        pulled: list[int] = []
        for i in range(10):
            num_backwards = 2 if i == 6 else 1  # updated again before it was committed
            for _ in range(num_backwards):
                model(torch.randn(8, 64)).square().mean().backward()
            if i == 7:
                with torch.no_grad():
                    model[1].weight.mul_(1.5)  # changed again after it was read
            link = replicator._publisher._link
            if link is not None and i > 2:
                replicator.gate()  # all is read before there is a commit of it
                at_commit = replicator.stats["bytes_pulled"]
                assert at_commit - pulled[-1] == num_backwards * large
            replicator.commit(i)
            pulled.append(replicator.stats["bytes_pulled"])
            if i == 7:
                assert pulled[-1] - at_commit >= model[1].weight.nbytes
            state = _fetch(daemon)
            assert state.step == i
            _assert_same(state.tree["models"]["model"], model.state_dict())
            _assert_same(state.tree["optimizers"], [optimizer.state_dict() for optimizer in optimizers.values()])


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_what_was_read_ahead_of_a_commit_that_never_came_does_not_count(daemon: Daemon, transport: Any) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, mode="rpo0", transport=transport) as replicator:
        for i in range(4):
            step(model, optimizer)
            replicator.commit(i)
        expected = copy.deepcopy(model.state_dict())
        step(model, optimizer)
        replicator.gate()  # it was read
        replicator._publisher._unlink()  # as if the process had died
    _assert_same(_fetch(daemon).tree["models"]["model"], expected)
    model, optimizer = build(seed=99)
    with _replicator(daemon, model, optimizer, mode="rpo0", transport=transport) as replicator:
        assert replicator.restore() is not None
        _assert_same(model.state_dict(), expected)
        for i in range(4, 7):
            step(model, optimizer)
            replicator.commit(i)
            _assert_same(_fetch(daemon).tree["models"]["model"], model.state_dict())


def test_state_that_grows_and_shrinks(daemon: Daemon) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, mode="rpo0") as replicator:
        for i, sizes in enumerate([[3000], [3000, 5000], [5000], [], [7000, 10, 3000], [7000]]):
            state = {"lists": [torch.full((n,), float(i)) for n in sizes], "text": "x" * i}
            replicator.commit(i, state=state)
            _assert_same(_fetch(daemon).tree["state"], state)


def test_what_does_not_fit_is_refused_with_names_and_shapes(daemon: Daemon) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer) as replicator:
        replicator.commit(0)
    wide = Net(width=65)
    with (
        _replicator(daemon, wide, torch.optim.AdamW(wide.parameters())) as replicator,
        pytest.raises(StateMismatchError, match=r"(?s)models 'model' do not fit.*layers\.0\.weight.*64, 32.*65, 32"),
    ):
        replicator.restore()
    with (
        _replicator(daemon, {"other": wide}, optimizer) as replicator,
        pytest.raises(StateMismatchError, match=r"has models \['model'\], this program \['other'\]"),
    ):
        replicator.restore()
    with (
        _replicator(daemon, model, optimizer, rank=1, world_size=2) as replicator,
        pytest.raises(StateMismatchError, match="world size of 1, this program one of 2"),
    ):
        replicator.restore()


def test_arguments_are_checked(daemon: Daemon) -> None:
    model, optimizer = build()
    for options, message in (
        ({"mode": "lag2"}, "mode has to be one of lag1, rpo0, got 'lag2'"),
        ({"tracking": "all"}, "tracking has to be one of"),
        ({"transport": "udp"}, "transport has to be one of"),
        ({"on_standby_loss": "ignore"}, "on_standby_loss has to be one of"),
        ({"rank": 2, "world_size": 2}, "rank has to be from 0 to world_size - 1 = 1, got 2"),
        ({"rank": -1, "world_size": 2}, "rank has to be at least 0, got -1"),
        ({"rank": 0, "world_size": 0}, "world_size has to be at least 1, got 0"),
        ({"rank": "0", "world_size": 2}, "rank has to be a whole number, got '0'"),
        ({"num_streams": 0}, "num_streams has to be at least 1, got 0"),
        ({"num_streams": 2.5}, "num_streams has to be a whole number, got 2.5"),
        ({"num_streams": True}, "num_streams has to be a whole number, got True"),
        ({"audit_every_n_steps": -1}, r"audit_every_n_steps has to be at least 0 \(0: no audits\), got -1"),
        ({"audit_every_n_steps": 0.5}, r"audit_every_n_steps has to be a whole number \(0: no audits\), got 0.5"),
        ({"persist_dir": "there", "persist_every_n_commits": -1}, "persist_every_n_commits has to be at least 0"),
        ({"persist_dir": "there", "persist_every_n_commits": None}, "persist_every_n_commits has to be a whole"),
        ({"persist_dir": "there"}, r"persist_every_n_commits \(at least 1\) go together, got persist_dir='there'"),
        ({"persist_every_n_commits": 3}, "go together, got persist_dir=None and persist_every_n_commits=3"),
        ({"timeout": 0}, "timeout has to be a timedelta or seconds, more than 0, got 0"),
        ({"timeout": timedelta(seconds=-1)}, "timeout has to be a timedelta or seconds"),
        ({"timeout": float("nan")}, "timeout has to be a timedelta or seconds, more than 0, got nan"),
        ({"timeout": "soon"}, "timeout has to be a timedelta or seconds, more than 0, got 'soon'"),
    ):
        with pytest.raises(ValueError, match=message):
            _replicator(daemon, model, optimizer, **options)
    with pytest.raises(ValueError, match="host:port or 'local', got 'nowhere'"):
        Replicator(model, optimizer, standby="nowhere").restore()
    counts: dict[str, Any] = {"num_streams": np.int64(2), "audit_every_n_steps": np.int64(2)}
    with _replicator(daemon, model, optimizer, transport="tcp", **counts) as replicator:
        replicator.commit(np.int64(5))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="steps have to grow: 5 after 5"):
            replicator.commit(5)
        for step_given, message in ((5.5, "step has to be a whole number, got 5.5"), (-1, "step has to be at least 0")):
            with pytest.raises(ValueError, match=message):
                replicator.commit(step_given)  # type: ignore[arg-type]
        assert replicator.stats["connected"]


def test_a_job_that_is_gone_is_named(daemon: Daemon) -> None:
    with pytest.raises(NoStateError, match="no job 'job', only none at all"):
        _fetch(daemon)
    model, optimizer = build()
    with _replicator(daemon, model, optimizer) as replicator:
        replicator.commit(0)
    remove(daemon.address, "job")
    assert status(daemon.address)["jobs"] == {}
    assert daemon.budget.used_bytes == 0


def test_the_default_name_of_a_job_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/train.py", "--lr", "1"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    name = default_job()
    assert name.startswith("train.py-")
    assert default_job() == name
    monkeypatch.setattr("sys.argv", ["/some/train.py", "--lr", "2"])
    assert default_job() != name
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run 5")
    assert default_job() == "run 5"
