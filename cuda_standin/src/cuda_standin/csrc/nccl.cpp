// A stand-in for libnccl.so.2: PyTorch's own ProcessGroupNCCL runs on it, with its streams, events, futures, and what
// it keeps alive for how long. Two ways:
//
//   real ranks   processes of this machine, as many as the communicator has; values travel through sockets
//   (nccl_peers.h) a lone rank  one rank of N exists (standin_nccl_alone). Every other rank is taken to hold what this
//   one holds: it
//                sends what this rank would send to itself. So a gather repeats this rank's part, a sum is N times it,
//                an average is it, an exchange of counts and the exchange that follows agree. What comes from a root
//                that does not exist stays as it is, unless this rank is a root in the same group: then the group is
//                a gather of parts. A receive gets what this rank sends in the same group (a ring),
//                else zeros. Whole numbers are votes and counts: a receive gets what this rank last sent to that rank
//                (an answer agrees), else ones, since none would be "no".
//
// Everything happens in the order of the stream that it was given, through the runtime (cudaLaunchHostFunc).
// STANDIN_SKIP_BYTES and STANDIN_VALUES=0 leave values out here as in the runtime.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "nccl_peers.h"
#include "nccl_reduce.h"
#include "nccl_types.h"

using namespace standin_nccl;

enum Kind {
  ALL_REDUCE,
  REDUCE,
  REDUCE_SCATTER,
  BROADCAST,
  ALL_GATHER,
  ALL_TO_ALL,
  GATHER,
  SCATTER,
  SEND,
  RECEIVE,
  SPLIT,
  KINDS
};
static const char* const NAMES[] = {"all_reduce", "reduce",  "reduce_scatter", "broadcast", "all_gather", "all_to_all",
                                    "gather",     "scatter", "send",           "recv",      "split"};

extern "C" void standin_record_collective(void* stream, const char* kind, long long bytes, int ranks, int nodes,
                                          long long communicator, long long group);

struct ncclComm {
  int rank = 0, size = 1, device = 0, nodes = 1;
  long long number = 0;
  std::unique_ptr<Peers> peers;  // none where this rank is alone
  std::map<int, std::string> told;  // by rank: the whole numbers that this one last sent to it, where it is alone
  std::string id, error;
  int splits = 0;
};

namespace {

struct Operation {
  Kind kind;
  const char* send;
  char* receive;
  size_t count;
  int type;  // count: of one part
  Reduction reduction;
  int root;  // or the peer
  ncclComm* comm;
  cudaStream_t stream;

  size_t bytes() const { return count * bytes_of(type); }
  bool reduces() const { return kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER; }
  // What this rank sends to that one; nullptr where nothing.
  const char* to(int rank) const {
    const bool i_am_root = comm->rank == root;
    switch (kind) {
      case ALL_REDUCE:
      case ALL_GATHER:
      case SPLIT: return send;
      case REDUCE:
      case GATHER:
      case SEND: return rank == root ? send : nullptr;
      case BROADCAST: return i_am_root ? send : nullptr;
      case REDUCE_SCATTER:
      case ALL_TO_ALL: return send + rank * bytes();
      case SCATTER: return i_am_root ? send + rank * bytes() : nullptr;
      default: return nullptr;
    }
  }
  bool from(int rank) const {
    switch (kind) {
      case REDUCE:
      case GATHER: return comm->rank == root;
      case BROADCAST:
      case SCATTER:
      case RECEIVE: return rank == root;
      case SEND: return false;
      default: return true;
    }
  }
  bool side_by_side() const { return kind == ALL_GATHER || kind == ALL_TO_ALL || kind == GATHER || kind == SPLIT; }
};

std::atomic<bool> alone{false};
std::atomic<double> patience_s{300};  // for ranks that start
std::atomic<unsigned long long> calls[KINDS], bytes_moved[KINDS];
thread_local int depth = 0, next_size = 0, next_rank = 0, next_nodes = 0;
std::atomic<long long> communicators{0}, groups{0};
thread_local std::vector<Operation> group;
thread_local std::string last_error;
std::mutex factors_lock;
std::map<int, double> factors;  // of the sums that ncclRedOpCreatePreMulSum made

// Large integers have values as in the value layer: they are indices and counts. 8 bits may be the bytes of anything.
bool is_whole(int type) { return type >= ncclInt32 && type <= ncclUint64; }
size_t skip_above(int type) {
  static const size_t limit = [] {
    const char* values = getenv("STANDIN_VALUES");
    const char* skip = getenv("STANDIN_SKIP_BYTES");
    return values && !strcmp(values, "0") ? 0 : skip ? (size_t)strtoull(skip, nullptr, 10) : SIZE_MAX;
  }();
  return limit && is_whole(type) ? SIZE_MAX : limit;
}

int fail(int code, std::string why, ncclComm* comm = nullptr) {
  last_error = "stand-in NCCL: " + std::move(why);
  if (comm) comm->error = last_error;
  return code;
}
int enqueue(cudaStream_t stream, std::function<void()> f) {
  using F = std::function<void()>;
  int capturing = 0;
  cudaStreamIsCapturing(stream, &capturing);
  auto once = [](void* p) {
    (*(F*)p)();
    delete (F*)p;
  };
  auto again = [](void* p) { (*(F*)p)(); };  // a graph runs it as often as it is launched
  return cudaLaunchHostFunc(stream, capturing ? +again : +once, new F(std::move(f))) ? ncclUnhandledCudaError
                                                                                     : ncclSuccess;
}

// What N parts that are all equal to `part` come to.
void repeat_reduction(const Operation& o, const char* part) {
  Reduction r = o.reduction;
  if (r.op == ncclProd) {
    std::vector<const char*> parts(o.comm->size, part);
    return reduce(o.receive, parts, o.count, o.type, r);
  }
  if (r.op == ncclSum) r.factor *= o.comm->size;
  if (r.op == ncclAvg) r.op = ncclSum;
  if (r.factor != 1) return reduce(o.receive, {part}, o.count, o.type, r);
  if (o.receive != part) memmove(o.receive, part, o.bytes());
}

constexpr size_t MOST_TOLD = 4096;  // bytes; votes, counts and shapes have few

// The send of this group whose content a receive from `o.root` gets.
const Operation* sent_for(const Operation& o, const std::vector<Operation>& others) {
  const Operation* ring = nullptr;
  for (auto& s : others) {
    if (s.kind != SEND || s.comm != o.comm) continue;
    if (s.root == o.comm->rank) return s.bytes() == o.bytes() ? &s : nullptr;  // every other rank sends me the same
    if (!ring && s.bytes() == o.bytes()) ring = &s;
  }
  return ring;
}

// What this rank broadcasts in the group of `o`, a broadcast from a rank that does not exist: PyTorch 2.15 gathers a
// list of tensors so, each rank the root of its own part.
const char* own_part(const Operation& o, const std::vector<Operation>& others) {
  for (auto& b : others)
    if (b.kind == BROADCAST && b.comm == o.comm && b.root == o.comm->rank && b.bytes() == o.bytes()) return b.send;
  return nullptr;
}

int run_alone(const Operation& o, const std::vector<Operation>& others) {
  const size_t bytes = o.bytes();
  if (!bytes || bytes > skip_above(o.type)) return ncclSuccess;
  if (o.kind == SEND) {
    if (!is_whole(o.type) || bytes > MOST_TOLD) return ncclSuccess;
    return enqueue(o.stream, [o, bytes] { o.comm->told[o.root].assign(o.send, bytes); });
  }
  if (o.kind == RECEIVE) {
    const Operation* source = sent_for(o, others);
    const char* from = source ? source->send : nullptr;
    return enqueue(o.stream, [o, from, bytes] {
      if (from) return (void)memmove(o.receive, from, bytes);
      memset(o.receive, 0, bytes);
      if (!is_whole(o.type)) return;
      const std::string& told = o.comm->told[o.root];
      if (told.size() == bytes) return (void)memcpy(o.receive, told.data(), bytes);
      for (size_t i = 0; i < bytes; i += bytes_of(o.type)) o.receive[i] = 1;  // little endian: the first byte is the 1
    });
  }
  const bool broadcast = o.kind == BROADCAST;
  const char* own = broadcast ? own_part(o, others) : o.to(o.comm->rank);
  if (!own || !(broadcast || o.from(o.comm->rank))) return ncclSuccess;
  return enqueue(o.stream, [o, own, bytes] {
    if (o.reduces()) return repeat_reduction(o, own);
    std::vector<char> part(own, own + bytes);  // the result may lie over what is sent
    for (int r = 0; r < (o.side_by_side() ? o.comm->size : 1); r++) memcpy(o.receive + r * bytes, part.data(), bytes);
  });
}

int post(const Operation& o) {
  if (cudaStreamSynchronize(o.stream)) return fail(ncclUnhandledCudaError, "the stream cannot be waited for", o.comm);
  const uint64_t bytes = o.bytes(), sent = bytes > skip_above(o.type) ? 0 : bytes;
  const uint64_t kind = o.kind == RECEIVE ? SEND : o.kind;
  for (int r = 0; r < o.comm->size; r++) {
    const char* content = o.to(r);
    if (!content && !(o.kind == SEND && r == o.root)) continue;
    if (!o.comm->peers->send(r, {kind, bytes, sent}, content))
      return fail(
          ncclRemoteError,
          "rank " + std::to_string(r) + " ended before " + NAMES[o.kind] + " of rank " + std::to_string(o.comm->rank),
          o.comm);
  }
  return ncclSuccess;
}

int collect(const Operation& o) {
  const size_t bytes = o.bytes();
  auto parts = std::make_shared<std::vector<Message>>(o.comm->size);
  bool any = false;
  for (int r = 0; r < o.comm->size; r++) {
    if (!o.from(r)) continue;
    const std::string who = "rank " + std::to_string(r), me = "rank " + std::to_string(o.comm->rank) +
                                                              " waited for its part of " + NAMES[o.kind] + " of " +
                                                              std::to_string(bytes) + " bytes";
    Message& m = (*parts)[r];
    if (!o.comm->peers->receive(r, &m)) return fail(ncclRemoteError, who + " ended while " + me, o.comm);
    if (m.header.kind != (uint64_t)(o.kind == RECEIVE ? SEND : o.kind) || m.header.bytes != bytes)
      return fail(
          ncclInvalidUsage,
          who + " did " + NAMES[m.header.kind % KINDS] + " of " + std::to_string(m.header.bytes) + " bytes while " + me,
          o.comm);
    any = any || m.header.sent;
  }
  if (!any) return ncclSuccess;
  return enqueue(o.stream, [o, parts, bytes] {
    std::vector<const char*> there;
    for (int r = 0; r < o.comm->size; r++) {
      const Message& m = (*parts)[r];
      if (!o.from(r) || !m.header.sent) continue;
      there.push_back(m.content.data());
      if (!o.reduces()) memcpy(o.receive + (o.side_by_side() ? r * bytes : 0), m.content.data(), bytes);
    }
    if (o.reduces()) reduce(o.receive, there, o.count, o.type, o.reduction);
  });
}

int run(const std::vector<Operation>& operations) {
  const long long together = groups++;
  for (auto& o : operations) {
    standin_record_collective(o.stream, NAMES[o.kind], o.bytes(), o.comm->size, o.comm->nodes, o.comm->number, together);
    int failed = o.comm->peers ? post(o) : run_alone(o, operations);
    if (failed) return failed;
  }
  for (auto& o : operations)
    if (int failed = o.comm->peers ? collect(o) : 0) return failed;
  return ncclSuccess;
}

int submit(Kind kind, const void* send, void* receive, size_t count, int type, int op, int root, ncclComm* comm,
           cudaStream_t stream) {
  if (!comm) return fail(ncclInvalidArgument, std::string(NAMES[kind]) + " without a communicator");
  if (!bytes_of(type))
    return fail(ncclInvalidArgument,
                std::string(NAMES[kind]) + " of data type " + std::to_string(type) + ", which is not known", comm);
  if (root < 0 || root >= comm->size)
    return fail(ncclInvalidArgument,
                std::string(NAMES[kind]) + " with rank " + std::to_string(root) + " of " + std::to_string(comm->size),
                comm);
  Reduction reduction{op, 1};
  if (op >= ncclOwnOps) {
    std::lock_guard<std::mutex> lock(factors_lock);
    if (!factors.count(op)) return fail(ncclInvalidArgument, "reduction " + std::to_string(op) + " is not known", comm);
    reduction = {ncclSum, factors[op]};
  }
  Operation o{kind, (const char*)send, (char*)receive, count, type, reduction, root, comm, stream};
  calls[kind]++;
  bytes_moved[kind] += o.bytes();
  if (depth) {
    group.push_back(o);
    return ncclSuccess;
  }
  return run({o});
}

int make(ncclComm_t* out, int size, int rank, const std::string& id) {
  auto comm = std::make_unique<ncclComm>();
  comm->rank = rank;
  comm->size = size;
  comm->id = id;
  comm->number = communicators++;
  comm->nodes = std::max(1, std::exchange(next_nodes, 0));
  cudaGetDevice(&comm->device);
  if (rank < 0 || rank >= size)
    return fail(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(size));
  if (!alone) comm->peers = std::make_unique<Peers>(id, rank, size);
  *out = comm.release();
  return ncclSuccess;
}
int meet(const std::vector<ncclComm_t>& comms) {
  for (auto c : comms)
    if (c->peers)
      if (auto why = c->peers->connect(patience_s); !why.empty()) return fail(ncclSystemError, why, c);
  for (auto c : comms)
    if (c->peers)
      if (auto why = c->peers->accept(patience_s); !why.empty()) return fail(ncclSystemError, why, c);
  return ncclSuccess;
}
std::string text(const ncclUniqueId& id) { return std::string(id.internal, strnlen(id.internal, sizeof id.internal)); }

int init(ncclComm_t* out, int size, const ncclUniqueId& id, int rank) {
  if (int failed = make(out, size, rank, text(id))) return failed;
  if (int failed = meet({*out})) {
    delete *out;
    *out = nullptr;
    return failed;
  }
  return ncclSuccess;
}

}  // namespace

extern "C" {

// Whether communicators that are made from now on have one rank that exists.
void standin_nccl_alone(int yes) { alone = yes; }
// For how long a rank that starts waits for the others.
void standin_nccl_patience(double seconds) { patience_s = seconds; }
// What the next ncclCommSplit of this thread leads to: NCCL asks the other ranks, who do not exist.
void standin_nccl_next_split(int size, int rank) {
  next_size = size;
  next_rank = rank;
}
// On how many machines the ranks of the next communicator of this thread are.
void standin_nccl_next_nodes(int nodes) { next_nodes = nodes; }
// Names of collectives, nullptr behind the last; how often each was called, and the bytes of one rank's part in all.
const char* standin_nccl_name(int kind) { return kind >= 0 && kind < KINDS ? NAMES[kind] : nullptr; }
unsigned long long standin_nccl_calls(int kind) { return calls[kind]; }
unsigned long long standin_nccl_bytes(int kind) { return bytes_moved[kind]; }

int ncclGetVersion(int* version) {
  *version = 23007;
  return ncclSuccess;
}
int ncclGetUniqueId(ncclUniqueId* out) {
  std::random_device random;
  memset(out, 0, sizeof *out);
  snprintf(out->internal, sizeof out->internal, "%08x%08x%08x", random(), random(), random());
  return ncclSuccess;
}
int ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) { return init(out, size, id, rank); }
int ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, void*) {
  return init(out, size, id, rank);
}
int ncclCommInitRankScalable(ncclComm_t* out, int size, int rank, int, ncclUniqueId* ids, void*) {
  return init(out, size, ids[0], rank);
}
int ncclCommInitAll(ncclComm_t* out, int size, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  const bool before = alone.exchange(false);  // all of them exist, in this process
  int failed = 0;
  for (int r = 0; r < size && !failed; r++)
    if (!(failed = make(&out[r], size, r, text(id)))) out[r]->device = devices ? devices[r] : r;
  alone = before;
  return failed ? failed : meet({out, out + size});
}
int ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, void*) {
  const std::string id = comm->id + "." + std::to_string(comm->splits++);
  *out = nullptr;
  calls[SPLIT]++;
  if (!comm->peers) {
    if (color < 0) return ncclSuccess;
    if (!next_size)
      return fail(ncclInvalidUsage, "ncclCommSplit of a lone rank: nobody said how many ranks have its color", comm);
    const int size = next_size, rank = next_rank;
    next_size = 0;
    return make(out, size, rank, id);
  }
  int64_t mine[2] = {color, key};
  std::vector<std::pair<int64_t, int>> same;  // key, rank in the parent
  Operation o{SPLIT, (const char*)mine, nullptr, 2, ncclInt64, {}, 0, comm, nullptr};
  for (int r = 0; r < comm->size; r++)
    if (!comm->peers->send(r, {SPLIT, o.bytes(), o.bytes()}, mine))
      return fail(ncclRemoteError, "rank " + std::to_string(r) + " ended before ncclCommSplit", comm);
  for (int r = 0; r < comm->size; r++) {
    Message m;
    if (!comm->peers->receive(r, &m) || m.header.kind != SPLIT)
      return fail(ncclRemoteError, "rank " + std::to_string(r) + " did not split", comm);
    int64_t theirs[2];
    memcpy(theirs, m.content.data(), sizeof theirs);
    if (theirs[0] == color) same.push_back({theirs[1], r});
  }
  if (color < 0) return ncclSuccess;
  std::sort(same.begin(), same.end());
  int rank = 0;
  while (same[rank].second != comm->rank) rank++;
  if (int failed = make(out, (int)same.size(), rank, id + "." + std::to_string(color))) return failed;
  return meet({*out});
}
int ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
int ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
// Others may wait in it: it is left there.
int ncclCommAbort(ncclComm_t comm) {
  if (comm && comm->peers) comm->peers->stop();
  return ncclSuccess;
}
int ncclCommGetAsyncError(ncclComm_t, int* result) {
  *result = ncclSuccess;
  return ncclSuccess;
}
int ncclCommCount(ncclComm_t comm, int* size) {
  *size = comm->size;
  return ncclSuccess;
}
int ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
int ncclCommCuDevice(ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
int ncclCommRegister(ncclComm_t, void* buffer, size_t, void** handle) {
  *handle = buffer;
  return ncclSuccess;
}
int ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
int ncclMemAlloc(void** out, size_t bytes) { return cudaMalloc(out, bytes) ? ncclUnhandledCudaError : ncclSuccess; }
int ncclMemFree(void* p) { return cudaFree(p) ? ncclUnhandledCudaError : ncclSuccess; }
const char* ncclGetErrorString(int code) {
  static const char* const words[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return code >= 0 && code < 8 ? words[code] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t comm) {
  return comm && !comm->error.empty() ? comm->error.c_str() : last_error.c_str();
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int, ncclComm_t comm) {
  double factor = 1;
  char wide[8];
  if (!bytes_of(type)) return fail(ncclInvalidArgument, "a factor of data type " + std::to_string(type), comm);
  memcpy(wide, scalar, bytes_of(type));
  switch (type) {
    case ncclFloat16: factor = *(Half*)wide; break;
    case ncclBfloat16: factor = *(Bfloat16*)wide; break;
    case ncclFloat32: factor = *(float*)wide; break;
    case ncclFloat64: factor = *(double*)wide; break;
    default:
      return fail(ncclInvalidArgument, "a factor of data type " + std::to_string(type) + ", which is no float", comm);
  }
  std::lock_guard<std::mutex> lock(factors_lock);
  *op = factors.empty() ? (int)ncclOwnOps : factors.rbegin()->first + 1;
  factors[*op] = factor;
  return ncclSuccess;
}
int ncclRedOpDestroy(int op, ncclComm_t) {
  std::lock_guard<std::mutex> lock(factors_lock);
  factors.erase(op);
  return ncclSuccess;
}

int ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
int ncclGroupEnd() {
  if (!depth) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--depth) return ncclSuccess;
  auto operations = std::move(group);
  group.clear();
  return run(operations);
}
int ncclGroupSimulateEnd(void*) { return fail(ncclInvalidUsage, "no estimates of time"); }

int ncclAllReduce(const void* s, void* r, size_t n, int type, int op, ncclComm_t c, cudaStream_t q) {
  return submit(ALL_REDUCE, s, r, n, type, op, 0, c, q);
}
int ncclReduce(const void* s, void* r, size_t n, int type, int op, int root, ncclComm_t c, cudaStream_t q) {
  return submit(REDUCE, s, r, n, type, op, root, c, q);
}
int ncclBroadcast(const void* s, void* r, size_t n, int type, int root, ncclComm_t c, cudaStream_t q) {
  return submit(BROADCAST, s, r, n, type, 0, root, c, q);
}
int ncclBcast(void* b, size_t n, int type, int root, ncclComm_t c, cudaStream_t q) {
  return submit(BROADCAST, b, b, n, type, 0, root, c, q);
}
int ncclAllGather(const void* s, void* r, size_t n, int type, ncclComm_t c, cudaStream_t q) {
  return submit(ALL_GATHER, s, r, n, type, 0, 0, c, q);
}
int ncclReduceScatter(const void* s, void* r, size_t n, int type, int op, ncclComm_t c, cudaStream_t q) {
  return submit(REDUCE_SCATTER, s, r, n, type, op, 0, c, q);
}
int ncclAlltoAll(const void* s, void* r, size_t n, int type, ncclComm_t c, cudaStream_t q) {
  return submit(ALL_TO_ALL, s, r, n, type, 0, 0, c, q);
}
int ncclGather(const void* s, void* r, size_t n, int type, int root, ncclComm_t c, cudaStream_t q) {
  return submit(GATHER, s, r, n, type, 0, root, c, q);
}
int ncclScatter(const void* s, void* r, size_t n, int type, int root, ncclComm_t c, cudaStream_t q) {
  return submit(SCATTER, s, r, n, type, 0, root, c, q);
}
int ncclSend(const void* s, size_t n, int type, int peer, ncclComm_t c, cudaStream_t q) {
  return submit(SEND, s, nullptr, n, type, 0, peer, c, q);
}
int ncclRecv(void* r, size_t n, int type, int peer, ncclComm_t c, cudaStream_t q) {
  return submit(RECEIVE, nullptr, r, n, type, 0, peer, c, q);
}

}  // extern "C"
