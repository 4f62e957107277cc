#include "state.h"

#include <sys/mman.h>

namespace standin {

thread_local int current_device = 0;
static thread_local cudaError_t the_last_error = cudaSuccess;
static thread_local unsigned long long thread_launches = 0, thread_waits = 0;

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) the_last_error = error;
  return error;
}
cudaError_t last_error() { return the_last_error; }
cudaError_t take_last_error() {
  cudaError_t error = the_last_error;
  the_last_error = cudaSuccess;
  return error;
}

State::State() {
  // settings.py has checked them: what is wrong there never comes here
  auto number = [](const char* name, size_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? (size_t)strtoull(text, nullptr, 10) : otherwise;
  };
  if (const char* id = getenv("STANDIN_GPU"))
    if (const Gpu* found = find_gpu(id)) gpu = *found;
  devices = (int)number("STANDIN_DEVICES", 1);
  skip_bytes = number("STANDIN_SKIP_BYTES", SIZE_MAX);
  if (const char* path = getenv("STANDIN_LOG"))
    if (*path) log = fopen(path, "a");
  capacity.assign(devices, number("STANDIN_MEMORY", gpu.memory_mib) << 20);
  used.assign(devices, number("STANDIN_CONTEXT", 0) << 20);
  peak = used;
  null_streams.resize(devices ? devices : 1);  // what no device serves still asks for its stream
  for (int d = 0; d < devices; d++) null_streams[d].device = d;
}
State& state() {
  static State* one = new State;  // never destroyed: PyTorch frees memory when the process ends
  return *one;
}

void* map_memory(size_t bytes) {
  size_t want = bytes + PAGE;
  void* p = mmap(nullptr, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  uintptr_t begin = (uintptr_t)p, aligned = round_up(begin, PAGE);
  if (aligned > begin) munmap(p, aligned - begin);
  if (begin + want > aligned + bytes) munmap((void*)(aligned + bytes), begin + want - aligned - bytes);
  return (void*)aligned;
}
const Block* find_block(const void* p, uintptr_t* base) {
  auto& blocks = state().blocks;
  auto i = blocks.upper_bound((uintptr_t)p);
  if (i == blocks.begin()) return nullptr;
  --i;
  if ((uintptr_t)p >= i->first + i->second.bytes) return nullptr;
  if (base) *base = i->first;
  return &i->second;
}
bool on_device(const void* p) {
  auto block = find_block(p);
  return block && (block->kind == Kind::device || block->kind == Kind::reserved);
}

Stream* real(cudaStream_t s) {
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) return &state().null_streams[current_device];
  return (Stream*)s;
}
void catch_up(Stream* s, unsigned long long until) {
  while (s->done < until && !s->queue.empty()) {
    Work work = std::move(s->queue.front());
    s->queue.pop_front();
    s->done++;
    OwnWork own;
    work();
  }
}
void catch_up_all() {
  for (auto& s : state().null_streams) catch_up(&s);
  for (auto s : state().streams) catch_up(s);
}
void submit(Stream* s, Work work, bool is_copy) {
  if (s->capture) {
    s->capture->work.push_back(std::move(work));
    return;
  }
  bool side = s != &state().null_streams[s->device];
  int when = side ? (is_copy ? SIDE_COPIES | SIDE_STREAMS : SIDE_STREAMS) : NULL_STREAM;
  if (state().late & when) {
    s->queue.push_back(std::move(work));
    s->queued++;
  } else {
    catch_up(s);
    OwnWork own;
    work();
  }
}

void count_launch(const char* name, const unsigned grid[3], const unsigned block[3]) {
  state().launches++;
  thread_launches++;
  if (!state().log) return;
  Lock lock(state().mutex);
  fprintf(state().log, "kernel %s grid %u %u %u block %u %u %u\n", name, grid[0], grid[1], grid[2], block[0], block[1],
          block[2]);
}

void count_wait() {
  state().waits++;
  thread_waits++;
}

}  // namespace standin

using namespace standin;

// For the value layer, for Python and for tests.
extern "C" {
void standin_set_capacity(int device, size_t bytes) {
  Lock lock(state().mutex);
  state().capacity.at(device) = bytes;
}
int standin_devices() { return state().devices; }
size_t standin_used(int device) { return state().used.at(device); }
size_t standin_peak(int device) { return state().peak.at(device); }
size_t standin_pinned_peak() { return state().pinned_peak; }
unsigned long long standin_launches() { return state().launches; }
unsigned long long standin_thread_launches() { return thread_launches; }
unsigned long long standin_waits() { return state().waits; }
unsigned long long standin_thread_waits() { return thread_waits; }
void standin_count_wait() { count_wait(); }
int standin_capturing(void* stream) { return real((cudaStream_t)stream)->capture != nullptr; }
// Whether work may run later than it is submitted: then it holds copies of what it needs from the host.
int standin_defers(void* stream) { return state().late != NEVER || standin_capturing(stream); }
// `run(argument)` when the stream gets there, and again in each replay of a graph; then `release(argument)`.
void standin_submit(void* stream, void (*run)(void*), void (*release)(void*), void* argument) {
  std::shared_ptr<void> owned(argument, release);
  Lock lock(state().mutex);
  submit(real((cudaStream_t)stream), [run, owned] { run(owned.get()); });
}
void standin_set_late(int late) {
  Lock lock(state().mutex);
  catch_up_all();
  state().late = late;
}
void standin_catch_up(void* stream) {
  Lock lock(state().mutex);
  catch_up(real((cudaStream_t)stream));
}
void standin_note(const char* text) {
  if (!state().log) return;
  Lock lock(state().mutex);
  fprintf(state().log, "%s\n", text);
  fflush(state().log);
}
// Names of what was called and is not there: report() tells them.
static std::set<std::string>& unsupported_names() {
  static auto* names = new std::set<std::string>;
  return *names;
}
int standin_unsupported(const char* name, int code) {
  Lock lock(state().mutex);
  if (unsupported_names().insert(name).second && getenv("STANDIN_TRACE"))
    fprintf(stderr, "cuda_standin: %s was called; the stand-in does not have it\n", name);
  return code;
}
const char* standin_unsupported_calls() {
  static std::string text;
  Lock lock(state().mutex);
  text.clear();
  for (auto& name : unsupported_names()) text += name + "\n";
  return text.c_str();
}
// Called from a library that stands for another (a count, a name) so that one word means one thing.
void standin_count_launch(const char* name, const unsigned* grid, const unsigned* block) {
  count_launch(name, grid, block);
}
}
