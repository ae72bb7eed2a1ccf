from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from torchext.scheduling import Cluster, ClusterState, Job, Machine, Placement


@hypothesis.given(st.data())
def test_free_machines_are_those_that_plain_counting_finds(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    state = ClusterState(Cluster(tuple(Machine(f"m{i}", size) for i, size in enumerate(sizes))))
    free, closed, running = list(sizes), set(), {}
    for step in range(data.draw(st.integers(0, 25))):
        machine = data.draw(st.integers(0, len(sizes) - 1))
        kind = data.draw(st.sampled_from(["start", "start", "stop", "door"]))
        if kind == "start" and free[machine] and machine not in closed:
            gpus = data.draw(st.integers(1, free[machine]))
            job = Job(f"j{step}", 0.0, gpus)
            state.start(job, Placement(((machine, gpus),)))
            running[job] = machine
            free[machine] -= gpus
        elif kind == "stop" and running:
            job = data.draw(st.sampled_from(sorted(running, key=lambda job: job.id)))
            state.stop(job)
            free[running.pop(job)] += job.num_gpus
        elif kind == "door":
            (state.open if machine in closed else state.close)(machine)
            closed ^= {machine}
        usable = [0 if i in closed else f for i, f in enumerate(free)]
        for state_now in (state, state.copy()):
            assert state_now.free == free
            assert (state_now.num_gpus, state_now.num_free) == (sum(sizes), sum(usable))
            assert state_now.most_free == max(usable)
            assert state_now.num_idle == sum(f == size for f, size in zip(usable, sizes, strict=True))
            assert [state_now.is_open(i) for i in range(len(sizes))] == [i not in closed for i in range(len(sizes))]
            for gpus in range(1, max(sizes) + 1):
                fit = [i for i, f in enumerate(usable) if f >= gpus]
                fullest = sorted(fit, key=lambda i: (usable[i], i))
                emptiest = sorted(fit, key=lambda i: (-usable[i], i))
                assert list(state_now.fullest(gpus)) == fullest
                assert list(state_now.emptiest(gpus)) == emptiest
                assert state_now.fullest_one(gpus) == next(iter(fullest), -1)
                assert state_now.emptiest_one(gpus) == next(iter(emptiest), -1)
                assert [state_now.fits(n, gpus) for n in (1, 2, 3)] == [len(fit) >= n for n in (1, 2, 3)]
            for i in range(len(sizes)):
                assert {job.id for job in state_now.jobs_on(i)} == {job.id for job, at in running.items() if at == i}


def test_a_bit_set_limits_the_search() -> None:
    state = ClusterState(Cluster((Machine("a", 4, "old"), Machine("b", 8, "new"), Machine("c", 8, "new"))))
    assert state.of_type == {"old": 0b001, "new": 0b110}
    assert list(state.fullest(2, state.of_type["new"])) == [1, 2]
    assert state.fullest_one(5, state.of_type["old"]) == -1
    assert not state.fits(3, 8, state.of_type["new"])


def test_service_and_progress_add_up_over_runs() -> None:
    state = ClusterState(Cluster.uniform(1, 4))
    job = Job("a", 0.0, 2)
    assert (state.service_gpu_s(job), state.progress_s(job)) == (0.0, 0.0)
    state.now_s = 10.0
    running = state.start(job, Placement(((0, 2),)))
    running.speed, running.mark_s = 0.5, 14.0  # loads a checkpoint first
    state.now_s = 12.0
    assert (state.service_gpu_s(job), state.progress_s(job)) == (4.0, 0.0)
    state.now_s = 20.0
    assert (state.service_gpu_s(job), state.progress_s(job)) == (20.0, 3.0)
    assert list(state.worked()) == [("a", 3.0)]
    state.remember(state.stop(job), progress_s=2.0)
    state.now_s = 100.0
    assert (state.service_gpu_s(job), state.progress_s(job)) == (20.0, 2.0)
    assert list(state.worked()) == [("a", 2.0)]
    state.start(job, Placement(((0, 2),)))
    state.now_s = 101.0
    assert (state.service_gpu_s(job), state.progress_s(job)) == (22.0, 2.0)


def test_speed_is_that_of_the_slowest_machine_and_suffers_from_neighbours() -> None:
    machines = (Machine("a", 4, "new"), Machine("b", 4, "old"))
    state = ClusterState(Cluster(machines, {"new": {"x": 4.0}, "old": {"x": 1.0}}, {"x": 0.5}))
    gang, neighbour = Job("gang", 0.0, 4, job_class="x"), Job("neighbour", 0.0, 1)
    both = Placement(((0, 2), (1, 2)))
    state.start(gang, both)
    assert state.speed(gang, both) == 1.0
    state.start(neighbour, Placement(((1, 1),)))
    assert state.speed(gang, both) == pytest.approx(1.0 * (1 - 0.5 * 1 / 2))


def test_giving_for_a_trial_is_undone_by_taking() -> None:
    state = ClusterState(Cluster.uniform(2, 4))
    placement = Placement(((1, 3),))
    state.start(Job("a", 0.0, 3), placement)
    state.give(placement)
    assert (state.free, state.num_free, state.fits(2, 4)) == ([4, 4], 8, True)
    state.take(placement)
    assert (state.free, state.num_free, state.fits(2, 4)) == ([4, 1], 5, False)
