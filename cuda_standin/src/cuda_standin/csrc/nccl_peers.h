// Messages between the ranks of one communicator, each rank a process of this machine (or one of several in one
// process). Each pair of ranks has a socket of the abstract namespace, which leaves nothing behind when a process dies,
// and each rank a thread that reads what comes, so that sending never waits for the other to receive.
#pragma once
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace standin_nccl {

struct Header {
  uint64_t kind, bytes, sent;  // sent is 0 where the values of so many bytes are skipped
};
struct Message {
  Header header{};
  std::vector<char> content;
};

class Peers {
 public:
  Peers(std::string name, int rank, int size)
      : name_(std::move(name)), rank_(rank), inbox_(size), gone_(size), sockets_(size, -1) {
    listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t length;
    sockaddr_un at = address(rank, &length);
    bound_ = listener_ >= 0 && !::bind(listener_, (sockaddr*)&at, length) && !::listen(listener_, size);
  }
  ~Peers() {
    stopping_ = true;
    for (int s : sockets_)
      if (s >= 0) ::shutdown(s, SHUT_RDWR);
    if (reader_.joinable()) reader_.join();
    for (int s : sockets_)
      if (s >= 0) ::close(s);
    if (listener_ >= 0) ::close(listener_);
  }

  // Empty, or why not. Lower ranks listen already or will soon; higher ones call.
  std::string connect(double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    if (!bound_) return "no socket for rank " + std::to_string(rank_) + ": " + std::strerror(errno);
    for (int r = 0; r < rank_; r++) {
      socklen_t length;
      sockaddr_un at = address(r, &length);
      int s = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      while (::connect(s, (sockaddr*)&at, length)) {
        if (std::chrono::steady_clock::now() > end) {
          ::close(s);
          return missing(r, seconds);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      int32_t me = rank_;
      if (!write_all(s, &me, sizeof me)) return missing(r, seconds);
      sockets_[r] = s;
    }
    return "";
  }
  std::string accept(double seconds) {
    const int size = (int)sockets_.size();
    for (int left = size - 1 - rank_; left > 0; left--) {
      pollfd waiting{listener_, POLLIN, 0};
      int32_t r = -1;
      int s =
          ::poll(&waiting, 1, (int)(seconds * 1000)) == 1 ? ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC) : -1;
      if (s < 0 || !read_all(s, &r, sizeof r) || r <= rank_ || r >= size) {
        for (int k = rank_ + 1; k < size; k++)
          if (sockets_[k] < 0) return missing(k, seconds);
      }
      sockets_[r] = s;
    }
    if (size > 1) reader_ = std::thread([this] { read_forever(); });
    return "";
  }

  bool send(int to, const Header& header, const void* content) {
    if (to == rank_) {
      Message m{header, {}};
      m.content.assign((const char*)content, (const char*)content + header.sent);
      std::lock_guard<std::mutex> lock(mutex_);
      inbox_[to].push_back(std::move(m));
      return true;
    }
    std::lock_guard<std::mutex> lock(sending_);
    return write_all(sockets_[to], &header, sizeof header) && write_all(sockets_[to], content, header.sent);
  }
  // The next message of that rank; false where it ended before it sent one.
  bool receive(int from, Message* out) {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_.wait(lock, [&] { return !inbox_[from].empty() || gone_[from] || stopping_; });
    if (inbox_[from].empty()) return false;
    *out = std::move(inbox_[from].front());
    inbox_[from].pop_front();
    return true;
  }
  void stop() {
    stopping_ = true;
    std::lock_guard<std::mutex> lock(mutex_);
    arrived_.notify_all();
  }

 private:
  sockaddr_un address(int rank, socklen_t* length) const {
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    std::string path = "cuda-standin-" + name_ + "-" + std::to_string(rank);
    std::memcpy(at.sun_path + 1, path.data(), path.size());  // the leading zero: no file
    *length = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + path.size());
    return at;
  }
  std::string missing(int rank, double seconds) const {
    return "rank " + std::to_string(rank) + " did not come within " + std::to_string((int)seconds) + " s";
  }
  static bool write_all(int s, const void* from, size_t n) {
    for (size_t done = 0; done < n;) {
      ssize_t k = ::send(s, (const char*)from + done, n - done, MSG_NOSIGNAL);
      if (k < 0 && errno == EINTR) continue;
      if (k <= 0) return false;
      done += (size_t)k;
    }
    return true;
  }
  static bool read_all(int s, void* to, size_t n) {
    for (size_t done = 0; done < n;) {
      ssize_t k = ::recv(s, (char*)to + done, n - done, 0);
      if (k < 0 && errno == EINTR) continue;
      if (k <= 0) return false;
      done += (size_t)k;
    }
    return true;
  }
  void read_forever() {
    std::vector<pollfd> open;
    std::vector<int> of;
    for (size_t r = 0; r < sockets_.size(); r++)
      if (sockets_[r] >= 0) {
        open.push_back({sockets_[r], POLLIN, 0});
        of.push_back((int)r);
      }
    while (!open.empty() && ::poll(open.data(), open.size(), -1) >= 0 && !stopping_) {
      for (size_t k = open.size(); k-- > 0;) {
        if (!open[k].revents) continue;
        Message m;
        bool whole = read_all(open[k].fd, &m.header, sizeof m.header);
        if (whole) {
          m.content.resize(m.header.sent);
          whole = read_all(open[k].fd, m.content.data(), m.header.sent);
        }
        {
          std::lock_guard<std::mutex> lock(mutex_);
          if (whole) inbox_[of[k]].push_back(std::move(m));
          else gone_[of[k]] = true;
        }
        arrived_.notify_all();
        if (!whole) {
          open.erase(open.begin() + k);
          of.erase(of.begin() + k);
        }
      }
    }
  }

  const std::string name_;
  const int rank_;
  int listener_ = -1;
  bool bound_ = false;
  std::atomic<bool> stopping_{false};
  std::vector<std::deque<Message>> inbox_;
  std::vector<char> gone_;
  std::vector<int> sockets_;
  std::mutex mutex_, sending_;
  std::condition_variable arrived_;
  std::thread reader_;
};

}  // namespace standin_nccl
