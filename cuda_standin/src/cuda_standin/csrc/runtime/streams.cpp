// Streams, events, callbacks on the host, and CUDA graphs.
#include "state.h"

using namespace standin;
typedef void (*cudaStreamCallback_t)(cudaStream_t, cudaError_t, void*);

extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock(state().mutex);
  auto s = new Stream;  // never freed: events may name it after it was destroyed
  s->flags = flags;
  s->priority = priority;
  s->device = current_device;
  s->id = state().next_stream++;
  state().streams.insert(s);
  *out = (cudaStream_t)s;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  Lock lock(state().mutex);
  catch_up(real(s));
  state().streams.erase(real(s));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  Lock lock(state().mutex);
  count_wait();
  record(Entry::host_stream, real(s));
  catch_up(real(s));
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  Lock lock(state().mutex);
  catch_up(real(s));
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Lock lock(state().mutex);
  count_wait();
  record(Entry::host_device, nullptr);
  catch_up_all();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
  *priority = real(s)->priority;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* argument) {
  Lock lock(state().mutex);
  submit(real(s), [=] { f(argument); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* argument, unsigned) {
  Lock lock(state().mutex);
  submit(real(s), [=] { f(s, cudaSuccess, argument); });
  return cudaSuccess;
}

// ---- events ----
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto e = new Event;
  e->flags = flags;
  *out = (cudaEvent_t)e;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  Lock lock(state().mutex);
  delete (Event*)e;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  Lock lock(state().mutex);
  auto e = (Event*)event;
  e->recorded = true;
  e->ms = now_ms();
  e->stream = real(stream);
  e->at = e->stream->queued;
  record(Entry::event, e->stream, (int64_t)e);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(state().mutex);
  auto e = (Event*)event;
  if (e->stream) catch_up(e->stream, e->at);  // whoever asks again and again would else wait for ever
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  count_wait();
  record(Entry::host_event, nullptr, (int64_t)e);
  return cudaEventQuery(e);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(state().mutex);
  auto e = (Event*)event;
  auto s = real(stream);
  if (!e->stream || e->stream == s) return cudaSuccess;
  if (e->stream->capture) {  // the other stream joins the capture, whose work stands in the order of the host
    s->capture = e->stream->capture;
    record(Entry::wait, s, (int64_t)e);
    return cudaSuccess;
  }
  record(Entry::wait, s, (int64_t)e);
  Stream* of = e->stream;
  unsigned long long at = e->at;
  submit(s, [=] { catch_up(of, at); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  auto a = (Event*)begin, b = (Event*)end;
  if (((a->flags | b->flags) & cudaEventDisableTiming) || !a->recorded || !b->recorded)
    return fail(cudaErrorInvalidResourceHandle);
  *ms = (float)(b->ms - a->ms);
  return cudaSuccess;
}

// ---- graphs ----
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  Lock lock(state().mutex);
  catch_up(real(s));
  auto graph = std::make_shared<Graph>();
  graph->id = state().next_graph++;
  real(s)->capture = graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* out) {
  Lock lock(state().mutex);
  auto graph = real(s)->capture;
  if (!graph) return fail(cudaErrorIllegalState);
  for (auto t : state().streams)
    if (t->capture == graph) t->capture = nullptr;
  for (auto& t : state().null_streams)
    if (t.capture == graph) t.capture = nullptr;
  *out = (cudaGraph_t) new std::shared_ptr<Graph>(graph);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  Lock lock(state().mutex);
  *status = real(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static cudaError_t capture_info(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, void** graph,
                                void* dependencies, void** edges, size_t* count) {
  Lock lock(state().mutex);
  static int some;
  auto capture = real(s)->capture;
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (void*)&some : nullptr;
  if (dependencies) *(void**)dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
#if CUDA_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, void** g,
                                     void* d, void** e, size_t* n) {
  return capture_info(s, status, id, g, d, e, n);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id) {
  return capture_info(s, status, id, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        void** g, void* d, size_t* n) {
  return capture_info(s, status, id, g, d, nullptr, n);
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        void** g, void* d, void** e, size_t* n) {
  return capture_info(s, status, id, g, d, e, n);
}
cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t, cudaGraphNode_t*, const void*, size_t, unsigned) {
  return cudaSuccess;
}
#endif
// the arguments differ by version; none of them is read
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = (cudaGraphExec_t) new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {  // CUDA 11 has two more
  return cudaGraphInstantiateWithFlags(out, graph, 0);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  Lock lock(state().mutex);
  state().launches++;
  auto graph = *(std::shared_ptr<Graph>*)exec;
  record_replay(real(stream), graph);
  for (auto& work : graph->work) submit(real(stream), work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Lock lock(state().mutex);
  delete (std::shared_ptr<Graph>*)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaGraphDestroy((cudaGraph_t)exec); }
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;  // PyTorch warns of an empty graph
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
}
