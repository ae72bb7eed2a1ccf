// The Python border of the channels.
#include "bindings.hpp"

#if defined(__linux__)

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "endpoint.hpp"
#include "latest.hpp"
#include "queue.hpp"

namespace torchext::channels {
namespace {

py::dict stats(Queue& queue) {
    const auto& c = queue.counters();
    const auto read = [](const std::atomic<std::uint64_t>& n) { return n.load(std::memory_order_relaxed); };
    const auto depth = queue.depth();
    py::dict d;
    d["depth"] = depth.messages;
    d["queued"] = depth.queued;
    d["held"] = depth.reading;
    d["retained_bytes"] = depth.retained_bytes;
    d["sent"] = read(c.sent);
    d["received"] = read(c.received);
    d["bytes_sent"] = read(c.bytes_sent);
    d["dropped_oldest"] = read(c.dropped_oldest);
    d["dropped_newest"] = read(c.dropped_newest);
    d["refused"] = read(c.refused);
    d["torn"] = read(c.torn);
    d["copied"] = read(c.copied);
    d["stale"] = read(c.stale);
    d["staleness_max"] = read(c.staleness_max);
    d["staleness_sum"] = read(c.staleness_sum);
    d["send_wait_s"] = static_cast<double>(read(c.send_wait_ns)) * 1e-9;
    d["receive_wait_s"] = static_cast<double>(read(c.receive_wait_ns)) * 1e-9;
    return d;
}

void note_staleness(Queue& queue, std::uint64_t staleness, bool dropped) {
    auto& c = queue.counters();
    if (dropped) c.stale.fetch_add(1, std::memory_order_relaxed);
    c.staleness_sum.fetch_add(staleness, std::memory_order_relaxed);
    auto most = c.staleness_max.load(std::memory_order_relaxed);
    while (most < staleness && !c.staleness_max.compare_exchange_weak(most, staleness, std::memory_order_relaxed)) {
    }
}

template <class T>
py::list peers(T& segment) {
    py::list found;
    for (const auto& p : segment.peers()) {
        found.append(py::make_tuple(p.name, p.pid, static_cast<int>(p.role), static_cast<int>(p.presence), p.place,
                                    p.generation, p.status));
    }
    return found;
}

// The weights' end in one process.
class Reader {
public:
    Reader(std::shared_ptr<Latest> latest, const std::string& name, int role) : latest_(std::move(latest)) {
        told_.count = latest_->known_deaths(Role::sender);
        peer_ = latest_->join(name, static_cast<Role>(role));
    }

    void leave() {
        if (std::exchange(here_, false)) latest_->leave(peer_);
    }
    std::uint32_t begin() { return latest_->begin(peer_); }
    std::pair<std::uint64_t, std::uint32_t> pin() { return latest_->pin(peer_); }
    void unpin() { latest_->unpin(peer_); }
    int wait(std::uint64_t newer_than, double timeout_s) {
        PythonSleeper sleeper;
        const auto status = latest_->wait(newer_than, deadline_in(timeout_s), sleeper, told_.count);
        sleeper.wake();
        if (status == Status::interrupted) throw py::error_already_set();
        return static_cast<int>(status);
    }
    // As of an Endpoint.
    void died(int pid, int status) {
        if (std::exchange(here_, false)) latest_->declare_dead(peer_, pid, status);
    }
    std::vector<Death> deaths() { return told_.next(*latest_, Role::sender); }

private:
    std::shared_ptr<Latest> latest_;
    std::uint32_t peer_;
    Told told_;
    bool here_ = true;
};

void bind_latest(py::module_& m) {
    py::class_<Latest, std::shared_ptr<Latest>>(m, "Latest")
        .def_static(
            "create",
            [](std::uint64_t slab_bytes, const py::bytes& meta, std::uint64_t nonce) {
                return Latest::create(slab_bytes, std::string(meta), nonce);
            },
            py::arg("slab_bytes"), py::arg("meta"), py::arg("nonce"))
        .def_static("attach", &Latest::attach, py::arg("descriptor"))
        .def_property_readonly("descriptor", &Latest::descriptor)
        .def_property_readonly("nonce", &Latest::nonce)
        .def_property_readonly("forked", &Latest::forked)
        .def_property_readonly("closed", &Latest::closed)
        .def_property_readonly("version", &Latest::version)
        .def_property_readonly("meta", [](const Latest& l) { return py::bytes(l.meta()); })
        .def("commit", &Latest::commit, py::arg("slab"), py::arg("version") = 0)
        .def("abandon", &Latest::abandon, py::arg("slab"))
        .def(
            "view",
            [](const std::shared_ptr<Latest>& latest, std::uint32_t slab) {
                auto owner = capsule_of(std::make_unique<std::shared_ptr<Latest>>(latest), nullptr);
                return py::array(py::dtype("u1"), {static_cast<py::ssize_t>(latest->slab_bytes())}, latest->data(slab), owner);
            },
            py::arg("slab"))
        .def("close", &Latest::close)
        .def("peers", &peers<Latest>);

    py::class_<Reader>(m, "Reader")
        .def(py::init<std::shared_ptr<Latest>, const std::string&, int>(), py::arg("latest"), py::arg("name"),
             py::arg("role"))
        .def("leave", &Reader::leave)
        .def("begin", &Reader::begin)
        .def("pin", &Reader::pin)
        .def("unpin", &Reader::unpin)
        .def("died", &Reader::died, py::arg("pid"), py::arg("status"))
        .def("wait", &Reader::wait, py::arg("newer_than"), py::arg("timeout_s"))
        .def("deaths", &Reader::deaths);
}

}  // namespace

void bind(py::module_& m) {
    bind_codec(m);

    py::class_<Queue, std::shared_ptr<Queue>>(m, "Queue")
        .def_static(
            "create",
            [](std::uint64_t slots, std::uint64_t slot_bytes, int policy, std::uint64_t num_senders, bool poison,
               std::uint64_t nonce) {
                return Queue::create(slots, slot_bytes, static_cast<Policy>(policy), num_senders, poison, nonce);
            },
            py::arg("slots"), py::arg("slot_bytes"), py::arg("policy"), py::arg("num_senders"), py::arg("poison"),
            py::arg("nonce"))
        .def_static("attach", &Queue::attach, py::arg("descriptor"))
        .def_property_readonly("descriptor", &Queue::descriptor)
        .def_property_readonly("nonce", &Queue::nonce)
        .def_property_readonly("slots", &Queue::slots)
        .def_property_readonly("policy", [](const Queue& q) { return static_cast<int>(q.policy()); })
        .def_property_readonly("largest_bytes", &Queue::stride)
        .def_property_readonly("forked", &Queue::forked)
        .def_property_readonly("closed", &Queue::closed)
        .def_property_readonly("batch_rows", &Queue::batch_rows)
        .def_property_readonly("deserted", &Queue::deserted)
        .def_property_readonly_static("most_rows", [](const py::object&) { return Queue::kMaxRows; })
        .def("set_batch_rows", &Queue::set_batch_rows, py::arg("rows"))
        .def("close", &Queue::close)
        .def("note_staleness", &note_staleness, py::arg("staleness"), py::arg("dropped"))
        .def("peers", &peers<Queue>)
        .def("stats", &stats);

    py::class_<Endpoint>(m, "Endpoint")
        .def(py::init([](std::shared_ptr<Queue> queue, const std::string& name, int role, bool heed_deaths) {
                 return std::make_unique<Endpoint>(std::move(queue), name, static_cast<Role>(role), heed_deaths);
             }),
             py::arg("queue"), py::arg("name"), py::arg("role"), py::arg("heed_deaths"))
        .def("leave", &Endpoint::leave)
        .def("send", &Endpoint::send, py::arg("tree"), py::arg("timeout_s"), py::arg("version"))
        .def("reserve", &Endpoint::reserve, py::arg("spec"), py::arg("timeout_s"), py::arg("version"))
        .def("commit", &Endpoint::commit, py::arg("reservation"), py::arg("timeout_s"), py::arg("keep") = false)
        .def("receive", &Endpoint::receive, py::arg("timeout_s"))
        .def("receive_bytes", &Endpoint::receive_bytes, py::arg("timeout_s"))
        .def("reserve_bytes", &Endpoint::reserve_bytes, py::arg("size"), py::arg("header_bytes"), py::arg("version"),
             py::arg("timeout_s"))
        .def("send_bytes", &Endpoint::send_bytes, py::arg("message"), py::arg("header_bytes"), py::arg("version"),
             py::arg("timeout_s"))
        .def("died", &Endpoint::died, py::arg("pid"), py::arg("status"))
        .def("deaths", &Endpoint::deaths);

    m.def("abandon", [](const py::capsule& c) { in<Reservation>(c, kReservation).abandon(); }, py::arg("reservation"));
    m.def("release", [](const py::capsule& c) { in<Lease>(c, kLease).release(); }, py::arg("lease"));
    m.def(
        "row",
        [](const py::capsule& capsule, std::size_t row) {
            const auto& l = in<Lease>(capsule, kLease);
            return decode(l.header(), l.header_bytes, l.data(), Rows{l.rows, row, 1, false}, capsule);
        },
        py::arg("lease"), py::arg("row"));

    bind_latest(m);
}

}  // namespace torchext::channels

#else

namespace torchext::channels {
void bind(pybind11::module_&) {}  // memfds, futexes and pidfds of Linux
}  // namespace torchext::channels

#endif
