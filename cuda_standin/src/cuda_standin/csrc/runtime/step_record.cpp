#include "step_record.h"

#include <thread>

#include "state.h"

namespace standin {
namespace {
std::atomic<Recording> recording{Recording::off};
std::vector<Recorded> step;
std::thread::id script_thread;
int64_t began_ns = 0;
std::vector<std::string> signatures;
std::unordered_map<std::string, int> known_signatures;
std::map<unsigned long long, std::shared_ptr<Graph>> replayed;
std::atomic<int64_t> own_ns{0};  // of all threads: the others wait meanwhile, or do nothing of the step
thread_local int depth = 0, operations = 0, next_kernel = -1;
thread_local int64_t since = 0;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
// The null stream of device 0 is 0, of device 1 is -1.
int64_t number_of(Stream* s) { return s == &state().null_streams[s->device] ? -s->device : (int64_t)s->id; }

const char* const NAMES[] = {"op",         "kernel",      "to_device",   "to_host",    "on_device", "fill",  "event",
                             "wait",       "host_event",  "host_stream", "host_device", "collective", "replay"};
void write(FILE* file, const std::vector<Recorded>& entries, int64_t zero) {
  fputs("[", file);
  const char* between = "\n";
  for (auto& r : entries) {
    fprintf(file, "%s[\"%s\",%lld,%lld,%lld,%lld,%lld,%lld,%lld]", between, NAMES[(int)r.kind],
            (long long)(r.at_ns - zero), (long long)r.stream, (long long)r.a, (long long)r.b, (long long)r.c,
            (long long)r.d, (long long)r.e);
    between = ",\n";
  }
  fputs("]", file);
}
}  // namespace

int64_t host_clock_ns() { return (depth ? since : now_ns()) - own_ns; }

OwnWork::OwnWork() {
  if (!depth++) since = now_ns();
}
OwnWork::~OwnWork() {
  if (!--depth) own_ns += now_ns() - since;
}
NotOwnWork::NotOwnWork() : depth_(depth) {
  if (depth_) own_ns += now_ns() - since;
  depth = 0;
}
NotOwnWork::~NotOwnWork() {
  depth = depth_;
  if (depth) since = now_ns();
}

bool records(Stream* s) {
  Recording now = recording;
  return now == Recording::all || (now == Recording::captures && s && s->capture);
}
void record(Entry kind, Stream* s, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) {
  if (recording == Recording::off) return;
  Lock lock(state().mutex);
  if (!records(s)) return;
  int64_t at = host_clock_ns();
  OwnWork own;
  auto& into = s && s->capture ? s->capture->entries : step;
  into.push_back({kind, at, s ? number_of(s) : 0, a, b, c, d, e});
}
void record_replay(Stream* s, const std::shared_ptr<Graph>& graph) {
  if (recording != Recording::all) return;
  record(Entry::replay, s, graph->id);
  replayed[graph->id] = graph;
}
void record_kernel(Stream* s) {
  if (recording == Recording::off || operations) return;
  record(Entry::kernel, s, next_kernel);
  next_kernel = -1;
}

}  // namespace standin

using namespace standin;

// For the value layer, for NCCL and for Python.
extern "C" {
// Nanoseconds of the host without the stand-in's own work.
long long standin_host_clock() { return host_clock_ns(); }
void standin_own_work(int begins) {  // for callers in C and Python; they begin and end in turn
  if (begins) {
    if (!depth++) since = now_ns();
  } else if (!--depth) {
    own_ns += now_ns() - since;
  }
}
int standin_not_own_work_begin() {
  int before = depth;
  if (before) own_ns += now_ns() - since;
  depth = 0;
  return before;
}
void standin_not_own_work_end(int before) {
  depth = before;
  if (depth) since = now_ns();
}

// From now on what goes into CUDA graphs is recorded, so that their replays can be told later.
void standin_record_captures() {
  recording = Recording::captures;
  script_thread = std::this_thread::get_id();
}
void standin_record_begin() {
  Lock lock(state().mutex);
  step.clear();
  recording = Recording::all;
  began_ns = host_clock_ns();
  script_thread = std::this_thread::get_id();
}
// Writes the entries since `standin_record_begin` and returns how many there are; -1 where the file cannot be written.
long long standin_record_end(const char* path) {
  Lock lock(state().mutex);
  int64_t end = host_clock_ns(), zero = began_ns;
  OwnWork own;
  recording = Recording::captures;
  FILE* file = fopen(path, "w");
  if (!file) return -1;
  fprintf(file, "{\"took_ns\":%lld,\n\"signatures\":[", (long long)(end - zero));
  for (size_t i = 0; i < signatures.size(); i++) fprintf(file, "%s%s", i ? ",\n" : "\n", signatures[i].c_str());
  fputs("],\n\"graphs\":{", file);
  const char* between = "\n";
  for (auto& [id, graph] : replayed) {
    fprintf(file, "%s\"%llu\":", between, id);
    write(file, graph->entries, graph->entries.empty() ? 0 : graph->entries[0].at_ns);
    between = ",\n";
  }
  fputs("},\n\"entries\":", file);
  write(file, step, zero);
  fputs("}\n", file);
  fclose(file);
  return step.size();
}
int standin_records(void* stream) {
  if (recording == Recording::off) return 0;
  Lock lock(state().mutex);
  return records(real((cudaStream_t)stream));
}
int standin_record_signature(const char* json) {
  Lock lock(state().mutex);
  auto [at, is_new] = known_signatures.emplace(json, (int)signatures.size());
  if (is_new) signatures.push_back(json);
  return at->second;
}
// An operator runs on this thread, or has: its kernels are its own. Returns how many run, with those that called it.
int standin_operations(int more) { return operations += more; }
void standin_record_operation(void* stream, int signature, long long written_bytes, long long kernels) {
  record(Entry::operation, real((cudaStream_t)stream), signature, written_bytes, kernels,
         script_thread != std::this_thread::get_id());
}
void standin_record_host_wait(void* stream) { record(Entry::host_stream, real((cudaStream_t)stream)); }
void standin_record_collective(void* stream, const char* kind, long long bytes, int ranks, int nodes,
                               long long communicator, long long group) {
  if (!standin_records(stream)) return;
  std::string json = std::string("{\"op\":\"") + kind + "\",\"ranks\":" + std::to_string(ranks) +
                     ",\"nodes\":" + std::to_string(nodes) + "}";
  record(Entry::collective, real((cudaStream_t)stream), standin_record_signature(json.c_str()), bytes, communicator,
         group);
}
// What the next kernel is that this thread launches through the driver: JSON.
void standin_record_next_kernel(const char* json) { next_kernel = standin_record_signature(json); }
void standin_record_kernel(void* stream) { record_kernel(real((cudaStream_t)stream)); }
}
