// The orderer under a sanitizer: ranks are threads of one process here, so that it sees both ends of every exchange.
// Arguments: ranks, programs. On each rank three threads issue, wait and launch; groups overlap, half of them over
// sockets. Then each waits for its right neighbour. Ends with status 0 if all ranks launched what they share in one order,
// and all were told of the circle. sanitize.py builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "../../torchext/csrc/collectives/order.hpp"

using namespace torchext::collectives;

namespace {

struct Meeting {
    std::uint64_t uid;
    std::vector<int> ranks;
    std::shared_ptr<Arena> arena;                // or
    std::vector<std::vector<int>> sockets;       // by place, to place
};

Meeting meet(const std::vector<int>& ranks, bool over_sockets) {
    static std::uint64_t last_uid = 0;
    Meeting m{++last_uid, ranks, nullptr, {}};
    const int n = static_cast<int>(ranks.size());
    if (!over_sockets) {
        m.arena = Arena::create(n, 16 << 10, 0, 0, 1);
        return m;
    }
    m.sockets.assign(ranks.size(), std::vector<int>(ranks.size(), -1));
    for (std::size_t a = 0; a < ranks.size(); ++a) {
        for (std::size_t b = 0; b < a; ++b) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) std::abort();
            m.sockets[a][b] = ends[0];
            m.sockets[b][a] = ends[1];
        }
    }
    return m;
}

OrderGroupPtr join(const Meeting& m, int rank, const std::vector<int>& doorbells) {
    auto group = std::make_shared<OrderGroup>();
    group->uid = m.uid;
    group->ranks = m.ranks;
    group->me = static_cast<int>(std::find(m.ranks.begin(), m.ranks.end(), rank) - m.ranks.begin());
    group->lost.assign(m.ranks.size(), Code::none);
    group->arena = m.arena;
    for (int p = 0; p < static_cast<int>(m.ranks.size()); ++p) {
        const auto at = static_cast<std::size_t>(p);
        if (p == group->me) {
            group->links.push_back(nullptr);
        } else if (m.arena != nullptr) {
            const int doorbell = dup(doorbells[static_cast<std::size_t>(m.ranks[at])]);
            group->links.push_back(std::make_unique<RingLink>(m.arena, group->me, p, doorbell));
        } else {
            group->links.push_back(std::make_unique<SocketLink>(m.sockets[static_cast<std::size_t>(group->me)][at]));
        }
    }
    return group;
}

// What one rank launched, in order; ids are the same on all ranks.
std::vector<int> run_rank(Orderer& orderer, const std::vector<OrderGroupPtr>& groups, int rank, int programs) {
    std::vector<int> launched;
    std::mutex launching;
    const Caller caller{[] { return false; }, {}};
    const auto launch = [&] {
        std::lock_guard lock(launching);
        while (const auto op = orderer.pop()) {
            if (op->code != Code::none) {
                std::fprintf(stderr, "rank %d: %s\n", rank, op->error.c_str());
                std::abort();
            }
            launched.push_back(std::atoi(op->signature.tag.c_str()));
        }
    };
    std::thread background([&] {
        while (orderer.background()) launch();
    });
    for (int program = 0; program < programs; ++program) {
        std::mt19937 shared(static_cast<unsigned>(program)), own(static_cast<unsigned>(program * 64 + rank));
        std::vector<std::pair<int, OrderGroupPtr>> calls;
        for (int i = 0; i < 12; ++i) {
            const auto& group = groups[shared() % groups.size()];
            if (group != nullptr) calls.emplace_back(program * 12 + i, group);
        }
        std::shuffle(calls.begin(), calls.end(), own);
        std::vector<OrderedPtr> ops;
        for (const auto& [id, group] : calls) {
            Orderer::Issue issue;
            issue.signature.tag = std::to_string(id);
            issue.members.resize(group->ranks.size());
            std::iota(issue.members.begin(), issue.members.end(), 0);
            issue.timeout = 60 * kSecond;
            ops.push_back(orderer.issue(group, issue));
            launch();
        }
        auto wait = [&](std::size_t from) {
            for (std::size_t i = from; i < ops.size(); i += 2) {
                if (!orderer.wait(ops[i], now() + 60 * kSecond, caller)) std::abort();
                launch();
            }
        };
        std::thread other(wait, 1);
        wait(0);
        other.join();
    }
    // Until all is launched: a wait also ends when there is something else to launch.
    for (int i = 0; i < 60'000 && std::get<1>(orderer.counts()) != 0; ++i) {
        launch();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    launch();
    orderer.stop_background();
    background.join();
    launch();
    return launched;
}

// Whether this rank, which waits for its right neighbour as all do, is told so.
bool wait_in_a_circle(Orderer& orderer, const OrderGroupPtr& pair) {
    Orderer::Issue issue;
    issue.members = {0, 1};
    issue.timeout = 60 * kSecond;
    issue.will_wait = true;
    const auto op = orderer.issue(pair, issue);
    const Caller caller{[] { return false; }, [](std::uint64_t, const std::vector<std::uint64_t>&, const std::vector<Issuer>&) {
                            return Caller::Sight{" here", true};
                        }};
    orderer.wait(op, now() + 60 * kSecond, caller);
    return orderer.pop() == op && op->code == Code::deadlock;
}

}  // namespace

int main(int argc, char** argv) {
    const int world = argc > 1 ? std::atoi(argv[1]) : 3;
    const int programs = argc > 2 ? std::atoi(argv[2]) : 100;
    std::vector<Meeting> meetings;
    std::vector<int> everyone(static_cast<std::size_t>(world));
    std::iota(everyone.begin(), everyone.end(), 0);
    meetings.push_back(meet(everyone, false));
    meetings.push_back(meet(everyone, true));
    for (int r = 0; r < world; ++r) meetings.push_back(meet({r, (r + 1) % world}, r % 2 == 1));
    std::vector<std::unique_ptr<Orderer>> orderers;
    std::vector<int> doorbells;
    for (int r = 0; r < world; ++r) {
        orderers.push_back(std::make_unique<Orderer>());
        doorbells.push_back(orderers.back()->doorbell());
    }
    std::vector<std::vector<int>> launched(static_cast<std::size_t>(world));
    std::vector<std::thread> threads;
    std::atomic<int> left{world};
    for (int r = 0; r < world; ++r) {
        threads.emplace_back([&, r] {
            const auto at = static_cast<std::size_t>(r);
            std::vector<OrderGroupPtr> groups;
            for (const auto& m : meetings) {
                const bool member = std::find(m.ranks.begin(), m.ranks.end(), r) != m.ranks.end();
                groups.push_back(member ? join(m, r, doorbells) : nullptr);
                if (member) orderers[at]->add(groups.back());
            }
            launched[at] = run_rank(*orderers[at], groups, r, programs);
            if (world > 2 && !wait_in_a_circle(*orderers[at], groups[at + 2])) {
                std::fprintf(stderr, "rank %d was not told of the circle\n", r);
                std::abort();
            }
            --left;
            while (left != 0) std::this_thread::yield();  // peers may still need what lies in this rank's links
            for (const auto& group : groups) {
                if (group != nullptr) orderers[at]->leave(group, "the end", false);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    std::size_t total = 0;
    for (std::size_t a = 0; a < launched.size(); ++a) {
        total += launched[a].size();
        const std::set<int> of_a(launched[a].begin(), launched[a].end());
        if (of_a.size() != launched[a].size()) return std::fprintf(stderr, "launched twice\n"), 1;
        for (std::size_t b = 0; b < a; ++b) {
            const std::set<int> of_b(launched[b].begin(), launched[b].end());
            std::vector<int> here, there;
            for (const int id : launched[a]) {
                if (of_b.count(id) != 0) here.push_back(id);
            }
            for (const int id : launched[b]) {
                if (of_a.count(id) != 0) there.push_back(id);
            }
            if (here != there) return std::fprintf(stderr, "ranks %zu and %zu differ\n", a, b), 1;
        }
    }
    std::printf("%d ranks, %zu launches, each pair in one order\n", world, total);
    return 0;
}
