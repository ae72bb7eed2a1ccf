// Issue and match: records out, records in, and what they do to the calls of this rank. See engine.hpp.
#if defined(__linux__)

#include "engine.hpp"

namespace torchext::collectives {

OpPtr Engine::issue_locked(const Request& request, bool will_wait) {
    issuers_.note();
    stir();
    auto op = std::make_shared<Op>();
    op->signature = request.signature;
    op->members = request.members;
    op->n = request.members->size();
    op->me = request.members->me;
    prepare(*op, request, eager_bytes_);
    op->key = request.signature.key(request.dims_hash);
    op->group_uid = request.group_uid;
    if (settings_.strict && in_flight_under(op->key) && op->signature.kind != OpKind::send &&
        op->signature.kind != OpKind::barrier) {
        throw std::invalid_argument(op->signature.describe() +
                                    " is in flight already, and nothing tells this call from it (strict=True): name "
                                    "them with torchext.tag, or wait for the first");
    }
    op->id = ++last_id_;
    op->issued = now();
    op->deadline = op->issued + request.timeout;
    op->keepalive = request.keepalive;
    ++stats_.issued;
    ++num_active_;
    stats_.max_queue_depth = std::max<std::uint64_t>(stats_.max_queue_depth, num_active_);
    if (closed_) {
        fail(op, Code::aborted, "the process group was destroyed or aborted", {}, false);
        return op;
    }
    if (op->n == 1) {
        if (op->local_to.bytes != 0) std::memmove(op->local_to.data, op->local_from.data, op->local_to.bytes);
        if (op->flow == Flow::reduce && op->result.data != op->whole.data && op->whole.bytes != 0) {
            std::memmove(op->result.data, op->whole.data, op->whole.bytes);
        }
        finish(op);
        return op;
    }
    ops_.emplace(op->id, op);
    post(op, will_wait);
    return op;
}

void Engine::post(const OpPtr& op, bool will_wait) {
    for (int i = 1; i < op->n; ++i) send_join(*op, (op->me + i) % op->n);
    wake_touched();  // before anything else: it is what the peers wait for
    keys_[op->key].posted.push_back(op);
    // All who have come, even if the first of them fails it: else their calls would pair with the next of this rank.
    for (int m = 0; m < op->n; ++m) {
        const auto queue = keys_.find(op->key);
        if (queue == keys_.end() || queue->second.arrived.empty()) break;
        auto& arrived = queue->second.arrived;
        const auto found = arrived.find(op->world_rank(m));
        if (m == op->me || found == arrived.end()) continue;
        Unexpected call = std::move(found->second.front());
        found->second.pop_front();
        if (found->second.empty()) arrived.erase(found);
        join(op, m, call, call.payload.data());
    }
    for (int m = 0; m < op->n && !op->done; ++m) {
        const int p = op->world_rank(m);
        if (peers_[at(p)].lost != Code::none) fail_if_needed(op, m, peers_[at(p)].lost);
    }
    settle(op);
    if (!op->done) {
        if (op->num_pending_sends != 0 && !op->in_send_queue) queue_sends(op);
        if (driving_) {
            wake_local();  // the driver may sleep, and there may be something for it to do now
        } else if (!will_wait && num_waiting_ == 0) {
            background_.notify_one();
        }
    }
    wake_touched();
}

OpPtr Engine::issue_any(std::vector<Request> choices) {
    Entry entry(*this);
    issuers_.note();
    stir();
    auto op = std::make_shared<Op>();
    const Request& first = choices.front();
    for (const auto& choice : choices) {  // before anything is kept: throws on what makes no sense
        Op trial;
        trial.signature = choice.signature;
        trial.n = choice.members->size();
        trial.me = choice.members->me;
        prepare(trial, choice, eager_bytes_);
    }
    op->signature = first.signature;
    op->signature.root = -1;
    op->group_uid = first.group_uid;
    op->members = first.group_members;
    op->n = op->members->size();
    op->me = op->members->me;
    op->peers.resize(at(op->n));
    op->needs_all_joined = true;
    op->id = ++last_id_;
    op->issued = now();
    op->deadline = op->issued + first.timeout;
    op->keepalive = first.keepalive;
    op->choices = std::move(choices);
    ++stats_.issued;
    ++num_active_;
    if (closed_) {
        fail(op, Code::aborted, "the process group was destroyed or aborted", {}, false);
        return op;
    }
    ops_.emplace(op->id, op);
    any_.push_back(op);
    for (const auto& choice : op->choices) {
        const auto found = keys_.find(choice.signature.key(choice.dims_hash));
        if (found != keys_.end() && !found->second.arrived.empty()) {
            choose(op, choice);
            return op;
        }
    }
    for (int m = 0; m < op->n && !op->done; ++m) {
        const int p = op->world_rank(m);
        if (m != op->me && peers_[at(p)].lost != Code::none) fail_if_needed(op, m, peers_[at(p)].lost);
    }
    if (!op->done && !driving_ && num_waiting_ == 0) background_.notify_one();
    return op;
}

void Engine::choose(const OpPtr& op, const Request& choice) {
    if (op->num_waiting != 0 || op->notify) stir();
    std::erase(any_, op);
    const Request request = choice;  // which lies in the op
    op->choices.clear();
    op->signature = request.signature;
    op->members = request.members;
    op->n = request.members->size();
    op->me = request.members->me;
    op->peers.clear();
    op->needs_all_joined = false;
    prepare(*op, request, eager_bytes_);
    op->key = request.signature.key(request.dims_hash);
    post(op, /*will_wait=*/true);
}

bool Engine::in_flight_under(std::uint64_t key) const {
    return std::any_of(ops_.begin(), ops_.end(), [&](const auto& item) {
        return item.second->key == key && !item.second->done;
    });
}

void Engine::send_join(Op& op, int member) {
    const int p = op.world_rank(member);
    Peer& peer = peers_[at(p)];
    if (peer.lost != Code::none) return;  // nobody reads it; the call fails for it
    auto& state = op.peers[at(member)];
    const Span payload = state.sent ? Span{} : op.send[at(member)];
    const std::size_t tag = std::min(op.signature.tag.size(), kMaxTag);
    const std::size_t bare = sizeof(JoinRecord) + round_up(tag, 16);
    std::byte* room = nullptr;
    bool eager = false;
    std::size_t record = RingWriter::record_bytes(bare + payload.bytes);
    if (peer.backlog.empty()) {
        if (payload.bytes != 0 && peer.eager_ahead + payload.bytes <= kMaxEagerAhead) {
            room = peer.out.reserve(record);
            eager = room != nullptr;
        }
        if (room == nullptr) {
            record = bare;
            room = peer.out.reserve(record);
        }
    } else {
        record = bare;
    }
    std::vector<std::byte> late;
    if (room == nullptr) {
        late.resize(record);
        room = late.data();
    }
    auto* join = new (room) JoinRecord{};
    join->header = {static_cast<std::uint32_t>(record), static_cast<std::uint8_t>(RecordKind::join), {}};
    put_signature(*join, op.signature);
    join->staged = op.staged_here;
    join->has_payload = eager;
    join->tag_bytes = static_cast<std::uint16_t>(tag);
    join->key = op.key;
    join->id = op.id;
    join->send_bytes = op.send[at(member)].bytes;
    join->recv_bytes = op.recv[at(member)].bytes;
    std::memcpy(room + sizeof(JoinRecord), op.signature.tag.data(), tag);
    if (eager) {
        std::memcpy(room + bare, payload.data, payload.bytes);
        state.sent = true;
        state.eager_bytes = payload.bytes;
        peer.eager_ahead += payload.bytes;
        --op.num_pending_sends;
    }
    if (late.empty()) {
        peer.out.publish();
        touched_.add(p);
    } else {
        peer.backlog.push_back(std::move(late));
    }
}

void Engine::join(const OpPtr& op, int member, Unexpected& call, const std::byte* payload) {
    const int p = op->world_rank(member);
    auto& state = op->peers[at(member)];
    if (op->num_waiting != 0 || op->notify) stir();
    state.joined = true;
    state.id = call.id;
    peers_[at(p)].eager_ahead -= state.eager_bytes;
    ++op->num_joined;
    op->staged |= call.staged;
    if (call.code != Code::none) {
        fail(op, call.code, call.error, call.culprits, true);
    } else if (op->done) {
        // Finished early, as a sender may, or failed, of which the peer has been told.
    } else if (!op->signature.same_call(call.signature) || call.send_bytes != op->recv[at(member)].bytes ||
               call.recv_bytes != op->send[at(member)].bytes) {
        fail(op, Code::mismatch,
             name(p) + " called " + call.signature.describe() + ", which sends this rank " +
                 std::to_string(call.send_bytes) + " bytes where it expects " +
                 std::to_string(op->recv[at(member)].bytes) + ", and expects " + std::to_string(call.recv_bytes) +
                 " where it sends " + std::to_string(op->send[at(member)].bytes),
             {p}, true);
    } else {
        if (call.has_payload) receive(op, member, payload, call.send_bytes, std::move(call.payload));
        if (!state.sent && !op->in_send_queue) queue_sends(op);
    }
    if (op->all_joined()) {
        forget_key(op);
        if (op->staged && !op->done) {
            if (op->leads()) wanted_.push_back(op);
        } else if (op->done) {
            forget(op);
        }
    }
}

void Engine::receive(const OpPtr& op, int member, const std::byte* payload, std::size_t bytes,
                     std::vector<std::byte> owner) {
    auto& state = op->peers[at(member)];
    auto& into = op->recv[at(member)];
    if (state.have || bytes != into.bytes) return;
    if (op->num_waiting != 0 || op->notify) stir();
    if (op->flow != Flow::reduce) {
        std::memcpy(into.data, payload, bytes);
    } else if (owner.empty() && op->num_pending_recvs == 1 && op->num_pending_sends == 0 && !op->staged) {
        into.data = const_cast<std::byte*>(payload);  // the last: it is reduced before it leaves the ring
    } else {
        op->inputs.push_back(owner.empty() ? std::vector<std::byte>(payload, payload + bytes) : std::move(owner));
        into.data = op->inputs.back().data();
    }
    state.have = true;
    --op->num_pending_recvs;
}

void Engine::queue_sends(const OpPtr& op) {
    op->in_send_queue = true;
    sends_.push_back(op);
}

void Engine::settle(const OpPtr& op) {
    if (op->done || op->num_pending_sends != 0 || op->num_pending_recvs != 0) return;
    if (op->needs_all_joined && !op->all_joined()) return;
    if (op->staged && !op->stage_done) return;
    if (!op->staged) {
        if (op->local_to.bytes != 0) std::memmove(op->local_to.data, op->local_from.data, op->local_to.bytes);
        if (op->flow == Flow::reduce && op->result.data != nullptr && op->whole.bytes != 0) {
            sources_.clear();
            for (int m = 0; m < op->n; ++m) {
                sources_.push_back(m == op->me ? op->whole.data : op->recv[at(m)].data);
            }
            op->kernel(op->result.data, sources_.data(), op->n, op->whole.bytes / op->item_bytes, op->n);
        }
    }
    finish(op);
}

void Engine::finish(const OpPtr& op) {
    if (op->num_waiting != 0 || op->notify) stir();
    op->done = true;
    op->finished_at = now();
    if (tracing_) note(*op, op->code == Code::none ? "call" : "failed call", op->issued, op->finished_at);
    --num_active_;
    ++(op->code == Code::none ? stats_.completed : stats_.failed);
    if (op->block != nullptr) {
        if (op->code == Code::none) ++stats_.staged;
        decline(op->block, op->me, *op->members);
        op->block = nullptr;
    }
    op->inputs = {};
    if (op->keepalive != nullptr) {
        released_.push_back(std::exchange(op->keepalive, nullptr));
        has_released_.store(true, std::memory_order_relaxed);  // the mutex orders what it announces
    }
    if (op->notify) {
        notices_.push_back(op->id);
        finished_.notify_all();
    }
    if (num_waiting_ > 1 || (num_waiting_ == 1 && in_background_)) changed_.notify_all();
    if (!op->choices.empty()) {
        std::erase(any_, op);
        ops_.erase(op->id);
    } else if (op->all_joined()) {
        forget(op);
    } else if (all_come(*op)) {
        forget_key(op);
        ops_.erase(op->id);
    }
}

void Engine::forget(const OpPtr& op) {
    // A failed call whose staging has yet to be granted stays, to decline it; harmless if that never comes.
    if (op->done && op->all_joined()) ops_.erase(op->id);
}

void Engine::forget_key(const OpPtr& op) {
    const auto found = keys_.find(op->key);
    if (found == keys_.end()) return;
    auto& posted = found->second.posted;
    const auto place = std::find(posted.begin(), posted.end(), op);
    if (place != posted.end()) posted.erase(place);
    if (posted.empty() && found->second.arrived.empty()) keys_.erase(found);
}

bool Engine::all_come(const Op& op) const {
    for (int m = 0; m < op.n; ++m) {
        if (m != op.me && !op.peers[at(m)].joined && peers_[at(op.world_rank(m))].lost == Code::none) return false;
    }
    return true;
}

std::vector<OpPtr> Engine::in_flight() const {
    std::vector<OpPtr> ops;
    for (const auto& [id, op] : ops_) {
        if (!op->done) ops.push_back(op);
    }
    std::sort(ops.begin(), ops.end(), [](const OpPtr& a, const OpPtr& b) { return a->id < b->id; });
    return ops;
}

bool Engine::drain(int p) {
    Peer& peer = peers_[at(p)];
    bool any = false;
    while (const RecordHeader* record = peer.in.front()) {
        any = true;
        const std::size_t bytes = record->bytes;
        switch (static_cast<RecordKind>(record->kind)) {
            case RecordKind::join:
                on_join(p, *reinterpret_cast<const JoinRecord*>(record));
                break;
            case RecordKind::data: {
                const auto& data = *reinterpret_cast<const DataRecord*>(record);
                if (const auto op = find(data.id); op != nullptr && !op->done) {
                    receive(op, op->members->index(p), reinterpret_cast<const std::byte*>(&data + 1), data.bytes, {});
                    settle(op);
                }
                break;
            }
            case RecordKind::grant:
                on_grant(p, *reinterpret_cast<const GrantRecord*>(record));
                break;
            case RecordKind::fail:
                on_fail(p, *reinterpret_cast<const FailRecord*>(record));
                break;
            case RecordKind::verdict:
                on_verdict(*reinterpret_cast<const VerdictRecord*>(record));
                break;
            case RecordKind::pad:
                break;
        }
        peer.in.pop(bytes);
        if (peer.in.room_wanted()) touched_.add(p);
    }
    return any;
}

OpPtr Engine::find(std::uint64_t id) const {
    const auto found = ops_.find(id);
    return found == ops_.end() ? nullptr : found->second;
}

void Engine::on_join(int p, const JoinRecord& record) {
    const auto found = keys_.find(record.key);
    OpPtr op;
    int member = -1;
    if (found != keys_.end() && found->second.arrived.find(p) == found->second.arrived.end()) {
        for (const auto& posted : found->second.posted) {
            member = posted->members->index(p);
            if (member >= 0 && !posted->peers[at(member)].joined) {
                op = posted;
                break;
            }
        }
    }
    Unexpected call;
    call.signature = signature_of(record);
    call.id = record.id;
    call.send_bytes = record.send_bytes;
    call.recv_bytes = record.recv_bytes;
    call.staged = record.staged != 0;
    call.has_payload = record.has_payload != 0;
    const std::byte* payload = payload_of(record);
    if (op != nullptr) {
        join(op, member, call, payload);
        settle(op);
        return;
    }
    if (call.has_payload) call.payload.assign(payload, payload + call.send_bytes);
    keys_[record.key].arrived[p].push_back(std::move(call));
    for (const auto& any : any_) {
        for (const auto& choice : any->choices) {
            if (choice.signature.key(choice.dims_hash) != record.key) continue;
            choose(OpPtr(any), choice);
            return;
        }
    }
}

void Engine::on_grant(int p, const GrantRecord& grant) {
    std::byte* block = arena_->pool(p) + grant.offset;
    const auto op = find(grant.id);
    if (op == nullptr || op->done) {
        // release: nothing of this rank touches the block; the leader's acquire lets it use the memory again
        StageLayout::finished(block, static_cast<int>(grant.member)).store(1, std::memory_order_release);
        touched_.add(p);
        return;
    }
    start(op, block);
}

void Engine::on_fail(int p, const FailRecord& record) {
    const auto code = static_cast<Code>(record.code);
    const std::string text = text_after(record, record.text_bytes);
    const std::vector<int> culprits = numbers_after(record, record.text_bytes, record.num_culprits);
    for (const auto& op : in_flight()) {
        const int member = op->members->index(p);
        if (member >= 0 && op->peers[at(member)].joined && op->peers[at(member)].id == record.id) {
            fail(op, code, text, culprits, false);
            return;
        }
    }
    for (auto& [key, queue] : keys_) {
        const auto found = queue.arrived.find(p);
        if (found == queue.arrived.end()) continue;
        for (auto& call : found->second) {
            if (call.id != record.id) continue;
            call.code = code;
            call.cause = static_cast<Code>(record.cause);
            call.error = text;
            call.culprits = culprits;
            return;
        }
    }
}

bool Engine::flush_backlogs() {
    bool left = false;
    for (int p = 0; p < world_size_; ++p) left |= flush_backlog(p) && peers_[at(p)].lost == Code::none;
    return left;
}

bool Engine::backlogged() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return !peer.backlog.empty() && peer.lost == Code::none; });
}

bool Engine::flush_backlog(int p) {
    Peer& peer = peers_[at(p)];
    while (!peer.backlog.empty()) {
        const auto& record = peer.backlog.front();
        std::byte* room = peer.out.reserve(record.size());
        if (room == nullptr) return true;
        std::memcpy(room, record.data(), record.size());
        peer.out.publish();
        touched_.add(p);
        peer.backlog.pop_front();
    }
    return false;
}

bool Engine::send_late(const OpPtr& op) {
    bool moved = false;
    for (int m = 0; m < op->n; ++m) {
        auto& state = op->peers[at(m)];
        const int p = op->world_rank(m);
        Peer& peer = peers_[at(p)];
        if (m == op->me || state.sent || !state.joined || !peer.backlog.empty()) continue;
        const Span& payload = op->send[at(m)];
        const std::size_t record = RingWriter::record_bytes(sizeof(DataRecord) + payload.bytes);
        std::byte* room = peer.out.reserve(record);
        if (room == nullptr) continue;
        auto* data = new (room) DataRecord{};
        data->header = {static_cast<std::uint32_t>(record), static_cast<std::uint8_t>(RecordKind::data), {}};
        data->id = state.id;
        data->bytes = payload.bytes;
        std::memcpy(data + 1, payload.data, payload.bytes);
        peer.out.publish();
        touched_.add(p);
        if (op->num_waiting != 0 || op->notify) stir();
        state.sent = true;
        --op->num_pending_sends;
        moved = true;
    }
    return moved;
}

}  // namespace torchext::collectives

#endif
