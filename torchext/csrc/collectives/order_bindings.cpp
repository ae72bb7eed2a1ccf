// The Python border of the orderer. The GIL is released wherever a call may wait, and wherever it takes the lock.
#include "bindings.hpp"

#if defined(__linux__)

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "look.hpp"
#include "order.hpp"

namespace torchext::collectives {
namespace {

namespace py = pybind11;

void set_dims(Orderer::Issue& request, const std::vector<std::int64_t>& shape) {
    auto& s = request.signature;
    s.num_dims = static_cast<std::uint8_t>(std::min<std::size_t>(shape.size(), 255));
    std::copy_n(shape.begin(), std::min<std::size_t>(shape.size(), kDims), s.dims.begin());
}

std::uint64_t hash_of(const std::vector<std::int64_t>& identity) {
    std::uint64_t h = identity.size() + 1;
    for (const auto number : identity) {
        h = (h ^ static_cast<std::uint64_t>(number)) * 0x9e3779b97f4a7c15ULL;
        h ^= h >> 29;
    }
    return h;
}

// What a call waits for: since when (s), for which ranks, what.
py::tuple told(const Blocked& b, Nanoseconds t) {
    return py::make_tuple(static_cast<double>(t - b.since) * 1e-9, b.waits_for, b.text);
}

}  // namespace

void bind_order(py::module_& m) {
    py::class_<OrderGroup, OrderGroupPtr>(m, "OrderGroup")
        .def_static(
            "over_memory",
            [](const std::vector<int>& ranks, int me, const std::shared_ptr<Arena>& arena, const std::vector<int>& pids,
               const std::vector<int>& doorbells, std::uint64_t uid) {
                auto group = std::make_shared<OrderGroup>();
                group->uid = uid;
                group->ranks = ranks;
                group->me = me;
                group->arena = arena;
                group->lost.assign(ranks.size(), Code::none);
                group->liveness.watch(pids);  // may throw, and then the descriptors are still the caller's
                for (std::size_t p = 0; p < ranks.size(); ++p) {
                    const int place = static_cast<int>(p);
                    group->links.push_back(
                        place == me ? nullptr : std::make_unique<RingLink>(arena, me, place, doorbells[p]));
                }
                return group;
            },
            py::arg("ranks"), py::arg("me"), py::arg("arena"), py::arg("pids"), py::arg("doorbells"),
            py::arg("uid"))
        .def_static(
            "over_sockets",
            [](const std::vector<int>& ranks, int me, const std::vector<int>& sockets, std::uint64_t uid) {
                auto group = std::make_shared<OrderGroup>();
                group->uid = uid;
                group->ranks = ranks;
                group->me = me;
                group->lost.assign(ranks.size(), Code::none);
                for (std::size_t p = 0; p < ranks.size(); ++p) {
                    const bool self = static_cast<int>(p) == me;
                    group->links.push_back(self ? nullptr : std::make_unique<SocketLink>(sockets[p]));
                }
                return group;
            },
            py::arg("ranks"), py::arg("me"), py::arg("sockets"), py::arg("uid"))
        .def_property_readonly("id", [](const OrderGroup& g) { return g.id; });

    // What is read here does not change once `code` and the rest can be asked for, after `Orderer.pop`.
    py::class_<Ordered, OrderedPtr>(m, "Ordered")
        .def_property_readonly("root", [](const Ordered& o) { return o.signature.root; })
        .def_property_readonly("text", [](const Ordered& o) { return o.signature.describe(); })
        .def_property_readonly("code", [](const Ordered& o) { return static_cast<int>(o.code); })
        .def_property_readonly("error", [](const Ordered& o) { return o.error; })
        .def_property_readonly("culprits", [](const Ordered& o) { return o.culprits; })
        .def_property_readonly("elapsed_s",
                               [](const Ordered& o) { return static_cast<double>(now() - o.issued) * 1e-9; })
        .def_property_readonly("agreed_s", [](const Ordered& o) {
            return static_cast<double>(o.finished_at - o.issued) * 1e-9;
        });

    py::class_<Orderer>(m, "Orderer")
        .def(py::init<>())
        .def_property_readonly("doorbell", &Orderer::doorbell)
        .def("add", &Orderer::add, py::arg("group"), py::call_guard<py::gil_scoped_release>())
        .def(
            "issue",
            [](Orderer& orderer, const OrderGroupPtr& group, int kind, int reduce_op, int dtype, int root, int peer,
               const std::vector<std::int64_t>& shape, const std::optional<std::vector<std::int64_t>>& identity,
               const std::string& tag, std::vector<int> members, std::vector<std::int64_t> send_bytes,
               std::vector<std::int64_t> recv_bytes, double timeout_s, bool will_wait, const py::object& work) {
                Orderer::Issue request;
                auto& s = request.signature;
                s.kind = static_cast<OpKind>(kind);
                s.reduce_op = static_cast<ReduceOp>(reduce_op);
                s.dtype = static_cast<std::uint8_t>(dtype);
                s.root = root;
                s.peer = peer;
                s.tag = tag;
                set_dims(request, shape);
                request.dims_hash = hash_of(identity.has_value() ? *identity : shape);
                request.members = std::move(members);
                request.send_bytes = std::move(send_bytes);
                request.recv_bytes = std::move(recv_bytes);
                request.timeout = nanoseconds(timeout_s);
                request.will_wait = will_wait;
                request.work = work.ptr();
                Py_INCREF(work.ptr());
                py::gil_scoped_release nogil;
                return orderer.issue(group, request);
            },
            py::arg("group"), py::arg("kind"), py::arg("reduce_op"), py::arg("dtype"), py::arg("root"), py::arg("peer"),
            py::arg("shape"), py::arg("identity"), py::arg("tag"), py::arg("members"), py::arg("send_bytes"),
            py::arg("recv_bytes"), py::arg("timeout_s"), py::arg("will_wait"), py::arg("work"))
        .def(
            "issue_any",  // a receive from whichever of the sources, places in the group, sends first
            [](Orderer& orderer, const OrderGroupPtr& group, int dtype, const std::vector<std::int64_t>& shape,
               const std::string& tag, std::vector<int> sources, std::int64_t bytes, double timeout_s,
               const py::object& work) {
                Orderer::Issue request;
                auto& s = request.signature;
                s.kind = OpKind::send;
                s.dtype = static_cast<std::uint8_t>(dtype);
                s.peer = group->me;
                s.tag = tag;
                set_dims(request, shape);
                request.members = std::move(sources);
                request.recv_bytes = {bytes};
                request.timeout = nanoseconds(timeout_s);
                request.work = work.ptr();
                Py_INCREF(work.ptr());
                py::gil_scoped_release nogil;
                return orderer.issue_any(group, request);
            },
            py::arg("group"), py::arg("dtype"), py::arg("shape"), py::arg("tag"), py::arg("sources"), py::arg("bytes"),
            py::arg("timeout_s"), py::arg("work"))
        .def(
            "wait",
            [](Orderer& orderer, const OrderedPtr& op, double timeout_s, const py::object& look) {
                bool stopped = false;
                {
                    py::gil_scoped_release nogil;
                    stopped = orderer.wait(op, now() + nanoseconds(timeout_s), caller(look));
                }
                raise_if_interrupted();
                return stopped;
            },
            py::arg("ordered"), py::arg("timeout_s"), py::arg("look"))
        .def("watch", &Orderer::watch, py::arg("ordered"), py::call_guard<py::gil_scoped_release>())
        .def(
            "pop",
            [](Orderer& orderer) -> std::optional<std::pair<py::object, OrderedPtr>> {
                OrderedPtr op;
                {
                    py::gil_scoped_release nogil;
                    op = orderer.pop();
                }
                if (op == nullptr) return std::nullopt;
                // The reference taken by `issue` goes to the caller.
                auto work = py::reinterpret_steal<py::object>(static_cast<PyObject*>(std::exchange(op->work, nullptr)));
                return std::make_pair(std::move(work), std::move(op));
            })
        .def("background", &Orderer::background, py::call_guard<py::gil_scoped_release>())
        .def("stop_background", &Orderer::stop_background, py::call_guard<py::gil_scoped_release>())
        .def(
            "fallen",
            [](Orderer& orderer) {
                std::vector<std::pair<std::uint64_t, int>> fallen;
                py::gil_scoped_release nogil;
                for (const auto& [group, place] : orderer.fallen()) {
                    fallen.emplace_back(group->id, group->ranks[static_cast<std::size_t>(place)]);
                }
                return fallen;
            })
        .def("cancel", &Orderer::cancel, py::arg("ordered"), py::arg("text"), py::call_guard<py::gil_scoped_release>())
        .def("leave", &Orderer::leave, py::arg("group"), py::arg("text"), py::arg("aborted"),
             py::call_guard<py::gil_scoped_release>())
        .def("park", &Orderer::park, py::call_guard<py::gil_scoped_release>())
        .def("forget", &Orderer::forget)
        .def("counts", &Orderer::counts, py::call_guard<py::gil_scoped_release>())
        // For each rank, by number: whether it is gone, and what it waits for.
        .def("reports",
             [](Orderer& orderer) {
                 std::map<int, std::pair<bool, Report>> reports;
                 {
                     py::gil_scoped_release nogil;
                     reports = orderer.reports();
                 }
                 py::list all;
                 const Nanoseconds t = now();
                 for (const auto& [rank, entry] : reports) {
                     py::list calls;
                     for (const auto& b : entry.second.blocked) {
                         if (!b.future) calls.append(told(b, t));
                     }
                     all.append(py::make_tuple(rank, entry.first, calls));
                 }
                 return all;
             })
        // This rank's calls in flight.
        .def("pending", [](Orderer& orderer) {
            std::vector<Blocked> pending;
            {
                py::gil_scoped_release nogil;
                pending = orderer.pending();
            }
            py::list calls;
            const Nanoseconds t = now();
            for (const auto& b : pending) calls.append(told(b, t));
            return calls;
        });
}

}  // namespace torchext::collectives

#else

namespace torchext::collectives {
void bind_order(pybind11::module_&) {}  // needs Linux, as the engine does
}  // namespace torchext::collectives

#endif
