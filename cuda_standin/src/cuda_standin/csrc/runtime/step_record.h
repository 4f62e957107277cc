// What the host asked of the device, entry by entry in the order of the host, with the host's time: a step is recorded
// and its time on a GPU simulated from it (lowtide.pretending).
//
// The host's clock leaves out what only the stand-in does (computing values, copying bytes, writing these entries):
// whoever does such work stands within an `OwnWork`, and PyTorch's own code that it calls within a `NotOwnWork`.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace standin {

enum class Entry : uint8_t {
  operation,       // signature, bytes written, kernels, whether another thread than the script's called it: backward
  kernel,          // one that PyTorch's operators do not launch: signature or -1
  to_device,       // a copy: bytes, whether the host's memory is pinned
  to_host,         // the same
  on_device,       // bytes
  fill,            // bytes
  event,           // recorded on the stream: which
  wait,            // the stream waits for an event: which
  host_event,      // the host waits: for an event,
  host_stream,     // for a stream,
  host_device,     // for all
  collective,      // signature: its kind; bytes of one rank's part, ranks, nodes, communicator, group of calls
  replay,          // of a captured graph: which
};

struct Recorded {
  Entry kind;
  int64_t at_ns;  // of the host's clock
  int64_t stream;
  int64_t a = 0, b = 0, c = 0, d = 0, e = 0;
};

enum class Recording : int { off, captures, all };  // `captures`: only what goes into CUDA graphs
struct Stream;
struct Graph;
void record(Entry kind, Stream* stream, int64_t a = 0, int64_t b = 0, int64_t c = 0, int64_t d = 0, int64_t e = 0);
void record_replay(Stream* stream, const std::shared_ptr<Graph>& graph);
void record_kernel(Stream* stream);  // one that came through the driver
bool records(Stream* stream);        // under the lock of the state
int64_t host_clock_ns();

class OwnWork {
 public:
  OwnWork();
  ~OwnWork();
};
class NotOwnWork {
 public:
  NotOwnWork();
  ~NotOwnWork();

 private:
  int depth_;
};

}  // namespace standin
