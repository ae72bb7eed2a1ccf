// The Python border of the collectives: addresses, sizes and codes come in, names and facts go out. The GIL is released
// wherever a call may wait.
#include "bindings.hpp"

#if defined(__linux__)

#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "look.hpp"

namespace torchext::collectives {
namespace {

namespace py = pybind11;

// One process group in a world: who is in it and how it is told apart.
struct Group {
    std::uint64_t uid;
    std::shared_ptr<const Members> members;
    int world_size;
    int rank;
    std::map<std::pair<int, int>, std::shared_ptr<const Members>> pairs;  // guarded by the GIL

    const std::shared_ptr<const Members>& pair(int from, int to) {
        auto& entry = pairs[{from, to}];
        if (entry == nullptr) {
            entry = std::make_shared<Members>(std::vector<int>{members->rank(from), members->rank(to)}, world_size, rank);
        }
        return entry;
    }
};

// See World.set_look; shared by a world and its calls.
struct Look {
    py::object function;
};

void require_member(const Engine& engine) {
    if (engine.forked()) {
        throw std::runtime_error("this process was forked from a member of the process group and is not a member itself");
    }
}

struct Handle {
    OpPtr op;
    std::shared_ptr<Engine> engine;
    std::shared_ptr<Look> look;

    bool done() const {
        require_member(*engine);
        return engine->done(op);
    }

    // 0: not done, 1: done, 2: deferred.
    int wait(double timeout_s, bool deferrable) {
        require_member(*engine);
        const Nanoseconds deadline = now() + nanoseconds(timeout_s);
        Waited waited{};
        {
            py::gil_scoped_release release;
            waited = engine->wait(op, deadline, caller(look->function), deferrable);
        }
        raise_if_interrupted();
        return waited == Waited::done ? 1 : waited == Waited::deferred ? 2 : 0;
    }
};

// The engine as Python holds it; calls into a forked child's copy are refused, for its peers would not know of it.
class World {
public:
    World(std::shared_ptr<Arena> arena, int rank, Settings settings)
        : engine_(std::make_shared<Engine>(std::move(arena), rank, std::move(settings))) {}
    World(const World&) = delete;
    World& operator=(const World&) = delete;
    ~World() {
        if (!engine_->forked()) close("the process group was dropped", false);
    }

    std::vector<int> meet(double timeout_s, const py::function& failed) {
        std::vector<int> missing;
        {
            py::gil_scoped_release release;
            missing = engine_->meet(nanoseconds(timeout_s), [&failed] {
                py::gil_scoped_acquire gil;
                return PyErr_CheckSignals() != 0 || failed().cast<bool>();
            });
        }
        raise_if_interrupted();
        return missing;
    }

    std::shared_ptr<Group> group(const std::vector<int>& ranks, std::uint64_t uid) const {
        auto members = std::make_shared<Members>(ranks, engine_->world_size(), engine_->rank());
        return std::make_shared<Group>(Group{uid, std::move(members), engine_->world_size(), engine_->rank(), {}});
    }

    Handle issue(const Request& request) {
        require_member(*engine_);
        release();
        py::gil_scoped_release nogil;
        return {engine_->issue(request), engine_, look_};
    }

    Handle issue_any(std::vector<Request> choices) {
        require_member(*engine_);
        release();
        py::gil_scoped_release nogil;
        return {engine_->issue_any(std::move(choices)), engine_, look_};
    }

    // Nothing if it succeeded, else the call: failed, or not done if the wait for it has been deferred.
    std::optional<Handle> run(const Request& request) {
        require_member(*engine_);
        release();
        OpPtr op;
        bool ok = false;
        {
            py::gil_scoped_release nogil;
            Waited waited{};
            std::tie(op, waited) = engine_->run(request, caller(look_->function));
            ok = waited == Waited::done && op->code == Code::none;
        }
        raise_if_interrupted();
        if (ok) return std::nullopt;
        return Handle{std::move(op), engine_, look_};
    }

    void cancel(const Handle& handle, const std::string& text) {
        require_member(*engine_);
        py::gil_scoped_release nogil;
        engine_->cancel(handle.op, text);
    }

    void abort(std::uint64_t group, const std::string& text) {
        if (engine_->forked()) return;
        {
            py::gil_scoped_release nogil;
            engine_->abort(group, text);
        }
        release();
    }

    void close(const std::string& text, bool at_exit) {
        {
            py::gil_scoped_release nogil;
            engine_->close(text, at_exit);
        }
        release();
    }

    std::vector<std::uint64_t> finished(double timeout_s) {
        std::vector<std::uint64_t> ids;
        {
            py::gil_scoped_release nogil;
            ids = engine_->finished(nanoseconds(timeout_s));
        }
        release();
        return ids;
    }

    py::dict stats() {
        const auto [s, depth] = engine_->stats();
        py::dict d;
        d["issued"] = s.issued;
        d["completed"] = s.completed;
        d["failed"] = s.failed;
        d["staged"] = s.staged;
        d["primitives"] = s.primitives;
        d["spins"] = s.spins;
        d["preemptions"] = s.preemptions;
        d["context_switches"] = s.context_switches;
        d["sleeps"] = s.sleeps;
        d["wakes"] = s.wakes;
        d["grants_deferred"] = s.grants_deferred;
        d["deadlocks"] = s.deadlocks;
        d["deferred"] = s.deferred;
        d["queue_depth"] = depth;
        d["max_queue_depth"] = s.max_queue_depth;
        d["spin_limit"] = engine_->spin_limit();
        return d;
    }

    // `function(group_uid, blocked_threads, issuers)` says where the calling thread is and whether the rank is quiet.
    void set_look(py::object function) { look_->function = std::move(function); }

    // For each rank: whether it is gone, whether it is stuck, and what it waits for: since when (s), for whom, what.
    py::list reports() {
        py::list all;
        const Nanoseconds t = now();
        for (const auto& [report, gone] : engine_->reports()) {
            py::list calls;
            if (report.has_value()) {
                for (const auto& b : report->blocked) {
                    if (!b.future) calls.append(py::make_tuple(static_cast<double>(t - b.since) * 1e-9, b.waits_for, b.text));
                }
            }
            all.append(py::make_tuple(gone, report.has_value() && report->stuck, calls));
        }
        return all;
    }

    // What has been noted since it was switched on: what, text, id of the call, begin and end (s).
    std::vector<std::tuple<std::string, std::string, std::uint64_t, double, double>> trace(bool on) {
        std::vector<std::tuple<std::string, std::string, std::uint64_t, double, double>> events;
        for (const auto& e : engine_->trace(on)) {
            events.emplace_back(e.what, e.text, e.id, static_cast<double>(e.begin) * 1e-9, static_cast<double>(e.end) * 1e-9);
        }
        return events;
    }

    // This rank's calls in flight: since when (s), for whom, what.
    std::vector<std::tuple<double, std::vector<int>, std::string>> pending() {
        std::vector<std::tuple<double, std::vector<int>, std::string>> calls;
        const Nanoseconds t = now();
        for (const auto& b : engine_->pending()) {
            calls.emplace_back(static_cast<double>(t - b.since) * 1e-9, b.waits_for, b.text);
        }
        return calls;
    }

    std::vector<std::pair<int, std::string>> unanswered() { return engine_->unanswered(); }

    // From now on the id of the call is among the finished ones once it is done; true if it is done already.
    bool watch(const Handle& handle) {
        require_member(*engine_);
        py::gil_scoped_release nogil;
        return engine_->watch(handle.op);
    }

    bool closed() { return engine_->closed(); }
    int rank() const { return engine_->rank(); }
    std::size_t eager_bytes() const { return engine_->eager_bytes(); }

    // Drops what kept the buffers of finished calls alive; with the GIL.
    void release() {
        for (void* object : engine_->released()) Py_DECREF(static_cast<PyObject*>(object));
    }

private:
    std::shared_ptr<Engine> engine_;
    std::shared_ptr<Look> look_ = std::make_shared<Look>();
};

std::vector<Span> spans(const py::sequence& pairs) {
    std::vector<Span> result;
    result.reserve(pairs.size());
    for (const py::handle item : pairs) {
        const auto pair = py::reinterpret_borrow<py::tuple>(item);
        result.push_back({reinterpret_cast<std::byte*>(pair[0].cast<std::uintptr_t>()), pair[1].cast<std::size_t>()});
    }
    return result;
}

void set_dims(Request& request, const py::tuple& shape) {
    auto& s = request.signature;
    s.num_dims = static_cast<std::uint8_t>(std::min<std::size_t>(shape.size(), 255));
    std::uint64_t h = shape.size() + 1;
    for (std::size_t i = 0; i < shape.size(); ++i) {
        const auto dim = shape[i].cast<std::int64_t>();
        if (i < kDims) s.dims[i] = dim;
        h = (h ^ static_cast<std::uint64_t>(dim)) * 0x9e3779b97f4a7c15ULL;
        h ^= h >> 29;
    }
    request.dims_hash = h;
}

// `identity`: the shape that all ranks agree on, where it is not `shape`.
Request make_request(Group& group, int kind, int reduce_op, int dtype, std::size_t item_bytes, int root, int peer,
                     const py::tuple& shape, const std::optional<py::tuple>& identity, const std::string& tag,
                     const py::sequence& in, const py::sequence& out, bool uneven, double timeout_s) {
    Request request;
    auto& s = request.signature;
    s.kind = static_cast<OpKind>(kind);
    s.reduce_op = static_cast<ReduceOp>(reduce_op);
    s.dtype = static_cast<std::uint8_t>(dtype);
    s.group = request.group_uid = group.uid;
    s.tag = tag;
    if (identity.has_value()) {
        set_dims(request, *identity);
        const auto hash = request.dims_hash;
        set_dims(request, shape);
        request.dims_hash = hash ^ 1;
    } else {
        set_dims(request, shape);
    }
    s.root = root;
    s.peer = peer;
    if (s.kind == OpKind::send) {
        // Between these two alone, of whom the sender is the first; the key still tells who they are.
        request.members = group.pair(root, peer);
        request.group_members = group.members;
        s.group ^= (static_cast<std::uint64_t>(root) + 1) * 0x9e3779b97f4a7c15ULL +
                   (static_cast<std::uint64_t>(peer) + 1) * 0xc2b2ae3d27d4eb4fULL;
    } else {
        request.members = group.members;
    }
    request.in = spans(in);
    request.out = spans(out);
    request.item_bytes = item_bytes;
    request.uneven = uneven;
    request.timeout = nanoseconds(timeout_s);
    return request;
}

}  // namespace

void bind(py::module_& m) {
    py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
        .def_static("create", &Arena::create, py::arg("world_size"), py::arg("ring_bytes"), py::arg("pool_bytes"),
                    py::arg("chunk_bytes"), py::arg("nonce"))
        .def_static("attach", &Arena::attach, py::arg("pid"), py::arg("descriptor"), py::arg("nonce"))
        .def_property_readonly("descriptor", &Arena::descriptor)
        .def("close_descriptor", &Arena::close_descriptor);

    py::class_<Group, std::shared_ptr<Group>>(m, "Group");

    py::class_<Handle>(m, "Call")
        .def_property_readonly("id", [](const Handle& h) { return h.op->id; })
        .def("done", &Handle::done)
        .def("wait", &Handle::wait, py::arg("timeout_s"), py::arg("deferrable"))
        .def_property_readonly("text", [](const Handle& h) { return h.op->signature.describe(); })
        .def_property_readonly("root", [](const Handle& h) { return h.op->signature.root; })
        .def_property_readonly("code", [](const Handle& h) { return static_cast<int>(h.op->code); })
        .def_property_readonly("error", [](const Handle& h) { return h.op->error; })
        .def_property_readonly("culprits", [](const Handle& h) { return h.op->culprits; })
        .def_property_readonly("elapsed_s", [](const Handle& h) {
            return static_cast<double>((h.op->done ? h.op->finished_at : now()) - h.op->issued) * 1e-9;
        });

    py::class_<World>(m, "World")
        .def(py::init([](std::shared_ptr<Arena> arena, int rank, std::uint32_t patience, bool defer, bool strict,
                         std::vector<int> names) {
                 return std::make_unique<World>(std::move(arena), rank,
                                                Settings{patience, defer, strict, std::move(names)});
             }),
             py::arg("arena"), py::arg("rank"), py::arg("patience"), py::arg("defer"), py::arg("strict"),
             py::arg("names"))
        .def("meet", &World::meet, py::arg("timeout_s"), py::arg("failed"))
        .def("group", &World::group, py::arg("ranks"), py::arg("uid"))
        .def(
            "issue",
            [](World& w, Group& group, int kind, int reduce_op, int dtype, std::size_t item_bytes, int root, int peer,
               const py::tuple& shape, const std::optional<py::tuple>& identity, const std::string& tag,
               const py::sequence& in, const py::sequence& out, bool uneven, double timeout_s,
               const py::object& keepalive) {
                Request request = make_request(group, kind, reduce_op, dtype, item_bytes, root, peer, shape, identity,
                                               tag, in, out, uneven, timeout_s);
                request.keepalive = keepalive.ptr();
                Py_INCREF(keepalive.ptr());
                try {
                    return w.issue(request);
                } catch (...) {
                    Py_DECREF(keepalive.ptr());
                    throw;
                }
            },
            py::arg("group"), py::arg("kind"), py::arg("reduce_op"), py::arg("dtype"), py::arg("item_bytes"),
            py::arg("root"), py::arg("peer"), py::arg("shape"), py::arg("identity"), py::arg("tag"), py::arg("inputs"),
            py::arg("outputs"), py::arg("uneven"), py::arg("timeout_s"), py::arg("keepalive"))
        .def(
            "issue_any",  // a receive from any of the sources; the root that is given does not count
            [](World& w, Group& group, int kind, int reduce_op, int dtype, std::size_t item_bytes, int, int peer,
               const py::tuple& shape, const std::optional<py::tuple>& identity, const std::string& tag,
               const py::sequence& in, const py::sequence& out, bool uneven, double timeout_s,
               const std::vector<int>& sources, const py::object& keepalive) {
                std::vector<Request> choices;
                for (const int source : sources) {
                    choices.push_back(make_request(group, kind, reduce_op, dtype, item_bytes, source, peer, shape,
                                                   identity, tag, in, out, uneven, timeout_s));
                }
                choices.front().keepalive = keepalive.ptr();
                Py_INCREF(keepalive.ptr());
                try {
                    return w.issue_any(std::move(choices));
                } catch (...) {
                    Py_DECREF(keepalive.ptr());
                    throw;
                }
            })
        .def(
            "run",
            [](World& w, Group& group, int kind, int reduce_op, int dtype, std::size_t item_bytes, int root, int peer,
               const py::tuple& shape, const std::optional<py::tuple>& identity, const std::string& tag,
               const py::sequence& in, const py::sequence& out, bool uneven, double timeout_s) {
                return w.run(make_request(group, kind, reduce_op, dtype, item_bytes, root, peer, shape, identity, tag,
                                          in, out, uneven, timeout_s));
            },
            py::arg("group"), py::arg("kind"), py::arg("reduce_op"), py::arg("dtype"), py::arg("item_bytes"),
            py::arg("root"), py::arg("peer"), py::arg("shape"), py::arg("identity"), py::arg("tag"), py::arg("inputs"),
            py::arg("outputs"), py::arg("uneven"), py::arg("timeout_s"))
        .def(
            "run_all_reduce",  // the call that is made most often, with the least to unpack
            [](World& w, Group& group, int reduce_op, int dtype, std::size_t item_bytes, const py::tuple& shape,
               const std::string& tag, std::uintptr_t data, std::size_t bytes, double timeout_s) {
                Request request;
                auto& s = request.signature;
                s.kind = OpKind::all_reduce;
                s.reduce_op = static_cast<ReduceOp>(reduce_op);
                s.dtype = static_cast<std::uint8_t>(dtype);
                s.group = request.group_uid = group.uid;
                s.tag = tag;
                set_dims(request, shape);
                request.members = group.members;
                request.in = request.out = {{reinterpret_cast<std::byte*>(data), bytes}};
                request.item_bytes = item_bytes;
                request.timeout = nanoseconds(timeout_s);
                return w.run(request);
            },
            py::arg("group"), py::arg("reduce_op"), py::arg("dtype"), py::arg("item_bytes"), py::arg("shape"),
            py::arg("tag"), py::arg("data"), py::arg("bytes"), py::arg("timeout_s"))
        .def("cancel", &World::cancel, py::arg("call"), py::arg("text"))
        .def("abort", &World::abort, py::arg("group_uid"), py::arg("text"))
        .def("close", &World::close, py::arg("text"), py::arg("at_exit") = false)
        .def("finished", &World::finished, py::arg("timeout_s"))
        .def("watch", &World::watch, py::arg("call"))
        .def("set_look", &World::set_look, py::arg("function"))
        .def("reports", &World::reports)
        .def("pending", &World::pending)
        .def("trace", &World::trace, py::arg("on"))
        .def("unanswered", &World::unanswered)
        .def("stats", &World::stats)
        .def("closed", &World::closed)
        .def("release", &World::release)
        .def_property_readonly("rank", &World::rank)
        .def_property_readonly("eager_bytes", &World::eager_bytes);
}

}  // namespace torchext::collectives

#else

namespace torchext::collectives {
void bind(pybind11::module_&) {}  // shared memory, futexes and pidfds of Linux
}  // namespace torchext::collectives

#endif
